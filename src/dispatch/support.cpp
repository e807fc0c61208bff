// Checks whether the kernels of an architecture can run a call at all, whatever the speed. The texts are in
// explain.cpp.
#include "dispatch/dispatch.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <utility>

#include "core/core.h"

namespace flashplug {

bool is_empty(const CallFacts& p) {
  return p.B <= 0 || p.Hq <= 0 || p.Hkv <= 0 || p.Sq <= 0 || p.Sk <= 0 || p.D <= 0 || p.Dv <= 0;
}

namespace {

// Collector of reasons up to a limit. A single list of checks serves both the fast test (is there any reason?) and the
// full list of reasons.
struct Collector {
  Reason* reasons;
  int limit;
  int count = 0;
  bool full() const { return count >= limit; }
  void add(Why why, int64_t actual = 0, int64_t allowed = 0, int operand = 0) {
    if (!full()) reasons[count++] = Reason{why, actual, allowed, operand};
  }
};

// Largest head dims of the kernels of a family on a device; 0 if there are no such kernels. Only kernels with the
// dtypes and features of the call count. A call with an unsupported dtype must be cast first, so kernels of all dtypes
// count. If no kernel takes the features of the call together, the features do not count.
struct HeadDims {
  int64_t d = 0, dv = 0;
};
HeadDims largest_head_dims(const CallFacts& p, int family, bool elementwise, const DeviceFacts& device,
                           const Tables& tables) {
  const bool cast = !tables.supports_dtypes(family, p.dtype), together = tables.has_kernel_with_all(family, p.needs);
  HeadDims most;
  for (const Kind kind : {kFwd, kDecode}) {  // some calls have only decode kernels
    if (most.d != 0) break;
    for (int element = 0; element < num_dtypes(); ++element) {
      for (int i : tables.rows(kind, family, static_cast<DType>(element))) {
        const KernelRow& row = tables.kernels[i];
        if ((row.elementwise != 0) != elementwise || !smem_fits(row, device)) continue;
        if ((!cast && !supports_dtypes(row, p)) || (together && !has_features(row, p.needs))) continue;
        most = {std::max(most.d, row.d_max), std::max(most.dv, row.dv_max)};
      }
    }
  }
  return most;
}

// Add the reasons that are known before the shapes.
void add_class_reasons(const CallFacts& p, const DeviceFacts& device, const Tables& tables, int family,
                       Collector* out) {
  if (!p.on_cuda || device.cc == 0)
    out->add(Why::kDevice);
  else if (!runs_on(tables.families[family], device.cc))
    out->add(Why::kArch, device.cc, family);
  if (!tables.supports_dtypes(family, p.dtype)) {
    const bool mixed = p.dtype[0] != p.dtype[1] || p.dtype[0] != p.dtype[2];
    out->add(mixed ? Why::kMixedDtype : Why::kDtype, 0, family);
  }
  const int64_t missing = p.needs & ~tables.features_of(family);
  for (int64_t left = missing; left != 0; left &= left - 1)
    out->add(Why::kFeature, std::countr_zero(static_cast<uint64_t>(left)));
  if (missing == 0 && !tables.has_kernel_with_all(family, p.needs)) out->add(Why::kTogether, p.needs);
  if ((p.needs & tables.recipe_features) != 0 && p.grad) out->add(Why::kGradientsInEightBits);
  if (p.scale == Scale::kNotFinite) out->add(Why::kScale);
  if ((p.needs & kDropout) != 0 && !(p.dropout_p > 0.0 && p.dropout_p <= 1.0)) out->add(Why::kProbability);
}

// A head dim above the limit of all kernels is no reason here: the caller adds the limit, which padding cannot help.
void add_alignment_reasons(const CallFacts& p, const Tables& tables, Collector* out) {
  const int64_t dims[kNumOperands] = {p.D, p.D, p.Dv};
  for (int i = 0; i < kNumOperands; ++i) {
    const int64_t step = unit_elements(p.dtype[i]);
    const bool is_reported = i == 1 && step == unit_elements(p.dtype[0]);  // already reported for the query
    const bool too_wide = dims[i] > tables.layout.max_head_dim;
    if (dims[i] % step != 0 && !too_wide && !is_reported) out->add(Why::kHeadDimStep, dims[i], step, i);
  }
  for (int i = 0; i < kNumOperands; ++i) {
    const Layout& layout = p.layout[i];
    if (layout.last_stride != 1) out->add(Why::kLastStride, layout.last_stride, 1, i);
    // Rows of such a head dim are not aligned either; the head dim is the reason.
    const bool aligned_dim = dims[i] % unit_elements(p.dtype[i]) == 0;
    if (layout.align_bytes < kUnitBytes && aligned_dim) out->add(Why::kAlignment, layout.align_bytes, kUnitBytes, i);
  }
}

}  // namespace

bool supports_dtypes(const KernelRow& row, const CallFacts& p) {
  return std::equal(p.dtype, p.dtype + kNumOperands, row.dtype);
}

bool has_features(const KernelRow& row, int64_t needs) { return Features{row.takes, row.always}.fit(needs); }

bool smem_fits(const KernelRow& row, const DeviceFacts& device) {
  return device.smem_bytes == 0 || row.smem_bytes <= device.smem_bytes;  // 0: unknown
}

bool last_dim_contiguous(const CallFacts& p) {
  return std::all_of(p.layout, p.layout + kNumOperands, [](const Layout& layout) { return layout.last_stride == 1; });
}

bool head_dims_aligned(const CallFacts& p) {
  return p.D % unit_elements(p.dtype[0]) == 0 && p.D % unit_elements(p.dtype[1]) == 0 &&
         p.Dv % unit_elements(p.dtype[2]) == 0;
}

bool is_16b_aligned(const CallFacts& p) {
  const auto is_aligned = [](const Layout& layout) { return is_16b_aligned(layout); };
  return head_dims_aligned(p) && std::all_of(p.layout, p.layout + kNumOperands, is_aligned);
}

// The kernels of stock get copies as well (stock_workarounds.cpp). Only calls with a strided last dim go to math
// instead. Plain calls are never copied, whatever rows a table has.
bool needs_operand_copies(const CallFacts& p, const Tables& tables) {
  return (p.needs & ~kCausal) != 0 && !is_16b_aligned(p) && head_dims_aligned(p) &&
         std::none_of(tables.kernels.begin(), tables.kernels.end(),
                      [&p](const KernelRow& row) { return row.elementwise != 0 && has_features(row, p.needs); });
}

CallFacts after_copies(const CallFacts& p, const Tables& tables) {
  CallFacts read = p;
  if (!needs_operand_copies(p, tables)) return read;
  for (Layout& layout : read.layout) {
    if (!is_16b_aligned(layout)) layout = Layout{};
  }
  return read;
}

// Stock's efficient attention supports a causal mask and no other feature; a call with another feature
// would return a result without the feature. The efficient attention has dropout, too, but draws other bits than the
// kernels of this project and math. The tensors do not say whose seed they hold, so no backward could tell. The dtypes
// below are the only supported dtypes, whatever else is in dtypes.py.
bool stock_efficient_supports(const CallFacts& p) {
  return (p.needs & ~kCausal) == 0 && is_one_of(p.dtype[0], {"bfloat16", "float16", "float32"}) &&
         p.dtype[0] == p.dtype[1] && p.dtype[0] == p.dtype[2] && !is_empty(p) && is_16b_aligned(p) && p.Hq % p.Hkv == 0;
}

namespace {

// Facts known from the class of a call, before the shapes are read.
constexpr int64_t kFactsOfClass = kMasked | kBiased | kWideBiased | kAllDropped | kGradients;

int64_t facts_of_class(const CallFacts& p) {
  int64_t facts = 0;
  if ((p.needs & kMask) != 0) facts |= kMasked;
  if ((p.needs & feature_bit("bias")) != 0) facts |= kBiased;
  if ((p.needs & feature_bit("bias32")) != 0) facts |= kWideBiased;
  if (p.dropout_p == 1.0) facts |= kAllDropped;
  if (p.as_with_gradients()) facts |= kGradients;
  return facts;
}

constexpr int64_t kMaxGridDim = 65535;  // limit of CTAs along the second and third dim of a grid

// Return the first row of stock_bugs.py for a call, or -1. `facts` has the call facts that hold, or may hold.
int find_stock_bug_row(const CallFacts& p, int64_t facts, const Tables& tables) {
  const auto row =
      std::find_if(tables.stock_bugs.begin(), tables.stock_bugs.end(), [facts, &p](const StockBugRow& bug) {
        return (facts & bug.facts) == bug.facts && (p.needs & ~bug.features) == 0;
      });
  return row == tables.stock_bugs.end() ? -1 : static_cast<int>(row - tables.stock_bugs.begin());
}

}  // namespace

// The evidence is of head dims that the fused kernels of stock take.
int find_stock_bug(const CallFacts& p, const Tables& tables) {
  if (std::max(p.D, p.Dv) > tables.layout.max_general_head_dim) return -1;
  const auto any = [&p](bool Layout::* fact) {
    return std::any_of(p.layout, p.layout + kNumOperands, [fact](const Layout& layout) { return layout.*fact; });
  };
  const std::pair<CallFact, bool> shape_facts[] = {
      {kUnalignedBase, any(&Layout::unaligned_base)},
      {kUnalignedUnitDim, any(&Layout::unaligned_unit_dim)},
      {kBroadcastQuery, p.layout[0].broadcast},
      {kMixedDims, p.D != p.Dv},
      {kHeadDimsAligned, head_dims_aligned(p)},
      {kOneRow, p.Sq == 1},
      {kOneKey, p.Sk == 1},
      {kUnusualScale, is_unusual(p.scale)},
      {kLastDimContiguous, last_dim_contiguous(p)},
      {kBeyondGrid, std::max(p.B, p.Hq) > kMaxGridDim},
      {kHalfKeyBlock, has_half_key_block(p)},
  };
  int64_t facts = facts_of_class(p);
  for (const auto& [fact, holds] : shape_facts) facts |= holds ? static_cast<int64_t>(fact) : 0;
  return find_stock_bug_row(p, facts, tables);
}

int unsupported(const CallFacts& original, const DeviceFacts& device, const Tables& tables, int family, Reason* reasons,
                int limit) {
  const CallFacts p = after_copies(original, tables);
  Collector out{reasons, limit};
  add_class_reasons(p, device, tables, family, &out);
  if (out.full()) return out.count;
  if (is_empty(p)) {
    out.add(Why::kEmpty);
    return out.count;
  }
  const bool aligned = is_16b_aligned(p);
  // If the family does not run on this GPU, the shared memory of the GPU is no limit: the reason is the architecture.
  const DeviceFacts holder = runs_on(tables.families[family], device.cc) ? device : DeviceFacts{};
  HeadDims most = largest_head_dims(p, family, !aligned, holder, tables);
  if (!aligned && most.d == 0) {  // the family has no element-wise kernel
    add_alignment_reasons(p, tables, &out);
    most = largest_head_dims(p, family, false, holder, tables);
  }
  if (most.d == 0) out.add(Why::kNoKernel);
  const auto too_wide = [&](int64_t original, int64_t HeadDims::* limit_of, int operand) {
    if (most.d == 0 || original <= most.*limit_of) return;
    CallFacts plain = p;
    plain.needs = 0;
    const bool narrowed = original <= largest_head_dims(plain, family, !aligned, holder, tables).*limit_of;
    out.add(narrowed ? Why::kHeadDimOfFeatures : Why::kHeadDimLimit, original, most.*limit_of, operand);
  };
  too_wide(p.D, &HeadDims::d, 0);
  too_wide(p.Dv, &HeadDims::dv, 2);
  return out.count;
}

// A requested backend overrides the choice rows, which hold only for the measured GPU.
bool may_serve_class(const CallFacts& p, const DeviceFacts& device, Mode mode, const Tables& tables) {
  const auto may_run = [&](int family) {
    Reason why;
    Collector out{&why, 1};
    add_class_reasons(p, device, tables, family, &out);
    return !out.full();
  };
  if (mode.backend() != Backend::kAuto) return mode.family() >= 0 && may_run(mode.family());
  const auto is_measured_and_runs = [&](int family) {
    return is_measured(tables.families[family], device.cc) && may_run(family);
  };
  if (!any_family(tables, is_measured_and_runs)) return false;
  const bool chosen = std::any_of(tables.choices.begin(), tables.choices.end(), [&p](const ChoiceRow& row) {
    return row.kind != kSplitBwd && serves(row, p) && (row.grad != 0) == p.as_with_gradients() &&
           row.features == p.needs;
  });
  return chosen || find_stock_bug_row(p, facts_of_class(p) | ~kFactsOfClass, tables) >= 0;
}

}  // namespace flashplug
