// Python names of the encoding core. Work on arrays releases the GIL; a list of Python values is read under it.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <string_view>

#include "encoding/bind_format_rows.h"
#include "encoding/count_table.h"
#include "encoding/criteo_lines.h"
#include "encoding/hex.h"
#include "encoding/id_tables.h"
#include "encoding/log_shift.h"

namespace nb = nanobind;
using namespace terarec::encoding;

namespace {

template <typename T>
using Vector = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Matrix = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void require(bool condition, const char* what) {
  if (!condition) throw std::invalid_argument(what);
}

// A 1-D array that owns `values`.
template <typename T>
nb::object to_numpy(std::vector<T> values) {
  auto* owned = new std::vector<T>(std::move(values));
  nb::capsule owner(owned, [](void* pointer) noexcept { delete static_cast<std::vector<T>*>(pointer); });
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(owned->data(), {owned->size()}, owner));
}

int64_t bind_count_lines(Vector<const uint8_t> block) {
  nb::gil_scoped_release release;
  return count_lines(reinterpret_cast<const char*>(block.data()), static_cast<int64_t>(block.shape(0)));
}

// (rows, fault, column, begin, end), as ParseResult has them.
nb::tuple bind_parse_criteo(Vector<const uint8_t> block, Vector<float> label, Matrix<int32_t> integers,
                            Matrix<uint32_t> categories, Vector<uint64_t> missing) {
  const char* data = reinterpret_cast<const char*>(block.data());
  const auto size = static_cast<int64_t>(block.shape(0));
  require(integers.shape(0) == kIntegers && categories.shape(0) == kCategories, "expected 13 integer and 26 category rows");
  require(integers.shape(1) == label.shape(0) && categories.shape(1) == label.shape(0) &&
              missing.shape(0) == label.shape(0),
          "the output arrays differ in length");
  ParseResult result;
  {
    nb::gil_scoped_release release;
    const CriteoColumns out{label.data(), integers.data(), categories.data(), missing.data(),
                            static_cast<int64_t>(label.shape(0))};
    result = parse_lines(data, size, out);
  }
  return nb::make_tuple(result.rows, static_cast<int>(result.fault), result.column, result.begin, result.end);
}

void bind_count_add(CountTable& table, Vector<const uint32_t> keys, Vector<const uint64_t> missing, int bit) {
  require(keys.shape(0) == missing.shape(0), "keys and missing differ in length");
  require(bit >= 0 && bit < 64, "bit must be in [0, 64)");
  nb::gil_scoped_release release;
  table.add(keys.data(), missing.data(), bit, static_cast<int64_t>(keys.shape(0)));
}

// (values uint32, counts int64)
nb::tuple bind_at_least(const CountTable& table, uint32_t min_count) {
  std::vector<uint32_t> values;
  std::vector<int64_t> counts;
  {
    nb::gil_scoped_release release;
    const std::vector<ValueCount> kept = table.at_least(min_count);
    values.reserve(kept.size());
    counts.reserve(kept.size());
    for (const ValueCount& entry : kept) {
      values.push_back(entry.value);
      counts.push_back(entry.count);
    }
  }
  return nb::make_tuple(to_numpy(std::move(values)), to_numpy(std::move(counts)));
}

template <typename Id>
void bind_find_all(const Hex32Ids& table, Vector<const uint32_t> keys, Vector<const uint64_t> missing, int bit,
                   Vector<Id> ids) {
  require(keys.shape(0) == missing.shape(0) && keys.shape(0) == ids.shape(0), "the arrays differ in length");
  require(bit >= 0 && bit < 64, "bit must be in [0, 64)");
  nb::gil_scoped_release release;
  table.find_all(keys.data(), missing.data(), bit, static_cast<int64_t>(keys.shape(0)), ids.data());
}

void bind_find_int64(const Int64Ids& table, Vector<const int64_t> keys, Vector<int64_t> ids) {
  require(keys.shape(0) == ids.shape(0), "keys and ids differ in length");
  nb::gil_scoped_release release;
  for (size_t row = 0; row < keys.shape(0); ++row) ids.data()[row] = table.find(keys.data()[row]);
}

// Checks Arrow's layout of text: offsets rise from >= 0 and end inside the text.
void require_text(const Vector<const uint8_t>& text, const Vector<const int64_t>& offsets) {
  require(offsets.shape(0) >= 1 && offsets.data()[0] >= 0, "expected offsets that start at 0 or later");
  for (size_t row = 1; row < offsets.shape(0); ++row) {
    require(offsets.data()[row - 1] <= offsets.data()[row], "expected rising offsets");
  }
  require(offsets.data()[offsets.shape(0) - 1] <= static_cast<int64_t>(text.shape(0)), "the offsets leave the text");
}

int64_t id_of(const TextIds& table, std::string_view value, bool&) {
  return value.empty() ? kMissingId : table.find(value);
}

int64_t id_of(const Hex32Ids& table, std::string_view value, bool& good) {
  if (value.empty()) return kMissingId;
  uint32_t key = 0;
  good = parse_hex(value.data(), value.data() + value.size(), key);
  return good ? table.find(key) : kRareId;
}

// Ids of Arrow's text; returns the first row that the table's type refuses, or -1.
template <typename Table>
int64_t bind_find_text(const Table& table, Vector<const uint8_t> text, Vector<const int64_t> offsets,
                       Vector<int64_t> ids) {
  require(offsets.shape(0) == ids.shape(0) + 1, "expected one more offset than ids");
  nb::gil_scoped_release release;
  require_text(text, offsets);
  const char* data = reinterpret_cast<const char*>(text.data());
  for (size_t row = 0; row < ids.shape(0); ++row) {
    const int64_t begin = offsets.data()[row];
    bool good = true;
    ids.data()[row] = id_of(table, {data + begin, static_cast<size_t>(offsets.data()[row + 1] - begin)}, good);
    if (!good) return static_cast<int64_t>(row);
  }
  return -1;
}

template <typename Table>
int64_t id_of_object(const Table& table, PyObject* value, bool& good) {
  Py_ssize_t size = 0;
  const char* text = PyUnicode_Check(value) ? PyUnicode_AsUTF8AndSize(value, &size) : nullptr;
  good = text != nullptr;
  if (good) return id_of(table, {text, static_cast<size_t>(size)}, good);
  PyErr_Clear();
  return kRareId;
}

int64_t id_of_object(const Int64Ids& table, PyObject* value, bool& good) {
  nb::object index = nb::steal(PyBool_Check(value) ? nullptr : PyNumber_Index(value));
  const int64_t key = index.is_valid() ? PyLong_AsLongLong(index.ptr()) : -1;
  good = index.is_valid() && !(key == -1 && PyErr_Occurred());
  PyErr_Clear();
  return good ? table.find(key) : kRareId;
}

// Ids of a list of Python values, None being missing; returns the first row of another type or range, or -1.
template <typename Table>
int64_t bind_find_list(const Table& table, nb::list values, Vector<int64_t> ids) {
  require(nb::len(values) == ids.shape(0), "values and ids differ in length");
  int64_t row = 0;
  for (nb::handle value : values) {
    bool good = true;
    ids.data()[row] = value.is_none() ? kMissingId : id_of_object(table, value.ptr(), good);
    if (!good) return row;
    ++row;
  }
  return -1;
}

// A Python number, or NaN for None and ""; sets `good` to false for anything else, infinity and bool included.
double number_of_object(PyObject* value, bool& good) {
  if (value == Py_None || (PyUnicode_Check(value) && PyUnicode_GetLength(value) == 0)) return std::nan("");
  const bool numeric = PyFloat_Check(value) || (PyLong_Check(value) && !PyBool_Check(value)) ||
                       (!PyUnicode_Check(value) && !PyBytes_Check(value) && PyNumber_Check(value) && !PyBool_Check(value));
  const double number = numeric ? PyFloat_AsDouble(value) : 0.0;
  good = numeric && !PyErr_Occurred() && !std::isinf(number);
  PyErr_Clear();
  return number;
}

// Numbers of a list of Python values; returns the first row of another type, or -1.
int64_t bind_numbers_of_list(nb::list values, Vector<double> numbers) {
  require(nb::len(values) == numbers.shape(0), "values and numbers differ in length");
  int64_t row = 0;
  for (nb::handle value : values) {
    bool good = true;
    numbers.data()[row] = number_of_object(value.ptr(), good);
    if (!good) return row;
    ++row;
  }
  return -1;
}

template <typename Number>
void bind_log_shift(Vector<const Number> values, double shift, Vector<float> out) {
  require(values.shape(0) == out.shape(0), "values and out differ in length");
  nb::gil_scoped_release release;
  log_shift(values.data(), static_cast<int64_t>(values.shape(0)), shift, out.data());
}

}  // namespace

NB_MODULE(_encoding, module) {
  bind_format_rows(module);
  module.def("count_lines", &bind_count_lines, nb::arg("block"));
  module.def("parse_criteo", &bind_parse_criteo, nb::arg("block"), nb::arg("label"), nb::arg("integers"),
             nb::arg("categories"), nb::arg("missing"));
  module.def("log_shift", &bind_log_shift<int32_t>, nb::arg("values"), nb::arg("shift"), nb::arg("out"));
  module.def("log_shift", &bind_log_shift<double>, nb::arg("values"), nb::arg("shift"), nb::arg("out"));

  module.def("numbers_of_list", &bind_numbers_of_list, nb::arg("values"), nb::arg("numbers"));

  nb::class_<CountTable>(module, "CountTable")
      .def(nb::init<>())
      .def("add", &bind_count_add, nb::arg("keys"), nb::arg("missing"), nb::arg("bit"))
      .def("at_least", &bind_at_least, nb::arg("min_count"))
      .def("__len__", &CountTable::size);

  nb::class_<Hex32Ids>(module, "Hex32Ids")
      .def("__init__",
           [](Hex32Ids* self, Vector<const uint32_t> values) {
             new (self) Hex32Ids(values.data(), static_cast<int64_t>(values.shape(0)));
           },
           nb::arg("values"))
      .def("find_all", &bind_find_all<int32_t>, nb::arg("keys"), nb::arg("missing"), nb::arg("bit"), nb::arg("ids"))
      .def("find_all", &bind_find_all<int64_t>, nb::arg("keys"), nb::arg("missing"), nb::arg("bit"), nb::arg("ids"))
      .def("find_text", &bind_find_text<Hex32Ids>, nb::arg("text"), nb::arg("offsets"), nb::arg("ids"))
      .def("find_list", &bind_find_list<Hex32Ids>, nb::arg("values"), nb::arg("ids"));

  nb::class_<Int64Ids>(module, "Int64Ids")
      .def("__init__",
           [](Int64Ids* self, Vector<const int64_t> values) {
             new (self) Int64Ids(values.data(), static_cast<int64_t>(values.shape(0)));
           },
           nb::arg("values"))
      .def("find_all", &bind_find_int64, nb::arg("keys"), nb::arg("ids"))
      .def("find_list", &bind_find_list<Int64Ids>, nb::arg("values"), nb::arg("ids"));

  nb::class_<TextIds>(module, "TextIds")
      .def("__init__",
           [](TextIds* self, Vector<const uint8_t> text, Vector<const int64_t> offsets) {
             require_text(text, offsets);
             new (self) TextIds(reinterpret_cast<const char*>(text.data()), offsets.data(),
                                static_cast<int64_t>(offsets.shape(0)) - 1);
           },
           nb::arg("text"), nb::arg("offsets"))
      .def("find_text", &bind_find_text<TextIds>, nb::arg("text"), nb::arg("offsets"), nb::arg("ids"))
      .def("find_list", &bind_find_list<TextIds>, nb::arg("values"), nb::arg("ids"));
}
