// SPDX-License-Identifier: Apache-2.0

// Delimited text -> columns.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "encoding/field_column.h"
#include "encoding/fields.h"
#include "encoding/records.h"

namespace terarec::encoding {

enum class Policy : int { raise, skip, missing };

// kernels/cpu/delimited.py describes the fields.
struct DelimitedLayout {
  std::vector<FieldLayout> fields;
  Quoting quoting;
  bool trim_quoted;
  std::vector<std::string> missing;
  Policy policy;
  int64_t max_line_bytes;
};

// One fault: `field` is its position, or the number of fields if that is wrong; `bytes` is the beginning of the text
// there.
struct FieldFault {
  int64_t line;
  Fault kind;
  int64_t field;
  std::string bytes;
};

struct ParsedText {
  RowMemory memory;
  std::vector<FieldColumn> columns;
  int64_t lines = 0;                // line ends, plus one for a last line without
  int64_t rows_found = 0;           // records that are not empty
  int64_t rows = 0;                 // those of them that were kept
  GrowingArray<int64_t> positions;  // of the kept rows among the found ones
  int64_t fault_counts[kFaults] = {};
  std::vector<FieldFault> first_faults;
};

constexpr int kFaultsKept = 10;  // and one more of Fault::quote
constexpr int64_t kFaultBytesKept = 80;

struct RecordCount {
  int64_t lines = 0;      // line ends, plus one for a last line without
  int64_t rows = 0;       // records that hold more than their end
  int64_t complete = 0;   // bytes to the end of the last record that has a line end
};
RecordCount count_rows(const char* data, int64_t size, const Quoting& quoting);

// The bytes of the first record, its line end included.
int64_t first_record_bytes(const char* data, int64_t size, const Quoting& quoting);

// The lines, from 0, in which the records begin that are not empty.
std::vector<int64_t> lines_of_rows(const char* data, int64_t size, const Quoting& quoting);

// Parses data[0, size) and reads nothing outside. Lines end in \n or \r\n. With Policy::raise it stops at the first fault,
// and always at Fault::quote: behind an invalid quote it is unknown where rows begin.
ParsedText parse_delimited(const char* data, int64_t size, const DelimitedLayout& layout);

}  // namespace terarec::encoding
