// What state.cpp owns; only state.cpp and bindings.cpp (the C functions for Python) look inside.
#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <unordered_set>

#include "core/flashplug.h"

namespace flashplug {

constexpr size_t kMostTold = 4096;  // log lines that are not said again
// Levels are those of Python's logging.
constexpr int kLogDebug = 10;
constexpr int kLogWarning = 30;
using LogCallback = void (*)(int level, const char* text);

struct State {
  std::atomic<bool> enabled{false};  // until enable(), which TORCH_FLASHPLUG=0 leaves out
  std::atomic<Standin> standin{Standin::kOff};
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
  std::unordered_set<std::string> told;  // of the log of plans
  std::mutex told_mutex;

  std::mutex error_mutex;
  std::string last_error;
};

State& state();
// block_mode.cpp: sets this thread's mode word; returns a token that restores the one before. A word that is no token
// belongs to a block that is entered now.
int64_t exchange_thread_mode(int64_t word);
// The mode word of this thread's innermost block; in a recomputation that of its forward.
int64_t current_thread_mode();
// Up-call: runs a small backward that calls learn_node() while its node, of that number, is evaluated.
using LearnCallback = void (*)();
void set_learn_callback(LearnCallback callback);
bool learn_node(uint64_t sequence);
int exchange_cta_margin(int ctas);

}  // namespace flashplug
