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

void prefetch(const Visit& visit, int64_t i, bool write) {
  const float* row = visit.table + visit.rows[i] * visit.width;
  for (int64_t c = 0; c < visit.width; c += 16) {
    if (write) __builtin_prefetch(row + c, 1, 3);
    else __builtin_prefetch(row + c, 0, 3);
  }
}

// Calls body(row, dense row, vector) for every vector of the rows of a unit.
template <class Body>
void visit_unit(const Visit& visit, int64_t unit, bool write, Body body) {
  const int64_t end = std::min(visit.count, (unit + 1) * kUnitRows), vectors = visit.width / kLanes;
  for (int64_t i = unit * kUnitRows; i < end; i++) {
    if (i + visit.ahead < visit.count) prefetch(visit, i + visit.ahead, write);
    Lanes* row = reinterpret_cast<Lanes*>(visit.table + visit.rows[i] * visit.width);
    Lanes* dense = reinterpret_cast<Lanes*>(visit.dense ? visit.dense + i * visit.width : nullptr);
    for (int64_t v = 0; v < vectors; v++) body(row, dense, v);
  }
}

}  // namespace

// `access`: 0 reads the rows, 1 reads and writes them (each as it was), 2 copies them to `dense` past the caches, 3 adds
// `dense` to them. The width is a multiple of 16, all rows are aligned to their vectors.
extern "C" void visit_rows(int access, const Visit* visit, int threads) {
  terarec::parallel_for(threads, (visit->count + kUnitRows - 1) / kUnitRows, [=](int64_t unit) {
    Lanes sum{};
    if (access == 0) visit_unit(*visit, unit, false, [&](Lanes* row, Lanes*, int64_t v) { sum += row[v]; });
    if (access == 1) visit_unit(*visit, unit, true, [](Lanes* row, Lanes*, int64_t v) { row[v] += 0.0f; });
    if (access == 2) {
      visit_unit(*visit, unit, false, [](Lanes* row, Lanes* to, int64_t v) { store_streaming(to + v, row[v]); });
    }
    if (access == 3) visit_unit(*visit, unit, true, [](Lanes* row, Lanes* from, int64_t v) { row[v] += from[v]; });
    sink = sum[0];
  });
}
