// phi(dot) = dot - 1.
//
// The normaliser is by Debye's uniform expansion at an order N = dimension / 2 - 1 + n, and by the recurrence of the
// Bessel functions from there: with R = hypot(N, k), v = (N / R)^2 and c = k / R,
//
//     W = (dimension - 1) / 2 log(R / (2 pi)) + N log(1 + N / R) - N^2 / (k + R) - sum_j P_j(v) / R^j - log p
//
// where p = (k / R)^n I_{N-n}(k) / I_N(k). Its derivative is 1 - A, A the ratio of the Bessel functions: from N down,
//
//     y = 2 m / R - (1 - A_m) c,    1 - A_{m-1} = y / (y + c)
//
// Sources: DLMF 10.41.9; Mardia & Jupp 2000, Directional Statistics, section 9.3.2.
#include "maps.h"
#include "special.h"

enum { TERMS = 7 };

// P_j(v), from its constant on.
static const double POLYNOMIALS[TERMS][TERMS + 1] = {
  {1.0 / 8, -5.0 / 24},
  {1.0 / 16, -3.0 / 8, 5.0 / 16},
  {25.0 / 384, -531.0 / 640, 221.0 / 128, -1105.0 / 1152},
  {13.0 / 128, -71.0 / 32, 531.0 / 64, -339.0 / 32, 565.0 / 128},
  {1073.0 / 5120, -50049.0 / 7168, 186821.0 / 4608, -44899.0 / 512, 82825.0 / 1024, -82825.0 / 3072},
  {103.0 / 192, -405.0 / 16, 1677.0 / 8, -5389.0 / 8, 65385.0 / 64, -11805.0 / 16, 19675.0 / 96},
  {375733.0 / 229376, -3407083.0 / 32768, 38038059.0 / 32768, -168434443.0 / 32768, 1852155413.0 / 163840,
   -432038457.0 / 32768, 256406305.0 / 32768, -1282031525.0 / 688128},
};

// sum_j P_j(v) / R^j, or its derivative by log(N / R) at a given N, which has (j + 2 i) times the coefficient of v^i.
template <bool IS_SLOPE>
static inline Doubles debye(Doubles v, Doubles inverse) {
  Doubles total = Doubles{};
  for (int j = TERMS; j > 0; j--) {
    Doubles value = Doubles{};
    for (int i = j; i >= 0; i--) value = value * v + POLYNOMIALS[j - 1][i] * (IS_SLOPE ? j + 2 * i : 1);
    total = (total + value) * inverse;
  }
  return total;
}

// sqrt(k^2 + N^2), where the squares may overflow.
static inline Doubles hypotenuse(Doubles k, double N) {
  Doubles order = Doubles{} + N, larger = k > order ? k : order, ratio = (k > order ? order : k) / larger;
  Doubles square = ratio * ratio + 1.0;
  for (int lane = 0; lane < DOUBLE_LANES; lane++) square[lane] = std::sqrt(square[lane]);
  return larger * square;
}

static Doubles normaliser(Doubles k, double dimension, Doubles* slope) {
  int n = dimension < 130 ? (130 - (int)dimension) / 3 : 0;
  double N = 0.5 * dimension - 1 + n;
  Doubles R = hypotenuse(k, N), inverse = 1.0 / R, c = k * inverse, sine = N * inverse, v = sine * sine;
  Doubles h = (debye<true>(v, inverse) + 0.5) * inverse;
  Doubles difference = sine * (1.0 + c + sine) / ((1.0 + c) * (1.0 + sine)) + c * h;  // 1 - A at the order N
  Doubles rest = c * c * (1.0 / (1.0 + sine) - h), p = Doubles{} + 1.0;
  for (int i = 0; i < n; i++) {
    Doubles twice = 2 * (N - i) * inverse, factor = rest + twice, y = twice - c * difference;
    p *= factor;
    rest = c * c / factor;
    difference = y / (y + c);
  }
  Doubles value = 0.5 * (dimension - 1) * logarithm(R * (0.5 / M_PI)) + N * logarithm_above_one(sine);
  value = value - N * sine / (1.0 + c) - debye<false>(v, inverse) - logarithm(p);
  if (slope) *slope = k >= 0.0 ? difference : Doubles{} + NAN;
  return k >= 0.0 ? value : Doubles{} + NAN;
}

const Map von_mises_fisher = {linear_value, linear_derivative, normaliser, true};
