// Products of blocks that fit the cache. Factors are copied into the workspace; a part of the product is in registers.
#pragma once
#include <cstring>

#include "narrow.h"

enum {
  ROWS = 128, COLUMNS = 128, DEPTH = 128,        // of a block, at most
  TALL = LANES == 16 ? 8 : 6, WIDE = 2 * LANES,  // of what is in registers
  STRIDE = DEPTH + 16,                           // of a block: rows 512 bytes apart would fall into the same sets
  BLOCK = (ROWS + TALL) * STRIDE,                // floats, with rows that nobody reads
  PANELS = COLUMNS * DEPTH,
};

// A matrix in memory, by the strides of its rows and columns, and what its numbers are.
struct Matrix {
  void* at;
  int64_t row, column;
  Type type = FLOAT32;

  void* address(int64_t i, int64_t j) const { return (char*)at + (i * row + j * column) * bytes_of(type); }
  Matrix from(int64_t first_row, int64_t first_column) const { return {address(first_row, first_column), row, column, type}; }
  float& operator()(int64_t i, int64_t j) const { return ((float*)at)[i * row + j * column]; }  // of float32 alone
  float get(int64_t i, int64_t j) const {
    return type == FLOAT32 ? (*this)(i, j) : widened_number(*(uint16_t*)address(i, j), type);
  }
  void set(int64_t i, int64_t j, float value) const {
    if (type == FLOAT32) (*this)(i, j) = value;
    else *(uint16_t*)address(i, j) = narrowed_number(value, type);
  }
};

static inline int at_most(int64_t count, int most) { return count < most ? (int)count : most; }
static inline int64_t blocks_of(int64_t count, int64_t size) { return (count + size - 1) / size; }

static inline void copy_row(Matrix from, int64_t i, int columns, float* to) {
  if (from.type != FLOAT32) widen((const uint16_t*)from.address(i, 0), from.column, columns, from.type, to);
  else if (from.column == 1) memcpy(to, &from(i, 0), columns * sizeof(float));
  else for (int j = 0; j < columns; j++) to[j] = from(i, j);
}
static void copy_block(Matrix from, int rows, int columns, float* to) {
  for (int i = 0; i < rows; i++, to += STRIDE) copy_row(from, i, columns, to);
}

// Put a block into memory, or add it to what is there, which has float32.
static void put_block(const float* from, int rows, int columns, bool adds, Matrix to) {
  for (int i = 0; i < rows; i++, from += STRIDE) {
    int j = 0;
    if (to.type != FLOAT32) {
      narrow(from, columns, to.type, (uint16_t*)to.address(i, 0), to.column);
      continue;
    }
    if (to.column == 1 && !adds) memcpy(&to(i, 0), from, columns * sizeof(float)), j = columns;
    if (to.column == 1)
      for (float* row = &to(i, 0); j + LANES <= columns; j += LANES) store(row + j, load(row + j) + load(from + j));
    for (; j < columns; j++) to(i, j) = adds ? to(i, j) + from[j] : from[j];
  }
}

// The transpose of a block, in panels of WIDE columns one after another; 0 where it has no rows.
static void transpose_block(const float* from, int rows, int columns, float* to) {
  for (int first = 0; first < rows; first += WIDE, to += WIDE * columns)
    for (int some = first; some < first + WIDE; some += 8) {
      float* panel = to + some - first;
      int j = 0;
      for (; some + 8 <= rows && j + 8 <= columns; j += 8) {
        Eight eight[8];
        for (int i = 0; i < 8; i++) eight[i] = *(const Eight*)(from + (some + i) * STRIDE + j);
        transpose(eight);
        for (int i = 0; i < 8; i++) *(Eight*)(panel + (j + i) * WIDE) = eight[i];
      }
      for (; j < columns; j++)
        for (int i = 0; i < 8; i++) panel[j * WIDE + i] = some + i < rows ? from[(some + i) * STRIDE + j] : 0;
    }
}

// The left factor of a product, whose elements are `row` and `step` apart; and the right one, whose panels are `panel`
// apart, and their rows `step`.
struct Left {
  const float* at;
  int64_t row, step;
};
struct Right {
  const float* at;
  int64_t panel, step;
};
static inline Left rows_of(const float* block) { return {block, STRIDE, 1}; }
static inline Left columns_of(const float* block) { return {block, 1, STRIDE}; }
static inline Right panels_of(const float* block) { return {block, WIDE, STRIDE}; }

// A part of the product in registers, TALL rows by some vectors: the sum of `depth` terms, added to what is there or not.
template <int VECTORS>
static inline void multiply_part(Left left, const float* right, int64_t right_step, int depth, bool adds, float* to) {
  Floats sums[TALL][VECTORS];
#pragma GCC unroll 8
  for (int i = 0; i < TALL; i++)
    for (int v = 0; v < VECTORS; v++) sums[i][v] = Floats{};
  for (int k = 0; k < depth; k++, right += right_step, left.at += left.step) {
    Floats factors[VECTORS];
    for (int v = 0; v < VECTORS; v++) factors[v] = load(right + v * LANES);
#pragma GCC unroll 8
    for (int i = 0; i < TALL; i++) {
      Floats value = all(left.at[i * left.row]);
      for (int v = 0; v < VECTORS; v++) sums[i][v] += value * factors[v];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < TALL; i++, to += STRIDE)
    for (int v = 0; v < VECTORS; v++) store(to + v * LANES, adds ? load(to + v * LANES) + sums[i][v] : sums[i][v]);
}

// A block of the product: rows by columns, of `depth` terms. A panel that is half empty takes one vector.
static void multiply(Left left, Right right, int rows, int columns, int depth, bool adds, float* to) {
  for (int j = 0; j < columns; j += WIDE, right.at += right.panel) {
    auto part = columns - j > LANES ? multiply_part<2> : multiply_part<1>;
    for (int i = 0; i < rows; i += TALL)
      part({left.at + i * left.row, left.row, left.step}, right.at, right.step, depth, adds, to + i * STRIDE + j);
  }
}
