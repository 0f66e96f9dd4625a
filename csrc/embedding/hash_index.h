// int64 key -> row of 36 bits, for batches of keys and several threads.
//
// A hash chooses one of 256 segments by its high bits and in it, by the rest, one of an array of 64-byte buckets: see
// hash_bucket.h and hash_segment.h. A search takes one cache line in most cases, fetched well before it is looked at.
// What changes the index sorts the keys of a call by segment, keeping their order, and gives each segment to one
// thread; so results are those of taking the keys one by one, whatever the number of threads.
//
// A segment that is full is rebuilt 1.75 times larger in one sequential pass. The segments' sizes are staggered, so
// that they are rebuilt one after the other: a call that takes up a share p of the keys held rebuilds about 2 p of the
// index, and memory per key is the same at any size.
#pragma once

#include <array>
#include <cstdint>

#include "embedding/bucket_memory.h"
#include "embedding/hash_segment.h"
#include "embedding/huge_memory.h"

namespace terarec {

// SplitMix64's finalizer: a bijection, so that no two keys have one hash. Without the seed, which differs from index to
// index, nobody can choose keys that crowd one bucket.
struct KeyHash {
  uint64_t seed;

  uint64_t operator()(int64_t key) const {
    uint64_t bits = static_cast<uint64_t>(key) + seed;
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBu;
    return bits ^ (bits >> 31);
  }
};

// Row of new key j: free_rows[j] below num_free, then next, next + step, ...
struct NewRows {
  const int64_t* free_rows;
  int64_t num_free;
  int64_t next;
  int64_t step;

  int64_t row(int64_t j) const { return j < num_free ? free_rows[j] : next + (j - num_free) * step; }
};

// Keys of a call.
struct KeySpan {
  const int64_t* keys;
  int64_t size;
};

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
  // A key of a call, in 16 bytes.
  class Entry {
   public:
    Entry() = default;
    Entry(int64_t key, int64_t at) : key_or_place_(key), at_(at) {}

    int64_t key() const { return key_or_place_; }  // until it is placed
    int64_t at() const { return at_ < 0 ? ~at_ : at_; }  // position in the call
    bool is_repeat() const { return at_ < 0; }
    void make_repeat() { at_ = ~at_; }

    // A bucket's address leaves room for the slot.
    void set_place(BucketSlot place) { key_or_place_ = reinterpret_cast<int64_t>(place.bucket) | place.slot; }
    Bucket* bucket() const { return reinterpret_cast<Bucket*>(key_or_place_ & ~int64_t{7}); }
    int slot() const { return static_cast<int>(key_or_place_ & 7); }
    bool is_at(BucketSlot place) const { return !is_repeat() && bucket() == place.bucket && slot() == place.slot; }

   private:
    int64_t key_or_place_, at_;
  };

  struct EntrySpan {
    const Entry* entries;
    int64_t size;
  };

  // Keys of a segment that have no place yet: those to be tried in the next bucket, and those to be looked for.
  struct Unplaced {
    Entry* onward;
    Entry* rest;
    int64_t num_onward, num_rest;
  };

  // Keys of a call, segment after segment, those of a segment in the order of the call.
  struct Sorted {
    CallMemory entries;
    std::array<int64_t, HashSegment::kSegments> begin, size;
    std::array<bool, HashSegment::kSegments> is_placed;

    Entry* of(int segment) const { return static_cast<Entry*>(entries.get()) + begin[segment]; }
  };

  static int number(uint64_t hash) { return static_cast<int>(hash >> (64 - HashSegment::kSegmentBits)); }
  const HashSegment& segment(uint64_t hash) const { return segments_[number(hash)]; }

  int64_t find_block(KeySpan keys, int64_t* rows) const;
  int64_t find_unless_new(KeySpan keys, int64_t* rows, int threads) const;
  Sorted sort_absent(KeySpan keys, const int64_t* rows, int threads) const;
  int64_t count_new(const Sorted& absent, int number) const;
  void take_up(Sorted& absent, int number, int64_t* rows);
  void take_up_at(int64_t step, EntrySpan keys, Sorted& absent, int number, int64_t* rows, Unplaced& unplaced);
  void take_up_rest(Sorted& absent, int number, int64_t* rows, EntrySpan rest);
  void take_back(const Sorted& absent);
  void write_rows(const Sorted& absent, int number, int64_t* rows);
  template <class Apply>
  void upsert(KeySpan keys, int64_t* rows, int threads, Apply&& apply);

  std::array<HashSegment, HashSegment::kSegments> segments_;
  BucketMemory memory_;
  KeyHash hash_;
};

}  // namespace terarec
