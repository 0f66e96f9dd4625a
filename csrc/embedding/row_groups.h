// Finding the distinct rows of a batch and, for each, where its gradients are.
#pragma once

#include <cstdint>
#include <vector>

#include "embedding/pooling.h"

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

// Memory of one thread, kept from call to call so that it is neither allocated nor faulted in again.
struct RowScratch {
  std::vector<uint32_t> index;                              // row -> group + 1
  std::vector<int64_t> rows;                                // of each group
  std::vector<const float*> first, more, found;             // gradients: see RowGroups; `found` as they came
  std::vector<float> first_scales, more_scales, found_scales;
  std::vector<uint32_t> begin, found_groups;
  std::vector<float> sums, buffer;
  std::vector<uint8_t> touched;

  int64_t bytes() const;
};

// Distinct rows, in a thread's scratch. Arena row rows[g] has gradient first[g], and more[begin[g]:begin[g + 1]] if
// `has_more`, in the order of the bags; first_scales and more_scales are their factors if `scaled`.
struct RowGroups {
  int64_t groups;
  bool has_more;
  bool scaled;
};

// `vector` made at least `size` long; never shorter, since growing writes every new element.
template <class T>
T* at_least(std::vector<T>& vector, int64_t size) {
  if (static_cast<int64_t>(vector.size()) < size) vector.resize(size);
  return vector.data();
}

// Groups the keys of a part by row.
RowGroups group_by_row(const TablePart& part, const std::vector<BagGradients>& bags, int64_t num_keys,
                       RowScratch& scratch);

// Sums the gradients of a part's rows into scratch.sums and makes each touched row a group with that one gradient.
// Only for tables of few rows.
RowGroups sum_by_row(const TablePart& part, const std::vector<BagGradients>& bags, int64_t width, RowScratch& scratch);

}  // namespace terarec
