// Plugin kernels behind torch.nn.attention.varlen, registered for torch's private ops at a dispatch key without a
// kernel of torch. Nothing is thereby overridden. All other calls go to the body that torch would have run, and
// unregistering leaves no trace. Autograd, fake kernels and compilation stay torch's.
//
// torch's module defines the ops at import, which takes a second and is up to the caller. The schemas are therefore
// requested at the first call.
#include <torch/csrc/stable/library.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
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
#include "stock/torch_symbols.h"

namespace flashplug {

namespace {

using torch::stable::detail::StableLibrary;

// ---- ops of torch ----

struct Op {
  const char* name;   // name in torch_attn
  const char* stock;  // op with torch's own body
  std::atomic<const LiveSchema*> schema{nullptr};
};
Op forward_op{"_varlen_attn", "torch_flashplug::_stock_varlen_attn"};
Op forward_out_op{"_varlen_attn_out", "torch_flashplug::_stock_varlen_attn_out"};
Op backward_op{"_varlen_attn_backward", "torch_flashplug::_stock_varlen_attn_backward"};

constexpr const char* kFlashBackward = "torch_flashplug::_flash_varlen_attn_backward";

std::atomic<PrepareCallback> prepare{nullptr};

const LiveSchema& schema_of(Op& op) {
  const LiveSchema* schema = op.schema.load(std::memory_order_acquire);
  if (schema == nullptr) {
    if (const PrepareCallback callback = prepare.load()) callback();
    schema = op.schema.load(std::memory_order_acquire);
  }
  if (schema == nullptr)
    throw std::runtime_error(std::string("torch_flashplug: the schema of torch_attn::") + op.name + " is not known.");
  return *schema;
}

void run_stock(BoxedArgs& args, const Op& op) { args.call_stock_op(op.stock); }

// ---- owner of a call ----

// The rule by which the running torch chooses the kernel of its body.
std::atomic<VarlenRule> rule{VarlenRule::kUnknown};

// Return true if cuDNN's varlen attention reads the tensor: whole units of 16 bytes, contiguous rows, no broadcast.
bool is_readable_by_cudnn(AtenTensorHandle tensor) {
  const Shape shape = shape_of(tensor);
  const int64_t bytes = element_bytes(tensor), last_dim = dims_of(tensor) - 1;
  bool fits = last_dim >= 0 && shape.stride[last_dim] == 1;
  for (int64_t i = 0; i < last_dim; ++i) {
    const bool is_broadcast = shape.size[i] > 1 && shape.stride[i] == 0;
    fits &= !is_broadcast && shape.stride[i] * bytes % kUnitBytes == 0;
  }
  const void* data = nullptr;
  check_shim(torch_get_const_data_ptr(tensor, &data), "get_const_data_ptr");
  return fits && reinterpret_cast<int64_t>(data) % kUnitBytes == 0;
}

// Read the facts of a varlen call. `cc`: compute capability of the GPU for plugin kernels; 0 if no plugin kernel reads
// the tensors.
VarlenCall facts_of_call(const BoxedArgs& args, int* cc) {
  const AtenTensorHandle q = args.tensor(Arg::kQuery), k = args.tensor(Arg::kKey), v = args.tensor(Arg::kValue);
  const auto size = [](AtenTensorHandle tensor, int64_t from_end) {
    const int64_t dims = tensor == nullptr ? 0 : dims_of(tensor);
    return dims < from_end ? int64_t{0} : shape_of(tensor).size[dims - from_end];
  };
  TensorMeta query;
  if (q != nullptr) read_meta(q, &query);
  const std::array<int64_t, 2> window = args.pair(Arg::kWindow).value_or(std::array<int64_t, 2>{-1, -1});
  const bool has_choice = args.has(Arg::kBackend);
  VarlenCall call;
  call.rule = static_cast<int64_t>(rule.load(std::memory_order_relaxed));
  call.backend = args.integer(Arg::kBackend).value_or(-1);
  // A torch version without the op's `backend` argument does not ask sdpa_kernel either.
  call.allowed = !has_choice || torch_symbols().flash_enabled() || torch_symbols().overrideable_enabled();
  call.writes_out = args.has(Arg::kOut);
  call.enable_gqa = args.flag(Arg::kGrouped);
  call.max_q = args.integer(Arg::kMaxQ).value_or(0);
  call.heads_q = size(q, 2), call.heads_k = size(k, 2);
  call.D = size(q, 1), call.Dv = size(v, 1);
  call.dtype = static_cast<int64_t>(query.dtype);
  const bool unbounded = window == std::array<int64_t, 2>{-1, -1}, causal = window == std::array<int64_t, 2>{-1, 0};
  call.window = static_cast<int64_t>(unbounded ? VarlenWindow::kNone
                                     : causal  ? VarlenWindow::kCausal
                                               : VarlenWindow::kOther);
  call.splits = args.integer(Arg::kSplits).value_or(-1);
  call.paged = args.tensor(Arg::kBlockTable) != nullptr;
  call.has_cu_seqlens_k = args.tensor(Arg::kCuSeqlensK) != nullptr;
  call.has_seqused_k = args.tensor(Arg::kSeqUsedK) != nullptr;
  call.readable = operands_fit(args, 3, call.paged != 0 ? 4 : 3);
  call.out_fits = out_fits(args);
  call.unknown_value = args.has_unknown_value();
  *cc = call.readable != 0 ? compute_capability(q) : 0;
  if (call.readable != 0 && stock_varlen_kernel(call, *cc) == kVarlenCudnn) {  // only cuDNN depends on these facts
    call.misaligned = !is_readable_by_cudnn(q) || !is_readable_by_cudnn(k) || !is_readable_by_cudnn(v);
    call.unusual_scale = scale_of(args.real(Arg::kScale)) != Scale::kPositive;
  }
  return call;
}

// Return true if a plugin kernel should run the call. Throws if a forced backend cannot run the call.
bool should_run_kernel(const BoxedArgs& args) {
  if (args.has(Arg::kWindow) && !args.pair(Arg::kWindow)) return false;  // stock reports the error
  const Mode mode = effective_mode();
  if (!enabled()) return false;
  int cc = 0;
  const VarlenCall call = facts_of_call(args, &cc);
  const VarlenDecision decision = decide_varlen(call, true, mode, cc, tables());
  if (decision.reason == VarlenDecisionReason::kUnsupported && mode.forces_kernels())
    throw std::runtime_error(forced_varlen_error(call, mode, tables()));
  return decision.ours();
}

Window window_of_call(const BoxedArgs& args) {
  const auto window = args.pair(Arg::kWindow).value_or(std::array<int64_t, 2>{-1, -1});
  return bottom_right(window[0], window[1], args.flag(Arg::kCausal));
}

// Run a plugin kernel if selected. `into`: null, or the output tensor.
bool run_kernel(const BoxedArgs& args, AtenTensorHandle into, FlashResult* result) {
  if (!should_run_kernel(args)) return false;
  HookedCall hooked(args, window_of_call(args), into);
  ForwardResult forward_result;
  const AtenTensorHandle block_table = args.tensor(Arg::kBlockTable);
  const bool is_done = block_table == nullptr ? run_with_kernels("varlen_attn", hooked, &forward_result)
                                              : run_with_pages("varlen_attn", block_table, &hooked, &forward_result);
  if (!is_done) return false;
  *result = to_stock_layout(std::move(forward_result), hooked, args.tensor(Arg::kQuery));
  return true;
}

// ---- op implementations ----

void forward(StableIValue* stack, uint64_t count, uint64_t) {
  BoxedArgs args(schema_of(forward_op), stack, count);
  FlashResult result;
  if (!run_kernel(args, nullptr, &result)) return run_stock(args, forward_op);
  stack[0] = box::from_tensor(std::move(result.out));
  stack[1] = box::from_tensor(std::move(result.lse));
  stack[2] = box::from_tensor(std::move(result.rng));
}

void forward_out(StableIValue* stack, uint64_t count, uint64_t) {
  BoxedArgs args(schema_of(forward_out_op), stack, count);
  FlashResult result;
  const AtenTensorHandle out = args.tensor(Arg::kOut);
  if (!run_kernel(args, out, &result)) return run_stock(args, forward_out_op);
  copy_result(out, result.out.get());
  stack[0] = box::from_tensor(std::move(result.lse));
}

void backward(StableIValue* stack, uint64_t count, uint64_t) {
  BoxedArgs args(schema_of(backward_op), stack, count);
  TensorHandle grads[3];
  if (!is_ours(args.tensor(Arg::kRng))) return run_stock(args, backward_op);
  // cuDNN's backward never follows the plugin's forward, whatever torch's body would choose.
  if (!gradients_with_kernels(args, window_of_call(args), grads)) return args.call_stock_op(kFlashBackward);
  for (int i = 0; i < 3; ++i) stack[i] = box::from_tensor(std::move(grads[i]));
}

std::mutex mutex;
using Libraries = std::map<std::string, std::unique_ptr<StableLibrary>>;  // by dispatch key
Libraries& libraries() {
  static auto* instance = new Libraries();  // outlives the dispatcher's own teardown
  return *instance;
}

}  // namespace

void register_varlen_ops(const char* dispatch_key) {
  std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<StableLibrary>& library = libraries()[dispatch_key];
  if (library != nullptr) return;
  library = std::make_unique<StableLibrary>(StableLibrary::Kind::IMPL, "torch_attn", dispatch_key, kOwner, __LINE__);
  library->impl(forward_op.name, &forward);
  library->impl(forward_out_op.name, &forward_out);
  library->impl(backward_op.name, &backward);
}

void unregister_varlen_ops() {
  std::lock_guard<std::mutex> lock(mutex);
  libraries().clear();
}

void set_varlen_schema(const char* op, const char* schema) {
  for (Op* varlen_op : {&forward_op, &forward_out_op, &backward_op}) {
    // Never freed: other threads may be reading the schema.
    if (std::strcmp(op, varlen_op->name) == 0)
      varlen_op->schema.store(new LiveSchema(schema), std::memory_order_release);
  }
}

void set_varlen_rule(int number) { rule.store(static_cast<VarlenRule>(number), std::memory_order_relaxed); }
int varlen_rule() { return static_cast<int>(rule.load(std::memory_order_relaxed)); }

void set_prepare_callback(PrepareCallback callback) { prepare.store(callback); }

}  // namespace flashplug
