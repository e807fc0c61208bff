"""Bool masks in decode, on a GPU or interpreted: output and LSE against fp64, with any number of splits.

Further tests cover partly filled caches without reads of masked keys, and a graph with a changing mask.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import masked_calls
import pytest
import torch
import torch.nn.functional as F
from forced_splits import MAX_SPLITS, plan_of_forced_call
from masked_calls import BACKENDS, HEADS, SEED, check_decode, copy_with_strides, reference_results
from torch import Tensor

from torch_flashplug import sdpa_backend
from torch_flashplug.dispatch import bindings
from torch_flashplug.registry import kernel_table
from torch_flashplug.registry.dtypes import ELEMENTS_16BIT
from torch_flashplug.registry.kernel_spec import KernelSpec
from torch_flashplug.testing import assert_within_budget, make_inputs, new_case

KERNELS = [spec for arch in (90, 80) for spec in kernel_table.specs(arch, "decode") if spec.features == {"mask"}]
KEYS = 333
MAX_GROUPS = 352  # capacity of a CTA's list (kernels/features/decode_mask.py); machines with a GPU may have no DSL


random_mask = functools.partial(masked_calls.random_mask, share=0.3)


def hide_last_row(mask: Tensor) -> Tensor:
    """Let the last row of each head see no key."""
    mask[..., -1, :] = False
    return mask


# Masks that broadcast to (2, 4, Sq, KEYS).
MASKS: dict[str, Callable[[int], Tensor]] = {
    "for_all": lambda Sq: random_mask(Sq, KEYS),
    "by_batch": lambda Sq: random_mask(2, 1, Sq, KEYS),
    "by_head": lambda Sq: hide_last_row(random_mask(4, Sq, KEYS)),
    "by_both": lambda Sq: hide_last_row(random_mask(2, 4, Sq, KEYS)),
    "keys": lambda Sq: random_mask(2, 1, 1, KEYS),
    "keys_expanded": lambda Sq: random_mask(1, 1, 1, KEYS).expand(2, 4, Sq, KEYS),
    "rows": lambda Sq: random_mask(2, 1, Sq, 1),
    "one": lambda Sq: torch.ones(1, 1, dtype=torch.bool),
    "nothing": lambda Sq: torch.zeros(2, 1, Sq, KEYS, dtype=torch.bool),
    "filled": lambda Sq: (torch.arange(KEYS) < 100).expand(2, 1, Sq, KEYS),
    "left_padding": lambda Sq: (torch.arange(KEYS) >= torch.tensor([300, 64]).view(2, 1, 1, 1)).expand(2, 1, Sq, KEYS),
    "hole": lambda Sq: ((torch.arange(KEYS) < 4) | (torch.arange(KEYS) > 320)).expand(Sq, KEYS),
    "transposed": lambda Sq: random_mask(KEYS, Sq).mT,
    "odd_offset": lambda Sq: random_mask(Sq, KEYS + 7)[:, 7:],
}


@pytest.mark.parametrize("spec", KERNELS, ids=KernelSpec.name)
def test_every_masked_decode_kernel(kernels_on: str, spec: KernelSpec) -> None:
    for Sq, keys in ((1, 1), (3, 64), (2, 200), (5, 129)):
        case = new_case(f"{spec.name()} {Sq}x{keys}", HEADS, (Sq, keys), (spec.d, spec.dv), dtype=spec.dtype)
        backend = BACKENDS[spec.arch]
        assert plan_of_forced_call(case, backend=backend, mask=1)["kernel"] == spec.name()
        check_decode(
            case, make_inputs(case, kernels_on, SEED), random_mask(2, 1, Sq, keys).to(kernels_on), backend=backend
        )


@pytest.mark.parametrize("num_splits", [0, 1, 3, MAX_SPLITS])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("Sq", [1, 7, 32])
def test_masked_decode_of_each_layout_and_number_of_splits(
    kernels_on: str, Sq: int, mask: str, num_splits: int
) -> None:
    case = new_case(f"{mask} {Sq}", HEADS, (Sq, KEYS), (64, 64), dtype=ELEMENTS_16BIT[Sq % 2])
    check_decode(case, make_inputs(case, kernels_on, SEED), copy_with_strides(MASKS[mask](Sq), kernels_on), num_splits)


@pytest.mark.parametrize("backend", BACKENDS.values())
@pytest.mark.parametrize("offset", [0, 1, 2, 3])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("Sk", [1, 2, 5, 19, 64, 336])
def test_mask_rows_at_any_address(kernels_on: str, Sk: int, heads: int, offset: int, backend: str) -> None:
    """Rows begin at multiples of words and vectors, or between them; visible bytes around a row are no keys."""
    case = new_case(f"{Sk} {heads} {offset}", HEADS, (2, Sk), (64, 64))
    around = torch.ones(2 * heads * 2 * Sk + 8, dtype=torch.bool)
    rows = around[offset : offset + 2 * heads * 2 * Sk].view(2, heads, 2, Sk)
    rows.copy_(random_mask(2, heads, 2, Sk))
    check_decode(case, make_inputs(case, kernels_on, SEED), copy_with_strides(rows, kernels_on), 1, backend)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("mask", MASKS)
def test_masked_decode_of_each_layout_on_sm80_kernels(kernels_on: str, mask: str, num_splits: int) -> None:
    Sq = (1, 7, 32)[len(mask) % 3]
    case = new_case(f"{mask} {Sq}", HEADS, (Sq, KEYS), (64, 64), dtype=ELEMENTS_16BIT[Sq % 2])
    check_decode(
        case, make_inputs(case, kernels_on, SEED), copy_with_strides(MASKS[mask](Sq), kernels_on), num_splits, "fa2"
    )


@pytest.mark.parametrize("mask", MASKS)
def test_masked_decode_through_sdpa_keeps_the_mask(kernels_on: str, mask: str) -> None:
    """No preprocessed mask is saved, and the caller's mask is unchanged."""
    case = new_case(mask, HEADS, (5, KEYS), (128, 128))
    inputs, mask_tensor = make_inputs(case, kernels_on, SEED), copy_with_strides(MASKS[mask](5), kernels_on)
    before = mask_tensor.clone()
    bindings.counters(reset=True)
    with sdpa_backend("fa3"):
        out = F.scaled_dot_product_attention(*inputs, attn_mask=mask_tensor, enable_gqa=True)
    assert bindings.counters()["ours_fwd"] == 1
    assert mask_tensor.dtype == torch.bool and torch.equal(mask_tensor, before)
    exact, low = reference_results(case, inputs, mask_tensor)
    assert_within_budget(mask, out, exact.out, low.out, seed=SEED)


def test_block_list_capacity_matches_the_kernel() -> None:
    pytest.importorskip("cutlass")
    from torch_flashplug.kernels.features import decode_mask

    assert decode_mask.MAX_GROUPS == MAX_GROUPS


@pytest.mark.parametrize("num_splits", [1, 2])
def test_long_masks_list_groups_of_blocks(kernels_on: str, num_splits: int) -> None:
    """The list holds groups of blocks, because there are more blocks than a list can hold."""
    keys = 64 * (2 * MAX_GROUPS + 40) + 1
    case = new_case("long", (1, 1, 1), (1, keys), (64, 64))
    mask = torch.zeros(1, keys, dtype=torch.bool)
    mask[:, 0] = mask[:, 5000:5100] = mask[:, -1] = True
    inputs = make_inputs(case, kernels_on, SEED)
    for tensor in (inputs.k, inputs.v):  # at most 4 blocks per group
        tensor[..., 512:4096, :] = tensor[..., 8192:-1024, :] = math.nan
    check_decode(case, inputs, mask.to(kernels_on), num_splits)


@pytest.mark.parametrize("backend", BACKENDS.values())
@pytest.mark.parametrize("num_splits", [0, 1, 3, MAX_SPLITS])
@pytest.mark.parametrize("Sq", [1, 4])
def test_blocks_of_masked_keys_are_not_read(kernels_on: str, Sq: int, num_splits: int, backend: str) -> None:
    """Keys are skipped in blocks of 64; a split without visible blocks takes one block without any weight."""
    case = new_case(f"static cache {Sq}", HEADS, (Sq, 1000), (128, 128))
    inputs, filled = make_inputs(case, kernels_on, SEED), 200
    mask = (torch.arange(1000) < filled).expand(2, 1, Sq, 1000).to(kernels_on)
    for tensor in (inputs.k, inputs.v):
        tensor[:, :, 256:] = math.nan
    check_decode(case, inputs, mask, num_splits, backend)


def test_fully_masked_call_takes_one_block(kernels_on: str) -> None:
    case = new_case("empty", (1, 2, 1), (1, 640), (64, 64))
    check_decode(case, make_inputs(case, kernels_on, SEED), torch.zeros(1, 640, dtype=torch.bool).to(kernels_on), 5)


def test_masked_calls_with_gradients_run_a_forward_kernel(kernels_on: str) -> None:
    case = new_case("gradients", HEADS, (4, KEYS), (64, 64))
    assert plan_of_forced_call(case, mask=1, grad=1)["kernel"].startswith("fwd_")


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [0, 1, MAX_SPLITS])
def test_captured_graph_follows_mask_changes(num_splits: int) -> None:
    """The graph is captured with few keys, and replayed with more keys and with none."""
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
        exact, low = reference_results(case, inputs, mask)
        assert_within_budget(f"{filled} keys", out, exact.out, low.out, seed=SEED)
