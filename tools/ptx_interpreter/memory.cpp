// Loads, stores, atomics, and copies of a thread (cp.async). PTX ISA 9, chapter 9.7.9.
#include "opcodes.h"

namespace interpreter {

namespace {

enum class Space { kGlobal, kShared, kParameters };

enum class Access { kLoads, kStores };

// Bounds of plain accesses to global memory; empty means no bounds.
std::vector<uint64_t> bounds;  // begin and end of each tensor

bool inside(uint64_t begin, uint64_t end) {
  static thread_local size_t last = 0;
  const auto holds = [&](size_t i) { return i + 1 < bounds.size() && bounds[i] <= begin && end <= bounds[i + 1]; };
  if (bounds.empty() || holds(last)) return true;
  for (last = 0; last < bounds.size(); last += 2)
    if (holds(last)) return true;
  return false;
}

template <Space space, Access access>
std::byte* place(Warp& w, const Operand& address, int lane, size_t bytes) {
  if constexpr (space == Space::kShared) {
    const uint32_t offset = w.lanes<uint32_t>(address.at)[lane] + static_cast<uint32_t>(address.number);
    if (offset % bytes != 0) throw Stop("a misaligned address in shared memory");
    return access == Access::kStores ? w.cta->to_store(offset, bytes, w) : w.cta->at(offset, bytes);
  } else {
    const uint64_t offset = w.lanes<uint64_t>(address.at)[lane] + static_cast<uint64_t>(address.number);
    if (offset < 4096) throw Stop("a null address");
    if (offset % bytes != 0) throw Stop("a misaligned address");
    if (space == Space::kGlobal && !inside(offset, offset + bytes)) throw Stop("an address in none of the tensors");
    return reinterpret_cast<std::byte*>(offset);
  }
}

// ld: loads a T into each register of the vector and extends with zeros.
template <Space space, typename T, typename Register = T>
Outcome load(Warp& w, const Instruction& in, uint32_t lanes) {
  const size_t count = in.many.size();
  each_lane(lanes, [&](int i) {
    const std::byte* from = place<space, Access::kLoads>(w, in.operands[1], i, count * sizeof(T));
    for (size_t k = 0; k < count; ++k) {
      T value;
      std::memcpy(&value, from + k * sizeof(T), sizeof(T));
      w.lanes<Register>(in.many[k])[i] = value;
    }
  });
  return Outcome::kNext;
}

template <Space space, typename T, typename Register = T>
Outcome store(Warp& w, const Instruction& in, uint32_t lanes) {
  const size_t count = in.many.size();
  each_lane(lanes, [&](int i) {
    std::byte* to = place<space, Access::kStores>(w, in.operands[0], i, count * sizeof(T));
    for (size_t k = 0; k < count; ++k) {
      const auto value = static_cast<T>(w.lanes<Register>(in.many[k])[i]);
      std::memcpy(to + k * sizeof(T), &value, sizeof(T));
    }
  });
  return Outcome::kNext;
}

// Sets d = the old value and memory = work(old, b).
template <Space space, typename T, auto work>
Outcome atomic(Warp& w, const Instruction& in, uint32_t lanes) {
  each_lane(lanes, [&](int i) {
    std::byte* at = place<space, Access::kStores>(w, in.operands[1], i, sizeof(T));
    w.lanes<T>(in.operands[0].at)[i] = update(at, w.lanes<T>(in.operands[2].at)[i], work);
  });
  return Outcome::kNext;
}

template <Space space, typename T, auto work>
Outcome reduce(Warp& w, const Instruction& in, uint32_t lanes) {
  each_lane(lanes, [&](int i) {
    std::byte* at = place<space, Access::kStores>(w, in.operands[0], i, sizeof(T));
    update(at, w.lanes<T>(in.operands[1].at)[i], work);
  });
  return Outcome::kNext;
}

// red.global.add.vN.f32 [address], {...}
Outcome reduce_vector(Warp& w, const Instruction& in, uint32_t lanes) {
  each_lane(lanes, [&](int i) {
    std::byte* at = place<Space::kGlobal, Access::kStores>(w, in.operands[0], i, in.many.size() * sizeof(float));
    for (const int32_t more : in.many) {
      update(at, w.lanes<float>(more)[i], std::plus<>());
      at += sizeof(float);
    }
  });
  return Outcome::kNext;
}

// cp.async [shared], [global], bytes, read: copies `read` of the bytes and fills the rest with zeros.
Outcome copy(Warp& w, const Instruction& in, uint32_t lanes) {
  const auto bytes = static_cast<size_t>(in.operands[2].number);
  each_lane(lanes, [&](int i) {
    std::byte* to = place<Space::kShared, Access::kStores>(w, in.operands[0], i, bytes);
    const size_t read = w.lanes<uint32_t>(in.operands[3].at)[i];
    const std::byte* from = read != 0 ? place<Space::kGlobal, Access::kLoads>(w, in.operands[1], i, bytes) : nullptr;
    w.machine().later(
        w.copies,
        [=] {
          std::memset(to, 0, bytes);
          if (read != 0) std::memcpy(to, from, read);
        },
        i);
  });
  return Outcome::kNext;
}

Outcome wait_all_copies(Warp& w, const Instruction&, uint32_t lanes) {
  each_lane(lanes, [&](int i) {
    w.copies.commit(i);
    w.copies.wait(0, i);
  });
  return Outcome::kNext;
}

// form: form of the opcode (form_of) for registers wider than T.
template <Space space, typename T, typename Register = T>
void add_access(Opcodes& to, const std::string& where, const std::string& type, const char* form = "") {
  const bool shared = space == Space::kShared;
  const std::string vector = sizeof(Register) == 2 ? "H" : sizeof(Register) == 4 ? "V" : "X";
  static const std::string loaded = vector + (shared ? "S" : "G"), stored = (shared ? "S" : "G") + vector;
  for (const std::string size : {"", "v2.", "v4."}) {
    for (const std::string once : {"ld.", "ld.volatile."})
      to[once + where + size + type + form] = {loaded.c_str(), load<space, T, Register>};
    to["st." + where + size + type + form] = {stored.c_str(), store<space, T, Register>};
  }
}

template <Space space, typename T, auto work>
void add_atomic(Opcodes& to, const std::string& where, const std::string& suffix) {
  const bool shared = space == Space::kShared;
  to["atom." + where + suffix] = {shared ? "wSw" : "wGw", atomic<space, T, work>};
  to["red." + where + suffix] = {shared ? "Sw" : "Gw", reduce<space, T, work>};
}

template <Space space>
void add_space(Opcodes& to, const std::string& where) {
  for (const auto* type : {"b8", "u8"}) {
    add_access<space, uint8_t, uint16_t>(to, where, type);
    add_access<space, uint8_t, uint32_t>(to, where, type, " word");
  }
  for (const auto* type : {"b16", "u16"}) {
    add_access<space, uint16_t>(to, where, type);
    add_access<space, uint16_t, uint32_t>(to, where, type, " word");
  }
  for (const auto* type : {"b32", "u32", "f32"}) add_access<space, uint32_t>(to, where, type);
  for (const auto* type : {"b64", "u64"}) add_access<space, uint64_t>(to, where, type);
  constexpr auto plus = [](auto a, auto b) { return a + b; };
  constexpr auto least = [](auto a, auto b) { return std::min(a, b); };
  constexpr auto most = [](auto a, auto b) { return std::max(a, b); };
  constexpr auto second = [](auto, auto b) { return b; };
  constexpr auto either = [](auto a, auto b) { return a | b; };
  add_atomic<space, uint32_t, plus>(to, where, "add.u32");
  add_atomic<space, uint32_t, plus>(to, where, "add.s32");
  add_atomic<space, float, plus>(to, where, "add.f32");
  add_atomic<space, uint32_t, second>(to, where, "exch.b32");
  add_atomic<space, uint32_t, either>(to, where, "or.b32");
  add_atomic<space, int32_t, least>(to, where, "min.s32");
  add_atomic<space, int32_t, most>(to, where, "max.s32");
}

}  // namespace

void hold_to(const uint64_t* tensors, size_t count) { bounds.assign(tensors, tensors + 2 * count); }

void add_memory(Opcodes& to) {
  add_space<Space::kGlobal>(to, "global.");
  add_space<Space::kShared>(to, "shared.");
  add_space<Space::kShared>(to, "shared::cluster.");
  for (const std::string size : {"", "v2.", "v4."}) {
    for (const auto* type : {"b32", "u32", "f32"})
      to["ld.param." + size + type] = {"VP", load<Space::kParameters, uint32_t>};
    for (const auto* type : {"b64", "u64"}) to["ld.param." + size + type] = {"XP", load<Space::kParameters, uint64_t>};
    for (const auto* type : {"b8", "u8"})
      to["ld.param." + size + type] = {"HP", load<Space::kParameters, uint8_t, uint16_t>};
    for (const auto* type : {"b16", "u16"}) to["ld.param." + size + type] = {"HP", load<Space::kParameters, uint16_t>};
  }
  for (const auto* name : {"red.global.add.v2.f32", "red.global.add.v4.f32"}) to[name] = {"GV", reduce_vector};
  to["cp.async.cg.shared.global"] = {"SGIw", copy};
  to["cp.async.ca.shared.global"] = {"SGIw", copy};
  // The instruction adds a pending arrival for each lane, and arrives after the lane's copies: in the interpreter at
  // once.
  to["cp.async.mbarrier.arrive.shared.b64"] = {"S", wait_all_copies};
  to["cp.async.commit_group"] = {"", commit_group<&Warp::copies>};
  to["cp.async.wait_group"] = {"I", wait_group<&Warp::copies>};
  to["cp.async.wait_all"] = {"", wait_all_copies};
}

}  // namespace interpreter
