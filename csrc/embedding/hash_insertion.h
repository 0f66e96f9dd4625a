// SPDX-License-Identifier: Apache-2.0

// The keys of a call on a hash index, sorted by the segments that they belong to.
#pragma once

#include <array>
#include <cstdint>

#include "embedding/bucket_memory.h"
#include "embedding/hash_segment.h"
#include "embedding/result_memory.h"
#include "embedding/split_mix.h"

namespace terarec {

// Keys of a call.
struct KeySpan {
  const int64_t* keys;
  int64_t size;
};

// The row of a key that was not found.
constexpr int64_t kAbsent = -1;

// Keys in one unit of work of passes over the keys of a call in their order.
constexpr int64_t kBlockKeys = 32768;

inline int64_t num_blocks(int64_t size) { return (size + kBlockKeys - 1) / kBlockKeys; }

// Calls visit(position) for the positions of a block.
template <class Visit>
void for_block(int64_t block, int64_t size, Visit&& visit) {
  const int64_t end = size < (block + 1) * kBlockKeys ? size : (block + 1) * kBlockKeys;
  for (int64_t i = block * kBlockKeys; i < end; i++) visit(i);
}

// A key of a call, in 16 bytes. Once it was inserted into a bucket, its place replaces its hash.
class Entry {
 public:
  Entry() = default;
  Entry(uint64_t hash, int64_t at) : hash_or_place_(hash), at_(at) {}

  uint64_t hash() const { return hash_or_place_; }
  int64_t at() const { return at_ < 0 ? ~at_ : at_; }  // position in the call
  bool is_repeat() const { return at_ < 0; }
  void make_repeat() { at_ = ~at_; }

  void set_hash(uint64_t hash) { hash_or_place_ = hash; }

  // The low bits of a bucket's address, which is aligned, hold the slot.
  void set_place(BucketSlot place) { hash_or_place_ = reinterpret_cast<uint64_t>(place.bucket) | place.slot; }
  Bucket* bucket() const { return reinterpret_cast<Bucket*>(hash_or_place_ & ~uint64_t{7}); }
  int slot() const { return static_cast<int>(hash_or_place_ & 7); }
  uint64_t placed_hash() const { return bucket()->hashes[slot()]; }
  bool is_at(BucketSlot place) const { return !is_repeat() && bucket() == place.bucket && slot() == place.slot; }

 private:
  uint64_t hash_or_place_;
  int64_t at_;
};

struct EntrySpan {
  const Entry* entries;
  int64_t size;
};

// Entries, segment after segment, those of a segment in the order of the call.
class SegmentEntries {
 public:
  // Entries of the keys whose row is kAbsent, or of all keys if `rows` is null. Throws std::bad_alloc.
  SegmentEntries(KeySpan keys, const int64_t* rows, const KeyHash& hash, int threads);

  Entry* of(int segment) const { return static_cast<Entry*>(entries_.get()) + begin_[segment]; }
  int64_t size(int segment) const { return begin_[segment + 1] - begin_[segment]; }

 private:
  template <class Takes>
  void sort(KeySpan keys, Takes&& takes, const KeyHash& hash, int threads);

  CallMemory entries_;
  std::array<int64_t, HashSegment::kSegments + 1> begin_{};
};

// Row of new key j: free_rows[j] below num_free, then next, next + step, ...
struct NewRows {
  const int64_t* free_rows;
  int64_t num_free;
  int64_t next;
  int64_t step;

  int64_t row(int64_t j) const { return j < num_free ? free_rows[j] : next + (j - num_free) * step; }
};

// Gives the keys of a call whose row is kAbsent their rows, in its order, and writes them to `new_keys` if that is not
// null. Returns how many they are, or -1, having changed nothing, if rows would reach `most_rows`.
int64_t number_new_keys(KeySpan keys, int64_t* rows, const NewRows& new_rows, int64_t most_rows, int64_t* new_keys,
                        int threads);

// First every segment inserts its keys, while their cache lines are cached; then all new keys are numbered in the order
// of the call; then every segment gives its keys their rows. In between, the row of an inserted key is the number of its
// entry, so that its further occurrences find the first.
class HashInsertion {
 public:
  // `rows` are those of the call's keys: kAbsent for absent keys.
  HashInsertion(HashSegment* segments, BucketMemory& memory, const SegmentEntries& entries, int64_t* rows)
      : segments_(segments), memory_(memory), entries_(entries), rows_(rows) {}

  // Inserts a segment's keys. Keys that turn out to be present get their rows; the rows of new keys stay kAbsent, those
  // of repeated keys refer to the first occurrence. Throws std::bad_alloc.
  void insert_keys(int number);

  // Undoes what `insert_keys` did to all segments.
  void undo();

  // Gives the inserted keys their rows, and repeated ones the row of the first occurrence.
  void write_rows(int number) const;

 private:
  // Keys of a segment that have no place yet: those to try in the next bucket, and those to search for.
  struct Unplaced {
    Entry* onward;
    Entry* rest;
    int64_t num_onward, num_rest;
  };

  // Grows a segment for the rest of its keys, and finds the inserted ones again.
  void grow(int number, EntrySpan left);
  void insert_at_step(int64_t step, EntrySpan keys, int number, Unplaced& unplaced);
  void insert_rest(EntrySpan rest, int number);

  HashSegment* segments_;
  BucketMemory& memory_;
  const SegmentEntries& entries_;
  int64_t* rows_;
  // Per segment: how many of its first entries are inserted keys or repeat one.
  std::array<int64_t, HashSegment::kSegments> num_placed_{};
};

}  // namespace terarec
