// Integers of up to seven digits, read eight bytes at a time.
#pragma once

#include <cstdint>

#include "encoding/hex.h"

namespace terarec::encoding {

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
