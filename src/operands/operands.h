// From tensors of a call to arguments of a kernel, and from outputs of a kernel to the tensors that torch expects.
// src/operands/ offers:
//
// - output_strides.cpp: views, copies and strides of tensors;
// - softmax_scale.cpp: scales that are not positive;
// - mask.cpp: bool masks, and the metadata that kernels read instead;
// - bias.cpp: float masks;
// - dropout.cpp: seeds of dropout;
// - sinks.cpp: sinks, the block table and the gradient of the LSE;
// - cache_pages.cpp: the block table of a cache without pages;
// - varlen_tile_list.cpp: packed sequences, and the tile lists of a plan;
// - equal_lengths.cpp: packed sequences of equal lengths as a dense batch;
// - quant_workspace.cpp: the workspaces of kernels that quantize operands.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <optional>

#include "core/attention_call.h"
#include "dispatch/dispatch.h"

namespace flashplug {

class Arguments;  // launch/kernel_args.h
struct Kernel;    // launch/launch.h

// ---- output_strides.cpp: tensors and their layouts ----

TensorHandle empty_strided(int dims, const int64_t* size, const int64_t* stride, int32_t dtype, int32_t device_type,
                           int32_t device_index);
// Return a tensor of a given size whose rows share the same memory, for a kernel without reads.
TensorHandle make_broadcast_tensor(std::initializer_list<int64_t> size, int32_t dtype, const TensorMeta& query);
Shape shape_of(AtenTensorHandle tensor);  // throws without a concrete shape
// Return a new tensor with the given sizes and strides, and with the dtype and device of `like`. The tensor is a copy
// of `from`, unless `from` is null.
TensorHandle new_like(AtenTensorHandle like, int dims, const int64_t* size, const int64_t* stride,
                      AtenTensorHandle from);
// Return a view of the same elements with different sizes and strides.
TensorHandle view(AtenTensorHandle tensor, int dims, const int64_t* size, const int64_t* stride, int64_t offset = 0);
// Return a 4-d tensor with the given strides. The result is the tensor itself if the strides are equal, a view if only
// dims of size 1 differ, else a copy.
TensorHandle view_with_strides(AtenTensorHandle tensor, const int64_t stride[4]);
int64_t element_bytes(AtenTensorHandle tensor);
Layout layout_in_memory(AtenTensorHandle tensor, const Shape& shape);  // for a tensor with an address
TensorHandle packed_copy(AtenTensorHandle tensor);                     // row-major copy of a 4-d tensor
// Return a copy of a 4-d tensor in the layout of torch.empty_like, if rows stay contiguous there, else row-major.
TensorHandle dense_copy(AtenTensorHandle tensor);
// `is_readable()`: true for a 4-d tensor in whole units of 16 bytes. `readable()`: the tensor itself, or a dense copy.
bool is_readable(AtenTensorHandle tensor);
TensorHandle readable(AtenTensorHandle tensor);
// Return a 4-d tensor whose dims of size 1 have aligned strides. torch leaves any number as the stride of a dim of size
// 1, and stock's kernels include the number in alignment checks.
TensorHandle align_size_one_dims(TensorHandle tensor);
// `dense_strides()`: strides of torch.empty_like(x). `output_strides()`: strides of the output of torch's attention ops
// for a query with the layout of `query`.
void dense_strides(const int64_t* size, const int64_t* stride, int dims, int64_t* out);
void pack_strides(const int64_t size[4], int64_t stride[4]);  // row-major
// Return a row-major copy of a tensor with the given sizes and strides. Each row is padded to a multiple of `unit`
// elements.
TensorHandle copy_of_padded_rows(AtenTensorHandle tensor, int dims, const int64_t* size, const int64_t* stride,
                                 int64_t unit);
// Return `out` in the layout of `output_strides()`: `out` itself, or a copy.
TensorHandle in_output_layout(TensorHandle out, AtenTensorHandle query);
// Return the sum over groups of heads: [B, n * H, S, D] -> [B, H, S, D], with the operand's number of heads. Kernels
// leave separate gradients for the n shares of a head. torch adds 16-bit numbers in fp32. Without shares, the result is
// `grad` itself.
TensorHandle sum_of_heads(TensorHandle grad, AtenTensorHandle operand);
// Return `grad` with the strides of torch.empty_like(operand), as graphs made by torch.compile expect.
TensorHandle in_operand_layout(TensorHandle grad, AtenTensorHandle operand);
void output_strides(const Shape& query, const int64_t out_size[4], int64_t out_stride[4]);
// A call whose unreadable operands are replaced by copies, if there are any (`needs_operand_copies()`).
struct ReadableCall {
  ForwardCall call;
  TensorHandle copies[kNumOperands];
};
ReadableCall make_readable(const ForwardCall& call, const CallFacts& p);

// ---- softmax_scale.cpp ----

// A call with a positive scale. The sign of a different scale moves to the query.
struct SignedScale {
  TensorHandle q;
  double scale;
};
SignedScale with_positive_scale(const ForwardCall& call, const CallFacts& p);
// Convert the gradient of the signed query into the gradient of the call's own query.
void pack_scale_sign(AtenTensorHandle grad_q, const CallFacts& p);

// ---- mask.cpp: bool masks, and the metadata that kernels read instead ----

// Replace the caller's bool mask, in the caller's own tensor, by the tensor for autograd to keep. F.sdpa would find a
// bool mask and convert the mask to floats. The thread's next op puts the mask back. The replacement is empty mask
// metadata or, with hooks of saved tensors, a copy of the mask's bytes. Called by the choice hook; returns false if
// memory is short.
bool replace_mask(AtenTensorHandle mask, const ReadFacts& facts);
void drop_replaced_mask();
// Return the mask replaced by `replacement`, and put the mask back. Undefined if `replacement` is no replacement of the
// calling thread. Called by the op.
TensorHandle restore_mask(AtenTensorHandle replacement);
// Return the mask metadata to be filled in by the op: `replacement` itself, or null if nobody keeps `replacement` or if
// `replacement` is a copy.
AtenTensorHandle metadata_to_fill(AtenTensorHandle replacement);
// Throw if a caller passes a kept tensor as a mask.
void reject_internal_mask(AtenTensorHandle mask);
// Mask arguments of a kernel: a mask to preprocess and a place for the metadata, or an empty mask and earlier metadata.
struct MaskArgs {
  TensorHandle mask;      // (B or 1, Hq or 1, Sq, Sk), stride 0 in broadcast dims; or without elements
  TensorHandle metadata;  // (B or 1, Hq or 1, n)
};
// Pack the mask and its metadata for a kernel that takes them; or the mask alone. The result must live until the
// launch.
MaskArgs pack_mask_args(const ForwardCall& call, const CallFacts& p, const TensorMeta& query, bool gradients,
                        Arguments* arguments);
// The first rule of the kernels that a mask breaks. describe_call.py has a text for each rule.
enum class MaskObstacle : int { kNone, kDtype, kLayout, kDims, kShape, kDevice, kSize, kCount };
inline constexpr const char* kMaskObstacleNames[] = {"none", "dtype", "layout", "dims", "shape", "device", "size"};
static_assert(std::size(kMaskObstacleNames) == static_cast<size_t>(MaskObstacle::kCount));
// Facts of a mask, from a tensor or from Python. A size or stride of -1 is not known, and is assumed to fit.
struct MaskFacts {
  bool is_bool, is_fp32, has_query_dtype, is_dense, is_on_query_device;
  int64_t dims = 0;
  const int64_t *size = nullptr, *stride = nullptr;  // null: no size is known
};
inline constexpr const char* kMaskFlagNames[] = {"is_bool", "is_fp32", "has_query_dtype", "is_dense",
                                                 "is_on_query_device"};
// `scores`: the sizes (B, Hq, Sq, Sk) of the scores.
MaskObstacle mask_obstacle(const MaskFacts& mask, const int64_t scores[4]);
// Compute sizes and strides of all four dims of a mask. Broadcast dims have stride 0, and equal planes count once.
// Returns false for a mask that kernels do not take.
bool expand_strides(AtenTensorHandle mask, const CallFacts& p, int64_t size[4], int64_t stride[4]);
// Compute `expand_strides()` from plain facts. `scores`: the sizes (B, Hq, Sq, Sk) of the scores.
bool expand_dims(int64_t dims, const int64_t* mask_size, const int64_t* mask_stride, const int64_t scores[4],
                 int64_t size[4], int64_t stride[4]);
bool has_supported_dtype(AtenTensorHandle mask, const CallFacts& p);   // dtype allowed by F.sdpa
bool is_on_device_of(AtenTensorHandle mask, const TensorMeta& query);  // on the same device
void preprocess_in_torch(const ForwardCall& call, const CallFacts& p,
                         const TensorMeta& query);  // fills the call's metadata
// Return the number of 32-bit numbers of mask metadata for each plane. `rows` is Sq, or the rows of a block that stands
// for all rows.
int64_t metadata_numbers(int64_t rows, int64_t Sq, int64_t Sk, bool gradients);
bool can_preprocess_mask(AtenTensorHandle mask, const CallFacts& p);  // true if kernels can count the numbers

// ---- bias.cpp: masks of floats ----

// How a kernel reads a float mask: in place, or from a copy whose rows begin at multiples of 16 bytes.
struct BiasRead {
  bool in_place;
  bool repeats_rows;     // the copy repeats the row that all queries share, for a kernel of sm_80
  int64_t size[4];       // of the view that the kernel gets
  int64_t stride[4];     // of the view in place; 0 in broadcast dims
  int64_t copy_size[4];  // of the copy, without broadcast dims; rows are padded to 16 bytes
};
// `dims`, `mask_size`, `mask_stride`: of the mask, which must fit (`mask_obstacle()`). `address` is in bytes.
BiasRead bias_read(int64_t dims, const int64_t* mask_size, const int64_t* mask_stride, int64_t address,
                   int64_t element_bytes, const CallFacts& p, const KernelRow& row);
// Pack a float mask for a kernel that takes a bias, in either dtype. Undefined if the kernel takes none. The result
// must live until the launch.
TensorHandle pack_bias_args(const ForwardCall& call, const CallFacts& p, const TensorMeta& query, const KernelRow& row,
                            Arguments* arguments);
// Return an output tensor for the gradient of a bias: four dims, with size 1 where the bias has size 1. The layout is
// the layout of the bias, if rows of the bias are contiguous.
TensorHandle new_bias_gradient(AtenTensorHandle bias);
// Planes of a bias gradient as written by a kernel: (rows, keys) along batch and heads. Where the bias is broadcast to
// many batches or heads and has few tiles, each CTA sums a range of them into a separate plane. The planes are then
// added up in one order, so the result repeats bit for bit.
struct BiasGradientPlanes {
  int64_t batches, heads, rows, keys;
  bool operator==(const BiasGradientPlanes&) const = default;
};
BiasGradientPlanes planes_of(AtenTensorHandle gradient);
BiasGradientPlanes gradient_planes(AtenTensorHandle gradient, const CallFacts& p, const KernelRow& row, int sm_count);
TensorHandle new_bias_planes(AtenTensorHandle gradient, const BiasGradientPlanes& planes);
void sum_bias_planes(TensorHandle planes, AtenTensorHandle gradient);
// Return a gradient with the sizes of the bias and the strides of torch.empty_like(bias).
TensorHandle in_bias_layout(TensorHandle gradient, AtenTensorHandle bias);

// ---- dropout.cpp: seeds of dropout ----

struct DropoutSeed {
  TensorHandle seed, offset;  // () int64; the offset is 0
};
DropoutSeed draw_seed(const TensorMeta& query);  // on the query's device, from the default generator
// Pack the seed for a kernel that takes a seed. The result must live until the launch.
TensorHandle pack_dropout_args(AtenTensorHandle seed, const TensorMeta& query, Arguments* arguments);

// ---- sinks.cpp: arguments of windows and pages ----

// Pack sinks, the block table or the LSE gradient for a kernel that takes the argument. Absent sinks and an absent
// gradient are replaced by a view without elements, at the address of `lse`. The result must live until the kernel is
// launched.
TensorHandle pack_sink_args(AtenTensorHandle sinks, AtenTensorHandle lse, Arguments* arguments);
void pack_page_args(const ForwardCall& call, Arguments* arguments);
TensorHandle pack_dlse(AtenTensorHandle gradient, AtenTensorHandle lse, const CallFacts& p, Arguments* arguments);

// ---- cache_pages.cpp ----

// Return the block table (B, 1) of a cache without pages: the keys of sequence i are page i. No launch, except for the
// first calls on a device.
TensorHandle pages_of_cache(int64_t B, const TensorMeta& query);

// ---- varlen_tile_list.cpp: arguments of packed sequences ----

// Pack the arguments of packed sequences for a kernel that takes them: sequence starts, and tile lists. The lists are
// the plan's, or a workspace for lists made by the kernel. `after_dense_kernel`: a dense kernel was launched ahead,
// which computes calls with equal lengths. The result must live until the launch. Throws if the plan belongs to a
// different call.
struct Lengths {
  TensorHandle tile_lists, seqused_k;
};
Lengths pack_varlen_args(const ForwardCall& call, const CallFacts& p, const KernelRow& row, const TensorMeta& query,
                         bool after_dense_kernel, Arguments* arguments);
// Tile lists of a plan, (1 or 2, n) int32: lists of the forward kernel, then of the backward kernel if a plugin kernel
// runs the backward. `key` accompanies the lists in later calls. Without such kernels, the lists are empty and the key
// is 0.
struct PlannedLists {
  TensorHandle lists;
  int64_t key;
};
PlannedLists plan_lists(const ForwardCall& call, const ReadFacts& facts, const Plan& plan,
                        const BackwardPlan& backward);

// ---- equal_lengths.cpp: packed sequences of equal lengths ----

// A dense kernel for packed sequences. The kernel does nothing unless all lengths are equal.
struct DenseKernel {
  Kernel* kernel;
  const KernelRow* row;
  CallFacts facts;  // of the dense batch
  // Return packed rows (1, heads, rows[, columns]) as a dense batch. The result is a view.
  TensorHandle batch_of(AtenTensorHandle packed, int dims = 4) const;
  void pack_lengths(const ForwardCall& call, Arguments* arguments) const;
};
// Return the dense kernel to be launched ahead of the kernel of row `packed`, or nothing.
std::optional<DenseKernel> find_equal_lengths_kernel(const ForwardCall& call, const CallFacts& p,
                                                     const KernelRow& packed, int device_index, int circumstances);

// ---- quant_workspace.cpp ----

// Pack the quantized operands of a call for a kernel that takes them: a workspace of the call, and the call's own
// quantized key and value, if there are any. The result must live until the launch.
TensorHandle pack_quant_workspace(const ForwardCall& call, const CallFacts& p, const TensorMeta& query,
                                  const KernelRow& row, Arguments* arguments);
// Return the number of 32-bit words of key and value in 8 bits, in the layout of a kernel.
int64_t quantized_kv_words(const CallFacts& p, const KernelRow& row);
// Quantize key and value of a call, and launch nothing else. The kernel is that of the row.
TensorHandle quantize_key_and_value(Kernel& kernel, const KernelRow& row, const ForwardCall& call, const CallFacts& p,
                                    const TensorMeta& key);

}  // namespace flashplug
