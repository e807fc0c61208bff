// The rule of the dispatcher: which kernel runs a call, or the reasons against all kernels. src/dispatch/ offers:
//
// - the types of a plan, and pure functions of (CallFacts, DeviceFacts, Mode, Tables) that make a plan (this header):
//   plan.cpp (the order of questions), support.cpp (can kernels run the call?), kernel_selection.cpp,
//   split_heuristic.cpp, backward.cpp, equal_lengths.cpp (packed sequences as a dense batch), plan_cache.cpp (recent
//   plans);
// - texts of plans and reasons for people (this header, explain.cpp);
// - varlen_decision.h: the rule for torch's varlen_attn.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string>

#include "core/core.h"

namespace flashplug {

// ---- the plan ----

// The comments say what `Reason::actual` and `Reason::allowed` are. Without a comment, a reason has no numbers.
enum class Why : int {
  kNone,
  kDevice,
  kArch,        // compute capability of the GPU; family
  kDtype,       // 0; family
  kMixedDtype,  // 0; family
  kFeature,     // index of the feature
  kTogether,    // feature bits of the call
  kScale,
  kProbability,
  kEmpty,
  kHeadDimStep,        // head dim; its required divisor
  kHeadDimLimit,       // head dim; largest head dim of the kernels
  kHeadDimOfFeatures,  // head dim; largest head dim of the kernels with the features
  kLastStride,         // stride; 1
  kAlignment,          // alignment in bytes; required alignment
  kNoKernel,
  kSplits,            // num_splits; 1
  kUnmeasuredDevice,  // compute capability of the GPU; family
  kNoRow,             // kernel row; output tiles
  kSlower,            // 1000 times the measured ratio
  kDecodeGate,        // tiles; tiles needed
  kDeterministic,
  kNoBackward,
  kNoBiasGradient,
  kUnmeasuredGradients,  // head dim; largest head dim with measured gradients
  kGradientsInEightBits,
  kCount
};
// Names of the reasons against the kernels of a family. test_reasons meets each name.
inline constexpr const char* kWhyNames[] = {"none",
                                            "device",
                                            "arch",
                                            "dtype",
                                            "mixed dtype",
                                            "feature",
                                            "together",
                                            "scale",
                                            "probability",
                                            "empty",
                                            "head dim step",
                                            "head dim",
                                            "features' dim",
                                            "last stride",
                                            "alignment",
                                            "no kernel",
                                            "splits",
                                            "unmeasured gpu",
                                            "no row",
                                            "slower",
                                            "decode gate",
                                            "deterministic",
                                            "no backward",
                                            "no bias gradient",
                                            "unmeasured gradients",
                                            "8 bits with gradients"};
static_assert(std::size(kWhyNames) == static_cast<size_t>(Why::kCount));

// A reason as numbers: the obstacle, the value of the call, the limit of the kernels. `Why` says what the numbers are.
// `reason_text()` turns the numbers into a sentence with the remedy.
struct Reason {
  Why why = Why::kNone;
  int64_t actual = 0;
  int64_t allowed = 0;
  int operand = 0;  // index of the operand with the obstacle
  explicit operator bool() const { return why != Why::kNone; }
};

struct Gate {
  bool decode = false;  // few enough query rows for a decode call
  int64_t tiles = 0;    // B * Hkv: the packed rows of a KV head fit into one tile
  int64_t needed = 0;   // number of tiles to reach, a share of the SMs, where keys cannot be split
  bool closed = false;  // closed to kernels without split-KV
};

// Number of CTAs among which the keys of a tile of rows are split. The CTAs form one cluster and add up in shared
// memory. Or each CTA is on its own (cluster 1) and leaves partial results in global memory for a second kernel.
struct Splits {
  int64_t n = 1;
  int64_t cluster = 1;
  // Balanced splits: number of splits of the longest sequence, if KV lengths are even; else 0. With balanced splits,
  // `n` is the number of items for each KV head and tile of rows. Each sequence gets some of the items on the device.
  int64_t even = 0;
  bool balanced() const { return even > 0; }
  bool in_memory() const { return n > cluster; }
};

struct Plan {
  Backend backend = Backend::kStock;
  int kernel_row = -1;
  int choice_row = -1;
  int stock_bug_row = -1;  // a row of stock_bugs.py decides before any choice row
  Splits splits;
  double packed_ns = 0, unpacked_ns = 0;  // estimated times, where the estimates decided
  int64_t tiles = 0;                      // B * Hq * ceil(Sq / tile_m); packed: B * Hkv * ceil(Sq * G / tile_m)
  Gate gate;
  std::array<Reason, kMaxFamilies> why;  // reasons against each family that was asked and not taken
  int64_t features = 0;                  // feature bits requested by the mode and present in the kernel
  Reason why_not_8bit;                   // reason for 16 bits where the mode asks for fewer
  bool ours() const { return is_ours(backend); }
};

// ---- the rule of the dispatcher, in pure functions ----

// Collect the reasons why kernels of a family cannot run the call at all, apart from speed (support.cpp). Stops after
// `limit` reasons and returns the number of reasons.
constexpr int kMaxReasons = 8;
bool is_empty(const CallFacts& p);  // true if a dimension is 0
int unsupported(const CallFacts& p, const DeviceFacts& device, const Tables& tables, int family, Reason* reasons,
                int limit);
bool head_dims_aligned(const CallFacts& p);                      // head dims fill whole 16-byte units, too
bool supports_dtypes(const KernelRow& row, const CallFacts& p);  // the kernel takes the call's dtypes
// Return true if the kernel has all needed features and applies no further feature.
bool has_features(const KernelRow& row, int64_t needs);
bool last_dim_contiguous(const CallFacts& p);  // the last dim of every operand is contiguous
bool is_16b_aligned(const CallFacts& p);       // rows and addresses fit TMA and vector loads
// Return true if operands are first copied into aligned 16-byte units. A call with a mask, dropout or a similar need is
// copied where no element-wise kernel has the needed features. `after_copies()` returns the facts after the copies.
bool needs_operand_copies(const CallFacts& p, const Tables& tables);
CallFacts after_copies(const CallFacts& p, const Tables& tables);
// Return true if the keys end in the middle of a block of 128, the tile size of cuDNN's backward.
inline bool has_half_key_block(const CallFacts& p) { return p.Sk % 128 == 64; }
bool stock_efficient_supports(const CallFacts& p);  // facts fit stock's efficient attention, on any device
bool smem_fits(const KernelRow& row, const DeviceFacts& device);
int find_stock_bug(const CallFacts& p, const Tables& tables);  // row of stock_bugs.py that holds the call, or -1
// Return true if a plugin kernel may serve some call of the class, while shapes are unknown.
bool may_serve_class(const CallFacts& p, const DeviceFacts& device, Mode mode, const Tables& tables);
// Kernel selection (kernel_selection.cpp). `find_kernel_row()` returns the kernel row with the shortest expected time,
// or -1. `estimate()` returns the expected time in ns. `find_choice_row()` returns the first measured row that holds
// the call as `tiles` output tiles of the kernel, or -1 for a class without measurements.
int find_kernel_row(const CallFacts& p, Kind kind, int family, const DeviceFacts& device, const Tables& tables);
double estimate(const CallFacts& p, const KernelRow& row, const DeviceFacts& device, const Tables& tables);
int find_choice_row(const CallFacts& p, const KernelRow& kernel, int64_t tiles, const Tables& tables);
// Range in which a choice row requires a number of the call.
struct Range {
  const char* name;
  int64_t value, low, high;
  bool holds() const { return value >= low && value <= high; }
};
std::array<Range, 6> ranges_of(const ChoiceRow& row, const CallFacts& p, const KernelRow& kernel,
                               int64_t forward_tiles);
// Return true if a kernel is as fast as stock in the row's class, with torch's setting of cuDNN.
bool serves(const ChoiceRow& row, const CallFacts& p);
// For reasons of explain: return the row with the fewest missed ranges among the rows of the call's class that serve,
// the first of equals; -1 if no row serves.
int nearest_serving_row(const CallFacts& p, const KernelRow& kernel, int64_t tiles, const Tables& tables);
int find_split_backward_row(const CallFacts& p, const KernelRow& fused,
                            const Tables& tables);  // row of kind `kSplitBwd`
// Packed sequences of equal lengths (equal_lengths.cpp). `equal_lengths_facts()` returns the facts of the dense batch
// that the sequences are if all lengths are equal, or nothing if lengths must differ or no dense kernel has the
// features. `find_equal_lengths_row()` returns the row of the dense kernel to be launched ahead of the kernel `packed`,
// or -1.
std::optional<CallFacts> equal_lengths_facts(const CallFacts& p);
int find_equal_lengths_row(const CallFacts& dense, const KernelRow& packed, const DeviceFacts& device,
                           const Tables& tables);
Reason slower_reason(const Plan& plan, const CallFacts& p, const Tables& tables);
// Return the plan of a call by the complete rule, as the choice hook and explain apply it. Measured rows and the decode
// gate decide between plugin kernels and stock.
Plan plan_call(const CallFacts& p, const DeviceFacts& device, Mode mode, const Tables& tables);
// Return the facts with the features that the mode asks for.
CallFacts with_requested_precision(const CallFacts& p, Mode mode, const Tables& tables);
// Return true if a kernel that reads key alone may run the call: value is the first columns of key, the call is a
// decode call, and other decode kernels lack the head dims. Unless a backend is forced, the limit of keys counts, too.
bool may_share_values(const CallFacts& p, Mode mode, const Tables& tables);
// Return the plan of `plan_call()`, from the thread's cache of recent plans if present (plan_cache.cpp). The reference
// is valid until the thread's next call.
const Plan& remembered_plan(const CallFacts& p, const DeviceFacts& device, Mode mode, const Tables& tables);
bool is_plan_cached(const CallFacts& p, const DeviceFacts& device, Mode mode, const Tables& tables);
// Return a plan inside an op, where stock's choice is out of reach: a plugin kernel wherever one can run. `splits` is
// encoded as in a mode word.
Plan plan_in_op(const CallFacts& p, const DeviceFacts& device, const Tables& tables, int64_t splits = 0);
// The plugin's backward for the gradients of a call, or the reason for a different backward (backward.cpp).
struct BackwardPlan {
  int kernel_row = -1;  // for query, key and value; -1: none of the three gradients is wanted
  int bias_row = -1;    // for the bias; -1: the bias gradient is not wanted
  Reason why;
  int64_t sharing = 1;  // tiles for each block of keys; the tiles share the query heads of the block's KV head
  bool ours() const { return !why; }
};
// Gradients wanted from a backward call beside the bias gradient: dQ, dK and dV, or both
// (kernels/call_args/kernel_call.py).
constexpr int64_t kNeedsDq = 1, kNeedsDkDv = 2, kNeedsAll = 3;
// Return true for head dims whose backward kernels were not timed on a GPU. The auto mode uses no such kernel.
bool has_unmeasured_gradients(const CallFacts& p, const Tables& tables);
BackwardPlan plan_backward(const CallFacts& p, const DeviceFacts& device, Mode mode, const Tables& tables,
                           int64_t wanted_grads = kNeedsAll);
// Return the kernel row for the gradients of query, key and value, or -1.
int find_backward_row(const CallFacts& p, const DeviceFacts& device, const Tables& tables, int family,
                      int64_t wanted_grads);
int64_t workspace_rows(const CallFacts& p, const KernelRow& row);  // rows of a query head in a backward's workspace
int64_t workspace_floats(const CallFacts& p, const KernelRow& row);
// Decode calls and split-KV (split_heuristic.cpp). `decode_gate()` tells whether a call has few query rows. The
// remaining functions choose the number of CTAs for the split keys of a tile.
Gate decode_gate(const CallFacts& p, const DeviceFacts& device, const Tables& tables);
int64_t packed_rows(const CallFacts& p);
int64_t packed_tiles(const CallFacts& p, const KernelRow& row);
// Return the time in ns of a call with more rows than a decode call, to compare with the forward's estimate.
double packed_time(const CallFacts& p, const KernelRow& row, const DeviceFacts& device, const Tables& tables,
                   Splits splits);
Splits best_splits(const CallFacts& p, const KernelRow& row, const DeviceFacts& device, const Tables& tables);
Splits split_among(const CallFacts& p, const KernelRow& row, const DeviceFacts& device, const Tables& tables,
                   int64_t n);
int64_t possible_splits(const CallFacts& p, const KernelRow& row, const Tables& tables, int64_t requested);
Splits splits_of_size(const CallFacts& p, const Tables& tables);  // for a call with a fixed split size
int64_t partial_floats(const CallFacts& p, int64_t splits);       // fp32 values in the partial results of all splits
// Balanced splits (kernels/features/balanced_splits.py). `may_balance_splits()` returns true if the plan of a call may
// have balanced splits. `balanced_splits()` returns the splits for a kernel with such splits; `equal` are the splits
// for equal lengths. `workspace_floats_of()` returns the size of the workspace for any splits, in 32-bit values.
bool may_balance_splits(const CallFacts& p, int64_t requested, const Tables& tables);
Splits balanced_splits(const CallFacts& p, const KernelRow& row, const DeviceFacts& device, const Tables& tables,
                       Splits equal);
int64_t workspace_floats_of(const CallFacts& p, Splits splits);
// Texts for people (explain.cpp).
std::string call_text(const CallFacts& p, const Tables& tables);
// Return a compute capability in NVIDIA's notation: 90 is 9.0.
std::string capability(int64_t cc);
// Return a text as JSON, without control characters.
std::string quote(const std::string& text);
std::string reason_text(const Reason& reason, const CallFacts& p, const DeviceFacts& device, const Tables& tables);
std::string plan_json(const Plan& plan, const CallFacts& p, const DeviceFacts& device, Mode mode, const Tables& tables);
std::string forced_error(const CallFacts& p, const DeviceFacts& device, Mode mode, const Tables& tables);
// Log a plan, if a listener wants plans.
void note_plan(const char* where, const CallFacts& p, const DeviceFacts& device, Mode mode, const Plan& plan);

}  // namespace flashplug
