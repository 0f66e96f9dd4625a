// SPDX-License-Identifier: Apache-2.0

// The value of one field of text, and what can be wrong with it.
#pragma once

#include <cstdint>
#include <cstring>

namespace terarec::encoding {

// The order is that of FAULT_KINDS in kernels/cpu/delimited.py.
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

// An optional minus and digits; below 2^53 perhaps a point and zeros.
Fault read_integer(const char* begin, const char* end, int64_t& value);

// What std::from_chars reads (a decimal number, a plus in its exponent alone), rounded to the nearest double; too small a
// number is 0. "nan" of any case is NaN.
Fault read_number(const char* begin, const char* end, double& value);

// Whether the bytes are UTF-8: no overlong form, no surrogate, nothing above U+10FFFF.
bool is_utf8(const char* begin, const char* end);

// Whether no byte is above 0x7f.
bool is_ascii(const char* begin, const char* end);

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the word-wise parsing is written for little-endian processors"
#endif

inline uint64_t load_word(const char* from) {
  uint64_t word;
  memcpy(&word, from, sizeof word);
  return word;
}

// The position of the first byte of `word` that is `byte`; 8 if none is.
inline int first_in_word(uint64_t word, char byte) {
  constexpr uint64_t ones = 0x0101010101010101ULL;
  const uint64_t differences = word ^ (ones * static_cast<unsigned char>(byte));
  const uint64_t found = (differences - ones) & ~differences & (ones * 0x80);
  return found == 0 ? 8 : __builtin_ctzll(found) >> 3;
}

// Whether all eight bytes are hexadecimal digits. Bit 7 of a byte of `x + (0x80 - limit)` says x >= limit; no sum
// carries into its neighbour, since bytes from 0x80 on are rejected and all constants are below 0x80.
inline bool is_hex_word(uint64_t word) {
  constexpr uint64_t ones = 0x0101010101010101ULL;
  constexpr uint64_t high_bits = ones * 0x80;
  const uint64_t lower = word | (ones * 0x20);
  const uint64_t plain = word & ~high_bits;
  const uint64_t plain_lower = lower & ~high_bits;
  const uint64_t digit = (plain + ones * (0x80 - '0')) & ~(plain + ones * (0x80 - '9' - 1));
  const uint64_t letter = (plain_lower + ones * (0x80 - 'a')) & ~(plain_lower + ones * (0x80 - 'f' - 1));
  return ((digit | letter) & ~word & high_bits) == high_bits;
}

// The value of eight digits, the first the most significant. Requires is_hex_word(word).
inline uint32_t hex_word_value(uint64_t word) {
  const uint64_t nibbles = (word & 0x0f0f0f0f0f0f0f0fULL) + 9 * ((word >> 6) & 0x0101010101010101ULL);
  uint64_t pairs = ((nibbles << 4) | (nibbles >> 8)) & 0x00ff00ff00ff00ffULL;
  pairs |= pairs >> 8;
  return __builtin_bswap32(static_cast<uint32_t>((pairs & 0xffff) | ((pairs >> 16) & 0xffff0000)));
}

// Reads one to eight hexadecimal digits of either case; returns false, leaving `value`, for anything else.
inline bool parse_hex(const char* begin, const char* end, uint32_t& value) {
  const auto length = end - begin;
  if (length < 1 || length > 8) return false;
  char padded[8];
  memset(padded, '0', sizeof padded);
  memcpy(padded + 8 - length, begin, static_cast<size_t>(length));
  const uint64_t word = load_word(padded);
  if (!is_hex_word(word)) return false;
  value = hex_word_value(word);
  return true;
}

struct ShortInteger {
  bool good;         // nothing, or digits with an optional minus, in front of a delimiter
  bool empty;        // nothing
  int64_t value;     // 0 where empty
  const char* stop;  // the delimiter
};

// Reads at `cursor`; nine bytes must be readable there. A longer integer is not `good` either.
inline ShortInteger read_short_integer(const char* cursor, char delimiter) {
  constexpr uint64_t ones = 0x0101010101010101ULL;
  const bool negative = *cursor == '-';
  cursor += negative;
  uint64_t word = load_word(cursor);
  const int length = first_in_word(word, delimiter);
  if (length == 8) return {false, false, 0, cursor};
  // Move the digits to the most significant bytes and fill up with '0'; two shifts, since one by 64 is undefined.
  word = (word << (56 - 8 * length)) << 8;
  word |= (ones * '0') >> (8 * length);
  const uint64_t digits_only = (word & (ones * 0xf0)) | (((word + ones * 0x06) & (ones * 0xf0)) >> 4);
  const bool good = digits_only == ones * 0x33 && !(negative && length == 0);
  word -= ones * '0';
  word = word * 10 + (word >> 8);
  const uint64_t low = (word & 0x000000ff000000ffULL) * 0x000f424000000064ULL;
  const uint64_t high = ((word >> 16) & 0x000000ff000000ffULL) * 0x0000271000000001ULL;
  const auto magnitude = static_cast<int64_t>((low + high) >> 32);
  return {good, length == 0, negative ? -magnitude : magnitude, cursor + length};
}

}  // namespace terarec::encoding
