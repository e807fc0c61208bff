"""Suite blocks: torch_flashplug.attention(block_mask=) compared with FlexAttention on equal masks.

The suite also times the project's kernel without a mask (`ours_plain`). `rate` is the speed of the masked call, counted
over visible blocks, as a fraction of the speed of `ours_plain`. All times are device times of replayed CUDA graphs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from tools.bench import baselines
from tools.bench.result_schema import GRADIENT_FLOP, PLAIN
from tools.bench.runner import Bench, race, row_of, whole_call
from torch_flashplug import attention, block_lists

SEED, BLOCK = 20261126, 128
LARGEST_ERROR = 0.01  # largest allowed relative error against fp64: above, a result is wrong
ROUND_MS, ROWS_CHECKED = 10.0, 64
SHARE = 10  # one block in SHARE blocks is visible in the "random" mask


@dataclass(frozen=True, slots=True)
class Call:
    """Self-attention call in bf16 with batch size 1."""

    name: str
    d: int
    s: int
    heads: tuple[int, int]
    mask: str
    what: str

    def facts(self, seen: float) -> dict[str, object]:
        flop = 4.0 * self.s**2 * self.heads[0] * self.d * seen * GRADIENT_FLOP.get(self.what, 1.0)
        return {"shape": [1, *self.heads, self.s, self.s, self.d, self.d], "d": self.d, "s": self.s, "mask": self.mask,
                "dtype": "bf16", "flop": flop, "seen": seen}  # fmt: skip


def _random(s: int, device: str) -> BlockMask:
    """Return a block mask of full blocks, with one block in SHARE visible and a new random choice in each row."""
    blocks = s // BLOCK
    listed = max(1, blocks // SHARE)
    drawn = torch.rand(blocks, blocks, generator=torch.Generator().manual_seed(SEED)).argsort(1)[:, :listed]
    index = torch.zeros(blocks, blocks, dtype=torch.int32)
    index[:, :listed] = drawn.sort(1).values
    count = torch.full((blocks,), listed, dtype=torch.int32)
    none = torch.zeros_like(count), torch.zeros_like(index)
    lists = (x[None, None].to(device) for x in (*none, count, index))
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=BLOCK, seq_lengths=(s, s))


def _of(rule: Callable) -> Callable[[int, str], BlockMask]:
    def made(s: int, device: str) -> BlockMask:
        return create_block_mask(lambda b, h, row, key: rule(s, b, h, row, key), None, None, s, s, device=device)

    return made


MASKS: dict[str, Callable[[int, str], BlockMask]] = {
    "random": _random,
    "window": _of(lambda s, b, h, row, key: (row >= key) & (row - key < s // 16)),
    "documents": _of(lambda s, b, h, row, key: (row >= key) & (row // (s // 16) == key // (s // 16))),
    "causal": _of(lambda s, b, h, row, key: row >= key),
}


def calls() -> Iterator[Call]:
    for what in ("fwd", "train"):
        for d, s, heads in ((128, 65536, 4), (128, 16384, 16), (64, 16384, 32), (256, 16384, 8), (128, 4096, 16)):
            for mask in MASKS:
                yield Call(f"{what}_{mask}_d{d}_s{s}", d, s, (heads, heads), mask, what)


def _seen(mask: BlockMask, s: int) -> float:
    """Return the fraction of the scores in visible blocks."""
    listed = int(mask.kv_num_blocks.sum())
    listed += 0 if mask.full_kv_num_blocks is None else int(mask.full_kv_num_blocks.sum())
    return listed * BLOCK**2 / s**2


def _error(call: Call, mask: BlockMask, leaves: list[Tensor], out: Tensor) -> float:
    """Return the relative error of randomly selected rows against fp64."""
    rows = torch.randperm(call.s, generator=torch.Generator().manual_seed(SEED))[:ROWS_CHECKED].to(out.device)
    at, keys = rows[:, None] // BLOCK, torch.arange(call.s, device=out.device)
    seen = mask.to_dense()[0, 0].bool().to(out.device)[at, keys // BLOCK]
    of_plane = torch.zeros((), dtype=torch.long, device=out.device)
    seen = seen & mask.mask_mod(of_plane, of_plane, rows[:, None], keys)
    q, k, v = (x.detach().double().transpose(1, 2) for x in leaves)
    scores = (q[:, :, rows] @ k.mT / math.sqrt(call.d)).masked_fill(~seen, -math.inf)
    right = (scores.softmax(-1) @ v).transpose(1, 2)
    return float((out[:, rows].double() - right).norm() / right.norm())


def _measure(bench: Bench, call: Call) -> None:
    mask, generator = MASKS[call.mask](call.s, bench.device), torch.Generator(bench.device).manual_seed(SEED)
    drawn = [torch.randn(1, call.s, call.heads[0], call.d, device=bench.device, generator=generator).bfloat16()
             for _ in range(4)]  # fmt: skip
    leaves = [x.requires_grad_(call.what == "train") for x in drawn[:3]]
    lists = block_lists(mask, gradients=call.what == "train")
    makers = {
        "ours_fa3": lambda: lambda: attention(*leaves, block_mask=lists),
        PLAIN: lambda: lambda: attention(*leaves),
        "flex": lambda: lambda: baselines._flex(*(x.transpose(1, 2) for x in leaves), block_mask=mask).transpose(1, 2),
    }
    timings, plain, errors, refused = race(
        bench, call.name, makers, error_of=functools.partial(_error, call, mask, leaves),
        once=functools.partial(whole_call, call.what, leaves, drawn[3]),
        largest_error=LARGEST_ERROR, round_ms=ROUND_MS,
    )  # fmt: skip
    seen = _seen(mask, call.s)
    row = row_of(call.name, timings, **call.facts(seen), errors=errors, refused=refused, grad=call.what == "train")
    if plain is not None:
        row["all_ms"] |= {PLAIN: plain.ms}
        row["rate"] = round(plain.ms * seen / timings["ours_fa3"].ms, 4)
    bench.add(row)


def suite_blocks(bench: Bench) -> None:
    for call in calls():
        if bench.take(call.name):
            _measure(bench, call)
