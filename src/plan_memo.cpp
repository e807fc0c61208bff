// The same calls come again and again, layer after layer and step after step: plans that this thread made lately, by
// everything that plan_call looks at.
#include <array>
#include <cstring>

#include "flashplug.h"

namespace flashplug {

namespace {

constexpr int kSlotBits = 6;  // of a thread's slots; a plan that collides with another one is made again
constexpr size_t kWords = 19;

using Key = std::array<uint64_t, kWords>;

struct Slot {
  Key key{};  // no call's: versions of tables start at 1
  Plan plan;
};

uint64_t bits(double value) {
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof word);
  return word;
}

uint64_t packed(std::initializer_list<uint64_t> small) {
  uint64_t word = 0;
  for (uint64_t value : small) word = word << 8 | value;
  return word;
}

Key key_of(const Problem& p, const DeviceFacts& device, Mode mode, const Tables& tables) {
  const auto dtype = [&p](int i) { return static_cast<uint64_t>(p.dtype[i]); };
  const auto layout = [&p](int i) {
    return static_cast<uint64_t>(p.layout[i].last_stride) << 8 | static_cast<uint64_t>(p.layout[i].align_bytes);
  };
  const uint64_t flags =
      packed({static_cast<uint64_t>(p.causal), p.has_mask, p.on_cuda, p.grad, p.deterministic, p.positive_scale});
  const auto size = [](int64_t n) { return static_cast<uint64_t>(n); };
  return {size(p.B),
          size(p.Hq),
          size(p.Hkv),
          size(p.Sq),
          size(p.Sk),
          size(p.D),
          size(p.Dv),
          layout(0),
          layout(1),
          layout(2),
          packed({dtype(0), dtype(1), dtype(2)}),
          flags,
          bits(p.dropout_p),
          size(mode.word),
          size(device.cc),
          size(device.sm_count),
          size(device.smem_bytes),
          size(device.memory_rate),
          tables.version};
}

size_t slot_of(const Key& key) {
  uint64_t hash = 0;
  for (uint64_t word : key) hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
  return hash >> (64 - kSlotBits);
}

}  // namespace

const Plan& remembered_plan(const Problem& p, const DeviceFacts& device, Mode mode, const Tables& tables) {
  thread_local std::array<Slot, 1 << kSlotBits> slots;
  const Key key = key_of(p, device, mode, tables);
  Slot& slot = slots[slot_of(key)];
  if (slot.key != key) {
    slot.plan = plan_call(p, device, mode, tables);
    slot.key = key;
  }
  return slot.plan;
}

}  // namespace flashplug
