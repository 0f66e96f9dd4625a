// The value of one field of text, and what can be wrong with it.
#pragma once

#include <cstdint>

namespace terarec::encoding {

// The order is that of FAULT_KINDS in kernels/delimited_types.py.
enum class Fault : int {
  none,
  short_line,
  long_line,
  oversized_line,
  quote,
  integer,
  integer_range,
  number,
  infinite,
  hex,
  utf8,
};
constexpr int kFaults = static_cast<int>(Fault::utf8) + 1;

// An optional minus and digits, and perhaps a point and zeros.
Fault read_integer(const char* begin, const char* end, int64_t& value);

// What std::from_chars reads (a decimal number, a plus in its exponent alone), rounded to the nearest double; too small a
// number is 0. "nan" of any case is NaN.
Fault read_number(const char* begin, const char* end, double& value);

// Whether the bytes are UTF-8: no overlong form, no surrogate, nothing above U+10FFFF.
bool is_utf8(const char* begin, const char* end);

// Whether no byte is above 0x7f.
bool is_ascii(const char* begin, const char* end);

}  // namespace terarec::encoding
