// SPDX-License-Identifier: Apache-2.0
#include "embedding/bindings.h"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include <tuple>
#include <vector>

#include "embedding/row_copy.h"
#include "embedding/row_set.h"
#include "embedding/slot_map.h"
#include "embedding/slot_maps.h"

namespace nb = nanobind;

namespace terarec {
namespace {

// Tensors come as addresses, as in bindings.cpp, those of int64 with their size behind them.
KeySpan keys(uintptr_t address, int64_t size) { return {at<const int64_t>(address), size}; }
SlotSpan slots(uintptr_t address, int64_t size) { return {at<const int64_t>(address), size}; }

// Arrays in the order of SlotArrays.
SlotArrays arrays(const std::vector<uintptr_t>& of) {
  return {at<int64_t>(of[0]), at<int64_t>(of[1]), at<int32_t>(of[2]), at<bool>(of[3]), at<bool>(of[4]),
          at<int32_t>(of[5]), at<uint8_t>(of[6]), at<int16_t>(of[7]), at<int32_t>(of[8])};
}

// (address, bytes of a row, offset in a packed row) of each.
using Parts = std::vector<std::tuple<uintptr_t, int64_t, int64_t>>;

std::vector<RowPart> parts(const Parts& of) {
  std::vector<RowPart> made;
  for (const auto& [address, bytes, offset] : of) made.push_back({at<char>(address), bytes, offset});
  return made;
}

}  // namespace

void bind_slot_map(nb::module_& module) {
  nb::class_<SlotMap>(module, "SlotMap")
      .def("__init__",
           [](SlotMap* self, int64_t capacity, const std::vector<uintptr_t>& of, uint64_t seed) {
             new (self) SlotMap(capacity, arrays(of), seed);
           })
      .def("size", &SlotMap::size)
      .def("used_slots", &SlotMap::used_slots)
      .def("room", &SlotMap::room)
      .def("num_pinned", &SlotMap::num_pinned, Unlocked())
      .def(
          "find", [](const SlotMap& map, uintptr_t rows, int64_t size, uintptr_t out,
                     int threads) { map.find(keys(rows, size), at<int64_t>(out), threads); },
          Unlocked())
      .def(
          "touch",
          [](SlotMap& map, uintptr_t rows, int64_t size, bool pins, uintptr_t out, uintptr_t used, uintptr_t absent,
             int threads) {
            const auto touched =
                map.touch(keys(rows, size), pins, at<int64_t>(out), at<int64_t>(used), at<int64_t>(absent), threads);
            return std::tuple(touched.used, touched.absent);
          },
          Unlocked())
      .def(
          "mark_needed", [](SlotMap& map, uintptr_t rows, int64_t size, int64_t until,
                     uintptr_t absent) {
            return map.mark_needed(keys(rows, size), static_cast<int32_t>(until), at<int64_t>(absent));
          },
          Unlocked())
      .def("pin", [](SlotMap& map, uintptr_t of, int64_t size) { map.pin(slots(of, size)); }, Unlocked())
      .def("unpin", [](SlotMap& map, uintptr_t of, int64_t size) { map.unpin(slots(of, size)); }, Unlocked())
      .def(
          "assign",
          [](SlotMap& map, uintptr_t rows, int64_t size, uintptr_t of_tables, uintptr_t tables, uintptr_t out,
             int threads) {
            map.assign({at<const int64_t>(rows), at<const int64_t>(of_tables), at<const int64_t>(tables), size},
                       at<int64_t>(out), threads);
          },
          Unlocked())
      .def(
          "admit",
          [](SlotMap& map, uintptr_t rows, int64_t size, int64_t at_once, uintptr_t out, int threads) {
            const auto admitted = map.admit(keys(rows, size), at_once, at<int64_t>(out), threads);
            return std::tuple(admitted.new_rows, admitted.released);
          },
          Unlocked())
      .def("release", [](SlotMap& map, uintptr_t of, int64_t size, int threads) { map.release(slots(of, size), threads); },
           Unlocked())
      .def(
          "victims", [](SlotMap& map, int64_t count, int64_t batch, bool keeps_dirty,
                        uintptr_t out) {
            return map.victims(count, static_cast<int32_t>(batch), keeps_dirty, at<int64_t>(out));
          },
          Unlocked())
      .def("by_table", [](const SlotMap& map, uintptr_t of, int64_t size, uintptr_t out) {
        map.by_table(slots(of, size), at<int64_t>(out));
      }, Unlocked());

  nb::class_<RowSet>(module, "RowSet")
      .def("__init__",
           [](RowSet* self, uintptr_t rows, int64_t size, uint64_t seed, uintptr_t places) {
             nb::gil_scoped_release unlocked;
             new (self) RowSet(keys(rows, size), seed, at<int64_t>(places));
           })
      .def("size", &RowSet::size)
      .def("firsts", [](const RowSet& set, uintptr_t out) {
        std::copy_n(set.firsts(), set.size(), at<int64_t>(out));
      })
      .def("find", [](const RowSet& set, uintptr_t rows, int64_t size, uintptr_t out) {
        set.find(keys(rows, size), at<int64_t>(out));
      }, Unlocked())
      .def("take", [](RowSet& set, uintptr_t rows, int64_t size, uintptr_t out) {
        return set.take(keys(rows, size), at<int64_t>(out));
      }, Unlocked());

  module.def("gather_rows", [](const Parts& of, uintptr_t from, int64_t count, uintptr_t packed, int64_t stride,
                               int threads) {
    const auto copied = parts(of);
    nb::gil_scoped_release unlocked;
    gather_rows(copied, at<const int64_t>(from), count, {at<char>(packed), stride}, threads);
  });
  module.def("scatter_rows", [](const Parts& of, uintptr_t to, uintptr_t places, int64_t count, uintptr_t packed,
                                int64_t stride, int threads) {
    const auto copied = parts(of);
    nb::gil_scoped_release unlocked;
    scatter_rows(copied, at<const int64_t>(to), at<const int64_t>(places), count, {at<char>(packed), stride}, threads);
  });
  module.def("touch_maps", [](const std::vector<SlotMap*>& maps, uintptr_t rows, const std::vector<int64_t>& ends,
                              bool pins, uint64_t seed, const std::vector<uintptr_t>& out, int threads) {
    std::vector<MapCounts> counts;
    {
      nb::gil_scoped_release unlocked;
      counts = touch_maps({maps, ends, at<const int64_t>(rows)}, pins, seed,
                          {at<int64_t>(out[0]), at<int64_t>(out[1]), at<int64_t>(out[2]), at<int64_t>(out[3]),
                           at<int64_t>(out[4])},
                          threads);
    }
    std::vector<std::tuple<int64_t, int64_t, int64_t>> found;
    for (const MapCounts& count : counts) found.emplace_back(count.used, count.absent, count.missing);
    return found;
  });
  module.def("admit_maps", [](const std::vector<SlotMap*>& maps, uintptr_t rows, const std::vector<int64_t>& ends,
                              const std::vector<int64_t>& at_once, uintptr_t out, int threads) {
    std::vector<SlotMap::Admitted> admitted;
    {
      nb::gil_scoped_release unlocked;
      admitted = admit_maps({maps, ends, at<const int64_t>(rows)}, at_once, at<int64_t>(out), threads);
    }
    std::vector<std::tuple<int64_t, int64_t>> found;
    for (const auto& one : admitted) found.emplace_back(one.new_rows, one.released);
    return found;
  });
  module.def("gather_from", [](const Parts& of, const std::vector<int64_t>& ends, uintptr_t from, uintptr_t packed,
                               int64_t stride, int threads) {
    const auto copied = parts(of);
    nb::gil_scoped_release unlocked;
    gather_from(copied, ends, at<const int64_t>(from), {at<char>(packed), stride}, threads);
  });
  module.def("mark_slots", [](uintptr_t flags, uintptr_t of, int64_t count) {
    nb::gil_scoped_release unlocked;
    for (int64_t i = 0; i < count; i++) at<bool>(flags)[at<const int64_t>(of)[i]] = true;
  });
}

}  // namespace terarec
