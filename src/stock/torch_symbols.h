// What is asked of libtorch and the CUDA driver behind the stable ABI (torch_symbols.cpp).
#pragma once

#include <array>

#include "core/flashplug.h"

namespace flashplug {

using ChoiceFunction = int64_t (*)(AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, const std::optional<void*>*,
                                   double, bool, std::optional<double>, bool);
struct TorchSymbols {
  void* stub = nullptr;         // at::native::_fused_sdp_choice_stub
  bool signature = false;       // its function type is the one we were written for
  void* cpu_default = nullptr;  // stock's choice function for CPU tensors
  void* wrap = nullptr;         // at::Tensor* -> its Python object
  bool flash_enabled() const;   // torch.nn.attention.sdpa_kernel and the global switches
  bool overrideable_enabled() const;
  bool math_enabled() const;
  bool efficient_enabled() const;
  bool deterministic() const;
  bool requires_grad(AtenTensorHandle tensor) const;
  bool nested(AtenTensorHandle tensor) const;           // a strided NestedTensor, which has no sizes
  bool wrapped(AtenTensorHandle tensor) const;          // by functorch, say: it has no storage of its own
  bool python_dispatch(AtenTensorHandle tensor) const;  // a FakeTensor or another Python subclass: maybe traced
  bool modes_set() const;    // TorchDispatchModes: what is called next may be another op; true where nobody can tell
  bool jit_traced() const;   // torch.jit.trace writes down what this thread calls
  bool saved_hooks() const;  // this thread hands what autograd saves to somebody: save_on_cpu, checkpoint, ...
  // The engine of autograd (block_mode.cpp): whether the next four can be asked; the running graph task of this thread,
  // -1: none; the number of the node that this thread makes next; this thread's number, as nodes have it; and the node
  // that is evaluated, written where a smart pointer of libtorch is returned.
  bool knows_nodes() const;
  int64_t graph_task() const;
  uint64_t sequence_number() const;
  uint64_t record_thread() const;
  void evaluated_node(void* returned) const;
  const char* lacking() const;  // the first symbol that the hook needs and this torch does not have; null: none
};
const TorchSymbols& torch_symbols();
void* current_cuda_stream(int device_index);
bool stream_is_capturing(void* stream);
// Driver calls that record nothing while a stream is captured: relaxed for the lifetime of this object.
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
// Threads that have not called the CUDA runtime yet, as autograd's, have no context, and the driver refuses them.
void ensure_context(int device_index);
void* device_zeros(size_t bytes);  // on the current device, never freed, also while a stream is captured; null if none
// Failures that are expected and handled; older libtorch logs every failed shim, backtrace and all, unless one of these
// lives.
class QuietShims {
 public:
  QuietShims();
  ~QuietShims();
  QuietShims(const QuietShims&) = delete;
  QuietShims& operator=(const QuietShims&) = delete;

 private:
  int previous_ = 0;
};
void* in_process(const char* library);  // its handle; null where it is not loaded

// ---- stock_kernels.cpp ----

// Stock's own attention kernels, past the dispatcher (stock_workarounds.cpp sits above them). They raise what they
// raise, torch.OutOfMemoryError too.
enum StockBackend : int { kStockCudnn = 1, kStockFlash = 2, kStockEfficient = 4 };
int stock_backends();  // the sum of those whose kernels this torch has
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
  AtenTensorHandle tensors[7];  // output, logsumexp, cum_seq_q, cum_seq_k, two of dropout's, debug mask
  int64_t max_q, max_k;
};
FusedResult stock_cudnn_forward(const CudnnForwardCall& call);
FusedResult stock_flash_forward(const FlashForwardCall& call);
// Results: output, logsumexp, philox_seed, philox_offset.
void stock_efficient_forward(const EfficientForwardCall& call, AtenTensorHandle results[4]);
// `tensors`: those of its arguments, in order.
void stock_cudnn_backward(const AtenTensorHandle tensors[11], int64_t max_q, int64_t max_k, double dropout_p,
                          bool is_causal, std::optional<double> scale, AtenTensorHandle grads[3]);
void stock_flash_backward(const AtenTensorHandle tensors[10], int64_t max_q, int64_t max_k, double dropout_p,
                          bool is_causal, std::optional<double> scale, AtenTensorHandle grads[3]);
void stock_efficient_backward(const AtenTensorHandle tensors[9], double dropout_p, std::array<bool, 4> wanted,
                              bool is_causal, std::optional<double> scale, AtenTensorHandle grads[4]);

// Flash of sequences on end, or of (B, S, H, D), and of windows: aten::_flash_attention_forward, below what may stand
// over it. Tensors may be null from cu_q on.
struct OnEndCall {
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
void stock_on_end_forward(const OnEndCall& call, AtenTensorHandle results[5]);
AtenTensorHandle stock_on_end_into(AtenTensorHandle out, const OnEndCall& call);  // logsumexp
// `tensors`: those of the backward's arguments, in order; of the call its numbers.
void stock_on_end_backward(const AtenTensorHandle tensors[10], const OnEndCall& call, AtenTensorHandle grads[3]);

// The efficient attention of (B, S, H, D) or sequences on end: aten::_efficient_attention_forward. Tensors may be null
// from bias on. mask_type: 0 none, 1 causal from the top left, 2 from the bottom right.
struct RowsCall {
  AtenTensorHandle q, k, v, bias, cu_q, cu_k;
  std::optional<int64_t> max_q, max_k;
  double dropout_p;
  int64_t mask_type;
  bool needs_lse;
  std::optional<double> scale;
  AtenTensorHandle used_k;
  std::optional<int64_t> window;
};
struct RowsResult {
  AtenTensorHandle tensors[4];  // output, logsumexp, philox_seed, philox_offset
  int64_t max_q, max_k;
};
bool has_stock_rows();
RowsResult stock_rows_forward(const RowsCall& call);
// What its backward takes besides: of the call its operands, numbers and lengths.
struct RowsGradients {
  AtenTensorHandle grad_out, out, lse, seed, offset;
  bool bias_grad, one_storage;
  std::optional<int64_t> splits;
};
void stock_rows_backward(const RowsCall& call, const RowsGradients& given, AtenTensorHandle grads[4]);

}  // namespace flashplug
