// SPDX-License-Identifier: Apache-2.0

// Memory of large results and of temporary arrays, which is kept for reuse.
#pragma once

#include <cstddef>

namespace terarec {

// Memory for a result of `bytes`, its content unspecified; null if the system has none.
void* take_result(size_t bytes);
void free_result(void* memory);

// Temporary memory of a call, aligned to cache lines, its content unspecified. Large blocks come from the memory of
// freed results: an update reuses that of the looked-up vectors, which are freed by then.
class CallMemory {
 public:
  CallMemory() = default;
  // Throws std::bad_alloc.
  explicit CallMemory(size_t bytes);
  ~CallMemory();
  CallMemory(CallMemory&& other) noexcept;
  CallMemory& operator=(CallMemory&& other) noexcept;

  // Grows to at least `bytes`; the content is lost if the memory changes. Throws as the constructor.
  void* at_least(size_t bytes);
  void* get() const { return memory_; }

 private:
  void* memory_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace terarec
