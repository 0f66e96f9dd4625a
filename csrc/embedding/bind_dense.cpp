// SPDX-License-Identifier: Apache-2.0
#include "embedding/bindings.h"

#include "embedding/dense.h"
#include "embedding/torch_tensors.h"

namespace nb = nanobind;

namespace terarec {
namespace {

// Fills `masked`, as `part` contiguous, and `sums`. Callers in Python have checked all types and shapes.
template <class T>
void run_mask_gradient(nb::handle grad, nb::handle part, nb::handle masked, nb::handle sums, int threads) {
  const HostTensor from(grad, true), positive(part), to(masked), totals(sums);
  const MaskGradient<T> call{from.as<const T>(), from.row_stride(), positive.as<const T>(), positive.size(0),
                             positive.size(1), to.as<T>(), totals.as<float>(), false};
  nb::gil_scoped_release unlocked;
  mask_gradient(call, threads);
}

template <class T>
SampleVectors<T> vectors_of(const HostTensor& first, const HostTensor& others) {
  const int64_t width = first.size(1), vectors = 1 + others.size(1) / width;
  return {first.as<const T>(), first.row_stride(), others.as<const float>(), others.row_stride(), first.size(0),
          vectors, width, nullptr};
}

// Fills `out`, contiguous.
template <class T>
void run_dot_pairs(nb::handle first, nb::handle others, nb::handle out, int threads) {
  const HostTensor vector(first, true), rest(others, true), to(out);
  const PairDots<T> call{vectors_of<T>(vector, rest), to.as<T>(), to.size(1)};
  nb::gil_scoped_release unlocked;
  dot_pairs(call, threads);
}

// Fills `grad_first` and `grad_others`, contiguous.
template <class T>
void run_pair_gradients(nb::handle grad, nb::handle first, nb::handle others, nb::handle grad_first,
                        nb::handle grad_others, int threads) {
  const HostTensor from(grad, true), vector(first, true), rest(others, true), of_first(grad_first), of_rest(grad_others);
  const PairGradients<T> call{vectors_of<T>(vector, rest), from.as<const T>(), from.row_stride(), of_first.as<T>(),
                              of_rest.as<float>(), false};
  nb::gil_scoped_release unlocked;
  pair_gradients(call, threads);
}

}  // namespace

void bind_dense(nb::module_& module) {
  module.def("mask_bfloat16", &run_mask_gradient<uint16_t>);
  module.def("mask_float", &run_mask_gradient<float>);
  module.def("has_pair_dots", &has_pair_dots);
  module.def("dot_bfloat16_pairs", &run_dot_pairs<uint16_t>);
  module.def("dot_float_pairs", &run_dot_pairs<float>);
  module.def("bfloat16_pair_gradients", &run_pair_gradients<uint16_t>);
  module.def("float_pair_gradients", &run_pair_gradients<float>);
}

}  // namespace terarec
