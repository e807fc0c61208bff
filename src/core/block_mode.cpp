// The mode of the thread's sdpa_backend block, and the mode of a recomputation.
//
// torch.utils.checkpoint repeats a forward while autograd evaluates a node. The repeat runs on the calling thread (CPU)
// or on the device's own thread (CUDA). The repeated forward must use the mode of the original forward, because a
// different backend draws different dropout bits or saves different tensors. The node tells the original mode: every
// node has a number, in order of creation on its thread, and the number of the thread. A block records the numbers at
// its begin and end, so the node's number identifies the block of its creation. A block entered during the
// recomputation itself has priority.
//
// libtorch has no stable access to the evaluated node. The first recomputation of a process asks Python to run a small
// backward with a known node. `learn_node_layout()` is called inside and finds the positions of the two numbers
// (torch 2.11 hands out a std::shared_ptr<Node>, 2.13 a c10::intrusive_ptr). If the search fails, the thread's own
// block counts.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/core.h"
#include "core/state.h"
#include "stock/torch_symbols.h"

namespace flashplug {

namespace {

constexpr int64_t kNoTask = -1;
constexpr int kTaskShift = 24;  // position in a token: above the mode word
constexpr int64_t kIsToken = int64_t{1} << 62;
constexpr int64_t kTaskMask = (int64_t{1} << 32) - 1;
constexpr size_t kMaxChanges = 1 << 20;  // limit of a thread; at the limit the older half is forgotten

// The innermost block of the thread, and the graph task (a run of backward()) in which the block was entered.
struct Block {
  int64_t word = 0;
  int64_t task = kNoTask;
};
thread_local Block block;
thread_local uint64_t noted_until = 0;     // the history has the modes of the thread's nodes below this number
thread_local bool is_recomputing = false;  // the thread's last mode in the history is a recomputation's

// Start of a mode: from this node number on, a thread's nodes are made in the mode.
struct Change {
  uint64_t sequence;
  int64_t word;
};

struct History {
  std::mutex mutex;
  std::unordered_map<uint64_t, std::vector<Change>> changes;  // by thread
};
History& history() {
  static auto* instance = new History();  // never destroyed: threads may outlive the process's statics
  return *instance;
}
std::atomic<bool> any_block{false};

// Record the mode of a thread for nodes from number `sequence` on.
void record_mode_change(uint64_t thread, uint64_t sequence, int64_t word) {
  History& histories = history();
  std::lock_guard<std::mutex> lock(histories.mutex);
  std::vector<Change>& changes = histories.changes[thread];
  while (!changes.empty() && changes.back().sequence >= sequence) changes.pop_back();  // no node was made in between
  if (word == (changes.empty() ? 0 : changes.back().word)) return;
  if (changes.size() == kMaxChanges) changes.erase(changes.begin(), changes.begin() + kMaxChanges / 2);
  changes.push_back({sequence, word});
}

// Record the mode of nodes made by the thread since the last record, and of future nodes.
void record_new_nodes(int64_t word) {
  record_mode_change(torch_symbols().record_thread(), noted_until, word);
  noted_until = torch_symbols().sequence_number();
}

// Return the mode in which a node was made.
int64_t mode_of_node(uint64_t thread, uint64_t sequence) {
  History& histories = history();
  std::lock_guard<std::mutex> lock(histories.mutex);
  const auto thread_changes = histories.changes.find(thread);
  if (thread_changes == histories.changes.end()) return 0;
  const auto after = std::ranges::upper_bound(thread_changes->second, sequence, {}, &Change::sequence);
  return after == thread_changes->second.begin() ? 0 : std::prev(after)->word;
}

// ---- the evaluated node ----

struct NodeLayout {
  std::atomic<int> sequence_word{-1};  // position of the node's number, in words of 8 bytes; -1: unknown
  bool is_shared = false;              // std::shared_ptr, else c10::intrusive_ptr
};
NodeLayout layout;
std::atomic<LearnCallback> learn_callback{nullptr};
constexpr int kThreadAfter = 3;  // words from the node's number to the thread's number (a depth and a flag lie between)
constexpr int kWordsLookedAt = 8;
constexpr uint64_t kUntouched = 0x5f5f5f5f5f5f5f5f;

// Memory to which libtorch writes a returned pointer to the evaluated node.
struct NodeReference {
  uint64_t* node = nullptr;
  uint64_t second = kUntouched;  // control block of a std::shared_ptr
};

NodeReference evaluated_node() {
  NodeReference reference;
  torch_symbols().evaluated_node(&reference);
  return reference;
}

// Drop a reference. The engine holds the node as well, so the count never reaches zero here.
void drop_reference(const NodeReference& reference, bool is_shared) {
  if (reference.node == nullptr) return;
  if (!is_shared) {
    std::atomic_ref<uint64_t>(reference.node[1]).fetch_sub(1);
    return;
  }
  std::shared_ptr<void> owner;
  static_assert(sizeof owner == sizeof reference);
  std::memcpy(static_cast<void*>(&owner), &reference, sizeof reference);
}

struct NodeNumbers {
  uint64_t thread, sequence;
};
// Return the numbers of the node under evaluation; empty if there is no node, or if the layout is unknown.
std::optional<NodeNumbers> evaluated_numbers() {
  static std::once_flag once;
  int sequence_word = layout.sequence_word.load(std::memory_order_acquire);
  if (sequence_word < 0) {
    const LearnCallback learn = learn_callback.load(std::memory_order_acquire);
    if (learn != nullptr) std::call_once(once, learn);
    sequence_word = layout.sequence_word.load(std::memory_order_acquire);
  }
  if (sequence_word < 0) return std::nullopt;
  const NodeReference reference = evaluated_node();
  if (reference.node == nullptr) return std::nullopt;
  const NodeNumbers numbers{reference.node[sequence_word + kThreadAfter], reference.node[sequence_word]};
  drop_reference(reference, layout.is_shared);
  return numbers;
}

}  // namespace

void set_learn_callback(LearnCallback callback) { learn_callback.store(callback, std::memory_order_release); }

bool learn_node_layout(uint64_t sequence) {
  const TorchSymbols& torch = torch_symbols();
  if (!torch.can_read_nodes()) return false;
  const NodeReference reference = evaluated_node();
  if (reference.node == nullptr) return false;
  const bool is_shared = reference.second != kUntouched;
  if (!is_shared) {  // check that the count is at the word decremented by `drop_reference()`
    const uint64_t before = reference.node[1];
    const NodeReference again = evaluated_node();
    if (again.node != reference.node || reference.node[1] != before + 1) return false;
    drop_reference(again, false);
  }
  int sequence_word = -1;
  for (int word = 1; word < kWordsLookedAt; ++word) {
    if (reference.node[word] == sequence && reference.node[word + kThreadAfter] == torch.record_thread())
      sequence_word = word;
  }
  drop_reference(reference, is_shared);
  layout.is_shared = is_shared;
  layout.sequence_word.store(sequence_word, std::memory_order_release);
  return sequence_word >= 0;
}

int64_t exchange_thread_mode(int64_t word) {
  const TorchSymbols& torch = torch_symbols();
  const int64_t previous = kIsToken | (block.task & kTaskMask) << kTaskShift | block.word;
  if (!torch.can_read_nodes()) {
    block.word = word & kModeMask;
    return previous;
  }
  if ((word & kIsToken) != 0) {
    const int64_t task = word >> kTaskShift & kTaskMask;
    block = {word & kModeMask, task == kTaskMask ? kNoTask : task};
  } else {
    block = {word & kModeMask, torch.graph_task()};
  }
  any_block.store(true, std::memory_order_relaxed);
  noted_until = torch.sequence_number();
  record_new_nodes(current_thread_mode());
  return previous;
}

int64_t current_thread_mode() {
  if (!any_block.load(std::memory_order_relaxed)) return block.word;
  const int64_t task = torch_symbols().graph_task();
  if (task == kNoTask) {
    if (std::exchange(is_recomputing, false)) record_new_nodes(block.word);
    return block.word;
  }
  if (task == block.task) return block.word;
  const std::optional<NodeNumbers> node = evaluated_numbers();
  // Nodes without a number of their own accumulate gradients: no forward made them.
  if (!node.has_value() || node->sequence == std::numeric_limits<uint64_t>::max()) return block.word;
  const int64_t word = mode_of_node(node->thread, node->sequence);
  // A nested checkpoint inside the recomputation makes nodes on the current thread. The nodes have the same mode.
  record_new_nodes(word);
  is_recomputing = true;
  return word;
}

}  // namespace flashplug
