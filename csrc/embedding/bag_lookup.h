// SPDX-License-Identifier: Apache-2.0

// Pooled lookup of all features of a layout in one arena, checks of its keys and offsets, and dot products for the
// gradient of key weights.
#pragma once

#include <cstdint>
#include <mutex>

#include "embedding/rows.h"

namespace terarec {

struct BagFault {
  enum Kind : int64_t { kNone, kOffset, kKey };
  Kind kind = kNone;
  int64_t gradient = 0;  // number of the gradient, for a row update
  int64_t feature = 0;
  int64_t position = 0;  // in the offsets or the keys
  int64_t value = 0;
};

// Bags of one feature of a call.
struct BagRange {
  const int64_t* keys;
  int64_t num_keys;
  const int64_t* offsets;
  int64_t feature;
  int64_t first_bag, bags;  // first_bag counts from the call's first
  int64_t rows;  // of the feature's table
};

struct BagCheck {
  BagFault fault;
  bool all_single = false;  // every bag holds one key
};

BagCheck check_bags(const BagRange& range);

// Whether the first and last of the call's offsets are 0 and num_keys.
BagFault check_ends(const int64_t* offsets, int64_t bags, int64_t num_keys);

// Keeps the fault with the lowest position in the call, whichever thread reports first.
class FirstFault {
 public:
  void add(const BagFault& fault);
  const BagFault& get() const { return first_; }

 private:
  std::mutex mutex_;
  BagFault first_;
};

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
