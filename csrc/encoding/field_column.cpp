// SPDX-License-Identifier: Apache-2.0
#include "encoding/field_column.h"

#include <algorithm>
#include <limits>

#include "common/bytes.h"
#include "encoding/records.h"
#include "encoding/fields.h"

namespace terarec::encoding {
namespace {

int64_t value_bytes(FieldType type) {
  switch (type) {
    case FieldType::integer:
    case FieldType::number:
      return 8;
    case FieldType::hex32:
      return 4;
    default:
      return 0;
  }
}

// Rounds up to whole cache lines, so that every array begins with one.
int64_t whole_lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

void reserve_items(FieldColumn& column, int64_t items) {
  column.values.reserve(items * value_bytes(column.layout.type));
  column.missing.reserve(items);
  if (column.layout.type == FieldType::text) column.text_offsets.reserve(items + 1);
}

Fault store_text(FieldColumn& column, std::string_view content, int64_t item, bool check_utf8) {
  if (check_utf8 && !is_utf8(content.data(), content.data() + content.size())) return Fault::utf8;
  const int64_t begin = column.text_offsets[item];
  const int64_t end = begin + static_cast<int64_t>(content.size());
  column.values.reserve(end);
  copy_bytes(column.values.data() + begin, content.data(), content.size());
  column.text_offsets[item + 1] = end;
  return Fault::none;
}

Fault store_item(FieldColumn& column, std::string_view content, int64_t item, bool check_utf8) {
  const char* begin = content.data();
  const char* end = begin + content.size();
  switch (column.layout.type) {
    case FieldType::integer:
      return read_integer(begin, end, column.values_as<int64_t>()[item]);
    case FieldType::number: {
      double& value = column.values_as<double>()[item];
      const Fault fault = read_number(begin, end, value);
      column.missing[item] = value != value;
      return fault;
    }
    case FieldType::hex32:
      return parse_hex(begin, end, column.values_as<uint32_t>()[item]) ? Fault::none : Fault::hex;
    default:
      return store_text(column, content, item, check_utf8);
  }
}

void store_missing_item(FieldColumn& column, int64_t item) {
  column.missing[item] = 1;
  switch (column.layout.type) {
    case FieldType::integer:
      column.values_as<int64_t>()[item] = 0;
      break;
    case FieldType::number:
      column.values_as<double>()[item] = std::numeric_limits<double>::quiet_NaN();
      break;
    case FieldType::hex32:
      column.values_as<uint32_t>()[item] = 0;
      break;
    default:
      column.text_offsets[item + 1] = column.text_offsets[item];
  }
}

Fault store_list(FieldColumn& column, std::string_view content, int64_t row, const ContentRules& rules) {
  const std::string& separator = column.layout.separator;
  int64_t item = column.list_offsets[row];
  for (size_t begin = 0; begin <= content.size(); ++item) {
    const size_t stop = std::min(content.find(separator, begin), content.size());
    std::string_view part = content.substr(begin, stop - begin);
    if (rules.trim_items) part = trimmed(part);
    reserve_items(column, item + 1);
    column.missing[item] = 0;
    if (rules.is_missing(part)) {
      store_missing_item(column, item);
    } else if (const Fault fault = store_item(column, part, item, rules.check_utf8); fault != Fault::none) {
      return fault;
    }
    begin = stop == content.size() ? stop + 1 : stop + separator.size();
  }
  column.list_offsets[row + 1] = item;
  return Fault::none;
}

}  // namespace

bool ContentRules::is_missing(std::string_view content) const {
  if (content.empty()) return true;
  for (const std::string& word : missing_words) {
    if (content == word) return true;
  }
  return false;
}

int64_t RowMemory::bytes_of(const FieldLayout& layout, int64_t rows) {
  if (layout.type == FieldType::skip) return 0;
  if (layout.is_list()) return whole_lines((rows + 1) * 8);
  const int64_t offsets = layout.type == FieldType::text ? whole_lines((rows + 1) * 8) : 0;
  return whole_lines(rows * value_bytes(layout.type)) + whole_lines(rows) + offsets;
}

char* RowMemory::take(int64_t bytes) {
  char* taken = memory_.data() + used_;
  used_ += whole_lines(bytes);
  return taken;
}

FieldColumn make_column(const FieldLayout& layout, int64_t rows, RowMemory& memory) {
  FieldColumn column{layout, {}, {}, {}, {}};
  if (layout.type == FieldType::skip) return column;
  if (layout.is_list()) {
    column.list_offsets.borrow(memory.take((rows + 1) * 8), rows + 1);
    column.list_offsets[0] = 0;
    reserve_items(column, rows);
  } else {
    const int64_t bytes = rows * value_bytes(layout.type);
    if (bytes > 0) column.values.borrow(memory.take(bytes), bytes);
    column.missing.borrow(memory.take(rows), rows);
    if (layout.type == FieldType::text) column.text_offsets.borrow(memory.take((rows + 1) * 8), rows + 1);
    std::fill_n(column.missing.data(), rows, uint8_t{0});
  }
  if (layout.type == FieldType::text) column.text_offsets[0] = 0;
  return column;
}

Fault store_field(FieldColumn& column, std::string_view content, int64_t row, const ContentRules& rules) {
  if (column.layout.type == FieldType::skip) return Fault::none;
  if (rules.is_missing(content)) {
    store_missing_field(column, row);
    return Fault::none;
  }
  if (column.layout.is_list()) return store_list(column, content, row, rules);
  return store_item(column, content, row, rules.check_utf8);
}

void store_missing_field(FieldColumn& column, int64_t row) {
  if (column.layout.type == FieldType::skip) return;
  if (column.layout.is_list()) {
    column.list_offsets[row + 1] = column.list_offsets[row];
  } else {
    store_missing_item(column, row);
  }
}

void forget_field(FieldColumn& column, int64_t row) {
  if (column.layout.type != FieldType::skip && !column.layout.is_list()) column.missing[row] = 0;
}

}  // namespace terarec::encoding
