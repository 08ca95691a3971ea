// Operands with several batch axes, along which they may be shared.
#pragma once
#include "product.h"

enum { AXES = 8 };  // of a batch, at most

// An operand and its strides along the batch axes, rows and columns. A gradient that is not wanted has no address.
struct Batched {
  void* at;
  int64_t strides[AXES + 2];
  Type type;

  int64_t offset(const int64_t* place) const {
    int64_t sum = 0;
    for (int axis = 0; axis < AXES; axis++) sum += place[axis] * strides[axis];
    return sum;
  }
  Matrix matrix(const int64_t* place) const {
    return {(char*)at + offset(place) * bytes_of(type), strides[AXES], strides[AXES + 1], type};
  }
};

// The batch axes along which an operand varies, and the others, along which its entries are shared.
struct Axes {
  int64_t sizes[AXES], is_shared[AXES];

  int64_t entries(bool shared) const {
    int64_t count = 1;
    for (int axis = 0; axis < AXES; axis++) count *= (bool)is_shared[axis] == shared ? sizes[axis] : 1;
    return count;
  }
  int64_t all_entries() const { return entries(false) * entries(true); }

  // Write the place of an entry, by the numbers along the axes of either kind. Returns its number along all axes.
  int64_t locate(int64_t own, int64_t shared, int64_t* place) const {
    for (int axis = AXES - 1; axis >= 0; axis--) {
      int64_t& index = is_shared[axis] ? shared : own;
      place[axis] = index % sizes[axis], index /= sizes[axis];
    }
    int64_t entry = 0;
    for (int axis = 0; axis < AXES; axis++) entry = entry * sizes[axis] + place[axis];
    return entry;
  }
};
