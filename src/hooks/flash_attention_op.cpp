// Override of aten::_flash_attention_forward and ..._backward at a dispatch key, over stock's kernels. Callers are
// jagged and strided nested tensors, lower-right causal masks of torch.nn.attention.bias, context parallel, and stock's
// own dense flash attention.
//
//   (T, H, D) with both cu_seq           packed sequences: plugin kernels by the rules of varlen_attn
//   (B, S, H, D), many rows, a window    or bottom-right causal: plugin kernels by the rules of attention()
//   all remaining calls                  plain dense calls, dropout, pages, ...: stock's kernel, called below the
//                                        override
//
// Callers here did not ask for the plugin by name. So a forced backend takes calls that its kernels can run and leaves
// the rest.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/attention_call.h"
#include "core/core.h"
#include "core/values.h"
#include "dispatch/varlen_decision.h"
#include "hooks/hooks.h"
#include "hooks/varlen_common.h"
#include "operands/operands.h"
#include "stock/stock.h"

namespace flashplug {

namespace {

using torch::stable::detail::StableLibrary;

// ---- ops of torch ----

#define FLASHPLUG_OPERANDS                                                                                         \
  "Tensor query, Tensor key, Tensor value, Tensor? cum_seq_q, Tensor? cum_seq_k, SymInt max_q, SymInt max_k, "     \
  "float dropout_p, bool is_causal, bool return_debug_mask, *, float? scale=None, SymInt? window_size_left=None, " \
  "SymInt? window_size_right=None, Tensor? seqused_k=None, Tensor? alibi_slopes=None"
#define FLASHPLUG_PAGES ", Tensor? block_table=None, int? num_splits=None"
#define FLASHPLUG_FIVE \
  "(Tensor output, Tensor softmax_logsumexp, Tensor rng_state, Tensor unused, Tensor debug_attn_mask)"

// Schemas that stock_kernels.cpp can call. Where a schema has changed, torch 2.11's form comes first.
constexpr const char* kForms[] = {
    "aten::_flash_attention_forward(" FLASHPLUG_OPERANDS ") -> " FLASHPLUG_FIVE,
    "aten::_flash_attention_forward(" FLASHPLUG_OPERANDS FLASHPLUG_PAGES ") -> " FLASHPLUG_FIVE,
    "aten::_flash_attention_forward_no_dropout_inplace(Tensor(a!) out, " FLASHPLUG_OPERANDS FLASHPLUG_PAGES
    ") -> Tensor softmax_logsumexp",
    "aten::_flash_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, "
    "Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, "
    "bool is_causal, Tensor rng_state, Tensor unused, *, float? scale=None, SymInt? window_size_left=None, "
    "SymInt? window_size_right=None) -> (Tensor, Tensor, Tensor)"};

struct Op {
  const char* name;
  std::atomic<const LiveSchema*> schema{nullptr};
};
Op forward_op{"_flash_attention_forward"}, into_op{"_flash_attention_forward_no_dropout_inplace"},
    backward_op{"_flash_attention_backward"};

std::atomic<bool> preferred{false};

// Return the arguments in the form of stock's kernel.
VarlenFlashCall stock_call(const BoxedArgs& args) {
  return {args.tensor(Arg::kQuery),
          args.tensor(Arg::kKey),
          args.tensor(Arg::kValue),
          args.tensor(Arg::kCuSeqlensQ),
          args.tensor(Arg::kCuSeqlensK),
          args.integer(Arg::kMaxQ).value_or(0),
          args.integer(Arg::kMaxK).value_or(0),
          args.real(Arg::kDropout).value_or(0.0),
          args.flag(Arg::kCausal),
          args.flag(Arg::kDebugMask),
          args.real(Arg::kScale),
          args.integer(Arg::kLeft),
          args.integer(Arg::kRight),
          args.tensor(Arg::kSeqUsedK),
          args.tensor(Arg::kAlibi),
          args.tensor(Arg::kBlockTable),
          args.integer(Arg::kSplits)};
}

void require_stock_flash(bool is_available) {
  if (!is_available)
    throw std::runtime_error(
        "torch_flashplug: this torch has no flash attention here, so stock cannot serve the call.");
}

// ---- owner of a call ----

Window window_of_call(const BoxedArgs& args) {
  return bottom_right(args.integer(Arg::kLeft), args.integer(Arg::kRight), args.flag(Arg::kCausal));
}

// Return true if a window needs a mask in F.sdpa, and if the call has more rows than a masked call handles better. The
// same rule holds in attention() (attention.py).
bool needs_window_kernel(const BoxedArgs& args, const Window& window) {
  const Shape q = shape_of(args.tensor(Arg::kQuery)), k = shape_of(args.tensor(Arg::kKey));
  const int64_t Sq = q.size[1], Sk = k.size[1], group = k.size[2] > 0 ? q.size[2] / k.size[2] : 0;
  const bool left = window.left >= 0 && window.left < Sk - 1, right = window.right >= 0 && window.right < Sq - 1;
  const bool plain = Sq == Sk && window.right == 0 && !left;
  const bool few = group * Sq <= tables().cost_model.max_decode_rows;
  return (left || right) && !plain && (!few || preferred.load());
}

// Return true if query and value have the same size in dim `last`.
bool has_one_head_dim(const BoxedArgs& args, int dim) {
  return shape_of(args.tensor(Arg::kQuery)).size[dim] == shape_of(args.tensor(Arg::kValue)).size[dim];
}

// Return true if a plugin kernel should run the call: enabled, supported, and either requested or measured.
bool should_run_kernel(const BoxedArgs& args, Mode mode, const Window& window) {
  if (!enabled() || (mode.backend() != Backend::kAuto && mode.family() < 0)) return false;
  if (args.real(Arg::kDropout).value_or(0.0) != 0.0 || args.flag(Arg::kDebugMask)) return false;
  const bool has_cu_seqlens_q = args.tensor(Arg::kCuSeqlensQ) != nullptr,
             has_cu_seqlens_k = args.tensor(Arg::kCuSeqlensK) != nullptr;
  if (has_cu_seqlens_q != has_cu_seqlens_k || !kernels_support(args, has_cu_seqlens_q ? 3 : 4) ||
      (!has_cu_seqlens_q && !needs_window_kernel(args, window)))
    return false;
  if (!has_cu_seqlens_q && args.tensor(Arg::kSeqUsedK) != nullptr) return false;
  if (!has_one_head_dim(args, has_cu_seqlens_q ? 2 : 3)) return false;  // torch's fake kernels know no other shape
  return mode.family() >= 0 || flash_is_measured(compute_capability(args.tensor(Arg::kQuery)), tables());
}

bool run_kernel(const BoxedArgs& args, AtenTensorHandle into, FlashResult* result) {
  const Mode mode = effective_mode();
  const Window window = window_of_call(args);
  if (!should_run_kernel(args, mode, window)) return false;
  HookedCall hooked(args, window, into);
  if (mode.forces_kernels()) hooked.call.mode = Mode::preferring(mode.backend());
  ForwardResult forward_result;
  if (!run_with_kernels("_flash_attention_forward", hooked, &forward_result)) return false;
  *result = to_stock_layout(std::move(forward_result), hooked, args.tensor(Arg::kQuery));
  return true;
}

// ---- op implementations ----

void forward(StableIValue* stack, uint64_t count, uint64_t) {
  const BoxedArgs args(*forward_op.schema.load(), stack, count);
  FlashResult result;
  if (!run_kernel(args, nullptr, &result)) {
    require_stock_flash(has_stock_varlen_flash());
    AtenTensorHandle results[5];
    stock_varlen_flash_forward(stock_call(args), results);
    for (int i = 0; i < 5; ++i) stack[i] = box::from_tensor(TensorHandle(results[i]));
    return;
  }
  TensorMeta query;
  read_meta(args.tensor(Arg::kQuery), &query);
  const int64_t no_elements = 0, unit_stride = 1;
  stack[0] = box::from_tensor(std::move(result.out));
  stack[1] = box::from_tensor(std::move(result.lse));
  stack[2] = box::from_tensor(std::move(result.rng));
  stack[3] = box::from_tensor(
      empty_strided(0, &no_elements, &unit_stride, aoti_torch_dtype_uint64(), query.device_type, query.device_index));
  stack[4] = box::from_tensor(new_like(args.tensor(Arg::kQuery), 1, &no_elements, &unit_stride, nullptr));
}

void forward_into(StableIValue* stack, uint64_t count, uint64_t) {
  const BoxedArgs args(*into_op.schema.load(), stack, count);
  const AtenTensorHandle out = args.tensor(Arg::kOut);
  FlashResult result;
  if (!run_kernel(args, out, &result)) {
    require_stock_flash(has_stock_varlen_flash_out());
    stack[0] = box::from_tensor(TensorHandle(stock_varlen_flash_out(out, stock_call(args))));
    return;
  }
  copy_result(out, result.out.get());
  stack[0] = box::from_tensor(std::move(result.lse));
}

void backward(StableIValue* stack, uint64_t count, uint64_t) {
  const BoxedArgs args(*backward_op.schema.load(), stack, count);
  TensorHandle grads[3];
  if (!is_ours(args.tensor(Arg::kRng)) || !gradients_with_kernels(args, window_of_call(args), grads)) {
    require_stock_flash(has_stock_varlen_flash());
    constexpr Arg tensors[] = {Arg::kGradOut, Arg::kQuery,      Arg::kKey,        Arg::kValue, Arg::kOut,
                               Arg::kLse,     Arg::kCuSeqlensQ, Arg::kCuSeqlensK, Arg::kRng,   Arg::kUnused};
    AtenTensorHandle handles[std::size(tensors)], results[3];
    std::ranges::transform(tensors, handles, [&args](Arg arg) { return args.undefined(arg); });
    stock_varlen_flash_backward(handles, stock_call(args), results);
    for (int i = 0; i < 3; ++i) grads[i] = TensorHandle(results[i]);
  }
  for (int i = 0; i < 3; ++i) stack[i] = box::from_tensor(std::move(grads[i]));
}

std::mutex mutex;
std::unique_ptr<StableLibrary>& library() {
  static auto* instance = new std::unique_ptr<StableLibrary>();  // outlives the dispatcher's own teardown
  return *instance;
}

}  // namespace

bool set_flash_schema(const char* schema) {
  const auto known_form =
      std::ranges::find_if(kForms, [&](const char* form) { return std::strcmp(form, schema) == 0; });
  if (known_form == std::end(kForms)) return false;
  for (Op* op : {&forward_op, &into_op, &backward_op}) {
    const std::string of_op = std::string("aten::") + op->name + "(";
    if (std::strncmp(schema, of_op.c_str(), of_op.size()) == 0 && op->schema.load() == nullptr)
      op->schema.store(new LiveSchema(*known_form));
  }
  return true;
}

void register_flash_op(const char* dispatch_key) {
  std::lock_guard<std::mutex> lock(mutex);
  // There is no kernel of torch at key CPU, where the CPU stub backend registers.
  const bool on_cpu = std::strcmp(dispatch_key, "CPU") == 0;
  library().reset();
  if (forward_op.schema.load() == nullptr || backward_op.schema.load() == nullptr ||
      !(on_cpu || has_stock_varlen_flash()))
    throw std::runtime_error(
        "torch_flashplug: the flash attention of this torch cannot be called: the schema is unknown, or symbols are "
        "missing.");
  auto library_of_ops =
      std::make_unique<StableLibrary>(StableLibrary::Kind::IMPL, "aten", dispatch_key, kOwner, __LINE__);
  library_of_ops->impl(forward_op.name, &forward);
  library_of_ops->impl(backward_op.name, &backward);
  if (into_op.schema.load() != nullptr && (on_cpu || has_stock_varlen_flash_out()))
    library_of_ops->impl(into_op.name, &forward_into);
  library() = std::move(library_of_ops);
}

void unregister_flash_op() {
  std::lock_guard<std::mutex> lock(mutex);
  library().reset();
}

void enable_flash_op_decode(bool on) { preferred.store(on); }

}  // namespace flashplug
