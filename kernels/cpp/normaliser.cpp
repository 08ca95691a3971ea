// The normalisers of scales, in double precision and rounded once.
#include "maps.h"
#include "parallel.h"
#include "special.h"

struct NormaliserCall {
  const Map* map;
  const Real* scales;
  Real *values, *slopes;  // `slopes` is null where they are not wanted
  double dimension;
  int64_t count, threads;
};

enum { SOME = 1024 };  // scales of an item

struct Some {
  const NormaliserCall& call;
  Some(const NormaliserCall& call, int64_t) : call(call) {}

  void operator()(int64_t item) {
    for (int64_t first = item * SOME; first < (item + 1) * SOME && first < call.count; first += DOUBLE_LANES) {
      int64_t left = call.count - first, lanes = left < DOUBLE_LANES ? left : (int64_t)DOUBLE_LANES;
      Doubles scale = Doubles{} + 1.0, slope;
      for (int64_t lane = 0; lane < lanes; lane++) scale[lane] = call.scales[first + lane];
      Doubles value = call.map->normaliser(scale, call.dimension, call.slopes ? &slope : nullptr);
      for (int64_t lane = 0; lane < lanes; lane++) {
        call.values[first + lane] = (Real)value[lane];
        if (call.slopes) call.slopes[first + lane] = (Real)slope[lane];
      }
    }
  }
};

// -sum_d log deviation[d] - dimension / 2 log(2 pi) of each row of deviations, or of one for all coordinates.
struct DeviationsCall {
  const Real* deviations;
  Real* values;
  int64_t count, coordinates, dimension, threads;
};
struct SomeOfDeviations {
  const DeviationsCall& call;
  SomeOfDeviations(const DeviationsCall& call, int64_t) : call(call) {}

  static double sum_of_logarithms(const Real* from, int64_t count) {
    Doubles sum = Doubles{};
    int64_t d = 0;
    for (; d + DOUBLE_LANES <= count; d += DOUBLE_LANES) {
      Doubles values;
      for (int lane = 0; lane < DOUBLE_LANES; lane++) values[lane] = from[d + lane];
      sum += values > 0.0 ? logarithm(values) : values == 0.0 ? Doubles{} - INFINITY : Doubles{} + NAN;
    }
    double rest = 0;
    for (int lane = 0; lane < DOUBLE_LANES; lane++) rest += sum[lane];
    for (; d < count; d++) rest += std::log((double)from[d]);
    return rest;
  }

  void operator()(int64_t item) {
    for (int64_t i = item * SOME; i < (item + 1) * SOME && i < call.count; i++) {
      double sum = sum_of_logarithms(call.deviations + i * call.coordinates, call.coordinates);
      if (call.coordinates == 1) sum *= call.dimension;
      call.values[i] = (Real)(-sum - 0.5 * call.dimension * std::log(2 * M_PI));
    }
  }
};

#pragma GCC visibility push(default)
extern "C" void effops_normaliser_of_deviations(const Real* deviations, Real* values, int64_t count,
                                                int64_t coordinates, int64_t dimension, int64_t threads) {
  DeviationsCall call{deviations, values, count, coordinates, dimension, threads};
  each<SomeOfDeviations>(call, (count + SOME - 1) / SOME);
}
extern "C" void effops_normaliser(const Map* map, const Real* scales, Real* values, Real* slopes, double dimension,
                                  int64_t count, int64_t threads) {
  NormaliserCall call{map, scales, values, slopes, dimension, count, threads};
  each<Some>(call, (count + SOME - 1) / SOME);
}
#pragma GCC visibility pop
