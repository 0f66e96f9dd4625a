// SPDX-License-Identifier: Apache-2.0
#include "embedding/bindings.h"

#include <nanobind/stl/tuple.h>

#include <optional>
#include <tuple>

#include "common/parallel.h"
#include "embedding/bag_lookup.h"
#include "embedding/torch_tensors.h"

namespace nb = nanobind;

namespace terarec {
namespace {

// The extents that the tensors of a lookup must fit: features, width, rows, whether it pools, whether it takes key
// weights.
using Extents = std::tuple<int64_t, int64_t, int64_t, bool, bool>;

// Whether the tensors lie in host memory and are of the types and shapes that a lookup with a layout takes.
bool lookup_fits(nb::handle weights, nb::handle keys, nb::handle offsets, nb::handle key_weights, nb::handle grad,
                 const Extents& extents) {
  const auto [features, width, num_rows, is_pooled, takes_key_weights] = extents;
  const std::optional<TensorKind> rows = kind_of(weights), of_keys = kind_of(keys), ends = kind_of(offsets);
  if (!rows || !rows->is_rows() || rows->sizes[1] != width || rows->sizes[0] < num_rows) return false;
  if (!of_keys || !of_keys->is_int64(1) || !ends || !ends->is_int64(1)) return false;
  const int64_t num_keys = of_keys->sizes[0], bags = ends->sizes[0] - 1;
  if (bags < 0 || bags % features) return false;
  if (!key_weights.is_none()) {
    const std::optional<TensorKind> factors = kind_of(key_weights);
    if (!takes_key_weights || !factors || !factors->is_float32(1) || factors->sizes[0] != num_keys) return false;
  }
  if (grad.is_none()) return true;
  const std::optional<TensorKind> gradient = kind_of(grad);
  if (!gradient || !gradient->is_float32(2)) return false;
  const int64_t expected_rows = is_pooled ? bags / features : num_keys;
  return gradient->sizes[0] == expected_rows && gradient->sizes[1] == (is_pooled ? features * width : width);
}

// Types and devices of the tensors, and that their shapes fit each other, were checked by the callers in Python.
struct LookupBags {
  LookupBags(nb::handle keys, nb::handle offsets, nb::handle layout)
      : keys(keys), offsets(offsets), layout(layout), features(this->layout.size(0)),
        batch((this->offsets.size(0) - 1) / features) {}

  HostTensor keys, offsets, layout;
  int64_t features, batch;
};

// Returns the result, a tensor that `empty(rows, columns)` allocates, or the report of a fault.
nb::object run_bag_lookup(nb::handle weights, nb::handle keys, nb::handle offsets, nb::handle layout, bool is_pooled,
                          nb::handle key_weights, nb::handle empty, int threads) {
  const HostTensor table(weights);
  const LookupBags bags(keys, offsets, layout);
  std::optional<HostTensor> factors;
  if (!key_weights.is_none()) factors.emplace(key_weights);
  const RowArray rows = table.rows();
  const int64_t num_keys = bags.keys.size(0);
  nb::object out = is_pooled ? empty(bags.batch, bags.features * rows.width) : empty(num_keys, rows.width);
  const LookupCall call{rows, bags.keys.as<const int64_t>(), num_keys,
                        factors ? factors->as<const float>() : nullptr, bags.offsets.as<const int64_t>(),
                        bags.layout.as<const FeatureLayout>(), bags.features, bags.batch,
                        HostTensor(out).as<float>(), threads};
  BagFault fault;
  {
    nb::gil_scoped_release unlocked;
    fault = bag_lookup(call);
  }
  return fault.kind == BagFault::kNone ? out : nb::cast(report(fault));
}

// Fills `dots`, contiguous.
Report run_row_dots(nb::handle weights, nb::handle keys, nb::handle offsets, nb::handle grad, nb::handle layout,
                    nb::handle dots, int threads) {
  const HostTensor table(weights), gradient(grad), out(dots);
  const LookupBags bags(keys, offsets, layout);
  const RowDotsCall call{table.rows(), bags.keys.as<const int64_t>(), bags.keys.size(0),
                         bags.offsets.as<const int64_t>(), bags.layout.as<const FeatureLayout>(), bags.features,
                         bags.batch, gradient.as<const float>(), gradient.size(1), out.as<float>(), threads};
  nb::gil_scoped_release unlocked;
  return report(row_dots(call));
}

}  // namespace

void bind_lookup(nb::module_& module) {
  module.def("lookup_fits", &lookup_fits, nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none(),
             nb::arg());
  module.def("bag_lookup", &run_bag_lookup, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(),
             nb::arg(), nb::arg());
  module.def("row_dots", &run_row_dots);
}

}  // namespace terarec
