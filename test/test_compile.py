"""Attention under tracers: torch.compile, torch.export, torch.func, checkpoint, autocast, FLOP counting. Graphs must hold our own ops with the mode of
the surrounding block baked in, one graph must serve all lengths, and results must be those of eager."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from conftest import CUDA
from functorch.compile import make_boxed_func
from standin import Road, road_to
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from torch_flashplug import composite, native, ops, sdpa_backend, tracing

OWN_OPS = {
    ops.namespace.sdpa_fwd.default: ("fwd", ops.ForwardArgs),
    ops.namespace.sdpa_bwd.default: ("bwd", ops.BackwardArgs),
}
AUTO, FA3, FA2, MATH, STOCK = range(5)
sdpa = F.scaled_dot_product_attention
TOLERANCE = {"atol": 2e-2, "rtol": 2e-2}


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    assert native.mode() == AUTO


def attention_ops(graph: torch.fx.Graph) -> list[tuple[str, int]]:
    """(op, mode word) of our ops, and (aten name, -1) of every other attention op, in graph order."""
    found = []
    for node in graph.nodes:
        call = [
            node.target,
            *node.args,
        ]  # an op that checkpoint will repeat is an argument of the op that keeps the RNG state
        own = next(
            (index for index, part in enumerate(call) if isinstance(part, torch._ops.OpOverload) and part in OWN_OPS),
            None,
        )
        if own is not None:
            name, fields = OWN_OPS[call[own]]
            found.append((name, fields(*call[own + 1 :]).mode))
        elif "attention" in str(node.target) or "softmax" in str(node.target):
            found.append((str(node.target), -1))
    return found


class Recorder:
    """A compiler for torch.compile that runs AOT graphs as they are and keeps their attention ops."""

    def __init__(self) -> None:
        self.forwards: list[list[tuple[str, int]]] = []
        self.backwards: list[list[tuple[str, int]]] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list) -> Callable:
        def keep(where: list) -> Callable:
            def compile_graph(graph: torch.fx.GraphModule, inputs: list) -> Callable:
                where.append(attention_ops(graph.graph))
                return make_boxed_func(graph.forward)

            return compile_graph

        return aot_autograd(fw_compiler=keep(self.forwards), bw_compiler=keep(self.backwards))(graph, inputs)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q * 2, k, v, is_causal=True) + 1


def nested(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_backend("fa3"):
        first = sdpa(q, k, v)
        with sdpa_backend("auto"):
            second = sdpa(q * 2, k, v)
        third = sdpa(q * 3, k, v)
    return first + second + third + sdpa(q * 4, k, v)


NESTED_MODES = [FA3, AUTO, FA3, AUTO]


def check_against_eager(
    road: Road, function: Callable, compiled: Callable, *, grad: bool, **sizes: int
) -> dict[str, int]:
    """Runs both on the same inputs; the paths that the compiled one took."""
    inputs, copies = (road.qkv(grad=grad, **sizes) for _ in range(2))
    want = function(*inputs)
    road.took()
    got = compiled(*copies)
    took = road.took()
    torch.testing.assert_close(got, want, **TOLERANCE)
    assert got.stride() == want.stride()
    if grad:
        weights = torch.linspace(-1, 1, want.shape[-1], device=want.device)
        (want.float() * weights).sum().backward()
        road.took()
        (got.float() * weights).sum().backward()
        took |= road.took()
        for name, a, b in zip("qkv", copies, inputs):
            torch.testing.assert_close(
                a.grad, b.grad, atol=6e-2, rtol=6e-2, msg=lambda text, name=name: f"d{name}: {text}"
            )
            assert a.grad.stride() == b.grad.stride()
    return took


# ---- torch.compile ----


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_fullgraph(any_road: Road, grad: bool, dynamic: bool) -> None:
    recorder = Recorder()
    compiled = torch.compile(causal, fullgraph=True, dynamic=dynamic, backend=recorder)
    took = check_against_eager(any_road, causal, compiled, grad=grad)
    assert took["ours_fwd"] == 1 and sum(count for path, count in took.items() if path.endswith("_bwd")) == int(grad)
    assert recorder.forwards == [[("fwd", AUTO)]] and recorder.backwards == [[("bwd", AUTO)]] * grad


def test_one_graph_for_all_lengths(road: Road) -> None:
    recorder = Recorder()
    compiled = torch.compile(causal, fullgraph=True, dynamic=True, backend=recorder)
    for rows in (128, 72, 136, 200):
        check_against_eager(road, causal, compiled, grad=True, rows=rows)
        check_against_eager(road, causal, compiled, grad=True, rows=rows, keys=rows + 8)
    # Square and not square differ in what duck shaping sees, as for any op; lengths do not.
    assert len(recorder.forwards) <= 2 and len(recorder.backwards) <= 2


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("where", ["around", "inside"])
def test_without_grad(road: Road, context: Callable, where: str) -> None:
    recorder = Recorder()

    def inside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with context():
            return causal(q, k, v)

    function = inside if where == "inside" else causal
    compiled = torch.compile(function, fullgraph=True, backend=recorder)
    q, k, v = road.qkv(grad=True)
    with context():
        got = compiled(q, k, v)
        want = function(q, k, v)
    assert recorder.forwards == [[("fwd", AUTO)]] and not got.requires_grad
    torch.testing.assert_close(got, want, **TOLERANCE)


@pytest.mark.parametrize("grad", [False, True])
def test_block_inside_is_baked_in(any_road: Road, grad: bool) -> None:
    recorder = Recorder()
    took = check_against_eager(any_road, nested, torch.compile(nested, fullgraph=True, backend=recorder), grad=grad)
    assert recorder.forwards == [[("fwd", mode) for mode in NESTED_MODES]] and took["ours_fwd"] == len(NESTED_MODES)
    if grad:  # every backward follows its own forward
        assert sorted(recorder.backwards[0]) == sorted(("bwd", mode) for mode in NESTED_MODES)


@pytest.mark.parametrize("backend", ["stock", "math"])
def test_block_inside_can_choose_stock(any_road: Road, backend: str) -> None:
    recorder = Recorder()

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_backend(backend):
            first = sdpa(q, k, v)
        return first + sdpa(q, k, v)

    took = check_against_eager(any_road, function, torch.compile(function, fullgraph=True, backend=recorder), grad=True)
    ours = [name for name, _ in recorder.forwards[0] if name == "fwd"]
    assert ours == ["fwd"] and len(recorder.forwards[0]) == 2 and took["ours_fwd"] == 1


def test_block_inside_checkpoint_inside_compile(road: Road) -> None:
    recorder = Recorder()

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(nested, q, k, v, use_reentrant=False)

    check_against_eager(road, function, torch.compile(function, fullgraph=True, backend=recorder), grad=True)
    assert recorder.forwards == [[("fwd", mode) for mode in NESTED_MODES]]


def test_decorator_inside(road: Road) -> None:
    recorder = Recorder()
    forced = sdpa_backend("fa3")(causal)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return forced(q, k, v)

    check_against_eager(road, function, torch.compile(function, fullgraph=True, backend=recorder), grad=False)
    assert recorder.forwards == [[("fwd", FA3)]]


def test_block_around_is_read_when_the_graph_runs(any_road: Road) -> None:
    recorder = Recorder()
    compiled = torch.compile(causal, fullgraph=True, backend=recorder)
    q, k, v = any_road.qkv()
    want = compiled(q, k, v)
    any_road.took()
    with sdpa_backend("math"):
        got = compiled(q, k, v)
    assert any_road.took() == {"math_fwd": 1}
    with sdpa_backend("fa2"), pytest.raises(RuntimeError, match="'fa2' is forced"):
        compiled(q, k, v)
    assert any_road.took().get("ours_fwd", 0) == 0
    compiled(q, k, v)
    assert any_road.took()["ours_fwd"] == 1 and len(recorder.forwards) == 1
    torch.testing.assert_close(got, want, **TOLERANCE)


def test_block_around_the_first_call_is_not_baked_in(any_road: Road) -> None:
    recorder = Recorder()
    compiled = torch.compile(causal, fullgraph=True, backend=recorder)
    q, k, v = any_road.qkv()
    with sdpa_backend("fa3"):
        compiled(q, k, v)
    compiled(q, k, v)
    assert recorder.forwards == [[("fwd", AUTO)]]


def test_failed_compile_leaves_no_mode_behind(road: Road) -> None:
    def broken(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_backend("stock"):
            out = sdpa(q, k, v)
            torch._dynamo.graph_break()
        return out

    def wrong(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_backend("stock"):
            return sdpa(q, k, v) @ torch.ones(3, 3)

    q, k, v = road.qkv()
    for function in (broken, wrong):
        with pytest.raises(Exception) as failure:  # held until the end: its frames keep the failed compile alive
            torch.compile(function, fullgraph=True, backend="aot_eager")(q, k, v)
        assert native.mode() == AUTO and tracing.traced_mode() == AUTO
        recorder = Recorder()
        check_against_eager(road, nested, torch.compile(nested, fullgraph=True, backend=recorder), grad=False)
        assert recorder.forwards == [[("fwd", mode) for mode in NESTED_MODES]]
        assert failure.value is not None


def test_graph_break_inside_a_block(road: Road) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_backend("stock"):
            first = sdpa(q, k, v)
            torch._dynamo.graph_break()
            second = sdpa(q, k, v)
        return first + second

    took = check_against_eager(road, function, torch.compile(function, backend="aot_eager"), grad=False)
    assert took.get("ours_fwd", 0) == 0


@pytest.mark.parametrize("allowed, served", [("MATH", False), ("FLASH_ATTENTION", True), ("OVERRIDEABLE", True)])
def test_sdpa_kernel_inside(road: Road, allowed: str, served: bool) -> None:
    recorder = Recorder()

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, allowed)):
            return sdpa(q, k, v)

    torch.compile(function, fullgraph=True, backend=recorder)(*road.qkv())
    assert (("fwd", AUTO) in recorder.forwards[0]) == served


def test_disabled_while_tracing(road: Road) -> None:
    road.disable()
    recorder = Recorder()
    torch.compile(causal, fullgraph=True, backend=recorder)(*road.qkv())
    road.enable()
    assert ("fwd", AUTO) not in recorder.forwards[0] and recorder.forwards[0]


def test_mask_goes_to_stock_and_gqa_is_served(road: Road) -> None:
    recorder = Recorder()
    q, k, v = road.qkv(heads=4, kv_heads=2)
    mask = torch.ones(128, 128, dtype=torch.bool, device=road.device).tril()

    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return sdpa(q, k, v, enable_gqa=True) + sdpa(q, k[:, :1].expand_as(q), v[:, :1].expand_as(q), mask)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=recorder)
    torch.testing.assert_close(compiled(q, k, v, mask), function(q, k, v, mask), **TOLERANCE)
    assert [name for name, _ in recorder.forwards[0]].count("fwd") == 1 and len(recorder.forwards[0]) >= 2


@pytest.mark.parametrize("cpp_wrapper", [False, True])
def test_inductor(road: Road, cpp_wrapper: bool) -> None:
    with torch._inductor.config.patch(cpp_wrapper=cpp_wrapper):
        took = check_against_eager(
            road, nested, torch.compile(nested, fullgraph=True), grad=not cpp_wrapper or road.device == "cuda"
        )
    assert took["ours_fwd"] == len(NESTED_MODES)


@pytest.mark.gpu
@pytest.mark.parametrize("grad", [False, True])
def test_inductor_forced_fa3_dynamic(road: Road, grad: bool) -> None:
    compiled = torch.compile(sdpa_backend("fa3")(causal), fullgraph=True, dynamic=True)
    for rows in (128, 200, 333):
        assert check_against_eager(road, causal, compiled, grad=grad, rows=rows)["ours_fwd"] == 1


# ---- compile caches ----


def test_caches_keep_plugged_and_stock_graphs_apart(road: Road, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    inputs = road.qkv()

    def compile_afresh() -> tuple[dict[str, int], int]:
        torch._dynamo.reset()
        counters.clear()
        road.took()
        torch.compile(causal, fullgraph=True)(*inputs)
        return road.took(), counters["aot_autograd"]["autograd_cache_hit"]

    with torch._functorch.config.patch(enable_autograd_cache=True), torch._inductor.config.patch(fx_graph_cache=True):
        took, hits = compile_afresh()
        assert took["ours_fwd"] == 1 and hits == 0
        road.disable()
        took, hits = compile_afresh()
        assert "ours_fwd" not in took and hits == 0
        road.enable()
        with sdpa_backend("stock"):
            took, hits = compile_afresh()
        assert "ours_fwd" not in took and hits == 0
        took, hits = compile_afresh()
        assert took["ours_fwd"] == 1 and hits == 1


# ---- export and make_fx ----


class Nested(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nested(q, k, v)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_export(road: Road, strict: bool, dynamic: bool) -> None:
    inputs = tuple(road.qkv())
    sizes = {name: {2: torch.export.Dim("rows", min=72, max=512)} for name in "qkv"} if dynamic else None
    program = torch.export.export(Nested(), inputs, dynamic_shapes=sizes, strict=strict)
    lowered = program.run_decompositions()
    assert attention_ops(lowered.graph) == [("fwd", mode) for mode in NESTED_MODES]
    others = tuple(road.qkv(rows=200)) if dynamic else inputs
    want = nested(*others)
    road.took()
    torch.testing.assert_close(lowered.module()(*others), want, **TOLERANCE)
    assert road.took()["ours_fwd"] == len(NESTED_MODES)
    torch.testing.assert_close(program.module()(*others), want, **TOLERANCE)  # holds `force` and aten ops
    assert road.took()["ours_fwd"] == len(NESTED_MODES)


def test_exported_program_survives_saving(road: Road, tmp_path) -> None:
    inputs = tuple(road.qkv())
    path = tmp_path / "attention.pt2"
    torch.export.save(torch.export.export(Nested(), inputs).run_decompositions(), path)
    torch.testing.assert_close(torch.export.load(path).module()(*inputs), nested(*inputs), **TOLERANCE)


def test_lowered_program_can_be_differentiated(road: Road) -> None:
    q, k, v = road.qkv(grad=True)
    lowered = torch.export.export(Nested(), (q, k, v)).run_decompositions().module()
    got = torch.autograd.grad(lowered(q, k, v).float().square().sum(), (q, k, v))
    want = torch.autograd.grad(nested(q, k, v).float().square().sum(), (q, k, v))
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, atol=6e-1, rtol=6e-2)


def test_make_fx_keeps_the_aten_op(road: Road) -> None:
    """Without functionalization the carrier is recorded as it is, and still runs ours."""
    q, k, v = road.qkv()
    graph = make_fx(causal)(q, k, v)
    road.took()
    torch.testing.assert_close(graph(q, k, v), causal(q, k, v), **TOLERANCE)
    assert road.took()["ours_fwd"] == 2


# ---- autocast, checkpoint, FLOPs ----


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast(road: Road, compiled: bool) -> None:
    q, k, v = (tensor.float() for tensor in road.qkv())

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast(road.device, torch.bfloat16):
            return sdpa(q, k, v)

    out = (torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function)(q, k, v)
    assert out.dtype == torch.bfloat16 and road.took()["ours_fwd"] == 1
    torch.testing.assert_close(out.float(), sdpa(q, k, v), **TOLERANCE)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(road: Road, reentrant: bool) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(causal, q, k, v, use_reentrant=reentrant)

    check_against_eager(road, causal, function, grad=True)


def test_selective_checkpoint_sees_the_aten_op(road: Road) -> None:
    def policy(context, op, *args, **kwargs) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op is tracing.OVERRIDEABLE.default else CheckpointPolicy.PREFER_RECOMPUTE

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(
            causal, q, k, v, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
        )

    took = check_against_eager(road, causal, function, grad=True)
    assert took.get("ours_fwd", 0) == 0 or took["ours_fwd"] == 1


def test_flops_are_those_of_stock(road: Road) -> None:
    def count(function: Callable) -> int:
        with FlopCounterMode(display=False) as counter:
            function(*road.qkv(grad=True)).sum().backward()
        return counter.get_total_flops()

    def own(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.namespace.sdpa_fwd(q, k, v, None, 0.0, 1, None, 0)[0]

    rows = heads = None
    q, k, v = road.qkv()
    batch, heads, rows, width = q.shape
    matmul = 2 * batch * heads * rows * rows * width
    assert count(causal) == count(own) == 7 * matmul  # two products forward, five backward


def test_flops_count_every_query_head_of_gqa(road: Road) -> None:
    q, k, v = road.qkv(heads=4, kv_heads=2)
    with FlopCounterMode(display=False) as counter:
        sdpa(q, k, v, enable_gqa=True)
    assert counter.get_total_flops() == 2 * 2 * q.shape[0] * 4 * 128 * 128 * 64


# ---- torch.func ----


def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q, k, v, is_causal=True).float().square().sum()


@pytest.mark.parametrize("compiled", [False, True])
def test_func_grad(road: Road, compiled: bool) -> None:
    q, k, v = road.qkv(grad=True)
    want = torch.autograd.grad(loss(q, k, v), (q, k, v))
    road.took()
    function = torch.func.grad(loss, argnums=(0, 1, 2))
    got = (torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function)(*road.qkv())
    assert road.took()["ours_fwd"] == 1
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, atol=6e-2, rtol=6e-2)


def three(tensors: list[Tensor]) -> list[Tensor]:
    return [torch.stack([tensor, tensor * 0.5, -tensor]) for tensor in tensors]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("mapped", [(0, 0, 0), (0, None, None), (None, 0, None)])
def test_vmap(road: Road, compiled: bool, mapped: tuple[int | None, ...]) -> None:
    plain = road.qkv()
    inputs = [many if dim is not None else one for many, one, dim in zip(three(plain), plain, mapped)]
    function = torch.vmap(causal, mapped)
    got = (torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function)(*inputs)
    assert road.took().get("ours_fwd", 0) == 1
    for index in range(3):
        want = causal(*(tensor[index] if dim is not None else tensor for tensor, dim in zip(inputs, mapped)))
        torch.testing.assert_close(got[index], want, **TOLERANCE)


def test_vmap_twice(road: Road) -> None:
    inputs = three(three(road.qkv(rows=72)))
    got = torch.vmap(torch.vmap(causal))(*inputs)
    assert road.took()["ours_fwd"] == 1
    torch.testing.assert_close(got[1, 2], causal(*(tensor[1, 2] for tensor in inputs)), **TOLERANCE)


@pytest.mark.parametrize("compiled", [False, True])
def test_vmap_of_grad(road: Road, compiled: bool) -> None:
    inputs = three(road.qkv())
    function = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))
    got = (torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function)(*inputs)
    assert road.took()["ours_fwd"] == 1
    for index in range(3):
        leaves = [tensor[index].detach().requires_grad_() for tensor in inputs]
        for a, b in zip(got, torch.autograd.grad(loss(*leaves), leaves)):
            torch.testing.assert_close(a[index], b, atol=6e-2, rtol=6e-2)


def test_jacrev(road: Road) -> None:
    q, k, v = road.qkv(rows=72)
    jacobian = torch.func.jacrev(lambda x: sdpa(x, k, v).float().sum((0, 2, 3)))(q)
    want = torch.func.grad(lambda x: sdpa(x, k, v).float()[:, 1].sum())(q)
    torch.testing.assert_close(jacobian[1], want, atol=6e-2, rtol=6e-2)


# ---- Plan B's known limits, kept honest ----


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_plan_b_leaves_vmap_to_stock(device: str) -> None:
    with road_to(device, "plan_b") as road:
        inputs = three(road.qkv())
        got = torch.vmap(causal)(*inputs)
        assert road.took().get("ours_fwd", 0) == 0
        torch.testing.assert_close(got[1], causal(*(tensor[1] for tensor in inputs)), **TOLERANCE)
        assert composite.installed()
