// The arrays in which a thread groups gradients by row.
#pragma once

#include <atomic>
#include <cstdint>
#include <forward_list>
#include <mutex>

#include "embedding/kernels.h"
#include "embedding/result_memory.h"

namespace terarec {

// Arrays of one unit of work after the other, in memory that grows to what the largest of them needs.
class RowScratch {
 public:
  // For `groups` rows of `keys` keys, which an index of `index_size` numbers finds; nothing is in them.
  void have_groups(int64_t keys, int64_t groups, int64_t index_size, int64_t width);
  // For the sums of `count` of those rows; what is in the others stays.
  void have_sums(int64_t count, int64_t width);
  // For a sum and a mark of each of `count` rows, and the list of those that are marked; nothing is in them.
  void have_sums_of_all(int64_t count, int64_t width);

  uint32_t* index;  // row -> group + 1
  int64_t* rows;    // of each group
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

// What the threads of a call have for scratch, given back with it: kept by each thread from call to call it would be
// memory beside that of results which nobody uses any more.
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

}  // namespace terarec
