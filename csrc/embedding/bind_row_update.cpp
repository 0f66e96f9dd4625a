// SPDX-License-Identifier: Apache-2.0
#include "embedding/bindings.h"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <deque>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "embedding/row_update.h"
#include "embedding/torch_tensors.h"

namespace nb = nanobind;

namespace terarec {
namespace {

// The tensors of a `KernelGradient`, checked by the callers in Python. They are read by name: an update has few of
// them, so that the time of a look-up of an attribute does not matter.
struct HeldGradient {
  explicit HeldGradient(nb::handle gradient)
      : keys(gradient.attr("keys")), offsets(gradient.attr("offsets")), grad(gradient.attr("grad"), true),
        layout(gradient.attr("layout")) {
    const nb::object factors = gradient.attr("key_weights");
    if (!factors.is_none()) key_weights.emplace(factors);
    const nb::object held_places = gradient.attr("places");
    if (!held_places.is_none()) places.emplace(held_places);
  }

  UpdateGradient plain() const {
    const int64_t features = layout.size(0);
    return {keys.as<const int64_t>(), places ? places->as<const int64_t>() : nullptr, keys.size(0),
            key_weights ? key_weights->as<const float>() : nullptr,
            offsets.as<const int64_t>(), layout.as<const FeatureLayout>(), features, (offsets.size(0) - 1) / features,
            grad.as<const float>(), grad.row_stride()};
  }

  HostTensor keys, offsets, grad, layout;
  std::optional<HostTensor> key_weights, places;
};

// All tensors of a call but the state, with contiguous copies of those that are not contiguous.
class HeldGradients {
 public:
  HeldGradients(nb::handle weights, nb::handle table_lr, nb::handle list, int threads) : weights_(weights) {
    if (!table_lr.is_none()) table_lr_.emplace(table_lr);
    const RowArray rows = weights_.rows();
    plain_ = {weights_.as<void>(), rows.type, rows.width, table_lr_ ? table_lr_->as<const float>() : nullptr, threads,
              {}};
    for (nb::handle gradient : list) plain_.list.push_back(held_.emplace_back(gradient).plain());
  }

  const UpdateGradients& plain() const { return plain_; }

 private:
  HostTensor weights_;
  std::optional<HostTensor> table_lr_;
  std::deque<HeldGradient> held_;
  UpdateGradients plain_;
};

// Address of a state, which the caller has checked to be contiguous; null for None.
template <class T>
T* state_at(nb::handle tensor) {
  return tensor.is_none() ? nullptr : HostTensor(tensor).as<T>();
}

// int64[V], or int64[count, 3] for segments.
RowNumbers numbers_in(const std::optional<HostTensor>& tensor) {
  if (!tensor) return {};
  const int64_t* const numbers = tensor->as<const int64_t>();
  if (tensor->dimensions() == 1) return {numbers, nullptr, 0};
  return {nullptr, numbers, tensor->size(0)};
}

// States are None where the rule has none.
Report run_row_update(nb::handle weights, nb::handle state0, nb::handle state1, nb::handle last_steps,
                      nb::handle gradients, const RowRule& rule, int64_t step, uint64_t rounding_seed,
                      nb::handle table_lr, int threads, nb::handle row_numbers) {
  const HeldGradients held(weights, table_lr, gradients, threads);
  std::optional<HostTensor> held_numbers;
  if (!row_numbers.is_none()) held_numbers.emplace(row_numbers);
  const UpdateCall call{state_at<float>(state0), state_at<float>(state1), state_at<int32_t>(last_steps), rule, step,
                        rounding_seed, held.plain(), numbers_in(held_numbers)};
  nb::gil_scoped_release unlocked;
  return report(row_update(call));
}

void make_rule(RowRule* rule, const char* kind) {
  const Rule* formula = RowRule::formula_of(kind);
  if (!formula) throw std::invalid_argument(std::string("no such rule: ") + kind);
  new (rule) RowRule{*formula};
}

// Returns the report and the sum of squares of the rows from `first_row` on.
std::tuple<Report, double> run_gradient_squares(nb::handle weights, int64_t first_row, nb::handle gradients,
                                                nb::handle table_lr, int threads) {
  const HeldGradients held(weights, table_lr, gradients, threads);
  nb::gil_scoped_release unlocked;
  const GradientSquares squares = gradient_squares(held.plain(), first_row);
  return {report(squares.fault), squares.sum};
}

}  // namespace

void bind_row_update(nb::module_& module) {
  nb::class_<RowRule>(module, "RowRule")
      .def("__init__", &make_rule, nb::arg("kind"))
      .def_rw("lr", &RowRule::lr)
      .def_rw("eps", &RowRule::eps)
      .def_rw("eps_hat", &RowRule::eps_hat)
      .def_rw("beta1", &RowRule::beta1)
      .def_rw("beta2", &RowRule::beta2)
      .def_rw("beta", &RowRule::beta)
      .def_rw("weight_decay", &RowRule::weight_decay)
      .def_rw("l1", &RowRule::l1)
      .def_rw("l2", &RowRule::l2)
      .def_rw("grad_scale", &RowRule::grad_scale)
      .def_rw("clip_value", &RowRule::clip_value)
      .def_rw("clip_norm", &RowRule::clip_norm)
      .def_rw("lr_in_momentum", &RowRule::lr_in_momentum)
      .def_rw("updates_all_rows", &RowRule::updates_all_rows)
      .def_rw("catches_up", &RowRule::catches_up);
  module.def("row_update", &run_row_update, nb::arg("weights"), nb::arg("state0").none(),
             nb::arg("state1").none(), nb::arg("last_steps").none(), nb::arg("gradients"), nb::arg("rule"), nb::arg("step"), nb::arg("rounding_seed"), nb::arg("table_lr").none(), nb::arg("threads"), nb::arg("row_numbers").none() = nb::none());
  module.def("gradient_squares", &run_gradient_squares, nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg());
}

}  // namespace terarec
