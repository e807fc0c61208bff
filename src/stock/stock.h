// The attention kernels of stock. src/stock/ offers:
//
// - stock.cpp: calls through the dispatcher, with operands of this project;
// - stock_kernels.cpp: calls past the dispatcher, by mangled names;
// - torch_symbols.h: functions of libtorch and of the CUDA driver outside the stable ABI.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "core/attention_call.h"

namespace flashplug {

// ---- stock.cpp: stock's kernels, called through the dispatcher with operands of this project ----

// Run cuDNN's forward. Returns false if cuDNN refuses the call.
bool cudnn_forward(const ForwardCall& call, const CallFacts& p, ForwardResult* result);
bool efficient_can_run(const CallFacts& p);
ForwardResult efficient_forward(const ForwardCall& call, const CallFacts& p);
ForwardResult math_forward(const ForwardCall& call);
TensorHandle cached_math(const ForwardCall& call);  // for key and value in 8 bits, dequantized to 16 (quantized_kv.py)
// For key and value that were quantized ahead of the call (quantize_ahead.py). `precision`: number of the recipe.
TensorHandle quantize_kv_math(const ForwardCall& call, int64_t precision);
ForwardResult quantized_attention_math(const ForwardCall& call, int64_t precision);
ForwardResult paged_math(const ForwardCall& call);  // for a paged KV cache (paged.py)
// Reference math for windows (attention.py).
ForwardResult attention_math(const ForwardCall& call);
BackwardResult attention_math_backward(const BackwardCall& call);
// Reference math for block-sparse lists (block_sparse.py).
ForwardResult listed_math(const ForwardCall& call);
BackwardResult listed_math_backward(const BackwardCall& call);
BackwardResult efficient_backward(const BackwardCall& call, const CallFacts& p);
BackwardResult math_backward(const BackwardCall& call);
// Pad the rows of an LSE (B, H, Sq) to a multiple of 32, as the efficient backward reads them. The padding is +inf, so
// that absent rows have probability 0.
TensorHandle pad_lse(AtenTensorHandle lse);

// ---- stock_kernels.cpp ----

// Stock's own attention kernels, called past the dispatcher; stock_workarounds.cpp sits above them. All exceptions pass
// through, torch.OutOfMemoryError too.
enum StockBackend : int { kStockCudnn = 1, kStockFlash = 2, kStockEfficient = 4 };
constexpr const char* kStockBackendNames[] = {"cudnn", "flash", "efficient"};
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
void stock_efficient_backward(const AtenTensorHandle tensors[9], double dropout_p, std::array<bool, 4> wanted_grads,
                              bool is_causal, std::optional<double> scale, AtenTensorHandle grads[4]);

// Arguments of stock's flash attention for packed sequences, for (B, S, H, D), and for windows:
// aten::_flash_attention_forward, called below any override. Tensors from `cu_seqlens_q` on may be null.
struct VarlenFlashCall {
  AtenTensorHandle q, k, v, cu_seqlens_q, cu_seqlens_k;
  int64_t max_q, max_k;
  double dropout_p;
  bool is_causal, returns_debug_mask;
  std::optional<double> scale;
  std::optional<int64_t> left, right;
  AtenTensorHandle seqused_k, alibi, block_table;
  std::optional<int64_t> splits;
};
bool has_stock_varlen_flash();
bool has_stock_varlen_flash_out();
// Results: output, logsumexp, rng_state, unused, debug mask.
void stock_varlen_flash_forward(const VarlenFlashCall& call, AtenTensorHandle results[5]);
AtenTensorHandle stock_varlen_flash_out(AtenTensorHandle out, const VarlenFlashCall& call);  // returns logsumexp
// `tensors`: the tensor arguments of the backward, in order. Numbers come from `call`.
void stock_varlen_flash_backward(const AtenTensorHandle tensors[10], const VarlenFlashCall& call,
                                 AtenTensorHandle grads[3]);

// Arguments of stock's efficient attention for (B, S, H, D) or packed sequences: aten::_efficient_attention_forward.
// Tensors from `bias` on may be null. `mask_type`: 0 none, 1 causal from the top left, 2 causal from the bottom right.
struct EfficientCall {
  AtenTensorHandle q, k, v, bias, cu_seqlens_q, cu_seqlens_k;
  std::optional<int64_t> max_q, max_k;
  double dropout_p;
  int64_t mask_type;
  bool needs_lse;
  std::optional<double> scale;
  AtenTensorHandle seqused_k;
  std::optional<int64_t> window;
};
struct EfficientResult {
  AtenTensorHandle tensors[4];  // output, logsumexp, philox_seed, philox_offset
  int64_t max_q, max_k;
};
bool has_stock_efficient_op();
EfficientResult stock_efficient_op_forward(const EfficientCall& call);
// Further arguments of the backward. Operands, numbers and lengths come from the `EfficientCall`.
struct EfficientGradients {
  AtenTensorHandle grad_out, out, lse, seed, offset;
  bool bias_grad, one_storage;
  std::optional<int64_t> splits;
};
void stock_efficient_op_backward(const EfficientCall& call, const EfficientGradients& gradients,
                                 AtenTensorHandle grads[4]);

}  // namespace flashplug
