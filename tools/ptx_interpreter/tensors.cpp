// Copies of boxes and of lines between global and shared memory (TMA). PTX ISA 9, chapter 9.7.9.25.
#include <array>

#include "barriers.h"
#include "opcodes.h"
#include "tensor_map.h"

namespace interpreter {

namespace {

uint32_t shared_address(Warp& w, const Operand& address, int lane) {
  return w.lanes<uint32_t>(address.at)[lane] + static_cast<uint32_t>(address.number);
}

std::byte* global_address(Warp& w, const Operand& address, int lane) {
  return reinterpret_cast<std::byte*>(w.lanes<uint64_t>(address.at)[lane] + static_cast<uint64_t>(address.number));
}

// Starts an asynchronous copy of `bytes` into shared memory, with an arrival at `barrier` at the end of the copy.
void bring(Warp& w, uint32_t barrier, size_t bytes, std::function<void()> copy) {
  Cta* cta = w.cta;
  ++cta->copies_coming;
  cta->at(barrier, 8);
  w.machine().later([=] {
    copy();
    arrive_bytes(cta->at(barrier, 8), static_cast<int64_t>(bytes));
    --cta->copies_coming;
  });
}

template <int rank>
std::array<int64_t, rank> coordinates(Warp& w, const Instruction& in, const Operand& tensor, int lane) {
  std::array<int64_t, rank> coordinates;
  for (int i = 0; i < rank; ++i)
    coordinates[i] = static_cast<int32_t>(w.lanes<uint32_t>(in.many[static_cast<size_t>(tensor.number + i)])[lane]);
  return coordinates;
}

TensorMap map_of(Warp& w, const Operand& tensor, int lane, int rank) {
  const TensorMap map = TensorMap::read(reinterpret_cast<const std::byte*>(w.lanes<uint64_t>(tensor.at)[lane]));
  if (map.rank != rank) throw Stop("a tensor of " + std::to_string(map.rank) + " dims");
  return map;
}

// Operands: [shared], [map, coordinates], [mbarrier], policy.
template <int rank>
Outcome load_box(Warp& w, const Instruction& in, uint32_t lanes) {
  each_lane(lanes, [&](int i) {
    const TensorMap map = map_of(w, in.operands[1], i, rank);
    const auto from = coordinates<rank>(w, in, in.operands[1], i);
    const uint32_t to = shared_address(w, in.operands[0], i);
    Cta* cta = w.cta;
    if (to % 128 != 0) throw Stop("a box at an address that is no multiple of 128");
    // An H100 ends such a load with the error "an illegal instruction was encountered".
    if (from[0] * map.element_bytes % 16 != 0) throw Stop("a box that begins at no multiple of 16 bytes");
    bring(w, shared_address(w, in.operands[2], i), map.box_bytes(), [=] {
      map.each_chunk(from.data(), to, [&](const std::byte* global, uint64_t shared, size_t bytes, size_t inside) {
        std::byte* chunk = cta->at(shared, bytes);
        std::memset(chunk, 0, bytes);
        std::memcpy(chunk, global, inside);
      });
    });
  });
  return Outcome::kNext;
}

// Operands: [map, coordinates], [shared], policy.
template <int rank>
Outcome store_box(Warp& w, const Instruction& in, uint32_t lanes) {
  each_lane(lanes, [&](int i) {
    const TensorMap map = map_of(w, in.operands[0], i, rank);
    const auto to = coordinates<rank>(w, in, in.operands[0], i);
    const uint32_t from = shared_address(w, in.operands[1], i);
    Cta* cta = w.cta;
    w.machine().later(
        w.stores,
        [=] {
          map.each_chunk(to.data(), from, [&](std::byte* global, uint64_t shared, size_t bytes, size_t inside) {
            std::memcpy(global, cta->to_read_async(shared, bytes), inside);
          });
        },
        i);
  });
  return Outcome::kNext;
}

void check_lines(uint32_t shared, const std::byte* global, uint32_t bytes) {
  if (shared % 16 != 0 || bytes % 16 != 0 || reinterpret_cast<uint64_t>(global) % 16 != 0)
    throw Stop("a bulk copy that is not of lines of 16 bytes");
}

// Operands: [shared], [global], bytes, [mbarrier].
Outcome load_bytes(Warp& w, const Instruction& in, uint32_t lanes) {
  each_lane(lanes, [&](int i) {
    const uint32_t to = shared_address(w, in.operands[0], i), bytes = w.lanes<uint32_t>(in.operands[2].at)[i];
    const std::byte* from = global_address(w, in.operands[1], i);
    check_lines(to, from, bytes);
    Cta* cta = w.cta;
    // The kernels name their own CTA by an address in the cluster.
    bring(w, shared_address(w, in.operands[3], i), bytes, [=] { std::memcpy(cta->at(to, bytes), from, bytes); });
  });
  return Outcome::kNext;
}

// Operands: [global], [shared], bytes.
template <bool adds>
Outcome store_bytes(Warp& w, const Instruction& in, uint32_t lanes) {
  each_lane(lanes, [&](int i) {
    std::byte* to = global_address(w, in.operands[0], i);
    const uint32_t from = shared_address(w, in.operands[1], i), bytes = w.lanes<uint32_t>(in.operands[2].at)[i];
    check_lines(from, to, bytes);
    Cta* cta = w.cta;
    w.machine().later(
        w.stores,
        [=] {
          const std::byte* line = cta->to_read_async(from, bytes);
          if constexpr (!adds) {
            std::memcpy(to, line, bytes);
          } else {
            for (size_t k = 0; k < bytes; k += 4) {
              float more;
              std::memcpy(&more, line + k, 4);
              update(to + k, more, std::plus<>());
            }
          }
        },
        i);
  });
  return Outcome::kNext;
}

template <int rank>
void add_boxes(Opcodes& to) {
  const std::string name = "cp.async.bulk.tensor." + std::to_string(rank) + "d.";
  for (const std::string where : {"shared", "shared::cluster"}) {
    const std::string load = name + where + ".global.tile.mbarrier::complete_tx::bytes";
    to[load] = {"STS", load_box<rank>};
    to[load + ".L2::cache_hint"] = {"STSx", load_box<rank>};
  }
  const std::string store = name + "global.shared.tile.bulk_group";
  to[store] = {"TS", store_box<rank>};
  to[store + ".L2::cache_hint"] = {"TSx", store_box<rank>};
}

}  // namespace

void add_tensors(Opcodes& to) {
  add_boxes<2>(to);
  add_boxes<3>(to);
  add_boxes<4>(to);
  add_boxes<5>(to);
  to["cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"] = {"SGwS", load_bytes};
  to["cp.async.bulk.global.shared.bulk_group"] = {"GSw", store_bytes<false>};
  to["cp.reduce.async.bulk.global.shared.bulk_group.add.f32"] = {"GSw", store_bytes<true>};
  to["cp.async.bulk.commit_group"] = {"", commit_group<&Warp::stores>};
  // In the interpreter, a store that has read the source has also written the target.
  for (const auto* name : {"cp.async.bulk.wait_group", "cp.async.bulk.wait_group.read"})
    to[name] = {"I", wait_group<&Warp::stores>};
  to["prefetch.tensormap"] = {"G", nothing};
}

}  // namespace interpreter
