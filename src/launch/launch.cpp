// Launch of a kernel on a device: stream, counter, lazily loaded modules, errors.
#include "launch/launch.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

#include "core/core.h"
#include "core/values.h"
#include "launch/kernel_args.h"
#include "stock/torch_symbols.h"

namespace flashplug {

OnDevice::OnDevice(int device_index) {
  if (cpu_stub() != CpuStub::kOff) return;
  int32_t current = -1;
  check_shim(aoti_torch_get_current_device_index(&current), "get_current_device_index");
  if (current != device_index) check_shim(aoti_torch_create_device_guard(device_index, &guard_), "create_device_guard");
  ensure_context(device_index);
}

OnDevice::~OnDevice() {
  if (guard_ != nullptr) aoti_torch_delete_device_guard(guard_);
}

static_assert(sizeof(TVMFFIFunctionCell) == 2 * sizeof(void*),
              "kernel_loader.cpp reads safe_call as the first field behind the object header");
static_assert(sizeof(TVMFFIObject) == 24, "kernel_loader.cpp knows the object header");

namespace {

// Return TVM-FFI's text of the failure. The library is in the process already, because packs and the JIT need it.
std::string raised_text() {
  void* library = dlopen("libtvm_ffi.so", RTLD_NOLOAD | RTLD_NOW);
  void* scope = library != nullptr ? library : RTLD_DEFAULT;
  auto move_raised = reinterpret_cast<void (*)(TVMFFIObjectHandle*)>(dlsym(scope, "TVMFFIErrorMoveFromRaised"));
  auto release = reinterpret_cast<int (*)(TVMFFIObjectHandle)>(dlsym(scope, "TVMFFIObjectDecRef"));
  if (move_raised == nullptr || release == nullptr) return "no text: libtvm_ffi.so is not loaded";
  TVMFFIObjectHandle error = nullptr;
  move_raised(&error);
  if (error == nullptr) return "no text was left";
  const auto* cell = reinterpret_cast<const TVMFFIErrorCell*>(static_cast<const char*>(error) + sizeof(TVMFFIObject));
  std::string text(cell->kind.data, cell->kind.size);
  text += ": " + std::string(cell->message.data, cell->message.size);
  release(error);
  return text;
}

void run(Kernel& kernel, const Arguments& arguments) {
  TVMFFIAny result{};  // None
  KernelCall call = kernel.call.load(std::memory_order_acquire);
  if (call(kernel.self, arguments.packed(), arguments.count(), &result) != 0)
    throw std::runtime_error("torch_flashplug: kernel launch failed: " + raised_text());
}

// Run a kernel. The first use on a device loads the kernel's module. A stream capture of the thread in strict mode
// would forbid the load.
void run_on(Kernel& kernel, const Arguments& arguments) {
  const uint64_t bit = uint64_t{1} << (arguments.device_index() & 63);
  if ((kernel.devices.load(std::memory_order_acquire) & bit) != 0) {
    run(kernel, arguments);
    return;
  }
  RelaxedCapture relaxed;
  run(kernel, arguments);
  kernel.devices.fetch_or(bit, std::memory_order_release);
}

// Pack the arguments of the tile scheduler of a persistent kernel: a counter, and the number of CTAs that fetch tiles.
void pack_tile_scheduler(Arguments& arguments, void* stream, bool has_ctas) {
  if (!arguments.takes("counter")) return;
  const int device_index = arguments.device_index();
  arguments.global_number("counter", launch_counter(device_index, stream));
  arguments.integer("num_ctas", has_ctas ? std::max(1, device_facts(device_index).sm_count - cta_margin()) : 0);
}

}  // namespace

void launch(Kernel& kernel, Arguments& arguments, bool loads) {
  const int device_index = arguments.device_index();
  OnDevice on_device(device_index);
  void* stream = current_cuda_stream(device_index);
  pack_tile_scheduler(arguments, stream, true);
  arguments.stream(stream);
  std::optional<RelaxedCapture> relaxed;
  if (loads) relaxed.emplace();
  run_on(kernel, arguments);
}

// The rest of the kernel's module may still have to be loaded, so the kernel does not count as used on the device.
void launch_preprocess(Kernel& kernel, Arguments& arguments) {
  const int device_index = arguments.device_index();
  OnDevice on_device(device_index);
  void* stream = current_cuda_stream(device_index);
  pack_tile_scheduler(arguments, stream, false);
  arguments.stream(stream);
  RelaxedCapture relaxed;
  run(kernel, arguments);
}

}  // namespace flashplug
