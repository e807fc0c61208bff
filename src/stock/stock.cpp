// Calls of stock's attention kernels through the dispatcher: efficient forward and backward, the math ops of
// ops/sdpa.py, and cuDNN's forward.
//
// torch_call_dispatcher serves only ops with tensors in all returns: the efficient ops and the math ops here. (The
// cuDNN and flash forwards return SymInts and cannot be called.) Undefined tensors stand for absent tensors where a
// schema says Tensor. cuDNN's backward is absent: no forward of the plugin is followed by cuDNN's backward, because
// cuDNN's backward can be silently wrong (stock_workarounds.cpp).
#include "stock/stock.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>

#include "core/attention_call.h"
#include "core/core.h"
#include "core/schemas.h"
#include "core/values.h"
#include "dispatch/dispatch.h"
#include "hooks/hooks.h"
#include "operands/operands.h"

namespace flashplug {

namespace {

constexpr int64_t kLsePad = 32;  // the efficient kernels keep LSE rows in multiples of kLsePad

// Compute strides of (B, S, H, D) in memory. The efficient kernels write their output in such a layout, and the
// efficient backward reads it without a check.
void rows_before_heads(const int64_t size[4], int64_t stride[4]) {
  stride[3] = 1;
  stride[1] = size[3];
  stride[2] = size[1] * stride[1];
  stride[0] = size[2] * stride[2];
}

// Repeat key or value heads for the query heads that share them: [B, Hkv, S, D] -> [B, Hq, S, D].
TensorHandle repeat_heads(AtenTensorHandle tensor, int64_t group) {
  if (group == 1) return align_size_one_dims(TensorHandle::share(tensor));
  OpCall op(kRepeat);
  op[kRepeat["self"]] = box::from_borrowed(tensor);
  op[kRepeat["repeats"]] = box::from(group);
  op[kRepeat["dim"]] = box::from(std::optional<int64_t>(1));
  op[kRepeat["output_size"]] = box::from(std::nullopt);
  op.run_or([&](StableIValue* results) {
    const AtenTensorHandle repeated = repeat_interleave_again(tensor, group, 1);
    if (repeated != nullptr) results[0] = box::from(repeated);
    return repeated != nullptr;
  });
  return op.result(0);
}

TensorHandle slice_lse(TensorHandle lse, const CallFacts& p) {
  const Shape shape = shape_of(lse.get());
  if (shape.size[2] == p.Sq) return lse;
  const int64_t size[3] = {p.B, p.Hq, p.Sq}, stride[3] = {p.Hq * p.Sq, p.Sq, 1};
  return new_like(lse.get(), 3, size, stride, view(lse.get(), 3, size, shape.stride).get());
}

TensorHandle share_or_undefined(AtenTensorHandle tensor) {
  return tensor == nullptr ? TensorHandle::undefined() : TensorHandle::share(tensor);
}

StableIValue optional(AtenTensorHandle tensor) {
  return box::from_optional_tensor(is_defined(tensor) ? tensor : nullptr);
}

template <const Schema& schema>
void put_operands(const ForwardCall& call, OpCall* to) {
  OpCall& op = *to;
  op[schema["query"]] = box::from_borrowed(call.q);
  op[schema["key"]] = box::from_borrowed(call.k);
  op[schema["value"]] = box::from_borrowed(call.v);
}

template <const Schema& schema>
ForwardResult out_and_lse(OpCall* op) {
  ForwardResult result;
  result.out = op->result(schema.result("out"));
  result.lse = op->result(schema.result("lse"));
  return result;
}

}  // namespace

TensorHandle pad_lse(AtenTensorHandle lse) {
  const Shape shape = shape_of(lse);
  const int64_t B = shape.size[0], H = shape.size[1], Sq = shape.size[2];
  if (Sq % kLsePad == 0) return TensorHandle::share(lse);
  const int64_t padded = ceil_div(Sq, kLsePad) * kLsePad;
  const int64_t size[3] = {B, H, padded}, stride[3] = {H * padded, padded, 1};
  TensorHandle out = new_like(lse, 3, size, stride, nullptr);
  check_shim(aoti_torch_aten_fill__Scalar(out.get(), std::numeric_limits<double>::infinity()), "fill_");
  copy_tensor(view(out.get(), 3, shape.size, stride).get(), lse);
  return out;
}

bool cudnn_forward(const ForwardCall& call, const CallFacts& p, ForwardResult* result) {
  if (!(stock_backends() & kStockCudnn)) return false;
  OwnedFusedResult raw;
  try {
    const bool causal = call.causal == Causal::kTopLeft;
    raw = readable_cudnn_forward({call.q, call.k, call.v, nullptr, true, 0.0, causal, false, call.scale});
  } catch (const std::exception& error) {  // the caller goes on to a different kernel; but no kernel needs less memory
    if (std::strstr(error.what(), "out of memory") != nullptr) throw;
    return false;
  }
  count(Path::kCudnnForward);
  result->out = in_output_layout(std::move(raw.tensors[0]), call.q);
  const TensorHandle& lse = raw.tensors[1];  // [B, H, Sq, 1] or [B, H, Sq]
  const int64_t size[3] = {p.B, p.Hq, p.Sq}, stride[3] = {p.Hq * p.Sq, p.Sq, 1};
  const TensorHandle rows = view(lse.get(), 3, size, shape_of(lse.get()).stride);
  const bool packed = std::memcmp(shape_of(rows.get()).stride, stride, sizeof stride) == 0;
  result->lse = packed ? TensorHandle::share(rows.get()) : new_like(rows.get(), 3, size, stride, rows.get());
  return true;
}

bool efficient_can_run(const CallFacts& p) {
  return p.on_cuda && cpu_stub() == CpuStub::kOff && stock_efficient_supports(p);
}

ForwardResult efficient_forward(const ForwardCall& call, const CallFacts& p) {
  count(Path::kEfficientForward);
  constexpr const Schema& schema = kEfficientForward;
  const TensorHandle q = align_size_one_dims(TensorHandle::share(call.q)), k = repeat_heads(call.k, p.group()),
                     v = repeat_heads(call.v, p.group());
  const bool causal = call.causal == Causal::kTopLeft;
  OpCall op(schema);
  op[schema["query"]] = box::from_borrowed(q.get());
  op[schema["key"]] = box::from_borrowed(k.get());
  op[schema["value"]] = box::from_borrowed(v.get());
  op[schema["attn_bias"]] = box::from_optional_tensor(nullptr);
  op[schema["compute_log_sumexp"]] = box::from(true);
  op[schema["dropout_p"]] = box::from(call.dropout_p);
  op[schema["is_causal"]] = box::from(causal);
  op[schema["scale"]] = box::from_optional_double(call.scale);
  op.run_or([&](StableIValue* results) {
    AtenTensorHandle tensors[4];
    if (!(stock_backends() & kStockEfficient)) return false;
    stock_efficient_forward({q.get(), k.get(), v.get(), nullptr, true, call.dropout_p, causal, call.scale}, tensors);
    std::ranges::transform(tensors, results, [](AtenTensorHandle tensor) { return box::from(tensor); });
    return true;
  });
  ForwardResult result;
  result.out = in_output_layout(op.result(schema.result("output")), call.q);
  result.lse = slice_lse(op.result(schema.result("log_sumexp")), p);
  result.seed = op.result(schema.result("philox_seed"));
  result.offset = op.result(schema.result("philox_offset"));
  return result;
}

ForwardResult math_forward(const ForwardCall& call) {
  constexpr const Schema& schema = kMathForward;
  OpCall op(schema);
  put_operands<schema>(call, &op);
  op[schema["attn_bias"]] = optional(call.mask);
  op[schema["dropout_p"]] = box::from(call.dropout_p);
  op[schema["causal_mode"]] = box::from(static_cast<int64_t>(call.causal));
  op[schema["scale"]] = box::from_optional_double(call.scale);
  op[schema["mode"]] = box::from(call.mode.word);
  op.run();
  ForwardResult result = out_and_lse<schema>(&op);
  result.seed = op.result(schema.result("seed"));
  result.offset = op.result(schema.result("offset"));
  return result;
}

TensorHandle cached_math(const ForwardCall& call) {
  constexpr const Schema& schema = kQuantizedKvMath;
  OpCall op(schema);
  put_operands<schema>(call, &op);
  op[schema["k_scale"]] = box::from_borrowed(call.k_scale);
  op[schema["v_scale"]] = box::from_borrowed(call.v_scale);
  op[schema["attn_mask"]] = optional(call.mask);
  op[schema["k_is_rotated"]] = box::from(call.k_is_rotated);
  op[schema["scale"]] = box::from_optional_double(call.scale);
  op.run();
  return op.result(0);
}

TensorHandle quantize_kv_math(const ForwardCall& call, int64_t precision) {
  constexpr const Schema& schema = kQuantizeKvMath;
  OpCall op(schema);
  op[schema["key"]] = box::from_borrowed(call.k);
  op[schema["value"]] = box::from_borrowed(call.v);
  op[schema["precision"]] = box::from(precision);
  op.run();
  return op.result(0);
}

ForwardResult quantized_attention_math(const ForwardCall& call, int64_t precision) {
  count(Path::kMathForward);
  constexpr const Schema& schema = kQuantizedAttentionMath;
  const int64_t* value_size = shape_of(call.v).size;
  OpCall op(schema);
  op[schema["query"]] = box::from_borrowed(call.q);
  op[schema["quantized_kv"]] = box::from_borrowed(call.quantized_kv);
  op[schema["key_samples"]] = box::from_borrowed(call.key_samples);
  op[schema["value"]] = box::from_optional_tensor(call.v);
  op[schema["keys"]] = box::from(value_size[2]);
  op[schema["value_dim"]] = box::from(value_size[3]);
  op[schema["precision"]] = box::from(precision);
  op[schema["is_causal"]] = box::from(call.causal == Causal::kTopLeft);
  op[schema["scale"]] = box::from_optional_double(call.scale);
  op.run();
  return out_and_lse<schema>(&op);
}

// Set the settings of attention(), all arguments beside tensors (`kSettings`).
template <const Schema& schema>
void put_settings(const ForwardCall& call, OpCall* to) {
  visit_settings([&]<size_t index>() {
    constexpr auto setting = std::get<index>(kSettings);
    (*to)[schema[setting.name()]] = box::from(setting.value_in(call));
  });
}

// Set the sequence lengths and the settings of both ops of attention.py.
template <const Schema& schema>
void put_lengths_and_settings(const ForwardCall& call, OpCall* to) {
  OpCall& op = *to;
  op[schema["cu_seqlens_q"]] = optional(call.cu_seqlens_q);
  op[schema["cu_seqlens_k"]] = optional(call.cu_seqlens_k);
  put_settings<schema>(call, to);
}

ForwardResult paged_math(const ForwardCall& call) {
  constexpr const Schema& schema = kPagedMath;
  OpCall op(schema);
  put_operands<schema>(call, &op);
  op[schema["block_table"]] = box::from_borrowed(call.block_table);
  op[schema["seqused_k"]] = box::from_borrowed(call.seqused_k);
  op[schema["k_scale"]] = optional(call.k_scale);
  op[schema["v_scale"]] = optional(call.v_scale);
  op[schema["sinks"]] = optional(call.sinks);
  put_settings<schema>(call, &op);
  op[schema["block_mode"]] = box::from(call.mode.word & kModeMask);
  op[schema["cu_seqlens_q"]] = optional(call.cu_seqlens_q);
  op.run();
  return out_and_lse<schema>(&op);
}

ForwardResult attention_math(const ForwardCall& call) {
  count(Path::kMathForward);
  constexpr const Schema& schema = kAttentionMathForward;
  OpCall op(schema);
  put_operands<schema>(call, &op);
  op[schema["sinks"]] = optional(call.sinks);
  op[schema["seqused_k"]] = optional(call.seqused_k);
  put_lengths_and_settings<schema>(call, &op);
  op.run();
  return out_and_lse<schema>(&op);
}

BackwardResult attention_math_backward(const BackwardCall& call) {
  count(Path::kMathBackward);
  const ForwardCall& forward = call.forward;
  constexpr const Schema& schema = kAttentionMathBackward;
  OpCall op(schema);
  op[schema["grad_out"]] = box::from_borrowed(call.grad_out);
  op[schema["grad_lse"]] = optional(call.grad_lse);
  put_operands<schema>(forward, &op);
  op[schema["out"]] = box::from_borrowed(call.out);
  op[schema["lse"]] = box::from_borrowed(call.lse);
  put_lengths_and_settings<schema>(forward, &op);
  op[schema["wants_delta"]] = box::from(call.wants_delta);
  op.run();
  BackwardResult result;
  for (int i = 0; i < 3; ++i) result.grads[i] = op.result(i);
  result.delta = op.result(schema.result("delta"));
  return result;
}

ForwardResult listed_math(const ForwardCall& call) {
  count(Path::kMathForward);
  constexpr const Schema& schema = kBlockSparseMathForward;
  OpCall op(schema);
  put_operands<schema>(call, &op);
  op[schema["mask_metadata"]] = box::from_borrowed(call.mask);
  op[schema["scale"]] = box::from_optional_double(call.scale);
  op.run();
  return out_and_lse<schema>(&op);
}

BackwardResult listed_math_backward(const BackwardCall& call) {
  count(Path::kMathBackward);
  constexpr const Schema& schema = kBlockSparseMathBackward;
  OpCall op(schema);
  op[schema["grad_out"]] = box::from_borrowed(call.grad_out);
  put_operands<schema>(call.forward, &op);
  op[schema["mask_metadata"]] = box::from_borrowed(call.forward.mask);
  op[schema["out"]] = box::from_borrowed(call.out);
  op[schema["lse"]] = box::from_borrowed(call.lse);
  op[schema["scale"]] = box::from_optional_double(call.forward.scale);
  op.run();
  BackwardResult result;
  for (int i = 0; i < 3; ++i) result.grads[i] = op.result(i);
  return result;
}

BackwardResult efficient_backward(const BackwardCall& call, const CallFacts& p) {
  count(Path::kEfficientBackward);
  const ForwardCall& forward = call.forward;
  int64_t stride[4];
  rows_before_heads(shape_of(call.out).size, stride);
  constexpr const Schema& schema = kEfficientBackward;
  const TensorHandle tensors[] = {readable(view_with_strides(call.grad_out, stride).get()),
                                  align_size_one_dims(TensorHandle::share(forward.q)),
                                  repeat_heads(forward.k, p.group()),
                                  repeat_heads(forward.v, p.group()),
                                  TensorHandle::undefined(),  // bias
                                  view_with_strides(call.out, stride),
                                  pad_lse(call.lse),
                                  share_or_undefined(call.seed),
                                  share_or_undefined(call.offset)};
  OpCall op(schema);
  for (int i = 0; i < 9; ++i) op[i] = box::from_borrowed(tensors[i].get());
  op[schema["dropout_p"]] = box::from(forward.dropout_p);
  const bool wanted_grads[4] = {true, true, true, false};
  op[schema["grad_input_mask"]] = box::from(torch::headeronly::HeaderOnlyArrayRef<bool>(wanted_grads, 4));
  op[schema["is_causal"]] = box::from(forward.causal == Causal::kTopLeft);
  op[schema["scale"]] = box::from_optional_double(forward.scale);
  op.run_or([&](StableIValue* results) {
    AtenTensorHandle borrowed[9], grads[4];
    if (!(stock_backends() & kStockEfficient)) return false;
    std::ranges::transform(tensors, borrowed, &TensorHandle::get);
    stock_efficient_backward(borrowed, forward.dropout_p, {true, true, true, false}, forward.causal == Causal::kTopLeft,
                             forward.scale, grads);
    std::ranges::transform(grads, results, [](AtenTensorHandle tensor) { return box::from(tensor); });
    return true;
  });
  BackwardResult result;
  result.grads[0] = in_operand_layout(op.result(0), forward.q);
  result.grads[1] = in_operand_layout(sum_of_heads(op.result(1), forward.k), forward.k);
  result.grads[2] = in_operand_layout(sum_of_heads(op.result(2), forward.v), forward.v);
  op.result(3);  // the bias gradient, which was not requested
  return result;
}

BackwardResult math_backward(const BackwardCall& call) {
  count(Path::kMathBackward);
  const ForwardCall& forward = call.forward;
  constexpr const Schema& schema = kMathBackward;
  OpCall op(schema);
  op[schema["grad_out"]] = box::from_borrowed(call.grad_out);
  put_operands<schema>(forward, &op);
  op[schema["attn_bias"]] = optional(forward.mask);
  op[schema["out"]] = box::from_borrowed(call.out);
  op[schema["lse"]] = box::from_borrowed(call.lse);
  op[schema["seed"]] = box::from_borrowed(call.seed);
  op[schema["offset"]] = box::from_borrowed(call.offset);
  op[schema["dropout_p"]] = box::from(forward.dropout_p);
  op[schema["causal_mode"]] = box::from(static_cast<int64_t>(forward.causal));
  op[schema["scale"]] = box::from_optional_double(forward.scale);
  op[schema["mode"]] = box::from(forward.mode.word);
  op[schema["bias_grad"]] = box::from(call.wanted_grads[3]);
  op.run();
  BackwardResult result;
  for (int i = 0; i < 4; ++i) result.grads[i] = op.result(i);
  return result;
}

}  // namespace flashplug
