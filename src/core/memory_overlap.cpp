// Comparison of the memory of tensors by storages, then by extents, then by common strides.
#include "core/memory_overlap.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <optional>
#include <vector>

namespace flashplug {

namespace {

struct Dim {
  int64_t stride, size;
};

// Return the dims in bytes, without dims of a single address. The bytes of an element count as a dim.
std::vector<Dim> dims_in_bytes(const TensorBytes& x) {
  std::vector<Dim> dims{{1, x.element_bytes}};
  for (int64_t i = 0; i < x.dims; ++i) {
    const Dim dim{x.shape.stride[i] * x.element_bytes, x.shape.size[i]};
    if (dim.size > 1 && dim.stride != 0) dims.push_back(dim);
  }
  return dims;
}

int64_t extent(const std::vector<Dim>& dims) {
  return std::accumulate(dims.begin(), dims.end(), int64_t{1},
                         [](int64_t sum, const Dim& dim) { return sum + dim.stride * (dim.size - 1); });
}

bool has_elements(const TensorBytes& x) {
  return std::all_of(x.shape.size, x.shape.size + x.dims, [](int64_t size) { return size != 0; });
}

bool have_separate_storages(const TensorBytes& x, const TensorBytes& y) {
  return x.storage + x.storage_bytes <= y.storage || y.storage + y.storage_bytes <= x.storage;
}

// Return true if all dims with strides from `step` on leave the tensors in separate parts of each step.
bool are_interleaved(const std::vector<Dim>& x, const std::vector<Dim>& y, int64_t distance, int64_t step) {
  std::vector<Dim> within[2];
  for (const std::vector<Dim>* dims : {&x, &y}) {
    for (const Dim& dim : *dims) {
      if (dim.stride < step)
        within[dims == &y].push_back(dim);
      else if (dim.stride % step != 0)
        return false;
    }
  }
  const int64_t offset = (distance % step + step) % step;
  return extent(within[0]) <= offset && offset <= step - extent(within[1]);
}

}  // namespace

std::optional<TensorBytes> bytes_of(AtenTensorHandle tensor) {
  TensorBytes x;
  int32_t dtype = -1;
  int64_t offset = 0;
  const void* data = nullptr;
  if (aoti_torch_get_dim(tensor, &x.dims) != 0 || aoti_torch_get_dtype(tensor, &dtype) != 0 ||
      aoti_torch_get_storage_offset(tensor, &offset) != 0 ||
      aoti_torch_get_storage_size(tensor, &x.storage_bytes) != 0 || torch_get_const_data_ptr(tensor, &data) != 0 ||
      !read_shape(tensor, &x.shape))
    return std::nullopt;
  x.element_bytes = static_cast<int64_t>(aoti_torch_dtype_element_size(dtype));
  x.address = reinterpret_cast<int64_t>(data);
  x.storage = x.address - offset * x.element_bytes;
  return x;
}

bool may_meet_itself(const TensorBytes& x) {
  std::vector<Dim> dims;
  for (int64_t i = 0; i < x.dims; ++i) dims.push_back({x.shape.stride[i], x.shape.size[i]});
  std::ranges::sort(
      dims, [](const Dim& a, const Dim& b) { return a.stride != b.stride ? a.stride < b.stride : a.size < b.size; });
  int64_t reach = 0;
  for (const Dim& dim : dims) {
    if (dim.size > 1 && dim.stride <= reach) return true;
    reach += (dim.size - 1) * dim.stride;
  }
  return false;
}

bool may_overlap(const TensorBytes& x, const TensorBytes& y) {
  if (!has_elements(x) || !has_elements(y) || have_separate_storages(x, y)) return false;
  const std::vector<Dim> x_dims = dims_in_bytes(x), y_dims = dims_in_bytes(y);
  const int64_t distance = y.address - x.address;
  if (distance >= extent(x_dims) || -distance >= extent(y_dims)) return false;
  for (const std::vector<Dim>* dims : {&x_dims, &y_dims}) {
    for (const Dim& dim : *dims) {
      if (are_interleaved(x_dims, y_dims, distance, dim.stride)) return false;
    }
  }
  return true;
}

}  // namespace flashplug
