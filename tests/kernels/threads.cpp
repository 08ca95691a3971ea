// Calls the library with threads that ThreadSanitizer knows, which PyTorch's runtime does not have: a program.
#include <cstdio>
#include <random>
#include <thread>
#include <vector>

#include "attention.h"
#include "pairs.h"

extern "C" {
void effops_pairs_forward(const PairsCall*);
void effops_pairs_backward(const PairsCall*);
void effops_attention_forward(const AttentionCall*);
void effops_attention_backward(const AttentionCall*);

void GOMP_parallel(void (*run)(void*), void* region, unsigned threads, unsigned) {
  std::vector<std::thread> others;
  for (unsigned thread = 1; thread < threads; thread++) others.emplace_back(run, region);
  run(region);
  for (std::thread& other : others) other.join();
}
}

enum { THREADS = 4 };

struct Sizes {
  int64_t batch, points, components, depth;
};

// Contiguous memory of a call. What no test of numbers sees is which thread writes it.
struct Memory {
  std::vector<std::vector<float>> all;
  std::mt19937 generator;

  Operand of(int64_t batch, int64_t rows, int64_t columns) {
    std::uniform_real_distribution<float> numbers(0.1f, 0.3f);
    all.emplace_back(batch * rows * columns);
    for (float& value : all.back()) value = numbers(generator);
    return {all.back().data(), {rows * columns, 0, columns, 1}};
  }
  bool is_finite() const {
    for (const std::vector<float>& one : all)
      for (float value : one)
        if (!std::isfinite(value)) return false;
    return true;
  }
};

static bool computes(Sizes sizes, bool is_reduced, bool has_distances, const Map& map) {
  auto [batch, points, components, depth] = sizes;
  Memory memory;
  PairsCall call{};
  call.batch = batch, call.others = 1, call.points = points, call.components = components, call.depth = depth;
  call.threads = THREADS, call.is_reduced = is_reduced, call.map = &map;
  call.floor = 1e-30, call.least = -1e-3;
  call.left = memory.of(batch, points, depth);
  call.right = memory.of(batch, components, depth);
  if (has_distances) call.deviations = memory.of(batch, components, depth);
  if (is_reduced) call.weights = memory.of(batch, 1, components);
  call.scale = memory.of(batch, 1, components);
  call.normaliser = memory.of(batch, 1, components);
  call.slope = memory.of(batch, 1, components);
  for (Operand* one : {&call.weights, &call.scale, &call.normaliser, &call.slope}) one->strides[2] = 0;
  int64_t results = is_reduced ? 1 : components;
  call.most = memory.of(batch, points, results);
  if (is_reduced) call.rest = memory.of(batch, points, 1);
  std::vector<float> workspace(THREADS * Worker::REALS);
  call.workspace = workspace.data();
  effops_pairs_forward(&call);

  call.dout = memory.of(batch, points, results);
  call.dleft = memory.of(batch, points, depth);
  call.dright = memory.of(batch, components, depth);
  if (has_distances) call.ddeviations = memory.of(batch, components, depth);
  if (is_reduced) call.dweights = memory.of(batch, 1, components);
  call.dscale = memory.of(batch, 1, components);
  effops_pairs_backward(&call);
  return memory.is_finite();
}

// Entries of queries, of which some share keys.
static bool attends(Sizes sizes, int64_t sharing, Output output, int64_t diagonal) {
  auto [batch, queries, keys, depth] = sizes;
  Memory memory;
  auto matrices = [&](int64_t count, int64_t rows, int64_t columns) {
    Batched operand{memory.of(count, rows, columns).at, {}};
    operand.strides[AXES - 2] = rows * columns * (count == batch ? 1 : sharing);
    operand.strides[AXES - 1] = count == batch ? 0 : rows * columns;
    operand.strides[AXES] = columns, operand.strides[AXES + 1] = 1;
    return operand;
  };
  int64_t all = batch * sharing, width = output == SUMS ? depth + 3 : keys;
  AttentionCall call{};
  std::fill(call.of_keys.sizes, call.of_keys.sizes + AXES, 1);
  call.of_keys.sizes[AXES - 2] = batch, call.of_keys.sizes[AXES - 1] = sharing, call.of_keys.is_shared[AXES - 1] = true;
  call.of_mask = call.of_keys;
  call.queries = queries, call.keys = keys, call.depth = depth, call.features = output == SUMS ? width : 0;
  call.threads = THREADS, call.output = output, call.may_exclude = true, call.diagonal = diagonal, call.factor = 0.5f;
  call.query = matrices(all, queries, depth);
  call.key = matrices(batch, keys, depth);
  if (output == SUMS) call.value = matrices(batch, keys, width);
  call.out = matrices(all, queries, width);
  std::vector<float> workspace(THREADS * Tiles::REALS);
  call.workspace = workspace.data();
  effops_attention_forward(&call);

  call.dout = matrices(all, queries, width);
  call.statistics = matrices(all, queries, 3);
  call.dquery = matrices(all, queries, depth);
  call.dkey = matrices(batch, keys, depth);
  if (output == SUMS) call.dvalue = matrices(batch, keys, width), call.dropped = 0.5f;
  effops_attention_backward(&call);
  call.dmask = matrices(batch, queries, keys);
  call.diagonal = keys;
  effops_attention_backward(&call);
  return output == SCORES || memory.is_finite();
}

int main() {
  for (Sizes sizes : {Sizes{17, 9, 21, 5}, Sizes{2, 150, 260, 9}, Sizes{3, 5, 13, 140}})
    for (bool is_reduced : {false, true})
      for (bool has_distances : {false, true}) {
        if (!computes(sizes, is_reduced, has_distances, has_distances ? linear : power_spherical)) return 1;
        if (!has_distances && !computes(sizes, is_reduced, false, von_mises_fisher)) return 1;
      }
  for (Sizes sizes : {Sizes{9, 130, 40, 5}, Sizes{2, 150, 260, 9}, Sizes{3, 5, 13, 140}})
    for (Output output : {SCORES, WEIGHTS, SUMS})
      for (int64_t diagonal : {sizes.components, int64_t(-3)})
        if (!attends(sizes, 2, output, diagonal)) return 1;
  puts("computed");
}
