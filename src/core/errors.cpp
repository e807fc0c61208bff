// Transport of errors through a shim. A shim returns a code and no exception, and up to torch 2.12 only logs the text.
//
// An exception of Python code is thrown again as the original object, with type, value and traceback. The bodies of the
// project's own ops hand exceptions over (`held()` of dispatch/bindings.py). A TorchDispatchMode leaves an exception
// set on the thread: torch throws a python_error, which owns nothing yet, and the shim catches the python_error. A C++
// exception is found by a second call past the shim, or recognized by the text.
#include "core/errors.h"

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "core/python_api.h"
#include "stock/torch_symbols.h"

// ---- exceptions of Python ----

namespace flashplug {
namespace {

std::string text_of(Object* value) {
  const PythonApi& p = python_api();
  Object* text = value == nullptr ? nullptr : p.str(value);
  ptrdiff_t size = 0;
  const char* bytes = text == nullptr ? nullptr : p.utf8(text, &size);
  std::string message = bytes == nullptr ? "an error in Python" : std::string(bytes, size);
  p.decref(text);  // may be null
  p.clear();
  return message;
}

}  // namespace
}  // namespace flashplug

// Copy of a class in torch/csrc/Exceptions.h, whose handlers restore the held exception. Exceptions are matched by the
// name of their type, so the copy is caught as torch's class. Base, members and their order must be the same.
struct __attribute__((visibility("default"))) python_error : public std::exception {
  python_error() = default;
  python_error(python_error&& other) noexcept
      : type(std::exchange(other.type, nullptr)),
        value(std::exchange(other.value, nullptr)),
        traceback(std::exchange(other.traceback, nullptr)),
        message(std::move(other.message)) {}
  python_error(const python_error&) = delete;
  ~python_error() override {
    if (type == nullptr || flashplug::python_api().initialized() == 0) return;
    const flashplug::Gil gil;
    for (void* object : {type, value, traceback}) flashplug::python_api().decref(object);
  }
  const char* what() const noexcept override { return message.c_str(); }

  void* type = nullptr;
  void* value = nullptr;
  void* traceback = nullptr;
  std::string message;
};

namespace flashplug {
namespace {

// Return a python_error with the exception set on the thread. The caller has the GIL.
python_error fetch_python_error() {
  const PythonApi& p = python_api();
  python_error error;
  p.fetch(&error.type, &error.value, &error.traceback);
  p.normalize(&error.type, &error.value, &error.traceback);
  error.message = text_of(error.value);
  return error;
}

// Exceptions handed over by Python bodies, and the number of the thread's calls that wait for an exception.
thread_local int waiting = 0;
thread_local Object* held = nullptr;

void drop_held_error() {
  if (held == nullptr) return;
  const Gil gil;
  python_api().decref(std::exchange(held, nullptr));
}

// ---- texts ----

// Return libtorch's text of the last error; empty if the running torch keeps none.
std::string_view last_torch_error_text() {
  using What = const char* (*)();
  static const What text_of_error = [] {
    void* cpu = in_process("libtorch_cpu.so");
    return cpu ? reinterpret_cast<What>(dlsym(cpu, "torch_exception_get_what_without_backtrace")) : nullptr;
  }();
  const char* text = text_of_error != nullptr ? text_of_error() : nullptr;
  return text != nullptr ? text : std::string_view();
}

// Beginnings of torch's texts for errors that are no RuntimeError. All other types are known only after a second call.
struct ExceptionPrefix {
  const char* begin;
  const char *module, *type;
};
// A text of pybind11 has the type, the message and, after `kTracebackMarker`, a traceback.
constexpr std::string_view kTracebackMarker = "\n\nAt:\n";
constexpr ExceptionPrefix kExceptionPrefixes[] = {
    {"CUDA out of memory", "torch", "OutOfMemoryError"},
    {"CUDA error: ", "torch", "AcceleratorError"},
    {"Could not run '", "builtins", "NotImplementedError"},
    {"There were no tensor arguments to this function", "builtins", "NotImplementedError"}};

// Throw a Python exception of the given type. Returns if there is no such exception type.
void raise_as(const char* module_name, const char* type_name, const std::string& text) {
  const PythonApi& p = python_api();
  if (!has_python()) return;
  std::optional<python_error> error;
  {
    const Gil gil;
    Object* module = p.import(module_name);
    Object* type = module == nullptr ? nullptr : p.attribute(module, type_name);
    if (type != nullptr) {
      p.set_string(type, text.c_str());  // refuses a type that is no exception
      error.emplace(fetch_python_error());
    }
    p.clear();
    p.decref(type);
    p.decref(module);
  }
  if (error) throw std::move(*error);
}

// Throw an exception whose Python type is recognized by the text. Returns if no type is recognized.
void throw_exception_named_in(const std::string& text) {
  for (const ExceptionPrefix& prefix : kExceptionPrefixes) {
    if (text.starts_with(prefix.begin)) raise_as(prefix.module, prefix.type, text);
  }
  const size_t traceback = text.find(kTracebackMarker), colon = text.find(": ");
  if (traceback == std::string::npos || colon > traceback) return;
  const std::string type = text.substr(0, colon), message = text.substr(colon + 2, traceback - colon - 2);
  if (!type.ends_with("Error") && !type.ends_with("Exception")) return;
  for (const char* module : {"builtins", "torch"}) raise_as(module, type.c_str(), message);
}

// ---- throwing entries of libtorch: at::_ops::...::call ----

struct Tensor {  // at::Tensor, returned in memory
  void* impl = nullptr;
  Tensor() = default;
  Tensor(const Tensor&) = delete;
  ~Tensor() {}
  AtenTensorHandle handle() const { return reinterpret_cast<AtenTensorHandle>(new void*(impl)); }
};
struct Numbers {  // c10::ArrayRef<c10::SymInt>: a concrete SymInt is the number itself
  const int64_t* data;
  size_t size;
};
struct Device {  // c10::Device
  int8_t type, index;
};
using Byte = std::optional<int8_t>;  // ScalarType, Layout
using Flag = std::optional<bool>;
using MaybeSymInt = std::optional<int64_t>;  // c10::SymInt has a destructor, so it is passed by address

template <typename Function>
Function find_cpu_function(const char* name) {
  void* cpu = in_process("libtorch_cpu.so");
  return cpu == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(cpu, name));
}

AtenTensorHandle empty_strided_again(int dims, const int64_t* size, const int64_t* stride, int32_t dtype,
                                     int32_t device_type, int32_t device_index) {
  using Call = Tensor (*)(Numbers, Numbers, Byte, Byte, std::optional<Device>, Flag);
  static const auto call = find_cpu_function<Call>(
      "_ZN2at4_ops13empty_strided4callEN3c108ArrayRefINS2_6SymIntEEES5_St8optionalINS2_10ScalarTypeEES6_INS2_"
      "6LayoutEES6_INS2_6DeviceEES6_IbE");
  if (call == nullptr) return nullptr;
  const size_t n = static_cast<size_t>(dims);
  const Device device{static_cast<int8_t>(device_type), static_cast<int8_t>(device_index)};
  return call({size, n}, {stride, n}, static_cast<int8_t>(dtype), std::nullopt, device, std::nullopt).handle();
}

}  // namespace

void rethrow_python_error() {
  const PythonApi& p = python_api();
  // A thread unknown to Python has no exception set.
  if (!has_python() || p.thread_state() == nullptr) return;
  std::optional<python_error> error;
  {
    const Gil gil;
    if (p.occurred() != nullptr) {
      error.emplace(fetch_python_error());
    } else if (held != nullptr) {
      error.emplace();
      error->value = std::exchange(held, nullptr);
      error->type = p.type_of(error->value);
      error->traceback = p.traceback_of(error->value);
      error->message = text_of(error->value);
    }
  }
  drop_held_error();
  if (error) throw std::move(*error);
}

void hold_python_error(void* exception) {
  if (waiting == 0 || !has_python()) return;
  drop_held_error();
  const Gil gil;
  python_api().incref(exception);
  held = exception;
}

bool dispatch_op(const char* op, const char* overload, StableIValue* stack) {
  drop_held_error();  // drops the exception of an inner call after a recovery
  ++waiting;
  const bool done = torch_call_dispatcher(op, overload, stack, TORCH_ABI_VERSION) == 0;
  --waiting;
  if (done) drop_held_error();
  return done;
}

void rethrow(const char* call) {
  rethrow_python_error();
  const std::string text(last_torch_error_text());
  if (text.empty())
    throw std::runtime_error(std::string("torch_flashplug: ") + call + " failed: the log above has libtorch's message");
  throw_exception_named_in(text);
  throw std::runtime_error(text);
}

AtenTensorHandle new_strided(int dims, const int64_t* size, const int64_t* stride, int32_t dtype, int32_t device_type,
                             int32_t device_index) {
  AtenTensorHandle tensor = nullptr;
  if (aoti_torch_empty_strided(dims, size, stride, dtype, device_type, device_index, &tensor) == 0) return tensor;
  rethrow_python_error();
  tensor = empty_strided_again(dims, size, stride, dtype, device_type, device_index);
  if (tensor == nullptr) rethrow("empty_strided");
  return tensor;
}

void copy_tensor(AtenTensorHandle to, AtenTensorHandle from) {
  if (aoti_torch_copy_(to, from, 0) == 0) return;
  rethrow_python_error();
  static const auto call =
      find_cpu_function<void* (*)(void*, const void*, bool)>("_ZN2at4_ops5copy_4callERNS_6TensorERKS2_b");
  if (call == nullptr) rethrow("copy_");
  call(to, from, false);
}

AtenTensorHandle repeat_interleave_again(AtenTensorHandle tensor, int64_t repeats, int64_t dim) {
  using Call = Tensor (*)(const void*, const int64_t*, std::optional<int64_t>, const MaybeSymInt*);
  static const auto call = find_cpu_function<Call>(
      "_ZN2at4_ops26repeat_interleave_self_int4callERKNS_6TensorEN3c106SymIntESt8optionalIlES7_IS6_E");
  const MaybeSymInt unsaid;
  return call == nullptr ? nullptr : call(tensor, &repeats, dim, &unsaid).handle();
}

}  // namespace flashplug
