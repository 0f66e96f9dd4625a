// SPDX-License-Identifier: Apache-2.0

// The streams of the simulated device and its memory: which work has used which memory, and who has waited for it.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

namespace simulated {

using at::Tensor;

constexpr auto kType = c10::DeviceType::PrivateUse1;
inline const c10::Device kDevice(kType, 0);

// ---- Streams: which work of each is known to be done where others, or the host, go on

using Clock = std::map<int64_t, uint64_t>;  // stream -> number of its works, all up to which are done

// What streams do with an allocation.
struct Uses {
  int64_t owner;  // whose next allocation may get the memory as soon as the host frees it
  std::pair<int64_t, uint64_t> last_write;
  Clock reads;
  std::set<int64_t> recorded;  // streams for which the memory is kept until their work is done
};

// Guarded by `mutex`, since autograd and readers have threads of their own. All threads of the host count as one, so
// that what one of them has waited for is known to the others.
// They are never destroyed: tensors of a process that ends are freed late.
inline std::mutex& mutex = *new std::mutex;
inline std::map<int64_t, Clock>& clocks = *new std::map<int64_t, Clock>;
inline Clock& host = *new Clock;
inline std::unordered_map<const void*, Uses>& uses = *new std::unordered_map<const void*, Uses>;
inline std::map<void*, size_t>& pinned = *new std::map<void*, size_t>;  // pinned memory of the host -> its bytes
inline std::string& mistake = *new std::string;                         // of a place that cannot raise it
inline std::map<int64_t, int64_t>& waits_for = *new std::map<int64_t, int64_t>;  // stream -> waits of the host for it
inline int64_t num_streams = 1;

inline thread_local int64_t current_stream = 0;

inline void merge(Clock& into, const Clock& from) {
  for (const auto& [stream, done] : from) into[stream] = std::max(into[stream], done);
}

inline uint64_t done(Clock& clock, int64_t stream) { return clock.count(stream) ? clock[stream] : 0; }

// Raises what was noted. It needs `mutex`, like all that does not lock it.
inline void raise_mistake() { TORCH_CHECK(mistake.empty(), std::exchange(mistake, "")); }

// Returns how the host may use pinned memory, and what it must not do before it has waited for a copy; "" if nothing.
inline std::pair<int, std::string> access_of_host(const Uses& of_memory) {
  const auto& [writer, write] = of_memory.last_write;
  if (done(host, writer) < write) return {PROT_NONE, "uses memory that stream " + std::to_string(writer) + " writes"};
  for (const auto& [stream, read] : of_memory.reads) {
    if (done(host, stream) < read) return {PROT_READ, "writes memory that stream " + std::to_string(stream) + " reads"};
  }
  return {PROT_READ | PROT_WRITE, ""};
}

// Keeps the host from pinned memory until it has waited for the copies of the device.
inline void protect(void* memory, size_t bytes) { mprotect(memory, bytes, access_of_host(uses.at(memory)).first); }

// Notes what the host knows to be done, and gives it back the pinned memory that was used for that.
inline void host_learns(const Clock& clock) {
  merge(host, clock);
  for (const auto& [memory, bytes] : pinned) protect(memory, bytes);
}

inline void host_waits_for(int64_t stream) {
  const std::lock_guard<std::mutex> lock(mutex);
  host_learns(clocks[stream]);
  waits_for[stream]++;
  raise_mistake();
}

inline struct sigaction former_action;

// Notes that the host uses pinned memory that it must not, and lets it go on, whatever code is about to.
inline void note_use_by_host(int signal, siginfo_t* info, void*) {
  // This thread does not hold it: inside the lock nothing uses such memory.
  const std::lock_guard<std::mutex> lock(mutex);
  for (const auto& [memory, bytes] : pinned) {
    const auto offset = static_cast<char*>(info->si_addr) - static_cast<char*>(memory);
    if (offset < 0 || offset >= static_cast<ptrdiff_t>(bytes)) continue;
    const std::string what = access_of_host(uses.at(memory)).second;
    // Nothing, if another thread has waited since.
    if (!what.empty() && mistake.empty()) mistake = "the host " + what + ", expected to wait for that stream";
    mprotect(memory, bytes, PROT_READ | PROT_WRITE);
    return;
  }
  sigaction(signal, &former_action, nullptr);  // what has come now comes again
}

[[maybe_unused]] inline const bool are_uses_noted = [] {
  struct sigaction action {};
  action.sa_sigaction = &note_use_by_host;
  action.sa_flags = SA_SIGINFO;
  return sigaction(SIGSEGV, &action, &former_action) == 0;
}();

// Notes that the current stream reads or writes memory; raises unless it has waited for those that did so before.
inline void touch(const void* memory, bool is_written) {
  const std::lock_guard<std::mutex> lock(mutex);
  raise_mistake();
  const auto found = uses.find(memory);
  if (found == uses.end()) return;
  Clock& clock = clocks[current_stream];
  merge(clock, host);
  const uint64_t now = ++clock[current_stream];
  Uses& of_memory = found->second;
  const auto check = [&](int64_t stream, uint64_t number, const char* what) {
    TORCH_CHECK(stream == current_stream || done(clock, stream) >= number, "stream ", current_stream,
                is_written ? " writes" : " reads", " memory that stream ", stream, what,
                ", expected to wait for that stream");
  };
  check(of_memory.last_write.first, of_memory.last_write.second, " writes");
  if (is_written) {
    for (const auto& [stream, number] : of_memory.reads) check(stream, number, " reads");
    of_memory.last_write = {current_stream, now};
    of_memory.reads.clear();
  } else {
    of_memory.reads[current_stream] = now;
  }
}

inline void note_allocation(const void* memory) {
  const std::lock_guard<std::mutex> lock(mutex);
  // Work that the stream began before may still use the memory.
  uses[memory] = {current_stream, {current_stream, done(clocks[current_stream], current_stream)}, {}, {}};
}

// Notes a mistake, which the next work raises: a destructor must not.
inline void note_freeing(const void* memory) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = uses.find(memory);
  if (found == uses.end()) return;
  Uses& of_memory = found->second;
  Clock known = clocks[of_memory.owner];
  merge(known, host);
  of_memory.reads[of_memory.last_write.first] =
      std::max(of_memory.reads[of_memory.last_write.first], of_memory.last_write.second);
  for (const auto& [stream, number] : of_memory.reads) {
    if (stream == of_memory.owner || of_memory.recorded.count(stream) || done(known, stream) >= number) continue;
    mistake = "memory of stream " + std::to_string(of_memory.owner) + " was freed while stream " +
              std::to_string(stream) + " uses it, expected a wait for that stream, or record_stream";
  }
  uses.erase(found);
}

// ---- Memory

inline int64_t largest_allocation = std::numeric_limits<int64_t>::max();

class HostMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    TORCH_CHECK_WITH(OutOfMemoryError, static_cast<int64_t>(bytes) <= largest_allocation,
                     "simulated out of memory. Tried to allocate ", bytes, " bytes.");
    void* memory = c10::alloc_cpu(bytes);
    if (memory) note_allocation(memory);
    return {memory, memory, &release, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

 private:
  static void release(void* memory) {
    note_freeing(memory);
    c10::free_cpu(memory);
  }
};

inline HostMemory memory;
REGISTER_ALLOCATOR(kType, &memory);

// Memory of the host that the device copies from and to by itself, on pages of its own.
class PinnedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (!bytes) return {nullptr, c10::kCPU};
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t whole = (bytes + page - 1) / page * page;
    void* got = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK_WITH(OutOfMemoryError, got != MAP_FAILED, "tried to allocate ", bytes, " bytes of pinned memory");
    const std::lock_guard<std::mutex> lock(mutex);
    pinned[got] = whole;
    uses[got] = {};
    return {got, got, &release, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

 private:
  // It may go while the device copies: CUDA's allocator keeps the memory until that is done.
  static void release(void* memory) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = pinned.find(memory);
    if (found == pinned.end()) return;
    munmap(memory, found->second);
    pinned.erase(found);
    uses.erase(memory);
  }
};

inline PinnedMemory pinned_memory;

inline bool is_pinned(const void* memory) {
  const std::lock_guard<std::mutex> lock(mutex);
  return pinned.count(const_cast<void*>(memory));
}

inline void touch(const Tensor& tensor, bool is_written) {
  if (tensor.numel() && tensor.has_storage()) touch(tensor.storage().data(), is_written);
}

// Returns a new tensor of the CPU over the memory of `tensor`.
inline Tensor over(const Tensor& tensor) {
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                       at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU));
}

inline Tensor on_host(const Tensor& tensor) { return tensor.is_cpu() ? tensor : over(tensor); }

// Copies a tensor as the device does, which may use what the host may not.
inline void copy_by_device(const Tensor& from, const Tensor& to) {
  void* const ends[] = {const_cast<void*>(from.storage().data()), const_cast<void*>(to.storage().data())};
  if (!is_pinned(ends[0]) && !is_pinned(ends[1])) {
    on_host(to).copy_(on_host(from));
    return;
  }
  // Made before the lock, and new ones: counting references of a tensor that Python has takes Python's lock, whose
  // holder may wait for this one.
  const Tensor source = over(from), target = over(to);
  // No other thread may protect the memory meanwhile.
  const std::lock_guard<std::mutex> lock(mutex);
  for (void* end : ends) {
    if (pinned.count(end)) mprotect(end, pinned[end], PROT_READ | PROT_WRITE);
  }
  target.copy_(source);
  for (void* end : ends) {
    if (pinned.count(end)) protect(end, pinned[end]);
  }
}

}  // namespace simulated
