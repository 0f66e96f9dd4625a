// torch's tensors as memory. They are read through the C functions that torch gives to extensions, DLPack's exchange
// API, which links nothing: 0.1 us for a tensor with its type, shape and strides. Python takes as long for each of them.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "embedding/row_type.h"

namespace terarec {

// Reads tensors from now on through `api`, the capsule torch.Tensor.__dlpack_c_exchange_api__.
void use_exchange_api(nanobind::capsule api);

// A tensor in host memory of up to two dimensions, or a contiguous copy if its elements do not lie one after the other.
class HostTensor {
 public:
  explicit HostTensor(nanobind::handle tensor);

  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

  int64_t size(int dimension) const { return sizes_[dimension]; }

  // Of a tensor of a table's rows; rows of codes have their scale and offset behind them.
  RowArray rows() const;

 private:
  void read(nanobind::handle tensor);

  nanobind::object copy_;
  void* data_;
  int64_t sizes_[2];
  uint8_t type_code_, type_bits_;
  bool is_contiguous_;
};

}  // namespace terarec
