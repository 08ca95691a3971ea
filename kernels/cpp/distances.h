// Squared distances of blocks that fit the cache, by differences, and their derivatives. A part of them is in registers.
//
//     distance[m,n] = sum_d ((left[m,d] - right[n,d]) inverse[n,d])^2
//
// With G the derivatives by the distances, and z the quotients that are squared,
//
//     dleft = 2 sum_n G z inverse,    dright = -2 sum_m G z inverse,    ddeviations = -2 sum_m G z^2 inverse
//
// PLAIN are sums of squared differences, which inverse[n]^2 multiplies afterwards, as it multiplies G here. Where a distance
// is not finite, LEAVES_OUT skips pairs whose G is 0, as 0 times infinity is NaN. It serves too where deviations are not
// MODERATE, since it multiplies with one factor after the other.
#pragma once
#include "product.h"

enum {
  HALF = DEPTH / 2,              // coordinates of a block at most: the other half of its rows has the inverse deviations
  HALF_PANELS = COLUMNS * HALF,
  PART = 16,                     // coordinates that one sum runs over
  SHORT = 4,                     // rows in registers where gradients are summed
};

// Squares and cubes of deviations up to this number, and of their inverses, leave most of the range to what they multiply.
static const Real MODERATE = REAL_BYTES == 8 ? 1e50 : 1e6f;

enum Squares { OF_QUOTIENTS, LEAVES_OUT, PLAIN };  // as the functions of tables are ordered

// Whether a function of all values of a block is finite.
template <class Function>
static bool all_finite(const Real* block, int rows, int columns, Function function) {
  Real sum = 0;
  for (int i = 0; i < rows; i++, block += STRIDE) {
    Reals sums = Reals{};
    int j = 0;
    for (; j + LANES <= columns; j += LANES) sums += function(load(block + j)) * 0.0f;
    for (; j < columns; j++) sum += function(block[j]) * 0.0f;
    sum += sum_of(sums);
  }
  return sum == 0;
}

// Whether all values of a block are so small that their differences are finite.
static bool is_small(const Real* block, int rows, int columns) {
  return all_finite(block, rows, columns, [](auto value) { return value * 2.0f; });
}

// Write the inverses of a block of deviations. Returns whether these are MODERATE.
static bool invert_block(Matrix from, int rows, int columns, Real* to) {
  auto grown = [](auto value) { return value * (std::numeric_limits<Real>::max() / MODERATE); };
  copy_block(from, rows, columns, to);
  bool is_moderate = all_finite(to, rows, columns, grown);
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < columns; j += LANES) store(to + i * STRIDE + j, 1.0f / load(to + i * STRIDE + j));
  return is_moderate && all_finite(to, rows, columns, grown);
}

template <Squares SQUARES, class Put>
static inline void measure_part(const Real* left, const Real* right, const Real* inverse, int depth, Put put) {
  Reals sums[TALL][2];
#pragma GCC unroll 8
  for (int i = 0; i < TALL; i++) sums[i][0] = sums[i][1] = Reals{};
  for (int k = 0; k < depth; k++, right += WIDE, inverse += WIDE, left++) {
#pragma GCC unroll 8
    for (int i = 0; i < TALL; i++) {
      Reals value = all(left[i * STRIDE]);
      Reals first = value - load(right), second = value - load(right + LANES);
      if (SQUARES != PLAIN) first *= load(inverse), second *= load(inverse + LANES);
      sums[i][0] += first * first;
      sums[i][1] += second * second;
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < TALL; i++) put(i, 0, sums[i][0]), put(i, 1, sums[i][1]);
}

// The distances of a block of rows and columns, the latter in panels.
template <Squares SQUARES>
static void measure(const Real* left, const Real* right, const Real* inverse, int rows, int columns, int depth,
                    bool adds, Real* to) {
  for (int j = 0; j < columns; j += WIDE, right += WIDE * depth, inverse += WIDE * depth)
    for (int i = 0; i < rows; i += TALL)
      for (int k = 0; k < depth; k += PART)
        measure_part<SQUARES>(left + i * STRIDE + k, right + k * WIDE, inverse + k * WIDE, at_most(depth - k, PART),
                              [=](int own, int v, Reals sum) {
          Real* at = to + (i + own) * STRIDE + j + v * LANES;
          store(at, adds || k > 0 ? load(at) + sum : sum);
        });
}

// Write what a function of column and distance makes of them to where it is wanted, as `write_product` does.
template <Squares SQUARES, class Finish>
static void write_distances(const Real* left, const Real* right, const Real* inverse, int rows, int columns, int depth,
                            Finish finish, Matrix to) {
  for (int j = 0; j < columns; j += WIDE, right += WIDE * depth, inverse += WIDE * depth)
    for (int i = 0; i < rows; i += TALL) {
      Tile tile(to, false, rows, columns, i, j);
      Real sums[TALL * WIDE] = {};
      for (int k = 0; k < depth; k += PART)
        measure_part<SQUARES>(left + i * STRIDE + k, right + k * WIDE, inverse + k * WIDE, at_most(depth - k, PART),
                              [&](int own, int v, Reals sum) {
          Real* at = sums + own * WIDE + v * LANES;
          sum += load(at);
          if (k + PART < depth) store(at, sum);
          else tile.put(own, v, finish(j + v * LANES, sum));
        });
    }
}

// 2 sum_n G z inverse of SHORT rows and WIDE coordinates, over the columns n.
template <Squares SQUARES>
static inline void pull_left_part(const Real* G, const Real* left, const Real* right, int columns, Real* to) {
  Reals sums[SHORT][2], own[SHORT][2];
#pragma GCC unroll 4
  for (int i = 0; i < SHORT; i++)
    for (int half = 0; half < 2; half++) sums[i][half] = Reals{}, own[i][half] = load(left + i * STRIDE + half * LANES);
  for (int n = 0; n < columns; n++, right += STRIDE)
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      Reals other = load(right + half * LANES), inverse = Reals{};
      if (SQUARES != PLAIN) inverse = load(right + HALF + half * LANES);
      Reals square = inverse * inverse;
#pragma GCC unroll 4
      for (int i = 0; i < SHORT; i++) {
        if (SQUARES == LEAVES_OUT && G[i * STRIDE + n] == 0) continue;
        Reals pull = all(G[i * STRIDE + n]), difference = own[i][half] - other;
        if (SQUARES == LEAVES_OUT) sums[i][half] += pull * (difference * inverse) * inverse;
        else sums[i][half] += pull * (SQUARES == PLAIN ? difference : difference * square);
      }
    }
  for (int i = 0; i < SHORT; i++)
    for (int half = 0; half < 2; half++) store(to + i * STRIDE + half * LANES, 2.0f * sums[i][half]);
}

// -2 sum_m G z inverse of SHORT columns and WIDE coordinates, over the rows m, and unless PLAIN the sum with z^2 HALF
// behind it.
template <Squares SQUARES>
static inline void pull_right_part(const Real* G, const Real* left, const Real* right, int rows, Real* to) {
  Reals sums[SHORT][2], squares[SHORT][2], own[SHORT][2];  // of differences, or of quotients
#pragma GCC unroll 4
  for (int i = 0; i < SHORT; i++)
    for (int half = 0; half < 2; half++) {
      sums[i][half] = squares[i][half] = Reals{};
      own[i][half] = load(right + i * STRIDE + half * LANES);
    }
  for (int m = 0; m < rows; m++, left += STRIDE, G += STRIDE)
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      Reals other = load(left + half * LANES);
#pragma GCC unroll 4
      for (int i = 0; i < SHORT; i++) {
        if (SQUARES == LEAVES_OUT && G[i] == 0) continue;
        Reals difference = other - own[i][half];
        if (SQUARES == LEAVES_OUT) difference *= load(right + i * STRIDE + HALF + half * LANES);
        Reals pull = all(G[i]) * difference;
        sums[i][half] += pull;
        if (SQUARES != PLAIN) squares[i][half] += pull * difference;
      }
    }
  for (int i = 0; i < SHORT; i++, to += STRIDE, right += STRIDE)
    for (int half = 0; half < 2; half++) {
      if (SQUARES == PLAIN) {
        store(to + half * LANES, sums[i][half] * -2.0f);
        continue;
      }
      Reals inverse = load(right + HALF + half * LANES), of_one = inverse * -2.0f, of_two = of_one;
      if (SQUARES != LEAVES_OUT) of_one *= inverse, of_two *= inverse * inverse;
      store(to + half * LANES, sums[i][half] * of_one);
      store(to + HALF + half * LANES, squares[i][half] * of_two);
    }
}

// The gradients of rows or of columns, of `depth` coordinates; deviations have theirs HALF behind that of columns. What is
// read behind a block becomes 0.
template <Squares SQUARES>
static void pull_left(Real* G, Real* left, Real* right, int rows, int columns, int depth, Real* to) {
  for (Real* block : {G, left}) clear_behind(block, rows, DEPTH, SHORT);
  for (int i = 0; i < rows; i += SHORT)
    for (int k = 0; k < depth; k += WIDE)
      pull_left_part<SQUARES>(G + i * STRIDE, left + i * STRIDE + k, right + k, columns, to + i * STRIDE + k);
}
template <Squares SQUARES>
static void pull_right(Real* G, Real* left, Real* right, int rows, int columns, int depth, Real* to) {
  clear_behind(right, columns, DEPTH, SHORT);
  for (int j = 0; j < columns; j += SHORT)
    for (int k = 0; k < depth; k += WIDE)
      pull_right_part<SQUARES>(G + j, left + k, right + j * STRIDE + k, rows, to + j * STRIDE + k);
}

typedef void (*Pull)(Real* G, Real* left, Real* right, int rows, int columns, int depth, Real* to);
static const Pull PULL_LEFT[] = {pull_left<OF_QUOTIENTS>, pull_left<LEAVES_OUT>, pull_left<PLAIN>};
static const Pull PULL_RIGHT[] = {pull_right<OF_QUOTIENTS>, pull_right<LEAVES_OUT>, pull_right<PLAIN>};
