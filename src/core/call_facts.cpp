// The reader of a call's facts: tensors -> `CallFacts`, step by step. Nothing here decides who serves the call.
#include "core/call_facts.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>

#include "core/core.h"
#include "stock/torch_symbols.h"

namespace flashplug {

namespace {

bool on_one_device(const TensorMeta (&operands)[kNumOperands]) {
  const TensorMeta& query = operands[0];
  return eligible_device(query.device_type) &&
         std::all_of(operands, operands + kNumOperands, [&query](const TensorMeta& operand) {
           return operand.device_type == query.device_type && operand.device_index == query.device_index;
         });
}

// Return the address or storage offset, in bytes, for the alignment. A traced tensor has no address yet; its future
// storage will be aligned.
int64_t address_of(AtenTensorHandle tensor, Memory memory, int64_t element_bytes) {
  const void* data = nullptr;
  if (memory == Memory::kReal && torch_get_const_data_ptr(tensor, &data) == 0) return reinterpret_cast<int64_t>(data);
  int64_t offset = 0;
  return aoti_torch_get_storage_offset(tensor, &offset) == 0 ? offset * element_bytes : 0;
}

// Set the window of a call. An absent bound becomes a bound beyond all keys, even for a tile's rows after the last
// row. Otherwise the block order would depend on the number of keys beside a sequence's own
// (kernels/tiling/sliding_window.py).
void set_window(const Window& window, CallFacts* p) {
  constexpr int64_t tile = 256;
  const int64_t all = p->Sq + p->Sk + tile;
  const auto bound = [all](int64_t keys) { return keys < 0 ? all : std::min(keys, all); };
  p->left = bound(window.left), p->right = bound(window.right);
  p->bottom_right = window.bottom_right ? 1 : 0;
}

bool has_dtype(AtenTensorHandle tensor, int32_t dtype) {
  int32_t tensor_dtype = -1;
  return aoti_torch_get_dtype(tensor, &tensor_dtype) == 0 && tensor_dtype == dtype;
}

}  // namespace

void read_torch_settings(CallFacts* p) {
  p->deterministic = torch_symbols().deterministic();
  p->without_cudnn = !torch_symbols().cudnn_enabled();
}

std::optional<Window> window_of(const AttentionArgs& call) {
  if (call.causal == Causal::kBottomRight) return Window{-1, 0, true};
  return call.window;
}

bool is_defined(AtenTensorHandle tensor) {
  bool defined = false;
  return tensor != nullptr && aoti_torch_is_defined(tensor, &defined) == 0 && defined;
}

bool is_mask(AtenTensorHandle tensor) { return has_dtype(tensor, aoti_torch_dtype_bool()) || is_kept(tensor); }

bool is_kept(AtenTensorHandle tensor) {
  return is_mask_metadata(tensor) || has_dtype(tensor, aoti_torch_dtype_uint8());
}

bool is_mask_metadata(AtenTensorHandle tensor) { return has_dtype(tensor, aoti_torch_dtype_int32()); }

bool is_wide_bias(const AttentionArgs& call) {
  static const int32_t fp32 = aoti_torch_dtype_float32();
  return has_dtype(call.mask, fp32) && !has_dtype(call.q, fp32);
}

bool is_traced(const AttentionArgs& call) {
  const TorchSymbols& torch = torch_symbols();
  return torch.python_dispatch(call.q) || torch.python_dispatch(call.k) || torch.python_dispatch(call.v);
}

bool has_wrapper(const AttentionArgs& call) {
  const TorchSymbols& torch = torch_symbols();
  return torch.has_wrapper(call.q) || torch.has_wrapper(call.k) || torch.has_wrapper(call.v) ||
         (call.mask != nullptr && torch.has_wrapper(call.mask));
}

int64_t required_features(const AttentionArgs& call) {
  int64_t needs = 0, bit = 1;
  for (const FeatureReader& feature : kFeatureReaders) {
    needs |= feature.needed(call) ? bit : 0;
    bit <<= 1;
  }
  return needs;
}

bool read_meta(const AttentionArgs& call, ReadFacts* facts) {
  const AtenTensorHandle tensors[kNumOperands] = {call.q, call.k, call.v};
  CallFacts& p = facts->call;
  for (int i = 0; i < kNumOperands; ++i) {
    if (!read_meta(tensors[i], &facts->operand[i])) return false;
    p.dtype[i] = facts->operand[i].dtype;
  }
  p.on_cuda = on_one_device(facts->operand);
  p.needs = required_features(call);
  read_numbers(call, &p);
  p.scale = scale_of(call.scale);
  return true;
}

bool four_dims(const ReadFacts& facts) {
  return std::all_of(facts.operand, facts.operand + kNumOperands, [](const TensorMeta& x) { return x.dim == 4; });
}

bool read_shapes(const AttentionArgs& call, Memory memory, ReadFacts* facts) {
  if (!four_dims(*facts)) return false;
  const AtenTensorHandle tensors[kNumOperands] = {call.q, call.k, call.v};
  for (int i = 0; i < kNumOperands; ++i) {
    if (!read_shape(tensors[i], &facts->shape[i])) return false;
  }
  fill_shapes(facts->shape, &facts->call);
  Shape block_table;
  if (is_defined(call.block_table) && read_shape(call.block_table, &block_table)) facts->call.Sk *= block_table.size[1];
  if (const std::optional<Window> window = window_of(call)) set_window(*window, &facts->call);
  int64_t starts = 0;
  if (is_defined(call.cu_seqlens_q) && aoti_torch_get_numel(call.cu_seqlens_q, &starts) == 0)
    facts->call.sequences = starts - 1;
  int64_t addresses[kNumOperands];
  for (int i = 0; i < kNumOperands; ++i) {
    const int64_t bytes = facts_of(facts->call.dtype[i]).bytes;
    addresses[i] = address_of(tensors[i], memory, bytes);
    facts->call.layout[i] = layout_of(facts->shape[i], addresses[i], bytes);
  }
  // Equal offsets of traced tensors do not show that the tensors will have one storage.
  facts->call.shared_values = memory == Memory::kReal && shares_values(facts->shape, addresses, facts->call);
  return true;
}

void fill_shapes(const Shape (&shape)[kNumOperands], CallFacts* p) {
  const auto& [q, k, v] = shape;
  p->B = q.size[0], p->Hq = q.size[1], p->Sq = q.size[2], p->D = q.size[3];
  p->Hkv = k.size[1], p->Sk = k.size[2], p->Dv = v.size[3];
}

bool shares_values(const Shape (&shape)[kNumOperands], const int64_t* addresses, const CallFacts& p) {
  const auto& [q, k, v] = shape;
  const auto in_common = [](const int64_t* a, const int64_t* b, int count) { return std::equal(a, a + count, b); };
  return addresses[1] != 0 && addresses[1] == addresses[2] && p.dtype[1] == p.dtype[2] && v.size[3] <= k.size[3] &&
         in_common(k.size, v.size, 3) && in_common(k.stride, v.stride, 4);
}

ShapeObstacle shape_obstacle(const Shape (&shape)[kNumOperands], bool enable_gqa) {
  const int64_t *q = shape[0].size, *k = shape[1].size, *v = shape[2].size;
  if (q[0] != k[0] || q[0] != v[0]) return ShapeObstacle::kBatch;
  if (q[3] != k[3]) return ShapeObstacle::kHeadDim;
  if (k[1] != v[1]) return ShapeObstacle::kValueHeads;
  if (k[2] != v[2]) return ShapeObstacle::kValueRows;
  if (q[1] == k[1] || k[1] == 1) return ShapeObstacle::kNone;
  if (!enable_gqa) return ShapeObstacle::kHeads;
  return k[1] > 0 && q[1] % k[1] == 0 ? ShapeObstacle::kNone : ShapeObstacle::kGroups;
}

Scale scale_of(std::optional<double> scale) {
  if (!scale) return Scale::kPositive;
  constexpr double smallest = std::numeric_limits<float>::min(), largest = std::numeric_limits<float>::max();
  if (!(std::abs(*scale) <= largest)) return Scale::kNotFinite;
  return *scale >= smallest ? Scale::kPositive : *scale <= -smallest ? Scale::kNegative : Scale::kZero;
}

bool eligible_device(int32_t device_type) {
  static const int32_t cuda = aoti_torch_device_type_cuda(), cpu = aoti_torch_device_type_cpu();
  return device_type == cuda || (device_type == cpu && cpu_stub() != CpuStub::kOff);
}

bool wants_grad(const AttentionArgs& call) {
  const TorchSymbols& torch = torch_symbols();
  const bool of_operands = torch.requires_grad(call.q) || torch.requires_grad(call.k) || torch.requires_grad(call.v);
  return (of_operands && aoti_torch_grad_mode_is_enabled()) || wants_bias_grad(call);
}

bool wants_bias_grad(const AttentionArgs& call) {
  return is_defined(call.mask) && torch_symbols().requires_grad(call.mask) && aoti_torch_grad_mode_is_enabled();
}

}  // namespace flashplug
