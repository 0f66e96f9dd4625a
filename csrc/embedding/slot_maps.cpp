// SPDX-License-Identifier: Apache-2.0
#include "embedding/slot_maps.h"

#include <cstring>

#include "common/parallel.h"
#include "embedding/row_set.h"

namespace terarec {

std::vector<MapCounts> touch_maps(const MapRows& requested, bool pins, uint64_t seed, const MapResults& results,
                                  int threads) {
  const auto num_maps = static_cast<int64_t>(requested.maps.size());
  std::vector<MapCounts> counts(num_maps);
  const int inner = num_maps == 1 ? threads : 1;  // one level of threads: across the maps, or within the only one
  parallel_for(threads, num_maps, [&](int64_t map) {
    const KeySpan rows = requested.of(map);
    const int64_t begin = requested.begin(map);
    int64_t* const absent = results.absent + begin;
    const auto touched =
        requested.maps[map]->touch(rows, pins, results.slots + begin, results.used + begin, absent, inner);
    std::vector<int64_t> without(touched.absent);
    for (int64_t i = 0; i < touched.absent; i++) without[i] = rows.keys[absent[i]];
    const RowSet distinct({without.data(), touched.absent}, seed, results.places + begin);
    for (int64_t i = 0; i < distinct.size(); i++) results.missing[begin + i] = without[distinct.firsts()[i]];
    counts[map] = {touched.used, touched.absent, distinct.size()};
  });
  // Each map wrote to the places of its own rows, since the counts of the maps before it were not known yet.
  MapCounts done{0, 0, 0};
  for (int64_t map = 0; map < num_maps; map++) {
    const int64_t begin = requested.begin(map);
    memmove(results.used + done.used, results.used + begin, counts[map].used * sizeof(int64_t));
    memmove(results.missing + done.missing, results.missing + begin, counts[map].missing * sizeof(int64_t));
    for (int64_t i = 0; i < counts[map].absent; i++) {
      results.absent[done.absent + i] = results.absent[begin + i] + begin;
      results.places[done.absent + i] = results.places[begin + i] + done.missing;
    }
    done = {done.used + counts[map].used, done.absent + counts[map].absent, done.missing + counts[map].missing};
  }
  return counts;
}

std::vector<SlotMap::Admitted> admit_maps(const MapRows& rows, const std::vector<int64_t>& at_once, int64_t* slots,
                                          int threads) {
  const auto num_maps = static_cast<int64_t>(rows.maps.size());
  std::vector<SlotMap::Admitted> admitted(num_maps);
  const int inner = num_maps == 1 ? threads : 1;
  parallel_for(threads, num_maps, [&](int64_t map) {
    admitted[map] = rows.maps[map]->admit(rows.of(map), at_once[map], slots + rows.begin(map), inner);
  });
  return admitted;
}

void gather_from(const std::vector<RowPart>& memories, const std::vector<int64_t>& ends, const int64_t* slots,
                 PackedRows packed, int threads) {
  const auto num_memories = static_cast<int64_t>(memories.size());
  const int inner = num_memories == 1 ? threads : 1;
  parallel_for(threads, num_memories, [&](int64_t memory) {
    const int64_t begin = memory ? ends[memory - 1] : 0;
    gather_rows({memories[memory]}, slots + begin, ends[memory] - begin,
                {packed.first + begin * packed.stride, packed.stride}, inner);
  });
}

}  // namespace terarec
