// Calls of few query rows: the gate in front of them, and among how many CTAs the keys of a tile of rows are split.
// Pure functions of ints.
#include "flashplug.h"

#include <algorithm>
#include <limits>

namespace flashplug {

namespace {

constexpr int64_t kMaxSplits = 255;   // what a mode word holds
constexpr int64_t kPartialBytes = 8;  // an fp32 partial is written once and read once

int64_t packed_rows(const Problem& p) { return p.Sq * p.group(); }

int64_t all_rows(const Problem& p) { return p.B * p.Hq * p.Sq; }

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

int64_t partial_floats(const Problem& p, int64_t splits) { return all_rows(p) * splits * (p.Dv + 1); }

// At most one for each block of keys, and partials that the kernels can count in 32 bits.
int64_t possible_splits(const Problem& p, const KernelRow& row, int64_t wanted) {
  const int64_t countable = std::numeric_limits<int32_t>::max() / partial_floats(p, 1);
  const int64_t most = std::min({ceil_div(p.Sk, row.tile_n), countable, kMaxSplits});
  return std::clamp<int64_t>(wanted, 1, std::max<int64_t>(most, 1));
}

// Time on one SM: its blocks of keys, then the combining of partial results. More CTAs than SMs do not read faster.
int64_t best_splits(const Problem& p, const KernelRow& row, const DeviceFacts& device, const Tables& tables) {
  const int64_t most = possible_splits(p, row, device.sm_count / packed_tiles(p, row));
  const int64_t blocks = ceil_div(p.Sk, row.tile_n);
  const double partial_ns = static_cast<double>(all_rows(p) * p.Dv * kPartialBytes) / tables.combine_rate;
  int64_t best = 1;
  double best_time = static_cast<double>(blocks * row.cost);
  for (int64_t n = 2; n <= most; ++n) {
    const double time = static_cast<double>(ceil_div(blocks, n) * row.cost + n * partial_ns) + tables.combine_ns;
    if (time >= best_time) continue;
    best = n;
    best_time = time;
  }
  return best;
}

}  // namespace flashplug
