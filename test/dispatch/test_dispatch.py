"""Dispatch of calls: enabled, disabled, forced and refused.

The path of a call is asserted by the counters of the core. Calls outside the plugin must be identical to stock torch.
"""

from __future__ import annotations

import logging
import threading

import pytest
import torch
import torch.nn.functional as F
from device_backend import DeviceBackend
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_flashplug
from torch_flashplug import env, sdpa_backend
from torch_flashplug.api import backend as backend_api
from torch_flashplug.api import startup
from torch_flashplug.dispatch import bindings, callbacks
from torch_flashplug.registry.architectures import BACKENDS, KERNEL_BACKENDS
from torch_flashplug.torch_hooks import sdpa_composite


def num_ours_fwd(took: dict[str, int]) -> int:
    return took.get("ours_fwd", 0)


# ---- enable and disable ----


def make_calls(device_backend: DeviceBackend) -> dict[str, tuple[list, dict]]:
    q, k, v = device_backend.qkv()
    gqa = device_backend.qkv(heads=4, kv_heads=2)
    cross = device_backend.qkv(rows=128, keys=192)
    mask = torch.ones(128, 128, dtype=torch.bool, device=device_backend.device).tril()
    return {
        "plain": ([q, k, v], {}),
        "causal": ([q, k, v], {"is_causal": True}),
        "cross_causal": (cross, {"is_causal": True}),
        "scale": ([q, k, v], {"scale": 0.3}),
        "gqa": (gqa, {"enable_gqa": True}),
        "mask": ([q, k, v, mask], {}),
        "bias": ([q, k, v, torch.where(mask, 0.0, -torch.inf).to(device_backend.dtype)], {}),
        "fp32": ([t.float() for t in (q, k, v)], {}),
        "head_dim_12": ([t[..., :12] for t in (q, k, v)], {}),
        "last_stride": ([t.transpose(-1, -2).contiguous().transpose(-1, -2) for t in (q, k, v)], {}),
    }


SERVED = ("plain", "causal", "cross_causal", "scale", "gqa", "mask", "bias")


def paths_and_outputs(device_backend: DeviceBackend) -> dict[str, tuple[dict[str, int], torch.Tensor]]:
    device_backend.pop_path_counts()
    return {
        name: (F.scaled_dot_product_attention(*args, **kwargs), device_backend.pop_path_counts())[::-1]
        for name, (args, kwargs) in make_calls(device_backend).items()
    }


def test_disable_restores_stock_exactly(device_backend: DeviceBackend) -> None:
    device_backend.disable()
    before = paths_and_outputs(device_backend)
    device_backend.enable()
    during = paths_and_outputs(device_backend)
    device_backend.disable()
    after = paths_and_outputs(device_backend)
    for name, (_, output) in before.items():
        assert before[name][0] == after[name][0] == {}, name  # the choice hook is removed, not only passive
        assert torch.equal(after[name][1], output), name
        assert num_ours_fwd(during[name][0]) == (name in SERVED), name
        if name not in SERVED:  # unserved calls run on stock, bit for bit
            assert torch.equal(during[name][1], output), name
        torch.testing.assert_close(during[name][1], output, atol=2e-2, rtol=2e-2)
        assert during[name][1].stride() == output.stride(), name


def test_disable_twice_and_enable_twice(hooked_backend: DeviceBackend) -> None:
    q, k, v = hooked_backend.qkv()
    torch_flashplug.enable()
    torch_flashplug.disable()
    torch_flashplug.disable()
    F.scaled_dot_product_attention(q, k, v)
    assert num_ours_fwd(hooked_backend.pop_path_counts()) == 0


@pytest.mark.parametrize("reason", ["asked_for", "signature_differs"])
def test_composite_hook_is_installed_on_request_or_without_the_choice_hook(
    monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    torch_flashplug.disable()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    if reason == "asked_for":
        monkeypatch.setenv("TORCH_FLASHPLUG_HOOK", "composite")
    else:
        monkeypatch.setattr(bindings, "install", lambda dispatch_slot: 3)
    torch_flashplug.enable()
    assert sdpa_composite.installed()
    torch_flashplug.disable()
    assert not sdpa_composite.installed()
    monkeypatch.undo()
    torch_flashplug.enable()


def test_backward_of_a_plugin_forward_runs_after_disable(device_backend: DeviceBackend) -> None:
    q, k, v = device_backend.qkv(grad=True)
    out = F.scaled_dot_product_attention(q, k, v)
    device_backend.disable()
    out.sum().backward()
    actual = q.grad.clone()
    q.grad = None
    F.scaled_dot_product_attention(q, k, v).sum().backward()
    torch.testing.assert_close(actual, q.grad, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("grad", [False, True])
def test_both_hooks_serve_and_differentiate(hooked_backend: DeviceBackend, grad: bool) -> None:
    q, k, v = hooked_backend.qkv(grad=grad)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert num_ours_fwd(hooked_backend.pop_path_counts()) == 1
    with sdpa_backend("stock"):
        stock = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert num_ours_fwd(hooked_backend.pop_path_counts()) == 0
    torch.testing.assert_close(out, stock, atol=2e-2, rtol=2e-2)
    if grad:
        actual = torch.autograd.grad(out.float().square().sum(), (q, k, v))
        expected = torch.autograd.grad(stock.float().square().sum(), (q, k, v))
        for a, b in zip(actual, expected):
            torch.testing.assert_close(a, b, atol=6e-2, rtol=6e-2)


# ---- sdpa_backend ----


def test_blocks_nest_and_are_exception_safe(hooked_backend: DeviceBackend) -> None:
    q, k, v = hooked_backend.qkv()

    def served() -> bool:
        F.scaled_dot_product_attention(q, k, v)
        return num_ours_fwd(hooked_backend.pop_path_counts()) == 1

    block = sdpa_backend("stock")
    is_served = [served()]
    with block:
        is_served.append(served())
        with sdpa_backend("fa3"):
            is_served.append(served())
            with block, pytest.raises(KeyError):
                is_served.append(served())
                raise KeyError
            is_served.append(served())
        is_served.append(served())
        with sdpa_backend("auto"):
            is_served.append(served())
    is_served.append(served())
    assert is_served == [True, False, True, False, True, False, True, True]
    assert bindings.mode() == 0


def test_backend_decorator_applies_to_recursive_calls(hooked_backend: DeviceBackend) -> None:
    q, k, v = hooked_backend.qkv()

    @sdpa_backend("stock")
    def attention(depth: int) -> torch.Tensor:
        """Doc."""
        return attention(depth - 1) if depth else F.scaled_dot_product_attention(q, k, v)

    attention(3)
    assert num_ours_fwd(hooked_backend.pop_path_counts()) == 0 and attention.__doc__ == "Doc." and bindings.mode() == 0


def test_backend_blocks_are_per_thread(hooked_backend: DeviceBackend) -> None:
    q, k, v = hooked_backend.qkv()
    inside, done = threading.Event(), threading.Event()
    modes = []

    def run_stock_block() -> None:
        with sdpa_backend("stock"):
            modes.append(bindings.mode())
            inside.set()
            done.wait(30)
        modes.append(bindings.mode())

    thread = threading.Thread(target=run_stock_block)
    thread.start()
    assert inside.wait(30)
    F.scaled_dot_product_attention(q, k, v)
    assert num_ours_fwd(hooked_backend.pop_path_counts()) == 1 and bindings.mode() == 0
    done.set()
    thread.join()
    assert modes == [BACKENDS.index("stock"), 0]


def test_unknown_backend_name_is_refused() -> None:
    with pytest.raises(ValueError, match="auto, math, stock, fa3, fa2"):
        sdpa_backend("fa4")


def test_forced_math_equals_math_of_torch(hooked_backend: DeviceBackend) -> None:
    q, k, v = hooked_backend.qkv()
    with sdpa_backend("math"):
        actual = F.scaled_dot_product_attention(q, k, v)
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(q, k, v)
    assert num_ours_fwd(hooked_backend.pop_path_counts()) == 0 and torch.equal(actual, expected)


def test_backward_follows_the_mode_of_its_forward(device_backend: DeviceBackend) -> None:
    """The backward runs after the block, on autograd threads that never entered the block."""
    q, k, v = device_backend.qkv(grad=True)
    with sdpa_backend("fa3"):
        forced = F.scaled_dot_product_attention(q, k, v)
    auto = F.scaled_dot_product_attention(q, k, v)
    device_backend.pop_path_counts()
    with sdpa_backend("math"):
        torch.autograd.grad(forced.sum() + auto.sum(), (q, k, v))
    took = device_backend.pop_path_counts()
    assert sum(count for path, count in took.items() if path.endswith("_bwd")) == 2
    assert device_backend.device == "cpu" or took.get("math_bwd", 0) == 0, took


# ---- torch's own switches ----


@pytest.mark.parametrize(
    "backend", ["FLASH_ATTENTION", "OVERRIDEABLE", "MATH", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION"]
)
def test_sdpa_kernel_stays_in_force(device_backend: DeviceBackend, backend: str) -> None:
    q, k, v = device_backend.qkv()

    def call() -> torch.Tensor | str:
        try:
            return F.scaled_dot_product_attention(q, k, v)
        except RuntimeError as error:
            return str(error).splitlines()[0]

    with sdpa_kernel(getattr(SDPBackend, backend)):
        actual = call()
        assert (num_ours_fwd(device_backend.pop_path_counts()) == 1) == (backend in ("FLASH_ATTENTION", "OVERRIDEABLE"))
        if backend not in ("FLASH_ATTENTION", "OVERRIDEABLE"):
            device_backend.disable()
            expected = call()
            assert torch.equal(actual, expected) if isinstance(actual, torch.Tensor) else actual == expected


def test_fallback_in_the_op_reaches_stock_and_returns(device_backend: DeviceBackend) -> None:
    """A traced graph receives a shape that auto does not serve.

    The op must serve the shape by stock, without calling itself again. If stock would end in math, our kernels are
    preferred where a kernel can run.
    """
    q, k, v = device_backend.qkv(grad=True)
    wide = [torch.cat((tensor,) * 5, dim=3) for tensor in (q, k, v)]  # head dim 320
    odd = [tensor[..., :12] for tensor in (q, k, v)]
    for tensors, fused in ((wide, False), (odd, device_backend.device == "cuda")):
        device_backend.pop_path_counts()
        out = torch.ops.torch_flashplug.sdpa_fwd(*tensors, None, 0.0, 1, None, 0)[0]
        took = device_backend.pop_path_counts()
        assert list(took.values()) == [1] and ("ours_fwd" in took) == fused and next(iter(took)).endswith("_fwd"), took
        with sdpa_kernel(SDPBackend.MATH):
            expected = F.scaled_dot_product_attention(*tensors, is_causal=True)
        torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
        device_backend.pop_path_counts()
        actual = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
        with sdpa_kernel(SDPBackend.MATH):
            exact = F.scaled_dot_product_attention(*(tensor.double() for tensor in tensors), is_causal=True)
        for a, b in zip(actual, torch.autograd.grad(exact.sum(), (q, k, v), retain_graph=True)):
            assert float((a.double() - b.double()).norm() / b.double().norm()) < 1e-2


# ---- explain and the log ----


def test_explain_predicts_the_backend(hooked_backend: DeviceBackend) -> None:
    for name, (args, kwargs) in make_calls(hooked_backend).items():
        plan = torch_flashplug.explain(*args, **kwargs, device="h100")
        hooked_backend.pop_path_counts()
        F.scaled_dot_product_attention(*args, **kwargs)
        assert (plan.backend == "fa3") == (num_ours_fwd(hooked_backend.pop_path_counts()) == 1), f"{name}: {plan}"
        assert plan.backend not in plan.reasons and all(plan.reasons.values()), name
        assert plan.backend in str(plan) and (not plan.kernel or plan.kernel in str(plan))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("feature", ["nothing", "causal", "mask", "bias", "bias32"])
def test_choice_hook_agrees_with_explain(
    device_backend: DeviceBackend, feature: str, dropout: float, grad: bool
) -> None:
    """Use the measured tables, whose rows and stock bugs the choice hook checks first by call class."""
    startup.push_tables()
    masks = {"mask": torch.ones(300, 300, device=device_backend.device).tril().bool()}
    masks |= {"bias": torch.randn(300, 300, device=device_backend.device).to(device_backend.dtype)}
    masks |= {"bias32": torch.randn(300, 300, device=device_backend.device)}
    q, k, v = (tensor.requires_grad_(grad) for tensor in device_backend.qkv(rows=300, keys=300))
    call = {"attn_mask": masks.get(feature), "dropout_p": dropout, "is_causal": feature == "causal"}
    preset = None if device_backend.device == "cuda" else "h100"
    backend = torch_flashplug.explain(q, k, v, **call, device=preset).backend
    device_backend.pop_path_counts()
    F.scaled_dot_product_attention(q, k, v, **call)
    assert num_ours_fwd(device_backend.pop_path_counts()) == (backend in KERNEL_BACKENDS)


def test_explain_without_a_gpu() -> None:
    query = torch.empty(1, 32, 1, 128, dtype=torch.bfloat16, device="meta")
    key = torch.empty(1, 8, 8192, 128, dtype=torch.bfloat16, device="meta")
    plan = torch_flashplug.explain(query, key, key, enable_gqa=True, device="h100")
    assert "tiles" in plan.gate and "splits 16 of 8 blocks" in plan.gate
    assert "8.0" in torch_flashplug.explain(query, key, key, enable_gqa=True, device="a100").reasons["fa3"]
    assert "no CUDA device" in torch_flashplug.explain(query, key, key, enable_gqa=True).reasons["fa3"]
    assert "enable_gqa" in torch_flashplug.explain(query, key, key, device="h100").reasons["fa3"]
    with pytest.raises(ValueError, match="h100, h200, a100, l4"):
        torch_flashplug.explain(query, key, key, device="b200")


def test_explain_respects_backend_blocks() -> None:
    query = torch.empty(1, 8, 256, 64, dtype=torch.bfloat16, device="meta")
    with sdpa_backend("fa3"):
        assert torch_flashplug.explain(query, query, query, device="h100").backend == "fa3"
        wide = torch.empty(1, 8, 256, 520, dtype=torch.bfloat16, device="meta")
        refused = torch_flashplug.explain(wide, wide, wide, device="h100")
        assert "512" in refused.error and refused.error in str(refused)
    with sdpa_backend("math"):
        assert torch_flashplug.explain(query, query, query, device="h100").backend == "math"


def test_each_new_plan_is_logged_once(device_backend: DeviceBackend) -> None:
    records: list[tuple[int, str]] = []
    callbacks.set_log_callback(lambda level, text: records.append((level, text)), plans=True)
    try:
        q, k, v = device_backend.qkv(rows=72)
        for _ in range(3):
            F.scaled_dot_product_attention(q, k, v)
        num_lines = len(records)
        F.scaled_dot_product_attention(q, k, v, is_causal=True)
    finally:
        callbacks.set_log_callback(startup._plan_log.log, plans=False)
    # one line each from the choice hook and from the op
    assert 1 <= num_lines <= 2 and num_lines < len(records) <= 2 * num_lines
    assert all(level == logging.DEBUG and "fa3" in text for level, text in records)


# ---- compile caches ----


def test_compile_cache_tag_follows_in_every_thread() -> None:
    def tags() -> list[str]:
        found_tags = [torch.compiler.config.cache_key_tag]
        thread = threading.Thread(target=lambda: found_tags.append(torch.compiler.config.cache_key_tag))
        thread.start()
        thread.join()
        return found_tags

    enabled_tags = tags()
    assert all("torch_flashplug" in tag for tag in enabled_tags)
    with sdpa_backend("stock"):
        assert tags()[0] == enabled_tags[0] + f"|{BACKENDS.index('stock')}"
    assert tags() == enabled_tags
    torch_flashplug.disable()
    try:
        assert all("torch_flashplug" not in tag for tag in tags())
    finally:
        torch_flashplug.enable()
    assert tags() == enabled_tags
    with torch.compiler.config.patch(cache_key_tag="mine"):  # a tag set by the user is kept
        torch_flashplug.enable()
        assert tags()[0].startswith("mine|torch_flashplug")
        torch_flashplug.disable()
        assert tags()[0] == "mine"
    torch_flashplug.enable()
    assert tags() == enabled_tags


@pytest.mark.usefixtures("fresh_dynamo")
def test_flags_read_before_tracing_are_in_the_cache_tag(
    device_backend: DeviceBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check flags from loading to tracing.

    A flag must declare whether it influences tracing.
    """
    read, get = set(), env.Flag.get
    with monkeypatch.context() as patch:
        patch.setattr(env.Flag, "get", lambda flag: read.add(flag.name) or get(flag))
        bindings.clear_packs()  # the packs are registered again
        startup._load_core()
        device_backend.enable()
        torch.compile(F.scaled_dot_product_attention, backend="aot_eager")(*device_backend.qkv())
    marks = {backend_api._cache_mark(): ""}
    for flag in env.FLAGS:
        with monkeypatch.context() as patch:
            patch.setenv(flag.name, next((value for value in flag.values if value != flag.default), "other"))
            marks.setdefault(backend_api._cache_mark(), flag.name)
    assert read <= {flag.name for flag in env.FLAGS if flag.affects_graphs} == set(marks.values()) - {""}
    with pytest.raises(TypeError, match="affects_graphs"):
        env.Flag("TORCH_FLASHPLUG_ANOTHER", "", "it may decide what is traced")
