// SPDX-License-Identifier: Apache-2.0

// The huge pages that the buckets of all hash indexes of a process share.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <mutex>
#include <vector>

#include "embedding/hash_bucket.h"

namespace terarec {

// A page has 32 chunks, each of 32 units. Units that an array frees are reused by others of any size and index, so
// that growing does not fragment memory: on the heap, holes were half as large as 26 growing indexes of 200 K keys.
// All but a few unused pages are returned to the system.
class BucketPool {
 public:
  static constexpr int kChunkBits = 10;  // buckets of a chunk: 64 KiB
  static constexpr int kUnitBits = 5;    // buckets of a unit: 2 KiB
  static constexpr int64_t kChunkUnits = int64_t{1} << (kChunkBits - kUnitBits);

  // That of the process.
  static BucketPool& shared();

  // A table of `chunks` chunks' addresses. Throws std::bad_alloc.
  Bucket** take_table(int64_t chunks);
  void free_table(Bucket** table, int64_t chunks);

  // Takes `count` units that may lie anywhere. Throws std::bad_alloc, having changed nothing.
  void take_units(Bucket** units, int64_t count);
  // Takes `units` units in chunks, of which the last one may be a part of one. Throws as take_units.
  void take_chunks(Bucket** chunks, int64_t units);
  // Frees what was taken as units or chunks, of `units` units in all.
  void free_units(Bucket* const* units, int64_t count);
  void free_chunks(Bucket* const* chunks, int64_t units);

  // Bytes allocated from the system.
  int64_t held_bytes();

  // Whether more than an eighth of that, and more than a page, is free.
  bool is_sparse();

 private:
  struct Page {
    static constexpr int kChunks = 32;

    char* memory;
    std::array<uint32_t, kChunks> free;  // a bit for each unit of a chunk
    int whole;                           // chunks of which all units are free
    int loose;                           // free units of the other chunks

    int free_units() const { return whole * static_cast<int>(kChunkUnits) + loose; }
  };
  // Units in a row, of a page's chunk; none if `run` is 0.
  struct Place {
    size_t page;
    int chunk;
    uint32_t run;
  };

  void have_whole_chunks(int64_t count);
  size_t fullest(int Page::* room) const;
  Place whole_chunk(size_t page) const;
  Place loose_chunk() const;
  Place shared_chunk(int units) const;
  Bucket* take(Place place);
  void release(Bucket* first, int units);
  void change(Page& page, int chunk, uint32_t free);

  std::mutex mutex_;
  // Tables are small and long-lived: on the heap they would fragment the memory of large temporary results.
  std::pmr::unsynchronized_pool_resource tables_;
  std::vector<Page> pages_;  // by address
  int64_t whole_chunks_ = 0;
  int64_t loose_units_ = 0;
};

// An array of buckets, which only BucketMemory frees. It consists of chunks, so that it can reuse memory of other
// arrays: contiguous growing arrays leave holes that are too small for the next one, and allocating pages from the system at
// each growth took a tenth of the time of all insertion (two Zen 3 cores).
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
  void release(BucketArray& array);

  // Bytes of all arrays.
  int64_t held_bytes() const { return held_bytes_; }

 private:
  std::atomic<int64_t> held_bytes_{0};
};

}  // namespace terarec
