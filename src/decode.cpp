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
constexpr int64_t kPartialBytes = 8;  // an fp32 partial is written once and read once

int64_t packed_rows(const Problem& p) { return p.Sq * p.group(); }

int64_t all_rows(const Problem& p) { return p.B * p.Hq * p.Sq; }

double partial_ns(const Problem& p, const Tables& tables) {
  return static_cast<double>(all_rows(p) * p.Dv * kPartialBytes) / tables.combine_rate;
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

int64_t partial_floats(const Problem& p, int64_t splits) { return all_rows(p) * splits * (p.Dv + 1); }

// At most one for each block of keys, and partials that the kernels can count in 32 bits.
int64_t possible_splits(const Problem& p, const KernelRow& row, int64_t wanted) {
  const int64_t countable = std::numeric_limits<int32_t>::max() / partial_floats(p, 1);
  const int64_t most = std::min({ceil_div(p.Sk, row.tile_n), countable, kMaxSplits});
  return std::clamp<int64_t>(wanted, 1, std::max<int64_t>(most, 1));
}

// Time of a call with n splits: K and V come from memory while every CTA works through its own blocks, whichever takes
// longer, and partial results are combined.
double split_time(const Problem& p, const KernelRow& row, const Tables& tables, int64_t n) {
  const int64_t blocks = ceil_div(p.Sk, row.tile_n);
  const double reading = static_cast<double>(p.B * p.Hkv * p.Sk * (p.D + p.Dv) * kElementBytes) / tables.read_rate;
  const double working = static_cast<double>(ceil_div(blocks, n) * row.cost);
  const double combining = tables.combine_ns + static_cast<double>(n) * partial_ns(p, tables);
  return std::hypot(reading, working) + (n > 1 ? combining : 0.0);
}

// More CTAs than SMs do not read faster. Below that, what CTAs work and what is combined weigh least together where
// they are equal: at blocks * cost / n = n * partial_ns; or it is not worth a second kernel at all.
int64_t best_splits(const Problem& p, const KernelRow& row, const DeviceFacts& device, const Tables& tables) {
  const int64_t blocks = ceil_div(p.Sk, row.tile_n);
  const auto equal = static_cast<int64_t>(std::sqrt(static_cast<double>(blocks * row.cost) / partial_ns(p, tables)));
  const int64_t room = possible_splits(p, row, device.sm_count / packed_tiles(p, row));
  const int64_t n = ceil_div(blocks, ceil_div(blocks, std::clamp<int64_t>(equal, 1, room)));  // even shares
  return split_time(p, row, tables, n) < split_time(p, row, tables, 1) ? n : 1;
}

}  // namespace flashplug
