"""num_splits=1 of attention(): a sequence gets the same kernel alone and in any batch, its keys are not split, and its
gradients are added up in one order.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from plans import Call, call, made_of

from torch_flashplug import native
from torch_flashplug.api import DEVICES
from torch_flashplug.families import BACKENDS

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
        tried = [native.plan({**one, **more}, GPUS[gpu], BACKENDS.index(family)) for family in ("fa3", "fa2")]
        found.append(next(plan for plan in tried if plan["kernel"]))
    return found


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_has_one_plan_in_any_batch(kind: str, gpu: str) -> None:
    found = plans(KINDS[kind], gpu, by_kind=1)
    assert len({plan["kernel"] for plan in found}) == 1
    assert {(plan["splits"], plan["cluster"]) for plan in found} == {(1, 1)}


@pytest.mark.parametrize("kind", ON_END | DENSE)
def test_gradients_have_one_plan_too(kind: str) -> None:
    """In parts, which add up in one order; the heads of one block of keys in one tile."""
    found = plans(KINDS[kind], "h100", by_kind=1, grad=1)
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
        assert plans(long, "h100")[0]["kernel"] == plans(long, "h100", by_kind=1)[0]["kernel"]


@pytest.mark.parametrize("splits", [2, 7])
def test_other_numbers_are_how_many_ctas_share_keys(splits: int) -> None:
    mode = BACKENDS.index("fa2") | splits << 8
    assert native.plan(batch(1, 1, 4096, 128, "paged"), DEVICES["h100"], mode)["splits"] == splits
    assert native.plan(batch(1, 1, 16, 128, "paged"), DEVICES["h100"], mode)["splits"] == 1  # of one block there is one
