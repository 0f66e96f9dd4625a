// SPDX-License-Identifier: Apache-2.0
#include "embedding/slot_map.h"

#include <algorithm>
#include <array>

#include "embedding/result_memory.h"

namespace terarec {
namespace {

// Slots that are prefetched ahead of the one in use.
constexpr int64_t kAhead = 24;

}  // namespace

int64_t SlotMap::num_pinned() const {
  return std::count_if(arrays_.pins, arrays_.pins + next_, [](int16_t pins) { return pins > 0; });
}

SlotMap::Touched SlotMap::touch(KeySpan rows, bool pins, int64_t* slots, int64_t* used, int64_t* absent, int threads) {
  index_.find(rows, slots, threads);
  const SlotArrays a = arrays_;
  if (++mark_ <= 0) {  // the number wrapped: old marks could look like new ones
    std::fill_n(a.marks, next_, 0);
    mark_ = 1;
  }
  Touched touched{0, 0};
  // One thread: a slot may occur many times, and `used` lists it once.
  for (int64_t i = 0; i < rows.size; i++) {
    if (i + kAhead < rows.size && slots[i + kAhead] >= 0) {
      __builtin_prefetch(a.marks + slots[i + kAhead], 1);
      __builtin_prefetch(a.pins + slots[i + kAhead], 1);
      __builtin_prefetch(a.counts + slots[i + kAhead], 1);
    }
    const int64_t slot = slots[i];
    if (slot < 0) {
      absent[touched.absent++] = i;
    } else if (a.marks[slot] != mark_) {
      a.marks[slot] = mark_;
      a.pins[slot] = static_cast<int16_t>(a.pins[slot] + pins);
      a.counts[slot] = static_cast<uint8_t>(a.counts[slot] + (a.counts[slot] < kMostUses));
      used[touched.used++] = slot;
    }
  }
  age(touched.used);
  return touched;
}

int64_t SlotMap::mark_needed(KeySpan rows, int32_t until, int64_t* absent) {
  const CallMemory memory(rows.size * sizeof(int64_t));
  auto* slots = static_cast<int64_t*>(memory.get());
  index_.find(rows, slots, 1);
  int64_t num_absent = 0;
  for (int64_t i = 0; i < rows.size; i++) {
    if (i + kAhead < rows.size && slots[i + kAhead] >= 0) __builtin_prefetch(arrays_.needed_until + slots[i + kAhead], 1);
    if (slots[i] < 0) absent[num_absent++] = i;
    else arrays_.needed_until[slots[i]] = until;
  }
  return num_absent;
}

void SlotMap::pin(SlotSpan slots) {
  for (int64_t i = 0; i < slots.size; i++) {
    if (i + kAhead < slots.size) __builtin_prefetch(arrays_.pins + slots.slots[i + kAhead], 1);
    arrays_.pins[slots.slots[i]]++;
  }
}

void SlotMap::unpin(SlotSpan slots) {
  for (int64_t i = 0; i < slots.size; i++) {
    if (i + kAhead < slots.size) __builtin_prefetch(arrays_.pins + slots.slots[i + kAhead], 1);
    arrays_.pins[slots.slots[i]]--;
  }
}

void SlotMap::assign(const OwnedRows& rows, int64_t* slots, int threads) {
  const SlotArrays a = arrays_;
  const auto num_free = static_cast<int64_t>(free_.size());
  const int64_t reused = std::min(rows.size, num_free);
  index_.insert({rows.rows, rows.size}, slots, {free_.data() + num_free - reused, reused, next_, 1}, nullptr, threads);
  free_.resize(num_free - reused);
  next_ += rows.size - reused;
  for (int64_t i = 0; i < rows.size; i++) {
    const int64_t slot = slots[i];
    a.rows[slot] = rows.rows[i];
    a.keys[slot] = rows.keys[i];
    a.tables[slot] = static_cast<int32_t>(rows.tables[i]);
    a.is_held[slot] = true;
    a.is_dirty[slot] = false;
    a.needed_until[slot] = 0;
    a.counts[slot] = 1;
    a.pins[slot] = 1;
  }
  age(rows.size);
}

SlotMap::Admitted SlotMap::admit(KeySpan rows, int64_t at_once, int64_t* slots, int threads) {
  const CallMemory memory(5 * rows.size * sizeof(int64_t));
  auto* const used = static_cast<int64_t*>(memory.get());
  int64_t *absent = used + rows.size, *keys = absent + rows.size, *given = keys + rows.size, *tables = given + rows.size;
  // Pinned until the end, so that the search for victims leaves the rows of this call in place.
  const Touched touched = touch(rows, true, slots, used, absent, threads);
  int64_t released = 0;
  if (touched.absent > room()) {
    std::vector<int64_t> gone(std::max(touched.absent - room(), at_once));
    released = victims(static_cast<int64_t>(gone.size()), 0, false, gone.data());
    release({gone.data(), released}, threads);
  }
  const int64_t admitted = std::min(touched.absent, room());
  for (int64_t i = 0; i < admitted; i++) keys[i] = rows.keys[absent[i]];
  std::fill_n(tables, admitted, 0);
  assign({keys, keys, tables, admitted}, given, threads);
  for (int64_t i = 0; i < admitted; i++) slots[absent[i]] = given[i];
  unpin({given, admitted});
  unpin({used, touched.used});
  return {admitted, released};
}

void SlotMap::release(SlotSpan slots, int threads) {
  const SlotArrays a = arrays_;
  const CallMemory memory(2 * slots.size * sizeof(int64_t));
  auto* const rows = static_cast<int64_t*>(memory.get());
  int64_t num_rows = 0;
  for (int64_t i = 0; i < slots.size; i++) {
    rows[num_rows] = a.rows[slots.slots[i]];
    num_rows += a.is_held[slots.slots[i]];
  }
  // As many rows come soon: freeing memory and allocating it again took 30 ms of a step with 40 K of 200 K slots.
  index_.erase({rows, num_rows}, rows + slots.size, threads, false);
  for (int64_t i = 0; i < slots.size; i++) {
    const int64_t slot = slots.slots[i];
    a.is_held[slot] = a.is_dirty[slot] = false;
    a.needed_until[slot] = 0;
    a.counts[slot] = 0;
    a.rows[slot] = kNoRow;
    // A pinned slot is not reused yet. Once nothing pins it, `victims` finds it, without a row and without uses.
    if (a.pins[slot] > 0) continue;
    a.pins[slot] = kFree;
    free_.push_back(slot);
  }
}

// Counts the uses of all slots that may go, which says how many uses the last victim has; then takes those with fewer
// wherever they are, and those with as many from the hand on, so that equal slots lose their rows in turns.
template <class MayRelease>
int64_t SlotMap::least_used(int64_t count, const MayRelease& may_release, int64_t* slots) {
  if (count <= 0 || next_ == 0) return 0;
  std::array<int64_t, kMostUses + 1> of_uses{};
  for (int64_t slot = 0; slot < next_; slot++) of_uses[arrays_.counts[slot]] += may_release(slot);
  int most = 0;
  int64_t below = 0;
  while (most < kMostUses && below + of_uses[most] < count) below += of_uses[most++];
  int64_t found = 0, at_most = count - below;
  const int64_t first = hand_ < next_ ? hand_ : 0;
  for (int64_t step = 0; step < next_; step++) {
    const int64_t slot = first + step < next_ ? first + step : first + step - next_;
    if (arrays_.counts[slot] > most || !may_release(slot)) continue;
    if (arrays_.counts[slot] == most) {
      if (at_most == 0) continue;
      at_most--;
      hand_ = slot + 1;
    }
    slots[found++] = slot;
  }
  return found;
}

int64_t SlotMap::victims(int64_t count, int32_t batch, bool keeps_dirty, int64_t* slots) {
  const SlotArrays a = arrays_;
  const auto is_loose = [&](int64_t slot) { return a.pins[slot] == 0 && !(keeps_dirty && a.is_dirty[slot]); };
  int64_t found = least_used(count, [&](int64_t slot) { return is_loose(slot) && a.needed_until[slot] <= batch; }, slots);
  if (found < count) {
    const auto is_needed = [&](int64_t slot) { return is_loose(slot) && a.needed_until[slot] > batch; };
    found += least_used(count - found, is_needed, slots + found);
  }
  return found;
}

void SlotMap::by_table(SlotSpan slots, int64_t* ordered) const {
  int32_t most = 0;
  for (int64_t i = 0; i < slots.size; i++) most = std::max(most, arrays_.tables[slots.slots[i]]);
  std::vector<int64_t> begin(most + 2);
  for (int64_t i = 0; i < slots.size; i++) begin[arrays_.tables[slots.slots[i]] + 1]++;
  for (int32_t table = 0; table <= most; table++) begin[table + 1] += begin[table];
  for (int64_t i = 0; i < slots.size; i++) ordered[begin[arrays_.tables[slots.slots[i]]]++] = slots.slots[i];
}

void SlotMap::age(int64_t uses) {
  uses_ += uses;
  if (uses_ < kUsesOfSlot * capacity_) return;
  uses_ = 0;
  for (int64_t slot = 0; slot < next_; slot++) arrays_.counts[slot] >>= 1;
}

}  // namespace terarec
