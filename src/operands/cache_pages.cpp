// Block tables of caches without pages. All calls on a device share one list of numbers, which stays in memory forever:
// CUDA graphs may read the list at any time.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <memory>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>

#include "core/attention_call.h"
#include "core/core.h"
#include "core/values.h"
#include "launch/launch.h"
#include "operands/operands.h"
#include "stock/torch_symbols.h"

namespace flashplug {

namespace {

constexpr int64_t kLeastNumbers = 4096;

struct PageNumbers {
  AtenTensorHandle tensor;  // (count,) int32: 0, 1, ...
  int64_t count;
};

std::mutex numbers_mutex;

const PageNumbers* new_numbers(int64_t least, const TensorMeta& query) {
  const auto count = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(std::max(least, kLeastNumbers))));
  auto host = std::make_unique<int32_t[]>(count);
  std::iota(host.get(), host.get() + count, 0);
  void* memory = nullptr;
  if (query.device_type == aoti_torch_device_type_cpu()) {  // the CPU stub
    memory = host.release();
  } else {
    const OnDevice on_device(query.device_index);
    memory = device_copy(host.get(), count * sizeof(int32_t));
  }
  if (memory == nullptr)
    throw std::runtime_error("torch_flashplug: the GPU has no free memory for the page numbers of caches (" +
                             std::to_string(count * sizeof(int32_t) / 1024) + " KiB). Free some memory.");
  const int64_t stride = 1;
  auto* numbers = new PageNumbers{nullptr, count};
  check_shim(aoti_torch_create_tensor_from_blob(memory, 1, &count, &stride, 0, aoti_torch_dtype_int32(),
                                                query.device_type, query.device_index, &numbers->tensor),
             "create_tensor_from_blob");
  return numbers;
}

}  // namespace

TensorHandle pages_of_cache(int64_t B, const TensorMeta& query) {
  static std::atomic<const PageNumbers*> of_devices[kMaxDevices];
  if (query.device_index < -1 || query.device_index >= kMaxDevices - 1)
    throw std::runtime_error("torch_flashplug: the index of a device must be less than kMaxDevices.");
  std::atomic<const PageNumbers*>& place = of_devices[query.device_index + 1];
  const PageNumbers* numbers = place.load(std::memory_order_acquire);
  if (numbers == nullptr || numbers->count < B) {
    std::lock_guard<std::mutex> lock(numbers_mutex);
    numbers = place.load(std::memory_order_acquire);
    if (numbers == nullptr || numbers->count < B)
      place.store(numbers = new_numbers(B, query), std::memory_order_release);
  }
  const int64_t size[2] = {B, 1}, stride[2] = {1, 1};
  return view(numbers->tensor, 2, size, stride);
}

}  // namespace flashplug
