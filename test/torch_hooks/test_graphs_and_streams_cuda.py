"""Behavior visible only on a GPU: graph capture and replay, streams, a second device, host syncs, threads.

All tests are marked gpu, except the AOTInductor package test, which also runs on the CPU stub backend.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from device_backend import DeviceBackend, use_device_backend
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from torch_flashplug import sdpa_backend

sdpa = F.scaled_dot_product_attention
TOLERANCE = {"atol": 2e-2, "rtol": 2e-2}


@pytest.fixture
def cuda_backend() -> Iterator[DeviceBackend]:
    with use_device_backend("cuda") as device_backend:
        yield device_backend


def run_by_stock(function: Callable, *inputs: Tensor) -> Tensor:
    with sdpa_backend("stock"):
        return function(*inputs)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, k, v, is_causal=True)


def check_replay(graph: torch.cuda.CUDAGraph, inputs: list[Tensor], out: Tensor) -> None:
    """Replay twice, the second time with new values in the same memory."""
    for factor in (1.0, -0.5):
        for tensor in inputs:
            tensor.mul_(factor)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(out, run_by_stock(causal, *inputs), **TOLERANCE)


@pytest.mark.gpu
@pytest.mark.isolated(240)
@pytest.mark.parametrize("warm", [False, True], ids=["first_use_under_capture", "warm"])
def test_captured_graph_is_replayed_with_new_inputs(cuda_backend: DeviceBackend, warm: bool) -> None:
    inputs = cuda_backend.qkv(rows=512)
    if warm:
        causal(*inputs)
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with sdpa_backend("fa3"), torch.cuda.graph(graph):
        out = causal(*inputs)
    assert cuda_backend.pop_path_counts()["ours_fwd"] == 1 + warm
    check_replay(graph, inputs, out)


@pytest.mark.gpu
@pytest.mark.isolated(240)
def test_graphed_training_step_equals_eager_mode(cuda_backend: DeviceBackend) -> None:
    class Attention(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_backend("fa3"):
                return causal(q, k, v)

    samples = cuda_backend.qkv(rows=256, grad=True)
    graphed = torch.cuda.make_graphed_callables(
        Attention(), tuple(t.detach().clone().requires_grad_() for t in samples)
    )
    for _ in range(2):
        grads = torch.autograd.grad(graphed(*samples).float().square().sum(), samples)
        expected = torch.autograd.grad(run_by_stock(causal, *samples).float().square().sum(), samples)
        for a, b in zip(grads, expected):
            torch.testing.assert_close(a, b, atol=6e-2, rtol=6e-2)


@pytest.mark.gpu
@pytest.mark.isolated(240)
def test_split_backward_kernel_first_runs_under_capture(cuda_backend: DeviceBackend) -> None:
    """Capture dK and dV after a call for dQ. The module of the kernels is loaded, but the dK/dV kernel has not run."""
    draw = {"device": "cuda", "dtype": cuda_backend.dtype}
    q, k, v = (torch.randn(2, 256, 4, 128, **draw).transpose(1, 2).requires_grad_() for _ in range(3))

    def gradients(*inputs_with_grad: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(causal(q, k, v).float().square().sum(), inputs_with_grad)

    with sdpa_backend("fa3"):
        gradients(q)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            actual = gradients(k, v)
    for tensor in actual:
        tensor.fill_(torch.nan)
    graph.replay()
    for a, b in zip(actual, run_by_stock(gradients, k, v)):
        torch.testing.assert_close(a, b, atol=6e-2, rtol=6e-2)


@pytest.mark.gpu
def test_compiled_gradients_of_inputs_laid_out_bshd(cuda_backend: DeviceBackend, fresh_dynamo: None) -> None:
    """Use the layout BSHD, in which compiled graphs produce a contiguous `grad_out`.

    The layouts of `grad_out` and `out` then differ, which the cuDNN backward of torch 2.11 gets wrong.
    """
    inputs = cuda_backend.qkv(rows=256, grad=True)
    out = torch.compile(sdpa_backend("fa3")(causal), backend="aot_eager", fullgraph=True)(*inputs)
    actual = torch.autograd.grad(out.float().square().sum(), inputs)
    with sdpa_kernel(SDPBackend.MATH):
        exact = causal(*(tensor.double() for tensor in inputs))
    for actual_grad, fp64 in zip(actual, torch.autograd.grad(exact.square().sum(), inputs)):
        assert float((actual_grad.double() - fp64.double()).norm() / fp64.double().norm()) < 1e-2


@pytest.mark.gpu
@pytest.mark.isolated(300)
@pytest.mark.parametrize("grad", [False, True])
def test_reduce_overhead_mode_equals_stock(cuda_backend: DeviceBackend, grad: bool) -> None:
    compiled = torch.compile(sdpa_backend("fa3")(causal), fullgraph=True, mode="reduce-overhead")
    inputs = cuda_backend.qkv(rows=256, grad=grad)
    expected = run_by_stock(causal, *inputs)
    want_grads = torch.autograd.grad(expected.float().square().sum(), inputs) if grad else ()
    for _ in range(4):  # recorded on the second call, replayed from the third
        torch.compiler.cudagraph_mark_step_begin()
        actual = compiled(*inputs)
        torch.testing.assert_close(actual, expected, **TOLERANCE)
        if grad:
            for a, b in zip(torch.autograd.grad(actual.float().square().sum(), inputs), want_grads):
                torch.testing.assert_close(a, b, atol=6e-2, rtol=6e-2)
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.gpu
@pytest.mark.isolated(240)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("captured", [False, True])
def test_tensors_on_a_second_device(cuda_backend: DeviceBackend, captured: bool) -> None:
    """Keep cuda:0 current while the tensors are on cuda:1."""
    inputs = [tensor.to("cuda:1").requires_grad_() for tensor in cuda_backend.qkv(rows=256)]
    torch.cuda.set_device(0)
    with sdpa_backend("fa3"):
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.device(1), torch.no_grad(), torch.cuda.graph(graph):
                out = causal(*inputs)
            torch.cuda.set_device(0)
            check_replay(graph, [tensor.detach() for tensor in inputs], out)
            return
        out = causal(*inputs)
    assert out.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
    expected = run_by_stock(causal, *inputs)
    torch.testing.assert_close(out, expected, **TOLERANCE)
    for a, b in zip(torch.autograd.grad(out.sum(), inputs), torch.autograd.grad(expected.sum(), inputs)):
        torch.testing.assert_close(a, b, atol=6e-2, rtol=6e-2)
    assert cuda_backend.pop_path_counts()["ours_fwd"] == 1


@pytest.mark.gpu
def test_current_stream_is_used(cuda_backend: DeviceBackend) -> None:
    q, k, v = cuda_backend.qkv(rows=512)
    expected = run_by_stock(causal, q * 3, k, v)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late = q * 3
        with sdpa_backend("fa3"):
            out = causal(late, k, v)
    stream.synchronize()
    torch.testing.assert_close(out, expected, **TOLERANCE)


@pytest.mark.gpu
def test_host_never_waits_for_the_device(cuda_backend: DeviceBackend) -> None:
    inputs = cuda_backend.qkv(rows=256, grad=True)
    grad = torch.ones_like(inputs[0])
    with sdpa_backend("fa3"):
        torch.autograd.grad(causal(*inputs), inputs, grad)  # loads kernels
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.autograd.grad(causal(*inputs), inputs, grad)
            torch.ops.torch_flashplug.sdpa_fwd(*(t.detach() for t in inputs), None, 0.0, 1, None, 0)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_threads_with_separate_streams_and_modes(cuda_backend: DeviceBackend) -> None:
    inputs = cuda_backend.qkv(rows=256)
    expected = run_by_stock(causal, *inputs)
    torch.cuda.synchronize()
    wrong: list[str] = []

    def work(backend: str) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()), sdpa_backend(backend):
                for _ in range(25):
                    torch.testing.assert_close(causal(*inputs), expected, **TOLERANCE)
        except Exception as error:
            wrong.append(f"{backend}: {error}")

    threads = [threading.Thread(target=work, args=(backend,)) for backend in ("fa3", "stock", "auto", "fa3", "math")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and cuda_backend.pop_path_counts()["ours_fwd"] == 75


@pytest.mark.gpu
def test_peak_memory_equals_the_outputs(cuda_backend: DeviceBackend) -> None:
    q, k, v = cuda_backend.qkv(rows=4096)
    with sdpa_backend("fa3"):
        causal(q, k, v)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = causal(q, k, v)
        torch.cuda.synchronize()
    outputs = out.numel() * out.element_size() + 4 * out.shape[0] * out.shape[1] * out.shape[2]
    assert torch.cuda.max_memory_allocated() - before <= outputs + (1 << 20)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "fa3"])
def test_gradients_need_memory_linear_in_length(cuda_backend: DeviceBackend, backend: str) -> None:
    inputs = cuda_backend.qkv(rows=4096, grad=True)
    with sdpa_backend(backend):
        out = causal(*inputs)
        cuda_backend.pop_path_counts()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(out, inputs, torch.randn_like(out))
        torch.cuda.synchronize()
    assert cuda_backend.pop_path_counts() == {"ours_bwd": 1}
    rows = out.shape[0] * out.shape[1] * out.shape[2]
    gradients = 4 * out.numel() * out.element_size()  # gradients of q, k, v, and the random gradient of out
    scratch = 4 * rows * (out.shape[3] + 2)  # dQ in fp32, LSE and delta
    assert torch.cuda.max_memory_allocated() - before <= gradients + scratch + (1 << 20)


@pytest.mark.isolated(280)
def test_aot_inductor_package_runs_on_kernels(device_backend: DeviceBackend, tmp_path) -> None:
    class Attention(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_backend("fa3"):
                return causal(q, k, v) * 2

    inputs = tuple(device_backend.qkv())
    with torch.no_grad():
        program = torch.export.export(Attention(), inputs)
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "attention.pt2"))
        model = torch._inductor.aoti_load_package(package)
        device_backend.pop_path_counts()
        actual = model(*inputs)
    assert device_backend.pop_path_counts()["ours_fwd"] == 1
    torch.testing.assert_close(actual, Attention()(*inputs), **TOLERANCE)
