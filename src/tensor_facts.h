// Reading a tensor's facts through the stable C shims: shared by the router and the ops.
#pragma once

#include "flashplug.h"

namespace flashplug {

// Facts that are safe to ask of any tensor, traced or not.
struct TensorClass {
  int64_t dim = 0;
  DType dtype = DType::kOther;
  int32_t device_type = -1;
  int32_t device_index = 0;
};
bool read_class(AtenTensorHandle tensor, TensorClass* facts);

// Sizes and strides are borrowed from the tensor. False where they are symbolic: get_numel is asked first, because
// get_sizes would specialise.
struct Shape {
  const int64_t* size = nullptr;
  const int64_t* stride = nullptr;
};
bool read_shape(AtenTensorHandle tensor, Shape* shape);

// Alignment of outer strides and of `address` or storage offset (both in bytes), for 16-bit elements; dims of size 1 do
// not count.
Layout layout_of(const Shape& shape, int64_t address_bytes);

// As kernels take it: a float of 32 bits, of which they flush subnormal ones to 0. The default one is positive.
Scale scale_of(std::optional<double> scale);

bool eligible_device(int32_t device_type);
bool wants_grad(AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v);  // with them, here and now

// Fills sizes and layouts from three 4-D shapes; no checks.
void fill_shapes(const Shape& q, const Shape& k, const Shape& v, Problem* p);

}  // namespace flashplug
