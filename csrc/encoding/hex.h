// Eight bytes of text at a time inside one 64-bit word; hexadecimal text -> 32-bit values.
#pragma once

#include <cstdint>
#include <cstring>

namespace terarec::encoding {

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
// carries into its neighbour, since bytes from 0x80 on are refused and all constants are below 0x80.
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

}  // namespace terarec::encoding
