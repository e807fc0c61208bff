// Override of aten::_efficient_attention_forward and ..._backward at a dispatch key, over stock's kernels. Callers are
// lower-right causal masks of torch.nn.attention.bias (with D != Dv or fp32, unsupported by flash attention), jagged
// nested tensors, and stock's own dense efficient attention.
//
//   (B, S, H, D), bottom-right causal, many rows   plugin kernels by the rules of attention(); in auto mode by rows of
//                                                  dispatch_table.py
//   all remaining calls                            stock's kernel, called below the override with operands that stock
//                                                  can read (stock_workarounds.cpp)
//
// Callers here did not ask for the plugin by name. So a forced backend takes calls that its kernels can run and leaves
// the rest. Without dropout, either backward accepts the results of either forward.
#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "core/attention_call.h"
#include "core/core.h"
#include "core/schemas.h"
#include "core/values.h"
#include "dispatch/dispatch.h"
#include "hooks/hooks.h"
#include "hooks/varlen_common.h"
#include "launch/launch.h"
#include "operands/operands.h"
#include "ops/ops.h"
#include "stock/stock.h"
#include "stock/torch_symbols.h"

namespace flashplug {

namespace {

using torch::stable::detail::StableLibrary;

constexpr int64_t kBottomRight = 2;  // custom_mask_type
constexpr Window kCausal{-1, 0, true};

const LiveSchema& forward_schema() {
  static const LiveSchema schema(kEfficientOpForward.text());
  return schema;
}
const LiveSchema& backward_schema() {
  static const LiveSchema schema(kEfficientOpBackward.text());
  return schema;
}

// Return true if a plugin kernel should run: by measured rows or, with a requested backend, regardless of speed.
bool should_run_kernel(const BoxedArgs& args, bool gradients) {
  const Mode mode = effective_mode();
  if (!enabled() || (mode.backend() != Backend::kAuto && mode.family() < 0)) return false;
  const TorchSymbols& torch = torch_symbols();
  if (!torch.flash_enabled() && !torch.overrideable_enabled()) return false;
  if (args.integer(Arg::kMaskType).value_or(0) != kBottomRight || args.real(Arg::kDropout).value_or(0.0) != 0.0 ||
      args.integer(Arg::kWindow).value_or(0) != 0 || args.flag(Arg::kBiasGrad) || args.flag(Arg::kOneStorage))
    return false;
  for (const Arg arg : {Arg::kBias, Arg::kCuSeqlensQ, Arg::kCuSeqlensK, Arg::kSeqUsedK}) {
    if (args.tensor(arg) != nullptr) return false;
  }
  if (!kernels_support(args, 4)) return false;
  const Shape q = shape_of(args.tensor(Arg::kQuery)), k = shape_of(args.tensor(Arg::kKey));
  if (q.size[1] <= tables().cost_model.max_decode_rows || q.size[2] != k.size[2]) return false;
  if (mode.family() >= 0) return true;
  const HookedCall hooked(args, kCausal);
  ReadFacts facts = read_facts(hooked.call);
  facts.call.grad = gradients;
  const DeviceFacts device = device_facts(facts.device_index());
  const Plan& plan = remembered_plan(facts.call, device, mode, tables());
  return plan.ours() && !kernel_missing(plan.kernel_row, device);
}

// ---- stock's kernels ----

void need_stock() {
  if (!has_stock_efficient_op())
    throw std::runtime_error(
        "torch_flashplug: this torch has no efficient attention here, so stock cannot serve the call.");
}

// Operands in layouts that stock can read. Absent operands stay null.
struct ReadableOperands {
  TensorHandle q, k, v, bias;
  EfficientCall call;
  explicit ReadableOperands(const BoxedArgs& args)
      : q(aligned_operand(args, Arg::kQuery)),
        k(aligned_operand(args, Arg::kKey)),
        v(aligned_operand(args, Arg::kValue)) {
    if (const AtenTensorHandle bias_arg = args.tensor(Arg::kBias); bias_arg != nullptr) {
      bias = TensorHandle::share(bias_arg);
      if (is_repaired(kStockEfficient)) bias = aligned_bias(std::move(bias));
    }
    call = {q.get(),
            k.get(),
            v.get(),
            bias.get(),
            args.tensor(Arg::kCuSeqlensQ),
            args.tensor(Arg::kCuSeqlensK),
            args.integer(Arg::kMaxQ),
            args.integer(Arg::kMaxK),
            args.real(Arg::kDropout).value_or(0.0),
            args.integer(Arg::kMaskType).value_or(0),
            args.flag(Arg::kNeedsLse),
            args.real(Arg::kScale),
            args.tensor(Arg::kSeqUsedK),
            args.integer(Arg::kWindow)};
  }
  static TensorHandle aligned_operand(const BoxedArgs& args, Arg arg) {
    TensorHandle operand = TensorHandle::share(args.undefined(arg));
    return is_repaired(kStockEfficient) ? aligned(std::move(operand)) : std::move(operand);
  }
};

// ---- plugin kernels ----

// Run a plugin kernel, with results in the form of stock's efficient attention. Returns false if stock is to go on.
bool forward_with_kernels(const BoxedArgs& args, StableIValue* stack) {
  if (!should_run_kernel(args, args.flag(Arg::kNeedsLse))) return false;
  HookedCall hooked(args, kCausal);
  if (hooked.call.mode.forces_kernels()) hooked.call.mode = Mode::preferring(hooked.call.mode.backend());
  ForwardResult forward_result;
  if (!run_with_kernels("_efficient_attention_forward", hooked, &forward_result)) return false;
  const AtenTensorHandle query = args.tensor(Arg::kQuery);
  FlashResult flash = to_stock_layout(std::move(forward_result), hooked, query);
  TensorMeta facts;
  read_meta(query, &facts);
  const Shape out = shape_of(flash.out.get()), lse = shape_of(flash.lse.get());
  int64_t packed[4];
  pack_strides(out.size, packed);
  const int64_t none[3] = {lse.size[0], lse.size[1], 0}, strides[3] = {0, 0, 1};
  const auto number = [&facts] {
    return empty_strided(0, nullptr, nullptr, aoti_torch_dtype_int64(), facts.device_type, facts.device_index);
  };
  constexpr const Schema& op = kEfficientOpForward;
  stack[op.result("output")] = box::from_tensor(view_with_strides(flash.out.get(), packed));
  stack[op.result("logsumexp")] = box::from_tensor(
      args.flag(Arg::kNeedsLse) ? pad_lse(flash.lse.get()) : new_like(flash.lse.get(), 3, none, strides, nullptr));
  stack[op.result("philox_seed")] = box::from_tensor(number());
  stack[op.result("philox_offset")] = box::from_tensor(number());
  stack[op.result("max_seqlen_batch_q")] = box::from(out.size[1]);
  stack[op.result("max_seqlen_batch_k")] = box::from(shape_of(args.tensor(Arg::kKey)).size[1]);
  return true;
}

// Compute gradients by plugin kernels. Returns false if stock is to go on.
bool backward_with_kernels(const BoxedArgs& args, TensorHandle grads[3]) {
  const AtenTensorHandle lse = args.tensor(Arg::kLse);
  if (lse == nullptr || !should_run_kernel(args, true)) return false;
  const Shape padded = shape_of(lse);
  const int64_t rows[3] = {padded.size[0], padded.size[1], shape_of(args.tensor(Arg::kQuery)).size[1]};
  if (padded.size[2] < rows[2]) return false;
  return gradients_with_kernels(args, kCausal, grads, view(lse, 3, rows, padded.stride).get());
}

// ---- op implementations ----

void forward(StableIValue* stack, uint64_t count, uint64_t) {
  const BoxedArgs args(forward_schema(), stack, count);
  if (forward_with_kernels(args, stack)) return;
  need_stock();
  const ReadableOperands operands(args);
  const EfficientResult results = stock_efficient_op_forward(operands.call);
  constexpr int kResults = 4;
  for (int i = 0; i < kResults; ++i) stack[i] = box::from_tensor(TensorHandle(results.tensors[i]));
  stack[kResults] = box::from(results.max_q);
  stack[kResults + 1] = box::from(results.max_k);
}

void backward(StableIValue* stack, uint64_t count, uint64_t) {
  const BoxedArgs args(backward_schema(), stack, count);
  TensorHandle grads[4];
  if (!backward_with_kernels(args, grads)) {
    need_stock();
    const ReadableOperands operands(args);
    const TensorHandle grad_out = ReadableOperands::aligned_operand(args, Arg::kGradOut),
                       out = ReadableOperands::aligned_operand(args, Arg::kOut);
    AtenTensorHandle results[4];
    stock_efficient_op_backward(
        operands.call,
        {grad_out.get(), out.get(), args.undefined(Arg::kLse), args.undefined(Arg::kSeed), args.undefined(Arg::kOffset),
         args.flag(Arg::kBiasGrad), args.flag(Arg::kOneStorage), args.integer(Arg::kSplits)},
        results);
    for (int i = 0; i < 4; ++i) grads[i] = TensorHandle(results[i]);
  }
  for (int i = 0; i < 4; ++i) stack[i] = box::from_tensor(std::move(grads[i]));
}

std::mutex mutex;
std::unique_ptr<StableLibrary>& library() {
  static auto* instance = new std::unique_ptr<StableLibrary>();  // outlives the dispatcher's own teardown
  return *instance;
}

}  // namespace

void register_efficient_op(const char* dispatch_key) {
  std::lock_guard<std::mutex> lock(mutex);
  library().reset();
  // There is no kernel of torch at key CPU, where the CPU stub backend registers.
  if (std::strcmp(dispatch_key, "CPU") != 0) need_stock();
  auto library_of_ops =
      std::make_unique<StableLibrary>(StableLibrary::Kind::IMPL, "aten", dispatch_key, kOwner, __LINE__);
  library_of_ops->impl("_efficient_attention_forward", &forward);
  library_of_ops->impl("_efficient_attention_backward", &backward);
  library() = std::move(library_of_ops);
}

void unregister_efficient_op() {
  std::lock_guard<std::mutex> lock(mutex);
  library().reset();
}

}  // namespace flashplug
