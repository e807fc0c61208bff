// Stock's attention kernels for CUDA, called past the dispatcher by their mangled names. The names spell all arguments
// but no results, so stock_workarounds.py compares the schemas. cuDNN's names were present in all supported versions.
// The other names were seen in 2.11, and follow from the declarations of 2.13.
#include <dlfcn.h>

#include <array>
#include <cstdint>
#include <optional>
#include <tuple>
#include <type_traits>

#include "stock/stock.h"
#include "stock/torch_symbols.h"

namespace flashplug {

namespace {

// at::cuda::_scaled_dot_product_{cudnn, flash, efficient}_attention and ..._backward, with all arguments.
constexpr const char* kCudnnForwardSymbol =
    "_ZN2at4cuda35_scaled_dot_product_cudnn_attentionERKNS_6TensorES3_S3_RKSt8optionalIS1_EbdbbS4_IdE";
constexpr const char* kCudnnBackwardSymbol =
    "_ZN2at4cuda44_scaled_dot_product_cudnn_attention_backwardERKNS_6TensorES3_S3_S3_S3_S3_S3_S3_S3_S3_S3_"
    "lldbSt8optionalIdE";
constexpr const char* kFlashForwardSymbol =
    "_ZN2at4cuda35_scaled_dot_product_flash_attentionERKNS_6TensorES3_S3_dbbSt8optionalIdE";
constexpr const char* kFlashBackwardSymbol =
    "_ZN2at4cuda44_scaled_dot_product_flash_attention_backwardERKNS_6TensorES3_S3_S3_S3_S3_S3_S3_lldbS3_S3_"
    "St8optionalIdE";
constexpr const char* kEfficientForwardSymbol =
    "_ZN2at4cuda39_scaled_dot_product_efficient_attentionERKNS_6TensorES3_S3_RKSt8optionalIS1_EbdbS4_IdE";
constexpr const char* kEfficientBackwardSymbol =
    "_ZN2at4cuda48_scaled_dot_product_efficient_attention_backwardERKNS_6TensorES3_S3_S3_S3_S3_S3_S3_S3_"
    "dSt5arrayIbLm4EEbSt8optionalIdE";

// at::cuda::_flash_attention_forward, whose later form also takes pages and splits; ..._no_dropout_inplace, which
// exists only beside the later form; and ..._backward. Seen in torch 2.11, 2.12 and 2.14.
constexpr const char* kVarlenFlashForwardSymbol =
    "_ZN2at4cuda24_flash_attention_forwardERKNS_6TensorES3_S3_RKSt8optionalIS1_ES7_lldbbS4_IdES4_IlES9_S7_S7_";
constexpr const char* kPagedVarlenFlashForwardSymbol =
    "_ZN2at4cuda24_flash_attention_forwardERKNS_6TensorES3_S3_RKSt8optionalIS1_ES7_lldbbS4_IdES4_IlES9_S7_S7_S7_S9_";
constexpr const char* kVarlenFlashOutSymbol =
    "_ZN2at4cuda43_flash_attention_forward_no_dropout_inplaceERNS_6TensorERKS1_S4_S4_RKSt8optionalIS1_ES8_lldbbS5_IdE"
    "S5_IlESA_S8_S8_S8_SA_";
constexpr const char* kVarlenFlashBackwardSymbol =
    "_ZN2at4cuda25_flash_attention_backwardERKNS_6TensorES3_S3_S3_S3_S3_S3_S3_lldbS3_S3_St8optionalIdES4_IlES6_";

// at::cuda::_efficient_attention_forward and ..._backward. Seen in torch 2.12, 2.14 and 2.15.
constexpr const char* kEfficientOpForwardSymbol =
    "_ZN2at4cuda28_efficient_attention_forwardERKNS_6TensorES3_S3_RKSt8optionalIS1_ES7_S7_S4_IlES8_dlbS4_IdES7_S8_";
constexpr const char* kEfficientOpBackwardSymbol =
    "_ZN2at4cuda29_efficient_attention_backwardERKNS_6TensorES3_S3_S3_RKSt8optionalIS1_ES3_S7_S7_llS3_dS3_S3_lb"
    "S4_IdES4_IlES9_b";

// Classes as returned by the C++ ABI: in memory, never in registers, because the classes have destructors.
struct TensorValue {  // at::Tensor: a single pointer
  void* impl = nullptr;
  TensorValue() = default;
  TensorValue(const TensorValue&) = delete;
  ~TensorValue() {}
  // Return a handle, which points at a separate at::Tensor on the heap. The handle takes over the reference.
  AtenTensorHandle handle() const { return reinterpret_cast<AtenTensorHandle>(new void*(impl)); }
};
struct SymIntValue {  // c10::SymInt: the number itself, unless symbolic
  int64_t number = 0;
  SymIntValue() = default;
  SymIntValue(const SymIntValue&) = delete;
  ~SymIntValue() {}
};
using T = TensorValue;
using Reference = const void*;  // const at::Tensor&
using OptionalReference = const std::optional<void*>*;
using MaybeScale = std::optional<double>;
using MaybeInt = std::optional<int64_t>;
using Five = std::tuple<T, T, T, T, T>;

using Fused = std::tuple<T, T, T, T, SymIntValue, SymIntValue, T, T, T>;

// Stock's kernels past the dispatcher; null if absent from the running torch.
struct StockKernels {
  Fused (*cudnn_forward)(Reference, Reference, Reference, OptionalReference, bool, double, bool, bool,
                         MaybeScale) = nullptr;
  Fused (*flash_forward)(Reference, Reference, Reference, double, bool, bool, MaybeScale) = nullptr;
  std::tuple<T, T, T, T> (*efficient_forward)(Reference, Reference, Reference, OptionalReference, bool, double, bool,
                                              MaybeScale) = nullptr;
  std::tuple<T, T, T> (*cudnn_backward)(Reference, Reference, Reference, Reference, Reference, Reference, Reference,
                                        Reference, Reference, Reference, Reference, int64_t, int64_t, double, bool,
                                        MaybeScale) = nullptr;
  std::tuple<T, T, T> (*flash_backward)(Reference, Reference, Reference, Reference, Reference, Reference, Reference,
                                        Reference, int64_t, int64_t, double, bool, Reference, Reference,
                                        MaybeScale) = nullptr;
  std::tuple<T, T, T, T> (*efficient_backward)(Reference, Reference, Reference, Reference, Reference, Reference,
                                               Reference, Reference, Reference, double, std::array<bool, 4>, bool,
                                               MaybeScale) = nullptr;
  Five (*varlen_flash_forward)(Reference, Reference, Reference, OptionalReference, OptionalReference, int64_t, int64_t,
                               double, bool, bool, MaybeScale, MaybeInt, MaybeInt, OptionalReference,
                               OptionalReference) = nullptr;
  Five (*paged_varlen_flash_forward)(Reference, Reference, Reference, OptionalReference, OptionalReference, int64_t,
                                     int64_t, double, bool, bool, MaybeScale, MaybeInt, MaybeInt, OptionalReference,
                                     OptionalReference, OptionalReference, MaybeInt) = nullptr;
  T (*varlen_flash_out)(Reference, Reference, Reference, Reference, OptionalReference, OptionalReference, int64_t,
                        int64_t, double, bool, bool, MaybeScale, MaybeInt, MaybeInt, OptionalReference,
                        OptionalReference, OptionalReference, MaybeInt) = nullptr;
  std::tuple<T, T, T> (*varlen_flash_backward)(Reference, Reference, Reference, Reference, Reference, Reference,
                                               Reference, Reference, int64_t, int64_t, double, bool, Reference,
                                               Reference, MaybeScale, MaybeInt, MaybeInt) = nullptr;
  std::tuple<T, T, T, T, SymIntValue, SymIntValue> (*efficient_op_forward)(Reference, Reference, Reference,
                                                                           OptionalReference, OptionalReference,
                                                                           OptionalReference, MaybeInt, MaybeInt,
                                                                           double, int64_t, bool, MaybeScale,
                                                                           OptionalReference, MaybeInt) = nullptr;
  std::tuple<T, T, T, T> (*efficient_op_backward)(Reference, Reference, Reference, Reference, OptionalReference,
                                                  Reference, OptionalReference, OptionalReference, int64_t, int64_t,
                                                  Reference, double, Reference, Reference, int64_t, bool, MaybeScale,
                                                  MaybeInt, MaybeInt, bool) = nullptr;
};

const StockKernels& stock_kernels() {
  static const StockKernels instance = [] {
    StockKernels kernels;
    void* cuda = in_process("libtorch_cuda.so");
    if (cuda == nullptr) return kernels;
    const auto look = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(cuda, name));
    };
    look(kernels.cudnn_forward, kCudnnForwardSymbol);
    look(kernels.flash_forward, kFlashForwardSymbol);
    look(kernels.efficient_forward, kEfficientForwardSymbol);
    look(kernels.cudnn_backward, kCudnnBackwardSymbol);
    look(kernels.flash_backward, kFlashBackwardSymbol);
    look(kernels.efficient_backward, kEfficientBackwardSymbol);
    look(kernels.varlen_flash_forward, kVarlenFlashForwardSymbol);
    look(kernels.paged_varlen_flash_forward, kPagedVarlenFlashForwardSymbol);
    look(kernels.varlen_flash_out, kVarlenFlashOutSymbol);
    look(kernels.varlen_flash_backward, kVarlenFlashBackwardSymbol);
    look(kernels.efficient_op_forward, kEfficientOpForwardSymbol);
    look(kernels.efficient_op_backward, kEfficientOpBackwardSymbol);
    return kernels;
  }();
  return instance;
}

template <typename Tuple>
void to_handles(const Tuple& tensors, AtenTensorHandle* handles) {
  std::apply([&](const auto&... tensor) { ((*handles++ = tensor.handle()), ...); }, tensors);
}

FusedResult to_handles(const Fused& results) {
  const auto& [out, lse, cum_q, cum_k, max_q, max_k, seed, offset, debug] = results;
  FusedResult handles{{}, max_q.number, max_k.number};
  to_handles(std::tie(out, lse, cum_q, cum_k, seed, offset, debug), handles.tensors);
  return handles;
}

// Return the at::Tensor behind a handle, which is a single pointer. Null stands for no tensor.
std::optional<void*> optional_tensor(AtenTensorHandle handle) {
  return handle == nullptr ? std::nullopt : std::optional<void*>(*reinterpret_cast<void**>(handle));
}

}  // namespace

int stock_backends() {
  const StockKernels& stock = stock_kernels();
  return (stock.cudnn_forward && stock.cudnn_backward ? kStockCudnn : 0) |
         (stock.flash_forward && stock.flash_backward ? kStockFlash : 0) |
         (stock.efficient_forward && stock.efficient_backward ? kStockEfficient : 0);
}

FusedResult stock_cudnn_forward(const CudnnForwardCall& c) {
  const std::optional<void*> bias = optional_tensor(c.bias);
  return to_handles(stock_kernels().cudnn_forward(c.q, c.k, c.v, &bias, c.needs_lse, c.dropout_p, c.is_causal,
                                                  c.returns_debug_mask, c.scale));
}

FusedResult stock_flash_forward(const FlashForwardCall& c) {
  return to_handles(
      stock_kernels().flash_forward(c.q, c.k, c.v, c.dropout_p, c.is_causal, c.returns_debug_mask, c.scale));
}

void stock_efficient_forward(const EfficientForwardCall& c, AtenTensorHandle results[4]) {
  const std::optional<void*> bias = optional_tensor(c.bias);
  to_handles(stock_kernels().efficient_forward(c.q, c.k, c.v, &bias, c.needs_lse, c.dropout_p, c.is_causal, c.scale),
             results);
}

void stock_cudnn_backward(const AtenTensorHandle t[11], int64_t max_q, int64_t max_k, double dropout_p, bool is_causal,
                          MaybeScale scale, AtenTensorHandle grads[3]) {
  to_handles(stock_kernels().cudnn_backward(t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8], t[9], t[10], max_q,
                                            max_k, dropout_p, is_causal, scale),
             grads);
}

void stock_flash_backward(const AtenTensorHandle t[10], int64_t max_q, int64_t max_k, double dropout_p, bool is_causal,
                          MaybeScale scale, AtenTensorHandle grads[3]) {
  to_handles(stock_kernels().flash_backward(t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], max_q, max_k, dropout_p,
                                            is_causal, t[8], t[9], scale),
             grads);
}

void stock_efficient_backward(const AtenTensorHandle t[9], double dropout_p, std::array<bool, 4> wanted_grads,
                              bool is_causal, MaybeScale scale, AtenTensorHandle grads[4]) {
  to_handles(stock_kernels().efficient_backward(t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8], dropout_p,
                                                wanted_grads, is_causal, scale),
             grads);
}

bool has_stock_varlen_flash() {
  const StockKernels& stock = stock_kernels();
  return (stock.varlen_flash_forward || stock.paged_varlen_flash_forward) && stock.varlen_flash_backward;
}
bool has_stock_varlen_flash_out() { return stock_kernels().varlen_flash_out != nullptr; }

void stock_varlen_flash_forward(const VarlenFlashCall& c, AtenTensorHandle results[5]) {
  const auto cu_seqlens_q = optional_tensor(c.cu_seqlens_q), cu_seqlens_k = optional_tensor(c.cu_seqlens_k),
             seqused_k = optional_tensor(c.seqused_k), alibi = optional_tensor(c.alibi),
             block_table = optional_tensor(c.block_table);
  const StockKernels& stock = stock_kernels();
  if (stock.paged_varlen_flash_forward)
    return to_handles(stock.paged_varlen_flash_forward(c.q, c.k, c.v, &cu_seqlens_q, &cu_seqlens_k, c.max_q, c.max_k,
                                                       c.dropout_p, c.is_causal, c.returns_debug_mask, c.scale, c.left,
                                                       c.right, &seqused_k, &alibi, &block_table, c.splits),
                      results);
  to_handles(
      stock.varlen_flash_forward(c.q, c.k, c.v, &cu_seqlens_q, &cu_seqlens_k, c.max_q, c.max_k, c.dropout_p,
                                 c.is_causal, c.returns_debug_mask, c.scale, c.left, c.right, &seqused_k, &alibi),
      results);
}

AtenTensorHandle stock_varlen_flash_out(AtenTensorHandle out, const VarlenFlashCall& c) {
  const auto cu_seqlens_q = optional_tensor(c.cu_seqlens_q), cu_seqlens_k = optional_tensor(c.cu_seqlens_k),
             seqused_k = optional_tensor(c.seqused_k), alibi = optional_tensor(c.alibi),
             block_table = optional_tensor(c.block_table);
  return stock_kernels()
      .varlen_flash_out(out, c.q, c.k, c.v, &cu_seqlens_q, &cu_seqlens_k, c.max_q, c.max_k, c.dropout_p, c.is_causal,
                        c.returns_debug_mask, c.scale, c.left, c.right, &seqused_k, &alibi, &block_table, c.splits)
      .handle();
}

void stock_varlen_flash_backward(const AtenTensorHandle t[10], const VarlenFlashCall& c, AtenTensorHandle grads[3]) {
  to_handles(stock_kernels().varlen_flash_backward(t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], c.max_q, c.max_k,
                                                   c.dropout_p, c.is_causal, t[8], t[9], c.scale, c.left, c.right),
             grads);
}

bool has_stock_efficient_op() { return stock_kernels().efficient_op_forward && stock_kernels().efficient_op_backward; }

EfficientResult stock_efficient_op_forward(const EfficientCall& c) {
  const auto bias = optional_tensor(c.bias), cu_seqlens_q = optional_tensor(c.cu_seqlens_q),
             cu_seqlens_k = optional_tensor(c.cu_seqlens_k), seqused_k = optional_tensor(c.seqused_k);
  const auto results =
      stock_kernels().efficient_op_forward(c.q, c.k, c.v, &bias, &cu_seqlens_q, &cu_seqlens_k, c.max_q, c.max_k,
                                           c.dropout_p, c.mask_type, c.needs_lse, c.scale, &seqused_k, c.window);
  const auto& [out, lse, seed, offset, max_q, max_k] = results;
  EfficientResult handles{{}, max_q.number, max_k.number};
  to_handles(std::tie(out, lse, seed, offset), handles.tensors);
  return handles;
}

void stock_efficient_op_backward(const EfficientCall& c, const EfficientGradients& g, AtenTensorHandle grads[4]) {
  const auto bias = optional_tensor(c.bias), cu_seqlens_q = optional_tensor(c.cu_seqlens_q),
             cu_seqlens_k = optional_tensor(c.cu_seqlens_k);
  to_handles(stock_kernels().efficient_op_backward(g.grad_out, c.q, c.k, c.v, &bias, g.out, &cu_seqlens_q,
                                                   &cu_seqlens_k, c.max_q.value_or(0), c.max_k.value_or(0), g.lse,
                                                   c.dropout_p, g.seed, g.offset, c.mask_type, g.bias_grad, c.scale,
                                                   g.splits, c.window, g.one_storage),
             grads);
}

}  // namespace flashplug
