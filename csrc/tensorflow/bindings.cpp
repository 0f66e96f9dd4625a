// SPDX-License-Identifier: Apache-2.0

// Python bindings of the tables: creation, files and checkpoints, and what ops do, where ops cannot be loaded.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "embedding/kernels.h"
#include "tensorflow/mesh.h"
#include "tensorflow/rule_numbers.h"
#include "tensorflow/tables.h"

namespace nb = nanobind;
using namespace terarec;

namespace {

using Ids = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;
using Numbers = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class T>
nb::object array_of(size_t rows, size_t columns, T** data) {
  *data = new T[std::max<size_t>(1, rows * std::max<size_t>(1, columns))];
  nb::capsule owner(*data, [](void* memory) noexcept { delete[] static_cast<T*>(memory); });
  if (columns == 0) return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(*data, {rows}, owner));
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<2>>(*data, {rows, columns}, owner));
}

void check(bool fits, const char* problem) {
  if (!fits) throw TableError(TableError::kInvalid, problem);
}

void check_rows(const Floats& rows, int64_t count, int64_t width, const char* problem) {
  check(rows.ndim() == 2 && static_cast<int64_t>(rows.shape(0)) == count &&
            static_cast<int64_t>(rows.shape(1)) == width,
        problem);
}

Bags bags_of(const Ids& ids, const Ids& offsets, const Floats& weights, int64_t pooling) {
  const bool pools = static_cast<Pooling>(pooling) != Pooling::kNone;
  check(!pools || offsets.size() > 0, "row_splits: got no number, expected one more than there are rows");
  check(weights.size() == 0 || weights.size() == ids.size(), "weights: expected one for each id");
  return {ids.data(), static_cast<int64_t>(ids.size()), offsets.data(), static_cast<int64_t>(offsets.size()) - 1,
          weights.size() > 0 ? weights.data() : nullptr, static_cast<Pooling>(pooling)};
}

nb::tuple arrays_of(const IdRows& of, int64_t width) {
  int64_t* ids;
  float* rows;
  nb::object keys = array_of<int64_t>(of.ids.size(), 0, &ids), values = array_of<float>(of.ids.size(), width, &rows);
  std::copy(of.ids.begin(), of.ids.end(), ids);
  std::copy(of.rows.begin(), of.rows.end(), rows);
  return nb::make_tuple(keys, values);
}

// (vectors, evicted ids, evicted rows).
nb::tuple look_up(Table& table, const Ids& ids, const Ids& offsets, const Floats& weights, int64_t pooling,
                  int64_t absent) {
  const Bags bags = bags_of(ids, offsets, weights, pooling);
  float* out;
  nb::object result = array_of<float>(bags.results(), table.width(), &out);
  IdRows evicted;
  {
    nb::gil_scoped_release unlocked;
    table.lookup(bags, static_cast<Absent>(absent), out, &evicted, table_threads());
  }
  const nb::tuple gone = arrays_of(evicted, table.width());
  return nb::make_tuple(result, gone[0], gone[1]);
}

nb::tuple merge(const Table& table, const Ids& ids, const Ids& offsets, const Floats& weights, const Floats& grad,
                int64_t pooling) {
  const Bags bags = bags_of(ids, offsets, weights, pooling);
  check_rows(grad, bags.results(), table.width(), "grad: expected the shape of the vectors");
  MergedRows merged;
  {
    nb::gil_scoped_release unlocked;
    merged = table.merge(bags, grad.data(), table_threads());
  }
  int64_t* indices;
  float* sums;
  nb::object keys = array_of<int64_t>(merged.size(), 0, &indices);
  nb::object values = array_of<float>(merged.size(), table.width(), &sums);
  merged.write(table.width(), indices, sums, table_threads());
  return nb::make_tuple(keys, values);
}

nb::object weight_gradient(const Table& table, const Ids& ids, const Ids& offsets, const Floats& weights,
                           const Floats& grad, int64_t pooling) {
  const Bags bags = bags_of(ids, offsets, weights, pooling);
  check_rows(grad, bags.results(), table.width(), "grad: expected the shape of the vectors");
  float* out;
  nb::object result = array_of<float>(weights.size(), 0, &out);
  nb::gil_scoped_release unlocked;
  if (bags.weights) table.weight_gradient(bags, grad.data(), out, table_threads());
  return result;
}

void apply(Table& table, const Ids& ids, const Floats& grads, const Numbers& numbers, int64_t step, int64_t rule) {
  check_rows(grads, ids.size(), table.width(), "values: expected a row of the variable's width for each index");
  check(static_cast<int64_t>(numbers.size()) == kRuleNumbers, "numbers: expected all numbers of a rule");
  nb::gil_scoped_release unlocked;
  table.apply(rule_of(rule, numbers.data()), step, ids.data(), ids.size(), grads.data(), table_threads());
}

void change(Table& table, const Ids& ids, const Floats& values, int64_t kind) {
  check_rows(values, ids.size(), table.width(), "values: expected a row of the variable's width for each index");
  nb::gil_scoped_release unlocked;
  table.change(static_cast<Table::Change>(kind), ids.data(), ids.size(), values.data(), table_threads());
}

void set_state(Table& table, int state, const Ids& ids, const Floats& values) {
  check_rows(values, ids.size(), table.width(), "values: expected a row of the variable's width for each id");
  nb::gil_scoped_release unlocked;
  table.set_state(state, ids.data(), ids.size(), values.data(), table_threads());
}

// What `read` returns, in place of all rows.
void replace(Table& table, const Ids& ids, const Floats& rows, const std::vector<Floats>& states, const Ids& clock,
             std::optional<float> initial) {
  const int64_t count = ids.size(), width = table.width(), times = static_cast<int64_t>(clock.size()) - 1;
  check(table.grows() || count == table.size(), "ids: expected all of fixed rows");
  check_rows(rows, count, width, "rows: expected a row of the variable's width for each id");
  check(times <= 0 || times == count, "clock: expected a number, and a time for each id or none");
  std::vector<const float*> values;
  for (const Floats& state : states) {
    check_rows(state, count, width, "states: expected a row of the variable's width for each id");
    values.push_back(state.data());
  }
  nb::gil_scoped_release unlocked;
  table.replace(ids.data(), count, rows.data(), values, initial ? &*initial : nullptr, clock.data(), times + 1,
                table_threads());
}

// (ids, rows, one array of rows for each state, clock, the first state of new ids).
nb::tuple read_all(const Table& table) {
  const int64_t rows = table.size(), width = table.width();
  const int states = table.states();
  int64_t *ids, *clock;
  float* values;
  std::array<float*, Table::kMostStates> state_values{};
  nb::object keys = array_of<int64_t>(rows, 0, &ids), weights = array_of<float>(rows, width, &values);
  nb::object times = array_of<int64_t>(1 + (table.forgets() ? rows : 0), 0, &clock);
  nb::list all;
  for (int state = 0; state < states; state++) all.append(array_of<float>(rows, width, &state_values[state]));
  {
    nb::gil_scoped_release unlocked;
    table.read(0, rows, ids, values, state_values.data(), clock);
  }
  return nb::make_tuple(keys, weights, all, times, table.initial_state());
}

// The table and its number. In one step: a pointer that is made of the Python object would not keep the number valid.
nb::tuple new_table(const std::string& name, int64_t width, int64_t rows, int64_t most_rows, double offset,
                    double scale, bool normal, uint64_t seed, bool forgets, bool narrow, double admitted) {
  check(width > 0, "dimension: expected a number > 0");
  const Growth growth{InitialRows{offset, scale, normal, seed}, admitted, forgets, narrow};
  const auto table = std::make_shared<Table>(name, width, rows, most_rows, growth);
  return nb::make_tuple(table, add_table(table));
}

nb::tuple since(const Table& table, int64_t microseconds) {
  IdRows found;
  {
    nb::gil_scoped_release unlocked;
    found = table.since(microseconds);
  }
  return arrays_of(found, table.width());
}

using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// What each rank has sent to this one: one of `parts` goes to each.
nb::list exchange(const std::string& what, const std::vector<Bytes>& parts) {
  const std::shared_ptr<Mesh> mesh = mesh_of_process();
  check(mesh && static_cast<int>(parts.size()) == mesh->size(), "parts: expected one for each rank");
  std::vector<Part> sent;
  for (const Bytes& part : parts) sent.push_back({part.data(), part.size()});
  std::vector<ReceivedPart> received;
  {
    nb::gil_scoped_release unlocked;
    const std::unique_lock<std::mutex> lock = mesh->begin();
    received = mesh->exchange(what, sent);
  }
  nb::list all;
  for (ReceivedPart& part : received) {
    uint8_t* bytes;
    all.append(array_of<uint8_t>(part.bytes, 0, &bytes));
    std::copy_n(part.data.get(), part.bytes, bytes);
  }
  return all;
}

int64_t rule_number(const char* kind) {
  const Rule* formula = RowRule::formula_of(kind);
  check(formula, "kind: no such rule");
  return static_cast<int64_t>(*formula);
}

std::vector<std::string> number_names() {
  std::vector<std::string> names;
  for (const auto& known : kNumbers) names.emplace_back(known.name);
  for (const auto& known : kFlags) names.emplace_back(known.name);
  return names;
}

}  // namespace

NB_MODULE(_tensorflow, m) {
  m.doc() = "Tables for terarec.tensorflow, and its ops.";
  nb::set_leak_warnings(false);  // TensorFlow's graphs live to the end of the interpreter
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const TableError& error) {
      // As TensorFlow maps what functions of Python raise.
      PyErr_SetString(error.kind == TableError::kInvalid ? PyExc_ValueError
                      : error.kind == TableError::kGone  ? PyExc_RuntimeError
                                                         : PyExc_MemoryError,
                      error.what());
    }
  });
  nb::class_<Table>(m, "Table")
      .def_prop_ro("grows", &Table::grows)
      .def("size", &Table::size)
      .def("have_states", &Table::have_states)
      .def("lookup", &look_up)
      .def("merge", &merge)
      .def("weight_gradient", &weight_gradient)
      .def("apply", &apply)
      .def("change", &change)
      .def("set_state", &set_state)
      .def("read", &read_all)
      .def("replace", &replace, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none())
      .def("since", &since);
  m.def("new_table", &new_table);
  m.def("join", [](int rank, const std::vector<int>& sockets, double limit_seconds) {
    set_mesh_of_process(std::make_shared<Mesh>(rank, sockets, limit_seconds));
  });
  m.def("leave", [] { set_mesh_of_process(nullptr); });
  m.def("exchange", &exchange);
  m.def("rule_number", &rule_number);
  m.def("number_names", &number_names);
  m.def("set_threads", &set_table_threads);
  m.def("select", [](const std::string& name) { return select_kernels(name.c_str()); });
}
