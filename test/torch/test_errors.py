"""What is raised beneath an op of ours reaches Python as what it was: the same type and text, and the same object where
Python code raised it; forward and backward, on the thread of the call and on others.
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

import cpp
import on_cpu
import pytest
import torch
import torch.nn.functional as F
from standin import Road, road_to
from torch import Tensor
from torch.nn.attention import varlen

from torch_flashplug import attention, sdpa_backend
from torch_flashplug.ops import attention as windowed
from torch_flashplug.ops import paged, quantized_kv
from torch_flashplug.ops import sdpa as ops
from torch_flashplug.torch_hooks import varlen_attn as varlen_hooks

sdpa = F.scaled_dot_product_attention


class OfAProgram(Exception):
    pass


RAISED = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    ValueError("a value"),
    NotImplementedError("not for this device"),
    IndexError("index 7 is out of bounds"),
    TypeError("a type"),
    torch.AcceleratorError("CUDA error: an illegal address"),
    OfAProgram("of a program", 3),
    KeyboardInterrupt("by a person"),
)


@pytest.fixture
def cpu() -> Iterator[Road]:
    with road_to("cpu") as road:
        yield road


@pytest.fixture(params=RAISED, ids=lambda error: type(error).__name__)
def error(request: pytest.FixtureRequest) -> Iterator[BaseException]:
    yield request.param
    request.param.__traceback__ = None


def raising(error: BaseException) -> Callable[..., NoReturn]:
    def body(*given: object, **more: object) -> NoReturn:
        raise error

    return body


def drawn(*sizes: int, grad: bool = False) -> Tensor:
    made = torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)))
    return made.to(torch.bfloat16).requires_grad_(grad)


def raised_by(call: Callable[[], object]) -> BaseException:
    try:
        call()
    except BaseException as error:  # noqa: BLE001 KeyboardInterrupt is one of them
        return error
    raise AssertionError("nothing was raised")


def assert_raises_it(call: Callable[[], object], error: BaseException) -> None:
    found = raised_by(call)
    assert found is error and found.__traceback__ is not None
    assert sys.exc_info() == (None, None, None)


# ---- bodies in Python ----


def paged_call() -> Tensor:
    pool = drawn(4, 16, 2, 64)
    table, used = torch.arange(4).int().view(1, 4), torch.tensor([50]).int()
    return attention(drawn(1, 3, 2, 64), pool, pool, block_table=table, seqused_k=used)


def cached_call() -> Tensor:
    rows, scale = torch.ones(1, 8, 2, 64, dtype=torch.int8), torch.ones(1, 2, 8)
    return attention(drawn(1, 3, 2, 64), rows, rows, k_scale=scale, v_scale=scale)


def windowed_call() -> Tensor:
    x = drawn(1, 32, 2, 64)
    return attention(x, x, x, window=(4, 4))


FORWARDS = {
    "sdpa": (lambda: sdpa(*[drawn(1, 2, 16, 64)] * 3), ops, "_scores"),
    "window": (windowed_call, windowed.reference, "scores_of"),
    "pages": (paged_call, paged, "gathered"),
    "cache": (cached_call, quantized_kv, "attend"),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_of_a_forward(cpu: Road, monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException) -> None:
    call, module, function = FORWARDS[name]
    call()
    with monkeypatch.context() as patch:
        patch.setattr(module, function, raising(error))
        assert_raises_it(call, error)
    assert call().isfinite().all()


BACKWARDS = {
    "sdpa": (lambda q: sdpa(q, q, q), ops.reference, "gradients"),
    "window": (lambda q: attention(q, q, q, window=(4, 4)), windowed.reference, "gradients"),
}


@pytest.mark.parametrize("name", BACKWARDS)
def test_of_a_backward(cpu: Road, monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException) -> None:
    call, module, function = BACKWARDS[name]
    q = drawn(1, 16, 2, 64, grad=True)
    with monkeypatch.context() as patch:
        out = call(q)
        patch.setattr(module, function, raising(error))
        assert_raises_it(lambda: out.sum().backward(), error)
    call(q).sum().backward()
    assert q.grad.isfinite().all()


def test_of_a_block(cpu: Road, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Math that is asked for, whose op C++ calls for CPU tensors as for those of a GPU."""
    monkeypatch.setattr(ops, "_scores", raising(error))
    with sdpa_backend("math"):
        assert_raises_it(
            lambda: torch.ops.torch_flashplug.sdpa_fwd(*[drawn(1, 2, 16, 64)] * 3, None, 0.0, 0, None, 1), error
        )


@pytest.mark.parametrize("backward", [False, True])
def test_of_stocks_varlen(monkeypatch: pytest.MonkeyPatch, error: BaseException, backward: bool) -> None:
    """Its body, which C++ goes on to with what is not ours."""
    q, cu = drawn(16, 2, 64, grad=True), torch.tensor([0, 16]).int()
    empty, library = torch.empty(0, dtype=torch.uint64), torch.library.Library("aten", "IMPL")

    def forward(query: Tensor, *more: object, **settings: object) -> tuple[Tensor, ...]:
        if not backward:
            raise error
        return torch.zeros_like(query), torch.zeros(2, 16), empty, empty, empty.float()

    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", raising(error), "CPU")
    try:
        with on_cpu.installed_at(varlen_hooks, "cpu"):
            assert_raises_it(lambda: varlen.varlen_attn(q, q, q, cu, cu, 16, 16).sum().backward(), error)
    finally:
        library._destroy()


def test_threads_have_errors_of_their_own(cpu: Road, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = {f"thread {i}": ValueError(f"of {i}") for i in range(4)}
    monkeypatch.setattr(ops, "_scores", lambda *given: raising(errors[threading.current_thread().name])())
    found = {}

    def run() -> None:
        name = threading.current_thread().name
        found[name] = [raised_by(FORWARDS["sdpa"][0]) for _ in range(50)]

    threads = [threading.Thread(target=run, name=name) for name in errors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(one is errors[name] for name, all_of_them in found.items() for one in all_of_them)


# ---- what is kept ----


def test_nobody_keeps_an_error_or_its_operands(cpu: Road, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its traceback holds tensors, and a program that catches it wants their memory back."""
    operands = [drawn(1, 2, 16, 64)] * 3
    seen = weakref.ref(operands[0])
    with monkeypatch.context() as patch:
        patch.setattr(ops, "_scores", lambda *given: raising(OfAProgram())())
        kept = weakref.ref(raised_by(lambda: sdpa(*operands)))
        assert isinstance(raised_by(lambda: ops._math_forward(*operands, None, 0.0, 0, None, 0)), OfAProgram)
    operands.clear()
    gc.collect()
    assert kept() is None and seen() is None


def test_an_error_that_a_program_recovered_from_is_not_told_later(cpu: Road, monkeypatch: pytest.MonkeyPatch) -> None:
    x = drawn(1, 2, 16, 64)
    scores = ops._scores

    def recovers(*given: object) -> object:
        with monkeypatch.context() as patch:
            patch.setattr(ops, "_scores", raising(ValueError("recovered from")))
            assert isinstance(raised_by(lambda: sdpa(x, x, x)), ValueError)
        return scores(*given)

    with monkeypatch.context() as patch:
        patch.setattr(ops, "_scores", recovers)
        out = sdpa(x, x, x)
    assert out.isfinite().all() and sdpa(x, x, x).isfinite().all()


# ---- libtorch's own ----


@pytest.fixture
def no_room(cpu: Road) -> Iterator[list[BaseException]]:
    """aten::empty_strided raises what is in the list, and else does what it does."""
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


def test_of_an_allocation(no_room: list[BaseException], error: BaseException) -> None:
    """That C++ asks for: the scalars of a forward without dropout, placeholders."""
    x = drawn(1, 2, 16, 64)
    no_room.append(error)
    assert_raises_it(lambda: sdpa(x, x, x), error)
    no_room.clear()
    assert sdpa(x, x, x).isfinite().all()


def test_of_a_real_allocation(cpu: Road) -> None:
    """More than any machine has: torch's own text of its CPU allocator."""
    q = drawn(1, 1, 1, 64).expand(1, 2**20, 2**26, 64)
    with pytest.raises(RuntimeError, match="can't allocate memory: you tried to allocate") as stock:
        torch.empty_like(q)
    for call in (lambda: sdpa(q, q, q), lambda: attention(q, q, q, window=(4, 4))):
        with pytest.raises(RuntimeError, match="can't allocate memory: you tried to allocate") as ours:
            call()
        assert type(ours.value) is type(stock.value) and "torch_flashplug" not in str(ours.value)


ASKED = """
#include <dlfcn.h>
#include "core/values.h"
#include "core/errors.cpp"
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
def test_of_a_call_that_is_known_by_its_text(tmp_path: Path) -> None:
    """Of C++, and of Python code as pybind11 words it."""
    assert cpp.compiles(ASKED, "-shared", "-fPIC", "-o", str(tmp_path / "asked.so"))
    negate = ctypes.PyDLL(str(tmp_path / "asked.so")).negate
    negate.restype = ctypes.py_object
    with pytest.raises(RuntimeError) as stock:
        torch.ones((), dtype=torch.bool).neg_()
    assert negate() == str(stock.value)
    library = torch.library.Library("aten", "IMPL")
    library.impl("neg_", raising(torch.OutOfMemoryError("of a kernel: 3")), "CPU")
    try:
        found = negate()
    finally:
        library._destroy()
    assert type(found) is torch.OutOfMemoryError and str(found) == "of a kernel: 3"
