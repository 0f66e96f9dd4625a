// Finding the distinct rows of a batch and, for each, where its gradients are.
#pragma once

#include <cstdint>
#include <vector>

#include "embedding/kernels.h"
#include "embedding/pooling.h"
#include "embedding/row_scratch.h"

namespace terarec {

// The bags of one feature of one gradient.
struct BagGradients {
  const int64_t* keys;       // absolute: offsets index it
  const float* key_weights;  // of each key, or null
  const int64_t* offsets;    // of the first bag; null if every key has a gradient of its own
  int64_t bags;
  const float* grad;  // of the first bag
  int64_t grad_stride;
  Pooling pooling;  // any but kMax

  bool scaled() const { return key_weights || pooling == Pooling::kMean || pooling == Pooling::kSqrtn; }
};

// The rows of a table with row % 2^shift == part: its share when 2^shift units work on the table.
struct TablePart {
  int64_t base;  // arena row of the table's first row
  int64_t rows;
  int64_t part;
  int shift;

  int64_t mask() const { return (int64_t{1} << shift) - 1; }
  int64_t part_rows() const { return (rows - part + mask()) >> shift; }
};

// Distinct rows, in a thread's scratch. Arena row rows[g] has gradient grads[g], to be multiplied by scales[g] if
// `scaled`: the only one of its row where it lies, or the sum of several in scratch.sums, added in the order of the
// bags.
struct RowGroups {
  int64_t groups;
  bool scaled;
};

// Finds the rows of the keys of a part, and sums the gradients of those that repeat.
RowGroups group_by_row(const TablePart& part, const std::vector<BagGradients>& bags, int64_t num_keys, int64_t width,
                       RowScratch& scratch);

// Sums the gradients of all rows of a part. Only for tables of few rows.
RowGroups sum_by_row(const TablePart& part, const std::vector<BagGradients>& bags, int64_t width, RowScratch& scratch);

}  // namespace terarec
