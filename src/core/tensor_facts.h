// Reading one tensor's facts through the stable C shims.
#pragma once

#include <torch/csrc/stable/c/shim.h>

#include <cstdint>
#include <iterator>
#include <string_view>

namespace flashplug {

// What tensors are made of: a place in kDTypes, in the order of NUMBERS in dtypes.py. kOther: any that is not there.
enum class DType : int { kFirst = 0, kOther = 6 };
struct DTypeFacts {
  const char* name;    // torch's
  int32_t (*torch)();  // its number for it
  int64_t bytes;
  uint8_t dlpack;  // DLDataTypeCode
};
inline constexpr DTypeFacts kDTypes[] = {{"bfloat16", aoti_torch_dtype_bfloat16, 2, 4},
                                         {"float16", aoti_torch_dtype_float16, 2, 2},
                                         {"float32", aoti_torch_dtype_float32, 4, 2},
                                         {"int8", aoti_torch_dtype_int8, 1, 0},
                                         {"float8_e4m3fn", aoti_torch_dtype_float8_e4m3fn, 1, 10},
                                         {"float8_e5m2", aoti_torch_dtype_float8_e5m2, 1, 12},
                                         {"other", nullptr, 8, 0}};  // float64's bytes; none is looked at
constexpr int kNumDTypes = std::size(kDTypes);
static_assert(static_cast<int>(DType::kOther) == kNumDTypes - 1);
constexpr const DTypeFacts& facts_of(DType dtype) { return kDTypes[static_cast<int>(dtype)]; }
// One that some rule of ours knows by its name, in a set of them. A name that is not there does not compile.
consteval int64_t dtype_bit(std::string_view name) {
  int place = 0;
  while (kDTypes[place].name != name) ++place;
  return int64_t{1} << place;
}

constexpr int64_t kUnitBytes = 16;  // TMA and vector loads move units of so many
constexpr int64_t unit_elements(DType dtype) { return kUnitBytes / facts_of(dtype).bytes; }

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
DType dtype_of(int32_t torch);

// Sizes and strides are borrowed from the tensor. False where they are symbolic: get_numel is asked first, because
// get_sizes would specialise.
struct Shape {
  const int64_t* size = nullptr;
  const int64_t* stride = nullptr;
};
bool read_shape(AtenTensorHandle tensor, Shape* shape);

// Alignment of outer strides and of `address` or storage offset (both in bytes); dims of size 1 do not count.
Layout layout_of(const Shape& shape, int64_t address_bytes, int64_t element_bytes);

}  // namespace flashplug
