// The facts of a call, and their reader from tensors. The choice hook, the ops, and calls described by Python share the
// reader.
#pragma once

#include <torch/csrc/stable/c/shim.h>

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

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
struct AttentionArgs {
  AtenTensorHandle q = nullptr, k = nullptr, v = nullptr, mask = nullptr;
  double dropout_p = 0.0;
  Causal causal = Causal::kNone;
  std::optional<double> scale = {};
  // Scales of key and value in 8 bits, (B, Hkv, Sk) fp32. `k_is_rotated`: the keys are rotated (quantize_reference.py).
  AtenTensorHandle k_scale = nullptr, v_scale = nullptr;
  bool k_is_rotated = false;
  std::optional<Window> window = {};
  double softcap = 0.0;  // 0: none
  // With a window: (Hq,) fp32, an extra logit of each head in the softmax sum of every row.
  AtenTensorHandle sinks = nullptr;
  // Packed sequences, in tensors of batch 1: (sequences + 1,) int32, the start of each sequence and the end of the
  // last.
  AtenTensorHandle cu_seqlens_q = nullptr, cu_seqlens_k = nullptr;
  AtenTensorHandle seqused_k = nullptr;  // (sequences,): KV length of each; or null
  // Paged KV cache: (B, n) int32 page numbers of each batch. Key and value are (pages, Hkv, rows, D), and a page holds
  // (rows, D) of each head. With a block table, `seqused_k` is (B,).
  AtenTensorHandle block_table = nullptr;
  // Number of CTAs for the split keys of a decode call of attention(); 0: automatic. The value 1 also makes the call
  // batch-invariant (`CallFacts::batch_invariant`).
  int64_t num_splits = 0;
  int64_t fixed_split_size = 0;  // alternative to `num_splits`: `CallFacts::split_size`
  double cost_ratio_192 = 1.0;   // for block-sparse lists: `CallFacts::cost_ratio_192`
};
// A setting of attention(): an argument of ops that is no tensor. `declaration` is the text in schemas, and `member` is
// the place of the value in a call.
template <typename Owner, typename T>
struct Setting {
  std::string_view declaration;
  T Owner::* member;
  consteval Setting(std::string_view declaration, T Owner::* member) : declaration(declaration), member(member) {
    if (declaration.substr(0, declaration.find(' ')) != schema_type()) throw "the member has a different type";
  }
  static constexpr std::string_view schema_type() {
    if constexpr (std::is_same_v<T, bool>) return "bool";
    if constexpr (std::is_same_v<T, int64_t>) return "int";
    if constexpr (std::is_same_v<T, double>) return "float";
    if constexpr (std::is_same_v<T, std::optional<double>>) return "float?";
  }
  constexpr bool has_default() const { return declaration.find('=') != declaration.npos; }
  constexpr std::string_view without_default() const { return declaration.substr(0, declaration.find('=')); }
  constexpr std::string_view name() const { return without_default().substr(declaration.find(' ') + 1); }
  // Return the value in a call. A setting of the window needs a call with a window.
  template <typename Call>
  constexpr auto& value_in(Call& call) const {
    if constexpr (std::is_same_v<Owner, Window>)
      return (*call.window).*member;
    else
      return call.*member;
  }
};
// The settings of attention_fwd, attention_bwd and paged_fwd, in the order of the schemas. The schemas, the readers and
// the writers of these ops are made of the list. A new setting is a member of `AttentionArgs` and a row here; the list
// of Python is `AttentionParams` in ops/attention.py.
inline constexpr std::tuple kSettings(Setting("int left", &Window::left), Setting("int right", &Window::right),
                                      Setting("bool bottom_right", &Window::bottom_right),
                                      Setting("float softcap", &AttentionArgs::softcap),
                                      Setting("float? scale", &AttentionArgs::scale),
                                      Setting("int num_splits=0", &AttentionArgs::num_splits),
                                      Setting("int fixed_split_size=0", &AttentionArgs::fixed_split_size));
// Call `visit` for each setting. The template argument is the index in `kSettings`, a constant.
template <typename Visit>
constexpr void visit_settings(Visit visit) {
  constexpr size_t count = std::tuple_size_v<decltype(kSettings)>;
  [&visit]<size_t... index>(std::index_sequence<index...>) {
    (visit.template operator()<index>(), ...);
  }(std::make_index_sequence<count>());
}

std::optional<Window> window_of(const AttentionArgs& call);  // also gives the window of `causal`
bool is_defined(AtenTensorHandle tensor);                    // neither null nor undefined
// Return true for is_causal with a mask: torch does not define the combination, and the math backend raises.
inline bool is_undefined(const AttentionArgs& call) { return call.causal != Causal::kNone && is_defined(call.mask); }
// `is_mask()`: true for a bool mask, and for the tensor kept by autograd in place of a bool mask (mask.cpp). No foreign
// code makes masks of the kept dtypes. `is_kept()`: true for a kept tensor, either mask metadata or a copy of the
// mask's bytes. `is_mask_metadata()`: true for mask metadata.
bool is_mask(AtenTensorHandle tensor);
bool is_kept(AtenTensorHandle tensor);
bool is_mask_metadata(AtenTensorHandle tensor);

// `is_traced()`: true if Python dispatches an operand; tracing.py may know better. `has_wrapper()`: true if functorch
// wraps an operand. Wrapped operands have no address, and asking for the address fails.
bool is_traced(const AttentionArgs& call);
bool has_wrapper(const AttentionArgs& call);
// Return true for a mask of floats wider than the query's dtype: fp32. Stock takes float masks of the query's own
// dtype, too.
bool is_wide_bias(const AttentionArgs& call);

// Reader of a feature. A feature is a need of a call beyond softmax(Q K^T) V, served by kernels. `needed` tells whether
// the arguments of a call show the feature.
struct FeatureReader {
  using Needed = bool (*)(const AttentionArgs& call);
  consteval FeatureReader(const char* name, Needed needed) : name(name), needed(needed) {}
  const char* name;
  Needed needed;
};
// The readers. The list of features is FEATURES of features.py, and the bit of a feature is its index there. FEATURES
// begins with the features below, in the same order (`Tables::add()`). Further features need no entry here: a mode
// requests them, or Python names them.
inline constexpr FeatureReader kFeatureReaders[] = {
    {"causal", [](const AttentionArgs& call) { return call.causal == Causal::kTopLeft; }},
    {"mask", [](const AttentionArgs& call) { return is_defined(call.mask) && is_mask(call.mask); }},
    {"bias",
     [](const AttentionArgs& call) { return is_defined(call.mask) && !is_mask(call.mask) && !is_wide_bias(call); }},
    {"bias32", [](const AttentionArgs& call) { return is_defined(call.mask) && is_wide_bias(call); }},
    {"window", [](const AttentionArgs& call) { return window_of(call).has_value(); }},
    {"softcap", [](const AttentionArgs& call) { return call.softcap != 0.0; }},
    {"ragged", [](const AttentionArgs& call) { return is_defined(call.cu_seqlens_q); }},
    {"dropout", [](const AttentionArgs& call) { return call.dropout_p != 0.0; }},
    {"cache8", [](const AttentionArgs& call) { return is_defined(call.k_scale); }},
    {"paged", [](const AttentionArgs& call) { return is_defined(call.block_table); }},
    // No argument shows the feature: packed sequences ask for it themselves (`equal_lengths_facts()`).
    {"equal", [](const AttentionArgs&) { return false; }},
    // No argument shows the feature: plans ask for it where values are shared (`may_share_values()`).
    {"shared", [](const AttentionArgs&) { return false; }},
    // No argument shows the feature: the plan of a paged call asks for it (`may_balance_splits()`).
    {"balanced", [](const AttentionArgs&) { return false; }},
};
constexpr int kNumFeatureReaders = std::size(kFeatureReaders);
int64_t required_features(const AttentionArgs& call);  // a sum of feature bits
// Return the bit of a feature that C++ code knows by name. An unknown name does not compile.
consteval int64_t feature_bit(std::string_view name) {
  int index = 0;
  while (kFeatureReaders[index].name != name) ++index;
  return int64_t{1} << index;
}
constexpr int64_t kCausal = feature_bit("causal"), kMask = feature_bit("mask"), kDropout = feature_bit("dropout"),
                  kWindow = feature_bit("window"), kVarlen = feature_bit("ragged"), kPaged = feature_bit("paged"),
                  kEqual = feature_bit("equal"), kShared = feature_bit("shared"), kBalanced = feature_bit("balanced");
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
  int64_t needs = 0;       // a sum of feature bits
  bool on_cuda = false;    // all operands on one CUDA device (or on the CPU, with the CPU stub backend of the tests)
  bool grad = false;       // autograd will want a backward
  bool bias_grad = false;  // and in the backward the gradient of a bias
  bool deterministic = false;  // torch.use_deterministic_algorithms
  bool without_cudnn = false;  // cuDNN is switched off, for example by torch.backends.cuda.enable_cudnn_sdp
  Scale scale = Scale::kPositive;
  double dropout_p = 0.0, softcap = 0.0;
  int64_t left = 0, right = 0, bottom_right = 0;  // of a window; at least one bound is set
  int64_t sequences = 0;                          // number of packed sequences, else 0
  // Batch-invariant: the result of a sequence has the same bits alone and in any batch. Kernels are then selected by
  // facts of a single sequence (`batch_invariant_facts()`), keys are not split, and gradients are accumulated in a
  // fixed order.
  bool batch_invariant = false;
  int64_t split_size = 0;  // batch-invariant decode with a split after so many keys of each sequence; 0: no splits
  // Ratio of visited blocks: tiles of 192 rows, with lists of their own, to tiles that divide the 128 rows of a block.
  double cost_ratio_192 = 1.0;
  bool shared_values = false;  // value is the first columns of key, in the same memory (`shares_values()`)
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
  auto& [B, Hq, Hkv, Sq, Sk, D, Dv, dtype, layout, needs, on_cuda, grad, bias_grad, deterministic, without_cudnn, scale,
         dropout_p, softcap, left, right, bottom_right, sequences, batch_invariant, split_size, cost_ratio_192,
         shared_values] = p;
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
  visit("deterministic", deterministic), visit("without_cudnn", without_cudnn);
  visit("scale", scale), visit("dropout_p", dropout_p), visit("softcap", softcap);
  visit("left", left), visit("right", right), visit("bottom_right", bottom_right), visit("sequences", sequences);
  visit("batch_invariant", batch_invariant), visit("split_size", split_size), visit("cost_ratio_192", cost_ratio_192);
  visit("shared_values", shared_values);
}

// Read the current settings of torch that a plan depends on.
void read_torch_settings(CallFacts* p);

// Read the facts that are numbers of a call.
inline void read_numbers(const AttentionArgs& call, CallFacts* p) {
  p->dropout_p = call.dropout_p;
  p->softcap = call.softcap;
  p->batch_invariant = call.num_splits == 1 || call.fixed_split_size != 0;
  p->split_size = call.fixed_split_size;
  p->cost_ratio_192 = call.cost_ratio_192;
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
bool read_meta(const AttentionArgs& call, ReadFacts* facts);
bool four_dims(const ReadFacts& facts);  // true if every operand has 4 dims, as all functions below require

// Location of the operands: at real addresses; or, for traced tensors, in future storages.
enum class Memory { kReal, kTraced };
inline Memory memory_of(bool only_traced) { return only_traced ? Memory::kTraced : Memory::kReal; }
// Read sizes and layouts. `read_meta()` must come first, because layouts depend on the dtypes. Returns false without
// sizes or with symbolic sizes.
bool read_shapes(const AttentionArgs& call, Memory memory, ReadFacts* facts);
void fill_shapes(const Shape (&shape)[kNumOperands], CallFacts* p);  // sizes only
// Return true if value is the first columns of key: same address, dtype and strides, and not more columns. Contents are
// never compared.
bool shares_values(const Shape (&shape)[kNumOperands], const int64_t* addresses, const CallFacts& p);

// The first rule of the kernels that the shapes of query, key and value break. describe_call.py has a text for each
// rule. The kernels take only shapes that stock neither rejects nor broadcasts. A single KV head, shared by all query
// heads, is allowed. Several KV heads, fewer than the query's, are allowed only with `enable_gqa` (`kGroups`).
enum class ShapeObstacle : int { kNone, kBatch, kHeadDim, kValueHeads, kValueRows, kGroups, kHeads, kCount };
inline constexpr const char* kShapeObstacleNames[] = {"none",       "batch",  "head dim", "value heads",
                                                      "value rows", "groups", "heads"};
static_assert(std::size(kShapeObstacleNames) == static_cast<size_t>(ShapeObstacle::kCount));
ShapeObstacle shape_obstacle(const Shape (&shape)[kNumOperands], bool enable_gqa);
inline bool shapes_fit(const Shape (&shape)[kNumOperands], bool enable_gqa) {
  return shape_obstacle(shape, enable_gqa) == ShapeObstacle::kNone;
}

// Return true if kernels take the mask and stock does not reject the mask: same device, 2 to 4 dims that broadcast
// (mask.cpp).
bool mask_fits(AtenTensorHandle mask, const ReadFacts& facts);
// Return `mask_fits()` for a traced mask, as far as sizes of the mask and of the operands are known.
bool traced_mask_fits(AtenTensorHandle mask, const ReadFacts& facts);

// Classify a scale from the kernels' view: a 32-bit float, where subnormal numbers are flushed to 0. The default scale
// is positive.
Scale scale_of(std::optional<double> scale);

bool eligible_device(int32_t device_type);
bool wants_grad(const AttentionArgs& call);       // under the current grad mode
bool wants_bias_grad(const AttentionArgs& call);  // under the current grad mode

}  // namespace flashplug
