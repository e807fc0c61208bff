"""Calls of trial kernels (trials.py) on CPU tensors, with fp64 references.

Calls of each feature span several blocks, have tails, have more tiles than CTAs, and two query heads per KV head.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_flashplug.ops import dropout_reference
from torch_flashplug.ops.bitmask import words
from torch_flashplug.ops.block_sparse_order import turns
from torch_flashplug.registry.kernel_args import ARGUMENTS_BY_KIND
from torch_flashplug.registry.kernel_spec import BACKWARD_TILE, LISTED, SCRATCH_UNITS, WARPGROUP, KernelSpec
from torch_flashplug.testing import (
    Case,
    Inputs,
    Masking,
    assert_lse,
    assert_within_budget,
    attention_math,
    grads_math,
    make_inputs,
    new_case,
)
from torch_flashplug.testing.budget import GRAD_FACTOR, cancelled_sums

ROOT = Path(__file__).resolve().parents[1]
CTAS = 3
DROPS = 0.2
HEADS = (2, 1)  # query heads, KV heads
SEQUENCES = ((150, 200), (0, 30), (70, 0), (1, 129), (0, 0), (130, 5))  # varlen: rows and keys of each sequence
SPLITS = ((1, 1), (2, 2), (3, 1))  # splits of decode, and CTAs of a cluster


@dataclass(frozen=True)
class Call:
    """Arguments of a trial kernel, and the attention that the kernel must compute.

    In a varlen call, the inputs are packed sequences.
    """

    case: Case
    inputs: Inputs
    masking: Masking
    extra: dict[str, object] = field(default_factory=dict)
    sequences: tuple[tuple[int, int], ...] = ()
    kinds: Tensor | None = None  # block-sparse: NONE, MASKED or WHOLE for each block

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the scores."""
        return self.case.B, self.case.Hq, self.case.Sq, self.case.Sk

    def with_mask(self, mask: Tensor) -> Call:
        """Return the call with an additional bool mask."""
        bias = self.masking.bias
        bias = mask if bias is None else mask & bias if bias.dtype == torch.bool else torch.where(mask, bias, -math.inf)
        return dataclasses.replace(self, masking=dataclasses.replace(self.masking, bias=bias))

    def with_args(self, **extra: object) -> Call:
        """Return the call with additional kernel arguments."""
        return dataclasses.replace(self, extra=self.extra | extra)


def random_uniform(seed: int, *sizes: int) -> Tensor:
    """Return uniform random numbers."""
    return torch.rand(*sizes, generator=torch.Generator().manual_seed(seed))


# ---- features ----

NONE, MASKED, WHOLE = range(3)


def bitmask_args(name: str, bits: Tensor, heads: int) -> dict[str, object]:
    """Return the bitmask arguments for a mask of shape (B or 1, Hq or 1, Sq, Sk)."""
    of_batch, of_head = (int(size > 1) for size in bits.shape[:2])
    numbers = {f"{name}_of_batch": of_batch * bits.shape[1], f"{name}_of_head": of_head}
    return {f"{name}_rows": words(bits).flatten(), f"{name}_columns": words(bits.mT).flatten(), **numbers}


def add_mask(call: Call, seed: int) -> Call:
    """Add a mask in which some rows see no key, or no key of a block.

    In a block-sparse call, the mask applies to the masked blocks.
    """
    B, Hq, Sq, Sk = call.shape
    mask = random_uniform(seed, B if seed % 3 else 1, Hq if seed % 2 else 1, Sq, Sk) < 0.7
    mask[..., 70, :] = mask[..., 65] = mask[..., 64:128, :150] = mask[..., 130:200, 128:] = False
    if call.kinds is not None:
        kinds = expand_blocks(call.kinds, Sq, Sk)
        mask = (kinds == WHOLE) | ((kinds == MASKED) & mask)
    return call.with_mask(mask).with_args(**bitmask_args("mask", mask, Hq))


def add_dropout(call: Call, seed: int) -> Call:
    B, Hq, Sq, Sk = call.shape
    drawn_from = torch.tensor([seed + 100])
    kept_scores = dropout_reference.dropout_mask(drawn_from, B, Hq, Sq, Sk, DROPS)
    call = call.with_args(drawn_from=drawn_from, drops=DROPS)
    masking = dataclasses.replace(call.masking, kept=kept_scores, kept_share=dropout_reference.share_of(DROPS))
    return dataclasses.replace(call, masking=masking)


def expand_blocks(blocks: Tensor, Sq: int, Sk: int) -> Tensor:
    """Expand values of blocks to values of scores."""
    return blocks.repeat_interleave(LISTED, -2).repeat_interleave(LISTED, -1)[..., :Sq, :Sk]


def to_block_lists(chosen: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Return counts and indices in the form of FlexAttention, in random order: (R,) and (R, C) over all planes."""
    order = ((1 + random_uniform(seed, *chosen.shape)) * chosen).argsort(-1, descending=True).int()
    return chosen.sum(-1, dtype=torch.int32).flatten(), order.view(-1, order.shape[-1])


def add_block_lists(call: Call, seed: int, *, words: bool) -> Call:
    """Add random blocks of each kind.

    Args:
        call: the call without blocks.
        seed: seed of the random blocks.
        words: True if a bitmask comes with the blocks. Then some rows have no block, and get a fully masked block.
    """
    B, Hq, Sq, Sk = call.shape
    M, N = -(-Sq // LISTED), -(-Sk // LISTED)
    kinds = (random_uniform(seed + 300, B, Hq, M, N) * 3).int()
    if words:
        kinds[..., 1, :] = kinds[..., N // 2] = NONE
    kinds[..., 0, 0] = MASKED
    kinds[..., -1, :] = WHOLE
    if not words:
        kinds[0, 0, 2:, -1] = kinds[-1, 0, :-1, N // 2] = NONE  # blocks of keys visible to few query blocks
        kinds[..., 0] = torch.where((kinds == NONE).all(-1), WHOLE, kinds[..., 0])
    if Sk % LISTED:
        kinds[..., -1] = kinds[..., -1].clamp(max=MASKED)  # no stage masks keys behind the last key in a full block
    masked = kinds == MASKED
    never_empty = masked.clone()
    never_empty[..., 0] |= (kinds == NONE).all(-1)
    keys = [to_block_lists(x, seed) for x in (never_empty, kinds == WHOLE)]
    queries = [to_block_lists(x.mT, seed + 1) for x in (masked, kinds == WHOLE)]
    shaped = [(count.view(B, Hq, N), index.view(B, Hq, N, M)) for count, index in queries]
    turn = [x.view(-1, M) for x in turns(shaped, Sq, Sk)]
    extra = {}
    for side, lists, rows in (("key", keys, M), ("query", queries, N)):
        plural = "keys" if side == "key" else "queries"
        for kind, (count, index) in zip(("masked", "whole"), lists, strict=True):
            extra |= {f"{kind}_{side}_count": count, f"{kind}_{plural}": index}
        extra |= {f"{side}_rows_of_batch": Hq * rows, f"{side}_rows_of_head": rows}
    call = dataclasses.replace(call, kinds=kinds).with_args(**extra, masked_turn=turn[0], whole_turn=turn[1])
    return call.with_mask(expand_blocks(kinds, Sq, Sk) != NONE)


def tile_lists():
    """Return the function `tiles` of docs/layouts.md."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/layouts.md").read_text(), re.DOTALL)
    names = {"torch": torch, "F": F}
    exec(next(block for block in blocks if block.startswith("def tiles(")), names)
    return names["tiles"]


def cu_seqlens_from(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def make_packed_call(spec: KernelSpec, seed: int) -> Call:
    """Return a call with packed sequences; sequences without keys or without rows contain NaN."""
    rows, keys = ([lengths[side] for lengths in SEQUENCES] for side in (0, 1))
    case = new_case("ragged", (1, *HEADS), (sum(rows), sum(keys)), (spec.d, spec.dv), *causal_tags(spec))
    inputs = make_inputs(case, "cpu", seed)
    for row, key in zip(split_by_lengths(range(case.Sq), rows), split_by_lengths(range(case.Sk), keys), strict=True):
        if not row or not key:
            inputs.q[:, :, row], inputs.grad_out[:, :, row] = math.nan, 1.0
            inputs.k[:, :, key] = inputs.v[:, :, key] = math.nan
    at, met = cu_seqlens_from(rows), cu_seqlens_from(keys)
    row_tile, key_tile = spec.tile_m, spec.tile_n
    if spec.is_decode:
        row_tile //= HEADS[0] // HEADS[1]  # query heads of a group are packed
    if spec.is_split_backward:
        row_tile = WARPGROUP
    tiles = tile_lists()
    lists = {
        "row": tiles(at, met, at, row_tile, case.Sq, visible_keys_of_block(row_tile)),
        "key": tiles(met, at, at, key_tile, case.Sk, visible_keys_of_block(key_tile)),
        "scratch": tiles(at, met, at, BACKWARD_TILE[0], case.Sq),
    }
    extra = {f"{name}_tiles": entries for name, (entries, _) in lists.items()}
    extra |= {f"{name}_head": head for name, (_, head) in lists.items()}
    return Call(case, inputs, Masking(int(case.causal)), extra, SEQUENCES)


def visible_keys_of_block(size: int):
    return lambda block, own_length, kv_length: torch.minimum(kv_length, (block + 1) * size)


def split_by_lengths(sequence, lengths: list[int]) -> Iterator:
    begin = 0
    for length in lengths:
        yield sequence[begin : begin + length]
        begin += length


def causal_tags(spec: KernelSpec) -> tuple[str, ...]:
    return ("causal",) if "causal" in spec.features else ()


def make_call(spec: KernelSpec, stages: tuple[str, ...], seed: int) -> Call:
    """Return a call for a trial kernel with the given stages."""
    if "ragged" in stages:
        return make_packed_call(spec, seed)
    lengths = (300, 333)
    if "listed" in stages:
        # half a block-sparse block too many, and lists with one entry
        lengths = (300, 400) if seed % 2 else (450, LISTED)
    case = new_case("trial", (2, *HEADS), lengths, (spec.d, spec.dv), *causal_tags(spec))
    call = Call(case, make_inputs(case, "cpu", seed), Masking(int(case.causal)))
    for stage in stages:
        if stage == "listed":
            call = add_block_lists(call, seed, words="bits" in stages)
        else:
            call = {"bits": add_mask, "dropout": add_dropout}[stage](call, seed)
    return call


# ---- launches ----


def extra_args(call: Call) -> list[object]:
    """Return the arguments in the order of `trials.Extra`; arguments without use in the trial are small and wrong."""
    from trials import Extra

    placeholders = {
        "_tiles": torch.zeros(1, 8, dtype=torch.int32),
        "_head": torch.zeros(2, dtype=torch.int32),
        "_rows": torch.zeros(4, dtype=torch.int32),
        "_columns": torch.zeros(4, dtype=torch.int32),
        "drawn_from": torch.zeros(1, dtype=torch.int64),
        "_count": torch.zeros(1, dtype=torch.int32),
    }

    def value(member: dataclasses.Field) -> object:
        if member.name in call.extra:
            return call.extra[member.name]
        if member.type != "cute.Tensor":
            return 0.0 if member.type == "Float32" else 0
        matches = (tensor for ending, tensor in placeholders.items() if member.name.endswith(ending))
        return next(matches, torch.zeros(1, 1, dtype=torch.int32))

    return [value(member) for member in dataclasses.fields(Extra)]


def launch(function: Callable[..., None], spec: KernelSpec, call: Call, **values: object) -> None:
    scale = call.case.D**-0.5
    tensors = dict(zip("qkv", call.inputs, strict=True)) | {"do": call.inputs.grad_out}
    numbers = {"scale_log2": scale * math.log2(math.e), "scale": scale, "num_ctas": CTAS, "wanted": 3}
    values = {**tensors, **numbers, "counter": torch.zeros(1, dtype=torch.int32), **values}
    args = (
        values.get(argument.name) if argument.is_optional else values[argument.name]
        for argument in ARGUMENTS_BY_KIND[spec.kind]
    )
    function(*args, extra_args(call), ctypes.c_void_p(None))


def forward(
    function: Callable[..., None], spec: KernelSpec, call: Call, splits: int = 1, cluster: int = 1
) -> tuple[Tensor, Tensor]:
    """Run the forward and return O and LSE."""
    case = call.case
    out = torch.full((case.B, case.Sq, case.Hq, case.Dv), math.nan, dtype=case.torch_dtype).transpose(1, 2)
    lse = torch.full((case.B, case.Hq, case.Sq), math.nan)
    partials = torch.full((case.B * case.Hq * case.Sq * splits * (case.Dv + 2),), math.nan)
    launch(function, spec, call, o=out, lse=lse, partials=partials, splits=splits, cluster=cluster)
    return out, lse


def backward(function: Callable[..., None], spec: KernelSpec, call: Call) -> tuple[Tensor, ...]:
    """Run the backward and return dQ, dK and dV; the workspace is sized as in src/ops/backward.cpp."""
    case, inputs = call.case, call.inputs
    forward_results = reference_attention(call, torch.float64)
    tiles = -(-case.Sq // LISTED) * (LISTED // spec.tile_m) if call.kinds is not None else -(-case.Sq // spec.tile_m)
    blocks = len(call.extra["scratch_tiles"]) if call.sequences else tiles
    rows = torch.full((case.B, case.Hq, 2, blocks * spec.tile_m), math.nan)
    floats = case.B * case.Hq * (blocks * spec.tile_m * spec.d + blocks * SCRATCH_UNITS + 2)
    gradients = tuple(torch.full_like(x, math.nan) for x in inputs)
    results = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    o, lse = forward_results[0].to(case.torch_dtype), forward_results[1].float()
    launch(function, spec, call, **results, o=o, lse=lse, rows=rows, scratch=torch.full((floats,), math.nan))
    return gradients


# ---- references ----


def attend_per_sequence(call: Call, math_of: Callable[..., tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Apply a function to q, k, v, dO; in a varlen call, apply it to each sequence and concatenate the results."""
    q, k, v, do = *call.inputs, call.inputs.grad_out
    if not call.sequences:
        return math_of(q, k, v, do)
    rows, keys = ([lengths[side] for lengths in call.sequences] for side in (0, 1))
    sides = ((q, rows), (k, keys), (v, keys), (do, rows))
    parts = [math_of(*each) for each in zip(*(x.split(lengths, 2) for x, lengths in sides), strict=True)]
    return tuple(torch.cat(each, 2) for each in zip(*parts, strict=True))


def reference_attention(call: Call, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return O and LSE of the reference."""

    def math_of(q, k, v, do):
        results = attention_math(q, k, v, mask=call.masking, dtype=dtype)
        return results.out, results.lse

    return attend_per_sequence(call, math_of)


def reference_gradients(call: Call, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return attend_per_sequence(call, lambda *tensors: grads_math(*tensors, mask=call.masking, dtype=dtype))


def check_kernel(label: str, function: Callable[..., None], spec: KernelSpec, call: Call) -> None:
    """Launch the kernel, and raise if a result exceeds its error budget."""
    if spec.is_backward:
        assert_gradients(label, call, backward(function, spec, call))
    for splits, cluster in SPLITS if spec.is_decode else () if spec.is_backward else SPLITS[:1]:
        assert_attention(f"{label} {splits} splits", call, *forward(function, spec, call, splits, cluster))


def assert_attention(label: str, call: Call, out: Tensor, lse: Tensor) -> None:
    exact, low = reference_attention(call, torch.float64), reference_attention(call, call.case.torch_dtype)
    assert_within_budget(f"{label} out", out, exact[0], low[0])
    assert_lse(label, lse, exact[1], reference_attention(call, torch.float32)[1])


def assert_gradients(label: str, call: Call, grads: tuple[Tensor, ...]) -> None:
    exact, low = reference_gradients(call, torch.float64), reference_gradients(call, call.case.torch_dtype)
    inputs = [x.nan_to_num() for x in (*call.inputs, call.inputs.grad_out)]
    cancelled = cancelled_sums(*inputs, None)
    for name, grad, fp64, yardstick in zip(("dq", "dk", "dv"), grads, exact, low, strict=True):
        budget = {"factor": GRAD_FACTOR, "cancelled": float(cancelled[name])}
        assert_within_budget(f"{label} {name}", grad, fp64, yardstick, **budget)
