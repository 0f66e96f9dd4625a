// SPDX-License-Identifier: Apache-2.0

// How often each value of a column occurs: tables of integers and of texts.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "encoding/missing_mask.h"
#include "encoding/slots.h"

namespace terarec::encoding {

template <typename Value>
struct ValueCount {
  Value value;
  int64_t count;
};

// A slot of a 32-bit value: value << 32 | count. A count is at least 1, so that 0 is a free slot, value 0 included; it
// stops at 2^32 - 1.
struct Hex32Slot {
  using Value = uint32_t;
  uint64_t word;
  bool is_free() const { return word == 0; }
  Value value() const { return static_cast<Value>(word >> 32); }
  int64_t count() const { return static_cast<int64_t>(word & UINT32_MAX); }
  void start(Value value) { word = uint64_t{value} << 32; }
  void add(int64_t more) {
    const uint64_t room = UINT32_MAX - (word & UINT32_MAX);
    word += static_cast<uint64_t>(more) < room ? static_cast<uint64_t>(more) : room;
  }
};

struct Int64Slot {
  using Value = int64_t;
  int64_t key;
  int64_t times;
  bool is_free() const { return times == 0; }
  Value value() const { return key; }
  int64_t count() const { return times; }
  void start(Value value) { key = value; }
  void add(int64_t more) { times += more; }
};

// An open-addressing table. Several threads may call any member at the same time; one runs, the others wait.
template <typename Slot>
class IntegerCounts {
 public:
  using Value = typename Slot::Value;
  IntegerCounts() : slots_(kFirstCapacity) {}

  // Counts the values that are not missing: value i `times[i]` >= 1 times, or once without `times`.
  void add(const Value* values, MissingMask missing, const int64_t* times, int64_t num_values);

  // Number of distinct values.
  int64_t size() const;
  int64_t memory_bytes() const;

  // The values that occurred at least min_count times, by decreasing count, ties by increasing value.
  std::vector<ValueCount<Value>> at_least(int64_t min_count) const;

  // All values, by increasing value; the table is empty and small afterwards.
  std::vector<ValueCount<Value>> drain();

 private:
  static constexpr uint64_t kFirstCapacity = 4096;

  void reserve(uint64_t more);
  std::vector<ValueCount<Value>> entries(int64_t min_count) const;

  Slots<Slot> slots_;
  uint64_t used_ = 0;
  mutable std::mutex mutex_;
};

using Hex32Counts = IntegerCounts<Hex32Slot>;
using Int64Counts = IntegerCounts<Int64Slot>;

// n texts in Arrow's layout, text i being bytes [offsets[i], offsets[i + 1]), and how often each occurs.
struct CountedTexts {
  std::string bytes;
  std::vector<int64_t> offsets;
  std::vector<int64_t> counts;
};

// An open-addressing table over texts that lie one after another in the order of their first occurrence. Several threads
// may call any member at the same time; one runs, the others wait.
class TextCounts {
 public:
  TextCounts() : slots_(kFirstCapacity) {}

  // Counts the texts that are neither missing nor empty: text i `times[i]` >= 1 times, or once without `times`. Text i is
  // text[offsets[i], offsets[i + 1]).
  void add(const char* text, const int64_t* offsets, MissingMask missing, const int64_t* times, int64_t num_texts);

  // Number of distinct texts.
  int64_t size() const;
  int64_t memory_bytes() const;

  // The texts that occurred at least min_count times, by decreasing count, ties by increasing bytes.
  CountedTexts at_least(int64_t min_count) const;

  // All texts, by increasing bytes; the table is empty and small afterwards.
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
