// SPDX-License-Identifier: Apache-2.0

// The inner loops that are compiled once per instruction set, and the table that holds one set of them.
//
// They take plain pointers that the drivers (bag_lookup.cpp, row_update.cpp) have checked; they neither allocate nor
// start threads. To keep instructions of one set out of code shared with others, isa/* use no std templates.
#pragma once

#include <cstdint>

#include "embedding/hash_bucket.h"
#include "embedding/isa/pair_dots.h"
#include "embedding/rows.h"

namespace terarec {

// Whether one of the keys is no row of a table of so many rows.
struct CheckKeys {
  const int64_t* keys;
  int64_t count;
  int64_t rows;
};

// Copies row keys[i] of a table to out + i * out_stride, for i < count.
struct CopyRows {
  RowArray table;
  const int64_t* keys;
  int64_t count;
  float* out;
  int64_t out_stride;
  bool stream;  // store past the caches; needs width % 16 == 0 and 64-byte aligned rows of `out`
};

// Pools the rows of bag b, keys[offsets[b]:offsets[b + 1]], into out + b * out_stride, for b < bags. Meanwhile it
// prefetches the rows of as many keys behind them, which are likely to be next, and with bag b the memory from
// soon[b * soon_step] to that of the next bag.
struct PoolBags {
  RowArray table;
  const int64_t* keys;
  const float* key_weights;  // factors of the rows, or null
  const int64_t* offsets;
  int64_t bags;
  float* out;
  int64_t out_stride;
  Pooling pooling;  // any but kNone
  bool stream;
  const char* soon;
  int64_t soon_step;
};

// Gives each key of a bag the columns of the bag's gradient in which its row is the first with the maximum, and zeros
// in the others: spread + i * width for key offsets[0] + i.
struct SpreadMax {
  RowArray table;
  const int64_t* keys;
  const int64_t* offsets;
  int64_t bags;
  const float* grad;
  int64_t grad_stride;
  float* spread;
  float* buffer;  // 2 * table.width floats
};

// Writes dots[i], the dot product of the row of keys[i] and the gradient of its bag, for the keys of all bags.
struct DotRows {
  RowArray table;
  const int64_t* keys;
  const int64_t* offsets;
  int64_t bags;
  const float* grad;
  int64_t grad_stride;
  float* dots;
};

// Adds the gradient of each bag to sums[key >> shift] for those of its keys with (key & mask) == part.
// Without offsets, bag b holds the one key keys[b].
struct AddBags {
  const int64_t* keys;
  const float* key_weights;  // of each key, or null
  const int64_t* offsets;
  int64_t bags;
  int64_t width;
  const float* grad;
  int64_t grad_stride;
  Pooling pooling;
  int64_t mask, part;
  int shift;
  float* sums;
  uint8_t* touched;
  float* buffer;  // width floats, used when the width is not one of those compiled in
};

// The formulas of kernels/row_rules.py, and Keras's AdaMax, AdaDelta and Nadam, which the tables of TensorFlow have
// alone.
enum class Rule {
  kSgd, kAdagrad, kRowwiseAdagrad, kAdam, kMomentum, kNesterov, kRmsprop, kAdamw, kFtrl, kAdamax, kAdadelta,
  kNadam
};

struct RuleConstants {
  float lr;
  float eps;
  float beta1, beta2;
  float gain1, gain2;  // 1 - beta1, 1 - beta2, subtracted in double: in float they would lose four digits
  float first_scale;   // of Adam and AdaMax: 1 / first bias correction; of momentum: factor of the gradient
  float grad_share;    // of Nadam: factor of the gradient beside the moment, whose factor is first_scale
  float second_scale;  // of Adam: 1 / sqrt(second bias correction)
  float weight_decay;
  float beta, l1, l2;  // of FTRL
  float eps_hat;       // of Adam: added to the root of the second moment before second_scale; of AdaGrad and
                       // RMSProp, as Keras 3 has them: added under the root
};

// Options that most updates do not use.
struct RowExtras {
  float grad_scale;
  float clip_value, clip_norm;  // infinite: none
  float l1, l2;                 // coupled
  double beta1, beta2;          // of RuleConstants, for powers of them
  int32_t step;
  int32_t* last_steps;     // of each row, for rules that catch up; else null
  uint64_t update_stream;  // of the bits that round narrow rows
};

// Floats of buffer that the update of a row needs: its gradient, its copy and its random bits.
static inline int64_t update_floats(int64_t width) { return 3 * width + 1; }

// A gradient times a factor, a term of one of several sums.
struct SumTerm {
  const float* grad;
  float scale;
  uint32_t sum;
};

// Sets each sum to its term in `first`, then adds the terms in `more` in their order; sum s is at sums + s * width.
struct AddTerms {
  int64_t width;
  const SumTerm* first;
  int64_t num_sums;
  const SumTerm* more;
  int64_t num_more;
  float* sums;
};

// Updates arena rows rows[g], g < groups, each with its gradient grads[g], in the memory of row places[g].
struct UpdateRows {
  void* weights;
  RowType row_type;  // narrow only with `extras`
  float* state0;
  float* state1;
  int64_t width;
  Rule rule;
  RuleConstants constants;
  const RowExtras* extras;  // or null
  int64_t groups;
  const int64_t* rows;
  const int64_t* places;  // `rows` where rows lie in their order
  const int64_t* numbers;  // on which the bits of a rounding depend, mostly `rows`
  const float* const* grads;
  const float* scales;  // factors of the gradients, or null
  float* buffer;  // update_floats(width) floats
};

// Copies a gradient, [rows, columns] of float, or of uint16_t for bfloat16, where the positive part of the same shape is
// positive, and zeros where it is not; adds its columns to `sums`.
template <class T>
struct MaskGradient {
  const T* grad;
  int64_t grad_stride;
  const T* part;  // one row after the other
  int64_t rows, columns;
  T* masked;  // one row after the other
  float* sums;
  bool stream;  // store past the caches; needs rows of whole cache lines, and `masked` aligned to them
};

// Searches key j, by its hash, in *buckets[j], j < count <= 64: rows[j] becomes its row there, or -1.
struct SearchBuckets {
  const uint64_t* hashes;
  const Bucket* const* buckets;
  int64_t count;
  int64_t* rows;
};

// Bit j of keys that are not in their buckets: of those that may be in later ones, and of the others.
struct SearchOutcome {
  uint64_t onward, absent;
};

struct Kernels {
  const char* name;
  bool (*has_outside)(const CheckKeys&);
  void (*copy_rows)(const CopyRows&);
  void (*pool_bags)(const PoolBags&);
  void (*spread_max)(const SpreadMax&);
  void (*dot_rows)(const DotRows&);
  void (*add_bags)(const AddBags&);
  void (*add_terms)(const AddTerms&);
  void (*update_rows)(const UpdateRows&);
  SearchOutcome (*search_buckets)(const SearchBuckets&);
  double (*sum_squares)(const UpdateRows&, int64_t first_row);  // of the gradients; rows before it do not count
  void (*mask_bfloat16)(const MaskGradient<uint16_t>&);
  void (*mask_float)(const MaskGradient<float>&);
  void (*dot_pairs)(const PairDots<float>&);  // null, and so the next, where the set has no fused multiply-add
  void (*pair_gradients)(const PairGradients<float>&);
};

// The set in use: the best that the CPU runs, or the one selected.
const Kernels& kernels();

// Selects a set by name: "generic", "avx2", "avx512", "wide", "neon", or "auto". False if it is unknown or cannot run
// here. "wide" runs the 16-lane source on AVX2, so that machines without AVX-512 test it.
bool select_kernels(const char* name);

// Name of set number `index` of those that this CPU runs, slowest first and without "wide"; null behind the last.
const char* runnable_kernels(int index);

}  // namespace terarec
