// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "encoding/bindings.h"
#include "encoding/fields.h"
#include "encoding/python_arrays.h"

namespace terarec::encoding {
namespace {

// Reads texts of one to eight hexadecimal digits; empty and masked ones are 0 and missing. Returns the first row of
// another text, or -1.
int64_t read_hex32(Vector<const uint8_t> text, Vector<const int64_t> offsets, Maybe<const uint8_t> valid,
                   Vector<uint32_t> numbers, Vector<bool> missing) {
  const int64_t rows = length(numbers);
  require(length(offsets) == rows + 1 && length(missing) == rows, "expected one more offset than numbers");
  const MissingMask mask = mask_of(valid, rows);
  nb::gil_scoped_release release;
  const Texts texts(text, offsets);
  for (int64_t row = 0; row < rows; ++row) {
    const std::string_view value = texts[row];
    const bool absent = value.empty() || mask[row];
    missing.data()[row] = absent;
    numbers.data()[row] = 0;
    if (!absent && !parse_hex(value.data(), value.data() + value.size(), numbers.data()[row])) return row;
  }
  return -1;
}

// Copies texts, each behind its length in four bytes, to Arrow's layout. Returns the first row that is cut short or no
// UTF-8, the number of rows if bytes follow the last one, or -1.
int64_t cut_texts(Vector<const uint8_t> raw, Vector<uint8_t> text, Vector<int64_t> offsets) {
  const int64_t rows = length(offsets) - 1;
  require(rows >= 0 && length(text) == length(raw) - 4 * rows, "expected room for the bytes of all texts");
  nb::gil_scoped_release release;
  const auto* from = reinterpret_cast<const char*>(raw.data());
  const char* const end = from + length(raw);
  auto* const first = reinterpret_cast<char*>(text.data());
  char* to = first;
  const bool ascii = is_ascii(from, end);
  offsets.data()[0] = 0;
  for (int64_t row = 0; row < rows; ++row) {
    uint32_t size;
    memcpy(&size, from, sizeof size);
    from += 4;
    // The lengths of the texts behind this one need room, too: so the next one is there, and what is written fits.
    if (static_cast<int64_t>(size) > end - from - 4 * (rows - row - 1)) return row;
    if (!ascii && !is_utf8(from, from + size)) return row;
    memcpy(to, from, size);
    from += size;
    to += size;
    offsets.data()[row + 1] = to - first;
  }
  return from == end ? -1 : rows;
}

}  // namespace

void bind_texts(nb::module_& module) {
  module.def("read_hex32", &read_hex32, nb::arg("text"), nb::arg("offsets"), nb::arg("valid").none(),
             nb::arg("numbers").noconvert(), nb::arg("missing").noconvert());
  module.def("cut_texts", &cut_texts, nb::arg("raw"), nb::arg("text").noconvert(), nb::arg("offsets").noconvert());
}

}  // namespace terarec::encoding
