// What random rows cost at best: visits rows of a table in a given order, prefetching a given distance ahead, and does
// next to nothing with them. Built with csrc/common/parallel.cpp, so that it runs on the threads that the kernels use.
#include <algorithm>
#include <cstdint>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "common/parallel.h"

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float Lanes __attribute__((vector_size(kLanes * 4), may_alias));

constexpr int64_t kUnitRows = 1024;

volatile float sink;

void store_streaming(Lanes* to, Lanes value) {
#if defined(__AVX512F__)
  _mm512_stream_ps(reinterpret_cast<float*>(to), (__m512)value);
#elif defined(__AVX2__)
  _mm256_stream_ps(reinterpret_cast<float*>(to), (__m256)value);
#elif defined(__SSE2__)
  _mm_stream_ps(reinterpret_cast<float*>(to), (__m128)value);
#else
  *to = value;
#endif
}

struct Visit {
  float* table;
  const int64_t* rows;
  int64_t count, width, ahead;
  float* dense;  // a row of its own for each row visited
};

enum Access { kRead, kModify, kCopy };

// Always inlined: GCC takes a function that only prefetches for one without effect and drops calls of it.
template <int W, Access A>
inline __attribute__((always_inline)) void prefetch(const Visit& visit, int64_t i) {
  const float* row = visit.table + visit.rows[i] * W;
  for (int c = 0; c < W; c += 16) __builtin_prefetch(row + c, A == kModify, 3);
}

template <int W, Access A>
void visit_unit(const Visit& shared, int64_t unit) {
  const Visit visit = shared;
  const int64_t end = std::min(visit.count, (unit + 1) * kUnitRows);
  Lanes sums[4] = {};
  for (int64_t i = unit * kUnitRows; i < end; i++) {
    if (i + visit.ahead < visit.count) prefetch<W, A>(visit, i + visit.ahead);
    Lanes* row = reinterpret_cast<Lanes*>(visit.table + visit.rows[i] * W);
    Lanes* dense = A == kCopy ? reinterpret_cast<Lanes*>(visit.dense + i * W) : nullptr;
    for (int v = 0; v < W / kLanes; v++) {
      if (A == kRead) sums[v % 4] += row[v];
      if (A == kModify) row[v] += 0.0f;
      if (A == kCopy) store_streaming(dense + v, row[v]);
    }
  }
  const Lanes sum = sums[0] + sums[1] + sums[2] + sums[3];
  sink = sum[0];
}

template <Access A>
void visit_units(const Visit& visit, int threads) {
  terarec::parallel_for(threads, (visit.count + kUnitRows - 1) / kUnitRows, [&](int64_t unit) {
    if (visit.width == 16) visit_unit<16, A>(visit, unit);
    if (visit.width == 64) visit_unit<64, A>(visit, unit);
    if (visit.width == 128) visit_unit<128, A>(visit, unit);
  });
}

}  // namespace

// Reads the rows, reads and writes them (each as it was), or copies them to `dense` past the caches. The width is 16,
// 64 or 128, and all rows are aligned to their vectors.
extern "C" void visit_rows(int access, const Visit* visit, int threads) {
  if (access == kRead) visit_units<kRead>(*visit, threads);
  if (access == kModify) visit_units<kModify>(*visit, threads);
  if (access == kCopy) visit_units<kCopy>(*visit, threads);
}
