// Which row of the tables a call gets: the kernel that should be done first, and the measured class that holds the
// call.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "flashplug.h"

namespace flashplug {

namespace {

constexpr double kEdgeBlocks = 1;     // what a tile costs beside its KV blocks: start and end, in blocks
constexpr int64_t kManyRows = 1024;   // more than any tile has
constexpr int kBoxColumns = 64;       // 128 bytes, the widest box that TMA swizzles
constexpr int kSectorColumns = 16;    // 32 bytes, what L2 hands out at once
constexpr int64_t kKeysOfTile = 128;  // in which choice rows count the tiles of calls with gradients

bool whole_sectors(const Problem& p) { return p.D % kSectorColumns == 0 && p.Dv % kSectorColumns == 0; }

// TMA fetches a tile in boxes of 128, 64 or 32 bytes a row, whichever divides its head dim. Where rows start inside a
// sector every box touches one sector more: D 72 ran at 0.79 x stock in tiles of 80, at 1.02 in tiles of 128. Boxes of
// 64 bytes do no harm where 192 query rows share the keys.
bool boxes_suit(const Problem& p, const KernelRow& row) {
  return row.arch != kHopper || row.d_max % kBoxColumns == 0 || whole_sectors(p) ||
         (row.d_max % (kBoxColumns / 2) == 0 && row.tile_m == 192);
}

// Elementwise kernels are for the calls that no other can read.
bool row_fits(const Problem& p, int kind, int arch, const DeviceFacts& device, const KernelRow& row) {
  return row.kind == kind && row.arch == arch && p.D <= row.d_max && p.Dv <= row.dv_max && boxes_suit(p, row) &&
         mask_fits(row.mask, p.causal) && row.elementwise != whole_units(p) && smem_fits(row, device);
}

bool same_family(const KernelRow& a, const KernelRow& b) { return a.d_max == b.d_max && a.dv_max == b.dv_max; }

// What a head's last tile costs beside a full one: of three warpgroups those without rows take part in one block only,
// and the others have the SM to themselves (by the costs of 64, 128 and 192 rows).
double last_tile(const Problem& p, const KernelRow& row) {
  if (row.tile_m < 192 || p.Sq % row.tile_m == 0) return 1.0;
  return 0.35 + 0.65 * static_cast<double>(ceil_div(p.Sq % row.tile_m, 64) * 64) / row.tile_m;
}

// What find_kernel_row compares. Decode: K and V are read once for each tile, so the fewest tiles, of the fewest rows.
double rank(const Problem& p, const KernelRow& row, const DeviceFacts& device) {
  if (row.kind != kKindDecode) return estimate(p, row, device);
  return static_cast<double>(packed_tiles(p, row) * kManyRows + row.tile_m);
}

}  // namespace

bool mask_fits(MaskKind row, Causal causal) {
  return row == MaskKind::kAny || row == (causal == Causal::kNone ? MaskKind::kFull : MaskKind::kCausal);
}

// Time of the whole launch in units of a row's cost: the SMs draw tiles longest first, so it ends when the work is
// spread evenly or when the longest tile is done, and equal tiles (no causal mask) come in whole waves.
double estimate(const Problem& p, const KernelRow& row, const DeviceFacts& device) {
  const int sm_count = std::max(device.sm_count, 1);
  const double m = row.tile_m, n = row.tile_n;
  const double heads = static_cast<double>(p.B) * p.Hq, num_m = static_cast<double>(ceil_div(p.Sq, row.tile_m));
  const double all_blocks = static_cast<double>(ceil_div(p.Sk, row.tile_n));
  const double spared = 1.0 - last_tile(p, row);
  if (p.causal == Causal::kNone) {
    const double waves = std::ceil(heads * num_m / sm_count) * (1.0 - spared / num_m);
    return waves * (all_blocks + kEdgeBlocks) * row.cost;
  }
  // Tile i sees the first (i + 1) * tile_m keys, rounded up to whole blocks: by half a step of the pattern on average.
  const double rounding = 0.5 * (1.0 - static_cast<double>(std::gcd(row.tile_m, row.tile_n)) / n);
  const double growing = std::min(num_m, std::floor(static_cast<double>(p.Sk) / m));
  const double blocks = m / n * growing * (growing + 1) / 2 + (num_m - growing) * all_blocks;
  const double longest = std::min(all_blocks, num_m * m / n + rounding) + kEdgeBlocks;
  const double work = heads * (blocks + num_m * (rounding + kEdgeBlocks) - spared * longest);
  return std::max(work / sm_count, longest) * row.cost;
}

// Of the rows for the smallest head dims that hold the call's (of all that hold them, where few of the smallest suit).
int find_kernel_row(const Problem& p, int kind, int arch, const DeviceFacts& device, const Tables& tables) {
  const bool smallest = arch != kHopper || whole_sectors(p);
  int best = -1;
  double least = 0;
  for (int i = 0; i < tables.num_kernels; ++i) {
    const KernelRow& row = tables.kernels[i];
    if (!row_fits(p, kind, arch, device, row)) continue;
    if (best >= 0 && smallest && !same_family(row, tables.kernels[best])) continue;
    const double time = rank(p, row, device);
    if (best >= 0 && time >= least) continue;
    best = i;
    least = time;
  }
  return best;
}

namespace {

int choice_kind(const Problem& p, const KernelRow& kernel) {
  const bool mixed = p.D != p.Dv;
  if (kernel.elementwise) {
    const auto rows_whole = [](const Layout& layout) { return layout.last_stride == 1; };
    if (!std::all_of(p.layout, p.layout + kNumOperands, rows_whole)) return kKindColumns;
    return whole_dims(p) ? kKindUnaligned : kKindOddDims;
  }
  if (kernel.kind == kKindDecode) return mixed ? kKindMixDecode : kKindDecode;
  if (!p.grad) return kKindFwd;
  return mixed ? kKindMixGrad : kKindGrad;
}

int find_row_of_kind(const Problem& p, int kind, const KernelRow& kernel, int64_t tiles, const Tables& tables) {
  const int64_t d = p.D > p.Dv ? p.D : p.Dv;
  for (int i = 0; i < tables.num_choices; ++i) {
    const ChoiceRow& row = tables.choices[i];
    if (row.kind == kind && row.arch == kernel.arch && row.grad == p.grad && mask_fits(row.mask, p.causal) &&
        d >= row.d_min && d <= row.d_max && p.Sq >= row.min_sq && p.Sq <= row.max_sq && p.Sk >= row.min_sk &&
        p.Sk <= row.max_sk && tiles >= row.min_tiles && packed_rows(p) >= row.min_packed &&
        packed_rows(p) <= row.max_packed && (row.tile_m == 0 || row.tile_m == kernel.tile_m)) {
      return i;
    }
  }
  return -1;
}

}  // namespace

// `tiles` of the forward; of calls with gradients the backward's, which has fewer where few query rows meet many keys.
int find_choice_row(const Problem& p, const KernelRow& kernel, int64_t tiles, const Tables& tables) {
  const int kind = choice_kind(p, kernel);
  const bool both = kind == kKindGrad || kind == kKindMixGrad;
  return find_row_of_kind(p, kind, kernel, both ? p.B * p.Hkv * ceil_div(p.Sk, kKeysOfTile) : tiles, tables);
}

int find_parts_row(const Problem& p, const KernelRow& fused, const Tables& tables) {
  return find_row_of_kind(p, kKindPartBwd, fused, 0, tables);
}

Reason slower_by_row(int choice_row, const KernelRow& kernel, const Tables& tables) {
  if (choice_row < 0) return Reason{Why::kNoRow, kernel.arch};
  const ChoiceRow& row = tables.choices[choice_row];
  return row.serve ? Reason{} : Reason{Why::kSlower, static_cast<int64_t>(row.ratio * 1000 + 0.5)};
}

}  // namespace flashplug
