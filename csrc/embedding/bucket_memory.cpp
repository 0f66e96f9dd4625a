// SPDX-License-Identifier: Apache-2.0
#include "embedding/bucket_memory.h"

#include <algorithm>
#include <new>

#include "common/platform.h"

namespace terarec {
namespace {

constexpr uint32_t kAllUnits = ~uint32_t{0};
constexpr size_t kUnitBytes = sizeof(Bucket) << BucketPool::kUnitBits;
constexpr size_t kChunkBytes = sizeof(Bucket) << BucketPool::kChunkBits;
// Share of the pages that may stay empty, at least one, for the next array to reuse.
constexpr size_t kPagesPerSpare = 32;

uint32_t first_units(int units) { return kAllUnits >> (BucketPool::kChunkUnits - units); }

// Bit mask of the lowest `units` adjacent free units; 0 if there are none.
uint32_t lowest_run(uint32_t free, int units) {
  uint32_t starts = free;  // units at which `length` adjacent free units begin
  for (int length = 1; length < units;) {
    const int more = std::min(length, units - length);
    starts &= starts >> more;
    length += more;
  }
  return starts ? first_units(units) << __builtin_ctz(starts) : 0;
}

}  // namespace

BucketPool& BucketPool::shared() {
  static BucketPool* const only = new BucketPool;  // never destroyed: indexes may outlive static objects
  return *only;
}

int64_t BucketPool::held_bytes() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<int64_t>(pages_.size() * kHugePage);
}

bool BucketPool::is_sparse() {
  constexpr int64_t kPageUnits = Page::kChunks * kChunkUnits;
  const std::lock_guard<std::mutex> lock(mutex_);
  const int64_t units = pages_.size() * kPageUnits, free = whole_chunks_ * kChunkUnits + loose_units_;
  return free > kPageUnits && 8 * free > units;
}

Bucket** BucketPool::take_table(int64_t chunks) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return static_cast<Bucket**>(tables_.allocate(chunks * sizeof(Bucket*)));
}

void BucketPool::free_table(Bucket** table, int64_t chunks) {
  const std::lock_guard<std::mutex> lock(mutex_);
  tables_.deallocate(table, chunks * sizeof(Bucket*));
}

// Allocates from partly used chunks, then from free chunks.
void BucketPool::take_units(Bucket** units, int64_t count) {
  const std::lock_guard<std::mutex> lock(mutex_);
  have_whole_chunks((count - loose_units_ + kChunkUnits - 1) / kChunkUnits);
  for (int64_t taken = 0; taken < count;) {
    Place place = loose_units_ > 0 ? loose_chunk() : whole_chunk(fullest(&Page::whole));
    for (; taken < count && pages_[place.page].free[place.chunk]; taken++) {
      place.run = lowest_run(pages_[place.page].free[place.chunk], 1);
      units[taken] = take(place);
    }
  }
}

void BucketPool::take_chunks(Bucket** chunks, int64_t units) {
  const int64_t whole = units / kChunkUnits;
  const int end = static_cast<int>(units % kChunkUnits);
  const std::lock_guard<std::mutex> lock(mutex_);
  Place place{0, 0, 0};
  if (end > 0) place = shared_chunk(end);
  if (place.run) chunks[whole] = take(place);
  try {
    have_whole_chunks(whole + (end > 0 && !place.run));
  } catch (const std::bad_alloc&) {
    if (place.run) release(chunks[whole], end);
    throw;
  }
  for (int64_t taken = 0; taken < whole;) {
    const size_t page = fullest(&Page::whole);
    for (; taken < whole && pages_[page].whole > 0; taken++) chunks[taken] = take(whole_chunk(page));
  }
  if (end == 0 || place.run) return;
  place = whole_chunk(fullest(&Page::whole));
  place.run = first_units(end);
  chunks[whole] = take(place);
}

void BucketPool::free_units(Bucket* const* units, int64_t count) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (int64_t u = 0; u < count; u++) release(units[u], 1);
}

void BucketPool::free_chunks(Bucket* const* chunks, int64_t units) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (; units > 0; units -= kChunkUnits) release(*chunks++, static_cast<int>(std::min(units, kChunkUnits)));
}

void BucketPool::have_whole_chunks(int64_t count) {
  while (whole_chunks_ < count) {
    pages_.reserve(pages_.size() + 1);
    Page page{static_cast<char*>(map_huge(kHugePage)), {}, Page::kChunks, 0};
    if (!page.memory) throw std::bad_alloc();
    page.free.fill(kAllUnits);
    const auto behind = [](const Page& a, const Page& b) { return a.memory < b.memory; };
    pages_.insert(std::upper_bound(pages_.begin(), pages_.end(), page, behind), page);
    whole_chunks_ += Page::kChunks;
  }
}

// The fullest of the pages with room of a kind. Filling it lets others become empty, which can then be freed. The
// search visits all pages (1,000 for 100 M keys), so callers search once for a page and not for each chunk.
size_t BucketPool::fullest(int Page::* room) const {
  const auto fuller = [room](const Page& a, const Page& b) {
    const bool a_has = a.*room > 0, b_has = b.*room > 0;
    return a_has != b_has ? a_has : a.free_units() < b.free_units();
  };
  return std::min_element(pages_.begin(), pages_.end(), fuller) - pages_.begin();
}

BucketPool::Place BucketPool::whole_chunk(size_t page) const {
  const auto& free = pages_[page].free;
  return {page, static_cast<int>(std::find(free.begin(), free.end(), kAllUnits) - free.begin()), kAllUnits};
}

BucketPool::Place BucketPool::loose_chunk() const {
  const size_t page = fullest(&Page::loose);
  const auto& free = pages_[page].free;
  const auto is_loose = [](uint32_t of) { return of != 0 && of != kAllUnits; };
  return {page, static_cast<int>(std::find_if(free.begin(), free.end(), is_loose) - free.begin()), 0};
}

// Finds `units` adjacent free units in a partly used chunk, in the fullest page that has such a chunk.
BucketPool::Place BucketPool::shared_chunk(int units) const {
  Place best{0, 0, 0};
  int least = Page::kChunks * kChunkUnits;
  for (size_t page = 0; page < pages_.size(); page++) {
    if (pages_[page].loose < units || pages_[page].free_units() >= least) continue;
    for (int chunk = 0; chunk < Page::kChunks; chunk++) {
      const uint32_t free = pages_[page].free[chunk], run = free == kAllUnits ? 0 : lowest_run(free, units);
      if (!run) continue;
      best = {page, chunk, run};
      least = pages_[page].free_units();
      break;
    }
  }
  return best;
}

Bucket* BucketPool::take(Place place) {
  Page& page = pages_[place.page];
  change(page, place.chunk, page.free[place.chunk] & ~place.run);
  return reinterpret_cast<Bucket*>(page.memory + place.chunk * kChunkBytes + __builtin_ctz(place.run) * kUnitBytes);
}

void BucketPool::release(Bucket* first, int units) {
  char* memory = reinterpret_cast<char*>(first);
  const auto behind = [](const char* at, const Page& page) { return at < page.memory; };
  const auto page = std::upper_bound(pages_.begin(), pages_.end(), memory, behind) - 1;
  const size_t unit = (memory - page->memory) / kUnitBytes;
  const int chunk = static_cast<int>(unit / kChunkUnits);
  change(*page, chunk, page->free[chunk] | first_units(units) << unit % kChunkUnits);
  const size_t kept = Page::kChunks * (1 + pages_.size() / kPagesPerSpare);
  if (page->whole < Page::kChunks || static_cast<size_t>(whole_chunks_) <= kept) return;
  unmap_huge(page->memory, kHugePage);
  whole_chunks_ -= Page::kChunks;
  pages_.erase(page);
}

// Sets which units of a chunk are free, and updates the counts.
void BucketPool::change(Page& page, int chunk, uint32_t free) {
  const auto loose = [](uint32_t of) { return of == kAllUnits ? 0 : __builtin_popcount(of); };
  const int more_whole = (free == kAllUnits) - (page.free[chunk] == kAllUnits);
  const int more_loose = loose(free) - loose(page.free[chunk]);
  page.free[chunk] = free;
  page.whole += more_whole;
  whole_chunks_ += more_whole;
  page.loose += more_loose;
  loose_units_ += more_loose;
}

namespace {

// For larger arrays, rounding up to whole units wastes at most a few tenths of the requested size.
constexpr int64_t kHeapBuckets = 64;
// Larger arrays have large chunks. With chunks of 16 KiB their tables left the caches: a search among 10 M keys was a
// seventh slower. With large chunks smaller arrays would lie in one piece.
constexpr int64_t kLooseBuckets = int64_t{1} << BucketPool::kChunkBits;

constexpr std::align_val_t kAlignment{alignof(Bucket)};

// Buckets of a chunk, as a power of two.
int chunk_bits(int64_t size) {
  if (size <= kHeapBuckets) return BucketPool::kChunkBits;
  return size <= kLooseBuckets ? BucketPool::kUnitBits : BucketPool::kChunkBits;
}

int64_t whole_units(int64_t buckets) {
  return (buckets + BucketArray::kLeastChunk - 1) / BucketArray::kLeastChunk;
}

int64_t num_chunks(int64_t size, int bits) { return ((size - 1) >> bits) + 1; }

int64_t array_bytes(int64_t size, int bits) { return size * sizeof(Bucket) + num_chunks(size, bits) * sizeof(Bucket*); }

}  // namespace

BucketArray::BucketArray() {
  static Bucket empty{};
  static Bucket* chunk = &empty;
  chunks_ = &chunk;
}

BucketArray BucketMemory::take(int64_t size) {
  BucketPool& pool = BucketPool::shared();
  BucketArray array;
  array.size_ = size <= kHeapBuckets ? size : whole_units(size) * BucketArray::kLeastChunk;
  array.bits_ = chunk_bits(array.size_);
  const int64_t chunks = num_chunks(array.size_, array.bits_);
  Bucket** table = pool.take_table(chunks);
  try {
    if (array.size_ <= kHeapBuckets) *table = static_cast<Bucket*>(::operator new(size * sizeof(Bucket), kAlignment));
    else if (array.size_ <= kLooseBuckets) pool.take_units(table, whole_units(size));
    else pool.take_chunks(table, whole_units(size));
  } catch (const std::bad_alloc&) {
    pool.free_table(table, chunks);
    throw;
  }
  array.chunks_ = table;
  array.is_owned_ = true;
  held_bytes_ += array_bytes(array.size_, array.bits_);
  return array;
}

void BucketMemory::release(BucketArray& array) {
  if (!array.owned()) return;
  BucketPool& pool = BucketPool::shared();
  const int64_t size = array.size_;
  if (size <= kHeapBuckets) ::operator delete(*array.chunks_, kAlignment);
  else if (size <= kLooseBuckets) pool.free_units(array.chunks_, whole_units(size));
  else pool.free_chunks(array.chunks_, whole_units(size));
  pool.free_table(array.chunks_, num_chunks(size, array.bits_));
  held_bytes_ -= array_bytes(size, array.bits_);
  array = BucketArray();
}

}  // namespace terarec
