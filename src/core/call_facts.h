// The facts of a call, and the one reader that makes them of tensors: the router's, the ops', and of what Python says
// of tensors that it holds.
#pragma once

#include <torch/csrc/stable/c/shim.h>

#include <cstdint>
#include <optional>
#include <string_view>

#include "core/tensor_facts.h"

namespace flashplug {

// How a call says what it is to be causal to: causal_mode of ops.py.
enum class Causal : int { kNone = 0, kTopLeft = 1, kBottomRight = 2 };
// Query i sees the keys from i + diagonal - left to i + diagonal + right; -1: there is no bound on that side. The
// diagonal is 0 or, to the bottom right, Sk - Sq.
struct Window {
  int64_t left = -1, right = -1;
  bool bottom_right = true;
};
// A call of attention as its caller gave it; tensors are borrowed, mask may be null.
struct Attention {
  AtenTensorHandle q = nullptr, k = nullptr, v = nullptr, mask = nullptr;
  double dropout_p = 0.0;
  Causal causal = Causal::kNone;
  std::optional<double> scale = {};
  // Of key and value in 8 bits, (B, Hkv, Sk) fp32; rotated: the keys (quantised.rotate).
  AtenTensorHandle k_scale = nullptr, v_scale = nullptr;
  bool rotated = false;
  std::optional<Window> window = {};
  double softcap = 0.0;              // likewise; 0: none
  AtenTensorHandle sinks = nullptr;  // beside a window, (Hq,) fp32: a logit that each row's sum has beside its keys
  // Of sequences on end, in tensors of one batch: (sequences + 1,) int32, where each begins, and ends.
  AtenTensorHandle cu_q = nullptr, cu_k = nullptr, used_k = nullptr;  // (sequences,): how many keys count; or null
  // (B, n) int32: numbers of each batch's pages, (rows, D) of each head, in key and value (pages, Hkv, rows, D). Beside
  // them used_k is (B,).
  AtenTensorHandle pages = nullptr;
  // Of attention(): among how many CTAs the keys of few rows are split, 0: as is fastest. 1 says more:
  // Problem::by_kind.
  int64_t num_splits = 0;
  int64_t fixed_split_size = 0;  // in its place: Problem::split_size
  double tall = 1.0;             // of lists of blocks: Problem::tall
};
std::optional<Window> window_of(const Attention& call);  // the same of `causal`
bool is_there(AtenTensorHandle tensor);                  // neither null nor undefined
// torch does not say what is_causal beside a mask is: its math raises.
inline bool is_undefined(const Attention& call) { return call.causal != Causal::kNone && is_there(call.mask); }
// Whether it is bool, or what autograd keeps instead (mask.cpp), which nobody else makes of these dtypes; or that
// alone, a digest or a copy of the mask's bytes.
bool is_mask(AtenTensorHandle tensor);
bool is_kept(AtenTensorHandle tensor);
bool is_digest(AtenTensorHandle tensor);

// Whether Python dispatches operands (tracing.py may know better); whether functorch wraps some: those have no address,
// and asking for one fails.
bool traced(const Attention& call);
bool wrapped(const Attention& call);
// Whether a mask is of floats wider than the query's, fp32 (stock takes those of the query's own dtype, too).
bool is_wide_bias(const Attention& call);

// What a call may need beyond softmax(Q K^T) V, and kernels take: its name, and whether a call needs it. Its bit is its
// place, in the order of features.py.
struct Feature {
  using Needed = bool (*)(const Attention& call);
  consteval Feature(const char* name, Needed needed) : name(name), needed(needed) {}  // none without a reader
  const char* name;
  Needed needed;
};
inline constexpr Feature kFeatures[] = {
    {"causal", [](const Attention& call) { return call.causal == Causal::kTopLeft; }},
    {"mask", [](const Attention& call) { return is_there(call.mask) && is_mask(call.mask); }},
    {"bias", [](const Attention& call) { return is_there(call.mask) && !is_mask(call.mask) && !is_wide_bias(call); }},
    {"bias32", [](const Attention& call) { return is_there(call.mask) && is_wide_bias(call); }},
    {"window", [](const Attention& call) { return window_of(call).has_value(); }},
    {"softcap", [](const Attention& call) { return call.softcap != 0.0; }},
    {"ragged", [](const Attention& call) { return is_there(call.cu_q); }},
    {"dropout", [](const Attention& call) { return call.dropout_p != 0.0; }},
    // What a mode asks for, and no tensor says.
    {"qk8", [](const Attention&) { return false; }},
    {"8bit", [](const Attention&) { return false; }},
    {"e4m3", [](const Attention&) { return false; }},
    {"cache8", [](const Attention& call) { return is_there(call.k_scale); }},
    {"paged", [](const Attention& call) { return is_there(call.pages); }},
};
int64_t needs_of(const Attention& call);  // a sum of their bits
// One of them that some rule of ours knows by its name. A name that is not there does not compile.
consteval int64_t feature_bit(std::string_view name) {
  int place = 0;
  while (kFeatures[place].name != name) ++place;
  return int64_t{1} << place;
}
constexpr int64_t kCausal = feature_bit("causal"), kMask = feature_bit("mask"), kDropout = feature_bit("dropout"),
                  kWindow = feature_bit("window"), kRagged = feature_bit("ragged");
// By a mode's precision, from 1 on: RECIPES of quant_recipes.py.
constexpr int64_t kRecipes[] = {feature_bit("qk8"), feature_bit("8bit"), feature_bit("e4m3")};
constexpr int64_t kEightBits = kRecipes[0] | kRecipes[1] | kRecipes[2];
constexpr int64_t kBiases = feature_bit("bias") | feature_bit("bias32"), kAnyMask = kMask | kBiases;
// Of the softmax scale. The kernels' running maximum is one of unscaled scores, so they take positive ones; the sign of
// another finite one goes to the query (SignedScale in attention.h).
enum class Scale : int { kPositive = 0, kZero = 1, kNegative = 2, kNotFinite = 3 };
inline bool is_unusual(Scale scale) { return scale == Scale::kZero || scale == Scale::kNegative; }

constexpr int kNumOperands = 3;  // query, key, value

// Plain facts of one call: all that a plan depends on, beside the device. Batch is shared; heads of the query may be a
// multiple of those of key and value.
struct Problem {
  int64_t B = 0, Hq = 0, Hkv = 0, Sq = 0, Sk = 0, D = 0, Dv = 0;
  DType dtype[kNumOperands] = {DType::kOther, DType::kOther, DType::kOther};
  Layout layout[kNumOperands];
  int64_t needs = 0;           // a sum of bits of kFeatures
  bool on_cuda = false;        // all operands on one CUDA device (or on the CPU, where the tests' stand-in is on)
  bool grad = false;           // autograd will want a backward
  bool bias_grad = false;      // and of it the gradient of a bias
  bool deterministic = false;  // torch.use_deterministic_algorithms
  Scale scale = Scale::kPositive;
  double dropout_p = 0.0, softcap = 0.0;
  int64_t left = 0, right = 0, bottom_right = 0;  // of a window, which ends somewhere
  int64_t sequences = 0;                          // on end; else 0
  // Results of a sequence are to be the same bits alone and beside any others: kernels are chosen by what sequences are
  // of (of_its_kind), keys are not split, gradients are added up in one order.
  bool by_kind = false;
  int64_t split_size = 0;  // by kind, but keys of few rows are split after so many of each sequence's; 0: they are not
  double tall = 1.0;       // blocks that tiles of more rows than a listed block walk over, of those that others do
  bool operator==(const Problem&) const = default;
  int64_t group() const { return Hkv > 0 ? Hq / Hkv : 0; }  // query heads per KV head
  // What a forward without gradients drops, one with them may have to drop again (a reentrant checkpoint): where nobody
  // is forced both are whose the latter is.
  bool as_with_gradients() const { return grad || (needs & kDropout) != 0; }
};

// Every fact by its name, in the order in which they cross from Python. The binding names every member: a new one does
// not compile until it is here, which is all that Python and the tests need to know it.
template <typename Visit>
void visit_facts(Problem& p, Visit&& visit) {
  auto& [B, Hq, Hkv, Sq, Sk, D, Dv, dtype, layout, needs, on_cuda, grad, bias_grad, deterministic, scale, dropout_p,
         softcap, left, right, bottom_right, sequences, by_kind, split_size, tall] = p;
  visit("B", B), visit("Hq", Hq), visit("Hkv", Hkv), visit("Sq", Sq), visit("Sk", Sk), visit("D", D), visit("Dv", Dv);
  visit("dtype_q", dtype[0]), visit("dtype_k", dtype[1]), visit("dtype_v", dtype[2]);
  const auto of_operand = [&visit](const char* const(&names)[5], Layout& x) {
    auto& [last_stride, align_bytes, odd_base, odd_ones, broadcast] = x;
    visit(names[0], last_stride), visit(names[1], align_bytes);
    visit(names[2], odd_base), visit(names[3], odd_ones), visit(names[4], broadcast);
  };
  of_operand({"last_stride_q", "align_q", "odd_base_q", "odd_ones_q", "broadcast_q"}, layout[0]);
  of_operand({"last_stride_k", "align_k", "odd_base_k", "odd_ones_k", "broadcast_k"}, layout[1]);
  of_operand({"last_stride_v", "align_v", "odd_base_v", "odd_ones_v", "broadcast_v"}, layout[2]);
  visit("needs", needs), visit("on_cuda", on_cuda), visit("grad", grad), visit("bias_grad", bias_grad);
  visit("deterministic", deterministic), visit("scale", scale), visit("dropout_p", dropout_p),
      visit("softcap", softcap);
  visit("left", left), visit("right", right), visit("bottom_right", bottom_right), visit("sequences", sequences);
  visit("by_kind", by_kind), visit("split_size", split_size), visit("tall", tall);
}

inline double fact_of(Problem p, int number) {
  double value = 0;
  visit_facts(p, [&](const char*, const auto& fact) {
    if (number-- == 0) value = static_cast<double>(fact);
  });
  return value;
}

// A call while it is read, in two steps, since sizes of tensors that are only traced may be symbolic.
struct Facts {
  Problem problem;
  TensorClass operand[kNumOperands];
  Shape shape[kNumOperands];
  int32_t device_index() const { return operand[0].device_index; }  // where the call runs
};

// What can be asked of any tensors: dims, dtypes, device, settings. False where they do not tell.
bool read_class(const Attention& call, Facts* facts);
bool four_dims(const Facts& facts);  // of every operand, as all below wants them

// Where operands lie: at their addresses; or, being only traced, where their storages will.
enum class Memory { kReal, kTraced };
inline Memory memory_of(bool only_traced) { return only_traced ? Memory::kTraced : Memory::kReal; }
// Sizes and layouts of what read_class() has read: they go by dtypes. False where there are none, or symbolic ones.
bool read_shapes(const Attention& call, Memory memory, Facts* facts);
void fill_shapes(const Shape (&shape)[kNumOperands], Problem* p);  // the sizes alone

// Shapes that stock neither rejects nor broadcasts, but for one head of key and value, which all of the query's share;
// more than one, and fewer than the query's, only where the caller says so.
bool shapes_fit(const Shape (&shape)[kNumOperands], bool enable_gqa);

// Whether a mask is one that kernels take and stock does not reject: on the same device, of 2 to 4 dims that broadcast
// (mask.cpp).
bool mask_fits(AtenTensorHandle mask, const Facts& facts);
// The same of one that is only traced, as far as its sizes, or those of the operands, are known.
bool traced_mask_fits(AtenTensorHandle mask, const Facts& facts);

// As kernels take it: a float of 32 bits, of which they flush subnormal ones to 0. The default one is positive.
Scale scale_of(std::optional<double> scale);

bool eligible_device(int32_t device_type);
bool wants_grad(const Attention& call);       // here and now
bool wants_bias_grad(const Attention& call);  // likewise

}  // namespace flashplug
