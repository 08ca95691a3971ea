// Vectors of VECTOR_BYTES, which the build gives: 32 with AVX2, 64 with AVX-512. One source serves both.
#pragma once
#include <cmath>
#include <cstdint>

typedef float Floats __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
typedef int32_t Integers __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
typedef double Doubles __attribute__((vector_size(VECTOR_BYTES), aligned(8), may_alias));
typedef int64_t Longs __attribute__((vector_size(VECTOR_BYTES), aligned(8), may_alias));
enum { LANES = VECTOR_BYTES / 4, DOUBLE_LANES = VECTOR_BYTES / 8 };

static inline int in_lanes(int count) { return (count + LANES - 1) / LANES * LANES; }  // rounded up

static inline Floats all(float value) { return value - Floats{}; }  // an assignment of each lane compiles to inserts
static inline Floats load(const float* from) { return *(const Floats*)from; }
static inline void store(float* to, Floats value) { *(Floats*)to = value; }

// The integers from `first` on, one in each lane.
static inline Integers counted_from(int32_t first) {
  Integers lanes = Integers{} + first;
  for (int lane = 0; lane < LANES; lane++) lanes[lane] += lane;
  return lanes;
}

typedef float Eight __attribute__((vector_size(32), aligned(4), may_alias));
typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));

// What a function of two vectors makes of all lanes: of one half and the other, and so on.
template <class Function>
static inline float folded(Floats values, Function function) {
#if VECTOR_BYTES == 64
  Eight eight = function(__builtin_shufflevector(values, values, 0, 1, 2, 3, 4, 5, 6, 7),
                         __builtin_shufflevector(values, values, 8, 9, 10, 11, 12, 13, 14, 15));
#else
  Eight eight = values;
#endif
  Four four = function(__builtin_shufflevector(eight, eight, 0, 1, 2, 3), __builtin_shufflevector(eight, eight, 4, 5, 6, 7));
  four = function(four, __builtin_shufflevector(four, four, 2, 3, 0, 1));
  four = function(four, __builtin_shufflevector(four, four, 1, 0, 3, 2));
  return four[0];
}
static inline float sum_of(Floats values) {
  return folded(values, [](auto one, auto other) { return one + other; });
}
// The largest lane. A NaN may get lost: who needs it finds it in a sum.
static inline float maximum_of(Floats values) {
  return folded(values, [](auto one, auto other) { return one <= other ? other : one; });
}

// Eight rows of eight become eight columns.
typedef float Eight __attribute__((vector_size(32), aligned(4), may_alias));
static inline void transpose(Eight rows[8]) {
  Eight pairs[8], fours[8];
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = __builtin_shufflevector(rows[i], rows[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    pairs[i + 1] = __builtin_shufflevector(rows[i], rows[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < 8; i += 4) {
    for (int half = 0; half < 2; half++) {
      fours[i + 2 * half] = __builtin_shufflevector(pairs[i + half], pairs[i + 2 + half], 0, 1, 8, 9, 4, 5, 12, 13);
      fours[i + 2 * half + 1] = __builtin_shufflevector(pairs[i + half], pairs[i + 2 + half], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  }
  for (int i = 0; i < 4; i++) {
    rows[i] = __builtin_shufflevector(fours[i], fours[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    rows[i + 4] = __builtin_shufflevector(fours[i], fours[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}
