// Our gradients: scratch, outputs and one launch.
#include <algorithm>

#include "arguments.h"
#include "attention.h"

namespace flashplug {

namespace {

// grad_out as a kernel can read it. An expanded scalar, as `.sum().backward()` gives, is no such thing.
Owned read_by(const KernelRow& row, AtenTensorHandle tensor) {
  return row.elementwise ? Owned::share(tensor) : readable(tensor);
}

// A gradient as a kernel can write it: laid out as empty_like(operand) where that has rows, else packed, unless it goes
// element by element.
Owned gradient_of(AtenTensorHandle operand, bool elementwise) {
  const Shape like = shape_of(operand);
  int64_t stride[4];
  dense_strides(like.size, like.stride, 4, stride);
  if (stride[3] != 1 && !elementwise) pack_strides(like.size, stride);
  return new_like(operand, 4, like.size, stride, nullptr);
}

}  // namespace

bool our_backward(const BackwardCall& call, const Problem& p, const DeviceFacts& device, int device_index, Mode mode,
                  BackwardResult* result) {
  if (standin() == Standin::kMath || call.wanted[3]) return false;
  if ((p.needs & kMask) != 0 && !can_be_digested(p)) return false;
  const ForwardCall& forward = call.forward;
  Problem problem = p;
  problem.grad = true;
  const bool* wanted = call.wanted;
  const int64_t parts = (wanted[0] ? kWantDq : 0) + (wanted[1] || wanted[2] ? kWantDkDv : 0);
  const int row = plan_backward(problem, device, mode, tables(), parts).kernel_row;
  if (row < 0) return false;
  Kernel* kernel = find_kernel(row, device_index, false);
  if (kernel == nullptr) return false;
  const KernelRow& shape = tables().kernels[row];
  const int64_t padded = scratch_rows(p, shape);
  const int64_t row_size[4] = {p.B, p.Hq, 2, padded}, row_stride[4] = {p.Hq * 2 * padded, 2 * padded, padded, 1};
  const int64_t floats = std::max<int64_t>(scratch_floats(p, shape), 4), one = 1;  // some, so that there is an address
  const int32_t fp32 = aoti_torch_dtype_float32();
  TensorClass query;
  read_class(forward.q, &query);
  const Owned rows = empty_strided(4, row_size, row_stride, fp32, query.device_type, device_index);
  const Owned scratch = empty_strided(1, &floats, &one, fp32, query.device_type, device_index);
  const Owned out = read_by(shape, call.out), grad_out = read_by(shape, call.grad_out);
  const AtenTensorHandle operands[3] = {forward.q, forward.k, forward.v};
  const int64_t written = shape.kind == kPartBwd ? parts : kWantAll;
  const auto writes = [written](int i) { return (written & (i == 0 ? kWantDq : kWantDkDv)) != 0; };
  for (int i = 0; i < 3; ++i)  // one that is not written is not read either: its operand stands in for it
    result->grads[i] = writes(i) ? gradient_of(operands[i], shape.elementwise) : Owned::share(operands[i]);
  const SignedScale positive = with_positive_scale(forward, p);
  Arguments arguments(shape, p, device_index);
  arguments.tensor("q", positive.q.get());
  arguments.tensor("k", forward.k);
  arguments.tensor("v", forward.v);
  arguments.tensor("o", out.get());
  arguments.tensor("do", grad_out.get());
  arguments.tensor("lse", call.lse);
  arguments.tensor("dq", result->grads[0].get(), writes(0));
  arguments.tensor("dk", result->grads[1].get(), writes(1));
  arguments.tensor("dv", result->grads[2].get(), writes(2));
  arguments.tensor("rows", rows.get(), true);
  arguments.tensor("scratch", scratch.get(), true);
  arguments.scale(positive.scale);
  arguments.integer("wanted", written);
  const Masked mask = give_mask(forward, p, query, true, &arguments);
  const Owned bias = give_bias(forward, p, query, shape, &arguments);
  const Owned seed = give_seed(call.seed, query, &arguments);
  launch(*kernel, arguments, written != kWantAll);
  if (writes(0)) give_sign(result->grads[0].get(), p);
  for (int i = 0; i < 3; ++i) {
    if (writes(i)) result->grads[i] = laid_out_like(std::move(result->grads[i]), operands[i]);
  }
  count(Path::kOursBackward);
  return true;
}

}  // namespace flashplug
