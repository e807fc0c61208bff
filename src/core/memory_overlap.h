// Whether tensors share memory: for the output tensor of a caller.
#pragma once

#include <torch/csrc/stable/c/shim.h>

#include <cstdint>
#include <optional>

#include "core/tensor_facts.h"

namespace flashplug {

// The bytes of a tensor. Addresses are in bytes, sizes and strides in elements.
struct TensorBytes {
  int64_t address = 0, storage = 0, storage_bytes = 0, element_bytes = 0;
  int64_t dims = 0;
  Shape shape;
};
std::optional<TensorBytes> bytes_of(AtenTensorHandle tensor);  // empty for a tensor without an address

// Return true if two elements of the tensor may share an address.
bool may_meet_itself(const TensorBytes& x);
// Return true if two tensors of a device may share bytes. The answer can be exact for interleaved layouts too: tensors
// with a common stride between their rows, such as q, k, v and out in one tensor, are known to be apart.
bool may_overlap(const TensorBytes& x, const TensorBytes& y);

}  // namespace flashplug
