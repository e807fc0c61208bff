// Text of plans and reasons: the lines of explain(), the errors of a forced backend, and the lines of the log. A call
// served by a kernel never runs this code.
#include "dispatch/dispatch.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <string>
#include <type_traits>

#include "core/core.h"

namespace flashplug {

std::string capability(int64_t cc) { return std::to_string(cc / 10) + "." + std::to_string(cc % 10); }

std::string quote(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (static_cast<unsigned char>(c) >= 0x20) out += c;
  }
  return out + "\"";
}

namespace {

const char* const kOperandNames[kNumOperands] = {"query", "key", "value"};

std::string number(int64_t value) { return std::to_string(value); }

std::string format_fixed(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3f", value);
  return text;
}

// Return the dtypes of the kernels of a family, as far as query, key and value can have the same dtype.
std::string dtypes_text(int family, const char* between, const Tables& tables) {
  std::string out;
  for (int i = 0; i < num_dtypes(); ++i) {
    const DType dtype = static_cast<DType>(i), all[kNumOperands] = {dtype, dtype, dtype};
    if (tables.supports_dtypes(family, all)) out += (out.empty() ? "" : between) + std::string(facts_of(dtype).name);
  }
  return out;
}

// Return the shortest decimal text with the same value as a double.
std::string format_shortest(double value) {
  char text[32];
  int digits = 0;
  do std::snprintf(text, sizeof text, "%.*g", ++digits, value);
  while (digits < std::numeric_limits<double>::max_digits10 && std::strtod(text, nullptr) != value);
  return text;
}

// Replace each {fact} in a text by the value of the fact with the name between the braces.
std::string fill_in_facts(std::string words, CallFacts p) {
  visit_facts(p, [&words](const char* name, const auto& fact) {
    const std::string hole = "{" + std::string(name) + "}";
    const size_t at = words.find(hole);
    if (at == std::string::npos) return;
    if constexpr (std::is_floating_point_v<std::decay_t<decltype(fact)>>)
      words.replace(at, hole.size(), format_shortest(fact));
    else
      words.replace(at, hole.size(), number(static_cast<int64_t>(fact)));
  });
  return words;
}

std::string needs_text(int64_t needs, const Tables& tables) {
  std::string names;
  for (size_t i = 0; i < tables.features.size(); ++i) {
    if ((needs >> i & 1) != 0) names += (names.empty() ? "" : " and ") + std::string(tables.features[i].name);
  }
  return names;
}

// Return the reason for a call whose features all have kernels, although no single kernel has all of the features.
std::string combination_reason(int64_t needs, const Tables& tables) {
  if (needs == 0)
    return "No kernel matches this call exactly: each candidate applies a feature (for example causal masking) that "
           "the call does not use.";
  if ((needs & kCausal) != 0 && (needs & kAnyMask) != 0)
    return "is_causal must be False with attn_mask, because PyTorch does not define the combination (its math backend "
           "raises). Pass one mask for both.";
  return "No kernel of this backend has exactly this combination of features: " + needs_text(needs, tables) +
         ". Stock attention serves this call.";
}

// Return the reason for a call outside the measured classes, with the limits of the nearest measured class.
std::string unmeasured_reason(int kernel_row, int64_t tiles, const CallFacts& p, const DeviceFacts& device,
                              const Tables& tables) {
  const KernelRow& kernel = tables.kernels[kernel_row];
  const int nearest = nearest_serving_row(p, kernel, tiles, tables);
  std::string missed;
  if (nearest >= 0) {
    for (const Range& range : ranges_of(tables.choices[nearest], p, kernel, tiles)) {
      if (range.holds()) continue;
      const bool low = range.value < range.low;
      missed += (missed.empty() ? "" : ", ") + std::string(range.name) + (low ? " >= " : " <= ") +
                number(low ? range.low : range.high) + " (here " + number(range.value) + ")";
    }
  }
  return std::string("No measured entry covers this ") + (missed.empty() ? "class of calls" : "call") +
         " (compute capability " + capability(device.cc) +
         (p.grad                  ? ", with grad"
          : p.as_with_gradients() ? ", dropout as with grad"
                                  : ", no grad") +
         (p.D == p.Dv ? "" : ", D != Dv") + ")" + (missed.empty() ? "" : ": the nearest entry needs " + missed) +
         ". The auto mode serves measured calls only. Force a kernel with sdpa_backend('" +
         tables.families[kernel.family].backend + "').";
}

// Return how the keys of a tile of packed query rows are split among CTAs.
std::string split_text(const Plan& plan, const CallFacts& p, const DeviceFacts& device, const Tables& tables) {
  const KernelRow& row = tables.kernels[plan.kernel_row];
  const int64_t ctas = plan.tiles * plan.splits.n, sms = std::max(device.sm_count, 1);
  if (plan.splits.balanced())
    return "tiles = B*Hkv*ceil(Sq*G/" + number(row.tile_m) + ") = " + number(plan.tiles) + " on " + number(sms) +
           " SMs: balanced splits, " + number(plan.splits.n) + " for all sequences, or " + number(plan.splits.even) +
           " for each sequence if lengths are even, " + number(ctas / p.B) + " CTAs";
  const int64_t blocks =
      p.split_size > 0 ? p.split_size / row.tile_n : ceil_div(ceil_div(p.Sk, row.tile_n), plan.splits.n);
  return "tiles = B*Hkv*ceil(Sq*G/" + number(row.tile_m) + ") = " + number(plan.tiles) + " on " + number(sms) +
         " SMs: splits " + number(plan.splits.n) + " of " + number(blocks) + " blocks of " + number(row.tile_n) +
         " keys, " + (plan.splits.cluster > 1 ? "in clusters, " : "") + number(ctas) + " CTAs (" +
         number(100 * ctas / sms) + " % of the SMs)";
}

std::string gate_text(const Plan& plan, const CallFacts& p, const DeviceFacts& device, const Tables& tables) {
  const Gate& gate = plan.gate;
  const std::string rows = "Sq*G = " + number(p.Sq) + "*" + number(p.group()) + " = " + number(packed_rows(p));
  std::string why = rows + (gate.decode ? " <= " : " > ") + number(tables.cost_model.max_decode_rows);
  if (plan.packed_ns > 0)
    why += ", <= " + number(tables.cost_model.max_packed_rows) + ": about " + format_fixed(1e-3 * plan.packed_ns) +
           " us with packed rows, " + format_fixed(1e-3 * plan.unpacked_ns) + " us without";
  if (plan.kernel_row >= 0 && tables.kernels[plan.kernel_row].kind == kDecode)
    return why + ": " + split_text(plan, p, device, tables);
  if (!gate.decode) return why + ": not a decode call";
  return why + ": tiles = B*Hkv = " + number(p.B) + "*" + number(p.Hkv) + " = " + number(gate.tiles) +
         (gate.closed ? " < " : " >= ") + format_fixed(tables.cost_model.occupancy) + "*" + number(device.sm_count) +
         " SMs -> " +
         (!gate.closed              ? "open"
          : plan.stock_bug_row >= 0 ? "closed, but stock attention is wrong for this call"
          : plan.ours()             ? "closed, but the backend is requested"
                                    : "stock");
}

std::string row_text(int choice_row, const CallFacts& p, const Tables& tables) {
  if (choice_row < 0) return "";
  const ChoiceRow& row = tables.choices[choice_row];
  const bool is_recipe = (row.features & tables.recipe_features) != 0;
  const double ratio = p.without_cudnn ? row.ratio_without_cudnn : row.ratio;
  const std::string than = is_recipe ? "the 16-bit kernel" : ratio != row.ratio ? "stock without cuDNN" : "stock";
  return std::string(row.description) + ": " + format_fixed(ratio) + " x " + than + " (" + row.measured + ")";
}

std::string stock_bug_row_text(int stock_bug_row, const Tables& tables) {
  if (stock_bug_row < 0) return "";
  const StockBugRow& row = tables.stock_bugs[stock_bug_row];
  return std::string(row.stock) + " (" + row.evidence + ")";
}

std::string name_of(Backend backend, const Tables& tables) {
  return is_ours(backend) ? tables.families[Mode{static_cast<int64_t>(backend)}.family()].backend
                          : kBackendNames[static_cast<int>(backend)];
}

// Return why the dispatcher did not examine a backend.
std::string not_examined_reason(const Plan& plan, Mode mode, const Tables& tables) {
  const bool is_requested = mode.backend() != Backend::kAuto;
  return name_of(is_requested ? mode.backend() : plan.backend, tables) +
         (!is_requested          ? " has priority and serves this call."
          : mode.is_preference() ? " is requested by TORCH_FLASHPLUG_BACKEND."
                                 : " is forced.");
}

// Return all reasons against the kernels of a family for a call.
std::string family_text(int family, const Plan& plan, const CallFacts& p, const DeviceFacts& device, Mode mode,
                        const Tables& tables) {
  const Reason& why = plan.why[family];
  if (!why) return not_examined_reason(plan, mode, tables);
  Reason all[kMaxReasons];
  const int count = unsupported(p, device, tables, family, all, kMaxReasons);
  std::string text = reason_text(why, p, device, tables);
  for (int i = 1; i < count; ++i) text += " Also: " + reason_text(all[i], p, device, tables);
  return text;
}

}  // namespace

// The switch has no default case, so that a reason without a text does not compile.
#pragma GCC diagnostic push
#pragma GCC diagnostic error "-Wswitch"
std::string reason_text(const Reason& reason, const CallFacts& p, const DeviceFacts& device, const Tables& tables) {
  const std::string name = kOperandNames[reason.operand], actual = number(reason.actual),
                    allowed = number(reason.allowed);
  switch (reason.why) {
    case Why::kNone:
    case Why::kCount:
      break;
    case Why::kDevice:
      return device.cc == 0 ? "There is no CUDA device. The kernels run on NVIDIA GPUs only."
                            : "The tensors are not all on one CUDA device. Move query, key and value to the same GPU.";
    case Why::kArch:
      return "The GPU has compute capability " + capability(reason.actual) + ", but the kernels of this backend need " +
             tables.families[reason.allowed].gpus + ". Stock attention serves this device.";
    case Why::kDtype:
      return std::string("query, key and value have dtype ") + facts_of(p.dtype[0]).name + ", but the kernels take " +
             dtypes_text(reason.allowed, " or ", tables) + ". Cast the tensors, or use torch.autocast.";
    case Why::kMixedDtype:
      return std::string("query, key and value must have one dtype, but have ") + facts_of(p.dtype[0]).name + ", " +
             facts_of(p.dtype[1]).name + ", " + facts_of(p.dtype[2]).name + ". Cast all of the tensors to " +
             dtypes_text(reason.allowed, " or ", tables);
    case Why::kFeature:
      return fill_in_facts(tables.features[reason.actual].unsupported_reason, p);
    case Why::kTogether:
      return combination_reason(reason.actual, tables);
    case Why::kScale:
      return "scale is not finite. Stock attention serves this call.";
    case Why::kProbability:
      return "dropout_p must be from 0 to 1, but got " + format_shortest(p.dropout_p) +
             ". Pass a valid probability: on a GPU, stock attention ends the process with an invalid one.";
    case Why::kEmpty:
      return "A dimension of a tensor is 0. Stock attention handles empty tensors.";
    case Why::kHeadDimStep:
      return name + " has head dim " + actual + ", but the kernels take multiples of " + allowed +
             ". Pad the head dim.";
    case Why::kHeadDimLimit:
      return name + " has head dim " + actual + ", but the kernels take at most " + allowed +
             ". Stock attention serves larger head dims.";
    case Why::kHeadDimOfFeatures:
      return name + " has head dim " + actual + ", but the kernels with " + needs_text(p.needs, tables) +
             " take at most " + allowed + ". Stock attention serves larger head dims.";
    case Why::kLastStride:
      return name + " has stride " + actual + " in the last dim, but the kernels need stride 1. Call .contiguous().";
    case Why::kAlignment:
      return name + " is aligned to " + actual + " bytes (base address and strides), but the kernels need " + allowed +
             ". Call .contiguous() or .clone().";
    case Why::kNoKernel:
      return "No kernel " + (p.needs == 0 ? "" : "with " + needs_text(p.needs, tables) + " ") +
             "takes D=" + number(p.D) + ", Dv=" + number(p.Dv) + ", Sq=" + number(p.Sq) +
             (device.smem_bytes > 0 ? " in " + number(device.smem_bytes) + " bytes of shared memory" : "") +
             ". The kernel table is torch_flashplug/registry/kernel_table.py.";
    case Why::kSplits:
      return "num_splits=" + actual +
             " is not possible, because no kernel splits the keys of this call (with is_causal, no kernel does). Use "
             "num_splits=1.";
    case Why::kUnmeasuredDevice:
      return "The auto mode serves measured calls only, and no GPU of compute capability " + capability(reason.actual) +
             " was available for measurements. Opt in with TORCH_FLASHPLUG_BACKEND=" +
             tables.families[reason.allowed].backend + " or sdpa_backend('" + tables.families[reason.allowed].backend +
             "').";
    case Why::kNoRow:
      return unmeasured_reason(static_cast<int>(reason.actual), reason.allowed, p, device, tables);
    case Why::kSlower:
      return "Such calls were measured at " + format_fixed(static_cast<double>(reason.actual) / 1000) +
             " x the speed of stock attention" + (reason.allowed != 0 ? " without cuDNN" : "") +
             ", below the serve ratio of the dispatch table. Stock attention is faster.";
    case Why::kDecodeGate:
      return "Decode gate: the call has " + actual + " tiles, but " + allowed +
             " are needed to fill the SMs, and no kernel splits the keys of this call. Stock attention is faster.";
    case Why::kDeterministic:
      return "torch.use_deterministic_algorithms is on, and no deterministic backward kernel takes this call. Use "
             "torch.no_grad() or the stock backend.";
    case Why::kNoBackward:
      return "The call needs gradients, and no backward kernel takes this call on this GPU. Stock attention serves "
             "both forward and backward.";
    case Why::kNoBiasGradient:
      return "attn_mask requires a gradient, and no kernel that computes this gradient takes the call.";
    case Why::kUnmeasuredGradients:
      return "The call needs gradients with head dim " + actual + ". The auto mode serves gradients up to " + allowed +
             ", because the backward kernels of larger head dims were not timed. Force these kernels with "
             "sdpa_backend('fa3').";
    case Why::kGradientsInEightBits:
      return "8-bit attention has no backward. Use torch.no_grad() or precision='16bit'.";
  }
  return "";
}
#pragma GCC diagnostic pop

// Return the backward kernels after a forward kernel of this project, or the reason for a stock backward.
std::string gradients_text(const CallFacts& p, const DeviceFacts& device, Mode mode, const Tables& tables) {
  const BackwardPlan plan = plan_backward(p, device, mode, tables);
  const auto name = [&tables](int row) { return std::string(tables.kernels[row].name); };
  const bool in_tiles = plan.kernel_row >= 0 && tables.kernels[plan.kernel_row].kind == kTileBwd;
  if (plan.ours()) return name(plan.kernel_row) + (plan.bias_row < 0 || in_tiles ? "" : " and " + name(plan.bias_row));
  return std::string(stock_efficient_supports(p) ? "The efficient backward of stock" : "The math backward of stock") +
         " follows. The reason: " + reason_text(plan.why, p, device, tables);
}

// Return the operands copied ahead of a kernel, and the number of bytes.
std::string copies_text(const CallFacts& p, const Tables& tables) {
  if (!needs_operand_copies(p, tables)) return "";
  const int64_t numbers[kNumOperands] = {p.B * p.Hq * p.Sq * p.D, p.B * p.Hkv * p.Sk * p.D, p.B * p.Hkv * p.Sk * p.Dv};
  std::string names;
  double bytes = 0;
  bool broadcast = false;
  for (int i = 0; i < kNumOperands; ++i) {
    if (is_16b_aligned(p.layout[i])) continue;
    names += (names.empty() ? "" : ", ") + std::string(kOperandNames[i]);
    bytes += static_cast<double>(numbers[i] * facts_of(p.dtype[i]).bytes);
    broadcast |= p.layout[i].broadcast;
  }
  return names + ": copied first into rows aligned to " + number(kUnitBytes) + " bytes, " + format_fixed(bytes / 1e6) +
         " MB" + (broadcast ? " minus the broadcast part" : "");
}

// Return a note on the alignment of a causal mask. Users of flash-attn expect the bottom right.
std::string causal_note(const CallFacts& p) {
  if ((p.needs & kCausal) == 0 || p.Sq == p.Sk) return "";
  return "is_causal aligns the mask to the top left: query i attends keys 0 to i, with Sq " + number(p.Sq) + ", Sk " +
         number(p.Sk) + ". For the bottom right, as in flash-attn, pass attn_mask=causal_lower_right(Sq, Sk) of " +
         "torch.nn.attention.bias.";
}

// Return a note on the dense kernels of packed sequences that may all have one length.
std::string equal_lengths_note(const Plan& plan, const CallFacts& p, const DeviceFacts& device, Mode mode,
                               const Tables& tables) {
  const std::optional<CallFacts> dense = equal_lengths_facts(p);
  if (!dense || !plan.ours()) return "";
  const auto name = [&](int packed_row) {
    const int row = packed_row < 0 ? -1 : find_equal_lengths_row(*dense, tables.kernels[packed_row], device, tables);
    return row < 0 ? std::string() : tables.kernels[row].name;
  };
  std::string kernels = name(plan.kernel_row);
  const std::string gradients = p.grad ? name(plan_backward(p, device, mode, tables).kernel_row) : "";
  kernels += (kernels.empty() || gradients.empty() ? "" : " and ") + gradients;
  if (kernels.empty()) return "";
  return "If all lengths are equal (" + number(dense->Sq) + " rows, " + number(dense->Sk) +
         " keys), without sinks and seqused_k, the sequences are computed as a dense batch, by " + kernels + ".";
}

// Return a note on a kernel that reads the keys alone.
std::string shared_values_note(const Plan& plan) {
  const bool shared = plan.ours() && (plan.features & kShared) != 0;
  return shared ? "The values are the first columns of the keys, in the same memory. The kernel reads the keys alone."
                : "";
}

std::string plan_json(const Plan& plan, const CallFacts& original, const DeviceFacts& device, Mode mode,
                      const Tables& tables) {
  // The plan is for 8 bits, or for 16 bits after the 8-bit plan was rejected. `p` has the features of that plan.
  const bool in_16_bits = static_cast<bool>(plan.why_not_8bit);
  const CallFacts p = in_16_bits ? original : with_requested_precision(original, mode, tables);
  std::string out = "{\"backend\": " + quote(name_of(plan.backend, tables));
  out += ", \"kernel\": " + quote(plan.ours() ? tables.kernels[plan.kernel_row].name : "");
  out += ", \"splits\": " + number(plan.splits.n) + ", \"cluster\": " + number(plan.splits.cluster) +
         ", \"tiles\": " + number(plan.tiles) + ", \"reasons\": {";
  const char* separator = "";
  auto add = [&](Backend backend, const std::string& text) {
    if (backend == plan.backend) return;
    out += separator + quote(name_of(backend, tables)) + ": " + quote(text);
    separator = ", ";
  };
  for (int family = 0; family < tables.num_families(); ++family)
    add(backend_of(family), family_text(family, plan, p, device, mode, tables));
  add(Backend::kMath,
      plan.backend == Backend::kStock && mode.backend() != Backend::kStock
          ? "The math backend is only used on request or as PyTorch's own fallback. Force the math backend with "
            "sdpa_backend('math')."
          : not_examined_reason(plan, mode, tables));
  add(Backend::kStock, not_examined_reason(plan, mode, tables));
  const bool has_gate_text =
      device.cc != 0 && (plan.choice_row >= 0 || plan.stock_bug_row >= 0 || plan.gate.decode || plan.splits.n > 1);
  const bool has_gradients = plan.ours() && p.grad;
  out += "}, \"why\": {";
  for (int family = 0; family < tables.num_families(); ++family)
    out += (family > 0 ? ", " : "") + quote(name_of(backend_of(family), tables)) + ": " +
           quote(kWhyNames[static_cast<int>(plan.why[family].why)]);
  out += "}, \"precision\": " + quote(needs_text(plan.features & tables.recipe_features, tables)) +
         ", \"why_not_8bit\": " +
         quote(in_16_bits
                   ? reason_text(plan.why_not_8bit, with_requested_precision(original, mode, tables), device, tables)
                   : "") +
         ", \"gate\": " + quote(has_gate_text ? gate_text(plan, p, device, tables) : "") +
         ", \"row\": " + quote(row_text(plan.choice_row, p, tables)) +
         ", \"stock_bug\": " + quote(stock_bug_row_text(plan.stock_bug_row, tables)) + ", \"note\": " +
         quote(causal_note(p) + equal_lengths_note(plan, p, device, mode, tables) + shared_values_note(plan)) +
         ", \"copies\": " + quote(plan.ours() ? copies_text(p, tables) : "") +
         ", \"sharing\": " + number(has_gradients ? plan_backward(p, device, mode, tables).sharing : 1) +
         ", \"gradients\": " + quote(has_gradients ? gradients_text(p, device, mode, tables) : "") + "}";
  return out;
}

std::string call_text(const CallFacts& p, const Tables& tables) {
  auto shape = [](int64_t a, int64_t b, int64_t c, int64_t d) {
    return "[" + number(a) + ", " + number(b) + ", " + number(c) + ", " + number(d) + "]";
  };
  std::string needs;
  for (size_t i = 0; i < tables.features.size(); ++i) {
    const char* description = tables.features[i].description;
    if ((p.needs >> i & 1) != 0 && *description != 0) needs += std::string(" ") + description;
  }
  return "query " + shape(p.B, p.Hq, p.Sq, p.D) + " key " + shape(p.B, p.Hkv, p.Sk, p.D) + " value " +
         shape(p.B, p.Hkv, p.Sk, p.Dv) + " " + facts_of(p.dtype[0]).name + needs + (p.grad ? " with grad" : "");
}

// Called for every decision: without a listener, the cost is two loads.
void note_plan(const char* where, const CallFacts& p, const DeviceFacts& device, Mode mode, const Plan& plan) {
  if (!plans_are_logged()) return;
  log_plan(std::string(where) + ": " + call_text(p, tables()) + " -> " + plan_json(plan, p, device, mode, tables()));
}

std::string forced_error(const CallFacts& original, const DeviceFacts& device, Mode mode, const Tables& tables) {
  const CallFacts p = with_requested_precision(original, mode, tables);
  const Plan plan = plan_call(original, device, mode, tables);
  const int family = mode.family();
  Reason all[kMaxReasons];
  const int count = unsupported(p, device, tables, family, all, kMaxReasons);
  std::string text = "torch_flashplug: backend '" + name_of(mode.backend(), tables) +
                     "' is forced and cannot run this call (" + call_text(p, tables) + "):";
  if (count == 0) text += "\n  - " + reason_text(plan.why[family], p, device, tables);
  for (int i = 0; i < count; ++i) text += "\n  - " + reason_text(all[i], p, device, tables);
  return text + "\nUse sdpa_backend('auto') to let stock attention serve such calls.";
}

}  // namespace flashplug
