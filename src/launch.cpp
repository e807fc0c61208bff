// From a plan to a kernel on the device: what each kind of call has for its kernel, on its stream and device.
#include <dlfcn.h>

#include "arguments.h"
#include "torch_symbols.h"
#include "values.h"

namespace flashplug {

static_assert(sizeof(TVMFFIFunctionCell) == 2 * sizeof(void*),
              "kernels.cpp reads safe_call as the first field behind the object header");
static_assert(sizeof(TVMFFIObject) == 24, "kernels.cpp knows the object header");

namespace {

constexpr double kLog2e = 1.4426950408889634;

// What TVM-FFI kept of the failure. Its library is in the process already: the packs and the JIT need it.
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

// Makes the tensors' device current, if it is not already, and puts the old one back.
class OnDevice {
 public:
  explicit OnDevice(int device_index) {
    if (standin() != Standin::kOff) return;
    int32_t current = -1;
    check_shim(aoti_torch_get_current_device_index(&current), "get_current_device_index");
    if (current != device_index)
      check_shim(aoti_torch_create_device_guard(device_index, &guard_), "create_device_guard");
    ensure_context(device_index);
  }
  ~OnDevice() {
    if (guard_ != nullptr) aoti_torch_delete_device_guard(guard_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  DeviceGuardHandle guard_ = nullptr;
};

void run(Kernel& kernel, const Arguments& arguments) {
  TVMFFIAny result{};  // None
  KernelCall call = kernel.call.load(std::memory_order_acquire);
  if (call(kernel.self, arguments.packed(), arguments.count(), &result) != 0)
    throw std::runtime_error("torch_flashplug: kernel launch failed: " + raised_text());
}

// First use on a device loads the kernel's module, which a stream capture of this thread would forbid in its strict
// mode.
void run_on(Kernel& kernel, const Arguments& arguments, int device_index) {
  const uint64_t bit = uint64_t{1} << (device_index & 63);
  if ((kernel.devices.load(std::memory_order_acquire) & bit) != 0) {
    run(kernel, arguments);
    return;
  }
  RelaxedCapture relaxed;
  run(kernel, arguments);
  kernel.devices.fetch_or(bit, std::memory_order_release);
}

void add_forward(const ForwardTensors& tensors, double scale, Arguments* arguments) {
  arguments->tensor("q", tensors.q);
  arguments->tensor("k", tensors.k);
  arguments->tensor("v", tensors.v);
  arguments->tensor("o", tensors.out, true);
  arguments->tensor("lse", tensors.lse, true);
  arguments->real("scale_log2", scale * kLog2e);
  arguments->real("scale", scale);
}

// What persistent kernels draw their tiles from.
void add_counter(void* stream, int device_index, Arguments* arguments) {
  arguments->one_number("counter", launch_counter(device_index, stream));
  arguments->integer("num_ctas", device_facts(device_index).sm_count);
}

}  // namespace

void launch_forward(Kernel& kernel, const KernelRow& row, const ForwardTensors& tensors, double scale,
                    int device_index) {
  OnDevice on_device(device_index);
  void* stream = current_cuda_stream(device_index);
  Arguments arguments(row, device_index);
  add_forward(tensors, scale, &arguments);
  add_counter(stream, device_index, &arguments);
  arguments.stream(stream);
  run_on(kernel, arguments, device_index);
}

void launch_decode(Kernel& kernel, const KernelRow& row, const ForwardTensors& tensors, AtenTensorHandle partials,
                   Splits splits, double scale, int device_index) {
  OnDevice on_device(device_index);
  Arguments arguments(row, device_index);
  add_forward(tensors, scale, &arguments);
  if (partials != nullptr)
    arguments.tensor("partials", partials, true);
  else  // nothing is written there, but an argument has an address: that of the LSE
    arguments.one_number("partials", mutable_data(tensors.lse));
  arguments.integer("splits", splits.n);
  arguments.integer("cluster", splits.cluster);
  arguments.stream(current_cuda_stream(device_index));
  std::optional<RelaxedCapture> relaxed;  // the kernels of splits may run for the first time, whatever ran before
  if (splits.n > 1) relaxed.emplace();
  run_on(kernel, arguments, device_index);
}

void launch_backward(Kernel& kernel, const KernelRow& row, const BackwardTensors& tensors, double scale,
                     int device_index) {
  OnDevice on_device(device_index);
  void* stream = current_cuda_stream(device_index);
  const bool writes_dq = (tensors.written & kWantDq) != 0, writes_dkdv = (tensors.written & kWantDkDv) != 0;
  Arguments arguments(row, device_index);
  arguments.tensor("q", tensors.q);
  arguments.tensor("k", tensors.k);
  arguments.tensor("v", tensors.v);
  arguments.tensor("o", tensors.out);
  arguments.tensor("do", tensors.grad_out);
  arguments.tensor("lse", tensors.lse);
  arguments.tensor("dq", tensors.dq, writes_dq);
  arguments.tensor("dk", tensors.dk, writes_dkdv);
  arguments.tensor("dv", tensors.dv, writes_dkdv);
  arguments.tensor("rows", tensors.rows, true);
  arguments.tensor("scratch", tensors.scratch, true);
  arguments.real("scale_log2", scale * kLog2e);
  arguments.real("scale", scale);
  add_counter(stream, device_index, &arguments);
  arguments.integer("wanted", tensors.written);
  arguments.stream(stream);
  // A part that runs for the first time may have to be loaded, whatever ran before.
  std::optional<RelaxedCapture> relaxed;
  if (tensors.written != kWantAll) relaxed.emplace();
  run_on(kernel, arguments, device_index);
}

}  // namespace flashplug
