// Workarounds for stock's attention kernels, for calls that stay with stock. Kernels registered over stock's hand stock
// operands in a correctly readable layout (torch 2.11, cuDNN 9.19, H100). Calls without need for a workaround pass
// untouched.
//
// - Alignment: all stock kernels read 16 bytes at a time. cuDNN and flash do not check whether addresses and strides
//   are multiples of 16 bytes. With TMA, cuDNN rounds addresses and strides down and reads wrong elements. With one row
//   or one key, cuDNN ends the CUDA context, as flash always does. The efficient attention checks some strides, even of
//   dims of size 1, and raises. Workaround: operands are copied.
// - Alignment of attn_mask: F.sdpa pads the rows, and nobody checks the address. The efficient attention reads the mask
//   16 bytes at a time, too: an fp32 mask ends the context, a 16-bit mask raises or ends the context. Workaround:
//   copied for the efficient attention. cuDNN takes any address, but not with dropout (misaligned address, or failure
//   of cuDNN's execute). Workaround: copied there.
// - Broadcast query with Dv != D: cuDNN is asked for an output with non-contiguous rows. The call raises, and the
//   second such call ends the process. Workaround: copied.
// - cuDNN's backward caches plans by the sizes and strides of query, key and value alone. The strides of `out` and
//   `grad_out` belong to the call that built the plan. A later call with a different order of grad_out in memory, (B,
//   S, H, D) against (B, H, S, D), gets wrong gradients. Workaround: both tensors are put in a fixed order, dependent
//   on the query alone. Plans from before the registration must stay out of reach, too. The cache key contains the bits
//   of dropout_p (as float). So the workaround passes the float next to the caller's value (-0 for 0), and no foreign
//   call passes such a number. The dropout mask stays the forward's mask (test_stock_workarounds.py).
// - Gradient of a float mask alone: F.sdpa asks the efficient forward for no LSE, but the backward reads the LSE. The
//   backward raises or, with one head, reads address 0. Workaround: the LSE is computed in the backward.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "core/core.h"
#include "core/schemas.h"
#include "core/values.h"
#include "hooks/hooks.h"
#include "operands/operands.h"
#include "stock/stock.h"

namespace flashplug {

namespace {

using torch::stable::detail::StableLibrary;

// Return true if all tensors have 4 dims. Calls that stock refuses or ignores pass unchanged.
bool four_dims(std::initializer_list<AtenTensorHandle> tensors) {
  const auto has_four = [](AtenTensorHandle tensor) {
    bool defined = false;
    int64_t dims = 0;
    return aoti_torch_is_defined(tensor, &defined) == 0 && defined && aoti_torch_get_dim(tensor, &dims) == 0 &&
           dims == 4;
  };
  return std::all_of(tensors.begin(), tensors.end(), has_four);
}

// ---- results of cuDNN and flash ----

OwnedFusedResult take_ownership(const FusedResult& raw) {
  OwnedFusedResult result{{}, raw.max_q, raw.max_k};
  for (size_t i = 0; i < std::size(raw.tensors); ++i) result.tensors[i] = TensorHandle(raw.tensors[i]);
  return result;
}

// Put the results on the stack. Flash's two dropout results have different names, but the same positions.
void put_results(OwnedFusedResult result, StableIValue* stack) {
  constexpr Schema op = kCudnnForward;
  constexpr int places[] = {op.result("output"),         op.result("logsumexp"),   op.result("cum_seq_q"),
                            op.result("cum_seq_k"),      op.result("philox_seed"), op.result("philox_offset"),
                            op.result("debug_attn_mask")};
  static_assert(op.result("max_q") == kFlashForward.result("max_q") &&
                op.result("debug_attn_mask") == kFlashForward.result("debug_attn_mask"));
  for (size_t i = 0; i < std::size(places); ++i) stack[places[i]] = box::from_tensor(std::move(result.tensors[i]));
  stack[op.result("max_q")] = box::from(result.max_q);
  stack[op.result("max_k")] = box::from(result.max_k);
}

// ---- cuDNN ----

// Return true if the rows of cuDNN's output would not be contiguous.
bool scatters_rows(AtenTensorHandle query, AtenTensorHandle value) {
  const Shape q = shape_of(query);
  return q.size[3] != shape_of(value).size[3] && layout_of(q, 0, element_bytes(query)).broadcast;
}

// Return true if cuDNN reads the operands correctly.
bool cudnn_can_read(AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v) {
  return is_readable(q) && is_readable(k) && is_readable(v) && !scatters_rows(q, v);
}

TensorHandle query_for_cudnn(AtenTensorHandle query, AtenTensorHandle value) {
  return scatters_rows(query, value) ? packed_copy(query) : readable(query);
}

// Copy a bias of 2 to 4 dims, without repeats of broadcast dims, into rows that begin at units of 16 bytes.
TensorHandle copy_aligned(AtenTensorHandle bias, int dims) {
  constexpr int64_t kPad = 16;  // F.sdpa pads rows to so many elements
  const Shape shape = shape_of(bias);
  int64_t size[4], stride[4];
  for (int i = 0; i < dims; ++i) size[i] = i < dims - 1 && shape.stride[i] == 0 ? 1 : shape.size[i];
  const TensorHandle copy = copy_of_padded_rows(bias, dims, size, shape.stride, kPad);
  const Shape copied = shape_of(copy.get());
  for (int i = 0; i < dims; ++i) stride[i] = size[i] < shape.size[i] ? 0 : copied.stride[i];
  return view(copy.get(), dims, shape.size, stride);
}

// Return a bias that cuDNN reads correctly with dropout: the bias itself, or a copy.
TensorHandle bias_beside_dropout(TensorHandle bias, double dropout_p) {
  int64_t dims = 0;
  const void* data = nullptr;
  if (dropout_p == 0.0 || !is_defined(bias.get()) || aoti_torch_get_dim(bias.get(), &dims) != 0 || dims < 2 || dims > 4)
    return bias;
  check_shim(torch_get_const_data_ptr(bias.get(), &data), "get_const_data_ptr");
  if (reinterpret_cast<int64_t>(data) % kUnitBytes == 0) return bias;
  return copy_aligned(bias.get(), static_cast<int>(dims));
}

void cudnn_forward_kernel(StableIValue* stack, uint64_t, uint64_t) {
  constexpr Schema op = kCudnnForward;
  const auto dropout_p = box::to<double>(stack[op["dropout_p"]]);
  const TensorHandle q = box::to_tensor(stack[op["query"]]), k = box::to_tensor(stack[op["key"]]),
                     v = box::to_tensor(stack[op["value"]]),
                     bias = bias_beside_dropout(box::to_optional_tensor(stack[op["attn_bias"]]), dropout_p);
  const CudnnForwardCall call{q.get(),
                              k.get(),
                              v.get(),
                              bias.defined() ? bias.get() : nullptr,
                              box::to<bool>(stack[op["compute_log_sumexp"]]),
                              dropout_p,
                              box::to<bool>(stack[op["is_causal"]]),
                              box::to<bool>(stack[op["return_debug_mask"]]),
                              box::to_optional_double(stack[op["scale"]])};
  put_results(readable_cudnn_forward(call), stack);
}

// The tensors of the backward are its first arguments.
constexpr int kTensors = kCudnnBackward["max_q"];
constexpr int kGradOut = kCudnnBackward["grad_out"], kQuery = kCudnnBackward["query"], kKey = kCudnnBackward["key"],
              kValue = kCudnnBackward["value"], kOut = kCudnnBackward["out"], kAttnBias = kCudnnBackward["attn_bias"];

// Return the float next to dropout_p, to avoid cached plans of foreign calls (see the file header).
double adjacent_float(double dropout_p) {
  return dropout_p == 0.0 ? -0.0 : std::nextafter(static_cast<float>(dropout_p), 0.0f);
}

// Return true if `out` and `grad_out` have the single order in memory with which plans are built.
bool in_order(const TensorHandle (&tensors)[kTensors]) {
  const Shape out = shape_of(tensors[kOut].get()), grad_out = shape_of(tensors[kGradOut].get());
  int64_t stride[4];
  output_strides(shape_of(tensors[kQuery].get()), out.size, stride);
  return std::equal(stride, stride + 4, out.stride) && std::equal(stride, stride + 4, grad_out.stride);
}

// Return true if cuDNN's backward needs copies or a different order of tensors.
bool needs_copies(const TensorHandle (&t)[kTensors]) {
  if (!four_dims({t[kGradOut].get(), t[kQuery].get(), t[kKey].get(), t[kValue].get(), t[kOut].get()})) return false;
  const bool operands = cudnn_can_read(t[kQuery].get(), t[kKey].get(), t[kValue].get());
  return !operands || !in_order(t) || !is_readable(t[kGradOut].get()) || !is_readable(t[kOut].get());
}

// Replace tensors that cuDNN would read wrongly. Returns the original operands.
std::array<TensorHandle, 3> replace_unreadable(TensorHandle (&tensors)[kTensors]) {
  std::array<TensorHandle, 3> originals;
  for (int i = 0; i < 3; ++i) originals[i] = TensorHandle::share(tensors[kQuery + i].get());
  tensors[kQuery] = query_for_cudnn(originals[0].get(), originals[2].get());
  for (int i : {kKey, kValue}) tensors[i] = readable(tensors[i].get());
  const Shape out = shape_of(tensors[kOut].get());
  int64_t stride[4];
  output_strides(shape_of(tensors[kQuery].get()), out.size, stride);
  for (int i : {kGradOut, kOut}) tensors[i] = readable(view_with_strides(tensors[i].get(), stride).get());
  return originals;
}

void cudnn_backward_kernel(StableIValue* stack, uint64_t, uint64_t) {
  constexpr Schema op = kCudnnBackward;
  TensorHandle tensors[kTensors];
  for (int i = 0; i < kTensors; ++i) tensors[i] = box::to_tensor(stack[i]);
  const auto max_q = box::to<int64_t>(stack[op["max_q"]]), max_k = box::to<int64_t>(stack[op["max_k"]]);
  const auto dropout_p = box::to<double>(stack[op["dropout_p"]]);
  const auto is_causal = box::to<bool>(stack[op["is_causal"]]);
  const std::optional<double> scale = box::to_optional_double(stack[op["scale"]]);
  std::array<TensorHandle, 3> originals;
  const bool copied = needs_copies(tensors);
  if (copied) originals = replace_unreadable(tensors);
  tensors[kAttnBias] = bias_beside_dropout(std::move(tensors[kAttnBias]), dropout_p);
  AtenTensorHandle borrowed[kTensors], grads[3];
  for (int i = 0; i < kTensors; ++i) borrowed[i] = tensors[i].get();
  stock_cudnn_backward(borrowed, max_q, max_k, adjacent_float(dropout_p), is_causal, scale, grads);
  count(Path::kRepairedBackward);
  for (int i = 0; i < 3; ++i) {
    TensorHandle grad(grads[i]);
    if (copied && grad.defined()) grad = in_operand_layout(std::move(grad), originals[i].get());
    stack[i] = box::from_tensor(std::move(grad));
  }
}

// ---- flash and efficient attention ----

// Return true if rows with a length in whole units of 16 bytes begin at unaligned addresses. Stock pads or refuses all
// other rows.
bool is_misaligned(AtenTensorHandle tensor) {
  const Shape shape = shape_of(tensor);
  const void* data = nullptr;
  const int64_t bytes = element_bytes(tensor);
  if (shape.stride[3] != 1 || shape.size[3] * bytes % kUnitBytes != 0) return false;
  check_shim(torch_get_const_data_ptr(tensor, &data), "get_const_data_ptr");
  bool off = reinterpret_cast<int64_t>(data) % kUnitBytes != 0;
  for (int i = 0; i < 3; ++i) off |= shape.size[i] > 1 && shape.stride[i] * bytes % kUnitBytes != 0;
  return off;
}

// Tensors from the stack, all taken before anything can fail. The tensors listed in `operands` are converted to
// readable layouts.
template <size_t n>
struct StackTensors {
  TensorHandle tensors[n];
  AtenTensorHandle handles[n];
  StackTensors(const StableIValue* stack, const int (&places)[n], std::initializer_list<int> operands) {
    for (size_t i = 0; i < n; ++i) tensors[i] = box::to_tensor(stack[places[i]]);
    for (int i : operands) tensors[i] = aligned(std::move(tensors[i]));
    for (size_t i = 0; i < n; ++i) handles[i] = tensors[i].get();
  }
};

template <size_t n>
void put_results(const AtenTensorHandle (&tensors)[n], StableIValue* stack) {
  for (size_t i = 0; i < n; ++i) stack[i] = box::from_tensor(TensorHandle(tensors[i]));
}

void flash_forward_kernel(StableIValue* stack, uint64_t, uint64_t) {
  constexpr Schema op = kFlashForward;
  const StackTensors inputs(stack, {op["query"], op["key"], op["value"]}, {0, 1, 2});
  const auto [q, k, v] = inputs.handles;
  put_results(take_ownership(stock_flash_forward(
                  {q, k, v, box::to<double>(stack[op["dropout_p"]]), box::to<bool>(stack[op["is_causal"]]),
                   box::to<bool>(stack[op["return_debug_mask"]]), box::to_optional_double(stack[op["scale"]])})),
              stack);
}

void efficient_forward_kernel(StableIValue* stack, uint64_t, uint64_t) {
  constexpr Schema op = kEfficientForward;
  TensorHandle bias = box::to_optional_tensor(stack[op["attn_bias"]]);
  const StackTensors inputs(stack, {op["query"], op["key"], op["value"]}, {0, 1, 2});
  bias = aligned_bias(std::move(bias));
  const auto [q, k, v] = inputs.handles;
  AtenTensorHandle results[4];
  stock_efficient_forward({q, k, v, bias.defined() ? bias.get() : nullptr,
                           box::to<bool>(stack[op["compute_log_sumexp"]]), box::to<double>(stack[op["dropout_p"]]),
                           box::to<bool>(stack[op["is_causal"]]), box::to_optional_double(stack[op["scale"]])},
                          results);
  put_results(results, stack);
}

void flash_backward_kernel(StableIValue* stack, uint64_t, uint64_t) {
  constexpr Schema op = kFlashBackward;
  const StackTensors inputs(stack,
                            {op["grad_out"], op["query"], op["key"], op["value"], op["out"], op["logsumexp"],
                             op["cum_seq_q"], op["cum_seq_k"], op["philox_seed"], op["philox_offset"]},
                            {0, 1, 2, 3, 4});
  AtenTensorHandle grads[3];
  stock_flash_backward(inputs.handles, box::to<int64_t>(stack[op["max_q"]]), box::to<int64_t>(stack[op["max_k"]]),
                       box::to<double>(stack[op["dropout_p"]]), box::to<bool>(stack[op["is_causal"]]),
                       box::to_optional_double(stack[op["scale"]]), grads);
  put_results(grads, stack);
}

// Compute the LSE by a second forward if the first forward has left `lse` empty. The result is undefined if `lse` has
// elements or is undefined, or if the query has no elements or not 4 dims.
TensorHandle missing_lse(AtenTensorHandle lse, const EfficientForwardCall& call) {
  const auto is_empty = [](AtenTensorHandle tensor) {
    int64_t numbers = 0;
    return aoti_torch_get_numel(tensor, &numbers) == 0 && numbers == 0;
  };
  if (!is_defined(lse) || !is_empty(lse) || !four_dims({call.q}) || is_empty(call.q)) return {};
  AtenTensorHandle results[4];
  stock_efficient_forward(call, results);
  constexpr int kLse = 1;
  TensorHandle owned[4];
  for (int i = 0; i < 4; ++i) owned[i] = TensorHandle(results[i]);
  return std::move(owned[kLse]);
}

void efficient_backward_kernel(StableIValue* stack, uint64_t, uint64_t) {
  constexpr Schema op = kEfficientBackward;
  StackTensors inputs(stack,
                      {op["grad_out_"], op["query"], op["key"], op["value"], op["attn_bias"], op["out"],
                       op["logsumexp"], op["philox_seed"], op["philox_offset"]},
                      {0, 1, 2, 3, 5});
  constexpr int kBias = 4;
  inputs.tensors[kBias] = aligned_bias(std::move(inputs.tensors[kBias]));
  inputs.handles[kBias] = inputs.tensors[kBias].get();
  const auto is_causal = box::to<bool>(stack[op["is_causal"]]);
  const std::optional<double> scale = box::to_optional_double(stack[op["scale"]]);
  const auto listed = box::to<std::vector<bool>>(stack[op["grad_input_mask"]]);
  std::array<bool, 4> wanted_grads{};
  std::copy_n(listed.begin(), std::min(listed.size(), wanted_grads.size()), wanted_grads.begin());
  auto& [grad_out, q, k, v, bias, out, lse, seed, offset] = inputs.handles;
  // Dropout does not change the LSE.
  const TensorHandle recomputed_lse =
      missing_lse(lse, {q, k, v, is_defined(bias) ? bias : nullptr, true, 0.0, is_causal, scale});
  if (recomputed_lse.defined()) lse = recomputed_lse.get();
  AtenTensorHandle grads[4];
  stock_efficient_backward(inputs.handles, box::to<double>(stack[op["dropout_p"]]), wanted_grads, is_causal, scale,
                           grads);
  put_results(grads, stack);
}

std::mutex repair_mutex;
std::atomic<int> repaired{0};  // sum of registered backends
std::unique_ptr<StableLibrary>& library() {
  static auto* instance = new std::unique_ptr<StableLibrary>();
  return *instance;
}

}  // namespace

TensorHandle aligned(TensorHandle tensor) {
  if (!four_dims({tensor.get()})) return tensor;
  return align_size_one_dims(is_misaligned(tensor.get()) ? dense_copy(tensor.get()) : std::move(tensor));
}

// Return a bias of 4 dims whose rows begin at units of 16 bytes: the bias itself, or a copy without repeats.
TensorHandle aligned_bias(TensorHandle bias) {
  if (!bias.defined() || !four_dims({bias.get()})) return bias;
  const Shape shape = shape_of(bias.get());
  if (shape.stride[3] != 1 || layout_in_memory(bias.get(), shape).align_bytes >= kUnitBytes) return bias;
  return copy_aligned(bias.get(), 4);
}

bool is_repaired(int backend) { return (repaired.load() & backend) != 0; }

OwnedFusedResult readable_cudnn_forward(CudnnForwardCall call) {
  if (!four_dims({call.q, call.k, call.v}) || cudnn_can_read(call.q, call.k, call.v))
    return take_ownership(stock_cudnn_forward(call));
  const AtenTensorHandle query = call.q;
  const TensorHandle q = query_for_cudnn(call.q, call.v), k = readable(call.k), v = readable(call.v);
  call.q = q.get(), call.k = k.get(), call.v = v.get();
  OwnedFusedResult result = take_ownership(stock_cudnn_forward(call));
  TensorHandle& out = result.tensors[0];
  if (out.defined()) out = in_output_layout(std::move(out), query);  // stock makes no output for empty operands
  return result;
}

void enable_stock_workarounds(int backends) {
  std::lock_guard<std::mutex> lock(repair_mutex);
  const int possible = backends & stock_backends();
  if (possible != repaired) {
    library().reset();  // stock's kernels are active again
    repaired = 0;
  }
  if (possible != 0 && repaired == 0) {
    auto library_of_ops = std::make_unique<StableLibrary>(StableLibrary::Kind::IMPL, "aten", "CUDA", kOwner, __LINE__);
    const auto put = [&](StockBackend backend, const char* forward, auto forward_kernel, const char* backward,
                         auto backward_kernel) {
      if ((possible & backend) == 0) return;
      library_of_ops->impl(forward, forward_kernel);
      library_of_ops->impl(backward, backward_kernel);
    };
    put(kStockCudnn, "_scaled_dot_product_cudnn_attention", &cudnn_forward_kernel,
        "_scaled_dot_product_cudnn_attention_backward", &cudnn_backward_kernel);
    put(kStockFlash, "_scaled_dot_product_flash_attention", &flash_forward_kernel,
        "_scaled_dot_product_flash_attention_backward", &flash_backward_kernel);
    put(kStockEfficient, "_scaled_dot_product_efficient_attention", &efficient_forward_kernel,
        "_scaled_dot_product_efficient_attention_backward", &efficient_backward_kernel);
    library() = std::move(library_of_ops);
    repaired = possible;
  }
  if (possible != backends) throw std::runtime_error("torch_flashplug: this torch lacks CUDA attention to repair.");
}

}  // namespace flashplug
