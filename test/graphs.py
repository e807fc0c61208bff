"""Shared helpers for tests of tracers.

The helpers are functions to trace, a compiler that records attention ops, and the comparison with eager mode.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from standin import Road
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from torch_flashplug import sdpa_backend
from torch_flashplug.dispatch import bindings
from torch_flashplug.ops import sdpa as ops
from torch_flashplug.registry.architectures import BACKENDS

OWN_OPS = {
    ops.namespace.sdpa_fwd.default: ("fwd", ops.ForwardArgs),
    ops.namespace.sdpa_bwd.default: ("bwd", ops.BackwardArgs),
}
AUTO, FA3, FA2, MATH, STOCK = (BACKENDS.index(name) for name in ("auto", "fa3", "fa2", "math", "stock"))
sdpa = F.scaled_dot_product_attention
TOLERANCE = {"atol": 2e-2, "rtol": 2e-2}


def attention_ops(graph: torch.fx.Graph) -> list[tuple[str, int]]:
    """Return the attention ops of a graph, in graph order.

    An op of the plugin becomes (op, mode word without the precision). An attention op of aten becomes (aten name, -1).
    """
    found = []
    for node in graph.nodes:
        call = [
            node.target,
            *node.args,
        ]  # an op that checkpoint repeats is an argument of an op that keeps the RNG state
        own = next(
            (index for index, part in enumerate(call) if isinstance(part, torch._ops.OpOverload) and part in OWN_OPS),
            None,
        )
        if own is not None:
            name, fields = OWN_OPS[call[own]]
            found.append((name, fields(*call[own + 1 :]).mode & (1 << bindings.PRECISION_SHIFT) - 1))
        elif "attention" in str(node.target) or "softmax" in str(node.target):
            found.append((str(node.target), -1))
    return found


def masks(graph: torch.fx.Graph) -> list[torch.dtype | None]:
    """Return the dtypes of the masks passed to the plugin's ops, in graph order, with None for calls without a mask."""
    calls = [(node, *OWN_OPS[node.target]) for node in graph.nodes if node.target in OWN_OPS]
    given = [fields(*node.args).attn_bias for node, _, fields in calls]
    return [None if mask is None else mask.meta["val"].dtype for mask in given]


def has_floats_of_masks(graph: torch.fx.Graph) -> bool:
    return any(node.target is torch.ops.aten.where.self for node in graph.nodes)


class Recorder:
    """Compiler for torch.compile that runs AOT graphs unchanged, and records the graphs and the attention ops."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.Graph] = []
        self.forwards: list[list[tuple[str, int]]] = []
        self.backwards: list[list[tuple[str, int]]] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list) -> Callable:
        def keep(where: list) -> Callable:
            def compile_graph(graph: torch.fx.GraphModule, inputs: list) -> Callable:
                self.graphs.append(graph.graph)
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
    """Run an eager function and the compiled function on equal inputs, and compare the results.

    Returns:
        The paths that the compiled function took, with counts.
    """
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
