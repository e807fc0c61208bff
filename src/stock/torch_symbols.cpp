// Symbols looked up at run time, and facts about torch versions behind them. Only stock_kernels.cpp and errors.cpp know
// further mangled names.
//
// libtorch_cpu.so and libc10.so are in the process already (import torch). libtorch_cuda.so exists only in CUDA builds,
// and the driver only on GPU machines. The names were present in the Linux libraries of all supported versions. If a
// name is missing, install() reports the name, and the caller uses the composite hook.
#include "stock/torch_symbols.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <mutex>
#include <stack>
#include <stdexcept>
#include <utility>

#include "core/core.h"

namespace flashplug {

void* in_process(const char* library) { return dlopen(library, RTLD_NOLOAD | RTLD_NOW); }

namespace {

// DispatchStub<signature, tag>::DEFAULT. The mangled name spells the function type, so its presence proves the
// signature.
constexpr const char* kSignature =
    "_ZN2at6native12DispatchStubIPFlRKNS_6TensorES4_S4_RKSt8optionalIS2_EdbS5_IdEbENS0_44_fused_sdp_choice_stub_"
    "DECLARE_DISPATCH_typeEE"
    "7DEFAULTE";
constexpr const char* kStub = "_ZN2at6native22_fused_sdp_choice_stubE";
constexpr const char* kGlobalContext = "_ZN2at13globalContextEv";
constexpr const char* kFlashEnabled = "_ZNK2at7Context19userEnabledFlashSDPEv";
constexpr const char* kOverrideableEnabled = "_ZNK2at7Context26userEnabledOverrideableSDPEv";
constexpr const char* kMathEnabled = "_ZNK2at7Context18userEnabledMathSDPEv";
constexpr const char* kEfficientEnabled = "_ZNK2at7Context26userEnabledMemEfficientSDPEv";
constexpr const char* kCudnnEnabled = "_ZNK2at7Context19userEnabledCuDNNSDPEv";
constexpr const char* kWrap = "_Z16THPVariable_WrapRKN2at10TensorBaseE";
constexpr const char* kDeterministic = "_ZNK2at7Context23deterministicAlgorithmsEv";
constexpr const char* kRequiresGrad = "_ZNK3c1010TensorImpl13requires_gradEv";
constexpr const char* kPythonDispatch = "_ZN2at4impl19tensor_has_dispatchERKNS_6TensorE";
constexpr const char* kModesSet = "_ZN3c104impl20TorchDispatchModeTLS13any_modes_setEb";
constexpr const char* kTracingState = "_ZN5torch3jit6tracer15getTracingStateEv";
constexpr const char* kSavedHooks = "_ZN2at23SavedTensorDefaultHooks13get_tls_stateEv";
constexpr const char* kNestedType = "_ZTIN2at6native16NestedTensorImplE";
constexpr const char* kPlainType = "_ZTIN3c1010TensorImplE";
constexpr const char* kGraphTask = "_ZN5torch8autograd25get_current_graph_task_idEv";
constexpr const char* kEvaluatedNode = "_ZN5torch8autograd16get_current_nodeEv";
constexpr const char* kSequenceNumber = "_ZN2at15sequence_number4peekEv";
constexpr const char* kRecordThread = "_ZN2at14RecordFunction15currentThreadIdEv";
constexpr const char* kDispatchKeys = "_ZN3c104impl26raw_local_dispatch_key_setE";
constexpr const char* kHasCallbacks = "_ZN2at12hasCallbacksEv";
constexpr const char* kFunctionMode = "_ZN2at4impl27torch_function_mode_enabledEv";
constexpr const char* kIsNegated = "_ZN2at6native6is_negERKNS_6TensorE";
constexpr const char* kIsInference = "_ZN2at6native12is_inferenceERKNS_6TensorE";
constexpr const char* kVersion = "_ZNK2at10TensorBase8_versionEv";
constexpr const char* kCountWrite = "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE";
constexpr const char* kLogLevel = "FLAGS_caffe2_log_level";

using ContextFlag = bool (*)(const void* context);
using TensorFlag = bool (*)(const void* tensor_impl);
// Dispatch keys that a thread adds and removes, c10::impl::PODLocalDispatchKeySet: sets of bits that differ from the
// sets of a new thread.
struct DispatchKeys {
  uint64_t included = 0, excluded = 0;
  bool operator==(const DispatchKeys&) const = default;
};

struct PrivateSymbols {
  void* context = nullptr;
  ContextFlag flash = nullptr, overrideable = nullptr, math = nullptr, efficient = nullptr, cudnn = nullptr,
              deterministic = nullptr;
  TensorFlag requires_grad = nullptr;
  bool (*python_dispatch)(const void* tensor) = nullptr;
  bool (*has_dispatch_mode)(bool skip_infra_modes) = nullptr;
  const std::shared_ptr<void>& (*tracing_state)() = nullptr;
  const std::stack<int>& (*saved_hooks)() = nullptr;  // the state begins with a stack; the element type does not matter
  const void* nested_type_info = nullptr;
  const void* tensor_impl_type_info = nullptr;
  int* log_level = nullptr;
  int (*graph_task)() = nullptr;
  void* (*evaluated_node)(void* returned) = nullptr;  // x86-64 passes the address of a returned object first
  uint64_t (*sequence_number)() = nullptr;
  uint64_t (*record_thread)() = nullptr;
  bool has_dispatch_keys = false;
  bool (*has_callbacks)() = nullptr;
  bool (*function_mode)() = nullptr;
  bool (*is_negated)(const void* tensor) = nullptr;
  bool (*is_inference)(const void* tensor) = nullptr;
  int64_t (*version)(const void* tensor) = nullptr;
  void (*count_write)(const void* tensor) = nullptr;
};

PrivateSymbols& private_symbols() {
  static PrivateSymbols instance;
  return instance;
}

// Return the public symbols, and fill `private_symbols()` with all further symbols. A missing symbol stays null.
TorchSymbols look_up_all() {
  TorchSymbols symbols;
  PrivateSymbols& hidden = private_symbols();
  void* cpu = in_process("libtorch_cpu.so");
  void* c10 = in_process("libc10.so");
  if (cpu == nullptr || c10 == nullptr) return symbols;
  symbols.choice_stub = dlsym(cpu, kStub);
  void** cpu_default = static_cast<void**>(dlsym(cpu, kSignature));
  symbols.has_expected_signature = cpu_default != nullptr;
  if (cpu_default != nullptr) symbols.cpu_default = *cpu_default;
  if (auto context = reinterpret_cast<void* (*)()>(dlsym(cpu, kGlobalContext))) hidden.context = context();
  hidden.flash = reinterpret_cast<ContextFlag>(dlsym(cpu, kFlashEnabled));
  hidden.overrideable = reinterpret_cast<ContextFlag>(dlsym(cpu, kOverrideableEnabled));
  hidden.math = reinterpret_cast<ContextFlag>(dlsym(cpu, kMathEnabled));
  hidden.efficient = reinterpret_cast<ContextFlag>(dlsym(cpu, kEfficientEnabled));
  hidden.cudnn = reinterpret_cast<ContextFlag>(dlsym(cpu, kCudnnEnabled));
  hidden.deterministic = reinterpret_cast<ContextFlag>(dlsym(cpu, kDeterministic));
  hidden.requires_grad = reinterpret_cast<TensorFlag>(dlsym(c10, kRequiresGrad));
  hidden.python_dispatch = reinterpret_cast<bool (*)(const void*)>(dlsym(cpu, kPythonDispatch));
  hidden.has_dispatch_mode = reinterpret_cast<bool (*)(bool)>(dlsym(c10, kModesSet));
  hidden.tracing_state = reinterpret_cast<const std::shared_ptr<void>& (*)()>(dlsym(cpu, kTracingState));
  hidden.saved_hooks = reinterpret_cast<const std::stack<int>& (*)()>(dlsym(cpu, kSavedHooks));
  hidden.nested_type_info = dlsym(cpu, kNestedType);
  hidden.tensor_impl_type_info = dlsym(c10, kPlainType);
  hidden.graph_task = reinterpret_cast<int (*)()>(dlsym(cpu, kGraphTask));
  hidden.evaluated_node = reinterpret_cast<void* (*)(void*)>(dlsym(cpu, kEvaluatedNode));
  hidden.sequence_number = reinterpret_cast<uint64_t (*)()>(dlsym(cpu, kSequenceNumber));
  hidden.record_thread = reinterpret_cast<uint64_t (*)()>(dlsym(cpu, kRecordThread));
  hidden.has_dispatch_keys = dlsym(c10, kDispatchKeys) != nullptr;
  hidden.has_callbacks = reinterpret_cast<bool (*)()>(dlsym(cpu, kHasCallbacks));
  hidden.function_mode = reinterpret_cast<bool (*)()>(dlsym(cpu, kFunctionMode));
  hidden.is_negated = reinterpret_cast<bool (*)(const void*)>(dlsym(cpu, kIsNegated));
  hidden.is_inference = reinterpret_cast<bool (*)(const void*)>(dlsym(cpu, kIsInference));
  hidden.version = reinterpret_cast<int64_t (*)(const void*)>(dlsym(cpu, kVersion));
  hidden.count_write = reinterpret_cast<void (*)(const void*)>(dlsym(cpu, kCountWrite));
  hidden.log_level = static_cast<int*>(dlsym(c10, kLogLevel));
  if (void* python = in_process("libtorch_python.so")) symbols.wrap_in_python = dlsym(python, kWrap);
  return symbols;
}

// The CUDA driver, for functions absent from the stable ABI. The driver's functions are versioned by name and stay
// forever, so no version of the CUDA runtime is needed.
struct Driver {
  using Attribute = int (*)(int* value, int attribute, int device);
  using ExchangeCaptureMode = int (*)(int* mode);
  using IsCapturing = int (*)(void* stream, int* status);
  Attribute attribute = nullptr;
  int (*device_get)(int* device, int ordinal) = nullptr;
  int (*init)(unsigned flags) = nullptr;
  ExchangeCaptureMode exchange_capture_mode = nullptr;
  IsCapturing is_capturing = nullptr;
  int (*mem_alloc)(uint64_t* pointer, size_t bytes) = nullptr;
  int (*memset_async)(uint64_t pointer, unsigned char value, size_t bytes, void* stream) = nullptr;
  int (*copy_to_device_async)(uint64_t pointer, const void* from, size_t bytes, void* stream) = nullptr;
  int (*stream_create)(void** stream, unsigned flags) = nullptr;
  int (*stream_synchronize)(void* stream) = nullptr;
  int (*stream_destroy)(void* stream) = nullptr;
  int (*context_current)(void** context) = nullptr;
  int (*context_set)(void* context) = nullptr;
  int (*primary_context)(void** context, int device) = nullptr;
};

const Driver& driver() {
  static const Driver instance = [] {
    Driver d;
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return d;
    d.init = reinterpret_cast<int (*)(unsigned)>(dlsym(library, "cuInit"));
    d.device_get = reinterpret_cast<int (*)(int*, int)>(dlsym(library, "cuDeviceGet"));
    d.attribute = reinterpret_cast<Driver::Attribute>(dlsym(library, "cuDeviceGetAttribute"));
    d.exchange_capture_mode =
        reinterpret_cast<Driver::ExchangeCaptureMode>(dlsym(library, "cuThreadExchangeStreamCaptureMode"));
    d.is_capturing = reinterpret_cast<Driver::IsCapturing>(dlsym(library, "cuStreamIsCapturing"));
    d.mem_alloc = reinterpret_cast<decltype(d.mem_alloc)>(dlsym(library, "cuMemAlloc_v2"));
    d.memset_async = reinterpret_cast<decltype(d.memset_async)>(dlsym(library, "cuMemsetD8Async"));
    d.copy_to_device_async = reinterpret_cast<decltype(d.copy_to_device_async)>(dlsym(library, "cuMemcpyHtoDAsync_v2"));
    d.stream_create = reinterpret_cast<decltype(d.stream_create)>(dlsym(library, "cuStreamCreate"));
    d.stream_synchronize = reinterpret_cast<decltype(d.stream_synchronize)>(dlsym(library, "cuStreamSynchronize"));
    d.stream_destroy = reinterpret_cast<decltype(d.stream_destroy)>(dlsym(library, "cuStreamDestroy_v2"));
    d.context_current = reinterpret_cast<decltype(d.context_current)>(dlsym(library, "cuCtxGetCurrent"));
    d.context_set = reinterpret_cast<decltype(d.context_set)>(dlsym(library, "cuCtxSetCurrent"));
    d.primary_context = reinterpret_cast<decltype(d.primary_context)>(dlsym(library, "cuDevicePrimaryCtxRetain"));
    return d;
  }();
  return instance;
}

// Values of CUdevice_attribute and CUstreamCaptureMode, fixed by the driver's ABI.
constexpr int kAttributeSmCount = 16;
constexpr int kAttributeMemoryKhz = 36;
constexpr int kAttributeMemoryBits = 37;
constexpr int kAttributeL2Bytes = 38;
constexpr int kAttributeMajor = 75;
constexpr int kAttributeMinor = 76;
constexpr int kAttributeSmemOptin = 97;
constexpr int kCaptureModeRelaxed = 2;
constexpr int kFirstCaptureError = 900, kLastCaptureError = 908;  // CUDA_ERROR_STREAM_CAPTURE_...
constexpr unsigned kStreamNonBlocking = 1;  // not ordered with the legacy stream, which a capture may forbid

constexpr int kLogFatal = 3;
std::mutex quiet_mutex;

}  // namespace

QuietShims::QuietShims() {
  quiet_mutex.lock();
  if (int* level = private_symbols().log_level) previous_ = std::exchange(*level, kLogFatal);
}

QuietShims::~QuietShims() {
  if (int* level = private_symbols().log_level) *level = previous_;
  quiet_mutex.unlock();
}

const TorchSymbols& torch_symbols() {
  static const TorchSymbols instance = look_up_all();
  return instance;
}

bool TorchSymbols::flash_enabled() const { return private_symbols().flash(private_symbols().context); }
bool TorchSymbols::overrideable_enabled() const { return private_symbols().overrideable(private_symbols().context); }
bool TorchSymbols::math_enabled() const { return private_symbols().math(private_symbols().context); }
bool TorchSymbols::efficient_enabled() const { return private_symbols().efficient(private_symbols().context); }
bool TorchSymbols::cudnn_enabled() const { return private_symbols().cudnn(private_symbols().context); }
bool TorchSymbols::deterministic() const { return private_symbols().deterministic(private_symbols().context); }

// at::Tensor is an intrusive_ptr<TensorImpl>; a handle points at the at::Tensor.
bool TorchSymbols::requires_grad(AtenTensorHandle tensor) const {
  return private_symbols().requires_grad(*reinterpret_cast<void**>(tensor));
}

namespace {

// Return the type_info of a tensor. The C++ ABI keeps the address in front of an object's virtual functions.
const void* type_of(AtenTensorHandle tensor) {
  void*** object = *reinterpret_cast<void****>(tensor);
  return (*object)[-1];
}

}  // namespace

bool TorchSymbols::nested(AtenTensorHandle tensor) const {
  return type_of(tensor) == private_symbols().nested_type_info;
}
bool TorchSymbols::has_wrapper(AtenTensorHandle tensor) const {
  return type_of(tensor) != private_symbols().tensor_impl_type_info;
}

bool TorchSymbols::python_dispatch(AtenTensorHandle tensor) const { return private_symbols().python_dispatch(tensor); }

bool TorchSymbols::has_dispatch_mode() const {
  return private_symbols().has_dispatch_mode == nullptr || private_symbols().has_dispatch_mode(false);
}

bool TorchSymbols::jit_traced() const {
  return private_symbols().tracing_state != nullptr && private_symbols().tracing_state() != nullptr;
}

bool TorchSymbols::saved_hooks() const {
  return private_symbols().saved_hooks == nullptr || !private_symbols().saved_hooks().empty();
}

bool TorchSymbols::can_read_nodes() const {
#if defined(__x86_64__)
  const PrivateSymbols& f = private_symbols();
  return f.graph_task != nullptr && f.evaluated_node != nullptr && f.sequence_number != nullptr &&
         f.record_thread != nullptr;
#else
  return false;
#endif
}

int64_t TorchSymbols::graph_task() const { return private_symbols().graph_task(); }
uint64_t TorchSymbols::sequence_number() const { return private_symbols().sequence_number(); }
uint64_t TorchSymbols::record_thread() const { return private_symbols().record_thread(); }
void TorchSymbols::evaluated_node(void* returned) const { private_symbols().evaluated_node(returned); }

namespace {

// Return the dispatch keys of the thread. dlsym() gives the address of a thread's own copy.
const DispatchKeys& dispatch_keys() {
  static thread_local const auto* keys =
      static_cast<const DispatchKeys*>(dlsym(in_process("libc10.so"), kDispatchKeys));
  return *keys;
}

DispatchKeys inference_keys;  // set once, before calls run

}  // namespace

void learn_inference_keys() {
  if (torch_symbols().can_call_directly()) inference_keys = dispatch_keys();
}

bool TorchSymbols::can_call_directly() const {
  const PrivateSymbols& f = private_symbols();
  return f.has_dispatch_keys && f.has_callbacks != nullptr && f.function_mode != nullptr && f.is_negated != nullptr &&
         f.is_inference != nullptr && f.version != nullptr && f.count_write != nullptr && f.requires_grad != nullptr &&
         f.tensor_impl_type_info != nullptr && wrap_in_python != nullptr;
}

bool TorchSymbols::runs_plain_eager_code() const {
  const DispatchKeys& keys = dispatch_keys();
  const PrivateSymbols& f = private_symbols();
  return (keys == DispatchKeys{} || keys == inference_keys) && !f.has_callbacks() && !f.function_mode();
}

bool TorchSymbols::is_negated(AtenTensorHandle tensor) const { return private_symbols().is_negated(tensor); }
bool TorchSymbols::is_inference(AtenTensorHandle tensor) const { return private_symbols().is_inference(tensor); }
int64_t TorchSymbols::version(AtenTensorHandle tensor) const { return private_symbols().version(tensor); }
void TorchSymbols::count_write(AtenTensorHandle tensor) const {
  if (!is_inference(tensor)) private_symbols().count_write(tensor);
}

const char* TorchSymbols::first_missing_symbol() const {
  const PrivateSymbols& f = private_symbols();
  const std::pair<const char*, bool> needed[] = {{kStub, choice_stub != nullptr},
                                                 {kGlobalContext, f.context != nullptr},
                                                 {kFlashEnabled, f.flash != nullptr},
                                                 {kOverrideableEnabled, f.overrideable != nullptr},
                                                 {kMathEnabled, f.math != nullptr},
                                                 {kEfficientEnabled, f.efficient != nullptr},
                                                 {kCudnnEnabled, f.cudnn != nullptr},
                                                 {kDeterministic, f.deterministic != nullptr},
                                                 {kRequiresGrad, f.requires_grad != nullptr},
                                                 {kPythonDispatch, f.python_dispatch != nullptr}};
  const auto missing = std::ranges::find(needed, false, &std::pair<const char*, bool>::second);
  return missing == std::end(needed) ? nullptr : missing->first;
}

void* current_cuda_stream(int device_index) {
  if (cpu_stub() != CpuStub::kOff) return nullptr;
  using Shim = AOTITorchError (*)(int32_t, void**);
  static const Shim shim = [] {
    void* cuda = in_process("libtorch_cuda.so");
    return cuda ? reinterpret_cast<Shim>(dlsym(cuda, "aoti_torch_get_current_cuda_stream")) : nullptr;
  }();
  void* stream = nullptr;
  if (shim == nullptr || shim(device_index, &stream) != 0)
    throw std::runtime_error("torch_flashplug: torch has no current CUDA stream. Install a CUDA build of torch.");
  return stream;
}

bool stream_is_capturing(void* stream) {
  if (driver().is_capturing == nullptr) return false;
  int status = 0;
  const int error = driver().is_capturing(stream, &status);
  // A capture can forbid the question itself. All other errors say nothing about captures: for example, threads of
  // autograd without earlier use of the GPU have no context.
  return error == 0 ? status != 0 : error >= kFirstCaptureError && error <= kLastCaptureError;
}

RelaxedCapture::RelaxedCapture() {
  int mode = kCaptureModeRelaxed;
  if (driver().exchange_capture_mode != nullptr && driver().exchange_capture_mode(&mode) == 0) previous_ = mode;
}

RelaxedCapture::~RelaxedCapture() {
  if (previous_ >= 0) driver().exchange_capture_mode(&previous_);
}

void ensure_context(int device_index) {
  const Driver& d = driver();
  if (d.context_current == nullptr || d.context_set == nullptr || d.primary_context == nullptr) return;
  void* context = nullptr;
  int device = 0;
  if (d.context_current(&context) != 0 || context != nullptr) return;
  if (d.device_get(&device, device_index) == 0 && d.primary_context(&context, device) == 0) d.context_set(context);
}

namespace {

// Return new memory on the current device, filled on a stream of its own; null after a failure.
template <typename Fill>
void* filled_memory(size_t bytes, Fill fill) {
  const Driver& d = driver();
  if (d.mem_alloc == nullptr || d.stream_create == nullptr) return nullptr;
  RelaxedCapture relaxed;
  uint64_t pointer = 0;
  void* stream = nullptr;
  if (d.mem_alloc(&pointer, bytes) != 0 || d.stream_create(&stream, kStreamNonBlocking) != 0) return nullptr;
  const bool filled = fill(pointer, stream) == 0 && d.stream_synchronize(stream) == 0;
  d.stream_destroy(stream);
  return filled ? reinterpret_cast<void*>(pointer) : nullptr;
}

}  // namespace

void* device_zeros(size_t bytes) {
  const Driver& d = driver();
  if (d.memset_async == nullptr) return nullptr;
  return filled_memory(bytes,
                       [&](uint64_t pointer, void* stream) { return d.memset_async(pointer, 0, bytes, stream); });
}

void* device_copy(const void* from, size_t bytes) {
  const Driver& d = driver();
  if (d.copy_to_device_async == nullptr) return nullptr;
  return filled_memory(
      bytes, [&](uint64_t pointer, void* stream) { return d.copy_to_device_async(pointer, from, bytes, stream); });
}

DeviceFacts query_device(int device_index) {
  const Driver& d = driver();
  DeviceFacts facts;
  int device = 0;
  if (d.init == nullptr || d.init(0) != 0 || d.device_get(&device, device_index) != 0) return facts;
  int major = 0, minor = 0;
  d.attribute(&major, kAttributeMajor, device);
  d.attribute(&minor, kAttributeMinor, device);
  d.attribute(&facts.sm_count, kAttributeSmCount, device);
  d.attribute(&facts.smem_bytes, kAttributeSmemOptin, device);
  d.attribute(&facts.l2_bytes, kAttributeL2Bytes, device);
  int khz = 0, bits = 0;
  d.attribute(&khz, kAttributeMemoryKhz, device);
  d.attribute(&bits, kAttributeMemoryBits, device);
  facts.memory_rate = static_cast<int>(2e-6 * khz * bits / 8);  // two transfers a clock
  facts.cc = 10 * major + minor;
  return facts;
}

}  // namespace flashplug
