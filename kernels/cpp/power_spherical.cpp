// phi(dot) = log t, t = (1 + dot) / 2. A t below the floor, as near the antipode, has no derivative.
//
// normaliser(s) = lgamma(s + 2 b) - lgamma(s + b) - b log(4 pi), b = (dimension - 1) / 2, without cancellation: with
// n = max(0, ceil(12 - b)), A = s + b + n, B = A + b and Stirling's remainder delta, the difference is
//
//     (A - 1/2) log(1 + b / A) + b (log B - 1) + delta(B) - delta(A) - log prod_{k < n} (1 + b / (s + b + k))
#include "maps.h"
#include "special.h"

static inline Reals raised(const MapSettings& settings, Reals t) {
  Reals high = t < settings.floor ? all(settings.floor) : t;
  return t < settings.least ? all(NAN) : high;
}

static void value(const MapSettings& settings, Real* dots, int count) {
  for (int j = 0; j < count; j += LANES) store(dots + j, logarithm(raised(settings, load(dots + j) * 0.5f + 0.5f)));
}

static void derivative(const MapSettings& settings, Real* dots, Real* values, int count) {
  for (int j = 0; j < count; j += LANES) {
    Reals t = load(dots + j) * 0.5f + 0.5f, high = raised(settings, t);
    store(values + j, logarithm(high));
    store(dots + j, t < settings.floor ? Reals{} : 0.5f / high);
  }
}

static inline Doubles remainder_of(Doubles z) {
  Doubles y = 1.0 / z, square = y * y;
  return y * (1.0 / 12 - square * (1.0 / 360 - square * (1.0 / 1260 - square * (1.0 / 1680))));
}
static inline Doubles remainder_slope(Doubles z) {
  Doubles square = 1.0 / (z * z);
  return -square * (1.0 / 12 - square * (1.0 / 120 - square * (1.0 / 252 - square * (1.0 / 240))));
}

static Doubles normaliser(Doubles scale, double dimension, Doubles* slope) {
  double b = 0.5 * (dimension - 1), shift = std::fmax(0, std::ceil(12 - b));
  Doubles lower = scale + (b + shift), upper = lower + b, ratio = logarithm_above_one(b / lower);
  Doubles product = Doubles{} + 1.0, sum = Doubles{};
  for (double k = 0; k < shift; k++) {
    Doubles step = scale + (b + k);
    product *= 1.0 + b / step;
    sum += b / step / (step + b);
  }
  Doubles value = (lower - 0.5) * ratio + b * (logarithm(upper) - 1.0) + remainder_of(upper) - remainder_of(lower);
  value = value - logarithm(product) - b * std::log(4 * M_PI);
  Doubles derivative = ratio + 0.5 * b / lower / upper + remainder_slope(upper) - remainder_slope(lower) + sum;
  if (slope) *slope = scale > -b ? derivative : Doubles{} + NAN;
  return scale > -b ? value : Doubles{} + NAN;
}

const Map power_spherical = {value, derivative, normaliser, false};
