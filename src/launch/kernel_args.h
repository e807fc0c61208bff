// The arguments of a kernel: a call says what it has, by slot; what its kernel takes, and at which place, is a table
// (torch_flashplug/registry/kernel_args.py). With launch.cpp all that knows TVM-FFI.
#pragma once

#include <tvm/ffi/c_api.h>

#include "core/flashplug.h"

namespace flashplug {

// Those of one call of a kernel of `row`, packed as they are said; those that are named like facts of the call, at
// once. What kernels of that kind do not take is left out, what this one's features do not bring is None. Holds
// addresses into itself and into tensors' sizes.
class Arguments {
 public:
  Arguments(const KernelRow& row, const Problem& p, int device_index);
  Arguments(const Arguments&) = delete;
  Arguments& operator=(const Arguments&) = delete;

  void tensor(Slot slot, AtenTensorHandle tensor, bool writes = false);
  void one_number(Slot slot, void* address);  // in global memory, and no torch tensor
  void integer(Slot slot, int64_t value);
  void real(Slot slot, double value);
  void scale(double scale);  // of the softmax
  // The last one. Throws where the kernel takes one that was not said.
  void stream(void* stream);

  bool takes(Slot slot) const {
    const Parameter& one = signature_.of(slot);
    return one.place >= 0 && takes_argument(row_, one.features);
  }
  int device_index() const { return device_index_; }
  const TVMFFIAny* packed() const { return packed_; }
  int32_t count() const { return signature_.count + 1; }

 private:
  // A DLTensor with room for its strides; sizes are borrowed from the tensor.
  struct Described {
    DLTensor tensor;
    int64_t stride[kMostDims];
  };
  TVMFFIAny* place_of(Slot slot, int32_t type_index);
  [[noreturn]] void throw_for_unsaid() const;
  DLDataType type_of(const Parameter& parameter) const;

  const Signature& signature_;
  const KernelRow& row_;
  const int device_index_;
  int32_t unsaid_;  // slots that the kernel takes
  Described described_[kMostArguments];
  TVMFFIAny packed_[kMostArguments + 1];
};

void* mutable_data(AtenTensorHandle tensor);

// launch.cpp: a kernel on its device and on that device's current stream, with a counter to draw its tiles from.
// loads: some of what it launches may run for the first time, whatever ran before.
void launch(Kernel& kernel, Arguments& arguments, bool loads = false);
// What it would launch ahead of its own CTAs, and none of those.
void launch_what_is_ahead(Kernel& kernel, Arguments& arguments);

}  // namespace flashplug
