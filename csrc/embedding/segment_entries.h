// The keys of a call on a hash index, sorted by the segments that they belong to.
#pragma once

#include <array>
#include <cstdint>

#include "embedding/hash_segment.h"
#include "embedding/result_memory.h"
#include "embedding/key_hash.h"

namespace terarec {

// Keys of a call.
struct KeySpan {
  const int64_t* keys;
  int64_t size;
};

// What the rows of a call hold for a key that was not found.
constexpr int64_t kAbsent = -1;

// Keys of a unit of what goes through the keys of a call in their order.
constexpr int64_t kBlockKeys = 32768;

inline int64_t num_blocks(int64_t size) { return (size + kBlockKeys - 1) / kBlockKeys; }

// Calls visit(position) for the positions of a block.
template <class Visit>
void for_block(int64_t block, int64_t size, Visit&& visit) {
  const int64_t end = size < (block + 1) * kBlockKeys ? size : (block + 1) * kBlockKeys;
  for (int64_t i = block * kBlockKeys; i < end; i++) visit(i);
}

// A key of a call, in 16 bytes. Once it has been put into a bucket, its place takes the place of its hash.
class Entry {
 public:
  Entry() = default;
  Entry(uint64_t hash, int64_t at) : hash_or_place_(hash), at_(at) {}

  uint64_t hash() const { return hash_or_place_; }
  int64_t at() const { return at_ < 0 ? ~at_ : at_; }  // position in the call
  bool is_repeat() const { return at_ < 0; }
  void make_repeat() { at_ = ~at_; }

  void set_hash(uint64_t hash) { hash_or_place_ = hash; }

  // A bucket's address leaves room for the slot.
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
  // Those of the keys whose row is kAbsent, or of all if `rows` is null. Throws std::bad_alloc.
  SegmentEntries(KeySpan keys, const int64_t* rows, const KeyHash& hash, int threads);

  Entry* of(int segment) const { return static_cast<Entry*>(entries_.get()) + begin_[segment]; }
  int64_t size(int segment) const { return begin_[segment + 1] - begin_[segment]; }

 private:
  template <class Takes>
  void sort(KeySpan keys, Takes&& takes, const KeyHash& hash, int threads);

  CallMemory entries_;
  std::array<int64_t, HashSegment::kSegments + 1> begin_{};
};

}  // namespace terarec
