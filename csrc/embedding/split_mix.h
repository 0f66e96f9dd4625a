// SplitMix64, by which random bits depend on counters alone; kernels/ref/rows.py and rounding.py describe their use.
#pragma once

#include <cstdint>

namespace terarec {

constexpr uint64_t kMixStep = 0x9E3779B97F4A7C15u;

// Static, so that each instruction set compiles its own.
static inline uint64_t mix(uint64_t bits) {
  bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9u;
  bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBu;
  return bits ^ (bits >> 31);
}

// The stream of the bits with which update number `step` rounds narrow rows.
static inline uint64_t stream_of_update(uint64_t seed, uint64_t step) { return mix(mix(seed) + step * kMixStep); }

}  // namespace terarec
