// SPDX-License-Identifier: Apache-2.0

// Columns of numbers in memory: side by side as rows of a matrix, and keys as int64 plus an offset.
#pragma once

#include <cstdint>
#include <vector>

namespace terarec::encoding {

enum class NumberType { kFloat32, kFloat64, kInt32, kInt64 };

// `stride` elements lie between the starts of two numbers.
struct NumberColumn {
  const void* data;
  NumberType type;
  int64_t stride;
};

// Writes column c of n numbers as column c of rows[n, columns], each number rounded to float32.
void stack_columns(const std::vector<NumberColumn>& columns, int64_t num_rows, float* rows);

// Writes n contiguous keys plus `offset` as int64; sums wrap around.
void copy_keys(const int32_t* keys, int64_t size, int64_t offset, int64_t* to);
void copy_keys(const int64_t* keys, int64_t size, int64_t offset, int64_t* to);

// Whether each null among `rows` numbers holds `fill`, or NaN where that is NaN. `absent(first, rows)` is a word of the
// nulls, see MissingMask. A word of few nulls is walked bit by bit, another row by row.
template <typename Number, typename Absent>
bool nulls_hold(const Number* numbers, Absent absent, int64_t num_rows, Number fill) {
  constexpr int few = 24;
  const bool is_nan = fill != fill;
  const auto differs = [is_nan, fill](Number number) { return is_nan ? number == number : number != fill; };
  for (int64_t first = 0; first < num_rows; first += 64) {
    const int64_t rows = num_rows - first < 64 ? num_rows - first : 64;
    uint64_t bits = absent(first, rows);
    bool differing = false;
    if (__builtin_popcountll(bits) <= few) {
      for (; bits != 0; bits &= bits - 1) differing |= differs(numbers[first + __builtin_ctzll(bits)]);
    } else {
      for (int64_t row = first; row < first + rows; ++row, bits >>= 1) {
        differing |= ((bits & 1) != 0) & differs(numbers[row]);
      }
    }
    if (differing) return false;
  }
  return true;
}

}  // namespace terarec::encoding
