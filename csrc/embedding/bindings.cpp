// The Python face of the kernels. Tensors come as addresses, or where a call is to be short as themselves: the launchers
// in terarec/kernels/cpu have checked types, shapes and devices.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>
#include <vector>

#include "common/cpu.h"
#include "common/parallel.h"
#include "embedding/bind_hash_index.h"
#include "embedding/bind_lookup.h"
#include "embedding/fault_report.h"
#include "embedding/huge_memory.h"
#include "embedding/kernels.h"
#include "embedding/reserved_memory.h"
#include "embedding/row_init.h"
#include "embedding/row_update.h"
#include "embedding/split_mix.h"
#include "embedding/torch_tensors.h"

namespace nb = nanobind;
using namespace terarec;

namespace {

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// Each of `list`: keys, number of keys, key weights or 0, offsets, layout, features, batch, gradient, gradient stride.
// `numbers`: weights, row type, width, factors of the learning rates or 0, threads.
UpdateGradients update_gradients(const std::vector<int64_t>& numbers, const std::vector<std::vector<int64_t>>& list) {
  UpdateGradients gradients{at<void>(numbers[0]), static_cast<RowType>(numbers[1]), numbers[2],
                            at<const float>(numbers[3]), static_cast<int>(numbers[4]), {}};
  for (const std::vector<int64_t>& g : list) {
    gradients.list.push_back({at<const int64_t>(g[0]), g[1], at<const float>(g[2]), at<const int64_t>(g[3]),
                              at<const FeatureLayout>(g[4]), g[5], g[6], at<const float>(g[7]), g[8]});
  }
  return gradients;
}

// `numbers`, `list`: see update_gradients. `state`: two tensors or 0, last steps or 0. `rule`: its kind, whether it
// sweeps, the step, the seed of the rounding. `constants`: as in RuleConstants. `extras`: none, or scale, bounds of
// values and of norms, coupled l1 and l2, beta1, beta2.
Report run_row_update(const std::vector<int64_t>& numbers, const std::vector<int64_t>& state,
                      const std::vector<int64_t>& rule, const std::vector<double>& constants,
                      const std::vector<double>& extras, const std::vector<std::vector<int64_t>>& list) {
  const auto constant = [&](int i) { return static_cast<float>(constants[i]); };
  const auto extra = [&](int i) { return static_cast<float>(extras[i]); };
  const RuleConstants of_rule{constant(0), constant(1), constant(2), constant(3), constant(4),  constant(5),
                              constant(6), constant(7), constant(8), constant(9), constant(10), constant(11),
                              constant(12)};
  RowExtras of_rows{};
  if (!extras.empty()) {
    of_rows = {extra(0),  extra(1),  extra(2), extra(3), extra(4), extras[5], extras[6], static_cast<int32_t>(rule[2]),
               at<int32_t>(state[2]), stream_of_update(static_cast<uint64_t>(rule[3]), static_cast<uint64_t>(rule[2]))};
  }
  const UpdateCall call{at<float>(state[0]), at<float>(state[1]), static_cast<Rule>(rule[0]), of_rule,
                        extras.empty() ? nullptr : &of_rows, rule[1] != 0, update_gradients(numbers, list)};
  nb::gil_scoped_release unlocked;
  return report(row_update(call));
}

// The report and the sum of squares of the rows from `first_row` on. `numbers`, `list`: see update_gradients.
std::tuple<Report, double> run_gradient_squares(const std::vector<int64_t>& numbers, int64_t first_row,
                                                const std::vector<std::vector<int64_t>>& list) {
  const UpdateGradients gradients = update_gradients(numbers, list);
  nb::gil_scoped_release unlocked;
  const GradientSquares squares = gradient_squares(gradients, first_row);
  return {report(squares.fault), squares.sum};
}

struct Mapping {
  void* memory;
  size_t bytes;
};

nb::capsule owner_of(void* memory, size_t bytes) {
  return nb::capsule(new Mapping{memory, bytes ? bytes : 1}, [](void* held) noexcept {
    Mapping* mapping = static_cast<Mapping*>(held);
    unmap_huge(mapping->memory, mapping->bytes);
    delete mapping;
  });
}

nb::object allocate_rows(const std::vector<size_t>& shape, int threads) {
  size_t bytes = sizeof(float);
  for (const size_t extent : shape) bytes *= extent;
  void* memory = map_huge(bytes ? bytes : 1);
  if (!memory) return nb::none();
  {
    nb::gil_scoped_release unlocked;
    touch_pages(memory, bytes, threads);
  }
  return nb::cast(nb::ndarray<nb::numpy, float>(memory, shape.size(), shape.data(), owner_of(memory, bytes)));
}

nb::object reserve(size_t bytes) {
  bytes = bytes ? bytes : 1;
  void* memory = reserve_memory(bytes);
  if (!memory) return nb::none();
  return nb::cast(nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(memory, {bytes}, owner_of(memory, bytes)));
}

nb::object allocate_result(size_t rows, size_t columns) {
  void* memory = take_result(rows * columns * sizeof(float));
  if (!memory) return nb::none();
  nb::capsule owner(memory, [](void* held) noexcept { give_result_back(held); });
  return nb::cast(nb::ndarray<nb::numpy, float, nb::ndim<2>>(memory, {rows, columns}, owner));
}

void run_fill_rows(uintptr_t rows, int64_t num_rows, int64_t width, int64_t first_row, uint64_t seed, double scale,
                   bool normal, int threads) {
  nb::gil_scoped_release unlocked;
  fill_rows({at<float>(rows), num_rows, width, first_row, seed, scale, normal, threads});
}

// `addresses`: of the rows, the targets and the keys.
void run_fill_keyed_rows(const std::vector<uintptr_t>& addresses, int64_t num_rows, int64_t width, uint64_t seed,
                         double scale, bool normal, int threads) {
  nb::gil_scoped_release unlocked;
  fill_keyed_rows({at<float>(addresses[0]), at<const int64_t>(addresses[1]), at<const int64_t>(addresses[2]), num_rows,
                   width, seed, scale, normal, threads});
}

std::vector<std::string> runnable() {
  std::vector<std::string> names{"generic"};
  if (cpu_has_avx2()) names.push_back("avx2");
  if (cpu_has_avx512()) names.push_back("avx512");
  return names;
}

}  // namespace

NB_MODULE(_embedding, m) {
  // A worker that torch's DataLoader spawns keeps its data set, and what that has of ours, in a global of torch's until
  // the interpreter is gone (WorkerInfo.dataset). What others never let go is no leak for us to tell a user about.
  nb::set_leak_warnings(false);
  m.doc() = "Embedding kernels for CPUs, to be called by terarec.kernels.cpu alone.";
  m.def("use_exchange_api", &use_exchange_api);
  bind_lookup(m);
  m.def("row_update", &run_row_update);
  m.def("gradient_squares", &run_gradient_squares);
  m.def("allocate_rows", &allocate_rows);
  m.def("allocate_result", &allocate_result);
  m.def("fill_rows", &run_fill_rows);
  m.def("fill_keyed_rows", &run_fill_keyed_rows);
  m.def("reserve", &reserve);
  m.def("commit", [](uintptr_t reserved, size_t begin, size_t end) {
    return commit_memory(at<void>(reserved), begin, end);
  });
  bind_hash_index(m);
  m.def("select", [](const std::string& name) { return select_kernels(name.c_str()); });
  m.def("selected", []() { return std::string(kernels().name); });
  m.def("runnable", &runnable);
  m.def("parallel_runtime", []() { return std::string(parallel_runtime()); });
}
