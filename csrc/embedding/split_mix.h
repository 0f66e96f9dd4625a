// SPDX-License-Identifier: Apache-2.0

// SplitMix64: random bits that depend on counters alone (kernels/ref/rows.py describes their use), and the hash of keys.
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

// SplitMix64's finalizer: a bijection, so that a hash determines its key and is stored instead of it. The seed differs
// from index to index, so that no one who does not know it can choose keys that all fall into one bucket.
struct KeyHash {
  uint64_t seed;

  uint64_t operator()(int64_t key) const {
    uint64_t bits = static_cast<uint64_t>(key) + seed;
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBu;
    return bits ^ (bits >> 31);
  }

  // The inverse steps, from the last to the first: each factor is the other's inverse modulo 2^64.
  int64_t key(uint64_t hash) const {
    uint64_t bits = hash ^ (hash >> 31) ^ (hash >> 62);
    bits *= 0x319642B2D24D8EC3u;
    bits ^= (bits >> 27) ^ (bits >> 54);
    bits *= 0x96DE1B173F119089u;
    bits ^= (bits >> 30) ^ (bits >> 60);
    return static_cast<int64_t>(bits - seed);
  }
};

}  // namespace terarec
