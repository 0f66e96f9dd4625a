#include "embedding/hash_segment.h"

#include <algorithm>
#include <cmath>

namespace terarec {
namespace {

constexpr double kGrowth = 1.75;
// A segment that was shrunk gets back to its series of sizes by at least this factor.
constexpr double kLeastGrowth = 1.12;

}  // namespace

BucketSlot HashSegment::find(uint64_t hash, int64_t key) const {
  for (int64_t step = 0; step < buckets_.size(); step++) {
    Bucket& bucket = after_home(hash, step);
    const uint32_t match = bucket.match(key);
    if (match) return {&bucket, __builtin_ctz(match)};
    if (!bucket.passed()) break;
  }
  return {nullptr, 0};
}

int64_t HashSegment::erase(uint64_t hash, int64_t key) {
  const BucketSlot found = find(hash, key);
  if (!found.bucket) return -1;
  for (int64_t step = 0; &after_home(hash, step) != found.bucket; step++) after_home(hash, step).unpass();
  const int64_t row = found.bucket->row(found.slot);
  found.bucket->remove(found.slot);
  size_--;
  return row;
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

}  // namespace terarec
