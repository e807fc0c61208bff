"""Attention under torch.compile.

Graphs contain our ops with the mode of the surrounding block as a constant. A single graph serves all lengths. Results
equal eager results.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from device_backend import DeviceBackend
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
from traced_graphs import AUTO, FA3, NESTED_MODES, TOLERANCE, Recorder, causal, check_against_eager, nested, sdpa

from torch_flashplug import sdpa_backend
from torch_flashplug.dispatch import bindings
from torch_flashplug.torch_hooks import tracing

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_full_graph_equals_eager_mode(hooked_backend: DeviceBackend, grad: bool, dynamic: bool) -> None:
    recorder = Recorder()
    compiled = torch.compile(causal, fullgraph=True, dynamic=dynamic, backend=recorder)
    took = check_against_eager(hooked_backend, causal, compiled, grad=grad)
    assert took["ours_fwd"] == 1 and sum(count for path, count in took.items() if path.endswith("_bwd")) == int(grad)
    assert recorder.forwards == [[("fwd", AUTO)]] and recorder.backwards == [[("bwd", AUTO)]] * grad


def test_one_graph_serves_all_lengths(device_backend: DeviceBackend) -> None:
    recorder = Recorder()
    compiled = torch.compile(causal, fullgraph=True, dynamic=True, backend=recorder)
    for rows in (128, 72, 136, 200):
        check_against_eager(device_backend, causal, compiled, grad=True, rows=rows)
        check_against_eager(device_backend, causal, compiled, grad=True, rows=rows, keys=rows + 8)
    # Duck shaping distinguishes square and non-square calls, as for any op, but not different lengths.
    assert len(recorder.forwards) <= 2 and len(recorder.backwards) <= 2


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("where", ["around", "inside"])
def test_graph_without_gradients_has_one_forward_op(
    device_backend: DeviceBackend, context: Callable, where: str
) -> None:
    recorder = Recorder()

    def inside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with context():
            return causal(q, k, v)

    function = inside if where == "inside" else causal
    compiled = torch.compile(function, fullgraph=True, backend=recorder)
    q, k, v = device_backend.qkv(grad=True)
    with context():
        actual = compiled(q, k, v)
        expected = function(q, k, v)
    assert recorder.forwards == [[("fwd", AUTO)]] and not actual.requires_grad
    torch.testing.assert_close(actual, expected, **TOLERANCE)


@pytest.mark.parametrize("grad", [False, True])
def test_backend_block_inside_a_graph_is_a_graph_constant(hooked_backend: DeviceBackend, grad: bool) -> None:
    recorder = Recorder()
    took = check_against_eager(
        hooked_backend, nested, torch.compile(nested, fullgraph=True, backend=recorder), grad=grad
    )
    assert recorder.forwards == [[("fwd", mode) for mode in NESTED_MODES]] and took["ours_fwd"] == len(NESTED_MODES)
    if grad:  # every backward uses the mode of its forward
        assert sorted(recorder.backwards[0]) == sorted(("bwd", mode) for mode in NESTED_MODES)


@pytest.mark.parametrize("backend", ["stock", "math"])
def test_backend_block_inside_a_graph_can_choose_stock(hooked_backend: DeviceBackend, backend: str) -> None:
    recorder = Recorder()

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_backend(backend):
            first = sdpa(q, k, v)
        return first + sdpa(q, k, v)

    took = check_against_eager(
        hooked_backend, function, torch.compile(function, fullgraph=True, backend=recorder), grad=True
    )
    plugin_ops = [name for name, _ in recorder.forwards[0] if name == "fwd"]
    assert plugin_ops == ["fwd"] and len(recorder.forwards[0]) == 2 and took["ours_fwd"] == 1


def test_backend_block_inside_a_compiled_checkpoint(device_backend: DeviceBackend) -> None:
    recorder = Recorder()

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(nested, q, k, v, use_reentrant=False)

    check_against_eager(device_backend, function, torch.compile(function, fullgraph=True, backend=recorder), grad=True)
    assert recorder.forwards == [[("fwd", mode) for mode in NESTED_MODES]]


def test_backend_decorator_inside_a_graph(device_backend: DeviceBackend) -> None:
    recorder = Recorder()
    forced = sdpa_backend("fa3")(causal)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return forced(q, k, v)

    check_against_eager(device_backend, function, torch.compile(function, fullgraph=True, backend=recorder), grad=False)
    assert recorder.forwards == [[("fwd", FA3)]]


def test_surrounding_backend_block_is_read_when_the_graph_runs(hooked_backend: DeviceBackend) -> None:
    recorder = Recorder()
    compiled = torch.compile(causal, fullgraph=True, backend=recorder)
    q, k, v = hooked_backend.qkv()
    expected = compiled(q, k, v)
    hooked_backend.pop_path_counts()
    with sdpa_backend("math"):
        actual = compiled(q, k, v)
    assert hooked_backend.pop_path_counts() == {"math_fwd": 1}
    with sdpa_backend("fa3", num_splits=4), pytest.raises(RuntimeError, match="'fa3' is forced"):
        compiled(q, k, v)
    assert hooked_backend.pop_path_counts().get("ours_fwd", 0) == 0
    with sdpa_backend("fa2"):
        compiled(q, k, v)
    assert hooked_backend.pop_path_counts() == {"ours_fwd": 1}
    compiled(q, k, v)
    assert hooked_backend.pop_path_counts()["ours_fwd"] == 1 and len(recorder.forwards) == 1
    torch.testing.assert_close(actual, expected, **TOLERANCE)


def test_backend_block_around_the_first_call_is_no_graph_constant(hooked_backend: DeviceBackend) -> None:
    recorder = Recorder()
    compiled = torch.compile(causal, fullgraph=True, backend=recorder)
    q, k, v = hooked_backend.qkv()
    with sdpa_backend("fa3"):
        compiled(q, k, v)
    compiled(q, k, v)
    assert recorder.forwards == [[("fwd", AUTO)]]


def test_failed_compilation_restores_the_mode(device_backend: DeviceBackend) -> None:
    def broken(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_backend("stock"):
            out = sdpa(q, k, v)
            torch._dynamo.graph_break()
        return out

    def wrong(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_backend("stock"):
            return sdpa(q, k, v) @ torch.ones(3, 3)

    q, k, v = device_backend.qkv()
    for function in (broken, wrong):
        # the exception is held until the end, and its frames keep the failed compile alive
        with pytest.raises(Exception) as failure:
            torch.compile(function, fullgraph=True, backend="aot_eager")(q, k, v)
        assert bindings.mode() == AUTO and tracing.traced_mode() == AUTO
        recorder = Recorder()
        check_against_eager(device_backend, nested, torch.compile(nested, fullgraph=True, backend=recorder), grad=False)
        assert recorder.forwards == [[("fwd", mode) for mode in NESTED_MODES]]
        assert failure.value is not None


def test_graph_break_inside_a_backend_block(device_backend: DeviceBackend) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_backend("stock"):
            first = sdpa(q, k, v)
            torch._dynamo.graph_break()
            second = sdpa(q, k, v)
        return first + second

    took = check_against_eager(device_backend, function, torch.compile(function, backend="aot_eager"), grad=False)
    assert took.get("ours_fwd", 0) == 0


@pytest.mark.parametrize("allowed, served", [("MATH", False), ("FLASH_ATTENTION", True), ("OVERRIDEABLE", True)])
def test_sdpa_kernel_block_inside_a_graph(device_backend: DeviceBackend, allowed: str, served: bool) -> None:
    recorder = Recorder()

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, allowed)):
            return sdpa(q, k, v)

    torch.compile(function, fullgraph=True, backend=recorder)(*device_backend.qkv())
    assert (("fwd", AUTO) in recorder.forwards[0]) == served


def test_graph_traced_without_the_plugin_has_no_plugin_op(device_backend: DeviceBackend) -> None:
    device_backend.disable()
    recorder = Recorder()
    torch.compile(causal, fullgraph=True, backend=recorder)(*device_backend.qkv())
    device_backend.enable()
    assert ("fwd", AUTO) not in recorder.forwards[0] and recorder.forwards[0]


def test_float_masks_and_gqa_are_served_in_graphs(device_backend: DeviceBackend) -> None:
    recorder = Recorder()
    q, k, v = device_backend.qkv(heads=4, kv_heads=2)
    bias = torch.linspace(-1, 1, 128, dtype=q.dtype, device=device_backend.device).expand(128, 128)

    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return sdpa(q, k, v, enable_gqa=True) + sdpa(q, k[:, :1].expand_as(q), v[:, :1].expand_as(q), bias)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=recorder)
    torch.testing.assert_close(compiled(q, k, v, bias), function(q, k, v, bias), **TOLERANCE)
    assert [name for name, _ in recorder.forwards[0]].count("fwd") == 2


@pytest.mark.parametrize("cpp_wrapper", [False, True])
def test_inductor_graph_equals_eager_mode(device_backend: DeviceBackend, cpp_wrapper: bool) -> None:
    with torch._inductor.config.patch(cpp_wrapper=cpp_wrapper):
        forced = torch.compile(sdpa_backend("fa3")(causal), fullgraph=True)
        took = check_against_eager(
            device_backend, causal, forced, grad=not cpp_wrapper or device_backend.device == "cuda"
        )
    assert took["ours_fwd"] == 1


@pytest.mark.gpu
@pytest.mark.parametrize("grad", [False, True])
def test_inductor_graph_of_symbolic_sizes_runs_on_forced_fa3(device_backend: DeviceBackend, grad: bool) -> None:
    compiled = torch.compile(sdpa_backend("fa3")(causal), fullgraph=True, dynamic=True)
    for rows in (128, 200, 333):
        assert check_against_eager(device_backend, causal, compiled, grad=grad, rows=rows)["ours_fwd"] == 1


# ---- compile caches ----


def test_compile_caches_separate_plugin_and_stock_graphs(
    device_backend: DeviceBackend, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    inputs = device_backend.qkv()

    def compile_afresh() -> tuple[dict[str, int], int]:
        torch._dynamo.reset()
        counters.clear()
        device_backend.pop_path_counts()
        torch.compile(causal, fullgraph=True)(*inputs)
        return device_backend.pop_path_counts(), counters["aot_autograd"]["autograd_cache_hit"]

    with torch._functorch.config.patch(enable_autograd_cache=True), torch._inductor.config.patch(fx_graph_cache=True):
        took, hits = compile_afresh()
        assert took["ours_fwd"] == 1 and hits == 0
        device_backend.disable()
        took, hits = compile_afresh()
        assert "ours_fwd" not in took and hits == 0
        device_backend.enable()
        with sdpa_backend("stock"):
            took, hits = compile_afresh()
        assert "ours_fwd" not in took and hits == 0
        took, hits = compile_afresh()
        assert took["ours_fwd"] == 1 and hits == 1
