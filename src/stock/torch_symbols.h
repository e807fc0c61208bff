// Functions of libtorch and of the CUDA driver outside the stable ABI (torch_symbols.cpp).
#pragma once

#include <torch/csrc/stable/c/shim.h>

#include <cstddef>
#include <cstdint>
#include <optional>

#include "core/core.h"

namespace flashplug {

using ChoiceFunction = int64_t (*)(AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, const std::optional<void*>*,
                                   double, bool, std::optional<double>, bool);
struct TorchSymbols {
  void* choice_stub = nullptr;          // at::native::_fused_sdp_choice_stub
  bool has_expected_signature = false;  // the choice function has the expected type
  void* cpu_default = nullptr;          // stock's choice function for CPU tensors
  void* wrap_in_python = nullptr;       // at::Tensor* -> its Python object
  bool flash_enabled() const;           // torch.nn.attention.sdpa_kernel and the global switches
  bool overrideable_enabled() const;
  bool math_enabled() const;
  bool efficient_enabled() const;
  bool cudnn_enabled() const;
  bool deterministic() const;
  bool requires_grad(AtenTensorHandle tensor) const;
  bool nested(AtenTensorHandle tensor) const;  // a strided NestedTensor, which has no sizes
  // Return true for a tensor wrapped by functorch, for example, which has no storage of its own.
  bool has_wrapper(AtenTensorHandle tensor) const;
  bool python_dispatch(AtenTensorHandle tensor) const;  // a FakeTensor or a different Python subclass: maybe traced
  bool has_dispatch_mode() const;  // a TorchDispatchMode is active, so the next op may be replaced; true if unknown
  bool jit_traced() const;         // torch.jit.trace records the thread's calls
  bool saved_hooks() const;        // the thread has hooks for tensors saved by autograd: save_on_cpu, checkpoint, ...
  // Questions to the engine of autograd (block_mode.cpp). `can_read_nodes()`: whether the next four can be asked.
  // `graph_task()`: the running graph task of the thread; -1: none. `sequence_number()`: number of the thread's next
  // node. `record_thread()`: the thread's number, as stored in nodes. `evaluated_node()`: writes the node under
  // evaluation to the place where libtorch returns a smart pointer.
  bool can_read_nodes() const;
  int64_t graph_task() const;
  uint64_t sequence_number() const;
  uint64_t record_thread() const;
  void evaluated_node(void* returned) const;
  // Questions of a call of attention() that does without torch's dispatcher (direct_attention.cpp).
  // `can_call_directly()`: whether the others can be asked. `runs_plain_eager_code()`: nothing on the thread may see,
  // change or record the calls of ops: no tracer, mode, transform, autocast, guard or profiler. `is_negated()`: a view
  // with lazily negated values. `version()`: the count of writes, of a tensor that is no inference tensor.
  // `count_write()`: adds a write, unless the tensor is an inference tensor.
  bool can_call_directly() const;
  bool runs_plain_eager_code() const;
  bool is_negated(AtenTensorHandle tensor) const;
  bool is_inference(AtenTensorHandle tensor) const;
  int64_t version(AtenTensorHandle tensor) const;
  void count_write(AtenTensorHandle tensor) const;
  const char* first_missing_symbol() const;  // first symbol that the hook needs and the running torch lacks; null: none
};
const TorchSymbols& torch_symbols();
// Note the dispatch keys of the calling thread as those of plain code in torch.inference_mode.
void learn_inference_keys();
void* current_cuda_stream(int device_index);
bool stream_is_capturing(void* stream);
// Scope in which driver calls of a capturing thread are allowed and record nothing (relaxed capture mode).
class RelaxedCapture {
 public:
  RelaxedCapture();
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  int previous_ = -1;
};
DeviceFacts query_device(int device_index);
// Give the thread a CUDA context. Threads without earlier calls of the CUDA runtime, such as autograd's, have no
// context, and the driver refuses their calls.
void ensure_context(int device_index);
// Return zeros on the current device, never freed; null if memory is short. Works while a stream is captured.
void* device_zeros(size_t bytes);
void* device_copy(const void* from, size_t bytes);  // the same with a copy of host memory
// Scope in which failures of shims are expected and handled. Outside such a scope, older libtorch logs every failed
// shim with a backtrace.
class QuietShims {
 public:
  QuietShims();
  ~QuietShims();
  QuietShims(const QuietShims&) = delete;
  QuietShims& operator=(const QuietShims&) = delete;

 private:
  int previous_ = 0;
};
void* in_process(const char* library);  // handle of a loaded library; null if not loaded

}  // namespace flashplug
