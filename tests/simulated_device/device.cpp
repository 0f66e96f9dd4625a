// SPDX-License-Identifier: Apache-2.0

// A device named "simulated" whose memory is the host's, for tests on machines without a GPU.
//
// It is a backend of PyTorch with the dispatch key PrivateUse1. Operators run on the CPU, but raise where CUDA raises:
// for tensors on different devices, for a random number generator of the CPU, and for operators of other libraries that
// have a kernel for the CPU alone. PyTorch itself refuses to make NumPy arrays of the tensors. It counts what makes a
// host wait for a GPU or copies between the two. Work is done at once, but a stream that touches memory without having
// waited for what another one does with it raises, as does memory that is freed while another stream uses it. Pinned
// memory of the host is closed to it, whatever code uses it, until it has waited for a copy: for all use if the copy is
// to this memory, for writing if it is from there. The work after such a use raises. One kind of mistakes does not
// show: code that passes the address of a tensor of the device to a library finds its memory.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "streams.h"

namespace {

using namespace simulated;
using at::IntArrayRef;
using at::Scalar;
using at::ScalarType;
using c10::SymIntArrayRef;
using MaybeTensor = std::optional<Tensor>;

// ---- Counts of copies and waits

int64_t copies_to_host, copies_to_device, waits;
thread_local int uncounted = 0;

// What runs while one of these lives is the device's own work.
struct Uncounted {
  Uncounted() { uncounted++; }
  ~Uncounted() { uncounted--; }
};

void count(int64_t& number) {
  if (!uncounted) number++;
}

// Waits for the current stream, unless this is work of the device.
void wait_here() {
  if (!uncounted) host_waits_for(current_stream);
}

// ---- The device itself, as PyTorch asks for it

class Guard final : public c10::impl::NoOpDeviceGuardImpl<kType> {
 public:
  // C10_REGISTER_GUARD_IMPL reads this name.
  static constexpr c10::DeviceType static_type = kType;

  c10::Device getDevice() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getNewStream(c10::Device, int) const override {
    const std::lock_guard<std::mutex> lock(mutex);
    return stream(num_streams++);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream next) const noexcept override {
    return stream(std::exchange(current_stream, next.id()));
  }
  bool queryStream(const c10::Stream&) const override { return false; }
  void synchronizeStream(const c10::Stream& waited) const override { host_waits_for(waited.id()); }
  void synchronizeDevice(c10::DeviceIndex) const override {
    for (int64_t id = 0; id < num_streams; id++) host_waits_for(id);
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& user) const override {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = uses.find(pointer.get());
    if (found != uses.end()) found->second.recorded.insert(user.id());
  }

  void record(void** event, const c10::Stream& recorded, c10::DeviceIndex, c10::EventFlag) const override {
    const std::lock_guard<std::mutex> lock(mutex);
    if (!*event) *event = new Event;
    *static_cast<Event*>(*event) = {clocks[recorded.id()], false};
  }
  void block(void* event, const c10::Stream& waiting) const override {
    const std::lock_guard<std::mutex> lock(mutex);
    if (event) merge(clocks[waiting.id()], static_cast<Event*>(event)->clock);
  }
  // An event has not come the first time that the host asks.
  bool queryEvent(void* event) const override {
    const std::lock_guard<std::mutex> lock(mutex);
    if (!event) return true;
    auto* asked = static_cast<Event*>(event);
    if (!std::exchange(asked->was_asked, true)) return false;
    host_learns(asked->clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    const std::lock_guard<std::mutex> lock(mutex);
    if (event) host_learns(static_cast<Event*>(event)->clock);
    raise_mistake();
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }

 private:
  struct Event {
    Clock clock;
    bool was_asked;
  };

  static c10::Stream stream(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, id); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return kDevice.index(); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DataPtr resized = memory.allocate(bytes);
    const size_t kept = std::min(storage.nbytes(), bytes);
    if (kept) std::memcpy(resized.get(), storage.data(), kept);
    c10::StorageImpl* held = storage.unsafeGetStorageImpl();
    held->set_data_ptr_noswap(std::move(resized));
    held->set_nbytes(bytes);
  }
};

Hooks hooks;
[[maybe_unused]] const bool are_hooks_registered = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

// ---- Operators that make, copy and view tensors, which every backend has to have

Tensor empty(IntArrayRef size, std::optional<ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &memory, keys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &memory, keys, c10::dtype_or_default(dtype));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (from.is_cpu() && to.numel()) count(copies_to_device);
  if (to.is_cpu() && to.numel()) count(copies_to_host);
  touch(from, false);
  touch(to, true);
  copy_by_device(from, to);
  // As of CUDA: a copy from memory that is not pinned takes the values at once, and one to such memory is waited for.
  const bool is_waited_for = !non_blocking || (to.is_cpu() && !is_pinned(to.storage().data()));
  if (is_waited_for && (from.is_cpu() || to.is_cpu())) wait_here();
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  // Only then: a resized tensor is contiguous, and `to` may be a view with other strides.
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

Scalar item(const Tensor& tensor) {
  count(waits);
  touch(tensor, false);
  wait_here();
  return on_host(tensor).item();
}

Tensor as_strided(const Tensor& tensor, SymIntArrayRef size, SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  const auto first = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::cpu::as_strided(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), first);
}

Tensor view(const Tensor& tensor, SymIntArrayRef size) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor reshape_alias(const Tensor& tensor, SymIntArrayRef size, SymIntArrayRef stride) {
  return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

const Tensor& resize_(const Tensor& tensor, SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  const IntArrayRef sizes = C10_AS_INTARRAYREF_SLOW(size);
  const size_t bytes = (c10::multiply_integers(sizes) + tensor.storage_offset()) * tensor.itemsize();
  if (tensor.storage().nbytes() < bytes) hooks.resizePrivateUse1Bytes(tensor.storage(), bytes);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

Tensor& set_part_of_storage(Tensor& tensor, at::Storage storage, c10::SymInt offset, SymIntArrayRef size,
                            SymIntArrayRef stride) {
  at::TensorImpl* held = tensor.unsafeGetTensorImpl();
  held->set_storage_keep_dtype(std::move(storage));
  held->set_storage_offset(offset.expect_int());
  held->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  return tensor;
}

Tensor& set_storage(Tensor& tensor, at::Storage storage) {
  const auto count = static_cast<int64_t>(storage.nbytes() / tensor.itemsize());
  return set_part_of_storage(tensor, std::move(storage), 0, {count}, {1});
}

// ---- All other operators

// Returns whether an argument may be on the CPU next to tensors on the device: CUDA takes from there the numbers in
// tensors without dimensions and the indices of `tensor[indices]`.
bool may_be_on_cpu(const std::string& op, const c10::Argument& argument, const Tensor& tensor) {
  const bool is_written = argument.alias_info() && argument.alias_info()->isWrite();
  const bool is_list = argument.type()->kind() == c10::TypeKind::ListType;
  const bool is_index = argument.name() == "indices" && op.find("index") != std::string::npos;
  return is_list ? is_index : tensor.dim() == 0 && !is_written;
}

// Raises unless the arguments of an operator are on one device.
void check_devices(const std::string& op, const std::vector<c10::Argument>& arguments,
                   c10::ArrayRef<c10::IValue> values) {
  std::optional<c10::Device> device;
  const auto check = [&](const c10::Argument& argument, const Tensor& tensor) {
    if (!tensor.defined() || (tensor.is_cpu() && may_be_on_cpu(op, argument, tensor))) return;
    if (!device) device = tensor.device();
    TORCH_CHECK(*device == tensor.device(), op, ": expected all tensors to be on the same device, got ", *device,
                " and ", tensor.device(), " for argument ", argument.name());
  };
  for (size_t i = 0; i < values.size(); i++) {
    if (values[i].isTensor()) {
      check(arguments[i], values[i].toTensor());
    } else if (values[i].isList()) {
      for (const c10::IValue& each : values[i].toListRef()) {
        if (each.isTensor()) check(arguments[i], each.toTensor());
      }
    } else if (values[i].isGenerator()) {
      // It is of the CPU: the device makes none.
      TORCH_CHECK(false, op, ": expected a generator of ", kDevice, ", got one of ", values[i].toGenerator().device());
    }
  }
}

bool has_mask(const c10::IValue& indices) {
  if (!indices.isList()) return false;
  for (const c10::IValue& each : indices.toListRef()) {
    if (each.isTensor() && each.toTensor().defined() && each.toTensor().scalar_type() == at::kBool) return true;
  }
  return false;
}

// Returns whether CUDA has to tell the host how large the result is, for which the host waits.
bool waits_for_size(const std::string& op, c10::ArrayRef<c10::IValue> values) {
  static const std::vector<std::string> always = {
      "aten::nonzero", "aten::masked_select", "aten::_unique",  "aten::_unique2", "aten::unique_consecutive",
      "aten::unique_dim", "aten::bincount", "aten::equal"};
  if (std::find(always.begin(), always.end(), op) != always.end()) return true;
  if (op == "aten::repeat_interleave") return values.back().isNone();
  // Writing one number through a mask fills, which needs no size.
  if (op == "aten::index_put_" || op == "aten::_index_put_impl_") {
    return has_mask(values[1]) && values[2].toTensor().numel() != 1;
  }
  return false;  // of `tensor[mask]` PyTorch calls "nonzero"
}

// Runs an operator on copies of its arguments on the CPU, and copies the results back.
void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::string name = op.schema().name();
  TORCH_CHECK_NOT_IMPLEMENTED(name.rfind("aten::", 0) == 0, name, " has no kernel for ", kDevice);
  if (name != "aten::is_pinned" && name != "aten::_pin_memory") {
    check_devices(name, op.schema().arguments(), torch::jit::last(*stack, op.schema().arguments().size()));
  }
  const bool is_waited_for = waits_for_size(name, torch::jit::last(*stack, op.schema().arguments().size()));
  {
    const Uncounted own;
    at::native::cpu_fallback(op, stack);
  }
  if (is_waited_for) {
    count(waits);
    wait_here();
  }
}

// The schema does not say that it writes the running mean and variance, so `run_on_host` would change copies of them.
std::tuple<Tensor, Tensor, Tensor> batch_norm(const Tensor& input, const MaybeTensor& weight, const MaybeTensor& bias,
                                              const MaybeTensor& mean, const MaybeTensor& variance, bool is_training,
                                              double momentum, double eps) {
  const auto checked = [&](const MaybeTensor& tensor) -> MaybeTensor {
    if (!tensor || !tensor->defined()) return std::nullopt;
    TORCH_CHECK(tensor->device() == input.device(), "aten::native_batch_norm: expected all tensors to be on the same ",
                "device, got ", input.device(), " and ", tensor->device());
    touch(*tensor, is_training && (&tensor == &mean || &tensor == &variance));
    return on_host(*tensor);
  };
  touch(input, false);
  const auto [output, batch_mean, inverse_deviation] =
      at::native_batch_norm(on_host(input), checked(weight), checked(bias), checked(mean), checked(variance),
                            is_training, momentum, eps);
  const Uncounted own;
  return {output.to(kDevice), batch_mean.to(kDevice), inverse_deviation.to(kDevice)};
}

void record_stream(Tensor& tensor, c10::Stream user) {
  c10::impl::getDeviceGuardImpl(kType)->recordDataPtrOnStream(tensor.storage().data_ptr(), user);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &item);
  library.impl("as_strided", &as_strided);
  library.impl("view", &view);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage", &set_storage);
  library.impl("set_.source_Storage_storage_offset", &set_part_of_storage);
  library.impl("native_batch_norm", &batch_norm);
  library.impl("record_stream", &record_stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

// ---- Operators of tests: the counts, and the memory of tensors for collectives

std::vector<int64_t> counts() { return {copies_to_host, copies_to_device, waits}; }

int64_t waits_for_stream(int64_t stream) {
  const std::lock_guard<std::mutex> lock(mutex);
  return waits_for[stream];
}

void set_largest_allocation(int64_t bytes) { largest_allocation = bytes; }

void set_counting(bool counts_from_now_on) { uncounted += counts_from_now_on ? -1 : 1; }

TORCH_LIBRARY(simulated_device, library) {
  library.def("on_host(Tensor(a) tensor) -> Tensor(a)", &on_host);
  library.def("touch(Tensor tensor, bool is_written) -> ()", static_cast<void (*)(const Tensor&, bool)>(&touch));
  library.def("counts() -> int[]", &counts);
  library.def("waits_for_stream(int stream) -> int", &waits_for_stream);
  library.def("set_largest_allocation(int bytes) -> ()", &set_largest_allocation);
  library.def("set_counting(bool counts_from_now_on) -> ()", &set_counting);
}

// ---- Autocast, with PyTorch's lists of operators, which are those of CUDA

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

// The macros of PyTorch name the library "m".
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define IN_16_BITS(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define IN_FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define IN_FLOAT32_UNLESS_GIVEN(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define IN_THE_WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(IN_16_BITS)
  AT_FORALL_FP32(IN_FLOAT32)
  AT_FORALL_FP32_SET_OPT_DTYPE(IN_FLOAT32_UNLESS_GIVEN)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(IN_THE_WIDEST)
}

}  // namespace
