// Products of blocks that fit the cache. Factors are copied into the workspace; a part of the product is in registers.
#pragma once
#include "narrow.h"

enum {
  ROWS = 512 / REAL_BYTES, COLUMNS = ROWS, DEPTH = ROWS,  // of a block, at most
  TALL = VECTOR_BYTES == 64 ? 8 : 6, WIDE = 2 * LANES,    // of what is in registers
  STRIDE = DEPTH + 16,             // of a block: rows 512 bytes apart would fall into the same sets
  BLOCK = (ROWS + TALL) * STRIDE,  // with rows that nobody reads
  PANELS = COLUMNS * DEPTH,
};

// A matrix in memory, by the strides of its rows and columns, and what its numbers are.
struct Matrix {
  void* at;
  int64_t row, column;
  Type type = REAL;

  void* address(int64_t i, int64_t j) const { return (char*)at + (i * row + j * column) * bytes_of(type); }
  Matrix from(int64_t first_row, int64_t first_column) const { return {address(first_row, first_column), row, column, type}; }
  Real& operator()(int64_t i, int64_t j) const { return ((Real*)at)[i * row + j * column]; }  // of no 16 bits
  Real get(int64_t i, int64_t j) const {
    return is_narrow(type) ? widened_number(*(uint16_t*)address(i, j), type) : (*this)(i, j);
  }
  void set(int64_t i, int64_t j, Real value) const {
    if (is_narrow(type)) *(uint16_t*)address(i, j) = narrowed_number(value, type);
    else (*this)(i, j) = value;
  }
};

static inline int at_most(int64_t count, int most) { return count < most ? (int)count : most; }
static inline int64_t blocks_of(int64_t count, int64_t size) { return (count + size - 1) / size; }

static inline void copy_row(Matrix from, int64_t i, int columns, Real* to) {
  if (is_narrow(from.type)) widen((const uint16_t*)from.address(i, 0), from.column, columns, from.type, to);
  else if (from.column == 1) memcpy(to, &from(i, 0), columns * sizeof(Real));
  else for (int j = 0; j < columns; j++) to[j] = from(i, j);
}
static void copy_block(Matrix from, int rows, int columns, Real* to) {
  for (int i = 0; i < rows; i++, to += STRIDE) copy_row(from, i, columns, to);
}

// Put a block into memory, or add it to what is there, which has no 16 bits.
static void put_block(const Real* from, int rows, int columns, bool adds, Matrix to) {
  for (int i = 0; i < rows; i++, from += STRIDE) {
    int j = 0;
    if (is_narrow(to.type)) {
      narrow(from, columns, to.type, (uint16_t*)to.address(i, 0), to.column);
      continue;
    }
    if (to.column == 1 && !adds) memcpy(&to(i, 0), from, columns * sizeof(Real)), j = columns;
    if (to.column == 1)
      for (Real* row = &to(i, 0); j + LANES <= columns; j += LANES) store(row + j, load(row + j) + load(from + j));
    for (; j < columns; j++) to(i, j) = adds ? to(i, j) + from[j] : from[j];
  }
}

// The transpose of a block, in panels of WIDE columns one after another; 0 where it has no rows.
static void transpose_block(const Real* from, int rows, int columns, Real* to) {
  for (int first = 0; first < rows; first += WIDE, to += WIDE * columns)
    for (int some = first; some < first + WIDE; some += SIDE) {
      Real* panel = to + some - first;
      int j = 0;
      for (; some + SIDE <= rows && j + SIDE <= columns; j += SIDE) {
        Half square[SIDE];
        for (int i = 0; i < SIDE; i++) square[i] = *(const Half*)(from + (some + i) * STRIDE + j);
        transpose(square);
        for (int i = 0; i < SIDE; i++) *(Half*)(panel + (j + i) * WIDE) = square[i];
      }
      for (; j < columns; j++)
        for (int i = 0; i < SIDE; i++) panel[j * WIDE + i] = some + i < rows ? from[(some + i) * STRIDE + j] : 0;
    }
}

// The left factor of a product, whose elements are `row` and `step` apart; and the right one, whose panels are `panel`
// apart, and their rows `step`.
struct Left {
  const Real* at;
  int64_t row, step;
};
struct Right {
  const Real* at;
  int64_t panel, step;
};
static inline Left rows_of(const Real* block) { return {block, STRIDE, 1}; }
static inline Left columns_of(const Real* block) { return {block, 1, STRIDE}; }
static inline Right panels_of(const Real* block) { return {block, WIDE, STRIDE}; }

// A part of the product in registers, TALL rows by some vectors: the sum of `depth` terms, added to what is there or not.
template <int VECTORS>
static inline void multiply_part(Left left, const Real* right, int64_t right_step, int depth, bool adds, Real* to) {
  Reals sums[TALL][VECTORS];
#pragma GCC unroll 8
  for (int i = 0; i < TALL; i++)
    for (int v = 0; v < VECTORS; v++) sums[i][v] = Reals{};
  for (int k = 0; k < depth; k++, right += right_step, left.at += left.step) {
    Reals factors[VECTORS];
    for (int v = 0; v < VECTORS; v++) factors[v] = load(right + v * LANES);
#pragma GCC unroll 8
    for (int i = 0; i < TALL; i++) {
      Reals value = all(left.at[i * left.row]);
      for (int v = 0; v < VECTORS; v++) sums[i][v] += value * factors[v];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < TALL; i++, to += STRIDE)
    for (int v = 0; v < VECTORS; v++) store(to + v * LANES, adds ? load(to + v * LANES) + sums[i][v] : sums[i][v]);
}

// A block of the product: rows by columns, of `depth` terms. A panel that is half empty takes one vector.
static void multiply(Left left, Right right, int rows, int columns, int depth, bool adds, Real* to) {
  for (int j = 0; j < columns; j += WIDE, right.at += right.panel) {
    auto part = columns - j > LANES ? multiply_part<2> : multiply_part<1>;
    for (int i = 0; i < rows; i += TALL)
      part({left.at + i * left.row, left.row, left.step}, right.at, right.step, depth, adds, to + i * STRIDE + j);
  }
}
