// SPDX-License-Identifier: Apache-2.0

// The values of one field of all rows, in growing arrays whose memory Python can take over.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "encoding/fields.h"

namespace terarec::encoding {

// An array that leaves new elements uninitialised, and whose memory Python can take over. It may also lie in memory that
// is another's; then it has room for what was said at first.
template <typename T>
class GrowingArray {
 public:
  GrowingArray() = default;
  GrowingArray(GrowingArray&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        capacity_(std::exchange(other.capacity_, 0)),
        borrowed_(other.borrowed_) {}
  GrowingArray(const GrowingArray&) = delete;
  GrowingArray& operator=(GrowingArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(capacity_, other.capacity_);
    std::swap(borrowed_, other.borrowed_);
    return *this;
  }
  GrowingArray& operator=(const GrowingArray&) = delete;
  ~GrowingArray() {
    if (!borrowed_) free(data_);
  }

  // Takes `memory`, room for `capacity` elements, which lives on after this array.
  void borrow(char* memory, int64_t capacity) {
    data_ = reinterpret_cast<T*>(memory);
    capacity_ = capacity;
    borrowed_ = true;
  }

  // Makes room for `size` elements; pointers into the array become invalid.
  void reserve(int64_t size) {
    if (size > capacity_) grow(size);
  }
  bool borrowed() const { return borrowed_; }
  T* data() { return data_; }
  T& operator[](int64_t index) { return data_[index]; }
  // Releases the memory, which the caller must free().
  T* release() {
    capacity_ = 0;
    return std::exchange(data_, nullptr);
  }

 private:
  void grow(int64_t size) {
    if (borrowed_) throw std::length_error("an array in another's memory is full");
    const int64_t capacity = std::max({size, 2 * capacity_, int64_t{16}});
    void* grown = realloc(data_, static_cast<size_t>(capacity) * sizeof(T));
    if (grown == nullptr) throw std::bad_alloc();
    data_ = static_cast<T*>(grown);
    capacity_ = capacity;
  }

  T* data_ = nullptr;
  int64_t capacity_ = 0;
  bool borrowed_ = false;
};

enum class FieldType : int { skip, text, integer, number, hex32 };

struct FieldLayout {
  FieldType type;
  std::string separator;  // of the items of a list; empty for a single value
  bool is_list() const { return !separator.empty(); }
};

// Item i of a list column, row i of another one, is values[i]: int64_t, double or uint32_t, or of text the bytes
// [text_offsets[i], text_offsets[i + 1]). Row r of a list has the items [list_offsets[r], list_offsets[r + 1]).
struct FieldColumn {
  FieldLayout layout;
  GrowingArray<char> values;
  GrowingArray<uint8_t> missing;
  GrowingArray<int64_t> text_offsets;
  GrowingArray<int64_t> list_offsets;

  template <typename Value>
  Value* values_as() {
    return reinterpret_cast<Value*>(values.data());
  }
  int64_t num_items(int64_t rows) { return layout.is_list() ? list_offsets[rows] : rows; }
};

// Options of all fields.
struct ContentRules {
  const std::vector<std::string>& missing_words;
  bool trim_items;
  bool check_utf8;
  // An empty field or item is missing always.
  bool is_missing(std::string_view content) const;
};

// One memory for the arrays whose length is the number of rows: a block of Criteo's 40 fields would need 80 allocations, and
// as many owners in Python.
class RowMemory {
 public:
  // The bytes that a column takes in it, whole cache lines.
  static int64_t bytes_of(const FieldLayout& layout, int64_t rows);
  explicit RowMemory(int64_t bytes) { memory_.reserve(bytes); }
  RowMemory() = default;

  // The next `bytes`, from a whole cache line on.
  char* take(int64_t bytes);
  char* begin() { return memory_.data(); }
  char* release() { return memory_.release(); }
  int64_t used() const { return used_; }

 private:
  GrowingArray<char> memory_;
  int64_t used_ = 0;
};

// A column with room for `rows` rows, none of them missing; all but texts' bytes and what lists hold lies in `memory`.
FieldColumn make_column(const FieldLayout& layout, int64_t rows, RowMemory& memory);

// Stores the content of a field as row `row`; after a fault the row is undefined.
Fault store_field(FieldColumn& column, std::string_view content, int64_t row, const ContentRules& rules);

// A missing list has no items.
void store_missing_field(FieldColumn& column, int64_t row);

// Resets row `row`.
void forget_field(FieldColumn& column, int64_t row);

// Position within a line. Sixteen bytes from `end` on must be readable.
struct LinePosition {
  const char* cursor;  // the next field; end + 1 or more if there is none
  const char* end;
  int64_t row;  // to store its values in
  char delimiter;
};

// Each of these stores the fields of columns[first], ... up to columns[stop - 1] and returns the position of the first that
// it leaves untouched.

// Integers of up to seven digits, or nothing.
inline int take_integers(FieldColumn* columns, int first, int stop, LinePosition& line) {
  const LinePosition at = line;
  const char* cursor = line.cursor;
  for (; first < stop; ++first) {
    const ShortInteger found = read_short_integer(cursor, at.delimiter);
    if (!found.good || found.stop >= at.end) break;
    FieldColumn& column = columns[first];
    column.values_as<int64_t>()[at.row] = found.value;
    column.missing[at.row] = found.empty;
    cursor = found.stop + 1;
  }
  line.cursor = cursor;
  return first;
}

// Eight hexadecimal digits, or nothing.
inline int take_hex32s(FieldColumn* columns, int first, int stop, LinePosition& line) {
  const LinePosition at = line;
  const char* cursor = line.cursor;
  for (; first < stop && cursor <= at.end; ++first) {
    FieldColumn& column = columns[first];
    uint32_t& value = column.values_as<uint32_t>()[at.row];
    if (*cursor == at.delimiter || cursor == at.end) {
      value = 0;
      column.missing[at.row] = 1;
      ++cursor;
      continue;
    }
    const uint64_t word = load_word(cursor);
    const int64_t left = at.end - cursor;
    if (left < 8 || (cursor[8] != at.delimiter && left > 8) || !is_hex_word(word)) break;
    value = hex_word_value(word);
    cursor += 9;
  }
  line.cursor = cursor;
  return first;
}

// ASCII text of up to fifteen bytes.
inline int take_short_texts(FieldColumn* columns, int first, int stop, LinePosition& line) {
  constexpr int64_t kCopied = 16;
  const LinePosition at = line;
  const char* cursor = line.cursor;
  for (; first < stop && cursor <= at.end; ++first) {
    int64_t length = first_in_word(load_word(cursor), at.delimiter);
    if (length == 8) length += first_in_word(load_word(cursor + 8), at.delimiter);
    if (length == kCopied || cursor + length >= at.end) break;
    FieldColumn& column = columns[first];
    int64_t* offsets = column.text_offsets.data() + at.row;
    column.values.reserve(offsets[0] + kCopied);
    memcpy(column.values.data() + offsets[0], cursor, kCopied);
    offsets[1] = offsets[0] + length;
    column.missing[at.row] = length == 0;
    cursor += length + 1;
  }
  line.cursor = cursor;
  return first;
}

}  // namespace terarec::encoding
