"""Errors raised below an op of the plugin: Python receives the original type and text.

An error raised by Python code must be the same object. The tests cover forward and backward, on the thread of the call
and on other threads.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import compile_cpp
import interpreted_kernels
import pytest
import torch
import torch.nn.functional as F
from device_backend import DeviceBackend, use_device_backend
from torch import Tensor
from torch.nn.attention import varlen

from torch_flashplug import attention, sdpa_backend
from torch_flashplug.ops import attention as attention_ops
from torch_flashplug.ops import paged, quantized_kv
from torch_flashplug.ops import sdpa as sdpa_ops
from torch_flashplug.torch_hooks import varlen_attn as varlen_attn_hook

sdpa = F.scaled_dot_product_attention


class ProgramError(Exception):
    pass


RAISED = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    ValueError("a value"),
    NotImplementedError("not for this device"),
    IndexError("index 7 is out of bounds"),
    TypeError("a type"),
    torch.AcceleratorError("CUDA error: an illegal address"),
    ProgramError("of a program", 3),
    KeyboardInterrupt("by a person"),
)


@pytest.fixture
def cpu() -> Iterator[DeviceBackend]:
    with use_device_backend("cpu") as device_backend:
        yield device_backend


@pytest.fixture(params=RAISED, ids=lambda error: type(error).__name__)
def error(request: pytest.FixtureRequest) -> Iterator[BaseException]:
    yield request.param
    request.param.__traceback__ = None


def make_raising_function(error: BaseException) -> Callable[..., NoReturn]:
    def body(*args: object, **kwargs: object) -> NoReturn:
        raise error

    return body


def random_tensor(*sizes: int, grad: bool = False) -> Tensor:
    tensor = torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)))
    return tensor.to(torch.bfloat16).requires_grad_(grad)


def raised_by(call: Callable[[], object]) -> BaseException:
    try:
        call()
    except BaseException as error:  # noqa: BLE001 KeyboardInterrupt is one of them
        return error
    raise AssertionError("nothing was raised")


def assert_raises_same_object(call: Callable[[], object], error: BaseException) -> None:
    actual = raised_by(call)
    assert actual is error and actual.__traceback__ is not None
    assert sys.exc_info() == (None, None, None)


# ---- implementations in Python ----


def paged_call() -> Tensor:
    pool = random_tensor(4, 16, 2, 64)
    table, used = torch.arange(4).int().view(1, 4), torch.tensor([50]).int()
    return attention(random_tensor(1, 3, 2, 64), pool, pool, block_table=table, seqused_k=used)


def cached_call() -> Tensor:
    rows, scale = torch.ones(1, 8, 2, 64, dtype=torch.int8), torch.ones(1, 2, 8)
    return attention(random_tensor(1, 3, 2, 64), rows, rows, k_scale=scale, v_scale=scale)


def window_call() -> Tensor:
    x = random_tensor(1, 32, 2, 64)
    return attention(x, x, x, window=(4, 4))


FORWARDS = {
    "sdpa": (lambda: sdpa(*[random_tensor(1, 2, 16, 64)] * 3), sdpa_ops, "_scores"),
    "window": (window_call, attention_ops.reference, "scores_of"),
    "pages": (paged_call, paged, "gathered"),
    "cache": (cached_call, quantized_kv, "attend"),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_forward_raises_the_original_error(
    cpu: DeviceBackend, monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException
) -> None:
    call, module, function = FORWARDS[name]
    call()
    with monkeypatch.context() as patch:
        patch.setattr(module, function, make_raising_function(error))
        assert_raises_same_object(call, error)
    assert call().isfinite().all()


BACKWARDS = {
    "sdpa": (lambda q: sdpa(q, q, q), sdpa_ops.reference, "gradients"),
    "window": (lambda q: attention(q, q, q, window=(4, 4)), attention_ops.reference, "gradients"),
}


@pytest.mark.parametrize("name", BACKWARDS)
def test_backward_raises_the_original_error(
    cpu: DeviceBackend, monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException
) -> None:
    call, module, function = BACKWARDS[name]
    q = random_tensor(1, 16, 2, 64, grad=True)
    with monkeypatch.context() as patch:
        out = call(q)
        patch.setattr(module, function, make_raising_function(error))
        assert_raises_same_object(lambda: out.sum().backward(), error)
    call(q).sum().backward()
    assert q.grad.isfinite().all()


def test_forced_math_raises_the_original_error(
    cpu: DeviceBackend, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Request math explicitly. C++ calls the math op for CPU tensors as for GPU tensors."""
    monkeypatch.setattr(sdpa_ops, "_scores", make_raising_function(error))
    with sdpa_backend("math"):
        assert_raises_same_object(
            lambda: torch.ops.torch_flashplug.sdpa_fwd(*[random_tensor(1, 2, 16, 64)] * 3, None, 0.0, 0, None, 1), error
        )


@pytest.mark.parametrize("backward", [False, True])
def test_varlen_attn_of_stock_raises_the_original_error(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, backward: bool
) -> None:
    """Check errors of the stock implementation, which C++ calls when no kernel of the plugin serves the call."""
    q, cu = random_tensor(16, 2, 64, grad=True), torch.tensor([0, 16]).int()
    empty, library = torch.empty(0, dtype=torch.uint64), torch.library.Library("aten", "IMPL")

    def forward(query: Tensor, *more: object, **settings: object) -> tuple[Tensor, ...]:
        if not backward:
            raise error
        return torch.zeros_like(query), torch.zeros(2, 16), empty, empty, empty.float()

    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", make_raising_function(error), "CPU")
    try:
        with interpreted_kernels.installed_at(varlen_attn_hook, "cpu"):
            assert_raises_same_object(lambda: varlen.varlen_attn(q, q, q, cu, cu, 16, 16).sum().backward(), error)
    finally:
        library._destroy()


def test_errors_are_per_thread(cpu: DeviceBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = {f"thread {i}": ValueError(f"of {i}") for i in range(4)}
    monkeypatch.setattr(
        sdpa_ops, "_scores", lambda *args: make_raising_function(errors[threading.current_thread().name])()
    )
    errors_by_thread = {}

    def run() -> None:
        name = threading.current_thread().name
        errors_by_thread[name] = [raised_by(FORWARDS["sdpa"][0]) for _ in range(50)]

    threads = [threading.Thread(target=run, name=name) for name in errors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(caught is errors[name] for name, caught_errors in errors_by_thread.items() for caught in caught_errors)


# ---- lifetime of errors ----


def test_errors_and_operands_are_released(cpu: DeviceBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The traceback holds tensors, and a program that catches the error needs the memory of the tensors back."""
    operands = [random_tensor(1, 2, 16, 64)] * 3
    operand_ref = weakref.ref(operands[0])
    with monkeypatch.context() as patch:
        patch.setattr(sdpa_ops, "_scores", lambda *args: make_raising_function(ProgramError())())
        error_ref = weakref.ref(raised_by(lambda: sdpa(*operands)))
        assert isinstance(raised_by(lambda: sdpa_ops._math_forward(*operands, None, 0.0, 0, None, 0)), ProgramError)
    operands.clear()
    gc.collect()
    assert error_ref() is None and operand_ref() is None


def test_handled_errors_are_not_raised_later(cpu: DeviceBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    x = random_tensor(1, 2, 16, 64)
    scores = sdpa_ops._scores

    def recovers(*args: object) -> object:
        with monkeypatch.context() as patch:
            patch.setattr(sdpa_ops, "_scores", make_raising_function(ValueError("recovered from")))
            assert isinstance(raised_by(lambda: sdpa(x, x, x)), ValueError)
        return scores(*args)

    with monkeypatch.context() as patch:
        patch.setattr(sdpa_ops, "_scores", recovers)
        out = sdpa(x, x, x)
    assert out.isfinite().all() and sdpa(x, x, x).isfinite().all()


# ---- errors of libtorch ----


@pytest.fixture
def allocation_errors(cpu: DeviceBackend) -> Iterator[list[BaseException]]:
    """Make aten::empty_strided raise the first error of a list, or allocate as usual if the list is empty."""
    errors, library = [], torch.library.Library("aten", "IMPL")

    def empty_strided(size: list[int], stride: list[int], **settings: object) -> Tensor:
        if errors:
            raise errors[0]
        elements = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if all(size) else 0
        storage = torch.empty(elements, dtype=settings.get("dtype"), device="cpu")
        return storage.as_strided(size, stride)

    library.impl("empty_strided", empty_strided, "CPU")
    yield errors
    library._destroy()


def test_allocation_in_cpp_raises_the_original_error(
    allocation_errors: list[BaseException], error: BaseException
) -> None:
    """Raise in an allocation of C++: scalars of a forward without dropout, and placeholders."""
    x = random_tensor(1, 2, 16, 64)
    allocation_errors.append(error)
    assert_raises_same_object(lambda: sdpa(x, x, x), error)
    allocation_errors.clear()
    assert sdpa(x, x, x).isfinite().all()


def test_failed_allocation_raises_the_error_of_torch(cpu: DeviceBackend) -> None:
    """Allocate more memory than any machine has. The text must be the text of the CPU allocator of torch."""
    q = random_tensor(1, 1, 1, 64).expand(1, 2**20, 2**26, 64)
    with pytest.raises(RuntimeError, match="can't allocate memory: you tried to allocate") as stock:
        torch.empty_like(q)
    for call in (lambda: sdpa(q, q, q), lambda: attention(q, q, q, window=(4, 4))):
        with pytest.raises(RuntimeError, match="can't allocate memory: you tried to allocate") as plugin_error:
            call()
        assert type(plugin_error.value) is type(stock.value) and "torch_flashplug" not in str(plugin_error.value)


ASKED = """
#include <dlfcn.h>
#include "core/values.h"
#include "core/errors.cpp"
#include "core/python_api.cpp"
namespace flashplug {
void* in_process(const char* library) { return dlopen(library, RTLD_NOLOAD | RTLD_NOW); }
}
extern "C" void* negate() try {
  using namespace flashplug;
  OpCall op(kNegate);
  op[0] = box::from(new_strided(0, nullptr, nullptr, aoti_torch_dtype_bool(), aoti_torch_device_type_cpu(), 0));
  op.run();
  return nullptr;
} catch (python_error& error) {
  return std::exchange(error.value, nullptr);
} catch (const std::exception& error) {
  using Text = void* (*)(const char*);
  return reinterpret_cast<Text>(dlsym(RTLD_DEFAULT, "PyUnicode_FromString"))(error.what());
}
"""


@pytest.mark.skipif(torch.__version__ < "2.13", reason="older torch only logs the texts")
def test_errors_of_dispatched_calls_keep_their_text(tmp_path: Path) -> None:
    """Check errors raised by C++, and errors raised by Python code in the wording of pybind11."""
    assert compile_cpp.compiles(ASKED, "-shared", "-fPIC", "-o", str(tmp_path / "asked.so"))
    negate = ctypes.PyDLL(str(tmp_path / "asked.so")).negate
    negate.restype = ctypes.py_object
    with pytest.raises(RuntimeError) as stock:
        torch.ones((), dtype=torch.bool).neg_()
    assert negate() == str(stock.value)
    library = torch.library.Library("aten", "IMPL")
    library.impl("neg_", make_raising_function(torch.OutOfMemoryError("of a kernel: 3")), "CPU")
    try:
        actual = negate()
    finally:
        library._destroy()
    assert type(actual) is torch.OutOfMemoryError and str(actual) == "of a kernel: 3"
