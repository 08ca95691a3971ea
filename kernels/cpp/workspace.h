// What a thread keeps of a call: blocks, and panels of right factors of products, one after another in one piece of memory.
#pragma once
#include "product.h"

// The address sanitizer has gaps behind the parts, which nobody may touch. Otherwise there are none.
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
enum { GAP = 4096 };
#else
enum { GAP = 0 };
#define ASAN_POISON_MEMORY_REGION(at, size) ((void)(at))
#define ASAN_UNPOISON_MEMORY_REGION(at, size) ((void)(at))
#endif

template <int BLOCKS, int ALL_PANELS>
struct Workspace {
  enum { REALS = BLOCKS * (BLOCK + GAP) + ALL_PANELS * (PANELS + GAP) };  // of a thread
  Real* const start;

  Workspace(Real* of_threads, int64_t thread) : start(of_threads + thread * REALS) {
    for (int part = 0; part < BLOCKS; part++) ASAN_POISON_MEMORY_REGION(block(part) + BLOCK, GAP * sizeof(Real));
    for (int part = 0; part < ALL_PANELS; part++) ASAN_POISON_MEMORY_REGION(panels_at(part) + PANELS, GAP * sizeof(Real));
  }
  ~Workspace() { ASAN_UNPOISON_MEMORY_REGION(start, REALS * sizeof(Real)); }

  Real* block(int part) const { return start + part * (BLOCK + GAP); }
  Real* panels_at(int part) const { return block(BLOCKS) + part * (PANELS + GAP); }
};

// Which block of a matrix a part of the workspace holds.
struct Copied {
  Matrix held = {nullptr, 0, 0};
  int rows = 0, columns = 0;

  bool becomes(Matrix from, int more_rows, int more_columns) {
    bool was = held.at == from.at && held.type == from.type;
    was = was && held.row == from.row && held.column == from.column;
    was = was && rows == more_rows && columns == more_columns;
    held = from, rows = more_rows, columns = more_columns;
    return !was;
  }
};
