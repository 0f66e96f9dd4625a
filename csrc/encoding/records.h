// SPDX-License-Identifier: Apache-2.0

// The records of delimited text, which end at a line end outside of quotes (RFC 4180), and their fields.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "encoding/fields.h"

namespace terarec::encoding {

inline bool is_space(char byte) { return byte == ' ' || (byte >= '\t' && byte <= '\r'); }

inline std::string_view trimmed(std::string_view text) {
  while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
  return text;
}

// Fields of records whose quotes RecordScanner accepted.
class FieldSplitter {
 public:
  FieldSplitter(const std::string& delimiter, bool quote, bool trim, bool trim_quoted)
      : delimiter_(delimiter), quote_(quote), trim_(trim), trim_quoted_(trim_quoted) {}

  // The content of the field at `cursor`, without quotes and, if trimmed, the white space around; valid until the next
  // field. Moves `cursor` past the delimiter, or past `end` after the last field. Reads up to eight bytes
  // from `end` on.
  std::string_view next(const char*& cursor, const char* end) const {
    if (quote_) {
      const char* first = cursor;
      while (trim_ && first < end && is_space(*first) && !at_delimiter(first, end)) ++first;
      if (first < end && *first == '"') {
        cursor = first + 1;
        const std::string_view content = next_quoted(cursor, end);
        return trim_quoted_ ? trimmed(content) : content;
      }
    }
    const char* stop = find(cursor, end);
    const std::string_view content(cursor, static_cast<size_t>(stop - cursor));
    cursor = behind(stop, end);
    return trim_ ? trimmed(content) : content;
  }

  int count_fields(const char* cursor, const char* end) const {
    int fields = 0;
    for (; cursor <= end; ++fields) next(cursor, end);
    return fields;
  }

  bool at_delimiter(const char* at, const char* end) const {
    return end - at >= static_cast<ptrdiff_t>(delimiter_.size()) && memcmp(at, delimiter_.data(), delimiter_.size()) == 0;
  }

 private:
  std::string_view next_quoted(const char*& cursor, const char* end) const;

  const char* behind(const char* stop, const char* end) const {
    return stop < end ? stop + delimiter_.size() : end + 1;
  }
  // The first delimiter in [begin, end), or `end`.
  const char* find(const char* begin, const char* end) const {
    if (delimiter_.size() != 1) {
      const std::string_view rest(begin, static_cast<size_t>(end - begin));
      const size_t at = rest.find(delimiter_);
      return at == std::string_view::npos ? end : begin + at;
    }
    // Most fields are short: two words spare the call of memchr.
    const char mark = delimiter_[0];
    for (int words = 0; words < 2 && begin < end; ++words, begin += 8) {
      const int position = first_in_word(load_word(begin), mark);
      if (position < 8) return begin + position < end ? begin + position : end;
    }
    if (begin >= end) return end;
    const void* found = memchr(begin, mark, static_cast<size_t>(end - begin));
    return found != nullptr ? static_cast<const char*>(found) : end;
  }

  const std::string& delimiter_;
  const bool quote_;
  const bool trim_;
  const bool trim_quoted_;
  mutable std::string unquoted_;
};

// `cursor` is after the opening quote. Two quotes inside mean one.
inline std::string_view FieldSplitter::next_quoted(const char*& cursor, const char* end) const {
  const char* begin = cursor;
  unquoted_.clear();
  const char* part = begin;
  for (;;) {
    const char* quote = static_cast<const char*>(memchr(part, '"', static_cast<size_t>(end - part)));
    if (quote == nullptr) quote = end;
    if (end - quote < 2 || quote[1] != '"') {
      const bool doubled = part != begin;
      if (doubled) unquoted_.append(part, quote);
      cursor = behind(find(std::min(quote + 1, end), end), end);
      return doubled ? std::string_view(unquoted_) : std::string_view(begin, static_cast<size_t>(quote - begin));
    }
    unquoted_.append(part, quote + 1);
    part = quote + 2;
  }
}

// How fields are separated and quoted; kernels/cpu/delimited.py says what the fields mean.
struct Quoting {
  std::string delimiter;
  bool quote;
  bool trim;
};

struct Record {
  const char* begin;
  const char* end;           // without its line end
  const char* next;          // behind its line end
  int64_t lines;             // that it takes
  bool complete;             // it has a line end
  int64_t bad_field = -1;    // the first field whose quotes are wrong: its position, and what it holds
  std::string_view bad_text = {};
};

// Records one after another. Text without quotes costs one more search for a quote, whatever the number of lines.
class RecordScanner {
 public:
  RecordScanner(const Quoting& quoting, const char* data, int64_t size)
      : quoting_(quoting), splitter_(quoting.delimiter, quoting.quote, quoting.trim, false), cursor_(data), end_(data + size) {
    quote_ = quoting.quote ? find_quote(data) : end_;
  }

  bool done() const { return cursor_ >= end_; }

  Record next() {
    Record record{cursor_, line_end(cursor_), end_, 1, false};
    if (quote_ < cursor_) quote_ = find_quote(cursor_);
    const char* stop = record.end;
    if (quote_ < stop) stop = walk(record);
    record.complete = stop < end_;
    record.next = record.complete ? stop + 1 : end_;
    record.end = without_return(record.begin, stop);
    cursor_ = record.next;
    return record;
  }

 private:
  const char* find(const char* begin, const char* end, char mark) const {
    const void* found = memchr(begin, mark, static_cast<size_t>(end - begin));
    return found != nullptr ? static_cast<const char*>(found) : end;
  }
  const char* find_quote(const char* begin) const { return find(begin, end_, '"'); }
  const char* line_end(const char* begin) const { return find(begin, end_, '\n'); }
  static const char* without_return(const char* begin, const char* stop) {
    return stop > begin && stop[-1] == '\r' ? stop - 1 : stop;
  }

  // The line end of a record that holds a quote, or the end of the text; takes note of what is wrong.
  const char* walk(Record& record) const {
    const char* stop = record.end;
    const char* cursor = record.begin;
    for (int64_t field = 0;; ++field) {
      const char* bound = without_return(cursor, stop);
      const char* first = cursor;
      while (quoting_.trim && first < bound && is_space(*first) && !splitter_.at_delimiter(first, bound)) ++first;
      const char* field_end;
      if (first < bound && *first == '"') {
        const char* closed = behind_quote(first + 1);
        if (closed == nullptr) {
          note(record, field, first, end_);
          stop = end_;
          break;
        }
        if (closed > stop) {
          stop = line_end(closed);
          bound = without_return(closed, stop);
        }
        field_end = closed;
        while (quoting_.trim && field_end < bound && is_space(*field_end) && !splitter_.at_delimiter(field_end, bound)) {
          ++field_end;
        }
        if (field_end < bound && !splitter_.at_delimiter(field_end, bound)) {
          field_end = delimiter(field_end, bound);
          note(record, field, first, field_end);
        }
      } else {
        field_end = delimiter(cursor, bound);
      }
      if (field_end >= bound) break;
      cursor = field_end + quoting_.delimiter.size();
    }
    if (stop != record.end) record.lines = 1 + std::count(record.begin, stop, '\n');
    return stop;
  }

  // Behind the quote that closes the field whose content begins at `begin`; nullptr if there is none.
  const char* behind_quote(const char* begin) const {
    for (;;) {
      const char* found = find_quote(begin);
      if (found == end_) return nullptr;
      if (end_ - found < 2 || found[1] != '"') return found + 1;
      begin = found + 2;
    }
  }

  const char* delimiter(const char* begin, const char* end) const {
    if (quoting_.delimiter.size() == 1) return find(begin, end, quoting_.delimiter[0]);
    const size_t at = std::string_view(begin, static_cast<size_t>(end - begin)).find(quoting_.delimiter);
    return at == std::string_view::npos ? end : begin + at;
  }

  static void note(Record& record, int64_t field, const char* begin, const char* end) {
    if (record.bad_field >= 0) return;
    record.bad_field = field;
    record.bad_text = {begin, static_cast<size_t>(end - begin)};
  }

  const Quoting& quoting_;
  const FieldSplitter splitter_;
  const char* cursor_;
  const char* end_;
  const char* quote_;
};

}  // namespace terarec::encoding
