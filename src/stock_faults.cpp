// Calls that stay with stock, and that the backend which stock chooses for them gets wrong where another one of its
// does not: for those the router says the other one. problem.py has the same rows for explain and Plan B.
#include <algorithm>

#include "flashplug.h"
#include "torch_symbols.h"

namespace flashplug {

namespace {

bool has_no_elements(const Attention& call) {
  if (torch_symbols().nested(call.q)) return false;
  std::optional<QuietShims> quiet;  // symbolic sizes
  if (traced(call)) quiet.emplace();
  const AtenTensorHandle operands[kNumOperands] = {call.q, call.k, call.v};
  return std::any_of(operands, operands + kNumOperands, [](AtenTensorHandle tensor) {
    int64_t numbers = -1;
    return aoti_torch_get_numel(tensor, &numbers) == 0 && numbers == 0;
  });
}

bool has_unusual_scale(const Attention& call) { return is_unusual(scale_of(call.scale)); }

bool drops_everything(const Attention& call) { return call.dropout_p == 1.0; }

bool has_wide_bias(const Attention& call) { return is_there(call.mask) && is_wide_bias(call); }

// Whether the efficient attention reads the operands as they are. It wants as many KV heads as query heads, and a mask
// whose rows are not broadcast, boolean (stock makes it the query's) or of the query's dtype.
bool efficient_reads(const Attention& call) {
  const TorchSymbols& torch = torch_symbols();
  if (standin() != Standin::kOff || torch.nested(call.q)) return false;
  if (call.mask != nullptr && wrapped(call)) return false;  // torch's rule for vmap wants it batched as the query is
  std::optional<QuietShims> quiet;                          // symbolic sizes, no storage
  const bool only_traced = traced(call);
  if (only_traced || wrapped(call)) quiet.emplace();
  Facts facts;
  const Problem& p = facts.problem;
  if (!read_class(call, &facts) || !read_shapes(call, memory_of(only_traced), &facts)) return false;
  if (call.mask != nullptr) {
    int64_t dims = 0;
    Shape mask;
    if (aoti_torch_get_dim(call.mask, &dims) != 0 || dims == 0 || !read_shape(call.mask, &mask)) return false;
    int32_t mask_dtype = -1, query_dtype = -1;
    if (aoti_torch_get_dtype(call.mask, &mask_dtype) != 0 || aoti_torch_get_dtype(call.q, &query_dtype) != 0)
      return false;
    if (mask.size[dims - 1] != p.Sk || (mask_dtype != query_dtype && mask_dtype != aoti_torch_dtype_bool()))
      return false;
  }
  const auto odd_ones = [](const Layout& layout) { return layout.odd_ones; };
  return whole_units(p) && p.Hq == p.Hkv && std::none_of(p.layout, p.layout + kNumOperands, odd_ones);
}

struct Fault {
  bool (*in)(const Attention& call);
  int64_t of[3];   // whose it is; 0, math, is nobody's
  bool efficient;  // the efficient attention has it right, where it reads the call
};
constexpr Fault kFaults[] = {
    // No output; a division by the number of heads, which ends the process.
    {has_no_elements, {kChoiceCudnn, kChoiceFlash}, false},
    // NaN; an error, where torch says that any p from 0 to 1 will do.
    {drops_everything, {kChoiceCudnn, kChoiceFlash, kChoiceEfficient}, false},
    // NaN.
    {has_unusual_scale, {kChoiceCudnn, kChoiceFlash}, true},
    // Read as if it were of 16 bits; an error, where F.sdpa takes such masks.
    {has_wide_bias, {kChoiceCudnn, kChoiceEfficient}, false},
};

}  // namespace

int64_t right_choice(int64_t chosen, const Attention& call) {
  if (call.causal != Causal::kNone && is_there(call.mask)) return chosen;  // torch does not define it, math raises
  for (const Fault& fault : kFaults) {
    if (chosen == kChoiceMath || std::ranges::find(fault.of, chosen) == std::end(fault.of) || !fault.in(call)) continue;
    if (fault.efficient && torch_symbols().efficient_enabled() && efficient_reads(call)) return kChoiceEfficient;
    return torch_symbols().math_enabled() ? kChoiceMath : chosen;
  }
  return chosen;
}

}  // namespace flashplug
