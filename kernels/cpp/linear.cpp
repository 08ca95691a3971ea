// phi(t) = offset + t, of dot products and squared distances.
#include "maps.h"

void linear_value(const MapSettings& settings, Real* dots, int count) {
  if (settings.offset == 0) return;
  for (int j = 0; j < count; j += LANES) store(dots + j, load(dots + j) + settings.offset);
}

void linear_derivative(const MapSettings& settings, Real* dots, Real* values, int count) {
  for (int j = 0; j < count; j += LANES) {
    store(values + j, load(dots + j) + settings.offset);
    store(dots + j, all(1));
  }
}

const Map linear = {linear_value, linear_derivative, nullptr, true};
