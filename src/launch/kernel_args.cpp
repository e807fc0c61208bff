// Packing of kernel arguments for TVM-FFI: tensors as DLTensors, numbers by value, None for absent arguments.
#include "launch/kernel_args.h"

#include <cstdint>
#include <numbers>
#include <stdexcept>
#include <string>

#include "core/core.h"
#include "core/values.h"

namespace flashplug {

namespace {

// Return a value of a type, with all bits zero until the caller sets the value.
TVMFFIAny typed(int32_t type_index) {
  TVMFFIAny any;
  any.type_index = type_index;
  any.zero_padding = 0;
  any.v_int64 = 0;
  return any;
}

}  // namespace

void* mutable_data(AtenTensorHandle tensor) {
  void* data = nullptr;
  check_shim(torch_get_mutable_data_ptr(tensor, &data), "get_data_ptr");
  return data;
}

Arguments::Arguments(const KernelRow& row, const CallFacts& p, int device_index)
    : signature_(tables().signatures[row.kind]),
      row_(row),
      device_index_(device_index),
      num_missing_(signature_.always) {
  for (int64_t features : signature_.brought) num_missing_ += takes_argument(row, features);
  for (int i = 0; i < signature_.count; ++i) packed_[i] = typed(kTVMFFINone);
  for (const FactParameter& fact_parameter : signature_.facts) {
    if (!takes_argument(row, fact_parameter.features)) continue;
    const bool real = fact_parameter.dtype == ArgumentDtype::kFp32;
    TVMFFIAny& any = packed_[fact_parameter.position] = typed(real ? kTVMFFIFloat : kTVMFFIInt);
    const double value = fact_of(p, fact_parameter.fact);
    if (real)
      any.v_float64 = value;
    else
      any.v_int64 = static_cast<int64_t>(value);
  }
}

DLDataType Arguments::type_of(const Parameter& parameter) const {
  switch (parameter.dtype) {
    case ArgumentDtype::kFp32:
      return {kDLFloat, 32, 1};
    case ArgumentDtype::kInt32:
      return {kDLInt, 32, 1};
    case ArgumentDtype::kInt64:
      return {kDLInt, 64, 1};
    case ArgumentDtype::kBool:
      return {kDLUInt, 8, 1};
    default: {
      const DTypeFacts& facts = facts_of(row_.dtype[static_cast<int>(parameter.dtype)]);
      // Kernels interpret the bytes of 8-bit dtypes themselves (kernels/features/quantized_kv_cache.py).
      if (facts.bytes == 1) return {kDLUInt, 8, 1};
      return {static_cast<uint8_t>(facts.dlpack), static_cast<uint8_t>(8 * facts.bytes), 1};
    }
  }
}

// Return the packed value of an argument, with a new type; null if the kernel does not take the argument.
TVMFFIAny* Arguments::value_for(KernelArg arg, int32_t type_index) {
  if (!takes(arg)) return nullptr;
  TVMFFIAny& any = packed_[signature_.parameter(arg).position];
  num_missing_ -= any.type_index == kTVMFFINone;
  any = typed(type_index);
  return &any;
}

void Arguments::tensor(KernelArg arg, AtenTensorHandle tensor, bool writes) {
  TVMFFIAny* any = value_for(arg, kTVMFFIDLTensorPtr);
  if (any == nullptr) return;
  const Parameter& parameter = signature_.parameter(arg);
  Described& out = described_[parameter.position];
  Shape shape;
  if (!read_shape(tensor, &shape))
    throw std::runtime_error("torch_flashplug: each tensor of a kernel must have a concrete shape at launch.");
  const void* data = nullptr;
  if (writes)
    data = mutable_data(tensor);
  else
    check_shim(torch_get_const_data_ptr(tensor, &data), "get_data_ptr");
  // torch leaves any number as the stride of a dim of size 1. The kernels' TMA descriptors need a multiple of 16 bytes
  // there too.
  const int rank = parameter.rank;
  const DLDataType type = type_of(parameter);
  const int64_t unit = 8 * kUnitBytes / type.bits;
  for (int i = 0; i < rank; ++i) {
    const bool any_stride = shape.size[i] == 1 && i + 1 < rank;
    out.stride[i] = any_stride ? ceil_div(shape.size[rank - 1], unit) * unit : shape.stride[i];
  }
  out.tensor = DLTensor{const_cast<void*>(data),
                        DLDevice{kDLCUDA, device_index_},
                        rank,
                        type,
                        const_cast<int64_t*>(shape.size),
                        out.stride,
                        0};
  any->v_ptr = &out.tensor;
}

void Arguments::global_number(KernelArg arg, void* address) {
  static int64_t unit_stride = 1;
  TVMFFIAny* any = value_for(arg, kTVMFFIDLTensorPtr);
  if (any == nullptr) return;
  const Parameter& parameter = signature_.parameter(arg);
  DLTensor& out = described_[parameter.position].tensor;
  out = DLTensor{address, DLDevice{kDLCUDA, device_index_}, 1, type_of(parameter), &unit_stride, &unit_stride, 0};
  any->v_ptr = &out;
}

void Arguments::integer(KernelArg arg, int64_t value) {
  if (TVMFFIAny* any = value_for(arg, kTVMFFIInt)) any->v_int64 = value;
}

void Arguments::real(KernelArg arg, double value) {
  if (TVMFFIAny* any = value_for(arg, kTVMFFIFloat)) any->v_float64 = value;
}

void Arguments::scale(double scale) {
  real("scale_log2", scale * std::numbers::log2e);
  real("scale", scale);
}

void Arguments::throw_for_missing() const {
  std::string names;
  for (int i = 0; i < kNumKernelArgs; ++i) {
    const KernelArg arg(i);
    if (takes(arg) && packed_[signature_.parameter(arg).position].type_index == kTVMFFINone)
      names += std::string(names.empty() ? "" : ", ") + kKernelArgNames[i];
  }
  throw std::runtime_error("torch_flashplug: the kernel takes " + names +
                           ", but the call does not provide such arguments.");
}

void Arguments::stream(void* stream) {
  if (num_missing_ != 0) throw_for_missing();
  packed_[signature_.count] = typed(kTVMFFIOpaquePtr);
  packed_[signature_.count].v_ptr = stream;
}

}  // namespace flashplug
