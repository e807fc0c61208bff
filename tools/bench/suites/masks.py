"""Mask suites: bool and float masks of F.sdpa (masks), and FlexAttention's block masks (blocks).

Suite masks makes calls with a bool mask or a float mask, as users make such calls, forward, then forward and backward.
The backward calls include gradients of float masks. The preprocessing of the mask is part of the time: torch converts
bool masks to floats, and this project computes a bitmask and block-sparse lists. The BlockMask of FlexAttention is
created before the timing.

Suite blocks compares torch_flashplug.attention(block_mask=) with FlexAttention on equal masks. The suite also times the
project's kernel without a mask (WITHOUT_FEATURE). `rate` is the speed of the masked call, counted over visible blocks,
as a fraction of the speed without a mask. All times of this suite are device times of replayed CUDA graphs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from tools.bench import baselines, workloads
from tools.bench.result_schema import GRADIENT_FLOP, WITHOUT_FEATURE
from tools.bench.runner import Bench, complete_call, facts_of, row_of, time_calls, time_with_peers
from torch_flashplug import attention, prepare_block_mask
from torch_flashplug.testing import (
    Candidate,
    Case,
    Inputs,
    Masking,
    make_inputs,
    measure_error,
    new_case,
    oracle,
    plain,
)

MOST_SCORES = 1 << 31  # largest mask: one byte per score, and three further bytes if stock converts the mask to floats
SEED = 20261123
VISIBLE_SHARE = 0.5  # fraction of visible scores in random masks
WINDOW, DOCUMENTS, PADDED = 1024, 8, 0.75  # keys; documents per sequence; mean fraction of keys without padding
Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # batch, head, row, key -> visible


def _lengths(case: Case, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(SEED)
    return (torch.rand(case.B, generator=generator) * 2 * (1 - PADDED) + 2 * PADDED - 1).mul(case.Sk).int().to(device)


def _causal(case: Case, device: str) -> Rule:
    return lambda b, h, row, key: row >= key


def _window(case: Case, device: str) -> Rule:
    return lambda b, h, row, key: (row >= key) & (row - key < WINDOW)


def _documents(case: Case, device: str) -> Rule:
    return lambda b, h, row, key: (row >= key) & (row // (case.Sq // DOCUMENTS) == key // (case.Sk // DOCUMENTS))


def _padding(case: Case, device: str) -> Rule:
    lengths = _lengths(case, device)
    return lambda b, h, row, key: key < lengths[b]


def _dense(rule: Callable[[Case, str], Rule], case: Case, device: str, sizes: tuple[int, ...]) -> Tensor:
    index = (torch.arange(size, device=device) for size in sizes)
    places = (i.view(*(-1 if dim == own_dim else 1 for dim in range(4))) for own_dim, i in enumerate(index))
    return rule(case, device)(*places).expand(sizes).contiguous()


def _random(case: Case, device: str, sizes: tuple[int, ...]) -> Tensor:
    return torch.rand(sizes, device=device, generator=torch.Generator(device).manual_seed(SEED)) < VISIBLE_SHARE


@dataclass(frozen=True, slots=True)
class Pattern:
    """Kind of mask. `dims` has a letter for each of the dims B, Hq, Sq and Sk of the mask; missing dims have size 1."""

    name: str
    dims: str
    rule: Callable[[Case, str], Rule] | None = None  # also passed to FlexAttention; None: a random mask
    floats: str = ""  # dtype of a float mask: "own" for the dtype of the query, or "fp32"; empty: bool
    heads_last: bool = False  # heads are innermost in memory, as in the table of T5
    learned: bool = False  # the gradient of the mask is computed

    def sizes(self, case: Case) -> tuple[int, ...]:
        size_by_letter = {"B": case.B, "H": case.Hq, "Q": case.Sq, "K": case.Sk}
        return tuple(size if dim in self.dims else 1 for dim, size in size_by_letter.items())

    def make(self, case: Case, device: str) -> Tensor:
        sizes = self.sizes(case)
        if self.floats:
            return self._biased(case, device, sizes)
        return _dense(self.rule, case, device, sizes) if self.rule else _random(case, device, sizes)

    def _biased(self, case: Case, device: str, sizes: tuple[int, ...]) -> Tensor:
        generator = torch.Generator(device).manual_seed(SEED)
        order = (0, 2, 3, 1) if self.heads_last else (0, 1, 2, 3)
        bias = torch.randn([sizes[dim] for dim in order], device=device, generator=generator)
        bias = bias.to(case.torch_dtype) if self.floats == "own" else bias
        return bias.permute([order.index(dim) for dim in range(4)])


PATTERNS = (
    Pattern("random", "QK", None),
    Pattern("all", "QK", lambda case, device: lambda b, h, row, key: row + key >= 0),
    Pattern("tril", "QK", _causal),
    Pattern("window", "QK", _window),
    Pattern("documents", "BQK", _documents),
    Pattern("padding", "BQK", _padding),
    Pattern("padding_row", "BK", _padding),
    Pattern("per_head", "HQK"),
    Pattern("bias_one", "QK", floats="own"),
    Pattern("bias_heads", "HQK", floats="own"),
    Pattern("bias_all", "BHQK", floats="own"),
    Pattern("bias_keys", "BK", floats="own"),
    Pattern("bias_t5", "HQK", floats="own", heads_last=True),
    Pattern("bias_fp32", "QK", floats="fp32"),
    Pattern("bias_learned", "HQK", floats="own", learned=True),
    Pattern("bias_learned_all", "BHQK", floats="own", learned=True),
)
# Biases that Swin transformers add to the scores of small windows: a learned table shared by all windows, a mask of
# shifted windows, and the sum of both.
SWIN = (
    Pattern("swin_bias", "HQK", floats="own"),
    Pattern("swin_learned", "HQK", floats="own", learned=True),
    Pattern("swin_shifted", "BQK", floats="own"),
    Pattern("swin_shifted_learned", "BQK", floats="own", learned=True),
    Pattern("swin_sum_learned", "BHQK", floats="own", learned=True),
)
FURTHER_PATTERNS = tuple(pattern for pattern in PATTERNS if pattern.name in {"random", "bias_heads", "bias_keys"})
FLEX = {"tril", "window", "documents", "padding"}


def swin_windows() -> list[Case]:
    """Return cases with windows of 7 x 7, 8 x 8 and 12 x 12 tokens. A batch holds the windows of all images."""
    sizes = ((4096, 3, 49), (1024, 6, 49), (512, 6, 49), (64, 6, 49), (256, 12, 49), (1024, 4, 64), (128, 24, 144))
    return [new_case(f"b{B}h{H}s{S}", (B, H, H), (S, S), (32, 32)) for B, H, S in sizes]


def calls() -> Iterator[tuple[str, Case, Pattern, str]]:
    for direction in ("fwd", "train"):
        for case in workloads.masked():
            for pattern in PATTERNS:
                fits = torch.Size(pattern.sizes(case)).numel() * (2 if pattern.floats else 1) <= MOST_SCORES
                if fits and (direction == "train" or not pattern.learned):
                    yield f"{pattern.name}_{direction}_d{case.D}_s{case.Sq}", case, pattern, direction
        for case in swin_windows():
            for pattern in SWIN:
                if direction == "train" or not pattern.learned:
                    yield f"{pattern.name}_{direction}_{case.name}", case, pattern, direction
        for case in workloads.masked_outside_grid():
            for pattern in FURTHER_PATTERNS:
                yield f"{pattern.name}_beside_{direction}_{case.name}", case, pattern, direction


def suite_masks(bench: Bench) -> None:
    for name, case, pattern, direction in calls():
        if bench.take(name):
            _measure(bench, name, case, pattern, direction)


def wrong_in(case: Case, inputs: Inputs, mask: Tensor, out: Tensor) -> str | None:
    """Compare the first head of a result with fp64, and return a description of a wrong result, or None."""
    group = case.Hq // case.Hkv
    few = Inputs(inputs.q[:1, :group], inputs.k[:1, :1], inputs.v[:1, :1], inputs.grad_out[:1, :group])
    rule = Masking(bias=mask[:1, :group])
    errors = measure_error(out[:1, :group], oracle(case, few, rule).out, plain(case, few, rule).out)
    return None if errors.ok else str(errors)


def _flex_call(flex: baselines.Attend, case: Case, pattern: Pattern, inputs: Inputs) -> Callable[[], Tensor]:
    sizes, device = pattern.sizes(case), str(inputs.q.device)
    block_mask = create_block_mask(pattern.rule(case, device), *sizes, device=device)
    return functools.partial(flex, inputs.q, inputs.k, inputs.v, block_mask=block_mask)


def _measure(bench: Bench, name: str, case: Case, pattern: Pattern, direction: str) -> None:
    grad = direction == "train"
    inputs, mask = make_inputs(case, bench.device, requires_grad=grad), pattern.make(case, bench.device)
    leaves = (*inputs, mask.requires_grad_()) if pattern.learned else tuple(inputs)

    def call_of(attend: Callable[[], Tensor]) -> Callable[[], object]:
        def call():
            out = attend()
            return torch.autograd.grad(out, leaves, inputs.grad_out) if grad else out

        return call

    of_torch = functools.partial(F.scaled_dot_product_attention, *inputs, mask, enable_gqa=case.gqa)
    attends = dict.fromkeys(("ours_fa3", "ours_auto", baselines.TALL, "stock", "efficient"), of_torch)
    with torch.set_grad_enabled(grad):
        for flex in sorted({"flex", baselines.FLASH} & bench.providers.keys()) if pattern.name in FLEX else ():
            attends[flex] = _flex_call(bench.providers[flex].attend, case, pattern, inputs)
        timings, wrong, refused = time_calls(
            bench,
            name,
            {
                peer: Candidate(call_of(attend), bench.providers[peer].scope)
                for peer, attend in attends.items()
                if peer in bench.providers
            },
            lambda peer: wrong_in(case, inputs, mask.detach(), attends[peer]().detach()),
        )
    facts = facts_of(case) | {"mask": pattern.name, "flop": case.flop * GRADIENT_FLOP.get(direction, 1.0)}
    bench.add(row_of(name, timings, **facts, grad=grad, wrong=wrong, refused=refused))


# ---- suite blocks ----

BLOCK_SEED, BLOCK_ROWS = 20261126, 128
LARGEST_BLOCK_ERROR = 0.01  # largest allowed relative error against fp64: above, a result is wrong
BLOCK_ROUND_MS, ROWS_CHECKED = 10.0, 64
BLOCK_SHARE = 10  # one block in BLOCK_SHARE blocks is visible in the "random" mask


@dataclass(frozen=True, slots=True)
class BlockMaskCall:
    """Self-attention call in bf16 with batch size 1."""

    name: str
    d: int
    s: int
    heads: tuple[int, int]
    mask: str
    direction: str

    def facts(self, visible_fraction: float) -> dict[str, object]:
        flop = 4.0 * self.s**2 * self.heads[0] * self.d * visible_fraction * GRADIENT_FLOP.get(self.direction, 1.0)
        return {"shape": [1, *self.heads, self.s, self.s, self.d, self.d], "d": self.d, "s": self.s, "mask": self.mask,
                "dtype": "bf16", "flop": flop, "seen": visible_fraction}  # fmt: skip


def _random_block_mask(s: int, device: str) -> BlockMask:
    """Return a block mask of full blocks, with one block in BLOCK_SHARE visible and a new random choice in each row."""
    blocks = s // BLOCK_ROWS
    listed = max(1, blocks // BLOCK_SHARE)
    drawn = torch.rand(blocks, blocks, generator=torch.Generator().manual_seed(BLOCK_SEED)).argsort(1)[:, :listed]
    index = torch.zeros(blocks, blocks, dtype=torch.int32)
    index[:, :listed] = drawn.sort(1).values
    count = torch.full((blocks,), listed, dtype=torch.int32)
    none = torch.zeros_like(count), torch.zeros_like(index)
    lists = (x[None, None].to(device) for x in (*none, count, index))
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=BLOCK_ROWS, seq_lengths=(s, s))


def _block_mask_of(rule: Callable) -> Callable[[int, str], BlockMask]:
    def made(s: int, device: str) -> BlockMask:
        return create_block_mask(lambda b, h, row, key: rule(s, b, h, row, key), None, None, s, s, device=device)

    return made


BLOCK_MASKS: dict[str, Callable[[int, str], BlockMask]] = {
    "random": _random_block_mask,
    "window": _block_mask_of(lambda s, b, h, row, key: (row >= key) & (row - key < s // 16)),
    "documents": _block_mask_of(lambda s, b, h, row, key: (row >= key) & (row // (s // 16) == key // (s // 16))),
    "causal": _block_mask_of(lambda s, b, h, row, key: row >= key),
}


def block_calls() -> Iterator[BlockMaskCall]:
    for direction in ("fwd", "train"):
        for d, s, heads in ((128, 65536, 4), (128, 16384, 16), (64, 16384, 32), (256, 16384, 8), (128, 4096, 16)):
            for mask in BLOCK_MASKS:
                yield BlockMaskCall(f"{direction}_{mask}_d{d}_s{s}", d, s, (heads, heads), mask, direction)


def _visible_fraction(mask: BlockMask, s: int) -> float:
    """Return the fraction of the scores in visible blocks."""
    listed = int(mask.kv_num_blocks.sum())
    listed += 0 if mask.full_kv_num_blocks is None else int(mask.full_kv_num_blocks.sum())
    return listed * BLOCK_ROWS**2 / s**2


def _block_error(call: BlockMaskCall, mask: BlockMask, leaves: list[Tensor], out: Tensor) -> float:
    """Return the relative error of randomly selected rows against fp64."""
    rows = torch.randperm(call.s, generator=torch.Generator().manual_seed(BLOCK_SEED))[:ROWS_CHECKED].to(out.device)
    at, keys = rows[:, None] // BLOCK_ROWS, torch.arange(call.s, device=out.device)
    visible = mask.to_dense()[0, 0].bool().to(out.device)[at, keys // BLOCK_ROWS]
    of_plane = torch.zeros((), dtype=torch.long, device=out.device)
    visible = visible & mask.mask_mod(of_plane, of_plane, rows[:, None], keys)
    q, k, v = (x.detach().double().transpose(1, 2) for x in leaves)
    scores = (q[:, :, rows] @ k.mT / math.sqrt(call.d)).masked_fill(~visible, -math.inf)
    right = (scores.softmax(-1) @ v).transpose(1, 2)
    return float((out[:, rows].double() - right).norm() / right.norm())


def _measure_blocks(bench: Bench, call: BlockMaskCall) -> None:
    mask = BLOCK_MASKS[call.mask](call.s, bench.device)
    generator = torch.Generator(bench.device).manual_seed(BLOCK_SEED)
    drawn = [torch.randn(1, call.s, call.heads[0], call.d, device=bench.device, generator=generator).bfloat16()
             for _ in range(4)]  # fmt: skip
    leaves = [x.requires_grad_(call.direction == "train") for x in drawn[:3]]
    lists = prepare_block_mask(mask, gradients=call.direction == "train")
    makers = {
        "ours_fa3": lambda: lambda: attention(*leaves, block_mask=lists),
        WITHOUT_FEATURE: lambda: lambda: attention(*leaves),
        "flex": lambda: lambda: baselines._flex(*(x.transpose(1, 2) for x in leaves), block_mask=mask).transpose(1, 2),
    }
    timings, plain, errors, refused = time_with_peers(
        bench, call.name, makers, error_of=functools.partial(_block_error, call, mask, leaves),
        once=functools.partial(complete_call, call.direction, leaves, drawn[3]),
        largest_error=LARGEST_BLOCK_ERROR, round_ms=BLOCK_ROUND_MS,
    )  # fmt: skip
    visible_fraction = _visible_fraction(mask, call.s)
    facts = call.facts(visible_fraction) | {"errors": errors, "refused": refused, "grad": call.direction == "train"}
    row = row_of(call.name, timings, **facts)
    if plain is not None:
        row["all_ms"] |= {WITHOUT_FEATURE: plain.ms}
        row["rate"] = round(plain.ms * visible_fraction / timings["ours_fa3"].ms, 4)
    bench.add(row)


def suite_blocks(bench: Bench) -> None:
    for call in block_calls():
        if bench.take(call.name):
            _measure_blocks(bench, call)
