// SPDX-License-Identifier: Apache-2.0

// int64 key -> row of 36 bits, for batches of keys and several threads.
//
// The high bits of a hash choose one of 256 segments, the rest a bucket in the segment's array of 64-byte buckets: see
// hash_bucket.h and hash_segment.h. Most searches read one cache line, which is prefetched well before.
// Calls that change the index sort their keys by segment, keeping their order, and process each segment in one
// thread; so results equal those of one key at a time, whatever the number of threads: see hash_insertion.h.
//
// A full segment is rebuilt 1.75 times larger in one sequential pass, in the middle of a call if necessary. The sizes
// of the segments are staggered, so that they are rebuilt one after the other: a call that inserts a share p of the
// present keys rebuilds about 2 p of the index, and memory per key is the same at any size.
#pragma once

#include <array>
#include <cstdint>

#include "embedding/bucket_memory.h"
#include "embedding/hash_segment.h"
#include "embedding/split_mix.h"
#include "embedding/hash_insertion.h"

namespace terarec {

class HashIndex {
 public:
  static constexpr int64_t kMostRows = int64_t{1} << 36;

  explicit HashIndex(uint64_t seed) : hash_{seed} {}
  ~HashIndex();
  HashIndex(const HashIndex&) = delete;
  HashIndex& operator=(const HashIndex&) = delete;

  int64_t size() const;
  int64_t memory_bytes() const { return static_cast<int64_t>(sizeof(*this)) + memory_.held_bytes(); }

  // Writes each key's row, or -1, and returns how many keys are absent.
  int64_t find(KeySpan keys, int64_t* rows, int threads) const;

  // Inserts the absent keys. Writes the rows of all keys and, if not null, the new keys in the order of their first
  // occurrence; returns the number of new keys, or -1 if rows would reach kMostRows. Throws std::bad_alloc. In both
  // cases of failure only `rows` has changed.
  int64_t insert(KeySpan keys, int64_t* rows, const NewRows& new_rows, int64_t* new_keys, int threads);

  // Gives each key a row, the last one if a key is repeated. Throws std::bad_alloc, having changed nothing.
  void assign(KeySpan keys, const int64_t* rows, int threads);

  // Adds 1 to each key's row per occurrence, from 0 to kMostRows - 1, and writes the row after each. Throws as assign.
  void count(KeySpan keys, int64_t* rows, int threads);

  // Removes keys; writes the row that each had, or -1. Without `shrinks` memory stays for as many keys.
  void erase(KeySpan keys, int64_t* rows, int threads, bool shrinks = true);

  // Writes at most `most` keys and rows from position `start` on, and their number; returns the next position, or -1.
  int64_t items(int64_t start, int64_t most, int64_t* keys, int64_t* rows, int64_t* written) const;

 private:
  const HashSegment& segment(uint64_t hash) const { return segments_[HashSegment::number(hash)]; }

  struct SearchGroup;

  void fetch_homes(KeySpan keys, SearchGroup& group) const;
  int64_t find_block(KeySpan keys, int64_t* rows) const;
  int64_t find_after_home(int64_t step, const int64_t* keys, uint16_t* list, int64_t size, int64_t* rows,
                          int64_t* absent) const;
  int64_t find_unless_new(KeySpan keys, int64_t* rows, int threads) const;
  template <class Apply>
  void upsert(KeySpan keys, int64_t* rows, int threads, Apply&& apply);

  std::array<HashSegment, HashSegment::kSegments> segments_;
  BucketMemory memory_;
  KeyHash hash_;
};

}  // namespace terarec
