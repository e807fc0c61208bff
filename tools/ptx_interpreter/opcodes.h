// Tables of opcodes, one for each file with handlers. The names are as in the PTX text, without the parts irrelevant to
// the interpreter: scopes, orders and hints (opcodes.cpp).
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <string>
#include <unordered_map>

#include "machine.h"

namespace interpreter {

using Opcodes = std::unordered_map<std::string, Opcode>;

void add_arithmetic(Opcodes& to);
void add_eight_bits(Opcodes& to);
void add_memory(Opcodes& to);
void add_barriers(Opcodes& to);
void add_matrices(Opcodes& to);
void add_tensors(Opcodes& to);

// Limits plain loads and stores to the tensors, given by begin and end, from now on. An access outside is an error.
// Without tensors, all memory is accessible.
void hold_to(const uint64_t* tensors, size_t count);

inline Outcome nothing(Warp&, const Instruction&, uint32_t) { return Outcome::kNext; }
// An operation of a whole warp (.aligned) without an effect in the interpreter.
inline Outcome together(Warp& w, const Instruction&, uint32_t) {
  return converged(w) ? Outcome::kNext : Outcome::kBlocked;
}

// commit_group forms a group of a lane's operations in a queue. wait_group waits for all but the latest groups; operand
// 0 is the number of groups left.
template <Queue Warp::* queue>
Outcome commit_group(Warp& w, const Instruction&, uint32_t lanes) {
  each_lane(lanes, [&](int i) { (w.*queue).commit(i); });
  return Outcome::kNext;
}
template <Queue Warp::* queue>
Outcome wait_group(Warp& w, const Instruction& in, uint32_t lanes) {
  each_lane(lanes, [&](int i) { (w.*queue).wait(static_cast<int>(in.operands[0].number), i); });
  return Outcome::kNext;
}

// Stores memory = work(memory, value) at any address, and returns the old value.
template <typename T, typename Work>
T update(std::byte* at, T value, Work work) {
  T old;
  std::memcpy(&old, at, sizeof old);
  const T updated = work(old, value);
  std::memcpy(at, &updated, sizeof updated);
  return old;
}

// Rounds to nearest, ties to even.
inline uint16_t to_bf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if (x != x) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float from_bf16(uint16_t x) { return std::bit_cast<float>(uint32_t{x} << 16); }
inline uint16_t to_fp16(float x) { return std::bit_cast<uint16_t>(static_cast<_Float16>(x)); }
inline float from_fp16(uint16_t x) { return static_cast<float>(std::bit_cast<_Float16>(x)); }
inline float from_e4m3(uint8_t x) {
  const int exponent = x >> 3 & 15, mantissa = x & 7;
  if ((x & 0x7f) == 0x7f) return std::numeric_limits<float>::quiet_NaN();
  const int significand = exponent == 0 ? mantissa : mantissa + 8;
  return std::ldexp(static_cast<float>((x & 0x80) != 0 ? -significand : significand), std::max(exponent, 1) - 10);
}

}  // namespace interpreter
