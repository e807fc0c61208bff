// Packed sequences of equal lengths: the dense kernel launched ahead of the kernel of packed sequences, and the tensors
// of the dense batch, which are views of the packed tensors (dispatch/equal_lengths.cpp).
#include <algorithm>
#include <cstdint>
#include <optional>

#include "core/attention_call.h"
#include "core/core.h"
#include "core/values.h"
#include "dispatch/dispatch.h"
#include "launch/kernel_args.h"
#include "launch/launch.h"
#include "operands/operands.h"

namespace flashplug {

namespace {

// Return false if the caller's longest length differs from the only common length.
bool may_be_common(int64_t length, int64_t longest) { return longest <= 0 || longest == length; }

}  // namespace

std::optional<DenseKernel> find_equal_lengths_kernel(const ForwardCall& call, const CallFacts& p,
                                                     const KernelRow& packed, int device_index, int circumstances) {
  const std::optional<CallFacts> dense = equal_lengths_facts(p);
  if (!dense || is_defined(call.sinks) || is_defined(call.seqused_k)) return {};  // dense kernels have neither
  if (!may_be_common(dense->Sq, call.max_seqlen_q) || !may_be_common(dense->Sk, call.max_seqlen_k)) return {};
  const int row = find_equal_lengths_row(*dense, packed, device_facts(device_index), tables());
  if (row < 0) return {};
  Kernel* kernel = find_kernel(row, device_index, (circumstances & ~kMustWait) | kIsOptional);
  if (kernel == nullptr) return {};
  count(Path::kDenseAhead);
  return DenseKernel{kernel, &tables().kernels[row], *dense};
}

TensorHandle DenseKernel::batch_of(AtenTensorHandle packed, int dims) const {
  const Shape rows = shape_of(packed);
  int64_t size[4], stride[4];
  std::copy_n(rows.size, dims, size);
  std::copy_n(rows.stride, dims, stride);
  size[0] = facts.B, size[2] = rows.size[2] / facts.B;
  stride[0] = size[2] * rows.stride[2];
  return view(packed, dims, size, stride);
}

void DenseKernel::pack_lengths(const ForwardCall& call, Arguments* arguments) const {
  arguments->tensor("cu_seqlens_q", call.cu_seqlens_q);
  arguments->tensor("cu_seqlens_k", call.cu_seqlens_k);
}

}  // namespace flashplug
