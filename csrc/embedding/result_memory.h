// Memory of large results and of what calls need in passing, which is kept and handed out again.
#pragma once

#include <cstddef>

namespace terarec {

// Memory for a result of `bytes`, its content unspecified; null if the system refuses it.
void* take_result(size_t bytes);
void give_result_back(void* memory);

// Memory for a call, aligned to cache lines, its content unspecified. What is large is a piece of what results have
// given back: an update so needs no memory beside that of the vectors, which nobody uses any more by then.
class CallMemory {
 public:
  CallMemory() = default;
  // Throws std::bad_alloc.
  explicit CallMemory(size_t bytes);
  ~CallMemory();
  CallMemory(CallMemory&& other) noexcept;
  CallMemory& operator=(CallMemory&& other) noexcept;

  // Sees to at least `bytes`, what was there being lost if that takes other memory. Throws as the constructor.
  void* at_least(size_t bytes);
  void* get() const { return memory_; }

 private:
  void* memory_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace terarec
