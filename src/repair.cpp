// Stock's attention, made right for the calls that stay with it: kernels of ours over stock's, which hand them operands
// that they take for what they are (torch 2.11, cuDNN 9.19, H100; calls that need no repair pass untouched).
//
// Flash and efficient: the backward reads grad_out 16 bytes at a time, wherever it lies: the CUDA context ends, or it
// refuses. Copied.
// cuDNN:
// - It reads with TMA, and nobody looks whether addresses and strides are multiples of 16 bytes: others are rounded
//   down, and the numbers are those of other elements (one row or one key: the CUDA context ends). Copied.
// - A broadcast query with Dv != D asks for an output whose rows are no consecutive elements: refused, and the second
//   such call ends the process. Copied.
// - The backward keeps its plans by the sizes and strides of query, key and value alone; those of `out` and `grad_out`
//   are of the call that built the plan. A later call whose grad_out lies in memory in another order, (B, S, H, D)
//   against (B, H, S, D), gets wrong gradients. Both are put in one order, which depends on the query alone. Plans from
//   before we were in place are out of reach, too: a plan is also kept by the bits of dropout_p (as float), so our
//   calls say the number beside the caller's (-0 for 0), which up to 1/2 keeps 1 - p as it is, and which no other call
//   says.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <mutex>
#include <vector>

#include "attention.h"

namespace flashplug {

namespace {

using torch::stable::detail::StableLibrary;

// What stock itself refuses, or makes nothing of, it gets as it is.
bool four_dims(std::initializer_list<AtenTensorHandle> tensors) {
  const auto has_four = [](AtenTensorHandle tensor) {
    bool defined = false;
    int64_t dims = 0;
    return aoti_torch_is_defined(tensor, &defined) == 0 && defined && aoti_torch_get_dim(tensor, &dims) == 0 &&
           dims == 4;
  };
  return std::all_of(tensors.begin(), tensors.end(), has_four);
}

Owned for_cudnn(AtenTensorHandle query, bool mixed_dims) {
  return mixed_dims && layout_of(shape_of(query), 0).broadcast ? packed_copy(query) : readable(query);
}

bool mixed_dims(AtenTensorHandle query, AtenTensorHandle value) {
  return shape_of(query).size[3] != shape_of(value).size[3];
}

// query, key, value, attn_bias?, compute_log_sumexp, dropout_p, is_causal, return_debug_mask, scale? -> output,
// logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, philox_seed, philox_offset, debug_attn_mask
void cudnn_forward_kernel(StableIValue* stack, uint64_t, uint64_t) {
  const Owned q = box::to_tensor(stack[0]), k = box::to_tensor(stack[1]), v = box::to_tensor(stack[2]),
              bias = box::to_optional_tensor(stack[3]);
  RepairedForward result = repaired_cudnn_forward(
      {q.get(), k.get(), v.get(), bias.defined() ? bias.get() : nullptr, box::to<bool>(stack[4]),
       box::to<double>(stack[5]), box::to<bool>(stack[6]), box::to<bool>(stack[7]), box::to_optional_double(stack[8])});
  constexpr int places[] = {0, 1, 2, 3, 6, 7, 8};  // of the tensors among the results
  for (size_t i = 0; i < std::size(places); ++i) stack[places[i]] = box::from_tensor(std::move(result.tensors[i]));
  stack[4] = box::from(result.max_q);
  stack[5] = box::from(result.max_k);
}

constexpr int kTensors = 11;  // the first arguments: grad_out, query, key, value, out, and six that are passed on
constexpr int kGradOut = 0, kQuery = 1, kKey = 2, kValue = 3, kOut = 4;

double its_neighbour(double dropout_p) {
  return dropout_p == 0.0 ? -0.0 : std::nextafter(static_cast<float>(dropout_p), 0.0f);
}

// Of four-dimensional tensors: what cuDNN takes for what it is. Returns the operands that were given.
std::array<Owned, 3> mend(Owned (&tensors)[kTensors]) {
  std::array<Owned, 3> given;
  for (int i = 0; i < 3; ++i) given[i] = Owned::share(tensors[kQuery + i].get());
  tensors[kQuery] = for_cudnn(given[0].get(), mixed_dims(given[0].get(), given[2].get()));
  for (int i : {kKey, kValue}) tensors[i] = readable(tensors[i].get());
  const Shape out = shape_of(tensors[kOut].get());
  int64_t stride[4];
  output_strides(shape_of(tensors[kQuery].get()), out.size, stride);
  for (int i : {kGradOut, kOut}) tensors[i] = readable(under_strides(tensors[i].get(), stride).get());
  return given;
}

// ... max_q, max_k, dropout_p, is_causal, scale? -> dq, dk, dv
void cudnn_backward_kernel(StableIValue* stack, uint64_t, uint64_t) {
  Owned tensors[kTensors];
  for (int i = 0; i < kTensors; ++i) tensors[i] = box::to_tensor(stack[i]);
  const auto max_q = box::to<int64_t>(stack[kTensors]), max_k = box::to<int64_t>(stack[kTensors + 1]);
  const auto dropout_p = box::to<double>(stack[kTensors + 2]);
  const auto is_causal = box::to<bool>(stack[kTensors + 3]);
  const std::optional<double> scale = box::to_optional_double(stack[kTensors + 4]);
  std::array<Owned, 3> given;
  const bool mendable = four_dims({tensors[kGradOut].get(), tensors[kQuery].get(), tensors[kKey].get(),
                                   tensors[kValue].get(), tensors[kOut].get()});
  if (mendable) given = mend(tensors);
  AtenTensorHandle borrowed[kTensors], grads[3];
  for (int i = 0; i < kTensors; ++i) borrowed[i] = tensors[i].get();
  stock_cudnn_backward(borrowed, max_q, max_k, its_neighbour(dropout_p), is_causal, scale, grads);
  count(Path::kRepairedBackward);
  for (int i = 0; i < 3; ++i) {
    Owned grad(grads[i]);
    if (mendable && grad.defined()) grad = laid_out_like(std::move(grad), given[i].get());
    stack[i] = box::from_tensor(std::move(grad));
  }
}

// Flash's and the efficient backward. Stock itself copies rows that are no consecutive elements.
Owned to_grad_out(StableIValue value) {
  Owned grad_out = box::to_tensor(value);
  const bool rows = four_dims({grad_out.get()}) && shape_of(grad_out.get()).stride[3] == 1;
  return rows ? readable(grad_out.get()) : std::move(grad_out);
}

// grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, philox_seed,
// philox_offset, scale? -> dq, dk, dv
void flash_backward_kernel(StableIValue* stack, uint64_t, uint64_t) {
  constexpr int places[] = {0, 1, 2, 3, 4, 5, 6, 7, 12, 13};
  Owned tensors[std::size(places)];
  AtenTensorHandle borrowed[std::size(places)], grads[3];
  for (size_t i = 0; i < std::size(places); ++i) {
    tensors[i] = i == kGradOut ? to_grad_out(stack[i]) : box::to_tensor(stack[places[i]]);
    borrowed[i] = tensors[i].get();
  }
  stock_flash_backward(borrowed, box::to<int64_t>(stack[8]), box::to<int64_t>(stack[9]), box::to<double>(stack[10]),
                       box::to<bool>(stack[11]), box::to_optional_double(stack[14]), grads);
  for (int i = 0; i < 3; ++i) stack[i] = box::from_tensor(Owned(grads[i]));
}

// grad_out, query, key, value, attn_bias, out, logsumexp, philox_seed, philox_offset, dropout_p, grad_input_mask,
// is_causal, scale? -> dq, dk, dv, d(attn_bias)
void efficient_backward_kernel(StableIValue* stack, uint64_t, uint64_t) {
  constexpr int tensor_count = 9;
  Owned tensors[tensor_count];
  AtenTensorHandle borrowed[tensor_count], grads[4];
  for (int i = 0; i < tensor_count; ++i) {
    tensors[i] = i == kGradOut ? to_grad_out(stack[i]) : box::to_tensor(stack[i]);
    borrowed[i] = tensors[i].get();
  }
  const auto listed = box::to<std::vector<bool>>(stack[10]);
  std::array<bool, 4> wanted{};
  std::copy_n(listed.begin(), std::min(listed.size(), wanted.size()), wanted.begin());
  stock_efficient_backward(borrowed, box::to<double>(stack[9]), wanted, box::to<bool>(stack[11]),
                           box::to_optional_double(stack[12]), grads);
  for (int i = 0; i < 4; ++i) stack[i] = box::from_tensor(Owned(grads[i]));
}

std::mutex repair_mutex;
std::unique_ptr<StableLibrary>& library() {
  static auto* instance = new std::unique_ptr<StableLibrary>();
  return *instance;
}

}  // namespace

RepairedForward repaired_cudnn_forward(CudnnForwardCall call) {
  const AtenTensorHandle query = call.q;
  const bool mendable = four_dims({call.q, call.k, call.v});
  Owned q, k, v;
  if (mendable) {
    q = for_cudnn(call.q, mixed_dims(call.q, call.v)), k = readable(call.k), v = readable(call.v);
    call.q = q.get(), call.k = k.get(), call.v = v.get();
  }
  const CudnnResult raw = stock_cudnn_forward(call);
  RepairedForward result{{}, raw.max_q, raw.max_k};
  for (size_t i = 0; i < std::size(raw.tensors); ++i) result.tensors[i] = Owned(raw.tensors[i]);
  Owned& out = result.tensors[0];
  if (mendable && out.defined()) out = in_output_layout(std::move(out), query);  // of empty operands stock makes none
  return result;
}

void repair(bool on) {
  std::lock_guard<std::mutex> lock(repair_mutex);
  if (on == (library() != nullptr)) return;
  if (!on) return library().reset();  // stock's kernels are in place again
  if (!has_cudnn_forward() || !has_stock_backwards())
    throw std::runtime_error("torch_flashplug: this torch has no CUDA attention to repair");
  auto made = std::make_unique<StableLibrary>(StableLibrary::Kind::IMPL, "aten", "CUDA", __FILE__, __LINE__);
  made->impl("_scaled_dot_product_cudnn_attention", &cudnn_forward_kernel);
  made->impl("_scaled_dot_product_cudnn_attention_backward", &cudnn_backward_kernel);
  made->impl("_scaled_dot_product_flash_attention_backward", &flash_backward_kernel);
  made->impl("_scaled_dot_product_efficient_attention_backward", &efficient_backward_kernel);
  library() = std::move(made);
}

}  // namespace flashplug
