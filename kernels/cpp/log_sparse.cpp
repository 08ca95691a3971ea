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
  double factor;

  int64_t blocks() const { return blocks_of(length, BLOCK_OF_ROWS); }
};

namespace {
enum { SOME = 128 };
struct Span {
  int64_t first, end;
};
enum Statistic { MOST, INVERSE, PULL };  // of a query: maximum, 1 / total, and the sum of P dP

// Numbers of a row, which are Real, or of 16 bits.
Reals load_as(const Real* from, Type) { return load(from); }
Reals load_as(const uint16_t* from, Type type) { return widened(*(const Shorts*)from, type); }
Real get_as(const Real* from, Type) { return *from; }
Real get_as(const uint16_t* from, Type type) { return widened_number(*from, type); }
void store_as(Real* to, Reals values, Type) { store(to, values); }
void store_as(uint16_t* to, Reals values, Type type) { *(Shorts*)to = narrowed(values, type); }
void set_as(Real* to, Real value, Type) { *to = value; }
void set_as(uint16_t* to, Real value, Type type) { *to = narrowed_number(value, type); }

template <class Number>
Real dot(const Number* one, const Number* other, int64_t count, Type type) {
  Reals sums = Reals{};
  int64_t d = 0;
  for (; d + LANES <= count; d += LANES) sums += load_as(one + d, type) * load_as(other + d, type);
  Real sum = sum_of(sums);
  for (; d < count; d++) sum += get_as(one + d, type) * get_as(other + d, type);
  return sum;
}

// Write the sum of some rows, each times its weight, or add it to what is there times a factor.
template <class Number, class Sum>
void gather(const Number* const* rows, const Real* weights, int count, int64_t width, Real factor, Sum* to, Type type) {
  int64_t d = 0;
  for (; d + LANES <= width; d += LANES) {
    Reals sum = factor == 0 ? Reals{} : load_as(to + d, type) * factor;
    for (int u = 0; u < count; u++) sum += load_as(rows[u] + d, type) * weights[u];
    store_as(to + d, sum, type);
  }
  for (; d < width; d++) {
    Real sum = factor == 0 ? 0 : get_as(to + d, type) * factor;
    for (int u = 0; u < count; u++) sum += get_as(rows[u] + d, type) * weights[u];
    set_as(to + d, sum, type);
  }
}

// What a thread keeps. Queries, keys, values, the result and its gradient are of Numbers, and other gradients are Real.
template <class Number>
struct Rows {
  const LogSparseCall& call;
  const Type type = call.query.type;
  const Real of_scores = (Real)call.factor;
  int64_t place[AXES];
  Matrix query, key, value, out, dout, statistics, dquery, dkey, dvalue;
  const Number *keys[SOME], *values[SOME];
  alignas(64) Real scores[SOME], pulls[SOME];

  Rows(const LogSparseCall& call, int64_t) : call(call) {}

  void enter(int64_t own, int64_t shared) {
    call.of_keys.locate(own, shared, place);
    query = call.query.matrix(place), key = call.key.matrix(place), value = call.value.matrix(place);
    out = call.out.matrix(place), dout = call.dout.matrix(place), statistics = call.statistics.matrix(place);
    dquery = call.dquery.matrix(place), dkey = call.dkey.matrix(place), dvalue = call.dvalue.matrix(place);
  }

  static Number* row_of(Matrix matrix, int64_t l) { return (Number*)matrix.address(l, 0); }

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
      keys[u] = row_of(key, j), values[u] = row_of(value, j);
      scores[u] = of_scores * dot(row_of(query, l), keys[u], call.depth, type);
    }
    for (int u = count; u < in_lanes(count); u++) scores[u] = -INFINITY;
  }

  // Overwrite scores with exp(score - most), and add them to `total`. Returns the factor of what was added before.
  Real absorb(int count, Real& most, Real& total) {
    Reals highest = all(-INFINITY), added = Reals{};
    for (int u = 0; u < count; u += LANES) highest = highest <= load(scores + u) ? load(scores + u) : highest;
    Real factor = rise(most, maximum_of(highest), total), shift = shift_of(most);
    for (int u = 0; u < count; u += LANES) {
      Reals term = softmax_term(load(scores + u) - shift);
      store(scores + u, term);
      added += term;
    }
    total = total * factor + sum_of(added);
    return factor;
  }
};

template <class Number>
struct Forward : Rows<Number> {
  using Own = Rows<Number>;
  using Own::Own, Own::call, Own::scores, Own::values, Own::type;

  // Where offsets have several parts, sums are added up in the result, which is then Real.
  void operator()(int64_t item) {
    Span rows = this->enter_block(item);
    for (int64_t l = rows.first; l < rows.end; l++) {
      Number* to = this->row_of(this->out, l);
      int64_t offsets = this->reached(l);
      bool has_parts = offsets > SOME;
      Real most = -INFINITY, total = 0;
      for (int64_t first = 0; first < offsets; first += SOME) {
        int some = at_most(offsets - first, SOME);
        this->score(l, first, some);
        Real factor = this->absorb(some, most, total);
        if (has_parts) gather(values, scores, some, call.features, first == 0 ? 0 : factor, to, type);
      }
      Real inverse = inverse_of_total(total);
      if (has_parts) {
        for (int64_t f = 0; f < call.features; f++) set_as(to + f, get_as(to + f, type) * inverse, type);
      } else {
        for (int u = 0; u < offsets; u++) scores[u] *= inverse;
        gather(values, scores, (int)offsets, call.features, 0, to, type);
      }
    }
  }
};

// The statistics of queries and their gradients.
template <class Number>
struct OfQueries : Rows<Number> {
  using Own = Rows<Number>;
  using Own::Own, Own::call, Own::scores, Own::pulls, Own::keys, Own::values, Own::type, Own::statistics, Own::of_scores;

  void operator()(int64_t item) {
    Span rows = this->enter_block(item);
    for (int64_t l = rows.first; l < rows.end; l++) {
      int64_t offsets = this->reached(l);
      Real most = -INFINITY, total = 0, pull = 0;
      for (int64_t first = 0; first < offsets; first += SOME) {
        int count = read(l, first, offsets);
        Real factor = this->absorb(count, most, total);
        pull = pull * factor + dot(scores, pulls, count, REAL);
      }
      Real shift = shift_of(most), inverse = inverse_of_total(total);
      pull *= inverse;
      statistics(l, MOST) = shift, statistics(l, INVERSE) = inverse, statistics(l, PULL) = pull;
      for (int64_t first = 0; call.dquery.at && first < offsets; first += SOME) {
        int count = at_most(offsets - first, SOME);
        if (offsets > SOME) {
          read(l, first, offsets);
          for (int u = 0; u < count; u += LANES) store(scores + u, softmax_term(load(scores + u) - shift));
        }
        for (int u = 0; u < count; u++) pulls[u] = scores[u] * inverse * (pulls[u] - pull) * of_scores;
        gather(keys, pulls, count, call.depth, first > 0, &this->dquery(l, 0), type);
      }
    }
  }

  // The scores of a query at some offsets, and the gradients of the weights. Returns how many they are.
  int read(int64_t l, int64_t first, int64_t offsets) {
    int count = at_most(offsets - first, SOME);
    this->score(l, first, count);
    for (int u = 0; u < count; u++) pulls[u] = dot(this->row_of(this->dout, l), values[u], call.features, type);
    return count;
  }
};

// The gradients of keys and values.
template <class Number>
struct OfKeys : Rows<Number> {
  using Own = Rows<Number>;
  using Own::Own, Own::call, Own::scores, Own::pulls, Own::keys, Own::values, Own::type, Own::statistics, Own::of_scores;
  using Own::row_of;

  void operator()(int64_t item) {
    Span rows = this->rows_of(item);
    for (int64_t shared = 0; shared < call.of_keys.entries(true); shared++) {
      this->enter(item / call.blocks(), shared);
      for (int64_t j = rows.first; j < rows.end; j++) {
        int64_t offsets = this->reached(call.length - 1 - j);
        for (int64_t first = 0; first < offsets; first += SOME) pull_back(j, first, at_most(offsets - first, SOME), shared > 0 || first > 0);
      }
    }
  }

  // The queries that come some offsets behind a key are in the place of `keys`, and their gradients in that of `values`.
  void pull_back(int64_t j, int64_t first, int count, bool adds) {
    for (int u = 0; u < count; u++) {
      int64_t l = j + call.offset[first + u];
      keys[u] = row_of(this->query, l), values[u] = row_of(this->dout, l);
      scores[u] = of_scores * dot(keys[u], row_of(this->key, j), call.depth, type);
    }
    // In a loop of its own, as one operation for both would not round the product, as it was when its maximum was found.
    for (int u = 0; u < count; u++) scores[u] -= statistics(j + call.offset[first + u], MOST);
    for (int u = count; u < in_lanes(count); u++) scores[u] = 0;
    for (int u = 0; u < count; u += LANES) store(scores + u, softmax_term(load(scores + u)));
    for (int u = 0; u < count; u++) scores[u] *= statistics(j + call.offset[first + u], INVERSE);
    if (call.dvalue.at) gather(values, scores, count, call.features, adds, &this->dvalue(j, 0), type);
    if (!call.dkey.at) return;
    for (int u = 0; u < count; u++) {
      Real pull = dot(values[u], row_of(this->value, j), call.features, type) - statistics(j + call.offset[first + u], PULL);
      pulls[u] = scores[u] * pull * of_scores;
    }
    gather(keys, pulls, count, call.depth, adds, &this->dkey(j, 0), type);
  }
};

template <class Number>
void pull_back(const LogSparseCall& call) {
  each<OfQueries<Number>>(call, call.of_keys.all_entries() * call.blocks());
  if (call.dkey.at || call.dvalue.at) each<OfKeys<Number>>(call, call.of_keys.entries(false) * call.blocks());
}
}  // namespace

extern "C" {
#pragma GCC visibility push(default)
int64_t effops_log_sparse_call_bytes() { return sizeof(LogSparseCall); }

int64_t effops_log_sparse_items(const LogSparseCall* call, int64_t) {
  return call->of_keys.all_entries() * call->blocks();
}
void effops_log_sparse_forward(const LogSparseCall* call) {
  int64_t items = effops_log_sparse_items(call, false);
  is_narrow(call->query.type) ? each<Forward<uint16_t>>(*call, items) : each<Forward<Real>>(*call, items);
}
void effops_log_sparse_backward(const LogSparseCall* call) {
  is_narrow(call->query.type) ? pull_back<uint16_t>(*call) : pull_back<Real>(*call);
}
#pragma GCC visibility pop
}
