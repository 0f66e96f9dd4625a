// Memory for the arrays of buckets of one hash index.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "embedding/hash_bucket.h"

namespace terarec {

// An array of buckets in chunks, so that a large one can use whatever memory another has given back: growing arrays
// that lie in one piece leave holes that are too small for the next, and asking the system for fresh pages at each
// growth took a tenth of the time of all insertion (two Zen 3 cores).
class BucketArray {
 public:
  // 64 KiB. Smaller chunks waste less, but their table leaves the caches: with 16 KiB a search among 10 M keys was a
  // seventh slower.
  static constexpr int kChunkBits = 10;
  static constexpr int64_t kChunkBuckets = int64_t{1} << kChunkBits;

  // One bucket that is always empty and never written to, for an index without memory.
  BucketArray();

  int64_t size() const { return size_; }
  bool owned() const { return table_ != nullptr; }
  Bucket& operator[](int64_t i) const { return chunks_[i >> kChunkBits][i & (kChunkBuckets - 1)]; }

 private:
  friend class BucketMemory;

  std::unique_ptr<Bucket*[]> table_;
  Bucket* const* chunks_;
  int64_t size_ = 1;
};

// Small arrays come from the heap. Those of a large index share huge pages, of 32 chunks each: without huge pages a
// search takes 1.6 times as long in 190 MB and 2 to 3 times as long in 1.9 GB.
class BucketMemory {
 public:
  BucketMemory() = default;
  ~BucketMemory();
  BucketMemory(const BucketMemory&) = delete;
  BucketMemory& operator=(const BucketMemory&) = delete;

  // `size` buckets, their content unspecified. Throws std::bad_alloc.
  BucketArray take(int64_t size);
  void give_back(BucketArray& array);

  // What the system has been asked for and has not got back.
  int64_t held_bytes() const { return held_bytes_; }

 private:
  struct Page {
    char* memory;
    std::vector<uint8_t> free;  // numbers of its free chunks
  };

  void take_chunks(Bucket** chunks, int64_t count);
  void give_chunk_back(Bucket* chunk);
  Page& fullest_page_with_room();

  std::mutex mutex_;
  std::vector<Page> pages_;  // by address
  int64_t free_chunks_ = 0;
  int64_t held_bytes_ = 0;
};

}  // namespace terarec
