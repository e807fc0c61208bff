// Lookup of Python's C interface in the running process.
#include "core/python_api.h"

#include <dlfcn.h>

#include <type_traits>

#include "stock/torch_symbols.h"

namespace flashplug {

const PythonApi& python_api() {
  static const PythonApi instance = [] {
    PythonApi p;
    void* torch = in_process("libtorch_python.so");
    const auto look = [&](auto& entry, const char* name) {
      void* symbol = dlsym(RTLD_DEFAULT, name);
      if (symbol == nullptr && torch != nullptr) symbol = dlsym(torch, name);
      entry = reinterpret_cast<std::remove_reference_t<decltype(entry)>>(symbol);
      p.is_complete &= symbol != nullptr;
    };
    look(p.initialized, "Py_IsInitialized");
    look(p.thread_state, "PyGILState_GetThisThreadState");
    look(p.ensure, "PyGILState_Ensure");
    look(p.release, "PyGILState_Release");
    look(p.save_thread, "PyEval_SaveThread");
    look(p.restore_thread, "PyEval_RestoreThread");
    look(p.occurred, "PyErr_Occurred");
    look(p.fetch, "PyErr_Fetch");
    look(p.normalize, "PyErr_NormalizeException");
    look(p.clear, "PyErr_Clear");
    look(p.set_string, "PyErr_SetString");
    look(p.incref, "Py_IncRef");
    look(p.decref, "Py_DecRef");
    look(p.type_of, "PyObject_Type");
    look(p.traceback_of, "PyException_GetTraceback");
    look(p.str, "PyObject_Str");
    look(p.utf8, "PyUnicode_AsUTF8AndSize");
    look(p.import, "PyImport_ImportModule");
    look(p.attribute, "PyObject_GetAttrString");
    look(p.integer, "PyLong_AsLongLongAndOverflow");
    look(p.real, "PyFloat_AsDouble");
    look(p.tuple_size, "PyTuple_Size");
    look(p.tuple_item, "PyTuple_GetItem");
    look(p.tuple_of, "PyTuple_Pack");
    look(p.compare_text, "PyUnicode_CompareWithASCIIString");
    look(p.new_function, "PyCFunction_NewEx");
    look(p.none, "_Py_NoneStruct");
    look(p.yes, "_Py_TrueStruct");
    look(p.no, "_Py_FalseStruct");
    look(p.int_type, "PyLong_Type");
    look(p.float_type, "PyFloat_Type");
    look(p.str_type, "PyUnicode_Type");
    look(p.tuple_type, "PyTuple_Type");
    p.is_complete = p.is_complete && torch != nullptr;
    return p;
  }();
  return instance;
}

bool has_python() {
  const PythonApi& p = python_api();
  return p.is_complete && p.initialized() != 0;
}

}  // namespace flashplug
