// The plugin's backward: workspace, outputs and launches.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

#include "core/attention_call.h"
#include "core/core.h"
#include "core/values.h"
#include "dispatch/dispatch.h"
#include "launch/kernel_args.h"
#include "launch/launch.h"
#include "operands/operands.h"
#include "ops/ops.h"

namespace flashplug {

namespace {

// Return grad_out in a layout that a kernel can read. An expanded scalar, as from `.sum().backward()`, is unreadable.
TensorHandle readable_grad_out(const KernelRow& row, AtenTensorHandle tensor) {
  return row.elementwise ? TensorHandle::share(tensor) : readable(tensor);
}

// Return a new gradient in a layout that a kernel can write. The layout is empty_like(operand) if rows are contiguous
// there, else packed; element-wise kernels write any layout. `heads`: number of gradient heads for each operand head,
// in consecutive order.
TensorHandle new_gradient(AtenTensorHandle operand, bool elementwise, int64_t heads = 1) {
  const Shape like = shape_of(operand);
  const int64_t size[4] = {like.size[0], like.size[1] * heads, like.size[2], like.size[3]};
  int64_t stride[4];
  dense_strides(like.size, like.stride, 4, stride);
  if (heads > 1 || (stride[3] != 1 && !elementwise)) pack_strides(size, stride);
  return new_like(operand, 4, size, stride, nullptr);
}

// Inputs read by every kernel of a backward. The object must live until the kernels are launched.
class BackwardInputs {
 public:
  BackwardInputs(const BackwardCall& call, const CallFacts& p, const KernelRow& row)
      : call_(call),
        read_(make_readable(call.forward, p)),
        positive_(with_positive_scale(read_.call, p)),
        out_(readable_grad_out(row, call.out)),
        grad_out_(readable_grad_out(row, call.grad_out)) {}

  void to(Arguments* arguments) const {
    const auto tensors = all();
    for (size_t i = 0; i < kCount; ++i) arguments->tensor(kArgs[i], tensors[i]);
    arguments->scale(positive_.scale);
  }

  // Pack the packed sequences as a dense batch. The result must live until the kernel is launched.
  std::array<TensorHandle, 6> to(const DenseKernel& dense, Arguments* arguments) const {
    std::array<TensorHandle, kCount> views;
    const auto tensors = all();
    for (size_t i = 0; i < kCount; ++i) {
      views[i] = dense.batch_of(tensors[i], tensors[i] == call_.lse ? 3 : 4);
      arguments->tensor(kArgs[i], views[i].get());
    }
    arguments->scale(positive_.scale);
    return views;
  }

  // Return a readable tensor with the size and dtype of an operand's gradient.
  AtenTensorHandle like(int operand) const {
    const AtenTensorHandle operands[kNumOperands] = {read_.call.q, read_.call.k, read_.call.v};
    return operands[operand];
  }

 private:
  static constexpr size_t kCount = 6;
  static constexpr KernelArg kArgs[kCount] = {"q", "k", "v", "o", "do", "lse"};
  std::array<AtenTensorHandle, kCount> all() const {
    return {positive_.q.get(), read_.call.k, read_.call.v, out_.get(), grad_out_.get(), call_.lse};
  }

  const BackwardCall& call_;
  const ReadableCall read_;
  const SignedScale positive_;
  const TensorHandle out_, grad_out_;
};

TensorHandle new_row_stats(const CallFacts& p, const KernelRow& row, const TensorMeta& query) {
  const int64_t padded = workspace_rows(p, row);
  const int64_t size[4] = {p.B, p.Hq, 2, padded}, stride[4] = {p.Hq * 2 * padded, 2 * padded, padded, 1};
  return empty_strided(4, size, stride, aoti_torch_dtype_float32(), query.device_type, query.device_index);
}

// Return a copy of delta, the second of the two row statistics in the workspace.
TensorHandle delta_of(AtenTensorHandle row_stats, const CallFacts& p) {
  const int64_t padded = shape_of(row_stats).size[3], size[3] = {p.B, p.Hq, p.Sq};
  const int64_t from[3] = {p.Hq * 2 * padded, 2 * padded, 1}, stride[3] = {p.Hq * p.Sq, p.Sq, 1};
  return new_like(row_stats, 3, size, stride, view(row_stats, 3, size, from, padded).get());
}

// Launch the dense kernel for packed sequences of equal lengths. Returns the row statistics, which must live until the
// next launch: the list kernel runs beside the dense kernel, so the tile lists must not get the same memory.
TensorHandle run_dense_backward(const DenseKernel& dense, const BackwardCall& call, const BackwardInputs& inputs,
                                AtenTensorHandle dq_workspace, const BackwardResult& result, const TensorMeta& query) {
  TensorHandle row_stats = new_row_stats(dense.facts, *dense.row, query);
  TensorHandle grads[3];
  for (int i = 0; i < 3; ++i) grads[i] = dense.batch_of(result.grads[i].get());
  Arguments arguments(*dense.row, dense.facts, query.device_index);
  const auto views = inputs.to(dense, &arguments);
  arguments.tensor("dq", grads[0].get(), true);
  arguments.tensor("dk", grads[1].get(), true);
  arguments.tensor("dv", grads[2].get(), true);
  arguments.tensor("row_stats", row_stats.get(), true);
  arguments.tensor("dq_workspace", dq_workspace, true);
  arguments.integer("needs_grad", kNeedsAll);
  dense.pack_lengths(call.forward, &arguments);
  launch(*dense.kernel, arguments);
  return row_stats;
}

// Compute dQ, dK and dV, or at least the gradients in `wanted_bits`. `sharing`: see `BackwardPlan`. Returns the bias as
// the kernel reads it.
TensorHandle operand_gradients(Kernel& kernel, const KernelRow& row, const BackwardCall& call, const CallFacts& p,
                               const TensorMeta& query, const BackwardInputs& inputs, int64_t wanted_bits,
                               int64_t sharing, BackwardResult* result) {
  const ForwardCall& forward = call.forward;
  // The dense kernel has no argument for a gradient of the LSE.
  const bool fits_dense = wanted_bits == kNeedsAll && !is_defined(call.grad_lse);
  const std::optional<DenseKernel> dense =
      fits_dense ? find_equal_lengths_kernel(forward, p, row, query.device_index, kNeedsGradients) : std::nullopt;
  // The workspace is never empty, so that there is an address. A dense kernel uses the same workspace.
  const int64_t floats = std::max(
                    {workspace_floats(p, row), dense ? workspace_floats(dense->facts, *dense->row) : 0, int64_t{4}}),
                unit_stride = 1;
  const TensorHandle row_stats = new_row_stats(p, row, query);
  const TensorHandle dq_workspace =
      empty_strided(1, &floats, &unit_stride, aoti_torch_dtype_float32(), query.device_type, query.device_index);
  const AtenTensorHandle operands[3] = {forward.q, forward.k, forward.v};
  const int64_t written = row.kind == kSplitBwd ? wanted_bits : kNeedsAll;
  const auto writes = [written](int i) { return (written & (i == 0 ? kNeedsDq : kNeedsDkDv)) != 0; };
  for (int i = 0; i < 3; ++i)  // an unwritten gradient is not read either, so its operand takes the argument's place
    result->grads[i] = writes(i) ? new_gradient(operands[i], row.elementwise, i == 0 ? 1 : sharing)
                                 : TensorHandle::share(inputs.like(i));
  const TensorHandle dense_row_stats =
      dense ? run_dense_backward(*dense, call, inputs, dq_workspace.get(), *result, query) : TensorHandle();
  Arguments arguments(row, p, query.device_index);
  inputs.to(&arguments);
  arguments.tensor("dq", result->grads[0].get(), writes(0));
  arguments.tensor("dk", result->grads[1].get(), writes(1));
  arguments.tensor("dv", result->grads[2].get(), writes(2));
  arguments.tensor("row_stats", row_stats.get(), true);
  arguments.tensor("dq_workspace", dq_workspace.get(), true);
  arguments.integer("needs_grad", written);
  const MaskArgs mask = pack_mask_args(forward, p, query, true, &arguments);
  TensorHandle bias = pack_bias_args(forward, p, query, row, &arguments);
  const TensorHandle seed = pack_dropout_args(call.seed, query, &arguments);
  const TensorHandle grad_lse = pack_dlse(call.grad_lse, call.lse, p, &arguments);
  const Lengths lengths = pack_varlen_args(forward, p, row, query, dense.has_value(), &arguments);
  launch(kernel, arguments, written != kNeedsAll);
  if (call.wants_delta) result->delta = delta_of(row_stats.get(), p);
  if (writes(0)) pack_scale_sign(result->grads[0].get(), p);
  for (int i = 0; i < 3; ++i) {
    if (writes(i))
      result->grads[i] = in_operand_layout(sum_of_heads(std::move(result->grads[i]), operands[i]), operands[i]);
  }
  return bias;
}

// Compute the gradient of the caller's bias. `read`: the bias as read by an earlier kernel, copied if necessary; or
// empty.
TensorHandle bias_gradient(Kernel& kernel, const KernelRow& row, const BackwardCall& call, const CallFacts& p,
                           const TensorMeta& query, const BackwardInputs& inputs, TensorHandle read, int sm_count) {
  const ForwardCall& forward = call.forward;
  const TensorHandle row_stats = new_row_stats(p, row, query);
  TensorHandle gradient = new_bias_gradient(forward.mask);
  const BiasGradientPlanes planes = gradient_planes(gradient.get(), p, row, sm_count);
  const bool is_split = planes != planes_of(gradient.get());
  TensorHandle written = is_split ? new_bias_planes(gradient.get(), planes) : TensorHandle::share(gradient.get());
  Arguments arguments(row, p, query.device_index);
  const bool wide = arguments.takes("dbias32");
  inputs.to(&arguments);
  arguments.tensor("row_stats", row_stats.get(), true);
  arguments.tensor(wide ? KernelArg("dbias32") : KernelArg("dbias"), written.get(), true);
  if (read.get() != nullptr)
    arguments.tensor(wide ? KernelArg("bias32") : KernelArg("bias"), read.get());
  else
    read = pack_bias_args(forward, p, query, row, &arguments);
  const TensorHandle seed = pack_dropout_args(call.seed, query, &arguments);
  launch(kernel, arguments);
  if (is_split) sum_bias_planes(std::move(written), gradient.get());
  return in_bias_layout(std::move(gradient), forward.mask);
}

// Return the number of ranges into which the batch is split for kernels of a single tile. Each CTA has one head and one
// range. The best number of ranges takes the shortest time. Among equal times the fewest ranges win, because fewer
// ranges leave fewer planes of a bias gradient to add up.
int64_t batch_ranges(const CallFacts& p, int sm_count) {
  constexpr int64_t kCtasPerSm = 2, kMaxWaves = 4;
  const int64_t at_once = std::max(sm_count, 1) * kCtasPerSm;
  int64_t best = 1, fewest_turns = ceil_div(p.Hq, at_once) * p.B;
  // For each number of waves, the largest number of ranges is the fastest.
  for (int64_t waves = 1; waves <= kMaxWaves; ++waves) {
    const int64_t ranges = std::max<int64_t>(std::min(waves * at_once / p.Hq, p.B), 1);
    const int64_t turns = ceil_div(p.Hq * ranges, at_once) * ceil_div(p.B, ranges);
    if (turns < fewest_turns) best = ranges, fewest_turns = turns;
  }
  return ceil_div(p.B, ceil_div(p.B, best));  // no range without work
}

// Return true if a bias has a separate number for every query and every key.
bool has_whole_planes(AtenTensorHandle bias, const CallFacts& p) {
  int64_t size[4], stride[4];
  return expand_strides(bias, p, size, stride) && (stride[2] != 0 || p.Sq == 1) && (stride[3] != 0 || p.Sk == 1);
}

// Compute all gradients of sequences that fit into a single tile, with the gradient of a bias if wanted.
void gradients_of_tiles(Kernel& kernel, const KernelRow& row, const BackwardCall& call, const CallFacts& p,
                        const TensorMeta& query, const BackwardInputs& inputs, bool with_bias, int sm_count,
                        BackwardResult* result) {
  const ForwardCall& forward = call.forward;
  const AtenTensorHandle operands[3] = {forward.q, forward.k, forward.v};
  for (int i = 0; i < 3; ++i) result->grads[i] = new_gradient(operands[i], row.elementwise);
  Arguments arguments(row, p, query.device_index);
  inputs.to(&arguments);
  arguments.tensor("dq", result->grads[0].get(), true);
  arguments.tensor("dk", result->grads[1].get(), true);
  arguments.tensor("dv", result->grads[2].get(), true);
  const int64_t ranges = batch_ranges(p, sm_count);
  arguments.integer("ranges", ranges);
  const TensorHandle bias = pack_bias_args(forward, p, query, row, &arguments);
  TensorHandle gradient, planes;
  bool is_split = false;
  if (with_bias) {
    gradient = new_bias_gradient(forward.mask);
    const BiasGradientPlanes bias_planes = planes_of(gradient.get());
    const BiasGradientPlanes written{bias_planes.batches > 1 ? p.B : ranges, p.Hq, p.Sq, p.Sk};
    is_split = written != bias_planes;
    planes = is_split ? new_bias_planes(gradient.get(), written) : TensorHandle::share(gradient.get());
  } else if (bias.get() != nullptr) {
    const BiasGradientPlanes none{0, p.Hq, p.Sq, p.Sk};
    planes = new_bias_planes(bias.get(), none);
  }
  if (planes.get() != nullptr)
    arguments.tensor(arguments.takes("dbias32") ? KernelArg("dbias32") : KernelArg("dbias"), planes.get(), with_bias);
  launch(kernel, arguments);
  pack_scale_sign(result->grads[0].get(), p);
  for (int i = 0; i < 3; ++i) result->grads[i] = in_operand_layout(std::move(result->grads[i]), operands[i]);
  if (is_split) sum_bias_planes(std::move(planes), gradient.get());
  if (with_bias) result->grads[3] = in_bias_layout(std::move(gradient), forward.mask);
}

}  // namespace

bool our_backward(const BackwardCall& call, const CallFacts& p, const DeviceFacts& device, int device_index, Mode mode,
                  BackwardResult* result) {
  if (cpu_stub() == CpuStub::kMath) return false;
  if ((p.needs & kMask) != 0 && !can_preprocess_mask(call.forward.mask, p)) return false;
  CallFacts with_gradients = p;
  with_gradients.grad = true;
  with_gradients.bias_grad = call.wanted_grads[3];
  const bool* wanted_grads = call.wanted_grads;
  const int64_t wanted_bits = (wanted_grads[0] ? kNeedsDq : 0) + (wanted_grads[1] || wanted_grads[2] ? kNeedsDkDv : 0);
  const BackwardPlan plan = plan_backward(with_gradients, device, mode, tables(), wanted_bits);
  if (!plan.ours()) return false;
  const int any_row = std::max(plan.kernel_row, plan.bias_row);
  if (any_row < 0) return true;  // nothing is wanted
  const bool in_tiles = plan.kernel_row >= 0 && tables().kernels[plan.kernel_row].kind == kTileBwd;
  const bool bias_in_tiles = in_tiles && plan.bias_row >= 0 && has_whole_planes(call.forward.mask, p);
  const int planned[2] = {plan.kernel_row, bias_in_tiles ? -1 : plan.bias_row};
  Kernel* kernels[2] = {};
  for (int i = 0; i < 2; ++i) {
    if (planned[i] < 0) continue;
    kernels[i] = find_kernel(planned[i], device_index, kNeedsGradients);
    if (kernels[i] == nullptr) return false;
  }
  TensorMeta query;
  read_meta(call.forward.q, &query);
  const auto row = [&planned](int i) -> const KernelRow& { return tables().kernels[planned[i]]; };
  const BackwardInputs inputs(call, p, tables().kernels[any_row]);
  TensorHandle bias;
  if (in_tiles)
    gradients_of_tiles(*kernels[0], row(0), call, p, query, inputs, bias_in_tiles, device.sm_count, result);
  else if (kernels[0] != nullptr)
    bias = operand_gradients(*kernels[0], row(0), call, p, query, inputs, wanted_bits, plan.sharing, result);
  if (kernels[1] != nullptr)
    result->grads[3] = bias_gradient(*kernels[1], row(1), call, p, query, inputs, std::move(bias), device.sm_count);
  count(Path::kOursBackward);
  return true;
}

}  // namespace flashplug
