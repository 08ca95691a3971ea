// Attention: a call, and what a thread keeps of a block of queries and keys.
#pragma once
#include "additive.h"
#include "batched.h"
#include "random.h"
#include "softmax.h"
#include "special.h"
#include "workspace.h"

enum Output : int64_t { SCORES, WEIGHTS, SUMS };
enum Mask : int64_t { NO_MASK, BOOLEANS, NUMBERS };
enum Statistic { MOST, INVERSE, PULL, STATISTICS };  // of a query: maximum, 1 / total, and the sum of P dP

// A key may come `diagonal` places after its query. A weight is dropped with a probability, and others are scaled. With
// `weight` scores are additive. Its gradient has a row for each block of queries, of which it is the sum.
struct AttentionCall {
  Axes of_keys, of_mask;
  int64_t queries, keys, depth, features, threads, output, mask_is, may_exclude, diagonal, seed;
  Batched query, key, weight, value, mask, out, dout, statistics, dquery, dkey, dweight, dvalue, dmask;
  Real* workspace;
  double factor, dropped;

  int64_t blocks_of_queries() const { return blocks_of(queries, ROWS); }
  int64_t blocks_of_keys() const { return blocks_of(keys, COLUMNS); }
};

static void fill(Matrix to, int64_t rows, int64_t columns, Real value) {
  uint16_t number = narrowed_number(value, to.type);
  for (int64_t i = 0; i < rows; i++) {
    if (to.has_plain_rows()) std::fill(&to(i, 0), &to(i, 0) + columns, value);
    else if (is_narrow(to.type)) for (int64_t j = 0; j < columns; j++) *(uint16_t*)to.address(i, j) = number;
    else for (int64_t j = 0; j < columns; j++) to(i, j) = value;
  }
}

typedef int8_t Flags __attribute__((vector_size(LANES), aligned(1), may_alias));

// What a block of the workspace holds: rows of an operand, as they are, measured, or their exponentials. The
// same rows may be wanted in one form and then in another, as where keys are the values too.
struct Held {
  Copied copied;
  enum { AS_THEY_ARE, MEASURED, RAISED } form = AS_THEY_ARE;
  Range range;

  void copy(Matrix from, int rows, int columns, Real* to) {
    if (!copied.becomes(from, rows, columns) && form != RAISED) return;
    copy_block(from, rows, columns, to);
    form = AS_THEY_ARE;
  }
  void measure(Matrix from, int rows, int columns, Real* to) {
    if (!copied.becomes(from, rows, columns) && form != AS_THEY_ARE) return;
    copy_block(from, rows, columns, to);
    range = measure_block(to, rows, columns);
    form = MEASURED;
  }
  // What was measured becomes its exponentials, or what it was before.
  void become(bool is_raised, Matrix from, int rows, int columns, Real* to) {
    if (is_raised == (form == RAISED)) return;
    if (is_raised) raise_block(to, rows, columns), form = RAISED;
    else form = AS_THEY_ARE, measure(from, rows, columns, to);
  }
};

// What a thread keeps of a block: a factor of a product, and the other one in panels; scores and their gradients; sums.
struct Tiles : Workspace<5, 2> {
  const AttentionCall& call;
  const Real of_scores = (Real)call.factor, dropped = (Real)call.dropped;
  Real *left = block(0), *right = block(1), *scores = block(2), *pulls = block(3), *product = block(4);
  Real *keys_in_panels = panels_at(0), *values_in_panels = panels_at(1);
  Held in_left, in_right;
  Copied copied_keys, copied_values;
  int64_t place[AXES], entry;
  Matrix query, key, weight, value, out, dout, statistics, dquery, dkey, dweight, dvalue, dmask;
  alignas(64) Real weights[DEPTH];
  alignas(64) Real numbers[COLUMNS];
  alignas(64) int8_t flags[COLUMNS];

  Tiles(const AttentionCall& call, int64_t thread) : Workspace(call.workspace, thread), call(call) {}

  // Go to an entry of the axes along which an operand varies, and of those along which it is shared.
  void enter(const Axes& axes, int64_t own, int64_t shared) {
    entry = axes.locate(own, shared, place);
    query = call.query.matrix(place), key = call.key.matrix(place), value = call.value.matrix(place);
    out = call.out.matrix(place), dout = call.dout.matrix(place), statistics = call.statistics.matrix(place);
    dquery = call.dquery.matrix(place), dkey = call.dkey.matrix(place), dvalue = call.dvalue.matrix(place);
    dmask = call.dmask.matrix(place), weight = call.weight.matrix(place), dweight = call.dweight.matrix(place);
  }

  // Go to a block of queries, the last ones first, since they may have the most keys. Returns its first one.
  int64_t enter_block(const Axes& axes, int64_t item, int64_t shared) {
    enter(axes, item / call.blocks_of_queries(), shared);
    return first_of(item);
  }
  int64_t enter_block(int64_t item) {
    int64_t any = item / call.blocks_of_queries(), sharing = call.of_keys.entries(true);
    enter(call.of_keys, any / sharing, any % sharing);
    return first_of(item);
  }
  int64_t first_of(int64_t item) const {
    int64_t blocks = call.blocks_of_queries();
    return (blocks - 1 - item % blocks) * ROWS;
  }

  // Behind the last key that may take part with a query.
  int64_t end_of(int64_t query) const { return std::max<int64_t>(0, std::min(call.keys - 1, query + call.diagonal) + 1); }

  void copy_left(Matrix from, int rows, int columns) { in_left.copy(from, rows, columns, left); }
  void copy_right(Matrix from, int rows, int columns) { in_right.copy(from, rows, columns, right); }

  // Read the factors of a product: rows of one operand to `left`, and those of another one to panels.
  void copy_factors(Matrix rows_from, int rows, Matrix columns_from, int columns, int depth, Real* panels, Copied& copied,
                    Real* room) {
    copy_left(rows_from, rows, depth);
    if (copied.becomes(columns_from, columns, depth)) transpose_matrix(columns_from, columns, depth, false, room, panels);
  }

  // The products of rows of two operands, in parts of DEPTH coordinates. `room` is overwritten.
  void pair_up(Matrix rows_from, int rows, Matrix columns_from, int columns, int64_t depth, Real* panels, Copied& copied,
               Real* room, Real* to) {
    for (int64_t k = 0; k < depth; k += DEPTH) {
      int part = at_most(depth - k, DEPTH);
      copy_factors(rows_from.from(0, k), rows, columns_from.from(0, k), columns, part, panels, copied, room);
      multiply(rows_of(left, rows, part), {panels, WIDE * part, WIDE}, rows, columns, part, k > 0, to);
    }
  }

  // Read some coordinates of queries and keys to `left` and `right`, as exponentials unless their r are computed DIRECTLY.
  Ratios read_factors(int64_t m, int rows, int64_t n, int columns, int64_t k, int part) {
    Real sum = 0;
    std::fill(weights, weights + DEPTH, 0.0f);
    for (int d = 0; d < part; d++) sum += std::fabs(weights[d] = weight(0, k + d));
    in_left.measure(query.from(m, k), rows, part, left);
    in_right.measure(key.from(n, k), columns, part, right);
    Ratios ratios = ratios_of(in_left.range, in_right.range, sum);
    in_left.become(ratios != DIRECTLY, query.from(m, k), rows, part, left);
    in_right.become(ratios != DIRECTLY, key.from(n, k), columns, part, right);
    return ratios;
  }

  // Write the additive scores of a block to `scores`.
  void add_up(int64_t m, int rows, int64_t n, int columns) {
    for (int64_t k = 0; k < call.depth; k += DEPTH) {
      int part = at_most(call.depth - k, DEPTH);
      Ratios ratios = read_factors(m, rows, n, columns, k, part);
      transpose_block(right, columns, part, keys_in_panels);
      auto score = ratios == OF_FOUR ? score_block<OF_FOUR> : ratios == DIRECTLY ? score_block<DIRECTLY> : score_block<OF_FACTORS>;
      score(left, keys_in_panels, weights, rows, columns, part, k > 0, scores);
    }
  }

  // Write the dot products or additive scores of a block to `scores`.
  void pair_keys(int64_t m, int rows, int64_t n, int columns) {
    if (call.depth == 0) memset(scores, 0, BLOCK * sizeof(Real));
    if (call.weight.at) add_up(m, rows, n, columns);
    else pair_up(query.from(m, 0), rows, key.from(n, 0), columns, call.depth, keys_in_panels, copied_keys, pulls, scores);
  }

  // How many keys from `n` on a query may take part with, of so many.
  int reach(int64_t query, int64_t n, int columns) const {
    return (int)std::max<int64_t>(0, std::min<int64_t>(columns, query + call.diagonal + 1 - n));
  }

  void read_flags(int64_t query, int64_t n, int columns) {
    const int8_t* from = (const int8_t*)call.mask.at + call.mask.offset(place) + query * call.mask.strides[AXES];
    int64_t step = call.mask.strides[AXES + 1];
    if (step == 1) memcpy(flags, from + n, columns);
    else for (int j = 0; j < columns; j++) flags[j] = from[(n + j) * step];
  }

  // Those of some values of a row whose pairs take part, and another number elsewhere.
  Reals taking_part(Reals values, int j, int reached, Real other) const {
    if (call.mask_is == BOOLEANS)
      values = __builtin_convertvector(*(const Flags*)(flags + j), Wholes) != 0 ? values : all(other);
    return j + LANES > reached ? (counted_from<Wholes>(j) < reached ? values : all(other)) : values;
  }

  // Scale and mask the dot products of a query. Returns the largest score.
  Real mask_row(Real* row, int64_t query, int64_t n, int columns) { return mask_row(row, query, n, columns, row); }
  Real mask_row(const Real* row, int64_t query, int64_t n, int columns, Real* to) {
    int reached = reach(query, n, columns);
    const Real* terms = numbers;
    if (call.mask_is == BOOLEANS) read_flags(query, n, columns);
    if (call.mask_is == NUMBERS) {
      Matrix from = call.mask.matrix(place).from(query, n);
      if (!is_narrow(from.type) && from.column == 1 && columns % LANES == 0) terms = &from(0, 0);
      else copy_row(from, 0, columns, numbers), std::fill(numbers + columns, numbers + in_lanes(columns), 0.0f);
    }
    Reals highest = all(-INFINITY);
    for (int j = 0; j < in_lanes(columns); j += LANES) {
      Reals score = load(row + j) * of_scores;
      if (call.mask_is == NUMBERS) score += load(terms + j);
      score = taking_part(score, j, reached, -INFINITY);
      store(to + j, score);
      highest = score <= highest ? highest : score;
    }
    return maximum_of(highest);
  }

  // Multiply values of a row with 0 where a weight is dropped, and else with 1 / (1 - dropped). What is drawn depends on
  // the seed and the place of the pair alone.
  void drop(Real* row, int64_t query, int64_t n, int columns) const {
    if (dropped == 0) return;
    Places key = Places{} + (int32_t)mixed(call.seed + mixed(entry * call.queries + query));
    Real kept = dropped < 1 ? 1 / (1 - dropped) : 0;
    for (int j = 0; j < in_lanes(columns); j += LANES) {
      Reals drawn = uniform(key, counted_from<Places>((int32_t)(n + j)));
      store(row + j, load(row + j) * (drawn < dropped ? Reals{} : all(kept)));
    }
  }

  // Overwrite the dot products of a query with its weights.
  void weigh(Real* row, int64_t query, int64_t n, int columns, Real shift, Real inverse) {
    mask_row(row, query, n, columns);
    for (int j = 0; j < in_lanes(columns); j += LANES) store(row + j, softmax_term(load(row + j) - shift) * inverse);
  }

  // The gradients of queries without keys, and what they add to that of the weight.
  void pull_nothing(int64_t m, int rows) {
    if (call.dquery.at) fill(dquery.from(m, 0), rows, call.depth, 0);
    if (call.dweight.at) fill(dweight.from(m / ROWS, 0), 1, call.depth, 0);
  }

  static void scale_row(Real* row, int count, Real factor) {
    for (int j = 0; j < count; j += LANES) store(row + j, load(row + j) * factor);
  }

  Real inverse_of(Real total) const { return inverse_of_total(total == 0 && call.may_exclude ? 1 : total); }
};
