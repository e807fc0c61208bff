// Known faults of stock backends, for calls that stay with stock. If stock chooses a backend that is wrong for a call
// and a different stock backend is right, the choice hook returns the right backend. The composite hook and explain do
// the same through the op _corrected_choice.
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <optional>

#include "core/core.h"
#include "dispatch/dispatch.h"
#include "hooks/hooks.h"
#include "stock/torch_symbols.h"

namespace flashplug {

namespace {

bool has_unusual_scale(const AttentionArgs& call) { return is_unusual(scale_of(call.scale)); }

bool drops_everything(const AttentionArgs& call) { return call.dropout_p == 1.0; }

bool has_wide_bias(const AttentionArgs& call) { return is_defined(call.mask) && is_wide_bias(call); }

// Return true for a masked call kept from plugin kernels by a mode or a transform. There cuDNN attends to all keys of a
// row without visible keys, and returns NaN in dQ if 64 rows remain after blocks of 128.
bool has_mask_in_transform(const AttentionArgs& call) {
  return is_defined(call.mask) && !is_traced(call) && (has_wrapper(call) || torch_symbols().has_dispatch_mode());
}

// Read the facts of a call with concrete sizes, traced or not.
bool read_concrete_facts(const AttentionArgs& call, ReadFacts* facts) {
  if (torch_symbols().nested(call.q)) return false;
  const bool only_traced = is_traced(call);
  std::optional<QuietShims> quiet;  // the question fails for symbolic sizes; the failure is not for the log, no storage
  if (only_traced || has_wrapper(call)) quiet.emplace();
  return read_meta(call, facts) && read_shapes(call, memory_of(only_traced), facts);
}

// Return true if cuDNN's backward on Hopper reads unmasked padding: query rows after a single row, or keys after a half
// block of 128. The padding counts as scores of 0. exp(0 - LSE) is infinite where LSE is below -88.7, and infinity
// times zero is NaN. With is_causal cuDNN masks the padding. With dropout, a forward without gradients counts, too
// (`CallFacts::as_with_gradients()`).
bool has_unmasked_rest(const AttentionArgs& call) {
  if (call.mask != nullptr || call.causal != Causal::kNone) return false;
  if (!wants_grad(call) && call.dropout_p == 0.0) return false;
  ReadFacts facts;
  constexpr int kHopper = 90;  // compute capability of the GPUs on which the bug was observed
  if (!read_concrete_facts(call, &facts) || device_facts(facts.device_index()).cc != kHopper) return false;
  return facts.call.Sq == 1 || has_half_key_block(facts.call);
}

// Return true if the efficient attention reads the operands unchanged. KV heads must equal query heads. The rows of a
// mask must be contiguous and not broadcast, boolean (converted by stock to the query's dtype) or of the query's dtype.
bool efficient_reads(const AttentionArgs& call) {
  if (cpu_stub() != CpuStub::kOff) return false;
  // The rule of torch for vmap requires a mask with the query's batching.
  if (call.mask != nullptr && has_wrapper(call)) return false;
  ReadFacts facts;
  const CallFacts& p = facts.call;
  if (!read_concrete_facts(call, &facts)) return false;
  if (call.mask != nullptr) {
    int64_t dims = 0;
    Shape mask;
    if (aoti_torch_get_dim(call.mask, &dims) != 0 || dims == 0 || !read_shape(call.mask, &mask)) return false;
    if (mask.stride[dims - 1] != 1) return false;
    int32_t mask_dtype = -1, query_dtype = -1;
    if (aoti_torch_get_dtype(call.mask, &mask_dtype) != 0 || aoti_torch_get_dtype(call.q, &query_dtype) != 0)
      return false;
    if (mask.size[dims - 1] != p.Sk || (mask_dtype != query_dtype && mask_dtype != aoti_torch_dtype_bool()))
      return false;
  }
  const auto unaligned_unit_dim = [](const Layout& layout) { return layout.unaligned_unit_dim; };
  return is_16b_aligned(p) && p.Hq == p.Hkv && std::none_of(p.layout, p.layout + kNumOperands, unaligned_unit_dim);
}

struct StockBug {
  const char* description;  // wrong behavior of the backend
  bool (*holds_for)(const AttentionArgs& call);
  int64_t backends[3];  // backends with the fault; 0, math, has no fault
  bool efficient;       // the efficient attention is right, where it can read the call
};
// The first fault of the chosen backend counts.
constexpr StockBug kFaults[] = {
    // F.sdpa allows any probability from 0 to 1.
    {"rejects dropout_p=1, or returns NaN", drops_everything, {kChoiceCudnn, kChoiceFlash, kChoiceEfficient}, false},
    {"would return NaN with this scale", has_unusual_scale, {kChoiceCudnn, kChoiceFlash}, true},
    {"reads fp32 masks as 16-bit masks, or rejects fp32 masks", has_wide_bias, {kChoiceCudnn, kChoiceEfficient}, false},
    {"may attend to all keys in rows without a visible key, or return NaN in the gradients of such rows",
     has_mask_in_transform,
     {kChoiceCudnn},
     true},
    {"returns NaN in gradients if the scores of a row are all below about -88",
     has_unmasked_rest,
     {kChoiceCudnn},
     true},
};

}  // namespace

// A failed question (a symbolic size) counts as elements, and nested queries have no sizes.
bool has_no_elements(const AttentionArgs& call) {
  if (torch_symbols().nested(call.q)) return false;
  std::optional<QuietShims> quiet;  // the question fails for symbolic sizes; the failure is not for the log
  if (is_traced(call)) quiet.emplace();
  const AtenTensorHandle operands[kNumOperands] = {call.q, call.k, call.v};
  return std::any_of(operands, operands + kNumOperands, [](AtenTensorHandle tensor) {
    int64_t numbers = -1;
    return aoti_torch_get_numel(tensor, &numbers) == 0 && numbers == 0;
  });
}

const char* stock_bug_text(int fault) {
  const bool exists = fault >= 0 && fault < static_cast<int>(std::size(kFaults));
  return exists ? kFaults[fault].description : "";
}

CorrectedChoice corrected_choice(int64_t chosen, const AttentionArgs& call) {
  if (is_undefined(call)) return {chosen};
  for (const StockBug& fault : kFaults) {
    if (chosen == kChoiceMath || std::ranges::find(fault.backends, chosen) == std::end(fault.backends) ||
        !fault.holds_for(call))
      continue;
    const int index = static_cast<int>(&fault - kFaults);
    if (fault.efficient && torch_symbols().efficient_enabled() && efficient_reads(call))
      return {kChoiceEfficient, index};
    return {torch_symbols().math_enabled() ? kChoiceMath : chosen, index};
  }
  return {chosen};
}

}  // namespace flashplug
