// From a plan to a running kernel. src/launch/ offers:
//
// - kernel_loader.cpp: the kernel of a table row, from kernel packs first, else by a callback into Python;
// - kernel_args.h: kernel arguments, packed by name for TVM-FFI;
// - launch.cpp: the launch on the device and stream of the call;
// - counters.cpp: the global counter from which a persistent kernel fetches tile numbers.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/core.h"

namespace flashplug {

class Arguments;  // kernel_args.h

// ---- kernel_loader.cpp ----

using KernelCall = int (*)(void* self, const void* args, int32_t num_args, void* result);  // TVM-FFI safe call
struct Kernel {
  std::atomic<KernelCall> call{nullptr};
  void* self = nullptr;
  std::atomic<uint64_t> devices{0};  // bit of device i: the kernel has run there, so the module is loaded there
};

// Load the kernel pack of a target of architectures.py ("sm_90a"). An empty path means: the pack is not installed.
void load_pack(const char* path, const char* target);
void clear_packs();
// Circumstances of a kernel lookup, as bits: CallConditions of torch_flashplug/codegen/kernel_request.py.
enum Circumstances : int {
  kIsCapturing = 1,     // the call is recorded in a CUDA graph: nothing is compiled
  kMustWait = 2,        // stock must not serve the call
  kNeedsGradients = 4,  // gradients are wanted: backward kernels follow
};
constexpr const char* kCircumstanceNames[] = {"is_capturing", "must_wait", "needs_gradients"};
constexpr int kIsOptional = 8;  // another kernel computes the call as well: no warning
// Return the kernel of a table row, looked up at its first use. If no kernel is found, return null after one warning,
// or throw if the kernel is required. `circumstances` is a sum of `kMustWait`, `kNeedsGradients` and `kIsOptional`.
Kernel* find_kernel(int row, int device_index, int circumstances);
// Return true if an earlier lookup for such a device failed; the choice hook then leaves such calls to stock.
bool kernel_missing(int row, const DeviceFacts& device);
int64_t missing_changes();  // grows with every change of an answer of `kernel_missing()`
void forget_kernels();
void reserve_kernel_entries(size_t rows);  // makes place for lookups of so many table rows; called before calls run
// Callback into Python for a kernel outside all packs. The callback returns a value of `CompileAnswer`. It sets
// `function` (address of the kernel's host function), or `self` (a TVM-FFI function object), or else `why`.
enum class CompileAnswer : int { kKernel, kNone, kNotYet };
constexpr const char* kCompileAnswerNames[] = {"kernel", "none", "not yet"};
using CompileCallback = int (*)(const char* name, int cc, int circumstances, void** function, void** self, char* why,
                                int why_bytes);
void set_compile_callback(CompileCallback callback);

// ---- launch.cpp ----

// Scope with the tensors' device as the current device. The destructor restores the previous device.
class OnDevice {
 public:
  explicit OnDevice(int device_index);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  DeviceGuardHandle guard_ = nullptr;
};

// Launch a kernel on its device and on the device's current stream, with a counter for the tile scheduler (launch.cpp).
// `loads`: parts of the launch may run for the first time, regardless of earlier launches.
void launch(Kernel& kernel, Arguments& arguments, bool loads = false);
// Launch only the preprocessing kernels that precede the kernel's own CTAs.
void launch_preprocess(Kernel& kernel, Arguments& arguments);

// ---- counters.cpp ----

// Return a global int32 for a launch: zero before and after the launch, and unused by any launch in flight
// (counters.cpp).
void* launch_counter(int device_index, void* stream);

}  // namespace flashplug
