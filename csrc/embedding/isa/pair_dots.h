// SPDX-License-Identifier: Apache-2.0

// The dots of all pairs of vectors of a sample: in float by the sets of kernels.h with fused multiply-add, in bfloat16
// (uint16_t) here, for processors with AVX512-BF16.
#pragma once

#include <cstdint>

namespace terarec {

// The vectors of each sample: `first`, and `others`, which are rounded to its type.
template <class T>
struct SampleVectors {
  const T* first;
  int64_t first_stride;
  const float* others;
  int64_t others_stride;
  int64_t samples, vectors, width;
  void* buffer;  // pair_bytes(vectors, width) bytes, aligned to 64 bytes
};

// Writes rows of `first`, the dots of vectors (1, 0), (2, 0), (2, 1), ..., and zeros.
template <class T>
struct PairDots {
  SampleVectors<T> of;
  T* out;
  int64_t out_stride;
};

// Writes the gradients of the vectors, rounded to T, from that of the rows; without gaps.
template <class T>
struct PairGradients {
  SampleVectors<T> of;
  const T* grad;
  int64_t grad_stride;
  T* grad_first;
  float* grad_others;
  bool stream;  // past the caches; needs width % 16 == 0 and `grad_others` aligned to 64 bytes
};

// Bytes of memory that a sample needs: its vectors twice, a number for each pair of them, and those of the triangle.
static inline int64_t pair_bytes(int64_t vectors, int64_t width) {
  const int64_t rows = (vectors + 15) / 16 * 16, columns = (width + 31) / 32 * 32;
  return 4 * (rows * columns + rows * rows + rows * rows + rows * columns);
}

void dot_pairs(const PairDots<uint16_t>& call);
void pair_gradients(const PairGradients<uint16_t>& call);

}  // namespace terarec
