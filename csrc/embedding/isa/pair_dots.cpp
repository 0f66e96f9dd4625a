// SPDX-License-Identifier: Apache-2.0

// The loops of pair_dots.h. An instruction adds 32 products of bfloat16 to 16 sums in float32, in pairs. As in torch's
// products on such a processor, subnormal numbers count as zero. As isa/kernel_set.cpp this uses no std templates.

#include "embedding/isa/pair_dots.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>

namespace terarec {
namespace {

// 16 floats rounded to bfloat16, to the nearest one and in ties to the even one, in the upper halves of 32 bits each;
// the lower halves are any.
inline __m512i nearest(__m512 value) {
  const __m512i bits = _mm512_castps_si512(value);
  const __m512i even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(even, _mm512_set1_epi32(0x7FFF)));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
  return _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x400000));
}

inline __m256i narrowed(__m512 value) { return _mm512_cvtepi32_epi16(_mm512_srli_epi32(nearest(value), 16)); }

inline __m512 widened(__m256i value) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(value), 16));
}

// The first `count` of 16 lanes.
inline __mmask16 first_lanes(int64_t count) { return count >= 16 ? 0xFFFF : (1u << (count > 0 ? count : 0)) - 1; }

inline __m512 add_pairs(__m512 sum, uint32_t pair, __m512i pairs) {
  return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)pairs);
}

// What one sample needs: its vectors as rows of bfloat16, two to 32 bits, with zeros behind them; the same in columns of
// 32 bits; a number for each pair of vectors in float32 or bfloat16; the numbers of the lower triangle, packed.
struct Buffer {
  int64_t padded_vectors, row_pairs;  // row_pairs: of 32 bits
  uint32_t* rows;
  uint32_t* columns;
  float* dots;
  uint16_t* packed;

  explicit Buffer(const SampleVectors<uint16_t>& of)
      : padded_vectors((of.vectors + 15) / 16 * 16), row_pairs((of.width + 31) / 32 * 16),
        rows(static_cast<uint32_t*>(of.buffer)), columns(rows + padded_vectors * row_pairs),
        dots(reinterpret_cast<float*>(columns + padded_vectors * row_pairs)),
        packed(reinterpret_cast<uint16_t*>(dots + padded_vectors * padded_vectors)) {
    __builtin_memset(of.buffer, 0, pair_bytes(of.vectors, of.width));
  }
};

inline void read_vectors(const SampleVectors<uint16_t>& of, int64_t sample, const Buffer& buffer) {
  __builtin_memcpy(buffer.rows, of.first + sample * of.first_stride, 2 * of.width);
  const float* other = of.others + sample * of.others_stride;
  uint16_t* row = reinterpret_cast<uint16_t*>(buffer.rows + buffer.row_pairs);
  for (int64_t i = 1; i < of.vectors; i++, other += of.width, row += 2 * buffer.row_pairs) {
    for (int64_t c = 0; c < of.width; c += 16) {
      const __m512 numbers = _mm512_maskz_loadu_ps(first_lanes(of.width - c), other + c);
      _mm256_storeu_si256((__m256i*)(row + c), narrowed(numbers));
    }
  }
}

// Transposes 16 x 16 numbers of 32 bits: each round interleaves the first half of the rows with the second.
inline void transpose(const uint32_t* from, int64_t from_stride, uint32_t* to, int64_t to_stride) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  __m512i held[16], next[16];
  for (int i = 0; i < 16; i++) held[i] = _mm512_loadu_si512(from + i * from_stride);
  for (int round = 0; round < 4; round++) {
    for (int i = 0; i < 8; i++) {
      next[2 * i] = _mm512_permutex2var_epi32(held[i], low, held[i + 8]);
      next[2 * i + 1] = _mm512_permutex2var_epi32(held[i], high, held[i + 8]);
    }
    for (int i = 0; i < 16; i++) held[i] = next[i];
  }
  for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + i * to_stride, held[i]);
}

// The dots of four vectors from `row` on with 16 * kVectors from `column` on.
template <int kVectors>
inline void dot_tile(const Buffer& buffer, int64_t row, int64_t column) {
  __m512 sums[4][kVectors] = {};
  const uint32_t* const rows = buffer.rows + row * buffer.row_pairs;
  for (int64_t c = 0; c < buffer.row_pairs; c++) {
    for (int v = 0; v < kVectors; v++) {
      const __m512i pairs = _mm512_loadu_si512(buffer.columns + c * buffer.padded_vectors + column + 16 * v);
      for (int r = 0; r < 4; r++) sums[r][v] = add_pairs(sums[r][v], rows[r * buffer.row_pairs + c], pairs);
    }
  }
  for (int r = 0; r < 4; r++) {
    float* const dots = buffer.dots + (row + r) * buffer.padded_vectors + column;
    for (int v = 0; v < kVectors; v++) _mm512_storeu_ps(dots + 16 * v, sums[r][v]);
  }
}

inline void write_dots(const PairDots<uint16_t>& call, int64_t sample, const Buffer& buffer) {
  const SampleVectors<uint16_t>& of = call.of;
  uint16_t* packed = buffer.packed;  // what is written behind the end of a row of the triangle, the next ones overwrite
  for (int64_t i = 1; i < of.vectors; packed += i++) {
    const float* const dots = buffer.dots + i * buffer.padded_vectors;
    for (int64_t j = 0; j < i; j += 16) _mm256_storeu_si256((__m256i*)(packed + j), narrowed(_mm512_loadu_ps(dots + j)));
  }
  const int64_t num_pairs = packed - buffer.packed;
  uint16_t* const out = call.out + sample * call.out_stride;
  __builtin_memcpy(out, of.first + sample * of.first_stride, 2 * of.width);
  __builtin_memcpy(out + of.width, buffer.packed, 2 * num_pairs);
  __builtin_memset(out + of.width + num_pairs, 0, 2 * (call.out_stride - of.width - num_pairs));
}

// The row of a vector in the matrix of gradients, which lies where dots do.
inline uint16_t* numbers_of(const Buffer& buffer, int64_t vector) {
  return reinterpret_cast<uint16_t*>(buffer.dots) + vector * buffer.padded_vectors;
}

// The symmetric matrix of the gradients of the dots, with zeros on its diagonal.
inline void unpack(const uint16_t* grad, int64_t vectors, const Buffer& buffer) {
  __builtin_memcpy(buffer.packed, grad, vectors * (vectors - 1));
  const uint16_t* packed = buffer.packed;
  for (int64_t i = 1; i < vectors; packed += i++) {
    uint16_t* const mine = numbers_of(buffer, i);
    __builtin_memcpy(mine, packed, 2 * i);
    for (int64_t j = 0; j < i; j++) numbers_of(buffer, j)[i] = packed[j];
    for (int64_t j = i; j < buffer.padded_vectors; j++) mine[j] = 0;
  }
}

// Writes vectors 2 j and 2 j + 1 as row j of pairs, number by number.
inline void pair_rows(const Buffer& buffer) {
  for (int64_t j = 0; j < buffer.padded_vectors / 2; j++) {
    const __m256i* const first = (const __m256i*)(buffer.rows + 2 * j * buffer.row_pairs);
    const __m256i* const second = (const __m256i*)(buffer.rows + (2 * j + 1) * buffer.row_pairs);
    uint32_t* const to = buffer.columns + 2 * j * buffer.row_pairs;
    for (int64_t k = 0; k < buffer.row_pairs / 8; k++) {
      const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(first + k));
      const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(second + k)), 16);
      _mm512_storeu_si512(to + 16 * k, _mm512_or_si512(low, high));
    }
  }
}

// The gradients of four vectors from `row` on, in 16 * kVectors columns from `column` on.
template <int kVectors>
inline void gradient_tile(const PairGradients<uint16_t>& call, int64_t sample, const Buffer& buffer, int64_t row, int64_t column) {
  const SampleVectors<uint16_t>& of = call.of;
  __m512 sums[4][kVectors] = {};
  const uint32_t* factors[4];
  for (int r = 0; r < 4; r++) factors[r] = reinterpret_cast<const uint32_t*>(numbers_of(buffer, row + r));
  for (int64_t j = 0; j < (of.vectors + 1) / 2; j++) {
    for (int v = 0; v < kVectors; v++) {
      const __m512i pairs = _mm512_loadu_si512(buffer.columns + 2 * j * buffer.row_pairs + column + 16 * v);
      for (int r = 0; r < 4; r++) sums[r][v] = add_pairs(sums[r][v], factors[r][j], pairs);
    }
  }
  for (int r = 0; r < 4 && row + r < of.vectors; r++) {
    for (int v = 0; v < kVectors; v++) {
      const int64_t c = column + 16 * v;
      const __mmask16 lanes = first_lanes(of.width - c);
      const __m512i high = _mm512_set1_epi32(0xFFFF0000);
      const __m512 sum = _mm512_castsi512_ps(_mm512_and_si512(nearest(sums[r][v]), high));
      if (row + r > 0) {
        float* const to = call.grad_others + (sample * (of.vectors - 1) + row + r - 1) * of.width + c;
        if (call.stream) _mm512_stream_ps(to, sum);
        else _mm512_mask_storeu_ps(to, lanes, sum);
      } else {
        const __m256i own = _mm256_maskz_loadu_epi16(lanes, call.grad + sample * call.grad_stride + c);
        const __m256i both = narrowed(_mm512_add_ps(sum, widened(own)));
        _mm256_mask_storeu_epi16(call.grad_first + sample * of.width + c, lanes, both);
      }
    }
  }
}

}  // namespace

void dot_pairs(const PairDots<uint16_t>& shared) {
  const PairDots<uint16_t> call = shared;
  const Buffer buffer(call.of);
  for (int64_t sample = 0; sample < call.of.samples; sample++) {
    read_vectors(call.of, sample, buffer);
    for (int64_t i = 0; i < buffer.padded_vectors; i += 16) {
      for (int64_t c = 0; c < buffer.row_pairs; c += 16) {
        transpose(buffer.rows + i * buffer.row_pairs + c, buffer.row_pairs,
                  buffer.columns + c * buffer.padded_vectors + i, buffer.padded_vectors);
      }
    }
    for (int64_t row = 0; row < call.of.vectors; row += 4) {
      int64_t column = 0;
      for (; column + 16 < row + 3; column += 32) dot_tile<2>(buffer, row, column);
      if (column < row + 3) dot_tile<1>(buffer, row, column);
    }
    write_dots(call, sample, buffer);
  }
}

void pair_gradients(const PairGradients<uint16_t>& shared) {
  const PairGradients<uint16_t> call = shared;
  const SampleVectors<uint16_t>& of = call.of;
  const Buffer buffer(of);
  for (int64_t sample = 0; sample < of.samples; sample++) {
    read_vectors(of, sample, buffer);
    pair_rows(buffer);
    unpack(call.grad + sample * call.grad_stride + of.width, of.vectors, buffer);
    for (int64_t row = 0; row < of.vectors; row += 4) {
      int64_t column = 0;
      for (; column + 64 <= of.width; column += 64) gradient_tile<4>(call, sample, buffer, row, column);
      for (; column < of.width; column += 16) gradient_tile<1>(call, sample, buffer, row, column);
    }
  }
  if (call.stream) _mm_sfence();
}

}  // namespace terarec
#else
namespace terarec {

void dot_pairs(const PairDots<uint16_t>&) {}
void pair_gradients(const PairGradients<uint16_t>&) {}

}  // namespace terarec
#endif
