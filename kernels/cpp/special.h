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

// exp x, which underflows gradually, and is infinite above 2^128. NaN stays NaN.
//
// x = n log 2 + f with f of at most log(2) / 2; the polynomial is that of Cephes' expf. n is rounded by a number so large
// that its last bit counts units. The power of two has two factors, since one does not reach from the first subnormal
// number to infinity.
static inline Floats exponential(Floats x) {
  x = x < -105.0f ? Floats{} - 105.0f : x;
  x = x > 90.0f ? Floats{} + 90.0f : x;
  Floats rounded = x * 1.44269504088896341f + 12582912.0f;
  Integers n = (Integers)rounded - 0x4b400000, half = n >> 1;
  rounded = rounded - 12582912.0f;
  Floats f = x - rounded * 0.693359375f + rounded * 2.12194440e-4f;
  Floats p = f * 1.9875691500E-4f + 1.3981999507E-3f;
  p = p * f + 8.3334519073E-3f;
  p = p * f + 4.1665795894E-2f;
  p = p * f + 1.6666665459E-1f;
  p = p * f + 5.0000001201E-1f;
  p = p * f * f + f + 1.0f;
  return p * (Floats)((half + 127) << 23) * (Floats)((n - half + 127) << 23);
}

// As that of floats, by the first terms of the series.
static inline Doubles exponential(Doubles x) {
  x = x < -746.0 ? Doubles{} - 746.0 : x;
  x = x > 710.0 ? Doubles{} + 710.0 : x;
  Doubles rounded = x * 1.4426950408889634 + 0x1.8p52;
  Longs n = (Longs)rounded - 0x4338000000000000, half = n >> 1;
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
  p = p * f * f + f + 1.0;
  return p * (Doubles)((half + 1023) << 52) * (Doubles)((n - half + 1023) << 52);
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
