// Kernel selection: the kernel row with the shortest estimated time for a call, and the measured class (choice row) of
// a call.
#include "dispatch/dispatch.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>

#include "core/core.h"

namespace flashplug {

namespace {

constexpr double kEdgeBlocks = 1;  // cost of the prologue and epilogue of a tile, in KV blocks

// Return true if all rows of the call's tensors start at a sector of L2, the smallest unit of L2 traffic.
bool rows_sector_aligned(const CallFacts& p, const KernelRow& row) {
  const auto is_aligned = [&row](int64_t columns, int operand) {
    return columns * facts_of(row.dtype[operand]).bytes % row.sector_bytes == 0;
  };
  return is_aligned(p.D, 0) && is_aligned(p.D, 1) && is_aligned(p.Dv, 2);
}

// Element-wise kernels serve only calls whose tensors vector loads cannot read.
bool row_fits(const CallFacts& p, const DeviceFacts& device, const KernelRow& row) {
  return supports_dtypes(row, p) && p.D <= row.d_max && p.Dv <= row.dv_max && has_features(row, p.needs) &&
         (row.rows_sector_aligned == 0 || rows_sector_aligned(p, row)) && (row.elementwise != 0) != is_16b_aligned(p) &&
         smem_fits(row, device);
}

bool same_head_dims(const KernelRow& a, const KernelRow& b) { return a.d_max == b.d_max && a.dv_max == b.dv_max; }

// Return the cost of the last tile of a head, relative to a full tile. A fixed part is always paid. The rest is
// proportional to the groups of rows with work.
double last_tile(const CallFacts& p, const KernelRow& row) {
  if (p.Sq % row.tile_m == 0) return 1.0;
  const int64_t rows = ceil_div(p.Sq % row.tile_m, row.group_rows) * row.group_rows;
  return row.last_tile + (1 - row.last_tile) * static_cast<double>(rows) / row.tile_m;
}

// Return the facts of a batch whose packed sequences all have the mean length. The host does not know the real lengths.
// With pages, Sk is the capacity of each sequence.
CallFacts with_mean_length(const CallFacts& p) {
  CallFacts mean = p;
  if (p.sequences <= 0) return mean;
  mean.B = p.sequences;
  mean.Sq = ceil_div(p.Sq, p.sequences);
  if ((p.needs & kPaged) == 0) mean.Sk = ceil_div(p.Sk, p.sequences);
  return mean;
}

// Return the facts by which the kernel of a batch-invariant call is chosen. The result of a sequence must not depend on
// the other sequences, so the facts assume enough sequences to fill any GPU. Every batch entry has the same number of
// query rows, so Sq is kept. Lengths of packed sequences, caches and block tables, and the bounds of a clipped window,
// belong to all sequences together, so the facts have fixed values for those.
CallFacts batch_invariant_facts(const CallFacts& p) {
  if (!p.batch_invariant) return p;
  constexpr int64_t sequences = 64, length = 4096;
  CallFacts facts = p;
  facts.Sk = length;
  if (p.sequences > 0)
    facts.sequences = sequences, facts.Sq = sequences * length, facts.Sk = (p.needs & kPaged) != 0 ? length : facts.Sq;
  else
    facts.B = sequences;
  facts.left = facts.right = facts.Sq + facts.Sk;
  return facts;
}

// Number of KV blocks visited by all tiles of a head, and by the longest tile (kernels/tiling/sliding_window.py).
struct WindowBlocks {
  double all = 0, longest = 0;
};
WindowBlocks count_window_blocks(const CallFacts& p, const KernelRow& row) {
  WindowBlocks counts;
  const int64_t diagonal = p.bottom_right * (p.Sk - p.Sq);
  for (int64_t first_row = 0; first_row < p.Sq; first_row += row.tile_m) {
    const int64_t begin = first_row + diagonal - p.left, last_key = first_row + row.tile_m - 1 + diagonal + p.right;
    const int64_t end = ceil_div(std::clamp<int64_t>(last_key + 1, 1, p.Sk), row.tile_n);
    const int64_t blocks = end - std::min(std::max<int64_t>(begin, 0) / row.tile_n, end - 1);
    counts.all += static_cast<double>(blocks);
    counts.longest = std::max(counts.longest, static_cast<double>(blocks));
  }
  return counts;
}

// Return the rank of a kernel row; `find_kernel_row` takes the row with the smallest rank. A decode reads K and V once
// for each tile. So the fewest tiles win, then the fewest rows of a tile, then the smallest head dims, then the longest
// steps as long as every SM has a step. Ranks are compared criterion by criterion.
using Rank = std::array<double, 4>;
Rank kernel_row_rank(const CallFacts& p, const KernelRow& row, const DeviceFacts& device, const Tables& tables) {
  if (row.kind != kDecode) return {estimate(p, row, device, tables)};
  const int64_t tiles = packed_tiles(p, row), steps = tiles * ceil_div(p.Sk, row.tile_n);
  return {static_cast<double>(tiles), static_cast<double>(row.tile_m), static_cast<double>(row.d_max + row.dv_max),
          static_cast<double>(steps < device.sm_count ? row.tile_n : -row.tile_n)};
}

}  // namespace

// Return the time of the whole launch in the unit of `cost`. The SMs fetch tiles from the tile scheduler, longest tile
// first. So a launch ends when evenly spread work is done, or when the longest tile is done. Tiles of equal length (no
// causal mask) run in whole waves.
double estimate(const CallFacts& original, const KernelRow& row, const DeviceFacts& device, const Tables& tables) {
  const CallFacts p = with_mean_length(original);
  const int sm_count = std::max(device.sm_count, 1);
  const double m = row.tile_m, n = row.tile_n;
  const double heads = static_cast<double>(p.B) * p.Hq * row.column_tiles;
  const double num_m = static_cast<double>(ceil_div(p.Sq, row.tile_m));
  const double all_blocks = static_cast<double>(ceil_div(p.Sk, row.tile_n));
  const double spared = 1.0 - last_tile(p, row);
  if ((row.takes & kWindow) != 0) {
    const auto [blocks, longest] = count_window_blocks(p, row);
    return std::max(heads * (blocks + num_m * kEdgeBlocks) / sm_count, longest + kEdgeBlocks) * row.cost;
  }
  if ((row.takes & kCausal) == 0) {
    const double waves = std::ceil(heads * num_m / sm_count) * (1.0 - spared / num_m);
    const bool has_own_lists = (row.takes & kMask) != 0 && row.tile_m > tables.layout.sparse_block;
    return waves * (all_blocks * (has_own_lists ? p.cost_ratio_192 : 1.0) + kEdgeBlocks) * row.cost;
  }
  // The keys visible to tile i are the first (i + 1) * tile_m, rounded up to whole blocks. On average, rounding adds
  // half a step of the pattern.
  const double rounding = 0.5 * (1.0 - static_cast<double>(std::gcd(row.tile_m, row.tile_n)) / n);
  const double growing = std::min(num_m, std::floor(static_cast<double>(p.Sk) / m));
  const double blocks = m / n * growing * (growing + 1) / 2 + (num_m - growing) * all_blocks;
  const double longest = std::min(all_blocks, num_m * m / n + rounding) + kEdgeBlocks;
  const double work = heads * (blocks + num_m * (rounding + kEdgeBlocks) - spared * longest);
  return std::max(work / sm_count, longest) * row.cost;
}

// Of the rows that fit a call, keep the rows with the fewest unneeded features. Of the remaining rows, keep the rows
// for the smallest head dims, except if rows of the call's tensors do not start at sectors: then keep all. Return the
// row with the smallest rank.
int find_kernel_row(const CallFacts& original, Kind kind, int family, const DeviceFacts& device, const Tables& tables) {
  const CallFacts p = batch_invariant_facts(original);
  int best = -1, fewest = 0;
  Rank smallest = {};
  for (int i : tables.rows(kind, family, p.dtype[0])) {
    const KernelRow& row = tables.kernels[i];
    if (!row_fits(p, device, row)) continue;
    const int spare = std::popcount(static_cast<uint64_t>(row.takes & ~p.needs));
    if (best >= 0 && spare > fewest) continue;
    const bool rival = best >= 0 && spare == fewest;
    if (rival && rows_sector_aligned(p, row) && !same_head_dims(row, tables.kernels[best])) continue;
    const Rank rank = kernel_row_rank(p, row, device, tables);
    if (rival && rank >= smallest) continue;
    best = i;
    fewest = spare;
    smallest = rank;
  }
  return best;
}

namespace {

// Return the class of the operands as stock receives the operands. Rows copied by stock, too, count as the copies.
// Tensors with a strided last dim are a class of their own, because stock serves such calls by math.
OperandClass operand_class_of(const CallFacts& p, const KernelRow& kernel) {
  if (!last_dim_contiguous(p)) return kStridedLastDim;
  if (kernel.elementwise == 0) return p.D == p.Dv ? kSquareHeadDims : kMixedHeadDims;
  return head_dims_aligned(p) ? kUnaligned : kOddHeadDims;
}

bool matches_class(const ChoiceRow& row, const CallFacts& p, int kind, const KernelRow& kernel) {
  return row.kind == kind && (row.operands & operand_class_of(p, kernel)) != 0 && row.family == kernel.family &&
         (row.elements >> kernel.element & 1) != 0 && (row.grad != 0) == p.as_with_gradients() &&
         row.features == p.needs;
}

int64_t count_missed_ranges(const ChoiceRow& row, const CallFacts& p, const KernelRow& kernel, int64_t tiles) {
  const auto ranges = ranges_of(row, p, kernel, tiles);
  return std::count_if(ranges.begin(), ranges.end(), [](const Range& range) { return !range.holds(); });
}

int find_first_matching_row(const CallFacts& p, int kind, const KernelRow& kernel, int64_t tiles,
                            const Tables& tables) {
  const auto row = std::find_if(tables.choices.begin(), tables.choices.end(), [&](const ChoiceRow& choice) {
    return matches_class(choice, p, kind, kernel) && count_missed_ranges(choice, p, kernel, tiles) == 0;
  });
  return row == tables.choices.end() ? -1 : static_cast<int>(row - tables.choices.begin());
}

// Return the facts that choice rows are compared with. Packed sequences have the mean length. For a window, Sk is the
// number of keys visible to a query.
CallFacts measured_form(const CallFacts& original) {
  CallFacts p = with_mean_length(original);
  if ((p.needs & kWindow) != 0) p.Sk = std::min(p.Sk, p.left + p.right + 1);
  return p;
}

}  // namespace

std::array<Range, 6> ranges_of(const ChoiceRow& row, const CallFacts& original, const KernelRow& kernel,
                               int64_t forward_tiles) {
  const CallFacts p = measured_form(original);
  const int64_t tiles = row.keys_of_tile == 0 ? forward_tiles : p.B * p.Hkv * ceil_div(p.Sk, row.keys_of_tile);
  const int64_t tile_m = row.tile_m == 0 ? kernel.tile_m : row.tile_m;
  return {{{"D", std::max(p.D, p.Dv), row.d_min, row.d_max},
           {"Sq", p.Sq, row.min_sq, row.max_sq},
           {"Sk", p.Sk, row.min_sk, row.max_sk},
           {"tiles", tiles, row.min_tiles, tiles},
           {"packed rows", packed_rows(p), row.min_packed, row.max_packed},
           {"rows of a tile", kernel.tile_m, tile_m, tile_m}}};
}

bool serves(const ChoiceRow& row, const CallFacts& p) {
  return (p.without_cudnn ? row.serve_without_cudnn : row.serve) != 0;
}

int nearest_serving_row(const CallFacts& p, const KernelRow& kernel, int64_t tiles, const Tables& tables) {
  int nearest = -1;
  int64_t fewest = 0;
  for (size_t i = 0; i < tables.choices.size(); ++i) {
    const ChoiceRow& row = tables.choices[i];
    if (!serves(row, p) || !matches_class(row, p, kernel.kind, kernel)) continue;
    const int64_t missed = count_missed_ranges(row, p, kernel, tiles);
    if (nearest >= 0 && missed >= fewest) continue;
    nearest = static_cast<int>(i);
    fewest = missed;
  }
  return nearest;
}

int find_choice_row(const CallFacts& p, const KernelRow& kernel, int64_t tiles, const Tables& tables) {
  return find_first_matching_row(p, kernel.kind, kernel, tiles, tables);
}

// The kernels for packed sequences of equal lengths are those of dense batches, so the same rows hold.
int find_split_backward_row(const CallFacts& p, const KernelRow& fused, const Tables& tables) {
  CallFacts measured = p;
  measured.needs &= ~kEqual;
  return find_first_matching_row(measured, kSplitBwd, fused, 0, tables);
}

Reason slower_reason(const Plan& plan, const CallFacts& p, const Tables& tables) {
  if (plan.choice_row < 0) return Reason{Why::kNoRow, plan.kernel_row, plan.tiles};
  const ChoiceRow& row = tables.choices[plan.choice_row];
  if (serves(row, p)) return {};
  const double ratio = p.without_cudnn ? row.ratio_without_cudnn : row.ratio;
  return Reason{Why::kSlower, static_cast<int64_t>(ratio * 1000 + 0.5), ratio != row.ratio};
}

}  // namespace flashplug
