// SPDX-License-Identifier: Apache-2.0

// Sums of the gradients of distinct rows, for ids that touch a good part of a table: ids are first sorted by ranges of
// rows, and what a range needs stays in the L2 cache.
#pragma once

#include <cstdint>
#include <vector>

#include "embedding/result_memory.h"
#include "embedding/rows.h"

namespace terarec {

// Bags of checked rows, and the gradients of their results.
struct RowGradients {
  const int64_t* rows;
  int64_t num_rows;
  const int64_t* offsets;  // bags + 1; null without pooling, where every row has a gradient
  int64_t bags;
  const float* weights;  // of each row, or null
  Pooling pooling;
  const float* grad;  // one row of `width` floats after the other
  int64_t width;
  int64_t table_rows;
};

// Distinct rows of a range, with their sums.
struct RangeSums {
  std::vector<int64_t> rows;
  CallMemory sums;
};

// Whether this is faster than grouping rows by an index.
bool sums_by_range(const RowGradients& gradients);

// The ranges in rising order. Gradients of a row are added in the order of the bags, whatever the number of threads.
std::vector<RangeSums> sum_by_range(const RowGradients& gradients, int threads);

}  // namespace terarec
