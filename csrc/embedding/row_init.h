// SPDX-License-Identifier: Apache-2.0

// Initial values of rows from a counter-based generator; kernels/ref/rows.py describes and repeats it.
#pragma once

#include <cstdint>

namespace terarec {

struct FillCall {
  float* rows;
  int64_t num_rows;
  int64_t width;
  int64_t first_row;
  uint64_t seed;
  double scale;
  bool normal;  // else uniform
  int threads;
};

void fill_rows(const FillCall& call);

// Gives row targets[i] the values that fill_rows gives to row number keys[i], which wraps to 64 bits.
struct KeyedFillCall {
  float* rows;
  const int64_t* targets;
  const int64_t* keys;
  int64_t num_rows;
  int64_t width;
  uint64_t seed;
  double scale;
  bool normal;  // else uniform
  int threads;
};

void fill_keyed_rows(const KeyedFillCall& call);

}  // namespace terarec
