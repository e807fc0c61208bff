// What the two doors of sdpa_ops.cpp (the aten carrier and the project's own ops) share with stock.cpp: one call, its
// results, stock's own kernels.
#pragma once

#include <cmath>

#include "tensor_facts.h"
#include "values.h"

namespace flashplug {

struct ForwardCall {
  AtenTensorHandle q, k, v, mask;  // mask may be null; all borrowed
  double dropout_p;
  Causal causal;
  std::optional<double> scale;
  Mode mode;
};

inline double softmax_scale(const ForwardCall& call, const Problem& p) {
  return call.scale.has_value() ? *call.scale : 1.0 / std::sqrt(static_cast<double>(p.D));
}

struct ForwardResult {
  Owned out, lse, seed, offset;  // seed and offset stay empty where no dropout was drawn
};

struct BackwardCall {
  AtenTensorHandle grad_out;
  ForwardCall forward;
  AtenTensorHandle out, lse, seed, offset;
  bool wanted[4];  // gradients of query, key, value, mask
};

struct BackwardResult {
  Owned grads[4];  // empty where not wanted
};

Owned empty_strided(int dims, const int64_t* size, const int64_t* stride, int32_t dtype, int32_t device_type,
                    int32_t device_index);
Shape shape_of(AtenTensorHandle tensor);  // throws if it is not concrete
// A tensor with the given shape and strides, dtype and device as `like`; a copy of `from` unless that is null.
Owned new_like(AtenTensorHandle like, int dims, const int64_t* size, const int64_t* stride, AtenTensorHandle from);
// The same elements seen with other sizes and strides.
Owned view(AtenTensorHandle tensor, int dims, const int64_t* size, const int64_t* stride);
// The same 4-d numbers under these strides: the tensor itself where it has them, a view where only dims of size 1
// differ, else a copy.
Owned under_strides(AtenTensorHandle tensor, const int64_t stride[4]);
// Strides of torch.empty_like(x) and of the output of torch's attention ops for a query laid out as `like`.
void dense_strides(const int64_t* size, const int64_t* stride, int dims, int64_t* out);
void pack_strides(const int64_t size[4], int64_t stride[4]);  // row-major
// `out` itself, or a copy of it in the layout that output_strides() says.
Owned in_output_layout(Owned out, AtenTensorHandle query);
void output_strides(const Shape& query, const int64_t out_size[4], int64_t out_stride[4]);

// ---- backward.cpp: our gradients ----

// False where another backward must follow: no measured row, no kernel.
bool our_backward(const BackwardCall& call, const Problem& p, const DeviceFacts& device, int device_index, Mode mode,
                  BackwardResult* result);

// ---- stock.cpp: stock's kernels, called through the dispatcher with our operands ----

// Stock's forward for this call where that is cuDNN's; false if it is another, or cuDNN refuses.
bool cudnn_forward(const ForwardCall& call, const Problem& p, ForwardResult* result);
bool efficient_can_run(const Problem& p);
bool cudnn_backward_can_run(const Problem& p, const DeviceFacts& device);
ForwardResult efficient_forward(const ForwardCall& call, const Problem& p);
ForwardResult math_forward(const ForwardCall& call);
// False where cuDNN refuses this call; the caller goes on to the next one.
bool cudnn_backward(const BackwardCall& call, const Problem& p, BackwardResult* result);
BackwardResult efficient_backward(const BackwardCall& call, const Problem& p);
BackwardResult math_backward(const BackwardCall& call);

}  // namespace flashplug
