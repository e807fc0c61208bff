// C functions bound by torch_flashplug/dispatch/bindings.py with ctypes. No exception crosses the boundary, and Python
// objects only where a function says so.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "core/core.h"
#include "core/errors.h"
#include "core/memory_overlap.h"
#include "core/schemas.h"
#include "core/state.h"
#include "dispatch/dispatch.h"
#include "dispatch/varlen_decision.h"
#include "hooks/hooks.h"
#include "launch/launch.h"
#include "operands/operands.h"
#include "ops/ops.h"
#include "stock/stock.h"
#include "stock/torch_symbols.h"

using namespace flashplug;

#define FLASHPLUG_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// Run a body. Returns 0; or, after an exception, 1 with the text available from flashplug_last_error.
template <typename Body>
int catch_errors(Body body) {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    set_last_error(error.what());
    return 1;
  }
}

// Return the tables for a change. The new version invalidates the plans cached by threads.
Tables& begin_table_update() {
  Tables& t = tables();
  ++t.version;
  return t;
}

// Add a row, if Python's struct has the same size.
template <typename Row, typename Add>
int add_table_row(const Row& row, size_t size, Add add) {
  return catch_errors([&] {
    if (size != sizeof(Row))
      throw std::runtime_error(
          "torch_flashplug: _C.so and torch_flashplug/dispatch/table_structs.py must define the same rows, but differ. "
          "Build _C.so "
          "again.");
    add(begin_table_update(), row);
  });
}

// Copy a text, truncated to the capacity. Returns the number of bytes needed, with the final zero.
int copy_text(const std::string& text, char* out, int capacity) {
  if (capacity > 0) {
    const size_t n = text.size() < static_cast<size_t>(capacity - 1) ? text.size() : static_cast<size_t>(capacity - 1);
    std::memcpy(out, text.data(), n);
    out[n] = '\0';
  }
  return static_cast<int>(text.size()) + 1;
}

// Return the call described by facts, in the order of `visit_facts()`.
CallFacts call_facts_from_array(const double* facts) {
  CallFacts p;
  visit_facts(p, [&facts](const char*, auto& fact) { fact = static_cast<std::decay_t<decltype(fact)>>(*facts++); });
  p.needs |= required_features({.dropout_p = p.dropout_p});  // all other needs come from Python by name
  return p;
}

void copy_facts(CallFacts p, double* out) {
  visit_facts(p, [&out](const char*, const auto& fact) { *out++ = static_cast<double>(fact); });
}

// Return the default call: bf16 and packed, on a GPU. Sizes have no default and are negative.
CallFacts default_call_facts() {
  CallFacts p;
  p.B = p.Hq = p.Hkv = p.Sq = p.Sk = p.D = p.Dv = -1;
  std::fill_n(p.dtype, kNumOperands, DType::kFirst);
  p.on_cuda = true;
  return p;
}

TensorBytes tensor_bytes_from_array(const int64_t* x) { return {x[0], x[1], x[2], x[3], x[4], {x + 5, x + 5 + x[4]}}; }

struct Names {
  const char* list;
  const char* const* names;
  int count;
  template <int n>
  constexpr Names(const char* list, const char* const (&names)[n]) : list(list), names(names), count(n) {}
};
const Names kVocabulary[] = {{"backends", kBackendNames},
                             {"kinds", kKindNames},
                             {"operand classes", kOperandClassNames},
                             {"call facts", kCallFactNames},
                             {"argument dtypes", kArgumentDtypeNames},
                             {"schemas", kSchemas},
                             {"exits", kExitNames},
                             {"reasons", kWhyNames},
                             {"shape obstacles", kShapeObstacleNames},
                             {"mask obstacles", kMaskObstacleNames},
                             {"mask flags", kMaskFlagNames},
                             {"scales", kScaleNames},
                             {"paths", kPathNames},
                             {"device facts", kDeviceFactNames},
                             {"trace answers", kTraceAnswerNames},
                             {"compile answers", kCompileAnswerNames},
                             {"circumstances", kCircumstanceNames},
                             {"stock backends", kStockBackendNames},
                             {"varlen windows", kVarlenWindowNames},
                             {"varlen rules", kVarlenRuleNames},
                             {"varlen call members", kVarlenCallMembers},
                             {"varlen reasons", kVarlenReasonNames},
                             {"varlen kernels", kVarlenKernelNames},
                             {"varlen facts", kVarlenFactNames},
                             {"attention arguments", kAttentionArgumentNames},
                             {"plan fields", kPlanFieldNames}};

// Return the device facts, in the order of `kDeviceFactNames`.
DeviceFacts device_facts_from_array(const int64_t* f) {
  return DeviceFacts{static_cast<int>(f[0]), static_cast<int>(f[1]), static_cast<int>(f[2]), static_cast<int>(f[3]),
                     static_cast<int>(f[4])};
}

}  // namespace

FLASHPLUG_EXPORT int flashplug_install(int stub_index) { return install(stub_index); }
FLASHPLUG_EXPORT int flashplug_uninstall(int stub_index) { return uninstall(stub_index); }
FLASHPLUG_EXPORT int flashplug_installed(int stub_index) { return is_installed(stub_index); }
FLASHPLUG_EXPORT int flashplug_take_last_exit() { return take_last_exit(); }
FLASHPLUG_EXPORT int flashplug_register_ops(const char* dispatch_key, int own_ops) {
  return catch_errors([&] { register_ops(dispatch_key, own_ops != 0); });
}
FLASHPLUG_EXPORT void flashplug_unregister_ops() { unregister_ops(); }

FLASHPLUG_EXPORT int flashplug_enable_stock_workarounds(int backends) {
  return catch_errors([&] { enable_stock_workarounds(backends); });
}

FLASHPLUG_EXPORT int flashplug_register_varlen_ops(const char* dispatch_key) {
  return catch_errors([&] { register_varlen_ops(dispatch_key); });
}
FLASHPLUG_EXPORT void flashplug_unregister_varlen_ops() { unregister_varlen_ops(); }
FLASHPLUG_EXPORT int flashplug_set_varlen_schema(const char* op, const char* schema) {
  return catch_errors([&] { set_varlen_schema(op, schema); });
}
FLASHPLUG_EXPORT void flashplug_set_varlen_rule(int rule) { set_varlen_rule(rule); }
FLASHPLUG_EXPORT int flashplug_varlen_rule() { return varlen_rule(); }
// Write the decision about a varlen call as JSON. `facts` has the values of `kVarlenCallMembers`, in order.
FLASHPLUG_EXPORT int flashplug_varlen_text(const int64_t* facts, int cc, int64_t mode, char* out, int capacity) {
  VarlenCall call;
  std::memcpy(static_cast<void*>(&call), facts, sizeof call);  // all members are int64_t
  const VarlenDecision decision = decide_varlen(call, enabled(), Mode{mode}, cc, tables());
  return copy_text(varlen_json(call, decision, Mode{mode}, cc, tables()), out, capacity);
}
FLASHPLUG_EXPORT void flashplug_set_prepare_callback(PrepareCallback callback) { set_prepare_callback(callback); }

// Functions of direct_attention.cpp; the objects are Python's.
FLASHPLUG_EXPORT void flashplug_learn_inference_keys() { learn_inference_keys(); }
FLASHPLUG_EXPORT void* flashplug_direct_attention(void* tensor, void* parameter, void* plan_type, int64_t words,
                                                  void* tensor_impl, void* parameter_impl) {
  return direct_attention_function({tensor, parameter, words, tensor_impl, parameter_impl}, plan_type);
}
// Return whether a tensor may share memory with itself, and whether two tensors do. A tensor is described by the
// members of `TensorBytes`: four numbers, dims, sizes and strides.
FLASHPLUG_EXPORT int flashplug_may_meet_itself(const int64_t* x) { return may_meet_itself(tensor_bytes_from_array(x)); }
FLASHPLUG_EXPORT int flashplug_may_overlap(const int64_t* x, const int64_t* y) {
  return may_overlap(tensor_bytes_from_array(x), tensor_bytes_from_array(y));
}

FLASHPLUG_EXPORT void flashplug_hold_error(void* exception) { hold_python_error(exception); }

FLASHPLUG_EXPORT int flashplug_set_flash_schema(const char* schema) { return set_flash_schema(schema); }
FLASHPLUG_EXPORT int flashplug_register_flash_op(const char* dispatch_key) {
  return catch_errors([&] { register_flash_op(dispatch_key); });
}
FLASHPLUG_EXPORT void flashplug_unregister_flash_op() { unregister_flash_op(); }
FLASHPLUG_EXPORT int flashplug_register_efficient_op(const char* dispatch_key) {
  return catch_errors([&] { register_efficient_op(dispatch_key); });
}
FLASHPLUG_EXPORT void flashplug_unregister_efficient_op() { unregister_efficient_op(); }
FLASHPLUG_EXPORT void flashplug_enable_flash_op_decode(int on) { enable_flash_op_decode(on != 0); }

FLASHPLUG_EXPORT void flashplug_set_enabled(int on) { state().enabled.store(on != 0); }
FLASHPLUG_EXPORT int flashplug_enabled() { return enabled(); }
FLASHPLUG_EXPORT int64_t flashplug_set_mode(int64_t word) { return exchange_thread_mode(word); }
FLASHPLUG_EXPORT void flashplug_set_learn_callback(LearnCallback callback) { set_learn_callback(callback); }
FLASHPLUG_EXPORT int flashplug_learn_node(int64_t sequence) {
  return learn_node_layout(static_cast<uint64_t>(sequence));
}
FLASHPLUG_EXPORT int64_t flashplug_mode() { return current_thread_mode(); }
FLASHPLUG_EXPORT int flashplug_set_cta_margin(int ctas) { return exchange_cta_margin(std::max(ctas, 0)); }
FLASHPLUG_EXPORT int64_t flashplug_effective_mode() { return effective_mode().word; }
FLASHPLUG_EXPORT void flashplug_set_process_precision(int precision) { set_process_precision(precision); }
FLASHPLUG_EXPORT void flashplug_set_process_backend(int backend) { state().process_backend.store(backend); }
FLASHPLUG_EXPORT void flashplug_set_cpu_stub(int level) { state().cpu_stub.store(static_cast<CpuStub>(level)); }

// Write a name that Python also has. Each list has the order of the numbers or bits, and ends with an empty name. Used
// by tests.
FLASHPLUG_EXPORT int flashplug_name(const char* list, int number, char* out, int capacity) {
  for (const Names& names : kVocabulary) {
    if (std::strcmp(names.list, list) == 0 && number >= 0 && number < names.count)
      return copy_text(names.names[number], out, capacity);
  }
  return copy_text("", out, capacity);
}

// Write the name of a dtype, with the bytes of an element and the DLPack code. The last name stands for all dtypes
// without a row. The list ends with an empty name.
FLASHPLUG_EXPORT int flashplug_dtype(int number, int64_t* bytes, int64_t* dlpack, char* out, int capacity) {
  if (number < 0 || number > num_dtypes()) return copy_text("", out, capacity);
  const DTypeFacts& facts = facts_of(static_cast<DType>(number));
  *bytes = facts.bytes, *dlpack = facts.dlpack;
  return copy_text(facts.name, out, capacity);
}

FLASHPLUG_EXPORT void flashplug_device_facts(int device_index, int64_t* out) {
  const DeviceFacts facts = device_facts(device_index);
  out[0] = facts.cc, out[1] = facts.sm_count, out[2] = facts.smem_bytes, out[3] = facts.l2_bytes;
  out[4] = facts.memory_rate;
}
FLASHPLUG_EXPORT void flashplug_set_facts_override(const int64_t* facts) {  // null: restores the real facts
  State& s = state();
  if (facts != nullptr) s.facts_override = device_facts_from_array(facts);
  s.facts_overridden.store(facts != nullptr, std::memory_order_release);
}

// Table rows: the structs of src/core/tables.h, mirrored by table_structs.py with equal sizes. Texts are copied.
FLASHPLUG_EXPORT void flashplug_clear_rows() {
  Tables& t = begin_table_update();
  const uint64_t version = t.version;
  const LayoutRow layout = t.layout;  // stays: sizes are divided by these numbers
  clear_dtypes();                     // the names lie in the tables
  t = Tables{};
  t.version = version;
  t.layout = layout;
  forget_kernels();
}
FLASHPLUG_EXPORT int flashplug_add_family_row(const FamilyRow* row, size_t size) {
  return add_table_row(*row, size, [](Tables& t, const FamilyRow& family) { t.add(family); });
}
FLASHPLUG_EXPORT int flashplug_add_kernel_row(const KernelRow* row, size_t size) {
  return add_table_row(*row, size, [](Tables& t, const KernelRow& kernel) {
    t.add(kernel);
    reserve_kernel_entries(t.kernels.size());
  });
}
FLASHPLUG_EXPORT int flashplug_add_argument_row(const ArgumentRow* row, size_t size) {
  return add_table_row(*row, size, [](Tables& t, const ArgumentRow& argument) { t.add(argument); });
}
FLASHPLUG_EXPORT int flashplug_add_choice_row(const ChoiceRow* row, size_t size) {
  return add_table_row(*row, size, [](Tables& t, ChoiceRow choice) {
    choice.description = t.keep(choice.description), choice.measured = t.keep(choice.measured);
    t.choices.push_back(choice);
  });
}
FLASHPLUG_EXPORT int flashplug_add_stock_bug_row(const StockBugRow* row, size_t size) {
  return add_table_row(*row, size, [](Tables& t, const StockBugRow& bug) {
    t.stock_bugs.push_back(bug);
    t.stock_bugs.back().stock = t.keep(bug.stock);
    t.stock_bugs.back().evidence = t.keep(bug.evidence);
  });
}
FLASHPLUG_EXPORT int flashplug_add_varlen_row(const VarlenRow* row, size_t size) {
  return add_table_row(*row, size, [](Tables& t, VarlenRow varlen) {
    varlen.measured = t.keep(varlen.measured), varlen.wrong = t.keep(varlen.wrong);
    t.varlen.push_back(varlen);
  });
}
FLASHPLUG_EXPORT int64_t flashplug_mask_metadata_size(int64_t rows, int64_t Sq, int64_t Sk, int gradients) {
  return metadata_numbers(rows, Sq, Sk, gradients != 0);
}
FLASHPLUG_EXPORT int flashplug_add_feature_row(const FeatureRow* row, size_t size) {
  return add_table_row(*row, size, [](Tables& t, const FeatureRow& feature) { t.add(feature); });
}
FLASHPLUG_EXPORT int flashplug_add_dtype_row(const DTypeRow* row, size_t size) {
  return add_table_row(*row, size, [](Tables& t, const DTypeRow& dtype) { t.add(dtype); });
}
FLASHPLUG_EXPORT int flashplug_add_cost_model_row(const CostModelRow* row, size_t size) {
  return add_table_row(*row, size, [](Tables& t, const CostModelRow& cost_model) { t.cost_model = cost_model; });
}
FLASHPLUG_EXPORT int flashplug_add_layout_row(const LayoutRow* row, size_t size) {
  return add_table_row(*row, size, [](Tables& t, const LayoutRow& layout) { t.layout = layout; });
}

// Write the name of a fact of a call, and its default value. The list ends with an empty name.
FLASHPLUG_EXPORT int flashplug_call_fact(int number, double* plain, char* out, int capacity) {
  std::string fact_name;
  CallFacts p = default_call_facts();
  visit_facts(p, [&](const char* name, const auto& fact) {
    if (number-- == 0) fact_name = name, *plain = static_cast<double>(fact);
  });
  return copy_text(fact_name, out, capacity);
}
// Set sizes and layouts of a call whose operands Python holds. Each operand has four sizes, four strides, an address in
// bytes, and the bytes of an element.
FLASHPLUG_EXPORT void flashplug_read_operands(const int64_t* sizes, const int64_t* strides, const int64_t* addresses,
                                              const int64_t* element_bytes, double* call_facts) {
  CallFacts p = call_facts_from_array(call_facts);
  const Shape shapes[kNumOperands] = {{sizes, strides}, {sizes + 4, strides + 4}, {sizes + 8, strides + 8}};
  fill_shapes(shapes, &p);
  for (int i = 0; i < kNumOperands; ++i) p.layout[i] = layout_of(shapes[i], addresses[i], element_bytes[i]);
  p.shared_values = shares_values(shapes, addresses, p);
  copy_facts(p, call_facts);
}
// Return the obstacle of the shapes of query, key and value, an index in `kShapeObstacleNames`.
FLASHPLUG_EXPORT int flashplug_shape_obstacle(const int64_t* sizes, int enable_gqa) {
  const Shape shapes[kNumOperands] = {{sizes}, {sizes + 4}, {sizes + 8}};
  return static_cast<int>(shape_obstacle(shapes, enable_gqa != 0));
}
// Return the obstacle of a mask, an index in `kMaskObstacleNames`. `flags` has the first five members of `MaskFacts`.
// Sizes that are not known are -1.
FLASHPLUG_EXPORT int flashplug_mask_obstacle(const int64_t* flags, int64_t dims, const int64_t* size,
                                             const int64_t* stride, const int64_t* scores) {
  const MaskFacts mask{flags[0] != 0, flags[1] != 0, flags[2] != 0, flags[3] != 0, flags[4] != 0, dims, size, stride};
  return static_cast<int>(mask_obstacle(mask, scores));
}
// Return how a kernel reads a float mask: 0 in place, 1 from a copy, 2 from a copy with repeated rows. `copy` gets the
// sizes of the copy in elements.
FLASHPLUG_EXPORT int flashplug_bias_read(const char* kernel, int64_t dims, const int64_t* size, const int64_t* stride,
                                         int64_t address, int64_t element_bytes, const int64_t* scores, int64_t* copy) {
  CallFacts p;
  p.B = scores[0], p.Hq = scores[1], p.Sq = scores[2], p.Sk = scores[3];
  const std::vector<KernelRow>& kernels = tables().kernels;
  const auto row =
      std::ranges::find_if(kernels, [kernel](const KernelRow& k) { return std::strcmp(k.name, kernel) == 0; });
  if (row == kernels.end()) return 0;
  const BiasRead read = bias_read(dims, size, stride, address, element_bytes, p, *row);
  std::copy_n(read.copy_size, 4, copy);
  return read.in_place ? 0 : read.repeats_rows ? 2 : 1;
}
FLASHPLUG_EXPORT int flashplug_stock_bug_text(int fault, char* out, int capacity) {
  return copy_text(stock_bug_text(fault), out, capacity);
}
FLASHPLUG_EXPORT int flashplug_scale(double scale) { return static_cast<int>(scale_of(scale)); }

// Write the plan of a call as JSON. `remembered`: use the thread's plan cache, as real calls do.
FLASHPLUG_EXPORT int flashplug_plan_text(const double* call_facts, const int64_t* facts, int64_t mode, int remembered,
                                         char* out, int capacity) {
  const CallFacts p = call_facts_from_array(call_facts);
  const DeviceFacts device = device_facts_from_array(facts);
  const Plan plan =
      remembered != 0 ? remembered_plan(p, device, Mode{mode}, tables()) : plan_call(p, device, Mode{mode}, tables());
  return copy_text(plan_json(plan, p, device, Mode{mode}, tables()), out, capacity);
}
// Return whether the thread's plan cache has the plan of exactly this call.
FLASHPLUG_EXPORT int flashplug_is_plan_cached(const double* call_facts, const int64_t* facts, int64_t mode) {
  return is_plan_cached(call_facts_from_array(call_facts), device_facts_from_array(facts), Mode{mode}, tables());
}
FLASHPLUG_EXPORT int64_t flashplug_missing_changes() { return missing_changes(); }
// Return 1 if a plugin kernel was planned, but an earlier kernel lookup failed.
FLASHPLUG_EXPORT int flashplug_kernel_missing(const double* call_facts, const int64_t* facts, int64_t mode) {
  const CallFacts p = call_facts_from_array(call_facts);
  const DeviceFacts device = device_facts_from_array(facts);
  const Plan& plan = remembered_plan(p, device, Mode{mode}, tables());
  return plan.ours() && kernel_missing(plan.kernel_row, device);
}
FLASHPLUG_EXPORT int flashplug_forced_error(const double* call_facts, const int64_t* facts, int64_t mode, char* out,
                                            int capacity) {
  return copy_text(
      forced_error(call_facts_from_array(call_facts), device_facts_from_array(facts), Mode{mode}, tables()), out,
      capacity);
}

FLASHPLUG_EXPORT void flashplug_counters(int64_t* out, int reset) {
  for (int i = 0; i < kNumPaths; ++i) {
    std::atomic<int64_t>& counter = state().counters[i];
    out[i] = reset ? counter.exchange(0) : counter.load();
  }
}
FLASHPLUG_EXPORT void flashplug_set_log_callback(LogCallback callback, int log_plans) {
  {
    std::lock_guard<std::mutex> lock(state().log_mutex);
    state().logged_plans.clear();  // a new listener has heard nothing so far
  }
  state().log_plans.store(log_plans != 0);
  state().log_callback.store(callback, std::memory_order_release);
}

// Return THPVariable_Wrap, for the callback below; null if unknown in the running torch. The function takes an
// at::Tensor* and returns a new reference to the Python object.
FLASHPLUG_EXPORT void* flashplug_wrap_function() { return torch_symbols().wrap_in_python; }
FLASHPLUG_EXPORT void flashplug_set_trace_callback(TraceCallback callback) { state().trace_callback.store(callback); }
FLASHPLUG_EXPORT void flashplug_set_compile_callback(CompileCallback callback) { set_compile_callback(callback); }
FLASHPLUG_EXPORT void flashplug_load_pack(const char* path, const char* target) { load_pack(path, target); }
FLASHPLUG_EXPORT void flashplug_clear_packs() { clear_packs(); }
FLASHPLUG_EXPORT int flashplug_last_error(char* out, int capacity) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.error_mutex);
  return copy_text(s.last_error, out, capacity);
}
