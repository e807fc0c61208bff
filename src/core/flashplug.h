// Umbrella header of the C++ core: the plan of a call, and every internal function in the order of a call's path.
//
// - F.scaled_dot_product_attention asks the choice hook, `choice()` of hooks/sdp_choice.cpp: can a plugin kernel serve
//   the call, and is the kernel worth it? If not, the saved choice of stock answers.
// - ops/sdpa_ops.cpp has the ops that torch calls after the choice: outputs, fallback to stock, backward.
// - core/call_facts.h turns tensors into `CallFacts`, for the choice and for the ops.
// - dispatch/ turns facts, `DeviceFacts` and `Mode` into a `Plan`, or into reasons against a plugin kernel. The
//   functions are pure: plan.cpp (the order of questions), support.cpp (can kernels run the call?),
//   kernel_selection.cpp, split_heuristic.cpp, backward.cpp, plan_cache.cpp (recent plans), explain.cpp (texts).
// - launch/kernel_loader.cpp turns a `Plan` into a loaded kernel: from kernel packs first, else by one callback.
// - launch/kernel_args.h packs kernel arguments by name for TVM-FFI.
// - launch/launch.cpp launches a kernel on its device and stream.
// - launch/counters.cpp has the global counter from which a persistent kernel fetches tile numbers.
// - core/state.cpp has switches and tables. stock/torch_symbols.h has the symbols of libtorch and of the driver that
//   are looked up at run time. All files above use both.
//
// Units: sizes and strides are in elements, `*_bytes` in bytes, scale is the softmax scale, LSE is a natural logarithm.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include "core/call_facts.h"
#include "core/tables.h"

namespace flashplug {

constexpr int kMaxDevices = 64;  // number of devices with cached facts and counters

// ---- vocabulary (mirrors torch_flashplug/registry/architectures.py; test_facts.py compares the two) ----

// Backend of a call. The kernel backends follow `kStock`: one for each family of the tables, in table order.
enum class Backend : int { kAuto = 0, kMath = 1, kStock = 2, kFirstFamily = 3 };
constexpr const char* kBackendNames[] = {"auto", "math", "stock"};
constexpr Backend backend_of(int family) {
  return static_cast<Backend>(static_cast<int>(Backend::kFirstFamily) + family);
}
constexpr bool is_ours(Backend backend) { return backend >= Backend::kFirstFamily; }

// Layout of a mode word. Bits 0-6: the `Backend`. Bit 7: a preference, so that unsupported calls fall back to stock.
// Bits 8-15: num_splits, where 0 is automatic. Bits 16-23: the precision. Precision 0 follows the process, values from
// 1 on select a recipe of quant_recipes.py, and the constants below are special values. `effective_mode()` returns 0 or
// a recipe. `kPermitted` then marks a recipe that comes from the process, because the sdpa_backend block sets only the
// backend.
constexpr int kPrecisionShift = 16;
constexpr int kPermitted = 0x40;          // added to a recipe: the recipe is permitted, not forced
constexpr int kWholePrecision = 0xff;     // the precision of the inputs, whatever the process says
constexpr int kPrecisionOfThread = 0xfe;  // in graphs without gradients: the precision in force around each run
struct Mode {
  int64_t word = 0;
  static Mode preferring(Backend backend) { return Mode{static_cast<int64_t>(backend) | 0x80}; }
  static Mode forcing(int family) { return Mode{static_cast<int64_t>(backend_of(family))}; }
  Backend backend() const { return static_cast<Backend>(word & 0x7f); }
  int num_splits() const { return static_cast<int>((word >> 8) & 0xff); }
  int precision() const { return static_cast<int>((word >> kPrecisionShift) & 0xff); }
  Mode with_splits(int64_t splits) const { return Mode{(word & ~int64_t{0xff00}) | splits << 8}; }
  Mode with_precision(int precision) const { return Mode{(word & 0xffff) | int64_t{precision} << kPrecisionShift}; }
  Mode of_any_backend() const { return Mode{word & ~int64_t{0xff}}; }
  // Return the feature bits of the recipe: needs of a call beyond the facts of its tensors.
  int64_t asks() const {
    const size_t place = static_cast<size_t>(precision() & ~kPermitted) - 1;
    return place < std::size(kRecipes) ? kRecipes[place] : 0;
  }
  bool permits() const { return asks() != 0 && (precision() & kPermitted) != 0; }
  bool operator==(const Mode&) const = default;
  bool is_preference() const { return (word & 0x80) != 0; }
  // Return the family of the requested backend; -1 without a kernel backend.
  int family() const {
    return is_ours(backend()) ? static_cast<int>(backend()) - static_cast<int>(Backend::kFirstFamily) : -1;
  }
  bool forces_kernels() const { return !is_preference() && is_ours(backend()); }
};
constexpr int64_t kModeMask = 0xffffff;
constexpr int64_t kMaxSplits = 255;  // limit of the mode word
// unit of fixed_split_size in keys, because a split must be a multiple of any tile_n
constexpr int64_t kSplitUnit = 128;

// ---- facts of a device; facts of a call are in call_facts.h, the tables in tables.h ----

struct DeviceFacts {
  int cc = 0;  // compute capability: 90 is 9.0
  int sm_count = 0;
  int smem_bytes = 0;
  int l2_bytes = 0;
  int memory_rate = 0;  // bytes per ns, reads and writes together; 0: unknown
  bool operator==(const DeviceFacts&) const = default;
};

// ---- the plan ----

enum class Why : int {
  kNone,
  kDevice,
  kArch,
  kDtype,
  kMixedDtype,
  kFeature,
  kTogether,
  kScale,
  kProbability,
  kEmpty,
  kHeadDimStep,
  kHeadDimLimit,
  kHeadDimOfFeatures,
  kLastStride,
  kAlignment,
  kNoKernel,
  kSplits,
  kUnmeasuredDevice,
  kNoRow,
  kSlower,
  kDecodeGate,
  kDeterministic,
  kNoBackward,
  kNoBiasGradient,
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
                                            "8 bits with gradients"};
static_assert(std::size(kWhyNames) == static_cast<size_t>(Why::kCount));

// A reason as numbers: the obstacle, the given value, the allowed value. `reason_text()` turns the numbers into a
// sentence with the remedy.
struct Reason {
  Why why = Why::kNone;
  int64_t given = 0;
  int64_t allowed = 0;
  int operand = 0;
  explicit operator bool() const { return why != Why::kNone; }
};

struct Gate {
  bool decode = false;  // few enough query rows for a decode call
  int64_t tiles = 0;    // B * Hkv * ceil(Sq * G / decode_rows)
  int64_t needed = 0;   // number of tiles to reach, a share of the SMs, where keys cannot be split
  bool closed = false;  // closed to kernels without split-KV
};

// Number of CTAs among which the keys of a tile of rows are split. The CTAs form one cluster and add up in shared
// memory. Or each CTA is on its own (cluster 1) and leaves partial results in global memory for a second kernel.
struct Splits {
  int64_t n = 1;
  int64_t cluster = 1;
  bool in_memory() const { return n > cluster; }
};

struct Plan {
  Backend backend = Backend::kStock;
  int kernel_row = -1;
  int choice_row = -1;
  int rescue_row = -1;  // a rescue row decides before any choice row
  Splits splits;
  double packed_ns = 0, unpacked_ns = 0;  // estimated times, where the estimates decided
  int64_t tiles = 0;                      // B * Hq * ceil(Sq / tile_m); packed: B * Hkv * ceil(Sq * G / tile_m)
  Gate gate;
  std::array<Reason, kMostFamilies> why;  // reasons against each family that was asked and not taken
  int64_t features = 0;                   // feature bits requested by the mode and present in the kernel
  Reason why_not_8bit;                    // reason for 16 bits where the mode asks for fewer
  bool ours() const { return is_ours(backend); }
};

// ---- 1. sdp_choice.cpp ----

int install(int slot);    // slot 1: CUDA, slot 0: CPU (tests). 0 = done; else a reason code, text in last_error()
int uninstall(int slot);  // restores the saved pointer
bool installed(int slot);
// Exits of the router: the places where a call is decided. Exit `planned` has a plan. test_exits meets each exit.
inline constexpr const char* kExitNames[] = {
    "disabled", "math everywhere", "math",     "not allowed", "other backend", "dims", "device",  "empty",
    "class",    "nested",          "subclass", "no sizes",    "shapes",        "mask", "planned", "part"};
int take_last_exit();  // exit of the calling thread's latest call since the previous question; -1: no call
// Values of SDPBackend.
inline constexpr int64_t kChoiceMath = 0, kChoiceFlash = 1, kChoiceEfficient = 2, kChoiceCudnn = 3,
                         kChoiceOverrideable = 4;
// Stock's choice, corrected by stock_bugs.cpp. If the chosen backend is known to be wrong for such a call, the choice
// is a correct stock backend, as far as sdpa_kernel allows. `fault` is the index of the fault, and `fault_said()`
// describes the behavior of the wrong backend.
struct CorrectedChoice {
  int64_t choice;
  int fault = -1;
};
CorrectedChoice right_choice(int64_t chosen, const Attention& call);
bool has_no_elements(const Attention& call);  // as far as known: false for nested tensors and symbolic sizes
const char* fault_said(int fault);            // "" without a fault
// Return stock torch's choice for a call without a mask; math if no router was ever installed.
int64_t stock_choice(AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v, double dropout_p, bool is_causal,
                     std::optional<double> scale, bool enable_gqa);

// ---- 2. sdpa_ops.cpp ----

void register_ops(const char* dispatch_key, bool own_ops);  // "CUDA", or "CPU" for the CPU stub backend
void unregister_ops();
// Register kernels over stock's attention ops, to hand stock operands in a readable layout (stock_workarounds.cpp).
// `backends` is a sum of `StockBackend`; 0 unregisters. Throws if the running torch lacks some of the backends; the
// rest is registered then.
void repair(int backends);

// ---- 3. plan/ (pure) ----

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Collect the reasons why kernels of a family cannot run the call at all, apart from speed (support.cpp). Stops after
// `limit` reasons and returns the number of reasons.
constexpr int kMaxReasons = 8;
bool is_empty(const CallFacts& p);  // true if a dimension is 0
int unsupported(const CallFacts& p, const DeviceFacts& device, const Tables& tables, int family, Reason* reasons,
                int limit);
bool head_dims_aligned(const CallFacts& p);              // head dims fill whole 16-byte units, too
bool made_of(const KernelRow& row, const CallFacts& p);  // the kernel takes the call's dtypes
// the kernel has all needed features and applies no further feature
bool has_features(const KernelRow& row, int64_t needs);
bool last_dim_contiguous(const CallFacts& p);  // the last dim of every operand is contiguous
bool is_16b_aligned(const CallFacts& p);       // rows and addresses fit TMA and vector loads
// Return true if operands are first copied into aligned 16-byte units. A call with a mask, dropout or a similar need is
// copied where no element-wise kernel has the needed features. `after_copies()` returns the facts after the copies.
bool copies_operands(const CallFacts& p, const Tables& tables);
CallFacts after_copies(const CallFacts& p, const Tables& tables);
// Return true if the keys end in the middle of a block of 128, the tile size of cuDNN's backward.
inline bool has_half_key_block(const CallFacts& p) { return p.Sk % 128 == 64; }
bool efficient_takes(const CallFacts& p);  // facts fit stock's efficient attention, on any device
bool smem_fits(const KernelRow& row, const DeviceFacts& device);
int find_rescue(const CallFacts& p, const Tables& tables);  // row of stock_bugs.py that holds the call, or -1
// Return true if a plugin kernel may serve some call of the class, while shapes are unknown.
bool class_may_serve(const CallFacts& p, const DeviceFacts& device, Mode mode, const Tables& tables);
// Kernel selection (kernel_selection.cpp). `find_kernel_row()` returns the kernel row with the shortest expected time,
// or -1. `estimate()` returns the expected time in ns. `find_choice_row()` returns the first measured row that holds
// the call as `tiles` output tiles of the kernel, or -1 for a class without measurements.
int find_kernel_row(const CallFacts& p, Kind kind, int family, const DeviceFacts& device, const Tables& tables);
double estimate(const CallFacts& p, const KernelRow& row, const DeviceFacts& device);
int find_choice_row(const CallFacts& p, const KernelRow& kernel, int64_t tiles, const Tables& tables);
// Range in which a choice row requires a number of the call.
struct Range {
  const char* of;
  int64_t given, low, high;
  bool holds() const { return given >= low && given <= high; }
};
std::array<Range, 6> ranges_of(const ChoiceRow& row, const CallFacts& p, const KernelRow& kernel,
                               int64_t forward_tiles);
// Return the row with the fewest missed ranges among the rows of the call's class that serve; -1 if no row serves.
int nearest_choice_row(const CallFacts& p, const KernelRow& kernel, int64_t tiles, const Tables& tables);
int find_parts_row(const CallFacts& p, const KernelRow& fused, const Tables& tables);  // row of kind `kPartBwd`
Reason slower_by_row(const Plan& plan, const Tables& tables);
// Return the plan of a call by the complete rule, as the router and explain apply it. Measured rows and the decode gate
// decide between plugin kernels and stock.
Plan plan_call(const CallFacts& p, const DeviceFacts& device, Mode mode, const Tables& tables);
CallFacts with_requested_precision(const CallFacts& p, Mode mode);  // facts with the features that the mode asks for
// Return the plan of `plan_call()`, from the thread's cache of recent plans if present (plan_cache.cpp). The reference
// is valid until the thread's next call.
const Plan& remembered_plan(const CallFacts& p, const DeviceFacts& device, Mode mode, const Tables& tables);
bool is_remembered(const CallFacts& p, const DeviceFacts& device, Mode mode, const Tables& tables);
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
// (kernels/call_args/backward.py).
constexpr int64_t kWantDq = 1, kWantDkDv = 2, kWantAll = 3;
BackwardPlan plan_backward(const CallFacts& p, const DeviceFacts& device, Mode mode, const Tables& tables,
                           int64_t wanted = kWantAll);
int64_t scratch_rows(const CallFacts& p, const KernelRow& row);  // rows of a query head in a backward's workspace
int64_t scratch_floats(const CallFacts& p, const KernelRow& row);
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
int64_t possible_splits(const CallFacts& p, const KernelRow& row, int64_t wanted);
Splits splits_of_size(const CallFacts& p);                   // for a call with a fixed split size
int64_t partial_floats(const CallFacts& p, int64_t splits);  // fp32 values in the partial results of all splits
// Texts for people (explain.cpp).
std::string call_text(const CallFacts& p, const Tables& tables);
// Return a compute capability in NVIDIA's notation: 90 is 9.0.
std::string capability(int64_t cc);
// Return a text as JSON, without control characters.
std::string quoted(const std::string& text);
std::string reason_text(const Reason& reason, const CallFacts& p, const DeviceFacts& device, const Tables& tables);
std::string plan_json(const Plan& plan, const CallFacts& p, const DeviceFacts& device, Mode mode, const Tables& tables);
std::string forced_error(const CallFacts& p, const DeviceFacts& device, Mode mode, const Tables& tables);

// ---- 4. kernel_loader.cpp ----

using KernelCall = int (*)(void* self, const void* args, int32_t num_args, void* result);  // TVM-FFI safe call
struct Kernel {
  std::atomic<KernelCall> call{nullptr};
  void* self = nullptr;
  std::atomic<uint64_t> devices{0};  // bit of device i: the kernel has run there, so the module is loaded there
};

// Load the kernel pack of a target of architectures.py ("sm_90a"). An empty path means: the pack is not installed.
void load_pack(const char* path, const char* target);
void clear_packs();
// Circumstances of a kernel lookup, as bits that Python reads as well (torch_flashplug/dispatch/callbacks.py).
enum Circumstances : int {
  kCapturing = 1,  // the call is recorded in a CUDA graph: nothing is compiled
  kRequired = 2,   // stock must not serve the call
  kTraining = 4,   // gradients are wanted: backward kernels follow
};
// Return the kernel of a table row, looked up at its first use. If no kernel is found, return null after one warning,
// or throw if the kernel is required. `circumstances` is a sum of `kRequired` and `kTraining`.
Kernel* find_kernel(int row, int device_index, int circumstances);
// Return true if an earlier lookup for such a device failed; the router then leaves such calls to stock.
bool kernel_missing(int row, const DeviceFacts& device);
int64_t missing_changes();  // grows with every change of an answer of `kernel_missing()`
void forget_kernels();
void expect_kernels(size_t rows);  // makes place for lookups of so many table rows; called before calls run
// Callback into Python for a kernel outside all packs. The callback returns a value of `Provided`. It sets `function`
// (address of the kernel's host function), or `self` (a TVM-FFI function object), or else `why`.
enum class Provided : int { kKernel, kNone, kNotYet };
using CompileCallback = int (*)(const char* name, int cc, int circumstances, void** function, void** self, char* why,
                                int why_bytes);
void set_compile_callback(CompileCallback callback);

// ---- 5. launch.cpp (kernel_args.h), counters.cpp ----

// Return a global int32 for a launch: zero before and after the launch, and unused by any launch in flight
// (counters.cpp).
void* launch_counter(int device_index, void* stream);

// ---- state.cpp ----

Tables& tables();
bool enabled();
Mode effective_mode();  // the process-wide backend first, else the thread's mode
// Return the mode for an op of this project. `baked` is the mode of the sdpa_backend block around the trace, stored in
// the graph; 0 means no block, and the op then uses `effective_mode()`.
Mode own_op_mode(int64_t baked);
Backend process_backend();
void set_process_precision(int precision);
// CPU stub backend for tests without a GPU: CPU tensors are eligible. `kMath` runs the math op in place of a kernel.
// `kPack` calls a pack's symbol on CPU memory with a null stream.
enum class Standin : int { kOff = 0, kMath = 1, kPack = 2 };
Standin standin();
int cta_margin();  // SMs that the thread's launches leave free, for the collectives of ring attention
DeviceFacts device_facts(int device_index);  // cached; returns the override if one is set
// Callback into Python for a call whose operands (at::Tensor*, all 4-d) are dispatched by Python. The mask may be null.
// A null callback means: not installed.
enum class Traced : int {
  kStocks = 0,
  kSized = 1,  // twelve size hints are filled in
  kSizesLater = 2,
  kPart = 3,  // operands on several devices; the sizes belong to each device's op call
  kStep = 4   // same as `kPart`, for a step of ring attention; no dropout is supported there
};
using TraceCallback = int (*)(const void* q, const void* k, const void* v, const void* mask, int64_t* sizes);
TraceCallback trace_callback();
enum class Path : int {
  kOursForward,
  kCudnnForward,
  kEfficientForward,
  kMathForward,
  kOursBackward,
  kRepairedBackward,  // cuDNN's backward in stock's own calls (stock_workarounds.cpp)
  kEfficientBackward,
  kMathBackward,
  kRoutedOurs,
  kRoutedStock
};
constexpr int kNumPaths = 10;
void count(Path path);
void log_warning(const std::string& text);
bool plans_are_logged();
void note_plan(const char* where, const CallFacts& p, const DeviceFacts& device, Mode mode, const Plan& plan);
void set_last_error(const std::string& text);

}  // namespace flashplug
