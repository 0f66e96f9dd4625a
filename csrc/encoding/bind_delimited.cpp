// SPDX-License-Identifier: Apache-2.0
#include "encoding/bindings.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <string>

#include "encoding/delimited.h"
#include "encoding/python_arrays.h"

namespace terarec::encoding {
namespace {

std::string to_string(nb::bytes text) { return {text.c_str(), text.size()}; }

nb::bytes to_bytes(const std::string& text) { return nb::bytes(text.data(), text.size()); }

void make_layout(DelimitedLayout* self, const std::vector<int>& types, const std::vector<nb::bytes>& separators,
                 nb::bytes delimiter, bool quote, bool trim, bool trim_quoted, const std::vector<nb::bytes>& missing, int policy,
                 int64_t max_line_bytes) {
  DelimitedLayout layout{{}, {to_string(delimiter), quote, trim}, trim_quoted, {}, static_cast<Policy>(policy), max_line_bytes};
  require(!types.empty() && types.size() == separators.size(), "expected one type and one separator a field");
  require(!layout.quoting.delimiter.empty(), "expected a delimiter");
  require(policy >= 0 && policy <= static_cast<int>(Policy::missing), "unknown policy");
  for (size_t field = 0; field < types.size(); ++field) {
    require(types[field] >= 0 && types[field] <= static_cast<int>(FieldType::hex32), "unknown type of a field");
    layout.fields.push_back({static_cast<FieldType>(types[field]), to_string(separators[field])});
  }
  for (const nb::bytes& word : missing) layout.missing.push_back(to_string(word));
  new (self) DelimitedLayout(std::move(layout));
}

// An array that owns `array`'s memory, or the position of its first byte in the memory of all rows.
template <typename T, typename Stored>
nb::object hand_over(GrowingArray<Stored>& array, int64_t size, char* memory) {
  if (array.borrowed()) return nb::int_(reinterpret_cast<char*>(array.data()) - memory);
  return own_memory(reinterpret_cast<T*>(array.release()), size);
}

nb::object hand_over_values(FieldColumn& column, int64_t items, char* memory) {
  switch (column.layout.type) {
    case FieldType::integer:
      return hand_over<int64_t>(column.values, items, memory);
    case FieldType::number:
      return hand_over<double>(column.values, items, memory);
    case FieldType::hex32:
      return hand_over<uint32_t>(column.values, items, memory);
    default:
      return hand_over<uint8_t>(column.values, column.text_offsets[items], memory);
  }
}

// Converts bytes, 1 where an item is missing, to Arrow's validity bitmap in the same memory; returns the missing items.
int64_t pack_validity(uint8_t* missing, int64_t items) {
  if (items == 0 || memchr(missing, 1, static_cast<size_t>(items)) == nullptr) return 0;
  int64_t nulls = 0;
  const auto pack = [missing, &nulls](int64_t first, size_t count) {
    uint64_t word = 0;
    memcpy(&word, missing + first, count);
    // The product moves each byte's lowest bit to its position in the highest byte; no two bits collide.
    const uint64_t bits = word * 0x0102040810204080ULL >> 56;
    nulls += static_cast<int64_t>(word * 0x0101010101010101ULL >> 56);  // the sum of the bytes; a popcount is a call here
    missing[first / 8] = static_cast<uint8_t>(~bits);
  };
  int64_t first = 0;
  for (; first + 8 <= items; first += 8) pack(first, 8);
  if (first < items) pack(first, static_cast<size_t>(items - first));
  return nulls;
}

// (items, missing items, values, validity bitmap or None, offsets of the bytes of texts or None, offsets of the items of lists
// or None); for an array that lies in the memory of all rows, where it begins there.
nb::object column_tuple(FieldColumn& column, int64_t rows, int64_t nulls, char* memory) {
  if (column.layout.type == FieldType::skip) return nb::none();
  const int64_t items = column.num_items(rows);
  nb::object values = hand_over_values(column, items, memory);
  nb::object valid = nb::none();
  if (nulls > 0) valid = hand_over<uint8_t>(column.missing, (items + 7) / 8, memory);
  nb::object text_offsets = nb::none();
  if (column.layout.type == FieldType::text) text_offsets = hand_over<int64_t>(column.text_offsets, items + 1, memory);
  nb::object list_offsets = nb::none();
  if (column.layout.is_list()) list_offsets = hand_over<int64_t>(column.list_offsets, rows + 1, memory);
  return nb::make_tuple(items, nulls, values, valid, text_offsets, list_offsets);
}

nb::list fault_list(const std::vector<FieldFault>& faults) {
  nb::list listed;
  for (const FieldFault& fault : faults) {
    listed.append(nb::make_tuple(fault.line, static_cast<int>(fault.kind), fault.field, to_bytes(fault.bytes)));
  }
  return listed;
}

// (memory of all rows, columns, lines, rows found, rows kept, their positions or None, counts of faults by kind, first
// faults)
nb::tuple parse(Vector<const uint8_t> text, const DelimitedLayout& layout) {
  ParsedText parsed;
  std::vector<int64_t> nulls;
  {
    nb::gil_scoped_release release;
    parsed = parse_delimited(reinterpret_cast<const char*>(text.data()), length(text), layout);
    for (FieldColumn& column : parsed.columns) {
      const bool skipped = column.layout.type == FieldType::skip;
      nulls.push_back(skipped ? 0 : pack_validity(column.missing.data(), column.num_items(parsed.rows)));
    }
  }
  nb::list columns;
  for (size_t field = 0; field < parsed.columns.size(); ++field) {
    columns.append(column_tuple(parsed.columns[field], parsed.rows, nulls[field], parsed.memory.begin()));
  }
  nb::object positions = nb::none();
  if (parsed.rows != parsed.rows_found) positions = own_memory(parsed.positions.release(), parsed.rows);
  nb::list counts;
  for (const int64_t count : parsed.fault_counts) counts.append(count);
  const int64_t used = parsed.memory.used();
  return nb::make_tuple(own_memory(reinterpret_cast<uint8_t*>(parsed.memory.release()), used), columns, parsed.lines,
                        parsed.rows_found, parsed.rows, positions, counts, fault_list(parsed.first_faults));
}

// (lines, rows, bytes of the complete records)
nb::tuple bind_count_rows(Vector<const uint8_t> text, const Quoting& quoting) {
  RecordCount count;
  {
    nb::gil_scoped_release release;
    count = count_rows(reinterpret_cast<const char*>(text.data()), length(text), quoting);
  }
  return nb::make_tuple(count.lines, count.rows, count.complete);
}

int64_t bind_first_record_bytes(Vector<const uint8_t> text, const Quoting& quoting) {
  return first_record_bytes(reinterpret_cast<const char*>(text.data()), length(text), quoting);
}

std::vector<int64_t> bind_lines_of_rows(Vector<const uint8_t> text, const Quoting& quoting) {
  return lines_of_rows(reinterpret_cast<const char*>(text.data()), length(text), quoting);
}

}  // namespace

void bind_delimited(nb::module_& module) {
  nb::class_<DelimitedLayout>(module, "DelimitedLayout")
      .def("__init__", &make_layout, nb::arg("types"), nb::arg("separators"), nb::arg("delimiter"), nb::arg("quote"),
           nb::arg("trim"), nb::arg("trim_quoted"), nb::arg("missing"), nb::arg("policy"), nb::arg("max_line_bytes"));
  nb::class_<Quoting>(module, "Quoting")
      .def("__init__",
           [](Quoting* self, nb::bytes delimiter, bool quote, bool trim) {
             new (self) Quoting{to_string(delimiter), quote, trim};
           },
           nb::arg("delimiter"), nb::arg("quote"), nb::arg("trim"));
  module.def("count_rows", &bind_count_rows, nb::arg("text"), nb::arg("quoting"));
  module.def("first_record_bytes", &bind_first_record_bytes, nb::arg("text"), nb::arg("quoting"));
  module.def("lines_of_rows", &bind_lines_of_rows, nb::arg("text"), nb::arg("quoting"));
  module.def("parse_delimited", &parse, nb::arg("text"), nb::arg("layout"));
}

}  // namespace terarec::encoding
