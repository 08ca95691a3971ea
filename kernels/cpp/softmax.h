// Softmax whose scores come in parts: the maximum so far, and the sum of exp(score - maximum).
#pragma once
#include <cmath>

// What is subtracted from scores: their maximum, unless it is infinite.
static inline Real shift_of(Real most) { return std::isfinite(most) ? most : 0; }

// Raise a maximum to that of further scores. Returns the factor that makes sums of earlier terms relative to it.
static inline Real rise(Real& most, Real highest, Real total) {
  Real before = most;
  most = highest <= before ? before : highest;
  return total == 0 ? 0 : std::exp(before - shift_of(most));
}

// 1 / total, or NaN where a score is infinite, as the other weights are too.
static inline Real inverse_of_total(Real total) { return total < INFINITY ? 1 / total : NAN; }
