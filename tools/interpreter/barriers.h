// An mbarrier as it lies in shared memory. Its bits are ours: kernels do not look into it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace interpreter {

struct Mbarrier {
  int64_t expected, pending;  // arrivals: of every phase, left of this one
  int64_t bytes;              // that copies have yet to bring
  bool phase;                 // parity of the one that is not complete

  static Mbarrier read(const std::byte* at);
  void write(std::byte* at);  // completes the phase where nothing is left
};

// A copy has brought so many bytes.
void arrive_bytes(std::byte* at, int64_t bytes);

}  // namespace interpreter
