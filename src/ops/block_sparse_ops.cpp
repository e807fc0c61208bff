// Ops of attention() with block-sparse lists (block_sparse.py): torch_flashplug::block_sparse_fwd, block_sparse_bwd.
#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <stdexcept>
#include <utility>

#include "core/attention_call.h"
#include "core/core.h"
#include "core/schemas.h"
#include "core/values.h"
#include "operands/operands.h"
#include "ops/ops.h"
#include "stock/stock.h"

namespace flashplug {

namespace {

// Read the facts of a call with block-sparse lists in place of the mask. The sizes of the lists are checked at their
// use.
ReadFacts read_lists(const ForwardCall& call) {
  ReadFacts facts = read_facts(call);
  // Gradients exclude decode kernels, which read masks and no metadata.
  facts.call.grad = true;
  if (!is_mask_metadata(call.mask) || !is_on_device_of(call.mask, facts.operand[0]))
    throw std::runtime_error("torch_flashplug: the block-sparse lists must be int32 on the device of query.");
  return facts;
}

void block_sparse_forward(StableIValue* stack, uint64_t, uint64_t) {
  constexpr Schema op = kBlockSparseForward;
  const TensorHandle q = box::to_tensor(stack[op["query"]]), k = box::to_tensor(stack[op["key"]]),
                     v = box::to_tensor(stack[op["value"]]), mask_metadata = box::to_tensor(stack[op["mask_metadata"]]);
  ForwardCall call{{q.get(), k.get(), v.get(), mask_metadata.get()},
                   mode_of_op(box::to<int64_t>(stack[op["block_mode"]]))};
  call.scale = box::to_optional_double(stack[op["scale"]]);
  call.cost_ratio_192 = box::to<double>(stack[op["cost_ratio_192"]]);
  const ReadFacts facts = read_lists(call);
  ForwardResult result;
  if (!attend("block_sparse_fwd", call, facts, call.mode, &result)) result = listed_math(call);
  stack[op.result("out")] = box::from_tensor(std::move(result.out));
  stack[op.result("lse")] = box::from_tensor(std::move(result.lse));
}

void block_sparse_backward(StableIValue* stack, uint64_t, uint64_t) {
  constexpr Schema op = kBlockSparseBackward;
  const TensorHandle grad = box::to_tensor(stack[op["grad_out"]]), q = box::to_tensor(stack[op["query"]]),
                     k = box::to_tensor(stack[op["key"]]), v = box::to_tensor(stack[op["value"]]),
                     mask_metadata = box::to_tensor(stack[op["mask_metadata"]]), out = box::to_tensor(stack[op["out"]]),
                     lse = box::to_tensor(stack[op["lse"]]);
  ForwardCall forward{{q.get(), k.get(), v.get(), mask_metadata.get()},
                      mode_of_op(box::to<int64_t>(stack[op["block_mode"]]))};
  forward.scale = box::to_optional_double(stack[op["scale"]]);
  const BackwardCall call{grad.get(), forward, out.get(), lse.get(), nullptr, nullptr, {true, true, true, false}};
  const ReadFacts facts = read_lists(forward);
  const CallFacts& p = facts.call;
  if (is_16_bit(p)) check_fp32("lse", call.lse, {p.B, p.Hq, p.Sq}, facts);
  BackwardResult result;
  if (wants_math(forward.mode) || !differentiate_attention(call, facts, &result)) result = listed_math_backward(call);
  for (int i = 0; i < 3; ++i) stack[i] = box::from_tensor(std::move(result.grads[i]));
}

}  // namespace

void register_listed(torch::stable::detail::StableLibrary* library) {
  library->impl("block_sparse_fwd", &block_sparse_forward);
  library->impl("block_sparse_bwd", &block_sparse_backward);
}

}  // namespace flashplug
