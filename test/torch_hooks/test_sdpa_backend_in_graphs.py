"""sdpa_backend around attention() inside a function traced by torch.compile, on a GPU or interpreted.

The backend of the block decides, whatever backend surrounds the run of the graph.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from torch_flashplug import attention, plan_varlen, prepare_block_mask, sdpa_backend
from torch_flashplug.dispatch import bindings
from torch_flashplug.testing import assert_bitwise_equal

HQ, HKV, D, ROWS, PAGE = 4, 2, 64, 150, 16
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def random_tensor(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def int_tensor(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def prepare_causal_blocks(device: str) -> object:
    return prepare_block_mask(create_block_mask(lambda b, h, row, key: row >= key, None, None, 192, 192, device=device))


def dense_operands(rows: int = ROWS) -> tuple[Tensor, ...]:
    return tuple(random_tensor(1, rows, heads, D, seed=i) for i, heads in enumerate((HQ, HKV, HKV)))


def paged_operands(rows: int) -> tuple[Tensor, ...]:
    pools = (random_tensor(9, PAGE, HKV, D, seed=i) for i in (1, 2))
    return random_tensor(2, rows, HQ, D, seed=0), *pools


TABLE = {"block_table": int_tensor(3, 1, 4, 0, 5, 8).view(2, 3), "seqused_k": int_tensor(40, 17)}
CALLS: dict[str, tuple[tuple[Tensor, ...], dict[str, object]]] = {
    "window": (dense_operands(), {"window": (40, 0)}),
    "softcap": (dense_operands(), {"causal": True, "softcap": 3.0}),
    "on_end": (tuple(x[0] for x in dense_operands()), {"causal": True, "cu_seqlens_q": int_tensor(0, 70, ROWS)}),
    "pages": (paged_operands(3), TABLE),
    "many_of_pages": (paged_operands(40), TABLE),
    "blocks": (dense_operands(192), {"block_mask": prepare_causal_blocks}),
}
TRAINED = ("window", "softcap", "on_end", "blocks")


def operands_on(call: str, device: str) -> tuple[list[Tensor], dict[str, object]]:
    operands, settings = CALLS[call]

    def on_device(x: object) -> object:
        return x.to(device) if isinstance(x, Tensor) else x(device) if callable(x) else x

    return list(map(on_device, operands)), {name: on_device(x) for name, x in settings.items()}


def call_in_mode(mode: str, settings: dict[str, object]) -> Callable[..., Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_backend(mode):
            out = attention(q * 1, k, v, **settings)
        return out * 1

    return call


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("mode", ["math", "stock"])
def test_math_and_stock_blocks_are_compiled_into_the_graph(kernels_on: str, call: str, mode: str) -> None:
    operands, settings = operands_on(call, kernels_on)
    leaves = [x.requires_grad_(call in TRAINED) for x in operands]
    compiled = torch.compile(call_in_mode(mode, settings), backend="aot_eager", fullgraph=True)
    bindings.counters(reset=True)
    out = compiled(*leaves)
    if call in TRAINED:
        torch.autograd.grad(out.float().sum(), leaves)
    counts = bindings.counters(reset=True)
    assert not counts["ours_fwd"] and not counts["ours_bwd"], counts
    assert_bitwise_equal("out", out.detach(), call_in_mode(mode, settings)(*operands).detach())
    attention(*leaves, **settings)
    assert bindings.counters(reset=True)["ours_fwd"], "a block changes nothing: no kernel takes such calls"


def test_family_blocks_are_compiled_into_the_graph(kernels_on: str) -> None:
    operands, settings = operands_on("window", kernels_on)
    expected = {mode: call_in_mode(mode, settings)(*operands) for mode in ("fa2", "fa3")}
    assert not torch.equal(expected["fa2"], expected["fa3"]), "they tell nothing of who ran"
    for mode, out in expected.items():
        actual = torch.compile(call_in_mode(mode, settings), backend="aot_eager", fullgraph=True)(*operands)
        assert_bitwise_equal(mode, actual, out)
    with sdpa_backend("fa2"):  # around the run of a graph that was traced without a backend block
        actual = torch.compile(lambda *tensors: attention(*tensors, **settings), backend="aot_eager")(*operands)
    assert_bitwise_equal("around", actual, expected["fa2"])


def test_plan_in_a_graph_belongs_to_the_kernel_of_the_block(kernels_on: str) -> None:
    operands, settings = operands_on("on_end", kernels_on)
    with sdpa_backend("fa2"):
        expected, lists = attention(*operands, **settings), plan_varlen(*operands, **settings)

    def call(q: Tensor, k: Tensor, v: Tensor, lists: object) -> Tensor:
        with sdpa_backend("fa2"):
            return attention(q, k, v, **settings, plan=lists)

    actual = torch.compile(call, backend="aot_eager", fullgraph=True)(*operands, lists)
    assert_bitwise_equal("out", actual, expected)
    with pytest.raises(RuntimeError, match="plan was made for another call"):
        torch.compile(call, backend="aot_eager", fullgraph=True)(*operands, plan_varlen(*operands, **settings))
