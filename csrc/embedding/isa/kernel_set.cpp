// SPDX-License-Identifier: Apache-2.0

// One set of kernels. CMake compiles this file once for each instruction set and defines TERAREC_SET (its namespace),
// TERAREC_LANES (floats in a vector) and TERAREC_TABLE (the Kernels constant to define). The set "generic" uses no
// intrinsics but those of the baseline; "neon" defines TERAREC_NEON.

#include <cstdint>
#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(TERAREC_NEON)
#include <arm_neon.h>
#endif

#include "embedding/kernels.h"
#include "embedding/split_mix.h"

#define TERAREC_INLINE static inline __attribute__((always_inline))

// Widths with loops of their own, unrolled and in registers; others use the loops with W == 0.
#define TERAREC_BY_WIDTH(function, call, width) \
  switch (width) {                              \
    case 1: return function<1>(call);           \
    case 8: return function<8>(call);           \
    case 16: return function<16>(call);         \
    case 32: return function<32>(call);         \
    case 64: return function<64>(call);         \
    case 128: return function<128>(call);       \
    case 256: return function<256>(call);       \
    default: return function<0>(call);          \
  }

namespace terarec {
namespace TERAREC_SET {

constexpr int kLanes = TERAREC_LANES;
#include "embedding/isa/vector.inc"
#include "embedding/isa/lookup.inc"
#include "embedding/isa/rules.inc"
#include "embedding/isa/update.inc"
#include "embedding/isa/dense.inc"
#include "embedding/isa/pair_dots.inc"

// The loop that compares keys with buckets.

// Bucket::match. Only code without an instruction set may call the functions of Bucket, which files share.
TERAREC_INLINE uint32_t match_in(const Bucket& bucket, uint64_t hash) {
#if defined(__AVX2__)
  const __m256i four = _mm256_load_si256((const __m256i*)bucket.hashes);
  const __m256i equal_four = _mm256_cmpeq_epi64(four, _mm256_set1_epi64x(hash));
  const uint32_t equal = _mm256_movemask_pd((__m256d)equal_four) | (bucket.hashes[4] == hash) << 4;
  return equal & ((1u << (bucket.word & 7)) - 1);
#elif defined(TERAREC_NEON)
  const uint64x2_t expected = vdupq_n_u64(hash);
  const uint32x2_t low = vmovn_u64(vceqq_u64(vld1q_u64(bucket.hashes), expected));
  const uint32x2_t high = vmovn_u64(vceqq_u64(vld1q_u64(bucket.hashes + 2), expected));
  const uint32x4_t bits = {1, 2, 4, 8};
  const uint32_t four = vaddvq_u32(vandq_u32(vcombine_u32(low, high), bits));
  return (four | (bucket.hashes[4] == hash) << 4) & ((1u << (bucket.word & 7)) - 1);
#else
  return bucket.match(hash);
#endif
}

// Without branches on the results, which cannot be predicted.
static SearchOutcome search_buckets(const SearchBuckets& shared) {
  const SearchBuckets call = shared;
  SearchOutcome outcome{0, 0};
  for (int64_t j = 0; j < call.count; j++) {
    const Bucket& bucket = *call.buckets[j];
    const uint32_t match = match_in(bucket, call.hashes[j]);
    const int slot = __builtin_ctz(match | 1u << (Bucket::kSlots - 1));
    const uint64_t high = bucket.word >> (12 + 4 * slot) & 15;
    const uint64_t none = !match, passed = (bucket.word & Bucket::kMostPassed) != 0;
    call.rows[j] = static_cast<int64_t>((high << 32 | bucket.low[slot]) | (0 - none));
    outcome.onward |= (none & passed) << j;
    outcome.absent |= (none & ~passed) << j;
  }
  return outcome;
}

}  // namespace TERAREC_SET

#define TERAREC_TEXT_OF(name) #name
#define TERAREC_TEXT(name) TERAREC_TEXT_OF(name)
extern const Kernels TERAREC_TABLE = {TERAREC_TEXT(TERAREC_SET), TERAREC_SET::has_outside, TERAREC_SET::copy_rows,
                                      TERAREC_SET::pool_bags, TERAREC_SET::spread_max, TERAREC_SET::dot_rows,
                                      TERAREC_SET::add_bags, TERAREC_SET::add_terms, TERAREC_SET::update_rows,
                                      TERAREC_SET::search_buckets, TERAREC_SET::sum_squares,
                                      TERAREC_SET::mask_gradient<uint16_t>, TERAREC_SET::mask_gradient<float>,
                                      TERAREC_SET::kDotPairs, TERAREC_SET::kPairGradients};

}  // namespace terarec
