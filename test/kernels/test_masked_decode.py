"""Bool masks beside few query rows, on a GPU or interpreted: numbers and LSE against fp64, in any number of splits;
caches filled in part, whose hidden keys nobody reads; a graph whose mask changes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from splits import MOST, forced, planned
from test_masks import BACKENDS, on
from test_masks import drawn as drawn_by_share
from torch import Tensor

from torch_flashplug import sdpa_backend
from torch_flashplug.dispatch import bindings
from torch_flashplug.registry import kernel_table
from torch_flashplug.registry.dtypes import WHOLE
from torch_flashplug.registry.kernel_spec import KernelSpec
from torch_flashplug.testing import (
    Case,
    Inputs,
    Masking,
    assert_lse,
    assert_within_budget,
    make_inputs,
    new_case,
    oracle,
    plain,
)

SEED = 20261124
KERNELS = [spec for arch in (90, 80) for spec in kernel_table.specs(arch, "decode") if spec.features == {"mask"}]
HEADS = (2, 4, 2)  # B, Hq, Hkv
KEYS = 333
GROUPS = 352  # of a CTA's list (kernels/features/decode_mask.py); machines with a GPU may have no DSL


drawn = functools.partial(drawn_by_share, share=0.3)


def blind(mask: Tensor) -> Tensor:
    """With rows that see nothing: the last one of each head."""
    mask[..., -1, :] = False
    return mask


# What may stand in the place of (2, 4, Sq, KEYS).
MASKS: dict[str, Callable[[int], Tensor]] = {
    "for_all": lambda Sq: drawn(Sq, KEYS),
    "by_batch": lambda Sq: drawn(2, 1, Sq, KEYS),
    "by_head": lambda Sq: blind(drawn(4, Sq, KEYS)),
    "by_both": lambda Sq: blind(drawn(2, 4, Sq, KEYS)),
    "keys": lambda Sq: drawn(2, 1, 1, KEYS),
    "keys_expanded": lambda Sq: drawn(1, 1, 1, KEYS).expand(2, 4, Sq, KEYS),
    "rows": lambda Sq: drawn(2, 1, Sq, 1),
    "one": lambda Sq: torch.ones(1, 1, dtype=torch.bool),
    "nothing": lambda Sq: torch.zeros(2, 1, Sq, KEYS, dtype=torch.bool),
    "filled": lambda Sq: (torch.arange(KEYS) < 100).expand(2, 1, Sq, KEYS),
    "left_padding": lambda Sq: (torch.arange(KEYS) >= torch.tensor([300, 64]).view(2, 1, 1, 1)).expand(2, 1, Sq, KEYS),
    "hole": lambda Sq: ((torch.arange(KEYS) < 4) | (torch.arange(KEYS) > 320)).expand(Sq, KEYS),
    "transposed": lambda Sq: drawn(KEYS, Sq).mT,
    "odd_offset": lambda Sq: drawn(Sq, KEYS + 7)[:, 7:],
}


def yardsticks(case: Case, inputs: Inputs, mask: Tensor) -> tuple:
    """fp64's answer and plain torch's. What is NaN is not to be read."""
    clean, rule = [tensor.nan_to_num() for tensor in inputs], Masking(bias=mask)
    return oracle(case, clean, rule), plain(case, clean, rule)


def check(case: Case, inputs: Inputs, mask: Tensor, num_splits: int = 0, backend: str = "fa3") -> None:
    """Out and LSE of the own op."""
    assert planned(case, num_splits, backend=backend, mask=1)["kernel"].startswith("decode_")
    bindings.counters(reset=True)
    operands = (*inputs, mask, 0.0, 0, case.scale, forced(num_splits, backend))
    out, lse = torch.ops.torch_flashplug.sdpa_fwd(*operands)[:2]
    assert bindings.counters()["ours_fwd"] == 1
    seen = mask.expand(case.B, case.Hq, case.Sq, case.Sk)
    exact, low = yardsticks(case, inputs, seen)
    name = f"{case.name} in {num_splits} splits"
    assert_within_budget(name, out, exact.out, low.out, seed=SEED)
    assert_lse(name, lse, exact.lse, low.lse, seed=SEED)
    assert (out[~seen.any(-1)] == 0).all()


@pytest.mark.parametrize("spec", KERNELS, ids=KernelSpec.name)
def test_every_kernel(kernels_on: str, spec: KernelSpec) -> None:
    for Sq, keys in ((1, 1), (3, 64), (2, 200), (5, 129)):
        case = new_case(f"{spec.name()} {Sq}x{keys}", HEADS, (Sq, keys), (spec.d, spec.dv), dtype=spec.dtype)
        backend = BACKENDS[spec.arch]
        assert planned(case, backend=backend, mask=1)["kernel"] == spec.name()
        check(case, make_inputs(case, kernels_on, SEED), drawn(2, 1, Sq, keys).to(kernels_on), backend=backend)


@pytest.mark.parametrize("num_splits", [0, 1, 3, MOST])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("Sq", [1, 7, 32])
def test_masks(kernels_on: str, Sq: int, mask: str, num_splits: int) -> None:
    case = new_case(f"{mask} {Sq}", HEADS, (Sq, KEYS), (64, 64), dtype=WHOLE[Sq % 2])
    check(case, make_inputs(case, kernels_on, SEED), on(kernels_on, MASKS[mask](Sq)), num_splits)


@pytest.mark.parametrize("backend", BACKENDS.values())
@pytest.mark.parametrize("offset", [0, 1, 2, 3])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("Sk", [1, 2, 5, 19, 64, 336])
def test_where_rows_begin_and_end(kernels_on: str, Sk: int, heads: int, offset: int, backend: str) -> None:
    """At words and vectors, or between them; what lies around a row, all seen, is none of its keys."""
    case = new_case(f"{Sk} {heads} {offset}", HEADS, (2, Sk), (64, 64))
    around = torch.ones(2 * heads * 2 * Sk + 8, dtype=torch.bool)
    rows = around[offset : offset + 2 * heads * 2 * Sk].view(2, heads, 2, Sk)
    rows.copy_(drawn(2, heads, 2, Sk))
    check(case, make_inputs(case, kernels_on, SEED), on(kernels_on, rows), 1, backend)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("mask", MASKS)
def test_masks_of_every_gpus_kernels(kernels_on: str, mask: str, num_splits: int) -> None:
    Sq = (1, 7, 32)[len(mask) % 3]
    case = new_case(f"{mask} {Sq}", HEADS, (Sq, KEYS), (64, 64), dtype=WHOLE[Sq % 2])
    check(case, make_inputs(case, kernels_on, SEED), on(kernels_on, MASKS[mask](Sq)), num_splits, "fa2")


@pytest.mark.parametrize("mask", MASKS)
def test_through_f_sdpa(kernels_on: str, mask: str) -> None:
    """Where nobody keeps a digest; the caller's mask comes back."""
    case = new_case(mask, HEADS, (5, KEYS), (128, 128))
    inputs, given = make_inputs(case, kernels_on, SEED), on(kernels_on, MASKS[mask](5))
    before = given.clone()
    bindings.counters(reset=True)
    with sdpa_backend("fa3"):
        out = F.scaled_dot_product_attention(*inputs, attn_mask=given, enable_gqa=True)
    assert bindings.counters()["ours_fwd"] == 1
    assert given.dtype == torch.bool and torch.equal(given, before)
    exact, low = yardsticks(case, inputs, given)
    assert_within_budget(mask, out, exact.out, low.out, seed=SEED)


def test_the_list_is_as_long() -> None:
    pytest.importorskip("cutlass")
    from torch_flashplug.kernels.features import decode_mask as seen

    assert seen.GROUPS == GROUPS


@pytest.mark.parametrize("num_splits", [1, 2])
def test_lists_of_groups(kernels_on: str, num_splits: int) -> None:
    """More blocks than a list has room for: their groups."""
    keys = 64 * (2 * GROUPS + 40) + 1
    case = new_case("long", (1, 1, 1), (1, keys), (64, 64))
    mask = torch.zeros(1, keys, dtype=torch.bool)
    mask[:, 0] = mask[:, 5000:5100] = mask[:, -1] = True
    inputs = make_inputs(case, kernels_on, SEED)
    for tensor in (inputs.k, inputs.v):  # 4 blocks a group at most
        tensor[..., 512:4096, :] = tensor[..., 8192:-1024, :] = math.nan
    check(case, inputs, mask.to(kernels_on), num_splits)


@pytest.mark.parametrize("backend", BACKENDS.values())
@pytest.mark.parametrize("num_splits", [0, 1, 3, MOST])
@pytest.mark.parametrize("Sq", [1, 4])
def test_hidden_keys_are_not_read(kernels_on: str, Sq: int, num_splits: int, backend: str) -> None:
    """By blocks of 64; a split that has none takes one of its own, and nothing of it."""
    case = new_case(f"static cache {Sq}", HEADS, (Sq, 1000), (128, 128))
    inputs, filled = make_inputs(case, kernels_on, SEED), 200
    mask = (torch.arange(1000) < filled).expand(2, 1, Sq, 1000).to(kernels_on)
    for tensor in (inputs.k, inputs.v):
        tensor[:, :, 256:] = math.nan
    check(case, inputs, mask, num_splits, backend)


def test_an_empty_list_takes_one_block(kernels_on: str) -> None:
    case = new_case("empty", (1, 2, 1), (1, 640), (64, 64))
    check(case, make_inputs(case, kernels_on, SEED), torch.zeros(1, 640, dtype=torch.bool).to(kernels_on), 5)


def test_gradients_take_the_forward_that_digests(kernels_on: str) -> None:
    case = new_case("gradients", HEADS, (4, KEYS), (64, 64))
    assert planned(case, mask=1, grad=1)["kernel"].startswith("fwd_")


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [0, 1, MOST])
def test_a_graph_follows_its_mask(num_splits: int) -> None:
    """Captured with few keys, replayed with more and with none."""
    case = new_case("graph", (2, 8, 2), (1, 4096), (128, 128))
    inputs, mask = make_inputs(case, "cuda", SEED), torch.zeros(2, 1, 1, 4096, dtype=torch.bool, device="cuda")
    mask[..., :10] = True

    def attend() -> Tensor:
        with sdpa_backend("fa3", num_splits=num_splits):
            return F.scaled_dot_product_attention(*inputs, attn_mask=mask, enable_gqa=True)

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    for filled in (10, 1000, 0, 4096, 65):
        mask.copy_((torch.arange(4096, device="cuda") < filled).expand_as(mask))
        graph.replay()
        exact, low = yardsticks(case, inputs, mask)
        assert_within_budget(f"{filled} keys", out, exact.out, low.out, seed=SEED)
