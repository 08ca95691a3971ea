// The scores of every pair of a point and a component, or their logsumexp over components; and the gradients.
//
//     score[b,c,m,n] = weights[b,c,m,n] + normaliser[b,c,m,n] + scale[b,c,m,n] phi(<points[b,m], components[b,c,n]>)
//     most[b,c,m] = max_n score,    rest[b,c,m] = log sum_n exp(score - most)
//
//     G = dout, or with a reduction dout share,    share = exp(score - most - rest)
//     dpoints = sum_cn G scale phi' components,    dcomponents = sum_m G scale phi' points
//     dweights = G,    dscale = G (phi + normaliser'),    each summed over what it does not vary along
//
// Forward writes the scores to `most`, or the statistics of a reduction. Where `rest` has no address it is most + rest.
// In backward `most` and `rest` are given. A block has up to ROWS points and COLUMNS components. Its scores are in the
// workspace, and no other pair is.
#include "pairs.h"

#include "parallel.h"
#include "softmax.h"
#include "special.h"

namespace {
enum { OWNERS = 16 };  // batch entries from which on each has one owner in backward

struct Forward : Worker {
  using Worker::Worker;

  // A block of points of a batch entry and of one of the others.
  struct Place {
    int64_t batch, other, first;
  };
  Place place_of(int64_t item) const {
    int64_t blocks = blocks_of(call.points, ROWS), outer = item / blocks;
    return {outer / call.others, outer % call.others, item % blocks * ROWS};
  }
  Matrix points_of(Place place) const { return call.left.matrix(place.batch, 0).from(place.first, 0); }

  void operator()(int64_t item) {
    Place place = place_of(item), next = place_of(next_of(item));
    int64_t batch = place.batch, other = place.other, first = place.first;
    int rows = at_most(call.points - first, ROWS);
    ahead.clear();
    if (!has_distances() && next.batch < call.batch) ahead.add(points_of(next), call.points - next.first, call.depth);
    Matrix points = points_of(place), components = call.right.matrix(batch, other);
    Matrix deviations = call.deviations.matrix(batch, other), mosts = call.most.matrix(batch, other);
    bool is_direct = call.map->is_linear && !call.is_reduced && varies_along_components_alone();
    is_direct = is_direct && call.depth > 0 && call.depth <= deepest() && mosts.has_plain_rows();
    Real most[ROWS], sum[ROWS];
    for (int i = 0; i < rows; i++) most[i] = -INFINITY, sum[i] = 0;
    for (int64_t n = 0; n < call.components; n += COLUMNS) {
      int columns = at_most(call.components - n, COLUMNS);
      read_constants(batch, other, n, columns);
      Matrix own_components = components.from(n, 0), own_deviations = deviations.from(n, 0), own = mosts.from(first, n);
      if (is_direct) {
        write_scores(points, rows, own_components, own_deviations, columns, own);
        continue;
      }
      pair_up(points, rows, own_components, own_deviations, columns);
      bool is_plain = !call.is_reduced && mosts.has_plain_rows() && columns % LANES == 0;
      for (int i = 0; i < rows; i++) {
        Real* row = scores + i * STRIDE;
        Matrix result = own.from(i, 0);
        Terms given = terms(batch, other, first + i, n, columns);
        call.map->value(settings, row, in_lanes(columns));
        Real* to = is_plain ? &result(0, 0) : row;
        for (int j = 0; j < columns; j += LANES)
          store(to + j, load(row + j) * load(given.scale + j) + load(given.constant + j));
        if (call.is_reduced) {
          absorb(row, in_lanes(columns), most[i], sum[i]);
          continue;
        }
        if (!is_plain) put_block(row, 1, columns, false, result);
      }
    }
    if (!call.is_reduced) return;
    Matrix rests = call.rest.matrix(batch, other);
    for (int i = 0; i < rows; i++) {
      Real rest = std::log(sum[i]);
      if (call.rest.at) mosts(first + i, 0) = most[i], rests(first + i, 0) = rest;
      else mosts.set(first + i, 0, most[i] + rest);
    }
  }

  // Write linear scores of a block to where they are wanted.
  void write_scores(Matrix points, int rows, Matrix components, Matrix deviations, int columns, Matrix to) {
    int depth = (int)call.depth;
    form = has_distances() && read_squares(deviations, columns) ? PLAIN : OF_QUOTIENTS;
    copy_left(points, rows, depth);
    Left own = rows_of(left, rows, depth);  // with rows of 0 behind them, whose distances count too
    copy_right(components, deviations, columns, depth);
    auto score = [this](int j, Reals value) { return (value + settings.offset) * load(scale + j) + load(constant + j); };
    if (!has_distances())
      return write_product(own, {panels, WIDE * depth, WIDE}, rows, columns, depth, score, false, to, &ahead);
    Reals oddity = Reals{};  // 0 if all distances are finite
    auto score_of_sum = [&](int j, Reals sum) {
      Reals distance = distance_of(sum, j);
      oddity += distance * 0.0f;
      return score(j, distance);
    };
    const Real* inverses = panels + HALF_PANELS;
    if (form == PLAIN) write_distances<PLAIN>(left, panels, inverses, rows, columns, depth, score_of_sum, to);
    if (form == PLAIN && sum_of(oddity) == 0) return;
    form = OF_QUOTIENTS;
    copy_right(components, deviations, columns, depth);
    write_distances<OF_QUOTIENTS>(left, panels, inverses, rows, columns, depth, score, to);
  }

  // Add a row of scores to their maximum, and to the sum of exp(score - maximum).
  void absorb(const Real* row, int count, Real& most, Real& sum) {
    Reals highest = all(-INFINITY), added = Reals{};
    for (int j = 0; j < count; j += LANES) {
      Reals score = load(row + j);
      highest = score <= highest ? highest : score;
    }
    Real factor = rise(most, maximum_of(highest), sum), shift = shift_of(most);
    for (int j = 0; j < count; j += LANES) added += softmax_term(load(row + j) - shift);
    sum = sum * factor + sum_of(added);
  }
};

// Where there is a reduction, gradients are computed 2^LIFT times as large, since most shares may be so small that they, or
// products of them, would be subnormal, which takes Intel's processors a hundred cycles an operation. A call with a lifted
// number that is not finite, as it overflowed or is NaN, is computed again without.
struct BackwardCall : PairsCall {
  enum { LIFT = 8 * REAL_BYTES };
  const bool is_lifted;
  const Real lowered = is_lifted ? std::ldexp((Real)1, -LIFT) : 1;
  mutable std::atomic<bool> has_odd{false};  // whether some number is not finite

  BackwardCall(const PairsCall& call, bool is_lifted) : PairsCall(call), is_lifted(is_lifted) {}
};

// A part of a batch entry: some points, some of the others, and some components. There is none behind the last entry.
struct Part {
  int64_t batch, first_point, end_point, first_other, end_other, first, end;
};

struct Backward : Worker {
  const BackwardCall& call;
  alignas(64) Real phi[COLUMNS], pulls[COLUMNS], dscale[COLUMNS], dweights[COLUMNS];
  bool has_pairs;  // whether products or distances of the block are computed; else scores are linear, and none is needed
  double all_dscale[COLUMNS], all_dweights[COLUMNS];  // sums of these over the blocks of points

  Backward(const BackwardCall& call, int64_t thread) : Worker(call, thread), call(call) {}

  // The gradients of points and of what varies with them, or of components and of what varies with these, or all. `next` is
  // the part that comes next.
  void pull_back(Part part, Part next, bool of_points, bool of_components) {
    bool wants_left = of_points && call.dleft.at, wants_right = of_components && (call.dright.at || call.ddeviations.at);
    bool needs_pairs = !call.map->is_linear || call.is_reduced || call.dscale.at || has_distances();
    Matrix points = call.left.matrix(part.batch, 0), dpoints = call.dleft.matrix(part.batch, 0);
    bool adds_left = false;
    for (int64_t other = part.first_other; other < part.end_other; other++) {
      Matrix components = call.right.matrix(part.batch, other), dcomponents = call.dright.matrix(part.batch, other);
      Matrix deviations = call.deviations.matrix(part.batch, other);
      for (int64_t n = part.first; n < part.end; n += COLUMNS, adds_left = true) {
        int columns = at_most(part.end - n, COLUMNS);
        read_constants(part.batch, other, n, columns);
        for (int j = 0; j < COLUMNS; j++) all_dscale[j] = all_dweights[j] = 0;
        for (int64_t m = part.first_point; m < part.end_point; m += ROWS) {
          if (call.has_odd) return;
          int rows = at_most(part.end_point - m, ROWS);
          look_ahead(part, other, n, m, next);
          if (wants_left && !has_distances()) ahead.add(dpoints.from(m, 0), rows, call.depth);
          bool skips = has_distances() && !of_components &&
                       skip_distances(points.from(m, 0), rows, components.from(n, 0), deviations.from(n, 0), columns);
          has_pairs = needs_pairs && !skips;
          if (has_pairs) pair_up(points.from(m, 0), rows, components.from(n, 0), deviations.from(n, 0), columns);
          if (call.ddeviations.at && call.ddeviations.strides[3] && form == PLAIN) form = OF_QUOTIENTS;  // whose sums it needs
          for (int j = 0; j < COLUMNS; j++) dscale[j] = dweights[j] = 0;
          for (int i = 0; i < rows; i++) weigh(i, columns, part.batch, other, m + i, n, of_points, n > part.first);
          for (int j = 0; j < columns; j++)
            all_dscale[j] += (double)dscale[j] * call.lowered, all_dweights[j] += (double)dweights[j] * call.lowered;
          for (int64_t k = 0; k < call.depth; k += deepest()) {
            int depth = at_most(call.depth - k, deepest());
            if (wants_left) {
              copy_right(components.from(n, k), deviations.from(n, k), columns, depth);
              if (has_distances()) {
                copy_left(points.from(m, k), rows, depth);
                PULL_LEFT[form](scores, left, right, rows, columns, depth, product);
              } else {
                multiply(rows_of(scores, rows, columns), panels_of(right), rows, depth, columns, false, product, &ahead);
              }
              lower(product, rows, depth);
              put_block(product, rows, depth, adds_left, dpoints.from(m, k));
            }
            if (wants_right) {
              copy_left(points.from(m, k), rows, depth);
              if (has_distances()) {
                copy_right(components.from(n, k), deviations.from(n, k), columns, depth);
                PULL_RIGHT[form](scores, left, right, rows, columns, depth, product);
              } else {
                multiply(columns_of(scores, columns, rows), panels_of(left), columns, depth, rows, false, product, &ahead);
              }
              lower(product, columns, depth);
              if (has_distances() && form != PLAIN) lower(product + HALF, columns, depth);
              bool adds = m > part.first_point;
              if (call.dright.at) put_block(product, columns, depth, adds, dcomponents.from(n, k));
              if (call.ddeviations.at && call.ddeviations.strides[3]) put_deviations(part.batch, other, n, k, columns, depth, adds);
            }
          }
        }
        if (of_components) write_sums(part, other, n, columns);
      }
    }
  }

  // Fetch what is read of the block that comes after one, of its part or of the next: gradients, and points, which are not
  // fetched ahead of distances, whose time they would not shorten.
  void look_ahead(Part part, int64_t other, int64_t n, int64_t m, Part next) {
    ahead.clear();
    if (m + ROWS < part.end_point) m += ROWS;
    else if (n + COLUMNS < part.end) n += COLUMNS, m = part.first_point;
    else if (other + 1 < part.end_other) other++, n = part.first, m = part.first_point;
    else part = next, other = part.first_other, n = part.first, m = part.first_point;
    if (part.batch >= call.batch) return;
    if (!call.is_reduced) ahead.add(call.dout.matrix(part.batch, other).from(m, n), part.end_point - m, part.end - n);
    if (!has_distances()) ahead.add(call.left.matrix(part.batch, 0).from(m, 0), part.end_point - m, call.depth);
  }

  // Take the lift from a block, of which NaN and infinities may come from it.
  void lower(Real* block, int rows, int columns) {
    if (!call.is_lifted) return;
    bool is_finite = all_finite(block, rows, columns, [](auto value) { return value; });
    for (int i = 0; i < rows; i++)
      for (int j = 0; j < columns; j += LANES) store(block + i * STRIDE + j, load(block + i * STRIDE + j) * call.lowered);
    if (!is_finite) call.has_odd = true;
  }

  // Overwrite the dot products or distances of a point, if there are any, with the gradients of them.
  void weigh(int i, int columns, int64_t batch, int64_t other, int64_t point, int64_t first, bool of_points, bool adds) {
    Real* row = scores + i * STRIDE;
    Terms own = terms(batch, other, point, first, columns);
    if (has_pairs) call.map->derivative(settings, row, phi, in_lanes(columns));
    else std::fill(phi, phi + in_lanes(columns), 0.0f), std::fill(row, row + in_lanes(columns), 1.0f);
    if (call.is_reduced) {
      take_shares(own, columns, batch, other, point);
    } else {
      Matrix douts = call.dout.matrix(batch, other).from(point, first);
      ahead.fetch(1);
      copy_row(douts, 0, columns, pulls);
    }
    for (int j = columns; j < in_lanes(columns); j++) pulls[j] = phi[j] = 0;
    Reals oddity = Reals{}, strange = Reals{};  // 0 if all distances are finite, and all gradients
    for (int j = 0; j < columns; j += LANES) {
      Reals pull = load(pulls + j), value = load(phi + j);
      oddity += value * 0.0f;
      Reals gradient = pull * load(own.scale + j) * load(row + j), of_scale = pull * (value + load(own.slope + j));
      if (form == PLAIN) gradient *= load(squares + j);
      if (has_distances()) of_scale = pull == 0.0f ? Reals{} : of_scale;  // a distance may be infinite
      strange += (gradient + of_scale) * 0.0f;
      store(row + j, gradient);
      store(phi + j, of_scale);
    }
    if (form == OF_QUOTIENTS && !(all_moderate && sum_of(oddity) == 0)) form = LEAVES_OUT;
    if (call.is_lifted && sum_of(strange) != 0) call.has_odd = true;
    gather(call.dweights, call.weights_along, pulls, dweights, batch, other, point, first, columns, of_points, adds);
    gather(call.dscale, call.scales_along, phi, dscale, batch, other, point, first, columns, of_points, adds);
    if (has_distances())  // that of deviations needs the sums
      for (int j = 0; call.weights_along != COMPONENTS_ALONE && j < columns; j++) dweights[j] += pulls[j];
  }

  // The gradients of the scores of a point: its shares of `dout`.
  void take_shares(Terms own, int columns, int64_t batch, int64_t other, int64_t point) {
    Real most = call.most.matrix(batch, other)(point, 0), rest = call.rest.matrix(batch, other)(point, 0);
    Real dout = call.dout.matrix(batch, other).get(point, 0);
    // Where the sum is 0, shares are 0 or unknown. An unknown share of a gradient of 0 is 0.
    bool has_no_share = rest == -INFINITY && (dout == 0 || lacks_weight(batch, other, point));
    Real shift = has_no_share ? 0 : most, factor = (has_no_share ? 0 : std::exp(-rest)) * dout;
    for (int j = 0; j < columns; j += LANES) {
      Reals relative = load(phi + j) * load(own.scale + j) + load(own.constant + j) - shift;
      if (call.is_lifted) store(pulls + j, normal(softmax_term<BackwardCall::LIFT>(relative) * factor));
      else store(pulls + j, exponential(relative) * factor);
    }
  }

  bool lacks_weight(int64_t batch, int64_t other, int64_t point) {
    Matrix weights = call.weights.matrix(batch, other);
    for (int64_t n = 0; n < call.components; n++)
      if (weights(point, n) != -INFINITY) return false;
    return true;
  }

  // Add the gradients of a row of pairs to sums over points, or write them, or their sum over components.
  void gather(const Operand& gradient, int64_t along, const Real* values, Real* sums, int64_t batch, int64_t other,
              int64_t point, int64_t first, int columns, bool of_points, bool adds) {
    if (along == COMPONENTS_ALONE) {
      for (int j = 0; j < columns; j += LANES) store(sums + j, load(sums + j) + load(values + j));
      return;
    }
    if (!gradient.at || !of_points) return;
    Matrix to = gradient.matrix(batch, other);
    if (along == BOTH) {
      for (int j = 0; j < columns; j++) to(point, first + j) = values[j] * call.lowered;
      return;
    }
    Reals sum = Reals{};
    for (int j = 0; j < columns; j += LANES) sum += load(values + j);
    Real total = sum_of(sum) * call.lowered;
    if (call.is_lifted && !std::isfinite(total)) call.has_odd = true;
    to(point, 0) = adds ? to(point, 0) + total : total;
  }

  // The gradients of deviations of each coordinate, from what `pull_right` wrote.
  void put_deviations(int64_t batch, int64_t other, int64_t first, int64_t k, int columns, int depth, bool adds) {
    Matrix to = call.ddeviations.matrix(batch, other).from(first, k);
    for (int j = 0; j < columns; j++)
      for (int d = 0; d < depth; d++) to(j, d) = product[j * STRIDE + HALF + d] + (adds ? to(j, d) : 0);
  }

  // Write the sums over points. The gradient of one deviation for all coordinates is (sum G distance - D sum G) / deviation.
  void write_sums(Part part, int64_t other, int64_t first, int columns) {
    Matrix scales = call.dscale.matrix(part.batch, other), weights = call.dweights.matrix(part.batch, other);
    Matrix deviations = call.deviations.matrix(part.batch, other).from(first, 0);
    Matrix to = call.ddeviations.matrix(part.batch, other).from(first, 0);
    for (int j = 0; j < columns; j++) {
      if (call.is_lifted && !std::isfinite(all_dscale[j] + all_dweights[j])) call.has_odd = true;
      if (call.dscale.at && call.scales_along == COMPONENTS_ALONE) scales(0, first + j) = (Real)all_dscale[j];
      if (call.dweights.at && call.weights_along == COMPONENTS_ALONE) weights(0, first + j) = (Real)all_dweights[j];
      if (!call.ddeviations.at) continue;
      if (to.column == 0) to(j, 0) = (Real)((all_dscale[j] - call.depth * all_dweights[j]) / deviations(j, 0));
      else for (int64_t d = 0; d < call.depth; d++) to(j, d) -= (Real)(all_dweights[j] / deviations(j, d));
    }
  }
};

// All gradients of a batch entry.
struct OfBatch : Backward {
  using Backward::Backward;
  Part part(int64_t batch) const { return {batch, 0, call.points, 0, call.others, 0, call.components}; }
  void operator()(int64_t item) { pull_back(part(item), part(next_of(item)), true, true); }
};
// The gradients of a block of points, and of what varies with them.
struct OfPoints : Backward {
  using Backward::Backward;
  const int64_t blocks = blocks_of(call.points, ROWS);
  Part part(int64_t item) const {
    int64_t first = item % blocks * ROWS, end = std::min<int64_t>(first + ROWS, call.points);
    return {item / blocks, first, end, 0, call.others, 0, call.components};
  }
  void operator()(int64_t item) { pull_back(part(item), part(next_of(item)), true, false); }
};
// The gradients of a block of components, and of what varies with them alone.
struct OfComponents : Backward {
  using Backward::Backward;
  const int64_t blocks = blocks_of(call.components, COLUMNS), outer = call.others * blocks;
  Part part(int64_t item) const {
    int64_t first = item % blocks * COLUMNS, end = std::min<int64_t>(first + COLUMNS, call.components);
    int64_t other = item / blocks % call.others;
    return {item / outer, 0, call.points, other, other + 1, first, end};
  }
  void operator()(int64_t item) { pull_back(part(item), part(next_of(item)), false, true); }
};

// Compute the gradients. Returns whether all numbers were finite on the way, of lifted ones.
bool pull_back(const BackwardCall& call) {
  bool scales = call.dscale.at, weighs = call.dweights.at, by_entry = call.batch >= OWNERS;
  bool of_points = call.dleft.at || (scales && call.scales_along) || (weighs && call.weights_along);
  bool of_components = call.dright.at || call.ddeviations.at;
  of_components = of_components || (scales && !call.scales_along) || (weighs && !call.weights_along);
  if (by_entry) each<OfBatch>(call, call.batch);
  if (!by_entry && of_points) each<OfPoints>(call, call.batch * blocks_of(call.points, ROWS));
  int64_t blocks = call.batch * call.others * blocks_of(call.components, COLUMNS);
  if (!by_entry && of_components) each<OfComponents>(call, blocks);
  return !call.has_odd;
}
}  // namespace

extern "C" {
#pragma GCC visibility push(default)
int64_t effops_pairs_call_bytes() { return sizeof(PairsCall); }
int64_t effops_pairs_workspace(const PairsCall*) { return Worker::REALS; }
const Map* effops_power_spherical() { return &power_spherical; }
const Map* effops_linear() { return &linear; }
const Map* effops_von_mises_fisher() { return &von_mises_fisher; }

int64_t effops_pairs_items(const PairsCall* call, int64_t is_backward) {
  int64_t of_points = call->batch * blocks_of(call->points, ROWS);
  int64_t of_components = call->batch * call->others * blocks_of(call->components, COLUMNS);
  if (!is_backward) return of_points * call->others;
  if (call->batch >= OWNERS) return call->batch;
  return of_points > of_components ? of_points : of_components;
}
void effops_pairs_forward(const PairsCall* call) { each<Forward>(*call, effops_pairs_items(call, false)); }

void effops_pairs_backward(const PairsCall* call) {
  if (!call->is_reduced || !pull_back(BackwardCall(*call, true))) pull_back(BackwardCall(*call, false));
}
#pragma GCC visibility pop
}
