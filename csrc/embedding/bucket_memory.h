// Memory for the arrays of buckets of one hash index.
#pragma once

#include <array>
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
  // 64 KiB. Smaller chunks have tables that leave the caches: with 16 KiB a search among 10 M keys was a seventh slower.
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

// Small arrays come from the heap, larger ones from huge pages: without huge pages a search takes 1.6 times as long in
// 190 MB and 2 to 3 times as long in 1.9 GB, and the system takes 5 times as long to give memory.
class BucketMemory {
 public:
  BucketMemory() = default;
  ~BucketMemory();
  BucketMemory(const BucketMemory&) = delete;
  BucketMemory& operator=(const BucketMemory&) = delete;

  // At least `size` buckets, their content unspecified: what huge pages hold are whole units. Throws std::bad_alloc.
  BucketArray take(int64_t size);
  void give_back(BucketArray& array);

  // What the system has been asked for and has not got back.
  int64_t held_bytes() const { return held_bytes_; }

 private:
  // A huge page of 32 chunks, each of 8 units. The last chunk of an array may be a part of one.
  struct Page {
    static constexpr int kChunks = 32;

    char* memory;
    std::array<uint8_t, kChunks> free;  // a bit for each unit of a chunk
    int whole;                          // chunks of which all units are free
  };
  // Units in a row, of a page's chunk; none if `run` is 0.
  struct Place {
    size_t page;
    int chunk;
    uint8_t run;
  };

  void take_chunks(Bucket** chunks, int64_t units);
  void map_page();
  size_t fullest_page_with_room() const;
  Place shared_place(int units) const;
  Place unshared_place(int units) const;
  Bucket* take_place(Place place);
  void give_back_units(Bucket* first, int units);

  std::mutex mutex_;
  std::vector<Page> pages_;  // by address
  int64_t whole_chunks_ = 0;
  int64_t held_bytes_ = 0;
};

}  // namespace terarec
