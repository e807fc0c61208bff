// Tile lists for kernels of packed sequences (kernels/features/varlen.py). The lists are either a workspace of the
// call, filled by a launch ahead of the kernel, or belong to a plan (varlen_plan.py). A plan's lists are made by a
// kernel that does nothing else.
#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>

#include "core/attention_call.h"
#include "core/core.h"
#include "core/values.h"
#include "dispatch/dispatch.h"
#include "launch/kernel_args.h"
#include "launch/launch.h"
#include "operands/operands.h"
#include "ops/ops.h"

namespace flashplug {

namespace {

constexpr int64_t kSector = 8;  // in 32-bit numbers

// Return the capacity of the lists, for any kernel. A list has entries for blocks of the smallest size, an extra block
// for each sequence, and for the rows before the first and after the last sequence. An entry takes a sector, and so
// does a list's head. One more sector allows a size of one number less (`list_of_kernel()`).
int64_t list_capacity(const CallFacts& p) {
  constexpr int64_t most_lists = 3, least = 64;
  const int64_t num_entries = std::max(p.Sq, p.Sk) / least + p.sequences + 2;
  return kSector * (most_lists * (num_entries + 1) + 1);
}

TensorHandle new_lists(int64_t kernels, const CallFacts& p, const TensorMeta& query) {
  const int64_t size[2] = {kernels, list_capacity(p)}, stride[2] = {size[1], 1};
  return empty_strided(2, size, stride, aoti_torch_dtype_int32(), query.device_type, query.device_index);
}

// Return the lists of a kernel. An odd size tells the kernel to compare the lengths (kernels/features/varlen.py).
TensorHandle list_of_kernel(AtenTensorHandle lists, int64_t nth, const CallFacts& p, bool compares_lengths) {
  const int64_t capacity = list_capacity(p), numbers = capacity - (compares_lengths ? 1 : 0), unit_stride = 1;
  return view(lists, 1, &numbers, &unit_stride, nth * capacity);
}

// Identity of a plan in a single number: a kernel row number plus 1 for forward and backward, and a hash of the lists'
// further inputs.
constexpr int kRowBits = 12;
constexpr int64_t kRows = int64_t{1} << kRowBits;

// Return a hash of the facts behind the lists, in the bits above the row numbers.
int64_t facts_key(const CallFacts& p) {
  uint64_t hash = 0;
  for (int64_t fact : {p.Sq, p.Sk, p.sequences, p.left, p.right, p.bottom_right})
    hash = ((hash ^ static_cast<uint64_t>(fact)) * 0x9e3779b97f4a7c15u) ^ (hash >> 29);
  return static_cast<int64_t>(hash >> (2 * kRowBits + 2)) << 2 * kRowBits;
}

int64_t plan_key(const CallFacts& p, int forward_row, int backward_row) {
  return facts_key(p) | (int64_t{forward_row} + 1) << kRowBits | (int64_t{backward_row} + 1);
}

// Return a plan's lists for the kernel of a row. Returns nothing for a backward kernel without lists in the plan. A
// plan may be made without gradients, and kernel selection for the backward may have changed since. Throws if the plan
// was made for a different call.
TensorHandle tile_lists_of_plan(const ForwardCall& call, const CallFacts& p, const KernelRow& row,
                                const TensorMeta& query, bool after_dense_kernel) {
  if (!is_defined(call.tile_lists)) return {};
  const int64_t number = &row - tables().kernels.data() + 1;
  const bool backward = row.kind != kFwd;
  const int64_t key = call.plan_key, planned_row = backward ? key & (kRows - 1) : key >> kRowBits & (kRows - 1);
  const bool of_call = (key >> 2 * kRowBits) == (facts_key(p) >> 2 * kRowBits);
  if (backward && planned_row != number && of_call) return {};
  Shape shape;
  TensorMeta lists;
  if (!of_call || planned_row != number || !read_meta(call.tile_lists, &lists) || lists.dim != 2 ||
      !is_mask_metadata(call.tile_lists) || !is_on_device_of(call.tile_lists, query) ||
      !read_shape(call.tile_lists, &shape) || shape.size[0] <= int64_t{backward} || shape.size[1] != list_capacity(p) ||
      shape.stride[1] != 1 || shape.stride[0] != shape.size[1])
    throw std::runtime_error(
        "torch_flashplug: plan was made for another call: the kernel, the window or the number of rows, keys or "
        "sequences differs. Make the plan with the arguments of this call, under the same sdpa_backend.");
  return list_of_kernel(call.tile_lists, backward ? 1 : 0, p, after_dense_kernel);
}

void pack_start_args(const ForwardCall& call, const TensorHandle& seqused_k, const TensorHandle& tile_lists,
                     Arguments* arguments) {
  arguments->tensor("cu_seqlens_q", call.cu_seqlens_q);
  arguments->tensor("cu_seqlens_k", call.cu_seqlens_k);
  arguments->tensor("seqused_k", seqused_k.get());
  arguments->tensor("tile_lists", tile_lists.get(), true);
}

TensorHandle lengths_or_empty(const ForwardCall& call) {
  constexpr int64_t no_elements = 0, unit_stride = 1;
  return is_defined(call.seqused_k) ? TensorHandle::share(call.seqused_k)
                                    : view(call.cu_seqlens_k, 1, &no_elements, &unit_stride);
}

}  // namespace

Lengths pack_varlen_args(const ForwardCall& call, const CallFacts& p, const KernelRow& row, const TensorMeta& query,
                         bool after_dense_kernel, Arguments* arguments) {
  if (!arguments->takes("tile_lists")) return {};
  Lengths lengths;
  lengths.tile_lists = tile_lists_of_plan(call, p, row, query, after_dense_kernel);
  const bool is_planned = lengths.tile_lists.get() != nullptr;
  if (!is_planned) lengths.tile_lists = list_of_kernel(new_lists(1, p, query).get(), 0, p, after_dense_kernel);
  // The size of cu_seqlens_q tells the kernel that the lists exist.
  lengths.seqused_k = is_planned ? TensorHandle::share(call.cu_seqlens_q) : lengths_or_empty(call);
  pack_start_args(call, lengths.seqused_k, lengths.tile_lists, arguments);
  return lengths;
}

// Launch only the preprocessing of a kernel, which fills the lists of a plan. All operands have sizes, but share the
// memory of their rows.
void make_lists(Kernel& kernel, const KernelRow& row, const ForwardCall& call, const CallFacts& p,
                const TensorMeta& query, const TensorHandle& tile_lists) {
  static const int32_t fp32 = aoti_torch_dtype_float32();
  int32_t dtype = -1;
  check_shim(aoti_torch_get_dtype(call.q, &dtype), "get_dtype");
  const auto operand = [&](int64_t heads, int64_t rows, int64_t columns) {
    return make_broadcast_tensor({p.B, heads, rows, columns}, dtype, query);
  };
  const TensorHandle q = operand(p.Hq, p.Sq, p.D), k = operand(p.Hkv, p.Sk, p.D), v = operand(p.Hkv, p.Sk, p.Dv),
                     o = operand(p.Hq, p.Sq, p.Dv);
  const TensorHandle lse = make_broadcast_tensor({p.B, p.Hq, p.Sq}, fp32, query),
                     dq_workspace = make_broadcast_tensor({4}, fp32, query);
  const TensorHandle row_stats =
      make_broadcast_tensor({p.B, p.Hq, 2, row.kind == kFwd ? 1 : workspace_rows(p, row)}, fp32, query);
  Arguments arguments(row, p, query.device_index);
  arguments.tensor("q", q.get()), arguments.tensor("dq", q.get());
  arguments.tensor("k", k.get()), arguments.tensor("dk", k.get());
  arguments.tensor("v", v.get()), arguments.tensor("dv", v.get());
  arguments.tensor("o", o.get()), arguments.tensor("do", o.get());
  arguments.tensor("lse", lse.get());
  arguments.tensor("row_stats", row_stats.get());
  arguments.tensor("dq_workspace", dq_workspace.get());
  arguments.integer("needs_grad", kNeedsAll);
  arguments.scale(1.0);
  const TensorHandle sinks = pack_sink_args(nullptr, lse.get(), &arguments);
  const TensorHandle gradient = pack_dlse(nullptr, lse.get(), p, &arguments);
  const TensorHandle seqused_k = lengths_or_empty(call);
  pack_start_args(call, seqused_k, tile_lists, &arguments);
  launch_preprocess(kernel, arguments);
}

PlannedLists plan_lists(const ForwardCall& call, const ReadFacts& facts, const Plan& plan,
                        const BackwardPlan& backward) {
  const CallFacts& p = facts.call;
  const TensorMeta& query = facts.operand[0];
  const auto takes_lists = [&](int row) { return row >= 0 && (tables().kernels[row].takes & kVarlen) != 0; };
  int rows[2] = {plan.ours() ? plan.kernel_row : -1, backward.ours() ? backward.kernel_row : -1};
  Kernel* kernels[2] = {};
  for (int i = 0; i < 2; ++i) {
    const int required = i == 0 && call.mode.forces_kernels() ? kMustWait : 0;
    const int training = backward.ours() ? kNeedsGradients : 0;
    if (takes_lists(rows[i])) kernels[i] = find_kernel(rows[i], query.device_index, required | training);
    if (kernels[i] == nullptr) rows[i] = -1;
    if (rows[0] < 0) return {placeholder(call, aoti_torch_dtype_int32()), 0};
  }
  PlannedLists planned_lists{new_lists(rows[1] < 0 ? 1 : 2, p, query), plan_key(p, rows[0], rows[1])};
  for (int i = 0; i < 2; ++i) {
    if (kernels[i] != nullptr)
      make_lists(*kernels[i], tables().kernels[rows[i]], call, p, query,
                 list_of_kernel(planned_lists.lists.get(), i, p, true));
  }
  return planned_lists;
}

}  // namespace flashplug
