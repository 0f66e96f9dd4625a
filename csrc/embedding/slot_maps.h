// SPDX-License-Identifier: Apache-2.0

// Calls of several slot maps at once, such as the caches of all tables of a model: a map is a unit of work for the
// threads. The maps are distinct, since one thread at a time may call a map.
#pragma once

#include <cstdint>
#include <vector>

#include "embedding/row_copy.h"
#include "embedding/slot_map.h"

namespace terarec {

// Rows of several maps: those of map i begin at ends[i - 1] and end before ends[i].
struct MapRows {
  const std::vector<SlotMap*>& maps;
  const std::vector<int64_t>& ends;
  const int64_t* rows;

  int64_t begin(int64_t map) const { return map ? ends[map - 1] : 0; }
  KeySpan of(int64_t map) const { return {rows + begin(map), ends[map] - begin(map)}; }
};

// As many elements each as there are rows; elements beyond the counts are unspecified.
struct MapResults {
  int64_t* slots;    // of each row, or -1
  int64_t* used;     // slots, each once, map by map
  int64_t* absent;   // positions of the rows without a slot
  int64_t* missing;  // these rows, each once, map by map
  int64_t* places;   // of each absent row among the missing ones
};

struct MapCounts {
  int64_t used, absent, missing;
};

// Finds rows as SlotMap::touch does, and the distinct ones among those without a slot. Returns the counts of each map.
std::vector<MapCounts> touch_maps(const MapRows& requested, bool pins, uint64_t seed, const MapResults& results,
                                  int threads);

// Calls SlotMap::admit of each map with its number of `at_once`, and returns what they do.
std::vector<SlotMap::Admitted> admit_maps(const MapRows& rows, const std::vector<int64_t>& at_once, int64_t* slots,
                                          int threads);

// Copies row slots[i] of a memory to packed row i, for each memory those from ends[m - 1] to ends[m]; none for a
// negative slot.
void gather_from(const std::vector<RowPart>& memories, const std::vector<int64_t>& ends, const int64_t* slots,
                 PackedRows packed, int threads);

}  // namespace terarec
