// How often each text of a column occurs.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "encoding/missing.h"
#include "encoding/slots.h"

namespace terarec::encoding {

// n texts in Arrow's layout, text i being bytes [offsets[i], offsets[i + 1]), and how often each occurs.
struct CountedTexts {
  std::string bytes;
  std::vector<int64_t> offsets;
  std::vector<int64_t> counts;
};

// An open-addressing table over texts that lie one after another in the order of their first occurrence. Threads may call
// all of it at the same time: one works, the others wait.
class TextCounts {
 public:
  TextCounts() : slots_(kFirstCapacity) {}

  // Counts the texts that are neither missing nor empty: text i `times[i]` >= 1 times, or once without `times`. Text i is
  // text[offsets[i], offsets[i + 1]).
  void add(const char* text, const int64_t* offsets, MissingMask missing, const int64_t* times, int64_t num_texts);

  // Number of distinct texts.
  int64_t size() const;
  int64_t memory_bytes() const;

  // The texts that occurred at least min_count times, by falling count, ties by rising bytes.
  CountedTexts at_least(int64_t min_count) const;

  // All texts, by rising bytes; the table is empty and small afterwards.
  CountedTexts drain();

 private:
  static constexpr uint64_t kFirstCapacity = 1024;
  struct Entry {
    int64_t begin;
    int64_t count;
  };

  void reserve(uint64_t more);
  Entry& entry_of(std::string_view text, uint64_t hash);
  CountedTexts gather(const std::vector<uint32_t>& positions) const;
  std::string_view text_of(size_t position) const {
    const auto begin = static_cast<size_t>(entries_[position].begin);
    const size_t end = position + 1 < entries_.size() ? static_cast<size_t>(entries_[position + 1].begin) : bytes_.size();
    return {bytes_.data() + begin, end - begin};
  }

  std::string bytes_;
  std::vector<Entry> entries_;
  Slots<uint64_t> slots_;  // the hash's upper half << 32 | position + 1; 0 is free
  mutable std::mutex mutex_;
};

}  // namespace terarec::encoding
