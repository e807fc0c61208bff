// Schemas of the ops that the plugin implements or calls, as printed by torch (test_custom_ops.py compares them with
// torch's own). Positions on a stack are looked up by argument name at compile time.
//
// Three placeholders stand for the settings of attention() (`kSettings` in call_facts.h): {required} for those without
// a default, {optional} for those with a default, and {settings} for all of them without defaults.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "core/call_facts.h"

namespace flashplug {

constexpr int kMaxStack = 20;  // maximal number of arguments and of results of an op

class Schema {
 public:
  consteval explicit Schema(std::string_view pattern) {
    for (size_t begin = pattern.find('{'); begin != pattern.npos; begin = pattern.find('{')) {
      const size_t end = pattern.find('}');
      append(pattern.substr(0, begin));
      append_settings(pattern.substr(begin + 1, end - begin - 1));
      pattern.remove_prefix(end + 1);
    }
    append(pattern);
    const std::string_view text = text_;
    const size_t end = text.find('('), dot = text.substr(0, end).find('.');
    text.substr(0, std::min(dot, end)).copy(name_, sizeof name_ - 1);
    if (dot < end) text.substr(dot + 1, end - dot - 1).copy(overload_, sizeof overload_ - 1);
    while (!argument(count_).empty()) ++count_;
    const std::string_view results = text.substr(text.rfind(") -> "));
    if (std::max<int64_t>(count_, std::ranges::count(results, ',') + 1) > kMaxStack) throw "kMaxStack is too small";
  }
  constexpr const char* text() const { return text_; }
  const char* name() const { return name_; }
  const char* overload() const { return overload_; }
  int count() const { return count_; }  // number of arguments
  constexpr std::string_view argument(int position) const { return name_in(between("(", ") -> "), position); }
  // Return the position of an argument. An unknown name is no constant expression, so the call does not compile.
  consteval int operator[](std::string_view name) const { return position(between("(", ") -> "), name); }
  consteval int result(std::string_view name) const { return position(between(") -> (", ")"), name); }

 private:
  constexpr void append(std::string_view part) {
    if (length_ + part.size() >= sizeof text_) throw "the schema is longer than text_";
    part.copy(text_ + length_, part.size());
    length_ += part.size();
  }
  constexpr void append_settings(std::string_view placeholder) {
    std::string_view separator = "";
    visit_settings([&]<size_t index>() {
      constexpr auto setting = std::get<index>(kSettings);
      if (placeholder != "settings" && setting.has_default() != (placeholder == "optional")) return;
      append(separator);
      append(placeholder == "optional" ? setting.declaration : setting.without_default());
      separator = ", ";
    });
  }
  constexpr std::string_view between(std::string_view begin, std::string_view end) const {
    const std::string_view text = text_;
    const size_t start = text.find(begin) + begin.size();
    return text.substr(start, text.find(end, start) - start);
  }
  // Return an empty name after the last argument.
  static constexpr std::string_view name_in(std::string_view list, int position) {
    while (!list.empty()) {
      const size_t comma = list.find(", ");
      const std::string_view item = list.substr(0, comma);
      list = comma == list.npos ? std::string_view() : list.substr(comma + 2);
      if (item == "*") continue;  // following arguments are keyword-only, but have positions as well
      const std::string_view word = item.substr(item.rfind(' ') + 1);
      if (position-- == 0) return word.substr(0, word.find('='));
    }
    return {};
  }
  static consteval int position(std::string_view list, std::string_view name) {
    for (int at = 0; !name_in(list, at).empty(); ++at) {
      if (name_in(list, at) == name) return at;
    }
    throw "the schema has no such name";
  }

  char text_[640] = {}, name_[96] = {}, overload_[32] = {};
  size_t length_ = 0;
  int count_ = 0;
};

// ---- the overrideable op, and the project's own ops (ops/sdpa.py defines the latter) ----

inline constexpr Schema kOverrideableForward(
    "aten::_scaled_dot_product_fused_attention_overrideable(Tensor query, Tensor key, Tensor value, "
    "Tensor? attn_bias=None, float dropout_p=0., bool is_causal=False, bool return_debug_mask=False, *, "
    "float? scale=None) -> (Tensor output, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, "
    "SymInt max_k, Tensor philox_seed, Tensor philox_offset, Tensor debug_attn_mask)");
inline constexpr Schema kOverrideableBackward(
    "aten::_scaled_dot_product_fused_attention_overrideable_backward(Tensor grad_out, Tensor query, Tensor key, "
    "Tensor value, Tensor attn_bias, bool[4] grad_input_mask, Tensor out, Tensor logsumexp, Tensor cum_seq_q, "
    "Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, Tensor philox_seed, "
    "Tensor philox_offset, *, float? scale=None) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, "
    "Tensor grad_attn_bias)");
inline constexpr Schema kOwnForward(
    "torch_flashplug::sdpa_fwd(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, float dropout_p, "
    "int causal_mode, float? scale, int mode) -> (Tensor out, Tensor lse, Tensor seed, Tensor offset)");
inline constexpr Schema kOwnBackward(
    "torch_flashplug::sdpa_bwd(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor? attn_bias, Tensor out, "
    "Tensor lse, Tensor seed, Tensor offset, float dropout_p, int causal_mode, float? scale, int mode, "
    "bool bias_grad) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias)");
inline constexpr Schema kQuantizedKvForward(
    "torch_flashplug::quantized_kv_fwd(Tensor query, Tensor key, Tensor value, Tensor k_scale, Tensor v_scale, "
    "Tensor? attn_mask, bool k_is_rotated, float? scale) -> Tensor");
inline constexpr Schema kQuantizedKvMath(
    "torch_flashplug::_quantized_kv_math(Tensor query, Tensor key, Tensor value, Tensor k_scale, Tensor v_scale, "
    "Tensor? attn_mask, bool k_is_rotated, float? scale) -> Tensor");
inline constexpr Schema kQuantizeKv("torch_flashplug::quantize_kv(Tensor key, Tensor value, int precision) -> Tensor");
inline constexpr Schema kQuantizeKvMath(
    "torch_flashplug::_quantize_kv_math(Tensor key, Tensor value, int precision) -> Tensor");
inline constexpr Schema kQuantizedAttentionForward(
    "torch_flashplug::quantized_attention_fwd(Tensor query, Tensor quantized_kv, Tensor key_samples, Tensor? value, "
    "SymInt keys, SymInt value_dim, int precision, bool is_causal, float? scale) -> (Tensor out, Tensor lse)");
inline constexpr Schema kQuantizedAttentionMath(
    "torch_flashplug::_quantized_attention_math(Tensor query, Tensor quantized_kv, Tensor key_samples, Tensor? value, "
    "int keys, int value_dim, int precision, bool is_causal, float? scale) -> (Tensor out, Tensor lse)");
inline constexpr Schema kPagedForward(
    "torch_flashplug::paged_fwd(Tensor query, Tensor key, Tensor value, Tensor block_table, Tensor seqused_k, "
    "Tensor? k_scale, Tensor? v_scale, Tensor? sinks, {required}, {optional}, Tensor? cu_seqlens_q=None, "
    "int block_mode=0) -> (Tensor out, Tensor lse)");
inline constexpr Schema kPagedMath(
    "torch_flashplug::_paged_math(Tensor query, Tensor key, Tensor value, Tensor block_table, Tensor seqused_k, "
    "Tensor? k_scale, Tensor? v_scale, Tensor? sinks, {required}, {optional}, Tensor? cu_seqlens_q=None, "
    "int block_mode=0) -> (Tensor out, Tensor lse)");
inline constexpr Schema kTablesOfRows(
    "torch_flashplug::_tables_of_rows(Tensor cu_seqlens_q, int rows, Tensor block_table, Tensor seqused_k) -> "
    "(Tensor block_table, Tensor seqused_k)");
inline constexpr Schema kGatheredPages(
    "torch_flashplug::_gathered_pages(Tensor key, Tensor value, Tensor block_table, Tensor seqused_k) -> (Tensor key, "
    "Tensor value, Tensor cu_seqlens_k, Tensor seqused_k)");
inline constexpr Schema kAttentionForward(
    "torch_flashplug::attention_fwd(Tensor query, Tensor key, Tensor value, Tensor? sinks, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? seqused_k, {required}, {optional}, Tensor? plan=None, SymInt plan_key=0, "
    "int block_mode=0) -> (Tensor out, Tensor lse)");
inline constexpr Schema kPlanLists(
    "torch_flashplug::_plan_lists(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "Tensor? seqused_k, {settings}, bool gradients) -> (Tensor lists, int key)");
inline constexpr Schema kAttentionBackward(
    "torch_flashplug::attention_bwd(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, "
    "Tensor out, Tensor lse, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, {required}, bool wants_delta, {optional}, "
    "Tensor? plan=None, SymInt plan_key=0, int block_mode=0) -> (Tensor dq, Tensor dk, Tensor dv, Tensor delta)");
inline constexpr Schema kAttentionMathForward(
    "torch_flashplug::_attention_math_fwd(Tensor query, Tensor key, Tensor value, Tensor? sinks, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, {required}, {optional}) -> (Tensor out, "
    "Tensor lse)");
inline constexpr Schema kAttentionMathBackward(
    "torch_flashplug::_attention_math_bwd(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, "
    "Tensor out, Tensor lse, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, {required}, bool wants_delta, "
    "{optional}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor delta)");
inline constexpr Schema kBlockSparseForward(
    "torch_flashplug::block_sparse_fwd(Tensor query, Tensor key, Tensor value, Tensor mask_metadata, "
    "float cost_ratio_192, float? scale, int block_mode=0) -> (Tensor out, Tensor lse)");
inline constexpr Schema kBlockSparseBackward(
    "torch_flashplug::block_sparse_bwd(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor mask_metadata, "
    "Tensor out, Tensor lse, float? scale, int block_mode=0) -> (Tensor dq, Tensor dk, Tensor dv)");
inline constexpr Schema kBlockSparseMathForward(
    "torch_flashplug::_block_sparse_math_fwd(Tensor query, Tensor key, Tensor value, Tensor mask_metadata, "
    "float? scale) -> (Tensor out, Tensor lse)");
inline constexpr Schema kBlockSparseMathBackward(
    "torch_flashplug::_block_sparse_math_bwd(Tensor grad_out, Tensor query, Tensor key, Tensor value, "
    "Tensor mask_metadata, Tensor out, Tensor lse, float? scale) -> (Tensor dq, Tensor dk, Tensor dv)");
inline constexpr Schema kAttentionForwardOut(
    "torch_flashplug::attention_fwd_out(Tensor(a!) out, Tensor query, Tensor key, Tensor value, Tensor? sinks, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, {required}, {optional}, Tensor? plan=None, "
    "SymInt plan_key=0, int block_mode=0) -> Tensor lse");
inline constexpr Schema kPagedForwardOut(
    "torch_flashplug::paged_fwd_out(Tensor(a!) out, Tensor query, Tensor key, Tensor value, Tensor block_table, "
    "Tensor seqused_k, Tensor? k_scale, Tensor? v_scale, Tensor? sinks, {required}, {optional}, "
    "Tensor? cu_seqlens_q=None, int block_mode=0) -> Tensor lse");
inline constexpr Schema kPreprocessMask("torch_flashplug::_preprocess_mask(Tensor mask, int numbers) -> Tensor");
inline constexpr Schema kCorrectedChoice(
    "torch_flashplug::_corrected_choice(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, float dropout_p, "
    "bool is_causal, float? scale, int chosen) -> (int choice, int fault)");
inline constexpr Schema kMathForward(
    "torch_flashplug::_math_fwd(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, float dropout_p, "
    "int causal_mode, float? scale, int mode) -> (Tensor out, Tensor lse, Tensor seed, Tensor offset)");
inline constexpr Schema kMathBackward(
    "torch_flashplug::_math_bwd(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor? attn_bias, "
    "Tensor out, Tensor lse, Tensor seed, Tensor offset, float dropout_p, int causal_mode, float? scale, int mode, "
    "bool bias_grad) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias)");

// ---- ops of stock torch ----

inline constexpr Schema kCudnnForward(
    "aten::_scaled_dot_product_cudnn_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, "
    "bool compute_log_sumexp, float dropout_p=0., bool is_causal=False, bool return_debug_mask=False, *, "
    "float? scale=None) -> (Tensor output, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, "
    "SymInt max_k, Tensor philox_seed, Tensor philox_offset, Tensor debug_attn_mask)");
inline constexpr Schema kCudnnBackward(
    "aten::_scaled_dot_product_cudnn_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, "
    "Tensor out, Tensor logsumexp, Tensor philox_seed, Tensor philox_offset, Tensor attn_bias, Tensor cum_seq_q, "
    "Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, *, "
    "float? scale=None) -> (Tensor, Tensor, Tensor)");
inline constexpr Schema kFlashForward(
    "aten::_scaled_dot_product_flash_attention(Tensor query, Tensor key, Tensor value, float dropout_p=0., "
    "bool is_causal=False, bool return_debug_mask=False, *, float? scale=None) -> (Tensor output, Tensor logsumexp, "
    "Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, Tensor rng_state, Tensor unused, "
    "Tensor debug_attn_mask)");
inline constexpr Schema kFlashBackward(
    "aten::_scaled_dot_product_flash_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, "
    "Tensor out, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, "
    "bool is_causal, Tensor philox_seed, Tensor philox_offset, *, float? scale=None) -> (Tensor grad_query, "
    "Tensor grad_key, Tensor grad_value)");
inline constexpr Schema kEfficientForward(
    "aten::_scaled_dot_product_efficient_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, "
    "bool compute_log_sumexp, float dropout_p=0., bool is_causal=False, *, float? scale=None) -> (Tensor output, "
    "Tensor log_sumexp, Tensor philox_seed, Tensor philox_offset)");
inline constexpr Schema kEfficientBackward(
    "aten::_scaled_dot_product_efficient_attention_backward(Tensor grad_out_, Tensor query, Tensor key, Tensor value, "
    "Tensor attn_bias, Tensor out, Tensor logsumexp, Tensor philox_seed, Tensor philox_offset, float dropout_p, "
    "bool[4] grad_input_mask, bool is_causal=False, *, float? scale=None) -> (Tensor, Tensor, Tensor, Tensor)");

inline constexpr Schema kNegate("aten::neg_(Tensor(a!) self) -> Tensor(a!)");
inline constexpr Schema kRepeat(
    "aten::repeat_interleave.self_int(Tensor self, SymInt repeats, int? dim=None, *, "
    "SymInt? output_size=None) -> Tensor");
inline constexpr Schema kSum(
    "aten::sum.IntList_out(Tensor self, int[1]? dim, bool keepdim=False, *, ScalarType? dtype=None, "
    "Tensor(a!) out) -> Tensor(a!)");

inline constexpr Schema kNanToNum(
    "aten::nan_to_num_(Tensor(a!) self, float? nan=None, float? posinf=None, float? neginf=None) -> Tensor(a!)");
inline constexpr Schema kRandom("aten::random_(Tensor(a!) self, *, Generator? generator=None) -> Tensor(a!)");

// Ops underneath stock's efficient attention; further calls reach them directly (efficient_attention_op.cpp).
inline constexpr Schema kEfficientOpForward(
    "aten::_efficient_attention_forward(Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, SymInt? max_seqlen_q, SymInt? max_seqlen_k, float dropout_p, int custom_mask_type, "
    "bool compute_log_sumexp=False, *, float? scale=None, Tensor? seqlen_k=None, int? window_size=None) -> "
    "(Tensor output, Tensor logsumexp, Tensor philox_seed, Tensor philox_offset, SymInt max_seqlen_batch_q, "
    "SymInt max_seqlen_batch_k)");
inline constexpr Schema kEfficientOpBackward(
    "aten::_efficient_attention_backward(Tensor grad_out_, Tensor query, Tensor key, Tensor value, Tensor? bias, "
    "Tensor out, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    "Tensor logsumexp, float dropout_p, Tensor philox_seed, Tensor philox_offset, int custom_mask_type, "
    "bool bias_requires_grad, *, float? scale=None, int? num_splits_key=None, int? window_size=None, "
    "bool shared_storage_dqdkdv=False) -> (Tensor, Tensor, Tensor, Tensor)");
// Every schema above. test_custom_ops.py compares each with torch's own, and checks that none is missing here.
inline constexpr const char* kSchemas[] = {kOverrideableForward.text(),
                                           kOverrideableBackward.text(),
                                           kOwnForward.text(),
                                           kOwnBackward.text(),
                                           kCorrectedChoice.text(),
                                           kMathForward.text(),
                                           kMathBackward.text(),
                                           kQuantizedKvForward.text(),
                                           kQuantizedKvMath.text(),
                                           kQuantizeKv.text(),
                                           kQuantizeKvMath.text(),
                                           kQuantizedAttentionForward.text(),
                                           kQuantizedAttentionMath.text(),
                                           kCudnnForward.text(),
                                           kCudnnBackward.text(),
                                           kFlashForward.text(),
                                           kFlashBackward.text(),
                                           kEfficientForward.text(),
                                           kEfficientBackward.text(),
                                           kEfficientOpForward.text(),
                                           kEfficientOpBackward.text(),
                                           kNegate.text(),
                                           kRepeat.text(),
                                           kSum.text(),
                                           kNanToNum.text(),
                                           kRandom.text(),
                                           kAttentionForward.text(),
                                           kAttentionBackward.text(),
                                           kAttentionForwardOut.text(),
                                           kPlanLists.text(),
                                           kPagedForward.text(),
                                           kPagedForwardOut.text(),
                                           kPagedMath.text(),
                                           kTablesOfRows.text(),
                                           kGatheredPages.text(),
                                           kPreprocessMask.text(),
                                           kAttentionMathForward.text(),
                                           kAttentionMathBackward.text(),
                                           kBlockSparseForward.text(),
                                           kBlockSparseBackward.text(),
                                           kBlockSparseMathForward.text(),
                                           kBlockSparseMathBackward.text()};

}  // namespace flashplug
