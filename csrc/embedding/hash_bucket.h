// SPDX-License-Identifier: Apache-2.0

// One cache line of a hash index: five keys by their hashes, their rows, and how many keys found it full.
#pragma once

#include <cstdint>

namespace terarec {

// Keys fill a bucket from slot 0 on, so any hash can be held. `word` holds the number of keys (3 bits), the number of
// keys that found this bucket full and lie in a later one (9 bits, which stay at 511 once they get there), and the high
// 4 bits of each row. Since erasing a passing key decrements the count again, there are no tombstones, and the
// search for an absent key ends at the first bucket that no key found full.
struct alignas(64) Bucket {
  static constexpr int kSlots = 5;
  static constexpr uint32_t kOnePassed = 1u << 3;
  static constexpr uint32_t kMostPassed = 511u << 3;

  uint64_t hashes[kSlots];
  uint32_t low[kSlots];
  uint32_t word;

  int count() const { return static_cast<int>(word & 7); }
  bool full() const { return count() == kSlots; }
  bool passed() const { return (word & kMostPassed) != 0; }
  void pass() { if ((word & kMostPassed) != kMostPassed) word += kOnePassed; }
  void unpass() { if ((word & kMostPassed) != kMostPassed) word -= kOnePassed; }

  // Bit i: slot i holds the key of this hash.
  uint32_t match(uint64_t hash) const {
    const uint32_t equal = (hashes[0] == hash) | (hashes[1] == hash) << 1 | (hashes[2] == hash) << 2 |
                           (hashes[3] == hash) << 3 | (hashes[4] == hash) << 4;
    return equal & ((1u << count()) - 1);
  }

  int64_t row(int slot) const { return low[slot] | static_cast<int64_t>(word >> (12 + 4 * slot) & 15) << 32; }

  void set_row(int slot, int64_t row) {
    low[slot] = static_cast<uint32_t>(row);
    const int shift = 12 + 4 * slot;
    word = (word & ~(15u << shift)) | static_cast<uint32_t>(row >> 32) << shift;
  }

  void add(uint64_t hash, int64_t row) {
    const uint32_t before = word;  // a compiler must assume that `low` aliases `word`
    const int slot = count(), shift = 12 + 4 * slot;
    hashes[slot] = hash;
    low[slot] = static_cast<uint32_t>(row);
    word = ((before & ~(15u << shift)) | static_cast<uint32_t>(row >> 32) << shift) + 1;
  }

  // Sets the word of a bucket to which a key was added: `before` is the word until then, `slot` its first free slot.
  // The key's row has all high bits set.
  void put(uint32_t before, int slot, uint64_t hash, int64_t low_row) {
    hashes[slot] = hash;
    low[slot] = static_cast<uint32_t>(low_row);
    word = (before | 15u << (12 + 4 * slot)) + 1;
  }

  // The last key moves to the slot of the removed one.
  void remove(int slot) {
    const int last = count() - 1;
    hashes[slot] = hashes[last];
    set_row(slot, row(last));
    word--;
  }
};

static_assert(sizeof(Bucket) == 64, "a bucket is a cache line");

}  // namespace terarec
