// The tables of torch_flashplug/registry/kernel_table.py, dispatch_table.py and stock_bugs.py as they cross from Python
// (table_structs.py mirrors every struct here, and the size of each is checked), pushed once at import.
#pragma once

#include <bitset>
#include <cstdint>
#include <deque>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "core/call_facts.h"

namespace flashplug {

// Kernels that are written for one architecture, and the backend that asks for them (architectures.py). Their order is
// the one in which auto asks.
struct FamilyRow {
  const char* backend;
  const char* gpus;  // that run them, in words
  int32_t arch;      // their compute capability: 90 is 9.0
  int32_t later;     // every one since runs them; else that one alone
};
inline bool runs_on(const FamilyRow& family, int cc) {
  return family.later != 0 ? cc >= family.arch : cc == family.arch;
}
constexpr int kMostFamilies = 4;

enum Kind : int32_t { kFwd, kBwd, kDetBwd, kPartBwd, kDecode, kDBias, kTileBwd };  // KINDS of kernel_spec.py
constexpr int kNumKinds = 7;
constexpr const char* kKindNames[kNumKinds] = {"fwd", "bwd", "detbwd", "partbwd", "decode", "dbias", "tilebwd"};

// Of a kernel.
struct Features {
  int64_t takes;   // those that it has,
  int64_t always;  // and of them those that it applies to every call
  bool fit(int64_t needs) const { return (needs & ~takes) == 0 && (always & ~needs) == 0; }
  bool operator==(const Features&) const = default;
};

// One kernel, and the calls that it fits.
struct KernelRow {
  const char* name;
  int64_t d_max, dv_max;
  int64_t takes;   // features that it has,
  int64_t always;  // and of them those that it applies to every call
  Kind kind;
  int32_t family;                 // a row of `families`
  int32_t element;                // what it is made of: its place in ELEMENTS of dtypes.py
  DType dtype[kNumOperands + 1];  // of query, key, value and output
  int32_t tile_m, tile_n, stages;
  int32_t cost;           // ns of one KV block of one tile on one SM
  int32_t elementwise;    // takes any addresses and strides, and calls that need it alone
  int32_t smem_bytes;     // of a CTA
  int32_t sector_bytes;   // what L2 hands out at once, of rows that TMA fetches in boxes; 1: no boxes
  int32_t whole_sectors;  // only for calls whose rows begin with a sector
  int32_t group_rows;     // of a tile, which are worked on together
  int32_t max_cluster;    // CTAs of one that can add up in shared memory
  int32_t peers_at_once;  // in a cluster: results of other CTAs that are read at the same time
  int32_t counters;       // of a block of rows of a backward's scratch; 0: it has no scratch
  int32_t scratch_rows;   // what rows of a backward's scratch are rounded up to
  int32_t shares_heads;   // tiles of a backward may share the query heads of a KV head
  int32_t dkdv_alone;     // in parts: faster than the fused kernel where dQ is not wanted
  int32_t at_once;        // decode: CTAs of an SM that read faster than one does
  double last_tile;       // what the least of a head's last tiles costs, of a full one's time
};

// What the operands of a class of calls look like to the kernel that takes them: by vectors, as far as head dims go; or
// by what no vector fits. OPERANDS of dispatch_table.py.
enum Operands : int32_t { kSquare = 1, kMixed = 2, kOddDims = 4, kUnaligned = 8, kColumns = 16 };
constexpr const char* kOperandsNames[] = {"square", "mixed", "odddims", "unaligned", "columns"};

struct ChoiceRow {
  const char* said;      // its class in words
  const char* measured;  // date, machine, suite
  double ratio;          // stock default time / our time
  int64_t features;      // exactly what its calls need
  int64_t elements;      // of the kernels that were measured: a bit for each
  int64_t d_min, d_max, min_sq, max_sq, min_sk, max_sk, min_tiles, min_packed, max_packed;
  int32_t kind, family, grad;
  int32_t operands;      // a sum of Operands
  int32_t tile_m;        // only calls whose kernel has this many query rows; 0: any
  int32_t keys_of_tile;  // tiles are blocks of so many keys; 0: those of the forward
  int32_t serve;
};

// Calls that stock is known to crash on, refuse or get wrong: auto takes them whatever the speed. A row holds for calls
// of which all its facts are true.
struct RescueRow {
  const char* stock;     // what stock would do
  const char* evidence;  // date, machine, how it was seen
  int64_t facts;         // a sum of CallFact
  int64_t features;      // calls that need others were not seen
};
enum CallFact : int64_t {  // FACTS of stock_bugs.py
  kOddBase = 1,            // of any operand, as the next
  kOddOnes = 2,
  kBroadcastQuery = 4,
  kMixedDims = 8,   // D != Dv
  kWholeDims = 16,  // both are multiples of 8
  kOneRow = 32,     // Sq == 1
  kOneKey = 64,     // Sk == 1
  kUnusualScale = 128,
  kRows = 256,  // the last dims are contiguous; else stock takes math
  kMasked = 512,
  kBiased = 1024,
  kWideBiased = 2048,
  kAllDropped = 4096,
  kBeyondGrid = 8192,  // more than 65535 batches or query heads
  kGradients = 16384,
  kHalfKeyBlock = 32768,  // Sk is 64 more than a multiple of 128
};

constexpr const char* kCallFactNames[] = {"odd_base",      "odd_ones", "broadcast_query", "mixed_dims",  "whole_dims",
                                          "one_row",       "one_key",  "unusual_scale",   "rows",        "mask",
                                          "bias",          "bias32",   "all_dropped",     "beyond_grid", "gradients",
                                          "half_key_block"};

// What a kernel of torch's varlen_attn would do, and whether auto takes such a call (VARLEN_ROWS of dispatch_table.py).
enum VarlenKernel : int32_t { kVarlenFlash, kVarlenCudnn };
constexpr const char* kVarlenKernelNames[] = {"flash", "cudnn"};
constexpr const char* kVarlenKernelSaid[] = {"flash attention", "cuDNN"};
enum VarlenFact : int64_t { kMisaligned = 1, kUnusualVarlenScale = 2 };  // VARLEN_FACTS there
constexpr const char* kVarlenFactBits[] = {"misaligned", "unusual_scale"};
struct VarlenRow {
  const char* measured;  // date, machine, suite; of a fault the evidence
  const char* wrong;     // what stock would do that is wrong; empty: it is right, and the ratio counts
  int64_t facts;         // that all have to hold
  int32_t stock;         // the kernel that torch would run
  int32_t cc;            // compute capability of the GPU
  int32_t serve;
};

// Words for a feature, in the order of their bits (features.py).
struct FeatureRow {
  const char* said;   // of a call that needs it
  const char* words;  // why kernels cannot run it, with {fact} for a fact of the call
};

// What a kernel can be given beside facts of its call (visit_facts), by name; what each is, and which of them a kind of
// kernels takes: kernel_args.py.
constexpr const char* kSlotNames[] = {
    "q",       "k",        "v",          "o",     "do",      "lse",      "dq",       "dk",      "dv",      "rows",
    "scratch", "partials", "scale_log2", "scale", "counter", "num_ctas", "splits",   "cluster", "wanted",  "mask",
    "digest",  "bias",     "bias32",     "seed",  "dbias",   "dbias32",  "scratch8", "k_scale", "v_scale", "rotated",
    "ranges",  "sinks",    "dlse",       "cu_q",  "cu_k",    "used_k",   "lists",    "pages"};
constexpr int kNumSlots = std::size(kSlotNames);
// One of them. A name that is not there does not compile.
class Slot {
 public:
  consteval Slot(const char* name) {  // NOLINT(google-explicit-constructor): calls say the name
    while (std::string_view(kSlotNames[number_]) != name) ++number_;
  }
  constexpr explicit Slot(int number) : number_(number) {}
  constexpr int number() const { return number_; }

 private:
  int number_ = 0;
};
enum class NumberType : int32_t {
  kQuery,
  kKey,
  kValue,
  kOutput,
  kFp32,
  kInt32,
  kInt64,
  kBool
};  // DTYPES of kernel_args.py
constexpr const char* kNumberTypeNames[] = {"query", "key", "value", "output", "fp32", "int32", "int64", "bool"};
struct ArgumentRow {
  const char* name;  // one of kSlotNames, or a fact
  int64_t features;  // that bring it: None to kernels that have none of them; 0: all take it
  Kind kind;         // of the kernels, which take arguments in the order of their rows
  int32_t rank;      // 0: a number
  NumberType type;
};
inline bool takes_argument(const KernelRow& kernel, int64_t features) {
  return features == 0 || (kernel.takes & features) != 0;
}
struct Parameter {
  int64_t features = 0;  // as of its row
  int32_t place = -1;    // among the arguments; -1: not taken
  int32_t rank = 0;
  NumberType type = NumberType::kQuery;
};
struct FactParameter {
  int64_t features;
  int32_t place, fact;
  NumberType type;
};
constexpr int kMostArguments = 32;
constexpr int kMostDims = 4;  // of a tensor
// What a kind of kernels takes.
struct Signature {
  int32_t count = 0;
  Parameter parameters[kNumSlots];
  std::vector<FactParameter> facts;
  int32_t always = 0;            // so many slots are every kernel's
  std::vector<int64_t> brought;  // the others' features
  const Parameter& of(Slot slot) const { return parameters[slot.number()]; }
};

constexpr int kMostInCluster = 8;

// What was measured of the machine, and asked of calls of few query rows (GATE of dispatch_table.py).
struct GateRow {
  int64_t measured_cc;  // the GPUs that choice rows hold for
  int64_t rows;         // Sq * G up to here is decode
  int64_t wide_rows;    // and up to here where that is the faster kernel,
  int64_t rows_spared;  // of queries, in a row: tiles of a backward that share query heads must spare as many
  int64_t cluster;      // splits up to here can be CTAs of a cluster, which add up in shared memory:
  double wide_ns;       // (a wide one takes that much longer for every wave of its CTAs)
  double occupancy;     // share of the SMs that tiles must fill where keys cannot be split
  double cluster_ns;    // they wait for each other,
  double cluster_rate;  // and a warpgroup adds up what it has of peers, bytes per ns
  double combine_ns;    // What more splits cost: a second kernel,
  double combine_rate;  // and partial results through memory, bytes per ns
  double read_share;    // of the memory's rate, which reading K and V comes to
  double shared_ns;     // what CTAs must save by sharing SMs
  double unknown_rate;  // of a device that does not tell its memory's, bytes per ns
  double cluster_share[kMostInCluster + 1];  // of the SMs, which clusters of so many CTAs may fill; 0: any number
};

struct Tables {
  std::vector<FamilyRow> families;
  std::vector<KernelRow> kernels;
  std::vector<ChoiceRow> choices;
  std::vector<RescueRow> rescues;
  std::vector<VarlenRow> varlen;
  std::vector<FeatureRow> features;
  Signature signatures[kNumKinds];
  GateRow gate = {};
  uint64_t version = 1;  // another one after every change

  void add(FamilyRow row);  // throws where there are kMostFamilies
  void add(KernelRow row);
  void add(const ArgumentRow& row);  // throws where there is no such slot
  // Rows of `kernels`, in their order.
  const std::vector<int>& of(Kind kind, int family, DType query) const {
    return groups[family].of[kind][static_cast<int>(query)];
  }
  // What the kernels of a family take, each some of it, and what they are made of; everything where there are none,
  // which is a reason of its own.
  int64_t takes(int family) const { return groups[family].taken; }
  bool takes_together(int family, int64_t needs) const;  // whether some kernel takes all of it, and asks for no more
  bool made_of(int family, const DType (&dtype)[kNumOperands]) const {
    return groups[family].taken < 0 || groups[family].made[place_of(dtype)];
  }
  int num_families() const { return static_cast<int>(families.size()); }
  const char* keep(const char* text) { return texts.emplace_back(text).c_str(); }

 private:
  std::deque<std::string> texts;  // what the rows' pointers point to
  struct Group {
    std::vector<int> of[kNumKinds][kNumDTypes];
    int64_t taken = -1;
    std::vector<Features> sets;                              // that kernels have, each once
    std::bitset<kNumDTypes * kNumDTypes * kNumDTypes> made;  // what their query, key and value are made of
  };
  std::vector<Group> groups;  // one for each family
  // Every three dtypes have one in `made`.
  static size_t place_of(const DType* dtype) {
    size_t place = 0;
    for (int i = 0; i < kNumOperands; ++i) place = place * kNumDTypes + static_cast<size_t>(dtype[i]);
    return place;
  }
};

// Whether the answer is yes for a family; asks in their order, until it is.
template <typename Ask>
bool any_family(const Tables& tables, Ask ask) {
  for (int family = 0; family < tables.num_families(); ++family) {
    if (ask(family)) return true;
  }
  return false;
}

}  // namespace flashplug
