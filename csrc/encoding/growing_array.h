// An array that leaves new elements uninitialised, and whose memory Python can take over. It may also lie in memory that
// is another's; then it has room for what was said at first.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <utility>

namespace terarec::encoding {

template <typename T>
class GrowingArray {
 public:
  GrowingArray() = default;
  GrowingArray(GrowingArray&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        capacity_(std::exchange(other.capacity_, 0)),
        borrowed_(other.borrowed_) {}
  GrowingArray(const GrowingArray&) = delete;
  GrowingArray& operator=(GrowingArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(capacity_, other.capacity_);
    std::swap(borrowed_, other.borrowed_);
    return *this;
  }
  GrowingArray& operator=(const GrowingArray&) = delete;
  ~GrowingArray() {
    if (!borrowed_) free(data_);
  }

  // Takes `memory`, room for `capacity` elements, which lives on after this array.
  void borrow(char* memory, int64_t capacity) {
    data_ = reinterpret_cast<T*>(memory);
    capacity_ = capacity;
    borrowed_ = true;
  }

  // Makes room for `size` elements; pointers into the array are void afterwards.
  void reserve(int64_t size) {
    if (size > capacity_) grow(size);
  }
  bool borrowed() const { return borrowed_; }
  T* data() { return data_; }
  T& operator[](int64_t index) { return data_[index]; }
  // Hands the memory over; free() it.
  T* release() {
    capacity_ = 0;
    return std::exchange(data_, nullptr);
  }

 private:
  void grow(int64_t size) {
    if (borrowed_) throw std::length_error("an array in another's memory is full");
    const int64_t capacity = std::max({size, 2 * capacity_, int64_t{16}});
    void* grown = realloc(data_, static_cast<size_t>(capacity) * sizeof(T));
    if (grown == nullptr) throw std::bad_alloc();
    data_ = static_cast<T*>(grown);
    capacity_ = capacity;
  }

  T* data_ = nullptr;
  int64_t capacity_ = 0;
  bool borrowed_ = false;
};

}  // namespace terarec::encoding
