"""Where calls leave before the dispatcher is asked: explain says what the router does, exit by exit. All of them are
matters of tensors and switches, which the CPU stand-in meets; none needs a CUDA build.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

import pytest
import torch
import torch.nn.functional as F
from standin import road_to
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import torch_flashplug
from torch_flashplug import sdpa_backend
from torch_flashplug.api.backend import DEVICES as GPUS
from torch_flashplug.dispatch import bindings
from torch_flashplug.registry.architectures import BACKENDS
from torch_flashplug.torch_hooks import describe_call

# What the router counts: the call is ours and ran; is ours and was only traced; is stock's; or nothing, since stock
# refuses it first, or math is the answer before the router looks at it.
OURS, TRACED, STOCK, NOTHING = {"routed_ours": 1, "ours_fwd": 1}, {"routed_ours": 1}, {"routed_stock": 1}, {}
Change = Callable[[list[Tensor]], list[Tensor]]
Scope = Callable[[], AbstractContextManager]
T = TypeVar("T")

# ---- switches ----


@contextmanager
def _together(scopes: tuple[Scope, ...]) -> Iterator[None]:
    with ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(scope())
        yield


@contextmanager
def _set(switch: Callable[[T], object], value: T, back: T) -> Iterator[None]:
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
    return _set(bindings.set_enabled, 0, 1)


def no_gpu() -> AbstractContextManager:
    return _set(bindings.set_cpu_stub, 0, 1)


def math_everywhere() -> AbstractContextManager:
    """TORCH_FLASHPLUG_BACKEND=math."""
    return _set(bindings.set_process_backend, BACKENDS.index("math"), 0)


# ---- tensors ----


def each(change: Callable[[Tensor], Tensor], of: str = "qkv") -> Change:
    return lambda tensors: [change(t) if name in of else t for name, t in zip("qkv", tensors)]


def nested(tensor: Tensor) -> Tensor:
    """Four dims and no sizes; torch's TransformerEncoder makes them on its own."""
    return torch.nested.as_nested_tensor(list(tensor))


def subclass(tensor: Tensor) -> Tensor:
    """Python dispatches it, and does not only trace."""
    return TwoTensor(tensor.contiguous(), tensor.contiguous())


def masked(*sizes: int) -> Change:
    return lambda tensors: [*tensors, torch.ones(sizes, dtype=torch.bool)]


def only_traced(rows: int | None, *mask: int) -> Change:
    """None: as many as data will say. mask: its sizes, if there is to be one."""

    def change(tensors: list[Tensor]) -> list[Tensor]:
        with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True) as mode:
            known = mode.shape_env.create_unbacked_symint() if rows is None else rows
            made = [torch.empty(2, 4, known, 64, dtype=tensor.dtype) for tensor in tensors]
            return made + ([torch.empty(mask, dtype=torch.bool)] if mask else [])

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
    raises: str = ""  # in what explain says that math makes of it
    settings: dict[str, bool | float] = field(default_factory=dict)


DIMS, DEVICES, SHAPES = "must have 4 dims", "different devices", "need broadcasting or do not fit"
ADDS_BATCH_DIM, DATA = describe_call.adds_batch_dim(), "depend on data"
MASKS, MASK_DIMS = "must broadcast to (batch, heads, rows, keys)", "must have 2 to 4 dims"
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
    "three_dims": Exit("", each(lambda t: t[0]), took=OURS, backend="fa3") if ADDS_BATCH_DIM else
                  Exit(DIMS, each(lambda t: t[0])),
    "five_dims": Exit(DIMS, each(lambda t: t[None])),
    **{f"three_dims_of_{name}": Exit(DIMS, each(lambda t: t[0], name)) for name in "qkv"},
    **{f"{name}_elsewhere": Exit(DEVICES, each(lambda t: t.to("meta"), name), took=NOTHING) for name in "kv"},
    "nested": Exit("nested", each(nested)),
    "subclass": Exit("subclass", each(subclass)),
    **{f"subclass_of_{name}": Exit("subclass", each(subclass, name)) for name in "qkv"},
    # The op of a traced graph decides when it runs.
    "sizes_of_data": Exit(DATA, only_traced(None), took=TRACED),
    "three_dims_of_data": Exit(DATA if ADDS_BATCH_DIM else DIMS,
                               lambda tensors: [t[0] for t in only_traced(None)(tensors)],
                               took=TRACED if ADDS_BATCH_DIM else STOCK),
    "one_head_of_keys": Exit("", each(lambda t: t[:, :1], "kv"), took=OURS, backend="fa3"),
    "some_heads_of_keys": Exit(SHAPES, each(lambda t: t[:, :2], "kv"), raises="must match the size"),
    "one_head_of_values": Exit(SHAPES, each(lambda t: t[:, :1], "v")),
    "one_batch_of_keys": Exit(SHAPES, each(lambda t: t[:1], "kv")),
    "one_batch_of_values": Exit(SHAPES, each(lambda t: t[:1], "v")),
    "fewer_values": Exit(SHAPES, each(lambda t: t[:, :, :100], "v"), raises="Expected size"),
    "narrower_keys": Exit(SHAPES, each(lambda t: t[..., :32], "k"), raises="Expected size"),
    "masked": Exit("", masked(128, 128), took=OURS, backend="fa3"),
    "mask_of_1_dims": Exit(MASK_DIMS, masked(128)),
    "mask_of_5_dims": Exit(MASK_DIMS, masked(1, 1, 1, 128, 128)),
    "traced_masked": Exit("", only_traced(128, 128, 128), took=TRACED, backend="fa3"),
    "traced_mask_of_one_dim": Exit(MASK_DIMS, only_traced(128, 128), took=STOCK),
    "traced_mask_of_other_rows": Exit(MASKS, only_traced(128, 3, 128), took=STOCK, raises="broadcast"),
    "subclass_of_mask": Exit("subclass", lambda tensors: [*tensors, subclass(torch.ones(128, 128, dtype=torch.bool))]),
    "mask_of_other_rows": Exit(MASKS, masked(3, 128), took=STOCK, raises="broadcast"),
    "mask_of_fp64": Exit("dtype for the kernels, but has torch.float64",
                         lambda tensors: [*tensors, torch.zeros(128, 128).double()],
                         took=NOTHING, raises="attn_mask dtype"),
    "math_of_other_rows": Exit("math is forced", masked(3, 128), forced("math"), NOTHING, "math", raises="broadcast"),
    "math_of_causal_and_mask": Exit("math is forced", masked(128, 128), forced("math"), NOTHING, "math",
                                    raises="Explicit attn_mask", settings={"is_causal": True}),
    "math_of_dropout_above_1": Exit("math is forced", list, forced("math"), NOTHING, "math",
                                    raises="dropout probability", settings={"dropout_p": 1.5}),
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
            plan = torch_flashplug.explain(*tensors, device=way.device, **way.settings)
            with contextlib.suppress(RuntimeError, IndexError):  # stock's, of what it refuses
                F.scaled_dot_product_attention(*tensors, **way.settings)
            took = road.took()
    assert took == (STOCK if way.took is None else way.took)
    assert plan.backend == way.backend, plan
    assert way.raises in plan.error and bool(way.raises) == bool(plan.error), plan
    assert plan.reasons and all(way.words in why for why in plan.reasons.values()), plan


@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_every_exit_has_its_row() -> None:
    """But for calls that no measured row serves by their class: the dispatcher says the same of them."""
    met = set()
    bindings.take_last_exit()
    for way in (*EXITS.values(), Exit("", each(Tensor.float))):
        with road_to("cpu") as road:
            tensors = way.change(road.qkv())
            with way.scope(), contextlib.suppress(RuntimeError, IndexError):
                F.scaled_dot_product_attention(*tensors)
        met.add(bindings.take_last_exit())
    # This torch asks for no choice of operands without elements; 2.11 does, on a GPU: test_badinput.
    # Parts are several devices': test_distributed.
    assert met - {""} == set(bindings.names("exits")) - {"empty", "part"}


# ---- what stock's flash gets wrong ----

NEGATIVE = -0.3


class Ran(TorchDispatchMode):
    """Whether stock's flash ran."""

    flash = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.flash |= func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_explain_knows_whose_scales_the_router_mends() -> None:
    """Of those that it leaves to stock, and stock to its flash."""
    mended, asked = {}, {}
    for name, way in EXITS.items():
        with road_to("cpu") as road:
            tensors, ran, stock_ran = way.change(road.qkv()), Ran(), Ran()
            with way.scope(), contextlib.suppress(RuntimeError, IndexError):
                asked[name] = describe_call.is_asked(bindings.effective_mode())
                with ran:
                    F.scaled_dot_product_attention(*tensors, scale=NEGATIVE)
            left = road.took() == STOCK
            with road.off(), way.scope(), contextlib.suppress(RuntimeError, IndexError), stock_ran:
                F.scaled_dot_product_attention(*tensors, scale=NEGATIVE)
        if stock_ran.flash and left:
            mended[name] = not ran.flash
    assert set(mended.values()) == {True, False}
    assert mended == {name: asked[name] for name in mended}


DROPPED, SCALE, WIDE = "dropout_p=1", "this scale", "fp32 masks"
WIDE_MASK, MASK = torch.zeros(16, 16), torch.zeros(16, 16).bfloat16()
GROUPED, NARROW = torch.empty(2, 2, 16, 64).bfloat16(), torch.empty(2, 4, 16, 60).bfloat16()


@pytest.mark.filterwarnings("ignore:.*nested tensors")
@pytest.mark.parametrize("change, fault, right", [
    ({}, "", "CUDNN"), ({"dropout_p": 1.0}, DROPPED, "MATH"), ({"dropout_p": 0.5}, "", "CUDNN"),
    ({"scale": 0.0}, SCALE, "EFFICIENT"), ({"scale": -1.0, "attn_mask": MASK}, SCALE, "EFFICIENT"),
    ({"scale": -1.0, "attn_mask": MASK.bool()}, SCALE, "EFFICIENT"), ({"attn_mask": MASK}, "", "CUDNN"),
    ({"attn_mask": WIDE_MASK}, WIDE, "MATH"), ({"attn_mask": WIDE_MASK, "scale": -1.0}, SCALE, "MATH"),
    # What efficient does not read.
    ({"scale": -1.0, "key": GROUPED, "value": GROUPED}, SCALE, "MATH"),
    ({"scale": -1.0, "value": NARROW}, SCALE, "MATH"),
    ({"scale": -1.0, "attn_mask": MASK.mT}, SCALE, "MATH"), ({"scale": -1.0, "attn_mask": MASK[:, :1]}, SCALE, "MATH"),
    ({"attn_mask": WIDE_MASK, "is_causal": True, "dropout_p": 1.0}, "", "CUDNN"),  # torch does not define it
    ({"dropout_p": 1.0, "scale": -0.3}, DROPPED, "MATH"),  # efficient, which has the scale right, drops as badly
    ({"key": nested(torch.empty(2, 4, 16, 64).bfloat16())}, "", "CUDNN"),
])  # fmt: skip
def test_faults_of_a_call(change: dict[str, object], fault: str, right: str) -> None:
    """Of cuDNN's; math has none, and is the answer only where it is allowed."""
    tensor = torch.empty(2, 4, 16, 64, dtype=torch.bfloat16)
    settings = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None}
    given = {"query": tensor, "key": tensor, "value": tensor} | settings | change

    def answer(choice: SDPBackend) -> tuple[str, str]:
        became, said = describe_call.right_choice(choice.value, *given.values())
        return SDPBackend(became).name.removesuffix("_ATTENTION"), said

    became, said = answer(SDPBackend.CUDNN_ATTENTION)
    assert became == right and fault in said and bool(fault) == bool(said)
    assert answer(SDPBackend.MATH) == ("MATH", "")
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]):
        assert answer(SDPBackend.CUDNN_ATTENTION) == ("CUDNN", said)


def stock_would(monkeypatch: pytest.MonkeyPatch, choose: Callable[..., int]) -> None:
    """In a build for CUDA, which alone knows what it would choose there."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch, "_fused_sdp_choice", choose)


FLASH = SDPBackend.FLASH_ATTENTION
LOOKS = {  # the call, the switch, whether the router looks at stock's choice
    "inside": ((2, 4, 128, 64), nullcontext, True),
    "outside": ((2, 1, 128, 64), nullcontext, True),  # keys of one head, to be broadcast
    "stock": ((2, 4, 128, 64), forced("stock"), False),
    "stock_outside": ((2, 1, 128, 64), forced("stock"), False),
    "disabled": ((2, 4, 128, 64), disabled, False),
    "impossible": ((2, 4, 128, 64), forced("fa3"), False),  # it raises
}


@pytest.mark.parametrize("name", LOOKS)
def test_explain_says_what_becomes_of_a_scale(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tensors that say they are on a GPU, and with what stock would choose there."""
    keys, scope, looks = LOOKS[name]
    stock_would(monkeypatch, lambda *_, **__: FLASH.value)
    with road_to("cpu"), FakeTensorMode() as mode, scope():
        bindings.set_facts_override(GPUS["a100"])  # auto takes nothing there, fa3 runs nothing
        query, key, value = (
            FakeTensor(mode, torch.empty(size, dtype=torch.bfloat16, device="meta"), torch.device("cuda:0"))
            for size in ((2, 4, 128, 64), keys, keys)
        )
        said = [torch_flashplug.explain(query, key, value, scale=scale).stock_choice for scale in (None, NEGATIVE)]
    nan = f"MATH; {FLASH.name} would return NaN with this scale"  # beside the stand-in nothing is efficient's
    assert said == [FLASH.name, nan if looks else FLASH.name]


@pytest.mark.parametrize("watch", ["mode", "grad", "vmap", "none"])
def test_masked_calls_are_served_and_explained_under_modes_and_transforms(watch: str) -> None:
    """Under a dispatch mode and functorch F.sdpa makes floats of the mask, and kernels take them as a bias."""
    with road_to("cpu") as road:
        tensors: list[Tensor] = [*road.qkv(), torch.ones(128, 128, dtype=torch.bool)]
        plans: list[torch_flashplug.api.backend.Plan] = []

        def attend(query: Tensor) -> Tensor:
            plans.append(torch_flashplug.explain(query, *tensors[1:], device="h100"))
            return F.scaled_dot_product_attention(query, *tensors[1:]).sum()

        if watch == "grad":
            torch.func.grad(attend)(tensors[0])
        elif watch == "vmap":
            torch.vmap(attend)(tensors[0][None])
        else:
            with Ran() if watch == "mode" else nullcontext():
                attend(tensors[0])
        took = road.took()
    assert [plan.backend for plan in plans] == ["fa3"] and took["ours_fwd"] == 1
    assert ("_mask_" if watch == "none" else "_bias_") in plans[0].kernel


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_explain_knows_what_autocast_makes_of_a_call(dtype: torch.dtype) -> None:
    """All but fp64, the mask as well."""
    tensors = (torch.zeros(2, 4, 256, 64, dtype=dtype) for _ in range(3))
    before = torch.get_autocast_dtype("cuda")
    # torch.autocast leaves it off where there is no GPU.
    with _set(functools.partial(torch.set_autocast_enabled, "cuda"), True, False):
        with _set(functools.partial(torch.set_autocast_dtype, "cuda"), torch.bfloat16, before):
            plan = torch_flashplug.explain(*tensors, torch.zeros(256, 256, dtype=dtype), device="h100")
    wide = dtype is torch.float64
    assert plan.backend == ("stock" if wide else "fa3")
    name = "float64" if wide else "bfloat16"
    assert name in plan.call and f"mask {name}" in plan.call and not plan.error


@pytest.mark.parametrize("backend, raised", [("auto", True), ("fa3", False)])
def test_explain_says_what_is_raised_where_nothing_is_allowed(
    backend: str, raised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock's choice raises for what no backend that sdpa_kernel allows can run; what ours takes is ours to run."""

    def refuse(*_: object, **__: object) -> int:
        raise RuntimeError("No available kernel. Aborting execution.")

    with road_to("cpu"), FakeTensorMode() as mode, sdpa_backend(backend):
        stock_would(monkeypatch, refuse)
        bindings.set_facts_override(GPUS["h100" if backend == "fa3" else "a100"])
        given = (torch.empty((2, 4, 128, 64), dtype=torch.bfloat16, device="meta") for _ in range(3))
        plan = torch_flashplug.explain(*(FakeTensor(mode, tensor, torch.device("cuda:0")) for tensor in given))
    assert plan.backend == ("stock" if raised else "fa3")
    assert plan.error == ("No available kernel. Aborting execution." if raised else "")


@pytest.mark.parametrize("choice", [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION])
def test_explain_knows_who_refuses_is_causal_beside_a_mask(choice: SDPBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock's math; the others run such calls."""
    stock_would(monkeypatch, lambda *_, **__: choice.value)
    with road_to("cpu"), FakeTensorMode() as mode:
        bindings.set_facts_override(GPUS["h100"])
        sizes = (*[(2, 4, 128, 64)] * 3, (128, 128))
        made = [torch.empty(size, dtype=torch.bfloat16, device="meta") for size in sizes]
        given = [FakeTensor(mode, tensor, torch.device("cuda:0")) for tensor in made]
        plan = torch_flashplug.explain(*given, is_causal=True)
    assert plan.backend == "stock" and plan.stock_choice == choice.name
    assert ("Explicit attn_mask" in plan.error) is (choice is SDPBackend.MATH)
