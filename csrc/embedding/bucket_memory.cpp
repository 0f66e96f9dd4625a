#include "embedding/bucket_memory.h"

#include <new>

namespace terarec {
namespace {

// Of larger arrays, whole units are no more than some tenths larger than what was asked for.
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
  static Bucket* const chunk = &empty;
  chunks_ = &chunk;
}

BucketArray BucketMemory::take(int64_t size) {
  BucketArray array;
  array.size_ = size <= kHeapBuckets ? size : whole_units(size) * BucketArray::kLeastChunk;
  array.bits_ = chunk_bits(array.size_);
  array.table_.reset(new Bucket*[num_chunks(array.size_, array.bits_)]);
  array.chunks_ = array.table_.get();
  Bucket** chunks = array.table_.get();
  if (array.size_ <= kHeapBuckets) *chunks = static_cast<Bucket*>(::operator new(size * sizeof(Bucket), kAlignment));
  else if (array.size_ <= kLooseBuckets) BucketPool::shared().take_units(chunks, whole_units(size));
  else BucketPool::shared().take_chunks(chunks, whole_units(size));
  held_bytes_ += array_bytes(array.size_, array.bits_);
  return array;
}

void BucketMemory::give_back(BucketArray& array) {
  if (!array.owned()) return;
  const int64_t size = array.size_;
  Bucket** chunks = array.table_.get();
  if (size <= kHeapBuckets) ::operator delete(*chunks, kAlignment);
  else if (size <= kLooseBuckets) BucketPool::shared().give_units_back(chunks, whole_units(size));
  else BucketPool::shared().give_chunks_back(chunks, whole_units(size));
  held_bytes_ -= array_bytes(size, array.bits_);
  array = BucketArray();
}

}  // namespace terarec
