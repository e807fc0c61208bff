// Python's stable C interface, looked up at run time. _C is not linked with libpython, so one binary serves all
// versions of Python.
#pragma once

#include <cstddef>

namespace flashplug {

using Object = void;                                                   // PyObject
using FastFunction = Object* (*)(Object*, Object* const*, ptrdiff_t);  // _PyCFunctionFast, flag METH_FASTCALL

struct PythonApi {
  int (*initialized)() = nullptr;
  Object* (*thread_state)() = nullptr;
  int (*ensure)() = nullptr;
  void (*release)(int) = nullptr;
  void* (*save_thread)() = nullptr;         // gives the GIL away
  void (*restore_thread)(void*) = nullptr;  // takes the GIL back
  Object* (*occurred)() = nullptr;
  void (*fetch)(Object**, Object**, Object**) = nullptr;
  void (*normalize)(Object**, Object**, Object**) = nullptr;
  void (*clear)() = nullptr;
  void (*set_string)(Object*, const char*) = nullptr;
  void (*incref)(Object*) = nullptr;
  void (*decref)(Object*) = nullptr;
  Object* (*type_of)(Object*) = nullptr;
  Object* (*traceback_of)(Object*) = nullptr;
  Object* (*str)(Object*) = nullptr;
  const char* (*utf8)(Object*, ptrdiff_t*) = nullptr;
  Object* (*import)(const char*) = nullptr;
  Object* (*attribute)(Object*, const char*) = nullptr;
  long long (*integer)(Object*, int* overflow) = nullptr;  // of an int
  double (*real)(Object*) = nullptr;                       // of a float
  ptrdiff_t (*tuple_size)(Object*) = nullptr;
  Object* (*tuple_item)(Object*, ptrdiff_t) = nullptr;  // borrowed
  Object* (*tuple_of)(ptrdiff_t, ...) = nullptr;
  int (*compare_text)(Object*, const char*) = nullptr;  // 0: an equal str
  Object* (*new_function)(void* definition, Object* self, Object* module) = nullptr;
  Object *none = nullptr, *yes = nullptr, *no = nullptr;
  Object *int_type = nullptr, *float_type = nullptr, *str_type = nullptr, *tuple_type = nullptr;
  bool is_complete = true;
};

// Return the functions and objects of Python, looked up at the first call.
const PythonApi& python_api();
// Return true if the process runs Python, and if every entry of `python_api()` was found.
bool has_python();

// Scope in which the thread has the GIL.
class Gil {
 public:
  Gil() : state_(python_api().ensure()) {}
  ~Gil() { python_api().release(state_); }
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;

 private:
  int state_;
};

}  // namespace flashplug
