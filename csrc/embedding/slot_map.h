// SPDX-License-Identifier: Apache-2.0

// Which rows have one of a bounded number of slots, and which rows give theirs to others: see kernels/ref/slots.py.
//
// What is known of a slot lies in arrays of the caller, one for each number, so that what goes over all slots reads a
// few bytes of each. One thread at a time calls a map; searches in its index may use more.
#pragma once

#include <cstdint>
#include <vector>

#include "embedding/hash_index.h"

namespace terarec {

// Of `capacity` elements each.
struct SlotArrays {
  int64_t* rows;    // kNoRow for none; any number is a row where is_held says so
  int64_t* keys;    // of the rows in their tables
  int32_t* tables;  // of the rows
  bool* is_held;  // whether the slot has a row
  bool* is_dirty;
  int32_t* needed_until;  // number of the last coming batch that needs the row
  uint8_t* counts;  // of uses
  int16_t* pins;    // kFree for a slot that may be assigned; a pinned one may have lost its row
  int32_t* marks;   // number of the last call that named the slot
};

// Rows with what the slots remember of them.
struct OwnedRows {
  const int64_t* rows;
  const int64_t* keys;
  const int64_t* tables;
  int64_t size;
};

struct SlotSpan {
  const int64_t* slots;
  int64_t size;
};

class SlotMap {
 public:
  static constexpr int64_t kNoRow = -1;
  static constexpr int16_t kFree = -1;
  static constexpr uint8_t kMostUses = 255;
  // Counts are halved after so many uses for each slot.
  static constexpr int64_t kUsesOfSlot = 64;

  SlotMap(int64_t capacity, const SlotArrays& arrays, uint64_t seed)
      : capacity_(capacity), arrays_(arrays), index_(seed) {}

  int64_t size() const { return index_.size(); }
  int64_t used_slots() const { return next_; }
  int64_t room() const { return static_cast<int64_t>(free_.size()) + capacity_ - next_; }
  int64_t num_pinned() const;

  // Writes each row's slot, or -1.
  void find(KeySpan rows, int64_t* slots, int threads) const { index_.find(rows, slots, threads); }

  struct Touched {
    int64_t used, absent;
  };
  // As find; counts a use of each slot, pins it once if `pins`, and writes each once to `used`. Writes the positions of
  // the rows without a slot to `absent`.
  Touched touch(KeySpan rows, bool pins, int64_t* slots, int64_t* used, int64_t* absent, int threads);

  // Notes that batches up to number `until` need rows; returns how many positions of rows without a slot it wrote to
  // `absent`.
  int64_t mark_needed(KeySpan rows, int32_t until, int64_t* absent);

  // Counted: a slot pinned twice is free to lose its row after two calls of unpin.
  void pin(SlotSpan slots);
  void unpin(SlotSpan slots);

  // Gives slots, which are pinned, to distinct rows without one; there is room. Throws std::bad_alloc, having changed
  // nothing.
  void assign(const OwnedRows& rows, int64_t* slots, int threads);

  struct Admitted {
    int64_t new_rows, released;
  };
  // Writes the slots of distinct rows, none of which is pinned by this. Those without one get one; if there is no room,
  // the slots of the fewest uses are released, `at_once` or more. Writes -1 for rows that find all others pinned.
  Admitted admit(KeySpan rows, int64_t at_once, int64_t* slots, int threads);

  // Takes the rows of distinct slots away.
  void release(SlotSpan slots, int threads);

  // Writes up to `count` slots that may be released, those of the fewest uses, and returns how many: rows that a batch
  // after `batch` needs stay if there are others; changed rows stay if `keeps_dirty`.
  int64_t victims(int64_t count, int32_t batch, bool keeps_dirty, int64_t* slots);

  // Writes distinct slots table by table, in the order in which they come.
  void by_table(SlotSpan slots, int64_t* ordered) const;

 private:
  template <class MayRelease>
  int64_t least_used(int64_t count, const MayRelease& may_release, int64_t* slots);
  void age(int64_t uses);

  const int64_t capacity_;
  const SlotArrays arrays_;
  HashIndex index_;
  std::vector<int64_t> free_;
  int64_t next_ = 0;  // slots from the first on that ever had a row
  int64_t hand_ = 0;  // where the search for victims of equal use continues, as in the clock algorithm
  int64_t uses_ = 0;  // since counts were halved
  int32_t mark_ = 0;  // number of the present call of touch, written to `marks`
};

}  // namespace terarec
