"""sdpa_backend around attention() inside of what torch.compile traces: by kernels of ours on a GPU or interpreted, what
the block says, whatever surrounds the graph's run.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from torch_flashplug import attention, block_lists, plan, sdpa_backend
from torch_flashplug.dispatch import bindings
from torch_flashplug.testing import assert_bitwise_equal

HQ, HKV, D, ROWS, PAGE = 4, 2, 64, 150, 16
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def numbers(*of: int) -> Tensor:
    return torch.tensor(of, dtype=torch.int32)


def lists_of_blocks(device: str) -> object:
    return block_lists(create_block_mask(lambda b, h, row, key: row >= key, None, None, 192, 192, device=device))


def dense(rows: int = ROWS) -> tuple[Tensor, ...]:
    return tuple(drawn(1, rows, heads, D, seed=i) for i, heads in enumerate((HQ, HKV, HKV)))


def in_pages(rows: int) -> tuple[Tensor, ...]:
    pools = (drawn(9, PAGE, HKV, D, seed=i) for i in (1, 2))
    return drawn(2, rows, HQ, D, seed=0), *pools


TABLE = {"block_table": numbers(3, 1, 4, 0, 5, 8).view(2, 3), "seqused_k": numbers(40, 17)}
CALLS: dict[str, tuple[tuple[Tensor, ...], dict[str, object]]] = {
    "window": (dense(), {"window": (40, 0)}),
    "softcap": (dense(), {"causal": True, "softcap": 3.0}),
    "on_end": (tuple(x[0] for x in dense()), {"causal": True, "cu_seqlens_q": numbers(0, 70, ROWS)}),
    "pages": (in_pages(3), TABLE),
    "many_of_pages": (in_pages(40), TABLE),
    "blocks": (dense(192), {"block_mask": lists_of_blocks}),
}
TRAINED = ("window", "softcap", "on_end", "blocks")


def made(call: str, device: str) -> tuple[list[Tensor], dict[str, object]]:
    operands, settings = CALLS[call]

    def there(x: object) -> object:
        return x.to(device) if isinstance(x, Tensor) else x(device) if callable(x) else x

    return list(map(there, operands)), {name: there(x) for name, x in settings.items()}


def inside(mode: str, settings: dict[str, object]) -> Callable[..., Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_backend(mode):
            found = attention(q * 1, k, v, **settings)
        return found * 1

    return call


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("mode", ["math", "stock"])
def test_mathematics_is_compiled_in(kernels_on: str, call: str, mode: str) -> None:
    operands, settings = made(call, kernels_on)
    leaves = [x.requires_grad_(call in TRAINED) for x in operands]
    compiled = torch.compile(inside(mode, settings), backend="aot_eager", fullgraph=True)
    bindings.counters(reset=True)
    found = compiled(*leaves)
    if call in TRAINED:
        torch.autograd.grad(found.float().sum(), leaves)
    counts = bindings.counters(reset=True)
    assert not counts["ours_fwd"] and not counts["ours_bwd"], counts
    assert_bitwise_equal("out", found.detach(), inside(mode, settings)(*operands).detach())
    attention(*leaves, **settings)
    assert bindings.counters(reset=True)["ours_fwd"], "a block changes nothing: no kernel takes such calls"


def test_a_familys_kernels_are(kernels_on: str) -> None:
    operands, settings = made("window", kernels_on)
    right = {mode: inside(mode, settings)(*operands) for mode in ("fa2", "fa3")}
    assert not torch.equal(right["fa2"], right["fa3"]), "they tell nothing of who ran"
    for mode, out in right.items():
        found = torch.compile(inside(mode, settings), backend="aot_eager", fullgraph=True)(*operands)
        assert_bitwise_equal(mode, found, out)
    with sdpa_backend("fa2"):  # around the run of a graph that was traced outside of any
        found = torch.compile(lambda *given: attention(*given, **settings), backend="aot_eager")(*operands)
    assert_bitwise_equal("around", found, right["fa2"])


def test_a_plan_is_of_the_blocks_kernel(kernels_on: str) -> None:
    operands, settings = made("on_end", kernels_on)
    with sdpa_backend("fa2"):
        right, lists = attention(*operands, **settings), plan(*operands, **settings)

    def call(q: Tensor, k: Tensor, v: Tensor, lists: object) -> Tensor:
        with sdpa_backend("fa2"):
            return attention(q, k, v, **settings, plan=lists)

    found = torch.compile(call, backend="aot_eager", fullgraph=True)(*operands, lists)
    assert_bitwise_equal("out", found, right)
    with pytest.raises(RuntimeError, match="plan was made for another call"):
        torch.compile(call, backend="aot_eager", fullgraph=True)(*operands, plan(*operands, **settings))
