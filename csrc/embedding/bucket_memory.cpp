#include "embedding/bucket_memory.h"

#include <algorithm>
#include <new>

#include "embedding/huge_memory.h"

namespace terarec {
namespace {

constexpr size_t kChunkBytes = BucketArray::kChunkBuckets * sizeof(Bucket);
constexpr int kPageChunks = kHugePage / kChunkBytes;
// Larger arrays lie in pages: half a chunk is wasted on average, an eighth of the smallest of them at most.
constexpr int64_t kHeapBuckets = 4 * BucketArray::kChunkBuckets;
// Share of the pages that may stay empty, to be taken again by the next array.
constexpr int64_t kPagesPerSpare = 32;

constexpr std::align_val_t kAlignment{alignof(Bucket)};

int64_t num_chunks(int64_t buckets) {
  return (buckets + BucketArray::kChunkBuckets - 1) / BucketArray::kChunkBuckets;
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
  const int64_t count = num_chunks(size);
  BucketArray array;
  array.table_.reset(new Bucket*[count]);
  if (size <= kHeapBuckets) {
    Bucket* buckets = static_cast<Bucket*>(::operator new(size * sizeof(Bucket), kAlignment));
    for (int64_t c = 0; c < count; c++) array.table_[c] = buckets + c * BucketArray::kChunkBuckets;
  } else {
    take_chunks(array.table_.get(), count);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  held_bytes_ += count * sizeof(Bucket*) + (size <= kHeapBuckets ? size * sizeof(Bucket) : 0);
  array.chunks_ = array.table_.get();
  array.size_ = size;
  return array;
}

void BucketMemory::give_back(BucketArray& array) {
  if (!array.owned()) return;
  const int64_t size = array.size_, count = num_chunks(size);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (size <= kHeapBuckets) ::operator delete(array.table_[0], kAlignment);
  else for (int64_t c = 0; c < count; c++) give_chunk_back(array.table_[c]);
  held_bytes_ -= count * sizeof(Bucket*) + (size <= kHeapBuckets ? size * sizeof(Bucket) : 0);
  array = BucketArray();
}

void BucketMemory::take_chunks(Bucket** chunks, int64_t count) {
  const std::lock_guard<std::mutex> lock(mutex_);
  while (free_chunks_ < count) {
    pages_.reserve(pages_.size() + 1);
    Page page{static_cast<char*>(map_huge(kHugePage)), {}};
    if (!page.memory) throw std::bad_alloc();
    for (int chunk = kPageChunks - 1; chunk >= 0; chunk--) page.free.push_back(static_cast<uint8_t>(chunk));
    const auto behind = [](const Page& a, const Page& b) { return a.memory < b.memory; };
    pages_.insert(std::upper_bound(pages_.begin(), pages_.end(), page, behind), page);
    free_chunks_ += kPageChunks;
    held_bytes_ += kHugePage;
  }
  free_chunks_ -= count;
  while (count > 0) {
    Page& page = fullest_page_with_room();
    for (; count > 0 && !page.free.empty(); page.free.pop_back()) {
      chunks[--count] = reinterpret_cast<Bucket*>(page.memory + page.free.back() * kChunkBytes);
    }
  }
}

// Filling the fullest page empties others, which can then be given back.
BucketMemory::Page& BucketMemory::fullest_page_with_room() {
  const auto fuller = [](const Page& a, const Page& b) { return a.free.size() - 1 < b.free.size() - 1; };
  return *std::min_element(pages_.begin(), pages_.end(), fuller);  // without room, size - 1 is the largest number
}

void BucketMemory::give_chunk_back(Bucket* chunk) {
  char* memory = reinterpret_cast<char*>(chunk);
  const auto behind = [](const char* at, const Page& page) { return at < page.memory; };
  const auto page = std::upper_bound(pages_.begin(), pages_.end(), memory, behind) - 1;
  page->free.push_back(static_cast<uint8_t>((memory - page->memory) / kChunkBytes));
  free_chunks_++;
  const int64_t kept = kPageChunks * (1 + static_cast<int64_t>(pages_.size()) / kPagesPerSpare);
  if (page->free.size() < kPageChunks || free_chunks_ <= kept) return;
  unmap_huge(page->memory, kHugePage);
  pages_.erase(page);
  free_chunks_ -= kPageChunks;
  held_bytes_ -= kHugePage;
}

}  // namespace terarec
