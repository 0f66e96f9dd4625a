// int64 key -> row of 36 bits, for batches of keys and several threads.
//
// A hash chooses one of 256 segments by its high bits and in it, by the rest, one of an array of 64-byte buckets: see
// hash_bucket.h and hash_segment.h. A search takes one cache line in most cases, fetched well before it is looked at.
// What changes the index sorts the keys of a call by segment, keeping their order, and gives each segment to one
// thread; so results are those of taking the keys one by one, whatever the number of threads: see hash_insertion.h.
//
// A segment that is full is rebuilt 1.75 times larger in one sequential pass, amid a call if it must be. The segments'
// sizes are staggered, so that they are rebuilt one after the other: a call that takes up a share p of the keys held
// rebuilds about 2 p of the index, and memory per key is the same at any size.
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

  // Takes up the absent keys. Writes the rows of all keys and, if not null, the new keys in the order of their first
  // occurrence; returns the number of new keys, or -1 if rows would reach kMostRows. Throws std::bad_alloc. In both
  // cases nothing has changed but `rows`.
  int64_t insert(KeySpan keys, int64_t* rows, const NewRows& new_rows, int64_t* new_keys, int threads);

  // Gives each key a row, the last one if a key is repeated. Throws std::bad_alloc, having changed nothing.
  void assign(KeySpan keys, const int64_t* rows, int threads);

  // Adds 1 to each key's row per occurrence, from 0 to kMostRows - 1, and writes the row after each. Throws as assign.
  void count(KeySpan keys, int64_t* rows, int threads);

  // Removes keys; writes the row that each had, or -1.
  void erase(KeySpan keys, int64_t* rows, int threads);

  // Writes at most `most` keys and rows from position `start` on, and how many; returns where to go on, or -1.
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
