// SPDX-License-Identifier: Apache-2.0
#include "encoding/fields.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <string_view>


namespace terarec::encoding {
namespace {

bool is_digit(char byte) { return byte >= '0' && byte <= '9'; }

bool equals_lower(std::string_view text, std::string_view lower) {
  return text.size() == lower.size() &&
         std::equal(text.begin(), text.end(), lower.begin(), [](char a, char b) { return (a | 0x20) == b; });
}

// Whether a decimal number outside the range of double is too large, rather than too small: the position of its first
// digit other than 0, counted from the point, decides.
bool is_too_large(std::string_view text) {
  int64_t position = 0;
  bool after_point = false;
  bool significant = false;
  size_t at = 0;
  for (; at < text.size() && (text[at] | 0x20) != 'e'; ++at) {
    if (text[at] == '.') after_point = true;
    if (!is_digit(text[at])) continue;
    significant = significant || text[at] != '0';
    if (significant && !after_point) ++position;
    if (!significant && after_point) --position;
  }
  if (at == text.size()) return position > 0;
  const bool negative = text[++at] == '-';
  int64_t exponent = 0;
  for (; at < text.size(); ++at) {
    if (is_digit(text[at])) exponent = std::min<int64_t>(exponent * 10 + (text[at] - '0'), int64_t{1} << 40);
  }
  return position + (negative ? -exponent : exponent) > 0;
}

// A decimal number without exponent of up to 15 digits: it and the power of ten are exact, so that one division rounds
// the quotient correctly (Clinger, How to read floating point numbers accurately, 1990).
bool read_short_decimal(const char* begin, const char* end, double& value) {
  static constexpr double powers[] = {1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15};
  const bool negative = *begin == '-';
  begin += negative;
  if (end - begin > 16) return false;
  int64_t digits = 0;
  const char* point = nullptr;
  for (const char* at = begin; at < end; ++at) {
    if (is_digit(*at)) {
      digits = digits * 10 + (*at - '0');
    } else if (*at == '.' && point == nullptr) {
      point = at;
    } else {
      return false;
    }
  }
  if (end - begin - (point != nullptr) < 1 || (end - begin == 16 && point == nullptr)) return false;
  const double magnitude = static_cast<double>(digits) / powers[point != nullptr ? end - point - 1 : 0];
  value = negative ? -magnitude : magnitude;
  return true;
}

// Bytes of the UTF-8 character at `begin`, or 0 if there is none.
int character_bytes(const unsigned char* begin, const unsigned char* end) {
  const unsigned first = *begin;
  if (first < 0x80) return 1;
  const int length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || end - begin < length) return 0;
  for (int at = 1; at < length; ++at) {
    if ((begin[at] & 0xc0) != 0x80) return 0;
  }
  // Overlong forms, surrogates, and what is above U+10FFFF differ from the rest in the second byte.
  const unsigned second = begin[1];
  const bool bad = (first == 0xe0 && second < 0xa0) || (first == 0xed && second > 0x9f) ||
                   (first == 0xf0 && second < 0x90) || (first == 0xf4 && second > 0x8f);
  return bad ? 0 : length;
}

}  // namespace

Fault read_integer(const char* begin, const char* end, int64_t& value) {
  const bool negative = begin < end && *begin == '-';
  begin += negative;
  const char* digits_end = std::find_if_not(begin, end, is_digit);
  if (digits_end == begin) return Fault::integer;
  // A point and zeros, as pandas writes integers of a column in which some are missing, from floats.
  const bool is_float = digits_end < end;
  if (is_float) {
    if (*digits_end != '.' || end - digits_end < 2) return Fault::integer;
    if (!std::all_of(digits_end + 1, end, [](char byte) { return byte == '0'; })) return Fault::integer;
    end = digits_end;
  }
  const uint64_t limit = static_cast<uint64_t>(std::numeric_limits<int64_t>::max()) + negative;
  uint64_t magnitude = 0;
  for (; begin < end; ++begin) {
    const auto digit = static_cast<uint64_t>(*begin - '0');
    if (magnitude > (limit - digit) / 10) return Fault::integer_range;
    magnitude = magnitude * 10 + digit;
  }
  // From 2^53 on the float may have been any of several integers.
  if (is_float && magnitude >= uint64_t{1} << 53) return Fault::integer;
  value = static_cast<int64_t>(negative ? 0 - magnitude : magnitude);
  return Fault::none;
}

Fault read_number(const char* begin, const char* end, double& value) {
  if (begin < end && read_short_decimal(begin, end, value)) return Fault::none;
  const char* digits = begin + (begin < end && *begin == '-');
  const std::string_view unsigned_text(digits, static_cast<size_t>(end - digits));
  if (digits == end || !(is_digit(*digits) || *digits == '.')) {
    if (equals_lower(unsigned_text, "inf") || equals_lower(unsigned_text, "infinity")) return Fault::infinite;
    value = std::numeric_limits<double>::quiet_NaN();
    return equals_lower(unsigned_text, "nan") ? Fault::none : Fault::number;
  }
  const auto [stop, error] = std::from_chars(begin, end, value);
  if (error == std::errc::invalid_argument || stop != end) return Fault::number;
  if (error == std::errc::result_out_of_range) {
    if (is_too_large(unsigned_text)) return Fault::infinite;
    value = digits == begin ? 0.0 : -0.0;
  }
  return std::isinf(value) ? Fault::infinite : Fault::none;
}

bool is_ascii(const char* begin, const char* end) {
  constexpr uint64_t high_bits = 0x8080808080808080ULL;
  uint64_t seen = 0;
  for (; end - begin >= 32; begin += 32) {
    seen |= load_word(begin) | load_word(begin + 8) | load_word(begin + 16) | load_word(begin + 24);
  }
  for (; begin < end; ++begin) seen |= static_cast<uint64_t>(static_cast<unsigned char>(*begin));
  return (seen & high_bits) == 0;
}

bool is_utf8(const char* begin, const char* end) {
  const auto* cursor = reinterpret_cast<const unsigned char*>(begin);
  const auto* stop = reinterpret_cast<const unsigned char*>(end);
  while (cursor < stop) {
    const int length = character_bytes(cursor, stop);
    if (length == 0) return false;
    cursor += length;
  }
  return true;
}

}  // namespace terarec::encoding
