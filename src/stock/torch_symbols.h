// Functions of libtorch and of the CUDA driver outside the stable ABI (torch_symbols.cpp).
#pragma once

#include <array>

#include "core/flashplug.h"

namespace flashplug {

using ChoiceFunction = int64_t (*)(AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, const std::optional<void*>*,
                                   double, bool, std::optional<double>, bool);
struct TorchSymbols {
  void* stub = nullptr;         // at::native::_fused_sdp_choice_stub
  bool signature = false;       // the function type is the expected one
  void* cpu_default = nullptr;  // stock's choice function for CPU tensors
  void* wrap = nullptr;         // at::Tensor* -> its Python object
  bool flash_enabled() const;   // torch.nn.attention.sdpa_kernel and the global switches
  bool overrideable_enabled() const;
  bool math_enabled() const;
  bool efficient_enabled() const;
  bool deterministic() const;
  bool requires_grad(AtenTensorHandle tensor) const;
  bool nested(AtenTensorHandle tensor) const;  // a strided NestedTensor, which has no sizes
  // wrapped, for example by functorch: the tensor has no storage of its own
  bool wrapped(AtenTensorHandle tensor) const;
  bool python_dispatch(AtenTensorHandle tensor) const;  // a FakeTensor or a different Python subclass: maybe traced
  bool modes_set() const;    // a TorchDispatchMode is active, so the next op may be replaced; true if unknown
  bool jit_traced() const;   // torch.jit.trace records the thread's calls
  bool saved_hooks() const;  // the thread has hooks for tensors saved by autograd: save_on_cpu, checkpoint, ...
  // Questions to the engine of autograd (block_mode.cpp). `knows_nodes()`: whether the next four can be asked.
  // `graph_task()`: the running graph task of the thread; -1: none. `sequence_number()`: number of the thread's next
  // node. `record_thread()`: the thread's number, as stored in nodes. `evaluated_node()`: writes the node under
  // evaluation to the place where libtorch returns a smart pointer.
  bool knows_nodes() const;
  int64_t graph_task() const;
  uint64_t sequence_number() const;
  uint64_t record_thread() const;
  void evaluated_node(void* returned) const;
  const char* lacking() const;  // first symbol that the hook needs and the running torch lacks; null: none
};
const TorchSymbols& torch_symbols();
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
// on the current device, never freed; works while a stream is captured; null if memory is short
void* device_zeros(size_t bytes);
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

// ---- stock_kernels.cpp ----

// Stock's own attention kernels, called past the dispatcher; stock_workarounds.cpp sits above them. All exceptions pass
// through, torch.OutOfMemoryError too.
enum StockBackend : int { kStockCudnn = 1, kStockFlash = 2, kStockEfficient = 4 };
int stock_backends();  // sum of the backends whose kernels exist in the running torch
struct CudnnForwardCall {
  AtenTensorHandle q, k, v, bias;  // bias may be null
  bool needs_lse;
  double dropout_p;
  bool is_causal, returns_debug_mask;
  std::optional<double> scale;
};
struct FlashForwardCall {
  AtenTensorHandle q, k, v;
  double dropout_p;
  bool is_causal, returns_debug_mask;
  std::optional<double> scale;
};
struct EfficientForwardCall {
  AtenTensorHandle q, k, v, bias;  // bias may be null
  bool needs_lse;
  double dropout_p;
  bool is_causal;
  std::optional<double> scale;
};
struct FusedResult {
  AtenTensorHandle tensors[7];  // output, logsumexp, cum_seq_q, cum_seq_k, two dropout tensors, debug mask
  int64_t max_q, max_k;
};
FusedResult stock_cudnn_forward(const CudnnForwardCall& call);
FusedResult stock_flash_forward(const FlashForwardCall& call);
// Results: output, logsumexp, philox_seed, philox_offset.
void stock_efficient_forward(const EfficientForwardCall& call, AtenTensorHandle results[4]);
// `tensors`: the tensor arguments of the backward, in order.
void stock_cudnn_backward(const AtenTensorHandle tensors[11], int64_t max_q, int64_t max_k, double dropout_p,
                          bool is_causal, std::optional<double> scale, AtenTensorHandle grads[3]);
void stock_flash_backward(const AtenTensorHandle tensors[10], int64_t max_q, int64_t max_k, double dropout_p,
                          bool is_causal, std::optional<double> scale, AtenTensorHandle grads[3]);
void stock_efficient_backward(const AtenTensorHandle tensors[9], double dropout_p, std::array<bool, 4> wanted,
                              bool is_causal, std::optional<double> scale, AtenTensorHandle grads[4]);

// Arguments of stock's flash attention for packed sequences, for (B, S, H, D), and for windows:
// aten::_flash_attention_forward, called below any override. Tensors from `cu_q` on may be null.
struct VarlenFlashCall {
  AtenTensorHandle q, k, v, cu_q, cu_k;
  int64_t max_q, max_k;
  double dropout_p;
  bool is_causal, returns_debug_mask;
  std::optional<double> scale;
  std::optional<int64_t> left, right;
  AtenTensorHandle used_k, alibi, pages;
  std::optional<int64_t> splits;
};
bool has_stock_on_end();
bool has_stock_on_end_into();
// Results: output, logsumexp, rng_state, unused, debug mask.
void stock_on_end_forward(const VarlenFlashCall& call, AtenTensorHandle results[5]);
AtenTensorHandle stock_on_end_into(AtenTensorHandle out, const VarlenFlashCall& call);  // returns logsumexp
// `tensors`: the tensor arguments of the backward, in order. Numbers come from `call`.
void stock_on_end_backward(const AtenTensorHandle tensors[10], const VarlenFlashCall& call, AtenTensorHandle grads[3]);

// Arguments of stock's efficient attention for (B, S, H, D) or packed sequences: aten::_efficient_attention_forward.
// Tensors from `bias` on may be null. `mask_type`: 0 none, 1 causal from the top left, 2 causal from the bottom right.
struct EfficientCall {
  AtenTensorHandle q, k, v, bias, cu_q, cu_k;
  std::optional<int64_t> max_q, max_k;
  double dropout_p;
  int64_t mask_type;
  bool needs_lse;
  std::optional<double> scale;
  AtenTensorHandle used_k;
  std::optional<int64_t> window;
};
struct EfficientResult {
  AtenTensorHandle tensors[4];  // output, logsumexp, philox_seed, philox_offset
  int64_t max_q, max_k;
};
bool has_stock_rows();
EfficientResult stock_rows_forward(const EfficientCall& call);
// Further arguments of the backward. Operands, numbers and lengths come from the `EfficientCall`.
struct EfficientGradients {
  AtenTensorHandle grad_out, out, lse, seed, offset;
  bool bias_grad, one_storage;
  std::optional<int64_t> splits;
};
void stock_rows_backward(const EfficientCall& call, const EfficientGradients& given, AtenTensorHandle grads[4]);

}  // namespace flashplug
