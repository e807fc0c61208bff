// Workspaces of kernels that quantize operands to 8 bits. kernels/features/quantized_qkv.py defines the layouts.
//
// The quantized query has a workspace of the call. Quantized key and value follow in the same allocation, or come from
// an earlier call, which quantized them and ran nothing else.
#include <cstdint>

#include "core/attention_call.h"
#include "core/core.h"
#include "core/values.h"
#include "launch/kernel_args.h"
#include "launch/launch.h"
#include "operands/operands.h"

namespace flashplug {

namespace {

constexpr int64_t kWordBytes = 4;  // of int32, the dtype of the workspaces, and of fp32

int64_t rounded(int64_t bytes, int64_t unit) { return ceil_div(bytes, unit) * unit; }

// Sizes of consecutive buffers, in the order of kernels/features/quantized_qkv.py.
class Bytes {
 public:
  void add(int64_t bytes) { total_ += rounded(bytes, tables().layout.workspace_alignment); }
  int64_t total() const { return total_; }

 private:
  int64_t total_ = 0;
};

int64_t query_bytes(const CallFacts& p, const KernelRow& row) {
  const int64_t rows = p.B * p.Hq * p.Sq;
  Bytes bytes;
  bytes.add(rows * row.d_max);
  bytes.add(rows * kWordBytes);
  bytes.add(rows * kWordBytes);
  return bytes.total();
}

int64_t kv_bytes(const CallFacts& p, const KernelRow& row) {
  const int64_t heads = p.B * p.Hkv;
  const bool values = (row.takes & tables().value_features) != 0;
  Bytes bytes;
  bytes.add(heads * p.Sk * row.d_max);
  if (values) bytes.add(heads * p.Dv * rounded(p.Sk, tables().layout.key_order));
  bytes.add(heads * ceil_div(p.Sk, row.tile_n) * kWordBytes);
  for (int i = 0; values && i < 2; ++i) bytes.add(heads * row.dv_max * kWordBytes);  // scale and mean of a channel
  return bytes.total();
}

TensorHandle new_words(int64_t bytes, const TensorMeta& like) {
  static const int32_t int32 = aoti_torch_dtype_int32();
  const int64_t words = bytes / kWordBytes, unit_stride = 1;
  return empty_strided(1, &words, &unit_stride, int32, like.device_type, like.device_index);
}

}  // namespace

int64_t quantized_kv_words(const CallFacts& p, const KernelRow& row) { return kv_bytes(p, row) / kWordBytes; }

TensorHandle pack_quant_workspace(const ForwardCall& call, const CallFacts& p, const TensorMeta& query,
                                  const KernelRow& row, Arguments* arguments) {
  if (!arguments->takes("quant_workspace")) return {};
  const bool quantizes_kv = call.quantized_kv == nullptr;
  const int64_t kv_offset = query_bytes(p, row);
  TensorHandle workspace = new_words(kv_offset + (quantizes_kv ? kv_bytes(p, row) : 0), query);
  arguments->tensor("quant_workspace", workspace.get(), true);
  arguments->integer("quantizes_kv", quantizes_kv);
  arguments->tensor("k_samples", quantizes_kv ? call.k : call.key_samples);
  if (quantizes_kv)
    arguments->global_number("quantized_kv", static_cast<char*>(mutable_data(workspace.get())) + kv_offset);
  else
    arguments->tensor("quantized_kv", call.quantized_kv);
  return workspace;
}

// Without CTAs for attention, the kernel quantizes key and value only. The remaining operands have sizes, but share the
// memory of their rows.
TensorHandle quantize_key_and_value(Kernel& kernel, const KernelRow& row, const ForwardCall& call, const CallFacts& p,
                                    const TensorMeta& key) {
  static const int32_t fp32 = aoti_torch_dtype_float32();
  int32_t dtype = -1;
  check_shim(aoti_torch_get_dtype(call.k, &dtype), "get_dtype");
  TensorHandle quantized_kv = new_words(kv_bytes(p, row), key);
  const TensorHandle query = make_broadcast_tensor({p.B, p.Hq, 1, p.D}, dtype, key),
                     out = make_broadcast_tensor({p.B, p.Hq, 1, p.Dv}, dtype, key),
                     lse = make_broadcast_tensor({p.B, p.Hq, 1}, fp32, key);
  Arguments arguments(row, p, key.device_index);
  arguments.tensor("q", query.get());
  arguments.tensor("k", call.k), arguments.tensor("k_samples", call.k);
  arguments.tensor("v", call.v);
  arguments.tensor("o", out.get()), arguments.tensor("lse", lse.get());
  arguments.scale(1.0);
  arguments.tensor("quant_workspace", quantized_kv.get());  // nothing is written there without a query
  arguments.tensor("quantized_kv", quantized_kv.get(), true);
  arguments.integer("quantizes_kv", 1);
  launch_preprocess(kernel, arguments);
  return quantized_kv;
}

}  // namespace flashplug
