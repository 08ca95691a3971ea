// Logarithm and exponential of vectors, of either precision.
#pragma once
#include "vector.h"

// log x of an x of at least the smallest normal number. Infinity and NaN stay what they are.
//
// x = 2^e (1 + f) with 1 + f between sqrt(1/2) and sqrt(2). The polynomial of log(1 + f) is that of Cephes' logf; log 2
// is given in two parts, the first of which times e is exact.
static inline Floats logarithm(Floats x) {
  Integers bits = (Integers)x, exponent = (bits - 0x3f3504f3) >> 23;
  Floats f = (Floats)(bits - (exponent << 23)) - 1.0f, e = __builtin_convertvector(exponent, Floats), square = f * f;
  Floats p = f * 7.0376836292E-2f - 1.1514610310E-1f;
  p = p * f + 1.1676998740E-1f;
  p = p * f - 1.2420140846E-1f;
  p = p * f + 1.4249322787E-1f;
  p = p * f - 1.6668057665E-1f;
  p = p * f + 2.0000714765E-1f;
  p = p * f - 2.4999993993E-1f;
  p = p * f + 3.3333331174E-1f;
  p = p * f * square + e * -2.12194440e-4f - square * 0.5f + f + e * 0.693359375f;
  return x < INFINITY ? p : x;
}

// exp x as p 2^n. NaN stays NaN, in p.
//
// x = n log 2 + f with f of at most log(2) / 2; the polynomial is that of Cephes' expf. n is rounded by a number so large
// that its last bit counts units.
static inline Floats exponential_parts(Floats x, Integers* n) {
  Floats rounded = x * 1.44269504088896341f + 12582912.0f;
  *n = (Integers)rounded - 0x4b400000;
  rounded = rounded - 12582912.0f;
  Floats f = x - rounded * 0.693359375f + rounded * 2.12194440e-4f;
  Floats p = f * 1.9875691500E-4f + 1.3981999507E-3f;
  p = p * f + 8.3334519073E-3f;
  p = p * f + 4.1665795894E-2f;
  p = p * f + 1.6666665459E-1f;
  p = p * f + 5.0000001201E-1f;
  return p * f * f + f + 1.0f;
}

// As that of floats, by the first terms of the series.
static inline Doubles exponential_parts(Doubles x, Longs* n) {
  Doubles rounded = x * 1.4426950408889634 + 0x1.8p52;
  *n = (Longs)rounded - 0x4338000000000000;
  rounded = rounded - 0x1.8p52;
  Doubles f = x - rounded * 0x1.62e42fefa0000p-1 - rounded * 0x1.cf79abc9e3b3ap-40;
  Doubles p = f * 1.6059043836821613e-10 + 2.08767569878681e-09;
  p = p * f + 2.505210838544172e-08;
  p = p * f + 2.755731922398589e-07;
  p = p * f + 2.7557319223985893e-06;
  p = p * f + 2.48015873015873e-05;
  p = p * f + 0.0001984126984126984;
  p = p * f + 0.001388888888888889;
  p = p * f + 0.008333333333333333;
  p = p * f + 0.041666666666666664;
  p = p * f + 0.16666666666666666;
  p = p * f + 0.5;
  return p * f * f + f + 1.0;
}

#if REAL_BYTES == 8
static const Real LEAST_POWER = -746, LEAST_NORMAL_POWER = -708.3964, MOST_POWER = 710, LEAST_NORMAL = 0x1p-1022;
static inline Doubles power_of_two(Longs n) { return (Doubles)((n + 1023) << 52); }
#else
static const Real LEAST_POWER = -105, LEAST_NORMAL_POWER = -87.33654, MOST_POWER = 88.8, LEAST_NORMAL = 0x1p-126;
static inline Floats power_of_two(Integers n) { return (Floats)((n + 127) << 23); }
#endif

// Values, or 0 where they are subnormal: arithmetic of subnormal numbers takes Intel's processors a hundred cycles.
static inline Reals normal(Reals values) {
  return values < LEAST_NORMAL && values > -LEAST_NORMAL ? Reals{} : values;
}

// exp x, which underflows gradually, and is infinite where it overflows. The power of two has two factors, since one does
// not reach from the first subnormal number to infinity.
static inline Reals exponential(Reals x) {
  x = x < LEAST_POWER ? all(LEAST_POWER) : x;
  x = x > MOST_POWER ? all(MOST_POWER) : x;
  Wholes n;
  Reals p = exponential_parts(x, &n);
  Wholes half = n >> 1;
  return p * power_of_two(half) * power_of_two(n - half);
}

// 2^LIFT exp x of a term of a softmax, whose largest is 1: 0 instead of a subnormal number, and infinite where it is more
// than 0.7 of the largest number.
template <int LIFT = 0>
static inline Reals softmax_term(Reals x) {
  const Real least = LEAST_NORMAL_POWER - LIFT * (Real)M_LN2, most = MOST_POWER - LIFT * (Real)M_LN2;
  Wholes n;
  Reals inside = x > most ? all(most) : x;
  Reals p = exponential_parts(inside < least ? all(least) : inside, &n);
  return x < least ? Reals{} : p * power_of_two(n + LIFT);
}

// log x in double precision, of an x of at least the smallest normal number. Infinity and NaN stay what they are.
//
// x = 2^e (1 + f) with 1 + f between sqrt(1/2) and sqrt(2), and log(1 + f) = 2 atanh(s), s = f / (2 + f), of which ten terms
// count. It is written as f - f^2 / 2 + s (f^2 / 2 + ...), so that the first terms round once, as fdlibm's log does.
static inline Doubles logarithm(Doubles x) {
  Longs bits = (Longs)x, exponent = (bits - 0x3fe6a09e667f3bcd) >> 52;
  Doubles f = (Doubles)(bits - (exponent << 52)) - 1.0, e = __builtin_convertvector(exponent, Doubles);
  Doubles s = f / (f + 2.0), square = s * s, half = f * f * 0.5, series = square * (2.0 / 21);
  for (int power = 19; power > 1; power -= 2) series = (series + 2.0 / power) * square;
  Doubles p = s * (half + series) + e * 0x1.cf79abc9e3b3ap-40 - half + f + e * 0x1.62e42fefa0000p-1;
  return x < INFINITY ? p : x;
}
// log(1 + y) of a y above -1, with the digits of a small y.
static inline Doubles logarithm_above_one(Doubles y) {
  Doubles sum = y + 1.0, rounded = sum - 1.0;
  return rounded == 0.0 ? y : logarithm(sum) * (y / rounded);
}
