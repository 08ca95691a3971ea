// Pairs of rows of two operands: a call, and what a thread keeps of a block of them.
#pragma once
#include "distances.h"
#include "maps.h"
#include "workspace.h"

// An operand and its strides, along: batch, others (along which points do not vary), points or components, coordinates.
// An operand of pairs has points and components last. A gradient that is not wanted has no address.
struct Operand {
  void* at;
  int64_t strides[4];
  Type type;

  Matrix matrix(int64_t batch, int64_t other) const {
    return {(char*)at + (batch * strides[0] + other * strides[1]) * bytes_of(type), strides[2], strides[3], type};
  }
};

// Along what scales or weights vary besides batch and others, and so of what their gradients are sums.
enum Along : int64_t { COMPONENTS_ALONE, POINTS_ALONE, BOTH };

// With deviations a pair has a squared distance in the place of its dot product: the sum of ((left - right) / deviation)^2
// over coordinates. They have components and coordinates last.
struct PairsCall {
  int64_t batch, others, points, components, depth, threads;
  int64_t is_reduced, scales_along, weights_along;
  Operand left, right, deviations, weights, scale, normaliser, slope, most, rest, dout;
  Operand dleft, dright, ddeviations, dweights, dscale;
  Real* workspace;
  const Map* map;
  double floor, least, offset;  // as of MapSettings
};

// What is added to phi of the pairs of a point, and what phi is multiplied with; and the derivative of the former.
struct Terms {
  const Real *scale, *constant, *slope;
};

// What a thread keeps of a block: its factors, as they are and in panels, its scores, and the product of a gradient.
struct Worker : Workspace<4, 1> {
  const PairsCall& call;
  const MapSettings settings;
  Real *left, *right, *panels, *scores, *product;
  Ahead ahead;
  Copied copied_left, copied_right, copied_deviations;
  alignas(64) Real scale[COLUMNS], constant[COLUMNS], slope[COLUMNS];
  alignas(64) Real squares[COLUMNS];  // of inverse deviations, where each component has one
  Squares form = OF_QUOTIENTS;         // of the distances of the block
  bool is_moderate = true, all_moderate = true;  // whether deviations are, of a part of the coordinates and of all
  alignas(64) Real own_scale[COLUMNS], own_constant[COLUMNS], own_slope[COLUMNS];

  Worker(const PairsCall& call, int64_t thread) : Workspace(call.workspace, thread), call(call), settings{(Real)call.floor, (Real)call.least, (Real)call.offset} {
    left = block(0), right = block(1), scores = block(2), product = block(3), panels = panels_at(0);
  }

  bool has_distances() const { return call.deviations.at; }
  bool varies_along_components_alone() const {
    return call.scales_along == COMPONENTS_ALONE && call.weights_along == COMPONENTS_ALONE;
  }
  int64_t next_of(int64_t item) const { return item + call.threads; }  // if threads take turns
  int deepest() const { return has_distances() ? (int)HALF : (int)DEPTH; }

  void copy_left(Matrix from, int rows, int depth) {
    if (copied_left.becomes(from, rows, depth)) copy_block(from, rows, depth, left);
  }
  void copy_right(Matrix from, Matrix deviations, int rows, int depth) {
    bool is_read = call.dout.at;  // as backward multiplies with rows too
    if (copied_right.becomes(from, rows, depth)) transpose_matrix(from, rows, depth, is_read, right, panels);
    if (!has_distances() || form == PLAIN || !copied_deviations.becomes(deviations, rows, depth)) return;
    is_moderate = invert_block(deviations, rows, depth, right + HALF);
    transpose_block(right + HALF, rows, depth, panels + HALF_PANELS);
  }

  // Write the dot products or squared distances of a block to `scores`. Where each component has one deviation, distances
  // are PLAIN sums of squares, unless these overflow.
  void pair_up(Matrix points, int rows, Matrix components, Matrix deviations, int columns) {
    if (call.depth == 0) memset(scores, 0, BLOCK * sizeof(Real));
    form = has_distances() && read_squares(deviations, columns) ? PLAIN : OF_QUOTIENTS;
    add_up(points, rows, components, deviations, columns);
    if (form == PLAIN && !scale_distances(rows, columns)) {
      form = OF_QUOTIENTS;
      add_up(points, rows, components, deviations, columns);
    }
    for (int i = 0; i < rows; i++)  // an infinite point has NaN there
      for (int j = columns; j < in_lanes(columns); j++) scores[i * STRIDE + j] = 0;
  }

  // Go to a block of which only gradients of points are wanted, without its distances. Returns whether these are not
  // needed, as the factors are PLAIN and finite.
  bool skip_distances(Matrix points, int rows, Matrix components, Matrix deviations, int columns) {
    if (call.is_reduced || call.depth > HALF || !read_squares(deviations, columns)) return false;
    form = PLAIN;
    copy_left(points, rows, (int)call.depth);
    copy_right(components, deviations, columns, (int)call.depth);
    return is_small(left, rows, (int)call.depth) && is_small(right, columns, (int)call.depth);
  }

  void add_up(Matrix points, int rows, Matrix components, Matrix deviations, int columns) {
    all_moderate = true;
    for (int64_t k = 0; k < call.depth; k += deepest()) {
      int depth = at_most(call.depth - k, deepest());
      copy_left(points.from(0, k), rows, depth);
      copy_right(components.from(0, k), deviations.from(0, k), columns, depth);
      all_moderate &= is_moderate;
      Left own = rows_of(left, rows, depth);
      if (!has_distances()) multiply(own, {panels, WIDE * depth, WIDE}, rows, columns, depth, k > 0, scores, &ahead);
      else (form == PLAIN ? measure<PLAIN> : measure<OF_QUOTIENTS>)(left, panels, panels + HALF_PANELS, rows, columns, depth,
                                                                     k > 0, scores);
    }
  }

  // Read the inverse squares of single deviations. Returns whether there are such, and all MODERATE.
  bool read_squares(Matrix deviations, int columns) {
    if (deviations.column != 0) return false;
    memset(squares, 0, sizeof squares);
    for (int j = 0; j < columns; j++) {
      Real deviation = deviations(j, 0);
      if (!(deviation > 1 / MODERATE && deviation < MODERATE)) return false;
      squares[j] = 1 / (deviation * deviation);
    }
    return true;
  }

  // The PLAIN distances of a point and some components, from sums of squares; 0 where there is no component.
  Reals distance_of(Reals sums, int column) const {
    Reals square = load(squares + column);
    return square > 0.0f ? sums * square : Reals{};
  }

  // Multiply sums of squares with those of inverse deviations. Returns whether all distances are finite.
  bool scale_distances(int rows, int columns) {
    Reals oddity = Reals{};
    for (int i = 0; i < rows; i++)
      for (int j = 0; j < columns; j += LANES) {
        Real* at = scores + i * STRIDE + j;
        Reals distance = distance_of(load(at), j);
        store(at, distance);
        oddity += distance * 0.0f;
      }
    return sum_of(oddity) == 0;
  }

  // Read the terms that are constant along the points of a block. Components that are not there have a weight of 0.
  void read_constants(int64_t batch, int64_t other, int64_t first, int columns) {
    read(batch, other, 0, first, columns, call.scales_along == COMPONENTS_ALONE,
         call.weights.at && call.weights_along == COMPONENTS_ALONE, scale, constant, slope);
    for (int j = columns; j < COLUMNS; j++) scale[j] = slope[j] = 0, constant[j] = -INFINITY;
    if (varies_along_components_alone()) return;
    memcpy(own_scale, scale, sizeof scale);
    memcpy(own_constant, constant, sizeof constant);
    memcpy(own_slope, slope, sizeof slope);
  }

  Terms terms(int64_t batch, int64_t other, int64_t point, int64_t first, int columns) {
    if (varies_along_components_alone()) return {scale, constant, slope};
    bool reads_scales = call.scales_along != COMPONENTS_ALONE, reads_weights = call.weights_along != COMPONENTS_ALONE;
    memcpy(own_constant, constant, columns * sizeof(Real));
    read(batch, other, point, first, columns, reads_scales, reads_weights, own_scale, own_constant, own_slope, true);
    return {own_scale, own_constant, own_slope};
  }

 private:
  // Read scales and what follows from them, and weights, which are parts of constants.
  void read(int64_t batch, int64_t other, int64_t point, int64_t first, int columns, bool reads_scales,
            bool reads_weights, Real* scales, Real* constants, Real* slopes, bool adds = false) {
    Matrix weights = call.weights.matrix(batch, other), all_scales = call.scale.matrix(batch, other);
    Matrix normalisers = call.normaliser.matrix(batch, other), all_slopes = call.slope.matrix(batch, other);
    for (int j = 0; j < columns; j++) {
      Real sum = adds ? constants[j] : 0;
      if (reads_scales) {
        scales[j] = all_scales(point, first + j);
        slopes[j] = call.slope.at ? all_slopes(point, first + j) : 0;
        if (call.normaliser.at) sum += normalisers(point, first + j);
      }
      constants[j] = reads_weights ? sum + weights(point, first + j) : sum;
    }
  }
};
