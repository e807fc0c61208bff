// The dispatcher's rule: pure functions of (Problem, DeviceFacts, Mode, Tables). No torch, no CUDA, no strings on this
// path.
//
// Order of questions: can ours run this call (fa3_unsupported)? Is there a kernel row? In auto: does the decode gate
// let it through, and does a measured row say that it is at least as fast as stock? The words for every answer are in
// plan_text.cpp.
#include "flashplug.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace flashplug {

namespace {

constexpr int kHopper = 90;
constexpr int kAmpere = 80;
constexpr int64_t kHeadDimStep = 8;   // TMA moves rows of whole 16-byte units
constexpr int64_t kMaxGrid = 65535;   // heads and batch are dims of the backward's row kernels' grids
constexpr double kEdgeBlocks = 1;     // what a tile costs beside its KV blocks: start and end, in blocks
constexpr int64_t kNarrow = 64;       // head dims of which half is a small wgmma
constexpr int64_t kUnits = 8;         // of a block of rows: UNITS of kernels/parts/scratch.py
constexpr int64_t kManyRows = 1024;   // more than any tile has
constexpr int64_t kKeysOfTile = 128;  // in which choice rows count a backward's tiles
constexpr int kAlignBytes = 16;       // TMA base address and strides
constexpr int kBoxColumns = 64;       // 128 bytes, the widest box that TMA swizzles
constexpr int kSectorColumns = 16;    // 32 bytes, what L2 hands out at once

bool is_half(DType dtype) { return dtype == DType::kBf16 || dtype == DType::kFp16; }

bool mask_fits(MaskKind row, Causal causal) {
  return row == MaskKind::kAny || row == (causal == Causal::kNone ? MaskKind::kFull : MaskKind::kCausal);
}

// Collects reasons up to a limit, so that one list of checks serves both the fast "may I?" and the full "why not?".
struct Collector {
  Reason* reasons;
  int limit;
  int count = 0;
  bool full() const { return count >= limit; }
  void add(Why why, int64_t given = 0, int64_t allowed = 0, int operand = 0) {
    if (!full()) reasons[count++] = Reason{why, given, allowed, operand};
  }
};

bool whole_sectors(const Problem& p) { return p.D % kSectorColumns == 0 && p.Dv % kSectorColumns == 0; }

// TMA fetches a tile in boxes of 128, 64 or 32 bytes a row, whichever divides its head dim. Where rows start inside a
// sector every box touches one sector more: D 72 ran at 0.79 x stock in tiles of 80, at 1.02 in tiles of 128. Boxes of
// 64 bytes do no harm where 192 query rows share the keys.
bool boxes_suit(const Problem& p, const KernelRow& row) {
  return row.d_max % kBoxColumns == 0 || whole_sectors(p) || (row.d_max % (kBoxColumns / 2) == 0 && row.tile_m == 192);
}

bool row_fits(const Problem& p, int kind, int arch, const KernelRow& row) {
  return row.kind == kind && row.arch == arch && p.D <= row.d_max && p.Dv <= row.dv_max && boxes_suit(p, row) &&
         mask_fits(row.mask, p.causal);
}

bool same_family(const KernelRow& a, const KernelRow& b) { return a.d_max == b.d_max && a.dv_max == b.dv_max; }

// What a head's last tile costs beside a full one: of three warpgroups those without rows take part in one block only,
// and the others have the SM to themselves (by the costs of 64, 128 and 192 rows).
double last_tile(const Problem& p, const KernelRow& row) {
  if (row.tile_m < 192 || p.Sq % row.tile_m == 0) return 1.0;
  return 0.35 + 0.65 * static_cast<double>(ceil_div(p.Sq % row.tile_m, 64) * 64) / row.tile_m;
}

// Time of the whole launch in units of a row's cost: the SMs draw tiles longest first, so it ends when the work is
// spread evenly or when the longest tile is done, and equal tiles (no causal mask) come in whole waves.
double estimate(const Problem& p, const KernelRow& row, int sm_count) {
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

// What find_kernel_row compares. Decode: K and V are read once for each tile, so the fewest tiles, of the fewest rows.
double rank(const Problem& p, const KernelRow& row, int sm_count) {
  if (row.kind != kKindDecode) return estimate(p, row, sm_count);
  return static_cast<double>(packed_tiles(p, row) * kManyRows + row.tile_m);
}

// Of the rows for the smallest head dims that hold the call's (of all that hold them, where few of the smallest suit),
// the one that should be done first. -1: no row.
int find_kernel_row(const Problem& p, int kind, int arch, int sm_count, const Tables& tables) {
  int best = -1;
  double least = 0;
  for (int i = 0; i < tables.num_kernels; ++i) {
    const KernelRow& row = tables.kernels[i];
    if (!row_fits(p, kind, arch, row)) continue;
    if (best >= 0 && whole_sectors(p) && !same_family(row, tables.kernels[best])) continue;
    const double time = rank(p, row, std::max(sm_count, 1));
    if (best >= 0 && time >= least) continue;
    best = i;
    least = time;
  }
  return best;
}

// The first measured row that holds the call as `tiles` output tiles of that kernel. -1: the class was not measured.
int find_choice_row(const Problem& p, int kind, int arch, const KernelRow& kernel, int64_t tiles,
                    const Tables& tables) {
  const int64_t d = p.D > p.Dv ? p.D : p.Dv;
  for (int i = 0; i < tables.num_choices; ++i) {
    const ChoiceRow& row = tables.choices[i];
    if (row.kind == kind && row.arch == arch && row.grad == p.grad && mask_fits(row.mask, p.causal) && d >= row.d_min &&
        d <= row.d_max && p.Sq >= row.min_sq && p.Sq <= row.max_sq && p.Sk >= row.min_sk && p.Sk <= row.max_sk &&
        tiles >= row.min_tiles && packed_rows(p) >= row.min_packed && packed_rows(p) <= row.max_packed &&
        (row.tile_m == 0 || row.tile_m == kernel.tile_m)) {
      return i;
    }
  }
  return -1;
}

// Head dims that some row of this arch holds: the limit that the message names.
void largest_head_dims(int arch, const Tables& tables, int64_t* d_max, int64_t* dv_max) {
  *d_max = *dv_max = 0;
  for (int i = 0; i < tables.num_kernels; ++i) {
    const KernelRow& row = tables.kernels[i];
    if (row.kind != kKindFwd || row.arch != arch) continue;
    if (row.d_max > *d_max) *d_max = row.d_max;
    if (row.dv_max > *dv_max) *dv_max = row.dv_max;
  }
}

// Packed rows in splits, or -1: where they are few enough, where splits are asked for, and, of calls with some rows
// more, where that should take less time than the forward of `unpacked`, whose tiles they do not fill.
int find_decode_row(const Problem& p, const DeviceFacts& device, Mode mode, const Tables& tables, int unpacked,
                    Plan* plan) {
  const int64_t wanted = mode.num_splits();
  const bool few = plan->gate.decode || wanted > 1;
  if (!few && (packed_rows(p) > tables.wide_rows || p.grad || unpacked < 0)) return -1;
  const int found = find_kernel_row(p, kKindDecode, kHopper, device.sm_count, tables);
  if (found < 0) return -1;
  const KernelRow& row = tables.kernels[found];
  const Splits splits = wanted > 0 ? split_among(p, row, device, tables, possible_splits(p, row, wanted))
                                   : best_splits(p, row, device, tables);
  if (!few) {
    plan->packed_ns = packed_time(p, row, device, tables, splits);
    plan->unpacked_ns = estimate(p, tables.kernels[unpacked], std::max(device.sm_count, 1));
    if (plan->packed_ns >= plan->unpacked_ns) return -1;
  }
  plan->splits = splits;
  return found;
}

// What both entry points share: support, kernel row, tiles. Leaves plan.fa3 empty if ours can run.
void resolve_fa3(const Problem& p, const DeviceFacts& device, Mode mode, const Tables& tables, Plan* plan) {
  if (fa3_unsupported(p, device, tables, &plan->fa3, 1) != 0) return;
  plan->gate = decode_gate(p, device, tables);
  const int forward = find_kernel_row(p, kKindFwd, kHopper, device.sm_count, tables);
  const int decode = find_decode_row(p, device, mode, tables, forward, plan);
  if (mode.num_splits() > 1 && decode < 0) {
    plan->fa3 = Reason{Why::kSplits, mode.num_splits(), 1};
    return;
  }
  plan->kernel_row = decode >= 0 ? decode : forward;
  if (plan->kernel_row < 0) {
    plan->fa3 = Reason{Why::kNoKernel};
    return;
  }
  const KernelRow& row = tables.kernels[plan->kernel_row];
  plan->tiles = decode >= 0 ? packed_tiles(p, row) : p.B * p.Hq * ceil_div(p.Sq, row.tile_m);
}

Reason slower_by_row(int choice_row, const Tables& tables) {
  if (choice_row < 0) return Reason{Why::kNoRow};
  const ChoiceRow& row = tables.choices[choice_row];
  return row.serve ? Reason{} : Reason{Why::kSlower, static_cast<int64_t>(row.ratio * 1000 + 0.5)};
}

Reason slower_than_stock(const Problem& p, const DeviceFacts& device, const Tables& tables, Plan* plan) {
  // Stock's backward after our forward is not deterministic.
  if (p.grad && p.deterministic && plan_backward(p, device, Mode{}, tables).kernel_row < 0)
    return Reason{Why::kDeterministic};
  const KernelRow& kernel = tables.kernels[plan->kernel_row];
  if (plan->gate.closed && kernel.kind != kKindDecode)
    return Reason{Why::kDecodeGate, plan->gate.tiles, plan->gate.needed};
  const int kind = kernel.kind == kKindDecode && p.D != p.Dv ? kKindMixDecode : kernel.kind;
  plan->choice_row = find_choice_row(p, kind, kHopper, kernel, plan->tiles, tables);
  return slower_by_row(plan->choice_row, tables);
}

}  // namespace

int fa3_unsupported(const Problem& p, const DeviceFacts& device, const Tables& tables, Reason* reasons, int limit) {
  Collector out{reasons, limit};
  if (!p.on_cuda || device.cc == 0)
    out.add(Why::kDevice);
  else if (device.cc != kHopper)
    out.add(Why::kArch, device.cc, kHopper);
  if (p.dtype[0] != p.dtype[1] || p.dtype[0] != p.dtype[2])
    out.add(Why::kMixedDtype);
  else if (!is_half(p.dtype[0]))
    out.add(Why::kDtype);
  if (p.has_mask) out.add(Why::kMask);
  if (p.causal == Causal::kBottomRight) out.add(Why::kBottomRight);
  if (p.dropout_p != 0.0) out.add(Why::kDropout);
  if (!p.positive_scale) out.add(Why::kScale);
  if (out.full()) return out.count;
  if (p.B <= 0 || p.Hq <= 0 || p.Hkv <= 0 || p.Sq <= 0 || p.Sk <= 0 || p.D <= 0 || p.Dv <= 0) {
    out.add(Why::kEmpty);
    return out.count;
  }
  if (p.D % kHeadDimStep != 0) out.add(Why::kHeadDimStep, p.D, kHeadDimStep, 0);
  if (p.Dv % kHeadDimStep != 0) out.add(Why::kHeadDimStep, p.Dv, kHeadDimStep, 2);
  int64_t d_max = 0, dv_max = 0;
  largest_head_dims(kHopper, tables, &d_max, &dv_max);
  if (p.D > d_max) out.add(Why::kHeadDimLimit, p.D, d_max, 0);
  if (p.Dv > dv_max) out.add(Why::kHeadDimLimit, p.Dv, dv_max, 2);
  for (int i = 0; i < kNumOperands; ++i) {
    if (p.layout[i].last_stride != 1) out.add(Why::kLastStride, p.layout[i].last_stride, 1, i);
    if (p.layout[i].align_bytes < kAlignBytes) out.add(Why::kAlignment, p.layout[i].align_bytes, kAlignBytes, i);
  }
  return out.count;
}

int fa2_unsupported(const Problem& p, const DeviceFacts& device, const Tables& tables, Reason* reasons, int limit) {
  Collector out{reasons, limit};
  if (!p.on_cuda || device.cc == 0)
    out.add(Why::kDevice);
  else if (device.cc < kAmpere)
    out.add(Why::kArch, device.cc, kAmpere);
  else if (find_kernel_row(p, kKindFwd, kAmpere, device.sm_count, tables) < 0)
    out.add(Why::kLaterRelease);
  return out.count;
}

Plan plan_call(const Problem& p, const DeviceFacts& device, Mode mode, const Tables& tables) {
  Plan plan;
  const Backend wanted = mode.backend();
  if (wanted == Backend::kMath || wanted == Backend::kStock) {
    plan.backend = wanted;
    return plan;
  }
  if (wanted != Backend::kFa2) {
    resolve_fa3(p, device, mode, tables, &plan);
    if (!plan.fa3 && wanted == Backend::kAuto) plan.fa3 = slower_than_stock(p, device, tables, &plan);
    if (!plan.fa3) {
      plan.backend = Backend::kFa3;
      return plan;
    }
  }
  fa2_unsupported(p, device, tables, &plan.fa2, 1);
  return plan;  // stock; under a forced backend the op turns this into an error
}

Plan plan_in_op(const Problem& p, const DeviceFacts& device, Mode mode, const Tables& tables) {
  if (mode.backend() != Backend::kAuto) return plan_call(p, device, mode, tables);
  Plan plan;
  resolve_fa3(p, device, mode, tables, &plan);
  if (!plan.fa3) plan.backend = Backend::kFa3;
  return plan;
}

int64_t scratch_floats(const Problem& p, const KernelRow& row) {
  if (row.kind == kKindPartBwd) return 0;
  // dQ in fp32, a counter for each sixteen rows' half of the columns, two for each KV head.
  const int64_t blocks = ceil_div(p.Sq, row.tile_m), counters = blocks * kUnits + 2;
  return p.B * p.Hq * (blocks * row.tile_m * row.d_max + counters);
}

// In parts where no other kernel is, where its scratch would have more than 2^31 - 1 floats (kernels count them in 32
// bits), where parts were measured to be faster, and where one part is enough: dQ alone is three of seven products, dK
// and dV are four, but narrow ones lose more by their halves of the columns.
int find_backward_row(const Problem& p, const DeviceFacts& device, const Tables& tables, int64_t wanted) {
  const int parts = find_kernel_row(p, kKindPartBwd, kHopper, device.sm_count, tables);
  const bool narrow = std::max(p.D, p.Dv) <= kNarrow;
  if (parts >= 0 && (wanted == kWantDq || (wanted == kWantDkDv && !narrow))) return parts;
  const int kind = p.deterministic ? kKindDetBwd : kKindBwd;
  const int fused = find_kernel_row(p, kind, kHopper, device.sm_count, tables);
  if (fused < 0 || parts < 0) return std::max(fused, parts);
  if (scratch_floats(p, tables.kernels[fused]) > std::numeric_limits<int32_t>::max()) return parts;
  const int faster = find_choice_row(p, kKindPartBwd, kHopper, tables.kernels[fused], 0, tables);
  return faster >= 0 && tables.choices[faster].serve ? parts : fused;
}

BackwardPlan plan_backward(const Problem& p, const DeviceFacts& device, Mode mode, const Tables& tables,
                           int64_t wanted) {
  const auto refused = [](Reason why) { return BackwardPlan{-1, -1, why}; };
  if (mode.backend() == Backend::kStock) return refused(Reason{Why::kNoKernel});
  Reason why;
  if (fa3_unsupported(p, device, tables, &why, 1) != 0) return refused(why);
  const int row = find_backward_row(p, device, tables, wanted);
  if (row < 0 || p.B > kMaxGrid || p.Hq > kMaxGrid) return refused(Reason{Why::kNoKernel});
  if (mode.backend() != Backend::kAuto) return BackwardPlan{row, -1, {}};
  const KernelRow& kernel = tables.kernels[row];
  const int64_t tiles = p.B * p.Hkv * ceil_div(p.Sk, kKeysOfTile);
  const int kind = p.D == p.Dv ? kKindBwd : kKindMixBwd;
  const int choice = find_choice_row(p, kind, kHopper, kernel, tiles, tables);
  why = slower_by_row(choice, tables);
  return BackwardPlan{why ? -1 : row, choice, why};
}

bool class_may_serve(const Problem& p, const DeviceFacts& device, const Tables& tables) {
  if (!p.on_cuda || device.cc != kHopper || p.has_mask || p.dropout_p != 0.0 || !p.positive_scale ||
      !is_half(p.dtype[0]) || p.dtype[0] != p.dtype[1] || p.dtype[0] != p.dtype[2]) {
    return false;
  }
  for (int i = 0; i < tables.num_choices; ++i) {
    const ChoiceRow& row = tables.choices[i];
    if ((row.kind == kKindFwd || row.kind == kKindDecode) && row.arch == kHopper && row.serve && row.grad == p.grad &&
        mask_fits(row.mask, p.causal))
      return true;
  }
  return false;
}

}  // namespace flashplug
