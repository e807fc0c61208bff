// The rule for packed sequences of equal lengths. Such sequences are a dense batch, and dense kernels are faster than
// kernels of packed sequences. Lengths are in device memory, so the host knows only the mean length. A dense kernel is
// launched ahead of the kernel of packed sequences where all lengths can be equal. Exactly one of both kernels has work
// (kernels/tiling/equal_lengths.py).
#include <cstdint>
#include <optional>

#include "core/core.h"
#include "dispatch/dispatch.h"

namespace flashplug {

std::optional<CallFacts> equal_lengths_facts(const CallFacts& p) {
  const int64_t n = p.sequences;
  if (n <= 0 || p.Sq % n != 0 || p.Sk % n != 0) return {};
  // The kernels have neither a softcap nor a window. A sequence alone must have the bits that it has among others, if a
  // call must be batch-invariant.
  if (p.needs != (kWindow | kVarlen) || p.batch_invariant) return {};
  CallFacts dense = p;
  dense.B = n, dense.Sq = p.Sq / n, dense.Sk = p.Sk / n;
  const int64_t all = dense.Sq + dense.Sk;  // a window bound from which on no key is hidden
  const bool same_corner = p.bottom_right == 0 || dense.Sq == dense.Sk;
  const bool causal = p.right == 0 && same_corner;
  if (p.left < all || !(causal || p.right >= all)) return {};
  dense.needs = kEqual | (causal ? kCausal : 0);
  dense.sequences = dense.left = dense.right = dense.bottom_right = 0;
  return dense;
}

int find_equal_lengths_row(const CallFacts& dense, const KernelRow& packed, const DeviceFacts& device,
                           const Tables& tables) {
  const CostModelRow& least = tables.cost_model;
  if (dense.Sq < (packed.kind == kFwd ? least.min_equal_rows : least.min_equal_rows_of_gradients)) return -1;
  const int forward = find_kernel_row(dense, kFwd, packed.family, device, tables);
  if (forward < 0 || estimate(dense, tables.kernels[forward], device, tables) < least.min_equal_ns) return -1;
  CallFacts with_gradients = dense;
  with_gradients.grad = true;
  const int row_index =
      packed.kind == kFwd ? forward : find_backward_row(with_gradients, device, tables, packed.family, kNeedsAll);
  if (row_index < 0) return -1;
  const KernelRow& row = tables.kernels[row_index];
  const bool pads_more = row.d_max > packed.d_max || row.dv_max > packed.dv_max;
  return pads_more ? -1 : row_index;
}

}  // namespace flashplug
