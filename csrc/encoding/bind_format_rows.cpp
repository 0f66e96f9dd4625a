#include "encoding/bind_format_rows.h"

#include <nanobind/ndarray.h>

#include <stdexcept>

#include "encoding/format_rows.h"

namespace nb = nanobind;

namespace terarec::encoding {

namespace {

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
             nb::arg("out"));
}

}  // namespace terarec::encoding
