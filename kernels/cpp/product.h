// Products of blocks that fit the cache. Factors are copied into the workspace; a part of the product is in registers.
#pragma once
#include <algorithm>

#include "narrow.h"

enum {
  ROWS = 512 / REAL_BYTES, COLUMNS = ROWS, DEPTH = ROWS,  // of a block, at most
  TALL = VECTOR_BYTES == 64 ? 8 : 6, WIDE = 2 * LANES,    // of what is in registers
  STRIDE = DEPTH + 16,             // of a block: rows 512 bytes apart would fall into the same sets
  BLOCK = (ROWS + TALL) * STRIDE,  // with room for the rows of a last part of a product
  PANELS = COLUMNS * DEPTH,
  EACH = 2,                        // rows that are fetched into the cache with each part of a product
};

// A matrix in memory, by the strides of its rows and columns, and what its numbers are.
struct Matrix {
  void* at;
  int64_t row, column;
  Type type = REAL;

  void* address(int64_t i, int64_t j) const { return (char*)at + (i * row + j * column) * bytes_of(type); }
  Matrix from(int64_t first_row, int64_t first_column) const { return {address(first_row, first_column), row, column, type}; }
  bool has_plain_rows() const { return column == 1 && !is_narrow(type); }
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
// Fetch a row into the cache ahead of its use, if its numbers lie one after another. It is inlined by force: GCC leaves out
// calls of a function that does nothing else, as if it had no effect.
__attribute__((always_inline)) static inline void fetch_row(Matrix from, int64_t i, int columns) {
  if (from.column != 1) return;
  const char* at = (const char*)from.address(i, 0);
  for (int64_t byte = 0; byte < columns * bytes_of(from.type); byte += 64) __builtin_prefetch(at + byte);
}
// Blocks that are fetched a few rows at a time, while others are computed. Rows may lie in pages of their own, so that the
// processor foresees none of them.
class Ahead {
  enum { MOST = 3 };
  Matrix blocks[MOST];
  int rows[MOST], columns[MOST], count = 0, row = 0;

 public:
  void clear() { count = row = 0; }
  // The block that is added last is fetched first.
  void add(Matrix block, int64_t all_rows, int64_t all_columns) {
    if (!block.at || block.column != 1 || count == MOST) return;
    blocks[count] = block, rows[count] = at_most(all_rows, ROWS), columns[count++] = at_most(all_columns, COLUMNS);
  }
  void fetch(int some) {
    for (; some > 0 && count > 0; some--) {
      fetch_row(blocks[count - 1], row, columns[count - 1]);
      if (++row == rows[count - 1]) row = 0, count--;
    }
  }
};

// Write 0 behind the rows of a block, to a multiple. What a product computes of them nobody reads, yet memory may hold
// subnormal numbers there, whose arithmetic takes a hundred cycles an operation.
static inline void clear_behind(Real* block, int rows, int columns, int multiple) {
  for (int i = rows; i % multiple; i++) memset(block + i * STRIDE, 0, columns * sizeof(Real));
}

// Copy a block, with 0 behind its rows in the last panel.
static void copy_block(Matrix from, int rows, int columns, Real* to) {
  int whole = (int)blocks_of(columns, WIDE) * WIDE;
  for (int i = 0; i < rows; i++, to += STRIDE) {
    copy_row(from, i, columns, to);
    if (columns < whole) memset(to + columns, 0, (whole - columns) * sizeof(Real));
  }
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

// The transpose of rows that are `stride` apart, in panels of WIDE columns one after another; 0 where there are no rows.
static void transpose_rows(const Real* from, int64_t stride, int rows, int columns, Real* to) {
  for (int first = 0; first < rows; first += WIDE, to += WIDE * columns)
    for (int some = first; some < first + WIDE; some += SIDE) {
      Real* panel = to + some - first;
      int j = 0;
      for (; some + SIDE <= rows && j + SIDE <= columns; j += SIDE) {
        Half square[SIDE];
#pragma GCC unroll 8
        for (int i = 0; i < SIDE; i++) square[i] = *(const Half*)(from + (some + i) * stride + j);
        transpose(square);
#pragma GCC unroll 8
        for (int i = 0; i < SIDE; i++) *(Half*)(panel + (j + i) * WIDE) = square[i];
      }
      for (; j < columns; j++)
        for (int i = 0; i < SIDE; i++) panel[j * WIDE + i] = some + i < rows ? from[(some + i) * stride + j] : 0;
    }
}
static void transpose_block(const Real* from, int rows, int columns, Real* to) { transpose_rows(from, STRIDE, rows, columns, to); }
// Likewise of a matrix, of which `copy` becomes a copy. It need not, where nobody reads it and rows lie close together.
static void transpose_matrix(Matrix from, int rows, int columns, bool needs_copy, Real* copy, Real* to) {
  if (!needs_copy && from.has_plain_rows() && from.row <= STRIDE) return transpose_rows(&from(0, 0), from.row, rows, columns, to);
  for (int i = 0; i < rows; i += WIDE, copy += WIDE * STRIDE, to += WIDE * columns) {
    int some = at_most(rows - i, WIDE);
    copy_block(from.from(i, 0), some, columns, copy);
    transpose_block(copy, some, columns, to);
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
// The rows of a block as a left factor, and its columns, of so many terms: what a product reads behind them becomes 0.
static inline Left rows_of(Real* block, int rows, int depth) {
  clear_behind(block, rows, depth, TALL);
  return {block, STRIDE, 1};
}
static inline Left columns_of(Real* block, int columns, int depth) {
  for (int k = 0; columns % TALL && k < depth; k++)
    for (int j = columns; j % TALL; j++) block[k * STRIDE + j] = 0;
  return {block, 1, STRIDE};
}
// The columns of a copied block as a right factor.
static inline Right panels_of(const Real* block) { return {block, WIDE, STRIDE}; }

// A part of the product in registers, TALL rows by some vectors: sums of `depth` terms, which `put` takes by row and vector.
template <int VECTORS, class Put>
static inline void multiply_part(Left left, const Real* right, int64_t right_step, int depth, Put put) {
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
  for (int i = 0; i < TALL; i++)
    for (int v = 0; v < VECTORS; v++) put(i, v, sums[i][v]);
}
template <int VECTORS>
static void multiply_part(Left left, const Real* right, int64_t right_step, int depth, bool adds, Real* to) {
  multiply_part<VECTORS>(left, right, right_step, depth, [=](int i, int v, Reals sum) {
    Real* at = to + i * STRIDE + v * LANES;
    store(at, adds ? load(at) + sum : sum);
  });
}

// A block of the product: rows by columns, of `depth` terms. A panel that is half empty takes one vector.
static void multiply(Left left, Right right, int rows, int columns, int depth, bool adds, Real* to, Ahead* ahead = nullptr) {
  for (int j = 0; j < columns; j += WIDE, right.at += right.panel) {
    auto part = columns - j > LANES ? multiply_part<2> : multiply_part<1>;
    for (int i = 0; i < rows; i += TALL) {
      if (ahead) ahead->fetch(EACH);
      part({left.at + i * left.row, left.row, left.step}, right.at, right.step, depth, adds, to + i * STRIDE + j);
    }
  }
}

// TALL rows by WIDE columns of a block of a result, from (i, j) on, which take numbers or add them to what is there. What
// reaches over its edges is put elsewhere first.
struct Tile {
  const Matrix to;
  const bool adds;
  const int rows, columns;  // of it that the block has
  const bool is_whole = rows >= TALL && columns >= WIDE;
  Real edge[TALL * WIDE];
  Real* const at = is_whole ? &to(0, 0) : edge;
  const int64_t row = is_whole ? to.row : (int64_t)WIDE;

  Tile(Matrix block, bool adds, int rows, int columns, int i, int j)
      : to(block.from(i, j)), adds(adds), rows(at_most(rows - i, TALL)), columns(at_most(columns - j, WIDE)) {
    if (!adds || is_whole) return;
    std::fill(edge, edge + TALL * WIDE, 0.0f);
    for (int k = 0; k < this->rows; k++) memcpy(edge + k * WIDE, &to(k, 0), this->columns * sizeof(Real));
  }
  ~Tile() {
    for (int i = 0; !is_whole && i < rows; i++) memcpy(&to(i, 0), edge + i * WIDE, columns * sizeof(Real));
  }
  void put(int i, int vector, Reals values) {
    Real* place = at + i * row + vector * LANES;
    store(place, adds ? load(place) + values : values);
  }
};

// Write what a function of column and value makes of a block of the product to where it is wanted, in plain rows, or add
// it to what is there. So the memory takes numbers while others are computed.
template <class Finish>
static void write_product(Left left, Right right, int rows, int columns, int depth, Finish finish, bool adds, Matrix to,
                          Ahead* ahead = nullptr) {
  for (int j = 0; j < columns; j += WIDE, right.at += right.panel)
    for (int i = 0; i < rows; i += TALL) {
      if (ahead) ahead->fetch(EACH);
      Tile tile(to, adds, rows, columns, i, j);
      Left own = {left.at + i * left.row, left.row, left.step};
      auto put = [&](int k, int v, Reals sum) { tile.put(k, v, finish(j + v * LANES, sum)); };
      if (columns - j > LANES) multiply_part<2>(own, right.at, right.step, depth, put);
      else multiply_part<1>(own, right.at, right.step, depth, put);
    }
}

// Put a block of the product into memory, or add it to what is there, by way of `room` where rows are not plain.
static void put_product(Left left, Right right, int rows, int columns, int depth, bool adds, Matrix to, Real* room) {
  auto sum = [](int, Reals sum) { return sum; };
  if (to.has_plain_rows()) return write_product(left, right, rows, columns, depth, sum, adds, to);
  multiply(left, right, rows, columns, depth, false, room);
  put_block(room, rows, columns, adds, to);
}
