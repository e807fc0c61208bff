// Calls of few query rows: the gate in front of them, and among how many CTAs the keys of a tile of rows are split.
// Pure functions of ints.
#include "flashplug.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace flashplug {

namespace {

constexpr int64_t kMaxSplits = 255;  // what a mode word holds
constexpr int64_t kElementBytes = 2;
constexpr int64_t kFloatBytes = 4;
constexpr int64_t kPartialBytes = 2 * kFloatBytes;  // written once and read once

int64_t packed_rows(const Problem& p) { return p.Sq * p.group(); }

int64_t all_rows(const Problem& p) { return p.B * p.Hq * p.Sq; }

int64_t kv_bytes(const Problem& p) { return p.B * p.Hkv * p.Sk * (p.D + p.Dv) * kElementBytes; }

// The SMs that clusters of n CTAs can keep evenly busy. Pairs: all. Larger ones are put beside each other on some SMs
// while others idle: beyond half of the SMs threes gain a little, the others lose. Where memory is the limit all take
// three quarters (H100: 2 to 6 % slower), since half of an H200's SMs cannot read all that its memory has.
int64_t clustered_sms(const Problem& p, const DeviceFacts& device, int64_t n) {
  if (n <= 2) return device.sm_count;
  return n == 3 || kv_bytes(p) > device.l2_bytes ? device.sm_count * 3 / 4 : device.sm_count / 2;
}

double partial_ns(const Problem& p, const Tables& tables) {
  return static_cast<double>(all_rows(p) * p.Dv * kPartialBytes) / tables.combine_rate;
}

// What adding up n splits of every tile takes: in each other's shared memory, or by a second kernel.
double adding_time(const Problem& p, const KernelRow& row, const Tables& tables, int64_t n) {
  if (n == 1) return 0;
  if (in_memory(n, tables)) return tables.combine_ns + static_cast<double>(n) * partial_ns(p, tables);
  const int64_t rows = std::min<int64_t>(packed_rows(p), row.tile_m);
  return tables.cluster_ns + static_cast<double>(rows * p.Dv * kFloatBytes) / tables.cluster_rate;
}

}  // namespace

Gate decode_gate(const Problem& p, const DeviceFacts& device, const Tables& tables) {
  Gate gate;
  if (packed_rows(p) > tables.decode_rows) return gate;
  gate.decode = true;
  gate.tiles = p.B * p.Hkv * ceil_div(packed_rows(p), tables.decode_rows);
  gate.needed = static_cast<int64_t>(tables.decode_occupancy * device.sm_count + 0.999999);
  gate.closed = gate.tiles < gate.needed;
  return gate;
}

int64_t packed_tiles(const Problem& p, const KernelRow& row) {
  return p.B * p.Hkv * ceil_div(packed_rows(p), row.tile_m);
}

bool in_memory(int64_t splits, const Tables& tables) { return splits > tables.cluster; }

int64_t partial_floats(const Problem& p, int64_t splits) { return all_rows(p) * splits * (p.Dv + 1); }

// At most one for each block of keys, and partials that the kernels can count in 32 bits.
int64_t possible_splits(const Problem& p, const KernelRow& row, int64_t wanted) {
  const int64_t countable = std::numeric_limits<int32_t>::max() / partial_floats(p, 1);
  const int64_t most = std::min({ceil_div(p.Sk, row.tile_n), countable, kMaxSplits});
  return std::clamp<int64_t>(wanted, 1, std::max<int64_t>(most, 1));
}

// Time of a call with n splits: K and V come from memory while every CTA works through its own blocks, whichever takes
// longer, and partial results are added up.
double split_time(const Problem& p, const KernelRow& row, const Tables& tables, int64_t n) {
  const int64_t blocks = ceil_div(p.Sk, row.tile_n);
  const double reading = static_cast<double>(kv_bytes(p)) / tables.read_rate;
  const double working = static_cast<double>(ceil_div(blocks, n) * row.cost);
  return std::hypot(reading, working) + adding_time(p, row, tables, n);
}

// More CTAs than SMs do not read faster. Every size of a cluster is tried; beyond, what CTAs work and what is combined
// weigh least together where they are equal: at blocks * cost / n = n * partial_ns.
int64_t best_splits(const Problem& p, const KernelRow& row, const DeviceFacts& device, const Tables& tables) {
  const int64_t blocks = ceil_div(p.Sk, row.tile_n);
  const auto equal = static_cast<int64_t>(std::sqrt(static_cast<double>(blocks * row.cost) / partial_ns(p, tables)));
  const int64_t tiles = packed_tiles(p, row), most = possible_splits(p, row, device.sm_count / tiles);
  int64_t best = 1;
  const auto consider = [&](int64_t wanted) {
    const int64_t n = ceil_div(blocks, ceil_div(blocks, wanted));  // even shares
    if (split_time(p, row, tables, n) < split_time(p, row, tables, best)) best = n;
  };
  for (int64_t n = 2; n <= std::min(tables.cluster, most); ++n)
    if (n * tiles <= clustered_sms(p, device, n)) consider(n);
  if (most > tables.cluster) consider(std::clamp(equal, tables.cluster + 1, most));
  return best;
}

}  // namespace flashplug
