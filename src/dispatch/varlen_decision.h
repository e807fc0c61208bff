// Who serves a call of torch's varlen_attn, decided on plain facts: by the op (src/hooks/varlen_attn.cpp) and by
// explain_varlen.
#pragma once

#include "core/flashplug.h"

namespace flashplug {

// How the running torch chooses the kernel of its own varlen_attn.
enum class VarlenRule : int64_t {
  kFlash,     // up to torch 2.13: flash attention
  kShapes,    // torch 2.14: cuDNN where the sizes of the call allow it
  kArgument,  // since torch 2.15: as the op's argument `backend` says
  kUnknown    // cuDNN is assumed
};
constexpr const char* kVarlenRuleNames[] = {"flash", "shapes", "argument", "unknown"};

// What window_size of a call says, (-1, -1) or (-1, 0) among it.
enum class VarlenWindow : int64_t { kNone, kCausal, kOther };

// Facts of one call. All members are numbers of one type, which Python fills in by the names below.
struct VarlenCall {
  int64_t rule = static_cast<int64_t>(VarlenRule::kUnknown);
  int64_t backend = -1;  // SDPBackend, of the argument; -1: not known
  int64_t allowed = 1;   // torch.nn.attention.sdpa_kernel allows ours; before torch 2.15 it says nothing here
  int64_t into = 0;      // varlen_attn_out
  int64_t enable_gqa = 0;
  int64_t max_q = 0, heads_q = 0, heads_k = 0, D = 0, Dv = 0;
  int64_t dtype = 0;    // of the query
  int64_t window = 0;   // VarlenWindow
  int64_t splits = -1;  // -1: not given
  int64_t paged = 0, has_cu_k = 1;
  int64_t readable = 1;       // by our kernels: tensors of three dims and one 16-bit dtype, on a GPU
  int64_t misaligned = 0;     // cuDNN does not read a tensor as it lies: address, strides, broadcast dims
  int64_t unusual_scale = 0;  // zero, negative or not finite
};
constexpr const char* kVarlenFactNames[] = {
    "rule", "backend", "allowed", "into",   "enable_gqa", "max_q",    "heads_q",  "heads_k",    "D",
    "Dv",   "dtype",   "window",  "splits", "paged",      "has_cu_k", "readable", "misaligned", "unusual_scale"};
static_assert(sizeof(VarlenCall) == std::size(kVarlenFactNames) * sizeof(int64_t));

enum class VarlenExit : int {
  kDisabled,
  kOtherBackend,  // a block of "math" or "stock"
  kNotAllowed,
  kNotTaken,    // by no kernel of ours; forced, that raises
  kForced,      // ours
  kServed,      // ours, as a row says
  kDevice,      // no row is of this GPU
  kUnmeasured,  // no row is of the kernel that torch would run
  kSlower,
  kCount
};
constexpr const char* kVarlenExitNames[] = {"disabled", "other backend", "not allowed", "not taken", "forced",
                                            "served",   "device",        "unmeasured",  "slower"};
static_assert(std::size(kVarlenExitNames) == static_cast<size_t>(VarlenExit::kCount));

struct VarlenVerdict {
  VarlenExit exit;
  int row = -1;  // of the tables
  bool ours() const { return exit == VarlenExit::kForced || exit == VarlenExit::kServed; }
};

VarlenKernel stock_varlen(const VarlenCall& call, int cc);  // that torch's own body would run
VarlenVerdict judge_varlen(const VarlenCall& call, bool is_on, Mode mode, int cc, const Tables& tables);
// Of calls that torch's flash attention would run: whether they were measured on this GPU, and ours are as fast.
bool flash_is_measured(int cc, const Tables& tables);
std::string lacking_text(const VarlenCall& call);  // what our kernels do not take
// What a mode that forces our kernels raises of a call that they do not take.
std::string forced_varlen_error(const VarlenCall& call, Mode mode, const Tables& tables);
std::string varlen_json(const VarlenCall& call, const VarlenVerdict& verdict, Mode mode, int cc, const Tables& tables);

}  // namespace flashplug
