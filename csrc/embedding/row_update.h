// The exact update of the rows that a batch touched.
#pragma once

#include <cstdint>
#include <vector>

#include "embedding/bag_faults.h"
#include "embedding/bag_lookup.h"
#include "embedding/kernels.h"

namespace terarec {

struct UpdateGradient {
  const int64_t* keys;
  int64_t num_keys;
  const int64_t* offsets;  // features * batch + 1
  const FeatureLayout* layout;
  int64_t features;
  int64_t batch;
  const float* grad;     // [batch, features * width], or [num_keys, width] without pooling
  int64_t grad_stride;   // floats from one row of `grad` to the next
};

struct UpdateCall {
  float* weights;
  float* state0;
  float* state1;
  int64_t width;
  Rule rule;
  RuleConstants constants;
  std::vector<UpdateGradient> gradients;
  int threads;
};

// Updates each touched row once with the sum of its gradients; the same bits for any number of threads.
// If a fault is returned, nothing was changed.
BagFault row_update(const UpdateCall& call);

}  // namespace terarec
