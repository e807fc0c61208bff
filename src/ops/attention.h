// What the two doors of sdpa_ops.cpp (the aten carrier and the project's own ops) share with stock.cpp: one call, its
// results, stock's own kernels.
#pragma once

#include <torch/csrc/stable/library.h>
#include <initializer_list>

#include "core/flashplug.h"
#include "core/values.h"

namespace flashplug {

class Arguments;

struct ForwardCall : Attention {
  Mode mode;
  std::optional<bool> grad = {};      // whether autograd will want a backward; graphs do not know
  AtenTensorHandle digest = nullptr;  // of the mask, to be filled in; null: nobody keeps it
  bool bias_grad = false;             // as far as is known, as `grad`
  AtenTensorHandle out = nullptr;     // to be written to, where a kernel can: (B, Hq, Sq, Dv) of the query's dtype
  AtenTensorHandle lists = nullptr;   // a plan's (varlen_tile_list.cpp), and what it was made for
  int64_t plan_key = 0;
};

struct ForwardResult {
  Owned out, lse, seed, offset;  // seed and offset stay empty where no dropout was drawn
  bool in_place = false;         // out is the call's own
};

struct BackwardCall {
  AtenTensorHandle grad_out;
  ForwardCall forward;
  AtenTensorHandle out, lse, seed, offset;
  bool wanted[4];  // gradients of query, key, value, mask
  AtenTensorHandle grad_lse = nullptr;
  bool wants_delta = false;
};

struct BackwardResult {
  Owned grads[4];  // empty where not wanted
  Owned delta;     // (B, Hq, Sq) fp32, likewise: rowsum(dO O) - dLSE
};

Owned empty_strided(int dims, const int64_t* size, const int64_t* stride, int32_t dtype, int32_t device_type,
                    int32_t device_index);
Shape shape_of(AtenTensorHandle tensor);  // throws if it is not concrete
// A tensor with the given shape and strides, dtype and device as `like`; a copy of `from` unless that is null.
Owned new_like(AtenTensorHandle like, int dims, const int64_t* size, const int64_t* stride, AtenTensorHandle from);
// The same elements seen with other sizes and strides.
Owned view(AtenTensorHandle tensor, int dims, const int64_t* size, const int64_t* stride, int64_t offset = 0);
// The same 4-d numbers under these strides: the tensor itself where it has them, a view where only dims of size 1
// differ, else a copy.
Owned under_strides(AtenTensorHandle tensor, const int64_t stride[4]);
int64_t element_bytes(AtenTensorHandle tensor);
Layout layout_in_memory(AtenTensorHandle tensor, const Shape& shape);  // of a tensor that has an address
Owned packed_copy(AtenTensorHandle tensor);                            // of a 4-d tensor, row-major
// Of a 4-d tensor, laid out as torch.empty_like would where rows stay consecutive, else row-major.
Owned dense_copy(AtenTensorHandle tensor);
// Whether a 4-d tensor lies in whole units of 16 bytes. readable(): itself, or a dense copy.
bool is_readable(AtenTensorHandle tensor);
Owned readable(AtenTensorHandle tensor);
// torch leaves any number as the stride of a dim of size 1, and stock's kernels look at it when they check alignment.
// The same 4-d tensor with strides there that no kernel minds.
Owned aligned_ones(Owned tensor);
// Strides of torch.empty_like(x) and of the output of torch's attention ops for a query laid out as `like`.
void dense_strides(const int64_t* size, const int64_t* stride, int dims, int64_t* out);
void pack_strides(const int64_t size[4], int64_t stride[4]);  // row-major
// A copy of a tensor that has this size and these strides, row-major, each row padded to a multiple of `unit` elements.
Owned copy_of_padded_rows(AtenTensorHandle tensor, int dims, const int64_t* size, const int64_t* stride, int64_t unit);
// `out` itself, or a copy of it in the layout that output_strides() says.
Owned in_output_layout(Owned out, AtenTensorHandle query);
// [B, n * H, S, D] -> [B, H, S, D], as the operand has them: heads that gradients were left for apart, added up (torch
// adds 16-bit numbers in fp32). `grad` itself where it has as many.
Owned sum_of_heads(Owned grad, AtenTensorHandle operand);
// `grad` under the strides of torch.empty_like(operand), which graphs that torch.compile made expect.
Owned laid_out_like(Owned grad, AtenTensorHandle operand);
void output_strides(const Shape& query, const int64_t out_size[4], int64_t out_stride[4]);

// quant_workspace.cpp: scratch for operands in 8 bits, to a kernel that takes it.
Owned give_scratch8(const Problem& p, const TensorClass& query, const KernelRow& row, Arguments* arguments);

// ---- sdpa_ops.cpp ----

// Facts of a call whose tensors are real; throws where it has none.
Facts read_facts(const ForwardCall& call);
// Ours: two allocations (three where keys are split), copies of what no kernel reads, and one call of a kernel. False
// where no kernel could be had (auto mode goes on to stock).
bool our_forward(const ForwardCall& given, const Facts& facts, const Plan& plan, ForwardResult* result);
// A tensor without elements: no memory, no launch.
Owned placeholder(const ForwardCall& call, int32_t dtype);

// ---- attention_ops.cpp: ops of attention() ----

void register_own_ops(torch::stable::detail::StableLibrary* library);
void check_lengths(const ForwardCall& call, const Facts& facts);  // throws where kernels could not read them
// By kernels that a mode allows; false where there are none. Throws where the call's mode forces one.
bool attend(const char* where, const ForwardCall& call, const Facts& facts, Mode by, ForwardResult* result);
bool differentiate(const BackwardCall& call, const Facts& facts, BackwardResult* result);  // false: no kernel of ours
bool wants_math(Mode mode);
bool are_kernels(const Problem& p);  // others are the mathematics' to look at
// Throws where a tensor is not fp32 of these sizes, on the query's device.
void check_fp32(const char* name, AtenTensorHandle tensor, std::initializer_list<int64_t> wanted, const Facts& facts);

// ---- block_sparse_ops.cpp ----

void register_listed(torch::stable::detail::StableLibrary* library);

// ---- sinks.cpp: what windows and pages bring ----

// To a kernel that takes them. lse: whose address a tensor without elements has. The result has to live until the
// kernel is launched.
Owned give_sinks(AtenTensorHandle sinks, AtenTensorHandle lse, Arguments* arguments);
void give_pages(const ForwardCall& call, Arguments* arguments);
Owned give_lse_gradient(AtenTensorHandle gradient, AtenTensorHandle lse, const Problem& p, Arguments* arguments);

// ---- varlen_tile_list.cpp: what sequences on end bring ----

// To a kernel that takes them: starts, and the lists of the call's plan, or scratch that the kernel makes lists in. The
// result has to live until it is launched. Throws where the plan is another call's.
struct Lengths {
  Owned lists, used_k;
};
Lengths give_lengths(const ForwardCall& call, const Problem& p, const KernelRow& row, const TensorClass& query,
                     Arguments* arguments);
// (1 or 2, n) int32: lists of the forward's kernel and, where it has one of ours, of the backward's; and the key that
// calls bring beside them. No numbers, and 0, of a call without such kernels.
struct PlannedLists {
  Owned lists;
  int64_t key;
};
PlannedLists plan_lists(const ForwardCall& call, const Facts& facts, const Plan& plan, const BackwardPlan& backward);

// The same call with copies of operands that no kernel of ours reads as they lie, if there are any (copies_operands).
struct ReadCall {
  ForwardCall call;
  Owned copies[kNumOperands];
};
ReadCall as_kernels_read(const ForwardCall& call, const Problem& p);

// ---- softmax_scale.cpp ----

// The same call with a positive scale: the sign of another one goes to the query.
struct SignedScale {
  Owned q;
  double scale;
};
SignedScale with_positive_scale(const ForwardCall& call, const Problem& p);
// The gradient of the call's own query from that of the one above.
void give_sign(AtenTensorHandle grad_q, const Problem& p);

// ---- mask.cpp: bool masks, and what kernels read instead ----

// Router: leaves what autograd is to keep in the place of the caller's mask, where F.sdpa would find a bool one and
// make floats of it, for the op that this thread calls next: an empty digest or, for hooks of saved tensors, a copy of
// the mask's bytes. False where there is no memory for it.
bool leave_kept(AtenTensorHandle mask, const Facts& facts);
void forget_mask();
// Op: the mask in whose place this was left, which goes back there; undefined if it is none of this thread's.
Owned take_mask(AtenTensorHandle left);
// The digest that the op has to fill in: what was left, or null where nobody keeps it or it is a copy.
AtenTensorHandle digest_of(AtenTensorHandle left);
// Throws where a caller gives one as a mask.
void refuse_kept(AtenTensorHandle mask);
// What kernels take: a mask to be digested and where to, or nothing and what was digested before.
struct Masked {
  Owned mask;    // (B or 1, Hq or 1, Sq, Sk), strides 0 where it is broadcast; or without elements
  Owned digest;  // (B or 1, Hq or 1, n)
};
// To a kernel that takes them, or the mask alone. The result has to live until it is launched.
Masked give_mask(const ForwardCall& call, const Problem& p, const TensorClass& query, bool gradients,
                 Arguments* arguments);
// Sizes and strides of all four dims of a mask, of which those that are broadcast have stride 0; planes that are the
// same are one. False where it is none that kernels take.
bool spread(AtenTensorHandle mask, const Problem& p, int64_t size[4], int64_t stride[4]);
bool right_dtype(AtenTensorHandle mask, const Problem& p);     // what F.sdpa takes for a mask
bool beside(AtenTensorHandle mask, const TensorClass& query);  // on the same device
void digest_in_torch(const ForwardCall& call, const Problem& p, const TensorClass& query);  // fills the call's
// Of 32 bits, for each plane of a mask of so many rows: Sq, or those of a block that is like the others.
int64_t digest_numbers(int64_t rows, int64_t Sq, int64_t Sk, bool gradients);
bool can_be_digested(AtenTensorHandle mask, const Problem& p);  // not more of them than kernels count

// ---- bias.cpp: masks of floats ----

// To a kernel that takes one of them, whichever it is; undefined for others. It has to live until it is launched.
Owned give_bias(const ForwardCall& call, const Problem& p, const TensorClass& query, const KernelRow& row,
                Arguments* arguments);
// What a kernel writes a bias's gradient to: four dims, of size one where the bias has size one. It has the layout of
// the bias where rows of the bias are contiguous.
Owned new_bias_gradient(AtenTensorHandle bias);
// The gradient of a bias as a kernel writes it: planes of (rows, keys) along batch and heads. Where the bias is
// broadcast to many batches or heads and has few tiles, each CTA sums a range of them into a plane of its own. The
// planes are then added up in one order, so the result repeats bit for bit.
struct Planes {
  int64_t batches, heads, rows, keys;
  bool operator==(const Planes&) const = default;
};
Planes planes_of(AtenTensorHandle gradient);
Planes gradient_planes(AtenTensorHandle gradient, const Problem& p, const KernelRow& row, int sm_count);
Owned new_bias_planes(AtenTensorHandle gradient, const Planes& planes);
void sum_bias_planes(Owned planes, AtenTensorHandle gradient);
// The same under the sizes of the bias and the strides of torch.empty_like(bias).
Owned laid_out_as_bias(Owned gradient, AtenTensorHandle bias);

// ---- dropout.cpp: what bits are drawn from ----

struct Drawn {
  Owned seed, offset;  // () int64; the second is 0
};
Drawn draw(const TensorClass& query);  // on its device, from the default generator
// To a kernel that takes it. The result has to live until it is launched.
Owned give_seed(AtenTensorHandle seed, const TensorClass& query, Arguments* arguments);

// ---- backward.cpp: our gradients ----

// False where another backward must follow: no kernel of ours, or a GPU on which auto takes none.
bool our_backward(const BackwardCall& call, const Problem& p, const DeviceFacts& device, int device_index, Mode mode,
                  BackwardResult* result);

// ---- stock_workarounds.cpp ----

// Stock's cuDNN forward with operands that it can read; its output in the layout that it would have had.
struct RepairedForward {
  Owned tensors[7];  // as FusedResult
  int64_t max_q, max_k;
};
RepairedForward repaired_cudnn_forward(CudnnForwardCall call);
// What stock's flash and efficient attention read 16 bytes at a time, of 4 dims: itself where it lies so, else a copy.
Owned on_units(Owned operand);
Owned bias_on_units(Owned bias);
bool is_repaired(int backend);  // StockBackend: repair() has put it in place
// LSE (B, H, Sq) -> rows padded to 32 as the efficient backward reads them; +inf gives rows that do not exist
// probability 0.
Owned pad_lse(AtenTensorHandle lse);

// ---- stock.cpp: stock's kernels, called through the dispatcher with our operands ----

// cuDNN's forward; false where it refuses the call.
bool cudnn_forward(const ForwardCall& call, const Problem& p, ForwardResult* result);
bool efficient_can_run(const Problem& p);
ForwardResult efficient_forward(const ForwardCall& call, const Problem& p);
ForwardResult math_forward(const ForwardCall& call);
Owned cached_math(const ForwardCall& call);         // of key and value in 8 bits, made 16 (quantized_kv.py)
ForwardResult paged_math(const ForwardCall& call);  // of key and value in pages (paged.py)
// Of windows (attention.py).
ForwardResult attention_math(const ForwardCall& call);
BackwardResult attention_math_backward(const BackwardCall& call);
// Of lists of blocks (block_sparse.py).
ForwardResult listed_math(const ForwardCall& call);
BackwardResult listed_math_backward(const BackwardCall& call);
BackwardResult efficient_backward(const BackwardCall& call, const Problem& p);
BackwardResult math_backward(const BackwardCall& call);

}  // namespace flashplug
