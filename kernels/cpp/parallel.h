// One parallel region a call: threads take items by a counter. The region is that of the runtime that PyTorch has loaded.
#pragma once
#include <atomic>
#include <cstdint>

extern "C" void GOMP_parallel(void (*)(void*), void*, unsigned threads, unsigned flags);

// Each thread makes a Worker of a call and of its number, and gives it items.
template <class Call, class Worker>
struct Region {
  const Call& call;
  int64_t items;
  std::atomic<int64_t> next_item{0}, next_thread{0};

  static void run(void* region) {
    Region& own = *(Region*)region;
    Worker worker(own.call, own.next_thread++);
    for (int64_t item; (item = own.next_item++) < own.items;) worker(item);
  }
};

template <class Worker, class Call>
static void each(const Call& call, int64_t items) {
  Region<Call, Worker> region{call, items};
  if (call.threads < 2) Region<Call, Worker>::run(&region);
  else GOMP_parallel(Region<Call, Worker>::run, &region, call.threads, 0);
}
