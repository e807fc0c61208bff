"""Bool masks in graphs: our ops receive the bool mask, and the float mask of F.sdpa is removed."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from device_backend import DeviceBackend
from test_mask_placeholder import attend_in_fp64
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from traced_graphs import AUTO, FA3, NESTED_MODES, TOLERANCE, Recorder, attention_ops, has_float_masks, masks, sdpa

from torch_flashplug import sdpa_backend
from torch_flashplug.dispatch import bindings

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

BATCH, HEADS, ROWS = 2, 4, 128  # sizes of DeviceBackend.qkv
SHAPES = [
    *((ROWS, ROWS), (1, ROWS), (ROWS, 1), (HEADS, ROWS, ROWS), (BATCH, 1, 1, ROWS), (1, 1, ROWS, ROWS)),
    *((BATCH, 1, ROWS, ROWS), (1, HEADS, ROWS, ROWS), (BATCH, HEADS, ROWS, ROWS), (BATCH, HEADS, 1, ROWS)),
]


def make_mask(device_backend: DeviceBackend, *sizes: int, seed: int = 0, blind: bool = True) -> Tensor:
    """Return a random bool mask with half of the keys visible.

    With `blind`, each eighth row has no visible key; cuDNN returns nonzero outputs for such rows.
    """
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(sizes, generator=generator) < 0.5
    if sizes[-2] > 1 and blind:
        mask[..., ::8, :] = False
    return mask.to(device_backend.device)


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return sdpa(q * 2, k, v, mask) + 1


def check(
    device_backend: DeviceBackend,
    function: Callable,
    compiled: Callable,
    *rest: Tensor,
    grad: bool = True,
    **sizes: int,
) -> dict:
    """Compare compiled and eager results and gradients, and return the counters of the compiled call."""
    results = []
    for run in (function, compiled):
        inputs = device_backend.qkv(grad=grad, **sizes)
        device_backend.pop_path_counts()
        out = run(*inputs, *rest)
        grads = torch.autograd.grad(out.float().square().sum(), inputs) if grad else ()
        results.append((out, *grads))
    took = device_backend.pop_path_counts()
    for name, expected, actual in zip(("out", "dq", "dk", "dv"), *results):
        torch.testing.assert_close(
            actual, expected, atol=6e-2, rtol=6e-2, msg=lambda text, name=name: f"{name}: {text}"
        )
        assert actual.stride() == expected.stride(), name
    return took


def check_recorded(
    device_backend: DeviceBackend, function: Callable, *rest: Tensor, modes: tuple[int, ...] = (AUTO,), **options
) -> None:
    """Check that all calls run on our ops with the given modes and read bool masks, in both directions."""
    grad = options.get("grad", True)
    recorder = Recorder()
    compiled = torch.compile(function, fullgraph=True, backend=recorder, dynamic=options.pop("dynamic", None))
    took = check(device_backend, function, compiled, *rest, **options)
    assert took["ours_fwd"] == len(modes) and recorder.forwards == [[("fwd", mode) for mode in modes]]
    assert [sorted(ops) for ops in recorder.backwards] == [sorted(("bwd", mode) for mode in modes)] * grad
    for graph in recorder.graphs:
        assert masks(graph) == [torch.bool] * len(modes) and not has_float_masks(graph), graph


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("sizes", SHAPES)
def test_masks_of_all_shapes(device_backend: DeviceBackend, sizes: tuple[int, ...], grad: bool) -> None:
    check_recorded(device_backend, masked, make_mask(device_backend, *sizes), grad=grad)


@pytest.mark.parametrize("grad", [False, True])
def test_masked_graphs_with_both_hooks(hooked_backend: DeviceBackend, grad: bool) -> None:
    check_recorded(hooked_backend, masked, make_mask(hooked_backend, ROWS, ROWS), grad=grad)


def test_strided_and_expanded_masks_in_graphs(device_backend: DeviceBackend) -> None:
    columns = make_mask(device_backend, BATCH, 1, 1, ROWS).expand(BATCH, HEADS, ROWS, ROWS)
    for mask in (columns, make_mask(device_backend, ROWS, ROWS).mT, make_mask(device_backend, ROWS, 2 * ROWS)[:, ::2]):
        torch._dynamo.reset()
        check_recorded(device_backend, masked, mask)


def test_mask_created_in_the_graph(device_backend: DeviceBackend) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        rows, keys = torch.arange(q.shape[2], device=q.device), torch.arange(k.shape[2], device=q.device)
        padding = keys < lengths[:, None, None, None]
        return sdpa(q, k, v, (rows[:, None] >= keys) & padding)

    check_recorded(device_backend, function, torch.tensor([ROWS, 40], device=device_backend.device))


def test_mask_held_by_the_graph(device_backend: DeviceBackend) -> None:
    """Use masks held by a closure and by a module."""
    mask = make_mask(device_backend, ROWS, ROWS)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, mask)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", mask)

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return sdpa(q, k, v, self.mask)

    for holder in (function, Model()):
        torch._dynamo.reset()
        check_recorded(device_backend, holder)


def test_masked_graph_with_gqa(device_backend: DeviceBackend) -> None:
    grouped = functools.partial(sdpa, enable_gqa=True)
    check_recorded(device_backend, grouped, make_mask(device_backend, 1, HEADS, ROWS, ROWS), kv_heads=2)


def test_sdpa_backend_blocks_inside_the_graph(device_backend: DeviceBackend) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        with sdpa_backend("fa3"):
            first = sdpa(q, k, v, mask)
            with sdpa_backend("auto"):
                second = sdpa(q * 2, k, v, mask)
            third = sdpa(q * 3, k, v, ~mask)
        return first + second + third + sdpa(q * 4, k, v, mask)

    check_recorded(device_backend, function, make_mask(device_backend, ROWS, ROWS), modes=tuple(NESTED_MODES))


@pytest.mark.parametrize("backend", ["stock", "math"])
def test_stock_and_math_blocks_inside_the_graph(device_backend: DeviceBackend, backend: str) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        with sdpa_backend(backend):
            first = sdpa(q, k, v, mask)
        return first + sdpa(q, k, v, mask)

    recorder = Recorder()
    took = check(
        device_backend,
        function,
        torch.compile(function, fullgraph=True, backend=recorder),
        make_mask(device_backend, ROWS, ROWS),
    )
    assert took["ours_fwd"] == 1 and [name for name, _ in recorder.forwards[0]].count("fwd") == 1


def test_graph_with_two_masks(device_backend: DeviceBackend) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, first_mask: Tensor, second_mask: Tensor) -> Tensor:
        return sdpa(q, k, v, first_mask) + sdpa(k, q, v, second_mask) + sdpa(q, k, v)

    recorder = Recorder()
    masks_of_call = make_mask(device_backend, ROWS, ROWS, seed=1), make_mask(device_backend, BATCH, 1, 1, ROWS, seed=2)
    check(device_backend, function, torch.compile(function, fullgraph=True, backend=recorder), *masks_of_call)
    for graph in recorder.graphs:
        assert sorted(masks(graph), key=str) == [None, torch.bool, torch.bool]
        read = {node.args[3 if "fwd" in str(node.target) else 4] for node in graph.nodes if "sdpa_" in str(node.target)}
        assert len(read) == 3


def test_graph_reads_the_current_mask_input(device_backend: DeviceBackend) -> None:
    recorder = Recorder()
    compiled = torch.compile(masked, fullgraph=True, backend=recorder)
    mask = make_mask(device_backend, ROWS, ROWS)
    for seed in range(3):
        mask.copy_(make_mask(device_backend, ROWS, ROWS, seed=seed))
        check(device_backend, masked, compiled, mask)
    assert len(recorder.forwards) == 1
    q, k, v = device_backend.qkv()
    torch.testing.assert_close(
        compiled(q, k, v, mask).double(), attend_in_fp64(q * 2, k, v, mask) + 1, atol=2e-2, rtol=2e-2
    )


def test_mask_changed_in_the_graph(device_backend: DeviceBackend) -> None:
    """Each call and its backward must use the mask at the time of the call."""

    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        mask = mask.clone()
        first = sdpa(q, k, v, mask)
        mask.logical_not_()
        return first + 2 * sdpa(q, k, v, mask)

    check_recorded(device_backend, function, make_mask(device_backend, ROWS, ROWS), modes=(AUTO, AUTO))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("forced", ["auto", "fa3"])
def test_masked_graphs_of_each_compile_backend_run_on_kernels(
    device_backend: DeviceBackend, backend: str, forced: str
) -> None:
    compiled = torch.compile(sdpa_backend(forced)(masked), fullgraph=True, backend=backend)
    assert check(device_backend, masked, compiled, make_mask(device_backend, BATCH, 1, 1, ROWS))["ours_fwd"] == 1


def test_masked_graph_under_autocast(device_backend: DeviceBackend) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        with torch.autocast(device_backend.device, torch.bfloat16):
            return sdpa(q.float(), k.float(), v.float(), mask)

    check_recorded(device_backend, function, make_mask(device_backend, ROWS, ROWS))


def test_checkpoint_inside_a_masked_graph(device_backend: DeviceBackend) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return checkpoint(masked, q, k, v, mask, use_reentrant=False)

    recorder = Recorder()
    compiled = torch.compile(function, fullgraph=True, backend=recorder)
    check(device_backend, function, compiled, make_mask(device_backend, ROWS, ROWS))
    assert recorder.forwards == [[("fwd", AUTO)]] and ("bwd", AUTO) in recorder.backwards[0]
    assert not any(has_float_masks(graph) for graph in recorder.graphs)


@pytest.mark.parametrize("forced", ["auto", "fa3"])
def test_masked_graph_of_symbolic_sizes_serves_all_lengths(hooked_backend: DeviceBackend, forced: str) -> None:
    """Use a single graph for all lengths."""
    recorder = Recorder()
    compiled = torch.compile(sdpa_backend(forced)(masked), fullgraph=True, dynamic=True, backend=recorder)
    for rows in (128, 72, 200):
        took = check(hooked_backend, masked, compiled, make_mask(hooked_backend, BATCH, 1, rows, rows), rows=rows)
        assert took["ours_fwd"] == 1
    assert recorder.forwards == [[("fwd", FA3 if forced == "fa3" else AUTO)]]
    assert all(masks(graph) == [torch.bool] and not has_float_masks(graph) for graph in recorder.graphs)


def test_symbolic_mask_sizes_with_static_operands(device_backend: DeviceBackend) -> None:
    """torch.compile makes a mask size symbolic after one dim of the mask changed between calls."""
    recorder = Recorder()
    compiled = torch.compile(masked, fullgraph=True, backend=recorder)
    for batch in (1, BATCH):
        assert check(device_backend, masked, compiled, make_mask(device_backend, batch, 1, ROWS, ROWS))["ours_fwd"] == 1
    assert all(masks(graph) == [torch.bool] for graph in recorder.graphs)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("sizes", [(3, ROWS), (ROWS,)])
def test_masks_of_wrong_shape_are_refused(device_backend: DeviceBackend, sizes: tuple[int, ...], dynamic: bool) -> None:
    """Stock must refuse the mask."""
    compiled = torch.compile(masked, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    with pytest.raises((RuntimeError, IndexError), match=r"(?i)size|broadcast|dim"):
        compiled(*device_backend.qkv(), torch.ones(sizes, dtype=torch.bool, device=device_backend.device))
    assert device_backend.pop_path_counts().get("routed_ours", 0) == 0


# ---- float masks that do not equal a bool mask ----

OTHER_FLOATS = {
    "smallest": lambda mask: torch.where(mask, 0.0, torch.finfo(torch.bfloat16).min),
    "reversed": lambda mask: torch.where(mask, -torch.inf, 0.0),
    "shown": lambda mask: torch.where(mask, 1.0, -torch.inf),
    "infinite": lambda mask: torch.where(mask, 0.0, torch.inf),
    "not_a_number": lambda mask: torch.where(mask, 0.0, torch.nan),
    "of_a_bias": lambda mask: torch.where(mask, torch.ones(ROWS, ROWS, device=mask.device), -torch.inf),
    "spread": lambda mask: torch.where(mask[:1], torch.zeros(ROWS, 1, device=mask.device), -torch.inf),
    "added": lambda mask: torch.where(mask, 0.0, -torch.inf) + 1,
    "filled": lambda mask: torch.zeros(ROWS, ROWS, device=mask.device).masked_fill(mask, -torch.inf),
}


def graph_of_floats(
    device_backend: DeviceBackend, floats: Callable, *rest: Tensor, grad: bool = False
) -> torch.fx.Graph:
    """Return the graph of a call with a float mask.

    The call forces fa3, because all other float masks stay with stock; no kernel serves such masks.
    """
    recorder = Recorder()

    def function(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
        with sdpa_backend("fa3"):
            return sdpa(q, k, v, floats(*rest))

    try:
        torch.compile(function, fullgraph=True, backend=recorder)(*device_backend.qkv(grad=grad), *rest)
    except RuntimeError as error:
        assert "attn_mask has a floating-point dtype" in str(error)
    return recorder.graphs[0]


@pytest.mark.parametrize("name", OTHER_FLOATS)
def test_float_masks_unlike_bool_masks_stay_floats(device_backend: DeviceBackend, name: str) -> None:
    graph = graph_of_floats(device_backend, OTHER_FLOATS[name], make_mask(device_backend, ROWS, ROWS))
    assert masks(graph) == [torch.float32]


def test_float_masks_equal_to_a_bool_mask_become_bool(device_backend: DeviceBackend) -> None:
    graph = graph_of_floats(
        device_backend, lambda mask: torch.where(mask, 0.0, -torch.inf), make_mask(device_backend, ROWS, ROWS)
    )
    assert masks(graph) == [torch.bool] and not has_float_masks(graph)


def test_float_masks_with_gradients_stay_floats(device_backend: DeviceBackend) -> None:
    mask, bias = (
        make_mask(device_backend, ROWS, ROWS, blind=False),
        torch.zeros((), device=device_backend.device, requires_grad=True),
    )
    floats = functools.partial(torch.where, mask)
    assert masks(graph_of_floats(device_backend, lambda x: torch.where(mask, x, -torch.inf), bias)) == [torch.float32]
    assert masks(graph_of_floats(device_backend, lambda x: floats(0.0, x), bias - torch.inf, grad=True)) == [
        torch.float32
    ]

    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return sdpa(q, k, v, torch.where(mask, bias, -torch.inf).to(q.dtype))

    grads = []
    for run in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        rows = torch.zeros(ROWS, 1, device=device_backend.device, requires_grad=True)
        grads.append(torch.autograd.grad(run(*device_backend.qkv(grad=True), rows).float().square().sum(), rows)[0])
    torch.testing.assert_close(*grads, atol=6e-2, rtol=6e-2)


# ---- other tracers ----


class Masked(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        with sdpa_backend("fa3"):
            first = masked(q, k, v, mask)
        return first + masked(q, k, v, ~mask)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_masked_program_keeps_bool_masks(device_backend: DeviceBackend, strict: bool) -> None:
    inputs = *device_backend.qkv(), make_mask(device_backend, ROWS, ROWS)
    program = torch.export.export(Masked(), inputs, strict=strict)
    lowered = program.run_decompositions()
    assert attention_ops(lowered.graph) == [("fwd", FA3), ("fwd", AUTO)]
    assert masks(lowered.graph) == [torch.bool] * 2 and not has_float_masks(lowered.graph)
    for mask in (inputs[3], make_mask(device_backend, ROWS, ROWS, seed=5)):
        expected = Masked()(*inputs[:3], mask)
        for form in (lowered, program):
            device_backend.pop_path_counts()
            torch.testing.assert_close(form.module()(*inputs[:3], mask), expected, **TOLERANCE)
            assert device_backend.pop_path_counts()["ours_fwd"] == 2


def test_lowered_program_can_be_differentiated(device_backend: DeviceBackend) -> None:
    mask = make_mask(device_backend, ROWS, ROWS)
    lowered = torch.export.export(Masked(), (*device_backend.qkv(grad=True), mask)).run_decompositions().module()
    check(device_backend, Masked(), lowered, mask)


@pytest.mark.parametrize("tracing", ["real", "fake", "symbolic"])
def test_make_fx_records_correct_masked_calls(device_backend: DeviceBackend, tracing: str) -> None:
    """Check the recorded ops: without functionalization, the aten op is recorded unchanged.

    Our op is recorded for real tensors, and the op of stock otherwise.
    """
    inputs = *device_backend.qkv(), make_mask(device_backend, ROWS, ROWS, blind=False)
    graph = make_fx(masked, tracing_mode=tracing)(*inputs)
    assert bindings.take_last_exit() in ({"planned"} if tracing == "real" else {"mask", "subclass"})
    device_backend.pop_path_counts()
    for mask in (inputs[3], make_mask(device_backend, ROWS, ROWS, seed=5, blind=False)):
        torch.testing.assert_close(graph(*inputs[:3], mask), masked(*inputs[:3], mask), **TOLERANCE)
    assert device_backend.pop_path_counts()["ours_fwd"] == (
        4 if tracing == "real" else 2
    )  # the eager calls and the calls of the graph


def test_compiled_vmap_of_a_masked_call_is_right(device_backend: DeviceBackend) -> None:
    inputs = [torch.stack([tensor, -tensor]) for tensor in device_backend.qkv()]
    mask = make_mask(device_backend, ROWS, ROWS, blind=False)
    compiled = torch.compile(torch.vmap(masked, (0, 0, 0, None)), fullgraph=True, backend="aot_eager")
    device_backend.pop_path_counts()
    actual = compiled(*inputs, mask)
    assert device_backend.pop_path_counts()["ours_fwd"] >= 1
    for index in range(2):
        torch.testing.assert_close(actual[index], masked(*(tensor[index] for tensor in inputs), mask), **TOLERANCE)


# ---- kernels ----


@pytest.mark.parametrize("sizes", [(72, 136), (2, 1, 1, 136), (1, 4, 72, 136)])
def test_masked_graphs_run_on_kernels(kernels_on: str, sizes: tuple[int, ...]) -> None:
    device_backend = DeviceBackend(kernels_on)
    mask = make_mask(device_backend, *sizes)
    recorder = Recorder()
    compiled = torch.compile(sdpa_backend("fa3")(sdpa), fullgraph=True, backend=recorder)
    for graph_mask in (mask, ~mask):
        q, k, v = device_backend.qkv(rows=72, keys=136, grad=True)
        bindings.counters(reset=True)
        out = compiled(q, k, v, graph_mask)
        grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
        took = device_backend.pop_path_counts()
        assert took["ours_fwd"] == took["ours_bwd"] == 1
        exact_inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
        exact = attend_in_fp64(*exact_inputs, graph_mask)
        torch.testing.assert_close(out.double(), exact, atol=2e-2, rtol=2e-2)
        for actual, expected in zip(grads, torch.autograd.grad(exact.square().sum(), exact_inputs), strict=True):
            torch.testing.assert_close(actual.double(), expected.nan_to_num(), atol=0.2, rtol=0.2)
    assert recorder.forwards == [[("fwd", FA3)]] and not any(has_float_masks(graph) for graph in recorder.graphs)


@pytest.mark.parametrize("first", [200, 40])
def test_graph_of_many_rows_serves_few_rows(kernels_on: str, first: int) -> None:
    """Use a single graph, whose kernels preprocess the mask. Decode kernels would read the mask directly."""
    device_backend = DeviceBackend(kernels_on)
    recorder = Recorder()
    compiled = torch.compile(sdpa, fullgraph=True, dynamic=True, backend=recorder)
    for rows in (first, 40, 200):
        mask = make_mask(device_backend, 1, 1, rows, 136)
        q, k, v = device_backend.qkv(rows=rows, keys=136, grad=True)
        bindings.counters(reset=True)
        out = compiled(q, k, v, mask)
        torch.autograd.grad(out.float().square().sum(), (q, k, v))
        took = device_backend.pop_path_counts()
        assert took["ours_fwd"] == took["ours_bwd"] == 1
        torch.testing.assert_close(out.double(), attend_in_fp64(q, k, v, mask), atol=2e-2, rtol=2e-2)
    assert len(recorder.forwards) == 1
