// Arguments as TVM-FFI wants them: tensors as DLTensors, numbers by value, None for what a call does not have.
#include "arguments.h"

#include <string>

#include "values.h"

namespace flashplug {

namespace {

// A value of that type, all bits zero until its caller sets it.
TVMFFIAny typed(int32_t type_index) {
  TVMFFIAny any;
  any.type_index = type_index;
  any.zero_padding = 0;
  any.v_int64 = 0;
  return any;
}

DLDataType type_of(const Parameter& parameter, DLDataType element) {
  switch (parameter.type) {
    case NumberType::kFp32:
      return {kDLFloat, 32, 1};
    case NumberType::kInt32:
      return {kDLInt, 32, 1};
    default:
      return element;
  }
}

}  // namespace

void* mutable_data(AtenTensorHandle tensor) {
  void* data = nullptr;
  check_shim(torch_get_mutable_data_ptr(tensor, &data), "get_data_ptr");
  return data;
}

void Arguments::tensor(Slot slot, AtenTensorHandle tensor, bool writes) {
  Value& value = at(slot);
  value.held = Held::kTensor;
  value.tensor = tensor;
  value.writes = writes;
}

void Arguments::one_number(Slot slot, void* address) {
  Value& value = at(slot);
  value.held = Held::kOneNumber;
  value.address = address;
}

void Arguments::integer(Slot slot, int64_t number) {
  Value& value = at(slot);
  value.held = Held::kInteger;
  value.integer = number;
}

void Arguments::real(Slot slot, double number) {
  Value& value = at(slot);
  value.held = Held::kReal;
  value.real = number;
}

void Arguments::describe(const Value& value, int rank, DLDataType dtype, Described* out) const {
  Shape shape;
  if (!read_shape(value.tensor, &shape))
    throw std::runtime_error("torch_flashplug: a tensor has no concrete shape at launch");
  const void* data = nullptr;
  if (value.writes)
    data = mutable_data(value.tensor);
  else
    check_shim(torch_get_const_data_ptr(value.tensor, &data), "get_data_ptr");
  // torch leaves any number as the stride of a dim of size 1; the kernels' TMA descriptors need a multiple of 16 bytes
  // there too.
  for (int i = 0; i < rank; ++i) {
    const bool any = shape.size[i] == 1 && i + 1 < rank;
    out->stride[i] = any ? ceil_div(shape.size[rank - 1], kUnitElements) * kUnitElements : shape.stride[i];
  }
  out->tensor = DLTensor{const_cast<void*>(data),
                         DLDevice{kDLCUDA, device_index_},
                         rank,
                         dtype,
                         const_cast<int64_t*>(shape.size),
                         out->stride,
                         0};
}

void Arguments::describe_one(void* address, DLDataType dtype, Described* out) const {
  static int64_t one = 1;
  out->tensor = DLTensor{address, DLDevice{kDLCUDA, device_index_}, 1, dtype, &one, &one, 0};
}

TVMFFIAny Arguments::pack_one(const Parameter& parameter, DLDataType element, Described* room) {
  const Value& value = at(parameter.slot);
  TVMFFIAny any = typed(kTVMFFINone);
  switch (value.held) {
    case Held::kNothing:
      if (!parameter.optional)
        throw std::runtime_error(std::string("torch_flashplug: a kernel takes ") +
                                 kSlotNames[static_cast<int>(parameter.slot)] + ", which this call does not have");
      return any;
    case Held::kInteger:
      any = typed(kTVMFFIInt);
      any.v_int64 = value.integer;
      return any;
    case Held::kReal:
      any = typed(kTVMFFIFloat);
      any.v_float64 = value.real;
      return any;
    case Held::kTensor:
      describe(value, parameter.rank, type_of(parameter, element), room);
      break;
    case Held::kOneNumber:
      describe_one(value.address, type_of(parameter, element), room);
      break;
  }
  any = typed(kTVMFFIDLTensorPtr);
  any.v_ptr = &room->tensor;
  return any;
}

int32_t Arguments::pack(const KernelRow& row, void* stream) {
  const DLDataType element = {static_cast<uint8_t>(row.element_code), static_cast<uint8_t>(8 * row.element_bytes), 1};
  int32_t count = 0;
  for (const Parameter& parameter : tables().parameters[row.kind]) {
    packed_[count] = pack_one(parameter, element, &described_[count]);
    ++count;
  }
  packed_[count] = typed(kTVMFFIOpaquePtr);
  packed_[count].v_ptr = stream;
  return count + 1;
}

}  // namespace flashplug
