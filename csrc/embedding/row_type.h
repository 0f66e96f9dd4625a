// What the rows of a table are made of.
#pragma once

#include <cstdint>

namespace terarec {

// kCodes8: a row is `width` codes of 8 bits, then its scale and its offset as floats; code c stands for
// offset + scale * c.
enum class RowType : int64_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2, kCodes8 = 3 };

static inline int64_t row_bytes(RowType type, int64_t width) {
  switch (type) {
    case RowType::kFloat32: return 4 * width;
    case RowType::kCodes8: return width + 8;
    default: return 2 * width;
  }
}

// Rows of one type and width, one after the other.
struct RowArray {
  const void* first;
  RowType type;
  int64_t width;
};

// The same from row `row` on. Static, so that each instruction set compiles its own.
static inline RowArray rows_from(const RowArray& rows, int64_t row) {
  return {static_cast<const char*>(rows.first) + row * row_bytes(rows.type, rows.width), rows.type, rows.width};
}

}  // namespace terarec
