#include "encoding/id_tables.h"

#include <cstring>
#include <stdexcept>

namespace terarec::encoding {
namespace {

[[noreturn]] void refuse_duplicate(int64_t position) {
  throw std::invalid_argument("the value at position " + std::to_string(position) + " occurs twice");
}

void check_size(int64_t num_values) {
  if (num_values > int64_t{UINT32_MAX} - kFirstId) throw std::invalid_argument("a vocabulary of more than 2^32 - 3 values");
}

// Spreads every input bit over the whole word (the finalizer of MurmurHash3, Appleby 2011).
uint64_t scramble(uint64_t word) {
  word = (word ^ (word >> 33)) * 0xff51afd7ed558ccdULL;
  word = (word ^ (word >> 33)) * 0xc4ceb9fe1a85ec53ULL;
  return word ^ (word >> 33);
}

uint64_t hash_text(std::string_view text) {
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

}  // namespace

Hex32Ids::Hex32Ids(const uint32_t* values, int64_t num_values) : slots_(roomy_capacity(num_values)) {
  check_size(num_values);
  for (int64_t position = 0; position < num_values; ++position) {
    const uint64_t value = values[position];
    uint64_t index = slots_.home(mix(value));
    for (; slots_[index] != 0; index = slots_.next(index)) {
      if (slots_[index] >> 32 == value) refuse_duplicate(position);
    }
    slots_[index] = value << 32 | static_cast<uint64_t>(position + kFirstId);
  }
}

template <typename Id>
void Hex32Ids::find_all(const uint32_t* keys, const uint64_t* missing, int bit, int64_t num_keys, Id* ids) const {
  for (int64_t row = 0; row < num_keys; ++row) {
    if (row + kPrefetchDistance < num_keys) slots_.prefetch(mix(keys[row + kPrefetchDistance]));
    ids[row] = static_cast<Id>((missing[row] >> bit) & 1 ? kMissingId : find(keys[row]));
  }
}

template void Hex32Ids::find_all(const uint32_t*, const uint64_t*, int, int64_t, int32_t*) const;
template void Hex32Ids::find_all(const uint32_t*, const uint64_t*, int, int64_t, int64_t*) const;

Int64Ids::Int64Ids(const int64_t* values, int64_t num_values) : slots_(roomy_capacity(num_values)) {
  check_size(num_values);
  for (int64_t position = 0; position < num_values; ++position) {
    uint64_t index = slots_.home(scramble(static_cast<uint64_t>(values[position])));
    for (; slots_[index].id != 0; index = slots_.next(index)) {
      if (slots_[index].value == values[position]) refuse_duplicate(position);
    }
    slots_[index] = {values[position], position + kFirstId};
  }
}

int64_t Int64Ids::find(int64_t value) const {
  uint64_t index = slots_.home(scramble(static_cast<uint64_t>(value)));
  for (; slots_[index].id != 0; index = slots_.next(index)) {
    if (slots_[index].value == value) return slots_[index].id;
  }
  return kRareId;
}

TextIds::TextIds(const char* text, const int64_t* offsets, int64_t num_values)
    : text_(text, static_cast<size_t>(offsets[num_values])),
      offsets_(offsets, offsets + num_values + 1),
      slots_(roomy_capacity(num_values)) {
  check_size(num_values);
  for (int64_t id = kFirstId; id < num_values + kFirstId; ++id) {
    const uint64_t hash = hash_text(value_of(id));
    uint64_t index = slots_.home(hash);
    for (; slots_[index].id != 0; index = slots_.next(index)) {
      if (value_of(slots_[index].id) == value_of(id)) refuse_duplicate(id - kFirstId);
    }
    slots_[index] = {static_cast<uint32_t>(hash), static_cast<uint32_t>(id)};
  }
}

int64_t TextIds::find(std::string_view value) const {
  const uint64_t hash = hash_text(value);
  uint64_t index = slots_.home(hash);
  for (; slots_[index].id != 0; index = slots_.next(index)) {
    if (slots_[index].tag == static_cast<uint32_t>(hash) && value_of(slots_[index].id) == value) return slots_[index].id;
  }
  return kRareId;
}

}  // namespace terarec::encoding
