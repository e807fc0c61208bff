// Model of a GPU for the kernels: interleaved warps, shared memory with barriers, and asynchronous copies and products.
// An asynchronous operation finishes at some time between the start and the wait for the operation. A seed determines
// the time. So a kernel with a missing wait computes wrong numbers for some seed.
#pragma once

#include <algorithm>
#include <bit>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "program.h"

namespace interpreter {

struct Cluster;
struct Cta;
struct Machine;

constexpr uint32_t kAllLanes = 0xffffffff;
// Start of a CTA's shared memory, after the part reserved by the hardware. The start is a multiple of 1024, the period
// of swizzles. Addresses in a cluster have 1 + the rank of a CTA above bit kRankShift.
constexpr uint32_t kSharedBase = 1024;
constexpr int kRankShift = 24;

struct Stop : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Lanes of a warp at the same instruction.
struct Group {
  uint32_t pc = 0;
  uint32_t lanes = 0;
  uint64_t awaited_phase = 0;  // phase of an awaited barrier; the lanes have arrived at the barrier
  bool stuck = false;          // blocked in the current turn
};

// An asynchronous operation, started and not yet done.
struct Pending {
  std::function<void()> finish;
  int lane = 0;
  int group = -1;  // group committed by the lane; -1: not committed
};

// Asynchronous operations started in order and awaited in groups: wgmma of a warp, or cp.async and bulk stores of the
// warp's lanes.
class Queue {
 public:
  void add(std::function<void()> finish, int lane = 0) { waiting_.push_back({std::move(finish), lane, -1}); }
  void commit(int lane = 0) {
    for (Pending& pending : waiting_)
      if (pending.lane == lane && pending.group < 0) pending.group = groups_[lane];
    ++groups_[lane];
  }
  // Finishes all but the latest `left` groups of a lane.
  void wait(int left, int lane = 0) {
    const int last = groups_[lane] - left;
    for (size_t i = 0; i < waiting_.size();) {
      Pending& pending = waiting_[i];
      if (pending.lane == lane && pending.group >= 0 && pending.group < last)
        finish(i);
      else
        ++i;
    }
  }
  void finish_first() { finish(0); }
  bool empty() const { return waiting_.empty(); }

 private:
  void finish(size_t i) {
    auto work = std::move(waiting_[i].finish);
    waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(i));
    work();
  }
  std::deque<Pending> waiting_;
  int groups_[kLanes] = {};
};

struct Warp {
  Cta* cta = nullptr;
  int index = 0;
  uint32_t alive = kAllLanes;
  std::vector<Group> groups;
  Group* current = nullptr;  // the group under execution
  std::vector<std::byte> registers;
  Queue products, copies, stores;  // wgmma, cp.async, bulk stores
  uint64_t awaited_cluster_phase = 0;

  template <typename T>
  T* lanes(int32_t at) {
    return reinterpret_cast<T*>(registers.data() + at);
  }
  uint32_t& predicate(int32_t at) { return *lanes<uint32_t>(at); }
  Machine& machine();
  // Returns whether all live lanes of `members` are in the current group.
  bool gathered(uint32_t members) const { return (current->lanes & members & alive) == (members & alive); }
};

struct Barrier {
  int arrived = 0;
  uint64_t phase = 0;
  // Returns whether the arrival completes the phase.
  bool arrive(int threads, int expected) {
    arrived += threads;
    if (arrived > expected) throw Stop("more threads at a barrier than it expects");
    if (arrived < expected) return false;
    arrived = 0;
    ++phase;
    return true;
  }
};

struct Cta {
  Machine* machine = nullptr;
  Cluster* cluster = nullptr;
  uint32_t index[3] = {};
  uint32_t rank = 0;  // rank in the cluster
  std::vector<std::byte> shared;
  std::vector<uint8_t> unfenced;  // for every 16 bytes: 1 + index of the warp with an unfenced store
  Barrier barriers[16];
  std::vector<Warp> warps;
  int copies_coming = 0;  // pending bulk copies into the shared memory
  // Returns the pointer to an address in the shared memory of the CTA, or of a CTA in the cluster. Stops for an address
  // outside the shared memory.
  std::byte* at(uint64_t address, size_t bytes);
  // to_store is at() for a store by a warp. to_read_async is at() for copies and wgmma: a store is visible to copies
  // and wgmma only after a fence (fence.proxy.async) of the storing warp.
  std::byte* to_store(uint64_t address, size_t bytes, const Warp& warp);
  const std::byte* to_read_async(uint64_t address, size_t bytes);
  void fence(const Warp& warp);
  bool done() const {
    return std::all_of(warps.begin(), warps.end(), [](const Warp& warp) { return warp.alive == 0; });
  }
};

// CTAs with a common start and end.
struct Cluster {
  Barrier barrier;
  std::vector<std::unique_ptr<Cta>> ctas;
  bool done() const {
    return std::all_of(ctas.begin(), ctas.end(), [](const auto& cta) { return cta->done(); });
  }
};

inline Machine& Warp::machine() { return *cta->machine; }

struct Launch {
  const Kernel* kernel;
  uint32_t grid[3], block, cluster;
  size_t shared_bytes;
  std::vector<std::byte> parameters;
};

struct Machine {
  explicit Machine(uint64_t seed) : seed(seed), random(seed) {}
  void run(const Launch& launch);

  // Starts an operation, which finishes at once (seed 0), or at a random or required time.
  void later(std::function<void()> work) {
    if (seed == 0)
      work();
    else
      copies.push_back(std::move(work));
  }
  void later(Queue& queue, std::function<void()> work, int lane = 0) {
    queue.add(std::move(work), lane);
    if (seed == 0 || chance(8)) queue.finish_first();
  }
  bool chance(uint32_t of) { return random() % of == 0; }

  uint64_t seed;
  std::mt19937 random;
  std::vector<std::function<void()>> copies;  // copies into shared memory, in no order
  // Operands and result of a product; products are computed one at a time.
  float left[16][32], right[32][256], sums[16][256];

 private:
  const Launch* launch_ = nullptr;
  std::vector<std::unique_ptr<Cluster>> clusters_;
  uint64_t instructions_ = 0;  // number of executed warp instructions
  void start_cluster(uint32_t first);
  // Return whether any instruction was executed. The first form runs all warps of a CTA in order, the second form a
  // single warp.
  bool turn(Cta& cta);
  bool turn(Warp& warp, int instructions);
  void advance(Warp& warp, Group& group, const Instruction& in, uint32_t branching, Outcome outcome);
  bool finish_some();
  bool end_clusters();
  std::string where() const;
};

// For operations of a whole warp (.aligned).
inline bool converged(const Warp& warp) { return warp.gathered(kAllLanes); }

template <typename Work>
inline void each_lane(uint32_t lanes, Work&& work) {
  if (lanes == kAllLanes) {
    for (int i = 0; i < kLanes; ++i) work(i);
  } else {
    for (; lanes != 0; lanes &= lanes - 1) work(std::countr_zero(lanes));
  }
}

}  // namespace interpreter
