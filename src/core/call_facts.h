// The facts of a call, and their reader from tensors. The choice hook, the ops, and calls described by Python share the
// reader.
#pragma once

#include <torch/csrc/stable/c/shim.h>

#include <cstdint>
#include <optional>
#include <string_view>

#include "core/tensor_facts.h"

namespace flashplug {

// Alignment of the causal mask: causal_mode of ops/sdpa.py.
enum class Causal : int { kNone = 0, kTopLeft = 1, kBottomRight = 2 };
// Sliding window: query i sees the keys from i + diagonal - left to i + diagonal + right. A bound of -1 means no bound
// on that side. The diagonal is 0 or, with `bottom_right`, Sk - Sq.
struct Window {
  int64_t left = -1, right = -1;
  bool bottom_right = true;
};
// A call of attention with the caller's arguments. Tensors are borrowed, and mask may be null.
struct Attention {
  AtenTensorHandle q = nullptr, k = nullptr, v = nullptr, mask = nullptr;
  double dropout_p = 0.0;
  Causal causal = Causal::kNone;
  std::optional<double> scale = {};
  // Scales of key and value in 8 bits, (B, Hkv, Sk) fp32. `rotated`: the keys are rotated (quantize_reference.py).
  AtenTensorHandle k_scale = nullptr, v_scale = nullptr;
  bool rotated = false;
  std::optional<Window> window = {};
  double softcap = 0.0;  // 0: none
  // With a window: (Hq,) fp32, an extra logit of each head in the softmax sum of every row.
  AtenTensorHandle sinks = nullptr;
  // Packed sequences, in tensors of batch 1: (sequences + 1,) int32, the start of each sequence and the end of the
  // last.
  AtenTensorHandle cu_q = nullptr, cu_k = nullptr, used_k = nullptr;  // (sequences,): KV length of each; or null
  // Paged KV cache: (B, n) int32 page numbers of each batch. Key and value are (pages, Hkv, rows, D), and a page holds
  // (rows, D) of each head. With pages, `used_k` is (B,).
  AtenTensorHandle pages = nullptr;
  // Number of CTAs for the split keys of a decode call of attention(); 0: automatic. The value 1 also makes the call
  // batch-invariant (`CallFacts::batch_invariant`).
  int64_t num_splits = 0;
  int64_t fixed_split_size = 0;  // alternative to `num_splits`: `CallFacts::split_size`
  double tall = 1.0;             // for block-sparse lists: `CallFacts::tall`
};
std::optional<Window> window_of(const Attention& call);  // also gives the window of `causal`
bool is_defined(AtenTensorHandle tensor);                // neither null nor undefined
// Return true for is_causal with a mask: torch does not define the combination, and the math backend raises.
inline bool is_undefined(const Attention& call) { return call.causal != Causal::kNone && is_defined(call.mask); }
// `is_mask()`: true for a bool mask, and for the tensor kept by autograd in place of a bool mask (mask.cpp). No foreign
// code makes masks of the kept dtypes. `is_kept()`: true for a kept tensor, either mask metadata or a copy of the
// mask's bytes. `is_mask_metadata()`: true for mask metadata.
bool is_mask(AtenTensorHandle tensor);
bool is_kept(AtenTensorHandle tensor);
bool is_mask_metadata(AtenTensorHandle tensor);

// `is_traced()`: true if Python dispatches an operand; tracing.py may know better. `has_wrapper()`: true if functorch
// wraps an operand. Wrapped operands have no address, and asking for the address fails.
bool is_traced(const Attention& call);
bool has_wrapper(const Attention& call);
// Return true for a mask of floats wider than the query's dtype: fp32. Stock takes float masks of the query's own
// dtype, too.
bool is_wide_bias(const Attention& call);

// A feature: a need of a call beyond softmax(Q K^T) V, served by kernels. `needed` tells whether a call needs the
// feature. The bit of a feature is the index in the order of features.py.
struct Feature {
  using Needed = bool (*)(const Attention& call);
  consteval Feature(const char* name, Needed needed) : name(name), needed(needed) {}  // no feature without a reader
  const char* name;
  Needed needed;
};
inline constexpr Feature kFeatures[] = {
    {"causal", [](const Attention& call) { return call.causal == Causal::kTopLeft; }},
    {"mask", [](const Attention& call) { return is_defined(call.mask) && is_mask(call.mask); }},
    {"bias", [](const Attention& call) { return is_defined(call.mask) && !is_mask(call.mask) && !is_wide_bias(call); }},
    {"bias32", [](const Attention& call) { return is_defined(call.mask) && is_wide_bias(call); }},
    {"window", [](const Attention& call) { return window_of(call).has_value(); }},
    {"softcap", [](const Attention& call) { return call.softcap != 0.0; }},
    {"ragged", [](const Attention& call) { return is_defined(call.cu_q); }},
    {"dropout", [](const Attention& call) { return call.dropout_p != 0.0; }},
    // Features requested by a mode, invisible in the tensors.
    {"qk8", [](const Attention&) { return false; }},
    {"8bit", [](const Attention&) { return false; }},
    {"e4m3", [](const Attention&) { return false; }},
    {"cache8", [](const Attention& call) { return is_defined(call.k_scale); }},
    {"paged", [](const Attention& call) { return is_defined(call.pages); }},
};
int64_t required_features(const Attention& call);  // a sum of feature bits
// Return the bit of a feature that C++ code knows by name. An unknown name does not compile.
consteval int64_t feature_bit(std::string_view name) {
  int index = 0;
  while (kFeatures[index].name != name) ++index;
  return int64_t{1} << index;
}
constexpr int64_t kCausal = feature_bit("causal"), kMask = feature_bit("mask"), kDropout = feature_bit("dropout"),
                  kWindow = feature_bit("window"), kVarlen = feature_bit("ragged");
// Features by precision of a mode, from 1 on: RECIPES of quant_recipes.py.
constexpr int64_t kRecipes[] = {feature_bit("qk8"), feature_bit("8bit"), feature_bit("e4m3")};
constexpr int64_t kEightBits = kRecipes[0] | kRecipes[1] | kRecipes[2];
constexpr int64_t kBiases = feature_bit("bias") | feature_bit("bias32"), kAnyMask = kMask | kBiases;
// Sign of the softmax scale. Kernels compute the running maximum of unscaled scores, and therefore take positive scales
// only. The sign of a different finite scale moves to the query (`SignedScale` in operands.h).
enum class Scale : int { kPositive = 0, kZero = 1, kNegative = 2, kNotFinite = 3 };
inline constexpr const char* kScaleNames[] = {"positive", "zero", "negative", "not finite"};
inline bool is_unusual(Scale scale) { return scale == Scale::kZero || scale == Scale::kNegative; }

constexpr int kNumOperands = 3;  // query, key, value

// Plain facts of a call: everything that a plan depends on, beside the device. All operands have the same batch size.
// The query heads may be a multiple of the KV heads.
struct CallFacts {
  int64_t B = 0, Hq = 0, Hkv = 0, Sq = 0, Sk = 0, D = 0, Dv = 0;
  DType dtype[kNumOperands] = {DType::kOther, DType::kOther, DType::kOther};
  Layout layout[kNumOperands];
  int64_t needs = 0;       // a sum of bits of `kFeatures`
  bool on_cuda = false;    // all operands on one CUDA device (or on the CPU, with the CPU stub backend of the tests)
  bool grad = false;       // autograd will want a backward
  bool bias_grad = false;  // and in the backward the gradient of a bias
  bool deterministic = false;  // torch.use_deterministic_algorithms
  Scale scale = Scale::kPositive;
  double dropout_p = 0.0, softcap = 0.0;
  int64_t left = 0, right = 0, bottom_right = 0;  // of a window; at least one bound is set
  int64_t sequences = 0;                          // number of packed sequences, else 0
  // Batch-invariant: the result of a sequence has the same bits alone and in any batch. Kernels are then selected by
  // facts of a single sequence (`batch_invariant_facts()`), keys are not split, and gradients are accumulated in a
  // fixed order.
  bool batch_invariant = false;
  int64_t split_size = 0;  // batch-invariant decode with a split after so many keys of each sequence; 0: no splits
  // Ratio of visited blocks: tiles with more rows than a block of the block-sparse lists, to tiles with as many rows.
  double tall = 1.0;
  bool operator==(const CallFacts&) const = default;
  int64_t group() const { return Hkv > 0 ? Hq / Hkv : 0; }  // query heads per KV head
  // Return true if the call counts as a call with gradients. With dropout, a reentrant checkpoint may run a forward
  // without gradients first and repeat the same dropout with gradients. Without a forced backend, both forwards must
  // have the same owner.
  bool as_with_gradients() const { return grad || (needs & kDropout) != 0; }
};

// Visit each fact by name, in the order of the Python interface. The binding names every member, so a new member
// compiles only after an entry here. Python and the tests need nothing else.
template <typename Visit>
void visit_facts(CallFacts& p, Visit&& visit) {
  auto& [B, Hq, Hkv, Sq, Sk, D, Dv, dtype, layout, needs, on_cuda, grad, bias_grad, deterministic, scale, dropout_p,
         softcap, left, right, bottom_right, sequences, batch_invariant, split_size, tall] = p;
  visit("B", B), visit("Hq", Hq), visit("Hkv", Hkv), visit("Sq", Sq), visit("Sk", Sk), visit("D", D), visit("Dv", Dv);
  visit("dtype_q", dtype[0]), visit("dtype_k", dtype[1]), visit("dtype_v", dtype[2]);
  const auto of_operand = [&visit](const char* const(&names)[5], Layout& x) {
    auto& [last_stride, align_bytes, unaligned_base, unaligned_unit_dim, broadcast] = x;
    visit(names[0], last_stride), visit(names[1], align_bytes);
    visit(names[2], unaligned_base), visit(names[3], unaligned_unit_dim), visit(names[4], broadcast);
  };
  of_operand({"last_stride_q", "align_q", "unaligned_base_q", "unaligned_unit_dim_q", "broadcast_q"}, layout[0]);
  of_operand({"last_stride_k", "align_k", "unaligned_base_k", "unaligned_unit_dim_k", "broadcast_k"}, layout[1]);
  of_operand({"last_stride_v", "align_v", "unaligned_base_v", "unaligned_unit_dim_v", "broadcast_v"}, layout[2]);
  visit("needs", needs), visit("on_cuda", on_cuda), visit("grad", grad), visit("bias_grad", bias_grad);
  visit("deterministic", deterministic), visit("scale", scale), visit("dropout_p", dropout_p),
      visit("softcap", softcap);
  visit("left", left), visit("right", right), visit("bottom_right", bottom_right), visit("sequences", sequences);
  visit("batch_invariant", batch_invariant), visit("split_size", split_size), visit("tall", tall);
}

inline double fact_of(CallFacts p, int number) {
  double value = 0;
  visit_facts(p, [&](const char*, const auto& fact) {
    if (number-- == 0) value = static_cast<double>(fact);
  });
  return value;
}

// A call during the reading of facts. Reading takes two steps, since the sizes of traced tensors may be symbolic.
struct ReadFacts {
  CallFacts call;
  TensorMeta operand[kNumOperands];
  Shape shape[kNumOperands];
  int32_t device_index() const { return operand[0].device_index; }  // device of the call
};

// Read the facts that any tensor can tell: number of dims, dtype, device, settings. Returns false if a tensor does not
// tell.
bool read_meta(const Attention& call, ReadFacts* facts);
bool four_dims(const ReadFacts& facts);  // true if every operand has 4 dims, as all functions below require

// Location of the operands: at real addresses; or, for traced tensors, in future storages.
enum class Memory { kReal, kTraced };
inline Memory memory_of(bool only_traced) { return only_traced ? Memory::kTraced : Memory::kReal; }
// Read sizes and layouts. `read_meta()` must come first, because layouts depend on the dtypes. Returns false without
// sizes or with symbolic sizes.
bool read_shapes(const Attention& call, Memory memory, ReadFacts* facts);
void fill_shapes(const Shape (&shape)[kNumOperands], CallFacts* p);  // sizes only

// Return true for shapes that stock neither rejects nor broadcasts. A single KV head, shared by all query heads, is
// allowed. Several KV heads, fewer than the query's, are allowed only with `enable_gqa`.
bool shapes_fit(const Shape (&shape)[kNumOperands], bool enable_gqa);

// Return true if kernels take the mask and stock does not reject the mask: same device, 2 to 4 dims that broadcast
// (mask.cpp).
bool mask_fits(AtenTensorHandle mask, const ReadFacts& facts);
// Return `mask_fits()` for a traced mask, as far as sizes of the mask and of the operands are known.
bool traced_mask_fits(AtenTensorHandle mask, const ReadFacts& facts);

// Classify a scale from the kernels' view: a 32-bit float, where subnormal numbers are flushed to 0. The default scale
// is positive.
Scale scale_of(std::optional<double> scale);

bool eligible_device(int32_t device_type);
bool wants_grad(const Attention& call);       // under the current grad mode
bool wants_bias_grad(const Attention& call);  // under the current grad mode

}  // namespace flashplug
