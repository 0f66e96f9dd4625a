// SPDX-License-Identifier: Apache-2.0
#include "rowfile/layout.h"

#include <cstring>

#include "common/bytes.h"
#include "rowfile/crc32c.h"

namespace terarec::rowfile {
namespace {

// Footers take 8 bytes of a row.
constexpr int64_t kLeastRowBytesWithFooters = 64;
constexpr size_t kBehindChecksum = 8;

std::string got(const char* what, uint64_t found, uint64_t expected) {
  return std::string("got ") + what + " " + std::to_string(found) + ", expected " + std::to_string(expected);
}

}  // namespace

Layout::Layout(int64_t row_bytes, int64_t page_bytes, int64_t segment_pages)
    : row_bytes(row_bytes),
      page_bytes(page_bytes),
      segment_pages(segment_pages),
      page_rows((page_bytes - static_cast<int64_t>(sizeof(PageHeader))) / (row_bytes + 8)),
      erased_in_page((page_bytes - static_cast<int64_t>(sizeof(PageHeader))) / 8),
      has_footers(row_bytes >= kLeastRowBytesWithFooters),
      first_row_(static_cast<int64_t>(sizeof(PageHeader)) + 8 * page_rows) {}

std::string Layout::page_fault(const char* data, uint64_t segment, int64_t page) const {
  const PageHeader& header = header_of(data);
  if (header.magic != kPageMagic) return "not a page";
  const uint32_t checksum = crc32c(data + kBehindChecksum, page_bytes - kBehindChecksum);
  if (checksum != header.checksum) return got("checksum", checksum, header.checksum);
  if (header.segment != segment) return got("segment", header.segment, segment);
  if (header.page != page) return got("page", header.page, page);
  const bool is_known = header.kind <= static_cast<uint16_t>(PageKind::kErased);
  const int64_t most = header.kind == static_cast<uint16_t>(PageKind::kRows) ? page_rows : erased_in_page;
  if (!is_known || header.count > most) return got("entries", header.count, most) + " or less";
  return "";
}

void Layout::seal_page(char* data) const {
  header_of(data).checksum = crc32c(data + kBehindChecksum, page_bytes - kBehindChecksum);
}

void SegmentKeys::add(const PageHeader& header, const int64_t* page_keys) {
  pages.push_back({header.sequence, header.count, header.kind, 0});
  keys.insert(keys.end(), page_keys, page_keys + header.count);
}

int64_t SegmentKeys::footer_bytes() const {
  return whole_blocks(static_cast<int64_t>(sizeof(FooterHeader) + pages.size() * sizeof(PageEntry) + keys.size() * 8));
}

void SegmentKeys::write_footer(uint64_t segment, char* to) const {
  const int64_t bytes = footer_bytes();
  memset(to, 0, bytes);
  auto& header = *reinterpret_cast<FooterHeader*>(to);
  header = {kFooterMagic, 0, segment, pages.size(), keys.size()};
  char* at = to + sizeof(FooterHeader);
  copy_bytes(at, pages.data(), pages.size() * sizeof(PageEntry));
  copy_bytes(at + pages.size() * sizeof(PageEntry), keys.data(), keys.size() * 8);
  header.checksum = crc32c(to + kBehindChecksum, bytes - kBehindChecksum);
}

std::string SegmentKeys::read_footer(uint64_t segment, int64_t pages_expected, const Layout& layout, const char* data,
                                     int64_t bytes) {
  const auto& header = *reinterpret_cast<const FooterHeader*>(data);
  if (bytes < kBlock || header.magic != kFooterMagic) return "not a footer";
  const uint32_t checksum = crc32c(data + kBehindChecksum, bytes - kBehindChecksum);
  if (checksum != header.checksum) return got("checksum of the footer", checksum, header.checksum);
  if (header.segment != segment) return got("segment", header.segment, segment);
  if (header.pages != static_cast<uint64_t>(pages_expected)) return got("pages", header.pages, pages_expected);
  const uint64_t room = static_cast<uint64_t>(bytes) - sizeof(FooterHeader) - header.pages * sizeof(PageEntry);
  if (header.pages * sizeof(PageEntry) + sizeof(FooterHeader) > static_cast<uint64_t>(bytes) ||
      header.keys > room / 8) {
    return got("keys", header.keys, room / 8) + " or less";
  }
  const char* at = data + sizeof(FooterHeader);
  pages.resize(header.pages);
  copy_bytes(pages.data(), at, pages.size() * sizeof(PageEntry));
  keys.resize(header.keys);
  copy_bytes(keys.data(), at + pages.size() * sizeof(PageEntry), keys.size() * 8);
  uint64_t sum = 0;
  for (const PageEntry& page : pages) {
    const int64_t most = page.kind == static_cast<uint16_t>(PageKind::kRows) ? layout.page_rows : layout.erased_in_page;
    if (page.count > most) return got("entries", page.count, most) + " or less";
    sum += page.count;
  }
  return sum == header.keys ? "" : got("keys of all pages", sum, header.keys);
}

}  // namespace terarec::rowfile
