// SPDX-License-Identifier: Apache-2.0

// Scans: pages are read from the first to the last, and give the rows that the page table says they hold.
#include <algorithm>
#include <cstring>

#include "rowfile/row_file.h"

namespace terarec::rowfile {
namespace {

constexpr int64_t kScanBytes = int64_t{1} << 21;

}  // namespace

Scan::Scan(RowFile& store)
    : store_(store), buffer_(std::max<int64_t>(1, kScanBytes / store.layout_.page_bytes) * store.layout_.page_bytes) {
  std::lock_guard<std::mutex> writer(store_.writer_mutex_);
  store_.check_open();
  if (!store_.options_.read_only) store_.flush();
  store_.scans_++;
  changes_ = store_.changes_;
  std::shared_lock<FairMutex> index(store_.index_lock_);
  for (const auto& segment : store_.contents_->segments) {
    if (segment && !segment->is_moved && segment->live_rows > 0) segments_.push_back(segment);
  }
}

Scan::~Scan() {
  store_.scans_--;
  store_.wake_compaction();
}

// Reads the next pages; false at the end.
bool Scan::next_pages() {
  const Layout& layout = store_.layout_;
  while (segment_ < segments_.size() && next_page_ == segments_[segment_]->pages) {
    segment_++;
    next_page_ = 0;
    file_.reset();
  }
  if (segment_ == segments_.size()) return false;
  Segment& segment = *segments_[segment_];
  if (!file_) file_ = segment.file(OpenMode::kRead, store_.open_files_);
  num_pages_ = std::min<int64_t>(static_cast<int64_t>(buffer_.size()) / layout.page_bytes, segment.pages - next_page_);
  file_->read(buffer_.get(), num_pages_ * layout.page_bytes, next_page_ * layout.page_bytes);
  first_page_ = next_page_;
  next_page_ += num_pages_;
  page_ = row_ = 0;
  return true;
}

int64_t Scan::next(int64_t* keys, RowsOut out, int64_t most) {
  const Layout& layout = store_.layout_;
  int64_t written = 0;
  while (written < most) {
    if (page_ == num_pages_ && !next_pages()) break;
    std::shared_lock<FairMutex> index(store_.index_lock_);
    store_.check_open();
    if (store_.changes_ != changes_) throw StoreError("the store was changed during the scan, expected no writes before its end");
    const Segment& segment = *segments_[segment_];
    for (; page_ < num_pages_ && written < most; page_++, row_ = 0) {
      const char* page = buffer_.get() + page_ * layout.page_bytes;
      const int64_t number = first_page_ + page_;
      if (row_ == 0) {
        const std::string fault = layout.page_fault(page, segment.number, number);
        if (!fault.empty()) throw DamagedError(segment.path, number, fault);
        if (header_of(page).kind != static_cast<uint16_t>(PageKind::kRows)) continue;
        places_.resize(header_of(page).count);
        store_.contents_->table.find(layout.keys(page), header_of(page).count, places_.data());
      }
      const uint64_t first_place = layout.place(segment.slot, number, 0);
      for (; row_ < header_of(page).count && written < most; row_++) {
        if (places_[row_] != first_place + row_) continue;
        keys[written] = layout.keys(page)[row_];
        memcpy(out.rows + written * out.stride, layout.row(page, row_), layout.row_bytes);
        written++;
      }
      if (row_ < header_of(page).count) break;
    }
  }
  return written;
}

}  // namespace terarec::rowfile
