// Custom ops behind attention(), for calls that F.sdpa has no arguments for. A plugin kernel serves a call wherever
// possible, since stock has no kernel to compare with. Otherwise the call runs the reference math that Python registers
// for each op.
//
//   torch_flashplug::quantized_kv_fwd: quantized KV cache, key and value in 8 bits (quantized_kv.py)
//   torch_flashplug::attention_fwd / attention_bwd: windows, sinks, differentiable LSE (attention.py)
//   torch_flashplug::_plan_lists: tile lists shared by calls of attention_fwd and attention_bwd (varlen_plan.py)
//   torch_flashplug::paged_fwd: paged KV cache (paged.py)
//   torch_flashplug::block_sparse_fwd / block_sparse_bwd: block-sparse lists (block_sparse_ops.cpp)
//   torch_flashplug::quantize_kv / quantized_attention_fwd: key and value quantized ahead (quantized_ops.cpp)
//   attention_fwd_out, paged_fwd_out: variants with an output tensor
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "core/attention_call.h"
#include "core/core.h"
#include "core/schemas.h"
#include "core/values.h"
#include "dispatch/dispatch.h"
#include "operands/operands.h"
#include "ops/ops.h"
#include "stock/stock.h"
#include "stock/torch_symbols.h"

namespace flashplug {

void check_fp32(const char* name, AtenTensorHandle tensor, std::initializer_list<int64_t> expected_size,
                const ReadFacts& facts) {
  static const int32_t fp32 = aoti_torch_dtype_float32();
  int32_t dtype = -1;
  int64_t dims = 0;
  Shape shape;
  check_shim(aoti_torch_get_dtype(tensor, &dtype), "get_dtype");
  check_shim(aoti_torch_get_dim(tensor, &dims), "get_dim");
  const bool fits = dtype == fp32 && dims == static_cast<int64_t>(expected_size.size()) && read_shape(tensor, &shape) &&
                    is_on_device_of(tensor, facts.operand[0]) &&
                    std::equal(expected_size.begin(), expected_size.end(), shape.size);
  if (fits) return;
  std::string sizes;
  for (int64_t size : expected_size) sizes += (sizes.empty() ? "" : ", ") + std::to_string(size);
  throw std::runtime_error(std::string("torch_flashplug: ") + name + " must be float32 [" + sizes +
                           "] on the device of query.");
}

bool wants_math(Mode mode) { return mode.backend() == Backend::kMath || mode.backend() == Backend::kStock; }

bool is_16_bit(const CallFacts& p) { return is_16_bit_float(p.dtype[0]); }

namespace {

// Return the number of rows of an int32 tensor that kernels can read; or -1. Rows must be contiguous, and the tensor
// must be on the query's device.
int64_t rows_of_int32(AtenTensorHandle x, int64_t dims, const ReadFacts& facts) {
  int32_t dtype = -1;
  int64_t tensor_dims = 0;
  Shape shape;
  const bool fits = is_defined(x) && aoti_torch_get_dtype(x, &dtype) == 0 && dtype == aoti_torch_dtype_int32() &&
                    aoti_torch_get_dim(x, &tensor_dims) == 0 && tensor_dims == dims && read_shape(x, &shape) &&
                    (shape.stride[dims - 1] == 1 || shape.size[dims - 1] <= 1) && is_on_device_of(x, facts.operand[0]);
  return fits ? shape.size[0] : -1;
}

void quantized_kv_forward(StableIValue* stack, uint64_t, uint64_t) {
  constexpr Schema op = kQuantizedKvForward;
  const TensorHandle q = box::to_tensor(stack[op["query"]]), k = box::to_tensor(stack[op["key"]]),
                     v = box::to_tensor(stack[op["value"]]), k_scale = box::to_tensor(stack[op["k_scale"]]),
                     v_scale = box::to_tensor(stack[op["v_scale"]]),
                     mask = box::to_optional_tensor(stack[op["attn_mask"]]);
  reject_internal_mask(mask.get());
  ForwardCall call{{q.get(), k.get(), v.get(), mask.get()}, {}};
  call.scale = box::to_optional_double(stack[op["scale"]]);
  call.k_scale = k_scale.get(), call.v_scale = v_scale.get();
  call.k_is_rotated = box::to<bool>(stack[op["k_is_rotated"]]);
  const ReadFacts facts = read_facts(call);
  const CallFacts& p = facts.call;
  check_fp32("k_scale", call.k_scale, {p.B, p.Hkv, p.Sk}, facts);
  check_fp32("v_scale", call.v_scale, {p.B, p.Hkv, p.Sk}, facts);
  const bool sees = !is_defined(call.mask) || mask_fits(call.mask, facts);  // all other masks are for stock to refuse
  const DeviceFacts device = device_facts(facts.device_index());
  const Plan plan = plan_in_op(p, device, tables());
  note_plan("quantized_kv_fwd", p, device, call.mode, plan);
  ForwardResult result;
  if (sees && plan.ours() && cpu_stub() != CpuStub::kMath && our_forward(call, facts, plan, &result)) {
    stack[0] = box::from_tensor(std::move(result.out));
    return;
  }
  stack[0] = box::from_tensor(cached_math(call));
}

// Return the plan under the mode of the thread or the process: a forced backend or the reason against it, else any
// available kernel. None of these kernels splits keys, whatever num_splits a call has.
Plan plan_attention_op(const CallFacts& p, const DeviceFacts& device, Mode mode) {
  if (wants_math(mode)) return {};
  return mode.forces_kernels() ? remembered_plan(p, device, Mode::forcing(mode.family()), tables())
                               : plan_in_op(p, device, tables());
}

// Raise an error for settings that no op takes, and bring the others into the form of kernels.
void normalize_settings(ForwardCall* given) {
  ForwardCall& call = *given;
  const auto [left, right, bottom_right] = *call.window;
  if (left < -1 || right < -1)
    throw std::runtime_error("torch_flashplug: the bounds of a window must be -1 (no bound) or more, but got (" +
                             std::to_string(left) + ", " + std::to_string(right) + ").");
  if (!(call.softcap >= 0.0 && call.softcap <= std::numeric_limits<float>::max()))
    throw std::runtime_error("torch_flashplug: softcap must be 0 (no softcap) or a positive finite number, but got " +
                             std::to_string(call.softcap) + ".");
  const int64_t splits = call.num_splits, size = call.fixed_split_size;
  if (splits < 0 || splits > tables().layout.max_splits)
    throw std::runtime_error("torch_flashplug: num_splits=" + std::to_string(splits) + " is not valid. Pass 1 to " +
                             std::to_string(tables().layout.max_splits) + ", or 0 for the fastest number.");
  if (size < 0 || size % tables().layout.split_unit != 0 || (size != 0 && splits != 0))
    throw std::runtime_error("torch_flashplug: fixed_split_size=" + std::to_string(size) +
                             " with num_splits=" + std::to_string(splits) +
                             " is not valid. Pass only num_splits, or a fixed_split_size in multiples of " +
                             std::to_string(tables().layout.split_unit));
  // Kernels count in 32 bits. No sequence has twice as many keys as the limit, so a larger size makes no other splits.
  call.fixed_split_size = std::min(call.fixed_split_size, tables().layout.max_total_rows);
}

// Read the `kSettings` of an op with settings of attention() into the call.
template <const Schema& op>
void read_settings(StableIValue* stack, ForwardCall* call) {
  call->window.emplace();
  visit_settings([&]<size_t index>() {
    constexpr auto setting = std::get<index>(kSettings);
    auto& value = setting.value_in(*call);
    value = box::to<std::remove_reference_t<decltype(value)>>(stack[op[setting.name()]]);
  });
}

// Return the facts for a plan of any kernel. Such a plan counts as forced, so shared values are permitted here.
CallFacts with_permitted_sharing(CallFacts p, Mode mode) {
  p.shared_values = may_share_values(p, mode, tables());
  return p;
}

void check_packed_sizes(const CallFacts& p) {
  if (p.B != 1)
    throw std::runtime_error("torch_flashplug: packed sequences must have batch size 1, but got " +
                             std::to_string(p.B));
  if (p.Sq + p.Sk >= tables().layout.max_total_rows)
    throw std::runtime_error("torch_flashplug: packed sequences must have fewer than 2^30 rows and keys together.");
}

}  // namespace

// Only shapes are checked here; kernels clamp the values on the device.
void check_lengths(const ForwardCall& call, const ReadFacts& facts) {
  if (!is_defined(call.cu_seqlens_q) && !is_defined(call.cu_seqlens_k) && !is_defined(call.seqused_k)) return;
  const int64_t starts = rows_of_int32(call.cu_seqlens_q, 1, facts);
  if (starts < 1 || rows_of_int32(call.cu_seqlens_k, 1, facts) != starts ||
      (is_defined(call.seqused_k) && rows_of_int32(call.seqused_k, 1, facts) != starts - 1))
    throw std::runtime_error(
        "torch_flashplug: cu_seqlens_q and cu_seqlens_k must be int32 [sequences + 1], and seqused_k int32 "
        "[sequences], contiguous and on the device of query.");
  check_packed_sizes(facts.call);
}

bool attend(const char* where, const ForwardCall& call, const ReadFacts& facts, Mode by, ForwardResult* result) {
  const CallFacts p = with_permitted_sharing(facts.call, by);
  const DeviceFacts device = device_facts(facts.device_index());
  const Plan plan = plan_attention_op(p, device, by);
  note_plan(where, p, device, by, plan);
  if (plan.ours() && cpu_stub() != CpuStub::kMath && our_forward(call, facts, plan, result)) return true;
  // A call without elements needs no backend.
  if (call.mode.forces_kernels() && !is_empty(p))
    throw std::runtime_error(forced_error(p, device, call.mode, tables()));
  return false;
}

namespace {

// Facts and mode of a backward call. Any plugin kernel may run. The current thread's mode does not count, because
// another thread's mode is not the call's. The settings of torch are the current settings.
CallFacts backward_facts(const ReadFacts& facts) {
  CallFacts p = facts.call;
  read_torch_settings(&p);
  return p;
}
Mode by_any(const CallFacts& p, Mode mode) {
  const bool is_auto = mode.backend() == Backend::kAuto;
  return is_auto && has_unmeasured_gradients(p, tables()) ? mode : Mode::forcing(std::max(mode.family(), 0));
}

}  // namespace

bool differentiate_attention(const BackwardCall& call, const ReadFacts& facts, BackwardResult* result) {
  const CallFacts p = backward_facts(facts);
  return our_backward(call, p, device_facts(facts.device_index()), facts.device_index(), by_any(p, call.forward.mode),
                      result);
}

namespace {

void check_out(const ForwardCall& call, const ReadFacts& facts) {
  if (call.out == nullptr) return;
  const CallFacts& p = facts.call;
  const int64_t expected_size[4] = {p.B, p.Hq, p.Sq, p.Dv};
  TensorMeta out;
  Shape shape;
  if (!read_meta(call.out, &out) || out.dtype != p.dtype[0] || out.dim != 4 || !read_shape(call.out, &shape) ||
      !std::equal(expected_size, expected_size + 4, shape.size) || !is_on_device_of(call.out, facts.operand[0]))
    throw std::runtime_error("torch_flashplug: out must be [B, Hq, Sq, Dv] in the dtype and on the device of query.");
}

// Only shapes are checked here; kernels clamp the values on the device.
void check_pages(const ForwardCall& call, const ReadFacts& facts) {
  const CallFacts& p = facts.call;
  const bool is_packed = is_defined(call.cu_seqlens_q);
  const int64_t sequences = is_packed ? rows_of_int32(call.cu_seqlens_q, 1, facts) - 1 : p.B;
  if (sequences < 0 || rows_of_int32(call.block_table, 2, facts) != sequences ||
      rows_of_int32(call.seqused_k, 1, facts) != sequences)
    throw std::runtime_error(
        "torch_flashplug: block_table must be int32 [B, n], seqused_k int32 [B], and cu_seqlens_q int32 [B + 1] or "
        "None, with contiguous rows and on the device of query.");
  if (is_packed) check_packed_sizes(p);
  if (is_defined(call.k_scale) != is_defined(call.v_scale))
    throw std::runtime_error("torch_flashplug: k_scale and v_scale must be both given or both None. Pass both scales.");
  if (!is_defined(call.k_scale)) return;
  const int64_t* key = facts.shape[1].size;
  check_fp32("k_scale", call.k_scale, {key[0], key[1], key[2]}, facts);
  check_fp32("v_scale", call.v_scale, {key[0], key[1], key[2]}, facts);
}

// Return true if kernels can read the pages: rows copied together by a thread lie in the same page
// (kernels/features/paged_kv.py).
bool are_pages_readable(const ForwardCall& call, const ReadFacts& facts) {
  Shape block_table;
  return read_shape(call.block_table, &block_table) && facts.shape[1].size[0] > 0 &&
         (block_table.size[1] == 1 || facts.shape[1].size[2] % tables().layout.page_group_rows == 0);
}

// Check the splits of a fixed split size: not more than num_splits may be, and partial results that kernels can count
// in 32 bits.
void check_splits(const CallFacts& p, int64_t splits) {
  if (splits > tables().layout.max_splits)
    throw std::runtime_error("torch_flashplug: fixed_split_size=" + std::to_string(p.split_size) + " makes " +
                             std::to_string(splits) + " splits of " + std::to_string(p.Sk) +
                             " keys, but the limit is " + std::to_string(tables().layout.max_splits) +
                             ". Pass a larger size.");
  if (partial_floats(p, splits) > std::numeric_limits<int32_t>::max())
    throw std::runtime_error("torch_flashplug: " + std::to_string(splits) +
                             " splits of fixed_split_size=" + std::to_string(p.split_size) +
                             " make more than 2^31 partial results. Pass a larger size, or fewer sequences.");
}

// Return the plan of a call whose pages are read in place. The forward kernels of packed queries run under a forced
// backend, or from a number of rows on.
Plan plan_pages(const ForwardCall& call, const CallFacts& p, const DeviceFacts& device) {
  if (!is_defined(call.cu_seqlens_q)) return plan_in_op(p, device, tables(), call.num_splits);
  if (call.mode.forces_kernels()) return plan_call(p, device, call.mode, tables());
  return p.Sq < tables().cost_model.min_paged_rows ? Plan{} : plan_in_op(p, device, tables());
}

// Run a kernel that reads the pages in place. Returns false without a kernel.
bool attend_pages(const ForwardCall& call, const ReadFacts& facts, ForwardResult* result) {
  const CallFacts p = with_permitted_sharing(facts.call, call.mode);
  const DeviceFacts device = device_facts(facts.device_index());
  const bool fits = are_pages_readable(call, facts);
  const Plan plan = fits ? plan_pages(call, p, device) : Plan{};
  if (p.split_size > 0 && plan.ours()) check_splits(p, plan.splits.n);
  note_plan("paged_fwd", p, device, call.mode, plan);
  const bool math = wants_math(call.mode) || cpu_stub() == CpuStub::kMath;
  return !math && plan.ours() && our_forward(call, facts, plan, result);
}

}  // namespace

bool attend_by_kernel(ForwardCall* given, ForwardResult* result) {
  normalize_settings(given);
  const ForwardCall& call = *given;
  const ReadFacts facts = read_facts(call);
  const bool is_paged = is_defined(call.block_table);
  check_out(call, facts);
  is_paged ? check_pages(call, facts) : check_lengths(call, facts);
  const CallFacts& p = facts.call;
  if (is_defined(call.sinks) && is_16_bit(p)) check_fp32("sinks", call.sinks, {p.Hq}, facts);
  return is_paged ? attend_pages(call, facts, result) : attend("attention_fwd", call, facts, call.mode, result);
}

namespace {

// Return the LSE, after a copy of the result into the call's own output, if necessary.
StableIValue lse_after_copy(AtenTensorHandle out, ForwardResult result) {
  if (!result.in_place) copy_tensor(out, result.out.get());
  return box::from_tensor(std::move(result.lse));
}

template <const Schema& op>
TensorHandle read_plan(StableIValue* stack, ForwardCall* call) {
  TensorHandle tile_lists = box::to_optional_tensor(stack[op["plan"]]);
  call->tile_lists = tile_lists.get();
  call->plan_key = box::to<int64_t>(stack[op["plan_key"]]);
  return tile_lists;
}

template <const Schema& op>
ForwardResult attention_from_stack(StableIValue* stack, AtenTensorHandle out = nullptr) {
  const TensorHandle q = box::to_tensor(stack[op["query"]]), k = box::to_tensor(stack[op["key"]]),
                     v = box::to_tensor(stack[op["value"]]), sinks = box::to_optional_tensor(stack[op["sinks"]]);
  const TensorHandle cu_seqlens_q = box::to_optional_tensor(stack[op["cu_seqlens_q"]]),
                     cu_seqlens_k = box::to_optional_tensor(stack[op["cu_seqlens_k"]]),
                     seqused_k = box::to_optional_tensor(stack[op["seqused_k"]]);
  ForwardCall call{{q.get(), k.get(), v.get()}, mode_of_op(box::to<int64_t>(stack[op["block_mode"]]))};
  read_settings<op>(stack, &call);
  call.out = out;
  call.sinks = sinks.get();
  call.cu_seqlens_q = cu_seqlens_q.get(), call.cu_seqlens_k = cu_seqlens_k.get(), call.seqused_k = seqused_k.get();
  const TensorHandle tile_lists = read_plan<op>(stack, &call);
  ForwardResult result;
  return attend_by_kernel(&call, &result) ? std::move(result) : attention_math(call);
}

void attention_forward(StableIValue* stack, uint64_t, uint64_t) {
  constexpr Schema op = kAttentionForward;
  ForwardResult result = attention_from_stack<kAttentionForward>(stack);
  stack[op.result("out")] = box::from_tensor(std::move(result.out));
  stack[op.result("lse")] = box::from_tensor(std::move(result.lse));
}

void planned_lists(StableIValue* stack, uint64_t, uint64_t) {
  constexpr Schema op = kPlanLists;
  const TensorHandle q = box::to_tensor(stack[op["query"]]), k = box::to_tensor(stack[op["key"]]),
                     v = box::to_tensor(stack[op["value"]]), cu_seqlens_q = box::to_tensor(stack[op["cu_seqlens_q"]]),
                     cu_seqlens_k = box::to_tensor(stack[op["cu_seqlens_k"]]),
                     seqused_k = box::to_optional_tensor(stack[op["seqused_k"]]);
  ForwardCall call{{q.get(), k.get(), v.get()}, effective_mode()};
  read_settings<kPlanLists>(stack, &call);
  normalize_settings(&call);
  call.cu_seqlens_q = cu_seqlens_q.get(), call.cu_seqlens_k = cu_seqlens_k.get(), call.seqused_k = seqused_k.get();
  const ReadFacts facts = read_facts(call);
  check_lengths(call, facts);
  const DeviceFacts device = device_facts(facts.device_index());
  const bool kernels = cpu_stub() != CpuStub::kMath;
  const Plan plan = kernels ? plan_attention_op(facts.call, device, call.mode) : Plan{};
  BackwardPlan backward;
  if (kernels && box::to<bool>(stack[op["gradients"]])) {
    CallFacts p = backward_facts(facts);
    p.grad = true;
    backward = plan_backward(p, device, by_any(p, call.mode), tables());
  }
  PlannedLists lists = plan_lists(call, facts, plan, backward);
  stack[op.result("lists")] = box::from_tensor(std::move(lists.lists));
  stack[op.result("key")] = box::from(lists.key);
}

void attention_forward_out(StableIValue* stack, uint64_t, uint64_t) {
  const TensorHandle out = box::to_tensor(stack[kAttentionForwardOut["out"]]);
  stack[0] = lse_after_copy(out.get(), attention_from_stack<kAttentionForwardOut>(stack, out.get()));
}

template <const Schema& op>
ForwardResult paged_from_stack(StableIValue* stack, AtenTensorHandle out = nullptr) {
  const TensorHandle q = box::to_tensor(stack[op["query"]]), k = box::to_tensor(stack[op["key"]]),
                     v = box::to_tensor(stack[op["value"]]), block_table = box::to_tensor(stack[op["block_table"]]),
                     seqused_k = box::to_tensor(stack[op["seqused_k"]]);
  const TensorHandle k_scale = box::to_optional_tensor(stack[op["k_scale"]]),
                     v_scale = box::to_optional_tensor(stack[op["v_scale"]]),
                     sinks = box::to_optional_tensor(stack[op["sinks"]]),
                     cu_seqlens_q = box::to_optional_tensor(stack[op["cu_seqlens_q"]]);
  ForwardCall call{{q.get(), k.get(), v.get()}, mode_of_op(box::to<int64_t>(stack[op["block_mode"]]))};
  read_settings<op>(stack, &call);
  call.out = out;
  call.cu_seqlens_q = call.cu_seqlens_k = cu_seqlens_q.get();
  call.block_table = block_table.get(), call.seqused_k = seqused_k.get(), call.sinks = sinks.get();
  if (is_defined(k_scale.get())) call.k_scale = k_scale.get();
  if (is_defined(v_scale.get())) call.v_scale = v_scale.get();
  ForwardResult result;
  return attend_by_kernel(&call, &result) ? std::move(result) : paged_math(call);
}

void paged_forward(StableIValue* stack, uint64_t, uint64_t) {
  constexpr Schema op = kPagedForward;
  ForwardResult result = paged_from_stack<kPagedForward>(stack);
  stack[op.result("out")] = box::from_tensor(std::move(result.out));
  stack[op.result("lse")] = box::from_tensor(std::move(result.lse));
}

void paged_forward_out(StableIValue* stack, uint64_t, uint64_t) {
  const TensorHandle out = box::to_tensor(stack[kPagedForwardOut["out"]]);
  stack[0] = lse_after_copy(out.get(), paged_from_stack<kPagedForwardOut>(stack, out.get()));
}

void attention_backward(StableIValue* stack, uint64_t, uint64_t) {
  constexpr Schema op = kAttentionBackward;
  const TensorHandle grad = box::to_tensor(stack[op["grad_out"]]),
                     grad_lse = box::to_optional_tensor(stack[op["grad_lse"]]), q = box::to_tensor(stack[op["query"]]),
                     k = box::to_tensor(stack[op["key"]]), v = box::to_tensor(stack[op["value"]]),
                     out = box::to_tensor(stack[op["out"]]), lse = box::to_tensor(stack[op["lse"]]);
  const TensorHandle cu_seqlens_q = box::to_optional_tensor(stack[op["cu_seqlens_q"]]),
                     cu_seqlens_k = box::to_optional_tensor(stack[op["cu_seqlens_k"]]);
  ForwardCall forward{{q.get(), k.get(), v.get()}, mode_of_op(box::to<int64_t>(stack[op["block_mode"]]))};
  read_settings<kAttentionBackward>(stack, &forward);
  normalize_settings(&forward);
  forward.cu_seqlens_q = cu_seqlens_q.get(), forward.cu_seqlens_k = cu_seqlens_k.get();
  const TensorHandle tile_lists = read_plan<kAttentionBackward>(stack, &forward);
  BackwardCall call{grad.get(), forward, out.get(), lse.get(), nullptr, nullptr, {true, true, true, false}};
  call.grad_lse = grad_lse.get();
  call.wants_delta = box::to<bool>(stack[op["wants_delta"]]);
  const ReadFacts facts = read_facts(forward);
  check_lengths(forward, facts);
  if (call.wants_delta && is_defined(forward.cu_seqlens_q))
    throw std::runtime_error(
        "torch_flashplug: wants_delta must be False with packed sequences: attention_bwd returns no delta. Leave "
        "wants_delta out.");
  const CallFacts& p = facts.call;
  if (is_16_bit(p)) {
    check_fp32("lse", call.lse, {p.B, p.Hq, p.Sq}, facts);
    if (is_defined(call.grad_lse)) check_fp32("grad_lse", call.grad_lse, {p.B, p.Hq, p.Sq}, facts);
  }
  BackwardResult result;
  if (wants_math(forward.mode) || !differentiate_attention(call, facts, &result))
    result = attention_math_backward(call);
  if (!result.delta.defined()) result.delta = placeholder(forward, aoti_torch_dtype_float32());
  for (int i = 0; i < 3; ++i) stack[i] = box::from_tensor(std::move(result.grads[i]));
  stack[op.result("delta")] = box::from_tensor(std::move(result.delta));
}

}  // namespace

void register_own_ops(torch::stable::detail::StableLibrary* library) {
  library->impl("quantized_kv_fwd", &quantized_kv_forward);
  library->impl("attention_fwd", &attention_forward);
  library->impl("attention_bwd", &attention_backward);
  library->impl("attention_fwd_out", &attention_forward_out);
  library->impl("_plan_lists", &planned_lists);
  library->impl("paged_fwd", &paged_forward);
  register_listed(library);
  register_quantized(library);
  library->impl("paged_fwd_out", &paged_forward_out);
}

}  // namespace flashplug
