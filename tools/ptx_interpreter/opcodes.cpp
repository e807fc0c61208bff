#include "opcodes.h"

#include <set>

namespace interpreter {

namespace {

// Parts of an opcode's name without effect in the interpreter, because threads access memory one at a time and in
// program order.
const std::set<std::string, std::less<>> kSilent = {"relaxed", "acquire",  "release",  "gpu",      "sys",
                                                    "cta",     "volatile", "weak",     "nc",       "uni",
                                                    "ftz",     "aligned",  "L2::128B", "L2::256B", "L1::no_allocate"};

std::string plain(std::string_view name) {
  std::string joined;
  for (size_t from = 0; from <= name.size();) {
    const size_t dot = std::min(name.find('.', from), name.size());
    std::string_view part = name.substr(from, dot - from);
    from = dot + 1;
    if (part == "shared::cta") part = "shared";
    if (kSilent.contains(part)) continue;
    joined += (joined.empty() ? "" : ".") + std::string(part);
  }
  return joined;
}

const Opcodes& table() {
  static const Opcodes* all = [] {
    auto* opcodes = new Opcodes();
    for (auto add : {add_arithmetic, add_eight_bits, add_memory, add_barriers, add_matrices, add_tensors})
      add(*opcodes);
    return opcodes;
  }();
  return *all;
}

}  // namespace

const Opcode* find_opcode(std::string_view name, const char* form) {
  const auto entry = table().find(plain(name) + form);
  return entry == table().end() ? nullptr : &entry->second;
}

}  // namespace interpreter
