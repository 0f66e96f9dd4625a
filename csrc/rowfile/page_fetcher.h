// SPDX-License-Identifier: Apache-2.0

// Many reads of pages at once: by io_uring, or by threads that call pread.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "rowfile/file.h"
#include "rowfile/uring.h"

namespace terarec::rowfile {

enum class Io { kAuto, kUring, kThreads };

// Adjacent bytes of a file, a whole number of pages.
struct PageRun {
  const File* file;
  int64_t offset;
  int64_t bytes;
};

class PageFetcher {
 public:
  // Gets the bytes of run number `run`; may be called by several threads at once.
  using Take = std::function<void(int64_t run, const char* data)>;

  // `most_bytes` of a run. Throws StoreError if io_uring is requested and unavailable.
  PageFetcher(Io io, int threads, bool direct, int64_t most_bytes);
  ~PageFetcher();

  bool uses_uring() const { return uses_uring_; }
  int64_t most_bytes() const { return most_bytes_; }
  int64_t memory_bytes() const;

  // Returns when all runs were taken. Throws the first error of a file or of `take`.
  void fetch(const std::vector<PageRun>& runs, const Take& take);

 private:
  struct RingAndBuffers;
  struct Job;

  void fetch_by_ring(const std::vector<PageRun>& runs, const Take& take);
  void fetch_by_threads(const std::vector<PageRun>& runs, const Take& take);
  std::unique_ptr<RingAndBuffers> borrow_ring();
  void work();
  void start_threads();

  const int num_threads_;
  const bool direct_;
  const int64_t most_bytes_;
  bool uses_uring_ = false;

  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<RingAndBuffers>> rings_;
  int64_t num_rings_ = 0;
  std::condition_variable has_job_;
  std::deque<std::shared_ptr<Job>> jobs_;
  std::vector<std::thread> threads_;
  bool is_closing_ = false;
};

}  // namespace terarec::rowfile
