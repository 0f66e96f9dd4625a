// SPDX-License-Identifier: Apache-2.0
#include "encoding/bindings.h"
#include "encoding/python_arrays.h"
#include "encoding/xxh64.h"

namespace terarec::encoding {
namespace {

void hash_integers(Vector<const int64_t> values, uint64_t seed, Vector<int64_t> hashes) {
  require(values.shape(0) == hashes.shape(0), "values and hashes differ in length");
  nb::gil_scoped_release release;
  const int64_t* from = values.data();
  int64_t* to = hashes.data();
  for (int64_t row = 0; row < length(values); ++row) to[row] = xxh64(from[row], seed);
}

void hash_texts(Vector<const uint8_t> text, Vector<const int64_t> offsets, uint64_t seed, Vector<int64_t> hashes) {
  require(length(offsets) == length(hashes) + 1, "expected one more offset than hashes");
  nb::gil_scoped_release release;
  const Texts texts(text, offsets);
  for (int64_t row = 0; row < texts.size; ++row) hashes.data()[row] = xxh64(texts[row], seed);
}

// Hashes of a list of str or int, 0 for None; returns the first row of another type, or -1.
int64_t hash_list(nb::list values, uint64_t seed, Vector<int64_t> hashes) {
  require(nb::len(values) == hashes.shape(0), "values and hashes differ in length");
  int64_t row = 0;
  for (nb::handle value : values) {
    int64_t& hash = hashes.data()[row];
    if (value.is_none()) {
      hash = 0;
    } else if (const auto text = text_of_object(value.ptr())) {
      hash = xxh64(*text, seed);
    } else if (const auto integer = integer_of_object(value.ptr())) {
      hash = xxh64(*integer, seed);
    } else {
      return row;
    }
    ++row;
  }
  return -1;
}

}  // namespace

void bind_hashes(nb::module_& module) {
  module.def("xxh64_int64", &hash_integers, nb::arg("values"), nb::arg("seed"), nb::arg("hashes").noconvert());
  module.def("xxh64_text", &hash_texts, nb::arg("text"), nb::arg("offsets"), nb::arg("seed"),
             nb::arg("hashes").noconvert());
  module.def("xxh64_list", &hash_list, nb::arg("values"), nb::arg("seed"), nb::arg("hashes").noconvert());
}

}  // namespace terarec::encoding
