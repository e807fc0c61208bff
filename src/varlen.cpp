// torch.nn.attention.varlen on kernels of ours: its private ops, at a dispatch key where torch has no kernel of its
// own. So nothing is overridden, a call that is not ours goes to the body that torch would have run, and taking these
// out leaves no trace. Autograd, fakes and compilation are torch's.
//
// The ops are defined when torch's module is imported, which takes a second and is the caller's to do: what they take
// is asked for at the first call.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "doors.h"

namespace flashplug {

namespace {

using torch::stable::detail::StableLibrary;

// ---- torch's own ----

struct Op {
  const char* name;   // in torch_attn
  const char* stock;  // its body
  std::atomic<const LiveSchema*> schema{nullptr};
};
Op forward_op{"_varlen_attn", "torch_flashplug::_stock_varlen_attn"};
Op forward_out_op{"_varlen_attn_out", "torch_flashplug::_stock_varlen_attn_out"};
Op backward_op{"_varlen_attn_backward", "torch_flashplug::_stock_varlen_attn_backward"};

std::atomic<PrepareCallback> prepare{nullptr};

const LiveSchema& schema_of(Op& op) {
  const LiveSchema* known = op.schema.load(std::memory_order_acquire);
  if (known == nullptr) {
    if (const PrepareCallback callback = prepare.load()) callback();
    known = op.schema.load(std::memory_order_acquire);
  }
  if (known == nullptr)
    throw std::runtime_error(std::string("torch_flashplug: what torch_attn::") + op.name + " takes is not known");
  return *known;
}

void go_on(Boxed& given, const Op& op) { given.go_on_to(op.stock); }

// ---- whose a call is ----

int64_t last_dim(AtenTensorHandle tensor) {
  const int64_t dims = dims_of(tensor);
  return dims == 0 ? 0 : shape_of(tensor).size[dims - 1];
}

[[noreturn]] void refuse(const Boxed& given, Mode mode) {
  TensorClass query;
  read_class(given.tensor(Arg::kQuery), &query);
  const int64_t D = last_dim(given.tensor(Arg::kQuery)), Dv = last_dim(given.tensor(Arg::kValue));
  const auto is_odd = [](int64_t dim) { return dim % 8 != 0 || dim > 256; };
  const std::string dims =
      D == Dv ? std::to_string(D) : std::to_string(std::min(D, Dv)) + ", " + std::to_string(std::max(D, Dv));
  const int64_t splits = given.integer(Arg::kSplits).value_or(1);
  const std::pair<bool, std::string> lacks[] = {
      {given.tensor(Arg::kCuK) == nullptr, "no cu_seq_k"},
      {given.tensor(Arg::kPages) != nullptr, "block_table"},
      {splits != 1, "num_splits=" + std::to_string(splits)},
      {facts_of(query.dtype).bytes != 2, std::string("torch.") + facts_of(query.dtype).name},
      {is_odd(D) || is_odd(Dv), "head dims [" + dims + "]"}};
  std::string said;
  for (const auto& [lacking, what] : lacks) said += lacking ? (said.empty() ? "" : ", ") + what : "";
  throw std::runtime_error("varlen_attn: kernels of ours do not take " + (said.empty() ? "these tensors" : said) +
                           "; call it outside of sdpa_backend('" + tables().families[mode.family()].backend + "')");
}

bool are_asked(const Boxed& given) {
  const Mode mode = effective_mode();
  if (!enabled() || (mode.backend() != Backend::kAuto && mode.family() < 0)) return false;
  if (given.has(Arg::kWindow) && !given.pair(Arg::kWindow)) return false;  // stock says what is wrong with it
  const bool takes = given.tensor(Arg::kCuK) != nullptr && kernels_take(given, 3);
  if (mode.forces_kernels() && !takes) refuse(given, mode);
  return takes && (mode.forces_kernels() || is_measured(given.tensor(Arg::kQuery)));
}

Window window_of_call(const Boxed& given) {
  const auto window = given.pair(Arg::kWindow).value_or(std::array<int64_t, 2>{-1, -1});
  return bottom_right(window[0], window[1], given.flag(Arg::kCausal));
}

// into: null, or where the output is to be.
bool ours(const Boxed& given, AtenTensorHandle into, FlashResult* result) {
  if (!are_asked(given)) return false;
  const DoorCall door(given, window_of_call(given), into);
  ForwardResult found;
  if (!by_kernels("varlen_attn", door, &found)) return false;
  *result = as_stocks(std::move(found), door, given.tensor(Arg::kQuery));
  return true;
}

// ---- kernels ----

void forward(StableIValue* stack, uint64_t count, uint64_t) {
  Boxed given(schema_of(forward_op), stack, count);
  FlashResult result;
  if (!ours(given, nullptr, &result)) return go_on(given, forward_op);
  stack[0] = box::from_tensor(std::move(result.out));
  stack[1] = box::from_tensor(std::move(result.lse));
  stack[2] = box::from_tensor(std::move(result.rng));
}

void forward_out(StableIValue* stack, uint64_t count, uint64_t) {
  Boxed given(schema_of(forward_out_op), stack, count);
  FlashResult result;
  const AtenTensorHandle out = given.tensor(Arg::kOut);
  if (!ours(given, out, &result)) return go_on(given, forward_out_op);
  write_to(out, result.out.get());
  stack[0] = box::from_tensor(std::move(result.lse));
}

void backward(StableIValue* stack, uint64_t count, uint64_t) {
  Boxed given(schema_of(backward_op), stack, count);
  Owned grads[3];
  if (!is_ours(given.tensor(Arg::kRng)) || !gradients_by_kernels(given, window_of_call(given), grads))
    return go_on(given, backward_op);
  for (int i = 0; i < 3; ++i) stack[i] = box::from_tensor(std::move(grads[i]));
}

std::mutex mutex;
using Libraries = std::map<std::string, std::unique_ptr<StableLibrary>>;  // by dispatch key
Libraries& libraries() {
  static auto* instance = new Libraries();  // outlives the dispatcher's own teardown
  return *instance;
}

}  // namespace

void open_varlen(const char* dispatch_key) {
  std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<StableLibrary>& made = libraries()[dispatch_key];
  if (made != nullptr) return;
  made = std::make_unique<StableLibrary>(StableLibrary::Kind::IMPL, "torch_attn", dispatch_key, __FILE__, __LINE__);
  made->impl(forward_op.name, &forward);
  made->impl(forward_out_op.name, &forward_out);
  made->impl(backward_op.name, &backward);
}

void close_varlen() {
  std::lock_guard<std::mutex> lock(mutex);
  libraries().clear();
}

void know_varlen(const char* op, const char* schema) {
  for (Op* one : {&forward_op, &forward_out_op, &backward_op}) {
    // Never freed: other threads may be reading it.
    if (std::strcmp(op, one->name) == 0) one->schema.store(new LiveSchema(schema), std::memory_order_release);
  }
}

void set_prepare_callback(PrepareCallback callback) { prepare.store(callback); }

}  // namespace flashplug
