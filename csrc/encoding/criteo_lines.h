// Criteo's text layout: label, 13 integers, 26 hexadecimal categories, tab-separated, one sample a line.
#pragma once

#include <cstdint>

namespace terarec::encoding {

constexpr int kIntegers = 13;
constexpr int kCategories = 26;
constexpr int kColumns = 1 + kIntegers + kCategories;

// Where the parsed columns go. Integer and category c of row r are at [c * stride + r].
// Bit c of missing[r] tells that integer c (bits 0 to 12) or category c - 13 (bits 13 to 38) is empty; its value is 0.
struct CriteoColumns {
  float* label;
  int32_t* integers;
  uint32_t* categories;
  uint64_t* missing;
  int64_t stride;
};

enum class LineFault : int { none, column_count, label, integer, integer_range, category };

// What parse_lines did. After a fault, `rows` is the row of the line at fault, `column` its column (or the number of
// columns found), and [begin, end) the bytes at fault.
struct ParseResult {
  int64_t rows = 0;
  LineFault fault = LineFault::none;
  int column = 0;
  int64_t begin = 0;
  int64_t end = 0;
};

// Number of lines in data[0, size): line ends, plus one for a last line without.
int64_t count_lines(const char* data, int64_t size);

// Parses every line up to the first fault. Never reads outside data[0, size); throws std::invalid_argument when there are
// more than out.stride lines.
ParseResult parse_lines(const char* data, int64_t size, const CriteoColumns& out);

}  // namespace terarec::encoding
