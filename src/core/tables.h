// The tables of torch_flashplug/registry/kernel_table.py, dispatch_table.py and stock_bugs.py as C++ structs. Python
// pushes the rows once at import. table_structs.py mirrors each struct, and the size of each row is checked.
#pragma once

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "core/call_facts.h"

namespace flashplug {

// A family: kernels written for a single architecture, and the name of their backend (architectures.py). Auto mode asks
// the families in table order.
struct FamilyRow {
  const char* backend;
  const char* gpus;            // GPUs that run the kernels, in words
  int32_t arch;                // compute capability of the kernels: 90 is 9.0
  int32_t runs_on_later_gpus;  // nonzero: every later GPU runs them, too; 0: only the exact capability
  int32_t measured_cc;         // compute capability of the GPUs of the measured rows; 0: none
};
inline bool runs_on(const FamilyRow& family, int cc) {
  return family.runs_on_later_gpus != 0 ? cc >= family.arch : cc == family.arch;
}
inline bool is_measured(const FamilyRow& family, int cc) { return family.measured_cc == cc; }
constexpr int kMaxFamilies = 4;

enum Kind : int32_t { kFwd, kBwd, kDeterministicBwd, kSplitBwd, kDecode, kDBias, kTileBwd };  // KINDS of kernel_spec.py
constexpr int kNumKinds = 7;
constexpr const char* kKindNames[kNumKinds] = {"fwd", "bwd", "detbwd", "partbwd", "decode", "dbias", "tilebwd"};

// A dtype (dtypes.py).
struct DTypeRow {
  const char* name;  // torch's name
  int64_t bytes;
  int32_t dlpack;  // DLDataTypeCode
};

// Features of a kernel.
struct Features {
  int64_t takes;   // bits of the kernel's features
  int64_t always;  // subset of `takes`: features applied to every call
  bool fit(int64_t needs) const { return (needs & ~takes) == 0 && (always & ~needs) == 0; }
  bool operator==(const Features&) const = default;
};

// A kernel, with limits of the calls that fit.
struct KernelRow {
  const char* name;
  int64_t d_max, dv_max;
  int64_t takes;   // bits of the kernel's features
  int64_t always;  // subset of `takes`: features applied to every call
  Kind kind;
  int32_t family;                 // index of a row of `families`
  int32_t element;                // element type: index in KERNEL_DTYPES of dtypes.py
  DType dtype[kNumOperands + 1];  // of query, key, value and output
  int32_t tile_m, tile_n, stages;
  int32_t cost;          // ns for a single KV block of a single tile on one SM
  int32_t elementwise;   // reads any addresses and strides, and runs only calls with a need for element-wise access
  int32_t smem_bytes;    // of a CTA
  int32_t sector_bytes;  // L2 sector size for rows fetched by TMA in boxes; 1: no boxes
  int32_t rows_sector_aligned;   // only for calls whose rows begin at a sector
  int32_t group_rows;            // rows of a tile for each group of threads
  int32_t max_cluster;           // maximal number of CTAs of a cluster for sums in shared memory
  int32_t peers_at_once;         // in a cluster: number of peer results read at the same time
  int32_t counters;              // counters for each block of rows of a backward's workspace; 0: no workspace
  int32_t workspace_block_rows;  // query rows of a backward's workspace are rounded up to a multiple of this number
  int32_t shares_heads;          // tiles of a backward may share the query heads of a KV head
  int32_t dkdv_alone;            // split backward: faster than the fused kernel where dQ is not wanted
  int32_t ctas_per_sm;           // decode: number of CTAs of an SM that read faster than a single CTA
  int32_t column_tiles;          // tiles of the same rows; each has a part of the columns of V and O
  double last_tile;              // smallest cost of a head's last tile, as a fraction of a full tile's time
};

// How the selected kernel reads the operands (OPERAND_CLASSES of dispatch_table.py): by vectors, with equal or
// different head dims; or element by element, for the reason in the name.
enum OperandClass : int32_t {
  kSquareHeadDims = 1,
  kMixedHeadDims = 2,
  kOddHeadDims = 4,
  kUnaligned = 8,
  kStridedLastDim = 16
};
constexpr const char* kOperandClassNames[] = {"square", "mixed", "odd_dims", "unaligned", "strided"};

struct ChoiceRow {
  const char* description;     // class of calls in words
  const char* measured;        // date, machine, suite
  double ratio;                // stock default time / plugin time
  double ratio_without_cudnn;  // stock time with cuDNN switched off / plugin time
  int64_t features;            // the exact features of the calls
  int64_t elements;            // bit set of the element types of the measured kernels
  int64_t d_min, d_max, min_sq, max_sq, min_sk, max_sk, min_tiles, min_packed, max_packed;
  int32_t kind, family, grad;
  int32_t operands;      // a sum of `OperandClass`
  int32_t tile_m;        // only calls whose kernel has `tile_m` query rows; 0: any
  int32_t keys_of_tile;  // tiles are counted in blocks of so many keys; 0: the forward's tiles
  int32_t serve, serve_without_cudnn;
};

// Calls on which stock is known to crash, raise or return wrong results. Auto mode serves such calls regardless of
// speed. A row holds for a call if all facts of the row are true.
struct StockBugRow {
  const char* stock;     // behavior of stock
  const char* evidence;  // date, machine, kind of observation
  int64_t facts;         // a sum of `CallFact`
  int64_t features;      // features covered by the evidence; the row does not hold for calls with further needs
};
enum CallFact : int64_t {  // FACTS of stock_bugs.py
  kUnalignedBase = 1,      // of any operand; so is `kUnalignedUnitDim`
  kUnalignedUnitDim = 2,
  kBroadcastQuery = 4,
  kMixedDims = 8,         // D != Dv
  kHeadDimsAligned = 16,  // D and Dv fill whole 16-byte units
  kOneRow = 32,           // Sq == 1
  kOneKey = 64,           // Sk == 1
  kUnusualScale = 128,
  kLastDimContiguous = 256,  // the last dims are contiguous; otherwise stock uses math
  kMasked = 512,
  kBiased = 1024,
  kWideBiased = 2048,
  kAllDropped = 4096,
  kBeyondGrid = 8192,  // more than 65535 batches or query heads
  kGradients = 16384,
  kHalfKeyBlock = 32768,  // Sk is 64 more than a multiple of 128
};

constexpr const char* kCallFactNames[] = {"unaligned_base",
                                          "unaligned_unit_dim",
                                          "broadcast_query",
                                          "mixed_dims",
                                          "head_dims_aligned",
                                          "one_row",
                                          "one_key",
                                          "unusual_scale",
                                          "last_dim_contiguous",
                                          "mask",
                                          "bias",
                                          "bias32",
                                          "all_dropped",
                                          "beyond_grid",
                                          "gradients",
                                          "half_key_block"};

// Kernel that torch's varlen_attn would run. `VarlenRow` says whether auto mode takes such a call (VARLEN_ROWS of
// dispatch_table.py).
enum VarlenKernel : int32_t { kVarlenFlash, kVarlenCudnn };
constexpr const char* kVarlenKernelNames[] = {"flash", "cudnn"};
constexpr const char* kVarlenKernelTexts[] = {"flash attention", "cuDNN"};
enum VarlenFact : int64_t {  // VARLEN_FACTS of dispatch_table.py
  kMisaligned = 1,
  kUnusualVarlenScale = 2,
  kPagedDecode = 4,
  kPagedRows = 8,
  kSplitHint = 16,
};
constexpr const char* kVarlenFactNames[] = {"misaligned", "unusual_scale", "paged_decode", "paged_rows", "split_hint"};
// A row holds for a call with such a fact only if the row names the fact.
constexpr int64_t kVarlenForms = kPagedDecode | kPagedRows | kSplitHint;
struct VarlenRow {
  const char* measured;  // date, machine, suite; for a fault the evidence
  const char* wrong;     // wrong behavior of stock; empty: stock is right, and the ratio decides
  int64_t facts;         // bits of facts; all must hold, and no further fact of `kVarlenForms`
  int32_t stock;         // kernel chosen by torch
  int32_t cc;            // compute capability of the GPU
  int32_t serve;
};

// A feature, in bit order (features.py).
struct FeatureRow {
  const char* name;
  const char* description;         // description of a call with the feature
  const char* unsupported_reason;  // why kernels cannot run the call; {fact} stands for a fact of the call
  int32_t recipe;                  // precision of a mode that requests the feature (quant_recipes.py); 0: none
  int32_t quantizes_values;        // the recipe has 8-bit values, too
};
constexpr size_t kMaxFeatures = 63;  // bits of a sum of features

// Arguments of kernels beside facts of the call (`visit_facts()`), by name. kernel_args.py describes each argument and
// lists the arguments of each kind of kernel.
constexpr const char* kKernelArgNames[] = {"q",
                                           "k",
                                           "v",
                                           "o",
                                           "do",
                                           "lse",
                                           "dq",
                                           "dk",
                                           "dv",
                                           "row_stats",
                                           "dq_workspace",
                                           "partials",
                                           "scale_log2",
                                           "scale",
                                           "counter",
                                           "num_ctas",
                                           "splits",
                                           "cluster",
                                           "needs_grad",
                                           "mask",
                                           "mask_metadata",
                                           "bias",
                                           "bias32",
                                           "seed",
                                           "dbias",
                                           "dbias32",
                                           "quant_workspace",
                                           "quantized_kv",
                                           "k_samples",
                                           "quantizes_kv",
                                           "k_scale",
                                           "v_scale",
                                           "k_is_rotated",
                                           "ranges",
                                           "sinks",
                                           "dlse",
                                           "cu_seqlens_q",
                                           "cu_seqlens_k",
                                           "seqused_k",
                                           "tile_lists",
                                           "block_table",
                                           "even_splits"};
constexpr int kNumKernelArgs = std::size(kKernelArgNames);
// Index of a kernel argument. An unknown name does not compile.
class KernelArg {
 public:
  consteval KernelArg(const char* name) {  // NOLINT(google-explicit-constructor): calls say the name
    while (std::string_view(kKernelArgNames[number_]) != name) ++number_;
  }
  constexpr explicit KernelArg(int number) : number_(number) {}
  constexpr int number() const { return number_; }

 private:
  int number_ = 0;
};
enum class ArgumentDtype : int32_t {
  kQuery,
  kKey,
  kValue,
  kOutput,
  kFp32,
  kInt32,
  kInt64,
  kBool
};  // DTYPES of kernel_args.py
constexpr const char* kArgumentDtypeNames[] = {"query", "key", "value", "output", "fp32", "int32", "int64", "bool"};
struct ArgumentRow {
  const char* name;  // a name of kKernelArgNames, or of a fact
  // Features that bring the argument. Kernels without the features get None. 0: all kernels take the argument.
  int64_t features;
  Kind kind;     // kind of kernel; the order of the rows is the order of the arguments
  int32_t rank;  // 0: a number
  ArgumentDtype dtype;
};
inline bool takes_argument(const KernelRow& kernel, int64_t features) {
  return features == 0 || (kernel.takes & features) != 0;
}
struct Parameter {
  int64_t features = 0;   // as in `ArgumentRow`
  int32_t position = -1;  // position among the arguments; -1: not taken
  int32_t rank = 0;
  ArgumentDtype dtype = ArgumentDtype::kQuery;
};
struct FactParameter {
  int64_t features;
  int32_t position, fact;
  ArgumentDtype dtype;
};
constexpr int kMaxArguments = 32;
constexpr int kMaxDims = 4;  // of a tensor
// The arguments of a kind of kernels.
struct Signature {
  int32_t count = 0;
  Parameter parameters[kNumKernelArgs];
  std::vector<FactParameter> facts;
  int32_t always = 0;            // number of named arguments that every kernel of the kind takes
  std::vector<int64_t> brought;  // features of each further argument
  const Parameter& parameter(KernelArg arg) const { return parameters[arg.number()]; }
};

constexpr int kMaxInCluster = 8;

// Cost model: measured properties of the machine and of the kernels, and limits of decode calls (COST_MODEL of
// dispatch_table.py).
struct CostModelRow {
  int64_t max_decode_rows;  // maximal Sq * G of a decode call
  int64_t max_packed_rows;  // maximal Sq * G of a call with packed rows, if the decode kernel is faster
  int64_t min_rows_saved;   // minimal saving of tiles of a backward that share query heads, in consecutive query rows
  int64_t rows_per_sum;     // the time of adding up the results of such a tile, in consecutive query rows
  int64_t max_cluster;      // maximal number of CTAs of a cluster with sums in shared memory
  int64_t min_equal_rows;   // minimal mean length of packed sequences for a dense kernel that needs equal lengths
  int64_t min_equal_rows_of_gradients;  // the same for a backward
  int64_t max_shared_rows;              // maximal Sq * G of a decode call with shared values
  int64_t min_shared_keys;              // minimal number of keys of such a call, unless a backend is forced
  int64_t min_paged_rows;               // minimal rows of packed queries whose pages a forward kernel reads in place
  int64_t max_balanced_sequences;       // maximal number of sequences of a decode with balanced splits; 0: none
  double packed_wave_ns;                // extra time of a call with packed rows, for every wave of CTAs
  double occupancy;                     // share of the SMs to be filled by tiles where keys cannot be split
  double cluster_ns;                    // waiting time inside a cluster
  double cluster_rate;                  // rate of a warpgroup's sums of peer results, bytes per ns
  double combine_ns;                    // cost of splits beyond a cluster: time of a second kernel
  double combine_rate;                  // rate of partial results through global memory, bytes per ns
  double read_efficiency;               // share of the memory rate reached by reading K and V
  double min_gain_of_sharing_ns;        // minimal time to be saved by several CTAs on an SM
  double unknown_rate;                  // assumed memory rate of a device with an unknown rate, bytes per ns
  double min_equal_ns;                  // minimal estimated time of the dense forward of such packed sequences
  double items_per_slot;  // balanced splits: splits of uneven lengths for each CTA that the SMs hold at once
  // Largest share of the SMs that clusters of so many CTAs may fill; 0: no limit.
  double cluster_share[kMaxInCluster + 1];
};

// Numbers that kernels and this core share: sizes of mask metadata (mask_layout.py, kernel_spec.py), the key order of
// 8-bit values (quant_recipes.py), and limits of splits (dispatch_table.py).
struct LayoutRow {
  int64_t sparse_block;          // query rows and keys of a block of the block-sparse lists
  int64_t sparse_block_m_192;    // query rows of a block of the second set of lists, for tiles of 192 rows
  int64_t bitmask_tile;          // query rows and keys of a tile of the bitmask
  int64_t bitmask_words;         // 32-bit words of a tile of the bitmask
  int64_t key_order;             // keys that are reordered together
  int64_t max_splits;            // limit of num_splits; a mode word has 8 bits for the number
  int64_t split_unit;            // fixed_split_size is a multiple, because a split must be a multiple of any tile_n
  int64_t max_head_dim;          // largest head dim of the kernels
  int64_t max_general_head_dim;  // the same, if the auto mode has forward kernels alone for larger head dims
  int64_t head_dim_step;         // head dims are multiples, because rows are read in units of 16 bytes
  int64_t workspace_alignment;   // bytes: alignment of each tensor in the workspace of quantized operands
  int64_t page_group_rows;       // kernels read pages in place whose rows are a multiple
  int64_t max_total_rows;        // limit of the rows and keys of all packed sequences together
};

// Return whether kernels have a head dim, possibly with padding: kernels of all kinds, or kernels of a forced backend.
inline bool has_head_dim(const LayoutRow& layout, int64_t dim, bool forced = false) {
  return dim % layout.head_dim_step == 0 && dim <= (forced ? layout.max_head_dim : layout.max_general_head_dim);
}

struct Tables {
  std::vector<FamilyRow> families;
  std::vector<KernelRow> kernels;
  std::vector<ChoiceRow> choices;
  std::vector<StockBugRow> stock_bugs;
  std::vector<VarlenRow> varlen;
  std::vector<FeatureRow> features;
  std::vector<int64_t> recipes;  // feature bit of each precision of a mode, from 1 on
  int64_t recipe_features = 0;   // feature bits of all recipes
  int64_t value_features = 0;    // feature bits of the recipes with 8-bit values
  Signature signatures[kNumKinds];
  CostModelRow cost_model = {};
  LayoutRow layout = {};
  uint64_t version = 1;  // changes with every change of the tables

  void add(FamilyRow row);  // throws if there are `kMaxFamilies` already
  // Throws if FEATURES of features.py does not begin with the features of `kFeatureReaders`.
  void add(const FeatureRow& row);
  void add(KernelRow row);           // throws if the features with a reader are not complete
  void add(const ArgumentRow& row);  // throws for an unknown argument
  // Return the indices of rows of `kernels`, in table order.
  const std::vector<int>& rows(Kind kind, int family, DType query) const {
    return groups[family].rows[kind][static_cast<int>(query)];
  }
  // Return the union of the features of a family's kernels. A family without kernels takes every feature and every
  // dtype, because the missing kernel is a separate reason. `supports_dtypes()` asks for the dtypes.
  int64_t features_of(int family) const { return groups[family].features; }
  // Return true if some kernel has all needed features and applies no more.
  bool has_kernel_with_all(int family, int64_t needs) const;
  bool supports_dtypes(int family, const DType (&dtype)[kNumOperands]) const {
    return groups[family].features < 0 || groups[family].dtypes[index_of(dtype)];
  }
  int num_families() const { return static_cast<int>(families.size()); }
  void add(const DTypeRow& row) { add_dtype({keep(row.name), row.bytes, row.dlpack}); }
  const char* keep(const char* text) { return texts.emplace_back(text).c_str(); }

 private:
  std::deque<std::string> texts;  // storage of the texts in rows
  struct Group {
    std::vector<int> rows[kNumKinds][kMaxDTypes];
    int64_t features = -1;
    std::vector<Features> sets;                                // distinct feature sets of the kernels
    std::bitset<kMaxDTypes * kMaxDTypes * kMaxDTypes> dtypes;  // dtypes of query, key and value of existing kernels
  };
  std::vector<Group> groups;  // an entry for each family
  // Return the index in `dtypes` of a combination of three dtypes.
  static size_t index_of(const DType* dtype) {
    size_t index = 0;
    for (int i = 0; i < kNumOperands; ++i) index = index * kMaxDTypes + static_cast<size_t>(dtype[i]);
    return index;
  }
};

// Return true if `ask` is true for a family. Families are asked in table order until the first true answer.
template <typename Ask>
bool any_family(const Tables& tables, Ask ask) {
  for (int family = 0; family < tables.num_families(); ++family) {
    if (ask(family)) return true;
  }
  return false;
}

}  // namespace flashplug
