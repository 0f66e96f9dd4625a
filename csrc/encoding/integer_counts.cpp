#include "encoding/integer_counts.h"

#include <algorithm>

namespace terarec::encoding {

// Makes room for `more` new values at a load of at most 0.7.
template <typename Slot>
void IntegerCounts<Slot>::reserve(uint64_t more) {
  uint64_t capacity = slots_.capacity();
  while ((used_ + more) * 10 > capacity * 7) capacity *= 2;
  if (capacity == slots_.capacity()) return;
  Slots<Slot> grown(capacity);
  for (uint64_t index = 0; index < slots_.capacity(); ++index) {
    const Slot& slot = slots_[index];
    if (slot.is_free()) continue;
    uint64_t target = grown.home(slot_hash(slot.value()));
    while (!grown[target].is_free()) target = grown.next(target);
    grown[target] = slot;
  }
  slots_.swap(grown);
}

template <typename Slot>
void IntegerCounts<Slot>::add(const Value* values, MissingMask missing, const int64_t* times, int64_t num_values) {
  constexpr int64_t chunk = 1024;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (int64_t begin = 0; begin < num_values; begin += chunk) {
    const int64_t end = std::min(begin + chunk, num_values);
    reserve(static_cast<uint64_t>(end - begin));
    for (int64_t row = begin; row < end; ++row) {
      if (row + kPrefetchDistance < num_values) slots_.prefetch(slot_hash(values[row + kPrefetchDistance]));
      if (missing[row]) continue;
      const Value value = values[row];
      uint64_t index = slots_.home(slot_hash(value));
      while (!slots_[index].is_free() && slots_[index].value() != value) index = slots_.next(index);
      Slot& slot = slots_[index];
      if (slot.is_free()) {
        slot.start(value);
        ++used_;
      }
      slot.add(times != nullptr ? times[row] : 1);
    }
  }
}

template <typename Slot>
int64_t IntegerCounts<Slot>::size() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int64_t>(used_);
}

template <typename Slot>
int64_t IntegerCounts<Slot>::memory_bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int64_t>(slots_.capacity() * sizeof(Slot));
}

template <typename Slot>
std::vector<ValueCount<typename Slot::Value>> IntegerCounts<Slot>::entries(int64_t min_count) const {
  std::vector<ValueCount<Value>> found;
  for (uint64_t index = 0; index < slots_.capacity(); ++index) {
    const Slot& slot = slots_[index];
    if (!slot.is_free() && slot.count() >= min_count) found.push_back({slot.value(), slot.count()});
  }
  return found;
}

template <typename Slot>
std::vector<ValueCount<typename Slot::Value>> IntegerCounts<Slot>::at_least(int64_t min_count) const {
  using Entry = ValueCount<Value>;
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Entry> kept = entries(min_count);
  std::sort(kept.begin(), kept.end(), [](const Entry& a, const Entry& b) {
    return a.count != b.count ? a.count > b.count : a.value < b.value;
  });
  return kept;
}

template <typename Slot>
std::vector<ValueCount<typename Slot::Value>> IntegerCounts<Slot>::drain() {
  using Entry = ValueCount<Value>;
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Entry> all = entries(1);
  Slots<Slot> empty(kFirstCapacity);
  slots_.swap(empty);
  used_ = 0;
  std::sort(all.begin(), all.end(), [](const Entry& a, const Entry& b) { return a.value < b.value; });
  return all;
}

template class IntegerCounts<Hex32Slot>;
template class IntegerCounts<Int64Slot>;

}  // namespace terarec::encoding
