// Additive scores of blocks that fit the cache, and their derivatives.
//
//     score[i,j] = sum_d weight[d] tanh(query[i,d] + key[j,d]) = sum_d weight[d] - 2 sum_d weight[d] r,
//     r = 1 / (1 + exp(2 query) exp(2 key))
//
// With G the derivatives by the scores,
//
//     dquery = 4 weight sum_j G r (1 - r),    dkey = 4 weight sum_i G r (1 - r),    dweight = sum_ij G (1 - 2 r)
//
// The exponentials of the rows of a block are taken once. Where no product of four denominators can overflow, four r have
// one quotient. Where the exponentials would overflow or vanish, as near infinity, each r takes its own exponential.
#pragma once
#include "product.h"
#include "special.h"

// The largest value and the largest absolute value of a block: infinite if any is NaN.
struct Range {
  Real highest = -INFINITY, widest = 0;

  bool allows_exponentials() const { return widest <= 43; }  // e^(2 * 43) and its inverse are normal numbers
};

// How the r of a block are computed.
enum Ratios { OF_FOUR, OF_FACTORS, DIRECTLY };

static inline Ratios ratios_of(Range query, Range key, Real sum_of_weights) {
  if (!query.allows_exponentials() || !key.allows_exponentials() || !(sum_of_weights <= 4e37f)) return DIRECTLY;
  return query.highest + key.highest <= 10.7f && sum_of_weights <= 1e9f ? OF_FOUR : OF_FACTORS;  // e^(2 * 10.7) < 2^31
}

// The range of a block. Behind it rows become 0, to a multiple of four.
static Range measure_block(Real* block, int rows, int columns) {
  Range range;
  clear_behind(block, rows, in_lanes(columns), 4);
  for (int i = 0; i < rows; i++, block += STRIDE)
    for (int j = 0; j < columns; j++) {
      Real size = std::fabs(block[j]);
      if (!(size <= range.widest)) range.widest = size == size ? size : INFINITY;
      if (block[j] > range.highest) range.highest = block[j];
    }
  return range;
}

static void raise_block(Real* block, int rows, int columns) {
  for (int i = 0; i < rows; i++, block += STRIDE)
    for (int j = 0; j < columns; j += LANES) store(block + j, exponential(load(block + j) * 2.0f));
}

// The denominators 1 + e^(2q) e^(2k), of factors or of what is to be raised.
template <Ratios RATIOS>
static inline Reals denominator(Reals query, Reals key) {
  return RATIOS == DIRECTLY ? exponential((query + key) * 2.0f) + 1.0f : query * key + 1.0f;
}

// Write the sums over d of weight r for a row of queries and WIDE keys of a panel; DIRECTLY those of weight (1 - 2 r).
template <Ratios RATIOS>
static inline void weigh_ratios(const Real* query, const Real* panel, const Real* weight, int depth, Reals sums[2]) {
  sums[0] = sums[1] = Reals{};
  int d = 0;
  for (; RATIOS == OF_FOUR && d + 4 <= depth; d += 4)
    for (int v = 0; v < 2; v++) {
      const Real* at = panel + d * WIDE + v * LANES;
      Reals a = denominator<RATIOS>(all(query[d]), load(at)), b = denominator<RATIOS>(all(query[d + 1]), load(at + WIDE));
      Reals c = denominator<RATIOS>(all(query[d + 2]), load(at + 2 * WIDE));
      Reals e = denominator<RATIOS>(all(query[d + 3]), load(at + 3 * WIDE));
      Reals ab = a * b, ce = c * e, first = b * weight[d] + a * weight[d + 1], second = e * weight[d + 2] + c * weight[d + 3];
      sums[v] += (first * ce + second * ab) / (ab * ce);
    }
  for (; d < depth; d++)
    for (int v = 0; v < 2; v++) {
      Reals below = denominator<RATIOS>(all(query[d]), load(panel + d * WIDE + v * LANES));
      if (RATIOS == DIRECTLY) sums[v] += (1.0f - 2.0f / below) * weight[d];
      else sums[v] += weight[d] / below;
    }
}

// Write additive scores, or add those of further coordinates to what is there. Sums are taken in parts, which round less.
template <Ratios RATIOS>
static void score_block(const Real* query, const Real* panels, const Real* weight, int rows, int columns, int depth,
                        bool adds, Real* to) {
  enum { PART = 32 };
  Real totals[DEPTH / PART];
  for (int d = 0; d < depth; d += PART) {
    double total = 0;
    for (int e = d; RATIOS != DIRECTLY && e < d + at_most(depth - d, PART); e++) total += weight[e];
    totals[d / PART] = (Real)total;
  }
  for (int j = 0; j < columns; j += WIDE, panels += WIDE * depth)
    for (int i = 0; i < rows; i++) {
      Real* at = to + i * STRIDE + j;
      Reals own[2] = {adds ? load(at) : Reals{}, adds ? load(at + LANES) : Reals{}};
      for (int d = 0; d < depth; d += PART) {
        Reals sums[2];
        weigh_ratios<RATIOS>(query + i * STRIDE + d, panels + d * WIDE, weight + d, at_most(depth - d, PART), sums);
        for (int v = 0; v < 2; v++) own[v] += RATIOS == DIRECTLY ? sums[v] : totals[d / PART] - sums[v] * 2.0f;
      }
      for (int v = 0; v < 2; v++) store(at + v * LANES, own[v]);
    }
}

// Write sums of G r (1 - r) of a block over its columns to `dquery`, and over its rows to `dkey`, and add those of G r
// to `drawn`. Four columns at once have one quotient, unless DIRECTLY.
template <Ratios RATIOS>
static void pull_block(const Real* g, const Real* query, const Real* key, int rows, int columns, int depth, Real* dquery,
                       Real* dkey, Real* drawn) {
  for (int j = 0; j < blocks_of(columns, 4) * 4; j++) memset(dkey + j * STRIDE, 0, in_lanes(depth) * sizeof(Real));
  for (int d = 0; d < depth; d += LANES) {
    Reals all_drawn = Reals{};
    for (int i = 0; i < rows; i++) {
      Reals own = load(query + i * STRIDE + d), sum = Reals{}, drawn_by_row = Reals{};
      for (int j = 0; j < columns; j += 4) {
        Reals below[4], ratio[4];
#pragma GCC unroll 4
        for (int u = 0; u < 4; u++) below[u] = denominator<RATIOS>(own, load(key + (j + u) * STRIDE + d));
        if (RATIOS == OF_FOUR) {
          Reals first = below[0] * below[1], second = below[2] * below[3], inverse = 1.0f / (first * second);
          first = first * inverse, second = second * inverse;
          ratio[0] = below[1] * second, ratio[1] = below[0] * second, ratio[2] = below[3] * first, ratio[3] = below[2] * first;
        } else {
#pragma GCC unroll 4
          for (int u = 0; u < 4; u++) ratio[u] = 1.0f / below[u];
        }
#pragma GCC unroll 4
        for (int u = 0; u < 4; u++) {
          Reals term = ratio[u] * g[i * STRIDE + j + u], slope = term - term * ratio[u];
          Real* at = dkey + (j + u) * STRIDE + d;
          store(at, load(at) + slope);
          sum += slope;
          drawn_by_row += term;
        }
      }
      store(dquery + i * STRIDE + d, sum);
      all_drawn += drawn_by_row;
    }
    store(drawn + d, load(drawn + d) + all_drawn);
  }
}
