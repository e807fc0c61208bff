"""num_splits=1 of attention(): a sequence gets the same kernel alone and in any batch, its keys are not split, and its
gradients are added up in one order. fixed_split_size: the same, but of pages keys are split.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from plans import Call, call, made_of
from torch import Tensor

from torch_flashplug.api.attention_args import MOST_SPLITS, SPLIT_UNIT, check_split_size
from torch_flashplug.api.backend import DEVICES
from torch_flashplug.dispatch import bindings
from torch_flashplug.registry import kernel_table
from torch_flashplug.registry.architectures import BACKENDS

GPUS = {"h100": DEVICES["h100"], "h200": DEVICES["h200"]}
BATCHES = (1, 2, 9, 64, 300)
HEADS = (8, 2)


def batch(B: int, Sq: int, Sk: int, D: int, *needs: str, **more: float) -> Call:
    return call((B, *HEADS), (Sq, Sk), (D, D), **dict.fromkeys(("window", *needs), 1), left=Sq + Sk, **more)


def on_end(lengths: Sequence[int], D: int, *needs: str, **more: float) -> Call:
    """Of these lengths, as many keys as rows."""
    total = sum(lengths)
    return batch(1, total, total, D, "ragged", *needs, sequences=len(lengths), right=2 * total, **more)


def with_others(length: int, others: int, beside: int, D: int, *needs: str, **more: float) -> Call:
    return on_end([length] + [beside] * others, D, *needs, **more)


# A sequence of its kind alone, and beside others, shorter ones and longer ones.
LENGTHS = (7, 700, 9000)
ON_END = {
    f"{'+'.join(('on_end', *needs))}_d{D}": [
        with_others(length, others, beside, D, *needs)
        for length in LENGTHS for others, beside in ((0, 0), (1, 5), (1000, 4), (30, 100), (7, 8192))
    ]
    for D in (64, 128, 256) for needs in ((), ("softcap",))
}  # fmt: skip
# Tables are as wide as the longest of a batch needs.
PAGED = {
    f"{'+'.join(('pages', *needs))}_d{D}_rows{Sq}": [
        batch(B, Sq, keys, D, "paged", *needs, **(made_of("bf16", "int8", "int8") if "cache8" in needs else {}))
        for B in BATCHES for keys in (16, 4096, 131072)
    ]
    for D in (64, 128, 256) for Sq in (1, 12) for needs in ((), ("softcap",), ("cache8",))
}  # fmt: skip
DENSE = {
    f"batches_d{D}_rows{Sq}": [batch(B, Sq, Sk, D) for B in BATCHES for Sk in (200, 2000)]
    for D in (64, 128, 256) for Sq in (65, 700, 5000)
}  # fmt: skip
KINDS = ON_END | PAGED | DENSE


def plans(calls: Sequence[Call], gpu: str, **more: float) -> list[dict]:
    """As the ops of attention() make them: by the first family that can."""
    found = []
    for one in calls:
        tried = [bindings.plan({**one, **more}, GPUS[gpu], BACKENDS.index(family)) for family in ("fa3", "fa2")]
        found.append(next(plan for plan in tried if plan["kernel"]))
    return found


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_has_one_plan_in_any_batch(kind: str, gpu: str) -> None:
    found = plans(KINDS[kind], gpu, batch_invariant=1)
    assert len({plan["kernel"] for plan in found}) == 1
    assert {(plan["splits"], plan["cluster"]) for plan in found} == {(1, 1)}


@pytest.mark.parametrize("kind", ON_END | DENSE)
def test_gradients_have_one_plan_too(kind: str) -> None:
    """In parts, which add up in one order; the heads of one block of keys in one tile."""
    found = plans(KINDS[kind], "h100", batch_invariant=1, grad=1)
    assert len({plan["gradients"] for plan in found}) == 1 and found[0]["gradients"].startswith("partbwd")
    assert {plan["sharing"] for plan in found} == {1}


@pytest.mark.parametrize("kind", ["on_end_d64", "on_end_d128", "pages_d128_rows1", "batches_d64_rows700"])
def test_otherwise_batches_decide(kind: str) -> None:
    """What num_splits=1 is for: these calls have several plans."""
    assert len({(plan["kernel"], plan["splits"]) for plan in plans(KINDS[kind], "h100")}) > 1


def test_long_calls_keep_the_tiles_that_are_fast() -> None:
    """Of sequences that fill the GPU the kernel is the one they would have anyway."""
    for D in (64, 128, 256):
        long = [on_end([4096] * 64, D)]
        assert plans(long, "h100")[0]["kernel"] == plans(long, "h100", batch_invariant=1)[0]["kernel"]


@pytest.mark.parametrize("splits", [2, 7])
def test_other_numbers_are_how_many_ctas_share_keys(splits: int) -> None:
    mode = BACKENDS.index("fa2") | splits << 8
    assert bindings.plan(batch(1, 1, 4096, 128, "paged"), DEVICES["h100"], mode)["splits"] == splits
    assert bindings.plan(batch(1, 1, 16, 128, "paged"), DEVICES["h100"], mode)["splits"] == 1  # of one block there is one


# ---- of a fixed size ----


@pytest.mark.parametrize("kind", KINDS)
def test_a_size_changes_splits_of_pages_alone(kind: str) -> None:
    """Of which there are as many as a table has room for, whatever the batch; the kernel is the same one."""
    size, one = 1024, plans(KINDS[kind], "h100", batch_invariant=1)
    for plan, other, said in zip(plans(KINDS[kind], "h100", batch_invariant=1, split_size=size), one, KINDS[kind], strict=True):
        assert plan["kernel"] == other["kernel"] and plan["cluster"] == 1
        assert plan["splits"] == (max(2, -(-said["Sk"] // size)) if kind in PAGED else 1)


def test_sizes_are_whole_blocks_of_every_kernel() -> None:
    tiles = {spec.tile_n for spec in kernel_table.specs(80, "decode") if "paged" in spec.features}
    assert tiles and all(SPLIT_UNIT % tile_n == 0 for tile_n in tiles)


def blocks(used: int, Sq: int, left: int, right: int, tile_n: int) -> int:
    """That a sequence's rows walk over: BoundFew.share of decode_window.py, to the bottom right."""
    end = -(-min(max(used + right, 1), max(used, 1)) // tile_n)
    return end - min(max(used - Sq - left, 0) // tile_n, end - 1)


@pytest.mark.parametrize("window", [(-1, 0), (0, 0), (127, 0), (128, 3), (1000, 0), (1023, 5), (-1, -1)], ids=str)
@pytest.mark.parametrize("Sq", [1, 5, 16])
def test_there_are_enough_splits_for_every_length(Sq: int, window: tuple[int, int]) -> None:
    """And two at least: one would write its own results."""
    for keys, size in itertools.product((16, 128, 144, 1008, 4096), (128, 256, 1024)):
        left, right = (Sq + keys if bound < 0 else bound for bound in window)
        given = batch(3, Sq, keys, 64, "paged", batch_invariant=1, split_size=size) | {"left": left, "right": right}
        (splits,) = {plan["splits"] for plan in plans([given, given | {"B": 300}], "h100")}
        assert splits >= 2
        for used, tile_n in itertools.product(range(keys + 1), (64, 128)):
            assert blocks(used, Sq, left, right, tile_n) * tile_n <= splits * size


@pytest.mark.parametrize("window", [(-1, 0), (100, 0), (70000, 4)], ids=str)
def test_the_least_size_that_the_error_says_is_enough(window: tuple[int, int]) -> None:
    q = torch.empty(1, 8, 3, 64, device="meta")
    for keys in (255 * 128, 255 * 128 + 1, 100_000, 1_000_000):
        said = next((size for size in range(128, 8192, 128) if accepted(size, window, q, keys) is None), 0)
        assert said and all(accepted(size, window, q, keys) == said for size in range(128, said, 128))
        left, right = (3 + keys if bound < 0 else bound for bound in window)
        given = batch(1, 3, keys, 64, "paged", batch_invariant=1) | {"left": left, "right": right}
        splits = [plan["splits"] for plan in plans([given | {"split_size": said - i * 128} for i in range(2)], "h100")]
        assert splits[0] <= MOST_SPLITS and (said == 128 or splits[1] > MOST_SPLITS)


def accepted(size: int, window: tuple[int, int], q: Tensor, keys: int) -> int | None:
    """None, or the least size."""
    try:
        check_split_size(size, window, q, torch.empty(1, 2, keys, 64, device="meta"), keys)
    except ValueError as error:
        return int(str(error).rpartition(" ")[2])
