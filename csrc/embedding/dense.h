// SPDX-License-Identifier: Apache-2.0

// The work of dense layers apart from matrix products, on several threads; in float, or uint16_t for bfloat16.
#pragma once

#include <cstdint>

#include "embedding/isa/pair_dots.h"
#include "embedding/kernels.h"

namespace terarec {

// As the kernels of these types; `sums` are set, and the same bits for any number of threads.
template <class T>
void mask_gradient(MaskGradient<T> call, int threads);

// Whether the set in use has the kernels of pair_dots.h.
bool has_pair_dots(bool is_narrow);

// As dot_pairs and pair_gradients of kernels.h and pair_dots.h, without a buffer.
template <class T>
void dot_pairs(const PairDots<T>& call, int threads);
template <class T>
void pair_gradients(PairGradients<T> call, int threads);

}  // namespace terarec
