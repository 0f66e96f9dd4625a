// Single Python values as the encoding tables read them, under the GIL.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <string_view>

namespace terarec::encoding {

// The UTF-8 bytes of a str, which lives as long as the object; nothing for another type or a lone surrogate.
inline std::optional<std::string_view> text_of_object(PyObject* value) {
  Py_ssize_t size = 0;
  const char* text = PyUnicode_Check(value) ? PyUnicode_AsUTF8AndSize(value, &size) : nullptr;
  if (text == nullptr) {
    PyErr_Clear();
    return std::nullopt;
  }
  return std::string_view{text, static_cast<size_t>(size)};
}

// A Python or NumPy integer; nothing for a truth value, another type, or more than 64 bits.
inline std::optional<int64_t> integer_of_object(PyObject* value) {
  nanobind::object index = nanobind::steal(PyBool_Check(value) ? nullptr : PyNumber_Index(value));
  const int64_t key = index.is_valid() ? PyLong_AsLongLong(index.ptr()) : -1;
  const bool good = index.is_valid() && !(key == -1 && PyErr_Occurred());
  PyErr_Clear();
  return good ? std::optional<int64_t>(key) : std::nullopt;
}

}  // namespace terarec::encoding
