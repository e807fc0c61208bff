// From a plan to a kernel on the device: the only file that knows the kernel ABI (TVM-FFI safe calls on DLTensors).
//
// Argument order, shared with torch_flashplug/kernels/parts/forward_call.py (backward: parts/backward_call.py):
//   0 q (B, Hq, Sq, D)   1 k (B, Hkv, Sk, D)   2 v (B, Hkv, Sk, Dv)   3 o (B, Hq, Sq, Dv)   4 lse (B, Hq, Sq) fp32
//   5 scale * log2(e)    6 scale               7 counter (1,) int32, zero     8 CTAs to run     9 stream
// decode: 0 to 4 the same, 5 partials (n,) fp32, 6 scale, 7 splits, 8 cluster, 9 stream
#include <dlfcn.h>
#include <tvm/ffi/c_api.h>

#include <cstring>
#include <iterator>

#include "flashplug.h"
#include "torch_symbols.h"
#include "values.h"

namespace flashplug {

static_assert(sizeof(TVMFFIFunctionCell) == 2 * sizeof(void*),
              "kernels.cpp reads safe_call as the first field behind the object header");
static_assert(sizeof(TVMFFIObject) == 24, "kernels.cpp knows the object header");

namespace {

constexpr double kLog2e = 1.4426950408889634;
constexpr DLDataType kSingle = {kDLFloat, 32, 1}, kCount = {kDLInt, 32, 1};

// A DLTensor with room for its strides; sizes are borrowed from the tensor.
struct Argument {
  DLTensor tensor;
  int64_t stride[4];
};

void describe(AtenTensorHandle handle, int dims, DLDataType dtype, int device_index, bool writes, Argument* out) {
  Shape shape;
  if (!read_shape(handle, &shape))
    throw std::runtime_error("torch_flashplug: a tensor has no concrete shape at launch");
  const void* data = nullptr;
  void* mutable_data = nullptr;
  check_shim(writes ? torch_get_mutable_data_ptr(handle, &mutable_data) : torch_get_const_data_ptr(handle, &data),
             "get_data_ptr");
  // torch leaves any number as the stride of a dim of size 1; the kernels' TMA descriptors need a multiple of 16 bytes
  // there too.
  for (int i = 0; i < dims; ++i) {
    const bool any = shape.size[i] == 1 && i + 1 < dims;
    out->stride[i] = any ? (shape.size[dims - 1] + 7) / 8 * 8 : shape.stride[i];
  }
  out->tensor.data = writes ? mutable_data : const_cast<void*>(data);
  out->tensor.device = DLDevice{kDLCUDA, device_index};
  out->tensor.ndim = dims;
  out->tensor.dtype = dtype;
  out->tensor.shape = const_cast<int64_t*>(shape.size);
  out->tensor.strides = out->stride;
  out->tensor.byte_offset = 0;
}

// One number that is no torch tensor.
void describe_one(void* data, DLDataType dtype, int device_index, Argument* out) {
  static int64_t one = 1;
  out->tensor = DLTensor{data, DLDevice{kDLCUDA, device_index}, 1, dtype, &one, &one, 0};
}

// A value of that type, all bits zero until its caller sets it.
TVMFFIAny typed(int32_t type_index) {
  TVMFFIAny any;
  any.type_index = type_index;
  any.zero_padding = 0;
  any.v_int64 = 0;
  return any;
}

TVMFFIAny pack_tensor(Argument* argument) {
  TVMFFIAny any = typed(kTVMFFIDLTensorPtr);
  any.v_ptr = &argument->tensor;
  return any;
}

TVMFFIAny pack_int(int64_t value) {
  TVMFFIAny any = typed(kTVMFFIInt);
  any.v_int64 = value;
  return any;
}

TVMFFIAny pack_float(double value) {
  TVMFFIAny any = typed(kTVMFFIFloat);
  any.v_float64 = value;
  return any;
}

TVMFFIAny pack_pointer(void* value) {
  TVMFFIAny any = typed(kTVMFFIOpaquePtr);
  any.v_ptr = value;
  return any;
}

// What TVM-FFI kept of the failure. Its library is in the process already: the packs and the JIT need it.
std::string raised_text() {
  void* library = dlopen("libtvm_ffi.so", RTLD_NOLOAD | RTLD_NOW);
  void* scope = library != nullptr ? library : RTLD_DEFAULT;
  auto move_raised = reinterpret_cast<void (*)(TVMFFIObjectHandle*)>(dlsym(scope, "TVMFFIErrorMoveFromRaised"));
  auto release = reinterpret_cast<int (*)(TVMFFIObjectHandle)>(dlsym(scope, "TVMFFIObjectDecRef"));
  if (move_raised == nullptr || release == nullptr) return "no text: libtvm_ffi.so is not loaded";
  TVMFFIObjectHandle error = nullptr;
  move_raised(&error);
  if (error == nullptr) return "no text was left";
  const auto* cell = reinterpret_cast<const TVMFFIErrorCell*>(static_cast<const char*>(error) + sizeof(TVMFFIObject));
  std::string text(cell->kind.data, cell->kind.size);
  text += ": " + std::string(cell->message.data, cell->message.size);
  release(error);
  return text;
}

// Makes the tensors' device current, if it is not already, and puts the old one back.
class OnDevice {
 public:
  explicit OnDevice(int device_index) {
    if (standin() != Standin::kOff) return;
    int32_t current = -1;
    check_shim(aoti_torch_get_current_device_index(&current), "get_current_device_index");
    if (current != device_index)
      check_shim(aoti_torch_create_device_guard(device_index, &guard_), "create_device_guard");
    ensure_context(device_index);
  }
  ~OnDevice() {
    if (guard_ != nullptr) aoti_torch_delete_device_guard(guard_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  DeviceGuardHandle guard_ = nullptr;
};

void run(Kernel& kernel, const TVMFFIAny* args, int32_t count) {
  TVMFFIAny result = typed(kTVMFFINone);
  KernelCall call = kernel.call.load(std::memory_order_acquire);
  if (call(kernel.self, args, count, &result) != 0)
    throw std::runtime_error("torch_flashplug: kernel launch failed: " + raised_text());
}

// First use on a device loads the kernel's module, which a stream capture of this thread would forbid in its strict
// mode.
void run_on(Kernel& kernel, int device_index, const TVMFFIAny* args, int32_t count) {
  const uint64_t bit = uint64_t{1} << (device_index & 63);
  if ((kernel.devices.load(std::memory_order_acquire) & bit) != 0) {
    run(kernel, args, count);
    return;
  }
  RelaxedCapture relaxed;
  run(kernel, args, count);
  kernel.devices.fetch_or(bit, std::memory_order_release);
}

DLDataType element_type(const KernelRow& row) {
  return {static_cast<uint8_t>(row.element_code), static_cast<uint8_t>(8 * row.element_bytes), 1};
}

struct Operand {
  AtenTensorHandle tensor;
  int dims;
  DLDataType dtype;
  bool writes;
};

// The first arguments of a kernel; the next one's place in args.
TVMFFIAny* pack_operands(const Operand* operands, size_t count, int device_index, Argument* described,
                         TVMFFIAny* args) {
  for (size_t i = 0; i < count; ++i) {
    const Operand& x = operands[i];
    describe(x.tensor, x.dims, x.dtype, device_index, x.writes, &described[i]);
    args[i] = pack_tensor(&described[i]);
  }
  return args + count;
}

// What every forward begins with.
constexpr size_t kForwardOperands = 5;
TVMFFIAny* pack_forward(const KernelRow& row, const ForwardTensors& tensors, int device_index, Argument* described,
                        TVMFFIAny* args) {
  const DLDataType element = element_type(row);
  const Operand operands[kForwardOperands] = {{tensors.q, 4, element, false},
                                              {tensors.k, 4, element, false},
                                              {tensors.v, 4, element, false},
                                              {tensors.out, 4, element, true},
                                              {tensors.lse, 3, kSingle, true}};
  return pack_operands(operands, kForwardOperands, device_index, described, args);
}

}  // namespace

void launch_forward(Kernel& kernel, const KernelRow& row, const ForwardTensors& tensors, double scale,
                    int device_index) {
  OnDevice on_device(device_index);
  void* stream = current_cuda_stream(device_index);
  Argument described[kForwardOperands], counter;
  describe_one(launch_counter(device_index, stream), kCount, device_index, &counter);
  TVMFFIAny args[kForwardOperands + 5];
  TVMFFIAny* next = pack_forward(row, tensors, device_index, described, args);
  *next++ = pack_float(scale * kLog2e);
  *next++ = pack_float(scale);
  *next++ = pack_tensor(&counter);
  *next++ = pack_int(device_facts(device_index).sm_count);
  *next++ = pack_pointer(stream);
  run_on(kernel, device_index, args, std::size(args));
}

void launch_decode(Kernel& kernel, const KernelRow& row, const ForwardTensors& tensors, AtenTensorHandle partials,
                   Splits splits, double scale, int device_index) {
  OnDevice on_device(device_index);
  Argument described[kForwardOperands], parts;
  TVMFFIAny args[kForwardOperands + 5];
  TVMFFIAny* next = pack_forward(row, tensors, device_index, described, args);
  if (partials != nullptr)
    describe(partials, 1, kSingle, device_index, true, &parts);
  else  // nothing is written there, but an argument has an address: that of the LSE
    describe_one(described[kForwardOperands - 1].tensor.data, kSingle, device_index, &parts);
  *next++ = pack_tensor(&parts);
  *next++ = pack_float(scale);
  *next++ = pack_int(splits.n);
  *next++ = pack_int(splits.cluster);
  *next++ = pack_pointer(current_cuda_stream(device_index));
  std::optional<RelaxedCapture> relaxed;  // the kernels of splits may run for the first time, whatever ran before
  if (splits.n > 1) relaxed.emplace();
  run_on(kernel, device_index, args, std::size(args));
}

void launch_backward(Kernel& kernel, const KernelRow& row, const BackwardTensors& tensors, double scale,
                     int device_index) {
  const DLDataType element = element_type(row);
  OnDevice on_device(device_index);
  void* stream = current_cuda_stream(device_index);
  const bool writes_dq = (tensors.written & kWantDq) != 0, writes_dkdv = (tensors.written & kWantDkDv) != 0;
  const Operand operands[] = {
      {tensors.q, 4, element, false},      {tensors.k, 4, element, false},        {tensors.v, 4, element, false},
      {tensors.out, 4, element, false},    {tensors.grad_out, 4, element, false}, {tensors.lse, 3, kSingle, false},
      {tensors.dq, 4, element, writes_dq}, {tensors.dk, 4, element, writes_dkdv}, {tensors.dv, 4, element, writes_dkdv},
      {tensors.rows, 4, kSingle, true},    {tensors.scratch, 1, kSingle, true}};
  Argument described[std::size(operands)], counter;
  describe_one(launch_counter(device_index, stream), kCount, device_index, &counter);
  TVMFFIAny args[std::size(operands) + 6];
  TVMFFIAny* next = pack_operands(operands, std::size(operands), device_index, described, args);
  *next++ = pack_float(scale * kLog2e);
  *next++ = pack_float(scale);
  *next++ = pack_tensor(&counter);
  *next++ = pack_int(device_facts(device_index).sm_count);
  *next++ = pack_int(tensors.written);
  *next++ = pack_pointer(stream);
  // A part that runs for the first time may have to be loaded, whatever ran before.
  std::optional<RelaxedCapture> relaxed;
  if (tensors.written != kWantAll) relaxed.emplace();
  run_on(kernel, device_index, args, std::size(args));
}

}  // namespace flashplug
