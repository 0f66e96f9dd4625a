// SPDX-License-Identifier: Apache-2.0

// Python names of the encoding core. Work on arrays releases the GIL; a list of Python values is read under it.
#include <cmath>

#include "encoding/bindings.h"
#include "encoding/python_arrays.h"

using namespace terarec::encoding;

namespace {

// A Python number, or NaN for None and ""; sets `good` to false for anything else, infinity and bool included.
double number_of_object(PyObject* value, bool& good) {
  if (PyFloat_CheckExact(value)) {
    good = !std::isinf(PyFloat_AS_DOUBLE(value));
    return PyFloat_AS_DOUBLE(value);
  }
  if (PyLong_CheckExact(value)) {
    if (const auto whole = integer_of_object(value)) return static_cast<double>(*whole);
  }
  if (value == Py_None || (PyUnicode_Check(value) && PyUnicode_GetLength(value) == 0)) return std::nan("");
  const bool numeric = PyFloat_Check(value) || (PyLong_Check(value) && !PyBool_Check(value)) ||
                       (!PyUnicode_Check(value) && !PyBytes_Check(value) && PyNumber_Check(value) && !PyBool_Check(value));
  const double number = numeric ? PyFloat_AsDouble(value) : 0.0;
  good = numeric && !PyErr_Occurred() && !std::isinf(number);
  PyErr_Clear();
  return number;
}

// The same of a Python integer of 64 bits.
double whole_of_object(PyObject* value, bool& good) {
  if (value == Py_None) return std::nan("");
  const std::optional<int64_t> whole = PyLong_Check(value) ? integer_of_object(value) : std::nullopt;
  good = whole.has_value();
  return good ? static_cast<double>(*whole) : 0.0;
}

// Numbers, or only whole ones, of lists of Python values, one list after another; returns the first position in `numbers` of
// another type, or -1. Several lists are not joined before: that would wait for each object to count a reference.
int64_t bind_numbers_of_lists(nb::list columns, bool whole, Vector<double> numbers) {
  int64_t row = 0;
  for (nb::handle column : columns) {
    const nb::list values = nb::cast<nb::list>(column);
    require(row + static_cast<int64_t>(nb::len(values)) <= length(numbers), "values and numbers differ in length");
    Py_ssize_t place = 0;
    for (nb::handle value : values) {
      prefetch_object(values.ptr(), place + kObjectsAhead);
      bool good = true;
      numbers.data()[row] = whole ? whole_of_object(value.ptr(), good) : number_of_object(value.ptr(), good);
      if (!good) return row;
      ++row;
      ++place;
    }
  }
  require(row == length(numbers), "values and numbers differ in length");
  return -1;
}

}  // namespace

NB_MODULE(_encoding, module) {
  nb::set_leak_warnings(false);  // as in _embedding: others may keep objects until the interpreter ends
  bind_format_rows(module);
  bind_delimited(module);
  bind_columns(module);
  bind_counts(module);
  bind_ids(module);
  bind_hashes(module);
  bind_texts(module);
  module.def("numbers_of_lists", &bind_numbers_of_lists, nb::arg("columns"), nb::arg("whole"),
             nb::arg("numbers").noconvert());
}
