// The choice function for CUDA in at::native::_fused_sdp_choice_stub, with installation and removal.
//
// The function answers SDPBackend.OVERRIDEABLE for a call that a plugin kernel serves. For every other call, the
// function asks the saved stock choice, so that stock behavior (and stock's errors for bad input) stays the same. The
// function never reads sizes of symbolic tensors, never throws, and allocates nothing except the replacement of a bool
// mask (mask.cpp).
#include <dlfcn.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "core/core.h"
#include "dispatch/dispatch.h"
#include "hooks/hooks.h"
#include "launch/launch.h"
#include "operands/operands.h"
#include "stock/torch_symbols.h"

namespace flashplug {

namespace {

constexpr int kNumStubs = 2;  // pointers at the start of DispatchStubImpl: cpu, cuda

std::atomic<void*> saved[kNumStubs];  // original pointers, restored by uninstall()
// Stock's choice functions: the same, or the CPU default where the pointer was still unresolved.
std::atomic<void*> stock_functions[kNumStubs];
std::mutex install_mutex;

struct Call : AttentionArgs {
  bool enable_gqa;
};

enum class Owner { kStocks, kOurs, kMaths };
// The owner of a call, and the exit where the choice hook decided.
struct Decision {
  int exit;
  Owner owner = Owner::kStocks;
  bool replaces_mask = false;  // the mask is to be replaced
  bool inspected = false;      // the tensors were inspected
};
Owner ours_if(bool ours) { return ours ? Owner::kOurs : Owner::kStocks; }
thread_local int last_exit = -1;

// Return the number of an exit. An unknown name does not compile.
consteval int exit_index(std::string_view name) {
  int index = 0;
  while (kExitNames[index] != name) ++index;
  return index;
}

using Sizes = int64_t[kNumOperands][4];

// Ask Python about subclasses that C++ cannot inspect: whether operands are only traced or lie on several devices, and
// hints of symbolic sizes. If sizes depend on data (left unfilled), the op decides at run time.
TraceAnswer ask_python(const Call& call, Sizes* hints) {
  const TraceCallback ask = trace_callback();
  if (ask == nullptr) return call.mask == nullptr ? TraceAnswer::kSizesAtRunTime : TraceAnswer::kStock;
  const auto answer = static_cast<TraceAnswer>(ask(call.q, call.k, call.v, call.mask, **hints));
  if (answer == TraceAnswer::kStock || answer == TraceAnswer::kSizesAtRunTime) return answer;
  const Shape shapes[kNumOperands] = {{(*hints)[0]}, {(*hints)[1]}, {(*hints)[2]}};
  return shapes_fit(shapes, call.enable_gqa) ? answer : TraceAnswer::kStock;
}

// Return true if auto mode takes a call of the given sizes, dense in memory.
bool serves_size_hints(CallFacts p, const Sizes& hints, const DeviceFacts& device, Mode mode) {
  int64_t strides[kNumOperands][4];
  Shape shapes[kNumOperands];
  for (int i = 0; i < kNumOperands; ++i) {
    pack_strides(hints[i], strides[i]);
    shapes[i] = {hints[i], strides[i]};
    p.layout[i] = layout_of(shapes[i], 0, facts_of(p.dtype[i]).bytes);
  }
  fill_shapes(shapes, &p);
  const Plan& plan = remembered_plan(p, device, mode, tables());
  return plan.ours() && !kernel_missing(plan.kernel_row, device);
}

// Decide by the facts of a call. The exit names the question that decided.
Decision make_decision(const Call& call, Mode mode, ReadFacts* read) {
  const TorchSymbols& torch = torch_symbols();
  ReadFacts& facts = *read;
  CallFacts& p = facts.call;
  if (!read_meta(call, &facts) || !four_dims(facts)) return {exit_index("dims")};
  if (!p.on_cuda) return {exit_index("device")};
  if (has_no_elements(call)) return {exit_index("empty")};
  const bool only_traced = is_traced(call);
  // Under a TorchDispatchMode or functorch, a foreign function may receive the replacement of a mask in place of the
  // plugin's op. There F.sdpa converts a bool mask to floats, as for stock, so the call counts as a call with a bias.
  const bool as_floats =
      (p.needs & kMask) != 0 && !only_traced && !torch.jit_traced() && (has_wrapper(call) || torch.has_dispatch_mode());
  if (as_floats) p.needs = (p.needs & ~kMask) | feature_bit("bias");
  const bool forced = mode.forces_kernels();
  const DeviceFacts device = device_facts(facts.device_index());
  p.grad = wants_grad(call);
  p.bias_grad = p.grad && wants_bias_grad(call);
  read_torch_settings(&p);
  // No row of the class can win: decided before shapes are read.
  if (!forced && !plans_are_logged() && !may_serve_class(p, device, mode, tables())) return {exit_index("class")};
  if (torch.nested(call.q) || torch.nested(call.k) || torch.nested(call.v)) return {exit_index("nested")};
  Sizes hints = {};
  const TraceAnswer answer = only_traced ? ask_python(call, &hints) : TraceAnswer::kSizesKnown;
  if (answer == TraceAnswer::kStock) return {exit_index("subclass")};
  if (answer == TraceAnswer::kRingStep && (p.needs & kDropout) != 0) return {exit_index("subclass")};
  // Decided by sizes that are the same on all devices. The devices have to agree on the op, which may move its inputs.
  if (answer == TraceAnswer::kPerDevice || answer == TraceAnswer::kRingStep)
    return {exit_index("part"), ours_if(forced || serves_size_hints(p, hints, device, mode))};
  // The replacement of a mask is for the plugin's op alone. Graphs keep the mask; tracing.py finds the mask again.
  const bool has_mask = (p.needs & kAnyMask) != 0, is_bool = (p.needs & kMask) != 0,
             replaces_mask = is_bool && !only_traced;
  if (is_bool && (has_wrapper(call) || torch.jit_traced())) return {exit_index("mask")};
  // A symbolic size is recognized by the failure of the question. The failure is not for the log.
  std::optional<QuietShims> quiet;
  if (only_traced || has_wrapper(call)) quiet.emplace();
  if (!read_shapes(call, memory_of(only_traced), &facts)) {
    // Traced with symbolic sizes: the op decides at run time, on concrete sizes. With a mask or dropout, no stock
    // kernel is available to the op, so size hints must show that a plugin kernel is as fast. Any other call without
    // sizes goes to stock.
    if (has_mask && !traced_mask_fits(call.mask, facts)) return {exit_index("mask")};
    const bool alone = (p.needs & (kAnyMask | kDropout)) != 0;
    const bool served =
        forced || (alone ? serves_size_hints(p, hints, device, mode) : may_serve_class(p, device, mode, tables()));
    return {exit_index("no sizes"), ours_if(only_traced && served)};
  }
  if (!shapes_fit(facts.shape, call.enable_gqa)) return {exit_index("shapes")};
  const auto mask_check = only_traced || has_wrapper(call) ? traced_mask_fits : mask_fits;
  if (has_mask && !mask_check(call.mask, facts)) return {exit_index("mask")};
  const Plan& plan = remembered_plan(p, device, mode, tables());
  note_plan("choice hook", p, device, mode, plan);
  // If a forced backend cannot run the call, the op raises the reasons.
  const bool ours = forced || (plan.ours() && !kernel_missing(plan.kernel_row, device));
  return {exit_index("planned"), ours_if(ours), replaces_mask};
}

// Decide a call: first by the switches, then by `make_decision()`.
Decision decide(const Call& call, Mode mode, ReadFacts* facts) {
  const TorchSymbols& torch = torch_symbols();
  if (!enabled()) return {exit_index("disabled")};
  if (process_backend() == Backend::kMath) return {exit_index("math everywhere"), Owner::kMaths};
  const Backend backend = mode.backend();
  // torch.nn.attention.sdpa_kernel allows the plugin by the names of two backends.
  const bool allowed = torch.flash_enabled() || torch.overrideable_enabled();
  if (!allowed) return {exit_index("not allowed")};
  if (backend == Backend::kMath && torch.math_enabled()) return {exit_index("math"), Owner::kMaths};
  if (backend == Backend::kStock || backend == Backend::kMath) return {exit_index("other backend")};
  Decision decision = make_decision(call, mode, facts);
  decision.inspected = true;
  return decision;
}

template <int stub_index>
int64_t choice(AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v, const std::optional<void*>* mask,
               double dropout_p, bool is_causal, std::optional<double> scale, bool enable_gqa) {
  // An optional holds its tensor at its own address.
  const auto mask_handle = reinterpret_cast<AtenTensorHandle>(const_cast<std::optional<void*>*>(mask));
  const Causal causal = is_causal ? Causal::kTopLeft : Causal::kNone;
  const Call call{{q, k, v, mask->has_value() ? mask_handle : nullptr, dropout_p, causal, scale}, enable_gqa};
  drop_replaced_mask();
  ReadFacts facts;
  const Decision decision = decide(call, effective_mode(), &facts);
  last_exit = decision.exit;
  if (decision.owner == Owner::kMaths) return kChoiceMath;
  const bool ours = decision.owner == Owner::kOurs && (!decision.replaces_mask || replace_mask(call.mask, facts));
  count(ours ? Path::kRoutedOurs : Path::kRoutedStock);
  if (ours) return kChoiceOverrideable;
  // Stock's choice divides by the number of heads. For empty calls, the chosen kernel gives no output, or ends the
  // process.
  if (decision.exit == exit_index("empty") && torch_symbols().math_enabled() && !is_undefined(call)) return kChoiceMath;
  auto stock = reinterpret_cast<ChoiceFunction>(stock_functions[stub_index].load(std::memory_order_acquire));
  const int64_t chosen = stock(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa);
  return decision.inspected ? corrected_choice(chosen, call).choice : chosen;
}

void* choice_function(int stub_index) {
  return stub_index == 0 ? reinterpret_cast<void*>(&choice<0>) : reinterpret_cast<void*>(&choice<1>);
}

std::atomic<void*>* stub_pointer(int stub_index) {
  return reinterpret_cast<std::atomic<void*>*>(static_cast<char*>(torch_symbols().choice_stub) +
                                               stub_index * sizeof(void*));
}

bool is_in_library(void* function, const char* library) {
  Dl_info info;
  return dladdr(function, &info) != 0 && info.dli_fname != nullptr && std::strstr(info.dli_fname, library) != nullptr;
}

int fail(int code, const std::string& text) {
  set_last_error("torch_flashplug: choice hook not installed: " + text);
  return code;
}

}  // namespace

int take_last_exit() { return std::exchange(last_exit, -1); }

bool is_installed(int stub_index) {
  return stub_index >= 0 && stub_index < kNumStubs && torch_symbols().choice_stub != nullptr &&
         stub_pointer(stub_index)->load(std::memory_order_acquire) == choice_function(stub_index);
}

int64_t stock_choice(AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v, double dropout_p, bool is_causal,
                     std::optional<double> scale, bool enable_gqa) {
  auto stock = reinterpret_cast<ChoiceFunction>(stock_functions[1].load(std::memory_order_acquire));
  const std::optional<void*> no_mask;
  return stock == nullptr ? kChoiceMath : stock(q, k, v, &no_mask, dropout_p, is_causal, scale, enable_gqa);
}

int install(int stub_index) {
  std::lock_guard<std::mutex> lock(install_mutex);
  if (stub_index < 0 || stub_index >= kNumStubs)
    return fail(1, "the slot does not exist; use 1 (CUDA) or 0 (CPU, tests)");
  const TorchSymbols& torch = torch_symbols();
  if (const char* symbol = torch.first_missing_symbol())
    return fail(2, std::string("this torch lacks ") + symbol + "; use TORCH_FLASHPLUG_HOOK=composite");
  if (!torch.has_expected_signature)
    return fail(3, "the choice function of this torch has another signature; use TORCH_FLASHPLUG_HOOK=composite");
  if (is_installed(stub_index)) return 0;
  void* old = stub_pointer(stub_index)->load(std::memory_order_acquire);
  if (stub_index == 1 && old == nullptr) {
    if (dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_NOW) == nullptr)
      return fail(4, "this torch is a CPU build; there is nothing to route");
    return fail(5, "the CUDA slot of torch's choice function is empty");
  }
  if (stub_index == 1 && !is_in_library(old, "libtorch_cuda"))
    return fail(6, "the CUDA slot already holds another plugin's function");
  saved[stub_index].store(old, std::memory_order_release);
  stock_functions[stub_index].store(old != nullptr ? old : torch.cpu_default, std::memory_order_release);
  stub_pointer(stub_index)->store(choice_function(stub_index), std::memory_order_release);
  return 0;
}

int uninstall(int stub_index) {
  std::lock_guard<std::mutex> lock(install_mutex);
  if (!is_installed(stub_index)) return fail(7, "the choice hook is not in place");
  stub_pointer(stub_index)->store(saved[stub_index].load(std::memory_order_acquire), std::memory_order_release);
  return 0;
}

}  // namespace flashplug
