"""Shared helpers for tests of tracers: functions to trace, a recording compiler, and the comparison with eager mode."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from device_backend import DeviceBackend
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from torch_flashplug import sdpa_backend
from torch_flashplug.dispatch import bindings
from torch_flashplug.ops import sdpa as sdpa_ops
from torch_flashplug.registry.architectures import BACKENDS

OWN_OPS = {
    sdpa_ops.namespace.sdpa_fwd.default: ("fwd", sdpa_ops.ForwardArgs),
    sdpa_ops.namespace.sdpa_bwd.default: ("bwd", sdpa_ops.BackwardArgs),
}
AUTO, FA3, FA2, MATH, STOCK = (BACKENDS.index(name) for name in ("auto", "fa3", "fa2", "math", "stock"))
sdpa = F.scaled_dot_product_attention
TOLERANCE = {"atol": 2e-2, "rtol": 2e-2}


def attention_ops(graph: torch.fx.Graph) -> list[tuple[str, int]]:
    """Return the attention ops of a graph, in graph order.

    Ops of the plugin give (op name, mode word without precision). All remaining attention ops give (aten name, -1).
    """
    graph_ops = []
    for node in graph.nodes:
        call = [
            node.target,
            *node.args,
        ]  # an op repeated by checkpoint is an argument of the op for keeping the RNG state
        op_idx = next(
            (idx for idx, value in enumerate(call) if isinstance(value, torch._ops.OpOverload) and value in OWN_OPS),
            None,
        )
        if op_idx is not None:
            name, fields = OWN_OPS[call[op_idx]]
            graph_ops.append((name, fields(*call[op_idx + 1 :]).mode & (1 << bindings.PRECISION_SHIFT) - 1))
        elif "attention" in str(node.target) or "softmax" in str(node.target):
            graph_ops.append((str(node.target), -1))
    return graph_ops


def masks(graph: torch.fx.Graph) -> list[torch.dtype | None]:
    """Return the dtypes of the masks of plugin ops, in graph order; None stands for no mask."""
    calls = [(node, *OWN_OPS[node.target]) for node in graph.nodes if node.target in OWN_OPS]
    biases = [fields(*node.args).attn_bias for node, _, fields in calls]
    return [None if mask is None else mask.meta["val"].dtype for mask in biases]


def has_float_masks(graph: torch.fx.Graph) -> bool:
    return any(node.target is torch.ops.aten.where.self for node in graph.nodes)


class Recorder:
    """Compiler for torch.compile that runs AOT graphs unchanged and records each graph with its attention ops."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.Graph] = []
        self.forwards: list[list[tuple[str, int]]] = []
        self.backwards: list[list[tuple[str, int]]] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list) -> Callable:
        def keep(recorded_ops: list) -> Callable:
            def compile_graph(graph: torch.fx.GraphModule, inputs: list) -> Callable:
                self.graphs.append(graph.graph)
                recorded_ops.append(attention_ops(graph.graph))
                return make_boxed_func(graph.forward)

            return compile_graph

        return aot_autograd(fw_compiler=keep(self.forwards), bw_compiler=keep(self.backwards))(graph, inputs)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa(q * 2, k, v, is_causal=True) + 1


def nested(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_backend("fa3"):
        in_fa3 = sdpa(q, k, v)
        with sdpa_backend("auto"):
            in_nested_auto = sdpa(q * 2, k, v)
        in_fa3_again = sdpa(q * 3, k, v)
    return in_fa3 + in_nested_auto + in_fa3_again + sdpa(q * 4, k, v)


NESTED_MODES = [FA3, AUTO, FA3, AUTO]


def check_against_eager(
    device_backend: DeviceBackend, function: Callable, compiled: Callable, *, grad: bool, **sizes: int
) -> dict[str, int]:
    """Run both functions on equal inputs, compare the results, and return the paths that the compiled function took."""
    inputs, copies = (device_backend.qkv(grad=grad, **sizes) for _ in range(2))
    expected = function(*inputs)
    device_backend.pop_path_counts()
    actual = compiled(*copies)
    paths = device_backend.pop_path_counts()
    torch.testing.assert_close(actual, expected, **TOLERANCE)
    assert actual.stride() == expected.stride()
    if grad:
        weights = torch.linspace(-1, 1, expected.shape[-1], device=expected.device)
        (expected.float() * weights).sum().backward()
        device_backend.pop_path_counts()
        (actual.float() * weights).sum().backward()
        paths |= device_backend.pop_path_counts()
        for name, actual_input, expected_input in zip("qkv", copies, inputs):
            torch.testing.assert_close(
                actual_input.grad,
                expected_input.grad,
                atol=6e-2,
                rtol=6e-2,
                msg=lambda text, name=name: f"d{name}: {text}",
            )
            assert actual_input.grad.stride() == expected_input.grad.stride()
    return paths
