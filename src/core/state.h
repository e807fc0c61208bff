// State of the process, owned by state.cpp, and the mode of a thread. Only state.cpp, block_mode.cpp and bindings.cpp
// (the C functions for Python) look inside.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_set>

#include "core/core.h"

namespace flashplug {

constexpr size_t kMaxLoggedPlans = 4096;  // number of remembered log lines that are not repeated
// Log levels of Python's logging.
constexpr int kLogDebug = 10;
constexpr int kLogWarning = 30;
using LogCallback = void (*)(int level, const char* text);

struct State {
  std::atomic<bool> enabled{false};  // set by enable(), which TORCH_FLASHPLUG=0 omits
  std::atomic<CpuStub> cpu_stub{CpuStub::kOff};
  std::atomic<int> process_backend{0};
  std::atomic<int> process_precision{0};
  Tables tables;  // written at import and by tests, before calls run
  std::atomic<int64_t> counters[kNumPaths] = {};

  struct CachedFacts {
    std::atomic<bool> ready{false};
    DeviceFacts facts;
  };
  CachedFacts facts[kMaxDevices];
  std::mutex facts_mutex;
  std::atomic<bool> facts_overridden{false};
  DeviceFacts facts_override;

  std::atomic<TraceCallback> trace_callback{nullptr};
  std::atomic<LogCallback> log_callback{nullptr};
  std::atomic<bool> log_plans{false};
  std::unordered_set<std::string> logged_plans;  // lines of the plan log
  std::mutex log_mutex;

  std::mutex error_mutex;
  std::string last_error;
};

State& state();
int exchange_cta_margin(int ctas);

// ---- block_mode.cpp: the mode of a thread ----

// Set the thread's mode word (block_mode.cpp). Returns a token that restores the previous mode. A word that is no token
// enters a new block.
int64_t exchange_thread_mode(int64_t word);
// Return the mode word of the thread's innermost block; during a recomputation, the mode word of the original forward.
int64_t current_thread_mode();
// Callback into Python: runs a small backward that calls `learn_node_layout()` during the evaluation of a node, with
// the node's number.
using LearnCallback = void (*)();
void set_learn_callback(LearnCallback callback);
bool learn_node_layout(uint64_t sequence);

}  // namespace flashplug
