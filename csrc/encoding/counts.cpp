// SPDX-License-Identifier: Apache-2.0
#include "encoding/counts.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "encoding/slots.h"

namespace terarec::encoding {

// Reserves room for `more` new values at a load of at most 0.7.
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
    for (int64_t first = begin; first < end; first += MissingMask::kWordRows) {
      const int64_t stop = std::min(first + MissingMask::kWordRows, end);
      uint64_t absent = missing.word(first, stop - first);
      for (int64_t row = first; row < stop; ++row, absent >>= 1) {
        if (row + kPrefetchDistance < num_values) slots_.prefetch(slot_hash(values[row + kPrefetchDistance]));
        if ((absent & 1) != 0) continue;
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

namespace {

constexpr uint64_t kUpperHalf = 0xffffffff00000000ULL;

}  // namespace

// Reserves room for `more` new texts at a load of at most 0.7. home() uses the upper half of a hash alone.
void TextCounts::reserve(uint64_t more) {
  if (entries_.size() + more > UINT32_MAX - 1) throw std::length_error("more than 2^32 - 2 distinct texts in one table");
  uint64_t capacity = slots_.capacity();
  while ((entries_.size() + more) * 10 > capacity * 7) capacity *= 2;
  if (capacity == slots_.capacity()) return;
  Slots<uint64_t> grown(capacity);
  for (uint64_t index = 0; index < slots_.capacity(); ++index) {
    if (slots_[index] == 0) continue;
    uint64_t target = grown.home(slots_[index] & kUpperHalf);
    while (grown[target] != 0) target = grown.next(target);
    grown[target] = slots_[index];
  }
  slots_.swap(grown);
}

void TextCounts::add(const char* text, const int64_t* offsets, MissingMask missing, const int64_t* times,
                     int64_t num_texts) {
  constexpr int64_t chunk = 256;
  uint64_t hashes[chunk];
  const std::lock_guard<std::mutex> lock(mutex_);
  for (int64_t begin = 0; begin < num_texts; begin += chunk) {
    const int64_t end = std::min(begin + chunk, num_texts);
    reserve(static_cast<uint64_t>(end - begin));
    const auto text_at = [&](int64_t row) {
      return std::string_view(text + offsets[row], static_cast<size_t>(offsets[row + 1] - offsets[row]));
    };
    for (int64_t row = begin; row < end; ++row) {
      hashes[row - begin] = slot_hash(text_at(row)) & kUpperHalf;
      slots_.prefetch(hashes[row - begin]);
    }
    for (int64_t row = begin; row < end; ++row) {
      if (missing[row] || offsets[row] == offsets[row + 1]) continue;
      entry_of(text_at(row), hashes[row - begin]).count += times != nullptr ? times[row] : 1;
    }
  }
}

TextCounts::Entry& TextCounts::entry_of(std::string_view text, uint64_t hash) {
  uint64_t index = slots_.home(hash);
  for (; slots_[index] != 0; index = slots_.next(index)) {
    const size_t position = (slots_[index] & ~kUpperHalf) - 1;
    if ((slots_[index] & kUpperHalf) == hash && text_of(position) == text) return entries_[position];
  }
  entries_.push_back({static_cast<int64_t>(bytes_.size()), 0});
  bytes_.append(text);
  slots_[index] = hash | entries_.size();
  return entries_.back();
}

int64_t TextCounts::size() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int64_t>(entries_.size());
}

int64_t TextCounts::memory_bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int64_t>(slots_.capacity() * sizeof(uint64_t) + entries_.capacity() * sizeof(Entry) +
                              bytes_.capacity());
}

CountedTexts TextCounts::at_least(int64_t min_count) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<uint32_t> kept;
  for (size_t position = 0; position < entries_.size(); ++position) {
    if (entries_[position].count >= min_count) kept.push_back(static_cast<uint32_t>(position));
  }
  std::sort(kept.begin(), kept.end(), [this](uint32_t a, uint32_t b) {
    return entries_[a].count != entries_[b].count ? entries_[a].count > entries_[b].count : text_of(a) < text_of(b);
  });
  return gather(kept);
}

CountedTexts TextCounts::drain() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<uint32_t> all(entries_.size());
  std::iota(all.begin(), all.end(), 0);
  std::sort(all.begin(), all.end(), [this](uint32_t a, uint32_t b) { return text_of(a) < text_of(b); });
  CountedTexts drained = gather(all);
  Slots<uint64_t> empty(kFirstCapacity);
  slots_.swap(empty);
  std::vector<Entry>().swap(entries_);
  std::string().swap(bytes_);
  return drained;
}

CountedTexts TextCounts::gather(const std::vector<uint32_t>& positions) const {
  CountedTexts texts;
  texts.offsets.reserve(positions.size() + 1);
  texts.counts.reserve(positions.size());
  texts.offsets.push_back(0);
  for (const uint32_t position : positions) {
    texts.bytes.append(text_of(position));
    texts.offsets.push_back(static_cast<int64_t>(texts.bytes.size()));
    texts.counts.push_back(entries_[position].count);
  }
  return texts;
}

}  // namespace terarec::encoding
