// Ops for calls that the choice hook gave to the plugin, and the project's own ops: one implementation for both.
//
//   aten::_scaled_dot_product_fused_attention_overrideable (+ _backward): eager mode; autograd, autocast and functorch
//     are libtorch's
//   torch_flashplug::sdpa_fwd / sdpa_bwd: traced graphs and direct users; schemas, fake kernels and autograd in
//   ops/sdpa.py
//
// The ops of attention() are in attention_ops.cpp.
//
// Order at run time: first a plugin kernel, if the plan says so. Then stock's choice, if callable from here (cuDNN or
// the efficient attention). Then math. A forced backend that cannot run raises its reasons. The backward uses the mode
// of its forward, but autograd threads do not see the caller's thread-local mode. The overrideable op therefore stores
// the mode in the upper bits of max_q. The generated autograd formula saves max_q and returns the number unchanged. The
// mode is 0 in auto mode, so max_q is Sq there.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h>
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/attention_call.h"
#include "core/core.h"
#include "core/schemas.h"
#include "core/values.h"
#include "dispatch/dispatch.h"
#include "hooks/hooks.h"
#include "launch/kernel_args.h"
#include "launch/launch.h"
#include "operands/operands.h"
#include "ops/ops.h"
#include "stock/stock.h"
#include "stock/torch_symbols.h"

namespace flashplug {

namespace {

constexpr int kModeShift = 40;  // above any sequence length

using torch::stable::detail::StableLibrary;

}  // namespace

ReadFacts read_facts(const ForwardCall& call) {
  ReadFacts facts;
  const CallFacts& p = facts.call;
  if (!read_meta(call, &facts) || !four_dims(facts)) {
    throw std::runtime_error("torch_flashplug: query, key and value must be 4-D tensors [B, H, S, D], but got " +
                             std::to_string(facts.operand[0].dim) + "-D, " + std::to_string(facts.operand[1].dim) +
                             "-D and " + std::to_string(facts.operand[2].dim) + "-D.");
  }
  if (!read_shapes(call, Memory::kReal, &facts))
    throw std::runtime_error("torch_flashplug: query, key and value must be dense tensors with concrete shapes.");
  Shape shape[kNumOperands] = {facts.shape[0], facts.shape[1], facts.shape[2]};
  int64_t sizes[kNumOperands][4];
  const bool pooled =
      is_defined(call.block_table) && shape[1].size[0] == shape[2].size[0];  // as many key pages as value pages
  for (int i = 0; i < kNumOperands; ++i) {
    std::copy_n(shape[i].size, 4, sizes[i]);
    if (pooled) sizes[i][0] = p.B;
    shape[i].size = sizes[i];
  }
  if (!shapes_fit(shape, true)) {
    throw std::runtime_error("torch_flashplug: the shapes of query, key and value must fit: query [" +
                             std::to_string(p.B) + ", " + std::to_string(p.Hq) + ", " + std::to_string(p.Sq) + ", " +
                             std::to_string(p.D) +
                             "] needs key [B, Hkv, Sk, D] and value [B, Hkv, Sk, Dv], with Hq a multiple of Hkv.");
  }
  return facts;
}

namespace {

// Launch the dense kernel for packed sequences of equal lengths.
void run_dense_forward(const DenseKernel& dense, const ForwardCall& call, const SignedScale& positive,
                       const ForwardResult& result, int32_t device_index) {
  const TensorHandle q = dense.batch_of(positive.q.get()), k = dense.batch_of(call.k), v = dense.batch_of(call.v),
                     o = dense.batch_of(result.out.get()), lse = dense.batch_of(result.lse.get(), 3);
  Arguments arguments(*dense.row, dense.facts, device_index);
  arguments.tensor("q", q.get());
  arguments.tensor("k", k.get());
  arguments.tensor("v", v.get());
  arguments.tensor("o", o.get(), true);
  arguments.tensor("lse", lse.get(), true);
  arguments.scale(positive.scale);
  dense.pack_lengths(call, &arguments);
  launch(*dense.kernel, arguments);
}

}  // namespace

bool our_forward(const ForwardCall& original, const ReadFacts& facts, const Plan& plan, ForwardResult* result) {
  CallFacts p = facts.call;
  p.needs |= plan.features;
  const TensorMeta& query = facts.operand[0];
  if ((p.needs & kMask) != 0 && !can_preprocess_mask(original.mask, p)) return false;
  if (cpu_stub() == CpuStub::kMath) {  // everything but the kernel is real
    *result = math_forward(original);
    if (original.metadata != nullptr) preprocess_in_torch(original, p, query);
    if (original.dropout_p == 0.0) {  // as with kernels: nothing is drawn, so nothing is returned
      result->seed = TensorHandle();
      result->offset = TensorHandle();
    }
    count(Path::kOursForward);
    return true;
  }
  const int circumstances = (original.mode.forces_kernels() ? kMustWait : 0) | (facts.call.grad ? kNeedsGradients : 0);
  Kernel* kernel = find_kernel(plan.kernel_row, query.device_index, circumstances);
  if (kernel == nullptr) return false;
  const ReadableCall read = make_readable(original, p);
  const ForwardCall& call = read.call;
  const int64_t out_size[4] = {p.B, p.Hq, p.Sq, p.Dv};
  const int64_t lse_size[3] = {p.B, p.Hq, p.Sq}, lse_stride[3] = {p.Hq * p.Sq, p.Sq, 1};
  int64_t out_stride[4];
  output_strides(facts.shape[0], out_size, out_stride);
  const KernelRow& row = tables().kernels[plan.kernel_row];
  // For a broadcast query with Dv != D, torch's layout puts the broadcast dim innermost, where only single elements can
  // be written.
  const bool writable = row.elementwise || out_stride[3] == 1;
  if (!writable) pack_strides(out_size, out_stride);
  result->in_place = is_defined(call.out) && (row.elementwise || is_readable(call.out));
  static const int32_t fp32 = aoti_torch_dtype_float32();
  result->out = result->in_place ? TensorHandle::share(call.out) : new_like(call.q, 4, out_size, out_stride, nullptr);
  result->lse = empty_strided(3, lse_size, lse_stride, fp32, query.device_type, query.device_index);
  const SignedScale positive = with_positive_scale(call, p);
  TensorHandle partials;
  if (plan.splits.in_memory()) {
    const int64_t floats = workspace_floats_of(p, plan.splits), unit_stride = 1;
    partials = empty_strided(1, &floats, &unit_stride, fp32, query.device_type, query.device_index);
  }
  Arguments arguments(row, p, query.device_index);
  arguments.tensor("q", positive.q.get());
  arguments.tensor("k", call.k);
  arguments.tensor("v", call.v);
  arguments.tensor("o", result->out.get(), true);
  arguments.tensor("lse", result->lse.get(), true);
  arguments.scale(positive.scale);
  if (partials.get() != nullptr)
    arguments.tensor("partials", partials.get(), true);
  else if (arguments.takes("partials"))  // nothing is written to partials, but an address is needed: the LSE's
    arguments.global_number("partials", mutable_data(result->lse.get()));
  const TensorHandle workspace = pack_quant_workspace(call, p, query, row, &arguments);
  const MaskArgs mask = pack_mask_args(call, p, query, false, &arguments);
  const TensorHandle bias = pack_bias_args(call, p, query, row, &arguments);
  if (call.dropout_p != 0.0) {
    DropoutSeed drawn = draw_seed(query);
    result->seed = std::move(drawn.seed);
    result->offset = std::move(drawn.offset);
  }
  const TensorHandle seed = pack_dropout_args(result->seed.get(), query, &arguments);
  if (call.k_scale != nullptr) {
    arguments.tensor("k_scale", call.k_scale);
    arguments.tensor("v_scale", call.v_scale);
    arguments.integer("k_is_rotated", call.k_is_rotated);
  }
  const TensorHandle sinks = pack_sink_args(call.sinks, result->lse.get(), &arguments);
  const std::optional<DenseKernel> dense = find_equal_lengths_kernel(call, p, row, query.device_index, circumstances);
  if (dense) run_dense_forward(*dense, call, positive, *result, query.device_index);
  const Lengths lengths = pack_varlen_args(call, p, row, query, dense.has_value(), &arguments);
  pack_page_args(call, &arguments);
  // Kernels learn nothing else about splits, except a fixed split size, which is a fact of the call.
  arguments.integer("splits", plan.splits.n);
  arguments.integer("cluster", plan.splits.cluster);
  arguments.integer("even_splits", plan.splits.even);
  launch(*kernel, arguments, plan.splits.n > 1);
  if (plan.splits.balanced()) count(Path::kBalanced);
  if (!writable && !result->in_place) result->out = in_output_layout(std::move(result->out), original.q);
  count(Path::kOursForward);
  return true;
}

namespace {

ForwardResult math_forward_counted(const ForwardCall& call) {
  count(Path::kMathForward);
  return math_forward(call);
}

// Run stock's choice for the call. A traced graph with the plugin's op is then not slower than stock, if stock serves
// the call at run time.
ForwardResult stock_forward(const ForwardCall& call, const ReadFacts& facts, const DeviceFacts& device) {
  const CallFacts& p = facts.call;
  ForwardResult result;
  const auto by_ours = [&] {
    const Plan plan = plan_in_op(p, device, tables());
    return plan.ours() && our_forward(call, facts, plan, &result);
  };
  const bool plain = p.on_cuda && (p.needs & ~kCausal) == 0 && p.scale == Scale::kPositive;
  if (cpu_stub() == CpuStub::kOff && plain && !is_empty(p)) {
    const int64_t choice =
        stock_choice(call.q, call.k, call.v, 0.0, (p.needs & kCausal) != 0, call.scale, p.Hq != p.Hkv);
    if (choice == kChoiceCudnn && cudnn_forward(call, p, &result)) return result;
    // Flash's results cannot be saved for the plugin's backward, so the plugin's forward is the nearest choice. Any
    // kernel beats math.
    if ((choice == kChoiceFlash || !efficient_can_run(p)) && by_ours()) return result;
  }
  // No stock kernel callable from here takes a mask or a window, or draws the dropout bits of math and of plugin
  // kernels.
  if ((p.needs & (kAnyMask | kDropout | kWindow)) != 0 && call.mode.backend() != Backend::kStock && by_ours())
    return result;
  return efficient_can_run(p) ? efficient_forward(call, p) : math_forward_counted(call);
}

ForwardResult forward(const ForwardCall& call) {
  ReadFacts facts = read_facts(call);
  CallFacts& p = facts.call;
  read_torch_settings(&p);
  const DeviceFacts device = device_facts(facts.device_index());
  const auto plan_with = [&](bool grad) {
    p.grad = grad;
    p.bias_grad = grad && call.bias_grad;
    return remembered_plan(p, device, call.mode, tables());
  };
  Plan plan = plan_with(call.grad.value_or(false));
  // The choice hook sent the graph here for both cases.
  if (!plan.ours() && !call.grad.has_value()) plan = plan_with(true);
  note_plan("op", p, device, call.mode, plan);
  ForwardResult result;
  if (plan.ours() && our_forward(call, facts, plan, &result)) return result;
  if (call.metadata != nullptr)
    preprocess_in_torch(call, p, facts.operand[0]);  // the backward may still be the plugin's
  if (plan.backend == Backend::kMath) return math_forward_counted(call);
  if (call.mode.forces_kernels()) throw std::runtime_error(forced_error(p, device, call.mode, tables()));
  return stock_forward(call, facts, device);
}

// Run a backward after any forward: the plugin's wherever possible, else the efficient attention's, else math. cuDNN's
// backward is never used, because its plans ignore the order of grad_out (stock_workarounds.cpp).
BackwardResult backward(const BackwardCall& call) {
  ReadFacts facts = read_facts(call.forward);
  CallFacts& p = facts.call;
  read_torch_settings(&p);
  const DeviceFacts device = device_facts(facts.device_index());
  BackwardResult result;
  const Mode mode = call.forward.mode;
  const bool math = mode.backend() == Backend::kMath;
  if (math || !our_backward(call, p, device, facts.device_index(), mode, &result))
    result = math || !efficient_can_run(p) ? math_backward(call) : efficient_backward(call, p);
  for (int i = 0; i < 4; ++i) {
    if (!call.wanted_grads[i]) result.grads[i] = TensorHandle();
  }
  return result;
}

Causal own_op_causal(int64_t causal_mode, AtenTensorHandle mask) {
  if (causal_mode < 0 || causal_mode > static_cast<int64_t>(Causal::kBottomRight))
    throw std::runtime_error("torch_flashplug: causal_mode is " + std::to_string(causal_mode) +
                             ", but must be 0 (none), 1 (top-left) or 2 (bottom-right).");
  if (causal_mode != 0 && is_defined(mask))
    throw std::runtime_error("torch_flashplug: causal_mode must be 0 if attn_bias is given. Pass only one of the two.");
  return static_cast<Causal>(causal_mode);
}

// ---- the overrideable aten op ----

void sdpa_op_forward(StableIValue* stack, uint64_t, uint64_t) {
  constexpr Schema op = kOverrideableForward;
  const TensorHandle q = box::to_tensor(stack[op["query"]]), k = box::to_tensor(stack[op["key"]]),
                     v = box::to_tensor(stack[op["value"]]), bias = box::to_optional_tensor(stack[op["attn_bias"]]);
  // The choice hook has put mask metadata, or a copy, in place of a bool mask.
  const TensorHandle original_mask = bias.defined() ? restore_mask(bias.get()) : TensorHandle();
  const AtenTensorHandle mask = original_mask.get() != nullptr ? original_mask.get() : bias.get();
  reject_internal_mask(mask);
  const Causal causal = box::to<bool>(stack[op["is_causal"]]) ? Causal::kTopLeft : Causal::kNone;
  const AttentionArgs arguments{q.get(),
                                k.get(),
                                v.get(),
                                mask,
                                box::to<double>(stack[op["dropout_p"]]),
                                causal,
                                box::to_optional_double(stack[op["scale"]])};
  const ForwardCall call{arguments, effective_mode(), wants_grad(arguments),
                         original_mask.get() != nullptr ? metadata_to_fill(bias.get()) : nullptr,
                         wants_bias_grad(arguments)};
  ForwardResult result = forward(call);
  int64_t rows = 0, keys = 0;
  check_shim(aoti_torch_get_size(call.q, 2, &rows), "get_size");
  check_shim(aoti_torch_get_size(call.k, 2, &keys), "get_size");
  stack[op.result("output")] = box::from_tensor(std::move(result.out));
  stack[op.result("logsumexp")] = box::from_tensor(std::move(result.lse));
  stack[op.result("cum_seq_q")] = box::from_tensor(TensorHandle());
  stack[op.result("cum_seq_k")] = box::from_tensor(TensorHandle());
  stack[op.result("max_q")] = box::from(rows | (call.mode.word << kModeShift));
  stack[op.result("max_k")] = box::from(keys);
  stack[op.result("philox_seed")] = box::from_tensor(std::move(result.seed));
  stack[op.result("philox_offset")] = box::from_tensor(std::move(result.offset));
  stack[op.result("debug_attn_mask")] = box::from_tensor(TensorHandle());
}

void sdpa_op_backward(StableIValue* stack, uint64_t, uint64_t) {
  constexpr Schema op = kOverrideableBackward;
  const TensorHandle grad = box::to_tensor(stack[op["grad_out"]]), q = box::to_tensor(stack[op["query"]]),
                     k = box::to_tensor(stack[op["key"]]), v = box::to_tensor(stack[op["value"]]);
  const TensorHandle mask = box::to_tensor(stack[op["attn_bias"]]), out = box::to_tensor(stack[op["out"]]),
                     lse = box::to_tensor(stack[op["logsumexp"]]);
  const TensorHandle cum_q = box::to_tensor(stack[op["cum_seq_q"]]), cum_k = box::to_tensor(stack[op["cum_seq_k"]]),
                     seed = box::to_tensor(stack[op["philox_seed"]]),
                     offset = box::to_tensor(stack[op["philox_offset"]]);
  const std::vector<bool> wanted_grads = box::to<std::vector<bool>>(stack[op["grad_input_mask"]]);
  const std::optional<double> scale = box::to_optional_double(stack[op["scale"]]);
  const Mode mode{(box::to<int64_t>(stack[op["max_q"]]) >> kModeShift) & kModeMask};
  const Causal causal = box::to<bool>(stack[op["is_causal"]]) ? Causal::kTopLeft : Causal::kNone;
  const bool has_mask = mask.defined();
  BackwardCall call{grad.get(),
                    {{q.get(), k.get(), v.get(), has_mask ? mask.get() : nullptr,
                      box::to<double>(stack[op["dropout_p"]]), causal, scale},
                     mode},
                    out.get(),
                    lse.get(),
                    seed.get(),
                    offset.get(),
                    {wanted_grads[0], wanted_grads[1], wanted_grads[2], wanted_grads[3] && has_mask}};
  BackwardResult result = backward(call);
  for (int i = 0; i < 4; ++i) stack[i] = box::from_tensor(std::move(result.grads[i]));
}

// ---- torch_flashplug::sdpa_fwd / sdpa_bwd, with real tensors in all returns ----

}  // namespace

TensorHandle placeholder(const ForwardCall& call, int32_t dtype) {
  TensorMeta query;
  read_meta(call.q, &query);
  const int64_t no_elements = 0, unit_stride = 1;
  return empty_strided(1, &no_elements, &unit_stride, dtype, query.device_type, query.device_index);
}

namespace {

void attention_op_forward(StableIValue* stack, uint64_t, uint64_t) {
  constexpr Schema op = kOwnForward;
  const TensorHandle q = box::to_tensor(stack[op["query"]]), k = box::to_tensor(stack[op["key"]]),
                     v = box::to_tensor(stack[op["value"]]), mask = box::to_optional_tensor(stack[op["attn_bias"]]);
  reject_internal_mask(mask.get());
  const Causal causal = own_op_causal(box::to<int64_t>(stack[op["causal_mode"]]), mask.get());
  const ForwardCall call{{q.get(), k.get(), v.get(), mask.get(), box::to<double>(stack[op["dropout_p"]]), causal,
                          box::to_optional_double(stack[op["scale"]])},
                         mode_of_op(box::to<int64_t>(stack[op["mode"]]))};
  ForwardResult result = forward(call);
  if (call.dropout_p == 0.0) {  // nothing was drawn on any path; the fake kernel of ops/sdpa.py returns the same
    result.seed = placeholder(call, aoti_torch_dtype_int64());
    result.offset = placeholder(call, aoti_torch_dtype_int64());
  }
  stack[op.result("out")] = box::from_tensor(std::move(result.out));
  stack[op.result("lse")] = box::from_tensor(std::move(result.lse));
  stack[op.result("seed")] = box::from_tensor(std::move(result.seed));
  stack[op.result("offset")] = box::from_tensor(std::move(result.offset));
}

void attention_op_backward(StableIValue* stack, uint64_t, uint64_t) {
  constexpr Schema op = kOwnBackward;
  const TensorHandle grad = box::to_tensor(stack[op["grad_out"]]), q = box::to_tensor(stack[op["query"]]),
                     k = box::to_tensor(stack[op["key"]]), v = box::to_tensor(stack[op["value"]]);
  const TensorHandle mask = box::to_optional_tensor(stack[op["attn_bias"]]), out = box::to_tensor(stack[op["out"]]),
                     lse = box::to_tensor(stack[op["lse"]]);
  const TensorHandle seed = box::to_tensor(stack[op["seed"]]), offset = box::to_tensor(stack[op["offset"]]);
  reject_internal_mask(mask.get());
  const Causal causal = own_op_causal(box::to<int64_t>(stack[op["causal_mode"]]), mask.get());
  const ForwardCall forward_call{{q.get(), k.get(), v.get(), mask.get(), box::to<double>(stack[op["dropout_p"]]),
                                  causal, box::to_optional_double(stack[op["scale"]])},
                                 mode_of_op(box::to<int64_t>(stack[op["mode"]]))};
  const bool bias_grad = box::to<bool>(stack[op["bias_grad"]]) && mask.defined();
  BackwardCall call{
      grad.get(), forward_call, out.get(), lse.get(), seed.get(), offset.get(), {true, true, true, bias_grad}};
  BackwardResult result = backward(call);
  if (!result.grads[3].defined()) {
    int32_t dtype = 0;
    check_shim(aoti_torch_get_dtype(call.forward.q, &dtype), "get_dtype");
    result.grads[3] = placeholder(call.forward, dtype);
  }
  for (int i = 0; i < 4; ++i) stack[i] = box::from_tensor(std::move(result.grads[i]));
}

void corrected_choice_of_call(StableIValue* stack, uint64_t, uint64_t) {
  constexpr Schema op = kCorrectedChoice;
  const TensorHandle q = box::to_tensor(stack[op["query"]]), k = box::to_tensor(stack[op["key"]]),
                     v = box::to_tensor(stack[op["value"]]), mask = box::to_optional_tensor(stack[op["attn_mask"]]);
  const Causal causal = box::to<bool>(stack[op["is_causal"]]) ? Causal::kTopLeft : Causal::kNone;
  const CorrectedChoice right =
      corrected_choice(box::to<int64_t>(stack[op["chosen"]]),
                       {q.get(), k.get(), v.get(), mask.get(), box::to<double>(stack[op["dropout_p"]]), causal,
                        box::to_optional_double(stack[op["scale"]])});
  stack[op.result("choice")] = box::from(right.choice);
  stack[op.result("fault")] = box::from(int64_t{right.fault});
}

std::vector<std::unique_ptr<StableLibrary>>& libraries() {
  static auto* instance = new std::vector<std::unique_ptr<StableLibrary>>();  // outlives the dispatcher's own teardown
  return *instance;
}

}  // namespace

void register_ops(const char* dispatch_key, bool own_ops) {
  auto aten = std::make_unique<StableLibrary>(StableLibrary::Kind::IMPL, "aten", dispatch_key, kOwner, __LINE__);
  aten->impl("_scaled_dot_product_fused_attention_overrideable", &sdpa_op_forward);
  aten->impl("_scaled_dot_product_fused_attention_overrideable_backward", &sdpa_op_backward);
  libraries().push_back(std::move(aten));
  if (!own_ops) return;
  auto library =
      std::make_unique<StableLibrary>(StableLibrary::Kind::IMPL, "torch_flashplug", dispatch_key, kOwner, __LINE__);
  library->impl("sdpa_fwd", &attention_op_forward);
  library->impl("sdpa_bwd", &attention_op_backward);
  register_own_ops(library.get());
  library->impl("_corrected_choice", &corrected_choice_of_call);
  libraries().push_back(std::move(library));
}

void unregister_ops() { libraries().clear(); }

}  // namespace flashplug
