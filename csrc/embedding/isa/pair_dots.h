// The dots of all pairs of vectors of a sample in bfloat16, for processors with AVX512-BF16.
#pragma once

#include <cstdint>

namespace terarec {

// The vectors of each sample: `first`, bfloat16, and `others`, which are rounded to it.
struct SampleVectors {
  const uint16_t* first;
  int64_t first_stride;
  const float* others;
  int64_t others_stride;
  int64_t samples, vectors, width;
  void* buffer;  // pair_bytes(vectors, width) bytes, aligned to 64 bytes
};

// Writes rows of `first`, the dots of vectors (1, 0), (2, 0), (2, 1), ..., and zeros.
struct PairDots {
  SampleVectors of;
  uint16_t* out;
  int64_t out_stride;
};

// Writes the gradients of the vectors, rounded to bfloat16, from that of the rows; without gaps.
struct PairGradients {
  SampleVectors of;
  const uint16_t* grad;
  int64_t grad_stride;
  uint16_t* grad_first;
  float* grad_others;
  bool stream;  // past the caches; needs width % 16 == 0 and `grad_others` aligned to 64 bytes
};

// Bytes of memory that a sample needs.
static inline int64_t pair_bytes(int64_t vectors, int64_t width) {
  const int64_t rows = (vectors + 15) / 16 * 16, columns = (width + 31) / 32 * 32;
  return 4 * rows * columns + 4 * rows * rows + 2 * rows * rows + 4 * rows * columns;
}

void dot_pairs(const PairDots& call);
void pair_gradients(const PairGradients& call);

}  // namespace terarec
