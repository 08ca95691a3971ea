// The log density of a mixture: the logsumexp of the scores of every pair of a point and a component, and its gradients.
//
//     score[b,c,m,n] = weights[b,c,m,n] + normaliser[b,c,n] + scale[b,c,n] phi(<points[b,m], components[b,c,n]>)
//     most[b,c,m] = max_n score,    rest[b,c,m] = log sum_n exp(score - most)
//
//     share = exp(score - most - rest),    G = dout share
//     dpoints = sum_cn G scale phi' components,    dcomponents = sum_m G scale phi' points
//     dweights = G, or sum_m G,    dscale = sum_m G (phi + normaliser')
//
// Where `rest` has no address, forward writes most + rest to `most`, and no statistics. In backward `most` and `rest` are
// given. A block has up to ROWS points and COLUMNS components. Its scores are in the workspace, and no other pair is.
#include "maps.h"
#include "parallel.h"
#include "product.h"
#include "special.h"

// An operand and its strides, along: batch, others (along which points do not vary), points or components, coordinates.
// An operand of pairs has points and components last. A gradient that is not wanted has no address.
struct Operand {
  float* at;
  int64_t strides[4];

  Matrix matrix(int64_t batch, int64_t other) const {
    return {at + batch * strides[0] + other * strides[1], strides[2], strides[3]};
  }
};
struct MixtureCall {
  int64_t batch, others, points, components, depth, threads;
  int64_t weighs_points;  // whether each point has weights of its own
  Operand left, right, weights, scale, normaliser, slope, most, rest, dout;
  Operand dleft, dright, dweights, dscale;
  float* workspace;
  const Map* map;
  MapSettings settings;
};

enum { WORKSPACE = 4 * BLOCK + PANELS };  // floats of a thread
enum { OWNERS = 16 };                     // batch entries from which on each has one owner in backward

// Which block of a matrix the workspace holds.
struct Copied {
  const float* at = nullptr;
  int rows = 0, columns = 0;

  bool becomes(Matrix from, int more_rows, int more_columns) {
    bool was = at == from.at && rows == more_rows && columns == more_columns;
    at = from.at, rows = more_rows, columns = more_columns;
    return !was;
  }
};

// What a thread keeps of a block: its factors, as they are and in panels, its scores, and the product of a gradient.
struct Worker {
  const MixtureCall& call;
  float *left, *right, *panels, *scores, *product;
  Copied copied_left, copied_right;
  alignas(64) float scale[COLUMNS], constant[COLUMNS], slope[COLUMNS], phi[COLUMNS], own_bias[COLUMNS];

  Worker(const MixtureCall& call, int64_t thread) : call(call) {
    left = call.workspace + thread * WORKSPACE;
    right = left + BLOCK;
    scores = right + BLOCK;
    product = scores + BLOCK;
    panels = product + BLOCK;
  }

  void copy_left(Matrix from, int rows, int depth) {
    if (copied_left.becomes(from, rows, depth)) copy_block(from, rows, depth, left);
  }
  void copy_right(Matrix from, int rows, int depth) {
    if (!copied_right.becomes(from, rows, depth)) return;
    copy_block(from, rows, depth, right);
    transpose_block(right, rows, depth, panels);
  }

  void multiply_block(Matrix points, int rows, Matrix components, int columns) {
    for (int64_t k = 0; k < call.depth; k += DEPTH) {
      int depth = at_most(call.depth - k, DEPTH);
      copy_left(points.from(0, k), rows, depth);
      copy_right(components.from(0, k), columns, depth);
      multiply(rows_of(left), {panels, WIDE * depth, WIDE}, rows, columns, depth, k > 0, scores);
    }
  }

  // What is constant along the points of a block. Components that are not there have a weight of 0.
  void read_constants(int64_t batch, int64_t other, int64_t first, int columns) {
    Matrix scales = call.scale.matrix(batch, other), normalisers = call.normaliser.matrix(batch, other);
    Matrix slopes = call.slope.matrix(batch, other), weights = call.weights.matrix(batch, other);
    for (int j = 0; j < COLUMNS; j++) {
      bool is_there = j < columns;
      scale[j] = is_there ? scales(0, first + j) : 0;
      constant[j] = is_there ? normalisers(0, first + j) + (call.weighs_points ? 0 : weights(0, first + j)) : -INFINITY;
      slope[j] = is_there && call.slope.at ? slopes(0, first + j) : 0;
    }
  }

  // What is added to the scores of a point.
  const float* bias(int64_t batch, int64_t other, int64_t point, int64_t first, int columns) {
    if (!call.weighs_points) return constant;
    Matrix weights = call.weights.matrix(batch, other);
    for (int j = 0; j < columns; j++) own_bias[j] = constant[j] + weights(point, first + j);
    for (int j = columns; j < COLUMNS; j++) own_bias[j] = constant[j];
    return own_bias;
  }
};

static inline int in_lanes(int count) { return (count + LANES - 1) / LANES * LANES; }

struct Forward : Worker {
  using Worker::Worker;

  void operator()(int64_t item) {
    int64_t blocks = (call.points + ROWS - 1) / ROWS, first = item % blocks * ROWS, outer = item / blocks;
    int64_t batch = outer / call.others, other = outer % call.others;
    int rows = at_most(call.points - first, ROWS);
    Matrix points = call.left.matrix(batch, 0).from(first, 0), components = call.right.matrix(batch, other);
    float most[ROWS], sum[ROWS];
    for (int i = 0; i < rows; i++) most[i] = -INFINITY, sum[i] = 0;
    for (int64_t n = 0; n < call.components; n += COLUMNS) {
      int columns = at_most(call.components - n, COLUMNS);
      multiply_block(points, rows, components.from(n, 0), columns);
      read_constants(batch, other, n, columns);
      for (int i = 0; i < rows; i++)
        absorb(scores + i * STRIDE, in_lanes(columns), bias(batch, other, first + i, n, columns), most[i], sum[i]);
    }
    Matrix mosts = call.most.matrix(batch, other), rests = call.rest.matrix(batch, other);
    for (int i = 0; i < rows; i++) {
      float rest = std::log(sum[i]);
      if (call.rest.at) mosts(first + i, 0) = most[i], rests(first + i, 0) = rest;
      else mosts(first + i, 0) = most[i] + rest;
    }
  }

  // Add a row of dot products to the maximum of its scores, and to the sum of exp(score - maximum).
  void absorb(float* row, int count, const float* bias, float& most, float& sum) {
    call.map->value(call.settings, row, count);
    Floats highest = all(-INFINITY), added = Floats{};
    for (int j = 0; j < count; j += LANES) {
      Floats score = load(row + j) * load(scale + j) + load(bias + j);
      store(row + j, score);
      highest = score <= highest ? highest : score;  // a NaN stays
    }
    float before = most, own = maximum_of(highest);
    most = own <= before ? before : own;
    float shift = std::isfinite(most) ? most : 0;
    for (int j = 0; j < count; j += LANES) added += exponential(load(row + j) - shift);
    sum = (sum == 0 ? 0 : sum * std::exp(before - shift)) + sum_of(added);
  }
};

struct Backward : Worker {
  alignas(64) float dscale[COLUMNS], dweights[COLUMNS];
  using Worker::Worker;

  // The gradients of some points and components by all that they meet in a batch entry.
  void pull_back(int64_t batch, int64_t first_point, int64_t end_point, int64_t other, int64_t end_other,
                 int64_t first, int64_t end, bool wants_left, bool wants_right) {
    Matrix points = call.left.matrix(batch, 0), dpoints = call.dleft.matrix(batch, 0);
    for (bool adds_left = false; other < end_other; other++) {
      Matrix components = call.right.matrix(batch, other), dcomponents = call.dright.matrix(batch, other);
      for (int64_t n = first; n < end; n += COLUMNS, adds_left = true) {
        int columns = at_most(end - n, COLUMNS);
        read_constants(batch, other, n, columns);
        for (int j = 0; j < COLUMNS; j++) dscale[j] = dweights[j] = 0;
        for (int64_t m = first_point; m < end_point; m += ROWS) {
          int rows = at_most(end_point - m, ROWS);
          multiply_block(points.from(m, 0), rows, components.from(n, 0), columns);
          for (int i = 0; i < rows; i++) weigh(scores + i * STRIDE, columns, batch, other, m + i, n);
          for (int64_t k = 0; k < call.depth; k += DEPTH) {
            int depth = at_most(call.depth - k, DEPTH);
            if (wants_left && call.dleft.at) {
              copy_right(components.from(n, k), columns, depth);
              multiply(rows_of(scores), panels_of(right), rows, depth, columns, false, product);
              put_block(product, rows, depth, adds_left, dpoints.from(m, k));
            }
            if (wants_right && call.dright.at) {
              copy_left(points.from(m, k), rows, depth);
              multiply(columns_of(scores), panels_of(left), columns, depth, rows, false, product);
              put_block(product, columns, depth, m > first_point, dcomponents.from(n, k));
            }
          }
        }
        if (wants_right) write_constants(batch, other, n, columns);
      }
    }
  }

  // Overwrite the dot products of a point with the gradients of them.
  void weigh(float* row, int columns, int64_t batch, int64_t other, int64_t point, int64_t first) {
    int count = in_lanes(columns);
    const float* added = bias(batch, other, point, first, columns);
    float most = call.most.matrix(batch, other)(point, 0), rest = call.rest.matrix(batch, other)(point, 0);
    float dout = call.dout.matrix(batch, other)(point, 0);
    // Where the sum is 0, shares are 0 or unknown. An unknown share of a gradient of 0 is 0.
    bool has_no_share = rest == -INFINITY && (dout == 0 || lacks_weight(batch, other, point));
    float shift = has_no_share ? 0 : most, factor = (has_no_share ? 0 : std::exp(-rest)) * dout;
    call.map->derivative(call.settings, row, phi, count);
    for (int j = 0; j < count; j += LANES) {
      Floats value = load(phi + j), own_scale = load(scale + j);
      Floats pull = exponential(value * own_scale + load(added + j) - shift) * factor;
      store(phi + j, pull);
      store(dweights + j, load(dweights + j) + pull);
      store(dscale + j, load(dscale + j) + pull * (value + load(slope + j)));
      store(row + j, pull * own_scale * load(row + j));
    }
    if (call.weighs_points && call.dweights.at)
      for (int j = 0; j < columns; j++) call.dweights.matrix(batch, other)(point, first + j) = phi[j];
  }

  bool lacks_weight(int64_t batch, int64_t other, int64_t point) {
    Matrix weights = call.weights.matrix(batch, other);
    for (int64_t n = 0; n < call.components; n++)
      if (weights(point, n) != -INFINITY) return false;
    return true;
  }

  void write_constants(int64_t batch, int64_t other, int64_t first, int columns) {
    Matrix scales = call.dscale.matrix(batch, other), weights = call.dweights.matrix(batch, other);
    for (int j = 0; j < columns; j++) {
      if (call.dscale.at) scales(0, first + j) = dscale[j];
      if (call.dweights.at && !call.weighs_points) weights(0, first + j) = dweights[j];
    }
  }
};

// All gradients of a batch entry.
struct OfBatch : Backward {
  using Backward::Backward;
  void operator()(int64_t batch) { pull_back(batch, 0, call.points, 0, call.others, 0, call.components, true, true); }
};
// The gradients of a block of points.
struct OfPoints : Backward {
  using Backward::Backward;
  void operator()(int64_t item) {
    int64_t blocks = (call.points + ROWS - 1) / ROWS, first = item % blocks * ROWS;
    int64_t end = first + at_most(call.points - first, ROWS);
    pull_back(item / blocks, first, end, 0, call.others, 0, call.components, true, false);
  }
};
// The gradients of a block of components, and of what belongs to them.
struct OfComponents : Backward {
  using Backward::Backward;
  void operator()(int64_t item) {
    int64_t blocks = (call.components + COLUMNS - 1) / COLUMNS, first = item % blocks * COLUMNS, outer = item / blocks;
    int64_t other = outer % call.others, end = first + at_most(call.components - first, COLUMNS);
    pull_back(outer / call.others, 0, call.points, other, other + 1, first, end, false, true);
  }
};

extern "C" {
#pragma GCC visibility push(default)
int64_t effops_mixture_call_bytes() { return sizeof(MixtureCall); }
int64_t effops_mixture_workspace() { return WORKSPACE; }
const Map* effops_power_spherical() { return &power_spherical; }

int64_t effops_mixture_items(const MixtureCall* call, int64_t is_backward) {
  int64_t of_points = call->batch * ((call->points + ROWS - 1) / ROWS);
  int64_t of_components = call->batch * call->others * ((call->components + COLUMNS - 1) / COLUMNS);
  if (!is_backward) return of_points * call->others;
  if (call->batch >= OWNERS) return call->batch;
  return of_points > of_components ? of_points : of_components;
}
void effops_mixture_forward(const MixtureCall* call) { each<Forward>(*call, effops_mixture_items(call, false)); }

void effops_mixture_backward(const MixtureCall* call) {
  if (call->batch >= OWNERS) return each<OfBatch>(*call, call->batch);
  if (call->dleft.at) each<OfPoints>(*call, call->batch * ((call->points + ROWS - 1) / ROWS));
  if (call->dright.at || call->dscale.at || call->dweights.at)
    each<OfComponents>(*call, call->batch * call->others * ((call->components + COLUMNS - 1) / COLUMNS));
}
#pragma GCC visibility pop
}
