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

}  // namespace terarec::encoding
