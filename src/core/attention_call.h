// A call of an op of the plugin, and its results. All folders from operands/ on use the types.
#pragma once

#include <cstdint>
#include <optional>

#include "core/core.h"
#include "core/values.h"

namespace flashplug {

struct ForwardCall : AttentionArgs {
  Mode mode;
  std::optional<bool> grad = {};        // whether autograd will want a backward; graphs do not know
  AtenTensorHandle metadata = nullptr;  // mask metadata to be filled in; null: nobody keeps the metadata
  bool bias_grad = false;               // whether autograd will want the bias gradient, as far as known
  // Output tensor for kernels that can write there: (B, Hq, Sq, Dv) of the query's dtype.
  AtenTensorHandle out = nullptr;
  // Tile lists of a plan (varlen_tile_list.cpp); `plan_key` identifies the planned calls.
  AtenTensorHandle tile_lists = nullptr;
  int64_t plan_key = 0;
  // Length of the longest packed sequence of queries and of keys, as far as the caller tells; 0: unknown. The numbers
  // may be too large.
  int64_t max_seqlen_q = 0, max_seqlen_k = 0;
  // Key and value in 8 bits, quantized by an earlier call (quant_workspace.cpp), and the sampled rows of the key in 16
  // bits. Of key and value, kernels then read only the sizes, and the values of a recipe with 16-bit values.
  AtenTensorHandle quantized_kv = nullptr, key_samples = nullptr;
};

struct ForwardResult {
  TensorHandle out, lse, seed, offset;  // seed and offset stay empty without dropout
  bool in_place = false;                // true if `out` is the call's own tensor
};

struct BackwardCall {
  AtenTensorHandle grad_out;
  ForwardCall forward;
  AtenTensorHandle out, lse, seed, offset;
  bool wanted_grads[4];  // gradients of query, key, value, mask
  AtenTensorHandle grad_lse = nullptr;
  bool wants_delta = false;
};

struct BackwardResult {
  TensorHandle grads[4];  // empty where not wanted
  TensorHandle delta;     // (B, Hq, Sq) fp32: rowsum(dO O) - dLSE; empty where not wanted
};

}  // namespace flashplug
