#include "encoding/format_rows.h"

#include <charconv>

namespace terarec::encoding {

namespace {

constexpr int64_t kWidestInteger = 11;  // -2147483648
constexpr int64_t kHexDigits = 8;

char* write_hex(char* out, uint32_t value) {
  static constexpr char kDigits[] = "0123456789abcdef";
  for (int shift = 28; shift >= 0; shift -= 4) *out++ = kDigits[(value >> shift) & 15u];
  return out;
}

}  // namespace

int64_t widest_row(int64_t num_integers, int64_t num_categories) {
  return 2 + num_integers * (kWidestInteger + 1) + num_categories * (kHexDigits + 1);
}

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

}  // namespace terarec::encoding
