"""Bool masks through F.sdpa, on a GPU or interpreted: results and gradients against fp64.

The tests cover rows without visible keys, NaN in masked-out keys, and memory layouts of masks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator

import interpreted_kernels
import masked_calls
import pytest
import torch
import torch.nn.functional as F
from deterministic import deterministic_gradients
from forced_splits import plan_of_forced_call
from fp64_gradients import NAMES
from masked_calls import BACKENDS, HEADS, copy_with_strides, random_mask
from torch import Tensor

import torch_flashplug
from torch_flashplug.api import startup
from torch_flashplug.registry import kernel_table
from torch_flashplug.registry.dtypes import ELEMENTS_16BIT
from torch_flashplug.registry.kernel_spec import SPARSE_BLOCK, SPARSE_BLOCK_M_192, KernelSpec
from torch_flashplug.testing import Case, Inputs, assert_bitwise_equal, assert_within_budget, make_inputs, new_case

SEED = masked_calls.BOOL_MASK_SEED
run_with_references = functools.partial(masked_calls.run_with_references, seed=SEED)
check_gradients = functools.partial(masked_calls.check_gradients, seed=SEED)


def with_holes(mask: Tensor) -> Tensor:
    """Add rows without visible keys (one row of a tile, and a full tile), keys that no row sees, and full blocks."""
    mask[..., 65, :] = mask[..., 128:256, :] = False
    mask[..., 70:100] = False
    mask[..., :64, 128:256] = mask[..., 256:, 128:256] = True
    return mask


def band_mask(Sq: int, Sk: int, width: int) -> Tensor:
    distance = torch.arange(Sq)[:, None] - torch.arange(Sk)
    return (distance >= 0) & (distance < width)


# Masks that broadcast to (B, Hq, Sq, Sk), for 300 rows and 333 keys.
MASKS: dict[str, Callable[[], Tensor]] = {
    "for_all": lambda: with_holes(random_mask(300, 333)),
    "by_batch": lambda: with_holes(random_mask(2, 1, 300, 333)),
    "by_head": lambda: with_holes(random_mask(4, 300, 333)),
    "by_both": lambda: with_holes(random_mask(2, 4, 300, 333)),
    "keys": lambda: random_mask(2, 1, 1, 333),
    "keys_expanded": lambda: random_mask(2, 1, 1, 333).expand(2, 4, 300, 333),
    "keys_by_head": lambda: random_mask(4, 1, 333).expand(4, 300, 333),
    "keys_for_all": lambda: (torch.arange(333) % 200 < 120).expand(300, 333),
    "rows": lambda: random_mask(2, 1, 300, 1),
    "one": lambda: torch.ones(1, 1, dtype=torch.bool),
    "nothing": lambda: torch.zeros(2, 1, 300, 333, dtype=torch.bool),
    "left_padding": lambda: band_mask(300, 333, 999) & (torch.arange(333) >= torch.tensor([200, 0]).view(2, 1, 1, 1)),
    "window": lambda: band_mask(300, 333, 40),
    "documents": lambda: torch.arange(300)[:, None] // 110 == torch.arange(333) // 110,
    "transposed": lambda: with_holes(random_mask(300, 333)).mT.contiguous().mT,
    "odd_offset": lambda: random_mask(300, 340)[:, 7:],
}  # fmt: skip


def inputs_with_hidden_nans(case: Case, mask: Tensor, device: str) -> Inputs:
    """Return inputs with NaN in keys and values of blocks hidden from all rows."""
    inputs = make_inputs(case, device, SEED)
    is_seen = mask.expand(case.B, case.Hq, case.Sq, case.Sk).any(2).view(case.B, case.Hkv, -1, case.Sk).any(2)
    blocks = F.pad(is_seen, (0, -case.Sk % SPARSE_BLOCK)).unflatten(-1, (-1, SPARSE_BLOCK)).any(-1)
    blocks[..., 0] = True  # rows without visible keys read the first block
    hidden = ~blocks.repeat_interleave(SPARSE_BLOCK, -1)[..., : case.Sk]
    for tensor in (inputs.k, inputs.v):
        tensor[hidden] = math.nan
    return inputs


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_output_of_each_mask_layout(kernels_on: str, mask: str, d: int) -> None:
    case = new_case(f"{mask} {d}", HEADS, (300, 333), (d, d), dtype=ELEMENTS_16BIT[len(mask) % 2])
    visible = copy_with_strides(MASKS[mask](), kernels_on)
    out, exact, low = run_with_references(case, visible, kernels_on)
    assert_within_budget(case.name, out, exact, low, seed=SEED)
    blind = ~visible.expand(case.B, case.Hq, case.Sq, case.Sk).any(-1)
    assert (out[blind] == 0).all()


@pytest.mark.parametrize("mask", MASKS)
def test_output_of_each_mask_layout_on_sm80_kernels(kernels_on: str, mask: str) -> None:
    d = (64, 128, 256)[len(mask) % 3]
    case = new_case(f"{mask} {d}", HEADS, (300, 333), (d, d), dtype=ELEMENTS_16BIT[len(mask) % 2])
    visible = copy_with_strides(MASKS[mask](), kernels_on)
    out, exact, low = run_with_references(case, visible, kernels_on, backend="fa2")
    assert_within_budget(case.name, out, exact, low, seed=SEED)
    blind = ~visible.expand(case.B, case.Hq, case.Sq, case.Sk).any(-1)
    assert (out[blind] == 0).all()


SIZES = [(1, 1), (1, 300), (300, 1), (64, 64), (65, 129), (129, 65), (500, 128)]


@pytest.mark.parametrize("backend", ["fa3", "fa2"])
@pytest.mark.parametrize("sizes", SIZES)
def test_masked_output_of_different_lengths(kernels_on: str, sizes: tuple[int, int], backend: str) -> None:
    case = new_case("sizes", (1, 3, 3), sizes, (64, 64))
    out, exact, low = run_with_references(case, random_mask(*sizes).to(kernels_on), kernels_on, backend=backend)
    assert_within_budget(f"{sizes}", out, exact, low, seed=SEED)


ROWS = [(1, 65), (63, 64), (64, 129), (65, 200), (127, 128), (128, 300), (129, 1), (300, 260)]


@pytest.mark.parametrize("Sq, Sk", ROWS)
def test_mask_row_broadcast_over_queries(kernels_on: str, Sq: int, Sk: int) -> None:
    """Preprocessing reads at most one block of rows."""
    case = new_case(f"row for all {Sq} of {Sk}", HEADS, (Sq, Sk), (64, 64))
    mask = random_mask(2, 1, 1, Sk).to(kernels_on).expand(2, 4, Sq, Sk)
    out, exact, low = run_with_references(case, mask, kernels_on)
    assert_within_budget(case.name, out, exact, low, seed=SEED)
    for backend, order in (("fa3", False), ("fa3", True), ("fa2", False)):
        check_gradients(case, mask, kernels_on, order=order, backend=backend)


@pytest.mark.parametrize("rows", [128, 640])
def test_saved_metadata_of_a_broadcast_mask_row_is_small(kernels_on: str, rows: int) -> None:
    """Except for the block lists, the size does not depend on the number of queries.

    The saved metadata has less than an eighth of the mask's bytes.
    """
    case = new_case("kept", (2, 1, 1), (rows, 640), (64, 64))
    inputs = make_inputs(case, kernels_on, SEED)
    for tensor in inputs:
        tensor.requires_grad_()
    mask = random_mask(2, 1, 1, 640).to(kernels_on)
    with torch_flashplug.sdpa_backend("fa3"):
        metadata = F.scaled_dot_product_attention(*inputs, attn_mask=mask).grad_fn._saved_attn_bias
    blocks, words = rows // SPARSE_BLOCK * 5, 2 * 11 + 10 * 3
    lists = 2 * (rows // SPARSE_BLOCK + 5) + 6 * blocks + 2 * -(-rows // SPARSE_BLOCK_M_192) * 6
    assert metadata.shape == (2, 1, 5 + lists + 128 * words)
    assert rows == 128 or metadata.nbytes < 2 * rows * 640 / 8 + 2**14


@pytest.mark.parametrize("mask", ["left_padding", "window", "documents", "nothing"])
def test_fully_masked_blocks_are_not_read(kernels_on: str, mask: str) -> None:
    case = new_case(mask, (2, 2, 2), (300, 600), (64, 64))
    visible = F.pad(MASKS[mask]().expand(2, 1, 300, 333), (0, 600 - 333)).to(kernels_on)
    out, exact, low = run_with_references(
        case, visible, kernels_on, inputs=inputs_with_hidden_nans(case, visible, kernels_on)
    )
    assert_within_budget(mask, out, exact, low, seed=SEED)


MASKED = [spec for arch in BACKENDS for spec in kernel_table.specs(arch) if spec.features == {"mask"}]


@pytest.fixture
def push_rows_where() -> Iterator[Callable]:
    """Return a function for pushing only the table rows with a given property."""

    def push(keeps: Callable[[kernel_table.KernelRow], bool]) -> None:
        startup.push_tables([row for row in kernel_table.KERNEL_ROWS if keeps(row)])

    yield push
    startup.push_tables()


FORWARDS = [spec for spec in MASKED if spec.kind == "fwd"]
TALL_TILE_FORWARDS = [spec for spec in FORWARDS if spec.tile_m == SPARSE_BLOCK_M_192]


@pytest.fixture
def push_forward(push_rows_where: Callable) -> Callable:
    """Return a function for pushing the row of a single forward and the rows of all backwards."""
    return lambda spec: push_rows_where(lambda row: row.kind not in {"fwd", "decode"} or spec in row.specs())


@pytest.mark.parametrize("spec", FORWARDS, ids=KernelSpec.name)
def test_every_masked_forward_kernel(kernels_on: str, spec: KernelSpec, push_forward: Callable) -> None:
    """Kernels whose tiles the plan chooses only for longer calls are included."""
    case = new_case(spec.name(), HEADS, (300, 333), (spec.d, spec.dv), dtype=spec.dtype)
    push_forward(spec)
    assert plan_of_forced_call(case, backend=BACKENDS[spec.arch], mask=1)["kernel"] == spec.name()
    out, exact, low = run_with_references(
        case, MASKS["by_batch"]().to(kernels_on), kernels_on, backend=BACKENDS[spec.arch]
    )
    assert_within_budget(case.name, out, exact, low, seed=SEED)


@pytest.mark.parametrize("mask", sorted(MASKS.keys() - {"by_batch"}))
@pytest.mark.parametrize("spec", TALL_TILE_FORWARDS, ids=KernelSpec.name)
def test_tiles_of_192_rows_with_each_mask_layout(
    kernels_on: str, spec: KernelSpec, mask: str, push_forward: Callable
) -> None:
    """A block of a tall tile spans parts of two block rows of the mask metadata; the backwards have no tall tiles."""
    case = new_case(f"{spec.name()} {mask}", HEADS, (300, 333), (spec.d, spec.dv), dtype=spec.dtype)
    push_forward(spec)
    visible = copy_with_strides(MASKS[mask](), kernels_on)
    out, exact, low = run_with_references(case, visible, kernels_on)
    assert_within_budget(case.name, out, exact, low, seed=SEED)
    check_gradients(case, visible, kernels_on, order=len(mask) % 2 == 0)


@pytest.mark.parametrize("Sq", [1, 64, 129, 191, 192, 193, 384, 577])
@pytest.mark.parametrize("spec", TALL_TILE_FORWARDS[:1], ids=KernelSpec.name)
def test_tiles_of_192_rows_with_different_lengths(
    kernels_on: str, spec: KernelSpec, Sq: int, push_forward: Callable
) -> None:
    case = new_case(f"tall {Sq}", (1, 2, 1), (Sq, 300), (spec.d, spec.dv), dtype=spec.dtype)
    push_forward(spec)
    visible = (band_mask(Sq, 300, 100) & random_mask(2, Sq, 300, share=0.9)).to(kernels_on)
    out, exact, low = run_with_references(
        case, visible, kernels_on, inputs=inputs_with_hidden_nans(case, visible, kernels_on)
    )
    assert_within_budget(case.name, out, exact, low, seed=SEED)


@pytest.mark.parametrize("spec", [s for s in MASKED if s.is_backward], ids=KernelSpec.name)
def test_every_masked_backward_kernel(kernels_on: str, spec: KernelSpec, push_rows_where: Callable) -> None:
    """The call fulfils the conditions for the kernel, and the table has no further backward kind."""
    heads, order, backend = (2, 2, 1), spec.is_deterministic, BACKENDS[spec.arch]
    case = new_case(spec.name(), heads, (200, 333), (spec.d, spec.dv), dtype=spec.dtype)
    push_rows_where(lambda row: row.kind in {"fwd", spec.kind})
    facts = {"mask": 1, "grad": 1, "deterministic": order}
    assert plan_of_forced_call(case, backend=backend, **facts)["gradients"] == spec.name()
    check_gradients(case, random_mask(2, 1, 200, 333).to(kernels_on), kernels_on, order=order, backend=backend)


@pytest.mark.parametrize("spec", [s for s in MASKED if s.kind == "detbwd"], ids=KernelSpec.name)
def test_deterministic_backward_is_bitwise_equal(kernels_on: str, spec: KernelSpec) -> None:
    """Results do not depend on the order of independent operations.

    Some keys end in the first half of a block, and few queries see some keys.
    """
    case = new_case(spec.name(), (1, 2, 1), (300, 300), (spec.d, spec.dv), dtype=spec.dtype)
    mask, runs = with_holes(random_mask(300, 300)).to(kernels_on), []
    mask[..., 0:128] &= torch.arange(300, device=kernels_on)[:, None] > 128
    for order in (0, 1, 2):
        if kernels_on == "cpu":
            interpreted_kernels.set_order_seed(interpreted_kernels.pack(), order)
        inputs = make_inputs(case, kernels_on, SEED)
        leaves = [tensor.requires_grad_() for tensor in inputs]
        with torch_flashplug.sdpa_backend(BACKENDS[spec.arch]), deterministic_gradients(True):
            out = F.scaled_dot_product_attention(*leaves, attn_mask=mask, enable_gqa=True)
            runs.append(torch.autograd.grad(out, leaves, inputs.grad_out))
    if kernels_on == "cpu":
        interpreted_kernels.set_order_seed(interpreted_kernels.pack(), 0)
    for grads in runs[1:]:
        for name, expected, actual in zip(NAMES, runs[0], grads, strict=True):
            assert_bitwise_equal(f"{spec.name()} {name}", actual, expected)


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_gradients_of_each_mask_layout(kernels_on: str, mask: str, order: bool) -> None:
    case = new_case(f"{mask} gradients", HEADS, (300, 333), (64, 64), dtype=ELEMENTS_16BIT[len(mask) % 2])
    check_gradients(case, copy_with_strides(MASKS[mask](), kernels_on), kernels_on, order=order)


@pytest.mark.parametrize("mask", MASKS)
def test_gradients_of_each_mask_layout_on_sm80_kernels(kernels_on: str, mask: str) -> None:
    d = (64, 128, 256)[len(mask) % 3]
    case = new_case(f"{mask} gradients {d}", HEADS, (300, 333), (d, d), dtype=ELEMENTS_16BIT[len(mask) % 2])
    check_gradients(
        case, copy_with_strides(MASKS[mask](), kernels_on), kernels_on, order=len(mask) % 2 == 0, backend="fa2"
    )


@pytest.mark.parametrize("leaf_names", ["q", "k", "v", "qv"])
@pytest.mark.parametrize("d", [64, 128])
def test_subset_of_masked_gradients(kernels_on: str, d: int, leaf_names: str) -> None:
    case = new_case(f"{leaf_names} {d}", (1, 2, 2), (150, 280), (d, d))
    check_gradients(case, with_holes(random_mask(150, 280)).to(kernels_on), kernels_on, leaf_names=leaf_names)


@pytest.mark.parametrize("sizes", [(1, 1), (1, 300), (300, 1), (65, 129), (129, 65)])
@pytest.mark.parametrize("d", [64, 256])
def test_masked_gradients_of_different_lengths(kernels_on: str, d: int, sizes: tuple[int, int]) -> None:
    case = new_case(f"gradients of {sizes}", (1, 3, 3), sizes, (d, d))
    check_gradients(case, random_mask(*sizes).to(kernels_on), kernels_on)
