// Facts of a single tensor, read through the stable C shims.
#pragma once

#include <torch/csrc/stable/c/shim.h>

#include <cstdint>
#include <iterator>
#include <string_view>

namespace flashplug {

// Dtype of a tensor: an index into `kDTypes`, in the order of DTYPE_INFO in dtypes.py. `kOther`: any dtype not listed.
enum class DType : int { kFirst = 0, kOther = 6 };
struct DTypeFacts {
  const char* name;    // torch's name
  int32_t (*torch)();  // torch's number
  int64_t bytes;
  uint8_t dlpack;  // DLDataTypeCode
};
inline constexpr DTypeFacts kDTypes[] = {{"bfloat16", aoti_torch_dtype_bfloat16, 2, 4},
                                         {"float16", aoti_torch_dtype_float16, 2, 2},
                                         {"float32", aoti_torch_dtype_float32, 4, 2},
                                         {"int8", aoti_torch_dtype_int8, 1, 0},
                                         {"float8_e4m3fn", aoti_torch_dtype_float8_e4m3fn, 1, 10},
                                         {"float8_e5m2", aoti_torch_dtype_float8_e5m2, 1, 12},
                                         {"other", nullptr, 8, 0}};  // the size of float64; such tensors are never read
constexpr int kNumDTypes = std::size(kDTypes);
static_assert(static_cast<int>(DType::kOther) == kNumDTypes - 1);
constexpr const DTypeFacts& facts_of(DType dtype) { return kDTypes[static_cast<int>(dtype)]; }
// Return the bit of a dtype in a set, for a dtype that C++ code knows by name. An unknown name does not compile.
consteval int64_t dtype_bit(std::string_view name) {
  int index = 0;
  while (kDTypes[index].name != name) ++index;
  return int64_t{1} << index;
}

constexpr int64_t kUnitBytes = 16;  // TMA and vector loads move units of so many bytes
constexpr int64_t unit_elements(DType dtype) { return kUnitBytes / facts_of(dtype).bytes; }

// Memory layout of an operand, with the properties relevant for kernels, and for known faults of stock (stock_bugs.py).
struct Layout {
  int64_t last_stride = 1;
  int align_bytes = 16;             // common divisor of the base address and of every outer stride, capped at 16
  bool unaligned_base = false;      // the base address is no multiple of 16 bytes
  bool unaligned_unit_dim = false;  // a dim of size 1 has an unaligned stride; torch leaves any number there
  bool broadcast = false;           // a dim of several entries has stride 0
  bool operator==(const Layout&) const = default;
};
// Return true if TMA and vectors can read the operand: contiguous rows, and all other strides are multiples of 16
// bytes.
inline bool is_16b_aligned(const Layout& layout) { return layout.last_stride == 1 && layout.align_bytes >= kUnitBytes; }

// Facts that are safe to ask of any tensor, traced or not.
struct TensorMeta {
  int64_t dim = 0;
  DType dtype = DType::kOther;
  int32_t device_type = -1;
  int32_t device_index = 0;
};
bool read_meta(AtenTensorHandle tensor, TensorMeta* facts);
DType dtype_of(int32_t torch);

// Sizes and strides, borrowed from the tensor. `read_shape()` returns false for symbolic sizes. get_numel is asked
// first, because get_sizes would specialize the sizes.
struct Shape {
  const int64_t* size = nullptr;
  const int64_t* stride = nullptr;
};
bool read_shape(AtenTensorHandle tensor, Shape* shape);

// Return the layout. The alignment covers outer strides and `address_bytes`, an address or a storage offset in bytes.
// Dims of size 1 do not count.
Layout layout_of(const Shape& shape, int64_t address_bytes, int64_t element_bytes);

}  // namespace flashplug
