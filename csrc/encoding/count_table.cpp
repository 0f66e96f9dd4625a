#include "encoding/count_table.h"

#include <algorithm>

namespace terarec::encoding {

// Makes room for `more` new values at a load of at most 0.7.
void CountTable::reserve(uint64_t more) {
  uint64_t capacity = slots_.capacity();
  while ((used_ + more) * 10 > capacity * 7) capacity *= 2;
  if (capacity == slots_.capacity()) return;
  Slots<uint64_t> grown(capacity);
  for (uint64_t index = 0; index < slots_.capacity(); ++index) {
    const uint64_t slot = slots_[index];
    if (slot == 0) continue;
    uint64_t target = grown.home(mix(slot >> 32));
    while (grown[target] != 0) target = grown.next(target);
    grown[target] = slot;
  }
  slots_.swap(grown);
}

void CountTable::add(const uint32_t* keys, const uint64_t* missing, int bit, int64_t num_keys) {
  constexpr int64_t chunk = 1024;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (int64_t begin = 0; begin < num_keys; begin += chunk) {
    const int64_t end = std::min(begin + chunk, num_keys);
    reserve(static_cast<uint64_t>(end - begin));
    for (int64_t row = begin; row < end; ++row) {
      if (row + kPrefetchDistance < num_keys) slots_.prefetch(mix(keys[row + kPrefetchDistance]));
      if ((missing[row] >> bit) & 1) continue;
      const uint64_t value = keys[row];
      uint64_t index = slots_.home(mix(value));
      while (slots_[index] != 0 && slots_[index] >> 32 != value) index = slots_.next(index);
      uint64_t& slot = slots_[index];
      used_ += slot == 0;
      if (slot == 0) slot = value << 32;
      if (static_cast<uint32_t>(slot) != UINT32_MAX) ++slot;
    }
  }
}

std::vector<ValueCount> CountTable::at_least(uint32_t min_count) const {
  std::vector<ValueCount> kept;
  for (uint64_t index = 0; index < slots_.capacity(); ++index) {
    const uint64_t slot = slots_[index];
    const ValueCount entry{static_cast<uint32_t>(slot >> 32), static_cast<uint32_t>(slot)};
    if (slot != 0 && entry.count >= min_count) kept.push_back(entry);
  }
  std::sort(kept.begin(), kept.end(), [](const ValueCount& a, const ValueCount& b) {
    return a.count != b.count ? a.count > b.count : a.value < b.value;
  });
  return kept;
}

}  // namespace terarec::encoding
