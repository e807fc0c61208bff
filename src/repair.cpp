// Stock's cuDNN backward, made right (torch 2.11 and later, https://github.com/pytorch/pytorch, MHA.cpp).
//
// It keeps its plans by the sizes and strides of query, key and value alone; the strides of `out` and `grad_out` are
// those of the call that built the plan. A later call whose grad_out lies in memory in another order, (B, S, H, D)
// against (B, H, S, D), gets wrong gradients without a word. A kernel of ours over stock's puts both in one order,
// which depends on the query alone. Plans from before it was in place are out of reach, too: a plan is also kept by the
// bits of dropout_p, so our calls say the number beside the caller's (-0 for 0), which means the same and no other call
// says.
#include <torch/csrc/stable/library.h>

#include <cmath>
#include <memory>

#include "attention.h"

namespace flashplug {

namespace {

constexpr const char* kOp = "_scaled_dot_product_cudnn_attention_backward";
constexpr int kTensors = 11;  // the first arguments: grad_out, query, key, value, out, and six that are passed on
constexpr int kGradOut = 0, kQuery = 1, kOut = 4;

double its_neighbour(double dropout_p) { return dropout_p == 0.0 ? -0.0 : std::nextafter(dropout_p, 0.0); }

// ... max_q, max_k, dropout_p, is_causal, scale? -> dq, dk, dv
void repaired_backward(StableIValue* stack, uint64_t, uint64_t) {
  Owned tensors[kTensors];
  for (int i = 0; i < kTensors; ++i) tensors[i] = box::to_tensor(stack[i]);
  const auto max_q = box::to<int64_t>(stack[kTensors]), max_k = box::to<int64_t>(stack[kTensors + 1]);
  const auto dropout_p = box::to<double>(stack[kTensors + 2]);
  const auto is_causal = box::to<bool>(stack[kTensors + 3]);
  const std::optional<double> scale = box::to_optional_double(stack[kTensors + 4]);
  const Shape out = shape_of(tensors[kOut].get());
  int64_t stride[4];
  output_strides(shape_of(tensors[kQuery].get()), out.size, stride);
  for (int i : {kGradOut, kOut}) tensors[i] = under_strides(tensors[i].get(), stride);
  AtenTensorHandle borrowed[kTensors];
  for (int i = 0; i < kTensors; ++i) borrowed[i] = tensors[i].get();
  AtenTensorHandle grads[3];
  cudnn_backward(borrowed, max_q, max_k, its_neighbour(dropout_p), is_causal, scale, grads);
  count(Path::kRepairedBackward);
  for (int i = 0; i < 3; ++i) stack[i] = box::from_tensor(Owned(grads[i]));
}

std::unique_ptr<torch::stable::detail::StableLibrary>& library() {
  static auto* instance = new std::unique_ptr<torch::stable::detail::StableLibrary>();
  return *instance;
}

}  // namespace

void repair(bool on) {
  library().reset();  // stock's kernel is in place again
  if (!on) return;
  if (!has_cudnn_backward()) throw std::runtime_error("torch_flashplug: this torch has no cuDNN backward to repair");
  using torch::stable::detail::StableLibrary;
  library() = std::make_unique<StableLibrary>(StableLibrary::Kind::IMPL, "aten", "CUDA", __FILE__, __LINE__);
  library()->impl(kOp, &repaired_backward);
}

}  // namespace flashplug
