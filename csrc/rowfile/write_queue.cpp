// SPDX-License-Identifier: Apache-2.0
#include "rowfile/write_queue.h"

#include <utility>

namespace terarec::rowfile {

WriteQueue::WriteQueue(const Layout& layout, OpenFiles& open_files, int64_t most_bytes,
                       std::function<void(const WriteTask&)> written)
    : layout_(layout), open_files_(open_files), most_bytes_(most_bytes), written_(std::move(written)) {
  thread_ = std::thread([this] { work(); });
}

WriteQueue::~WriteQueue() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_closing_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void WriteQueue::add(WriteTask task) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (task.block) queued_bytes_ += task.block->pages * layout_.page_bytes;
    tasks_.push_back(std::move(task));
  }
  changed_.notify_all();
}

int64_t WriteQueue::queued_bytes() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return queued_bytes_;
}

bool WriteQueue::is_writing() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return !error_ && !tasks_.empty();
}

void WriteQueue::wait_for_room() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (error_) try_again(lock);
  changed_.wait(lock, [&] { return error_ || queued_bytes_ < most_bytes_; });
  if (error_) std::rethrow_exception(error_);
}

void WriteQueue::drain() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (error_) try_again(lock);
  changed_.wait(lock, [&] { return error_ || tasks_.empty(); });
  if (error_) std::rethrow_exception(error_);
}

void WriteQueue::try_again(std::unique_lock<std::mutex>& lock) {
  const int64_t before = num_tried_;
  error_ = nullptr;
  changed_.notify_all();
  changed_.wait(lock, [&] { return num_tried_ > before; });
  if (error_) std::rethrow_exception(error_);
}

// A task stays at the front while it runs, so that an empty queue means that all is written. After an error it stays
// with those behind it: their rows are still read from memory, and writing it again gives the same bytes in the same
// place.
void WriteQueue::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return is_closing_ || (!tasks_.empty() && !error_); });
    if (is_closing_) return;
    const WriteTask& task = tasks_.front();  // a deque does not move what others push behind it
    lock.unlock();
    std::exception_ptr error;
    try {
      write(task);
      written_(task);
    } catch (const StoreError& failure) {
      const std::string message = std::string(failure.what()) + "; the last commit remains valid";
      error = std::make_exception_ptr(StoreError(message, failure.code()));
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    num_tried_++;
    if (error) {
      error_ = error;
    } else {
      if (task.block) queued_bytes_ -= task.block->pages * layout_.page_bytes;
      tasks_.pop_front();
    }
    changed_.notify_all();
  }
}

void WriteQueue::write(const WriteTask& task) {
  const auto file = task.segment->file(OpenMode::kWrite, open_files_);
  if (task.block) {
    char* const data = task.block->memory.get();
    const int64_t bytes = task.block->pages * layout_.page_bytes;
    for (int64_t at = 0; at < bytes; at += layout_.page_bytes) layout_.seal_page(data + at);
    file->write(data, bytes, task.block->first_page * layout_.page_bytes);
    written_bytes_ += bytes;
  } else {
    const AlignedBuffer footer(task.keys.footer_bytes());
    task.keys.write_footer(task.segment->number, footer.get());
    file->write(footer.get(), footer.size(), task.footer_offset);
    written_bytes_ += static_cast<int64_t>(footer.size());
  }
}

}  // namespace terarec::rowfile
