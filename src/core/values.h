// Values of the dispatcher's boxed ABI: owned tensor handles, and conversions to and from StableIValue. The file makes
// no decisions.
#pragma once

#include <torch/csrc/stable/stableivalue_conversions.h>

#include <bit>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/errors.h"
#include "core/schemas.h"

namespace flashplug {

// Owner name of the plugin's registrations in dumps of the dispatcher. op_owners.py recognizes registrations by the
// name.
inline constexpr const char* kOwner = "torch_flashplug";

inline void check_shim(AOTITorchError error, const char* function) {
  if (error != 0) rethrow(function);
}

// A reference to a tensor. An empty `TensorHandle` stands for "no tensor"; `undefined()` makes torch's undefined
// tensor.
class TensorHandle {
 public:
  TensorHandle() = default;
  explicit TensorHandle(AtenTensorHandle handle) : handle_(handle) {}
  TensorHandle(TensorHandle&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  TensorHandle& operator=(TensorHandle&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~TensorHandle() {
    if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
  }
  static TensorHandle undefined() {
    AtenTensorHandle handle = nullptr;
    check_shim(aoti_torch_new_uninitialized_tensor(&handle), "new_uninitialized_tensor");
    return TensorHandle(handle);
  }
  static TensorHandle share(AtenTensorHandle tensor) {
    AtenTensorHandle handle = nullptr;
    check_shim(aoti_torch_new_tensor_handle(tensor, &handle), "new_tensor_handle");
    return TensorHandle(handle);
  }
  AtenTensorHandle get() const { return handle_; }
  AtenTensorHandle release() { return std::exchange(handle_, nullptr); }
  bool defined() const {
    bool answer = false;
    return handle_ != nullptr && aoti_torch_is_defined(handle_, &answer) == 0 && answer;
  }

 private:
  AtenTensorHandle handle_ = nullptr;
};

namespace box {

template <typename T>
StableIValue from(T value) {
  return torch::stable::detail::from(value);
}
// Give the reference away.
inline StableIValue from_tensor(TensorHandle tensor) {
  return torch::stable::detail::from((tensor.get() ? std::move(tensor) : TensorHandle::undefined()).release());
}
inline StableIValue from_borrowed(AtenTensorHandle tensor) {
  return from_tensor(tensor ? TensorHandle::share(tensor) : TensorHandle::undefined());
}
// Tensor? and float? are a null pointer, or a heap cell freed by the receiver.
inline StableIValue from_optional_tensor(AtenTensorHandle tensor) {
  return tensor == nullptr ? from(std::nullopt) : from(new StableIValue(from_borrowed(tensor)));
}
inline StableIValue from_optional_double(const std::optional<double>& value) {
  return torch::stable::detail::from(value);
}

inline TensorHandle to_tensor(StableIValue value) {
  return TensorHandle(torch::stable::detail::to<AtenTensorHandle>(value));
}
inline TensorHandle to_optional_tensor(StableIValue value) {
  StableIValue* cell = torch::stable::detail::to<StableIValue*>(value);
  if (cell == nullptr) return TensorHandle();
  TensorHandle tensor = to_tensor(*cell);
  delete cell;
  return tensor;
}
inline std::optional<double> to_optional_double(StableIValue value) {
  return torch::stable::detail::to<std::optional<double>>(value);
}
template <typename T>
T to(StableIValue value) {
  return torch::stable::detail::to<T>(value);
}

}  // namespace box

// A call of an op: arguments are set by position, and results come out in order. The dispatcher frees the arguments.
class OpCall {
 public:
  explicit OpCall(const Schema& op) : op_(op) {}  // the schema must live as long
  StableIValue& operator[](int position) {
    set_arguments_ |= uint32_t{1} << position;
    return stack_[position];
  }
  void run() {
    if (!called()) rethrow(op_.name());
  }
  // Run the op. After a failure, `again` gets the places of the results, and either fills them or throws the call's
  // error.
  template <typename Again>
  void run_or(Again again) {
    if (called()) return;
    rethrow_python_error();
    if (!again(stack_)) rethrow(op_.name());
  }
  TensorHandle result(int i) const { return box::to_tensor(stack_[i]); }

 private:
  bool called() {
    // The dispatcher would take an unset place for the address of a tensor.
    if (const int missing = std::countr_one(set_arguments_); missing < op_.count())
      throw std::runtime_error(std::string("torch_flashplug: ") + op_.name() + " without its argument " +
                               std::string(op_.argument(missing)));
    return dispatch_op(op_.name(), op_.overload(), stack_);
  }

  const Schema& op_;
  StableIValue stack_[kMaxStack];
  uint32_t set_arguments_ = 0;  // a bit for each place
  static_assert(kMaxStack < 32);
};

}  // namespace flashplug
