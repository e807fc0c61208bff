// Strides of outputs, exactly as torch's meta functions compute them: compiled graphs assert the strides.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "core/attention_call.h"
#include "core/core.h"
#include "core/schemas.h"
#include "core/values.h"
#include "dispatch/dispatch.h"
#include "operands/operands.h"

namespace flashplug {

TensorHandle empty_strided(int dims, const int64_t* size, const int64_t* stride, int32_t dtype, int32_t device_type,
                           int32_t device_index) {
  return TensorHandle(new_strided(dims, size, stride, dtype, device_type, device_index));
}

TensorHandle make_broadcast_tensor(std::initializer_list<int64_t> size, int32_t dtype, const TensorMeta& query) {
  int64_t stride[kMaxDims] = {};
  stride[size.size() - 1] = 1;
  return empty_strided(static_cast<int>(size.size()), size.begin(), stride, dtype, query.device_type,
                       query.device_index);
}

Shape shape_of(AtenTensorHandle tensor) {
  Shape shape;
  if (!read_shape(tensor, &shape))
    throw std::runtime_error(
        "torch_flashplug: a tensor must have a concrete shape, but the shape is symbolic or unknown.");
  return shape;
}

TensorHandle new_like(AtenTensorHandle like, int dims, const int64_t* size, const int64_t* stride,
                      AtenTensorHandle from) {
  int32_t dtype = 0, device_type = 0, device_index = 0;
  check_shim(aoti_torch_get_dtype(like, &dtype), "get_dtype");
  check_shim(aoti_torch_get_device_type(like, &device_type), "get_device_type");
  check_shim(aoti_torch_get_device_index(like, &device_index), "get_device_index");
  TensorHandle out = empty_strided(dims, size, stride, dtype, device_type, device_index);
  if (from != nullptr) copy_tensor(out.get(), from);
  return out;
}

TensorHandle view(AtenTensorHandle tensor, int dims, const int64_t* size, const int64_t* stride, int64_t offset) {
  AtenTensorHandle handle = nullptr;
  check_shim(aoti_torch__reinterpret_tensor(tensor, dims, size, stride, offset, &handle), "_reinterpret_tensor");
  return TensorHandle(handle);
}

TensorHandle view_with_strides(AtenTensorHandle tensor, const int64_t stride[4]) {
  const Shape have = shape_of(tensor);
  if (std::memcmp(have.stride, stride, 4 * sizeof *stride) == 0) return TensorHandle::share(tensor);
  bool same = true;
  for (int i = 0; i < 4; ++i) same &= have.size[i] == 1 || have.stride[i] == stride[i];
  return same ? view(tensor, 4, have.size, stride) : new_like(tensor, 4, have.size, stride, tensor);
}

int64_t element_bytes(AtenTensorHandle tensor) {
  int32_t dtype = 0;
  check_shim(aoti_torch_get_dtype(tensor, &dtype), "get_dtype");
  return static_cast<int64_t>(aoti_torch_dtype_element_size(dtype));
}

Layout layout_in_memory(AtenTensorHandle tensor, const Shape& shape) {
  const void* data = nullptr;
  check_shim(torch_get_const_data_ptr(tensor, &data), "get_const_data_ptr");
  return layout_of(shape, reinterpret_cast<int64_t>(data), element_bytes(tensor));
}

TensorHandle packed_copy(AtenTensorHandle tensor) {
  const Shape shape = shape_of(tensor);
  int64_t stride[4];
  pack_strides(shape.size, stride);
  return new_like(tensor, 4, shape.size, stride, tensor);
}

TensorHandle copy_of_padded_rows(AtenTensorHandle tensor, int dims, const int64_t* size, const int64_t* stride,
                                 int64_t unit) {
  int64_t padded_size[4] = {1, 1, 1, 1}, padded_stride[4];
  std::copy_n(size, dims, padded_size);
  padded_size[dims - 1] = ceil_div(size[dims - 1], unit) * unit;
  pack_strides(padded_size, padded_stride);
  TensorHandle copy =
      view(new_like(tensor, dims, padded_size, padded_stride, nullptr).get(), dims, size, padded_stride);
  copy_tensor(copy.get(), view(tensor, dims, size, stride).get());
  return copy;
}

TensorHandle dense_copy(AtenTensorHandle tensor) {
  const Shape shape = shape_of(tensor);
  int64_t stride[4];
  dense_strides(shape.size, shape.stride, 4, stride);
  return stride[3] == 1 ? new_like(tensor, 4, shape.size, stride, tensor) : packed_copy(tensor);
}

bool is_readable(AtenTensorHandle tensor) { return is_16b_aligned(layout_in_memory(tensor, shape_of(tensor))); }

TensorHandle readable(AtenTensorHandle tensor) {
  return is_readable(tensor) ? TensorHandle::share(tensor) : dense_copy(tensor);
}

namespace {

// Copy a 4-d tensor once, without repeats of broadcast dims, and view the copy with the original sizes. Dims of stride
// 0 keep stride 0, except the last dim.
TensorHandle copy_without_repeats(AtenTensorHandle tensor) {
  const Shape shape = shape_of(tensor);
  int64_t size[4], stride[4];
  for (int i = 0; i < 4; ++i) size[i] = i < 3 && shape.stride[i] == 0 ? 1 : shape.size[i];
  const TensorHandle copy = dense_copy(view(tensor, 4, size, shape.stride).get());
  const int64_t* const copy_stride = shape_of(copy.get()).stride;
  for (int i = 0; i < 4; ++i) stride[i] = size[i] < shape.size[i] ? 0 : copy_stride[i];
  return view(copy.get(), 4, shape.size, stride);
}

}  // namespace

ReadableCall make_readable(const ForwardCall& call, const CallFacts& p) {
  ReadableCall read{call, {}};
  if (!needs_operand_copies(p, tables())) return read;
  AtenTensorHandle* operands[kNumOperands] = {&read.call.q, &read.call.k, &read.call.v};
  for (int i = 0; i < kNumOperands; ++i) {
    if (is_readable(*operands[i])) continue;
    read.copies[i] = copy_without_repeats(*operands[i]);
    *operands[i] = read.copies[i].get();
  }
  return read;
}

TensorHandle align_size_one_dims(TensorHandle tensor) {
  constexpr int64_t kWholeElements = 8;  // units of 16 bytes for every dtype of two bytes or more
  const Shape shape = shape_of(tensor.get());
  int64_t stride[4];
  bool changed = false;
  for (int i = 0; i < 4; ++i) {
    const bool odd = i < 3 && shape.size[i] == 1 && shape.stride[i] % kWholeElements != 0;
    stride[i] = odd ? ceil_div(shape.size[3], kWholeElements) * kWholeElements : shape.stride[i];
    changed |= odd;
  }
  return changed ? view(tensor.get(), 4, shape.size, stride) : std::move(tensor);
}

namespace {

// 1: dim a belongs outside dim b; -1: inside; 0: undecided (a broadcast dim, or a tie).
int compare_dims(const int64_t* size, const int64_t* stride, int a, int b) {
  if (stride[a] == 0 || stride[b] == 0) return 0;
  if (stride[a] != stride[b]) return stride[a] < stride[b] ? -1 : 1;
  return size[a] > size[b] ? 1 : 0;
}

}  // namespace

// empty_like keeps the strides of a tensor without holes or overlaps; any other tensor is packed in the order of its
// strides (c10's infer_dense_strides).
void dense_strides(const int64_t* size, const int64_t* stride, int dims, int64_t* out) {
  int order[5];  // innermost first
  for (int i = 0; i < dims; ++i) order[i] = dims - 1 - i;
  for (int i = 1; i < dims; ++i) {
    int moving = i;
    for (int j = i - 1; j >= 0; --j) {
      const int comparison = compare_dims(size, stride, order[j], order[moving]);
      if (comparison > 0) {
        std::swap(order[j], order[moving]);
        moving = j;
      } else if (comparison < 0) {
        break;
      }
    }
  }
  bool dense = true;
  int64_t next = 1;
  for (int i = 0; i < dims; ++i) {
    const int dim = order[i];
    out[dim] = next;
    if (size[dim] != 1 && stride[dim] != next) dense = false;
    next *= size[dim] > 1 ? size[dim] : 1;
  }
  if (dense) std::memcpy(out, stride, sizeof(int64_t) * dims);
}

void output_strides(const Shape& query, const int64_t out_size[4], int64_t out_stride[4]) {
  if (std::memcmp(query.size, out_size, 4 * sizeof(int64_t)) == 0) {
    dense_strides(query.size, query.stride, 4, out_stride);
    return;
  }
  // torch sorts the dims by stride, stable and largest first, and packs the strides in the sorted order.
  int order[4] = {0, 1, 2, 3};
  for (int i = 1; i < 4; ++i) {
    for (int j = i; j > 0 && query.stride[order[j - 1]] < query.stride[order[j]]; --j)
      std::swap(order[j - 1], order[j]);
  }
  int64_t next = 1;
  for (int i = 3; i >= 0; --i) {
    out_stride[order[i]] = next;
    next *= out_size[order[i]];
  }
}

void pack_strides(const int64_t size[4], int64_t stride[4]) {
  int64_t next = 1;
  for (int i = 3; i >= 0; --i) {
    stride[i] = next;
    next *= size[i];
  }
}

// Compiled graphs rely on the output's layout, too.
TensorHandle in_output_layout(TensorHandle out, AtenTensorHandle query) {
  const Shape have = shape_of(out.get());
  int64_t want[4];
  output_strides(shape_of(query), have.size, want);
  return view_with_strides(out.get(), want);
}

TensorHandle sum_of_heads(TensorHandle grad, AtenTensorHandle operand) {
  const Shape like = shape_of(operand), grads = shape_of(grad.get());
  if (grads.size[1] == like.size[1]) return grad;
  const int64_t apart = grads.size[1] / like.size[1];
  const int64_t size[5] = {grads.size[0], like.size[1], apart, grads.size[2], grads.size[3]};
  const int64_t stride[5] = {grads.stride[0], grads.stride[1] * apart, grads.stride[1], grads.stride[2],
                             grads.stride[3]};
  int64_t want[4];
  dense_strides(like.size, like.stride, 4, want);
  TensorHandle sum = new_like(operand, 4, like.size, want, nullptr);
  OpCall op(kSum);
  op[kSum["self"]] = box::from_tensor(view(grad.get(), 5, size, stride));
  op[kSum["dim"]] = box::from(std::optional<std::vector<int64_t>>(std::vector<int64_t>{2}));
  op[kSum["keepdim"]] = box::from(false);
  op[kSum["dtype"]] = box::from(std::nullopt);
  op[kSum["out"]] = box::from_borrowed(sum.get());
  op.run();
  op.result(0);  // frees the second reference to the sum
  return sum;
}

TensorHandle in_operand_layout(TensorHandle grad, AtenTensorHandle operand) {
  const Shape like = shape_of(operand);
  int64_t want[4];
  dense_strides(like.size, like.stride, 4, want);
  return view_with_strides(grad.get(), want);
}

}  // namespace flashplug
