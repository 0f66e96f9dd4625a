// SPDX-License-Identifier: Apache-2.0
#include "embedding/hash_index.h"

#include <algorithm>
#include <atomic>

#include "common/parallel.h"
#include "embedding/hash_insertion.h"
#include "embedding/kernels.h"

namespace terarec {
namespace {

constexpr int64_t kAhead = HashSegment::kAhead;
constexpr int kSegments = HashSegment::kSegments;
// Keys in one unit of work of a search.
constexpr int64_t kFindKeys = 4096;
// Below this many keys one thread finishes before others would have started.
constexpr int64_t kParallelKeys = 4096;
constexpr int64_t kUnknown = -1;  // number of absent keys

int useful_threads(int64_t keys, int threads) { return keys < kParallelKeys ? 1 : threads; }

}  // namespace

HashIndex::~HashIndex() {
  for (HashSegment& segment : segments_) segment.release(memory_);
}

int64_t HashIndex::size() const {
  int64_t size = 0;
  for (const HashSegment& segment : segments_) size += segment.size();
  return size;
}

// Keys whose buckets are searched together, while those of the next block are prefetched.
struct HashIndex::SearchGroup {
  // A prefetch completes only when the page's address is translated, which takes long in large memory, and the
  // instructions behind it then wait for room in the processor. In a loop of their own many prefetches are in flight,
  // so that their latencies overlap: interleaved with the search, 100 M keys were found at half the rate (two Zen 3
  // cores).
  static constexpr int64_t kKeys = 32;

  uint64_t hashes[kKeys];
  const Bucket* buckets[kKeys];
  int64_t size;

  void fetch() const {
    for (int64_t j = 0; j < size; j++) __builtin_prefetch(buckets[j]);
  }

  SearchOutcome search(int64_t* rows) const { return kernels().search_buckets({hashes, buckets, size, rows}); }
};

void HashIndex::fetch_homes(KeySpan keys, SearchGroup& group) const {
  group.size = std::min(SearchGroup::kKeys, keys.size);
  for (int64_t j = 0; j < group.size; j++) {
    group.hashes[j] = hash_(keys.keys[j]);
    group.buckets[j] = &segment(group.hashes[j]).home_bucket(group.hashes[j]);
  }
  group.fetch();
}

// Searches the home buckets of all keys of the block, then, for keys whose home was full, the buckets after it.
int64_t HashIndex::find_block(KeySpan keys, int64_t* rows) const {
  uint16_t onward[kFindKeys];
  SearchGroup groups[2];
  int64_t num_onward = 0, absent = 0;
  fetch_homes(keys, groups[0]);
  for (int64_t first = 0, g = 0; first < keys.size; first += SearchGroup::kKeys, g ^= 1) {
    const int64_t next = std::min(first + SearchGroup::kKeys, keys.size);
    fetch_homes({keys.keys + next, keys.size - next}, groups[g ^ 1]);
    SearchOutcome outcome = groups[g].search(rows + first);
    absent += __builtin_popcountll(outcome.absent);
    for (; outcome.onward; outcome.onward &= outcome.onward - 1) {
      onward[num_onward++] = static_cast<uint16_t>(first + __builtin_ctzll(outcome.onward));
    }
  }
  for (int64_t step = 1; num_onward > 0; step++) {
    num_onward = find_after_home(step, keys.keys, onward, num_onward, rows, &absent);
  }
  return absent;
}

int64_t HashIndex::find_after_home(int64_t step, const int64_t* keys, uint16_t* list, int64_t size, int64_t* rows,
                                   int64_t* absent) const {
  static const Bucket none{};
  int64_t left = 0;
  for (int64_t first = 0; first < size; first += SearchGroup::kKeys) {
    SearchGroup group;
    int64_t found[SearchGroup::kKeys];
    group.size = std::min(SearchGroup::kKeys, size - first);
    for (int64_t j = 0; j < group.size; j++) {
      const uint64_t hash = hash_(keys[list[first + j]]);
      const HashSegment& of = segment(hash);
      group.hashes[j] = hash;
      group.buckets[j] = step < of.buckets().size() ? &of.after_home(hash, step) : &none;
    }
    group.fetch();
    const SearchOutcome outcome = group.search(found);
    *absent += __builtin_popcountll(outcome.absent);
    for (int64_t j = 0; j < group.size; j++) {
      const uint16_t i = list[first + j];
      rows[i] = found[j];
      list[left] = i;
      left += outcome.onward >> j & 1;
    }
  }
  return left;
}

int64_t HashIndex::find(KeySpan keys, int64_t* rows, int threads) const {
  std::atomic<int64_t> absent{0};
  const int64_t units = (keys.size + kFindKeys - 1) / kFindKeys;
  parallel_for(useful_threads(keys.size, threads), units, [&](int64_t unit) {
    const int64_t first = unit * kFindKeys, size = std::min(kFindKeys, keys.size - first);
    absent.fetch_add(find_block({keys.keys + first, size}, rows + first), std::memory_order_relaxed);
  });
  return absent;
}

// Finds all keys and returns how many are absent. If most of a sample are absent, it is faster that the insertion
// searches for all of them itself: the rows of keys outside the sample are then kAbsent, and kUnknown is returned.
int64_t HashIndex::find_unless_new(KeySpan keys, int64_t* rows, int threads) const {
  const int64_t sample = std::min(kFindKeys, keys.size), rest = keys.size - sample;
  const int64_t absent = find_block({keys.keys, sample}, rows);
  if (rest == 0 || 2 * absent < sample) return absent + find({keys.keys + sample, rest}, rows + sample, threads);
  parallel_for(threads, num_blocks(rest), [&](int64_t block) {
    for_block(block, rest, [&](int64_t i) { rows[sample + i] = kAbsent; });
  });
  return kUnknown;
}

int64_t HashIndex::insert(KeySpan keys, int64_t* rows, const NewRows& new_rows, int64_t* new_keys, int threads) {
  const int64_t num_absent = find_unless_new(keys, rows, threads);
  if (num_absent == 0) return 0;
  threads = useful_threads(num_absent == kUnknown ? keys.size : num_absent, threads);
  const SegmentEntries absent(keys, num_absent == kUnknown ? nullptr : rows, hash_, threads);
  HashInsertion insertion(segments_.data(), memory_, absent, rows);
  int64_t num_new = -1;
  try {
    parallel_for(threads, kSegments, [&](int64_t s) { insertion.insert_keys(static_cast<int>(s)); });
    num_new = number_new_keys(keys, rows, new_rows, kMostRows, new_keys, threads);
  } catch (const std::bad_alloc&) {
    insertion.undo();
    throw;
  }
  if (num_new < 0) insertion.undo();
  else parallel_for(threads, kSegments, [&](int64_t s) { insertion.write_rows(static_cast<int>(s)); });
  return num_new;
}

// Inserts the absent keys with row 0, then calls apply(bucket, slot, position) for each key in order.
template <class Apply>
void HashIndex::upsert(KeySpan keys, int64_t* rows, int threads, Apply&& apply) {
  threads = useful_threads(keys.size, threads);
  const SegmentEntries all(keys, nullptr, hash_, threads);
  insert(keys, rows, {nullptr, 0, 0, 0}, nullptr, threads);
  parallel_for(threads, kSegments, [&](int64_t s) {
    const HashSegment& segment = segments_[s];
    const Entry* entries = all.of(s);
    const int64_t size = all.size(s);
    for (int64_t e = 0; e < size; e++) {
      if (e + kAhead < size) segment.fetch(entries[e + kAhead].hash());
      const BucketSlot found = segment.find(entries[e].hash());
      apply(*found.bucket, found.slot, entries[e].at());
    }
  });
}

void HashIndex::assign(KeySpan keys, const int64_t* rows, int threads) {
  const CallMemory found(keys.size * sizeof(int64_t));
  upsert(keys, static_cast<int64_t*>(found.get()), threads,
         [&](Bucket& bucket, int slot, int64_t at) { bucket.set_row(slot, rows[at]); });
}

void HashIndex::count(KeySpan keys, int64_t* rows, int threads) {
  upsert(keys, rows, threads, [&](Bucket& bucket, int slot, int64_t at) {
    rows[at] = std::min(bucket.row(slot) + 1, kMostRows - 1);
    bucket.set_row(slot, rows[at]);
  });
}

// Segments that shrink leave holes in all pages. If there are many holes, segments are moved into them, so that whole
// pages become free: without this, 5 M keys of which one call erased half kept 38 bytes a key.
void HashIndex::erase(KeySpan keys, int64_t* rows, int threads, bool shrinks) {
  threads = useful_threads(keys.size, threads);
  const SegmentEntries all(keys, nullptr, hash_, threads);
  std::array<bool, kSegments> shrunk;
  parallel_for(threads, kSegments, [&](int64_t s) {
    HashSegment& segment = segments_[s];
    const Entry* entries = all.of(s);
    const int64_t size = all.size(s);
    for (int64_t e = 0; e < size; e++) {
      if (e + kAhead < size) segment.fetch(entries[e + kAhead].hash());
      rows[entries[e].at()] = segment.erase(entries[e].hash());
    }
    shrunk[s] = shrinks && segment.shrink(memory_);
  });
  if (!shrinks || !BucketPool::shared().is_sparse()) return;
  parallel_for(threads, kSegments, [&](int64_t s) {
    if (shrunk[s]) segments_[s].move(memory_);
  });
}

// A position is the number of a segment and that of a slot in it.
int64_t HashIndex::items(int64_t start, int64_t most, int64_t* keys, int64_t* rows, int64_t* written) const {
  constexpr int kSlotBits = 62 - HashSegment::kSegmentBits;
  *written = 0;
  int64_t skipped = start & ((int64_t{1} << kSlotBits) - 1);
  for (int64_t s = start >> kSlotBits; s < kSegments; s++, skipped = 0) {
    const BucketArray& buckets = segments_[s].buckets();
    for (int64_t b = skipped / Bucket::kSlots; b < buckets.size(); b++) {
      const Bucket& bucket = buckets[b];
      for (int i = b == skipped / Bucket::kSlots ? skipped % Bucket::kSlots : 0; i < bucket.count(); i++) {
        if (*written == most) return s << kSlotBits | (b * Bucket::kSlots + i);
        keys[*written] = hash_.key(bucket.hashes[i]);
        rows[(*written)++] = bucket.row(i);
      }
    }
  }
  return -1;
}

}  // namespace terarec
