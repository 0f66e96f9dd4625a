// SPDX-License-Identifier: Apache-2.0

// XXH64 (Collet 2012, https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md). Equals Spark's xxhash64 of a
// text (its UTF-8 bytes) and of a bigint (its eight little-endian bytes).
#pragma once

#include <cstdint>
#include <cstring>
#include <string_view>

namespace terarec::encoding {

constexpr uint64_t kXxhPrimes[5] = {0x9e3779b185ebca87ULL, 0xc2b2ae3d27d4eb4fULL, 0x165667b19e3779f9ULL,
                                    0x85ebca77c2b2ae63ULL, 0x27d4eb2f165667c5ULL};

inline uint64_t xxh_rotate(uint64_t word, int bits) { return (word << bits) | (word >> (64 - bits)); }
inline uint64_t xxh_round(uint64_t lane, uint64_t word) {
  return xxh_rotate(lane + word * kXxhPrimes[1], 31) * kXxhPrimes[0];
}
inline uint64_t xxh_add_word(uint64_t hash, uint64_t word) {
  return xxh_rotate(hash ^ xxh_round(0, word), 27) * kXxhPrimes[0] + kXxhPrimes[3];
}
inline uint64_t xxh_avalanche(uint64_t hash) {
  hash = (hash ^ (hash >> 33)) * kXxhPrimes[1];
  hash = (hash ^ (hash >> 29)) * kXxhPrimes[2];
  return hash ^ (hash >> 32);
}

// Of the eight little-endian bytes of `value`.
inline int64_t xxh64(int64_t value, uint64_t seed) {
  return static_cast<int64_t>(xxh_avalanche(xxh_add_word(seed + kXxhPrimes[4] + 8, static_cast<uint64_t>(value))));
}

template <typename Word>
inline Word xxh_load(const char* from) {
  Word word;
  memcpy(&word, from, sizeof word);
  return word;
}

// The first hash of at least 32 bytes; `cursor` is left behind the last whole 32.
inline uint64_t xxh_stripes(const char*& cursor, const char* end, uint64_t seed) {
  uint64_t lanes[4] = {seed + kXxhPrimes[0] + kXxhPrimes[1], seed + kXxhPrimes[1], seed, seed - kXxhPrimes[0]};
  for (; end - cursor >= 32; cursor += 32) {
    for (int lane = 0; lane < 4; ++lane) lanes[lane] = xxh_round(lanes[lane], xxh_load<uint64_t>(cursor + 8 * lane));
  }
  uint64_t hash = xxh_rotate(lanes[0], 1) + xxh_rotate(lanes[1], 7) + xxh_rotate(lanes[2], 12) + xxh_rotate(lanes[3], 18);
  for (const uint64_t lane : lanes) hash = (hash ^ xxh_round(0, lane)) * kXxhPrimes[0] + kXxhPrimes[3];
  return hash;
}

inline int64_t xxh64(std::string_view text, uint64_t seed) {
  const char* cursor = text.data();
  const char* end = cursor + text.size();
  uint64_t hash = text.size() >= 32 ? xxh_stripes(cursor, end, seed) : seed + kXxhPrimes[4];
  hash += text.size();
  for (; end - cursor >= 8; cursor += 8) hash = xxh_add_word(hash, xxh_load<uint64_t>(cursor));
  if (end - cursor >= 4) {
    hash = xxh_rotate(hash ^ (xxh_load<uint32_t>(cursor) * kXxhPrimes[0]), 23) * kXxhPrimes[1] + kXxhPrimes[2];
    cursor += 4;
  }
  for (; cursor < end; ++cursor) {
    hash = xxh_rotate(hash ^ (static_cast<unsigned char>(*cursor) * kXxhPrimes[4]), 11) * kXxhPrimes[0];
  }
  return static_cast<int64_t>(xxh_avalanche(hash));
}

// The bucket of a hash: its remainder, never negative, of a division by buckets >= 1.
inline int64_t bucket_of(int64_t hash, int64_t buckets) {
  const int64_t remainder = hash % buckets;
  return remainder < 0 ? remainder + buckets : remainder;
}

}  // namespace terarec::encoding
