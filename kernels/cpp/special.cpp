// The special functions by themselves, for tests: of as many floats as fill vectors, in place.
#include "special.h"

#pragma GCC visibility push(default)
extern "C" void effops_logarithm(Real* values, int64_t count) {
  for (int64_t j = 0; j < count; j += LANES) store(values + j, logarithm(load(values + j)));
}
extern "C" void effops_exponential(Real* values, int64_t count) {
  for (int64_t j = 0; j < count; j += LANES) store(values + j, exponential(load(values + j)));
}
#pragma GCC visibility pop
