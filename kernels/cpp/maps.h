// The functions of scores normaliser(scale) + scale phi(<x, loc>).
#pragma once
#include <cstdint>

#include "vector.h"

struct MapSettings {
  float floor, least;  // of the argument: below `floor` it is taken for that, and below `least` phi is NaN
};
struct Map {
  // Overwrite a row of dot products with phi.
  void (*value)(const MapSettings&, float* dots, int count);
  // Write phi to `values`, and overwrite dot products with its derivative.
  void (*derivative)(const MapSettings&, float* dots, float* values, int count);
  // The normaliser of some scales in a dimension, and its derivative if `slope` is not null.
  Doubles (*normaliser)(Doubles scale, double dimension, Doubles* slope);
};
extern const Map power_spherical;
