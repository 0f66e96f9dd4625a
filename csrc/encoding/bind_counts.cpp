// SPDX-License-Identifier: Apache-2.0
#include "encoding/bindings.h"
#include "encoding/counts.h"
#include "encoding/python_arrays.h"

namespace terarec::encoding {
namespace {

template <typename Counts>
void add(Counts& table, Vector<const typename Counts::Value> values, Maybe<const uint8_t> valid,
         Maybe<const int64_t> times) {
  const int64_t rows = length(values);
  const MissingMask mask = mask_of(valid, rows);
  const int64_t* repeats = elements(times, rows);
  nb::gil_scoped_release release;
  table.add(values.data(), mask, repeats, rows);
}

void add_text(TextCounts& table, Vector<const uint8_t> text, Vector<const int64_t> offsets, Maybe<const uint8_t> valid,
              Maybe<const int64_t> times) {
  const int64_t rows = length(offsets) - 1;
  const MissingMask mask = mask_of(valid, rows);
  const int64_t* repeats = elements(times, rows);
  nb::gil_scoped_release release;
  const Texts texts(text, offsets);
  table.add(texts.data, texts.offsets, mask, repeats, texts.size);
}

// (values, counts int64)
template <typename Value, typename Collect>
nb::tuple collect_integers(Collect collect) {
  std::vector<Value> values;
  std::vector<int64_t> counts;
  {
    nb::gil_scoped_release release;
    const std::vector<ValueCount<Value>> entries = collect();
    values.reserve(entries.size());
    counts.reserve(entries.size());
    for (const ValueCount<Value>& entry : entries) {
      values.push_back(entry.value);
      counts.push_back(entry.count);
    }
  }
  return nb::make_tuple(own_container<Value>(std::move(values)), own_container<int64_t>(std::move(counts)));
}

// (text uint8, offsets int64, counts int64)
template <typename Collect>
nb::tuple collect_texts(Collect collect) {
  CountedTexts texts;
  {
    nb::gil_scoped_release release;
    texts = collect();
  }
  return nb::make_tuple(own_container<uint8_t>(std::move(texts.bytes)), own_container<int64_t>(std::move(texts.offsets)),
                        own_container<int64_t>(std::move(texts.counts)));
}

template <typename Counts>
nb::class_<Counts> bind_integer_counts(nb::module_& module, const char* name) {
  using Value = typename Counts::Value;
  return nb::class_<Counts>(module, name)
      .def(nb::init<>())
      .def("add", &add<Counts>, nb::arg("values"), nb::arg("valid").none(), nb::arg("times").none())
      .def("at_least",
           [](const Counts& table, int64_t min_count) {
             return collect_integers<Value>([&] { return table.at_least(min_count); });
           },
           nb::arg("min_count"))
      .def("drain", [](Counts& table) { return collect_integers<Value>([&] { return table.drain(); }); })
      .def("memory_bytes", &Counts::memory_bytes, nb::call_guard<nb::gil_scoped_release>())
      .def("__len__", &Counts::size, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace

void bind_counts(nb::module_& module) {
  bind_integer_counts<Hex32Counts>(module, "Hex32Counts");
  bind_integer_counts<Int64Counts>(module, "Int64Counts");
  nb::class_<TextCounts>(module, "TextCounts")
      .def(nb::init<>())
      .def("add", &add_text, nb::arg("text"), nb::arg("offsets"), nb::arg("valid").none(), nb::arg("times").none())
      .def("at_least",
           [](const TextCounts& table, int64_t min_count) {
             return collect_texts([&] { return table.at_least(min_count); });
           },
           nb::arg("min_count"))
      .def("drain", [](TextCounts& table) { return collect_texts([&] { return table.drain(); }); })
      .def("memory_bytes", &TextCounts::memory_bytes, nb::call_guard<nb::gil_scoped_release>())
      .def("__len__", &TextCounts::size, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace terarec::encoding
