// Vectors of VECTOR_BYTES, which the build gives: 32 with AVX2, 64 with AVX-512. One source serves both, and numbers of
// REAL_BYTES, 4 or 8, which it gives too.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

typedef float Floats __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
typedef int32_t Integers __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
typedef double Doubles __attribute__((vector_size(VECTOR_BYTES), aligned(8), may_alias));
typedef int64_t Longs __attribute__((vector_size(VECTOR_BYTES), aligned(8), may_alias));
#if REAL_BYTES == 8
typedef double Real;
typedef Doubles Reals;
typedef Longs Wholes;  // integers as wide
#else
typedef float Real;
typedef Floats Reals;
typedef Integers Wholes;
#endif
enum { LANES = VECTOR_BYTES / REAL_BYTES, DOUBLE_LANES = VECTOR_BYTES / 8, SIDE = 32 / REAL_BYTES };

// As many numbers of 32 bits as there are lanes.
typedef float Singles __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t Places __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

static inline int in_lanes(int count) { return (count + LANES - 1) / LANES * LANES; }  // rounded up

static inline Reals all(Real value) { return value - Reals{}; }  // an assignment of each lane compiles to inserts
static inline Reals load(const Real* from) { return *(const Reals*)from; }
static inline void store(Real* to, Reals value) { *(Reals*)to = value; }

// The integers from `first` on, one in each lane.
template <class Lanes>
static inline Lanes counted_from(int32_t first) {
  Lanes lanes = Lanes{} + first;
  for (int lane = 0; lane < LANES; lane++) lanes[lane] += lane;
  return lanes;
}

typedef Real Half __attribute__((vector_size(32), aligned(REAL_BYTES), may_alias));
typedef Real Quarter __attribute__((vector_size(16), aligned(REAL_BYTES), may_alias));

// The lanes of two vectors that the indices name: those of the other one come after those of the one.
template <class Result, int... INDICES, class All>
static inline Result lanes_of(All one, All other) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(one, other, INDICES...);
#else
  if constexpr (sizeof(Result) == sizeof(All)) {
    typedef std::conditional_t<REAL_BYTES == 8, int64_t, int32_t> Index;
    typedef Index Indices __attribute__((vector_size(sizeof(Result))));
    return __builtin_shuffle(one, other, Indices{INDICES...});
  } else {
    return Result{one[INDICES]...};
  }
#endif
}

// The lanes of a vector from FIRST on, as many as the other indices. By memcpy, the vector would live in memory.
template <class Part, int FIRST, class All, size_t... INDICES>
static inline Part part_of(All whole, std::index_sequence<INDICES...>) {
  return lanes_of<Part, (FIRST + INDICES)...>(whole, whole);
}

// What a function of two vectors makes of all lanes: of one half and the other, and so on.
template <class Function>
static inline Real folded(Reals values, Function function) {
#if VECTOR_BYTES == 64
  const std::make_index_sequence<LANES / 2> halves;
  Half half = function(part_of<Half, 0>(values, halves), part_of<Half, LANES / 2>(values, halves));
#else
  Half half = values;
#endif
  const std::make_index_sequence<SIDE / 2> quarters;
  Quarter quarter = function(part_of<Quarter, 0>(half, quarters), part_of<Quarter, SIDE / 2>(half, quarters));
#if REAL_BYTES == 8
  return function(quarter[0], quarter[1]);
#else
  return function(function(quarter[0], quarter[2]), function(quarter[1], quarter[3]));
#endif
}
static inline Real sum_of(Reals values) {
  return folded(values, [](auto one, auto other) { return one + other; });
}
// The largest lane. A NaN may get lost: who needs it finds it in a sum.
static inline Real maximum_of(Reals values) {
  return folded(values, [](auto one, auto other) { return one <= other ? other : one; });
}

// SIDE rows of as many become columns.
#if REAL_BYTES == 8
static inline void transpose(Half rows[4]) {
  Half pairs[4];
#pragma GCC unroll 8
  for (int i = 0; i < 4; i += 2) {
    pairs[i] = lanes_of<Half, 0, 4, 2, 6>(rows[i], rows[i + 1]);
    pairs[i + 1] = lanes_of<Half, 1, 5, 3, 7>(rows[i], rows[i + 1]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 2; i++) {
    rows[i] = lanes_of<Half, 0, 1, 4, 5>(pairs[i], pairs[i + 2]);
    rows[i + 2] = lanes_of<Half, 2, 3, 6, 7>(pairs[i], pairs[i + 2]);
  }
}
#else
static inline void transpose(Half rows[8]) {
  Half pairs[8], fours[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = lanes_of<Half, 0, 8, 1, 9, 4, 12, 5, 13>(rows[i], rows[i + 1]);
    pairs[i + 1] = lanes_of<Half, 2, 10, 3, 11, 6, 14, 7, 15>(rows[i], rows[i + 1]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; i += 4) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      fours[i + 2 * half] = lanes_of<Half, 0, 1, 8, 9, 4, 5, 12, 13>(pairs[i + half], pairs[i + 2 + half]);
      fours[i + 2 * half + 1] = lanes_of<Half, 2, 3, 10, 11, 6, 7, 14, 15>(pairs[i + half], pairs[i + 2 + half]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < 4; i++) {
    rows[i] = lanes_of<Half, 0, 1, 2, 3, 8, 9, 10, 11>(fours[i], fours[i + 4]);
    rows[i + 4] = lanes_of<Half, 4, 5, 6, 7, 12, 13, 14, 15>(fours[i], fours[i + 4]);
  }
}
#endif
