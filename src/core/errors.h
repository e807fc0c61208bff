// Errors that libtorch's C functions (the shims) caught, thrown again as what they were.
#pragma once

#include <torch/csrc/stable/stableivalue_conversions.h>

#include <string>

namespace flashplug {

// torch_call_dispatcher; false: the call failed, and rethrow() is next.
bool dispatched(const char* op, const char* overload, StableIValue* stack);

// After a shim failed on this thread. Python gets the original exception where it can be had, else a RuntimeError with
// libtorch's text where this torch keeps it. `call` names the failed call where there is no text.
[[noreturn]] void rethrow(const char* call);

// An exception that Python code raised inside the shim is thrown as it is; without one this returns.
void rethrow_python_error();

// What the body of an op in Python raises, a PyObject. It is kept if this thread waits for it in dispatched(), since
// pybind11 takes the exception from the thread and the shim frees it.
void hold_python_error(void* exception);

// Calls that allocate. Where the shim fails they are repeated by an entry of libtorch that throws: its exception passes
// through us. A repeat that succeeds gives the result.
AtenTensorHandle new_strided(int dims, const int64_t* size, const int64_t* stride, int32_t dtype, int32_t device_type,
                             int32_t device_index);
void copy_into(AtenTensorHandle to, AtenTensorHandle from);
AtenTensorHandle repeat_interleave_again(AtenTensorHandle tensor, int64_t repeats, int64_t dim);  // null: no such entry

}  // namespace flashplug
