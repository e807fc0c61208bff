// Hooks into torch. src/hooks/ offers:
//
// - sdp_choice.cpp: the choice hook of F.scaled_dot_product_attention. If no kernel of the plugin serves a call, the
//   saved choice of stock answers.
// - stock_bugs.cpp: known faults of stock, for calls that stay with stock;
// - stock_workarounds.cpp: kernels over stock's ops that hand stock readable operands;
// - varlen_attn.cpp, flash_attention_op.cpp, efficient_attention_op.cpp: overrides of further attention ops of torch;
//   varlen_common.h and boxed_args.h are their common code.
#pragma once

#include <cstdint>
#include <optional>

#include "core/attention_call.h"
#include "stock/stock.h"

namespace flashplug {

// ---- sdp_choice.cpp, stock_bugs.cpp ----

int install(int stub_index);  // index 1: CUDA, index 0: CPU (tests). Returns 0, or the code of a reason, with the text
                              // in last_error()
int uninstall(int stub_index);  // restores the saved pointer
bool is_installed(int stub_index);
// Exits of the choice hook: the places where a call is decided. Exit `planned` has a plan. test_sdp_choice meets each
// exit.
inline constexpr const char* kExitNames[] = {
    "disabled", "math everywhere", "math",     "not allowed", "other backend", "dims", "device",  "empty",
    "class",    "nested",          "subclass", "no sizes",    "shapes",        "mask", "planned", "part"};
int take_last_exit();  // exit of the calling thread's latest call since the previous question; -1: no call
// Stock's choice, corrected by stock_bugs.cpp. If the chosen backend is known to be wrong for such a call, the choice
// is a correct stock backend, as far as sdpa_kernel allows. `fault` is the index of the fault, and `stock_bug_text()`
// describes the behavior of the wrong backend.
struct CorrectedChoice {
  int64_t choice;
  int fault = -1;
};
CorrectedChoice corrected_choice(int64_t chosen, const AttentionArgs& call);
bool has_no_elements(const AttentionArgs& call);  // as far as known: false for nested tensors and symbolic sizes
const char* stock_bug_text(int fault);            // "" without a fault
// Return stock torch's choice for a call without a mask; math if no choice hook was ever installed.
int64_t stock_choice(AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v, double dropout_p, bool is_causal,
                     std::optional<double> scale, bool enable_gqa);

// ---- stock_workarounds.cpp ----

// Register kernels over stock's attention ops, to hand stock operands in a readable layout (stock_workarounds.cpp).
// `backends` is a sum of `StockBackend`; 0 unregisters. Throws if the running torch lacks some of the backends; the
// rest is registered then.
void enable_stock_workarounds(int backends);

// Results of stock's cuDNN or flash forward on readable operands, with ownership. The output has the layout of the
// call.
struct OwnedFusedResult {
  TensorHandle tensors[7];  // in the order of `FusedResult`
  int64_t max_q, max_k;
};
OwnedFusedResult readable_cudnn_forward(CudnnForwardCall call);
// Return a 4-d operand for stock's flash or efficient attention, which read 16 bytes at a time: the operand itself if
// aligned, else a copy.
TensorHandle aligned(TensorHandle operand);
TensorHandle aligned_bias(TensorHandle bias);
bool is_repaired(
    int backend);  // takes a `StockBackend`; true if `enable_stock_workarounds()` has registered kernels for it

// ---- varlen_attn.cpp ----

// Register kernels at a dispatch key; possible before the import of torch's module, too.
void register_varlen_ops(const char* dispatch_key);
void unregister_varlen_ops();
// Set the schema of the running torch, after the import of the module.
void set_varlen_schema(const char* op, const char* schema);
void set_varlen_rule(int number);  // sets the `VarlenRule` (varlen_decision.h) of the running torch
int varlen_rule();
// Callback into Python: makes schemas and rule known, and makes stock's bodies callable as torch_flashplug::_stock<op>.
using PrepareCallback = void (*)();
void set_prepare_callback(PrepareCallback callback);

// ---- flash_attention_op.cpp ----

// Set the schema of the running torch. Returns false if stock cannot be called by such a schema.
bool set_flash_schema(const char* schema);
// Register kernels at a dispatch key, over the kernels of stock and of third parties. Throws if stock could not be
// called underneath.
void register_flash_op(const char* dispatch_key);
void unregister_flash_op();
void enable_flash_op_decode(bool on);  // serves decode shapes as well

// ---- efficient_attention_op.cpp ----

// Register kernels at a dispatch key, over stock's kernels. Throws if stock could not be called underneath.
void register_efficient_op(const char* dispatch_key);
void unregister_efficient_op();

}  // namespace flashplug
