// The source of kernels. Kernel packs come first (shared objects with a symbol for each kernel). Else a callback asks
// Python, with its cache of compiled kernels and its compiler (torch_flashplug/codegen/jit.py).
//
// A kernel is looked up at its first use and stored by table row and device generation. Later uses need no strings,
// maps or locks.
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/core.h"
#include "launch/launch.h"
#include "stock/torch_symbols.h"

namespace flashplug {

namespace {

constexpr int kOldest = 8, kNumGenerations = 8;  // major numbers of compute capabilities that are told apart

// Return the major number of a compute capability. GPUs with the same major number run the same code.
int generation(int cc) { return cc / 10; }

struct Pack {
  std::string path;  // empty: not installed
  std::string target;
  int generation;
  void* library = nullptr;
  std::string error;
};

struct Entry {
  Kernel kernel;
  std::atomic<bool> missing{false};
  std::atomic<bool> warned{false};
};

struct Registry {
  std::deque<Entry> entries;  // for each row an entry per generation; grows before calls run, and entries never move
  std::atomic<int64_t> changes{0};  // number of changes of `missing` flags
  std::vector<Pack> packs;
  std::atomic<CompileCallback> compile{nullptr};
  // Guards packs and writes of entries. Never held during a callback, because callbacks wait for the GIL.
  std::mutex mutex;
};

Registry& registry() {
  static Registry* instance = new Registry();
  return *instance;
}

// Head of a TVM-FFI function object. The callable sits behind a handle returned by the compiler.
struct FunctionObject {
  uint64_t reference_counts;
  int32_t type_index;
  uint32_t padding;
  void* deleter;
  KernelCall safe_call;
};

Entry& entry_of(int row, const DeviceFacts& device) {
  const int generation_index = std::clamp(generation(device.cc) - kOldest, 0, kNumGenerations - 1);
  return registry().entries[static_cast<size_t>(row) * kNumGenerations + generation_index];
}

KernelCall find_in_packs(const std::string& name, const DeviceFacts& device, std::string* why) {
  Registry& r = registry();
  std::lock_guard<std::mutex> lock(r.mutex);
  *why = "no kernel pack for this GPU is installed";
  for (Pack& pack : r.packs) {
    if (pack.generation != generation(device.cc) || pack.path.empty()) continue;
    if (pack.library == nullptr && pack.error.empty()) {
      pack.library = dlopen(pack.path.c_str(), RTLD_NOW | RTLD_LOCAL);
      if (pack.library == nullptr) pack.error = dlerror();
    }
    if (pack.library == nullptr) {
      *why = "kernel pack " + pack.path + " does not load: " + pack.error;
      continue;
    }
    if (void* symbol = dlsym(pack.library, ("__tvm_ffi_" + name).c_str())) return reinterpret_cast<KernelCall>(symbol);
    *why = "kernel pack " + pack.path + " does not contain the kernel";
  }
  return nullptr;
}

// Ask Python for a kernel. `later` is set if a later call may get a different answer.
KernelCall compile(const std::string& name, const DeviceFacts& device, int circumstances, void** self, std::string* why,
                   bool* later) {
  CompileCallback callback = registry().compile.load(std::memory_order_acquire);
  if (callback == nullptr) {
    *why += "; no compiler is installed";
    return nullptr;
  }
  void* function = nullptr;
  char reason[1024] = "";
  const auto answer = static_cast<CompileAnswer>(
      callback(name.c_str(), device.cc, circumstances, &function, self, reason, sizeof reason));
  *later = answer == CompileAnswer::kNotYet;
  if (answer != CompileAnswer::kKernel || (function == nullptr && *self == nullptr)) {
    *why += std::string("; ") + reason;
    return nullptr;
  }
  return function != nullptr ? reinterpret_cast<KernelCall>(function)
                             : reinterpret_cast<FunctionObject*>(*self)->safe_call;
}

// Look a kernel up in the packs, then ask Python. A failure is final, unless Python may answer differently later.
Kernel* search(Entry& entry, const std::string& name, int device_index, int circumstances) {
  const DeviceFacts device = device_facts(device_index);
  std::string why;
  void* self = nullptr;
  KernelCall call = find_in_packs(name, device, &why);
  if (call == nullptr) {
    const bool capturing = stream_is_capturing(current_cuda_stream(device_index));
    bool later = false;
    const int conditions = (circumstances & ~kIsOptional) | (capturing ? kIsCapturing : 0);
    call = compile(name, device, conditions, &self, &why, &later);
    if (call == nullptr) {
      const std::string text = "torch_flashplug: kernel " + name + " is not available (" + why + ")";
      if ((circumstances & kMustWait) != 0) throw std::runtime_error(text);
      if (!later && !entry.missing.exchange(true)) registry().changes.fetch_add(1, std::memory_order_relaxed);
      const bool warns = (!later || capturing) && (circumstances & kIsOptional) == 0;
      if (warns && !entry.warned.exchange(true))
        log_warning(text + "; stock attention serves " + (later ? "this call" : "these calls"));
      return nullptr;
    }
  }
  std::lock_guard<std::mutex> lock(registry().mutex);
  if (entry.kernel.call.load(std::memory_order_relaxed) == nullptr) {
    entry.kernel.self = self;
    entry.kernel.call.store(call, std::memory_order_release);
  }
  return &entry.kernel;
}

}  // namespace

Kernel* find_kernel(int row, int device_index, int circumstances) {
  Entry& entry = entry_of(row, device_facts(device_index));
  if (entry.kernel.call.load(std::memory_order_acquire) != nullptr) return &entry.kernel;
  if ((circumstances & kMustWait) == 0 && entry.missing.load(std::memory_order_relaxed)) return nullptr;
  return search(entry, tables().kernels[row].name, device_index, circumstances);
}

bool kernel_missing(int row, const DeviceFacts& device) {
  return entry_of(row, device).missing.load(std::memory_order_relaxed);
}

int64_t missing_changes() { return registry().changes.load(std::memory_order_relaxed); }

void load_pack(const char* path, const char* target) {
  Registry& r = registry();
  const int cc = std::atoi(target + std::strcspn(target, "0123456789"));
  std::lock_guard<std::mutex> lock(r.mutex);
  r.packs.push_back(Pack{path, target, generation(cc), nullptr, ""});
}

void clear_packs() {
  Registry& r = registry();
  std::lock_guard<std::mutex> lock(r.mutex);
  r.packs.clear();  // libraries stay loaded: kernels in flight may still run their code
}

void forget_kernels() {
  registry().changes.fetch_add(1, std::memory_order_relaxed);
  for (Entry& entry : registry().entries) {
    entry.kernel.call.store(nullptr, std::memory_order_release);
    entry.kernel.devices.store(0, std::memory_order_release);
    entry.missing.store(false, std::memory_order_release);
    entry.warned.store(false, std::memory_order_release);
  }
}

void reserve_kernel_entries(size_t rows) {
  std::deque<Entry>& entries = registry().entries;
  while (entries.size() < rows * kNumGenerations) entries.emplace_back();
}

void set_compile_callback(CompileCallback callback) { registry().compile.store(callback, std::memory_order_release); }

}  // namespace flashplug
