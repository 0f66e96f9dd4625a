// Columns -> the text of a raw click log: label, integers, hexadecimal categories, tab-separated.
#pragma once

#include <cstdint>

namespace terarec::encoding {

// An integer that is missing: nothing is written between its tabs.
constexpr int32_t kMissingInteger = INT32_MIN;

// Integer or category c of row r is at [c * num_rows + r].
struct RowColumns {
  const uint8_t* labels;      // 0 or 1
  const int32_t* integers;
  const int64_t* categories;  // 0 <= value < 2^32, or negative when missing
  int64_t num_rows;
  int64_t num_integers;
  int64_t num_categories;
};

// The most bytes that a row can take, line feed included.
int64_t widest_row(int64_t num_integers, int64_t num_categories);

// Writes the rows to `out`, which holds num_rows * widest_row() bytes; returns the number of bytes written.
int64_t format_rows(const RowColumns& columns, char* out);

}  // namespace terarec::encoding
