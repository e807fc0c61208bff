// The dispatcher's rule: pure functions of (Problem, DeviceFacts, Mode, Tables). No torch, no CUDA, no strings on this
// path.
//
// Order of questions, of Hopper's kernels first and then of those for every GPU: can they run this call (support.cpp)?
// Is there a kernel row (kernel_selection.cpp)? In auto: is it a call that stock is known to fail? Unless forced: is
// the backward ours, too, where gradients are wanted? In auto: does the decode gate let it through, and does a measured
// row say that it is at least as fast as stock? The words for every answer are in explain.cpp.
#include <algorithm>

#include "core/flashplug.h"

namespace flashplug {

namespace {

// Packed rows in splits, or -1: where they are few enough, where splits are asked for, and, of calls with some rows
// more, where that should take less time than the forward of `unpacked`, whose tiles they do not fill.
int find_decode_row(const Problem& p, const DeviceFacts& device, Mode mode, const Tables& tables, int family,
                    int unpacked, Plan* plan) {
  if (p.grad && (p.needs & kMask) != 0) return -1;  // gradients want a digest, which these kernels do without
  const int64_t wanted = p.by_kind ? 1 : mode.num_splits();
  const bool few = plan->gate.decode || wanted > 1;
  if (!few && p.by_kind) return -1;
  if (!few && (packed_rows(p) > tables.gate.wide_rows || p.grad || unpacked < 0)) return -1;
  const int found = find_kernel_row(p, kDecode, family, device, tables);
  if (found < 0) return -1;
  const KernelRow& row = tables.kernels[found];
  const Splits splits = p.split_size > 0 ? splits_of_size(p)
                        : wanted > 0     ? split_among(p, row, device, tables, possible_splits(p, row, wanted))
                                         : best_splits(p, row, device, tables);
  if (!few) {
    plan->packed_ns = packed_time(p, row, device, tables, splits);
    plan->unpacked_ns = estimate(p, tables.kernels[unpacked], device);
    if (plan->packed_ns >= plan->unpacked_ns) return -1;
  }
  plan->splits = splits;
  return found;
}

// Support, kernel row, splits, tiles; or why kernels of that family cannot run.
Reason resolve(const Problem& p, const DeviceFacts& device, Mode mode, const Tables& tables, int family, Plan* plan) {
  Reason why;
  if (unsupported(p, device, tables, family, &why, 1) != 0) return why;
  plan->gate = decode_gate(p, device, tables);
  const int forward = find_kernel_row(p, kFwd, family, device, tables);
  const int decode = find_decode_row(p, device, mode, tables, family, forward, plan);
  if (mode.num_splits() > 1 && decode < 0) return Reason{Why::kSplits, mode.num_splits(), 1};
  plan->kernel_row = decode >= 0 ? decode : forward;
  if (plan->kernel_row < 0) return Reason{Why::kNoKernel};
  const KernelRow& row = tables.kernels[plan->kernel_row];
  plan->tiles = decode >= 0 ? packed_tiles(p, row) : p.B * p.Hq * ceil_div(p.Sq, row.tile_m);
  return {};
}

// Why kernels that could run should not, unless they are forced. A preferred backend goes ahead of what was measured.
// given: what stock would get.
Reason unwanted(const Problem& p, const Problem& given, const DeviceFacts& device, Mode mode, const Tables& tables,
                Plan* plan) {
  const KernelRow& kernel = tables.kernels[plan->kernel_row];
  const bool measured = mode.backend() == Backend::kAuto;
  if (measured && device.cc != tables.gate.measured_cc) return Reason{Why::kUnmeasuredDevice, device.cc, kernel.family};
  if (measured) plan->rescue_row = find_rescue(given, tables);
  const bool rescued = plan->rescue_row >= 0;
  if (rescued && (p.needs & kBiases) == 0) return {};  // right goes before fast
  // What could follow our forward there is slower than what stock has for both, and may not repeat its sums. To a bias
  // it would be math, which needs memory for every score.
  const bool grad = p.as_with_gradients();
  if (const BackwardPlan ours = grad ? plan_backward(p, device, mode, tables) : BackwardPlan{}; !ours.ours()) {
    if (ours.why.why == Why::kNoBiasGradient) return ours.why;
    return Reason{p.deterministic ? Why::kDeterministic : Why::kNoBackward};
  }
  if (rescued) return {};
  if (!measured) return {};
  const bool one_block = p.Sk <= kernel.tile_n;  // of keys: there is nothing to split
  if (plan->gate.closed && kernel.kind != kDecode && !one_block)
    return Reason{Why::kDecodeGate, plan->gate.tiles, plan->gate.needed};
  plan->choice_row = find_choice_row(given, kernel, plan->tiles, tables);
  return slower_by_row(*plan, tables);
}

// What one family makes of a call: its plan, or stock's with its reason.
Plan attempt(const Problem& p, const Problem& given, const DeviceFacts& device, Mode mode, const Tables& tables,
             int family) {
  Plan plan;
  Reason& why = plan.why[family];
  why = resolve(p, device, mode, tables, family, &plan);
  if (!why && !mode.forces_kernels()) why = unwanted(p, given, device, mode, tables, &plan);
  if (!why) plan.backend = backend_of(family);
  return plan;
}

Plan plan_exactly(const Problem& given, const DeviceFacts& device, Mode mode, const Tables& tables) {
  const Backend wanted = mode.backend();
  const Problem p = as_read(given, tables);
  if (mode.family() >= 0) return attempt(p, given, device, mode, tables, mode.family());
  Plan plan;
  if (wanted != Backend::kAuto) {
    plan.backend = wanted;
    return plan;
  }
  decltype(plan.why) why;
  any_family(tables, [&](int family) {
    const Plan next = attempt(p, given, device, mode, tables, family);
    why[family] = next.why[family];
    if (family == 0 || next.ours()) plan = next;
    return next.ours();
  });
  plan.why = why;
  return plan;
}

}  // namespace

Problem as_asked(const Problem& p, Mode mode) {
  Problem asked = p;
  asked.needs |= mode.asks();
  return asked;
}

// Stock where no family serves; under a forced backend the op turns that into an error. Fewer bits are a permission: 16
// where kernels of 8 cannot run a call, or were not measured to be faster; an order where a block forces them and the
// backend.
Plan plan_call(const Problem& given, const DeviceFacts& device, Mode mode, const Tables& tables) {
  if (mode.asks() == 0) return plan_exactly(given, device, mode, tables);
  const bool order = mode.forces_kernels() && !mode.permits();
  Plan asked = plan_exactly(as_asked(given, mode), device, order ? mode : mode.of_any_backend(), tables);
  const bool served = asked.ours() && (mode.family() < 0 || asked.backend == mode.backend());
  if (served) asked.features = mode.asks();
  if (served || order) return asked;
  Plan whole = plan_exactly(given, device, mode, tables);
  whole.why_whole = asked.why[std::max(mode.family(), 0)];
  return whole;
}

Plan plan_in_op(const Problem& p, const DeviceFacts& device, const Tables& tables, int64_t splits) {
  Plan plan;
  any_family(tables, [&](int family) {
    plan = plan_call(p, device, Mode::forcing(family).with_splits(splits), tables);
    return plan.ours();
  });
  return plan;
}

}  // namespace flashplug
