// SPDX-License-Identifier: Apache-2.0
#include "rowfile/page_table.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "common/platform.h"

namespace terarec::rowfile {
namespace {

constexpr int64_t kLeastHomes = 8;
constexpr int64_t kSlotBytes = 13;
// Pages of the smallest mapped partition: the part of a page that is not used takes less than an eighth of it.
constexpr int64_t kMappedPages = 16;
constexpr int64_t kMostPercent = 92;
constexpr int64_t kAhead = 16;

}  // namespace

void PageTable::Partition::fetch(uint64_t hash) const {
  if (slots_ == 0) return;
  const int64_t at = home(hash);
  __builtin_prefetch(&hashes_[at]);
  __builtin_prefetch(&places_[at]);
}

int64_t PageTable::Partition::lower_bound(uint64_t hash) const {
  int64_t at = home(hash);
  while (hashes_[at] < hash) at++;
  return at;
}

uint64_t PageTable::Partition::find(uint64_t hash) const {
  if (slots_ == 0) return kNone;
  const int64_t at = lower_bound(hash);
  return hashes_[at] == hash ? value(places_[at]) : kNone;
}

uint64_t PageTable::Partition::set(uint64_t hash, uint64_t place) {
  const Place stored{static_cast<uint32_t>(place), static_cast<uint8_t>(place >> 32)};
  for (;;) {
    if (slots_ > 0) {
      const int64_t at = lower_bound(hash);
      if (hashes_[at] == hash) return value(std::exchange(places_[at], stored));
      if (size_ * 100 < homes_ * kMostPercent) {
        int64_t free = at;
        while (hashes_[free] != kEmpty) free++;
        if (free < slots_ - 1) {
          memmove(&hashes_[at + 1], &hashes_[at], (free - at) * sizeof(uint64_t));
          memmove(&places_[at + 1], &places_[at], (free - at) * sizeof(Place));
          hashes_[at] = hash;
          places_[at] = stored;
          size_++;
          return kNone;
        }
      }
    }
    grow();
  }
}

// The hashes behind it move back by one slot, up to the first that is at its home.
uint64_t PageTable::Partition::erase(uint64_t hash) {
  if (slots_ == 0) return kNone;
  const int64_t at = lower_bound(hash);
  if (hashes_[at] != hash) return kNone;
  const uint64_t place = value(places_[at]);
  int64_t end = at + 1;
  while (hashes_[end] != kEmpty && home(hashes_[end]) < end) end++;
  memmove(&hashes_[at], &hashes_[at + 1], (end - at - 1) * sizeof(uint64_t));
  memmove(&places_[at], &places_[at + 1], (end - at - 1) * sizeof(Place));
  hashes_[end - 1] = kEmpty;
  size_--;
  return place;
}

void PageTable::Partition::Free::operator()(char* memory) const {
  if (mapped_bytes > 0) unmap_pages(memory, mapped_bytes);
  else operator delete(memory);
}

// Mapped memory is rounded up to pages, so as many slots fewer are allocated: a key never takes more than 16 bytes.
void PageTable::Partition::grow() {
  const int64_t page = static_cast<int64_t>(small_page()), homes = homes_ + homes_ / 8 + 1;
  resize(homes * kSlotBytes < kMappedPages * page ? homes : homes - (page - 1) / kSlotBytes);
}

// Slots behind the homes take the hashes that the last homes displace: few, whatever the size; if they do not suffice,
// the partition grows again.
void PageTable::Partition::resize(int64_t homes) {
  for (homes = std::max(kLeastHomes, homes);; homes += homes / 8 + 1) {
    Partition grown;
    grown.allocate(homes);
    if (!grown.fill(*this)) continue;
    *this = std::move(grown);
    return;
  }
}

void PageTable::Partition::allocate(int64_t homes) {
  const int64_t page = static_cast<int64_t>(small_page()), behind = std::min<int64_t>(64, 4 + homes / 16);
  bytes_ = (homes + behind) * kSlotBytes;
  if (bytes_ < kMappedPages * page) {
    memory_.reset(static_cast<char*>(operator new(bytes_)));
  } else {
    bytes_ = (bytes_ + page - 1) / page * page;
    char* mapped = static_cast<char*>(map_pages(bytes_));
    if (mapped == nullptr) throw std::bad_alloc();
    memory_ = {mapped, Free{static_cast<size_t>(bytes_)}};
  }
  slots_ = bytes_ / kSlotBytes;
  homes_ = slots_ - behind;
  hashes_ = reinterpret_cast<uint64_t*>(memory_.get());
  places_ = reinterpret_cast<Place*>(hashes_ + slots_);
}

bool PageTable::Partition::fill(const Partition& from) {
  std::fill_n(hashes_, slots_, kEmpty);
  int64_t next = 0;
  for (int64_t i = 0; i < from.slots_; i++) {
    if (from.hashes_[i] == kEmpty) continue;
    const int64_t at = std::max(next, home(from.hashes_[i]));
    if (at >= slots_ - 1) return false;
    hashes_[at] = from.hashes_[i];
    places_[at] = from.places_[i];
    next = at + 1;
  }
  size_ = from.size_;
  return true;
}

void PageTable::reserve(int64_t keys) {
  if (size_ > 0) return;
  for (Partition& each : partitions_) each.reserve(keys / kPartitions);
}

int64_t PageTable::memory_bytes() const {
  int64_t bytes = sizeof(*this);
  for (const Partition& each : partitions_) bytes += each.memory_bytes();
  return bytes;
}

void PageTable::fetch(int64_t key) const {
  const uint64_t hash = hash_(key);
  partition(hash).fetch(hash);
}

uint64_t PageTable::find(int64_t key) const {
  const uint64_t hash = hash_(key);
  return hash == kEmpty ? largest_ : partition(hash).find(hash);
}

void PageTable::find(const int64_t* keys, int64_t count, uint64_t* places) const {
  for (int64_t i = 0; i < std::min(count, kAhead); i++) fetch(keys[i]);
  for (int64_t i = 0; i < count; i++) {
    if (i + kAhead < count) fetch(keys[i + kAhead]);
    places[i] = find(keys[i]);
  }
}

uint64_t PageTable::set(int64_t key, uint64_t place) {
  const uint64_t hash = hash_(key);
  const uint64_t before = hash == kEmpty ? std::exchange(largest_, place) : partition(hash).set(hash, place);
  size_ += before == kNone;
  return before;
}

uint64_t PageTable::erase(int64_t key) {
  const uint64_t hash = hash_(key);
  const uint64_t before = hash == kEmpty ? std::exchange(largest_, kNone) : partition(hash).erase(hash);
  size_ -= before != kNone;
  return before;
}

}  // namespace terarec::rowfile
