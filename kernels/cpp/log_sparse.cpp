// Attention over a log-sparse pattern: each query takes part with the keys that come some offsets before it.
//
//     score[l,o] = factor <query[l], key[l - o]>,    P = softmax(score) over offsets,    out[l] = sum_o P[l,o] value[l - o]
//
//     dP[l,o] = <dout[l], value[l - o]>,    G = factor P (dP - sum_o P dP)
//     dquery[l] = sum_o G[l,o] key[l - o],    dkey[j] = sum_o G[j + o,o] query[j + o],    dvalue[j] = sum_o P[j + o,o] dout[j + o]
//
// for each entry of some batch axes. Rows are read where they are, and a row takes up to SOME offsets at a time.
#include <algorithm>

#include "batched.h"
#include "parallel.h"
#include "softmax.h"
#include "special.h"

enum { BLOCK_OF_ROWS = 64 };

struct LogSparseCall {
  Axes of_keys;
  int64_t length, depth, features, offsets, threads;
  const int64_t* offset;  // ascending, the first one is 0
  Batched query, key, value, out, dout, statistics, dquery, dkey, dvalue;
  float factor;

  int64_t blocks() const { return blocks_of(length, BLOCK_OF_ROWS); }
};

namespace {
enum { SOME = 128 };
struct Span {
  int64_t first, end;
};
enum Statistic { MOST, INVERSE, PULL };  // of a query: maximum, 1 / total, and the sum of P dP

float dot(const float* one, const float* other, int64_t count) {
  Floats sums = Floats{};
  int64_t d = 0;
  for (; d + LANES <= count; d += LANES) sums += load(one + d) * load(other + d);
  float sum = sum_of(sums);
  for (; d < count; d++) sum += one[d] * other[d];
  return sum;
}

// Write the sum of some rows, each times its weight, or add it to what is there times a factor.
void gather(const float* const* rows, const float* weights, int count, int64_t width, float factor, float* to) {
  int64_t d = 0;
  for (; d + LANES <= width; d += LANES) {
    Floats sum = factor == 0 ? Floats{} : load(to + d) * factor;
    for (int u = 0; u < count; u++) sum += load(rows[u] + d) * weights[u];
    store(to + d, sum);
  }
  for (; d < width; d++) {
    float sum = factor == 0 ? 0 : to[d] * factor;
    for (int u = 0; u < count; u++) sum += rows[u][d] * weights[u];
    to[d] = sum;
  }
}

struct Rows {
  const LogSparseCall& call;
  int64_t place[AXES];
  Matrix query, key, value, out, dout, statistics, dquery, dkey, dvalue;
  const float *keys[SOME], *values[SOME];
  alignas(64) float scores[SOME], pulls[SOME];

  Rows(const LogSparseCall& call, int64_t) : call(call) {}

  void enter(int64_t own, int64_t shared) {
    call.of_keys.locate(own, shared, place);
    query = call.query.matrix(place), key = call.key.matrix(place), value = call.value.matrix(place);
    out = call.out.matrix(place), dout = call.dout.matrix(place), statistics = call.statistics.matrix(place);
    dquery = call.dquery.matrix(place), dkey = call.dkey.matrix(place), dvalue = call.dvalue.matrix(place);
  }

  // The rows of an item, for which `enter_block` goes to its entry of all axes.
  Span rows_of(int64_t item) const {
    int64_t first = item % call.blocks() * BLOCK_OF_ROWS;
    return {first, std::min(call.length, first + BLOCK_OF_ROWS)};
  }
  Span enter_block(int64_t item) {
    int64_t any = item / call.blocks(), sharing = call.of_keys.entries(true);
    enter(any / sharing, any % sharing);
    return rows_of(item);
  }

  // How many offsets are at most `reach`.
  int64_t reached(int64_t reach) const {
    return std::upper_bound(call.offset, call.offset + call.offsets, reach) - call.offset;
  }

  // The scores of a query at some offsets, and behind them -inf.
  void score(int64_t l, int64_t first, int count) {
    for (int u = 0; u < count; u++) {
      int64_t j = l - call.offset[first + u];
      keys[u] = &key(j, 0), values[u] = &value(j, 0);
      scores[u] = call.factor * dot(&query(l, 0), keys[u], call.depth);
    }
    for (int u = count; u < in_lanes(count); u++) scores[u] = -INFINITY;
  }

  // Overwrite scores with exp(score - most), and add them to `total`. Returns the factor of what was added before.
  float absorb(int count, float& most, float& total) {
    Floats highest = all(-INFINITY), added = Floats{};
    for (int u = 0; u < count; u += LANES) highest = highest <= load(scores + u) ? load(scores + u) : highest;
    float factor = rise(most, maximum_of(highest), total), shift = shift_of(most);
    for (int u = 0; u < count; u += LANES) {
      Floats term = exponential(load(scores + u) - shift);
      store(scores + u, term);
      added += term;
    }
    total = total * factor + sum_of(added);
    return factor;
  }
};

struct Forward : Rows {
  using Rows::Rows;

  void operator()(int64_t item) {
    Span rows = enter_block(item);
    for (int64_t l = rows.first; l < rows.end; l++) {
      int64_t offsets = reached(l);
      float most = -INFINITY, total = 0;
      for (int64_t first = 0; first < offsets; first += SOME) {
        int count = at_most(offsets - first, SOME);
        score(l, first, count);
        float factor = absorb(count, most, total);
        gather(values, scores, count, call.features, first == 0 ? 0 : factor, &out(l, 0));
      }
      float inverse = inverse_of_total(total);
      for (int64_t f = 0; f < call.features; f++) out(l, f) *= inverse;
    }
  }
};

// The statistics of queries and their gradients.
struct OfQueries : Rows {
  using Rows::Rows;

  void operator()(int64_t item) {
    Span rows = enter_block(item);
    for (int64_t l = rows.first; l < rows.end; l++) {
      int64_t offsets = reached(l);
      float most = -INFINITY, total = 0, pull = 0;
      for (int64_t first = 0; first < offsets; first += SOME) {
        int count = read(l, first, offsets);
        float factor = absorb(count, most, total);
        pull = pull * factor + dot(scores, pulls, count);
      }
      float shift = shift_of(most), inverse = inverse_of_total(total);
      pull *= inverse;
      statistics(l, MOST) = shift, statistics(l, INVERSE) = inverse, statistics(l, PULL) = pull;
      for (int64_t first = 0; call.dquery.at && first < offsets; first += SOME) {
        int count = at_most(offsets - first, SOME);
        if (offsets > SOME) {
          read(l, first, offsets);
          for (int u = 0; u < count; u += LANES) store(scores + u, exponential(load(scores + u) - shift));
        }
        for (int u = 0; u < count; u++) pulls[u] = scores[u] * inverse * (pulls[u] - pull) * call.factor;
        gather(keys, pulls, count, call.depth, first > 0, &dquery(l, 0));
      }
    }
  }

  // The scores of a query at some offsets, and the gradients of the weights. Returns how many they are.
  int read(int64_t l, int64_t first, int64_t offsets) {
    int count = at_most(offsets - first, SOME);
    score(l, first, count);
    for (int u = 0; u < count; u++) pulls[u] = dot(&dout(l, 0), values[u], call.features);
    return count;
  }
};

// The gradients of keys and values.
struct OfKeys : Rows {
  using Rows::Rows;

  void operator()(int64_t item) {
    Span rows = rows_of(item);
    for (int64_t shared = 0; shared < call.of_keys.entries(true); shared++) {
      enter(item / call.blocks(), shared);
      for (int64_t j = rows.first; j < rows.end; j++) {
        int64_t offsets = reached(call.length - 1 - j);
        for (int64_t first = 0; first < offsets; first += SOME) pull_back(j, first, at_most(offsets - first, SOME), shared > 0 || first > 0);
      }
    }
  }

  // The queries that come some offsets behind a key are in the place of `keys`, and their gradients in that of `values`.
  void pull_back(int64_t j, int64_t first, int count, bool adds) {
    for (int u = 0; u < count; u++) {
      int64_t l = j + call.offset[first + u];
      keys[u] = &query(l, 0), values[u] = &dout(l, 0);
      scores[u] = call.factor * dot(keys[u], &key(j, 0), call.depth) - statistics(l, MOST);
    }
    for (int u = count; u < in_lanes(count); u++) scores[u] = 0;
    for (int u = 0; u < count; u += LANES) store(scores + u, exponential(load(scores + u)));
    for (int u = 0; u < count; u++) scores[u] *= statistics(j + call.offset[first + u], INVERSE);
    if (call.dvalue.at) gather(values, scores, count, call.features, adds, &dvalue(j, 0));
    if (!call.dkey.at) return;
    for (int u = 0; u < count; u++) {
      float pull = dot(values[u], &value(j, 0), call.features) - statistics(j + call.offset[first + u], PULL);
      pulls[u] = scores[u] * pull * call.factor;
    }
    gather(keys, pulls, count, call.depth, adds, &dkey(j, 0));
  }
};
}  // namespace

extern "C" {
#pragma GCC visibility push(default)
int64_t effops_log_sparse_call_bytes() { return sizeof(LogSparseCall); }

int64_t effops_log_sparse_items(const LogSparseCall* call) {
  return call->of_keys.all_entries() * call->blocks();
}
void effops_log_sparse_forward(const LogSparseCall* call) { each<Forward>(*call, effops_log_sparse_items(call)); }

void effops_log_sparse_backward(const LogSparseCall* call) {
  each<OfQueries>(*call, effops_log_sparse_items(call));
  if (call->dkey.at || call->dvalue.at)
    each<OfKeys>(*call, call->of_keys.entries(false) * call->blocks());
}
#pragma GCC visibility pop
}
