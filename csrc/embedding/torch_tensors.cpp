// SPDX-License-Identifier: Apache-2.0
#include "embedding/torch_tensors.h"

#include <nanobind/ndarray.h>

#include <stdexcept>

namespace nb = nanobind;

namespace terarec {
namespace {

using nb::dlpack::dltensor;
using nb::dlpack::dtype_code;

// The beginning of DLPack's struct DLPackExchangeAPI, version 1.
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

bool is_contiguous(const dltensor& view, bool rows_apart) {
  int64_t expected = 1;
  for (int i = view.ndim - 1; i >= 0; i--) {
    if (view.shape[i] == 0) return true;
    if (rows_apart && i == 0 && view.ndim == 2) return true;
    if (view.shape[i] != 1 && view.strides[i] != expected) return false;
    expected *= view.shape[i];
  }
  return true;
}

TensorKind kind_of(const dltensor& view) {
  TensorKind kind{view.ndim, {1, 1}, view.dtype.code, view.dtype.bits};
  for (int i = 0; i < view.ndim; i++) kind.sizes[i] = view.shape[i];
  return kind;
}

bool is_of(const TensorKind& kind, dtype_code code, int bits) {
  return kind.type_code == static_cast<uint8_t>(code) && kind.type_bits == bits;
}

}  // namespace

bool TensorKind::is_int64(int of_dimensions) const {
  return dimensions == of_dimensions && is_of(*this, dtype_code::Int, 64);
}

bool TensorKind::is_float32(int of_dimensions) const {
  return dimensions == of_dimensions && is_of(*this, dtype_code::Float, 32);
}

bool TensorKind::is_rows() const {
  return is_float32(2) ||
         (dimensions == 2 && (is_of(*this, dtype_code::Float, 16) || is_of(*this, dtype_code::Bfloat, 16)));
}

std::optional<TensorKind> kind_of(nb::handle tensor) {
  dltensor view;
  if (exchange->view(tensor.ptr(), &view)) {
    PyErr_Clear();
    return {};
  }
  if (view.device.device_type != nb::device::cpu::value || view.ndim > 2) return {};
  return kind_of(view);
}

void use_exchange_api(nb::capsule api) {
  const auto* table = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(api.ptr(), "dlpack_exchange_api"));
  if (!table) throw nb::python_error();
  while (table && table->major != 1) table = table->older;
  if (!table || !table->view) throw std::runtime_error("torch has no exchange API of DLPack 1");
  exchange = table;
}

HostTensor::HostTensor(nb::handle tensor, bool rows_apart) {
  if (read(tensor, rows_apart)) return;
  copy_ = tensor.attr("contiguous")();
  read(copy_, rows_apart);
}

bool HostTensor::read(nb::handle tensor, bool rows_apart) {
  dltensor view;
  if (exchange->view(tensor.ptr(), &view)) throw nb::python_error();
  if (view.ndim > 2) throw std::invalid_argument("a tensor of more than two dimensions");
  data_ = static_cast<char*>(view.data) + view.byte_offset;
  kind_ = kind_of(view);
  row_stride_ = view.ndim ? view.strides[0] : 1;
  return is_contiguous(view, rows_apart);
}

RowArray HostTensor::rows() const {
  const int64_t columns = kind_.sizes[1];
  if (kind_.type_bits == 8) return {data_, RowType::kCodes8, columns - kCodesTailBytes};
  if (kind_.type_bits == 32) return {data_, RowType::kFloat32, columns};
  return {data_, is_of(kind_, dtype_code::Bfloat, 16) ? RowType::kBfloat16 : RowType::kFloat16, columns};
}

}  // namespace terarec
