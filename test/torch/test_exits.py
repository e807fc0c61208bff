"""Where calls leave before the dispatcher is asked: explain says what the router does, exit by exit. All of them are
matters of tensors and switches, which the CPU stand-in meets; none needs a CUDA build.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from standin import road_to
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.two_tensor import TwoTensor

import torch_flashplug
from torch_flashplug import native, sdpa_backend
from torch_flashplug.families import BACKENDS

# What the router counts: the call is ours and ran; is ours and was only traced; is stock's; or nothing, since stock
# refuses it first, or math is the answer before the router looks at it.
OURS, TRACED, STOCK, NOTHING = {"routed_ours": 1, "ours_fwd": 1}, {"routed_ours": 1}, {"routed_stock": 1}, {}
Change = Callable[[list[Tensor]], list[Tensor]]
Scope = Callable[[], AbstractContextManager]

# ---- switches ----


@contextmanager
def _together(scopes: tuple[Scope, ...]) -> Iterator[None]:
    with ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(scope())
        yield


@contextmanager
def _set(switch: Callable[[int], None], value: int, back: int) -> Iterator[None]:
    switch(value)
    try:
        yield
    finally:
        switch(back)


def together(*scopes: Scope) -> Scope:
    return lambda: _together(scopes)


def allowing(*names: str) -> Scope:
    return lambda: sdpa_kernel([getattr(SDPBackend, name) for name in names])


def forced(backend: str) -> Scope:
    return lambda: sdpa_backend(backend)


def disabled() -> AbstractContextManager:
    """The hook is still in place."""
    return _set(native.set_enabled, 0, 1)


def no_gpu() -> AbstractContextManager:
    return _set(native.set_standin, 0, 1)


def math_everywhere() -> AbstractContextManager:
    """TORCH_FLASHPLUG_BACKEND=math."""
    return _set(native.set_process_backend, BACKENDS.index("math"), 0)


# ---- tensors ----


def each(change: Callable[[Tensor], Tensor], of: str = "qkv") -> Change:
    return lambda tensors: [change(t) if name in of else t for name, t in zip("qkv", tensors)]


def nested(tensor: Tensor) -> Tensor:
    """Four dims and no sizes; torch's TransformerEncoder makes them on its own."""
    return torch.nested.as_nested_tensor(list(tensor))


def subclass(tensor: Tensor) -> Tensor:
    """Python dispatches it, and does not only trace."""
    return TwoTensor(tensor.contiguous(), tensor.contiguous())


def only_traced(rows: int | None) -> Change:
    """None: as many as data will say."""

    def change(tensors: list[Tensor]) -> list[Tensor]:
        with FakeTensorMode(shape_env=ShapeEnv()) as mode:
            known = mode.shape_env.create_unbacked_symint() if rows is None else rows
            return [torch.empty(2, 4, known, 64, dtype=tensor.dtype) for tensor in tensors]

    return change


@dataclass(frozen=True)
class Exit:
    """A call that kernels take, but for this change of its tensors or this switch."""

    words: str  # in every reason that explain gives
    change: Change = list
    scope: Scope = nullcontext
    took: dict[str, int] | None = None  # None: STOCK
    backend: str = "stock"  # that explain says
    device: str | None = "h100"  # that explain is asked about; None: the tensors' own


DIMS, DEVICES, SHAPES = "need 4 dims", "different devices", "need broadcasting or do not fit"
EXITS = {
    "none": Exit("", took=OURS, backend="fa3"),
    "traced": Exit("", only_traced(128), took=TRACED, backend="fa3"),
    "flash_allowed": Exit("", scope=allowing("FLASH_ATTENTION"), took=OURS, backend="fa3"),
    "overrideable_allowed": Exit("", scope=allowing("OVERRIDEABLE"), took=OURS, backend="fa3"),
    "math_allowed": Exit("allows neither", scope=allowing("MATH")),
    "others_allowed": Exit("allows neither", scope=allowing("EFFICIENT_ATTENTION", "CUDNN_ATTENTION")),
    "disabled": Exit("disabled", scope=disabled),
    "no_gpu": Exit("", scope=no_gpu, device=None),
    "two_dims": Exit(DIMS, each(lambda t: t[0, 0])),
    "three_dims": Exit(DIMS, each(lambda t: t[0])),
    "five_dims": Exit(DIMS, each(lambda t: t[None])),
    **{f"three_dims_of_{name}": Exit(DIMS, each(lambda t: t[0], name)) for name in "qkv"},
    **{f"{name}_elsewhere": Exit(DEVICES, each(lambda t: t.to("meta"), name), took=NOTHING) for name in "kv"},
    "nested": Exit("nested", each(nested)),
    "subclass": Exit("subclass", each(subclass)),
    **{f"subclass_of_{name}": Exit("subclass", each(subclass, name)) for name in "qkv"},
    # The op of a traced graph decides when it runs.
    "sizes_of_data": Exit("depend on data", only_traced(None), took=TRACED),
    "three_dims_of_data": Exit(DIMS, lambda tensors: [t[0] for t in only_traced(None)(tensors)]),
    "one_head_of_keys": Exit(SHAPES, each(lambda t: t[:, :1], "kv")),
    "one_batch_of_keys": Exit(SHAPES, each(lambda t: t[:1], "kv")),
    "one_batch_of_values": Exit(SHAPES, each(lambda t: t[:1], "v")),
    "fewer_values": Exit(SHAPES, each(lambda t: t[:, :, :100], "v")),
    "narrower_keys": Exit(SHAPES, each(lambda t: t[..., :32], "k")),
    "stock": Exit("stock is forced", scope=forced("stock")),
    "math": Exit("math is forced", list, forced("math"), NOTHING, "math"),
    "math_of_three_dims": Exit("math is forced", each(lambda t: t[0]), forced("math"), NOTHING, "math"),
    "math_of_nested": Exit("math is forced", each(nested), forced("math"), NOTHING, "math"),
    "math_not_allowed": Exit("math is forced, but", scope=together(forced("math"), allowing("FLASH_ATTENTION"))),
    "math_alone_allowed": Exit("allows neither", scope=together(forced("math"), allowing("MATH"))),
    "math_disabled": Exit("disabled", scope=together(forced("math"), disabled)),
    "math_everywhere": Exit("_BACKEND", list, together(math_everywhere, allowing("OVERRIDEABLE")), NOTHING, "math"),
    "math_no_gpu": Exit("", scope=together(forced("math"), allowing("FLASH_ATTENTION"), no_gpu), device=None),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*nested tensors")
@pytest.mark.parametrize("mode", ["auto", "fa3"])
@pytest.mark.parametrize("name", EXITS)
def test_explain_says_what_the_router_did(name: str, mode: str) -> None:
    """Forced calls, too: no measured row lets them out before the others are asked."""
    way = EXITS[name]
    with road_to("cpu") as road, sdpa_backend(mode):
        tensors = way.change(road.qkv())
        with way.scope():
            plan = torch_flashplug.explain(*tensors, device=way.device)
            with contextlib.suppress(RuntimeError):  # stock's, of what it refuses
                F.scaled_dot_product_attention(*tensors)
            took = road.took()
    assert took == (STOCK if way.took is None else way.took)
    assert plan.backend == way.backend and not plan.error, plan
    assert plan.reasons and all(way.words in why for why in plan.reasons.values()), plan
