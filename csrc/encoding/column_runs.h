// Columns side by side of one type, read word by word in their usual form. What has another form is left to FieldSplitter
// and store_field, so that these loops decide about speed alone.
#pragma once

#include <cstdint>
#include <cstring>

#include "encoding/field_column.h"
#include "encoding/hex.h"
#include "encoding/short_integer.h"

namespace terarec::encoding {

// Where a line is being read. Sixteen bytes from `end` on must be readable.
struct LinePosition {
  const char* cursor;  // the next field; end + 1 or more if there is none
  const char* end;
  int64_t row;  // to store its values in
  char delimiter;
};

// Each of these stores the fields of columns[first], ... up to columns[stop - 1] and returns the position of the first that
// it leaves untouched.

// Integers of up to seven digits, or nothing.
inline int take_integers(FieldColumn* columns, int first, int stop, LinePosition& line) {
  const LinePosition at = line;
  const char* cursor = line.cursor;
  for (; first < stop; ++first) {
    const ShortInteger found = read_short_integer(cursor, at.delimiter);
    if (!found.good || found.stop >= at.end) break;
    FieldColumn& column = columns[first];
    column.values_as<int64_t>()[at.row] = found.value;
    column.missing[at.row] = found.empty;
    cursor = found.stop + 1;
  }
  line.cursor = cursor;
  return first;
}

// Eight hexadecimal digits, or nothing.
inline int take_hex32s(FieldColumn* columns, int first, int stop, LinePosition& line) {
  const LinePosition at = line;
  const char* cursor = line.cursor;
  for (; first < stop && cursor <= at.end; ++first) {
    FieldColumn& column = columns[first];
    uint32_t& value = column.values_as<uint32_t>()[at.row];
    if (*cursor == at.delimiter || cursor == at.end) {
      value = 0;
      column.missing[at.row] = 1;
      ++cursor;
      continue;
    }
    const uint64_t word = load_word(cursor);
    const int64_t left = at.end - cursor;
    if (left < 8 || (cursor[8] != at.delimiter && left > 8) || !is_hex_word(word)) break;
    value = hex_word_value(word);
    cursor += 9;
  }
  line.cursor = cursor;
  return first;
}

// ASCII text of up to fifteen bytes.
inline int take_short_texts(FieldColumn* columns, int first, int stop, LinePosition& line) {
  constexpr int64_t kCopied = 16;
  const LinePosition at = line;
  const char* cursor = line.cursor;
  for (; first < stop && cursor <= at.end; ++first) {
    int64_t length = first_in_word(load_word(cursor), at.delimiter);
    if (length == 8) length += first_in_word(load_word(cursor + 8), at.delimiter);
    if (length == kCopied || cursor + length >= at.end) break;
    FieldColumn& column = columns[first];
    int64_t* offsets = column.text_offsets.data() + at.row;
    column.values.reserve(offsets[0] + kCopied);
    memcpy(column.values.data() + offsets[0], cursor, kCopied);
    offsets[1] = offsets[0] + length;
    column.missing[at.row] = length == 0;
    cursor += length + 1;
  }
  line.cursor = cursor;
  return first;
}

}  // namespace terarec::encoding
