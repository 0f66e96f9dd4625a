// The values of one field over all rows, and how its contents become values.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "encoding/fields.h"
#include "encoding/growing_array.h"

namespace terarec::encoding {

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
};

// What holds for the contents of all fields.
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

// Makes row `row` ready for other contents.
void forget_field(FieldColumn& column, int64_t row);

}  // namespace terarec::encoding
