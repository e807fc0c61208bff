"""Exits of the choice hook: calls that leave before the dispatcher is asked.

For each exit, explain must agree with the choice hook. All exits depend on tensors and switches only, which the CPU
stub backend provides. No exit needs a CUDA build.
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
from device_backend import use_device_backend
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

# Counters of the choice hook. OURS: a kernel of the plugin served the call. TRACED: the call was assigned to the plugin
# and only traced. STOCK: stock served the call. NOTHING: stock refuses the call first, or math is forced and the choice
# hook is not asked.
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


def combine(*scopes: Scope) -> Scope:
    return lambda: _together(scopes)


def allow(*names: str) -> Scope:
    return lambda: sdpa_kernel([getattr(SDPBackend, name) for name in names])


def force(backend: str) -> Scope:
    return lambda: sdpa_backend(backend)


def disabled() -> AbstractContextManager:
    """Disable the plugin while the hook stays in place."""
    return _set(bindings.set_enabled, 0, 1)


def no_gpu() -> AbstractContextManager:
    return _set(bindings.set_cpu_stub, 0, 1)


def math_everywhere() -> AbstractContextManager:
    """Emulate TORCH_FLASHPLUG_BACKEND=math."""
    return _set(bindings.set_process_backend, BACKENDS.index("math"), 0)


# ---- tensors ----


def change_each(change: Callable[[Tensor], Tensor], names: str = "qkv") -> Change:
    return lambda tensors: [change(t) if name in names else t for name, t in zip("qkv", tensors)]


def as_nested(tensor: Tensor) -> Tensor:
    """Return a nested tensor: four dims and no sizes. The TransformerEncoder of torch creates such tensors."""
    return torch.nested.as_nested_tensor(list(tensor))


def as_subclass(tensor: Tensor) -> Tensor:
    """Return a tensor subclass that Python dispatches even outside of tracing."""
    return TwoTensor(tensor.contiguous(), tensor.contiguous())


def with_mask(*sizes: int) -> Change:
    return lambda tensors: [*tensors, torch.ones(sizes, dtype=torch.bool)]


def as_fake_tensors(rows: int | None, *mask: int) -> Change:
    """Return a change that creates fake tensors.

    Args:
      rows: the number of rows; None makes the number depend on data.
      mask: sizes of a mask; empty for no mask.
    """

    def change(tensors: list[Tensor]) -> list[Tensor]:
        with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True) as mode:
            num_rows = mode.shape_env.create_unbacked_symint() if rows is None else rows
            fakes = [torch.empty(2, 4, num_rows, 64, dtype=tensor.dtype) for tensor in tensors]
            return fakes + ([torch.empty(mask, dtype=torch.bool)] if mask else [])

    return change


@dataclass(frozen=True)
class Exit:
    """A call that kernels serve, except for a change of the tensors or a switch."""

    words: str  # in every reason given by explain
    change: Change = list
    scope: Scope = nullcontext
    took: dict[str, int] | None = None  # None: STOCK
    backend: str = "stock"  # expected from explain
    device: str | None = "h100"  # the device passed to explain; None: the device of the tensors
    raises: str = ""  # part of the error that explain predicts for math
    settings: dict[str, bool | float] = field(default_factory=dict)


DIMS, DEVICES = "must have 4 dims", "different devices"
HEADS, VALUE_HEADS, BATCHES = (
    "without enable_gqa=True, but got",
    "need as many heads of value",
    "need equal batch sizes",
)
ADDS_BATCH_DIM, DATA = describe_call.adds_batch_dim(), "depend on data"
MASKS, MASK_DIMS = "must broadcast to (batch, heads, rows, keys)", "must have 2 to 4 dims"
EXITS = {
    "none": Exit("", took=OURS, backend="fa3"),
    "traced": Exit("", as_fake_tensors(128), took=TRACED, backend="fa3"),
    "flash_allowed": Exit("", scope=allow("FLASH_ATTENTION"), took=OURS, backend="fa3"),
    "overrideable_allowed": Exit("", scope=allow("OVERRIDEABLE"), took=OURS, backend="fa3"),
    "math_allowed": Exit("allows neither", scope=allow("MATH")),
    "others_allowed": Exit("allows neither", scope=allow("EFFICIENT_ATTENTION", "CUDNN_ATTENTION")),
    "disabled": Exit("disabled", scope=disabled),
    "no_gpu": Exit("", scope=no_gpu, device=None),
    "two_dims": Exit(DIMS, change_each(lambda t: t[0, 0])),
    "three_dims": Exit("", change_each(lambda t: t[0]), took=OURS, backend="fa3") if ADDS_BATCH_DIM else
                  Exit(DIMS, change_each(lambda t: t[0])),
    "five_dims": Exit(DIMS, change_each(lambda t: t[None])),
    **{f"three_dims_of_{name}": Exit(DIMS, change_each(lambda t: t[0], name)) for name in "qkv"},
    **{f"{name}_elsewhere": Exit(DEVICES, change_each(lambda t: t.to("meta"), name), took=NOTHING) for name in "kv"},
    "nested": Exit("nested", change_each(as_nested)),
    "subclass": Exit("subclass", change_each(as_subclass)),
    **{f"subclass_of_{name}": Exit("subclass", change_each(as_subclass, name)) for name in "qkv"},
    # The op of a traced graph decides when the graph runs.
    "sizes_of_data": Exit(DATA, as_fake_tensors(None), took=TRACED),
    "three_dims_of_data": Exit(DATA if ADDS_BATCH_DIM else DIMS,
                               lambda tensors: [t[0] for t in as_fake_tensors(None)(tensors)],
                               took=TRACED if ADDS_BATCH_DIM else STOCK),
    "one_head_of_keys": Exit("", change_each(lambda t: t[:, :1], "kv"), took=OURS, backend="fa3"),
    "some_heads_of_keys": Exit(HEADS, change_each(lambda t: t[:, :2], "kv"), raises="must match the size"),
    "one_head_of_values": Exit(VALUE_HEADS, change_each(lambda t: t[:, :1], "v")),
    "one_batch_of_keys": Exit(BATCHES, change_each(lambda t: t[:1], "kv")),
    "one_batch_of_values": Exit(BATCHES, change_each(lambda t: t[:1], "v")),
    "fewer_values": Exit("many rows of value", change_each(lambda t: t[:, :, :100], "v"), raises="Expected size"),
    "narrower_keys": Exit("need equal head dims", change_each(lambda t: t[..., :32], "k"), raises="Expected size"),
    "masked": Exit("", with_mask(128, 128), took=OURS, backend="fa3"),
    "mask_of_1_dims": Exit(MASK_DIMS, with_mask(128)),
    "mask_of_5_dims": Exit(MASK_DIMS, with_mask(1, 1, 1, 128, 128)),
    "traced_masked": Exit("", as_fake_tensors(128, 128, 128), took=TRACED, backend="fa3"),
    "traced_mask_of_one_dim": Exit(MASK_DIMS, as_fake_tensors(128, 128), took=STOCK),
    "traced_mask_of_other_rows": Exit(MASKS, as_fake_tensors(128, 3, 128), took=STOCK, raises="broadcast"),
    "subclass_of_mask": Exit("subclass",
                             lambda tensors: [*tensors, as_subclass(torch.ones(128, 128, dtype=torch.bool))]),
    "mask_of_other_rows": Exit(MASKS, with_mask(3, 128), took=STOCK, raises="broadcast"),
    "mask_of_fp64": Exit("dtype for the kernels, but has torch.float64",
                         lambda tensors: [*tensors, torch.zeros(128, 128).double()],
                         took=NOTHING, raises="attn_mask dtype"),
    "math_of_other_rows": Exit("math is forced", with_mask(3, 128), force("math"), NOTHING, "math", raises="broadcast"),
    "math_of_causal_and_mask": Exit("math is forced", with_mask(128, 128), force("math"), NOTHING, "math",
                                    raises="Explicit attn_mask", settings={"is_causal": True}),
    "math_of_dropout_above_1": Exit("math is forced", list, force("math"), NOTHING, "math",
                                    raises="dropout probability", settings={"dropout_p": 1.5}),
    "stock": Exit("stock is forced", scope=force("stock")),
    "math": Exit("math is forced", list, force("math"), NOTHING, "math"),
    "math_of_three_dims": Exit("math is forced", change_each(lambda t: t[0]), force("math"), NOTHING, "math"),
    "math_of_nested": Exit("math is forced", change_each(as_nested), force("math"), NOTHING, "math"),
    "math_not_allowed": Exit("math is forced, but", scope=combine(force("math"), allow("FLASH_ATTENTION"))),
    "math_alone_allowed": Exit("allows neither", scope=combine(force("math"), allow("MATH"))),
    "math_disabled": Exit("disabled", scope=combine(force("math"), disabled)),
    "math_everywhere": Exit("_BACKEND", list, combine(math_everywhere, allow("OVERRIDEABLE")), NOTHING, "math"),
    "math_no_gpu": Exit("", scope=combine(force("math"), allow("FLASH_ATTENTION"), no_gpu), device=None),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*nested tensors")
@pytest.mark.parametrize("mode", ["auto", "fa3"])
@pytest.mark.parametrize("name", EXITS)
def test_explain_agrees_with_the_choice_hook_at_each_exit(name: str, mode: str) -> None:
    """Test forced calls too: no measured row may end a call before the exits are checked."""
    case = EXITS[name]
    with use_device_backend("cpu") as device_backend, sdpa_backend(mode):
        tensors = case.change(device_backend.qkv())
        with case.scope():
            plan = torch_flashplug.explain(*tensors, device=case.device, **case.settings)
            with contextlib.suppress(RuntimeError, IndexError):  # errors of stock for refused calls
                F.scaled_dot_product_attention(*tensors, **case.settings)
            took = device_backend.pop_path_counts()
    assert took == (STOCK if case.took is None else case.took)
    assert plan.backend == case.backend, plan
    assert case.raises in plan.error and bool(case.raises) == bool(plan.error), plan
    assert plan.reasons and all(case.words in why for why in plan.reasons.values()), plan


@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_every_exit_has_a_test_row() -> None:
    """Compare the exits that were met with the list of exits in C++.

    Exits of call classes without a measured row are not included; the dispatcher gives the same answer there.
    """
    exits = set()
    bindings.take_last_exit()
    with use_device_backend("cpu") as device_backend:
        for case in (*EXITS.values(), Exit("", change_each(Tensor.float))):
            tensors = case.change(device_backend.qkv())
            with case.scope(), contextlib.suppress(RuntimeError, IndexError):
                F.scaled_dot_product_attention(*tensors)
            exits.add(bindings.take_last_exit())
    # This torch asks for no choice when operands have no elements. torch 2.11 does so on a GPU (test_invalid_input).
    # The exit `part` needs several devices (test_distributed).
    assert exits - {""} == set(bindings.names("exits")) - {"empty", "part"}


# ---- what stock's flash gets wrong ----

NEGATIVE = -0.3


class Ran(TorchDispatchMode):
    """Dispatch mode that records whether the flash attention of stock ran."""

    flash = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.flash |= func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_explain_predicts_scale_corrections_of_the_choice_hook() -> None:
    """Cover the calls that the choice hook leaves to stock and stock leaves to flash."""
    mended, asked = {}, {}
    for name, case in EXITS.items():
        with use_device_backend("cpu") as device_backend:
            tensors, ran, stock_ran = case.change(device_backend.qkv()), Ran(), Ran()
            with case.scope(), contextlib.suppress(RuntimeError, IndexError):
                asked[name] = describe_call.is_asked(bindings.effective_mode())
                with ran:
                    F.scaled_dot_product_attention(*tensors, scale=NEGATIVE)
            is_left_to_stock = device_backend.pop_path_counts() == STOCK
            with device_backend.disabled(), case.scope(), contextlib.suppress(RuntimeError, IndexError), stock_ran:
                F.scaled_dot_product_attention(*tensors, scale=NEGATIVE)
        if stock_ran.flash and is_left_to_stock:
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
    # Operands that the efficient attention cannot read.
    ({"scale": -1.0, "key": GROUPED, "value": GROUPED}, SCALE, "MATH"),
    ({"scale": -1.0, "value": NARROW}, SCALE, "MATH"),
    ({"scale": -1.0, "attn_mask": MASK.mT}, SCALE, "MATH"), ({"scale": -1.0, "attn_mask": MASK[:, :1]}, SCALE, "MATH"),
    # torch does not define this combination
    ({"attn_mask": WIDE_MASK, "is_causal": True, "dropout_p": 1.0}, "", "CUDNN"),
    # efficient attention computes the scale correctly, but its dropout is as wrong
    ({"dropout_p": 1.0, "scale": -0.3}, DROPPED, "MATH"),
    ({"key": as_nested(torch.empty(2, 4, 16, 64).bfloat16())}, "", "CUDNN"),
])  # fmt: skip
def test_cudnn_faults_select_a_correct_backend(change: dict[str, object], fault: str, right: str) -> None:
    """Check faults of cuDNN attention. Math attention has no fault, and is chosen only if math is allowed."""
    tensor = torch.empty(2, 4, 16, 64, dtype=torch.bfloat16)
    settings = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None}
    arguments = {"query": tensor, "key": tensor, "value": tensor} | settings | change

    def answer(choice: SDPBackend) -> tuple[str, str]:
        chosen, reason = describe_call.corrected_choice(choice.value, *arguments.values())
        return SDPBackend(chosen).name.removesuffix("_ATTENTION"), reason

    chosen, reason = answer(SDPBackend.CUDNN_ATTENTION)
    assert chosen == right and fault in reason and bool(fault) == bool(reason)
    assert answer(SDPBackend.MATH) == ("MATH", "")
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]):
        assert answer(SDPBackend.CUDNN_ATTENTION) == ("CUDNN", reason)


def set_stock_choice(monkeypatch: pytest.MonkeyPatch, choose: Callable[..., int]) -> None:
    """Set the choice of stock as in a CUDA build, the only build with such a choice."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch, "_fused_sdp_choice", choose)


FLASH = SDPBackend.FLASH_ATTENTION
STOCK_CHOICE_CASES = {  # the sizes of keys and values, the switch, whether the choice hook examines the choice of stock
    "inside": ((2, 4, 128, 64), nullcontext, True),
    "outside": ((2, 1, 128, 64), nullcontext, True),  # keys of a single head, broadcast to all query heads
    "stock": ((2, 4, 128, 64), force("stock"), False),
    "stock_outside": ((2, 1, 128, 64), force("stock"), False),
    "disabled": ((2, 4, 128, 64), disabled, False),
    "impossible": ((2, 4, 128, 64), force("fa3"), False),  # forced FA3 raises
}


@pytest.mark.parametrize("name", STOCK_CHOICE_CASES)
def test_explain_reports_the_stock_choice_for_a_negative_scale(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use fake tensors on a GPU device and a fixed choice of stock."""
    keys, scope, looks = STOCK_CHOICE_CASES[name]
    set_stock_choice(monkeypatch, lambda *_, **__: FLASH.value)
    with use_device_backend("cpu"), FakeTensorMode() as mode, scope():
        bindings.set_facts_override(GPUS["a100"])  # on an A100, auto serves nothing and fa3 cannot run
        query, key, value = (
            FakeTensor(mode, torch.empty(size, dtype=torch.bfloat16, device="meta"), torch.device("cuda:0"))
            for size in ((2, 4, 128, 64), keys, keys)
        )
        choices = [torch_flashplug.explain(query, key, value, scale=scale).stock_choice for scale in (None, NEGATIVE)]
    # with the CPU stub backend, no call suits the efficient attention
    nan = f"MATH; {FLASH.name} would return NaN with this scale"
    assert choices == [FLASH.name, nan if looks else FLASH.name]


@pytest.mark.parametrize("watch", ["mode", "grad", "vmap", "none"])
def test_masked_calls_are_served_and_explained_under_modes_and_transforms(watch: str) -> None:
    """Check masked calls under dispatch modes and functorch.

    There, F.scaled_dot_product_attention converts the mask to floats, and kernels receive the mask as a bias.
    """
    with use_device_backend("cpu") as device_backend:
        tensors: list[Tensor] = [*device_backend.qkv(), torch.ones(128, 128, dtype=torch.bool)]
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
        took = device_backend.pop_path_counts()
    assert [plan.backend for plan in plans] == ["fa3"] and took["ours_fwd"] == 1
    assert ("_mask_" if watch == "none" else "_bias_") in plans[0].kernel


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_explain_applies_autocast(dtype: torch.dtype) -> None:
    """Autocast converts all dtypes except fp64, and also converts the mask."""
    tensors = (torch.zeros(2, 4, 256, 64, dtype=dtype) for _ in range(3))
    before = torch.get_autocast_dtype("cuda")
    # torch.autocast stays off without a GPU, so the test sets the state directly.
    with _set(functools.partial(torch.set_autocast_enabled, "cuda"), True, False):
        with _set(functools.partial(torch.set_autocast_dtype, "cuda"), torch.bfloat16, before):
            plan = torch_flashplug.explain(*tensors, torch.zeros(256, 256, dtype=dtype), device="h100")
    wide = dtype is torch.float64
    assert plan.backend == ("stock" if wide else "fa3")
    name = "float64" if wide else "bfloat16"
    assert name in plan.call and f"mask {name}" in plan.call and not plan.error


@pytest.mark.parametrize("backend, raised", [("auto", True), ("fa3", False)])
def test_explain_reports_the_error_if_no_backend_is_allowed(
    backend: str, raised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Predict the error of stock if no allowed backend of `sdpa_kernel` can run the call.

    Calls served by our kernels raise nothing.
    """

    def refuse(*_: object, **__: object) -> int:
        raise RuntimeError("No available kernel. Aborting execution.")

    with use_device_backend("cpu"), FakeTensorMode() as mode, sdpa_backend(backend):
        set_stock_choice(monkeypatch, refuse)
        bindings.set_facts_override(GPUS["h100" if backend == "fa3" else "a100"])
        metas = (torch.empty((2, 4, 128, 64), dtype=torch.bfloat16, device="meta") for _ in range(3))
        plan = torch_flashplug.explain(*(FakeTensor(mode, tensor, torch.device("cuda:0")) for tensor in metas))
    assert plan.backend == ("stock" if raised else "fa3")
    assert plan.error == ("No available kernel. Aborting execution." if raised else "")


@pytest.mark.parametrize("choice", [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION])
def test_explain_reports_that_math_refuses_is_causal_with_a_mask(
    choice: SDPBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Math of stock refuses such calls; flash, efficient and cuDNN attention run them."""
    set_stock_choice(monkeypatch, lambda *_, **__: choice.value)
    with use_device_backend("cpu"), FakeTensorMode() as mode:
        bindings.set_facts_override(GPUS["h100"])
        sizes = (*[(2, 4, 128, 64)] * 3, (128, 128))
        metas = [torch.empty(size, dtype=torch.bfloat16, device="meta") for size in sizes]
        fakes = [FakeTensor(mode, tensor, torch.device("cuda:0")) for tensor in metas]
        plan = torch_flashplug.explain(*fakes, is_causal=True)
    assert plan.backend == "stock" and plan.stock_choice == choice.name
    assert ("Explicit attn_mask" in plan.error) is (choice is SDPBackend.MATH)
