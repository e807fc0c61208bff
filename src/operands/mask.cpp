// Transport of a bool mask to kernels, as mask metadata (kernels/preprocess/mask.py: two or four bits per score).
//
// After the choice hook, F.sdpa would convert a bool mask to floats, 3 bytes per score, for the op and for autograd to
// keep. F.sdpa reads the mask argument again at that point and converts only bool masks. The choice hook therefore
// replaces the mask by mask metadata, still empty. The op, called from the same frame of F.sdpa, puts the mask back and
// fills the metadata. Autograd keeps the metadata. Measured on an H200, at 16k x 16k: the floats alone took 590 us. The
// attention of a window takes 240 us there, and the mask metadata takes 105 us.
#include <pthread.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/attention_call.h"
#include "core/core.h"
#include "core/schemas.h"
#include "core/values.h"
#include "launch/kernel_args.h"
#include "operands/operands.h"
#include "stock/torch_symbols.h"

namespace flashplug {

namespace {

constexpr int kMaxMaskDims = 4;

// Return the pointer inside a tensor. A tensor is a single pointer, and the pointer identifies the tensor.
void*& pointer_in(AtenTensorHandle tensor) { return *reinterpret_cast<void**>(tensor); }

// A replaced mask. Never destroyed: at the end of a thread or of the process, libtorch may be gone.
struct ReplacedMask {
  AtenTensorHandle mask = nullptr;
  AtenTensorHandle argument = nullptr;  // the caller's tensor
  void* replacement = nullptr;          // pointer of the replacement
};
thread_local ReplacedMask replaced;

// Return true for an address on the thread's own stack. Torch passes arguments from frame to frame. A tensor elsewhere
// may be read by different threads meanwhile.
bool is_on_thread_stack(const void* address) {
  thread_local const char* const top = [] {
    pthread_attr_t attributes;
    void* start = nullptr;
    size_t size = 0;
    if (pthread_getattr_np(pthread_self(), &attributes) != 0) return static_cast<const char*>(nullptr);
    pthread_attr_getstack(&attributes, &start, &size);
    pthread_attr_destroy(&attributes);
    return static_cast<const char*>(start) + size;
  }();
  const auto* at = static_cast<const char*>(address);
  return at > static_cast<const char*>(__builtin_frame_address(0)) && at < top;
}

// Return the number of mask rows that kernels read: the rows of a single block if all rows are the same.
int64_t rows_of(const CallFacts& p, const int64_t stride[4]) {
  return stride[2] == 0 ? std::min(p.Sq, tables().layout.sparse_block) : p.Sq;
}

bool has_memory(AtenTensorHandle mask) {
  const void* data = nullptr;
  return torch_get_const_data_ptr(mask, &data) == 0 && data != nullptr;
}

bool make_dense(AtenTensorHandle mask) {
  int32_t layout = -1;
  return aoti_torch_get_layout(mask, &layout) == 0 && layout == aoti_torch_layout_strided() && !is_kept(mask);
}

bool has_mask_dims(int64_t dims) { return dims >= 2 && dims <= kMaxMaskDims; }

// Return true if kernels can count the numbers of the metadata: those of a plane in 31 bits, of all planes in 32 bits.
bool are_numbers_countable(const int64_t size[4], const int64_t stride[4], int64_t Sq, int64_t Sk) {
  const int64_t rows = stride[2] == 0 ? std::min(Sq, tables().layout.sparse_block) : Sq;
  const int64_t numbers = metadata_numbers(rows, Sq, Sk, true);
  return numbers <= std::numeric_limits<int32_t>::max() &&
         size[0] * size[1] * numbers <= std::numeric_limits<uint32_t>::max();
}

TensorHandle new_metadata(const int64_t size[4], int64_t numbers, const TensorMeta& query) {
  const int64_t sizes[3] = {size[0], size[1], numbers}, strides[3] = {size[1] * numbers, numbers, 1};
  return empty_strided(3, sizes, strides, aoti_torch_dtype_int32(), query.device_type, query.device_index);
}

// Return a copy of the mask's bytes, without repeats of broadcast dims.
TensorHandle copy_of(AtenTensorHandle mask, const int64_t size[4], const int64_t stride[4], const TensorMeta& query) {
  int64_t once[4], packed[4];
  for (int i = 0; i < 4; ++i) once[i] = stride[i] == 0 ? 1 : size[i];
  pack_strides(once, packed);
  TensorHandle copy = empty_strided(4, once, packed, aoti_torch_dtype_uint8(), query.device_type, query.device_index);
  copy_tensor(copy.get(), view(mask, 4, once, stride).get());
  return copy;
}

// Return mask metadata kept by an earlier plugin forward: of all rows, or of a block that stands for all rows. The
// metadata may also be block-sparse lists of the call; without gradients, such lists hold only the forward's part.
MaskArgs kept_metadata(AtenTensorHandle metadata, const CallFacts& p, bool gradients) {
  const Shape shape = shape_of(metadata);
  int64_t dims = 0, rows = std::min(p.Sq, tables().layout.sparse_block);
  if (aoti_torch_get_dim(metadata, &dims) != 0 || dims != 3) rows = -1;
  const auto holds = [&](int64_t num_rows, bool all) {
    return shape.size[2] == metadata_numbers(num_rows, p.Sq, p.Sk, all);
  };
  if (rows > 0 && !holds(rows, true)) rows = p.Sq;
  const bool fits = rows > 0 && (shape.size[0] == 1 || shape.size[0] == p.B) &&
                    (shape.size[1] == 1 || shape.size[1] == p.Hq) &&
                    (holds(rows, true) || (!gradients && holds(rows, false)));
  if (!fits)
    throw std::runtime_error(
        "torch_flashplug: attn_bias must be the mask kept by a forward if the dtype is int32, but the shape differs.");
  const int64_t size[4] = {0, 0, rows, 0}, stride[4] = {};
  return {view(metadata, 4, size, stride), TensorHandle::share(metadata)};
}

// Return the mask arguments of a kernel. `mask_metadata`: whether the kernel takes metadata.
MaskArgs mask_args(const ForwardCall& call, const CallFacts& p, const TensorMeta& query, bool takes_metadata,
                   bool gradients) {
  if (is_mask_metadata(call.mask)) return kept_metadata(call.mask, p, gradients);
  int64_t size[4], stride[4];
  if (!is_on_device_of(call.mask, query))
    throw std::runtime_error("torch_flashplug: attn_mask must be on the device of query.");
  if (!expand_strides(call.mask, p, size, stride))
    throw std::runtime_error("torch_flashplug: attn_mask must have 2 to 4 dims that broadcast to (B, Hq, Sq, Sk).");
  if (!takes_metadata) return {view(call.mask, 4, size, stride), TensorHandle()};
  size[2] = rows_of(p, stride);
  TensorHandle metadata = call.metadata != nullptr
                              ? TensorHandle::share(call.metadata)
                              : new_metadata(size, metadata_numbers(size[2], p.Sq, p.Sk, gradients), query);
  return {view(call.mask, 4, size, stride), std::move(metadata)};
}

}  // namespace

bool expand_dims(int64_t dims, const int64_t* mask_size, const int64_t* mask_stride, const int64_t scores[4],
                 int64_t size[4], int64_t stride[4]) {
  const int64_t missing = kMaxMaskDims - dims;
  for (int64_t i = 0; i < kMaxMaskDims; ++i) {
    const int64_t have = i < missing ? 1 : mask_size[i - missing];
    const bool are_known = have >= 0 && scores[i] >= 0;
    if (have != 1 && have != scores[i] && are_known) return false;
    stride[i] = have == 1 ? 0 : mask_stride[i - missing];
    size[i] = i < 2 && stride[i] == 0 ? 1 : scores[i];
  }
  return true;
}

bool expand_strides(AtenTensorHandle mask, const CallFacts& p, int64_t size[4], int64_t stride[4]) {
  int64_t dims = 0;
  Shape shape;
  const int64_t scores[4] = {p.B, p.Hq, p.Sq, p.Sk};
  return aoti_torch_get_dim(mask, &dims) == 0 && has_mask_dims(dims) && read_shape(mask, &shape) &&
         expand_dims(dims, shape.size, shape.stride, scores, size, stride);
}

bool is_on_device_of(AtenTensorHandle mask, const TensorMeta& query) {
  TensorMeta of_mask;
  return read_meta(mask, &of_mask) && of_mask.device_type == query.device_type &&
         of_mask.device_index == query.device_index;
}

bool has_supported_dtype(AtenTensorHandle mask, const CallFacts& p) {
  TensorMeta of_mask;
  if ((p.needs & feature_bit("bias")) == 0) return true;  // bool, or fp32
  if (is_mask(mask) && !is_kept(mask)) return true;       // F.sdpa converts the mask to floats of the query's dtype
  return read_meta(mask, &of_mask) && of_mask.dtype == p.dtype[0];
}

MaskObstacle mask_obstacle(const MaskFacts& mask, const int64_t scores[4]) {
  if (!mask.is_bool && !mask.is_fp32 && !mask.has_query_dtype) return MaskObstacle::kDtype;
  if (!mask.is_dense) return MaskObstacle::kLayout;
  if (!has_mask_dims(mask.dims)) return MaskObstacle::kDims;
  int64_t size[4], stride[4];
  const bool are_sizes_known = mask.size != nullptr;
  if (are_sizes_known && !expand_dims(mask.dims, mask.size, mask.stride, scores, size, stride))
    return MaskObstacle::kShape;
  if (!mask.is_on_query_device) return MaskObstacle::kDevice;
  const bool is_counted =
      mask.is_bool && are_sizes_known && std::all_of(scores, scores + 4, [](int64_t x) { return x >= 0; });
  return is_counted && !are_numbers_countable(size, stride, scores[2], scores[3]) ? MaskObstacle::kSize
                                                                                  : MaskObstacle::kNone;
}

namespace {

// Return true if a mask breaks no rule. Sizes are read only if the operands have concrete sizes.
bool has_no_obstacle(AtenTensorHandle mask, const TensorMeta& of_mask, const ReadFacts& facts) {
  const CallFacts& p = facts.call;
  const TensorMeta& query = facts.operand[0];
  Shape shape;
  MaskFacts plain{
      .is_bool = (p.needs & kMask) != 0,
      .is_fp32 = (p.needs & feature_bit("bias32")) != 0,
      .has_query_dtype = has_supported_dtype(mask, p),
      .is_dense = make_dense(mask),
      .is_on_query_device = of_mask.device_type == query.device_type && of_mask.device_index == query.device_index,
      .dims = of_mask.dim};
  if (plain.is_dense && facts.shape[kNumOperands - 1].size != nullptr && read_shape(mask, &shape))
    plain.size = shape.size, plain.stride = shape.stride;
  const int64_t scores[4] = {p.B, p.Hq, p.Sq, p.Sk};
  return mask_obstacle(plain, scores) == MaskObstacle::kNone;
}

}  // namespace

bool mask_fits(AtenTensorHandle mask, const ReadFacts& facts) {
  const TorchSymbols& torch = torch_symbols();
  TensorMeta of_mask;
  const bool is_replaced = (facts.call.needs & kMask) != 0;  // the choice hook replaces the mask
  if (is_replaced && !is_on_thread_stack(mask))
    return false;  // only the caller's own tensor, on the stack, can be replaced
  if (torch.python_dispatch(mask) || torch.has_wrapper(mask) || !has_memory(mask))
    return false;  // no address of its own
  return read_meta(mask, &of_mask) && has_no_obstacle(mask, of_mask, facts);
}

bool traced_mask_fits(AtenTensorHandle mask, const ReadFacts& facts) {
  TensorMeta of_mask;
  return !torch_symbols().nested(mask) && read_meta(mask, &of_mask) && has_no_obstacle(mask, of_mask, facts);
}

bool replace_mask(AtenTensorHandle mask, const ReadFacts& facts) {
  try {
    int64_t size[4], stride[4];
    expand_strides(mask, facts.call, size, stride);
    const CallFacts& p = facts.call;
    // Without gradients, nobody keeps the metadata.
    const int64_t numbers = p.grad ? metadata_numbers(rows_of(p, stride), p.Sq, p.Sk, true) : 0;
    // Hooks of saved tensors get the replacement before the op fills the metadata, and may copy the replacement. So the
    // hooks get the mask's bytes.
    TensorHandle replacement = p.grad && torch_symbols().saved_hooks() ? copy_of(mask, size, stride, facts.operand[0])
                                                                       : new_metadata(size, numbers, facts.operand[0]);
    if (torch_symbols().has_wrapper(replacement.get()))
      return false;  // inside a transform the op would get a different tensor
    std::swap(pointer_in(mask), pointer_in(replacement.get()));
    replaced = {replacement.release(), mask, pointer_in(mask)};
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

void drop_replaced_mask() {
  if (replaced.mask != nullptr) TensorHandle{std::exchange(replaced.mask, nullptr)};
}

TensorHandle restore_mask(AtenTensorHandle replacement) {
  TensorHandle original(std::exchange(replaced.mask, nullptr));
  if (original.get() == nullptr || pointer_in(replacement) != replaced.replacement ||
      pointer_in(replaced.argument) != replaced.replacement)
    return {};
  TensorHandle mask = TensorHandle::share(original.get());
  std::swap(pointer_in(original.get()), pointer_in(replaced.argument));
  return mask;
}

AtenTensorHandle metadata_to_fill(AtenTensorHandle replacement) {
  int64_t numbers = 0;
  check_shim(aoti_torch_get_numel(replacement, &numbers), "get_numel");
  return is_mask_metadata(replacement) && numbers > 0 ? replacement : nullptr;
}

void reject_internal_mask(AtenTensorHandle mask) {
  if (mask != nullptr && is_kept(mask))
    throw std::runtime_error(
        std::string("torch_flashplug: attn_mask must be bool, float32 or of the query's dtype, but got ") +
        (is_mask_metadata(mask) ? "int32" : "uint8") + ". Cast the mask.");
}

MaskArgs pack_mask_args(const ForwardCall& call, const CallFacts& p, const TensorMeta& query, bool gradients,
                        Arguments* arguments) {
  if (!arguments->takes("mask")) return {};
  const bool takes_metadata = arguments->takes("mask_metadata");
  MaskArgs mask = mask_args(call, p, query, takes_metadata, gradients);
  arguments->tensor("mask", mask.mask.get());
  if (takes_metadata) arguments->tensor("mask_metadata", mask.metadata.get(), true);
  return mask;
}

void preprocess_in_torch(const ForwardCall& call, const CallFacts& p, const TensorMeta& query) {
  const MaskArgs args = mask_args(call, p, query, false, false);
  OpCall op(kPreprocessMask);
  op[kPreprocessMask["mask"]] = box::from_borrowed(args.mask.get());
  op[kPreprocessMask["numbers"]] = box::from(shape_of(call.metadata).size[2]);
  op.run();
  copy_tensor(call.metadata, op.result(0).get());
}

// Return the size of a plane's metadata; same formula as `metadata_size` of kernels/preprocess/mask.py.
int64_t metadata_numbers(int64_t rows, int64_t Sq, int64_t Sk, bool gradients) {
  const LayoutRow& layout = tables().layout;
  const int64_t block = layout.sparse_block, tile = layout.bitmask_tile, words = layout.bitmask_words;
  const int64_t lines = ceil_div(rows, block), M = ceil_div(Sq, block), N = ceil_div(Sk, block),
                row_tiles = ceil_div(rows, tile), key_tiles = ceil_div(Sk, tile),
                M_192 = ceil_div(Sq, layout.sparse_block_m_192);
  const int64_t forward = lines * N + 2 * (M + M_192) * (N + 1) + row_tiles * (key_tiles + 1) * words;
  return gradients ? forward + 2 * (N + M * N) + key_tiles * (row_tiles + 1) * words + 2 * M * N : forward;
}

bool can_preprocess_mask(AtenTensorHandle mask, const CallFacts& p) {
  if (is_mask_metadata(mask)) return true;  // made by a plugin forward after the same check
  int64_t size[4], stride[4];
  if (!expand_strides(mask, p, size, stride)) return true;  // refused where the mask is read
  return are_numbers_countable(size, stride, p.Sq, p.Sk);
}

}  // namespace flashplug
