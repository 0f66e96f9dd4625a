// SPDX-License-Identifier: Apache-2.0
#include "rowfile/segment.h"

#include <sys/resource.h>

#include <algorithm>
#include <cerrno>

#include "common/platform.h"

namespace terarec::rowfile {
namespace {

// Segments that were opened, of all row files, in that order; some are gone.
struct Opened {
  static Opened& shared() {
    static auto* const opened = new Opened;  // never destroyed: threads may outlive static objects
    return *opened;
  }

  std::mutex mutex;
  std::vector<std::weak_ptr<Segment>> segments;
};

}  // namespace

int64_t OpenFiles::most() const {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return most_;
  return std::min(most_, static_cast<int64_t>(limit.rlim_cur / 2));
}

void OpenFiles::opened(const std::shared_ptr<Segment>& segment) const {
  {
    Opened& all = Opened::shared();
    std::lock_guard<std::mutex> lock(all.mutex);
    all.segments.push_back(segment);
  }
  close_half(most());
}

bool OpenFiles::close_half(int64_t most) {
  std::vector<std::shared_ptr<Segment>> to_close;
  {
    Opened& all = Opened::shared();
    std::lock_guard<std::mutex> lock(all.mutex);
    auto& segments = all.segments;
    if (static_cast<int64_t>(segments.size()) <= most) return false;
    const auto is_gone = [](const std::weak_ptr<Segment>& each) { return each.expired(); };
    segments.erase(std::remove_if(segments.begin(), segments.end(), is_gone), segments.end());
    if (static_cast<int64_t>(segments.size()) <= most) return false;
    const auto half = segments.begin() + static_cast<int64_t>((segments.size() + 1) / 2);
    for (auto each = segments.begin(); each != half; ++each) {
      if (auto held = each->lock()) to_close.push_back(std::move(held));
    }
    segments.erase(segments.begin(), half);
  }
  for (const auto& each : to_close) each->close_file();
  return !to_close.empty();
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
  for (bool has_closed = false;; has_closed = true) {
    try {
      std::unique_lock<std::mutex> lock(file_mutex_);
      if (file_ && (is_writable_ || mode == OpenMode::kRead)) return file_;
      file_ = std::make_shared<const File>(path, mode, direct_);
      is_writable_ = mode == OpenMode::kWrite;
      advise_random_reads(file_->descriptor());  // rows are read one by one; what comes next is no use
      const auto result = file_;
      lock.unlock();
      open_files.opened(shared_from_this());
      return result;
    } catch (const StoreError& error) {  // others than segments have taken what the process may open
      if (has_closed || error.code() != EMFILE || !OpenFiles::close_half(0)) throw;
    }
  }
}

void Segment::close_file() {
  std::lock_guard<std::mutex> lock(file_mutex_);
  file_.reset();
}

}  // namespace terarec::rowfile
