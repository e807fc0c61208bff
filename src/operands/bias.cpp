// Float masks (biases) in the layout that kernels read: four dims, stride 0 in broadcast dims, contiguous rows.
//
// Hopper kernels read rows at any address. Kernels for sm_80 read rows that begin at multiples of 16 bytes. Any other
// mask is copied once, without broadcast dims. Examples: a mask whose heads are innermost (T5), or a mask with a single
// number for all keys. Where more than a tile's rows of queries share a mask row, the row begins at a multiple of 16
// bytes. Kernels for sm_80 get 64 copies of such a row.
#include <algorithm>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "core/attention_call.h"
#include "core/core.h"
#include "core/schemas.h"
#include "core/values.h"
#include "launch/kernel_args.h"
#include "operands/operands.h"

namespace flashplug {

namespace {

// Minimal number of batches or heads summed into a plane. Planes then take little memory compared with a number for
// every score.
constexpr int64_t kLeastSummed = 8;

// Return a bias in a layout that the kernel reads: a view, or a copy.
TensorHandle make_readable(const ForwardCall& call, const CallFacts& p, const TensorMeta& query, const KernelRow& row) {
  const AtenTensorHandle bias = call.mask;
  int64_t size[4], stride[4], dims = 0;
  if (!has_supported_dtype(bias, p))
    throw std::runtime_error("torch_flashplug: attn_mask must be bool, float32 or of the query's dtype.");
  if (!is_on_device_of(bias, query))
    throw std::runtime_error("torch_flashplug: attn_mask must be on the device of query.");
  if (!expand_strides(bias, p, size, stride))
    throw std::runtime_error("torch_flashplug: attn_mask must have 2 to 4 dims that broadcast to (B, Hq, Sq, Sk).");
  check_shim(aoti_torch_get_dim(bias, &dims), "get_dim");
  const Shape shape = shape_of(bias);
  const void* data = nullptr;
  check_shim(torch_get_const_data_ptr(bias, &data), "get_data_ptr");
  const int64_t bytes = element_bytes(bias);
  const BiasRead read = bias_read(dims, shape.size, shape.stride, reinterpret_cast<int64_t>(data), bytes, p, row);
  if (read.in_place) return view(bias, 4, read.size, read.stride);
  const TensorHandle copy = copy_of_padded_rows(bias, 4, read.copy_size, read.stride, kUnitBytes / bytes);
  int64_t repeated[4];
  for (int i = 0; i < 4; ++i) repeated[i] = read.copy_size[i] == 1 && i < 3 ? 0 : shape_of(copy.get()).stride[i];
  return view(copy.get(), 4, read.size, repeated);
}

// Sizes of a bias gradient in all four dims, with the strides of torch.empty_like.
struct Gradient {
  int64_t size[4], stride[4];
  int64_t missing;  // number of dims absent from the bias
};

Gradient gradient_like(AtenTensorHandle bias) {
  int64_t dims = 0;
  check_shim(aoti_torch_get_dim(bias, &dims), "get_dim");
  const Shape shape = shape_of(bias);
  Gradient like{{1, 1, 1, 1}, {}, 4 - dims};
  std::copy_n(shape.size, dims, like.size + like.missing);
  dense_strides(shape.size, shape.stride, static_cast<int>(dims), like.stride + like.missing);
  return like;
}

}  // namespace

BiasRead bias_read(int64_t dims, const int64_t* mask_size, const int64_t* mask_stride, int64_t address,
                   int64_t element_bytes, const CallFacts& p, const KernelRow& row) {
  const int64_t scores[4] = {p.B, p.Hq, p.Sq, p.Sk}, unit = kUnitBytes / element_bytes;
  BiasRead read{};
  int64_t (&stride)[4] = read.stride;
  int64_t size[4];
  expand_dims(dims, mask_size, mask_stride, scores, size, stride);
  if (p.Sk == 1) stride[3] = 1;
  const bool hopper = tables().families[row.family].arch >= 90;
  const bool shared = row.kind != kDecode && stride[2] == 0 && p.Sq > row.group_rows;  // all queries share a mask row
  read.repeats_rows = shared && !hopper;
  const bool aligned = address % kUnitBytes == 0 &&
                       std::all_of(stride, stride + 3, [unit](int64_t elements) { return elements % unit == 0; });
  read.in_place = !read.repeats_rows && stride[3] == 1 && (aligned || (hopper && !shared));
  const int64_t view_size[4] = {p.B, p.Hq, read.repeats_rows ? row.group_rows : p.Sq, p.Sk};
  std::copy_n(view_size, 4, read.size);
  std::copy_n(view_size, 4, read.copy_size);
  for (int i = 0; i < 3; ++i) {
    if (stride[i] == 0 && !(read.repeats_rows && i == 2)) read.copy_size[i] = 1;
  }
  return read;
}

TensorHandle new_bias_gradient(AtenTensorHandle bias) {
  const Gradient like = gradient_like(bias);
  int64_t stride[4];
  pack_strides(like.size, stride);
  if (like.stride[3] == 1 || like.size[3] == 1) std::copy_n(like.stride, 3, stride);
  return new_like(bias, 4, like.size, stride, nullptr);
}

BiasGradientPlanes planes_of(AtenTensorHandle gradient) {
  const Shape shape = shape_of(gradient);
  return BiasGradientPlanes{shape.size[0], shape.size[1], shape.size[2], shape.size[3]};
}

BiasGradientPlanes gradient_planes(AtenTensorHandle gradient, const CallFacts& p, const KernelRow& row, int sm_count) {
  const Shape like = shape_of(gradient);
  const auto blocks = [](int64_t wide, int64_t length, int64_t tile) { return wide > 1 ? ceil_div(length, tile) : 1; };
  const int64_t tiles =
      like.size[0] * like.size[1] * blocks(like.size[2], p.Sq, row.tile_m) * blocks(like.size[3], p.Sk, row.tile_n);
  BiasGradientPlanes planes = planes_of(gradient);
  // With so many planes for each plane of the gradient, all SMs are busy.
  int64_t planes_to_fill = std::max(sm_count, 1) / tiles;
  const auto share = [&planes_to_fill](int64_t* number, int64_t all) {
    const int64_t most = std::min(planes_to_fill, all / kLeastSummed);
    if (*number != 1 || most < 2) return;
    *number = ceil_div(all, ceil_div(all, most));  // no plane without work
    planes_to_fill /= *number;
  };
  share(&planes.batches, p.B);
  share(&planes.heads, p.Hq);
  return planes;
}

// Rows begin at units of 16 bytes, because the kernel stores vectors there.
TensorHandle new_bias_planes(AtenTensorHandle gradient, const BiasGradientPlanes& planes) {
  const int64_t unit = kUnitBytes / element_bytes(gradient), pitch = ceil_div(planes.keys, unit) * unit;
  const int64_t padded[4] = {planes.batches, planes.heads, planes.rows, pitch};
  int64_t stride[4];
  pack_strides(padded, stride);
  const int64_t size[4] = {planes.batches, planes.heads, planes.rows, planes.keys};
  return view(new_like(gradient, 4, padded, stride, nullptr).get(), 4, size, stride);
}

void sum_bias_planes(TensorHandle planes, AtenTensorHandle gradient) {
  const Shape from = shape_of(planes.get()), to = shape_of(gradient);
  std::vector<int64_t> dims;
  for (int64_t dim : {0, 1}) {
    if (from.size[dim] > to.size[dim]) dims.push_back(dim);
  }
  OpCall op(kSum);
  op[kSum["self"]] = box::from_tensor(std::move(planes));
  op[kSum["dim"]] = box::from(std::optional<std::vector<int64_t>>(dims));
  op[kSum["keepdim"]] = box::from(true);
  op[kSum["dtype"]] = box::from(std::nullopt);
  op[kSum["out"]] = box::from_borrowed(gradient);
  op.run();
  op.result(0);  // frees the second reference to the gradient
}

TensorHandle in_bias_layout(TensorHandle gradient, AtenTensorHandle bias) {
  const Gradient like = gradient_like(bias);
  const TensorHandle laid_out = view_with_strides(gradient.get(), like.stride);
  return view(laid_out.get(), static_cast<int>(4 - like.missing), like.size + like.missing, like.stride + like.missing);
}

TensorHandle pack_bias_args(const ForwardCall& call, const CallFacts& p, const TensorMeta& query, const KernelRow& row,
                            Arguments* arguments) {
  const bool wide = arguments->takes("bias32");
  if (!wide && !arguments->takes("bias")) return {};
  TensorHandle bias = make_readable(call, p, query, row);
  if (wide)
    arguments->tensor("bias32", bias.get());
  else
    arguments->tensor("bias", bias.get());
  return bias;
}

}  // namespace flashplug
