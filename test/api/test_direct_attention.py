"""Plain calls of attention() in one C function: the same launches and results as on the general path in Python.

Recording kernels stand for real kernels: the launch of both paths must have the same arguments.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from recording_kernels import Recorder, recorded_launches
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import torch_flashplug
from torch_flashplug import VarlenPlan, attention, plan_varlen
from torch_flashplug.api import attention_args, direct_attention, startup
from torch_flashplug.dispatch import bindings

HQ, HKV, D = 4, 2, 64
ANSWERS: list[object] = []  # of the C function


def random_tensor(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


TABLE = {"block_table": torch.arange(6, dtype=torch.int32).flip(0).view(2, 3), "seqused_k": ints(40, 17)}
# Calls by form: the shapes of q and of k and v before the heads, and the lengths.
FORMS = {
    "packed": ((9,), (9,), {"cu_seqlens_q": ints(0, 4, 9)}),
    "packed_keys": (
        (9,), (20,), {"cu_seqlens_q": ints(0, 4, 9), "cu_seqlens_k": ints(0, 12, 20), "seqused_k": ints(7, 8)},
    ),
    "cache": ((2, 1), (2, 40), {"seqused_k": ints(7, 40)}),
    "cache_rows": ((2, 3), (2, 40), {"seqused_k": ints(7, 40)}),
    "pages": ((2, 1), (6, 16), TABLE),
    "pages_rows": ((2, 3), (6, 16), TABLE),
}  # fmt: skip
OPTIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "causal": {"causal": True},
    "bottom_right": {"causal": "bottom_right"},
    "top_left": {"causal": "top_left"},
    "window": {"window": (5, None)},
    "window_and_causal": {"window": (5, 3), "causal": True},
    "no_bounds": {"window": (-1, -1)},
    "softcap": {"softcap": 2.0},
    "softcap_of_int": {"softcap": 2},
    "sinks": {"sinks": random_tensor(HQ, dtype=torch.float32)},
    "sinks_of_16_bits": {"sinks": torch.nn.Parameter(random_tensor(HQ), requires_grad=False)},
    "sinks_with_strides": {"sinks": random_tensor(HQ, 2, dtype=torch.float32)[:, 0]},
    "scale": {"scale": 0.3},
    "scale_of_int": {"scale": 2},
    "negative_scale": {"scale": -0.3},
    "zero_scale": {"scale": 0.0},
    "lse": {"return_lse": True},
    "one_split": {"num_splits": 1},
    "three_splits": {"num_splits": 3},
    "split_size": {"fixed_split_size": 128},
    "large_split_size": {"fixed_split_size": 2**40},
    "bounds": {"max_seqlen_q": 1, "max_seqlen_k": 0},
}


def make_call(form: str, dtype: torch.dtype = torch.bfloat16) -> tuple[list[Tensor], dict[str, object]]:
    rows, keys, lengths = FORMS[form]
    shapes = ((*rows, HQ, D), (*keys, HKV, D), (*keys, HKV, D))
    return [random_tensor(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)], dict(lengths)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """Return the recorder of launches. Python takes kernels to exist for CPU tensors, as C++ does."""
    attend = direct_attention.attend

    def observed(*arguments: object) -> object:
        ANSWERS.append(attend(*arguments))
        return ANSWERS[-1]

    def has_kernel(_: int, query: Tensor, key: Tensor, value: Tensor) -> bool:
        return query.dtype == key.dtype == value.dtype and query.dtype in attention_args.SIXTEEN_BITS

    monkeypatch.setattr(direct_attention, "attend", observed)
    monkeypatch.setattr(attention_args, "_has_kernel_up_to", has_kernel)
    ANSWERS.clear()
    with recorded_launches() as recorder, torch.no_grad():
        yield recorder


def took_direct_path() -> bool:
    """Return True if the last call was direct, and False if the C function refused the call or was not asked."""
    assert len(ANSWERS) <= 1
    return bool(ANSWERS) and ANSWERS.pop() is not None


@contextlib.contextmanager
def general_path() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct_attention, "attend", lambda *_: None)
        yield


def facts_of(results: Tensor | tuple[Tensor, Tensor]) -> list[tuple[object, ...]]:
    """Return everything that a program may see of results, but not whether a result is a view."""
    tensors = results if isinstance(results, tuple) else (results,)
    assert all(type(x) is Tensor for x in tensors)
    return [(x.dtype, x.shape, x.stride(), x.requires_grad, x.is_inference(), x.tolist()) for x in tensors]


def check_same_on_both_paths(recorder: Recorder, call: Callable[[], object], is_direct: bool = True) -> None:
    launches, facts = [], []
    for scope in (contextlib.nullcontext, general_path):
        with scope():
            facts.append(facts_of(call()))
        launches.append(recorder.take())
    assert took_direct_path() is is_direct
    assert facts[0] == facts[1]
    assert launches[0] == launches[1] and len(launches[0]) == is_direct


@pytest.mark.parametrize("form", FORMS)
def test_launch_and_results_equal_those_of_the_general_path(recorder: Recorder, form: str) -> None:
    for option, settings in OPTIONS.items():
        (q, k, v), lengths = make_call(form, torch.float16 if option == "plain" else torch.bfloat16)
        recorder.known = {"q": q, "k": k, "v": v}
        check_same_on_both_paths(recorder, lambda: attention(q, k, v, **lengths, **settings))  # noqa: B023


# Dense calls: whether the C function takes the call, for 80 query rows and for decode.
DENSE_OPTIONS = {
    "plain": (False, False),
    "causal": (False, False),
    "top_left": (False, False),
    "window": (True, False),
    "window_and_causal": (True, False),
    "no_bounds": (False, False),
    "softcap": (True, True),
    "sinks": (True, False),
    "sinks_of_16_bits": (True, False),
    "lse": (True, False),
    "one_split": (False, False),
}
DENSE_WINDOWS: tuple[dict[str, object], ...] = (
    {"window": (None, 3), "causal": "top_left"},
    {"window": (30, 0), "causal": "top_left"},
    {"window": (None, 0)},
    {"window": (300, 0)},
    {"window": (300, 300)},
    {"window": (0, 0)},
    {"window": (3, -1)},
    {"window": (-1, 7)},
)
DENSE_SIZES = ((80, 100), (100, 80), (90, 90))


@pytest.mark.parametrize("rows", [80, 2])
def test_dense_calls_equal_those_of_the_general_path(recorder: Recorder, rows: int) -> None:
    q, k, v = random_tensor(2, rows, HQ, D), random_tensor(2, 100, HKV, D), random_tensor(2, 100, HKV, D, seed=1)
    recorder.known = {"q": q, "k": k, "v": v}
    for option, are_direct in DENSE_OPTIONS.items():
        for more in ({}, {"out": torch.empty_like(q)}):
            check_dense(recorder, lambda: attention(q, k, v, **OPTIONS[option], **more), are_direct[rows == 2])  # noqa: B023
    check_dense(recorder, lambda: attention(q, k, v, num_splits=1, softcap=2.0), rows == 80)


def check_dense(recorder: Recorder, call: Callable[[], Tensor], is_direct: bool) -> None:
    """Compare both paths. A call of F.sdpa launches a kernel or runs math, with the same numbers."""
    facts = facts_of(call())
    launches = recorder.take()
    assert took_direct_path() is is_direct
    with general_path():
        assert facts_of(call()) == facts
    assert recorder.take() == launches


@pytest.mark.parametrize("sizes", DENSE_SIZES, ids=str)
def test_windows_of_dense_calls(recorder: Recorder, sizes: tuple[int, int]) -> None:
    """Masked keys at either end are cut off. A window that is `is_causal`, or masks nothing, is left to F.sdpa."""
    q, k, v = (random_tensor(2, n, h, D, seed=h) for n, h in zip((sizes[0], *2 * sizes[1:]), (HQ, HKV, HKV)))
    for window, more in itertools.product(DENSE_WINDOWS, ({}, {"return_lse": True}, {"softcap": 2.0})):
        recorder.known = {"q": q, "k": k, "v": v}
        with general_path():
            expected = facts_of(attention(q, k, v, **window, **more))
        launches = recorder.take()
        assert facts_of(attention(q, k, v, **window, **more)) == expected
        assert recorder.take() == launches and len(launches) == 1
        (answer,) = ANSWERS
        ANSWERS.clear()
        assert answer is not None or not more


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "one_tensor_of_heads": lambda x: torch.stack((x, x), -3)[..., 0, :, :],
    "padded_rows": lambda x: torch.nn.functional.pad(x, (0, 8))[..., :-8],
    "unaligned_rows": lambda x: torch.nn.functional.pad(x, (1, 0))[..., 1:],
    "heads_first": lambda x: x.transpose(-3, -2).contiguous().transpose(-3, -2),
    "reversed_dims": lambda x: x.mT.contiguous().mT,
}


@pytest.mark.parametrize("form", FORMS)
def test_layouts_of_operands(recorder: Recorder, form: str) -> None:
    operands, lengths = make_call(form)
    for layout, changed in itertools.product(LAYOUTS.values(), ((0,), (1, 2), (0, 1, 2))):
        q, k, v = (layout(x) if i in changed else x for i, x in enumerate(operands))
        recorder.known = {"q": q, "k": k, "v": v}
        check_same_on_both_paths(recorder, lambda: attention(q, k, v, **lengths, return_lse=True))  # noqa: B023


@pytest.mark.parametrize("form", FORMS)
def test_value_of_another_head_dim(recorder: Recorder, form: str) -> None:
    (q, k, v), lengths = make_call(form)
    check_same_on_both_paths(recorder, lambda: attention(q, k, v[..., :32], **lengths))
    check_same_on_both_paths(recorder, lambda: attention(q, k[..., :1, :], v[..., :1, :], **lengths))


@pytest.mark.parametrize("form", FORMS)
def test_out_is_written_and_returned(recorder: Recorder, form: str) -> None:
    (q, k, v), lengths = make_call(form)
    expected, expected_lse = attention(q, k, v, **lengths, return_lse=True)
    assert took_direct_path()
    for shift in (0, 8, 1):
        buffer = torch.full((*expected.shape[:-2], HQ + 2, D + 24), -7.0, dtype=q.dtype)
        out = buffer[..., 1 : 1 + HQ, shift : shift + D]
        recorder.known = {"out": out}
        recorder.take()
        writes = out._version
        actual, lse = attention(q, k, v, **lengths, out=out, return_lse=True)
        assert took_direct_path() and actual is out and out._version > writes
        ((_, launch),) = recorder.take()
        assert (launch["o"][-1][0] == "out") == (shift != 1)
        assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
        out.fill_(-7.0)
        assert (buffer == -7.0).all()
        assert attention(q, k, v, **lengths, out=out) is out and took_direct_path()
        recorder.take()
        check_same_on_both_paths(recorder, lambda: attention(q, k, v, **lengths, out=out))  # noqa: B023


def test_out_between_operands_in_one_tensor(recorder: Recorder) -> None:
    (q, k, v), lengths = make_call("packed")
    rows = torch.zeros(9, 3 * HQ, D, dtype=q.dtype)
    assert attention(rows[:, :HQ], k, v, **lengths, out=rows[:, HQ : 2 * HQ]) is not None and took_direct_path()
    with pytest.raises(ValueError, match="out must own its memory"):
        attention(rows[:, :HQ], k, v, **lengths, out=rows[:, HQ - 1 : 2 * HQ - 1])
    assert not took_direct_path()


SCOPES = (torch.no_grad, torch.enable_grad, torch.inference_mode, lambda: torch_flashplug.sdpa_backend("fa3"))


@pytest.mark.parametrize("scope", SCOPES, ids=("no_grad", "enable_grad", "inference_mode", "sdpa_backend"))
@pytest.mark.parametrize("form", FORMS)
def test_scopes_of_plain_calls(recorder: Recorder, form: str, scope: Callable) -> None:
    with scope():
        (q, k, v), lengths = make_call(form)
        out = torch.empty_like(q)
        for more in ({"return_lse": True}, {"out": out}):
            check_same_on_both_paths(recorder, lambda: attention(q, k, v, **lengths, **more))  # noqa: B023
    check_same_on_both_paths(recorder, lambda: attention(q, k, v, **lengths))


def test_plan_of_the_call(recorder: Recorder) -> None:
    for form in ("packed", "packed_keys"):
        for scope in (torch.no_grad, torch.inference_mode):
            with scope():
                (q, k, v), lengths = make_call(form)
                lengths = {name: x.clone() for name, x in lengths.items()}
                plan = plan_varlen(q, k, v, **lengths, causal=True, window=(5, 0))
                recorder.take()
                recorder.known = {"lists": plan.lists}
                settings = {"causal": True, "window": (5, 0), "plan": plan}
                check_same_on_both_paths(recorder, lambda: attention(q, k, v, **lengths, **settings))  # noqa: B023
    assert plan.lists is not None


def test_other_plans_are_refused_on_the_general_path(recorder: Recorder) -> None:
    (q, k, v), lengths = make_call("packed")
    cu = lengths["cu_seqlens_q"].clone()
    plan = plan_varlen(q, k, v, cu_seqlens_q=cu)
    for says, operands, more in (
        ("q.shape", (q[:-1], k, v), {}),
        ("k.shape", (q, k[:-1], v[:-1]), {}),
        ("window", (q, k, v), {"causal": True}),
        ("different cu_seqlens_q", (q, k, v), {"cu_seqlens_q": cu.clone()}),
        ("different seqused_k", (q, k, v), {"seqused_k": ints(1, 1)}),
        ("the kernel, the window", (q, k, v), {"softcap": 2.0}),
    ):
        with pytest.raises(ValueError, match=f"attention: plan .*{says}"):
            attention(*operands, **{"cu_seqlens_q": cu, "plan": plan} | more)
        assert not took_direct_path()
    for malformed in (plan._replace(lengths=()), plan._replace(versions=(None, 3, None)), plan._replace(window=None)):
        with pytest.raises((ValueError, TypeError, AttributeError)):
            attention(q, k, v, cu_seqlens_q=cu, plan=malformed)
        assert not took_direct_path()
    cu.add_(0)
    with pytest.raises(ValueError, match="written to after plan"):
        attention(q, k, v, cu_seqlens_q=cu, plan=plan)
    assert not took_direct_path()


# ---- calls that are not plain ----


class _Subclass(Tensor):
    pass


class _DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class _FunctionMode(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def profiler() -> contextlib.AbstractContextManager:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


OTHER_SCOPES = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "dispatch_mode": _DispatchMode,
    "function_mode": _FunctionMode,
    "default_device": lambda: torch.device("cpu"),
    "below_autograd": torch._C._AutoDispatchBelowAutograd,
    "profiler": profiler,
    "math": lambda: torch_flashplug.sdpa_backend("math"),
}


@pytest.mark.parametrize("scope", OTHER_SCOPES)
@pytest.mark.parametrize("form", ["packed", "cache", "pages"])
def test_scopes_that_leave_the_direct_path(recorder: Recorder, form: str, scope: str) -> None:
    (q, k, v), lengths = make_call(form)
    with OTHER_SCOPES[scope]():
        assert attention(q, k, v, **lengths).shape == q.shape
    assert not took_direct_path()
    assert attention(q, k, v, **lengths).shape == q.shape and took_direct_path()


OTHER_ARGUMENTS: dict[str, dict[str, object]] = {
    "window_of_a_list": {"window": [5, 0]},
    "window_of_numpy": {"window": (np.int64(5), 0)},
    "scale_of_a_tensor": {"scale": torch.tensor(0.5)},
    "scale_not_finite": {"scale": float("inf")},
    "splits_of_numpy": {"num_splits": np.int64(3)},
    "bound_of_numpy": {"max_seqlen_k": np.int64(3)},
    "lse_by_a_number": {"return_lse": 1},
    "sinks_of_64_bits": {"sinks": random_tensor(HQ, dtype=torch.float64)},
}


@pytest.mark.parametrize("name", OTHER_ARGUMENTS)
def test_arguments_that_leave_the_direct_path(recorder: Recorder, name: str) -> None:
    (q, k, v), lengths = make_call("packed")
    results = attention(q, k, v, **lengths, **OTHER_ARGUMENTS[name])
    assert not took_direct_path()
    assert isinstance(results, tuple) == (name == "lse_by_a_number")


def test_tensors_that_leave_the_direct_path(recorder: Recorder) -> None:
    (q, k, v), lengths = make_call("packed")
    cu = lengths["cu_seqlens_q"]
    for operands, more in (
        ((q.float(), k.float(), v.float()), {}),
        ((torch._neg_view(q), k, v), {}),
        ((q.as_subclass(_Subclass), k, v), {}),
        ((q, k, v.as_subclass(_Subclass)), {}),
        ((q[:, :, :60], k[:, :, :60], v), {}),  # 60 is no head dim of kernels
        ((q[:0], k[:0], v[:0]), {"cu_seqlens_q": ints(0, 0)}),
        ((q, k, v), {"cu_seqlens_q": torch.stack((cu, cu), 1)[:, 0]}),
        ((q, k, v), {"sinks": random_tensor(HQ).as_subclass(_Subclass)}),
    ):
        attention(*operands, **{"cu_seqlens_q": cu} | more)
        assert not took_direct_path()
    (q, k, v), lengths = make_call("pages")
    wide = torch.cat((lengths["block_table"], lengths["block_table"]), 1)
    attention(q, k, v, block_table=wide[:, :3], seqused_k=lengths["seqused_k"])
    assert not took_direct_path()
    (q, k, v), lengths = make_call("cache")
    attention(random_tensor(2, 40, HQ, D), k, v, **lengths)  # many rows
    assert not took_direct_path()


def test_tensors_without_memory_leave_the_direct_path(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel would read or write address 0, which ends all CUDA work of the process."""
    failures: list[object] = []  # of launches, which read their arguments
    monkeypatch.setattr(sys, "unraisablehook", failures.append)
    (q, k, v), lengths = make_call("packed")
    zeros, freed = torch._efficientzerotensor(q.shape, dtype=q.dtype), q.clone()
    freed.untyped_storage().resize_(0)
    assert attention(zeros, k, v, **lengths).shape == q.shape and not took_direct_path()
    for operands, more in (((freed, k, v), {}), ((q, k, v), {"out": freed})):
        with pytest.raises(RuntimeError, match="out of bounds for storage of size 0"):
            attention(*operands, **lengths, **more)
        assert not took_direct_path()
    assert not failures


def test_forms_that_leave_the_direct_path(recorder: Recorder) -> None:
    (q, k, v), lengths = make_call("pages")
    eight = [(x * 30).to(torch.int8) for x in (k, v)]
    for operands, more in (
        ((q[:, 0], k, v), {"cu_seqlens_q": ints(0, 1, 2), "max_seqlen_q": 1}),
        ((q[:, 0], k, v), {"cu_seqlens_q": ints(0, 1, 2)}),
        ((q, *eight), {"k_scale": 0.03, "v_scale": 0.03}),
    ):
        attention(*operands, **lengths, **more)
        assert not took_direct_path()
    attention(q, k[:2], v[:2])
    assert not ANSWERS  # F.sdpa has all arguments of the call


@pytest.mark.parametrize(
    "error, says, form, arguments",
    [
        (ValueError, "causal must be", "packed", {"causal": "left"}),
        (ValueError, "causal must be", "packed", {"causal": 1}),
        (ValueError, "window must be", "packed", {"window": (-2, 0)}),
        (ValueError, "window must be", "packed", {"window": (True, 0)}),
        (ValueError, "window must be", "packed", {"window": (2**70, 0)}),
        (ValueError, "softcap must be", "packed", {"softcap": -1.0}),
        (ValueError, "softcap must be", "packed", {"softcap": float("nan")}),
        (ValueError, "softcap must be", "packed", {"softcap": True}),
        (TypeError, "scale must be", "packed", {"scale": "1"}),
        (ValueError, "num_splits must be", "packed", {"num_splits": 0}),
        (ValueError, "num_splits must be", "pages", {"num_splits": 256}),
        (ValueError, "multiple of 128", "pages", {"fixed_split_size": 100}),
        (ValueError, "must not be passed together", "pages", {"fixed_split_size": 128, "num_splits": 1}),
        (TypeError, "max_seqlen_q must be", "packed", {"max_seqlen_q": 1.0}),
        (ValueError, "max_seqlen_k must be", "packed", {"max_seqlen_k": -1}),
        (ValueError, "cu_seqlens_q must be an int32", "packed", {"cu_seqlens_q": torch.tensor([0, 9])}),
        (ValueError, "the same number of sequences", "packed", {"cu_seqlens_k": ints(0, 9)}),
        (ValueError, "the same number of sequences", "packed", {"seqused_k": ints(9)}),
        (ValueError, "cu_seqlens_q must be an int32", "packed", {"cu_seqlens_q": None, "cu_seqlens_k": ints(0, 9)}),
        (ValueError, "sinks must be", "packed", {"sinks": random_tensor(HQ + 1)}),
        (ValueError, "sinks must be", "packed", {"sinks": ints(*range(HQ))}),
        (ValueError, "out must be", "packed", {"out": random_tensor(9, HQ, D - 1)}),
        (ValueError, "out must be", "packed", {"out": random_tensor(9, HQ, D, dtype=torch.float16)}),
        (ValueError, "share", "packed", {"out": random_tensor(1, HQ, D).expand(9, -1, -1)}),
        (ValueError, "lazily negated", "packed", {"out": torch._neg_view(random_tensor(9, HQ, D))}),
        (TypeError, "plan must be", "packed", {"plan": 3}),
        (ValueError, "seqused_k must", "cache", {"seqused_k": ints(3)}),
        (ValueError, "seqused_k must", "pages", {"seqused_k": torch.tensor([40, 17])}),
        (ValueError, "must fit", "pages", {"seqused_k": ints(3)}),
        (ValueError, "block_table must", "pages", {"block_table": ints(3, 4)}),
        (ValueError, "cu_seqlens_k is not supported", "pages", {"cu_seqlens_k": ints(0, 1, 2)}),
        (ValueError, "at least 256", "pages", {"fixed_split_size": 128, "block_table": torch.zeros(2, 2100).int()}),
        (ValueError, "k_scale and v_scale must be None", "pages", {"k_scale": 1.0}),
    ],
)  # fmt: skip
def test_invalid_arguments_raise_the_errors_of_the_general_path(
    recorder: Recorder, error: type[Exception], says: str, form: str, arguments: dict[str, object]
) -> None:
    operands, lengths = make_call(form)
    with pytest.raises(error, match=says):
        attention(*operands, **lengths | arguments)
    assert not took_direct_path() and not recorder.take()


def test_invalid_operands_raise_the_errors_of_the_general_path(recorder: Recorder) -> None:
    for form in FORMS:
        (q, k, v), lengths = make_call(form)
        for operands in (
            (q, k[..., :32], v), (q, k, v[..., :1, :]), (q[..., :3, :], k, v), (q, k, v.half()), (q, k, v[:1]),
            (q[None], k, v), (q, k[:1], v[:1]),
        ):  # fmt: skip
            if not form.startswith("cache") and operands[1].shape[0] == operands[2].shape[0] == 1:
                continue  # only a cache has as many sequences as the query
            with pytest.raises((ValueError, TypeError)):
                attention(*operands, **lengths)
            assert not took_direct_path() and not recorder.take()


def test_calls_with_gradients_leave_the_direct_path(recorder: Recorder) -> None:
    (q, k, v), lengths = make_call("packed")
    sinks = random_tensor(HQ, dtype=torch.float32)
    for leaf in (q, k, v, sinks):
        leaf.requires_grad_()
        with torch.enable_grad():
            assert attention(q, k, v, **lengths, sinks=sinks).requires_grad
            assert not took_direct_path()
        assert not attention(q, k, v, **lengths, sinks=sinks).requires_grad and took_direct_path()
        leaf.requires_grad_(False)
    out = torch.empty_like(q).requires_grad_()
    with torch.enable_grad(), pytest.raises(RuntimeError, match="gradients are not supported with out"):
        attention(q, k, v, **lengths, out=out)
    assert not took_direct_path()
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-mode"):
        attention(q, k, v, **lengths)
    assert not ANSWERS


def test_transforms_and_tracers_leave_the_direct_path(recorder: Recorder) -> None:
    (q, k, v), lengths = make_call("packed")

    def attend(q: Tensor) -> Tensor:
        return attention(q, k, v, **lengths)

    torch.vmap(attend)(torch.stack((q, q)))
    torch.vmap(lambda x: attend(q) + x)(torch.zeros(2))
    torch.jit.trace(attend, (q,), check_trace=False)
    with FakeTensorMode() as fake:
        fakes = [fake.from_tensor(x) for x in (q, k, v, lengths["cu_seqlens_q"])]
        attention(*fakes[:3], cu_seqlens_q=fakes[3])
    assert ANSWERS and not any(answer is not None for answer in ANSWERS)


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_calls_do_without_the_c_function(recorder: Recorder) -> None:
    (q, k, v), lengths = make_call("packed")
    compiled = torch.compile(lambda q: attention(q, k, v, **lengths), backend="aot_eager", fullgraph=True)
    assert compiled(q).shape == q.shape and not ANSWERS and len(recorder.take()) == 1


def test_missing_kernels_leave_the_direct_path(recorder: Recorder) -> None:
    (q, k, v), lengths = make_call("packed")
    recorder.reason = "no kernel in this test"
    startup.push_tables()  # makes C++ search the kernels again
    attention(q, k, v, **lengths)
    assert not took_direct_path() and not recorder.take()
    with torch_flashplug.sdpa_backend("fa3"), pytest.raises(RuntimeError, match="no kernel in this test"):
        attention(q, k, v, **lengths)
    assert not took_direct_path()


def test_counters_of_both_paths_are_equal(recorder: Recorder) -> None:
    (q, k, v), lengths = make_call("pages")
    counts = []
    for scope in (contextlib.nullcontext, general_path):
        with scope():
            bindings.counters(reset=True)
            attention(q, k, v, **lengths)
            counts.append(bindings.counters(reset=True))
    assert counts[0] == counts[1] and counts[0]["ours_fwd"] == 1 and took_direct_path()


def test_threads_share_the_c_function(recorder: Recorder) -> None:
    """Call from many threads, in inference mode in half of the threads."""
    (q, k, v), lengths = make_call("cache")
    expected = attention(q, k, v, **lengths)
    results: list[Tensor] = []

    def run(scope: Callable) -> None:
        for _ in range(20):
            with scope():
                results.append(attention(q, k, v, **lengths))

    threads = [threading.Thread(target=run, args=(scope,)) for scope in (torch.no_grad, torch.inference_mode) * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 160 and all(torch.equal(x, expected) for x in results)
    assert len(ANSWERS) == 161 and all(answer is not None for answer in ANSWERS)


def test_c_function_has_the_arguments_of_attention() -> None:
    parameters = [name for name in inspect.signature(attention).parameters if name != "v_dim"]  # `v` stands for both
    assert parameters == list(bindings.names("attention arguments"))
    assert list(VarlenPlan._fields) == list(bindings.names("plan fields"))
    assert direct_attention.attend is not direct_attention._refuse
    assert direct_attention.attend(1, 2, 3) is None


def test_results_and_arguments_are_not_leaked(recorder: Recorder) -> None:
    (q, k, v), lengths = make_call("packed")
    out = torch.empty_like(q)
    objects = (q, k, v, out, lengths["cu_seqlens_q"], None)
    counts = [sys.getrefcount(x) for x in objects[:-1]]
    for _ in range(50):
        result, lse = attention(q, k, v, **lengths, return_lse=True)
        assert sys.getrefcount(result) == sys.getrefcount(lse) == 3  # noqa: PLR2004
        ANSWERS.clear()
        attention(q, k, v, **lengths, out=out)
        ANSWERS.clear()
    assert [sys.getrefcount(x) for x in objects[:-1]] == counts
