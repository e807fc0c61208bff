// The C++ core in one page: the facts of a call, the plan made of them, and every internal function in the order in
// which a call meets it.
//
//   F.scaled_dot_product_attention
//     sdp_choice.cpp         choice(): may this call be ours, and is it worth it?           no -> the saved stock
//     choice sdpa_ops.cpp       the ops torch then calls: outputs, stock fallbacks, backward call_facts.h          for
//     both of them: tensors -> Problem, the facts of a call plan/              Problem + DeviceFacts + Mode -> Plan, or
//     the reasons why not; pure functions: plan.cpp (the
//                        order of questions), support.cpp (can kernels run it?), kernel_selection.cpp (which row of the
//                        tables?), split_heuristic.cpp, backward.cpp, plan_cache.cpp (plans made lately), explain.cpp
//                        (reasons in words)
//     kernel_loader.cpp        Plan -> a loaded kernel: packs first, else one up-call into Python
//     kernel_args.h        what the call has for its kernel, by name, packed as TVM-FFI wants it
//     launch.cpp         the kernel on its device and stream
//     counters.cpp       the global counter from which a persistent kernel draws its tiles
//   below all of them: state.cpp (switches and tables), torch_symbols.h (libtorch and driver symbols found at run
//   time)
//
// Units: sizes and strides in elements, `*_bytes` in bytes, scale is the softmax scale, LSE is natural log.
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

constexpr int kMaxDevices = 64;  // whose facts and counters a process keeps

// ---- vocabulary (mirrors torch_flashplug/registry/architectures.py; test_facts.py holds the two together) ----

// Those of our kernels follow, one for each family of the tables, in their order.
enum class Backend : int { kAuto = 0, kMath = 1, kStock = 2, kFirstFamily = 3 };
constexpr const char* kBackendNames[] = {"auto", "math", "stock"};
constexpr Backend backend_of(int family) {
  return static_cast<Backend>(static_cast<int>(Backend::kFirstFamily) + family);
}
constexpr bool is_ours(Backend backend) { return backend >= Backend::kFirstFamily; }

// bits 0-6 backend, 7: calls that it cannot run stay stock, 8-15 num_splits (0 = auto), 16-23 precision: 0 as the
// process says, a recipe of quant_recipes.py from 1 on, or one of these. effective_mode() says 0 or a recipe, and
// whether that is what the process permits, where a block forces nothing but the backend.
constexpr int kPrecisionShift = 16;
constexpr int kPermitted = 0x40;          // beside a recipe
constexpr int kWholePrecision = 0xff;     // the inputs', whatever the process says
constexpr int kPrecisionOfThread = 0xfe;  // in graphs that want no gradients: what surrounds their run
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
  // What calls need of kernels beside what their tensors say.
  int64_t asks() const {
    const size_t place = static_cast<size_t>(precision() & ~kPermitted) - 1;
    return place < std::size(kRecipes) ? kRecipes[place] : 0;
  }
  bool permits() const { return asks() != 0 && (precision() & kPermitted) != 0; }
  bool operator==(const Mode&) const = default;
  bool is_preference() const { return (word & 0x80) != 0; }
  // The family that is asked for; -1: none.
  int family() const {
    return is_ours(backend()) ? static_cast<int>(backend()) - static_cast<int>(Backend::kFirstFamily) : -1;
  }
  bool forces_kernels() const { return !is_preference() && is_ours(backend()); }
};
constexpr int64_t kModeMask = 0xffffff;
constexpr int64_t kMaxSplits = 255;  // what a mode word holds
constexpr int64_t kSplitUnit = 128;  // keys that a fixed size of splits is a multiple of, as it has to be of any tile_n

// ---- facts: of a call in call_facts.h, of a device here; the tables in tables.h ----

struct DeviceFacts {
  int cc = 0;  // compute capability: 90 is 9.0
  int sm_count = 0;
  int smem_bytes = 0;
  int l2_bytes = 0;
  int memory_rate = 0;  // bytes per ns, of both directions together; 0: unknown
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
// Why a family's kernels do not take a call; test_reasons meets every one.
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

// A sentence in numbers: what is in the way, what was given, what is allowed. reason_text() says it in words with the
// remedy.
struct Reason {
  Why why = Why::kNone;
  int64_t given = 0;
  int64_t allowed = 0;
  int operand = 0;
  explicit operator bool() const { return why != Why::kNone; }
};

struct Gate {
  bool decode = false;  // few enough query rows to be a decode call
  int64_t tiles = 0;    // B * Hkv * ceil(Sq * G / decode_rows)
  int64_t needed = 0;   // the share of the SMs that they must reach, where keys cannot be split
  bool closed = false;  // to kernels that do not split keys
};

// Among how many CTAs the keys of a tile of rows are split. They are one cluster, which adds up in shared memory, or
// each its own (cluster 1), and leave partial results in memory for a second kernel.
struct Splits {
  int64_t n = 1;
  int64_t cluster = 1;
  bool in_memory() const { return n > cluster; }
};

struct Plan {
  Backend backend = Backend::kStock;
  int kernel_row = -1;
  int choice_row = -1;
  int rescue_row = -1;  // decides before any choice row
  Splits splits;
  double packed_ns = 0, unpacked_ns = 0;  // as estimated, where they decided
  int64_t tiles = 0;                      // B * Hq * ceil(Sq / tile_m); packed: B * Hkv * ceil(Sq * G / tile_m)
  Gate gate;
  std::array<Reason, kMostFamilies> why;  // not by the kernels of each family, where they were asked and not taken
  int64_t features = 0;                   // what a mode asks for, and its kernel has
  Reason why_whole;                       // 16 bits, where a mode asks for less
  bool ours() const { return is_ours(backend); }
};

// ---- 1. sdp_choice.cpp ----

int install(int slot);    // slot 1: CUDA, slot 0: CPU (tests). 0 = done; else a reason code, text in last_error()
int uninstall(int slot);  // puts the saved pointer back
bool installed(int slot);
// Where calls leave the router, the last one with a plan; test_exits meets every one.
inline constexpr const char* kExitNames[] = {
    "disabled", "math everywhere", "math",     "not allowed", "other backend", "dims", "device",  "empty",
    "class",    "nested",          "subclass", "no sizes",    "shapes",        "mask", "planned", "part"};
int take_last_exit();  // of this thread's latest call since it was asked; -1: there was none
// SDPBackend
inline constexpr int64_t kChoiceMath = 0, kChoiceFlash = 1, kChoiceEfficient = 2, kChoiceCudnn = 3,
                         kChoiceOverrideable = 4;
// stock_bugs.cpp: stock's choice or, where that one is known to be wrong about such a call, another of stock's, if
// sdpa_kernel allows one that is right; and the place of the fault: fault_said() says what the wrong one does.
struct RightChoice {
  int64_t choice;
  int fault = -1;
};
RightChoice right_choice(int64_t chosen, const Attention& call);
bool has_no_elements(const Attention& call);  // as far as is known: neither nested nor of symbolic sizes
const char* fault_said(int fault);            // "" of none
// What stock torch would choose for a call without mask; math where no router was ever installed.
int64_t stock_choice(AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v, double dropout_p, bool is_causal,
                     std::optional<double> scale, bool enable_gqa);

// ---- 2. sdpa_ops.cpp ----

void register_ops(const char* dispatch_key, bool own_ops);  // "CUDA", or "CPU" for the stand-in
void unregister_ops();
// stock_workarounds.cpp: stock's attention gets operands that it takes for what they are. A sum of StockBackend, 0
// takes it out; throws if this torch lacks some, the others are in place then.
void repair(int backends);

// ---- 3. plan/ (pure) ----

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// support.cpp: everything that keeps kernels of a family from running this call at all (speed aside); stops after
// `limit`. Returns how many.
constexpr int kMaxReasons = 8;
bool is_empty(const Problem& p);  // a dimension is 0
int unsupported(const Problem& p, const DeviceFacts& device, const Tables& tables, int family, Reason* reasons,
                int limit);
bool whole_dims(const Problem& p);                       // head dims are whole units, too
bool made_of(const KernelRow& row, const Problem& p);    // a kernel that takes the call's dtypes
bool has_features(const KernelRow& row, int64_t needs);  // a kernel that does what a call needs, and nothing else to it
bool whole_rows(const Problem& p);                       // the elements of a row follow each other, in every operand
bool whole_units(const Problem& p);                      // rows and addresses are what TMA and vector loads need
// Whether operands are copied first, into whole units: where no kernel that has what a masked call or one with dropout
// needs goes element by element. as_read(): what kernels get.
bool copies_operands(const Problem& p, const Tables& tables);
Problem as_read(const Problem& p, const Tables& tables);
// Keys end in the middle of a block of 128, as cuDNN's backward tiles them.
inline bool has_half_key_block(const Problem& p) { return p.Sk % 128 == 64; }
bool efficient_takes(const Problem& p);  // stock's efficient attention, whatever the device
bool smem_fits(const KernelRow& row, const DeviceFacts& device);
int find_rescue(const Problem& p, const Tables& tables);  // stock_bugs.py's row that holds the call, or -1
// With shapes unknown: may some call of this class be ours?
bool class_may_serve(const Problem& p, const DeviceFacts& device, Mode mode, const Tables& tables);
// kernel_selection.cpp: the kernel row that should be done first, -1 where none fits; its estimate in ns; and the first
// measured row that holds the call as `tiles` output tiles of that kernel, -1 where the class was not measured.
int find_kernel_row(const Problem& p, Kind kind, int family, const DeviceFacts& device, const Tables& tables);
double estimate(const Problem& p, const KernelRow& row, const DeviceFacts& device);
int find_choice_row(const Problem& p, const KernelRow& kernel, int64_t tiles, const Tables& tables);
// What a choice row asks of one of the numbers of a call.
struct Range {
  const char* of;
  int64_t given, low, high;
  bool holds() const { return given >= low && given <= high; }
};
std::array<Range, 6> ranges_of(const ChoiceRow& row, const Problem& p, const KernelRow& kernel, int64_t forward_tiles);
// Of the rows of a class that serve the one whose ranges hold best; -1: none serves.
int nearest_choice_row(const Problem& p, const KernelRow& kernel, int64_t tiles, const Tables& tables);
int find_parts_row(const Problem& p, const KernelRow& fused, const Tables& tables);  // of kind kPartBwd
Reason slower_by_row(const Plan& plan, const Tables& tables);
// The whole rule, as the router and explain apply it: measured rows and the decode gate decide between ours and stock.
Plan plan_call(const Problem& p, const DeviceFacts& device, Mode mode, const Tables& tables);
Problem as_asked(const Problem& p, Mode mode);  // with what the mode asks for
// The same, from memory where this thread has made that plan lately (plan_cache.cpp). Valid until its next call.
const Plan& remembered_plan(const Problem& p, const DeviceFacts& device, Mode mode, const Tables& tables);
bool is_remembered(const Problem& p, const DeviceFacts& device, Mode mode, const Tables& tables);
// Inside an op there is no way back to stock's choice: ours wherever it can run. splits: as in a mode word.
Plan plan_in_op(const Problem& p, const DeviceFacts& device, const Tables& tables, int64_t splits = 0);
// backward.cpp: our backward for the gradients of a call, or why another one follows.
struct BackwardPlan {
  int kernel_row = -1;  // of query, key and value; -1: none of theirs is wanted
  int bias_row = -1;    // likewise
  Reason why;
  int64_t sharing = 1;  // tiles of a block of keys, which share the query heads of its KV head
  bool ours() const { return !why; }
};
// What a call of a backward wants beside the bias's: dQ, dK and dV, or both (kernels/parts/arguments/backward.py).
constexpr int64_t kWantDq = 1, kWantDkDv = 2, kWantAll = 3;
BackwardPlan plan_backward(const Problem& p, const DeviceFacts& device, Mode mode, const Tables& tables,
                           int64_t wanted = kWantAll);
int64_t scratch_rows(const Problem& p, const KernelRow& row);  // of a query head in a backward's scratch
int64_t scratch_floats(const Problem& p, const KernelRow& row);
// split_heuristic.cpp: whether a call is one of few query rows, and among how many CTAs the keys of a tile are split.
Gate decode_gate(const Problem& p, const DeviceFacts& device, const Tables& tables);
int64_t packed_rows(const Problem& p);
int64_t packed_tiles(const Problem& p, const KernelRow& row);
// ns of a call of more rows than decode's, to be held against the forward's estimate.
double packed_time(const Problem& p, const KernelRow& row, const DeviceFacts& device, const Tables& tables,
                   Splits splits);
Splits best_splits(const Problem& p, const KernelRow& row, const DeviceFacts& device, const Tables& tables);
Splits split_among(const Problem& p, const KernelRow& row, const DeviceFacts& device, const Tables& tables, int64_t n);
int64_t possible_splits(const Problem& p, const KernelRow& row, int64_t wanted);
Splits splits_of_size(const Problem& p);                   // where the call fixes their size
int64_t partial_floats(const Problem& p, int64_t splits);  // fp32 results of splits before they are combined
// explain.cpp
std::string call_text(const Problem& p, const Tables& tables);
// A compute capability as NVIDIA writes it: 90 is 9.0.
std::string capability(int64_t cc);
// A text in JSON, without control characters.
std::string quoted(const std::string& text);
std::string reason_text(const Reason& reason, const Problem& p, const DeviceFacts& device, const Tables& tables);
std::string plan_json(const Plan& plan, const Problem& p, const DeviceFacts& device, Mode mode, const Tables& tables);
std::string forced_error(const Problem& p, const DeviceFacts& device, Mode mode, const Tables& tables);

// ---- 4. kernel_loader.cpp ----

using KernelCall = int (*)(void* self, const void* args, int32_t num_args, void* result);  // TVM-FFI safe call
struct Kernel {
  std::atomic<KernelCall> call{nullptr};
  void* self = nullptr;
  std::atomic<uint64_t> devices{0};  // bit i: has run on device i, its module is loaded there
};

// The kernel pack of a target of architectures.py ("sm_90a"); an empty path: it is not installed.
void load_pack(const char* path, const char* target);
void clear_packs();
// What a call that looks for a kernel allows and wants; bits, as Python reads them
// (torch_flashplug/dispatch/callbacks.py).
enum Circumstances : int {
  kCapturing = 1,  // the call is recorded in a CUDA graph: nothing is compiled
  kRequired = 2,   // stock must not serve the call
  kTraining = 4,   // gradients are wanted: backward kernels follow
};
// The kernel of a row of the table, found at its first use. Without one: null after one warning, or an error if the
// kernel is required. circumstances: kRequired and kTraining.
Kernel* find_kernel(int row, int device_index, int circumstances);
// An earlier search for such a device failed; the router then leaves such calls to stock.
bool kernel_missing(int row, const DeviceFacts& device);
int64_t missing_changes();  // goes up with every change of its answers
void forget_kernels();
void expect_kernels(size_t rows);  // so many rows of the table may be looked up; before calls run
// Asked for a kernel that no pack holds. Fills `function`, the address of the kernel's host function, or `self`, a
// TVM-FFI function object, or else `why`. Returns one of Provided.
enum class Provided : int { kKernel, kNone, kNotYet };
using CompileCallback = int (*)(const char* name, int cc, int circumstances, void** function, void** self, char* why,
                                int why_bytes);
void set_compile_callback(CompileCallback callback);

// ---- 5. launch.cpp (kernel_args.h), counters.cpp ----

// A global int32, zero now and zero again after the launch, that no other launch in flight uses (counters.cpp).
void* launch_counter(int device_index, void* stream);

// ---- state.cpp ----

Tables& tables();
bool enabled();
Mode effective_mode();  // process-wide backend first, else this thread's mode
// Of our own ops, which graphs tell the mode of the block that they were traced in; 0: of none, and they go by the
// above.
Mode own_op_mode(int64_t baked);
Backend process_backend();
void set_process_precision(int precision);
// Tests without a GPU: CPU tensors are eligible; the math op stands in for the kernel, or a pack's symbol is called on
// CPU memory with a null stream.
enum class Standin : int { kOff = 0, kMath = 1, kPack = 2 };
Standin standin();
int cta_margin();  // of this thread: SMs that its launches leave to others, a ring's collectives say
DeviceFacts device_facts(int device_index);  // cached; the override where one is set
// Up-call: what Python says of a call whose operands (at::Tensor*, all of four dims) it dispatches, and of its mask,
// which may be null. No callback: not installed.
enum class Traced : int {
  kStocks = 0,
  kSized = 1,  // twelve hints of sizes are filled in
  kSizesLater = 2,
  kPart = 3,  // of tensors on several devices; the sizes are those of what the op gets on each
  kStep = 4   // the same, as the step of a ring, which knows no dropout
};
using TraceCallback = int (*)(const void* q, const void* k, const void* v, const void* mask, int64_t* sizes);
TraceCallback trace_callback();
enum class Path : int {
  kOursForward,
  kCudnnForward,
  kEfficientForward,
  kMathForward,
  kOursBackward,
  kRepairedBackward,  // cuDNN's, of stock's own calls (stock_workarounds.cpp)
  kEfficientBackward,
  kMathBackward,
  kRoutedOurs,
  kRoutedStock
};
constexpr int kNumPaths = 10;
void count(Path path);
void log_warning(const std::string& text);
bool plans_are_logged();
void note_plan(const char* where, const Problem& p, const DeviceFacts& device, Mode mode, const Plan& plan);
void set_last_error(const std::string& text);

}  // namespace flashplug
