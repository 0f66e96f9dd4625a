// SPDX-License-Identifier: Apache-2.0

// Prints what the embedding core computes, as a digest for each instruction set that the processor runs: lines of
// "<set> <case> <digest>". test_aarch64.py compares those of several builds; cases named "libm..." depend on the C
// library's functions, too, so they are compared within one build alone.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "embedding/bag_lookup.h"
#include "embedding/dense.h"
#include "embedding/hash_index.h"
#include "embedding/kernels.h"
#include "embedding/row_init.h"
#include "embedding/row_update.h"

#include "check_digest.h"

using namespace terarec;

namespace {

constexpr int64_t kRows = 97, kFeatures = 2, kBatch = 41;
constexpr int64_t kWidths[] = {1, 3, 8, 16, 17, 32, 64, 100, 128, 256};
constexpr RowType kTypes[] = {RowType::kFloat32, RowType::kBfloat16, RowType::kFloat16, RowType::kCodes8};
const char* const kTypeNames[] = {"float32", "bfloat16", "float16", "codes8"};

std::vector<float> numbers(Random& random, int64_t count) {
  std::vector<float> made(count);
  for (float& number : made) number = random.number();
  return made;
}

// Rows of finite numbers, subnormal halves among them.
std::vector<uint8_t> table(Random& random, RowType type, int64_t width) {
  std::vector<uint8_t> bytes(kRows * row_bytes(type, width));
  for (int64_t row = 0; row < kRows; row++) {
    uint8_t* to = bytes.data() + row * row_bytes(type, width);
    for (int64_t c = 0; c < width; c++) {
      const float number = random.number();
      uint32_t bits;
      memcpy(&bits, &number, 4);
      const uint16_t half = static_cast<uint16_t>(type == RowType::kBfloat16 ? bits >> 16 : random.bits() & 0xBFFF);
      if (type == RowType::kFloat32) memcpy(to + 4 * c, &number, 4);
      else if (type == RowType::kCodes8) to[c] = static_cast<uint8_t>(random.bits());
      else memcpy(to + 2 * c, &half, 2);
    }
    const float tail[] = {random.number(), random.number()};
    if (type == RowType::kCodes8) memcpy(to + width, tail, 8);
  }
  return bytes;
}

// Two features of one table: bags of 0 to 6 keys.
struct Bags {
  explicit Bags(Random& random, Pooling pooling) : layout{{0, kRows, pooling, 0}, {0, kRows, pooling, 0}} {
    for (int64_t bag = 0; bag < kFeatures * kBatch; bag++) {
      for (int64_t i = random.below(7); i > 0; i--) keys.push_back(random.below(kRows));
      offsets.push_back(static_cast<int64_t>(keys.size()));
    }
    key_weights = numbers(random, static_cast<int64_t>(keys.size()));
  }

  int64_t num_keys() const { return static_cast<int64_t>(keys.size()); }

  std::vector<int64_t> keys, offsets{0};
  std::vector<float> key_weights;
  FeatureLayout layout[kFeatures];
};

void check_lookups(int type) {
  Digest pooled, dots;
  for (const int64_t width : kWidths) {
    Random random(width);
    const std::vector<uint8_t> rows = table(random, kTypes[type], width);
    const RowArray weights{rows.data(), kTypes[type], width};
    for (const Pooling pooling : {Pooling::kSum, Pooling::kMean, Pooling::kNone, Pooling::kSqrtn, Pooling::kMax}) {
      for (const bool weighted : {false, true}) {
        if (weighted && (pooling == Pooling::kNone || pooling == Pooling::kMax)) continue;
        const Bags bags(random, pooling);
        std::vector<float> out((pooling == Pooling::kNone ? bags.num_keys() : kBatch * kFeatures) * width);
        bag_lookup({weights, bags.keys.data(), bags.num_keys(), weighted ? bags.key_weights.data() : nullptr,
                    bags.offsets.data(), bags.layout, kFeatures, kBatch, out.data(), 1});
        pooled.add(out);
        if (pooling != Pooling::kSum) continue;
        const std::vector<float> grad = numbers(random, kBatch * kFeatures * width);
        std::vector<float> found(bags.num_keys());
        row_dots({weights, bags.keys.data(), bags.num_keys(), bags.offsets.data(), bags.layout, kFeatures, kBatch,
                  grad.data(), kFeatures * width, found.data(), 1});
        dots.add(found);
      }
    }
  }
  pooled.print(kernels().name, std::string("lookup/") + kTypeNames[type]);
  if (kTypes[type] != RowType::kCodes8) dots.print(kernels().name, std::string("dots/") + kTypeNames[type]);
}

RowRule rule_of(const char* kind) {
  RowRule rule{*RowRule::formula_of(kind)};
  rule.lr = 0.05;
  rule.eps = 1e-3;
  rule.beta1 = 0.9;
  rule.beta2 = 0.99;
  rule.beta = 0.5;
  rule.weight_decay = 0.1;
  if (rule.formula == Rule::kFtrl) rule.l1 = rule.l2 = 0.02;
  return rule;
}

// Three steps, from sums, means or maxima of bags, in rows of each type.
void check_updates(const std::string& name, const RowRule& rule) {
  Digest digest;
  for (const RowType type : {RowType::kFloat32, RowType::kBfloat16, RowType::kFloat16}) {
    for (const int64_t width : kWidths) {
      Random random(width + 1);
      std::vector<uint8_t> rows = table(random, type, width);
      std::vector<float> state0(kRows * width, 0.01f), state1(kRows * width, 0.01f);
      std::vector<int32_t> last_steps(kRows);
      for (int64_t step = 1; step <= 3; step++) {
        const Bags bags(random, step == 1 ? Pooling::kSum : step == 2 ? Pooling::kMean : Pooling::kMax);
        const std::vector<float> grad = numbers(random, kBatch * kFeatures * width);
        const UpdateGradients gradients{rows.data(), type, width, nullptr, 1,
                                        {{bags.keys.data(), nullptr, bags.num_keys(), nullptr, bags.offsets.data(),
                                          bags.layout, kFeatures, kBatch, grad.data(), kFeatures * width}}};
        row_update({state0.data(), state1.data(), rule.catches_up ? last_steps.data() : nullptr, rule, 2 * step, 7,
                    gradients});
      }
      digest.add(rows);
      digest.add(state0);
      digest.add(state1);
    }
  }
  digest.print(kernels().name, name);
}

void check_all_updates() {
  for (const char* kind : {"sgd", "momentum", "nesterov", "adagrad", "rowwise_adagrad", "rmsprop", "adam", "adamw",
                           "ftrl"}) {
    RowRule rule = rule_of(kind);
    const bool scales_by_power = !strncmp(kind, "adam", 4);
    check_updates((scales_by_power ? "libm/update/" : "update/") + std::string(kind), rule);
    rule.updates_all_rows = true;
    rule.grad_scale = 0.5;
    rule.clip_value = 0.4;
    rule.clip_norm = 1.5;
    if (rule.formula != Rule::kFtrl) rule.l1 = rule.l2 = 0.01;
    check_updates((scales_by_power ? "libm/all_rows/" : "all_rows/") + std::string(kind), rule);
  }
  for (const char* kind : {"momentum", "nesterov", "rmsprop", "adam", "adamw"}) {
    RowRule rule = rule_of(kind);
    rule.catches_up = true;
    check_updates(std::string("libm/catch_up/") + kind, rule);
  }
}

void check_fills() {
  for (const bool normal : {false, true}) {
    Digest digest;
    for (const int64_t width : kWidths) {
      std::vector<float> rows(kRows * width);
      fill_rows({rows.data(), kRows, width, 5, 11, 0.5, normal, 1});
      digest.add(rows);
    }
    digest.print(kernels().name, normal ? "libm/fill/normal" : "fill/uniform");
  }
}

void check_masks() {
  Digest digest;
  for (const int64_t width : kWidths) {
    Random random(width);
    const int64_t rows = 300;
    std::vector<uint16_t> grad(rows * width), part(rows * width), masked(rows * width);
    for (uint16_t& number : grad) number = random.bits() & 0xBF7F;  // finite
    for (uint16_t& number : part) number = random.bits();
    std::vector<float> sums(width);
    mask_gradient(MaskGradient<uint16_t>{grad.data(), width, part.data(), rows, width, masked.data(), sums.data(), false}, 2);
    digest.add(masked);
    digest.add(sums);
  }
  digest.print(kernels().name, "mask_gradient");
}

void check_index() {
  HashIndex index(99);
  Random random(3);
  Digest digest;
  int64_t next = 0;
  for (int call = 0; call < 40; call++) {
    std::vector<int64_t> keys(3000), rows(keys.size()), new_keys(keys.size()), counted(keys.size());
    for (int64_t& key : keys) key = random.below(60000) * 0x9E3779B97F4A7C15 - 30000;
    const KeySpan span{keys.data(), static_cast<int64_t>(keys.size())};
    const int64_t num_new = index.insert(span, rows.data(), {nullptr, 0, next, 1}, new_keys.data(), 1);
    next += num_new;
    digest.add(rows);
    digest.add(new_keys);
    index.find({keys.data(), 1000}, rows.data(), 1);
    digest.add(rows);
    index.erase({keys.data() + call * 10, 700}, rows.data(), 1);
    index.find(span, rows.data(), 1);
    digest.add(rows);
    std::vector<int64_t> size{index.size(), num_new};
    digest.add(size);
  }
  digest.print(kernels().name, "hash_index");
}

}  // namespace

int main() {
  for (int i = 0; const char* name = runnable_kernels(i); i++) {
    select_kernels(name);
    for (int type = 0; type < 4; type++) check_lookups(type);
    check_all_updates();
    check_fills();
    check_masks();
    check_index();
  }
}
