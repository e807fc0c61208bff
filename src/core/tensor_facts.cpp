// Tensor facts, read through the stable C shims. Nothing here decides anything.
#include "core/tensor_facts.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace flashplug {

DType dtype_of(int32_t torch) {
  static const auto numbers = [] {
    std::array<int32_t, kNumDTypes - 1> ids;
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = kDTypes[i].torch();
    return ids;
  }();
  return static_cast<DType>(std::find(numbers.begin(), numbers.end(), torch) - numbers.begin());
}

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
