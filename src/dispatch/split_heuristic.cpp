// Decode calls: the decode gate, and the number of CTAs among which the keys of a tile of query rows are split. All
// functions are pure functions of integers.
#include "dispatch/dispatch.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/core.h"

namespace flashplug {

namespace {

constexpr int64_t kFloatBytes = 4;
constexpr int64_t kPartialBytes = 2 * kFloatBytes;  // each partial result is written once and read once

int64_t all_rows(const CallFacts& p) { return p.B * p.Hq * p.Sq; }

// Return the number of keys visible to at least one query.
int64_t num_visible_keys(const CallFacts& p) {
  return (p.needs & kWindow) != 0 ? std::min(p.Sk, p.left + p.right + p.Sq) : p.Sk;
}

int64_t kv_bytes(const CallFacts& p, const KernelRow& row) {
  return p.B * p.Hkv * num_visible_keys(p) * (p.D * facts_of(row.dtype[1]).bytes + p.Dv * facts_of(row.dtype[2]).bytes);
}

double partial_ns(const CallFacts& p, const Tables& tables) {
  return static_cast<double>(all_rows(p) * p.Dv * kPartialBytes) / tables.cost_model.combine_rate;
}

// Return the time in ns for combining the splits of all tiles. In a cluster, every CTA adds up a share of the tile, and
// each warpgroup reads `peers_at_once` CTAs at a time. Without a cluster, a second kernel reads the partial results
// from memory.
double combine_time_ns(const CallFacts& p, const KernelRow& row, const Tables& tables, Splits splits) {
  if (splits.n == 1) return 0;
  if (splits.in_memory()) return tables.cost_model.combine_ns + static_cast<double>(splits.n) * partial_ns(p, tables);
  const double rows = static_cast<double>(std::min<int64_t>(packed_rows(p), row.tile_m));
  const double share = rows * static_cast<double>(p.Dv * kFloatBytes) / static_cast<double>(splits.n);
  const double rounds = static_cast<double>(ceil_div(splits.n, row.peers_at_once) * row.group_rows) / row.tile_m;
  return tables.cost_model.cluster_ns + rounds * share / tables.cost_model.cluster_rate;
}

// Return the largest number of splits that a cluster can hold.
int64_t largest_cluster(const KernelRow& row, const Tables& tables) {
  return std::min<int64_t>(row.max_cluster, tables.cost_model.max_cluster);
}

// Return the number of waves of CTAs, at least 1.
double waves(const CallFacts& p, const KernelRow& row, const DeviceFacts& device, Splits splits) {
  const auto ctas = static_cast<double>(packed_tiles(p, row) * splits.n);
  return std::max(1.0, ctas / (row.ctas_per_sm * std::max(device.sm_count, 1)));
}

// Return the time in ns of a call: the memory traffic of K and V overlaps with the work of every CTA on its blocks, and
// the combination of the partial results follows.
double split_time(const CallFacts& p, const KernelRow& row, const DeviceFacts& device, const Tables& tables,
                  Splits splits) {
  const double rate = device.memory_rate > 0 ? device.memory_rate : tables.cost_model.unknown_rate;
  const double reading = static_cast<double>(kv_bytes(p, row)) / (tables.cost_model.read_efficiency * rate);
  const int64_t blocks = ceil_div(ceil_div(num_visible_keys(p), row.tile_n), splits.n);
  const double working = waves(p, row, device, splits) * static_cast<double>(blocks * row.cost);
  return std::hypot(reading, working) + combine_time_ns(p, row, tables, splits);
}

}  // namespace

int64_t packed_rows(const CallFacts& p) { return p.Sq * p.group(); }

Gate decode_gate(const CallFacts& p, const DeviceFacts& device, const Tables& tables) {
  Gate gate;
  if (packed_rows(p) > tables.cost_model.max_decode_rows) return gate;
  gate.decode = true;
  gate.tiles = p.B * p.Hkv;  // all packed rows of a KV head fit into one tile
  gate.needed = static_cast<int64_t>(tables.cost_model.occupancy * device.sm_count + 0.999999);
  gate.closed = gate.tiles < gate.needed;
  return gate;
}

int64_t packed_tiles(const CallFacts& p, const KernelRow& row) {
  return p.B * p.Hkv * ceil_div(packed_rows(p), row.tile_m);
}

int64_t partial_floats(const CallFacts& p, int64_t splits) { return all_rows(p) * splits * (p.Dv + 2); }

// The splits form a cluster if a cluster combines faster than a second kernel and the GPU can place the clusters.
Splits split_among(const CallFacts& p, const KernelRow& row, const DeviceFacts& device, const Tables& tables,
                   int64_t n) {
  const Splits apart{n, 1}, together{n, n};
  if (n > largest_cluster(row, tables)) return apart;
  const double share = tables.cost_model.cluster_share[n];
  const bool fits_gpu = share == 0 || static_cast<double>(n * packed_tiles(p, row)) <= share * device.sm_count;
  return fits_gpu && combine_time_ns(p, row, tables, together) <= combine_time_ns(p, row, tables, apart) ? together
                                                                                                         : apart;
}

double packed_time(const CallFacts& p, const KernelRow& row, const DeviceFacts& device, const Tables& tables,
                   Splits splits) {
  return tables.cost_model.packed_wave_ns * waves(p, row, device, splits) + split_time(p, row, device, tables, splits);
}

// There is at most one split for each block of keys, and kernels must be able to count the partial results in 32 bits.
int64_t possible_splits(const CallFacts& p, const KernelRow& row, const Tables& tables, int64_t requested) {
  const int64_t countable = std::numeric_limits<int32_t>::max() / partial_floats(p, 1);
  const int64_t most = std::min({ceil_div(num_visible_keys(p), row.tile_n), countable, tables.layout.max_splits});
  return std::clamp<int64_t>(requested, 1, std::max<int64_t>(most, 1));
}

// The number of splits is enough for the longest possible sequence, whose first block may begin before the window. The
// number is at least two, because a single split rounds differently.
Splits splits_of_size(const CallFacts& p, const Tables& tables) {
  const int64_t keys = std::min(p.Sk, num_visible_keys(p) + tables.layout.split_unit - 1);
  return {std::max<int64_t>(ceil_div(keys, p.split_size), 2), 1};
}

// A batch-invariant call has splits that depend on a single sequence. A single sequence is balanced already. Kernels
// count blocks and items in 32 bits.
bool may_balance_splits(const CallFacts& p, int64_t requested, const Tables& tables) {
  return (p.needs & kPaged) != 0 && requested == 0 && p.split_size == 0 && !p.batch_invariant && p.B > 1 &&
         p.B <= tables.cost_model.max_balanced_sequences && p.B * p.Sk <= std::numeric_limits<int32_t>::max();
}

// A split of uneven lengths has at least total / (n - B) blocks, so all sequences together have at most n splits.
Splits balanced_splits(const CallFacts& p, const KernelRow& row, const DeviceFacts& device, const Tables& tables,
                       Splits equal) {
  const int64_t slots = int64_t{row.ctas_per_sm} * std::max(device.sm_count, 1);
  const int64_t tiles = packed_tiles(p, row) / p.B;  // of a sequence
  const auto uneven = static_cast<int64_t>(tables.cost_model.items_per_slot * static_cast<double>(slots));
  Splits splits{p.B + std::max<int64_t>(ceil_div(uneven, tiles), 1), 1, equal.n};
  splits.n = std::max(splits.n, p.B * equal.n);
  return splits;
}

int64_t workspace_floats_of(const CallFacts& p, Splits splits) {
  constexpr int64_t counts = 2;  // integers for each sequence
  if (!splits.balanced()) return partial_floats(p, splits.n);
  return partial_floats(p, splits.n) / p.B + counts * p.B;
}

// All cluster sizes are tried. For more splits, the sum of the work of a CTA and the time of combining is smallest
// where both are equal: at blocks * cost / n = n * partial_ns.
Splits best_of(const CallFacts& p, const KernelRow& row, const DeviceFacts& device, const Tables& tables,
               int64_t most) {
  const int64_t blocks = ceil_div(num_visible_keys(p), row.tile_n);
  const auto equal = static_cast<int64_t>(std::sqrt(static_cast<double>(blocks * row.cost) / partial_ns(p, tables)));
  Splits best;
  const auto consider = [&](int64_t requested) {
    const int64_t even = ceil_div(blocks, ceil_div(blocks, requested));
    const Splits splits = split_among(p, row, device, tables, even);
    if (split_time(p, row, device, tables, splits) < split_time(p, row, device, tables, best)) best = splits;
  };
  const int64_t cluster = largest_cluster(row, tables);
  for (int64_t n = 2; n <= std::min(cluster, most); ++n) consider(n);
  if (most > cluster) consider(std::clamp(equal, cluster + 1, most));
  return best;
}

// Kernels with `ctas_per_sm` > 1 read faster with more CTAs than SMs. If a mask excludes most keys, combining more
// splits takes longer than this estimate, so the CTAs must save at least `min_gain_of_sharing_ns`.
Splits best_splits(const CallFacts& p, const KernelRow& row, const DeviceFacts& device, const Tables& tables) {
  const auto best_with = [&](int64_t ctas) {
    return best_of(p, row, device, tables, possible_splits(p, row, tables, ctas / packed_tiles(p, row)));
  };
  const auto time = [&](Splits splits) { return split_time(p, row, device, tables, splits); };
  const Splits alone = best_with(device.sm_count);
  if (row.ctas_per_sm == 1) return alone;
  const Splits shared = best_with(row.ctas_per_sm * device.sm_count);
  return time(alone) - time(shared) >= tables.cost_model.min_gain_of_sharing_ns ? shared : alone;
}

}  // namespace flashplug
