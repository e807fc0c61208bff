#include "machine.h"

namespace interpreter {

namespace {

constexpr size_t kResidentCtas = 132;
constexpr uint64_t kMostInstructions = 20'000'000'000;  // of a launch: minutes; an endless loop reaches the limit
constexpr std::byte kPoison{0xff};                      // NaN in every float type

uint64_t value_of(const Constant& constant, const Launch& launch, const Cta& cta, int thread) {
  switch (constant.kind) {
    case Constant::kNumber:
      return constant.number;
    case Constant::kParameter:
      return reinterpret_cast<uint64_t>(launch.parameters.data()) + constant.number;
    case Constant::kShared:
      return kSharedBase;
    case Constant::kSpecial:
      switch (static_cast<Special>(constant.number)) {
        case Special::kTidX:
          return static_cast<uint64_t>(thread);
        case Special::kLaneid:
          return static_cast<uint64_t>(thread % kLanes);
        case Special::kCtaidX:
        case Special::kCtaidY:
        case Special::kCtaidZ:
          return cta.index[constant.number - static_cast<uint64_t>(Special::kCtaidX)];
        case Special::kNctaidX:
        case Special::kNctaidY:
        case Special::kNctaidZ:
          return launch.grid[constant.number - static_cast<uint64_t>(Special::kNctaidX)];
        case Special::kClusterCtarank:
          return cta.rank;
      }
  }
  return 0;
}

void start(Warp& warp, Cta& cta, int index, const Launch& launch) {
  const Kernel& kernel = *launch.kernel;
  warp.cta = &cta;
  warp.index = index;
  warp.groups = {Group{0, kAllLanes, 0, false}};
  warp.registers.assign(kernel.register_bytes + 8 * kLanes, kPoison);
  for (const Constant& constant : kernel.constants) {
    if (constant.bytes == 0) warp.predicate(constant.at) = static_cast<uint32_t>(constant.number);
    for (int lane = 0; lane < kLanes; ++lane) {
      const uint64_t value = value_of(constant, launch, cta, index * kLanes + lane);
      std::memcpy(warp.registers.data() + constant.at + static_cast<ptrdiff_t>(lane) * constant.bytes, &value,
                  static_cast<size_t>(constant.bytes));
    }
  }
}

}  // namespace

std::byte* Cta::at(uint64_t address, size_t bytes) {
  Cta* cta = this;
  if (const uint64_t rank = address >> kRankShift; rank != 0) {
    if (rank > cluster->ctas.size()) throw Stop("an address in a CTA that the cluster does not have");
    cta = cluster->ctas[rank - 1].get();
  }
  const uint64_t offset = address & ((uint64_t{1} << kRankShift) - 1);
  if (offset < kSharedBase || offset + bytes > kSharedBase + cta->shared.size())
    throw Stop("address " + std::to_string(offset) + " is outside of shared memory");
  return cta->shared.data() + (offset - kSharedBase);
}

std::byte* Cta::to_store(uint64_t address, size_t bytes, const Warp& warp) {
  std::byte* place = at(address, bytes);
  if (address >> kRankShift == 0) {
    const uint64_t first = (address - kSharedBase) / 16, last = (address - kSharedBase + bytes - 1) / 16;
    for (uint64_t i = first; i <= last; ++i) unfenced[i] = static_cast<uint8_t>(warp.index + 1);
  }
  return place;
}

const std::byte* Cta::to_read_async(uint64_t address, size_t bytes) {
  const std::byte* place = at(address, bytes);
  if (address >> kRankShift != 0) throw Stop("an asynchronous read of another CTA's shared memory");
  const uint64_t first = (address - kSharedBase) / 16, last = (address - kSharedBase + bytes - 1) / 16;
  for (uint64_t i = first; i <= last; ++i)
    if (unfenced[i] != 0)
      throw Stop("what warp " + std::to_string(unfenced[i] - 1) + " stored is read asynchronously, and was not fenced");
  return place;
}

void Cta::fence(const Warp& warp) {
  std::replace(unfenced.begin(), unfenced.end(), static_cast<uint8_t>(warp.index + 1), uint8_t{0});
}

void Machine::start_cluster(uint32_t first) {
  auto cluster = std::make_unique<Cluster>();
  for (uint32_t rank = 0; rank < launch_->cluster; ++rank) {
    const uint32_t number = first + rank;
    auto cta = std::make_unique<Cta>();
    cta->machine = this;
    cta->cluster = cluster.get();
    cta->index[0] = number % launch_->grid[0];
    cta->index[1] = number / launch_->grid[0] % launch_->grid[1];
    cta->index[2] = number / launch_->grid[0] / launch_->grid[1];
    cta->rank = rank;
    cta->shared.assign(launch_->shared_bytes, kPoison);
    cta->unfenced.assign(launch_->shared_bytes / 16 + 1, 0);
    cta->warps.resize(launch_->block / kLanes);
    for (size_t i = 0; i < cta->warps.size(); ++i) start(cta->warps[i], *cta, static_cast<int>(i), *launch_);
    cluster->ctas.push_back(std::move(cta));
  }
  clusters_.push_back(std::move(cluster));
}

void Machine::run(const Launch& launch) {
  launch_ = &launch;
  const uint32_t total = launch.grid[0] * launch.grid[1] * launch.grid[2];
  uint32_t started = 0;
  while (started < total || !clusters_.empty()) {
    for (; started < total && (clusters_.size() + 1) * launch.cluster <= kResidentCtas; started += launch.cluster)
      start_cluster(started);
    bool moved = false;
    for (const auto& cluster : clusters_)
      for (const auto& cta : cluster->ctas) moved |= turn(*cta);
    moved |= end_clusters();
    if (!moved && !finish_some()) throw Stop("nothing can go on: " + where());
    if (instructions_ > kMostInstructions) throw Stop("no end: " + where());
  }
}

bool Machine::turn(Cta& cta) {
  bool moved = false;
  const size_t count = cta.warps.size(), first = seed == 0 ? 0 : random() % count;
  for (size_t i = 0; i < count; ++i) {
    Warp& warp = cta.warps[(first + i) % count];
    if (warp.alive != 0) moved |= turn(warp, seed == 0 ? 4000 : static_cast<int>(1 + random() % 400));
  }
  if (!copies.empty() && chance(4)) moved |= finish_some();
  return moved;
}

bool Machine::end_clusters() {
  for (const auto& cluster : clusters_) {
    if (!cluster->done()) continue;
    for (const auto& cta : cluster->ctas) {
      const auto waits = [](const Warp& warp) { return !warp.stores.empty() || !warp.copies.empty(); };
      if (cta->copies_coming != 0 || std::any_of(cta->warps.begin(), cta->warps.end(), waits))
        throw Stop("CTA " + std::to_string(cta->index[0]) + " ends while copies of its shared memory are under way");
    }
  }
  return std::erase_if(clusters_, [](const auto& cluster) { return cluster->done(); }) > 0;
}

// Finishes a random pending copy, if any copy is pending.
bool Machine::finish_some() {
  if (copies.empty()) return false;
  std::swap(copies[random() % copies.size()], copies.back());
  auto work = std::move(copies.back());
  copies.pop_back();
  work();
  return true;
}

// After a divergence, the lanes furthest behind run first, until the lanes meet the rest. Returns false if all lanes
// wait.
bool Machine::turn(Warp& warp, int instructions) {
  bool moved = false;
  for (Group& group : warp.groups) group.stuck = false;
  const auto& code = launch_->kernel->code;
  while (instructions-- > 0) {
    Group* next = nullptr;
    for (Group& group : warp.groups)
      if (!group.stuck && (next == nullptr || group.pc < next->pc)) next = &group;
    if (next == nullptr) return moved;
    const Instruction& in = code[next->pc];
    uint32_t lanes = next->lanes;
    if (in.guard >= 0) {
      const uint32_t guard = warp.predicate(in.guard);
      lanes &= in.guard_not ? ~guard : guard;
    }
    warp.current = next;
    Outcome outcome = Outcome::kNext;
    if (lanes != 0) {
      try {
        outcome = in.run(warp, in, lanes);
      } catch (const Stop& stop) {
        throw Stop(std::string(stop.what()) + ", in " + in.opcode + " at line " + std::to_string(in.line) + ", warp " +
                   std::to_string(warp.index) + " of CTA " + std::to_string(warp.cta->index[0]));
      }
    }
    ++instructions_;
    if (outcome == Outcome::kBlocked) {
      next->stuck = true;
      continue;
    }
    moved = true;
    advance(warp, *next, in, lanes, outcome);
    if (warp.alive == 0) return true;
  }
  return moved;
}

void Machine::advance(Warp& warp, Group& group, const Instruction& in, uint32_t branching, Outcome outcome) {
  const uint32_t stay = group.lanes & ~branching;
  if (outcome == Outcome::kNext) {
    ++group.pc;
  } else {
    if (outcome == Outcome::kExit) warp.alive &= ~branching;
    const uint32_t next = group.pc + 1;
    if (outcome == Outcome::kJump && stay == 0) {
      group.pc = in.target;
    } else {
      group.lanes = stay;
      group.pc = next;
      if (outcome == Outcome::kJump) warp.groups.push_back({in.target, branching, 0, false});
      std::erase_if(warp.groups, [](const Group& x) { return x.lanes == 0; });
    }
  }
  if (warp.groups.size() < 2) return;
  for (size_t i = 0; i < warp.groups.size(); ++i) {
    for (size_t j = i + 1; j < warp.groups.size();) {
      Group &a = warp.groups[i], &b = warp.groups[j];
      if (a.pc != b.pc || a.awaited_phase != 0 || b.awaited_phase != 0) {
        ++j;
        continue;
      }
      a.lanes |= b.lanes;
      a.stuck = false;
      warp.groups.erase(warp.groups.begin() + static_cast<ptrdiff_t>(j));
    }
  }
}

// Returns the positions of a few waiting warps.
std::string Machine::where() const {
  std::string text;
  int num_reported = 0;
  const auto say = [&](const Cta& cta, const Warp& warp, const Group& group) {
    const Instruction& in = launch_->kernel->code[group.pc];
    text += "\n  CTA " + std::to_string(cta.index[0]) + " warp " + std::to_string(warp.index) + " lanes " +
            std::to_string(std::popcount(group.lanes)) + ": " + in.opcode + " at line " + std::to_string(in.line);
  };
  for (const auto& cluster : clusters_)
    for (const auto& cta : cluster->ctas)
      for (const Warp& warp : cta->warps)
        for (const Group& group : warp.groups)
          if (warp.alive != 0 && num_reported++ < 12) say(*cta, warp, group);
  return text;
}

}  // namespace interpreter
