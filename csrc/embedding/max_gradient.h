// The gradients of bags pooled by their maximum, as a gradient for each key.
#pragma once

#include <cstdint>
#include <vector>

#include "embedding/bag_lookup.h"
#include "embedding/result_memory.h"

namespace terarec {

// The bags of one feature pooled by maximum, with the gradient of their result.
struct MaxBags {
  RowArray table;  // from the feature's first row on, as it was at the lookup
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

}  // namespace terarec
