#include "encoding/bind_delimited.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <string>

#include "encoding/delimited.h"
#include "encoding/numpy_arrays.h"

namespace terarec::encoding {
namespace {

std::string to_string(nb::bytes text) { return {text.c_str(), text.size()}; }

nb::bytes to_bytes(const std::string& text) { return nb::bytes(text.data(), text.size()); }

void make_layout(DelimitedLayout* self, const std::vector<int>& types, const std::vector<nb::bytes>& separators,
                 nb::bytes delimiter, bool quote, bool trim, const std::vector<nb::bytes>& missing, int policy,
                 int64_t max_line_bytes) {
  DelimitedLayout layout{{}, to_string(delimiter), quote, trim, {}, static_cast<Policy>(policy), max_line_bytes};
  require(!types.empty() && types.size() == separators.size(), "expected one type and one separator a field");
  require(!layout.delimiter.empty(), "expected a delimiter");
  require(policy >= 0 && policy <= static_cast<int>(Policy::missing), "unknown policy");
  for (size_t field = 0; field < types.size(); ++field) {
    require(types[field] >= 0 && types[field] <= static_cast<int>(FieldType::hex32), "unknown type of a field");
    layout.fields.push_back({static_cast<FieldType>(types[field]), to_string(separators[field])});
  }
  for (const nb::bytes& word : missing) layout.missing.push_back(to_string(word));
  new (self) DelimitedLayout(std::move(layout));
}

nb::object values_array(FieldColumn& column, int64_t items) {
  char* memory = column.values.release();
  switch (column.layout.type) {
    case FieldType::integer:
      return own_memory(reinterpret_cast<int64_t*>(memory), items);
    case FieldType::number:
      return own_memory(reinterpret_cast<double*>(memory), items);
    case FieldType::hex32:
      return own_memory(reinterpret_cast<uint32_t*>(memory), items);
    default:
      return own_memory(reinterpret_cast<uint8_t*>(memory), column.text_offsets[items]);
  }
}

// (values, missing or None, offsets of the bytes of texts or None, offsets of the items of lists or None)
nb::object column_tuple(FieldColumn& column, int64_t rows) {
  if (column.layout.type == FieldType::skip) return nb::none();
  const bool is_list = column.layout.is_list();
  const int64_t items = is_list ? column.list_offsets[rows] : rows;
  const bool any_missing = items > 0 && memchr(column.missing.data(), 1, static_cast<size_t>(items)) != nullptr;
  nb::object values = values_array(column, items);
  nb::object missing = nb::none();
  if (any_missing) missing = own_memory(reinterpret_cast<bool*>(column.missing.release()), items);
  nb::object text_offsets = nb::none();
  if (column.layout.type == FieldType::text) text_offsets = own_memory(column.text_offsets.release(), items + 1);
  nb::object list_offsets = nb::none();
  if (is_list) list_offsets = own_memory(column.list_offsets.release(), rows + 1);
  return nb::make_tuple(values, missing, text_offsets, list_offsets);
}

nb::list fault_list(const std::vector<FieldFault>& faults) {
  nb::list listed;
  for (const FieldFault& fault : faults) {
    listed.append(nb::make_tuple(fault.line, static_cast<int>(fault.kind), fault.field, to_bytes(fault.bytes)));
  }
  return listed;
}

// (columns, lines, rows found, positions of the kept rows or None, counts of faults by kind, first faults)
nb::tuple parse(Vector<const uint8_t> text, const DelimitedLayout& layout) {
  ParsedText parsed;
  {
    nb::gil_scoped_release release;
    parsed = parse_delimited(reinterpret_cast<const char*>(text.data()), length(text), layout);
  }
  nb::list columns;
  for (FieldColumn& column : parsed.columns) columns.append(column_tuple(column, parsed.rows));
  nb::object positions = nb::none();
  if (parsed.rows != parsed.rows_found) positions = own_memory(parsed.positions.release(), parsed.rows);
  nb::list counts;
  for (const int64_t count : parsed.fault_counts) counts.append(count);
  return nb::make_tuple(columns, parsed.lines, parsed.rows_found, positions, counts, fault_list(parsed.first_faults));
}

nb::tuple bind_count_rows(Vector<const uint8_t> text) {
  LineCount count;
  {
    nb::gil_scoped_release release;
    count = count_rows(reinterpret_cast<const char*>(text.data()), length(text));
  }
  return nb::make_tuple(count.lines, count.rows);
}

}  // namespace

void bind_delimited(nb::module_& module) {
  nb::class_<DelimitedLayout>(module, "DelimitedLayout")
      .def("__init__", &make_layout, nb::arg("types"), nb::arg("separators"), nb::arg("delimiter"), nb::arg("quote"),
           nb::arg("trim"), nb::arg("missing"), nb::arg("policy"), nb::arg("max_line_bytes"));
  module.def("count_rows", &bind_count_rows, nb::arg("text"));
  module.def("parse_delimited", &parse, nb::arg("text"), nb::arg("layout"));
}

}  // namespace terarec::encoding
