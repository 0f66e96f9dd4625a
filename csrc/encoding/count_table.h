// How often each value of a column occurs.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "encoding/slots.h"

namespace terarec::encoding {

struct ValueCount {
  uint32_t value;
  uint32_t count;
};

// An open-addressing table of 32-bit values. One slot holds value << 32 | count; a count is at least 1, so that a slot
// of 0 is free, value 0 included. Counts stop at 2^32 - 1. Threads may add at the same time: one works, others wait.
class CountTable {
 public:
  CountTable() : slots_(kFirstCapacity) {}

  // Counts keys[i] where bit `bit` of missing[i] is clear.
  void add(const uint32_t* keys, const uint64_t* missing, int bit, int64_t num_keys);

  // Number of distinct values.
  int64_t size() const { return static_cast<int64_t>(used_); }

  // The values that occurred at least min_count times, by falling count, ties by rising value.
  std::vector<ValueCount> at_least(uint32_t min_count) const;

 private:
  static constexpr uint64_t kFirstCapacity = 4096;

  void reserve(uint64_t more);

  Slots<uint64_t> slots_;
  uint64_t used_ = 0;
  std::mutex mutex_;
};

}  // namespace terarec::encoding
