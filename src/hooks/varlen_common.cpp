// Conversions between (rows, heads) and (heads, rows) layouts, the check of arguments for plugin kernels, and results
// in the form of stock's flash attention.
#include "hooks/varlen_common.h"

#include <algorithm>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <limits>
#include <optional>
#include <stdexcept>
#include <utility>

#include "core/attention_call.h"
#include "core/core.h"
#include "core/memory_overlap.h"
#include "core/schemas.h"
#include "core/values.h"
#include "dispatch/dispatch.h"
#include "dispatch/varlen_decision.h"
#include "operands/operands.h"
#include "ops/ops.h"
#include "stock/stock.h"

namespace flashplug {

namespace {

// Storage offset of a dropout state made by the plugin's forward; stock's state has offset 0. The state begins at an
// aligned address, because compiled graphs assert an alignment of 16 bytes.
constexpr int64_t kMark = 2, kState = 2;

struct Strided {
  int64_t size[4], stride[4];
};

// Swap the two middle dims of a 4-d shape. A 3-d shape counts as a batch of 1.
Strided swap_middle_dims(const Shape& x, int64_t dims) {
  if (dims == 4)
    return {{x.size[0], x.size[2], x.size[1], x.size[3]}, {x.stride[0], x.stride[2], x.stride[1], x.stride[3]}};
  return {{1, x.size[1], x.size[0], x.size[2]}, {x.size[0] * x.stride[0], x.stride[1], x.stride[0], x.stride[2]}};
}

// Return a view with heads before rows.
TensorHandle heads_first(AtenTensorHandle x) {
  const Strided swapped = swap_middle_dims(shape_of(x), dims_of(x));
  return view(x, 4, swapped.size, swapped.stride);
}

// Return the inverse view of `heads_first()`, in the layout of torch.empty_like(operand) if sizes are equal.
TensorHandle rows_first(TensorHandle x, AtenTensorHandle operand) {
  const int64_t dims = dims_of(operand), skipped = 4 - dims;
  const Strided swapped = swap_middle_dims(shape_of(x.get()), 4);
  const int64_t *size = swapped.size + skipped, *stride = swapped.stride + skipped;
  const Shape like = shape_of(operand);
  int64_t target[4];
  std::copy_n(stride, dims, target);
  if (std::equal(size, size + dims, like.size)) dense_strides(like.size, like.stride, static_cast<int>(dims), target);
  bool same = true;
  for (int64_t i = 0; i < dims; ++i) same &= size[i] == 1 || stride[i] == target[i];
  TensorHandle viewed = view(x.get(), static_cast<int>(dims), size, same ? target : stride);
  return same ? std::move(viewed) : new_like(x.get(), static_cast<int>(dims), size, target, viewed.get());
}

AtenTensorHandle operand(const BoxedArgs& args, Arg arg) {
  const AtenTensorHandle tensor = args.tensor(arg);
  if (tensor == nullptr)
    throw std::runtime_error(
        "torch_flashplug: torch's attention op must get query, key and value, but an operand is missing.");
  return tensor;
}

const void* address(AtenTensorHandle tensor) {
  const void* data = nullptr;
  check_shim(torch_get_const_data_ptr(tensor, &data), "get_const_data_ptr");
  return data;
}

// Return true if a query row may have no visible key.
bool may_have_empty_rows(const ForwardCall& call, const CallFacts& p) {
  if (call.cu_seqlens_q == nullptr) return p.Sq > p.Sk;
  return call.seqused_k != nullptr || address(call.cu_seqlens_q) != address(call.cu_seqlens_k);
}

// Replace -inf by +inf.
void positive_infinities(AtenTensorHandle lse) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  constexpr const Schema& op = kNanToNum;
  OpCall call(op);
  call[op["self"]] = box::from_borrowed(lse);
  call[op["nan"]] = box::from(std::optional<double>(std::numeric_limits<double>::quiet_NaN()));
  call[op["posinf"]] = box::from(std::optional<double>(infinity));
  call[op["neginf"]] = box::from(std::optional<double>(infinity));
  call.run();
  call.result(0);
}

// Return a forward's LSE, (H, T) or (B, H, S), as a packed (B, H, S) tensor.
TensorHandle rows_of(AtenTensorHandle lse, const CallFacts& p) {
  const int64_t size[3] = {p.B, p.Hq, p.Sq}, stride[3] = {p.Hq * p.Sq, p.Sq, 1};
  const int64_t dims = dims_of(lse), skipped = 3 - dims;
  const Shape have = shape_of(lse);
  if (skipped < 0 || !std::equal(have.size, have.size + dims, size + skipped))
    throw std::runtime_error(
        "torch_flashplug: the logsumexp must have the shape (B, Hq, Sq) or (Hq, Sq) of the query.");
  const bool is_packed = std::equal(have.stride, have.stride + dims, stride + skipped);
  const TensorHandle packed = is_packed ? TensorHandle::share(lse)
                                        : new_like(lse, static_cast<int>(dims), size + skipped, stride + skipped, lse);
  return view(packed.get(), 3, size, stride);
}

// Return a new dropout state at a storage offset.
TensorHandle new_state(const TensorMeta& query, int64_t mark) {
  const int64_t size = mark + kState, unit_stride = 1;
  const TensorHandle storage =
      empty_strided(1, &size, &unit_stride, aoti_torch_dtype_uint64(), query.device_type, query.device_index);
  return view(storage.get(), 1, &kState, &unit_stride, mark);
}

// Return true if `out` shares no memory with an operand.
bool is_apart(AtenTensorHandle out, std::initializer_list<AtenTensorHandle> operands) {
  const std::optional<TensorBytes> written = bytes_of(out);
  return written && !may_meet_itself(*written) && std::ranges::none_of(operands, [&](AtenTensorHandle operand) {
           const std::optional<TensorBytes> read = bytes_of(operand);
           return !read || may_overlap(*written, *read);
         });
}

// Return true if kernels can write the output to `out`.
bool is_writable(AtenTensorHandle out, AtenTensorHandle q, AtenTensorHandle v) {
  TensorMeta of_out, of_q;
  if (!read_meta(out, &of_out) || !read_meta(q, &of_q) || of_out.dtype != of_q.dtype || !is_readable(out)) return false;
  const Shape have = shape_of(out), query = shape_of(q);
  return is_on_device_of(out, of_q) && !layout_in_memory(out, have).broadcast &&
         std::equal(query.size, query.size + 3, have.size) && have.size[3] == shape_of(v).size[3];
}

}  // namespace

int64_t dims_of(AtenTensorHandle tensor) {
  int64_t dims = 0;
  check_shim(aoti_torch_get_dim(tensor, &dims), "get_dim");
  return dims;
}

Window bottom_right(std::optional<int64_t> left, std::optional<int64_t> right, bool is_causal) {
  const auto bound = [](std::optional<int64_t> keys) { return std::max<int64_t>(keys.value_or(-1), -1); };
  return {bound(left), is_causal ? 0 : bound(right), true};
}

HookedCall::HookedCall(const BoxedArgs& args, Window window, AtenTensorHandle into)
    : q(heads_first(operand(args, Arg::kQuery))),
      k(heads_first(operand(args, Arg::kKey))),
      v(heads_first(operand(args, Arg::kValue))) {
  call.q = q.get(), call.k = k.get(), call.v = v.get();
  call.mode = effective_mode();
  call.scale = args.real(Arg::kScale);
  call.window = window;
  call.cu_seqlens_q = args.tensor(Arg::kCuSeqlensQ), call.cu_seqlens_k = args.tensor(Arg::kCuSeqlensK);
  call.seqused_k = args.tensor(Arg::kSeqUsedK);
  call.num_splits = args.integer(Arg::kSplits).value_or(0);
  call.max_seqlen_q = args.integer(Arg::kMaxQ).value_or(0), call.max_seqlen_k = args.integer(Arg::kMaxK).value_or(0);
  if (into == nullptr || dims_of(into) != dims_of(args.tensor(Arg::kQuery))) return;
  this->into = heads_first(into);
  AtenTensorHandle out = this->into.get();
  if (is_writable(out, call.q, call.v) && is_apart(out, {call.q, call.k, call.v})) call.out = out;
}

void HookedCall::set_packed_keys(TensorHandle key, TensorHandle value, TensorHandle cu_seqlens_k,
                                 TensorHandle seqused_k) {
  k = heads_first(key.get()), v = heads_first(value.get());
  cu_seqlens_k_ = std::move(cu_seqlens_k), seqused_k_ = std::move(seqused_k);
  call.k = k.get(), call.v = v.get();
  call.cu_seqlens_k = cu_seqlens_k_.get(), call.seqused_k = seqused_k_.get();
}

bool out_fits(const BoxedArgs& args) {
  const AtenTensorHandle out = args.tensor(Arg::kOut), q = args.tensor(Arg::kQuery), v = args.tensor(Arg::kValue);
  TensorMeta of_out, of_q;
  if (out == nullptr) return true;
  if (q == nullptr || v == nullptr || !read_meta(out, &of_out) || !read_meta(q, &of_q)) return false;
  if (of_out.dim != of_q.dim || of_out.dtype != of_q.dtype || !is_on_device_of(out, of_q)) return false;
  const Shape have = shape_of(out), query = shape_of(q);
  const int64_t last = of_q.dim - 1;
  return std::equal(query.size, query.size + last, have.size) && have.size[last] == shape_of(v).size[dims_of(v) - 1];
}

bool kernels_support(const BoxedArgs& args, int64_t dims) {
  if (args.tensor(Arg::kBlockTable) != nullptr || args.tensor(Arg::kAlibi) != nullptr) return false;
  if (args.integer(Arg::kSplits).value_or(1) != 1 || !operands_fit(args, dims, dims)) return false;
  return std::ranges::all_of(std::initializer_list<Arg>{Arg::kQuery, Arg::kKey, Arg::kValue}, [&](Arg arg) {
    return has_head_dim(tables().layout, shape_of(args.tensor(arg)).size[dims - 1]);
  });
}

bool operands_fit(const BoxedArgs& args, int64_t query_dims, int64_t key_dims) {
  for (const Arg arg : {Arg::kQuery, Arg::kKey, Arg::kValue}) {
    const AtenTensorHandle x = args.tensor(arg);
    const int64_t dims = arg == Arg::kQuery ? query_dims : key_dims;
    TensorMeta facts;
    if (x == nullptr || !read_meta(x, &facts) || facts.dim != dims || !eligible_device(facts.device_type)) return false;
    if (!is_16_bit_float(facts.dtype)) return false;
  }
  return true;
}

int compute_capability(AtenTensorHandle query) {
  int32_t index = 0;
  check_shim(aoti_torch_get_device_index(query, &index), "get_device_index");
  return device_facts(index).cc;
}

bool run_with_kernels(const char* where, const HookedCall& hooked, ForwardResult* result) {
  const ForwardCall& call = hooked.call;
  const auto attended = [&](Mode by) {
    const ReadFacts facts = read_facts(call);
    check_lengths(call, facts);
    return attend(where, call, facts, by, result);
  };
  if (call.mode.forces_kernels()) {
    if (!attended(call.mode)) *result = attention_math(call);  // no elements: attend() raises for all others
    return true;
  }
  try {  // without a forced backend, stock serves the call after any error, and raises its own error
    return attended(Mode::forcing(std::max(call.mode.family(), 0)));
  } catch (const std::exception&) {
    return false;
  }
}

FlashResult to_stock_layout(ForwardResult result, const HookedCall& hooked, AtenTensorHandle query) {
  const ForwardCall& call = hooked.call;
  TensorMeta facts;
  read_meta(query, &facts);
  CallFacts p;
  const Shape shape[kNumOperands] = {shape_of(call.q), shape_of(call.k), shape_of(call.v)};
  fill_shapes(shape, &p);
  FlashResult flash;
  flash.out = rows_first(std::move(result.out), query);
  if (facts.dim == 3) {
    const int64_t size[2] = {p.Hq, p.Sq}, stride[2] = {p.Sq, 1};
    flash.lse = view(result.lse.get(), 2, size, stride);
  } else {
    flash.lse = std::move(result.lse);
  }
  if (may_have_empty_rows(call, p)) positive_infinities(flash.lse.get());
  // As with stock, the backward gets no KV lengths and includes all keys.
  flash.rng = new_state(facts, call.seqused_k != nullptr ? 0 : kMark);
  return flash;
}

void copy_result(AtenTensorHandle out, AtenTensorHandle result) {
  if (address(out) != address(result)) copy_tensor(out, result);
}

bool is_ours(AtenTensorHandle rng) {
  int64_t offset = 0;
  return rng != nullptr && aoti_torch_get_storage_offset(rng, &offset) == 0 && offset == kMark;
}

bool gradients_with_kernels(const BoxedArgs& args, Window window, TensorHandle grads[3], AtenTensorHandle lse) {
  HookedCall hooked(args, window);
  const TensorHandle grad_out = heads_first(operand(args, Arg::kGradOut)), out = heads_first(operand(args, Arg::kOut));
  const ReadFacts facts = read_facts(hooked.call);
  check_lengths(hooked.call, facts);
  // Only a forced backend runs a forward of such head dims. The backward may run outside of the sdpa_backend block.
  if (has_unmeasured_gradients(facts.call, tables())) hooked.call.mode = Mode::forcing(0);
  const TensorHandle rows = rows_of(lse != nullptr ? lse : operand(args, Arg::kLse), facts.call);
  const BackwardCall call{grad_out.get(),           hooked.call, out.get(), rows.get(), nullptr, nullptr,
                          {true, true, true, false}};
  BackwardResult result;
  if (!differentiate_attention(call, facts, &result)) {
    // Empty calls: a forced backend takes them as well, and stock's kernels need not.
    if (!is_empty(facts.call) && cpu_stub() != CpuStub::kMath) return false;
    result = attention_math_backward(call);
  }
  constexpr Arg operands[3] = {Arg::kQuery, Arg::kKey, Arg::kValue};
  for (int i = 0; i < 3; ++i) grads[i] = rows_first(std::move(result.grads[i]), args.tensor(operands[i]));
  return true;
}

}  // namespace flashplug
