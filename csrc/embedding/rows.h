// SPDX-License-Identifier: Apache-2.0

// Rows of a table in memory, and the pooling of the vectors of a bag. Functions are static, so that each instruction set
// compiles its own.
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

enum class Pooling : int64_t { kSum = 0, kMean = 1, kNone = 2, kSqrtn = 3, kMax = 4 };

// The factor of the sum of a bag's vectors; `key_weights` are those of its keys, null if there are none.
// Weighted as TensorFlow's embedding_lookup_sparse does it: the mean divides by the sum of the weights, sqrtn by the
// root of the sum of their squares, and a divisor of zero gives zeros.
// Static, so that each instruction set compiles its own.
static inline float bag_factor(Pooling pooling, int64_t keys, const float* key_weights) {
  if (pooling != Pooling::kMean && pooling != Pooling::kSqrtn) return 1.0f;
  const bool mean = pooling == Pooling::kMean;
  if (!key_weights) {
    if (keys <= 1) return 1.0f;
    const float count = static_cast<float>(keys);
    return 1.0f / (mean ? count : __builtin_sqrtf(count));
  }
  float sum = 0.0f;
  for (int64_t i = 0; i < keys; i++) sum += mean ? key_weights[i] : key_weights[i] * key_weights[i];
  if (sum == 0.0f) return 0.0f;
  return 1.0f / (mean ? sum : __builtin_sqrtf(sum));
}

}  // namespace terarec
