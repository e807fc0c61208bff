// The rule of the dispatcher: pure functions of (CallFacts, DeviceFacts, Mode, Tables). No torch, no CUDA and no
// strings are used here.
//
// The dispatcher asks these questions in order, first about the kernels for Hopper, then about the kernels for every
// GPU:
// 1. Can a kernel of the family run the call (support.cpp)?
// 2. Is there a kernel row (kernel_selection.cpp)?
// 3. In auto mode: is stock known to fail on the call?
// 4. Unless a backend is forced, and if gradients are wanted: does a kernel of this project run the backward, too?
// 5. In auto mode: does the decode gate let the call through?
// 6. In auto mode: does a measured row say that the kernel is at least as fast as stock?
// The texts of all answers are in explain.cpp.
#include "dispatch/dispatch.h"

#include <algorithm>
#include <cstdint>

#include "core/core.h"

namespace flashplug {

namespace {

// Return the kernel row of a decode kernel, or -1. A decode kernel packs the query rows of a KV head and splits the
// keys. Decode runs if the packed rows are few enough, if splits are requested, or if values are shared. With somewhat
// more rows, decode runs if the estimated time is less than that of the forward kernel `unpacked`, whose tiles the rows
// do not fill.
int find_decode_row(const CallFacts& p, const DeviceFacts& device, Mode mode, const Tables& tables, int family,
                    int unpacked, Plan* plan) {
  if (p.grad && (p.needs & kMask) != 0) return -1;  // the backward needs mask metadata, and decode makes none
  const int64_t requested_splits = p.batch_invariant ? 1 : mode.num_splits();
  const bool few = plan->gate.decode || requested_splits > 1 || (p.needs & kShared) != 0;
  if (!few && p.batch_invariant) return -1;
  if (!few && (packed_rows(p) > tables.cost_model.max_packed_rows || p.grad || unpacked < 0)) return -1;
  const int row_index = find_kernel_row(p, kDecode, family, device, tables);
  if (row_index < 0) return -1;
  const KernelRow& row = tables.kernels[row_index];
  const Splits splits = p.split_size > 0 ? splits_of_size(p, tables)
                        : requested_splits > 0
                            ? split_among(p, row, device, tables, possible_splits(p, row, tables, requested_splits))
                            : best_splits(p, row, device, tables);
  if (!few) {
    plan->packed_ns = packed_time(p, row, device, tables, splits);
    plan->unpacked_ns = estimate(p, tables.kernels[unpacked], device, tables);
    if (plan->packed_ns >= plan->unpacked_ns) return -1;
  }
  plan->splits = splits;
  if (!may_balance_splits(p, mode.num_splits(), tables)) return row_index;
  CallFacts balanced = p;
  balanced.needs |= kBalanced;
  const int balanced_index = find_kernel_row(balanced, kDecode, family, device, tables);
  if (balanced_index < 0) return row_index;
  plan->splits = balanced_splits(p, tables.kernels[balanced_index], device, tables, splits);
  return balanced_index;
}

// Fill in kernel row, splits and tiles of the plan, or return the reason why the family cannot run the call.
Reason plan_family(const CallFacts& p, const DeviceFacts& device, Mode mode, const Tables& tables, int family,
                   Plan* plan) {
  Reason why;
  if (unsupported(p, device, tables, family, &why, 1) != 0) return why;
  plan->gate = decode_gate(p, device, tables);
  const int forward = find_kernel_row(p, kFwd, family, device, tables);
  const int decode = find_decode_row(p, device, mode, tables, family, forward, plan);
  if (mode.num_splits() > 1 && decode < 0) return Reason{Why::kSplits, mode.num_splits(), 1};
  plan->kernel_row = decode >= 0 ? decode : forward;
  if (plan->kernel_row < 0) return Reason{Why::kNoKernel};
  const KernelRow& row = tables.kernels[plan->kernel_row];
  plan->tiles = decode >= 0 ? packed_tiles(p, row) : p.B * p.Hq * ceil_div(p.Sq, row.tile_m) * row.column_tiles;
  return {};
}

// Return the reason why an able, unforced family should not serve a call. A preferred backend overrides the measured
// rows. `original` has the facts of the call as stock receives the tensors.
Reason unwanted(const CallFacts& p, const CallFacts& original, const DeviceFacts& device, Mode mode,
                const Tables& tables, Plan* plan) {
  const KernelRow& kernel = tables.kernels[plan->kernel_row];
  const bool measured = mode.backend() == Backend::kAuto;
  if (measured && !is_measured(tables.families[kernel.family], device.cc))
    return Reason{Why::kUnmeasuredDevice, device.cc, kernel.family};
  if (measured) plan->stock_bug_row = find_stock_bug(original, tables);
  const bool has_stock_bug = plan->stock_bug_row >= 0;
  if (has_stock_bug && (p.needs & kBiases) == 0) return {};  // a correct result has priority over speed
  // After a forward of this project, a stock backward would be slower than stock for both directions, and its sums may
  // not be deterministic. For a bias, the math backward would follow, which needs memory for every score.
  const bool grad = p.as_with_gradients();
  if (const BackwardPlan ours = grad ? plan_backward(p, device, mode, tables) : BackwardPlan{}; !ours.ours()) {
    if (ours.why.why == Why::kNoBiasGradient || ours.why.why == Why::kUnmeasuredGradients) return ours.why;
    return Reason{p.deterministic ? Why::kDeterministic : Why::kNoBackward};
  }
  if (has_stock_bug) return {};
  if (!measured) return {};
  const bool one_block = p.Sk <= kernel.tile_n;  // a single block of keys cannot be split
  if (plan->gate.closed && kernel.kind != kDecode && !one_block)
    return Reason{Why::kDecodeGate, plan->gate.tiles, plan->gate.needed};
  plan->choice_row = find_choice_row(original, kernel, plan->tiles, tables);
  return slower_reason(*plan, original, tables);
}

// Return the plan of a family for a call, or a plan for stock with the reason against the family.
Plan attempt(const CallFacts& p, const CallFacts& original, const DeviceFacts& device, Mode mode, const Tables& tables,
             int family) {
  Plan plan;
  Reason& why = plan.why[family];
  why = plan_family(p, device, mode, tables, family, &plan);
  if (!why && !mode.forces_kernels()) why = unwanted(p, original, device, mode, tables, &plan);
  if (!why) plan.backend = backend_of(family);
  return plan;
}

Plan plan_with_precision(const CallFacts& original, const DeviceFacts& device, Mode mode, const Tables& tables) {
  const Backend backend = mode.backend();
  const CallFacts p = after_copies(original, tables);
  if (mode.family() >= 0) return attempt(p, original, device, mode, tables, mode.family());
  Plan plan;
  if (backend != Backend::kAuto) {
    plan.backend = backend;
    return plan;
  }
  decltype(plan.why) why;
  any_family(tables, [&](int family) {
    const Plan next = attempt(p, original, device, mode, tables, family);
    why[family] = next.why[family];
    if (family == 0 || next.ours()) plan = next;
    return next.ours();
  });
  plan.why = why;
  return plan;
}

// Return the plan in 16 bits. Values that are shared are a permission: calls run without, if no kernel shares values.
Plan plan_in_16_bits(const CallFacts& p, const DeviceFacts& device, Mode mode, const Tables& tables) {
  if (may_share_values(p, mode, tables)) {
    CallFacts shared = p;
    shared.needs |= kShared;
    Plan plan = plan_with_precision(shared, device, mode, tables);
    if (plan.ours()) {
      plan.features = kShared;
      return plan;
    }
  }
  return plan_with_precision(p, device, mode, tables);
}

}  // namespace

bool may_share_values(const CallFacts& p, Mode mode, const Tables& tables) {
  const CostModelRow& limits = tables.cost_model;
  return p.shared_values && !p.grad && packed_rows(p) <= limits.max_shared_rows &&
         std::max(p.D, p.Dv) > tables.layout.max_general_head_dim &&
         (mode.forces_kernels() || p.Sk >= limits.min_shared_keys);
}

CallFacts with_requested_precision(const CallFacts& p, Mode mode, const Tables& tables) {
  CallFacts requested = p;
  requested.needs |= recipe_features(mode, tables);
  return requested;
}

// The plan is for stock if no family serves the call. Under a forced backend, the op raises an error for a stock plan.
// A requested 8-bit precision is a permission: calls run in 16 bits if the 8-bit kernels cannot run the call or were
// not measured to be faster. The precision is an order if a block forces both the precision and the backend.
Plan plan_call(const CallFacts& original, const DeviceFacts& device, Mode mode, const Tables& tables) {
  if (recipe_features(mode, tables) == 0) return plan_in_16_bits(original, device, mode, tables);
  const bool order = mode.forces_kernels() && !permits_recipe(mode, tables);
  Plan in_8_bits = plan_with_precision(with_requested_precision(original, mode, tables), device,
                                       order ? mode : mode.of_any_backend(), tables);
  const bool served = in_8_bits.ours() && (mode.family() < 0 || in_8_bits.backend == mode.backend());
  if (served) in_8_bits.features = recipe_features(mode, tables);
  if (served || order) return in_8_bits;
  Plan in_16_bits = plan_in_16_bits(original, device, mode, tables);
  in_16_bits.why_not_8bit = in_8_bits.why[std::max(mode.family(), 0)];
  return in_16_bits;
}

Plan plan_in_op(const CallFacts& p, const DeviceFacts& device, const Tables& tables, int64_t splits) {
  Plan plan;
  any_family(tables, [&](int family) {
    plan = plan_call(p, device, Mode::forcing(family).with_splits(splits), tables);
    return plan.ours();
  });
  return plan;
}

}  // namespace flashplug
