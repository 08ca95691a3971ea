// Numbers of 16 bits: widened where they are read, and rounded once, to even, where results are written.
#pragma once
#include "vector.h"

enum Type : int64_t { FLOAT32, BFLOAT16, FLOAT16 };

typedef uint16_t Shorts __attribute__((vector_size(VECTOR_BYTES / 2), aligned(2), may_alias));
typedef uint32_t Bits __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));

static inline int64_t bytes_of(Type type) { return type == FLOAT32 ? 4 : 2; }

static inline Floats widened(Shorts from, Type type) {
  Bits bits = __builtin_convertvector(from, Bits);
  if (type == BFLOAT16) return (Floats)(bits << 16);
  Bits sign = (bits & 0x8000) << 16, size = (bits & 0x7fff) << 13;
  Floats subnormal = __builtin_convertvector((Integers)(bits & 0x3ff), Floats) * 0x1p-24f;
  Bits found = size < 0x00800000 ? (Bits)subnormal : size + 0x38000000;  // the exponent has another origin
  found = size >= 0x0f800000 ? size | 0x7f800000 : found;                // infinities and NaN
  return (Floats)(found | sign);
}

static inline Shorts narrowed(Floats from, Type type) {
  Bits bits = (Bits)from, sign = bits & 0x80000000, size = bits & 0x7fffffff, found;
  if (type == BFLOAT16) {
    found = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    found = size > 0x7f800000 ? sign >> 16 | 0x7fc0 : found;
  } else {
    Bits normal = (size + (uint32_t)(-112 * 0x800000 + 0xfff) + ((size >> 13) & 1)) >> 13;
    Bits small = (Bits)((Floats)size + 0.5f) - 0x3f000000;  // the addition rounds to multiples of 2^-24
    found = size < 0x38800000 ? small : normal;
    found = size >= 0x47800000 ? (size > 0x7f800000 ? Bits{} + 0x7e00 : Bits{} + 0x7c00) : found;
    found = found | sign >> 16;
  }
  return __builtin_convertvector(found, Shorts);
}

static inline void widen(const uint16_t* from, int64_t step, int count, Type type, float* to) {
  int j = 0;
  for (; step == 1 && j + LANES <= count; j += LANES) store(to + j, widened(*(const Shorts*)(from + j), type));
  for (; j < count; j += LANES) {
    Shorts some = Shorts{};
    int left = count - j < LANES ? count - j : (int)LANES;
    for (int lane = 0; lane < left; lane++) some[lane] = from[(j + lane) * step];
    Floats values = widened(some, type);
    for (int lane = 0; lane < left; lane++) to[j + lane] = values[lane];
  }
}

static inline float widened_number(uint16_t from, Type type) { return widened(Shorts{} + from, type)[0]; }
static inline uint16_t narrowed_number(float from, Type type) { return narrowed(all(from), type)[0]; }

static inline void narrow(const float* from, int count, Type type, uint16_t* to, int64_t step) {
  int j = 0;
  for (; step == 1 && j + LANES <= count; j += LANES) *(Shorts*)(to + j) = narrowed(load(from + j), type);
  for (; j < count; j += LANES) {
    Floats some = Floats{};
    int left = count - j < LANES ? count - j : (int)LANES;
    for (int lane = 0; lane < left; lane++) some[lane] = from[j + lane];
    Shorts values = narrowed(some, type);
    for (int lane = 0; lane < left; lane++) to[(j + lane) * step] = values[lane];
  }
}
