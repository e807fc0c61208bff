// The rule for gradients: a kernel of this project or stock runs the backward after a forward kernel of this project,
// and which kernel.
#include "dispatch/dispatch.h"

#include <algorithm>
#include <cstdint>
#include <limits>

#include "core/core.h"

namespace flashplug {

namespace {

constexpr int64_t kLargeWorkspace = int64_t{1} << 28;  // bytes

// Return true if the workspace of a fused backward is large and takes more memory than the call's operands, output and
// gradients. The workspace pads rows to whole blocks, so many short sequences would need many times the memory of the
// operands.
bool has_large_workspace(const CallFacts& p, const KernelRow& row) {
  const int64_t bytes = workspace_floats(p, row) * static_cast<int64_t>(sizeof(float));
  const int64_t of_queries = p.B * p.Hq * p.Sq * (p.D + p.Dv), of_keys = p.B * p.Hkv * p.Sk * (p.D + p.Dv);
  return bytes > kLargeWorkspace && bytes > 2 * (of_queries + of_keys) * facts_of(p.dtype[0]).bytes;
}

// Return the kernel row of a single-tile backward, or -1. Such a kernel computes all gradients of sequences that fit
// into one tile.
int find_tile_row(const CallFacts& p, const DeviceFacts& device, const Tables& tables, int family,
                  int64_t wanted_grads) {
  if (wanted_grads != kNeedsAll || p.batch_invariant || p.group() != 1) return -1;
  const int row_index = find_kernel_row(p, kTileBwd, family, device, tables);
  if (row_index < 0) return -1;
  const KernelRow& row = tables.kernels[row_index];
  return p.Sq <= row.tile_m && p.Sk <= row.tile_n ? row_index : -1;
}

}  // namespace

// Return the kernel row of the backward, or -1. The split backward is chosen in these cases:
// - no other kernel takes the call;
// - the workspace of the fused kernel would have more than 2^31 - 1 floats, because kernels count floats in 32 bits;
// - the workspace would take much more memory than the call;
// - the split backward was measured to be faster;
// - the call wants only one part. dQ alone needs three of the seven matrix products, dK and dV need four. Kernels for
//   narrow head dims lose more time by working on halves of the columns (`dkdv_alone` is false);
// - the call must be batch-invariant. The split backward has a fixed accumulation order.
int find_backward_row(const CallFacts& p, const DeviceFacts& device, const Tables& tables, int family,
                      int64_t wanted_grads) {
  const int tile = find_tile_row(p, device, tables, family, wanted_grads);
  if (tile >= 0) return tile;
  const int split_row = find_kernel_row(p, kSplitBwd, family, device, tables);
  if (split_row >= 0 && p.batch_invariant) return split_row;
  if (split_row >= 0 &&
      (wanted_grads == kNeedsDq || (wanted_grads == kNeedsDkDv && tables.kernels[split_row].dkdv_alone)))
    return split_row;
  const int fused_row = find_kernel_row(p, p.deterministic ? kDeterministicBwd : kBwd, family, device, tables);
  if (fused_row < 0 || workspace_floats(p, tables.kernels[fused_row]) > std::numeric_limits<int32_t>::max())
    return split_row;
  if (split_row < 0) return fused_row;
  if (has_large_workspace(p, tables.kernels[fused_row])) return split_row;
  const int faster = find_split_backward_row(p, tables.kernels[fused_row], tables);
  return faster >= 0 && tables.choices[faster].serve ? split_row : fused_row;
}

namespace {

// Return the query rows that the busiest CTA visits in turn, with so many tiles for each block of keys. With a causal
// mask, the longest tiles run first, so the CTAs share the rows evenly unless a single tile is longer.
int64_t rows_in_turn(const CallFacts& p, int64_t blocks, int64_t sms, int64_t sharing) {
  const int64_t heads = p.group() / sharing;
  if ((p.needs & kCausal) == 0) return ceil_div(blocks * sharing, sms) * heads * p.Sq;
  const int64_t visible_keys = std::min(p.Sq, p.Sk);  // rows of a block of keys decrease with the keys, from Sq on
  // Products of four sizes exceed 63 bits for a few million keys.
  const double visible = static_cast<double>(p.Sq - visible_keys / 2) * static_cast<double>(visible_keys);
  const double all_rows =
      static_cast<double>(blocks * p.group()) * visible / static_cast<double>(std::max<int64_t>(p.Sk, 1));
  return std::max(heads * p.Sq, ceil_div(static_cast<int64_t>(all_rows), sms));
}

// Return the number of tiles for each block of keys. If few blocks of keys leave SMs idle, several tiles share the
// query heads of a KV head. The number is the smallest with the fewest rows in turn. The results of the tiles must be
// added up, so the saved rows must reach `min_rows_saved`, and with a causal mask `rows_per_sum` for each tile of a
// CTA.
int64_t num_tiles_per_kv_block(const CallFacts& p, const KernelRow& row, const DeviceFacts& device,
                               const Tables& tables) {
  if (row.shares_heads == 0 || (p.needs & kVarlen) != 0 || p.batch_invariant) return 1;
  const int64_t blocks = p.B * p.Hkv * ceil_div(p.Sk, row.tile_n), sms = std::max(device.sm_count, 1);
  const auto sums = [&](int64_t sharing) {
    if (sharing == 1 || (p.needs & kCausal) == 0) return int64_t{0};
    return ceil_div(blocks * sharing, sms) * tables.cost_model.rows_per_sum;
  };
  const auto cost = [&](int64_t sharing) { return rows_in_turn(p, blocks, sms, sharing) + sums(sharing); };
  int64_t best = 1;
  for (int64_t sharing = 2; sharing <= p.group(); ++sharing) {
    if (p.group() % sharing == 0 && cost(sharing) < cost(best)) best = sharing;
  }
  return cost(1) - cost(best) < tables.cost_model.min_rows_saved ? 1 : best;
}

BackwardPlan refused(Reason why) { return BackwardPlan{-1, -1, why}; }

// Return the backward plan with kernels of a single family, or the reason against the family.
BackwardPlan attempt(const CallFacts& p, const DeviceFacts& device, const Tables& tables, int family,
                     int64_t wanted_grads) {
  Reason why;
  if (unsupported(p, device, tables, family, &why, 1) != 0) return refused(why);
  const int row = wanted_grads == 0 ? -1 : find_backward_row(p, device, tables, family, wanted_grads);
  const int bias_row = p.bias_grad ? find_kernel_row(p, kDBias, family, device, tables) : -1;
  if (wanted_grads != 0 && row < 0) return refused(Reason{Why::kNoKernel});
  if (p.bias_grad && bias_row < 0) return refused(Reason{Why::kNoBiasGradient});
  const bool shared = row >= 0 && (wanted_grads & kNeedsDkDv) != 0;
  return BackwardPlan{row, bias_row, {}, shared ? num_tiles_per_kv_block(p, tables.kernels[row], device, tables) : 1};
}

// Return the backward plan of the requested family, or else of the first family able to run the call.
BackwardPlan attempt_all(const CallFacts& p, const DeviceFacts& device, const Tables& tables, int requested,
                         int64_t wanted_grads) {
  BackwardPlan plan = attempt(p, device, tables, requested, wanted_grads);
  if (plan.ours()) return plan;
  any_family(tables, [&](int family) {
    if (family == requested) return false;
    const BackwardPlan candidate = attempt(p, device, tables, family, wanted_grads);
    if (candidate.ours()) plan = candidate;
    return candidate.ours();
  });
  return plan;
}

}  // namespace

int64_t workspace_rows(const CallFacts& p, const KernelRow& row) {
  // Each packed sequence has separate blocks, and so have the rows before the first and after the last sequence.
  const bool is_packed = (p.needs & kVarlen) != 0;
  const int64_t blocks =
      is_packed ? p.Sq / row.workspace_block_rows + p.sequences + 2 : ceil_div(p.Sq, row.workspace_block_rows);
  return blocks * row.workspace_block_rows;
}

int64_t workspace_floats(const CallFacts& p, const KernelRow& row) {
  if (row.counters == 0) return 0;
  // The workspace holds dQ in fp32, a counter for each half of the columns of sixteen rows, and two counters for each
  // head of the tiles. There are at most Hq such heads.
  const int64_t rows = workspace_rows(p, row), counters = rows / row.tile_m * row.counters + 2;
  return p.B * p.Hq * (rows * row.d_max + counters);
}

bool has_unmeasured_gradients(const CallFacts& p, const Tables& tables) {
  return std::max(p.D, p.Dv) > tables.layout.max_general_head_dim;
}

// A backward kernel of this project runs wherever possible. The alternatives after a forward of this project are the
// backward of stock's efficient attention, which is slower, and the math backward. On an unmeasured GPU, the auto mode
// uses a backward kernel of this project only in place of the math backward.
BackwardPlan plan_backward(const CallFacts& original, const DeviceFacts& device, Mode mode, const Tables& tables,
                           int64_t wanted_grads) {
  if (mode.backend() == Backend::kStock) return refused(Reason{Why::kNoKernel});
  if (mode.backend() == Backend::kAuto && has_unmeasured_gradients(original, tables))
    return refused(
        Reason{Why::kUnmeasuredGradients, std::max(original.D, original.Dv), tables.layout.max_general_head_dim});
  const CallFacts p = after_copies(original, tables);
  const BackwardPlan plan = attempt_all(p, device, tables, std::max(mode.family(), 0), wanted_grads);
  if (!plan.ours() || mode.backend() != Backend::kAuto || !stock_efficient_supports(p)) return plan;
  const int row = std::max(plan.kernel_row, plan.bias_row);  // both rows have the same family
  const int family = tables.kernels[row].family;
  if (is_measured(tables.families[family], device.cc)) return plan;
  return refused(Reason{Why::kUnmeasuredDevice, device.cc, family});
}

}  // namespace flashplug
