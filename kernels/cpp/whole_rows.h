// Gradients of attention where the scores of WIDE queries and all keys fit a block.
//
// Scores and their gradients are transposed, a row for each key: then keys and values are factors of products as they lie,
// statistics of queries are maxima and sums of whole vectors, and no product is computed twice.
#pragma once
#include "attention.h"

// The gradients of all queries and keys of an entry of keys.
struct WholeRows : Tiles {
  using Tiles::Tiles;
  enum { ROOM = (WIDE + TALL) * STRIDE };  // of a block of queries
  Real *queries = left, *douts = left + ROOM, *dqueries = left + 2 * ROOM, *room = right;
  Real *queries_in_panel = keys_in_panels, *douts_in_panel = values_in_panels;
  static_assert(3 * ROOM <= BLOCK, "blocks of queries lie in one block");

  // Whether a call whose queries have gradients has rows that fit, without masks and what is drawn.
  static bool fit(const AttentionCall& call) {
    bool is_plain = call.output != SCORES && !call.weight.at && call.mask_is == NO_MASK && call.dropped == 0;
    return is_plain && call.depth <= DEPTH && call.features <= DEPTH && (call.keys + TALL) * WIDE <= BLOCK;
  }

  void operator()(int64_t owner) {
    for (int64_t shared = 0; shared < call.of_keys.entries(true); shared++) {
      enter(call.of_keys, owner, shared);
      if (shared == 0 && dkey.at) fill(dkey, call.keys, call.depth, 0);
      if (shared == 0 && dvalue.at) fill(dvalue, call.keys, call.features, 0);
      for (int64_t m = 0; m < call.queries; m += WIDE) pull_back(m);
    }
  }

  void pull_back(int64_t m) {
    int rows = at_most(call.queries - m, WIDE), depth = (int)call.depth, features = (int)call.features;
    int64_t end = end_of(m + rows - 1);
    if (end == 0) return pull_nothing(m, rows);
    copy_block(query.from(m, 0), rows, depth, queries);
    transpose_block(queries, rows, depth, queries_in_panel);
    pair_up(key, queries_in_panel, end, depth, of_scores, scores);
    read_pulls(m, rows, end);
    for (int vector = 0; vector < WIDE; vector += LANES) pull_scores(m + vector, end, scores + vector, pulls + vector);
    for (Real* block : {scores, pulls}) std::fill_n(block + end * WIDE, TALL * WIDE, 0.0f);  // which products read
    for (int64_t n = 0; n < end; n += COLUMNS) {
      int columns = at_most(end - n, COLUMNS);
      Left weights = {scores + n * WIDE, WIDE, 1}, dscores = {pulls + n * WIDE, WIDE, 1};
      if (dvalue.at) put_product(weights, panels_of(douts), columns, features, rows, true, dvalue.from(n, 0), product);
      if (dkey.at) put_product(dscores, panels_of(queries), columns, depth, rows, true, dkey.from(n, 0), product);
      multiply({dscores.at, 1, WIDE}, right_of(key.from(n, 0), columns, depth), rows, depth, columns, n > 0, dqueries);
    }
    put_block(dqueries, rows, depth, false, dquery.from(m, 0));
  }

  // Write the gradients of weights to `pulls`.
  void read_pulls(int64_t m, int rows, int64_t end) {
    if (call.output == SUMS) {
      copy_block(dout.from(m, 0), rows, (int)call.features, douts);
      transpose_block(douts, rows, (int)call.features, douts_in_panel);
      return pair_up(value, douts_in_panel, end, (int)call.features, 1, pulls);
    }
    for (int64_t n = 0; n < end; n += COLUMNS)
      transpose_matrix(dout.from(m, n), rows, at_most(end - n, COLUMNS), false, room, pulls + n * WIDE);
  }

  // The products of keys or values and the queries or gradients of a panel, transposed.
  void pair_up(Matrix from, const Real* panel, int64_t end, int depth, Real factor, Real* to) {
    for (int64_t n = 0; n < end; n += COLUMNS) {
      int columns = at_most(end - n, COLUMNS);
      write_product(left_of(from.from(n, 0), columns, depth, call.keys - n), {panel, 0, WIDE}, columns, WIDE, depth,
                    [=](int, Reals dot) { return dot * factor; }, false, {to + n * WIDE, WIDE, 1});
    }
  }

  // Rows as a factor: as they lie, where all that a product reads is there, or else a copy.
  Left left_of(Matrix from, int count, int width, int64_t all) {
    if (!is_narrow(from.type) && blocks_of(count, TALL) * TALL <= all) return {&from(0, 0), from.row, from.column};
    copy_block(from, count, width, room);
    return rows_of(room, count, width);
  }
  Right right_of(Matrix from, int count, int width) {
    if (from.has_plain_rows() && width % WIDE == 0) return {&from(0, 0), WIDE, from.row};
    copy_block(from, count, width, room);
    return panels_of(room);
  }

  // Overwrite the scores of a vector of queries with their weights, and gradients of weights with those of dot products.
  void pull_scores(int64_t query, int64_t end, Real* own, Real* gradients) {
    Reals most = all(-INFINITY), total = Reals{}, pull = Reals{};
    for (int64_t n = 0; n < end; n++) {
      Reals score = those_reaching(n - query, load(own + n * WIDE), -INFINITY);
      store(own + n * WIDE, score);
      most = score <= most ? most : score;
    }
    for (int lane = 0; lane < LANES; lane++) most[lane] = shift_of(most[lane]);
    for (int64_t n = 0; n < end; n++) {
      Reals term = softmax_term(load(own + n * WIDE) - most);
      store(own + n * WIDE, term);
      total += term;
      pull += term * load(gradients + n * WIDE);
    }
    for (int lane = 0; lane < LANES; lane++) total[lane] = inverse_of(total[lane]);
    pull *= total;
    for (int64_t n = 0; n < end; n++) {
      Reals weight = load(own + n * WIDE) * total, gradient = (load(gradients + n * WIDE) - pull) * weight;
      store(own + n * WIDE, weight);
      store(gradients + n * WIDE, those_reaching(n - query, gradient * of_scores, 0));
    }
  }

  // Values of a vector of queries and the key that comes so many places behind the first of them; another number where the
  // pair takes no part.
  Reals those_reaching(int64_t behind, Reals values, Real other) const {
    if (behind <= call.diagonal) return values;
    return counted_from<Wholes>(0) >= (int)(behind - call.diagonal) ? values : all(other);
  }
};
