// SPDX-License-Identifier: Apache-2.0

// Columns -> the text of a raw click log: label, integers, hexadecimal categories, tab-separated.
#include "encoding/bindings.h"

#include <nanobind/ndarray.h>

#include <charconv>
#include <cstdint>
#include <stdexcept>

namespace nb = nanobind;

namespace terarec::encoding {

namespace {

// An integer that is missing: nothing is written between its tabs.
constexpr int32_t kMissingInteger = INT32_MIN;

// Integer or category c of row r is at [c * num_rows + r].
struct RowColumns {
  const uint8_t* labels;      // 0 or 1
  const int32_t* integers;
  const int64_t* categories;  // 0 <= value < 2^32, or negative when missing
  int64_t num_rows;
  int64_t num_integers;
  int64_t num_categories;
};

constexpr int64_t kWidestInteger = 11;  // -2147483648
constexpr int64_t kHexDigits = 8;

char* write_hex(char* out, uint32_t value) {
  static constexpr char kDigits[] = "0123456789abcdef";
  for (int shift = 28; shift >= 0; shift -= 4) *out++ = kDigits[(value >> shift) & 15u];
  return out;
}

// The most bytes that a row can take, line feed included.
int64_t widest_row(int64_t num_integers, int64_t num_categories) {
  return 2 + num_integers * (kWidestInteger + 1) + num_categories * (kHexDigits + 1);
}

// Writes the rows to `out`, which holds num_rows * widest_row() bytes; returns the number of bytes written.
int64_t format_rows(const RowColumns& columns, char* out) {
  const char* const first = out;
  for (int64_t row = 0; row < columns.num_rows; ++row) {
    *out++ = static_cast<char>('0' + (columns.labels[row] & 1));
    for (int64_t column = 0; column < columns.num_integers; ++column) {
      *out++ = '\t';
      const int32_t value = columns.integers[column * columns.num_rows + row];
      if (value != kMissingInteger) out = std::to_chars(out, out + kWidestInteger, value).ptr;
    }
    for (int64_t column = 0; column < columns.num_categories; ++column) {
      *out++ = '\t';
      const int64_t value = columns.categories[column * columns.num_rows + row];
      if (value >= 0) out = write_hex(out, static_cast<uint32_t>(value));
    }
    *out++ = '\n';
  }
  return out - first;
}

template <typename T, int dimensions>
using Array = nb::ndarray<T, nb::ndim<dimensions>, nb::c_contig, nb::device::cpu>;

int64_t format_rows_into(Array<const uint8_t, 1> labels, Array<const int32_t, 2> integers,
                         Array<const int64_t, 2> categories, Array<uint8_t, 1> out) {
  const RowColumns columns{labels.data(),
                           integers.data(),
                           categories.data(),
                           static_cast<int64_t>(labels.shape(0)),
                           static_cast<int64_t>(integers.shape(0)),
                           static_cast<int64_t>(categories.shape(0))};
  if (integers.shape(1) != labels.shape(0) || categories.shape(1) != labels.shape(0)) {
    throw std::invalid_argument("the columns differ in length");
  }
  if (static_cast<int64_t>(out.shape(0)) <
      columns.num_rows * widest_row(columns.num_integers, columns.num_categories)) {
    throw std::invalid_argument("out is shorter than rows * widest_row");
  }
  nb::gil_scoped_release release;
  return format_rows(columns, reinterpret_cast<char*>(out.data()));
}

}  // namespace

void bind_format_rows(nb::module_& module) {
  module.def("widest_row", &widest_row, nb::arg("num_integers"), nb::arg("num_categories"));
  module.def("format_rows", &format_rows_into, nb::arg("labels"), nb::arg("integers"), nb::arg("categories"),
             nb::arg("out").noconvert());
}

}  // namespace terarec::encoding
