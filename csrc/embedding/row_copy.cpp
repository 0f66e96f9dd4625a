// SPDX-License-Identifier: Apache-2.0
#include "embedding/row_copy.h"

#include <algorithm>
#include <cstring>

#include "common/parallel.h"

namespace terarec {
namespace {

constexpr int64_t kUnitRows = 512;
constexpr int64_t kLine = 64;
// Bytes of the rows that are prefetched: the processor follows a row once it is begun.
constexpr int64_t kAheadBytes = 4096;

template <bool kWrites>
void fetch(const std::vector<RowPart>& parts, int64_t slot) {
  if (slot < 0) return;
  for (const RowPart& part : parts) {
    const char* row = part.first + slot * part.bytes;
    for (int64_t at = 0; at < part.bytes; at += kLine) __builtin_prefetch(row + at, kWrites);
  }
}

// Calls copy(i) for i < count in parallel, having prefetched the rows slots[i] of the parts.
template <bool kWrites, class Copy>
void for_rows(const std::vector<RowPart>& parts, const int64_t* slots, int64_t count, int threads, Copy&& copy) {
  int64_t bytes = 1;
  for (const RowPart& part : parts) bytes += part.bytes;
  const int64_t ahead = std::clamp<int64_t>(kAheadBytes / bytes, 2, 32);
  parallel_for(threads, (count + kUnitRows - 1) / kUnitRows, [&](int64_t unit) {
    const int64_t begin = unit * kUnitRows, end = std::min(count, begin + kUnitRows);
    for (int64_t i = begin; i < std::min(begin + ahead, end); i++) fetch<kWrites>(parts, slots[i]);
    for (int64_t i = begin; i < end; i++) {
      if (i + ahead < end) fetch<kWrites>(parts, slots[i + ahead]);
      copy(i);
    }
  });
}

}  // namespace

void gather_rows(const std::vector<RowPart>& parts, const int64_t* slots, int64_t count, PackedRows packed,
                 int threads) {
  for_rows<false>(parts, slots, count, threads, [&](int64_t i) {
    if (slots[i] < 0) return;
    for (const RowPart& part : parts) {
      memcpy(packed.first + i * packed.stride + part.offset, part.first + slots[i] * part.bytes, part.bytes);
    }
  });
}

void scatter_rows(const std::vector<RowPart>& parts, const int64_t* slots, const int64_t* places, int64_t count,
                  PackedRows packed, int threads) {
  for_rows<true>(parts, slots, count, threads, [&](int64_t i) {
    const int64_t place = places ? places[i] : i;
    if (place < 0) return;
    for (const RowPart& part : parts) {
      memcpy(part.first + slots[i] * part.bytes, packed.first + place * packed.stride + part.offset, part.bytes);
    }
  });
}

}  // namespace terarec
