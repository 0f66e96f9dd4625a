// SPDX-License-Identifier: Apache-2.0

// The thread that writes filled blocks and footers to their files, in order.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "rowfile/segment.h"

namespace terarec::rowfile {

// A block, or else the footer of a segment.
struct WriteTask {
  std::shared_ptr<Block> block;
  std::shared_ptr<Segment> segment;
  SegmentKeys keys;
  int64_t footer_offset = 0;
};

class WriteQueue {
 public:
  // `written` is called after each task, by the thread. At most about `most_bytes` of blocks wait.
  WriteQueue(const Layout& layout, OpenFiles& open_files, int64_t most_bytes,
             std::function<void(const WriteTask&)> written);
  // What was not written is lost.
  ~WriteQueue();

  void add(WriteTask task);
  // Waits until a writer may add more. After an error the failed task is tried again, since a full disk may have room
  // by now; throws if it fails again, as `drain` does.
  void wait_for_room();
  // Waits until all is written.
  void drain();

  // Bytes that went to files.
  int64_t written_bytes() const { return written_bytes_; }
  int64_t queued_bytes() const;
  // Whether tasks wait, and not for someone to try again.
  bool is_writing() const;

 private:
  void work();
  void write(const WriteTask& task);
  // Lets the thread try again what failed, and waits until that is done; throws if it fails again.
  void try_again(std::unique_lock<std::mutex>& lock);

  const Layout& layout_;
  OpenFiles& open_files_;
  const int64_t most_bytes_;
  const std::function<void(const WriteTask&)> written_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<WriteTask> tasks_;
  int64_t queued_bytes_ = 0;
  std::atomic<int64_t> written_bytes_{0};
  std::exception_ptr error_;  // of the task in front, at which the thread waits until someone tries again
  int64_t num_tried_ = 0;     // tasks that ended, with or without an error
  bool is_closing_ = false;
  std::thread thread_;
};

}  // namespace terarec::rowfile
