// SPDX-License-Identifier: Apache-2.0
#include "embedding/row_init.h"

#include <algorithm>
#include <cmath>

#include "common/parallel.h"
#include "embedding/split_mix.h"

namespace terarec {
namespace {

constexpr double kTwoPi = 6.283185307179586476925286766559;
constexpr int64_t kUnitFloats = 1 << 19;   // 2 MiB: a huge page is first touched by one thread
constexpr int64_t kKeyedFloats = 1 << 14;  // of a unit of keyed rows: some 20 us of work

struct Pair {
  float even, odd;
};

Pair uniform(uint32_t high, uint32_t low, double scale) {
  const auto unit = [](uint32_t bits) { return static_cast<float>(bits >> 8) * 0x1p-23f - 1.0f; };
  return {unit(high) * static_cast<float>(scale), unit(low) * static_cast<float>(scale)};
}

Pair normal(uint32_t high, uint32_t low, double scale) {
  const double radius = scale * std::sqrt(-2.0 * std::log((high + 1.0) * 0x1p-32));
  const double angle = kTwoPi * (low * 0x1p-32);
  return {static_cast<float>(radius * std::cos(angle)), static_cast<float>(radius * std::sin(angle))};
}

template <Pair (*kDraw)(uint32_t, uint32_t, double)>
void fill_row(float* row, int64_t width, uint64_t stream, double scale) {
  for (int64_t c = 0; c < width; c += 2) {
    stream += kMixStep;
    const uint64_t bits = mix(stream);
    const Pair pair = kDraw(static_cast<uint32_t>(bits >> 32), static_cast<uint32_t>(bits), scale);
    row[c] = pair.even;
    if (c + 1 < width) row[c + 1] = pair.odd;
  }
}

// The row of number `number` in the table of the mixed seed `seed`.
template <class Call>
void fill_row(const Call& call, uint64_t seed, float* row, int64_t number) {
  const uint64_t stream = mix(seed + (static_cast<uint64_t>(number) + 1) * kMixStep);
  if (call.normal) fill_row<normal>(row, call.width, stream, call.scale);
  else fill_row<uniform>(row, call.width, stream, call.scale);
}

// Calls fill(i) for every i below `num_rows`, in parallel.
template <class Fill>
void for_rows(int threads, int64_t num_rows, int64_t unit_rows, Fill&& fill) {
  parallel_for(threads, (num_rows + unit_rows - 1) / unit_rows, [&](int64_t unit) {
    const int64_t end = std::min(num_rows, (unit + 1) * unit_rows);
    for (int64_t i = unit * unit_rows; i < end; i++) fill(i);
  });
}

}  // namespace

void fill_rows(const FillCall& call) {
  const uint64_t seed = mix(call.seed);
  for_rows(call.threads, call.num_rows, std::max<int64_t>(1, kUnitFloats / call.width),
           [&](int64_t i) { fill_row(call, seed, call.rows + i * call.width, call.first_row + i); });
}

void fill_keyed_rows(const KeyedFillCall& call) {
  const uint64_t seed = mix(call.seed);
  for_rows(call.threads, call.num_rows, std::max<int64_t>(1, kKeyedFloats / call.width),
           [&](int64_t i) { fill_row(call, seed, call.rows + call.targets[i] * call.width, call.keys[i]); });
}

}  // namespace terarec
