// SPDX-License-Identifier: Apache-2.0

// Lets several threads work in the core at once: the team of one call, and callers that share memory, an index, a
// counter or a row file. Arguments: an empty directory, and the threads of a team. Prints digests of what does not
// depend on the order of threads, as lines of "threads <case> <digest>"; test_sanitizers.py builds it with sanitizers.

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/parallel.h"
#include "embedding/bag_lookup.h"
#include "embedding/dense.h"
#include "embedding/hash_index.h"
#include "embedding/row_copy.h"
#include "embedding/row_init.h"
#include "embedding/row_update.h"
#include "embedding/slot_map.h"
#include "embedding/slot_maps.h"
#include "encoding/counts.h"
#include "rowfile/row_file.h"

#include "check_digest.h"

using namespace terarec;

namespace {

constexpr int kCallers = 4;

// Calls work(0), ... at the same time, each in a thread of its own.
void at_once(int count, const std::function<void(int)>& work) {
  std::vector<std::thread> callers;
  for (int number = 0; number < count; number++) callers.emplace_back(work, number);
  for (std::thread& caller : callers) caller.join();
}

void require(bool is_right, const char* what) {
  if (is_right) return;
  fprintf(stderr, "threads_check: %s\n", what);
  exit(1);
}

// A table with the bags of two features; large enough for a team.
struct Lookups {
  static constexpr int64_t kRows = 5000, kFeatures = 2, kBatch = 1500, kWidth = 32;

  explicit Lookups(Pooling pooling) : layout{{0, kRows, pooling, 0}, {0, kRows, pooling, 0}}, rows(kRows * kWidth) {
    Random random(5);
    for (float& number : rows) number = random.number();
    for (int64_t bag = 0; bag < kFeatures * kBatch; bag++) {
      for (int64_t i = random.below(9); i > 0; i--) keys.push_back(random.below(random.below(kRows) + 1));
      offsets.push_back(static_cast<int64_t>(keys.size()));
    }
    grad.resize(kBatch * kFeatures * kWidth);
    for (float& number : grad) number = random.number();
  }

  int64_t num_keys() const { return static_cast<int64_t>(keys.size()); }

  void look_up(int threads, Digest& digest) const {
    std::vector<float> out(kBatch * kFeatures * kWidth), dots(keys.size());
    const RowArray weights{reinterpret_cast<const uint8_t*>(rows.data()), RowType::kFloat32, kWidth};
    bag_lookup({weights, keys.data(), num_keys(), nullptr, offsets.data(), layout, kFeatures, kBatch, out.data(), threads});
    row_dots({weights, keys.data(), num_keys(), offsets.data(), layout, kFeatures, kBatch, grad.data(),
              kFeatures * kWidth, dots.data(), threads});
    digest.add(out);
    digest.add(dots);
  }

  void update(int threads, Digest& digest) {
    RowRule rule{*RowRule::formula_of("adagrad")};
    rule.lr = 0.05;
    rule.eps = 1e-3;
    rule.clip_norm = 1.5;
    std::vector<float> state(rows.size(), 0.01f);
    const UpdateGradients gradients{rows.data(), RowType::kFloat32, kWidth, nullptr, threads,
                                    {{keys.data(), nullptr, num_keys(), nullptr, offsets.data(), layout, kFeatures,
                                      kBatch, grad.data(), kFeatures * kWidth}}};
    for (int64_t step = 1; step <= 2; step++) row_update({state.data(), nullptr, nullptr, rule, step, 7, gradients});
    const double squares = gradient_squares(gradients, 0).sum;
    digest.add(&squares, sizeof squares);
    digest.add(rows);
    digest.add(state);
  }

  FeatureLayout layout[kFeatures];
  std::vector<int64_t> keys, offsets{0};
  std::vector<float> rows, grad;
};

void check_tables(int threads, Digest& digest) {
  for (const Pooling pooling : {Pooling::kSum, Pooling::kMax}) {
    Lookups lookups(pooling);
    lookups.look_up(threads, digest);
    lookups.update(threads, digest);
  }
  std::vector<float> rows(4000 * 16);
  fill_rows({rows.data(), 4000, 16, 5, 11, 0.5, false, threads});
  digest.add(rows);
  constexpr int64_t count = 3000, width = 40;
  std::vector<float> grad(count * width, 0.5f), part(count * width), masked(count * width), sums(width);
  for (int64_t i = 0; i < count * width; i++) part[i] = static_cast<float>(i % 3) - 1.0f;
  mask_gradient(MaskGradient<float>{grad.data(), width, part.data(), count, width, masked.data(), sums.data(), false},
                threads);
  digest.add(masked);
  digest.add(sums);
}

std::vector<int64_t> keys_of(int64_t count, uint64_t seed, int64_t below) {
  Random random(seed);
  std::vector<int64_t> keys(count);
  for (int64_t& key : keys) key = random.below(below) * 0x9E3779B97F4A7C15;
  return keys;
}

void check_index(int threads, Digest& digest) {
  HashIndex index(99);
  int64_t next = 0;
  for (int call = 0; call < 4; call++) {
    const std::vector<int64_t> keys = keys_of(40000, call, 60000);
    const KeySpan span{keys.data(), static_cast<int64_t>(keys.size())};
    std::vector<int64_t> rows(keys.size()), new_keys(keys.size());
    next += index.insert(span, rows.data(), {nullptr, 0, next, 1}, new_keys.data(), threads);
    digest.add(rows);
    index.erase({keys.data(), 15000}, rows.data(), threads);
    index.find(span, rows.data(), threads);
    digest.add(rows);
    index.count(span, rows.data(), threads);
    digest.add(rows);
    index.assign(span, rows.data(), threads);
    index.find(span, rows.data(), threads);
    digest.add(rows);
  }
}

// A map with the arrays that the caller owns.
struct Slots {
  explicit Slots(int64_t capacity)
      : rows(capacity), keys(capacity), needed(capacity), tables(capacity), marks(capacity), counts(capacity),
        pins(capacity, SlotMap::kFree), is_held(new bool[capacity]()), is_dirty(new bool[capacity]()),
        map(capacity, {rows.data(), keys.data(), tables.data(), is_held.get(), is_dirty.get(), needed.data(),
                       counts.data(), pins.data(), marks.data()}, 3) {}

  std::vector<int64_t> rows, keys;
  std::vector<int32_t> needed, tables, marks;
  std::vector<uint8_t> counts;
  std::vector<int16_t> pins;
  std::unique_ptr<bool[]> is_held, is_dirty;
  SlotMap map;
};

void check_slots(int threads, Digest& digest) {
  constexpr int64_t maps = 3, capacity = 4000, of_map = 3000, row_bytes = 48;
  std::vector<std::unique_ptr<Slots>> owned;
  std::vector<SlotMap*> pointers;
  std::vector<int64_t> ends, at_once(maps, 100);
  std::vector<std::vector<char>> memories;
  for (int64_t map = 0; map < maps; map++) {
    owned.push_back(std::make_unique<Slots>(capacity));
    pointers.push_back(&owned.back()->map);
    ends.push_back((map + 1) * of_map);
    memories.emplace_back(capacity * row_bytes);
  }
  for (int call = 0; call < 4; call++) {
    std::vector<int64_t> rows(maps * of_map), slots(rows.size()), used(rows.size()), absent(rows.size()),
        missing(rows.size()), places(rows.size());
    // Steps of an odd number modulo a power of two: the rows of a map are distinct.
    for (int64_t i = 0; i < maps * of_map; i++) rows[i] = (call * 700 + (i % of_map) * 1237) % 8192;
    const MapRows requested{pointers, ends, rows.data()};
    touch_maps(requested, false, 3, {slots.data(), used.data(), absent.data(), missing.data(), places.data()}, threads);
    admit_maps(requested, at_once, slots.data(), threads);
    digest.add(slots);
    std::vector<char> packed(rows.size() * row_bytes);
    for (size_t i = 0; i < packed.size(); i++) packed[i] = static_cast<char>(rows[i / row_bytes] + i % row_bytes);
    std::vector<RowPart> parts;
    for (int64_t map = 0; map < maps; map++) {
      parts.push_back({memories[map].data(), row_bytes, 0});
      scatter_rows({parts.back()}, slots.data() + map * of_map, nullptr, of_map,
                   {packed.data() + map * of_map * row_bytes, row_bytes}, threads);
    }
    std::vector<char> gathered(packed.size());
    gather_from(parts, ends, slots.data(), {gathered.data(), row_bytes}, threads);
    digest.add(gathered);
  }
}

// Several threads, each with objects of its own; the memory of results and the pages of buckets are shared.
void check_callers(int threads) {
  std::vector<Digest> digests(kCallers);
  at_once(kCallers, [&](int number) {
    check_tables(threads, digests[number]);
    check_index(threads, digests[number]);
    check_slots(threads, digests[number]);
  });
  for (const Digest& digest : digests) digest.print("threads", "callers");
}

// Several threads read what none writes.
void check_readers(int threads) {
  const Lookups lookups(Pooling::kMean);
  HashIndex index(1);
  const std::vector<int64_t> keys = keys_of(30000, 8, 50000);
  const KeySpan span{keys.data(), static_cast<int64_t>(keys.size())};
  std::vector<int64_t> rows(keys.size());
  index.insert(span, rows.data(), {nullptr, 0, 0, 1}, nullptr, threads);
  std::vector<Digest> digests(kCallers);
  at_once(kCallers, [&](int number) {
    lookups.look_up(threads, digests[number]);
    std::vector<int64_t> mine(keys.size());
    index.find(span, mine.data(), threads);
    digests[number].add(mine);
  });
  for (const Digest& digest : digests) digest.print("threads", "readers");
}

void check_counts() {
  encoding::Int64Counts counts;
  encoding::TextCounts texts;
  at_once(kCallers, [&](int number) {
    const std::vector<int64_t> values = keys_of(20000, number, 3000);
    std::string text;
    std::vector<int64_t> offsets{0};
    for (const int64_t value : values) {
      text += std::to_string(value % 1000);
      offsets.push_back(static_cast<int64_t>(text.size()));
    }
    counts.add(values.data(), {nullptr}, nullptr, static_cast<int64_t>(values.size()));
    texts.add(text.data(), offsets.data(), {nullptr}, nullptr, static_cast<int64_t>(values.size()));
    require(counts.size() > 0 && texts.memory_bytes() > 0, "a counter has lost what it counted");
  });
  Digest digest;
  for (const auto& entry : counts.at_least(2)) {
    digest.add(&entry.value, sizeof entry.value);
    digest.add(&entry.count, sizeof entry.count);
  }
  const encoding::CountedTexts kept = texts.at_least(2);
  digest.add(kept.bytes.data(), kept.bytes.size());
  digest.add(kept.counts);
  digest.print("threads", "counts");
}

constexpr int64_t kRowBytes = 72, kKeys = 4096, kPiece = 512;

// A row is its key and one version, again and again: two versions in one row are seen.
void fill_row(char* row, int64_t key, int64_t version) {
  for (int64_t i = 0; i < kRowBytes; i += 8) {
    const int64_t value = i ? version : key;
    memcpy(row + i, &value, 8);
  }
}

void check_row(const char* row, int64_t key) {
  int64_t words[kRowBytes / 8];
  memcpy(words, row, kRowBytes);
  require(words[0] == key, "a row file gave the row of another key");
  for (int64_t i = 2; i < kRowBytes / 8; i++) require(words[i] == words[1], "a row file gave a torn row");
}

// One thread writes, erases and commits, others read, and rows move in the background.
void check_row_file(const std::string& directory) {
  rowfile::RowFile::create(directory);
  const auto fetcher = std::make_shared<rowfile::PageFetcher>(rowfile::Io::kThreads, 2, false, 1 << 20);
  rowfile::RowFileOptions options;
  options.queue_bytes = 1 << 16;
  rowfile::RowFile store(directory, rowfile::Layout(kRowBytes, 4096, 16), fetcher, options);
  std::atomic<bool> is_writing{true};
  at_once(1 + kCallers, [&](int number) {
    Random random(number);
    std::vector<int64_t> keys(kPiece);
    std::vector<char> rows(kPiece * kRowBytes);
    if (number == 0) {
      for (int64_t version = 1; version <= 60; version++) {
        const int64_t first = random.below(kKeys);
        for (int64_t i = 0; i < kPiece; i++) {
          keys[i] = (first + i * 1237) % kKeys;
          fill_row(rows.data() + i * kRowBytes, keys[i], version);
        }
        store.write(keys.data(), kPiece, {rows.data(), kRowBytes});
        store.erase(keys.data(), 40);
        if (version % 8 == 0) store.commit("{}");
        if (version % 30 == 0) store.compact();
      }
      is_writing = false;
      return;
    }
    const auto is_there = std::make_unique<bool[]>(kPiece);
    while (is_writing) {
      for (int64_t& key : keys) key = random.below(kKeys);
      rowfile::RowFile::read({{&store, keys.data(), kPiece, {rows.data(), kRowBytes}, is_there.get()}});
      for (int64_t i = 0; i < kPiece; i++) {
        if (is_there[i]) check_row(rows.data() + i * kRowBytes, keys[i]);
      }
      require(store.file_bytes() > 0 && store.memory_bytes() > 0 && store.size() >= 0, "a row file has no size");
    }
  });
  store.commit("{}");
  std::vector<int64_t> keys(kKeys);
  for (int64_t i = 0; i < kKeys; i++) keys[i] = i;
  std::vector<char> rows(kKeys * kRowBytes);
  const auto is_there = std::make_unique<bool[]>(kKeys);
  rowfile::RowFile::read({{&store, keys.data(), kKeys, {rows.data(), kRowBytes}, is_there.get()}});
  Digest digest;
  for (int64_t i = 0; i < kKeys; i++) {
    if (is_there[i]) digest.add(rows.data() + i * kRowBytes, kRowBytes);
  }
  digest.print("threads", "row_file");
  store.close();
}

}  // namespace

int main(int count, char** arguments) {
  require(count == 3, "expected a directory and a number of threads");
  require(!strcmp(parallel_runtime(), "std::thread"), "an OpenMP runtime is loaded, whose barriers no sanitizer sees");
  const int threads = atoi(arguments[2]);
  Digest tables, index, slots;
  check_tables(threads, tables);
  tables.print("threads", "tables");
  check_index(threads, index);
  index.print("threads", "index");
  check_slots(threads, slots);
  slots.print("threads", "slots");
  check_callers(threads);
  check_readers(threads);
  check_counts();
  check_row_file(arguments[1]);
}
