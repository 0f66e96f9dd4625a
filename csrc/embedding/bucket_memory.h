// Memory for the arrays of buckets of one hash index.
#pragma once

#include <atomic>
#include <cstdint>

#include "embedding/bucket_pool.h"
#include "embedding/hash_bucket.h"

namespace terarec {

// An array of buckets, given back by nobody but BucketMemory. It lies in chunks, so that it can use whatever memory
// another has given back: growing arrays that lie in one piece leave holes that are too small for the next, and asking
// the system for fresh pages at each growth took a tenth of the time of all insertion (two Zen 3 cores).
class BucketArray {
 public:
  // Buckets of the smallest chunks. Those of larger ones are multiples, but for the last.
  static constexpr int64_t kLeastChunk = int64_t{1} << BucketPool::kUnitBits;

  // One bucket that is always empty and never written to, for an index without memory.
  BucketArray();

  int64_t size() const { return size_; }
  bool owned() const { return is_owned_; }
  Bucket& operator[](int64_t i) const {
    const int64_t chunk = i >> bits_;
    return chunks_[chunk][i - (chunk << bits_)];
  }

 private:
  friend class BucketMemory;

  // Few members: with what else a segment has they fill half a cache line, and a search reads those of all segments.
  Bucket** chunks_;
  int64_t size_ = 1;
  int32_t bits_ = 0;  // log2 of the buckets of a chunk
  bool is_owned_ = false;
};

// Tiny arrays come from the heap, larger ones from the huge pages of the pool: without huge pages a search takes 1.6
// times as long in 190 MB and 2 to 3 times as long in 1.9 GB, and the system takes 5 times as long to give memory.
class BucketMemory {
 public:
  // At least `size` buckets, their content unspecified: of the pool, whole units. Throws std::bad_alloc.
  BucketArray take(int64_t size);
  void give_back(BucketArray& array);

  // What all arrays take.
  int64_t held_bytes() const { return held_bytes_; }

 private:
  std::atomic<int64_t> held_bytes_{0};
};

}  // namespace terarec
