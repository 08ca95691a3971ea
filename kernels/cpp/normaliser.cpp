// The normalisers of scales, in double precision and rounded once.
#include "maps.h"
#include "parallel.h"

struct NormaliserCall {
  const Map* map;
  const float* scales;
  float *values, *slopes;  // `slopes` is null where they are not wanted
  double dimension;
  int64_t count, threads;
};

enum { SOME = 1024 };  // scales of an item

struct Some {
  const NormaliserCall& call;
  Some(const NormaliserCall& call, int64_t) : call(call) {}

  void operator()(int64_t item) {
    for (int64_t first = item * SOME; first < (item + 1) * SOME && first < call.count; first += DOUBLE_LANES) {
      int64_t left = call.count - first, lanes = left < DOUBLE_LANES ? left : DOUBLE_LANES;
      Doubles scale = Doubles{} + 1.0, slope;
      for (int64_t lane = 0; lane < lanes; lane++) scale[lane] = call.scales[first + lane];
      Doubles value = call.map->normaliser(scale, call.dimension, call.slopes ? &slope : nullptr);
      for (int64_t lane = 0; lane < lanes; lane++) {
        call.values[first + lane] = (float)value[lane];
        if (call.slopes) call.slopes[first + lane] = (float)slope[lane];
      }
    }
  }
};

#pragma GCC visibility push(default)
extern "C" void effops_normaliser(const Map* map, const float* scales, float* values, float* slopes, double dimension,
                                  int64_t count, int64_t threads) {
  NormaliserCall call{map, scales, values, slopes, dimension, count, threads};
  each<Some>(call, (count + SOME - 1) / SOME);
}
#pragma GCC visibility pop
