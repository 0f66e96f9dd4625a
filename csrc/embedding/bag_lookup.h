// Pooled lookup of all features of a layout in one arena.
#pragma once

#include <cstdint>

#include "embedding/bag_faults.h"
#include "embedding/pooling.h"
#include "embedding/row_type.h"

namespace terarec {

// One row of a layout array.
struct FeatureLayout {
  int64_t base;  // arena row of the table's first row
  int64_t rows;  // of the table
  Pooling pooling;
  int64_t table;  // its number in the layout
};

struct LookupCall {
  RowArray weights;
  const int64_t* keys;
  int64_t num_keys;
  const float* key_weights;  // of each key, or null
  const int64_t* offsets;    // features * batch + 1
  const FeatureLayout* layout;
  int64_t features;
  int64_t batch;
  float* out;  // [batch, features * width], or [num_keys, width] without pooling
  int threads;
};

// Fills `out`; if a fault is returned, its content is unspecified.
BagFault bag_lookup(const LookupCall& call);

}  // namespace terarec
