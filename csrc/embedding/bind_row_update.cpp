#include "embedding/bind_row_update.h"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <deque>
#include <optional>
#include <tuple>
#include <vector>

#include "embedding/fault_report.h"
#include "embedding/row_update.h"
#include "embedding/split_mix.h"
#include "embedding/torch_tensors.h"

namespace nb = nanobind;

namespace terarec {
namespace {

// The tensors of a `LaidGradient`, checked by the callers in Python.
struct HeldGradient {
  explicit HeldGradient(nb::handle parts)
      : keys(parts[0]), offsets(parts[1]), grad(parts[2], true), layout(parts[3]) {
    const nb::object factors = parts[4];
    if (!factors.is_none()) key_weights.emplace(factors);
  }

  UpdateGradient plain() const {
    const int64_t features = layout.size(0);
    return {keys.as<const int64_t>(), keys.size(0), key_weights ? key_weights->as<const float>() : nullptr,
            offsets.as<const int64_t>(), layout.as<const FeatureLayout>(), features, (offsets.size(0) - 1) / features,
            grad.as<const float>(), grad.row_stride()};
  }

  HostTensor keys, offsets, grad, layout;
  std::optional<HostTensor> key_weights;
};

// All tensors of a call but the state, with copies of those that do not lie as the core reads them.
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

// Where a state lies, which the caller has checked to be contiguous; null for None.
template <class T>
T* state_at(nb::handle tensor) {
  return tensor.is_none() ? nullptr : HostTensor(tensor).as<T>();
}

// `state`: two tensors or None, last steps or None. `rule`: its kind, whether it sweeps, the step, the seed of the
// rounding. `constants`: as in RuleConstants. `extras`: none, or scale, bounds of values and of norms, coupled l1 and
// l2, beta1, beta2.
Report run_row_update(nb::handle weights, nb::handle state, nb::handle gradients, const std::vector<int64_t>& rule,
                      const std::vector<double>& constants, const std::vector<double>& extras, nb::handle table_lr,
                      int threads) {
  const auto constant = [&](int i) { return static_cast<float>(constants[i]); };
  const auto extra = [&](int i) { return static_cast<float>(extras[i]); };
  const RuleConstants of_rule{constant(0), constant(1), constant(2), constant(3), constant(4),  constant(5),
                              constant(6), constant(7), constant(8), constant(9), constant(10), constant(11),
                              constant(12)};
  RowExtras of_rows{};
  if (!extras.empty()) {
    of_rows = {extra(0),  extra(1),  extra(2), extra(3), extra(4), extras[5], extras[6], static_cast<int32_t>(rule[2]),
               state_at<int32_t>(state[2]),
               stream_of_update(static_cast<uint64_t>(rule[3]), static_cast<uint64_t>(rule[2]))};
  }
  const HeldGradients held(weights, table_lr, gradients, threads);
  const UpdateCall call{state_at<float>(state[0]), state_at<float>(state[1]), static_cast<Rule>(rule[0]), of_rule,
                        extras.empty() ? nullptr : &of_rows, rule[1] != 0, held.plain()};
  nb::gil_scoped_release unlocked;
  return report(row_update(call));
}

// The report and the sum of squares of the rows from `first_row` on.
std::tuple<Report, double> run_gradient_squares(nb::handle weights, int64_t first_row, nb::handle gradients,
                                                nb::handle table_lr, int threads) {
  const HeldGradients held(weights, table_lr, gradients, threads);
  nb::gil_scoped_release unlocked;
  const GradientSquares squares = gradient_squares(held.plain(), first_row);
  return {report(squares.fault), squares.sum};
}

}  // namespace

void bind_row_update(nb::module_& module) {
  module.def("row_update", &run_row_update, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
             nb::arg().none(), nb::arg());
  module.def("gradient_squares", &run_gradient_squares, nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg());
}

}  // namespace terarec
