#include "embedding/bucket_memory.h"

#include <algorithm>
#include <new>

#include "embedding/huge_memory.h"

namespace terarec {
namespace {

constexpr size_t kChunkBytes = BucketArray::kChunkBuckets * sizeof(Bucket);
constexpr int kChunkUnits = 8;
constexpr uint8_t kAllUnits = (1 << kChunkUnits) - 1;
constexpr size_t kUnitBytes = kChunkBytes / kChunkUnits;
constexpr int64_t kUnitBuckets = BucketArray::kChunkBuckets / kChunkUnits;
// Larger arrays lie in pages, of which an index has a dozen then: the last one of them may be nearly empty, and so may
// an eighth of what the ends of arrays share.
constexpr int64_t kHeapBuckets = BucketArray::kChunkBuckets * 3 / 2;
// Share of the pages that may stay empty, to be taken again by the next array.
constexpr int64_t kPagesPerSpare = 16;

constexpr std::align_val_t kAlignment{alignof(Bucket)};

int64_t divided_up(int64_t dividend, int64_t divisor) { return (dividend + divisor - 1) / divisor; }

int64_t num_chunks(int64_t buckets) { return divided_up(buckets, BucketArray::kChunkBuckets); }

bool is_on_heap(int64_t buckets) { return buckets <= kHeapBuckets; }

// Of an array's own: those of its table, and of its buckets if they are on the heap.
int64_t own_bytes(int64_t buckets) {
  return num_chunks(buckets) * sizeof(Bucket*) + (is_on_heap(buckets) ? buckets * sizeof(Bucket) : 0);
}

// The lowest `units` units in a row that are all free; 0 if there are none.
uint8_t lowest_run(uint8_t free, int units) {
  for (uint32_t run = (1u << units) - 1; run <= kAllUnits; run <<= 1) {
    if ((free & run) == run) return static_cast<uint8_t>(run);
  }
  return 0;
}

}  // namespace

BucketArray::BucketArray() {
  static Bucket empty{};
  static Bucket* const chunk = &empty;
  chunks_ = &chunk;
}

BucketMemory::~BucketMemory() {
  for (const Page& page : pages_) unmap_huge(page.memory, kHugePage);
}

BucketArray BucketMemory::take(int64_t size) {
  BucketArray array;
  array.table_.reset(new Bucket*[num_chunks(size)]);
  array.chunks_ = array.table_.get();
  array.size_ = is_on_heap(size) ? size : divided_up(size, kUnitBuckets) * kUnitBuckets;
  Bucket* of_heap = nullptr;
  if (is_on_heap(size)) of_heap = static_cast<Bucket*>(::operator new(size * sizeof(Bucket), kAlignment));
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!of_heap) take_chunks(array.table_.get(), array.size_ / kUnitBuckets);
  else for (int64_t c = 0; c < num_chunks(size); c++) array.table_[c] = of_heap + c * BucketArray::kChunkBuckets;
  held_bytes_ += own_bytes(array.size_);
  return array;
}

void BucketMemory::give_back(BucketArray& array) {
  if (!array.owned()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  held_bytes_ -= own_bytes(array.size_);
  if (is_on_heap(array.size_)) {
    ::operator delete(array.table_[0], kAlignment);
  } else {
    int64_t units = array.size_ / kUnitBuckets;
    for (Bucket** chunk = array.table_.get(); units > 0; units -= kChunkUnits) {
      give_back_units(*chunk++, static_cast<int>(std::min<int64_t>(units, kChunkUnits)));
    }
  }
  array = BucketArray();
}

// Maps all pages that it needs before it takes anything.
void BucketMemory::take_chunks(Bucket** chunks, int64_t units) {
  const int64_t whole = units / kChunkUnits;
  const int end = static_cast<int>(units % kChunkUnits);
  const bool needs_another = end > 0 && !shared_place(end).run;
  while (whole_chunks_ < whole + needs_another) map_page();
  for (int64_t taken = 0; taken < whole;) {
    const size_t page = fullest_page_with_room();
    for (int chunk = 0; chunk < Page::kChunks && taken < whole; chunk++) {
      if (pages_[page].free[chunk] == kAllUnits) chunks[taken++] = take_place({page, chunk, kAllUnits});
    }
  }
  if (end > 0) chunks[whole] = take_place(needs_another ? unshared_place(end) : shared_place(end));
}

void BucketMemory::map_page() {
  pages_.reserve(pages_.size() + 1);
  Page page{static_cast<char*>(map_huge(kHugePage)), {}, Page::kChunks};
  if (!page.memory) throw std::bad_alloc();
  page.free.fill(kAllUnits);
  const auto behind = [](const Page& a, const Page& b) { return a.memory < b.memory; };
  pages_.insert(std::upper_bound(pages_.begin(), pages_.end(), page, behind), page);
  whole_chunks_ += Page::kChunks;
  held_bytes_ += kHugePage;
}

// Filling the fullest page empties others, which can then be given back.
size_t BucketMemory::fullest_page_with_room() const {
  const auto fuller = [](const Page& a, const Page& b) {
    return static_cast<unsigned>(a.whole) - 1 < static_cast<unsigned>(b.whole) - 1;  // of none, it is the largest
  };
  return std::min_element(pages_.begin(), pages_.end(), fuller) - pages_.begin();
}

// Where `units` units are free in a chunk that has least to spare of those that are in use in part.
BucketMemory::Place BucketMemory::shared_place(int units) const {
  Place best{0, 0, 0};
  int least = kChunkUnits;
  for (size_t page = 0; page < pages_.size(); page++) {
    for (int chunk = 0; chunk < Page::kChunks; chunk++) {
      const uint8_t free = pages_[page].free[chunk];
      const int spare = __builtin_popcount(free) - units;
      if (spare < 0 || spare >= least || free == kAllUnits) continue;
      const uint8_t run = lowest_run(free, units);
      if (!run) continue;
      best = {page, chunk, run};
      least = spare;
    }
  }
  return best;
}

BucketMemory::Place BucketMemory::unshared_place(int units) const {
  const size_t page = fullest_page_with_room();
  const auto& free = pages_[page].free;
  const auto chunk = std::find(free.begin(), free.end(), kAllUnits) - free.begin();
  return {page, static_cast<int>(chunk), lowest_run(kAllUnits, units)};
}

Bucket* BucketMemory::take_place(Place place) {
  Page& page = pages_[place.page];
  const bool was_whole = page.free[place.chunk] == kAllUnits;
  page.whole -= was_whole;
  whole_chunks_ -= was_whole;
  page.free[place.chunk] &= ~place.run;
  return reinterpret_cast<Bucket*>(page.memory + place.chunk * kChunkBytes + __builtin_ctz(place.run) * kUnitBytes);
}

void BucketMemory::give_back_units(Bucket* first, int units) {
  char* memory = reinterpret_cast<char*>(first);
  const auto behind = [](const char* at, const Page& page) { return at < page.memory; };
  const auto page = std::upper_bound(pages_.begin(), pages_.end(), memory, behind) - 1;
  const size_t unit = (memory - page->memory) / kUnitBytes;
  uint8_t& free = page->free[unit / kChunkUnits];
  free |= ((1u << units) - 1) << unit % kChunkUnits;
  page->whole += free == kAllUnits;
  whole_chunks_ += free == kAllUnits;
  const int64_t kept = Page::kChunks * static_cast<int64_t>(pages_.size() / kPagesPerSpare);
  if (page->whole < Page::kChunks || whole_chunks_ <= kept) return;
  unmap_huge(page->memory, kHugePage);
  pages_.erase(page);
  whole_chunks_ -= Page::kChunks;
  held_bytes_ -= kHugePage;
}

}  // namespace terarec
