// Value -> id, for 32-bit, 64-bit and text values. Ids are those of a vocabulary: 0 missing, 1 rare or unseen, and
// i + 2 for the value at position i. Every table refuses a list that names a value twice.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "encoding/slots.h"

namespace terarec::encoding {

constexpr int64_t kMissingId = 0;
constexpr int64_t kRareId = 1;
constexpr int64_t kFirstId = 2;

class Hex32Ids {
 public:
  Hex32Ids(const uint32_t* values, int64_t num_values);

  int64_t find(uint32_t value) const {
    uint64_t index = slots_.home(mix(value));
    for (;;) {
      const uint64_t slot = slots_[index];
      if (slot == 0) return kRareId;
      if (slot >> 32 == value) return static_cast<int64_t>(slot & 0xffffffff);
      index = slots_.next(index);
    }
  }

  // ids[i] of keys[i]; missing where bit `bit` of missing[i] is set.
  template <typename Id>
  void find_all(const uint32_t* keys, const uint64_t* missing, int bit, int64_t num_keys, Id* ids) const;

 private:
  Slots<uint64_t> slots_;  // value << 32 | id
};

class Int64Ids {
 public:
  Int64Ids(const int64_t* values, int64_t num_values);
  int64_t find(int64_t value) const;

 private:
  struct Slot {
    int64_t value;
    int64_t id;
  };
  Slots<Slot> slots_;
};

class TextIds {
 public:
  // Value i is text[offsets[i], offsets[i + 1]).
  TextIds(const char* text, const int64_t* offsets, int64_t num_values);
  int64_t find(std::string_view value) const;

 private:
  struct Slot {
    uint32_t tag;
    uint32_t id;
  };
  std::string_view value_of(int64_t id) const {
    const int64_t begin = offsets_[id - kFirstId];
    return {text_.data() + begin, static_cast<size_t>(offsets_[id - kFirstId + 1] - begin)};
  }

  std::string text_;
  std::vector<int64_t> offsets_;
  Slots<Slot> slots_;
};

}  // namespace terarec::encoding
