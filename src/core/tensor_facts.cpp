// Tensor facts, read through the stable C shims. Nothing here decides anything.
#include "core/tensor_facts.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "stock/torch_symbols.h"

namespace flashplug {

namespace {

int num_rows = 0;
constexpr int kMaxTorchDTypes = 128;  // limit of torch's numbers of dtypes
// Index of the row of each of torch's dtypes, by torch's number; `kOther` without a row.
std::array<DType, kMaxTorchDTypes> rows_by_number = [] {
  std::array<DType, kMaxTorchDTypes> none;
  none.fill(DType::kOther);
  return none;
}();

// Return torch's number of a dtype. torch's stable ABI has a function for each dtype.
int32_t torch_number(const std::string& name) {
  const std::string function = "aoti_torch_dtype_" + name;
  void* symbol = dlsym(in_process("libtorch_cpu.so"), function.c_str());
  if (symbol == nullptr)
    throw std::runtime_error(
        "torch_flashplug: each dtype of torch_flashplug/registry/dtypes.py must be a dtype of "
        "the running torch, but torch has no function " +
        function + ".");
  return reinterpret_cast<int32_t (*)()>(symbol)();
}

}  // namespace

void clear_dtypes() {
  rows_by_number.fill(DType::kOther);
  std::fill_n(dtype_facts, num_rows, DTypeFacts{});
  num_rows = 0;
}

void add_dtype(const DTypeFacts& facts) {
  if (num_rows == static_cast<int>(DType::kOther))
    throw std::runtime_error("torch_flashplug: kMaxDTypes must be larger than the number of rows of dtypes.py.");
  rows_by_number.at(torch_number(facts.name)) = static_cast<DType>(num_rows);
  dtype_facts[num_rows++] = facts;
}

int num_dtypes() { return num_rows; }

bool is_one_of(DType dtype, std::initializer_list<std::string_view> names) {
  return std::find(names.begin(), names.end(), facts_of(dtype).name) != names.end();
}

DType dtype_of(int32_t torch) { return torch >= 0 && torch < kMaxTorchDTypes ? rows_by_number[torch] : DType::kOther; }

bool read_meta(AtenTensorHandle tensor, TensorMeta* facts) {
  int32_t dtype = -1;
  if (aoti_torch_get_dim(tensor, &facts->dim) != 0 || aoti_torch_get_dtype(tensor, &dtype) != 0 ||
      aoti_torch_get_device_type(tensor, &facts->device_type) != 0 ||
      aoti_torch_get_device_index(tensor, &facts->device_index) != 0) {
    return false;
  }
  facts->dtype = dtype_of(dtype);
  return true;
}

bool read_shape(AtenTensorHandle tensor, Shape* shape) {
  int64_t numel = 0;
  int64_t *size = nullptr, *stride = nullptr;
  if (aoti_torch_get_numel(tensor, &numel) != 0 || aoti_torch_get_sizes(tensor, &size) != 0 ||
      aoti_torch_get_strides(tensor, &stride) != 0) {
    return false;
  }
  shape->size = size;
  shape->stride = stride;
  return true;
}

Layout layout_of(const Shape& shape, int64_t address_bytes, int64_t element_bytes) {
  uint64_t bits = static_cast<uint64_t>(address_bytes) | kUnitBytes;
  Layout layout;
  layout.unaligned_base = address_bytes % kUnitBytes != 0;
  for (int i = 0; i < 3; ++i) {
    const int64_t bytes = shape.stride[i] * element_bytes;
    if (shape.size[i] > 1) bits |= static_cast<uint64_t>(bytes);
    layout.unaligned_unit_dim |= shape.size[i] == 1 && bytes % kUnitBytes != 0;
    layout.broadcast |= shape.size[i] > 1 && bytes == 0;
  }
  layout.align_bytes = static_cast<int>(bits & (~bits + 1));  // lowest set bit
  layout.last_stride = shape.size[3] > 1 ? shape.stride[3] : 1;
  return layout;
}

}  // namespace flashplug
