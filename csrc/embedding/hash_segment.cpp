// SPDX-License-Identifier: Apache-2.0
#include "embedding/hash_segment.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <utility>

namespace terarec {
namespace {

constexpr double kGrowth = 1.75;
// A segment that was shrunk returns to its series of sizes by at least this factor.
constexpr double kLeastGrowth = 1.12;
constexpr int64_t kLeastPercent = 58;
constexpr int64_t kShrunkPercent = 72;
// Buckets that are moved, and buckets that are cleared, at a time: they stay in the L1 cache. The latter are of one
// chunk.
constexpr int64_t kMoved = 64;
constexpr int64_t kCleared = BucketArray::kLeastChunk;
// Buckets cleared beyond the last home of the moved ones: few keys lie further from their home.
constexpr int64_t kMargin = 16;

// A segment while it is filled in the order of its buckets. They are cleared just before: clearing the whole array at
// once takes what is larger than a core's cache through it twice.
class Filling {
 public:
  Filling(const HashSegment& segment, const BucketArray& buckets) : segment_(segment), buckets_(buckets) {}

  void clear_to(int64_t end) {
    while (cleared_ < std::min(end, buckets_.size())) {
      const int64_t count = std::min(kCleared - cleared_ % kCleared, buckets_.size() - cleared_);
      memset(static_cast<void*>(&buckets_[cleared_]), 0, count * sizeof(Bucket));
      cleared_ += count;
    }
  }

  // All that `from` holds, whose homes must be cleared.
  void add(const Bucket& from) {
    Bucket none;  // receives the content of free slots: their number cannot be predicted, and so no branch is taken
    none.word = 0;
    for (int i = 0; i < Bucket::kSlots; i++) {
      Bucket* const targets[] = {&none, &segment_.home_bucket(from.hashes[i])};
      Bucket& target = *targets[i < from.count()];
      if (target.full()) add_beyond_home(from.hashes[i], from.row(i));
      else target.add(from.hashes[i], from.row(i));
    }
  }

 private:
  void add_beyond_home(uint64_t hash, int64_t row) {
    const int64_t home = segment_.home(hash);
    Bucket* bucket = &buckets_[home];
    for (int64_t step = 1; bucket->full(); step++) {
      bucket->pass();
      clear_to(home + step + 1);
      bucket = &segment_.after_home(hash, step);
    }
    bucket->add(hash, row);
  }

  const HashSegment& segment_;
  const BucketArray& buckets_;
  int64_t cleared_ = 0;
};

// The first bucket without a key that wrapped around from the last bucket to the first.
int64_t first_in_order(const BucketArray& buckets) {
  int64_t first = 0;
  if (buckets[buckets.size() - 1].passed()) {
    while (first < buckets.size() && buckets[first++].passed()) continue;
  }
  return first;
}

}  // namespace

int64_t HashSegment::erase(uint64_t hash) {
  const BucketSlot found = find(hash);
  if (!found.bucket) return -1;
  for (int64_t step = 0; &after_home(hash, step) != found.bucket; step++) after_home(hash, step).unpass();
  const int64_t row = found.bucket->row(found.slot);
  found.bucket->remove(found.slot);
  size_--;
  return row;
}

bool HashSegment::shrink(BucketMemory& memory) {
  if (buckets_.size() < 2 || size_ >= buckets_.size() * kLeastPercent / 20) return false;
  try {
    rebuild(size_ * 20 / kShrunkPercent + 1, memory);
    return true;
  } catch (const std::bad_alloc&) {  // both arrays do not fit at once: the large one stays
    return false;
  }
}

void HashSegment::move(BucketMemory& memory) {
  try {
    rebuild(buckets_.size(), memory);
  } catch (const std::bad_alloc&) {  // it stays where it is
  }
}

// The sizes of segment `number` are 1.75^(j + number / 256): equally full segments grow one after the other.
int64_t HashSegment::grown(int number, int64_t keys) const {
  if (keys <= Bucket::kSlots) return 1;
  const double least = std::max(static_cast<double>(keys) * 20 / kMostPercent, buckets_.size() * kLeastGrowth);
  const double phase = static_cast<double>(number) / kSegments;
  double step = std::ceil(std::log(least) / std::log(kGrowth) - phase);
  int64_t buckets = 0;
  do {
    buckets = static_cast<int64_t>(std::ceil(std::pow(kGrowth, step + phase)));
    step += 1.0;
  } while (buckets * kMostPercent / 20 < keys);
  return buckets;
}

// Both arrays are traversed in one direction, but for the few keys that wrapped around from the last bucket.
void HashSegment::rebuild(int64_t least_buckets, BucketMemory& memory) {
  HashSegment built;
  built.buckets_ = memory.take(least_buckets);
  const int64_t num_buckets = built.buckets_.size();
  built.size_ = size_;
  Filling filling(built, built.buckets_);
  const int64_t before = buckets_.size(), first = first_in_order(buckets_);
  for (int64_t begin = first; begin < before; begin += kMoved) {
    const int64_t end = std::min(before, begin + kMoved);
    filling.clear_to((end * num_buckets + before - 1) / before + kMargin);
    for (int64_t b = begin; b < end; b++) filling.add(buckets_[b]);
  }
  filling.clear_to(num_buckets);
  for (int64_t b = 0; b < first; b++) filling.add(buckets_[b]);
  release(memory);
  *this = std::move(built);
}

}  // namespace terarec
