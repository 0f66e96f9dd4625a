// SPDX-License-Identifier: Apache-2.0

// Prints what the parser, the counters, the id tables and the row file make of generated data, as digests: lines of
// "data <case> <digest>". Its argument is an empty directory for a row file, or with "read" behind it the directory of one
// that another run has written. test_aarch64.py compares two processors.

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "encoding/columns.h"
#include "encoding/counts.h"
#include "encoding/delimited.h"
#include "encoding/id_tables.h"
#include "encoding/xxh64.h"
#include "rowfile/crc32c.h"
#include "rowfile/row_file.h"

#include "check_digest.h"

using namespace terarec;

namespace {

constexpr int64_t kRows = 20000;

void print(const Digest& digest, const char* what) { digest.print("data", what); }

// Rows of an integer, a number, eight hexadecimal digits, a text and a list; some fields are empty, quoted or invalid.
std::string raw_log(bool quote) {
  Random random(quote ? 1 : 2);
  std::string log;
  char field[64];
  for (int64_t row = 0; row < kRows; row++) {
    const int64_t kind = random.below(40);
    const int64_t integer = kind == 0 ? random.below(INT64_MAX) : random.below(2000000) - 1000000;
    log += kind == 1 ? "" : kind == 2 ? "12x" : std::to_string(integer);
    log += ',';
    const double number = random.number() * 1e3;
    snprintf(field, sizeof field, random.below(2) ? "%.17g" : "%.3f", number);
    log += kind == 3 ? "1e-400" : kind == 4 ? "inf" : kind == 5 ? "" : field;
    log += ',';
    snprintf(field, sizeof field, "%08x", static_cast<unsigned>(random.below(5000) * 0x9E3779B1));
    log += kind == 6 ? "" : kind == 7 ? "xyz" : field;
    log += ',';
    std::string text = "text " + std::to_string(random.below(3000));
    if (kind == 8) text += " of more than fifteen bytes, \xc3\xa9";
    const bool is_quoted = quote && random.below(3) == 0;
    log += is_quoted ? "\"" + text + " \"\"quoted\"\", with\na line end\"" : kind == 9 ? "\xff" : text.substr(0, text.find(','));
    log += ',';
    for (int64_t item = random.below(5); item > 0; item--) log += std::to_string(random.below(100)) + (item > 1 ? "|" : "");
    log += kind == 10 ? ",more" : "";
    log += random.below(2) ? "\n" : "\r\n";
  }
  return log;
}

void check_text(bool quote, encoding::Policy policy, const char* what) {
  using encoding::FieldType;
  const std::string log = raw_log(quote);
  const encoding::DelimitedLayout layout{
      {{FieldType::integer, ""}, {FieldType::number, ""}, {FieldType::hex32, ""}, {FieldType::text, ""},
       {FieldType::integer, "|"}},
      {",", quote, true}, true, {"NA", "?"}, policy, 1 << 20};
  encoding::ParsedText parsed = encoding::parse_delimited(log.data(), static_cast<int64_t>(log.size()), layout);
  Digest digest;
  const int64_t counts[] = {parsed.lines, parsed.rows_found, parsed.rows};
  digest.add(counts, sizeof counts);
  digest.add(parsed.fault_counts, sizeof parsed.fault_counts);
  for (const encoding::FieldFault& fault : parsed.first_faults) {
    const int64_t place[] = {fault.line, static_cast<int64_t>(fault.kind), fault.field};
    digest.add(place, sizeof place);
    digest.add(fault.bytes.data(), fault.bytes.size());
  }
  for (encoding::FieldColumn& column : parsed.columns) {
    const int64_t items = column.num_items(parsed.rows);
    const bool is_text = column.layout.type == FieldType::text;
    const int64_t bytes = is_text ? column.text_offsets[items] : items * (column.layout.type == FieldType::hex32 ? 4 : 8);
    for (int64_t item = 0; item < items; item++) digest.add(&column.missing[item], 1);
    if (is_text) digest.add(column.text_offsets.data(), sizeof(int64_t) * (items + 1));
    if (column.layout.is_list()) digest.add(column.list_offsets.data(), sizeof(int64_t) * (parsed.rows + 1));
    digest.add(column.values.data(), bytes);
  }
  print(digest, what);
  const encoding::RecordCount found = encoding::count_rows(log.data(), static_cast<int64_t>(log.size()), layout.quoting);
  Digest counted;
  counted.add(&found, sizeof found);
  counted.add(encoding::lines_of_rows(log.data(), static_cast<int64_t>(log.size()), layout.quoting));
  print(counted, (std::string(what) + "/records").c_str());
}

template <typename Counts, typename Ids>
void check_integers(const char* what) {
  using Value = typename Counts::Value;
  Random random(7);
  std::vector<Value> values(kRows);
  for (Value& value : values) value = static_cast<Value>(random.below(random.below(6000) + 1) * 0x9E3779B97F4A7C15);
  std::vector<uint8_t> valid(kRows / 8 + 1);
  for (uint8_t& byte : valid) byte = static_cast<uint8_t>(random.bits() | random.bits());
  const encoding::MissingMask missing{valid.data()};
  Counts counts;
  counts.add(values.data(), missing, nullptr, kRows);
  Digest digest;
  std::vector<Value> kept;
  for (const auto& entry : counts.at_least(3)) {
    digest.add(&entry.value, sizeof entry.value);
    digest.add(&entry.count, sizeof entry.count);
    kept.push_back(entry.value);
  }
  for (const int64_t buckets : {1, 1000}) {
    const Ids ids(kept.data(), static_cast<int64_t>(kept.size()), buckets);
    std::vector<int64_t> found(kRows);
    ids.find_all(values.data(), missing, kRows, found.data());
    digest.add(found);
  }
  print(digest, what);
}

void check_texts() {
  Random random(9);
  std::string text;
  std::vector<int64_t> offsets{0};
  for (int64_t row = 0; row < kRows; row++) {
    for (int64_t part = random.below(7); part > 0; part--) text += std::to_string(random.below(4)) + "-";
    offsets.push_back(static_cast<int64_t>(text.size()));
  }
  encoding::TextCounts counts;
  counts.add(text.data(), offsets.data(), {nullptr}, nullptr, kRows);
  const encoding::CountedTexts kept = counts.at_least(2);
  Digest digest;
  digest.add(kept.bytes.data(), kept.bytes.size());
  digest.add(kept.offsets);
  digest.add(kept.counts);
  const encoding::TextIds ids(kept.bytes.data(), kept.offsets.data(), static_cast<int64_t>(kept.counts.size()), 500);
  std::vector<int32_t> found(kRows);
  ids.find_all(text.data(), offsets.data(), {nullptr}, kRows, found.data());
  digest.add(found);
  print(digest, "texts");
}

void check_columns() {
  Random random(11);
  std::vector<float> floats(kRows), rows(kRows * 4);
  std::vector<double> doubles(kRows);
  std::vector<int64_t> longs(kRows), keys(kRows);
  std::vector<int32_t> ints(kRows);
  for (int64_t row = 0; row < kRows; row++) {
    floats[row] = random.number();
    doubles[row] = random.number() * 1e-40 / 3;
    longs[row] = static_cast<int64_t>(random.bits());
    ints[row] = static_cast<int32_t>(random.bits());
  }
  using encoding::NumberType;
  encoding::stack_columns({{floats.data(), NumberType::kFloat32, 1}, {doubles.data(), NumberType::kFloat64, 1},
                           {ints.data(), NumberType::kInt32, 1}, {longs.data(), NumberType::kInt64, 1}}, kRows, rows.data());
  encoding::copy_keys(ints.data(), kRows, 1000, keys.data());
  Digest digest;
  digest.add(rows);
  digest.add(keys);
  print(digest, "columns");
}

void check_checksums() {
  Random random(13);
  std::vector<uint8_t> bytes(5000);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.bits());
  for (const bool by_tables : {false, true}) {
    Digest digest;
    for (size_t size = 0; size < bytes.size(); size += 1 + size / 16) {
      const uint32_t sum = by_tables ? rowfile::crc32c_by_tables(bytes.data() + size % 9, size)
                                     : rowfile::crc32c(bytes.data() + size % 9, size);
      digest.add(&sum, sizeof sum);
    }
    print(digest, by_tables ? "crc32c/tables" : "crc32c");
  }
}

constexpr int64_t kRowBytes = 72, kKeys = 8192;

std::unique_ptr<rowfile::RowFile> open_store(const std::string& directory) {
  rowfile::RowFileOptions options;
  options.space_ratio = 0;  // compaction in the background would write segments at times of its own
  const auto fetcher = std::make_shared<rowfile::PageFetcher>(rowfile::Io::kThreads, 2, false, 1 << 20);
  return std::make_unique<rowfile::RowFile>(directory, rowfile::Layout(kRowBytes, 4096, 64), fetcher, options);
}

// Writes, overwrites and erases rows, with commits and a compaction.
void write_row_file(const std::string& directory) {
  constexpr int64_t batch = 3000;
  rowfile::RowFile::create(directory);
  const auto store = open_store(directory);
  Random random(17);
  std::vector<int64_t> keys(batch);
  std::vector<char> rows(batch * kRowBytes);
  for (int call = 0; call < 12; call++) {
    // The keys of a call are distinct: steps of an odd number modulo a power of two.
    const int64_t first = random.below(kKeys);
    for (int64_t i = 0; i < batch; i++) keys[i] = (first + i * 1237) % kKeys - 4000;
    for (char& byte : rows) byte = static_cast<char>(random.bits());
    store->write(keys.data(), batch, {rows.data(), kRowBytes});
    store->erase(keys.data() + call * 20, 100);
    if (call % 4 == 3) store->commit("{}");
  }
  store->compact();
  store->commit("{}");
  store->close();
}

void check_row_file(const std::string& directory) {
  const auto store = open_store(directory);
  std::vector<int64_t> keys(kKeys);
  for (int64_t i = 0; i < kKeys; i++) keys[i] = i - 4000;
  std::vector<char> rows(kKeys * kRowBytes);
  const auto found = std::make_unique<bool[]>(kKeys);
  rowfile::RowFile::read({{store.get(), keys.data(), kKeys, {rows.data(), kRowBytes}, found.get()}});
  Digest digest;
  digest.add(found.get(), kKeys);
  for (int64_t i = 0; i < kKeys; i++) {
    if (found[i]) digest.add(rows.data() + i * kRowBytes, kRowBytes);
  }
  const int64_t size = store->size();
  digest.add(&size, sizeof size);
  print(digest, "row_file");
  store->close();
}

}  // namespace

int main(int count, char** arguments) {
  check_text(false, encoding::Policy::missing, "text/missing");
  check_text(false, encoding::Policy::skip, "text/skip");
  check_text(true, encoding::Policy::skip, "text/quoted");
  check_integers<encoding::Hex32Counts, encoding::Hex32Ids>("integers/32");
  check_integers<encoding::Int64Counts, encoding::Int64Ids>("integers/64");
  check_texts();
  check_columns();
  check_checksums();
  if (count == 2) write_row_file(arguments[1]);
  check_row_file(arguments[1]);
}
