// Facts of a single tensor, read through the stable C shims.
#pragma once

#include <torch/csrc/stable/c/shim.h>

#include <cstdint>
#include <initializer_list>
#include <string_view>

namespace flashplug {

// Dtype of a tensor: the index of a row of dtypes.py. `kOther`: a dtype without a row.
constexpr int kMaxDTypes = 32;  // limit of the rows, with `kOther`
enum class DType : int { kFirst = 0, kOther = kMaxDTypes - 1 };
struct DTypeFacts {
  const char* name = "other";  // torch's name
  int64_t bytes = 8;           // without a row: the size of float64; such tensors are never read
  int32_t dlpack = 0;          // DLDataTypeCode
};
// The pushed rows. Entries behind the rows stand for other dtypes.
inline DTypeFacts dtype_facts[kMaxDTypes];
inline const DTypeFacts& facts_of(DType dtype) { return dtype_facts[static_cast<int>(dtype)]; }
void clear_dtypes();
void add_dtype(const DTypeFacts& facts);  // throws for a name that the running torch does not know
int num_dtypes();                         // number of rows
// Return true if torch's name of a dtype is one of `names`.
bool is_one_of(DType dtype, std::initializer_list<std::string_view> names);
inline bool is_16_bit_float(DType dtype) { return is_one_of(dtype, {"bfloat16", "float16"}); }

constexpr int64_t kUnitBytes = 16;  // TMA and vector loads move units of so many bytes
inline int64_t unit_elements(DType dtype) { return kUnitBytes / facts_of(dtype).bytes; }

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
