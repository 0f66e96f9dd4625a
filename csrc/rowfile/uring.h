// SPDX-License-Identifier: Apache-2.0

// Reads of files by io_uring, where the kernel has it and lets the process use it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace terarec::rowfile {

// A ring of one thread at a time.
class Ring {
 public:
  struct Read {
    int descriptor;
    char* to;
    uint32_t bytes;
    int64_t offset;
  };

  // Null where there is no io_uring.
  static std::unique_ptr<Ring> make(unsigned depth);
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // Adds a read under a tag; there must be room: fewer than `depth` are under way.
  void add(const Read& read, uint64_t tag);
  // Submits what was added, and waits until one read is done if `wait`; calls done(tag, bytes read or -errno) for all
  // that are. Throws StoreError if the kernel rejects them.
  void submit(bool wait, const std::function<void(uint64_t, int64_t)>& done);

 private:
  struct Queues;
  explicit Ring(std::unique_ptr<Queues> queues);
  std::unique_ptr<Queues> queues_;
};

}  // namespace terarec::rowfile
