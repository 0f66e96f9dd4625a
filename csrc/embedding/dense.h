// What dense layers do in bfloat16 beside their products, on several threads.
#pragma once

#include <cstdint>

#include "embedding/isa/pair_dots.h"
#include "embedding/kernels.h"

namespace terarec {

// As the kernel of this name; `sums` are set, and the same bits for any number of threads.
void mask_gradient(MaskGradient call, int threads);

// Whether the kernels of pair_dots.h run here.
bool has_pair_dots();

// As dot_pairs and pair_gradients, without a buffer.
void dot_pairs(const PairDots& call, int threads);
void pair_gradients(PairGradients call, int threads);

}  // namespace terarec
