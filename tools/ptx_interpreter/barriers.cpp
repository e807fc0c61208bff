// Barriers of a CTA and of a cluster, mbarriers, fences. PTX ISA 9, chapter 9.7.13.
#include "barriers.h"

#include "opcodes.h"

namespace interpreter {

namespace {

constexpr int64_t kMostPending = (1 << 20) - 1;

}  // namespace

Mbarrier Mbarrier::read(const std::byte* at) {
  uint64_t word;
  std::memcpy(&word, at, sizeof word);
  Mbarrier mbarrier;
  mbarrier.expected = static_cast<int64_t>(word & kMostPending);
  mbarrier.pending = static_cast<int64_t>(word >> 20 & kMostPending);
  mbarrier.bytes = static_cast<int64_t>(word << 1) >> 41;
  mbarrier.phase = word >> 63 != 0;
  if (mbarrier.expected == kMostPending) throw Stop("an mbarrier that nobody has initialised");
  return mbarrier;
}

void Mbarrier::write(std::byte* at) {
  if (pending < 0) throw Stop("more arrivals at an mbarrier than it expects");
  if (pending == 0 && bytes == 0) {
    pending = expected;
    phase = !phase;
  }
  const uint64_t word = static_cast<uint64_t>(expected) | static_cast<uint64_t>(pending) << 20 |
                        (static_cast<uint64_t>(bytes) & 0x7fffff) << 40 | static_cast<uint64_t>(phase) << 63;
  std::memcpy(at, &word, sizeof word);
}

void arrive_bytes(std::byte* at, int64_t bytes) {
  Mbarrier barrier = Mbarrier::read(at);
  barrier.bytes -= bytes;
  barrier.write(at);
}

namespace {

std::byte* mbarrier_of(Warp& w, const Operand& address, int lane) {
  return w.cta->at(w.lanes<uint32_t>(address.at)[lane] + static_cast<uint32_t>(address.number), 8);
}

Outcome initialise(Warp& w, const Instruction& in, uint32_t lanes) {
  each_lane(lanes, [&](int i) {
    const auto expected = static_cast<int64_t>(w.lanes<uint32_t>(in.operands[1].at)[i]);
    Mbarrier{expected, expected, 0, false}.write(mbarrier_of(w, in.operands[0], i));
  });
  return Outcome::kNext;
}

// Operands of arrive: state, [barrier], count.
Outcome arrive(Warp& w, const Instruction& in, uint32_t lanes) {
  each_lane(lanes, [&](int i) {
    std::byte* at = mbarrier_of(w, in.operands[1], i);
    Mbarrier barrier = Mbarrier::read(at);
    barrier.pending -= w.lanes<uint32_t>(in.operands[2].at)[i];
    barrier.write(at);
  });
  return Outcome::kNext;
}

Outcome arrive_expecting(Warp& w, const Instruction& in, uint32_t lanes) {
  each_lane(lanes, [&](int i) {
    std::byte* at = mbarrier_of(w, in.operands[1], i);
    Mbarrier barrier = Mbarrier::read(at);
    barrier.bytes += w.lanes<uint32_t>(in.operands[2].at)[i];
    barrier.pending -= 1;
    barrier.write(at);
  });
  return Outcome::kNext;
}

// Operands of expect_tx: [barrier], bytes.
Outcome expect(Warp& w, const Instruction& in, uint32_t lanes) {
  each_lane(lanes, [&](int i) {
    std::byte* at = mbarrier_of(w, in.operands[0], i);
    Mbarrier barrier = Mbarrier::read(at);
    barrier.bytes += w.lanes<uint32_t>(in.operands[1].at)[i];
    barrier.write(at);
  });
  return Outcome::kNext;
}

// try_wait.parity p, [barrier], parity, ns: waits without a time limit.
Outcome wait(Warp& w, const Instruction& in, uint32_t lanes) {
  bool over = true;
  each_lane(lanes, [&](int i) {
    const bool parity = (w.lanes<uint32_t>(in.operands[2].at)[i] & 1) != 0;
    over &= Mbarrier::read(mbarrier_of(w, in.operands[1], i)).phase != parity;
  });
  if (!over) return Outcome::kBlocked;
  w.predicate(in.operands[0].at) |= lanes;
  return Outcome::kNext;
}

// ---- barriers of a CTA ----

template <bool has_count, bool waits>
Outcome cta_barrier(Warp& w, const Instruction& in, uint32_t lanes) {
  if (!converged(w)) return Outcome::kBlocked;
  const int lane = std::countr_zero(lanes);
  const uint32_t number = w.lanes<uint32_t>(in.operands[0].at)[lane];
  if (number >= std::size(w.cta->barriers)) throw Stop("a CTA has 16 barriers");
  Barrier& barrier = w.cta->barriers[number];
  uint64_t& awaited_phase = w.current->awaited_phase;
  if (awaited_phase == 0) {
    const int threads = static_cast<int>(w.cta->warps.size()) * kLanes;
    const int expected = has_count ? static_cast<int>(w.lanes<uint32_t>(in.operands[1].at)[lane]) : threads;
    const uint64_t phase = barrier.phase;
    if (barrier.arrive(kLanes, expected) || !waits) return Outcome::kNext;
    awaited_phase = phase + 1;
  }
  if (barrier.phase < awaited_phase) return Outcome::kBlocked;
  awaited_phase = 0;
  return Outcome::kNext;
}

Outcome warp_barrier(Warp& w, const Instruction& in, uint32_t lanes) {
  const uint32_t members = w.lanes<uint32_t>(in.operands[0].at)[std::countr_zero(lanes)];
  return w.gathered(members) ? Outcome::kNext : Outcome::kBlocked;
}

Outcome arrive_in_cluster(Warp& w, const Instruction&, uint32_t) {
  if (!converged(w)) return Outcome::kBlocked;
  Cluster& cluster = *w.cta->cluster;
  const auto threads = static_cast<int>(w.cta->warps.size() * cluster.ctas.size()) * kLanes;
  w.awaited_cluster_phase = cluster.barrier.phase + 1;
  cluster.barrier.arrive(kLanes, threads);
  return Outcome::kNext;
}

Outcome wait_for_cluster(Warp& w, const Instruction&, uint32_t) {
  return w.cta->cluster->barrier.phase >= w.awaited_cluster_phase ? Outcome::kNext : Outcome::kBlocked;
}

// mapa: maps a shared memory address to the CTA of a rank.
Outcome map_address(Warp& w, const Instruction& in, uint32_t lanes) {
  each_lane(lanes, [&](int i) {
    const uint32_t address = w.lanes<uint32_t>(in.operands[1].at)[i] & ((1u << kRankShift) - 1);
    w.lanes<uint32_t>(in.operands[0].at)[i] = address | (w.lanes<uint32_t>(in.operands[2].at)[i] + 1) << kRankShift;
  });
  return Outcome::kNext;
}

// Fence of the lanes' stores into shared memory, before copies and wgmma read the shared memory.
Outcome fence_async(Warp& w, const Instruction&, uint32_t) {
  w.cta->fence(w);
  return Outcome::kNext;
}

}  // namespace

void add_barriers(Opcodes& to) {
  to["mbarrier.init.shared.b64"] = {"Sw", initialise};
  to["mbarrier.arrive.shared.b64"] = {"xSw", arrive};
  to["mbarrier.arrive.expect_tx.shared.b64"] = {"xSw", arrive_expecting};
  to["mbarrier.expect_tx.shared.b64"] = {"Sw", expect};
  to["mbarrier.try_wait.parity.shared.b64"] = {"pSww", wait};
  to["bar.sync"] = {"w", cta_barrier<false, true>};
  to["bar.sync 2"] = {"ww", cta_barrier<true, true>};
  to["bar.arrive 2"] = {"ww", cta_barrier<true, false>};
  to["barrier.sync"] = to["bar.sync"];
  to["barrier.sync 2"] = to["bar.sync 2"];
  to["bar.warp.sync"] = {"w", warp_barrier};
  to["barrier.cluster.arrive"] = {"", arrive_in_cluster};
  to["barrier.cluster.wait"] = {"", wait_for_cluster};
  to["mapa.shared::cluster.u32"] = {"www", map_address};
  to["fence.proxy.async"] = to["fence.proxy.async.shared"] = {"", fence_async};
  for (const auto* name : {"fence.proxy.async.global", "fence.mbarrier_init.cluster",
                           "fence.sync_restrict::shared.cluster", "fence.sync_restrict::shared::cta.cluster",
                           "fence.sync_restrict::shared::cluster.cluster", "fence.acq_rel", "membar.gl", "fence.sc",
                           "griddepcontrol.wait", "griddepcontrol.launch_dependents"})  // one kernel after the next
    to[name] = {"", nothing};
}

}  // namespace interpreter
