#include "embedding/row_scratch.h"

#include <cstddef>

namespace terarec {
namespace {

constexpr size_t kCacheLine = 64;

// Places arrays one after the other: first to learn how much memory they take, then in it.
class Layout {
 public:
  explicit Layout(void* memory) : memory_(static_cast<char*>(memory)) {}

  template <class T>
  void place(T*& array, int64_t count) {
    array = memory_ ? reinterpret_cast<T*>(memory_ + bytes_) : nullptr;
    bytes_ += (count * sizeof(T) + kCacheLine - 1) / kCacheLine * kCacheLine;
  }

  size_t bytes() const { return bytes_; }

 private:
  char* memory_;
  size_t bytes_ = 0;
};

// Calls place_all(layout) so that all arrays lie in `memory`.
template <class PlaceAll>
void lay_out(CallMemory& memory, PlaceAll&& place_all) {
  Layout measured(nullptr);
  place_all(measured);
  Layout laid(memory.at_least(measured.bytes()));
  place_all(laid);
}

// 0 is no call.
uint64_t next_call() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

}  // namespace

void RowScratch::have_groups(int64_t keys, int64_t groups, int64_t index_size, int64_t width) {
  lay_out(arrays_, [&](Layout& layout) {
    layout.place(buffer, update_floats(width));
    layout.place(rows, groups);
    layout.place(grads, groups);
    layout.place(scales, groups);
    layout.place(sum_of, groups);
    layout.place(more, keys);
    layout.place(index, index_size);
  });
}

void RowScratch::have_sums(int64_t count, int64_t width) {
  lay_out(sums_, [&](Layout& layout) {
    layout.place(first, count);
    layout.place(sums, count * width);
  });
}

void RowScratch::have_sums_of_all(int64_t count, int64_t width) {
  lay_out(arrays_, [&](Layout& layout) {
    layout.place(buffer, update_floats(width));
    layout.place(rows, count);
    layout.place(grads, count);
    layout.place(touched, count);
  });
  lay_out(sums_, [&](Layout& layout) { layout.place(sums, count * width); });
}

CallScratch::CallScratch() : call_(next_call()) {}

RowScratch& CallScratch::of_thread() {
  static thread_local uint64_t call = 0;
  static thread_local RowScratch* scratch = nullptr;
  if (call != call_) {
    const std::lock_guard<std::mutex> lock(mutex_);
    scratch = &all_.emplace_front();
    call = call_;
  }
  return *scratch;
}

}  // namespace terarec
