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

  // Replace the keys of a paged KV cache by packed keys and values, both (T, Hkv, D).
  void set_packed_keys(TensorHandle key, TensorHandle value, TensorHandle cu_seqlens_k, TensorHandle seqused_k);

 private:
  TensorHandle cu_seqlens_k_, seqused_k_;  // of set_packed_keys()
};

// Return true if query, key and value are 16-bit floats on a GPU, with the numbers of dims: 3 for packed rows, 4 for a
// batch and for pages.
bool operands_fit(const BoxedArgs& args, int64_t query_dims, int64_t key_dims);
// Return true if plugin kernels take the arguments, regardless of speed: `operands_fit()`, no pages, no requested
// splits, and head dims of all kernels.
bool kernels_support(const BoxedArgs& args, int64_t dims);
// Return true if `out` has the sizes, dtype and device of the result. A call without `out` fits.
bool out_fits(const BoxedArgs& args);
int64_t dims_of(AtenTensorHandle tensor);
int compute_capability(AtenTensorHandle query);

// Run a plugin kernel. Returns false if stock is to serve the call. Under a forced backend no call goes to stock: math
// serves calls without elements, and a call without a kernel raises.
bool run_with_kernels(const char* where, const HookedCall& hooked, ForwardResult* result);

// The same for queries of packed sequences and a paged KV cache (varlen_pages.cpp). The pages are read in place or
// gathered.
bool run_with_pages(const char* where, AtenTensorHandle block_table, HookedCall* hooked, ForwardResult* result);

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
