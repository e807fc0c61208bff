// Stub of libtorch_cuda.so for CPU builds of torch: flash attention of packed sequences under the C++ names of stock,
// with the declarations of torch. The stub computes nothing. The LSE holds the received arguments, and the gradients
// identify the arguments of the backward.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <optional>
#include <tuple>
#include <vector>

namespace at::cuda {

using Maybe = const std::optional<Tensor>&;

static Tensor received_args(Maybe cu_q, Maybe cu_k, int64_t max_q, int64_t max_k, double dropout_p, bool is_causal,
                            bool debug, std::optional<double> scale, std::optional<int64_t> left,
                            std::optional<int64_t> right, Maybe used_k, Maybe alibi, Maybe pages,
                            std::optional<int64_t> splits) {
  const auto size = [](Maybe x) { return x.has_value() ? static_cast<double>(x->numel()) : -1.0; };
  const auto number = [](auto x) { return x.has_value() ? static_cast<double>(*x) : -1.0; };
  return at::tensor(std::vector<double>{size(cu_q), size(cu_k), static_cast<double>(max_q), static_cast<double>(max_k),
                                        dropout_p, static_cast<double>(is_causal), static_cast<double>(debug),
                                        number(scale), number(left), number(right), size(used_k), size(alibi),
                                        size(pages), number(splits)});
}

__attribute__((visibility("default"))) std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> _flash_attention_forward(
    const Tensor& q, const Tensor& k, const Tensor& v, Maybe cu_q, Maybe cu_k, int64_t max_q, int64_t max_k,
    double dropout_p, bool is_causal, bool debug, std::optional<double> scale, std::optional<int64_t> left,
    std::optional<int64_t> right, Maybe used_k, Maybe alibi, Maybe pages, std::optional<int64_t> splits) {
  TORCH_CHECK_NOT_IMPLEMENTED(q.scalar_type() != kDouble, "stock has no fp64");
  return {at::full_like(q, 7),
          received_args(cu_q, cu_k, max_q, max_k, dropout_p, is_causal, debug, scale, left, right, used_k, alibi, pages,
                        splits),
          at::zeros({2}, kUInt64), at::zeros({}, kUInt64), at::empty({0}, q.options())};
}

__attribute__((visibility("default"))) Tensor _flash_attention_forward_no_dropout_inplace(
    Tensor& out, const Tensor& q, const Tensor& k, const Tensor& v, Maybe cu_q, Maybe cu_k, int64_t max_q,
    int64_t max_k, double dropout_p, bool is_causal, bool debug, std::optional<double> scale,
    std::optional<int64_t> left, std::optional<int64_t> right, Maybe used_k, Maybe alibi, Maybe pages,
    std::optional<int64_t> splits) {
  out.fill_(8);
  return received_args(cu_q, cu_k, max_q, max_k, dropout_p, is_causal, debug, scale, left, right, used_k, alibi, pages,
                       splits);
}

__attribute__((visibility("default"))) std::tuple<Tensor, Tensor, Tensor> _flash_attention_backward(
    const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
    const Tensor& cu_q, const Tensor& cu_k, int64_t max_q, int64_t max_k, double dropout_p, bool is_causal,
    const Tensor& rng_state, const Tensor& unused, std::optional<double> scale, std::optional<int64_t> left,
    std::optional<int64_t> right) {
  const double grad_of_q = (cu_q.defined() ? cu_q.numel() : 0) + (is_causal ? 16 : 0);
  return {at::full_like(q, grad_of_q), at::full_like(k, max_q + left.value_or(64)),
          at::full_like(v, max_k + right.value_or(32) + scale.value_or(0.0))};
}

}  // namespace at::cuda
