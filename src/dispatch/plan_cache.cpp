// Cache of the latest plans of a thread. A model repeats the same calls for each layer and each step. The key has all
// inputs of `plan_call`.
#include "dispatch/dispatch.h"

#include <array>
#include <cstddef>
#include <cstdint>

#include "core/core.h"

namespace flashplug {

namespace {

constexpr int kEntryBits = 6;  // a thread has 2^6 places; after a collision of two calls, the plan is made again

// Keys are compared with all members. A new field of `CallFacts` is a part of the key without further code.
struct Key {
  CallFacts call;
  DeviceFacts device;
  Mode mode;
  uint64_t version = 0;  // versions of tables start at 1, so 0 matches no table
  bool operator==(const Key&) const = default;
};

struct CachedPlan {
  Key key;
  Plan plan;
};

// Return the place for a call. The hash uses the facts that distinguish most calls of a program.
size_t cache_index(const CallFacts& p, Mode mode) {
  uint64_t hash = 0;
  for (int64_t fact : {p.B, p.Hq, p.Hkv, p.Sq, p.Sk, p.D, p.Dv, mode.word, p.needs << 1 | static_cast<int64_t>(p.grad)})
    hash = (hash ^ static_cast<uint64_t>(fact)) * 0x9e3779b97f4a7c15u;
  return hash >> (64 - kEntryBits);
}

std::array<CachedPlan, 1 << kEntryBits>& cache_entries() {
  thread_local std::array<CachedPlan, 1 << kEntryBits> cache;
  return cache;
}

}  // namespace

const Plan& remembered_plan(const CallFacts& p, const DeviceFacts& device, Mode mode, const Tables& tables) {
  CachedPlan& entry = cache_entries()[cache_index(p, mode)];
  const Key key{p, device, mode, tables.version};
  if (entry.key != key) entry = {key, plan_call(p, device, mode, tables)};
  return entry.plan;
}

bool is_plan_cached(const CallFacts& p, const DeviceFacts& device, Mode mode, const Tables& tables) {
  return cache_entries()[cache_index(p, mode)].key == Key{p, device, mode, tables.version};
}

}  // namespace flashplug
