// attention() in one C function: from Python's arguments to a launched kernel, without torch's dispatcher, views in
// Python and autograd.
//
// The function answers None for every call that is not plain, and before anything was launched. attention() in Python
// then handles the call, and raises all errors. Plain calls have operands of 16 bits, no gradients, and nothing on
// the thread that would see the calls of ops. The checks here only say yes or no. Checks of the ops throw; a thrown
// error counts as no, and Python meets the error again.
//
// Python objects are read through Python's stable C interface. A tensor's place in its Python object is learned from
// probes, since no interface is stable there.
#include <torch/csrc/stable/c/shim.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>

#include "core/attention_call.h"
#include "core/core.h"
#include "core/memory_overlap.h"
#include "core/python_api.h"
#include "core/values.h"
#include "operands/operands.h"
#include "ops/ops.h"
#include "stock/torch_symbols.h"

namespace flashplug {

namespace {

// Return the position of a name in a list. An unknown name is no constant expression, so the call does not compile.
template <size_t count>
consteval int position_in(const char* const (&names)[count], std::string_view name) {
  for (size_t i = 0; i < count; ++i) {
    if (names[i] == name) return static_cast<int>(i);
  }
  throw "the list has no such name";
}
consteval int argument(std::string_view name) { return position_in(kAttentionArgumentNames, name); }
consteval int field(std::string_view name) { return position_in(kPlanFieldNames, name); }  // of a VarlenPlan

constexpr int kNumLengths = 3;  // cu_seqlens_q, cu_seqlens_k, seqused_k

// What is known of Python's objects; set once, before calls run.
struct Objects {
  Object *tensor = nullptr, *parameter = nullptr, *plan = nullptr;  // types
  int type_word = -1, tensor_word = -1;                             // positions in an object, in words
};
Objects objects;

Object* type_of(Object* object) { return static_cast<Object**>(object)[objects.type_word]; }

// Return the tensor of a Python object: the address of the at::Tensor inside.
AtenTensorHandle tensor_in(Object* object) {
  return reinterpret_cast<AtenTensorHandle>(static_cast<void**>(object) + objects.tensor_word);
}

int word_with(const void* object, int64_t words, const void* content) {
  const auto* const* const begin = static_cast<const void* const*>(object);
  const auto* const* const found = std::find(begin, begin + words, content);
  return found == begin + words ? -1 : static_cast<int>(found - begin);
}

// ---- arguments that are no tensors ----

bool is_none(Object* object) { return object == python_api().none; }

bool read_integer(Object* object, int64_t least, int64_t most, int64_t* value) {
  if (type_of(object) != python_api().int_type) return false;
  int overflow = 0;
  *value = python_api().integer(object, &overflow);
  return overflow == 0 && *value >= least && *value <= most;
}

bool read_number(Object* object, double* value) {
  if (type_of(object) == python_api().float_type) {
    *value = python_api().real(object);
    return true;
  }
  constexpr int64_t exact = int64_t{1} << 53;
  int64_t integer = 0;
  if (!read_integer(object, -exact, exact, &integer)) return false;
  *value = static_cast<double>(integer);
  return true;
}

constexpr int64_t kLargest = (int64_t{1} << 62) - 1;  // of bounds and split sizes

bool is_bound_of_length(Object* object) {
  int64_t value = 0;
  return is_none(object) || read_integer(object, 0, std::numeric_limits<int64_t>::max(), &value);
}

bool read_window_bound(Object* object, int64_t* bound) {
  return is_none(object) || read_integer(object, -1, kLargest, bound);
}

bool read_window(Object* causal, Object* bounds, Window* window) {
  const PythonApi& p = python_api();
  bool is_causal = causal == p.yes;
  if (type_of(causal) == p.str_type) {
    window->bottom_right = p.compare_text(causal, "bottom_right") == 0;
    is_causal = window->bottom_right || p.compare_text(causal, "top_left") == 0;
    if (!is_causal) return false;
  } else if (!is_causal && causal != p.no) {
    return false;
  }
  if (!is_none(bounds)) {
    if (type_of(bounds) != p.tuple_type || p.tuple_size(bounds) != 2) return false;
    if (!read_window_bound(p.tuple_item(bounds, 0), &window->left)) return false;
    if (!read_window_bound(p.tuple_item(bounds, 1), &window->right)) return false;
  }
  if (is_causal) window->right = 0;
  return true;
}

bool read_settings(Object* const* arguments, ForwardCall* call) {
  if (!read_window(arguments[argument("causal")], arguments[argument("window")], &call->window.emplace())) return false;
  if (!read_number(arguments[argument("softcap")], &call->softcap)) return false;
  if (!is_none(arguments[argument("scale")]) && !read_number(arguments[argument("scale")], &call->scale.emplace()))
    return false;
  const LayoutRow& layout = tables().layout;
  Object *const splits = arguments[argument("num_splits")], *const size = arguments[argument("fixed_split_size")];
  if (!is_none(splits) && !read_integer(splits, 1, layout.max_splits, &call->num_splits)) return false;
  if (!is_none(size) && !read_integer(size, 1, kLargest, &call->fixed_split_size)) return false;
  return is_bound_of_length(arguments[argument("max_seqlen_q")]) &&
         is_bound_of_length(arguments[argument("max_seqlen_k")]);
}

// ---- tensors ----

// Return true for a tensor with memory. Tensors of zeros that are not stored, and freed tensors, have none.
bool has_memory(AtenTensorHandle tensor) {
  const void* data = nullptr;
  return torch_get_const_data_ptr(tensor, &data) == 0 && data != nullptr;
}

// Read a tensor that torch's dispatcher would pass to a kernel unchanged. Of the subclasses, only parameters are plain.
bool read_plain_tensor(Object* object, bool with_gradients, AtenTensorHandle* tensor) {
  if (type_of(object) != objects.tensor && type_of(object) != objects.parameter) return false;
  *tensor = tensor_in(object);
  const TorchSymbols& torch = torch_symbols();
  return !torch.has_wrapper(*tensor) && !torch.is_negated(*tensor) &&
         !(with_gradients && torch.requires_grad(*tensor)) && has_memory(*tensor);
}

// The tensors of a call. Absent tensors are null.
struct Tensors {
  AtenTensorHandle q = nullptr, k = nullptr, v = nullptr, sinks = nullptr, block_table = nullptr, out = nullptr;
  AtenTensorHandle lengths[kNumLengths] = {};
};

bool read_tensors(Object* const* arguments, Tensors* x) {
  const bool with_gradients = aoti_torch_grad_mode_is_enabled();
  const std::pair<int, AtenTensorHandle*> required[] = {
      {argument("q"), &x->q}, {argument("k"), &x->k}, {argument("v"), &x->v}};
  const std::pair<int, AtenTensorHandle*> optional[] = {{argument("sinks"), &x->sinks},
                                                        {argument("block_table"), &x->block_table},
                                                        {argument("out"), &x->out},
                                                        {argument("cu_seqlens_q"), &x->lengths[0]},
                                                        {argument("cu_seqlens_k"), &x->lengths[1]},
                                                        {argument("seqused_k"), &x->lengths[2]}};
  for (const auto& [position, tensor] : required) {
    if (!read_plain_tensor(arguments[position], with_gradients, tensor)) return false;
  }
  for (const auto& [position, tensor] : optional) {
    Object* object = arguments[position];
    if (!is_none(object) && !read_plain_tensor(object, with_gradients, tensor)) return false;
  }
  return true;
}

// Meta facts and shape of an operand of the caller, whose length comes before its heads.
struct Operand {
  TensorMeta meta;
  Shape shape;
};

bool read_operands(const Tensors& x, int64_t dims, Operand (&operands)[kNumOperands]) {
  const AtenTensorHandle tensors[kNumOperands] = {x.q, x.k, x.v};
  for (int i = 0; i < kNumOperands; ++i) {
    Operand& operand = operands[i];
    if (!read_meta(tensors[i], &operand.meta) || operand.meta.dim != dims || !read_shape(tensors[i], &operand.shape))
      return false;
    if (operand.meta.dtype != operands[0].meta.dtype) return false;
  }
  return eligible_device(operands[0].meta.device_type) && is_16_bit_float(operands[0].meta.dtype);
}

// Keys from `begin` on, before `end`.
struct KeyRange {
  int64_t begin, end;
};

// Return the view (B, heads, length, head dim) that ops take, of (B, length, heads, head dim) or of packed (length,
// heads, head dim). The strides are those of unsqueeze() and transpose(). A dense call takes a range of the length.
TensorHandle as_operand(AtenTensorHandle tensor, int64_t dims, const Shape& shape,
                        const std::optional<KeyRange>& range = {}) {
  const int64_t* size = shape.size + dims - 3;
  const int64_t* stride = shape.stride + dims - 3;
  const int64_t batch = dims == 4 ? shape.size[0] : 1, apart = dims == 4 ? shape.stride[0] : size[0] * stride[0];
  const auto [begin, end] = range.value_or(KeyRange{0, size[0]});
  const int64_t view_size[4] = {batch, size[1], end - begin, size[2]};
  const int64_t view_stride[4] = {apart, stride[1], stride[0], stride[2]};
  return view(tensor, 4, view_size, view_stride, begin * stride[0]);
}

// Return the inverse of `as_operand()` for a new tensor of an op.
TensorHandle as_result(AtenTensorHandle tensor, int64_t dims) {
  const Shape shape = shape_of(tensor);
  const int64_t size[4] = {shape.size[0], shape.size[2], shape.size[1], shape.size[3]};
  const int64_t stride[4] = {shape.stride[0], shape.stride[2], shape.stride[1], shape.stride[3]};
  return view(tensor, static_cast<int>(dims), size + 4 - dims, stride + 4 - dims);
}

// Return true if `out` has the shape and the dtype of the result, and memory of its own. The shape is (..., Hq, Dv).
bool is_valid_out(const Tensors& x, int64_t dims, const Operand (&operands)[kNumOperands]) {
  const Operand &q = operands[0], &v = operands[2];
  TensorMeta meta;
  Shape shape;
  if (!read_meta(x.out, &meta) || meta.dim != dims || meta.dtype != q.meta.dtype || !read_shape(x.out, &shape) ||
      !is_on_device_of(x.out, q.meta) || !std::equal(shape.size, shape.size + dims - 1, q.shape.size) ||
      shape.size[dims - 1] != v.shape.size[dims - 1])
    return false;
  const std::optional<TensorBytes> out = bytes_of(x.out);
  if (!out || may_meet_itself(*out)) return false;
  const AtenTensorHandle others[] = {x.q, x.k, x.v, x.sinks, x.block_table, x.lengths[0], x.lengths[1], x.lengths[2]};
  return std::ranges::none_of(others, [&](AtenTensorHandle tensor) {
    if (tensor == nullptr || !is_on_device_of(tensor, q.meta)) return false;
    const std::optional<TensorBytes> bytes = bytes_of(tensor);
    return !bytes || may_overlap(*out, *bytes);
  });
}

// Return true for sinks (Hq,) in fp32 or 16 bits, on the device of the query.
bool are_plain_sinks(AtenTensorHandle sinks, const Operand& query) {
  TensorMeta meta;
  Shape shape;
  return read_meta(sinks, &meta) && meta.dim == 1 && read_shape(sinks, &shape) &&
         shape.size[0] == query.shape.size[query.meta.dim - 2] && is_on_device_of(sinks, query.meta) &&
         (is_16_bit_float(meta.dtype) || is_one_of(meta.dtype, {"float32"}));
}

// Return a copy of sinks in fp32; empty for sinks that are fp32.
TensorHandle widened_sinks(AtenTensorHandle sinks) {
  static const int32_t fp32 = aoti_torch_dtype_float32();
  TensorMeta meta;
  int32_t dtype = -1;
  if (!read_meta(sinks, &meta) || aoti_torch_get_dtype(sinks, &dtype) != 0 || dtype == fp32) return {};
  const int64_t stride = 1;
  TensorHandle wide = empty_strided(1, shape_of(sinks).size, &stride, fp32, meta.device_type, meta.device_index);
  copy_tensor(wide.get(), sinks);
  return wide;
}

// ---- plans ----

// Return an item of a tuple, or None.
Object* item(Object* tuple, ptrdiff_t index) {
  const PythonApi& p = python_api();
  Object* const found = p.tuple_item(tuple, index);
  if (found != nullptr) return found;
  p.clear();
  return p.none;
}

bool is_integer(Object* object, int64_t expected) {
  int64_t value = 0;
  return read_integer(object, expected, expected, &value);
}

// Compare a tensor of lengths with its `TensorVersion` and with the tensor at the time of planning.
bool is_tensor_of_plan(AtenTensorHandle tensor, Object* planned, Object* recorded) {
  if (tensor == nullptr || is_none(recorded)) return tensor == nullptr && is_none(recorded);
  AtenTensorHandle same_memory = nullptr;
  if (!read_plain_tensor(planned, false, &same_memory)) return false;
  Object *const layout = item(recorded, 0), *const version = item(recorded, 1);
  const void* data = nullptr;
  int64_t dims = 0;
  Shape shape;
  if (torch_get_const_data_ptr(tensor, &data) != 0 || aoti_torch_get_dim(tensor, &dims) != 0 || dims != 1 ||
      !read_shape(tensor, &shape) || !is_integer(item(layout, 0), reinterpret_cast<int64_t>(data)) ||
      !is_integer(item(item(layout, 1), 0), shape.size[0]) || !is_integer(item(item(layout, 2), 0), shape.stride[0]))
    return false;
  const TorchSymbols& torch = torch_symbols();
  if (torch.is_inference(tensor) || torch.is_inference(same_memory))
    return torch.is_inference(tensor) && torch.is_inference(same_memory) && is_none(version);
  return is_integer(version, torch.version(tensor)) && is_integer(version, torch.version(same_memory));
}

bool read_plan(Object* plan, const Operand (&operands)[kNumOperands], ForwardCall* call) {
  const PythonApi& p = python_api();
  if (is_none(plan)) return true;
  if (type_of(plan) != objects.plan) return false;
  const Window& window = *call->window;
  Object* const planned_window = item(plan, field("window"));
  if (!is_integer(item(plan, field("rows")), operands[0].shape.size[0]) ||
      !is_integer(item(plan, field("keys")), operands[1].shape.size[0]) ||
      !is_integer(item(planned_window, 0), window.left) || !is_integer(item(planned_window, 1), window.right) ||
      item(planned_window, 2) != (window.bottom_right ? p.yes : p.no))
    return false;
  const AtenTensorHandle lengths[kNumLengths] = {call->cu_seqlens_q, call->cu_seqlens_k, call->seqused_k};
  for (int i = 0; i < kNumLengths; ++i) {
    if (!is_tensor_of_plan(lengths[i], item(item(plan, field("lengths")), i), item(item(plan, field("versions")), i)))
      return false;
  }
  Object* const lists = item(plan, field("lists"));
  if (!is_none(lists) && !read_plain_tensor(lists, false, &call->tile_lists)) return false;
  return read_integer(item(plan, field("key")), std::numeric_limits<int64_t>::min(),
                      std::numeric_limits<int64_t>::max(), &call->plan_key);
}

// ---- forms of calls ----

// Return true for few query rows of each KV head. The kernels of pages take such calls with a cache (B, length, Hkv,
// D).
bool is_decode_call(const Operand (&operands)[kNumOperands]) {
  const int64_t *q = operands[0].shape.size, *k = operands[1].shape.size, *v = operands[2].shape.size;
  const int64_t rows = q[1], Hkv = k[2];
  return Hkv > 0 && rows * (q[2] / Hkv) <= tables().cost_model.max_decode_rows && has_head_dim(tables().layout, q[3]) &&
         has_head_dim(tables().layout, v[3]);
}

// Return the keys that at least one query sees. The window stays valid for these keys alone.
KeyRange visible_keys(const Window& window, int64_t rows, int64_t keys) {
  if (window.bottom_right) return {window.left < 0 ? 0 : std::max<int64_t>(0, keys - rows - window.left), keys};
  return {0, window.right < 0 ? keys : std::min(keys, rows + window.right)};
}

// Return true if the window masks keys, but not exactly those of `is_causal` of F.sdpa.
bool masks_keys_unlike_sdpa(const Window& window, int64_t rows, int64_t keys) {
  const int64_t last_own = window.bottom_right ? keys - 1 : rows - 1, first_own = window.bottom_right ? keys - rows : 0;
  const bool left = window.left >= 0 && window.left < last_own,
             right = window.right >= 0 && first_own + window.right < keys - 1;
  const bool is_top_left = (!window.bottom_right || rows == keys) && window.right == 0 && right && !left;
  return (left || right) && !is_top_left;
}

// Return true for a dense call that attention() gives to the op attention_fwd: F.sdpa has no argument for the call, or
// would read a mask. Other kernels are faster for few query rows.
bool is_for_attention_op(const Operand (&operands)[kNumOperands], const ForwardCall& call, bool wants_lse,
                         const KeyRange& keys) {
  const int64_t *q = operands[0].shape.size, *k = operands[1].shape.size, *v = operands[2].shape.size;
  const bool requests_splits = call.num_splits != 0 || call.fixed_split_size != 0, is_decode = is_decode_call(operands);
  if (k[0] != q[0] || v[0] != q[0] || v[1] != k[1] || (requests_splits && is_decode)) return false;
  if (call.softcap != 0.0) return true;
  if (is_decode) return false;
  return call.sinks != nullptr || wants_lse || requests_splits ||
         (masks_keys_unlike_sdpa(*call.window, q[1], keys.end - keys.begin) && has_head_dim(tables().layout, q[3]) &&
          has_head_dim(tables().layout, v[3]));
}

bool is_vector_of_ints(AtenTensorHandle tensor, const TensorMeta& query) {
  int64_t dims = 0;
  int32_t dtype = -1;
  return aoti_torch_get_dim(tensor, &dims) == 0 && dims == 1 && aoti_torch_get_dtype(tensor, &dtype) == 0 &&
         dtype == aoti_torch_dtype_int32() && is_on_device_of(tensor, query);
}

// Return true for contiguous rows: Python would copy any other table.
bool is_packed_table(AtenTensorHandle table) {
  Shape shape;
  int64_t dims = 0;
  if (aoti_torch_get_dim(table, &dims) != 0 || dims != 2 || !read_shape(table, &shape)) return false;
  return (shape.size[1] == 1 || shape.stride[1] == 1) && (shape.size[0] == 1 || shape.stride[0] == shape.size[1]);
}

// A plain call: the caller's tensors, the operands, and settings, plan and lengths in the form of ops.
struct DirectCall {
  Tensors tensors;
  Operand operands[kNumOperands];
  ForwardCall call;
  std::optional<KeyRange> keys;  // of a dense call
  int64_t dims() const { return operands[0].meta.dim; }
};

// Read a call. Returns false for a call that is not plain.
bool read_call(Object* const* arguments, DirectCall* direct) {
  if (!is_none(arguments[argument("k_scale")]) || !is_none(arguments[argument("v_scale")]) ||
      !is_none(arguments[argument("block_mask")]) || !is_none(arguments[argument("tree_mask")]))
    return false;
  const PythonApi& p = python_api();
  Tensors& x = direct->tensors;
  ForwardCall& call = direct->call;
  auto& operands = direct->operands;
  if (!read_tensors(arguments, &x) || !read_settings(arguments, &call)) return false;
  if (arguments[argument("return_lse")] != p.yes && arguments[argument("return_lse")] != p.no) return false;
  const auto [cu_seqlens_q, cu_seqlens_k, seqused_k] = x.lengths;
  const bool is_packed = cu_seqlens_q != nullptr;
  if (is_packed ? x.block_table != nullptr : cu_seqlens_k != nullptr) return false;
  const int64_t dims = is_packed ? 3 : 4;
  if (!read_operands(x, dims, operands)) return false;
  const Operand& query = operands[0];
  if (x.sinks != nullptr && !are_plain_sinks(x.sinks, query)) return false;
  if (x.out != nullptr && !is_valid_out(x, dims, operands)) return false;
  call.sinks = x.sinks, call.seqused_k = seqused_k, call.block_table = x.block_table;
  call.mode = mode_of_op(0);
  if (is_packed) {
    call.cu_seqlens_q = cu_seqlens_q, call.cu_seqlens_k = cu_seqlens_k == nullptr ? cu_seqlens_q : cu_seqlens_k;
    return read_plan(arguments[argument("plan")], operands, &call);
  }
  if (!is_none(arguments[argument("plan")])) return false;
  const int64_t rows = query.shape.size[1], keys = operands[1].shape.size[1];
  if (seqused_k == nullptr) {
    direct->keys = visible_keys(*call.window, rows, keys);
    return x.block_table == nullptr &&
           is_for_attention_op(operands, call, arguments[argument("return_lse")] == p.yes, *direct->keys);
  }
  if (!is_vector_of_ints(seqused_k, query.meta)) return false;
  if (x.block_table != nullptr) return is_packed_table(x.block_table);
  return operands[1].shape.size[0] == query.shape.size[0] && is_decode_call(operands);
}

// Run the kernel of a call. Returns false without a kernel.
bool run_kernel(const DirectCall& direct, ForwardResult* result) {
  const Tensors& x = direct.tensors;
  const auto& [query, key, value] = direct.operands;
  const int64_t dims = direct.dims();
  ForwardCall call = direct.call;
  const TensorHandle q = as_operand(x.q, dims, query.shape), k = as_operand(x.k, dims, key.shape, direct.keys),
                     v = as_operand(x.v, dims, value.shape, direct.keys);
  call.q = q.get(), call.k = k.get(), call.v = v.get();
  TensorHandle out, pages, sinks;
  if (x.out != nullptr) call.out = (out = as_operand(x.out, dims, shape_of(x.out))).get();
  if (dims == 4 && x.block_table == nullptr && !direct.keys)
    call.block_table = (pages = pages_of_cache(query.shape.size[0], query.meta)).get();
  if (x.sinks != nullptr && (sinks = widened_sinks(x.sinks)).get() != nullptr) call.sinks = sinks.get();
  if (!attend_by_kernel(&call, result)) return false;
  if (x.out == nullptr)
    result->out = as_result(result->out.get(), dims);
  else if (!result->in_place)
    copy_tensor(call.out, result->out.get());
  if (dims == 3) {
    const Shape lse = shape_of(result->lse.get());
    result->lse = view(result->lse.get(), 2, lse.size + 1, lse.stride + 1);
  }
  return true;
}

Object* in_python(const TensorHandle& tensor) {
  return reinterpret_cast<Object* (*)(const void*)>(torch_symbols().wrap_in_python)(tensor.get());
}

Object* answer_none() {
  python_api().incref(python_api().none);
  return python_api().none;
}

Object* attend_directly(Object*, Object* const* arguments, ptrdiff_t count) {
  const PythonApi& p = python_api();
  if (count != kNumAttentionArguments || !torch_symbols().runs_plain_eager_code()) return answer_none();
  ForwardResult result;
  bool is_done = false;
  {
    DirectCall direct;
    try {
      if (!read_call(arguments, &direct)) return answer_none();
    } catch (const std::exception&) {
      return answer_none();
    }
    // The GIL is taken back outside of handlers: Python may end a thread there.
    void* const thread = p.save_thread();
    try {
      is_done = run_kernel(direct, &result);
    } catch (const std::exception&) {
    }
    p.restore_thread(thread);
  }
  if (!is_done) {
    p.clear();
    return answer_none();
  }
  Object* out = arguments[argument("out")];
  if (is_none(out)) {
    out = in_python(result.out);
  } else {
    torch_symbols().count_write(tensor_in(out));
    p.incref(out);
  }
  if (out == nullptr || arguments[argument("return_lse")] == p.no) return out;
  Object* const lse = in_python(result.lse);
  Object* const both = lse == nullptr ? nullptr : p.tuple_of(2, out, lse);
  p.decref(out), p.decref(lse);
  return both;
}

// PyMethodDef, and the flag of `FastFunction`.
struct Definition {
  const char* name;
  FastFunction function;
  int flags;
  const char* doc;
};
constexpr int kFastCall = 0x80;

}  // namespace

void* direct_attention_function(const ProbeObjects& probes, void* plan_type) {
  static Definition definition{"attention", &attend_directly, kFastCall, nullptr};
  if (!has_python() || !torch_symbols().can_call_directly()) return nullptr;
  const PythonApi& p = python_api();
  const Gil gil;
  Object *const tensor_type = p.type_of(probes.tensor), *const parameter_type = p.type_of(probes.parameter);
  const int type_word = word_with(probes.tensor, probes.words, tensor_type),
            tensor_word = word_with(probes.tensor, probes.words, probes.tensor_impl);
  if (type_word < 0 || tensor_word < 0 || word_with(probes.parameter, probes.words, parameter_type) != type_word ||
      word_with(probes.parameter, probes.words, probes.parameter_impl) != tensor_word)
    return nullptr;
  objects = {tensor_type, parameter_type, plan_type, type_word, tensor_word};
  p.incref(plan_type);
  return p.new_function(&definition, nullptr, nullptr);
}

}  // namespace flashplug
