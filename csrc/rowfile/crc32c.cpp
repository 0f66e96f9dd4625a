// SPDX-License-Identifier: Apache-2.0
#include "rowfile/crc32c.h"

#include <array>
#include <cstring>

#include "common/platform.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#define TERAREC_CRC_TARGET __attribute__((target("sse4.2")))
#elif defined(__aarch64__)
#include <arm_acle.h>
#define TERAREC_CRC_TARGET __attribute__((target("+crc")))
#endif

namespace terarec::rowfile {
namespace {

constexpr uint32_t kPolynomial = 0x82F63B78u;  // reflected
using ByteTable = std::array<uint32_t, 256>;

// Table t advances a register by a byte that is followed by t zero bytes.
const std::array<ByteTable, 8>& tables() {
  static const std::array<ByteTable, 8> made = [] {
    std::array<ByteTable, 8> result{};
    for (uint32_t byte = 0; byte < 256; byte++) {
      uint32_t crc = byte;
      for (int bit = 0; bit < 8; bit++) crc = crc & 1 ? crc >> 1 ^ kPolynomial : crc >> 1;
      result[0][byte] = crc;
    }
    for (int t = 1; t < 8; t++) {
      for (int byte = 0; byte < 256; byte++) {
        const uint32_t before = result[t - 1][byte];
        result[t][byte] = before >> 8 ^ result[0][before & 255];
      }
    }
    return result;
  }();
  return made;
}

// The functions below take and return the register itself, which is not inverted.
uint32_t advance_by_tables(uint32_t crc, const uint8_t* data, size_t bytes) {
  const auto& t = tables();
  for (; bytes >= 8; data += 8, bytes -= 8) {
    uint64_t word;
    memcpy(&word, data, 8);
    word ^= crc;
    crc = t[7][word & 255] ^ t[6][word >> 8 & 255] ^ t[5][word >> 16 & 255] ^ t[4][word >> 24 & 255] ^
          t[3][word >> 32 & 255] ^ t[2][word >> 40 & 255] ^ t[1][word >> 48 & 255] ^ t[0][word >> 56];
  }
  for (; bytes > 0; data++, bytes--) crc = crc >> 8 ^ t[0][(crc ^ *data) & 255];
  return crc;
}

#if defined(TERAREC_CRC_TARGET)

// Bytes of each of the three streams that are advanced side by side: the instruction takes three cycles, and one can
// start in each. A page of 4 KiB is one round and 64 bytes.
constexpr size_t kStream = 1344;

// Advances a register by kStream zero bytes.
uint32_t skip_stream(uint32_t crc) {
  static const std::array<ByteTable, 4> skip = [] {
    std::array<ByteTable, 4> made{};
    const std::array<uint8_t, kStream> zeros{};
    for (int t = 0; t < 4; t++) {
      for (uint32_t byte = 0; byte < 256; byte++) made[t][byte] = advance_by_tables(byte << 8 * t, zeros.data(), kStream);
    }
    return made;
  }();
  return skip[0][crc & 255] ^ skip[1][crc >> 8 & 255] ^ skip[2][crc >> 16 & 255] ^ skip[3][crc >> 24];
}

#if defined(__x86_64__)
TERAREC_CRC_TARGET inline uint32_t step(uint32_t crc, uint64_t word) {
  return static_cast<uint32_t>(_mm_crc32_u64(crc, word));
}
TERAREC_CRC_TARGET inline uint32_t step(uint32_t crc, uint8_t byte) { return _mm_crc32_u8(crc, byte); }
#else
TERAREC_CRC_TARGET inline uint32_t step(uint32_t crc, uint64_t word) { return __crc32cd(crc, word); }
TERAREC_CRC_TARGET inline uint32_t step(uint32_t crc, uint8_t byte) { return __crc32cb(crc, byte); }
#endif

inline uint64_t word_at(const uint8_t* data) {
  uint64_t word;
  memcpy(&word, data, 8);
  return word;
}

TERAREC_CRC_TARGET uint32_t advance_by_instruction(uint32_t crc, const uint8_t* data, size_t bytes) {
  for (; bytes >= 3 * kStream; data += 3 * kStream, bytes -= 3 * kStream) {
    uint32_t second = 0, third = 0;
    for (size_t i = 0; i < kStream; i += 8) {
      crc = step(crc, word_at(data + i));
      second = step(second, word_at(data + kStream + i));
      third = step(third, word_at(data + 2 * kStream + i));
    }
    crc = skip_stream(skip_stream(crc) ^ second) ^ third;
  }
  for (; bytes >= 8; data += 8, bytes -= 8) crc = step(crc, word_at(data));
  for (; bytes > 0; data++, bytes--) crc = step(crc, *data);
  return crc;
}

#endif

}  // namespace

uint32_t crc32c_by_tables(const void* data, size_t bytes) {
  return ~advance_by_tables(~0u, static_cast<const uint8_t*>(data), bytes);
}

uint32_t crc32c(const void* data, size_t bytes) {
#if defined(TERAREC_CRC_TARGET)
  static const bool has_instruction = cpu_has_crc32c();
  if (has_instruction) return ~advance_by_instruction(~0u, static_cast<const uint8_t*>(data), bytes);
#endif
  return crc32c_by_tables(data, bytes);
}

}  // namespace terarec::rowfile
