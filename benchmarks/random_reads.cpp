// SPDX-License-Identifier: Apache-2.0

// Random reads of a file past the page cache at a given depth: what the disk gives at best. Built by row_file.py.
#include <fcntl.h>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <random>

// Seconds that `count` reads of `bytes` at random multiples of them take with `depth` under way; negative on an error.
extern "C" double random_reads(const char* path, int64_t file_bytes, int64_t bytes, int64_t count, unsigned depth) {
  const int file = open(path, O_RDONLY | O_DIRECT);
  io_uring_params parameters{};
  const int ring = static_cast<int>(syscall(__NR_io_uring_setup, depth, &parameters));
  if (file < 0 || ring < 0) return -1;
  const size_t ring_bytes = parameters.cq_off.cqes + parameters.cq_entries * sizeof(io_uring_cqe) +
                            parameters.sq_off.array + parameters.sq_entries * sizeof(unsigned);
  char* rings = static_cast<char*>(mmap(nullptr, ring_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, ring, 0));
  auto* entries = static_cast<io_uring_sqe*>(mmap(nullptr, parameters.sq_entries * sizeof(io_uring_sqe),
                                                  PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQES));
  auto at = [&](uint32_t offset) { return reinterpret_cast<unsigned*>(rings + offset); };
  unsigned* array = at(parameters.sq_off.array);
  char* buffers = static_cast<char*>(aligned_alloc(4096, depth * ((bytes + 4095) / 4096 * 4096)));
  std::mt19937_64 random(1);
  int64_t submitted = 0, done = 0;
  unsigned under_way = 0;
  const auto start = std::chrono::steady_clock::now();
  while (done < count) {
    unsigned added = 0;
    for (; under_way < depth && submitted < count; under_way++, submitted++, added++) {
      unsigned* tail = at(parameters.sq_off.tail);
      const unsigned slot = *tail & *at(parameters.sq_off.ring_mask);
      io_uring_sqe& entry = entries[slot];
      memset(&entry, 0, sizeof(entry));
      entry.opcode = IORING_OP_READ;
      entry.fd = file;
      entry.addr = reinterpret_cast<uint64_t>(buffers + slot % depth * ((bytes + 4095) / 4096 * 4096));
      entry.len = static_cast<uint32_t>(bytes);
      entry.off = random() % static_cast<uint64_t>(file_bytes / bytes) * static_cast<uint64_t>(bytes);
      array[slot] = slot;
      __atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);
    }
    if (syscall(__NR_io_uring_enter, ring, added, 1, IORING_ENTER_GETEVENTS, nullptr, 0) < 0) return -1;
    unsigned* head = at(parameters.cq_off.head);
    while (*head != __atomic_load_n(at(parameters.cq_off.tail), __ATOMIC_ACQUIRE)) {
      const auto* completed = reinterpret_cast<io_uring_cqe*>(rings + parameters.cq_off.cqes);
      if (completed[*head & *at(parameters.cq_off.ring_mask)].res != bytes) return -1;
      __atomic_store_n(head, *head + 1, __ATOMIC_RELEASE);
      under_way--;
      done++;
    }
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  free(buffers);
  munmap(rings, ring_bytes);
  munmap(entries, parameters.sq_entries * sizeof(io_uring_sqe));
  close(ring);
  close(file);
  return seconds;
}
