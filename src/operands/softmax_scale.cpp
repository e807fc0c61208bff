// Scales that are not positive. Kernels find the maximum of a row before scaling, so a scale must not reverse the order
// of scores. softmax(-s Q K^T) equals softmax(s (-Q) K^T), and a query of zeros gives scores that are all 0. (The
// kernels of cuDNN and flash have the same limit, and return NaN.)
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_aten.h>

#include <cmath>
#include <utility>

#include "core/attention_call.h"
#include "core/call_facts.h"
#include "core/schemas.h"
#include "core/values.h"
#include "operands/operands.h"

namespace flashplug {

namespace {

void apply_sign(AtenTensorHandle tensor, Scale scale) {
  if (scale == Scale::kZero) check_shim(aoti_torch_aten_fill__Scalar(tensor, 0.0), "fill_");
  if (scale == Scale::kNegative) {
    OpCall negate(kNegate);
    negate[kNegate["self"]] = box::from_borrowed(tensor);
    negate.run();
    negate.result(0);
  }
}

}  // namespace

SignedScale with_positive_scale(const ForwardCall& call, const CallFacts& p) {
  const double scale = call.scale.has_value() ? *call.scale : 1.0 / std::sqrt(static_cast<double>(p.D));
  if (p.scale == Scale::kPositive) return {TensorHandle::share(call.q), scale};
  TensorHandle q = packed_copy(call.q);
  apply_sign(q.get(), p.scale);
  return {std::move(q), p.scale == Scale::kZero ? 1.0 : std::abs(scale)};
}

void pack_scale_sign(AtenTensorHandle grad_q, const CallFacts& p) { apply_sign(grad_q, p.scale); }

}  // namespace flashplug
