// Attention: masked, scaled dot products of queries and keys, their softmax, or the sums of values that it weighs.
//
//     score[i,j] = factor <query[i], key[j]> + mask[i,j], or -inf where the pair takes no part; additive scores are those
//                  of additive.h in the place of the dot product
//     P[i,j] = exp(score[i,j] - most[i]) / total[i],    out = score, P or (P R) value
//
//     dP = R dout value^T or dout,    G = P (dP - sum_j P dP), or dout for scores, and 0 where the pair takes no part
//     dquery = factor G key,    dkey = factor G^T query,    dvalue = (P R)^T dout,    dmask = G
//
// with R = 0 where a weight is dropped, and else 1 / (1 - dropped),
// for each entry of up to AXES batch axes. A block has up to ROWS queries and COLUMNS keys; blocks of which no pair takes
// part are left out. While the blocks of keys go by, a query keeps the maximum of its scores, the sum of exponentials
// and the sums of values that they weigh. Backward finds the statistics of all queries first, unless whole rows of scores
// fit the workspace, as in whole_rows.h.
#include "attention.h"

#include "parallel.h"
#include "whole_rows.h"

namespace {
enum { OWNERS = 8 };  // entries of keys from which on each has one owner in backward

struct Forward : Tiles {
  using Tiles::Tiles;

  void operator()(int64_t item) {
    int64_t m = enter_block(item);
    int rows = at_most(call.queries - m, ROWS);
    if (call.output == SUMS) sum_up(m, rows);
    else write_pairs(m, rows);
  }

  void write_pairs(int64_t m, int rows) {
    int64_t end = end_of(m + rows - 1);
    bool is_softmax = call.output == WEIGHTS;
    if (is_softmax && is_narrow(out.type)) return write_rounded(m, rows, end);
    Real most[ROWS];
    std::fill(most, most + ROWS, -INFINITY);
    bool writes_products = !call.weight.at && call.depth <= DEPTH && out.has_plain_rows();
    writes_products = writes_products && call.mask_is == NO_MASK && m + call.diagonal + 1 >= call.keys;
    for (int64_t n = 0; n < end; n += COLUMNS) {
      int columns = at_most(call.keys - n, COLUMNS);
      if (writes_products) {
        write_keys(m, rows, n, columns);
        continue;
      }
      pair_keys(m, rows, n, columns);
      bool is_direct = out.has_plain_rows() && columns % LANES == 0;
      for (int i = 0; i < rows; i++) {
        Matrix result = out.from(m + i, n);
        Real* row = scores + i * STRIDE;
        Real own = mask_row(row, m + i, n, columns, is_direct ? &result(0, 0) : row);
        most[i] = own <= most[i] ? most[i] : own;
        if (!is_direct) put_block(row, 1, columns, false, result);
      }
    }
    int64_t written = std::min(call.keys, blocks_of(end, COLUMNS) * COLUMNS);
    fill(out.from(m, written), rows, call.keys - written, is_softmax ? 0 : -INFINITY);
    for (int i = 0; is_softmax && i < rows; i++) {
      Real* row = &out(m + i, 0);
      take_exponentials(row, written, shift_of(writes_products ? largest_of(row, written) : most[i]));
    }
  }

  // Weights of 16 bits. They are rounded once, so that the sums of exponentials come first.
  void write_rounded(int64_t m, int rows, int64_t end) {
    Real most[ROWS], total[ROWS];
    for (int i = 0; i < rows; i++) most[i] = -INFINITY, total[i] = 0;
    for (bool writes : {false, true})
      for (int64_t n = 0; n < end; n += COLUMNS) {
        int columns = at_most(call.keys - n, COLUMNS);
        pair_keys(m, rows, n, columns);
        for (int i = 0; i < rows; i++) {
          Real* row = scores + i * STRIDE;
          if (!writes) absorb(row, m + i, n, columns, most[i], total[i]);
          else weigh(row, m + i, n, columns, shift_of(most[i]), inverse_of(total[i]));
        }
        if (writes) put_block(scores, rows, columns, false, out.from(m, n));
      }
    int64_t written = std::min(call.keys, blocks_of(end, COLUMNS) * COLUMNS);
    fill(out.from(m, written), rows, call.keys - written, 0);
  }

  // Write the scores of a block, of which all pairs take part, to where they are wanted.
  void write_keys(int64_t m, int rows, int64_t n, int columns) {
    int depth = (int)call.depth;
    copy_factors(query.from(m, 0), rows, key.from(n, 0), columns, depth, keys_in_panels, copied_keys, pulls);
    const Real factor = of_scores;
    write_product(rows_of(left, rows, depth), {keys_in_panels, WIDE * depth, WIDE}, rows, columns, depth,
                  [=](int, Reals dot) { return dot * factor; }, false, out.from(m, n));
  }

  static Real largest_of(const Real* row, int64_t count) {
    int64_t whole = count / LANES * LANES;
    Reals highest = all(-INFINITY);
    for (int64_t j = 0; j < whole; j += LANES) highest = load(row + j) <= highest ? highest : load(row + j);
    Real largest = maximum_of(highest);
    for (int64_t j = whole; j < count; j++) largest = row[j] <= largest ? largest : row[j];
    return largest;
  }

  // Overwrite scores that lie one after another with their weights.
  void take_exponentials(Real* row, int64_t count, Real shift) {
    int64_t whole = count / LANES * LANES;
    Reals sums = Reals{}, rest = all(-INFINITY);
    for (int64_t j = 0; j < whole; j += LANES) {
      Reals term = softmax_term(load(row + j) - shift);
      store(row + j, term);
      sums += term;
    }
    memcpy(&rest, row + whole, (count - whole) * sizeof(Real));
    rest = softmax_term(rest - shift);
    Real total = sum_of(sums);
    for (int64_t j = whole; j < count; j++) total += rest[j - whole];
    Real inverse = inverse_of(total);
    rest = rest * inverse;
    for (int64_t j = 0; j < whole; j += LANES) store(row + j, load(row + j) * inverse);
    memcpy(row + whole, &rest, (count - whole) * sizeof(Real));
  }

  // The sums of some queries. They are in the workspace, or in `out` where they have several parts.
  void sum_up(int64_t m, int rows) {
    int64_t end = end_of(m + rows - 1);
    bool has_parts = call.features > DEPTH;
    Real most[ROWS], total[ROWS], factor[ROWS];
    for (int i = 0; i < rows; i++) most[i] = -INFINITY, total[i] = 0;
    for (int64_t n = 0; n < end; n += COLUMNS) {
      int columns = at_most(call.keys - n, COLUMNS);
      pair_keys(m, rows, n, columns);
      for (int i = 0; i < rows; i++) factor[i] = absorb(scores + i * STRIDE, m + i, n, columns, most[i], total[i]);
      for (int64_t k = 0; k < call.features; k += DEPTH) {
        int part = at_most(call.features - k, DEPTH);
        if (has_parts && n > 0) copy_block(out.from(m, k), rows, part, product);
        for (int i = 0; n > 0 && i < rows; i++)
          if (factor[i] != 1) scale_row(product + i * STRIDE, part, factor[i]);
        copy_right(value.from(n, k), columns, part);
        multiply(rows_of(scores, rows, columns), panels_of(right), rows, part, columns, n > 0, product);
        if (has_parts) put_block(product, rows, part, false, out.from(m, k));
      }
    }
    if (end == 0) return fill(out.from(m, 0), rows, call.features, 0);
    for (int64_t k = 0; k < call.features; k += DEPTH) {
      int part = at_most(call.features - k, DEPTH);
      if (has_parts) copy_block(out.from(m, k), rows, part, product);
      for (int i = 0; i < rows; i++) scale_row(product + i * STRIDE, part, inverse_of(total[i]));
      put_block(product, rows, part, false, out.from(m, k));
    }
  }

  // Overwrite the dot products of a query with exp(score - most), and add them to `total`. Returns the factor that makes
  // sums of earlier terms relative to the same maximum.
  Real absorb(Real* row, int64_t query, int64_t n, int columns, Real& most, Real& total) {
    Real factor = rise(most, mask_row(row, query, n, columns), total), shift = shift_of(most);
    Reals added = Reals{};
    for (int j = 0; j < in_lanes(columns); j += LANES) {
      Reals term = softmax_term(load(row + j) - shift);
      store(row + j, term);
      added += term;
    }
    total = total * factor + sum_of(added);
    drop(row, query, n, columns);
    return factor;
  }
};

struct Backward : Tiles {
  using Tiles::Tiles;

  // Write the gradients of the weights of a block to `pulls`. What is behind its columns is 0.
  void pull_weights(int64_t m, int rows, int64_t n, int columns) {
    if (call.output == SUMS) {
      Matrix from = value.from(n, 0);
      if (call.features == 0) memset(pulls, 0, BLOCK * sizeof(Real));
      pair_up(dout.from(m, 0), rows, from, columns, call.features, values_in_panels, copied_values, product, pulls);
      for (int i = 0; i < rows; i++) drop(pulls + i * STRIDE, m + i, n, columns);
      return;
    }
    copy_block(dout.from(m, n), rows, columns, pulls);
  }

  // The gradients of some queries, of keys, and of their mask. With `adds` they are added to what is there.
  void pull_back(int64_t m, int64_t n, bool of_queries, bool of_keys, bool adds_to_queries, bool adds_to_keys,
                 bool of_mask = false, bool adds_to_mask = false) {
    int rows = at_most(call.queries - m, ROWS), columns = at_most(call.keys - n, COLUMNS);
    if (call.output != SCORES) {
      pair_keys(m, rows, n, columns);
      for (int i = 0; i < rows; i++)
        weigh(scores + i * STRIDE, m + i, n, columns, statistics(m + i, MOST), statistics(m + i, INVERSE));
    }
    if (!(of_queries && wants_queries()) && !(of_keys && call.dkey.at) && !of_mask)
      return pull_values(m, rows, n, columns, adds_to_keys);
    pull_weights(m, rows, n, columns);
    Real factor = of_mask ? 1 : of_scores;
    for (int i = 0; i < rows; i++) pull_scores(pulls + i * STRIDE, scores + i * STRIDE, m + i, n, columns, factor);
    if (of_keys && call.dvalue.at) pull_values(m, rows, n, columns, adds_to_keys);
    if (of_mask) {
      pull_mask(m, rows, n, columns, adds_to_mask);
      for (int i = 0; i < rows; i++) scale_row(pulls + i * STRIDE, columns, of_scores);
    }
    if (call.weight.at) return pull_sums(m, rows, n, columns, of_queries, of_keys, adds_to_queries, adds_to_keys);
    for (int64_t k = 0; of_queries && call.dquery.at && k < call.depth; k += DEPTH) {
      int part = at_most(call.depth - k, DEPTH);
      copy_right(key.from(n, k), columns, part);
      Left dscores = rows_of(pulls, rows, columns);
      put_product(dscores, panels_of(right), rows, part, columns, adds_to_queries, dquery.from(m, k), product);
    }
    if (of_keys && call.dkey.at) gather(query.from(m, 0), rows, columns, call.depth, pulls, dkey.from(n, 0), adds_to_keys);
  }

  bool wants_queries() const { return call.dquery.at || call.dweight.at; }

  // The gradients of queries, keys and weight from those of additive scores, in `pulls`. `scores` is overwritten.
  void pull_sums(int64_t m, int rows, int64_t n, int columns, bool of_queries, bool of_keys, bool adds_to_queries,
                 bool adds_to_keys) {
    Reals sums = Reals{};
    for (int i = 0; i < rows; i++)
      for (int j = 0; j < in_lanes(columns); j += LANES) sums += load(pulls + i * STRIDE + j);
    Real total = sum_of(sums);
    alignas(64) Real drawn[DEPTH];
    for (int64_t k = 0; k < call.depth; k += DEPTH) {
      int part = at_most(call.depth - k, DEPTH);
      Ratios ratios = read_factors(m, rows, n, columns, k, part);
      std::fill(drawn, drawn + DEPTH, 0.0f);
      auto pull = ratios == OF_FOUR ? pull_block<OF_FOUR> : ratios == DIRECTLY ? pull_block<DIRECTLY> : pull_block<OF_FACTORS>;
      pull(pulls, left, right, rows, columns, part, scores, product, drawn);
      if (of_queries && call.dquery.at) put_weighed(scores, rows, part, adds_to_queries, dquery.from(m, k));
      if (of_keys && call.dkey.at) put_weighed(product, columns, part, adds_to_keys, dkey.from(n, k));
      for (int d = 0; of_queries && call.dweight.at && d < part; d++) {
        Real& to = dweight(m / ROWS, k + d);
        to = (adds_to_queries ? to : 0) + total - 2 * drawn[d];
      }
    }
  }
  void put_weighed(Real* block, int rows, int part, bool adds, Matrix to) {
    for (int i = 0; i < rows; i++)
      for (int d = 0; d < part; d += LANES) store(block + i * STRIDE + d, load(block + i * STRIDE + d) * load(weights + d) * 4.0f);
    put_block(block, rows, part, adds, to);
  }

  // The gradients of the mask from those of the scores of a block. They are sums over what it does not vary along.
  void pull_mask(int64_t m, int rows, int64_t n, int columns, bool adds) {
    if (dmask.row && dmask.column) return put_block(pulls, rows, columns, adds, dmask.from(m, n));
    for (int j = columns; j < in_lanes(columns); j++)
      for (int i = 0; i < rows; i++) pulls[i * STRIDE + j] = 0;
    std::fill(numbers, numbers + COLUMNS, 0.0f);
    for (int i = 0; i < rows; i++) {
      Reals sum = Reals{};
      for (int j = 0; j < in_lanes(columns); j += LANES) {
        Reals gradient = load(pulls + i * STRIDE + j);
        store(numbers + j, load(numbers + j) + gradient);
        sum += gradient;
      }
      if (!dmask.column) dmask(m + i, 0) += sum_of(sum);
    }
    for (int j = 0; dmask.column && j < columns; j++) dmask(0, n + j) += numbers[j];
  }

  // The gradients of values, of weights in `scores`, which are overwritten.
  void pull_values(int64_t m, int rows, int64_t n, int columns, bool adds) {
    for (int i = 0; i < rows; i++) drop(scores + i * STRIDE, m + i, n, columns);
    gather(dout.from(m, 0), rows, columns, call.features, scores, dvalue.from(n, 0), adds);
  }

  // The sums over queries of rows that a block weighs.
  void gather(Matrix from, int rows, int columns, int64_t width, Real* weights, Matrix to, bool adds) {
    Left left_factor = columns_of(weights, columns, rows);
    for (int64_t k = 0; k < width; k += DEPTH) {
      int part = at_most(width - k, DEPTH);
      copy_left(from.from(0, k), rows, part);
      put_product(left_factor, panels_of(left), columns, part, rows, adds, to.from(0, k), product);
    }
  }

  // Overwrite the gradients of the weights of a query with those of its scores, times a factor.
  void pull_scores(Real* row, const Real* weights, int64_t query, int64_t n, int columns, Real factor) {
    int reached = reach(query, n, columns);
    if (call.mask_is == BOOLEANS) read_flags(query, n, columns);
    Real pull = call.output == SCORES ? 0 : statistics(query, PULL);
    for (int j = 0; j < in_lanes(columns); j += LANES) {
      Reals gradient = load(row + j);
      if (call.output != SCORES) gradient = (gradient - pull) * load(weights + j);
      store(row + j, taking_part(gradient * factor, j, reached, 0));
    }
  }
};

// The statistics of a block of queries.
struct OfStatistics : Backward {
  using Backward::Backward;

  void operator()(int64_t item) {
    int64_t m = enter_block(item);
    int rows = at_most(call.queries - m, ROWS);
    int64_t end = end_of(m + rows - 1);
    Real most[ROWS], total[ROWS], pull[ROWS];
    for (int i = 0; i < rows; i++) most[i] = -INFINITY, total[i] = pull[i] = 0;
    for (int64_t n = 0; n < end; n += COLUMNS) {
      int columns = at_most(call.keys - n, COLUMNS);
      // Gradients of weights that lie one after another are read where they are.
      bool is_read = call.output == WEIGHTS && !is_narrow(dout.type) && dout.column == 1 && columns % LANES == 0;
      pair_keys(m, rows, n, columns);
      if (!is_read) pull_weights(m, rows, n, columns);
      for (int i = 0; i < rows; i++) {
        Real* row = scores + i * STRIDE;
        const Real* gradients = is_read ? &dout(m + i, n) : pulls + i * STRIDE;
        Real factor = rise(most[i], mask_row(row, m + i, n, columns), total[i]), shift = shift_of(most[i]);
        Reals added = Reals{}, pulled = Reals{};
        for (int j = 0; j < in_lanes(columns); j += LANES) {
          Reals term = softmax_term(load(row + j) - shift);
          added += term;
          pulled += term * load(gradients + j);
        }
        total[i] = total[i] * factor + sum_of(added);
        pull[i] = pull[i] * factor + sum_of(pulled);
      }
    }
    for (int i = 0; i < rows; i++) {
      Real inverse = inverse_of(total[i]);
      statistics(m + i, MOST) = shift_of(most[i]);
      statistics(m + i, INVERSE) = inverse;
      statistics(m + i, PULL) = pull[i] * inverse;
    }
  }
};

// The gradients of all queries that meet some keys, and of these keys.
struct OfKeys : Backward {
  using Backward::Backward;

  void pull_back_all(int64_t entry, int64_t first, int64_t end, bool of_queries) {
    for (int64_t shared = 0; shared < call.of_keys.entries(true); shared++) {
      enter(call.of_keys, entry, shared);
      for (int64_t n = first; n < end; n += COLUMNS) {
        bool adds = shared > 0;
        for (int64_t m = 0; m < call.queries; m += ROWS) {
          int rows = at_most(call.queries - m, ROWS);
          if (n < end_of(m + rows - 1)) pull_back(m, n, of_queries, true, n > 0, adds), adds = true;
          else if (n == 0 && of_queries) pull_nothing(m, rows);
        }
        int columns = at_most(call.keys - n, COLUMNS);
        if (!adds && call.dkey.at) fill(dkey.from(n, 0), columns, call.depth, 0);
        if (!adds && call.dvalue.at) fill(dvalue.from(n, 0), columns, call.features, 0);
      }
    }
  }
};
// The gradients of all queries and keys of an entry of keys.
struct OfEntry : OfKeys {
  using OfKeys::OfKeys;
  void operator()(int64_t entry) { pull_back_all(entry, 0, call.keys, true); }
};
// The gradients of a block of keys.
struct OfSomeKeys : OfKeys {
  using OfKeys::OfKeys;
  void operator()(int64_t item) {
    int64_t blocks = call.blocks_of_keys(), n = item % blocks * COLUMNS;
    pull_back_all(item / blocks, n, n + at_most(call.keys - n, COLUMNS), false);
  }
};
// The gradients of a block of queries.
struct OfQueries : Backward {
  using Backward::Backward;
  void operator()(int64_t item) {
    int64_t m = enter_block(item);
    int rows = at_most(call.queries - m, ROWS);
    int64_t end = end_of(m + rows - 1);
    for (int64_t n = 0; n < end; n += COLUMNS) pull_back(m, n, true, false, n > 0, false);
    if (end == 0) pull_nothing(m, rows);
  }
};

// The gradients of all entries that share a mask, and of it: of a block of queries, or of all if they share it too.
struct OfMask : Backward {
  using Backward::Backward;

  void operator()(int64_t item) {
    bool is_of_queries = call.dmask.strides[AXES], is_sum = !is_of_queries || !call.dmask.strides[AXES + 1];
    for (int64_t shared = 0; shared < call.of_mask.entries(true); shared++) {
      int64_t first = 0, end = call.queries;
      if (is_of_queries) first = enter_block(call.of_mask, item, shared), end = first + at_most(end - first, ROWS);
      else enter(call.of_mask, item, shared);
      if (is_sum && shared == 0) fill(dmask.from(first, 0), is_of_queries ? end - first : 1, dmask.column ? call.keys : 1, 0);
      for (int64_t m = first; m < end; m += ROWS)
        for (int64_t n = 0; n < call.keys; n += COLUMNS) pull_back(m, n, true, false, n > 0, false, true, shared > 0);
    }
  }
};
}  // namespace

extern "C" {
#pragma GCC visibility push(default)
int64_t effops_attention_call_bytes() { return sizeof(AttentionCall); }
int64_t effops_attention_workspace(const AttentionCall*) { return Tiles::REALS; }

int64_t effops_attention_items(const AttentionCall* call, int64_t is_backward) {
  int64_t of_queries = call->of_keys.all_entries() * call->blocks_of_queries();
  return is_backward ? std::max(of_queries, call->of_keys.entries(false) * call->blocks_of_keys()) : of_queries;
}
void effops_attention_forward(const AttentionCall* call) { each<Forward>(*call, effops_attention_items(call, false)); }

void effops_attention_backward(const AttentionCall* call) {
  int64_t blocks = call->blocks_of_queries(), of_queries = call->of_keys.all_entries() * blocks;
  int64_t owners = call->of_keys.entries(false);
  bool wants_keys = call->dkey.at || call->dvalue.at, wants_queries = call->dquery.at || call->dweight.at;
  bool by_owner = owners >= OWNERS && wants_queries && wants_keys && !call->dmask.at;
  if (by_owner && WholeRows::fit(*call)) return each<WholeRows>(*call, owners);
  if (call->output != SCORES) each<OfStatistics>(*call, of_queries);
  if (by_owner) return each<OfEntry>(*call, owners);
  if (call->dmask.at) each<OfMask>(*call, call->of_mask.entries(false) * (call->dmask.strides[AXES] ? blocks : 1));
  else if (wants_queries) each<OfQueries>(*call, of_queries);
  if (wants_keys) each<OfSomeKeys>(*call, owners * call->blocks_of_keys());
}
#pragma GCC visibility pop
}
