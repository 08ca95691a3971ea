// Random numbers by index: each is a function of a key and of its place, so that any thread draws the same.
#pragma once
#include "vector.h"

// A number that depends on all bits of another one: the mixing function of SplitMix64.
static inline uint64_t mixed(uint64_t value) {
  value += 0x9e3779b97f4a7c15;
  value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9;
  value = (value ^ value >> 27) * 0x94d049bb133111eb;
  return value ^ value >> 31;
}

// Numbers from 0 to 1, below 1, of places under keys. Each round is the finaliser of MurmurHash3.
static inline Reals uniform(Places key, Places place) {
  Words bits = (Words)place * 0x9e3779b9u + (Words)key;
  for (int round = 0; round < 2; round++) {
    bits = (bits ^ bits >> 16) * 0x85ebca6bu;
    bits = (bits ^ bits >> 13) * 0xc2b2ae35u;
    bits = (bits ^ bits >> 16) + (Words)key;
  }
  return __builtin_convertvector((Places)(bits >> 8), Reals) * 0x1p-24f;
}
