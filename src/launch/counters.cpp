// Launch counters: the global integers from which persistent kernels fetch tile numbers. A launch finds its counter
// zero and leaves the counter zero (kernels/primitives/tile_scheduler.py), so nothing is cleared between calls. No two
// launches in flight may share a counter.
//
// Eager launches take the counters of a ring buffer in turn; the buffer has far more counters than a device runs
// kernels at once. A launch recorded into a CUDA graph may run again at any time, so it gets a counter of its own
// forever.
#include <atomic>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>

#include "core/core.h"
#include "launch/launch.h"
#include "stock/torch_symbols.h"

namespace flashplug {

namespace {

// A device runs at most 128 kernels at once, and a stream queues some thousand more.
constexpr uint32_t kRingCounters = 1 << 16;
constexpr uint32_t kBlockCounters = 16384;  // counters per allocation for recorded launches
constexpr int64_t kCounterBytes = sizeof(int32_t);

struct DeviceCounters {
  std::atomic<char*> ring_buffer{nullptr};
  std::atomic<uint32_t> next{0};
  char* block = nullptr;  // allocation for counters of recorded launches
  uint32_t used = kBlockCounters;
};

DeviceCounters& counters_of(int device_index) {
  static DeviceCounters devices[kMaxDevices];
  if (device_index < 0 || device_index >= kMaxDevices)
    throw std::runtime_error("torch_flashplug: the index of a device must be at least 0 and less than kMaxDevices.");
  return devices[device_index];
}

std::mutex mutex;

char* allocate(uint32_t count) {
  void* memory = device_zeros(count * kCounterBytes);
  if (memory == nullptr)
    throw std::runtime_error("torch_flashplug: the GPU has no free memory for the launch counters (" +
                             std::to_string(count * kCounterBytes / 1024) + " KiB). Free some memory.");
  return static_cast<char*>(memory);
}

}  // namespace

void* launch_counter(int device_index, void* stream) {
  static int32_t host_counter = 0;
  if (cpu_stub() != CpuStub::kOff) return &host_counter;
  DeviceCounters& device = counters_of(device_index);
  if (stream_is_capturing(stream)) {
    std::lock_guard<std::mutex> lock(mutex);
    if (device.used == kBlockCounters) {
      device.block = allocate(kBlockCounters);
      device.used = 0;
    }
    return device.block + kCounterBytes * device.used++;
  }
  char* ring_buffer = device.ring_buffer.load(std::memory_order_acquire);
  if (ring_buffer == nullptr) {
    std::lock_guard<std::mutex> lock(mutex);
    ring_buffer = device.ring_buffer.load(std::memory_order_acquire);
    if (ring_buffer == nullptr)
      device.ring_buffer.store(ring_buffer = allocate(kRingCounters), std::memory_order_release);
  }
  return ring_buffer + kCounterBytes * (device.next.fetch_add(1, std::memory_order_relaxed) % kRingCounters);
}

}  // namespace flashplug
