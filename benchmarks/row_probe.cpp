// SPDX-License-Identifier: Apache-2.0

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
typedef float Lanes __attribute__((vector_size(kLanes * 4), may_alias, aligned(4)));  // gradients lie as NumPy has them

// Rows that a thread takes at a time. In units of 128, 8 M rows of 64 bytes took 1.4 to 2 x as long (two Zen 3 cores);
// 1664 rows in units of more than 512 leave a core without work.
constexpr int64_t kMostRows = 2048, kFewestRows = 64, kUnitsOfThread = 8;

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
  int64_t count, width;
  int64_t ahead;  // 0: nothing is prefetched
  float* dense;   // a row of its own for each row visited
};

enum Access { kRead, kModify, kCopy, kStream };

// Always inlined: GCC takes a function that only prefetches for one without effect and drops calls of it.
template <int W, Access A>
inline __attribute__((always_inline)) void prefetch(const Visit& visit, int64_t i) {
  const float* row = visit.table + visit.rows[i] * W;
  for (int c = 0; c < W; c += 16) __builtin_prefetch(row + c, A == kModify, 3);
}

template <int W, Access A, bool kPrefetches>
void visit_unit(const Visit& shared, int64_t first, int64_t end) {
  const Visit visit = shared;
  if (kPrefetches) {
    for (int64_t i = first; i < std::min(end, first + visit.ahead); i++) prefetch<W, A>(visit, i);
  }
  Lanes sums[4] = {};
  for (int64_t i = first; i < end; i++) {
    if (kPrefetches && i + visit.ahead < end) prefetch<W, A>(visit, i + visit.ahead);
    Lanes* row = reinterpret_cast<Lanes*>(visit.table + visit.rows[i] * W);
    Lanes* dense = A >= kCopy ? reinterpret_cast<Lanes*>(visit.dense + i * W) : nullptr;
    for (int v = 0; v < W / kLanes; v++) {
      if (A == kRead) sums[v % 4] += row[v];
      if (A == kModify) row[v] += 0.0f;
      if (A == kCopy) dense[v] = row[v];
      if (A == kStream) store_streaming(dense + v, row[v]);
    }
  }
  const Lanes sum = sums[0] + sums[1] + sums[2] + sums[3];
  sink = sum[0];
}

template <int W, Access A>
void visit_units(const Visit& visit, int threads) {
  const int64_t rows = std::clamp(visit.count / (threads * kUnitsOfThread), kFewestRows, kMostRows);
  terarec::parallel_for(threads, (visit.count + rows - 1) / rows, [&](int64_t unit) {
    const int64_t first = unit * rows, end = std::min(visit.count, first + rows);
    if (visit.ahead) visit_unit<W, A, true>(visit, first, end);
    else visit_unit<W, A, false>(visit, first, end);
  });
}

template <Access A>
void visit_width(const Visit& visit, int threads) {
  if (visit.width == 16) visit_units<16, A>(visit, threads);
  if (visit.width == 64) visit_units<64, A>(visit, threads);
  if (visit.width == 128) visit_units<128, A>(visit, threads);
}

}  // namespace

// Reads the rows, reads and writes them (each as it was), or copies them to `dense`, through the caches or past them.
// The width is 16, 64 or 128; rows stored past the caches are aligned to their vectors.
extern "C" void visit_rows(int access, const Visit* visit, int threads) {
  if (access == kRead) visit_width<kRead>(*visit, threads);
  if (access == kModify) visit_width<kModify>(*visit, threads);
  if (access == kCopy) visit_width<kCopy>(*visit, threads);
  if (access == kStream) visit_width<kStream>(*visit, threads);
}
