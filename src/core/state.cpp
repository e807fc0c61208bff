// State of the process: switches, tables, counters, and device facts, asked of the driver once per device. The C
// functions called by Python are in bindings.cpp.
#include "core/state.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/core.h"
#include "stock/torch_symbols.h"

namespace flashplug {

State& state() {
  static State* instance = new State();  // never destroyed: ops may run while the process ends
  return *instance;
}

namespace {
// Number of SMs that launches of a ring-attention step leave free. The step's own frame sets and restores the number,
// forward and backward, so no recomputation meets the number of a different thread.
thread_local int thread_margin = 0;
}  // namespace

int exchange_cta_margin(int ctas) { return std::exchange(thread_margin, ctas); }

int cta_margin() { return thread_margin; }

void Tables::add(FamilyRow row) {
  if (families.size() == kMaxFamilies)
    throw std::runtime_error("torch_flashplug: kMaxFamilies must be at least the length of FAMILIES.");
  row.backend = keep(row.backend), row.gpus = keep(row.gpus);
  families.push_back(row);
  groups.emplace_back();
}

void Tables::add(const FeatureRow& row) {
  const size_t index = features.size();
  if (index == kMaxFeatures)
    throw std::runtime_error("torch_flashplug: kMaxFeatures must be at least the length of FEATURES (features.py).");
  if (index < kNumFeatureReaders && std::strcmp(row.name, kFeatureReaders[index].name) != 0)
    throw std::runtime_error(std::string("torch_flashplug: FEATURES of features.py must begin with the features of ") +
                             "kFeatureReaders (src/core/call_facts.h), in order, but position " +
                             std::to_string(index) + " has '" + row.name + "' in place of '" +
                             kFeatureReaders[index].name + "'. Put a feature without a reader at the end of FEATURES.");
  FeatureRow& added = features.emplace_back(row);
  added.name = keep(row.name), added.description = keep(row.description);
  added.unsupported_reason = keep(row.unsupported_reason);
  if (row.recipe <= 0) return;
  const int64_t bit = int64_t{1} << index;
  recipes.resize(std::max(recipes.size(), static_cast<size_t>(row.recipe)));
  recipes[row.recipe - 1] = bit, recipe_features |= bit;
  if (row.quantizes_values != 0) value_features |= bit;
}

void Tables::add(KernelRow row) {
  if (features.size() < kNumFeatureReaders)
    throw std::runtime_error(std::string("torch_flashplug: kFeatureReaders (src/core/call_facts.h) has a reader of '") +
                             kFeatureReaders[features.size()].name +
                             "', but FEATURES of features.py has no such "
                             "feature. Remove the reader, or add the feature.");
  row.name = keep(row.name);
  Group& group = groups.at(row.family);
  group.rows[row.kind][static_cast<int>(row.dtype[0])].push_back(static_cast<int>(kernels.size()));
  group.features = std::max<int64_t>(group.features, 0) | row.takes;
  if (const Features set{row.takes, row.always}; std::ranges::find(group.sets, set) == group.sets.end())
    group.sets.push_back(set);
  group.dtypes.set(index_of(row.dtype));
  kernels.push_back(row);
}

bool Tables::has_kernel_with_all(int family, int64_t needs) const {
  const std::vector<Features>& sets = groups[family].sets;
  return sets.empty() || std::ranges::any_of(sets, [needs](const Features& set) { return set.fit(needs); });
}

void Tables::add(const ArgumentRow& row) {
  Signature& signature = signatures[row.kind];
  if (signature.count == kMaxArguments)
    throw std::runtime_error(
        "torch_flashplug: kMaxArguments must be at least the number of arguments of each kind of kernel.");
  if (row.rank > kMaxDims)
    throw std::runtime_error(
        std::string(
            "torch_flashplug: an argument of a kernel must have at most kMaxDims dims, but this argument has more: ") +
        row.name);
  const auto is_named = [&row](const char* name) { return std::strcmp(name, row.name) == 0; };
  if (const auto name = std::ranges::find_if(kKernelArgNames, is_named); name != std::end(kKernelArgNames)) {
    const KernelArg arg(static_cast<int>(name - kKernelArgNames));
    signature.parameters[arg.number()] = Parameter{row.features, signature.count++, row.rank, row.dtype};
    if (row.features == 0)
      ++signature.always;
    else
      signature.brought.push_back(row.features);
    return;
  }
  int fact = -1, number = 0;
  CallFacts any;
  visit_facts(any, [&](const char* name, const auto&) {
    if (is_named(name)) fact = number;
    ++number;
  });
  if (fact < 0 || row.rank != 0)
    throw std::runtime_error(std::string("torch_flashplug: no call has an argument named ") + row.name);
  signature.facts.push_back(FactParameter{row.features, signature.count++, fact, row.dtype});
}

Tables& tables() { return state().tables; }
bool enabled() { return state().enabled.load(std::memory_order_relaxed); }
CpuStub cpu_stub() { return state().cpu_stub.load(std::memory_order_relaxed); }
Backend process_backend() { return static_cast<Backend>(state().process_backend.load(std::memory_order_relaxed)); }

Mode effective_mode() {
  const Backend everywhere = process_backend();
  const Mode thread_mode{current_thread_mode()};
  const Mode mode = everywhere != Backend::kAuto ? Mode::preferring(everywhere) : thread_mode;
  const int requested = thread_mode.precision();
  const int permitted = state().process_precision.load(std::memory_order_relaxed);
  if (requested == 0) return mode.with_precision(permitted == 0 ? 0 : permitted | kPermitted);
  return mode.with_precision(requested == kInputPrecision ? 0 : requested);
}

Mode mode_of_op(int64_t baked) {
  if (Mode{baked}.family() >= tables().num_families())
    throw std::runtime_error("torch_flashplug: mode=" + std::to_string(baked) +
                             " asks for no backend of torch_flashplug/registry/architectures.py.");
  const Mode current = effective_mode(), recorded{baked & kModeMask};
  const bool uses_current = process_backend() != Backend::kAuto || recorded.with_precision(0).word == 0;
  // Only the tracer knows whether gradients are wanted.
  const int precision = recorded.precision() == kPrecisionAtRun ? current.precision() : recorded.precision();
  return (uses_current ? current : recorded).with_precision(precision == kInputPrecision ? 0 : precision);
}

void set_process_precision(int precision) { state().process_precision.store(precision); }

DeviceFacts device_facts(int device_index) {
  State& s = state();
  if (s.facts_overridden.load(std::memory_order_acquire)) return s.facts_override;
  if (device_index < 0 || device_index >= kMaxDevices) return {};
  State::CachedFacts& cached = s.facts[device_index];
  if (!cached.ready.load(std::memory_order_acquire)) {
    std::lock_guard<std::mutex> lock(s.facts_mutex);
    if (!cached.ready.load(std::memory_order_relaxed)) {
      cached.facts = query_device(device_index);
      // A failed query (cc 0) is repeated by the next call.
      if (cached.facts.cc != 0) cached.ready.store(true, std::memory_order_release);
      return cached.facts;
    }
  }
  return cached.facts;
}

void count(Path path) { state().counters[static_cast<int>(path)].fetch_add(1, std::memory_order_relaxed); }

bool plans_are_logged() {
  State& s = state();
  return s.log_plans.load(std::memory_order_relaxed) && s.log_callback.load(std::memory_order_relaxed) != nullptr;
}

void log_plan(const std::string& text) {
  State& s = state();
  {
    std::lock_guard<std::mutex> lock(s.log_mutex);
    if (s.logged_plans.size() >= kMaxLoggedPlans) s.logged_plans.clear();
    if (!s.logged_plans.insert(text).second) return;
  }
  if (const LogCallback callback = s.log_callback.load(std::memory_order_acquire)) callback(kLogDebug, text.c_str());
}

void log_warning(const std::string& text) {
  LogCallback callback = state().log_callback.load(std::memory_order_acquire);
  if (callback != nullptr) callback(kLogWarning, text.c_str());
}

TraceCallback trace_callback() { return state().trace_callback.load(std::memory_order_acquire); }

void set_last_error(const std::string& text) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.error_mutex);
  s.last_error = text;
}

}  // namespace flashplug
