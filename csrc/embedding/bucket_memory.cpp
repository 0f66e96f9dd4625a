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
    pool.give_table_back(table, chunks);
    throw;
  }
  array.chunks_ = table;
  array.is_owned_ = true;
  held_bytes_ += array_bytes(array.size_, array.bits_);
  return array;
}

void BucketMemory::give_back(BucketArray& array) {
  if (!array.owned()) return;
  BucketPool& pool = BucketPool::shared();
  const int64_t size = array.size_;
  if (size <= kHeapBuckets) ::operator delete(*array.chunks_, kAlignment);
  else if (size <= kLooseBuckets) pool.give_units_back(array.chunks_, whole_units(size));
  else pool.give_chunks_back(array.chunks_, whole_units(size));
  pool.give_table_back(array.chunks_, num_chunks(size, array.bits_));
  held_bytes_ -= array_bytes(size, array.bits_);
  array = BucketArray();
}

}  // namespace terarec
