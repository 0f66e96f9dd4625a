// An array that leaves new elements uninitialised, and whose memory Python can take over.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>

namespace terarec::encoding {

template <typename T>
class GrowingArray {
 public:
  GrowingArray() = default;
  GrowingArray(GrowingArray&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), capacity_(std::exchange(other.capacity_, 0)) {}
  GrowingArray(const GrowingArray&) = delete;
  GrowingArray& operator=(GrowingArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(capacity_, other.capacity_);
    return *this;
  }
  GrowingArray& operator=(const GrowingArray&) = delete;
  ~GrowingArray() { free(data_); }

  // Makes room for `size` elements; pointers into the array are void afterwards.
  void reserve(int64_t size) {
    if (size > capacity_) grow(size);
  }
  T* data() { return data_; }
  T& operator[](int64_t index) { return data_[index]; }
  // Hands the memory over; free() it.
  T* release() {
    capacity_ = 0;
    return std::exchange(data_, nullptr);
  }

 private:
  void grow(int64_t size) {
    const int64_t capacity = std::max({size, 2 * capacity_, int64_t{16}});
    void* grown = realloc(data_, static_cast<size_t>(capacity) * sizeof(T));
    if (grown == nullptr) throw std::bad_alloc();
    data_ = static_cast<T*>(grown);
    capacity_ = capacity;
  }

  T* data_ = nullptr;
  int64_t capacity_ = 0;
};

}  // namespace terarec::encoding
