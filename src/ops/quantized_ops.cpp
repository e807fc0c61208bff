// Ops of key and value that are quantized once and used by several calls of attention() (quantize_ahead.py).
//
//   torch_flashplug::quantize_kv: the quantization of key and value by a kernel that quantizes its own operands
//   torch_flashplug::quantized_attention_fwd: the same kernel, without this part of its work
//
// Without a kernel for the call, both ops run reference math.
#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/attention_call.h"
#include "core/core.h"
#include "core/schemas.h"
#include "core/values.h"
#include "dispatch/dispatch.h"
#include "launch/launch.h"
#include "operands/operands.h"
#include "ops/ops.h"
#include "stock/stock.h"

namespace flashplug {

namespace {

// Return the plan of a call with a recipe. The scale of a block of keys belongs to a kernel's tile, so the plans of all
// calls with the same key and value must name kernels with equal tiles. Whole units of 16 elements exclude the only
// choice between kernels of several head dims, which depends on the lengths (`find_kernel_row()`).
Plan plan_recipe(CallFacts p, const DeviceFacts& device, int64_t precision) {
  constexpr int64_t unit = 16;
  if (head_dims_aligned(p)) p.D = ceil_div(p.D, unit) * unit, p.Dv = ceil_div(p.Dv, unit) * unit;
  Plan plan;
  any_family(tables(), [&](int family) {
    const Mode mode = Mode::forcing(family).with_precision(static_cast<int>(precision));
    plan = plan_call(p, device, mode, tables());
    return plan.ours();
  });
  return plan;
}

Mode forcing(const Plan& plan) { return Mode{static_cast<int64_t>(plan.backend)}; }

bool runs_kernels(const Plan& plan) { return plan.ours() && cpu_stub() != CpuStub::kMath; }

void check_precision(int64_t precision) {
  const auto recipes = static_cast<int64_t>(tables().recipes.size());
  if (precision < 1 || precision > recipes)
    throw std::runtime_error("torch_flashplug: precision must be the number of a recipe, 1 to " +
                             std::to_string(recipes) + ", but got " + std::to_string(precision) + ".");
}

void quantize_kv(StableIValue* stack, uint64_t, uint64_t) {
  constexpr Schema op = kQuantizeKv;
  const TensorHandle k = box::to_tensor(stack[op["key"]]), v = box::to_tensor(stack[op["value"]]);
  const int64_t precision = box::to<int64_t>(stack[op["precision"]]);
  check_precision(precision);
  const ForwardCall call{{k.get(), k.get(), v.get()}, {}};  // the key has the sizes of a query
  const ReadFacts facts = read_facts(call);
  CallFacts p = facts.call;
  const DeviceFacts device = device_facts(facts.device_index());
  const Plan plan = plan_recipe(p, device, precision);
  note_plan("quantize_kv", p, device, forcing(plan), plan);
  if (!runs_kernels(plan)) {
    stack[0] = box::from_tensor(quantize_kv_math(call, precision));
    return;
  }
  p.needs |= plan.features;
  Kernel* kernel = find_kernel(plan.kernel_row, facts.device_index(), kMustWait);
  const ReadableCall read = make_readable(call, p);
  stack[0] = box::from_tensor(
      quantize_key_and_value(*kernel, tables().kernels[plan.kernel_row], read.call, p, facts.operand[1]));
}

// Sizes that quantized key and value have in common with the caller's tensors.
struct KeySizes {
  int64_t B, heads, keys, D, Dv;
};

KeySizes read_key_sizes(const TensorHandle& samples, int64_t keys, int64_t value_dim) {
  TensorMeta meta;
  Shape shape;
  if (!read_meta(samples.get(), &meta) || meta.dim != 4 || !read_shape(samples.get(), &shape) ||
      !is_readable(samples.get()) || shape.size[2] < 1)
    throw std::runtime_error("torch_flashplug: key_samples must be [B, Hkv, keys, D] with contiguous rows.");
  return {shape.size[0], shape.size[1], keys, shape.size[3], value_dim};
}

// Return a tensor with the sizes of a key or value that exists in 8 bits only. Kernels do not read the tensor.
TensorHandle make_unread_tensor(const KeySizes& sizes, int64_t head_dim, const TensorHandle& samples) {
  TensorMeta meta;
  int32_t dtype = -1;
  read_meta(samples.get(), &meta);
  check_shim(aoti_torch_get_dtype(samples.get(), &dtype), "get_dtype");
  return make_broadcast_tensor({sizes.B, sizes.heads, sizes.keys, head_dim}, dtype, meta);
}

void check_quantized_kv(AtenTensorHandle quantized_kv, int64_t words, const ReadFacts& facts) {
  int32_t dtype = -1;
  int64_t dims = 0;
  Shape shape;
  const void* data = nullptr;
  const bool fits = aoti_torch_get_dtype(quantized_kv, &dtype) == 0 && dtype == aoti_torch_dtype_int32() &&
                    aoti_torch_get_dim(quantized_kv, &dims) == 0 && dims == 1 && read_shape(quantized_kv, &shape) &&
                    shape.size[0] == words && shape.stride[0] == 1 && is_on_device_of(quantized_kv, facts.operand[0]) &&
                    torch_get_const_data_ptr(quantized_kv, &data) == 0 &&
                    reinterpret_cast<uintptr_t>(data) % kUnitBytes == 0;
  if (!fits)
    throw std::runtime_error("torch_flashplug: quantized_kv must be the result of quantize_kv for the same sizes and " +
                             std::string("precision: int32 [") + std::to_string(words) +
                             "], aligned to 16 bytes, on the device of query.");
}

void quantized_attention_forward(StableIValue* stack, uint64_t, uint64_t) {
  constexpr Schema op = kQuantizedAttentionForward;
  const TensorHandle q = box::to_tensor(stack[op["query"]]), quantized_kv = box::to_tensor(stack[op["quantized_kv"]]),
                     samples = box::to_tensor(stack[op["key_samples"]]),
                     value = box::to_optional_tensor(stack[op["value"]]);
  const int64_t keys = box::to<int64_t>(stack[op["keys"]]), value_dim = box::to<int64_t>(stack[op["value_dim"]]);
  const int64_t precision = box::to<int64_t>(stack[op["precision"]]);
  const Causal causal = box::to<bool>(stack[op["is_causal"]]) ? Causal::kTopLeft : Causal::kNone;
  const std::optional<double> scale = box::to_optional_double(stack[op["scale"]]);
  check_precision(precision);
  const KeySizes sizes = read_key_sizes(samples, keys, value_dim);
  const bool has_value = is_defined(value.get());
  const TensorHandle k = make_unread_tensor(sizes, sizes.D, samples),
                     v = has_value ? TensorHandle::share(value.get()) : make_unread_tensor(sizes, sizes.Dv, samples);
  ForwardCall call{{q.get(), k.get(), v.get(), nullptr, 0.0, causal, scale}, {}};
  call.quantized_kv = quantized_kv.get(), call.key_samples = samples.get();
  const ReadFacts facts = read_facts(call);
  const CallFacts& p = facts.call;
  const DeviceFacts device = device_facts(facts.device_index());
  const Plan plan = plan_recipe(p, device, precision);
  call.mode = forcing(plan);
  note_plan("quantized_attention_fwd", p, device, call.mode, plan);
  ForwardResult result;
  if (runs_kernels(plan)) {
    const KernelRow& row = tables().kernels[plan.kernel_row];
    if (has_value == ((row.takes & tables().value_features) != 0))
      throw std::runtime_error(
          "torch_flashplug: value must be a tensor if precision keeps values in 16 bits, else None.");
    check_quantized_kv(quantized_kv.get(), quantized_kv_words(p, row), facts);
  }
  if (!runs_kernels(plan) || !our_forward(call, facts, plan, &result))
    result = quantized_attention_math(call, precision);
  stack[op.result("out")] = box::from_tensor(std::move(result.out));
  stack[op.result("lse")] = box::from_tensor(std::move(result.lse));
}

}  // namespace

void register_quantized(torch::stable::detail::StableLibrary* library) {
  library->impl("quantize_kv", &quantize_kv);
  library->impl("quantized_attention_fwd", &quantized_attention_forward);
}

}  // namespace flashplug
