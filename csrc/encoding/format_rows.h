// Columns -> the text of a raw click log: label, integers, hexadecimal categories, tab-separated.
#pragma once

#include <cstddef>
#include <cstdint>

namespace terarec {

// An integer that is missing: nothing is written between its tabs.
constexpr int32_t kMissingInteger = INT32_MIN;

struct RowColumns {
    const uint8_t* labels;      // [num_rows], 0 or 1
    const int32_t* integers;    // [num_integers, num_rows]
    const int64_t* categories;  // [num_categories, num_rows], 0 <= value < 2^32, or negative when missing
    size_t num_rows;
    size_t num_integers;
    size_t num_categories;
};

// The most bytes that a row can take, line feed included.
size_t widest_row(size_t num_integers, size_t num_categories);

// Writes the rows to `out`, which holds num_rows * widest_row() bytes; returns the number of bytes written.
size_t format_rows(const RowColumns& columns, char* out);

}  // namespace terarec
