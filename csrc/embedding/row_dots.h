// The dot product of each key's row with the gradient of its bag: what the gradient of key weights is made of.
#pragma once

#include <cstdint>

#include "embedding/bag_faults.h"
#include "embedding/bag_lookup.h"

namespace terarec {

struct RowDotsCall {
  RowArray weights;
  const int64_t* keys;
  int64_t num_keys;
  const int64_t* offsets;  // features * batch + 1
  const FeatureLayout* layout;
  int64_t features;
  int64_t batch;
  const float* grad;    // [batch, features * width]
  int64_t grad_stride;  // floats from one row of `grad` to the next
  float* dots;          // [num_keys]
  int threads;
};

// Fills `dots`; if a fault is returned, its content is unspecified.
BagFault row_dots(const RowDotsCall& call);

}  // namespace terarec
