"""Plans of attention() with num_splits=1 or fixed_split_size, independent of the batch.

With num_splits=1 a sequence gets the same kernel alone and in any batch, keys are not split, and gradients are added up
in a fixed order. With fixed_split_size the rules are equal, but keys of paged caches are split.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import pytest
import torch
from golden_plans import Call, call, operand_dtypes
from torch import Tensor

from torch_flashplug.api.attention_args import MAX_SPLITS, SPLIT_UNIT, check_split_size
from torch_flashplug.api.backend import DEVICES
from torch_flashplug.dispatch import bindings
from torch_flashplug.ops.attention import AttentionParams
from torch_flashplug.registry import kernel_table
from torch_flashplug.registry.architectures import BACKENDS

GPUS = {"h100": DEVICES["h100"], "h200": DEVICES["h200"]}
BATCHES = (1, 2, 9, 64, 300)
HEADS = (8, 2)


def batched_call(B: int, Sq: int, Sk: int, D: int, *features: str, **facts: float) -> Call:
    return call((B, *HEADS), (Sq, Sk), (D, D), **dict.fromkeys(("window", *features), 1), left=Sq + Sk, **facts)


def packed_call(lengths: Sequence[int], D: int, *features: str, **facts: float) -> Call:
    """Return a call with packed sequences of the given lengths, with as many keys as rows."""
    total = sum(lengths)
    return batched_call(1, total, total, D, "ragged", *features, sequences=len(lengths), right=2 * total, **facts)


def packed_call_with_neighbors(
    length: int, num_further: int, further_length: int, D: int, *features: str, **facts: float
) -> Call:
    return packed_call([length] + [further_length] * num_further, D, *features, **facts)


# A sequence alone, and in batches with shorter and longer sequences.
LENGTHS = (7, 700, 9000)
PACKED = {
    f"{'+'.join(('on_end', *needs))}_d{D}": [
        packed_call_with_neighbors(length, num_further, further_length, D, *needs)
        for length in LENGTHS for num_further, further_length in ((0, 0), (1, 5), (1000, 4), (30, 100), (7, 8192))
    ]
    for D in (64, 128, 256) for needs in ((), ("softcap",))
}  # fmt: skip
# Block tables are as wide as the longest sequence of a batch needs.
PAGED = {
    f"{'+'.join(('pages', *needs))}_d{D}_rows{Sq}": [
        batched_call(B, Sq, keys, D, "paged", *needs, **(operand_dtypes("bf16", "int8", "int8") if "cache8" in needs else {}))
        for B in BATCHES for keys in (16, 4096, 131072)
    ]
    for D in (64, 128, 256) for Sq in (1, 12) for needs in ((), ("softcap",), ("cache8",))
}  # fmt: skip
DENSE = {
    f"batches_d{D}_rows{Sq}": [batched_call(B, Sq, Sk, D) for B in BATCHES for Sk in (200, 2000)]
    for D in (64, 128, 256) for Sq in (65, 700, 5000)
}  # fmt: skip
KINDS = PACKED | PAGED | DENSE


def make_plans(calls: Sequence[Call], gpu: str, **facts: float) -> list[dict]:
    """Return the plans that the ops of attention() make, by the first family with a kernel for the call."""
    plans_of_calls = []
    for facts_of_call in calls:
        candidates = [
            bindings.plan({**facts_of_call, **facts}, GPUS[gpu], BACKENDS.index(family)) for family in ("fa3", "fa2")
        ]
        plans_of_calls.append(next(plan for plan in candidates if plan["kernel"]))
    return plans_of_calls


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("kind", KINDS)
def test_batch_invariant_sequence_has_one_plan_in_any_batch(kind: str, gpu: str) -> None:
    plans_of_calls = make_plans(KINDS[kind], gpu, batch_invariant=1)
    assert len({plan["kernel"] for plan in plans_of_calls}) == 1
    assert {(plan["splits"], plan["cluster"]) for plan in plans_of_calls} == {(1, 1)}


@pytest.mark.parametrize("kind", PACKED | DENSE)
def test_batch_invariant_gradients_have_one_plan(kind: str) -> None:
    """The backward is split into parts with a fixed accumulation order; heads of a block of keys share a tile."""
    plans_of_calls = make_plans(KINDS[kind], "h100", batch_invariant=1, grad=1)
    assert len({plan["gradients"] for plan in plans_of_calls}) == 1 and plans_of_calls[0]["gradients"].startswith(
        "partbwd"
    )
    assert {plan["sharing"] for plan in plans_of_calls} == {1}


@pytest.mark.parametrize("kind", ["on_end_d64", "on_end_d128", "pages_d128_rows1", "batches_d64_rows700"])
def test_plans_depend_on_the_batch_by_default(kind: str) -> None:
    """Without num_splits=1 these calls have several plans: the reason for num_splits=1."""
    assert len({(plan["kernel"], plan["splits"]) for plan in make_plans(KINDS[kind], "h100")}) > 1


def test_long_calls_keep_fast_tiles() -> None:
    """Sequences that fill the GPU keep the kernel chosen without num_splits=1."""
    for D in (64, 128, 256):
        long = [packed_call([4096] * 64, D)]
        assert make_plans(long, "h100")[0]["kernel"] == make_plans(long, "h100", batch_invariant=1)[0]["kernel"]


@pytest.mark.parametrize("splits", [2, 7])
def test_num_splits_sets_the_number_of_ctas_per_sequence(splits: int) -> None:
    mode = BACKENDS.index("fa2") | splits << 8
    assert bindings.plan(batched_call(1, 1, 4096, 128, "paged"), DEVICES["h100"], mode)["splits"] == splits
    # a single block cannot be split
    assert bindings.plan(batched_call(1, 1, 16, 128, "paged"), DEVICES["h100"], mode)["splits"] == 1


# ---- of a fixed size ----


@pytest.mark.parametrize("kind", KINDS)
def test_split_size_changes_only_splits_of_paged_calls(kind: str) -> None:
    """The number of splits follows from the capacity of the block table in any batch; the kernel does not change."""
    size, unsized_plans = 1024, make_plans(KINDS[kind], "h100", batch_invariant=1)
    for plan, unsized_plan, facts in zip(
        make_plans(KINDS[kind], "h100", batch_invariant=1, split_size=size), unsized_plans, KINDS[kind], strict=True
    ):
        assert plan["kernel"] == unsized_plan["kernel"] and plan["cluster"] == 1
        assert plan["splits"] == (max(2, -(-facts["Sk"] // size)) if kind in PAGED else 1)


def test_split_sizes_are_multiples_of_every_key_block() -> None:
    tiles = {spec.tile_n for spec in kernel_table.specs(80, "decode") if "paged" in spec.features}
    assert tiles and all(SPLIT_UNIT % tile_n == 0 for tile_n in tiles)


def num_visited_blocks(kv_length: int, Sq: int, left: int, right: int, tile_n: int) -> int:
    """Return the number of visited blocks of a sequence, like BoundFew.share of decode_window.py.

    The window is aligned to the bottom right.
    """
    end = -(-min(max(kv_length + right, 1), max(kv_length, 1)) // tile_n)
    return end - min(max(kv_length - Sq - left, 0) // tile_n, end - 1)


@pytest.mark.parametrize("window", [(-1, 0), (0, 0), (127, 0), (128, 3), (1000, 0), (1023, 5), (-1, -1)], ids=str)
@pytest.mark.parametrize("Sq", [1, 5, 16])
def test_planned_splits_cover_every_kv_length(Sq: int, window: tuple[int, int]) -> None:
    """The plan has at least two splits, because a single split would write its results directly."""
    for keys, size in itertools.product((16, 128, 144, 1008, 4096), (128, 256, 1024)):
        left, right = (Sq + keys if bound < 0 else bound for bound in window)
        facts = batched_call(3, Sq, keys, 64, "paged", batch_invariant=1, split_size=size) | {
            "left": left,
            "right": right,
        }
        (splits,) = {plan["splits"] for plan in make_plans([facts, facts | {"B": 300}], "h100")}
        assert splits >= 2
        for kv_length, tile_n in itertools.product(range(keys + 1), (64, 128)):
            assert num_visited_blocks(kv_length, Sq, left, right, tile_n) * tile_n <= splits * size


@pytest.mark.parametrize("window", [(-1, 0), (100, 0), (70000, 4)], ids=str)
def test_smallest_split_size_named_by_the_error_is_accepted(window: tuple[int, int]) -> None:
    q = torch.empty(1, 8, 3, 64, device="meta")
    for keys in (255 * 128, 255 * 128 + 1, 100_000, 1_000_000):
        least_size = next(
            (size for size in range(128, 8192, 128) if least_accepted_size(size, window, q, keys) is None), 0
        )
        assert least_size and all(
            least_accepted_size(size, window, q, keys) == least_size for size in range(128, least_size, 128)
        )
        left, right = (3 + keys if bound < 0 else bound for bound in window)
        facts = batched_call(1, 3, keys, 64, "paged", batch_invariant=1) | {"left": left, "right": right}
        splits = [
            plan["splits"]
            for plan in make_plans([facts | {"split_size": least_size - i * 128} for i in range(2)], "h100")
        ]
        assert splits[0] <= MAX_SPLITS and (least_size == 128 or splits[1] > MAX_SPLITS)


def least_accepted_size(size: int, window: tuple[int, int], q: Tensor, keys: int) -> int | None:
    """Return None if the split size is accepted, or the least accepted size that the error names."""
    try:
        params = AttentionParams(*window, fixed_split_size=size)
        check_split_size(params, q, torch.empty(1, 2, keys, 64, device="meta"), keys)
    except ValueError as error:
        return int(re.search(r"at least (\d+)", str(error))[1])
