// Where the open-addressing tables put a value. None of these hashes is stored or seen outside of the process.
#pragma once

#include <cstdint>
#include <cstring>
#include <string_view>

#include "encoding/slots.h"

namespace terarec::encoding {

// Spreads every input bit over the whole word (the finalizer of MurmurHash3, Appleby 2011).
inline uint64_t scramble(uint64_t word) {
  word = (word ^ (word >> 33)) * 0xff51afd7ed558ccdULL;
  word = (word ^ (word >> 33)) * 0xc4ceb9fe1a85ec53ULL;
  return word ^ (word >> 33);
}

inline uint64_t slot_hash(uint32_t value) { return mix(value); }
inline uint64_t slot_hash(int64_t value) { return scramble(static_cast<uint64_t>(value)); }

inline uint64_t slot_hash(std::string_view text) {
  uint64_t hash = mix(text.size() + 1);
  const char* cursor = text.data();
  size_t left = text.size();
  for (; left >= 8; left -= 8, cursor += 8) {
    uint64_t word;
    memcpy(&word, cursor, 8);
    hash = scramble(hash ^ word);
  }
  uint64_t word = 0;
  memcpy(&word, cursor, left);
  return scramble(hash ^ word);
}

}  // namespace terarec::encoding
