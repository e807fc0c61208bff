// Tables of opcodes, one for each file that executes some. Names are as in the text, without what does not matter here:
// scopes, orders and hints (opcodes.cpp).
#pragma once

#include <string>
#include <unordered_map>

#include "machine.h"

namespace interpreter {

using Opcodes = std::unordered_map<std::string, Opcode>;

void add_arithmetic(Opcodes& to);
void add_memory(Opcodes& to);
void add_barriers(Opcodes& to);
void add_matrices(Opcodes& to);
void add_tensors(Opcodes& to);

// Begin and end of each tensor, behind which plain loads and stores are errors from now on; none: all memory is theirs.
void hold_to(const uint64_t* tensors, size_t count);

// Rounds to the nearest, ties to even.
inline uint16_t to_bf16(float x) {
  const uint32_t bits = bits_as<uint32_t>(x);
  if (x != x) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float from_bf16(uint16_t x) { return bits_as<float>(uint32_t{x} << 16); }
inline uint16_t to_fp16(float x) { return bits_as<uint16_t>(static_cast<_Float16>(x)); }
inline float from_fp16(uint16_t x) { return static_cast<float>(bits_as<_Float16>(x)); }

}  // namespace interpreter
