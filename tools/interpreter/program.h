// PTX text -> instructions of the interpreter. Registers are places in a warp's register file, 32 lanes each;
// constants, special registers and addresses of parameters are registers, too, that are filled when a warp starts.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

namespace interpreter {

constexpr int kLanes = 32;
constexpr int kBitsOfLanes = 4;  // a predicate: one bit for each lane, in one word

struct Warp;
struct Instruction;

enum class Outcome { kNext, kBlocked, kJump, kExit };
// Executes one instruction for some lanes of a warp.
using Handler = Outcome (*)(Warp&, const Instruction&, uint32_t lanes);

// A register, and what is added to it where it is an address.
struct Operand {
  int32_t at = -1;
  int64_t number = 0;
};

constexpr int kMostOperands = 8;

struct Instruction {
  Handler run = nullptr;
  Operand operands[kMostOperands];
  std::vector<int32_t> many;  // registers of its vectors, one behind the other
  int32_t guard = -1;         // a predicate
  bool guard_not = false;
  uint32_t target = 0;  // of a branch
  int32_t extra = 0;    // what a handler wants to know of its opcode
  int32_t line = 0;     // of the text
  const char* opcode = "";
};

enum class Special { kTidX, kCtaidX, kCtaidY, kCtaidZ, kNctaidX, kNctaidY, kNctaidZ, kLaneid, kClusterCtarank };

// A register that has its value when a warp starts.
struct Constant {
  enum Kind { kNumber, kSpecial, kParameter, kShared } kind;
  uint64_t number;  // itself; a Special; where a parameter lies in the block of them
  int32_t bytes;    // of a lane; 0: a predicate
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
  size_t register_bytes = 0;  // of a warp
  size_t parameter_bytes = 0;
};

// Kernels of a module, by name. Throws std::runtime_error, with the line, for what it does not know.
std::map<std::string, Kernel> parse(std::string_view text);

// What an opcode does, and what its operands are, a letter each:
//   p predicate    h, w, x register or number of 16, 32, 64 bits    V vector of words (or one)    H, X of halves, of 64
//   bits S, G address in shared, in global memory: [register + number]    T a tensor's: [descriptor, {coordinates}] P
//   [parameter + number]    L label    I number of the instruction itself
struct Opcode {
  const char* operands;
  Handler run;
  int32_t extra = 0;
};
// form: of those that have several, by their operands.
const Opcode* find_opcode(std::string_view name, const char* form);

}  // namespace interpreter
