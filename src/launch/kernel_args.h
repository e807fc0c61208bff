// The arguments of a kernel call, packed for TVM-FFI. A call sets arguments by name. The arguments of each kind of
// kernel, and their positions, come from a table (torch_flashplug/registry/kernel_args.py). Only kernel_args.h,
// kernel_args.cpp and launch.cpp know TVM-FFI.
#pragma once

#include <tvm/ffi/c_api.h>

#include <cstdint>

#include "core/core.h"

namespace flashplug {

// Packed arguments for a call of the kernel in `row`. Arguments named like facts of the call are packed at
// construction, the rest as soon as set. An argument unknown to the kind of kernel is ignored. An argument
// of a feature absent from the kernel stays None. The object holds pointers into itself and into the sizes of tensors.
class Arguments {
 public:
  Arguments(const KernelRow& row, const CallFacts& p, int device_index);
  Arguments(const Arguments&) = delete;
  Arguments& operator=(const Arguments&) = delete;

  void tensor(KernelArg arg, AtenTensorHandle tensor, bool writes = false);
  void global_number(KernelArg arg, void* address);  // an address in global memory outside any torch tensor
  void integer(KernelArg arg, int64_t value);
  void real(KernelArg arg, double value);
  void scale(double scale);  // softmax scale
  // Pack the stream, as the last argument. Throws if an argument of the kernel was not set.
  void stream(void* stream);

  bool takes(KernelArg arg) const {
    const Parameter& parameter = signature_.parameter(arg);
    return parameter.position >= 0 && takes_argument(row_, parameter.features);
  }
  int device_index() const { return device_index_; }
  const TVMFFIAny* packed() const { return packed_; }
  int32_t count() const { return signature_.count + 1; }

 private:
  // A DLTensor with storage for its strides. The sizes are borrowed from the tensor.
  struct Described {
    DLTensor tensor;
    int64_t stride[kMaxDims];
  };
  TVMFFIAny* value_for(KernelArg arg, int32_t type_index);
  [[noreturn]] void throw_for_missing() const;
  DLDataType type_of(const Parameter& parameter) const;

  const Signature& signature_;
  const KernelRow& row_;
  const int device_index_;
  int32_t num_missing_;  // number of arguments of the kernel still to be set
  Described described_[kMaxArguments];
  TVMFFIAny packed_[kMaxArguments + 1];
};

void* mutable_data(AtenTensorHandle tensor);

}  // namespace flashplug
