// SPDX-License-Identifier: Apache-2.0

// torch's tensors as memory. They are read through the C functions that torch gives to extensions, DLPack's exchange
// API, which links nothing: 0.1 us for a tensor with its type, shape and strides. Python takes as long for each of them.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>

#include "embedding/rows.h"

namespace terarec {

// Reads tensors from now on through `api`, the capsule torch.Tensor.__dlpack_c_exchange_api__.
void use_exchange_api(nanobind::capsule api);

// Type, shape and strides of a tensor in host memory.
struct TensorKind {
  int dimensions;    // 0 to 2
  int64_t sizes[2];  // 1 beyond the dimensions
  uint8_t type_code, type_bits;

  bool is_int64(int of_dimensions) const;
  bool is_float32(int of_dimensions) const;
  bool is_rows() const;  // float32, bfloat16 or float16 [V, D]
};

// Empty for an object that is no tensor, a tensor on another device or without memory, or more dimensions.
std::optional<TensorKind> kind_of(nanobind::handle tensor);

// A tensor in host memory of up to two dimensions, or a contiguous copy if it is not contiguous.
class HostTensor {
 public:
  // With `rows_apart` only each row must be contiguous, at any stride between rows.
  explicit HostTensor(nanobind::handle tensor, bool rows_apart = false);

  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

  int dimensions() const { return kind_.dimensions; }
  int64_t size(int dimension) const { return kind_.sizes[dimension]; }

  // Elements from one row to the next.
  int64_t row_stride() const { return row_stride_; }

  // Of a tensor of a table's rows; rows of codes have their scale and offset behind them.
  RowArray rows() const;

 private:
  // Returns whether the elements are laid out as required.
  bool read(nanobind::handle tensor, bool rows_apart);

  nanobind::object copy_;
  void* data_;
  TensorKind kind_;
  int64_t row_stride_;
};

}  // namespace terarec
