// The rule of torch's varlen_attn. A mode can force kernels. Otherwise, the measured rows of torch's own kernel for the
// call decide (VARLEN_ROWS of dispatch_table.py).
#include "dispatch/varlen_decision.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "core/core.h"
#include "dispatch/dispatch.h"

namespace flashplug {

namespace {

constexpr int64_t kMaxDecodeRows = 128;    // torch 2.14 does not use cuDNN for calls of at most so many query rows
constexpr int64_t kMaxCudnnHeadDim = 128;  // limit of torch 2.15 on Hopper

bool is_window(const VarlenCall& call, VarlenWindow window) { return call.window == static_cast<int64_t>(window); }

// Return true if torch 2.14 runs cuDNN. The rule is `_can_use_cudnn` of torch/nn/attention/varlen.py, reduced to the
// calls that the kernels of this project take.
bool fits_cudnn(const VarlenCall& call) {
  const bool grouped = call.enable_gqa != 0 || call.heads_q != call.heads_k;
  return call.writes_out == 0 && call.max_q > kMaxDecodeRows && is_window(call, VarlenWindow::kNone) && !grouped &&
         call.splits < 0 && call.paged == 0;
}

// Return true if torch 2.15 can run cuDNN for the call on some machine with a Hopper GPU. The op of torch 2.15 receives
// the choice as an argument.
bool may_run_cudnn(const VarlenCall& call) {
  return !is_window(call, VarlenWindow::kOther) && call.splits < 0 && std::max(call.D, call.Dv) <= kMaxCudnnHeadDim;
}

int64_t varlen_facts_of(const VarlenCall& call) {
  const bool is_decode = call.max_q == 1 && call.splits != 1;  // as in src/hooks/varlen_pages.cpp
  return (call.misaligned != 0 ? int64_t{kMisaligned} : 0) |
         (call.unusual_scale != 0 ? int64_t{kUnusualVarlenScale} : 0) |
         (call.paged == 0 ? 0 : int64_t{is_decode ? kPagedDecode : kPagedRows}) |
         (call.splits >= 0 && call.splits != 1 ? int64_t{kSplitHint} : 0);
}

bool has_row_of(int cc, const Tables& tables) {
  return std::ranges::any_of(tables.varlen, [cc](const VarlenRow& row) { return row.cc == cc; });
}

int find_row(VarlenKernel stock, int64_t facts, int cc, const Tables& tables) {
  const auto holds = [&](const VarlenRow& row) {
    return row.cc == cc && row.stock == stock && (row.facts & ~facts) == 0 && (facts & ~row.facts & kVarlenForms) == 0;
  };
  const auto first_match = std::ranges::find_if(tables.varlen, holds);
  return first_match == tables.varlen.end() ? -1 : static_cast<int>(first_match - tables.varlen.begin());
}

// A backend must be forced for packed sequences with head dims above the limit of all kernels.
bool takes_head_dim(const VarlenCall& call, int64_t dim, Mode mode, const Tables& tables) {
  return has_head_dim(tables.layout, dim, mode.forces_kernels() && call.paged == 0);
}

bool kernels_support(const VarlenCall& call, Mode mode, const Tables& tables) {
  const bool has_lengths = (call.paged != 0 ? call.has_seqused_k : call.has_cu_seqlens_k) != 0;
  return call.readable != 0 && has_lengths && call.out_fits != 0 && call.unknown_value == 0 &&
         call.splits <= tables.layout.max_splits && takes_head_dim(call, call.D, mode, tables) &&
         takes_head_dim(call, call.Dv, mode, tables);
}

// Return the sdpa_backend blocks that force the kernels of a family.
std::string blocks_text(const char* separator, const Tables& tables) {
  std::string blocks;
  for (const FamilyRow& family : tables.families)
    blocks += (blocks.empty() ? "" : separator) + ("sdpa_backend('" + std::string(family.backend) + "')");
  return blocks;
}

std::string decision_text(const VarlenCall& call, const VarlenDecision& decision, Mode mode, int cc,
                          const Tables& tables) {
  const std::string stock = kVarlenKernelTexts[stock_varlen_kernel(call, cc)];
  switch (decision.reason) {
    case VarlenDecisionReason::kDisabled:
      return "The plugin is disabled. Call torch_flashplug.enable().";
    case VarlenDecisionReason::kOtherBackend:
      return "Another backend is requested.";
    case VarlenDecisionReason::kNotAllowed:
      return "torch.nn.attention.sdpa_kernel allows neither FLASH_ATTENTION nor OVERRIDEABLE.";
    case VarlenDecisionReason::kUnsupported:
      return "The kernels of this project do not support a call with " + missing_support_text(call, mode, tables);
    case VarlenDecisionReason::kForced:
      return "The backend is forced.";
    case VarlenDecisionReason::kServed:
      return "PyTorch would run " + stock;
    case VarlenDecisionReason::kDevice:
      return "varlen_attn was not measured on compute capability " + capability(cc) + ". Use " +
             blocks_text(" or ", tables) + ".";
    case VarlenDecisionReason::kUnmeasured:
      return "PyTorch would run " + stock +
             ", and no measured entry compares the kernels of this project with that kernel (VARLEN_ROWS of "
             "torch_flashplug/registry/dispatch_table.py). Use sdpa_backend('" +
             tables.families[0].backend + "').";
    case VarlenDecisionReason::kSlower:
      return "PyTorch would run " + stock + ", which was measured to be faster.";
    case VarlenDecisionReason::kCount:
      break;
  }
  return "";
}

}  // namespace

VarlenKernel stock_varlen_kernel(const VarlenCall& call, int cc) {
  const bool considers_cudnn = cc / 10 == 9 || cc / 10 == 10;  // GPUs for which torch considers cuDNN
  switch (static_cast<VarlenRule>(call.rule)) {
    case VarlenRule::kFlash:
      return kVarlenFlash;
    case VarlenRule::kShapes:
      return considers_cudnn && fits_cudnn(call) ? kVarlenCudnn : kVarlenFlash;
    case VarlenRule::kArgument:
      // A negative backend: the call names none.
      if (call.backend < 0) return considers_cudnn && may_run_cudnn(call) ? kVarlenCudnn : kVarlenFlash;
      return call.backend == kChoiceFlash ? kVarlenFlash : kVarlenCudnn;
    case VarlenRule::kUnknown:
      break;
  }
  return kVarlenCudnn;  // the faster kernel, so that auto mode takes no call of an unknown torch
}

bool flash_is_measured(int cc, const Tables& tables) {
  const int row = find_row(kVarlenFlash, 0, cc, tables);
  return row >= 0 && tables.varlen[row].serve != 0;
}

VarlenDecision decide_varlen(const VarlenCall& call, bool is_on, Mode mode, int cc, const Tables& tables) {
  if (!is_on) return {VarlenDecisionReason::kDisabled};
  if (mode.backend() != Backend::kAuto && mode.family() < 0) return {VarlenDecisionReason::kOtherBackend};
  if (call.allowed == 0) return {VarlenDecisionReason::kNotAllowed};
  if (!kernels_support(call, mode, tables)) return {VarlenDecisionReason::kUnsupported};
  if (mode.forces_kernels()) return {VarlenDecisionReason::kForced};
  const int row = find_row(stock_varlen_kernel(call, cc), varlen_facts_of(call), cc, tables);
  if (row >= 0)
    return {tables.varlen[row].serve != 0 ? VarlenDecisionReason::kServed : VarlenDecisionReason::kSlower, row};
  return {has_row_of(cc, tables) ? VarlenDecisionReason::kUnmeasured : VarlenDecisionReason::kDevice};
}

std::string missing_support_text(const VarlenCall& call, Mode mode, const Tables& tables) {
  const auto is_odd = [&](int64_t dim) { return !takes_head_dim(call, dim, mode, tables); };
  const DType dtype = static_cast<DType>(call.dtype);
  const auto [low, high] = std::minmax(call.D, call.Dv);
  const std::string dims = low == high ? std::to_string(low) : std::to_string(low) + ", " + std::to_string(high);
  const std::pair<bool, std::string> lacks[] = {
      {call.paged == 0 && call.has_cu_seqlens_k == 0, "no cu_seq_k"},
      {call.paged != 0 && call.has_seqused_k == 0, "block_table, but no seqused_k"},
      {call.splits > tables.layout.max_splits, "num_splits=" + std::to_string(call.splits)},
      {call.out_fits == 0, "an out that differs from the result in shape, dtype or device"},
      {call.unknown_value != 0, "an argument that this version does not know"},
      {!is_16_bit_float(dtype), std::string("torch.") + facts_of(dtype).name},
      {is_odd(call.D) || is_odd(call.Dv), "head dims [" + dims + "]"}};
  std::string all;
  for (const auto& [lacking, property] : lacks) all += lacking ? (all.empty() ? "" : ", ") + property : "";
  return all.empty() ? "these tensors" : all;
}

std::string varlen_json(const VarlenCall& call, const VarlenDecision& decision, Mode mode, int cc,
                        const Tables& tables) {
  const VarlenRow* row = decision.row < 0 ? nullptr : &tables.varlen[decision.row];
  const bool raises = decision.reason == VarlenDecisionReason::kUnsupported && mode.forces_kernels();
  const std::pair<const char*, std::string> members[] = {
      {"reason", kVarlenReasonNames[static_cast<int>(decision.reason)]},
      {"stock", kVarlenKernelNames[stock_varlen_kernel(call, cc)]},
      {"text", decision_text(call, decision, mode, cc, tables)},
      {"row", row != nullptr ? row->measured : ""},
      {"stock_bug", row != nullptr ? row->wrong : ""},
      {"error", raises ? forced_varlen_error(call, mode, tables) : ""}};
  std::string json;
  for (const auto& [name, text] : members) json += (json.empty() ? "{" : ", ") + quote(name) + ": " + quote(text);
  return json + "}";
}

std::string forced_varlen_error(const VarlenCall& call, Mode mode, const Tables& tables) {
  return "varlen_attn: the forced kernels do not support a call with " + missing_support_text(call, mode, tables) +
         ". Call varlen_attn outside of sdpa_backend('" + tables.families[mode.family()].backend + "').";
}

}  // namespace flashplug
