// SPDX-License-Identifier: Apache-2.0
#include "encoding/columns.h"

#include <algorithm>

namespace terarec::encoding {
namespace {

// Rows that are converted at once. Those of 64 columns take 16 KiB of the L1 cache.
constexpr int64_t kTileRows = 64;

// Four floats, which every processor transposes in registers.
typedef float Four __attribute__((vector_size(16)));
typedef float LooseFour __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t Places __attribute__((vector_size(16)));

Four low_pairs(Four a, Four b) { return __builtin_shuffle(a, b, Places{0, 4, 1, 5}); }
Four high_pairs(Four a, Four b) { return __builtin_shuffle(a, b, Places{2, 6, 3, 7}); }
Four first_halves(Four a, Four b) { return __builtin_shuffle(a, b, Places{0, 1, 4, 5}); }
Four last_halves(Four a, Four b) { return __builtin_shuffle(a, b, Places{2, 3, 6, 7}); }

template <typename T>
void convert(const T* from, int64_t stride, int64_t count, float* to) {
  if (stride == 1) {
    for (int64_t row = 0; row < count; ++row) to[row] = static_cast<float>(from[row]);
  } else {
    for (int64_t row = 0; row < count; ++row) to[row] = static_cast<float>(from[row * stride]);
  }
}

// The `count` numbers of a column from `start` on, as floats: in place where they are, else in `tile`.
const float* floats_of(const NumberColumn& column, int64_t start, int64_t count, float* tile) {
  const int64_t first = start * column.stride;
  switch (column.type) {
    case NumberType::kFloat32: {
      const float* from = static_cast<const float*>(column.data) + first;
      if (column.stride == 1) return from;
      convert(from, column.stride, count, tile);
      break;
    }
    case NumberType::kFloat64:
      convert(static_cast<const double*>(column.data) + first, column.stride, count, tile);
      break;
    case NumberType::kInt32:
      convert(static_cast<const int32_t*>(column.data) + first, column.stride, count, tile);
      break;
    case NumberType::kInt64:
      convert(static_cast<const int64_t*>(column.data) + first, column.stride, count, tile);
      break;
  }
  return tile;
}

// Writes four columns of `count` floats into rows of `width` floats.
void stack_four(const float* const* columns, int64_t count, int64_t width, float* to) {
  int64_t row = 0;
  for (; row + 4 <= count; row += 4) {
    Four in[4];
    for (int column = 0; column < 4; ++column) in[column] = *reinterpret_cast<const LooseFour*>(columns[column] + row);
    const Four low_left = low_pairs(in[0], in[1]), low_right = low_pairs(in[2], in[3]);
    const Four high_left = high_pairs(in[0], in[1]), high_right = high_pairs(in[2], in[3]);
    float* out = to + row * width;
    *reinterpret_cast<LooseFour*>(out) = first_halves(low_left, low_right);
    *reinterpret_cast<LooseFour*>(out + width) = last_halves(low_left, low_right);
    *reinterpret_cast<LooseFour*>(out + 2 * width) = first_halves(high_left, high_right);
    *reinterpret_cast<LooseFour*>(out + 3 * width) = last_halves(high_left, high_right);
  }
  for (; row < count; ++row) {
    for (int column = 0; column < 4; ++column) to[row * width + column] = columns[column][row];
  }
}

template <typename Key>
void copy_any_keys(const Key* keys, int64_t size, int64_t offset, int64_t* to) {
  const uint64_t step = static_cast<uint64_t>(offset);
  for (int64_t i = 0; i < size; ++i) {
    to[i] = static_cast<int64_t>(static_cast<uint64_t>(static_cast<int64_t>(keys[i])) + step);
  }
}

}  // namespace

void stack_columns(const std::vector<NumberColumn>& columns, int64_t num_rows, float* rows) {
  const int64_t width = static_cast<int64_t>(columns.size());
  float tiles[4][kTileRows];
  for (int64_t start = 0; start < num_rows; start += kTileRows) {
    const int64_t count = std::min(kTileRows, num_rows - start);
    float* to = rows + start * width;
    int64_t column = 0;
    for (; column + 4 <= width; column += 4) {
      const float* floats[4];
      for (int64_t i = 0; i < 4; ++i) floats[i] = floats_of(columns[column + i], start, count, tiles[i]);
      stack_four(floats, count, width, to + column);
    }
    for (; column < width; ++column) {
      const float* floats = floats_of(columns[column], start, count, tiles[0]);
      for (int64_t row = 0; row < count; ++row) to[row * width + column] = floats[row];
    }
  }
}

void copy_keys(const int32_t* keys, int64_t size, int64_t offset, int64_t* to) { copy_any_keys(keys, size, offset, to); }
void copy_keys(const int64_t* keys, int64_t size, int64_t offset, int64_t* to) { copy_any_keys(keys, size, offset, to); }

}  // namespace terarec::encoding
