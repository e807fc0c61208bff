// The ops that torch calls: outputs, fallback to stock, backward. src/ops/ offers:
//
// - sdpa_ops.cpp: the overrideable aten op, and sdpa_fwd and sdpa_bwd of traced graphs;
// - attention_ops.cpp, block_sparse_ops.cpp and quantized_ops.cpp: the ops of attention();
// - direct_attention.cpp: plain calls of attention() without torch's dispatcher;
// - backward.cpp: gradients by kernels of the plugin.
#pragma once

#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <initializer_list>
#include <iterator>

#include "core/attention_call.h"
#include "dispatch/dispatch.h"

namespace flashplug {

// ---- sdpa_ops.cpp ----

void register_ops(const char* dispatch_key, bool own_ops);  // "CUDA", or "CPU" for the CPU stub backend
void unregister_ops();

// Read the facts of a call with real tensors. Throws for unsupported tensors.
ReadFacts read_facts(const ForwardCall& call);
// Run a plugin kernel: two allocations (three with split-KV), copies of unreadable operands, and one kernel call.
// Returns false without an available kernel; auto mode then falls back to stock.
bool our_forward(const ForwardCall& original, const ReadFacts& facts, const Plan& plan, ForwardResult* result);
// Return a tensor without elements: no memory, no launch.
TensorHandle placeholder(const ForwardCall& call, int32_t dtype);

// ---- attention_ops.cpp: ops of attention() ----

void register_own_ops(torch::stable::detail::StableLibrary* library);
void check_lengths(const ForwardCall& call, const ReadFacts& facts);  // throws if kernels could not read the lengths
// Run a kernel allowed by the mode `by`. Returns false without a kernel, but throws if the call's mode forces one.
bool attend(const char* where, const ForwardCall& call, const ReadFacts& facts, Mode by, ForwardResult* result);
// Run a kernel for a call of attention_fwd or, with a block table, of paged_fwd. Returns false where the reference math
// has to run. Throws for arguments that the ops do not take.
bool attend_by_kernel(ForwardCall* given, ForwardResult* result);
bool differentiate_attention(const BackwardCall& call, const ReadFacts& facts,
                             BackwardResult* result);  // false: no plugin kernel
bool wants_math(Mode mode);
bool is_16_bit(const CallFacts& p);  // true for 16-bit queries; the reference math checks all other calls
// Throw unless a tensor is fp32, has the wanted sizes, and is on the query's device.
void check_fp32(const char* name, AtenTensorHandle tensor, std::initializer_list<int64_t> expected_size,
                const ReadFacts& facts);

// ---- direct_attention.cpp ----

// Arguments of attention() in the order of its signature, all of them positional in the C function.
constexpr const char* kAttentionArgumentNames[] = {"q",
                                                   "k",
                                                   "v",
                                                   "causal",
                                                   "window",
                                                   "softcap",
                                                   "sinks",
                                                   "scale",
                                                   "cu_seqlens_q",
                                                   "cu_seqlens_k",
                                                   "max_seqlen_q",
                                                   "max_seqlen_k",
                                                   "seqused_k",
                                                   "block_table",
                                                   "k_scale",
                                                   "v_scale",
                                                   "block_mask",
                                                   "tree_mask",
                                                   "num_splits",
                                                   "fixed_split_size",
                                                   "plan",
                                                   "out",
                                                   "return_lse"};
constexpr int kNumAttentionArguments = std::size(kAttentionArgumentNames);
// Fields of a VarlenPlan (varlen_plan.py), in order.
constexpr const char* kPlanFieldNames[] = {"lists", "key", "rows", "keys", "window", "lengths", "versions"};

// Python objects of a tensor and of a parameter, and what is inside: the addresses of torch's objects.
struct ProbeObjects {
  void *tensor, *parameter;
  int64_t words;  // size of an object in C
  const void *tensor_impl, *parameter_impl;
};
// Return a new Python function that serves plain calls of attention() and answers None for all others. Returns null if
// the running torch or Python lacks a function, or keeps tensors in an unknown place.
void* direct_attention_function(const ProbeObjects& probes, void* plan_type);

// ---- block_sparse_ops.cpp ----

void register_listed(torch::stable::detail::StableLibrary* library);

// ---- quantized_ops.cpp ----

void register_quantized(torch::stable::detail::StableLibrary* library);

// ---- backward.cpp: gradients by plugin kernels ----

// Run the plugin's backward. Returns false if a different backward must follow: no plugin kernel, or a GPU on which
// auto mode takes none.
bool our_backward(const BackwardCall& call, const CallFacts& p, const DeviceFacts& device, int device_index, Mode mode,
                  BackwardResult* result);

}  // namespace flashplug
