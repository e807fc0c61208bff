// Common code of the overrides of torch's varlen and flash attention ops (varlen_attn.cpp, flash_attention_op.cpp,
// efficient_attention_op.cpp). Tensors have rows before heads: (T, H, D) for packed sequences, or (B, S, H, D). Windows
// are bottom-right. LSE and dropout state have the form of stock's flash attention. All remaining calls go on to stock.
#pragma once

#include <cstdint>
#include <optional>

#include "core/attention_call.h"
#include "hooks/boxed_args.h"

namespace flashplug {

// The call of an overridden op. The operands are viewed with heads before rows.
struct HookedCall {
  // `into`: output tensor, or null.
  HookedCall(const BoxedArgs& args, Window window, AtenTensorHandle into = nullptr);
  TensorHandle q, k, v, into;
  ForwardCall call;
};

// Return true if plugin kernels take the arguments, regardless of speed: 16 bits, aligned head dims, no pages, no
// requested splits. `dims` is 3 for packed sequences, 4 for a batch.
bool kernels_support(const BoxedArgs& args, int64_t dims);
int64_t dims_of(AtenTensorHandle tensor);
int compute_capability(AtenTensorHandle query);

// Run a plugin kernel. Returns false if stock is to serve the call. Under a forced backend no call goes to stock: math
// serves calls without elements, and a call without a kernel raises.
bool run_with_kernels(const char* where, const HookedCall& hooked, ForwardResult* result);

// Results of stock's flash attention.
struct FlashResult {
  TensorHandle out, lse, rng;
};
FlashResult to_stock_layout(ForwardResult result, const HookedCall& hooked, AtenTensorHandle query);
void copy_result(AtenTensorHandle out, AtenTensorHandle result);  // copies unless `result` is already in `out`
// Return true if the plugin's forward made the dropout state, so that the plugin's backward must follow.
bool is_ours(AtenTensorHandle rng);

// Compute gradients of query, key and value by plugin kernels, in the layout of torch.empty_like of each operand.
// Returns false without kernels. `lse`: an LSE of the query's rows alone, if the op's own LSE has more rows.
bool gradients_with_kernels(const BoxedArgs& args, Window window, TensorHandle grads[3],
                            AtenTensorHandle lse = nullptr);

// Return a bottom-right window. A bound of -1 means: all keys on that side are visible.
Window bottom_right(std::optional<int64_t> left, std::optional<int64_t> right, bool is_causal);

}  // namespace flashplug
