// SPDX-License-Identifier: Apache-2.0

// What the check programs share: a digest of results, and numbers that are the same on every processor.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "embedding/split_mix.h"

class Digest {
 public:
  void add(const void* values, size_t size) {
    const auto* bytes = static_cast<const unsigned char*>(values);
    for (size_t i = 0; i < size; i++) hash_ = (hash_ ^ bytes[i]) * 0x100000001B3u;
  }
  template <class T>
  void add(const std::vector<T>& values) {
    add(values.data(), values.size() * sizeof(T));
  }
  void print(const char* set, const std::string& what) const {
    printf("%s %s %016llx\n", set, what.c_str(), static_cast<unsigned long long>(hash_));
  }

 private:
  uint64_t hash_ = 0xCBF29CE484222325u;
};

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t bits() { return terarec::mix(state_ += terarec::kMixStep); }
  float number() { return static_cast<float>(bits() >> 40) * 0x1p-23f - 1.0f; }
  int64_t below(int64_t limit) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(limit)); }

 private:
  uint64_t state_;
};
