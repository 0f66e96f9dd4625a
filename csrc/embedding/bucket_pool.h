// The huge pages that the buckets of all hash indexes of a process share.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <mutex>
#include <vector>

#include "embedding/hash_bucket.h"

namespace terarec {

// A page has 32 chunks, each of 32 units. What one array gives back the next one takes, in pieces, whatever its size
// and its index; so growing leaves no holes, which were half as large as 26 growing indexes of 200 K keys on the heap.
// Pages of which nothing is used go back to the system, but for a few.
class BucketPool {
 public:
  static constexpr int kChunkBits = 10;  // buckets of a chunk: 64 KiB
  static constexpr int kUnitBits = 5;    // buckets of a unit: 2 KiB
  static constexpr int64_t kChunkUnits = int64_t{1} << (kChunkBits - kUnitBits);

  // That of the process.
  static BucketPool& shared();

  // A table of `chunks` chunks' addresses. Throws std::bad_alloc.
  Bucket** take_table(int64_t chunks);
  void give_table_back(Bucket** table, int64_t chunks);

  // Takes `count` units that may lie anywhere. Throws std::bad_alloc, having changed nothing.
  void take_units(Bucket** units, int64_t count);
  // Takes `units` units in chunks, of which the last one may be a part of one. Throws as take_units.
  void take_chunks(Bucket** chunks, int64_t units);
  // What was taken as units or chunks, of `units` units in all.
  void give_units_back(Bucket* const* units, int64_t count);
  void give_chunks_back(Bucket* const* chunks, int64_t units);

  // What the system was asked for and has not got back.
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
  void give_back(Bucket* first, int units);
  void change(Page& page, int chunk, uint32_t free);

  std::mutex mutex_;
  // Tables live long and are small: on the heap they would lie scattered among the holes that large temporary results
  // leave, so that these could not be used again.
  std::pmr::unsynchronized_pool_resource tables_;
  std::vector<Page> pages_;  // by address
  int64_t whole_chunks_ = 0;
  int64_t loose_units_ = 0;
};

}  // namespace terarec
