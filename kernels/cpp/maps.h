// The functions of scores normaliser(scale) + scale phi(<x, loc>).
#pragma once
#include <cstdint>

#include "vector.h"

struct MapSettings {
  Real floor, least;  // of the argument: below `floor` it is taken for that, and below `least` phi is NaN
  Real offset;        // of phi, where it is linear
};
struct Map {
  // Overwrite a row of dot products with phi.
  void (*value)(const MapSettings&, Real* dots, int count);
  // Write phi to `values`, and overwrite dot products with its derivative.
  void (*derivative)(const MapSettings&, Real* dots, Real* values, int count);
  // The normaliser of some scales in a dimension, and its derivative if `slope` is not null.
  Doubles (*normaliser)(Doubles scale, double dimension, Doubles* slope);
  bool is_linear;  // whether its derivative is 1
};
extern const Map linear, power_spherical, von_mises_fisher;

void linear_value(const MapSettings&, Real* dots, int count);
void linear_derivative(const MapSettings&, Real* dots, Real* values, int count);
