#include "embedding/torch_tensors.h"

#include <nanobind/ndarray.h>

#include <stdexcept>

namespace nb = nanobind;

namespace terarec {
namespace {

using nb::dlpack::dltensor;
using nb::dlpack::dtype_code;

// The begin of DLPack's struct DLPackExchangeAPI, version 1.
struct ExchangeApi {
  uint32_t major, minor;
  const ExchangeApi* older;
  void (*allocate)();      // these three have other types and are not called
  void (*export_owned)();
  void (*import_owned)();
  int (*view)(void* tensor, dltensor* out);  // fills `out`, which owns nothing; sets Python's error unless it returns 0
};

const ExchangeApi* exchange = nullptr;

constexpr int64_t kCodesTailBytes = 8;  // scale and offset behind a row's codes

bool is_contiguous(const dltensor& view) {
  int64_t expected = 1;
  for (int i = view.ndim - 1; i >= 0; i--) {
    if (view.shape[i] == 0) return true;
    if (view.shape[i] != 1 && view.strides[i] != expected) return false;
    expected *= view.shape[i];
  }
  return true;
}

}  // namespace

void use_exchange_api(nb::capsule api) {
  const auto* table = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(api.ptr(), "dlpack_exchange_api"));
  if (!table) throw nb::python_error();
  while (table && table->major != 1) table = table->older;
  if (!table || !table->view) throw std::runtime_error("torch has no exchange API of DLPack 1");
  exchange = table;
}

HostTensor::HostTensor(nb::handle tensor) {
  read(tensor);
  if (is_contiguous_) return;
  copy_ = tensor.attr("contiguous")();
  read(copy_);
}

void HostTensor::read(nb::handle tensor) {
  dltensor view;
  if (exchange->view(tensor.ptr(), &view)) throw nb::python_error();
  if (view.ndim > 2) throw std::invalid_argument("a tensor of more than two dimensions");
  data_ = static_cast<char*>(view.data) + view.byte_offset;
  for (int i = 0; i < 2; i++) sizes_[i] = i < view.ndim ? view.shape[i] : 1;
  type_code_ = view.dtype.code;
  type_bits_ = view.dtype.bits;
  is_contiguous_ = is_contiguous(view);
}

RowArray HostTensor::rows() const {
  if (type_bits_ == 8) return {data_, RowType::kCodes8, sizes_[1] - kCodesTailBytes};
  if (type_bits_ == 32) return {data_, RowType::kFloat32, sizes_[1]};
  const bool is_bfloat16 = type_code_ == static_cast<uint8_t>(dtype_code::Bfloat);
  return {data_, is_bfloat16 ? RowType::kBfloat16 : RowType::kFloat16, sizes_[1]};
}

}  // namespace terarec
