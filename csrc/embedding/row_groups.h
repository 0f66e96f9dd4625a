// SPDX-License-Identifier: Apache-2.0

// The arrays in which a thread groups gradients by row.
#pragma once

#include <atomic>
#include <cstdint>
#include <forward_list>
#include <mutex>
#include <vector>

#include "embedding/kernels.h"
#include "embedding/result_memory.h"
#include "embedding/rows.h"

namespace terarec {

// Arrays of one unit of work, in memory that is reused for the next one and grows to the largest.
class RowScratch {
 public:
  // For `groups` rows of `keys` keys, which an index of `index_size` numbers finds; nothing is in them.
  void have_groups(int64_t keys, int64_t groups, int64_t index_size, int64_t width, bool placed);
  // For the sums of `count` of those rows; what is in the others stays.
  void have_sums(int64_t count, int64_t width);
  // For a sum and a mark of each of `count` rows, and the list of those that are marked; nothing is in them.
  void have_sums_of_all(int64_t count, int64_t width, bool placed);

  uint32_t* index;  // row -> group + 1
  int64_t* rows;    // of each group
  int64_t* places;  // of each group's row
  const float** grads;
  float* scales;
  uint32_t* sum_of;       // of each group, whether it has a sum, then the sum's number
  SumTerm *first, *more;  // of the sums
  float* sums;
  uint8_t* touched;
  float* buffer;  // update_floats(width)

 private:
  CallMemory arrays_, sums_;
};

// Scratch memory of the threads of a call, freed with it: if threads kept it between calls, it would add to the memory
// kept of freed results.
class CallScratch {
 public:
  CallScratch();

  // The calling thread's. Throws std::bad_alloc.
  RowScratch& of_thread();

 private:
  const uint64_t call_;
  std::mutex mutex_;
  std::forward_list<RowScratch> all_;
};

// The bags of one feature of one gradient.
struct BagGradients {
  const int64_t* keys;       // absolute: offsets index it
  const int64_t* places;     // of each key's row in memory; null where rows lie in their order
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

// Distinct rows, in a thread's scratch. Arena row rows[g], which lies at places[g] if `placed`, has gradient grads[g],
// to be multiplied by scales[g] if `scaled`: the only one of its row where it lies, or the sum of several in
// scratch.sums, added in the order of the bags.
struct RowGroups {
  int64_t groups;
  bool scaled, placed;
};

// Finds the rows of the keys of a part, and sums the gradients of those that repeat.
RowGroups group_by_row(const TablePart& part, const std::vector<BagGradients>& bags, int64_t num_keys, int64_t width,
                       RowScratch& scratch);

// Sums the gradients of all rows of a part. Only for tables of few rows.
RowGroups sum_by_row(const TablePart& part, const std::vector<BagGradients>& bags, int64_t width, RowScratch& scratch);

}  // namespace terarec
