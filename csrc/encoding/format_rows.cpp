#include "format_rows.h"

#include <charconv>
#include <stdexcept>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

namespace nb = nanobind;

namespace terarec {
namespace {

constexpr size_t kWidestInteger = 11;  // -2147483648
constexpr size_t kHexDigits = 8;

char* write_hex(char* out, uint32_t value) {
    static constexpr char kDigits[] = "0123456789abcdef";
    for (int shift = 28; shift >= 0; shift -= 4) {
        *out++ = kDigits[(value >> shift) & 15u];
    }
    return out;
}

}  // namespace

size_t widest_row(size_t num_integers, size_t num_categories) {
    return 2 + num_integers * (kWidestInteger + 1) + num_categories * (kHexDigits + 1);
}

size_t format_rows(const RowColumns& columns, char* out) {
    const char* const first = out;
    for (size_t row = 0; row < columns.num_rows; ++row) {
        *out++ = static_cast<char>('0' + columns.labels[row]);
        for (size_t column = 0; column < columns.num_integers; ++column) {
            *out++ = '\t';
            const int32_t value = columns.integers[column * columns.num_rows + row];
            if (value != kMissingInteger) {
                out = std::to_chars(out, out + kWidestInteger, value).ptr;
            }
        }
        for (size_t column = 0; column < columns.num_categories; ++column) {
            *out++ = '\t';
            const int64_t value = columns.categories[column * columns.num_rows + row];
            if (value >= 0) {
                out = write_hex(out, static_cast<uint32_t>(value));
            }
        }
        *out++ = '\n';
    }
    return static_cast<size_t>(out - first);
}

namespace {

using Labels = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Integers = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Categories = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Text = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

size_t format_rows_into(Labels labels, Integers integers, Categories categories, Text out) {
    const size_t num_rows = labels.shape(0);
    if (integers.shape(1) != num_rows || categories.shape(1) != num_rows) {
        throw std::invalid_argument("format_rows: the columns differ in length");
    }
    if (out.shape(0) < num_rows * widest_row(integers.shape(0), categories.shape(0))) {
        throw std::invalid_argument("format_rows: out is shorter than rows * widest_row");
    }
    const RowColumns columns{labels.data(),     integers.data(),     categories.data(), num_rows,
                             integers.shape(0), categories.shape(0)};
    nb::gil_scoped_release release;
    return format_rows(columns, reinterpret_cast<char*>(out.data()));
}

}  // namespace

void bind_format_rows(nb::module_& module) {
    module.def("widest_row", &widest_row, nb::arg("num_integers"), nb::arg("num_categories"),
               "The most bytes that a row of format_rows can take.");
    module.def("format_rows", &format_rows_into, nb::arg("labels"), nb::arg("integers"), nb::arg("categories"),
               nb::arg("out"),
               "Write labels uint8[n], integers int32[I, n] (INT32_MIN: missing) and categories int64[C, n] (negative: "
               "missing) as tab-separated lines into out; returns the bytes written.");
}

}  // namespace terarec
