// SPDX-License-Identifier: Apache-2.0

// int64 key -> place of its row, in at most 16 bytes a key on the average, whatever the number of keys.
//
// A hash that is a bijection chooses one of 256 partitions by its high bits. In a partition hashes lie in rising order,
// each at its home (the slot given by the rest of its bits) or as near behind it as the order allows; so the search
// for an absent key ends at the first hash that is larger. Slots take 13 bytes (hash 8, place 5) and a partition grows
// by an eighth when it is 92 % full, so that a key takes 14.1 to 15.9 bytes. (terarec's other hash index trades memory
// for speed: 20 bytes a key, and no order.)
//
// Partitions of 16 pages and more are mapped, smaller ones lie on the heap: memory that partitions leave as they grow
// goes back to the system. On the heap it stayed as holes, which took more than 200 MiB next to an index of 583 MiB.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "embedding/split_mix.h"

namespace terarec::rowfile {

class PageTable {
 public:
  // Places have 40 bits; this one stands for none.
  static constexpr uint64_t kNone = (uint64_t{1} << 40) - 1;

  explicit PageTable(uint64_t seed) : hash_{seed} {}

  int64_t size() const { return size_; }
  int64_t memory_bytes() const;

  // Allocates room for so many keys in an empty table, so that it grows little or not at all while they come.
  void reserve(int64_t keys);

  // Writes each key's place, or kNone.
  void find(const int64_t* keys, int64_t count, uint64_t* places) const;
  uint64_t find(int64_t key) const;

  // Prefetches the cache line in which a key should be.
  void fetch(int64_t key) const;

  // Gives a key a place; returns the one that it had, or kNone. Throws std::bad_alloc, having changed nothing.
  uint64_t set(int64_t key, uint64_t place);

  // Returns the place that the key had, or kNone.
  uint64_t erase(int64_t key);

  // Erases all keys of whose places `is_gone` says so; looks at every key.
  template <typename IsGone>
  void erase_if(const IsGone& is_gone) {
    for (Partition& each : partitions_) size_ -= each.erase_if(is_gone);
    if (largest_ != kNone && is_gone(largest_)) largest_ = kNone, size_--;
  }

 private:
  static constexpr int kPartitionBits = 8;
  static constexpr int kPartitions = 1 << kPartitionBits;
  static constexpr int64_t kReservedPercent = 88;  // less than what makes a partition grow; 14.8 bytes a key
  // An empty slot holds the largest hash. The key of that hash, if it is held, has its place in `largest_`.
  static constexpr uint64_t kEmpty = ~uint64_t{0};

  class Partition {
   public:
    int64_t memory_bytes() const { return bytes_; }
    void fetch(uint64_t hash) const;
    uint64_t find(uint64_t hash) const;
    uint64_t set(uint64_t hash, uint64_t place);
    uint64_t erase(uint64_t hash);
    void reserve(int64_t keys) { resize(keys * 100 / kReservedPercent); }
    template <typename IsGone>
    int64_t erase_if(const IsGone& is_gone) {
      const int64_t before = size_;
      for (int64_t i = 0; i < slots_;) {
        const bool goes = hashes_[i] != kEmpty && is_gone(value(places_[i]));
        if (goes) erase(hashes_[i]);  // what follows moves to this slot
        i += !goes;
      }
      return before - size_;
    }

   private:
    struct Place {
      uint32_t low;
      uint8_t high;
    } __attribute__((packed));

    struct Free {
      size_t mapped_bytes;  // 0: on the heap
      void operator()(char* memory) const;
    };

    int64_t home(uint64_t hash) const {
      return static_cast<int64_t>(static_cast<unsigned __int128>(hash << kPartitionBits) * homes_ >> 64);
    }
    // The first slot from the hash's home on that holds no smaller one.
    int64_t lower_bound(uint64_t hash) const;
    void grow();
    // Takes memory for at least so many homes and the keys of this partition.
    void resize(int64_t homes);
    void allocate(int64_t homes);
    bool fill(const Partition& from);
    static uint64_t value(Place place) { return place.low | static_cast<uint64_t>(place.high) << 32; }

    std::unique_ptr<char[], Free> memory_{nullptr, Free{0}};
    uint64_t* hashes_ = nullptr;  // in `memory_`
    Place* places_ = nullptr;     // behind them
    int64_t bytes_ = 0;
    int64_t homes_ = 0;
    int64_t slots_ = 0;  // those of the homes, and some behind them; the last is always empty
    int64_t size_ = 0;
  };

  Partition& partition(uint64_t hash) { return partitions_[hash >> (64 - kPartitionBits)]; }
  const Partition& partition(uint64_t hash) const { return partitions_[hash >> (64 - kPartitionBits)]; }

  std::array<Partition, kPartitions> partitions_;
  uint64_t largest_ = kNone;
  int64_t size_ = 0;
  KeyHash hash_;
};

}  // namespace terarec::rowfile
