// SPDX-License-Identifier: Apache-2.0

// A share of a hash index: an array of buckets in the order of the hash, owned by one thread while it changes.
#pragma once

#include <cstdint>

#include "embedding/bucket_memory.h"
#include "embedding/hash_bucket.h"

namespace terarec {

// Position of a key; bucket is null if the key is absent.
struct BucketSlot {
  Bucket* bucket;
  int slot;
};

class HashSegment {
 public:
  // The high bits of a hash choose the segment, the others the bucket.
  static constexpr int kSegmentBits = 8;
  static constexpr int kSegments = 1 << kSegmentBits;
  // Number of keys to prefetch ahead of the current one.
  static constexpr int64_t kAhead = 32;

  static int number(uint64_t hash) { return static_cast<int>(hash >> (64 - kSegmentBits)); }

  int64_t size() const { return size_; }
  const BucketArray& buckets() const { return buckets_; }

  // Number of the bucket that a key should be in. Monotonic in the hash, whatever the number of buckets.
  int64_t home(uint64_t hash) const {
    const auto product = static_cast<unsigned __int128>(hash << kSegmentBits) * static_cast<uint64_t>(buckets_.size());
    return static_cast<int64_t>(product >> 64);
  }

  Bucket& home_bucket(uint64_t hash) const { return buckets_[home(hash)]; }

  // The bucket `step` after a key's home, the first following the last.
  Bucket& after_home(uint64_t hash, int64_t step) const {
    const int64_t i = home(hash) + step;
    return buckets_[i < buckets_.size() ? i : i - buckets_.size()];
  }

  // Prefetches the cache line of a key's home. (Prefetching the next one, too, is slower.)
  void fetch(uint64_t hash) const { __builtin_prefetch(&home_bucket(hash)); }

  BucketSlot find(uint64_t hash) const {
    for (int64_t step = 0; step < buckets_.size(); step++) {
      Bucket& bucket = after_home(hash, step);
      const uint32_t match = bucket.match(hash);
      if (match) return {&bucket, __builtin_ctz(match)};
      if (!bucket.passed()) break;
    }
    return {nullptr, 0};
  }

  // Puts an absent key into the first bucket from its home on that has room. There must be room: see `room`.
  BucketSlot place(uint64_t hash, int64_t row) {
    Bucket* bucket = &home_bucket(hash);
    for (int64_t step = 1; bucket->full(); step++) {
      bucket->pass();
      bucket = &after_home(hash, step);
    }
    bucket->add(hash, row);
    size_++;
    return {bucket, bucket->count() - 1};
  }

  // Counts a key in the `steps` buckets from its home on, behind which it lies.
  void pass(uint64_t hash, int64_t steps) {
    for (int64_t step = 0; step < steps; step++) after_home(hash, step).pass();
  }

  // Counts keys that were put into buckets by other means than `place`.
  void count_added(int64_t keys) { size_ += keys; }

  // The row that the key had, or -1.
  int64_t erase(uint64_t hash);

  // Number of keys that fit before it must grow.
  int64_t room() const { return limit() - size_; }

  // Whether it is so full that growing is better than filling it up.
  bool nearly_full() const { return room() <= limit() / 64; }

  // Makes segment `number` larger, about by 1.75 or until there is room for `extra` keys. Throws std::bad_alloc, having
  // changed nothing.
  void grow(int number, int64_t extra, BucketMemory& memory) { rebuild(grown(number, size_ + extra), memory); }

  // Frees memory if it exceeds 24 bytes a key after keys were erased; returns whether it did.
  bool shrink(BucketMemory& memory);

  // Moves to fuller pages, if memory is available.
  void move(BucketMemory& memory);

  void release(BucketMemory& memory) { memory.release(buckets_); }

 private:
  // Fuller buckets make the search for absent keys longer, emptier ones cost memory. Growing by 1.75 keeps the load
  // between 49 and 85 %, which is 20.2 bytes a key on the average of the staggered segments, and moves a key 1.3 times;
  // growing by 1.25 needs 16.9 bytes, but moves a key 4 times; by 1.85 inserts no faster and needs 22 bytes with all
  // that belongs to a key.
  static constexpr int64_t kMostPercent = 85;

  int64_t limit() const {
    if (!buckets_.owned()) return 0;
    return buckets_.size() == 1 ? Bucket::kSlots : buckets_.size() * kMostPercent / 20;
  }

  int64_t grown(int number, int64_t keys) const;
  void rebuild(int64_t least_buckets, BucketMemory& memory);

  BucketArray buckets_;
  int64_t size_ = 0;
};

}  // namespace terarec
