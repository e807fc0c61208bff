// The part of the CUDA runtime called by the host code of the kernels, on the memory of this machine. The contained
// cubin identifies a library. The PTX of the cubin lies in a folder next to the pack (build_pack.py). A launch is
// interpreted to the end.
#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <mutex>

#include "machine.h"
#include "opcodes.h"

namespace interpreter {

namespace {

struct Library {
  std::map<std::string, Kernel> kernels;
};

struct Dim3 {
  uint32_t x, y, z;
};
struct Attribute {
  int32_t id;
  int32_t padding;
  union {
    Dim3 cluster;
    char bytes[64];
  };
};
struct LaunchConfig {
  Dim3 grid, block;
  size_t shared_bytes;
  void* stream;
  const Attribute* attributes;
  uint32_t count;
};
constexpr int32_t kClusterDimension = 4;

constexpr int kSuccess = 0, kFailed = 719;

std::atomic<uint64_t> seed{0};  // seed of launches: the order of events (machine.h)

std::string& last_error() {
  static std::string text;
  return text;
}

template <typename Work>
int guarded(Work&& work) {
  static std::recursive_mutex mutex;
  std::lock_guard lock(mutex);
  try {
    work();
    return kSuccess;
  } catch (const std::exception& error) {
    last_error() = error.what();
    return kFailed;
  }
}

// FNV-1a hash of an ELF file in memory, up to the end of the section headers. build_pack.py names PTX files by the
// hash.
uint64_t name_of(const void* code) {
  const auto* bytes = static_cast<const unsigned char*>(code);
  while (std::memcmp(bytes,
                     "\x7f"
                     "ELF",
                     4) != 0)
    ++bytes;  // skip the headers of a fat binary
  uint64_t sections;
  uint16_t entry, count;
  std::memcpy(&sections, bytes + 0x28, sizeof sections);
  std::memcpy(&entry, bytes + 0x3a, sizeof entry);
  std::memcpy(&count, bytes + 0x3c, sizeof count);
  uint64_t hash = 0xcbf29ce484222325;
  for (uint64_t i = 0; i < sections; ++i) hash = (hash ^ bytes[i]) * 0x100000001b3;
  return hash;
}

Library* load(const void* code) {
  char name[32];
  std::snprintf(name, sizeof name, "%016llx.ptx", static_cast<unsigned long long>(name_of(code)));
  Dl_info pack;  // pack that contains this function
  dladdr(reinterpret_cast<void*>(&last_error), &pack);
  const std::string path = std::string(pack.dli_fname) + ".ptx/" + name;
  std::ifstream file(path);
  if (!file) throw Stop("no PTX at " + path);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  return new Library{parse(text)};
}

void launch(const LaunchConfig& config, const Kernel& kernel, void** arguments) {
  Launch launch_config{&kernel, {config.grid.x, config.grid.y, config.grid.z}, config.block.x, 1, config.shared_bytes,
                       {}};
  for (uint32_t i = 0; i < config.count; ++i)
    if (config.attributes[i].id == kClusterDimension) launch_config.cluster = config.attributes[i].cluster.x;
  launch_config.parameters.resize(kernel.parameter_bytes);
  for (size_t i = 0; i < kernel.parameters.size(); ++i)
    std::memcpy(launch_config.parameters.data() + kernel.parameters[i].offset, arguments[i],
                kernel.parameters[i].bytes);
  Machine machine(seed.load());
  machine.run(launch_config);
}

// Attribute of an H100, by cudaDeviceAttr.
int attribute(int which) {
  switch (which) {
    case 1:
    case 2:
    case 3:
      return 1024;  // most threads of a block, in x and in y
    case 4:
      return 64;
    case 5:
      return 2147483647;
    case 6:
    case 7:
      return 65535;
    case 8:
      return 49152;
    case 10:
      return kLanes;
    case 16:
      return 132;
    case 75:
      return 9;
    case 81:
      return 233472;
    case 97:
      return 232448;
    default:
      return 0;
  }
}

}  // namespace

}  // namespace interpreter

#define EXPORT extern "C" __attribute__((visibility("default")))

using interpreter::guarded;

EXPORT void interpreter_seed(uint64_t seed) { interpreter::seed.store(seed); }
EXPORT void interpreter_tensors(const uint64_t* tensors, size_t count) { interpreter::hold_to(tensors, count); }

EXPORT int cudaLibraryLoadData(void** library, const void* code, void*, void**, unsigned, void*, void**, unsigned) {
  return guarded([&] { *library = interpreter::load(code); });
}
EXPORT int cudaLibraryUnload(void* library) {
  delete static_cast<interpreter::Library*>(library);
  return 0;
}
EXPORT int cudaLibraryGetKernel(void** kernel, void* library, const char* name) {
  return guarded([&] {
    auto& kernels = static_cast<interpreter::Library*>(library)->kernels;
    const auto entry = kernels.find(name);
    if (entry == kernels.end()) throw interpreter::Stop(std::string("no kernel ") + name);
    *kernel = &entry->second;
  });
}
EXPORT int cudaLaunchKernelExC(const interpreter::LaunchConfig* config, const void* kernel, void** arguments) {
  return guarded([&] { interpreter::launch(*config, *static_cast<const interpreter::Kernel*>(kernel), arguments); });
}
EXPORT int cudaKernelSetAttributeForDevice(const void*, int, int, int) { return 0; }
EXPORT int cudaFuncSetAttribute(const void*, int, int) { return 0; }
EXPORT int cudaDeviceGetAttribute(int* value, int which, int) {
  *value = interpreter::attribute(which);
  return 0;
}
EXPORT int cuKernelGetAttribute(int* value, int which, const void*, int) {
  *value = which == 0 ? 1024 : 0;  // most threads of a block; 0 for registers and local memory
  return 0;
}
EXPORT int cudaGetDevice(int* device) {
  *device = 0;
  return 0;
}
EXPORT int cudaSetDevice(int) { return 0; }
EXPORT int cudaGetDeviceCount(int* count) {
  *count = 1;
  return 0;
}
EXPORT int cudaDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}
EXPORT int cudaGetLastError() { return 0; }
EXPORT const char* cudaGetErrorName(int) { return "interpreter"; }
EXPORT const char* cudaGetErrorString(int) { return interpreter::last_error().c_str(); }
EXPORT int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}
EXPORT int cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                            int* is_found) {
  return guarded([&] {
    const std::map<std::string, void*> functions = {
        {"cuDeviceGet", reinterpret_cast<void*>(&cuDeviceGet)},
        {"cuKernelGetAttribute", reinterpret_cast<void*>(&cuKernelGetAttribute)},
    };
    *function = functions.at(name);
    *is_found = 0;
  });
}

// Functions named by the archive next to the host code, but never reached by the kernels.
#define UNUSED(name)                                               \
  EXPORT void name() {                                             \
    std::fprintf(stderr, "interpreter: %s is not there\n", #name); \
    std::abort();                                                  \
  }
UNUSED(cudaDeviceSynchronize)
UNUSED(cudaEventCreate)
UNUSED(cudaEventCreateWithFlags)
UNUSED(cudaEventDestroy)
UNUSED(cudaEventElapsedTime)
UNUSED(cudaEventQuery)
UNUSED(cudaEventRecord)
UNUSED(cudaEventRecordWithFlags)
UNUSED(cudaEventSynchronize)
UNUSED(cudaFree)
UNUSED(cudaFreeAsync)
UNUSED(cudaFreeHost)
UNUSED(cudaGetDeviceProperties)
UNUSED(cudaGraphAddKernelNode)
UNUSED(cudaGraphCreate)
UNUSED(cudaGraphDestroy)
UNUSED(cudaGraphExecDestroy)
UNUSED(cudaGraphInstantiate)
UNUSED(cudaGraphKernelNodeGetAttribute)
UNUSED(cudaGraphKernelNodeSetAttribute)
UNUSED(cudaGraphLaunch)
UNUSED(cudaLibraryGetGlobal)
UNUSED(cudaLibraryGetKernelCount)
UNUSED(cudaLibraryGetManaged)
UNUSED(cudaLibraryGetUnifiedFunction)
UNUSED(cudaLibraryLoadFromFile)
UNUSED(cudaMalloc)
UNUSED(cudaMallocAsync)
UNUSED(cudaMallocHost)
UNUSED(cudaMallocManaged)
UNUSED(cudaMemcpy)
UNUSED(cudaMemcpy3D)
UNUSED(cudaMemcpy3DAsync)
UNUSED(cudaMemcpyAsync)
UNUSED(cudaMemset)
UNUSED(cudaMemsetAsync)
UNUSED(cudaOccupancyMaxActiveBlocksPerMultiprocessor)
UNUSED(cudaProfilerStart)
UNUSED(cudaProfilerStop)
UNUSED(cudaStreamAddCallback)
UNUSED(cudaStreamBeginCapture)
UNUSED(cudaStreamCreate)
UNUSED(cudaStreamDestroy)
UNUSED(cudaStreamEndCapture)
UNUSED(cudaStreamSynchronize)
UNUSED(cudaStreamWaitEvent)
