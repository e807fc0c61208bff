// A tensor map: a tensor in global memory, the box moved by a copy, and the layout of the box in shared memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "machine.h"

namespace interpreter {

struct TensorMap {
  int rank = 0;
  std::byte* base = nullptr;
  int64_t element_bytes = 2;
  int64_t sizes[5] = {};    // elements
  int64_t strides[5] = {};  // bytes
  int64_t box[5] = {};      // elements
  int64_t swizzle = 16;     // bytes of a row in shared memory: 128, 64, 32; 16 means no swizzle

  static TensorMap read(const std::byte* words);

  size_t box_bytes() const {
    int64_t bytes = element_bytes;
    for (int i = 0; i < rank; ++i) bytes *= box[i];
    return static_cast<size_t>(bytes);
  }

  // Calls work(global, shared, bytes, bytes inside the tensor) for all chunks of a box. A chunk is contiguous in global
  // and in shared memory: 16 bytes, the unit of swizzles.
  template <typename Work>
  void each_chunk(const int64_t* from, uint64_t shared, Work&& work) const {
    const int64_t row = box[0] * element_bytes, chunk = std::min<int64_t>(row, 16);
    const int64_t rows = static_cast<int64_t>(box_bytes()) / row, first = from[0] * element_bytes;
    int64_t at[5] = {};
    for (int64_t n = 0; n < rows; ++n) {
      bool inside = true;
      std::byte* line = base + first;
      for (int i = 1; i < rank; ++i) {
        const int64_t x = from[i] + at[i];
        inside &= x >= 0 && x < sizes[i];
        line += x * strides[i];
      }
      if (first < 0) throw Stop("a box that begins before its rows");
      for (int64_t byte = 0; byte < row; byte += chunk) {
        const uint64_t linear = shared + static_cast<uint64_t>(n * row + byte);
        const uint64_t swizzled = linear ^ ((linear >> 7 & static_cast<uint64_t>(swizzle / 16 - 1)) << 4);
        const int64_t left = std::clamp<int64_t>(sizes[0] * element_bytes - first - byte, 0, chunk);
        work(line + byte, swizzled, static_cast<size_t>(chunk), static_cast<size_t>(inside ? left : 0));
      }
      for (int i = 1; i < rank && ++at[i] == box[i]; ++i) at[i] = 0;
    }
  }
};

}  // namespace interpreter
