// Errors caught by libtorch's C functions (the shims), thrown again in their original form.
#pragma once

#include <torch/csrc/stable/stableivalue_conversions.h>

#include <cstdint>

namespace flashplug {

// Call `torch_call_dispatcher`. After a false result, the caller must call `rethrow()`.
bool dispatch_op(const char* op, const char* overload, StableIValue* stack);

// Throw the error of a shim that failed on the calling thread. Python gets the original exception if available, else a
// RuntimeError with libtorch's text if the running torch keeps the text. `call` names the failed call for lack of a
// text.
[[noreturn]] void rethrow(const char* call);

// Rethrow the exception raised by Python code inside the shim. Returns if there is none.
void rethrow_python_error();

// Keep an exception raised by the Python body of an op (a PyObject), if the thread waits for it in `dispatch_op()`.
// Keeping is necessary, since pybind11 takes the exception from the thread and the shim frees the exception.
void hold_python_error(void* exception);

// Calls that allocate. After a failed shim, the call is repeated by a throwing entry of libtorch, and the exception
// passes through the plugin. A successful repeat gives the result.
AtenTensorHandle new_strided(int dims, const int64_t* size, const int64_t* stride, int32_t dtype, int32_t device_type,
                             int32_t device_index);
void copy_tensor(AtenTensorHandle to, AtenTensorHandle from);
AtenTensorHandle repeat_interleave_again(AtenTensorHandle tensor, int64_t repeats, int64_t dim);  // null: no such entry

}  // namespace flashplug
