// Dispatch of torch's varlen_attn: the choice between the kernels of this project and stock, from plain facts of a
// call. The op (src/hooks/varlen_attn.cpp) and explain_varlen use the rule.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>

#include "core/core.h"

namespace flashplug {

// The way in which the running torch chooses the stock kernel of varlen_attn.
enum class VarlenRule : int64_t {
  kFlash,     // up to torch 2.13: always flash attention
  kShapes,    // torch 2.14: cuDNN if the sizes of the call allow cuDNN
  kArgument,  // since torch 2.15: the op has an argument `backend`
  kUnknown    // an unknown torch: cuDNN is assumed
};
constexpr const char* kVarlenRuleNames[] = {"flash", "shapes", "argument", "unknown"};

// The window_size of a call: kNone is (-1, -1), kCausal is (-1, 0).
enum class VarlenWindow : int64_t { kNone, kCausal, kOther };
constexpr const char* kVarlenWindowNames[] = {"none", "causal", "other"};

// Facts of a call. All members have the same type, because Python fills in the members by the names below.
struct VarlenCall {
  int64_t rule = static_cast<int64_t>(VarlenRule::kUnknown);
  int64_t backend = -1;  // SDPBackend of the op's argument; -1: not known
  // torch.nn.attention.sdpa_kernel allows these kernels; 1 before torch 2.15, which ignores sdpa_kernel.
  int64_t allowed = 1;
  int64_t writes_out = 0;  // the op is varlen_attn_out
  int64_t enable_gqa = 0;
  int64_t max_q = 0, heads_q = 0, heads_k = 0, D = 0, Dv = 0;
  int64_t dtype = 0;    // dtype of the query
  int64_t window = 0;   // VarlenWindow
  int64_t splits = -1;  // num_splits; -1: not given
  int64_t paged = 0, has_cu_seqlens_k = 1, has_seqused_k = 0;
  int64_t readable = 1;       // the kernels can read the tensors: right number of dims, 16-bit floats, on a GPU
  int64_t out_fits = 1;       // the output tensor of varlen_attn_out has the shape and dtype of the result
  int64_t unknown_value = 0;  // an argument unknown to this project differs from its default
  int64_t misaligned = 0;     // cuDNN cannot read a tensor in place, because of address, strides or broadcast dims
  int64_t unusual_scale = 0;  // the scale is zero, negative or not finite
};
constexpr const char* kVarlenCallMembers[] = {
    "rule",     "backend",  "allowed",       "writes_out", "enable_gqa",   "max_q", "heads_q",          "heads_k",
    "D",        "Dv",       "dtype",         "window",     "splits",       "paged", "has_cu_seqlens_k", "has_seqused_k",
    "readable", "out_fits", "unknown_value", "misaligned", "unusual_scale"};
static_assert(sizeof(VarlenCall) == std::size(kVarlenCallMembers) * sizeof(int64_t));

enum class VarlenDecisionReason : int {
  kDisabled,
  kOtherBackend,  // a block requests "math" or "stock"
  kNotAllowed,
  kUnsupported,  // no kernel takes the call; a forced backend raises
  kForced,       // a kernel runs, because the mode forces kernels
  kServed,       // a kernel runs, because a measured row says so
  kDevice,       // no row is for the GPU
  kUnmeasured,   // no row is for the kernel that torch would run
  kSlower,
  kCount
};
constexpr const char* kVarlenReasonNames[] = {"disabled", "other backend", "not allowed", "unsupported", "forced",
                                              "served",   "device",        "unmeasured",  "slower"};
static_assert(std::size(kVarlenReasonNames) == static_cast<size_t>(VarlenDecisionReason::kCount));

struct VarlenDecision {
  VarlenDecisionReason reason;
  int row = -1;  // row of the table that decided, or -1
  bool ours() const { return reason == VarlenDecisionReason::kForced || reason == VarlenDecisionReason::kServed; }
};

VarlenKernel stock_varlen_kernel(const VarlenCall& call, int cc);  // the kernel of the stock op
VarlenDecision decide_varlen(const VarlenCall& call, bool is_on, Mode mode, int cc, const Tables& tables);
// Return true if the kernels were measured on the GPU to be as fast as torch's flash attention.
bool flash_is_measured(int cc, const Tables& tables);
// Return the unsupported properties of the call.
std::string missing_support_text(const VarlenCall& call, Mode mode, const Tables& tables);
// Return the error text for an unsupported call under a mode that forces kernels.
std::string forced_varlen_error(const VarlenCall& call, Mode mode, const Tables& tables);
std::string varlen_json(const VarlenCall& call, const VarlenDecision& decision, Mode mode, int cc,
                        const Tables& tables);

}  // namespace flashplug
