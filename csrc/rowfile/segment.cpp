// SPDX-License-Identifier: Apache-2.0
#include "rowfile/segment.h"

#include "common/platform.h"

namespace terarec::rowfile {

// The first half is closed: it was opened before the other.
void OpenFiles::opened(const std::shared_ptr<Segment>& segment) {
  std::vector<std::shared_ptr<Segment>> to_close;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    open_.push_back(segment);
    if (static_cast<int64_t>(open_.size()) <= most_) return;
    const auto half = open_.begin() + static_cast<int64_t>(open_.size() / 2);
    for (auto each = open_.begin(); each != half; ++each) {
      if (auto held = each->lock()) to_close.push_back(std::move(held));
    }
    open_.erase(open_.begin(), half);
  }
  for (const auto& each : to_close) each->close_file();
}

Block* Segment::block_of(int64_t page) const {
  for (const auto& block : pending) {
    if (page >= block->first_page && page < block->first_page + block->capacity) return block.get();
  }
  return nullptr;
}

SegmentRecord Segment::record() const {
  return {number, first_sequence, last_sequence, static_cast<uint32_t>(pages), footer_bytes > 0,
          static_cast<uint64_t>(footer_bytes)};
}

std::shared_ptr<const File> Segment::file(OpenMode mode, OpenFiles& open_files) {
  std::shared_ptr<const File> result;
  {
    std::lock_guard<std::mutex> lock(file_mutex_);
    if (file_ && (is_writable_ || mode == OpenMode::kRead)) return file_;
    file_ = std::make_shared<const File>(path, mode, direct_);
    is_writable_ = mode == OpenMode::kWrite;
    advise_random_reads(file_->descriptor());  // rows are read one by one; what comes next is no use
    result = file_;
  }
  open_files.opened(shared_from_this());
  return result;
}

void Segment::close_file() {
  std::lock_guard<std::mutex> lock(file_mutex_);
  file_.reset();
}

}  // namespace terarec::rowfile
