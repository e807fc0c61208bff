#include "tensor_map.h"

#include <cstring>

namespace interpreter {

namespace {

uint64_t word(const std::byte* words, int i) {
  uint64_t word;
  std::memcpy(&word, words + static_cast<ptrdiff_t>(i) * 8, sizeof word);
  return word;
}

// Returns a 32-bit word of a map.
uint32_t half(const std::byte* words, int i) { return static_cast<uint32_t>(word(words, i / 2) >> (32 * (i % 2))); }

}  // namespace

// The layout of a tensor map is not documented. The layout was found by a comparison of maps written by the DSL's host
// code, for calls with a difference in one size, stride or type. The fields are the address, flags, strides in units of
// 16 bytes, and sizes and boxes, each less 1.
TensorMap TensorMap::read(const std::byte* words) {
  TensorMap map;
  const uint32_t flags = half(words, 2);
  const uint32_t type = flags >> 7 & 0xf;
  map.base = reinterpret_cast<std::byte*>(word(words, 0));
  map.rank = static_cast<int>(flags >> 4 & 7) + 1;
  map.swizzle = 16 << (flags >> 13 & 3);
  if (type != 0 && type != 6 && type != 7 && type != 10)
    throw Stop("a tensor map of type " + std::to_string(type) + "; 8 bits are 0, fp16 is 6, fp32 7, bf16 10");
  map.element_bytes = type == 0 ? 1 : type == 7 ? 4 : 2;
  if (half(words, 7) != 0) throw Stop("a tensor map with a stride of 2^36 bytes or more");
  map.strides[0] = map.element_bytes;
  for (int i = 1; i < map.rank; ++i) map.strides[i] = int64_t{half(words, 2 + i)} << 4;
  for (int i = 0; i < map.rank; ++i) {
    map.sizes[i] = int64_t{half(words, 8 + i)} + 1;
    map.box[i] = std::to_integer<int64_t>(words[55 + i]) + 1;
  }
  return map;
}

}  // namespace interpreter
