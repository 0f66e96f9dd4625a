// SPDX-License-Identifier: Apache-2.0
#include "encoding/delimited.h"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "encoding/field_column.h"
#include "encoding/records.h"
#include "encoding/fields.h"

namespace terarec::encoding {
namespace {

// Bytes behind the end of a line that must be readable: the word-wise loops look that far.
constexpr int64_t kPadding = 32;

// Columns side by side that are read in one way.
struct Run {
  enum class Kind { integers, hex32s, short_texts, any };
  Kind kind;
  int first;
  int stop;
};

// Whether a field that looks like an integer or a hexadecimal value is one: no word for a missing value looks so.
bool values_are_plain(const DelimitedLayout& layout) {
  const char mark = layout.quoting.delimiter[0];
  const bool letter = (mark >= '0' && mark <= '9') || ((mark | 0x20) >= 'a' && (mark | 0x20) <= 'z');
  if (layout.quoting.delimiter.size() != 1 || letter || mark == '-') return false;
  return std::none_of(layout.missing.begin(), layout.missing.end(), [](const std::string& word) {
    int64_t integer;
    uint32_t value;
    const char* end = word.data() + word.size();
    return read_integer(word.data(), end, integer) == Fault::none || parse_hex(word.data(), end, value);
  });
}

// Whether the bytes between two delimiters are the text itself, without quotes or trimming.
bool texts_are_plain(const DelimitedLayout& layout) {
  return layout.quoting.delimiter.size() == 1 && !layout.quoting.quote && !layout.quoting.trim &&
         std::all_of(layout.missing.begin(), layout.missing.end(), [](const std::string& word) { return word.empty(); });
}

std::vector<Run> make_runs(const DelimitedLayout& layout, bool ascii) {
  const bool plain_values = values_are_plain(layout);
  const bool plain_texts = ascii && texts_are_plain(layout);
  std::vector<Run> runs;
  for (int column = 0; column < static_cast<int>(layout.fields.size()); ++column) {
    const FieldLayout& field = layout.fields[static_cast<size_t>(column)];
    const bool single = !field.is_list();
    Run::Kind kind = Run::Kind::any;
    if (single && plain_values && field.type == FieldType::integer) kind = Run::Kind::integers;
    if (single && plain_values && field.type == FieldType::hex32) kind = Run::Kind::hex32s;
    if (single && plain_texts && field.type == FieldType::text) kind = Run::Kind::short_texts;
    if (runs.empty() || runs.back().kind != kind) runs.push_back({kind, column, column});
    runs.back().stop = column + 1;
  }
  return runs;
}

bool any_text(const DelimitedLayout& layout) {
  return std::any_of(layout.fields.begin(), layout.fields.end(),
                     [](const FieldLayout& field) { return field.type == FieldType::text; });
}

// A record that is not empty, and the line in which it begins.
struct Line {
  const char* begin;
  const char* end;
  int64_t number;
};

class Parser {
 public:
  Parser(const DelimitedLayout& layout, const char* data, int64_t size);
  ParsedText parse();

 private:
  bool parse_line(const char* begin, const char* end);
  bool parse_fields(LinePosition& line);
  bool take_field(LinePosition& line, int column);
  bool report(Fault kind, int64_t field, std::string_view bytes);
  bool report_field(Fault kind, int column, const std::string& bytes);
  void report_quotes();
  std::string_view line() const { return {line_, static_cast<size_t>(line_end_ - line_)}; }

  const DelimitedLayout& layout_;
  const FieldSplitter splitter_;
  const char* data_;
  const char* data_end_;
  const bool ascii_;
  const ContentRules rules_;
  const int num_fields_;
  const std::vector<Run> runs_;
  std::vector<Line> lines_;
  Record badly_quoted_{};  // the last of `lines_`, if there is one
  int64_t num_lines_ = 0;
  ParsedText out_;
  const char* line_ = nullptr;
  const char* line_end_ = nullptr;
};

Parser::Parser(const DelimitedLayout& layout, const char* data, int64_t size)
    : layout_(layout),
      splitter_(layout.quoting.delimiter, layout.quoting.quote, layout.quoting.trim, layout.trim_quoted),
      data_(data),
      data_end_(data + size),
      ascii_(any_text(layout) && is_ascii(data, data + size)),
      rules_{layout.missing, layout.quoting.trim, !ascii_},
      num_fields_(static_cast<int>(layout.fields.size())),
      runs_(make_runs(layout, ascii_)) {
  for (RecordScanner records(layout.quoting, data, size); !records.done() && badly_quoted_.bad_field < 0;) {
    const Record record = records.next();
    if (record.end > record.begin) lines_.push_back({record.begin, record.end, num_lines_});
    if (record.bad_field >= 0) badly_quoted_ = record;
    num_lines_ += record.lines;
  }
  const auto rows = static_cast<int64_t>(lines_.size());
  out_.positions.reserve(rows);
  int64_t bytes = 0;
  for (const FieldLayout& field : layout.fields) bytes += RowMemory::bytes_of(field, rows);
  out_.memory = RowMemory(bytes);
  for (const FieldLayout& field : layout.fields) out_.columns.push_back(make_column(field, rows, out_.memory));
}

ParsedText Parser::parse() {
  std::string padded;
  for (const Line& found : lines_) {
    const char* begin = found.begin;
    const char* end = found.end;
    out_.lines = found.number;
    if (badly_quoted_.bad_field >= 0 && &found == &lines_.back()) {
      report_quotes();
      return std::move(out_);
    }
    if (data_end_ - end < kPadding) {
      padded.assign(begin, end).append(kPadding, '\0');
      end = padded.data() + (end - begin);
      begin = padded.data();
    }
    const bool kept = parse_line(begin, end);
    if (!kept && layout_.policy == Policy::raise) return std::move(out_);
    if (kept) out_.positions[out_.rows++] = out_.rows_found;
    ++out_.rows_found;
  }
  out_.lines = num_lines_;
  return std::move(out_);
}

// Parses a line into row out_.rows; false drops it.
bool Parser::parse_line(const char* begin, const char* end) {
  line_ = begin;
  line_end_ = end;
  bool kept;
  if (end - begin > layout_.max_line_bytes) {
    for (FieldColumn& column : out_.columns) store_missing_field(column, out_.rows);
    kept = report(Fault::oversized_line, 0, line());
  } else {
    LinePosition position{begin, end, out_.rows, layout_.quoting.delimiter[0]};
    kept = parse_fields(position);
    if (kept && position.cursor <= end) kept = report(Fault::long_line, splitter_.count_fields(begin, end), line());
  }
  if (kept) return true;
  for (FieldColumn& column : out_.columns) forget_field(column, out_.rows);
  return false;
}

bool Parser::parse_fields(LinePosition& line) {
  FieldColumn* columns = out_.columns.data();
  for (const Run& run : runs_) {
    for (int column = run.first; column < run.stop; ++column) {
      if (run.kind == Run::Kind::integers) column = take_integers(columns, column, run.stop, line);
      if (run.kind == Run::Kind::hex32s) column = take_hex32s(columns, column, run.stop, line);
      if (run.kind == Run::Kind::short_texts) column = take_short_texts(columns, column, run.stop, line);
      if (column < run.stop && !take_field(line, column)) return false;
    }
  }
  return true;
}

// Takes the next field, whatever it is, or finds that there is none. False drops the line.
bool Parser::take_field(LinePosition& line, int column) {
  FieldColumn& out = out_.columns[static_cast<size_t>(column)];
  if (line.cursor > line.end) {
    store_missing_field(out, line.row);
    const bool first = line.cursor == line.end + 1;
    line.cursor = line.end + 2;
    return !first || report(Fault::short_line, column, this->line());
  }
  const std::string_view content = splitter_.next(line.cursor, line.end);
  const Fault fault = store_field(out, content, line.row, rules_);
  if (fault == Fault::none) return true;
  store_missing_field(out, line.row);
  return report_field(fault, column, std::string(content));
}

// Counts a fault; returns whether the line is kept all the same.
bool Parser::report(Fault kind, int64_t field, std::string_view bytes) {
  ++out_.fault_counts[static_cast<int>(kind)];
  if (out_.first_faults.size() < kFaultsKept) {
    out_.first_faults.push_back({out_.lines, kind, field, std::string(bytes.substr(0, kFaultBytesKept))});
  }
  return layout_.policy == Policy::missing;
}

// Counts the fault that ends the reading, whatever the policy.
void Parser::report_quotes() {
  ++out_.fault_counts[static_cast<int>(Fault::quote)];
  const std::string_view text = badly_quoted_.bad_text.substr(0, kFaultBytesKept);
  out_.first_faults.push_back({out_.lines, Fault::quote, badly_quoted_.bad_field, std::string(text)});
}

// As report; if the line will be dropped and has too few or too many fields, that fault is reported instead.
bool Parser::report_field(Fault kind, int column, const std::string& bytes) {
  if (layout_.policy != Policy::missing) {
    const int found = splitter_.count_fields(line_, line_end_);
    if (found != num_fields_) return report(found < num_fields_ ? Fault::short_line : Fault::long_line, found, line());
  }
  return report(kind, column, bytes);
}

}  // namespace

RecordCount count_rows(const char* data, int64_t size, const Quoting& quoting) {
  RecordCount count;
  for (RecordScanner records(quoting, data, size); !records.done();) {
    const Record record = records.next();
    count.lines += record.lines;
    count.rows += record.end > record.begin;
    if (record.complete) count.complete = record.next - data;
  }
  return count;
}

int64_t first_record_bytes(const char* data, int64_t size, const Quoting& quoting) {
  RecordScanner records(quoting, data, size);
  return records.done() ? 0 : records.next().next - data;
}

std::vector<int64_t> lines_of_rows(const char* data, int64_t size, const Quoting& quoting) {
  std::vector<int64_t> lines;
  int64_t line = 0;
  for (RecordScanner records(quoting, data, size); !records.done();) {
    const Record record = records.next();
    if (record.end > record.begin) lines.push_back(line);
    line += record.lines;
  }
  return lines;
}

ParsedText parse_delimited(const char* data, int64_t size, const DelimitedLayout& layout) {
  return Parser(layout, data, size).parse();
}

}  // namespace terarec::encoding
