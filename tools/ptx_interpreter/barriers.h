// An mbarrier in shared memory. The bit layout is an own choice, because kernels do not read the bits.
#pragma once

#include <cstddef>
#include <cstdint>

namespace interpreter {

struct Mbarrier {
  int64_t expected, pending;  // arrivals of every phase, and pending arrivals of the current phase
  int64_t bytes;              // pending bytes of copies
  bool phase;                 // parity of the incomplete phase

  static Mbarrier read(const std::byte* at);
  void write(std::byte* at);  // completes the phase without pending arrivals and bytes
};

// Reports the arrival of `bytes` of a copy.
void arrive_bytes(std::byte* at, int64_t bytes);

}  // namespace interpreter
