// Everything that all other folders of the C++ core share. src/core/ offers:
//
// - backends, modes and device facts (this header);
// - the state of the process: switches, tables, counters, log (this header, state.cpp; state.h shows the state itself);
// - block_mode.cpp: the mode of a thread's sdpa_backend block, and of a recomputation;
// - call_facts.h turns tensors into `CallFacts`, for the choice hook and for the ops; tensor_facts.h reads one tensor;
// - tables.h: the tables of Python as C++ structs;
// - attention_call.h: a call of an op of the plugin, and its results;
// - values.h, schemas.h, errors.h: owned tensors, stacks of ops and exceptions, across the stable ABI of torch;
// - portable.h: one binary for older systems.
//
// A call passes the folders in this order. Each folder has a header of its own name, which says what the folder offers.
//
// 1. hooks/ answers torch's question: can a kernel of the plugin serve the call, and is the kernel worth it?
// 2. dispatch/ turns facts, `DeviceFacts` and `Mode` into a `Plan`, or into reasons against a kernel of the plugin.
// 3. ops/ has the ops that torch calls after the choice: outputs, fallback to stock, backward.
// 4. operands/ turns tensors into kernel arguments: masks, biases, lengths, workspaces.
// 5. launch/ turns a `Plan` into a loaded kernel, packs arguments by name, and launches the kernel.
// 6. stock/ calls the attention kernels of stock, and looks up symbols of libtorch and of the driver at run time.
//
// Units: sizes and strides are in elements, `*_bytes` in bytes, scale is the softmax scale, LSE is a natural logarithm.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/call_facts.h"
#include "core/tables.h"

namespace flashplug {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int kMaxDevices = 64;  // number of devices with cached facts and counters

// ---- vocabulary (mirrors torch_flashplug/registry/architectures.py; test_call_facts.py compares the two) ----

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
// a recipe. `kPermitted` then marks a recipe that comes from the process, because the sdpa_backend block sets only
// the backend.
constexpr int64_t kBackendBits = 0x7f, kPreferenceBit = 0x80, kSplitsBits = 0xff00, kPrecisionBits = 0xff0000;
constexpr int kSplitsShift = 8, kPrecisionShift = 16;
constexpr int kPermitted = 0x40;       // added to a recipe: the recipe is permitted, not forced
constexpr int kInputPrecision = 0xff;  // the precision of the inputs, whatever the process says
constexpr int kPrecisionAtRun = 0xfe;  // in graphs without gradients: the precision in force around each run
struct Mode {
  int64_t word = 0;
  static Mode preferring(Backend backend) { return Mode{static_cast<int64_t>(backend) | kPreferenceBit}; }
  static Mode forcing(int family) { return Mode{static_cast<int64_t>(backend_of(family))}; }
  Backend backend() const { return static_cast<Backend>(word & kBackendBits); }
  int num_splits() const { return static_cast<int>((word & kSplitsBits) >> kSplitsShift); }
  int precision() const { return static_cast<int>((word & kPrecisionBits) >> kPrecisionShift); }
  Mode with_splits(int64_t splits) const { return Mode{(word & ~kSplitsBits) | splits << kSplitsShift}; }
  Mode with_precision(int precision) const {
    return Mode{(word & ~kPrecisionBits) | int64_t{precision} << kPrecisionShift};
  }
  Mode of_any_backend() const { return Mode{word & ~(kBackendBits | kPreferenceBit)}; }
  bool operator==(const Mode&) const = default;
  bool is_preference() const { return (word & kPreferenceBit) != 0; }
  // Return the family of the requested backend; -1 without a kernel backend.
  int family() const {
    return is_ours(backend()) ? static_cast<int>(backend()) - static_cast<int>(Backend::kFirstFamily) : -1;
  }
  bool forces_kernels() const { return !is_preference() && is_ours(backend()); }
};
constexpr int64_t kModeMask = kBackendBits | kPreferenceBit | kSplitsBits | kPrecisionBits;
// Return the feature bit of the recipe of a mode: a need of a call beyond the facts of its tensors. 0 without a recipe.
inline int64_t recipe_features(Mode mode, const Tables& tables) {
  const size_t recipe = static_cast<size_t>(mode.precision() & ~kPermitted) - 1;
  return recipe < tables.recipes.size() ? tables.recipes[recipe] : 0;
}
inline bool permits_recipe(Mode mode, const Tables& tables) {
  return recipe_features(mode, tables) != 0 && (mode.precision() & kPermitted) != 0;
}

// Facts of a device. Facts of a call are in call_facts.h, the tables in tables.h.
struct DeviceFacts {
  int cc = 0;  // compute capability: 90 is 9.0
  int sm_count = 0;
  int smem_bytes = 0;
  int l2_bytes = 0;
  int memory_rate = 0;  // bytes per ns, reads and writes together; 0: unknown
  bool operator==(const DeviceFacts&) const = default;
};
constexpr const char* kDeviceFactNames[] = {"cc", "sm_count", "smem_bytes", "l2_bytes", "memory_rate"};

// Values of SDPBackend.
inline constexpr int64_t kChoiceMath = 0, kChoiceFlash = 1, kChoiceEfficient = 2, kChoiceCudnn = 3,
                         kChoiceOverrideable = 4;

// ---- state.cpp ----

Tables& tables();
bool enabled();
Mode effective_mode();  // the process-wide backend first, else the thread's mode
// Return the mode for an op of this project. `baked` is the mode of the sdpa_backend block around the trace, stored in
// the graph; 0 means no block, and the op then uses `effective_mode()`.
Mode mode_of_op(int64_t baked);
Backend process_backend();
void set_process_precision(int precision);
// CPU stub backend for tests without a GPU: CPU tensors are eligible. `kMath` runs the math op in place of a kernel.
// `kPack` calls a pack's symbol on CPU memory with a null stream.
enum class CpuStub : int { kOff = 0, kMath = 1, kPack = 2 };
CpuStub cpu_stub();
int cta_margin();  // SMs that the thread's launches leave free, for the collectives of ring attention
DeviceFacts device_facts(int device_index);  // cached; returns the override if one is set
// Callback into Python for a call whose operands (at::Tensor*, all 4-d) are dispatched by Python. The mask may be null.
// A null callback means: not installed. The callback returns a `TraceAnswer`.
enum class TraceAnswer : int {
  kStock = 0,           // stock serves the call
  kSizesKnown = 1,      // twelve size hints are filled in
  kSizesAtRunTime = 2,  // sizes are symbolic, so the op decides at run time
  kPerDevice = 3,       // operands on several devices; the sizes belong to each device's op call
  kRingStep = 4         // same as `kPerDevice`, for a step of ring attention; no dropout is supported there
};
constexpr const char* kTraceAnswerNames[] = {"stock", "sizes known", "sizes at run time", "per device", "ring step"};
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
  kRoutedStock,
  kDenseAhead,  // a dense kernel ahead of a kernel of packed sequences (equal_lengths.cpp)
  kBalanced     // a decode kernel with balanced splits (split_heuristic.cpp)
};
constexpr const char* kPathNames[] = {"ours_fwd",    "cudnn_fwd",    "efficient_fwd", "math_fwd",
                                      "ours_bwd",    "repaired_bwd", "efficient_bwd", "math_bwd",
                                      "routed_ours", "routed_stock", "dense_ahead",   "balanced"};
constexpr int kNumPaths = std::size(kPathNames);
static_assert(kNumPaths == static_cast<int>(Path::kBalanced) + 1);
void count(Path path);
void log_warning(const std::string& text);
bool plans_are_logged();
void log_plan(const std::string& text);  // once for equal texts
void set_last_error(const std::string& text);

}  // namespace flashplug
