// How a hash index takes up the absent keys of a call.
#pragma once

#include <array>
#include <cstdint>

#include "embedding/bucket_memory.h"
#include "embedding/hash_segment.h"
#include "embedding/segment_entries.h"

namespace terarec {

// First every segment takes up its keys, which puts them where they belong while their cache lines are at hand; then
// all new keys are numbered in the order of the call; then every segment gives its keys their rows. In between, a
// placed key's row is the number of its entry, so that its further occurrences find the first.
class HashInsertion {
 public:
  // `rows` are those of the call's keys: kAbsent for what is not held.
  HashInsertion(HashSegment* segments, BucketMemory& memory, const SegmentEntries& entries, int64_t* rows)
      : segments_(segments), memory_(memory), entries_(entries), rows_(rows) {}

  // Takes up a segment's keys. Those that were held after all get their rows; the rows of new ones stay kAbsent, those
  // of repeated ones tell of the first. Throws std::bad_alloc.
  void take_up(int number);

  // Undoes what `take_up` did to all segments.
  void take_back();

  // Gives the keys that were placed their rows, and the repeated ones those of the first.
  void write_rows(int number) const;

 private:
  // Keys of a segment that have no place yet: those to be tried in the next bucket, and those to be looked for.
  struct Unplaced {
    Entry* onward;
    Entry* rest;
    int64_t num_onward, num_rest;
  };

  // Makes a segment larger for what is left of its keys, and finds those again that were placed.
  void grow(int number, EntrySpan left);
  void take_up_at(int64_t step, EntrySpan keys, int number, Unplaced& unplaced);
  void take_up_rest(EntrySpan rest, int number);

  HashSegment* segments_;
  BucketMemory& memory_;
  const SegmentEntries& entries_;
  int64_t* rows_;
  // Of each segment: how many of its first entries are keys that were placed, or repeat such a one.
  std::array<int64_t, HashSegment::kSegments> num_placed_{};
};

}  // namespace terarec
