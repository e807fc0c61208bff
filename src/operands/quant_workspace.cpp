// Workspace of kernels that quantize operands to 8 bits. kernels/features/quantized_qkv.py defines the layout.
#include <cstdint>

#include "core/core.h"
#include "core/values.h"
#include "launch/kernel_args.h"
#include "operands/operands.h"

namespace flashplug {

namespace {

int64_t rounded(int64_t bytes, int64_t unit) { return ceil_div(bytes, unit) * unit; }

// Return the size of the workspace, buffer by buffer in the order of kernels/features/quantized_qkv.py.
int64_t quant_workspace_bytes(const CallFacts& p, const KernelRow& row) {
  const LayoutRow& layout = tables().layout;
  const int64_t queries = p.B * p.Hq * p.Sq, kv_heads = p.B * p.Hkv, fp32 = 4;
  int64_t bytes = 0;
  const auto take = [&](int64_t buffer_bytes) { bytes += rounded(buffer_bytes, layout.workspace_alignment); };
  take(queries * row.d_max);
  take(kv_heads * p.Sk * row.d_max);
  const bool values = (row.takes & tables().value_features) != 0;
  if (values) take(kv_heads * p.Dv * rounded(p.Sk, layout.key_order));
  take(queries * fp32);
  take(queries * fp32);
  take(kv_heads * ceil_div(p.Sk, row.tile_n) * fp32);
  for (int of_channel = 0; values && of_channel < 2; ++of_channel) take(kv_heads * row.dv_max * fp32);
  return bytes;
}

}  // namespace

TensorHandle pack_quant_workspace(const CallFacts& p, const TensorMeta& query, const KernelRow& row,
                                  Arguments* arguments) {
  if (!arguments->takes("quant_workspace")) return {};
  static const int32_t int32 = aoti_torch_dtype_int32();
  const int64_t words = quant_workspace_bytes(p, row) / 4, unit_stride = 1;
  TensorHandle workspace = empty_strided(1, &words, &unit_stride, int32, query.device_type, query.device_index);
  arguments->tensor("quant_workspace", workspace.get(), true);
  return workspace;
}

}  // namespace flashplug
