// SPDX-License-Identifier: Apache-2.0
#include "rowfile/uring.h"

#include "rowfile/file.h"

// liburing is no part of most systems; the calls and structures of the kernel's header are few.
#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <sys/syscall.h>
#endif

// Headers before Linux 5.6 lack reads without vectors, which came with this flag.
#if defined(IORING_FEAT_RW_CUR_POS) && defined(__NR_io_uring_setup)

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace terarec::rowfile {
namespace {

class Mapping {
 public:
  Mapping(int descriptor, size_t bytes, off_t what) : bytes_(bytes) {
    void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, descriptor, what);
    memory_ = mapped == MAP_FAILED ? nullptr : static_cast<char*>(mapped);
  }
  ~Mapping() {
    if (memory_) munmap(memory_, bytes_);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  char* get() const { return memory_; }

 private:
  char* memory_;
  size_t bytes_;
};

class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor() {
    if (number_ >= 0) close(number_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  int number() const { return number_; }

 private:
  int number_;
};

int setup(unsigned depth, io_uring_params& parameters) {
  return static_cast<int>(syscall(__NR_io_uring_setup, depth, &parameters));
}

unsigned load(const unsigned* at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
void store(unsigned* at, unsigned value) { __atomic_store_n(at, value, __ATOMIC_RELEASE); }

}  // namespace

struct Ring::Queues {
  Queues(int ring, const io_uring_params& parameters)
      : descriptor(ring),
        rings(ring,
              std::max<size_t>(parameters.sq_off.array + parameters.sq_entries * sizeof(unsigned),
                               parameters.cq_off.cqes + parameters.cq_entries * sizeof(io_uring_cqe)),
              IORING_OFF_SQ_RING),
        entries(ring, parameters.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES) {
    if (!valid()) return;
    char* base = rings.get();
    submit_tail = reinterpret_cast<unsigned*>(base + parameters.sq_off.tail);
    submit_mask = *reinterpret_cast<unsigned*>(base + parameters.sq_off.ring_mask);
    submit_array = reinterpret_cast<unsigned*>(base + parameters.sq_off.array);
    complete_head = reinterpret_cast<unsigned*>(base + parameters.cq_off.head);
    complete_tail = reinterpret_cast<unsigned*>(base + parameters.cq_off.tail);
    complete_mask = *reinterpret_cast<unsigned*>(base + parameters.cq_off.ring_mask);
    completed = reinterpret_cast<io_uring_cqe*>(base + parameters.cq_off.cqes);
  }

  bool valid() const { return rings.get() && entries.get(); }

  Descriptor descriptor;
  Mapping rings, entries;
  unsigned* submit_tail = nullptr;
  unsigned* submit_array = nullptr;
  unsigned* complete_head = nullptr;
  unsigned* complete_tail = nullptr;
  io_uring_cqe* completed = nullptr;
  unsigned submit_mask = 0, complete_mask = 0;
  unsigned added = 0;  // since the last submission
};

Ring::Ring(std::unique_ptr<Queues> queues) : queues_(std::move(queues)) {}
Ring::~Ring() = default;

// One mapping of both rings and reads without vectors came with Linux 5.4 and 5.6.
std::unique_ptr<Ring> Ring::make(unsigned depth) {
  io_uring_params parameters{};
  const int ring = setup(depth, parameters);
  if (ring < 0) return nullptr;
  auto queues = std::make_unique<Queues>(ring, parameters);
  if (!(parameters.features & IORING_FEAT_SINGLE_MMAP) || !queues->valid()) return nullptr;
  return std::unique_ptr<Ring>(new Ring(std::move(queues)));
}

void Ring::add(const Read& read, uint64_t tag) {
  Queues& q = *queues_;
  const unsigned tail = *q.submit_tail, at = tail & q.submit_mask;
  auto& entry = reinterpret_cast<io_uring_sqe*>(q.entries.get())[at];
  memset(&entry, 0, sizeof(entry));
  entry.opcode = IORING_OP_READ;
  entry.fd = read.descriptor;
  entry.addr = reinterpret_cast<uint64_t>(read.to);
  entry.len = read.bytes;
  entry.off = static_cast<uint64_t>(read.offset);
  entry.user_data = tag;
  q.submit_array[at] = at;
  store(q.submit_tail, tail + 1);
  q.added++;
}

void Ring::submit(bool wait, const std::function<void(uint64_t, int64_t)>& done) {
  Queues& q = *queues_;
  while (q.added > 0 || wait) {
    const bool must_wait = wait && *q.complete_head == load(q.complete_tail);
    if (q.added == 0 && !must_wait) break;
    const long taken = syscall(__NR_io_uring_enter, q.descriptor.number(), q.added, must_wait ? 1 : 0,
                               IORING_ENTER_GETEVENTS, nullptr, 0);
    if (taken >= 0) {
      q.added -= static_cast<unsigned>(taken);
      if (q.added == 0) break;
    } else if (errno != EINTR && errno != EAGAIN && errno != EBUSY) {
      throw_system_error("io_uring", "submit reads");
    } else if (*q.complete_head != load(q.complete_tail)) {
      break;  // completions must be taken before more fits in
    }
  }
  unsigned head = *q.complete_head;
  while (head != load(q.complete_tail)) {
    const io_uring_cqe& entry = q.completed[head & q.complete_mask];
    const uint64_t tag = entry.user_data;
    const int64_t result = entry.res;
    store(q.complete_head, ++head);
    done(tag, result);
  }
}

}  // namespace terarec::rowfile

#else

namespace terarec::rowfile {

struct Ring::Queues {};

Ring::Ring(std::unique_ptr<Queues> queues) : queues_(std::move(queues)) {}
Ring::~Ring() = default;
std::unique_ptr<Ring> Ring::make(unsigned) { return nullptr; }
void Ring::add(const Read&, uint64_t) {}
void Ring::submit(bool, const std::function<void(uint64_t, int64_t)>&) {}

}  // namespace terarec::rowfile

#endif
