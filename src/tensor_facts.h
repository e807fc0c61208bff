// Reading one tensor's facts through the stable C shims.
#pragma once

#include <torch/csrc/stable/c/shim.h>

#include <cstdint>

namespace flashplug {

enum class DType : int { kBf16 = 0, kFp16 = 1, kFp32 = 2, kOther = 3 };
constexpr int kNumDTypes = 4;
constexpr const char* kDtypeNames[kNumDTypes] = {"bfloat16", "float16", "float32", "other"};

constexpr int64_t kUnitElements = 8;  // TMA and vector loads move units of 16 bytes
constexpr int64_t kElementBytes = 2;  // of the element types of kernels
constexpr int64_t kUnitBytes = kUnitElements * kElementBytes;

// How one operand lies in memory, as far as the kernels care, and stock's, whose faults some of this is (rescues).
struct Layout {
  int64_t last_stride = 1;
  int align_bytes = 16;    // what the base address and every outer stride are multiples of, capped at 16
  bool odd_base = false;   // the base address is no multiple of 16 bytes
  bool odd_ones = false;   // the stride of a dim of size 1 is none: torch leaves any number there
  bool broadcast = false;  // a dim of several entries has stride 0
  bool operator==(const Layout&) const = default;
};
// Whether TMA and vectors can read it: rows of consecutive elements, all else on multiples of 16 bytes.
inline bool whole_units(const Layout& layout) { return layout.last_stride == 1 && layout.align_bytes >= kUnitBytes; }

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

// Alignment of outer strides and of `address` or storage offset (both in bytes); dims of size 1 do not count.
Layout layout_of(const Shape& shape, int64_t address_bytes, int64_t element_bytes = kElementBytes);

}  // namespace flashplug
