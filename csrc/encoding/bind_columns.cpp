// SPDX-License-Identifier: Apache-2.0
#include <nanobind/stl/vector.h>

#include <string_view>
#include <vector>

#include "encoding/bindings.h"
#include "encoding/columns.h"
#include "encoding/python_arrays.h"

namespace terarec::encoding {
namespace {

// A one-dimensional array, which the buffer protocol gives in a fifth of the time that nb::ndarray takes.
class ArrayView {
 public:
  ArrayView(nb::handle array, int flags) {
    if (PyObject_GetBuffer(array.ptr(), &view_, flags | PyBUF_FORMAT) != 0) throw nb::python_error();
    if (view_.ndim != 1) {
      PyBuffer_Release(&view_);
      throw std::invalid_argument("expected arrays of one dimension");
    }
  }
  ArrayView(ArrayView&& other) noexcept : view_(other.view_) { other.view_.obj = nullptr; }
  ArrayView(const ArrayView&) = delete;
  ArrayView& operator=(const ArrayView&) = delete;
  ArrayView& operator=(ArrayView&&) = delete;
  ~ArrayView() { PyBuffer_Release(&view_); }

  int64_t size() const { return view_.len / view_.itemsize; }
  void* data() const { return view_.buf; }
  bool is_signed() const { return format() == "i" || format() == "l" || format() == "q"; }
  bool is_int32() const { return is_signed() && view_.itemsize == 4; }
  bool is_int64() const { return is_signed() && view_.itemsize == 8; }

  NumberColumn numbers() const {
    const bool is_float = format() == "f" || format() == "d";
    require((is_float || is_signed()) && (view_.itemsize == 4 || view_.itemsize == 8),
            "expected float32, float64, int32 or int64");
    require(view_.strides[0] % view_.itemsize == 0, "expected aligned numbers");
    const NumberType type = is_float ? (view_.itemsize == 4 ? NumberType::kFloat32 : NumberType::kFloat64)
                                     : (view_.itemsize == 4 ? NumberType::kInt32 : NumberType::kInt64);
    return {view_.buf, type, view_.strides[0] / view_.itemsize};
  }

 private:
  std::string_view format() const { return view_.format == nullptr ? "B" : view_.format; }
  Py_buffer view_{};
};

std::vector<ArrayView> views_of(nb::list arrays, int flags) {
  std::vector<ArrayView> views;
  views.reserve(nb::len(arrays));
  for (nb::handle array : arrays) views.emplace_back(array, flags);
  return views;
}

void stack_numbers(nb::list columns, Matrix<float> rows) {
  const std::vector<ArrayView> views = views_of(columns, PyBUF_STRIDES);
  require(views.size() == rows.shape(1), "columns and rows differ in width");
  std::vector<NumberColumn> numbers;
  numbers.reserve(views.size());
  for (const ArrayView& view : views) {
    require(view.size() == static_cast<int64_t>(rows.shape(0)), "columns and rows differ in number");
    numbers.push_back(view.numbers());
  }
  nb::gil_scoped_release release;
  stack_columns(numbers, static_cast<int64_t>(rows.shape(0)), rows.data());
}

void concatenate_keys(nb::list arrays, std::vector<int64_t> offsets, Vector<int64_t> out) {
  const std::vector<ArrayView> views = views_of(arrays, PyBUF_C_CONTIGUOUS);
  require(views.size() == offsets.size(), "arrays and offsets differ in number");
  int64_t total = 0;
  for (const ArrayView& view : views) {
    require(view.is_int32() || view.is_int64(), "expected int32 or int64");
    total += view.size();
  }
  require(total == length(out), "the arrays and their concatenation differ in length");
  nb::gil_scoped_release release;
  int64_t* to = out.data();
  for (size_t i = 0; i < views.size(); ++i) {
    const ArrayView& view = views[i];
    if (view.is_int32()) {
      copy_keys(static_cast<const int32_t*>(view.data()), view.size(), offsets[i], to);
    } else {
      copy_keys(static_cast<const int64_t*>(view.data()), view.size(), offsets[i], to);
    }
    to += view.size();
  }
}

template <typename Number>
bool all_nulls_hold(Vector<const Number> numbers, Vector<const uint8_t> valid, Number fill) {
  const int64_t rows = length(numbers);
  const MissingMask missing = mask_of(valid, rows);
  nb::gil_scoped_release release;
  return nulls_hold(
      numbers.data(), [missing](int64_t first, int64_t count) { return missing.word(first, count); }, rows, fill);
}

template <typename Number>
void bind_nulls_hold(nb::module_& module) {
  module.def("nulls_hold", &all_nulls_hold<Number>, nb::arg("numbers").noconvert(), nb::arg("valid"), nb::arg("fill"));
}

}  // namespace

void bind_columns(nb::module_& module) {
  bind_nulls_hold<int64_t>(module);
  bind_nulls_hold<double>(module);
  bind_nulls_hold<uint32_t>(module);
  module.def("stack_columns", &stack_numbers, nb::arg("columns"), nb::arg("rows").noconvert());
  module.def("concatenate_keys", &concatenate_keys, nb::arg("arrays"), nb::arg("offsets"), nb::arg("out").noconvert());
}

}  // namespace terarec::encoding
