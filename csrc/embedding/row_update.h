// The exact update of the rows that a batch touched, or of all rows of their tables.
#pragma once

#include <cstdint>

#include "embedding/bag_faults.h"
#include "embedding/kernels.h"
#include "embedding/update_tables.h"

namespace terarec {

struct UpdateCall {
  float* state0;
  float* state1;
  Rule rule;
  RuleConstants constants;
  const RowExtras* extras;  // or null
  bool sweeps;              // whether the rows without a gradient move, too
  UpdateGradients gradients;
};

// Updates each row that moves once, with the sum of its gradients; the same bits for any number of threads.
// If a fault is returned, nothing was changed.
BagFault row_update(const UpdateCall& call);

struct GradientSquares {
  BagFault fault;
  double sum;
};

// The sum of the squares of the rows' summed gradients, the same bits for any number of threads; rows of tables that
// do not learn, and rows before `first_row`, do not count.
GradientSquares gradient_squares(const UpdateGradients& gradients, int64_t first_row);

}  // namespace terarec
