// Translation of PTX text into instructions of the interpreter. A register is an offset in a warp's register file, with
// 32 lanes. Constants, special registers and addresses of parameters are registers too, filled at the start of a warp.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

namespace interpreter {

constexpr int kLanes = 32;
constexpr int kBitsOfLanes = 4;  // bytes of a predicate: one bit for each lane, in one word

struct Warp;
struct Instruction;

enum class Outcome { kNext, kBlocked, kJump, kExit };
// Executes one instruction for some lanes of a warp.
using Handler = Outcome (*)(Warp&, const Instruction&, uint32_t lanes);

// A register, and the number added to the register in an address.
struct Operand {
  int32_t at = -1;
  int64_t number = 0;
};

constexpr int kMostOperands = 8;

struct Instruction {
  Handler run = nullptr;
  Operand operands[kMostOperands];
  std::vector<int32_t> many;  // registers of the vectors, in order
  int32_t guard = -1;         // register of the guard predicate
  bool guard_not = false;
  uint32_t target = 0;  // of a branch: index of the target instruction
  int32_t extra = 0;    // extra number of the opcode for the handler
  int32_t line = 0;     // line in the PTX text
  const char* opcode = "";
};

enum class Special { kTidX, kCtaidX, kCtaidY, kCtaidZ, kNctaidX, kNctaidY, kNctaidZ, kLaneid, kClusterCtarank };

// A register filled with a value at the start of a warp.
struct Constant {
  enum Kind { kNumber, kSpecial, kParameter, kShared } kind;
  uint64_t number;  // the number; a Special; the offset of a parameter in the parameter block
  int32_t bytes;    // bytes of a lane; 0 for a predicate
  int32_t at;
  bool operator<(const Constant& x) const {
    return std::tie(kind, number, bytes) < std::tie(x.kind, x.number, x.bytes);
  }
};

struct Parameter {
  size_t offset, bytes;
};

struct Kernel {
  std::string name;
  std::vector<Instruction> code;
  std::vector<Parameter> parameters;
  std::vector<Constant> constants;
  size_t register_bytes = 0;  // bytes of a warp's register file
  size_t parameter_bytes = 0;
};

// Returns the kernels of a module by name. Throws std::runtime_error with the line for unknown PTX.
std::map<std::string, Kernel> parse(std::string_view text);

// Handler and operands of an opcode. Each operand has a letter:
//   p          predicate
//   h, w, x    register or number of 16, 32, 64 bits
//   V          vector of words (or a single word); H, X: vector of 16-bit, of 64-bit elements
//   S, G       address in shared, in global memory: [register + number]
//   T          address of a tensor box: [descriptor, {coordinates}]
//   P          [parameter + number]
//   L          label
//   I          immediate number of the instruction
struct Opcode {
  const char* operands;
  Handler run;
  int32_t extra = 0;
};
// form: variant of an opcode, determined by the operands; empty for most opcodes.
const Opcode* find_opcode(std::string_view name, const char* form);

}  // namespace interpreter
