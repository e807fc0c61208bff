// The arguments of a kernel: a call says what it has, by slot; what its kernel takes, in which order, is a table
// (torch_flashplug/arguments.py). With launch.cpp all that knows TVM-FFI.
#pragma once

#include <tvm/ffi/c_api.h>

#include "flashplug.h"

namespace flashplug {

class Arguments {
 public:
  explicit Arguments(int device_index) : device_index_(device_index) {}
  Arguments(const Arguments&) = delete;
  Arguments& operator=(const Arguments&) = delete;

  void tensor(Slot slot, AtenTensorHandle tensor, bool writes = false);
  void one_number(Slot slot, void* address);  // in global memory, and no torch tensor
  void integer(Slot slot, int64_t value);
  void real(Slot slot, double value);

  // For a kernel of this row, and the stream after them. What a call does not have is None, where the kernel allows it.
  // Returns how many; valid as long as this object.
  int32_t pack(const KernelRow& row, void* stream);
  const TVMFFIAny* packed() const { return packed_; }

 private:
  enum class Held { kNothing, kTensor, kOneNumber, kInteger, kReal };
  struct Value {
    Held held = Held::kNothing;
    bool writes = false;
    union {
      AtenTensorHandle tensor;
      void* address;
      int64_t integer;
      double real;
    };
  };
  // A DLTensor with room for its strides; sizes are borrowed from the tensor.
  struct Described {
    DLTensor tensor;
    int64_t stride[4];
  };
  Value& at(Slot slot) { return values_[static_cast<int>(slot)]; }
  TVMFFIAny pack_one(const Parameter& parameter, DLDataType element, Described* room);
  void describe(const Value& value, int rank, DLDataType dtype, Described* out) const;
  void describe_one(void* address, DLDataType dtype, Described* out) const;

  int device_index_;
  Value values_[kNumSlots];
  Described described_[kNumSlots];
  TVMFFIAny packed_[kNumSlots + 1];
};

void* mutable_data(AtenTensorHandle tensor);

}  // namespace flashplug
