// Calls the library with threads that ThreadSanitizer knows, which PyTorch's runtime does not have: a program.
#include <cstdio>
#include <random>
#include <thread>
#include <vector>

#include "pairs.h"

extern "C" {
int64_t effops_pairs_items(const PairsCall*, int64_t is_backward);
void effops_pairs_forward(const PairsCall*);
void effops_pairs_backward(const PairsCall*);

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
};

static bool computes(Sizes sizes, bool is_reduced, bool has_distances, const Map& map) {
  auto [batch, points, components, depth] = sizes;
  Memory memory;
  PairsCall call{};
  call.batch = batch, call.others = 1, call.points = points, call.components = components, call.depth = depth;
  call.threads = THREADS, call.is_reduced = is_reduced, call.map = &map;
  call.settings = {1e-30f, -1e-3f, 0};
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
  std::vector<float> workspace(THREADS * WORKSPACE);
  call.workspace = workspace.data();
  effops_pairs_forward(&call);

  call.dout = memory.of(batch, points, results);
  call.dleft = memory.of(batch, points, depth);
  call.dright = memory.of(batch, components, depth);
  if (has_distances) call.ddeviations = memory.of(batch, components, depth);
  if (is_reduced) call.dweights = memory.of(batch, 1, components);
  call.dscale = memory.of(batch, 1, components);
  effops_pairs_backward(&call);
  for (const std::vector<float>& one : memory.all)
    for (float value : one)
      if (!std::isfinite(value)) return false;
  return true;
}

int main() {
  for (Sizes sizes : {Sizes{17, 9, 21, 5}, Sizes{2, 150, 260, 9}, Sizes{3, 5, 13, 140}})
    for (bool is_reduced : {false, true})
      for (bool has_distances : {false, true}) {
        if (!computes(sizes, is_reduced, has_distances, has_distances ? linear : power_spherical)) return 1;
        if (!has_distances && !computes(sizes, is_reduced, false, von_mises_fisher)) return 1;
      }
  puts("computed");
}
