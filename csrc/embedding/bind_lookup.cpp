#include "embedding/bind_lookup.h"

#include <optional>

#include "common/parallel.h"
#include "embedding/bag_lookup.h"
#include "embedding/fault_report.h"
#include "embedding/row_dots.h"
#include "embedding/torch_tensors.h"

namespace nb = nanobind;

namespace terarec {
namespace {

// Types and devices of the tensors, and that their shapes fit each other, were checked by the callers in Python.
struct LaidBags {
  LaidBags(nb::handle keys, nb::handle offsets, nb::handle layout)
      : keys(keys), offsets(offsets), layout(layout), features(this->layout.size(0)),
        batch((this->offsets.size(0) - 1) / features) {}

  HostTensor keys, offsets, layout;
  int64_t features, batch;
};

// The result, a tensor that `empty(rows, columns)` makes; or the report of a fault.
nb::object run_bag_lookup(nb::handle weights, nb::handle keys, nb::handle offsets, nb::handle layout, bool is_pooled,
                          nb::handle key_weights, nb::handle empty, int threads) {
  const HostTensor table(weights);
  const LaidBags bags(keys, offsets, layout);
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
  const LaidBags bags(keys, offsets, layout);
  const RowDotsCall call{table.rows(), bags.keys.as<const int64_t>(), bags.keys.size(0),
                         bags.offsets.as<const int64_t>(), bags.layout.as<const FeatureLayout>(), bags.features,
                         bags.batch, gradient.as<const float>(), gradient.size(1), out.as<float>(), threads};
  nb::gil_scoped_release unlocked;
  return report(row_dots(call));
}

}  // namespace

void bind_lookup(nb::module_& module) {
  module.def("bag_lookup", &run_bag_lookup, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(),
             nb::arg(), nb::arg());
  module.def("row_dots", &run_row_dots);
}

}  // namespace terarec
