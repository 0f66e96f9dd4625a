// SPDX-License-Identifier: Apache-2.0

// The gradients of bags pooled by their maximum, as a gradient for each key.
#pragma once

#include <cstdint>
#include <vector>

#include "embedding/bag_lookup.h"
#include "embedding/kernels.h"
#include "embedding/result_memory.h"
#include "embedding/row_groups.h"

namespace terarec {

// The bags of one feature pooled by maximum, with the gradient of their result.
struct MaxBags {
  RowArray table;  // from the row of key 0 on, as it was at the lookup
  const int64_t* keys;     // absolute: offsets index it
  const int64_t* offsets;  // of the first bag
  int64_t bags;
  const float* grad;  // of the first bag
  int64_t grad_stride;
};

class MaxGradients {
 public:
  // Memory for the gradients [keys, width] of the feature's keys, which `fill` writes.
  const float* add(const MaxBags& bags);
  void fill(int threads) const;

 private:
  struct Spread {
    MaxBags bags;
    CallMemory memory;

    float* gradients() const { return static_cast<float*>(memory.get()); }
  };
  std::vector<Spread> spreads_;
};

// The gradient of one lookup.
struct UpdateGradient {
  const int64_t* keys;
  const int64_t* places;  // of each key's row in memory, which the caller has checked; null where rows lie in order
  int64_t num_keys;
  const float* key_weights;  // of each key, or null
  const int64_t* offsets;    // features * batch + 1
  const FeatureLayout* layout;
  int64_t features;
  int64_t batch;
  const float* grad;     // [batch, features * width], or [num_keys, width] without pooling
  int64_t grad_stride;   // floats from one row of `grad` to the next
};

// All gradients of a step in one arena.
struct UpdateGradients {
  void* weights;  // as they were at the lookup
  RowType row_type;
  int64_t width;
  const float* table_lr;  // factor of each table's learning rate, 0 if it does not learn; or null
  int threads;
  std::vector<UpdateGradient> list;

  int64_t num_keys() const;
  // Number of threads that is worth starting for the work.
  int useful_threads() const;
};

// A table that learns, with the bags of all gradients and features that touch it, in call order.
struct UpdateTable {
  int64_t base, rows;  // tables of an arena that grows share these; a row belongs to one table even so
  float lr_factor;
  int64_t num_keys;
  std::vector<BagGradients> bags;
};

struct UpdateUnit {
  const UpdateTable* table;
  TablePart part;
  int64_t num_keys;  // estimate, to start the longest first
};

BagFault check_gradients(const UpdateGradients& gradients);

// The tables in the order of their rows, those without a key in the batch included. Features pooled by maximum come
// with a gradient for each key, in memory of `maxima` that is yet to be filled.
std::vector<UpdateTable> collect_tables(const UpdateGradients& gradients, MaxGradients& maxima);

// Splits tables so that no unit has more than half of a thread's share; the longest come first.
std::vector<UpdateUnit> split_tables(const std::vector<UpdateTable>& tables, int64_t num_keys, int threads);

// The rows of a unit with their gradients, in the memory of `scratch`; where the rows are is left to the caller.
UpdateRows group_unit(const UpdateUnit& unit, int64_t width, RowScratch& scratch);

}  // namespace terarec
