// Numbers of 16 bits: widened where they are read, and rounded once, to even, where results are written. Beside doubles
// there are none.
#pragma once
#include "vector.h"

enum Type : int64_t { REAL, BFLOAT16, FLOAT16 };

typedef uint16_t Shorts __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

static inline bool is_narrow(Type type) { return REAL_BYTES == 4 && type != REAL; }
static inline int64_t bytes_of(Type type) { return is_narrow(type) ? 2 : REAL_BYTES; }

static inline Reals widened(Shorts from, Type type) {
  Words bits = __builtin_convertvector(from, Words);
  if (type == BFLOAT16) return __builtin_convertvector((Singles)(bits << 16), Reals);
  Words sign = (bits & 0x8000) << 16, size = (bits & 0x7fff) << 13;
  Singles subnormal = __builtin_convertvector((Places)(bits & 0x3ff), Singles) * 0x1p-24f;
  Words found = size < 0x00800000 ? (Words)subnormal : size + 0x38000000;  // the exponent has another origin
  found = size >= 0x0f800000 ? size | 0x7f800000 : found;                 // infinities and NaN
  return __builtin_convertvector((Singles)(found | sign), Reals);
}

static inline Shorts narrowed(Reals from, Type type) {
  Words bits = (Words)__builtin_convertvector(from, Singles), sign = bits & 0x80000000, size = bits & 0x7fffffff, found;
  if (type == BFLOAT16) {
    found = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    found = size > 0x7f800000 ? sign >> 16 | 0x7fc0 : found;
  } else {
    Words normal = (size + (uint32_t)(-112 * 0x800000 + 0xfff) + ((size >> 13) & 1)) >> 13;
    Words small = (Words)((Singles)size + 0.5f) - 0x3f000000;  // the addition rounds to multiples of 2^-24
    found = size < 0x38800000 ? small : normal;
    found = size >= 0x47800000 ? (size > 0x7f800000 ? Words{} + 0x7e00 : Words{} + 0x7c00) : found;
    found = found | sign >> 16;
  }
  return __builtin_convertvector(found, Shorts);
}

static inline void widen(const uint16_t* from, int64_t step, int count, Type type, Real* to) {
  int j = 0;
  for (; step == 1 && j + LANES <= count; j += LANES) store(to + j, widened(*(const Shorts*)(from + j), type));
  for (; j < count; j += LANES) {
    Shorts some = Shorts{};
    int left = count - j < LANES ? count - j : (int)LANES;
    for (int lane = 0; lane < left; lane++) some[lane] = from[(j + lane) * step];
    Reals values = widened(some, type);
    for (int lane = 0; lane < left; lane++) to[j + lane] = values[lane];
  }
}

static inline Real widened_number(uint16_t from, Type type) { return widened(Shorts{} + from, type)[0]; }
static inline uint16_t narrowed_number(Real from, Type type) { return narrowed(all(from), type)[0]; }

static inline void narrow(const Real* from, int count, Type type, uint16_t* to, int64_t step) {
  int j = 0;
  for (; step == 1 && j + LANES <= count; j += LANES) *(Shorts*)(to + j) = narrowed(load(from + j), type);
  for (; j < count; j += LANES) {
    Reals some = Reals{};
    int left = count - j < LANES ? count - j : (int)LANES;
    for (int lane = 0; lane < left; lane++) some[lane] = from[j + lane];
    Shorts values = narrowed(some, type);
    for (int lane = 0; lane < left; lane++) to[(j + lane) * step] = values[lane];
  }
}
