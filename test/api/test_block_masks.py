"""attention(block_mask=): BlockMasks of FlexAttention as block-sparse lists.

The tests cover mask preprocessing, numbers and gradients against the dense mask, the tools of torch on the ops, and
refused calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

import torch_flashplug
from torch_flashplug import PreparedBlockMask, attention, prepare_block_mask
from torch_flashplug.dispatch import bindings
from torch_flashplug.ops import mask_preprocess_reference

SEED = 20261126
FORWARD, BACKWARD = torch.ops.torch_flashplug.block_sparse_fwd, torch.ops.torch_flashplug.block_sparse_bwd


def causal(b, h, q, k) -> Tensor:
    return q >= k


def sliding(b, h, q, k) -> Tensor:
    return (q - k).abs() <= 70


def documents(b, h, q, k) -> Tensor:
    return (q // 90 == k // 90) & (q >= k)


def per_head_mod(b, h, q, k) -> Tensor:
    return (q + k + 40 * h + 17 * b) % 300 < 140


def rows_without_keys(b, h, q, k) -> Tensor:
    return (q >= 200) & (k < 130)


def all_visible(b, h, q, k) -> Tensor:
    return q >= 0


MODS = {mod.__name__: mod for mod in (causal, sliding, documents, per_head_mod, rows_without_keys, all_visible)}


def random_tensor(*sizes: int, seed: int = SEED, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_operands(
    Sq: int, Sk: int, *, device: str = "cpu", heads: tuple[int, int] = (4, 2), D: int = 16, dtype=torch.float32
) -> list[Tensor]:
    """Return q, k and v of shape (B, S, H, D)."""
    sizes = (Sq, heads[0]), (Sk, heads[1]), (Sk, heads[1])
    return [
        random_tensor(2, rows, num_heads, D, seed=SEED + i, dtype=dtype).to(device)
        for i, (rows, num_heads) in enumerate(sizes)
    ]


def block_mask(mod: Callable, Sq: int, Sk: int, device: str = "cpu", block: int | tuple[int, int] = 128) -> object:
    per_plane = mod is per_head_mod
    sizes = (2 if per_plane else None, 4 if per_plane else None, Sq, Sk)
    return flex.create_block_mask(mod, *sizes, device=device, BLOCK_SIZE=block)


def make_dense_mask(mod: Callable, Sq: int, Sk: int, device: str = "cpu") -> Tensor:
    per_plane = mod is per_head_mod
    return flex.create_mask(mod, 2 if per_plane else None, 4 if per_plane else None, Sq, Sk, device=device)


def attend_in_dense_scores(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * (q.shape[3] ** -0.5 if scale is None else scale)).masked_fill(~visible, -math.inf)
    return (scores.softmax(-1).nan_to_num() @ v).transpose(1, 2), scores.logsumexp(-1)


@pytest.mark.parametrize("mod", MODS.values(), ids=MODS)
@pytest.mark.parametrize(("Sq", "Sk"), [(128, 128), (384, 384), (300, 450), (65, 1), (1, 200), (250, 64)])
@pytest.mark.parametrize("block", [128, (256, 128), (64, 192)], ids=str)
def test_block_mask_and_dense_mask_give_equal_metadata(
    mod: Callable, Sq: int, Sk: int, block: int | tuple[int, int]
) -> None:
    """Compare mask preprocessing of a BlockMask and of the equivalent dense mask.

    Each list, each block state and each bitmask word must be equal.
    """
    lists = prepare_block_mask(block_mask(mod, Sq, Sk, block=block))
    visible = make_dense_mask(mod, Sq, Sk)
    expected = mask_preprocess_reference.preprocess_mask(visible, mask_preprocess_reference.numbers_of(Sq, Sq, Sk))
    assert torch.equal(mask_preprocess_reference.visible_scores(lists.metadata, Sq, Sk), visible)
    assert torch.equal(lists.metadata, expected)
    forward = prepare_block_mask(block_mask(mod, Sq, Sk, block=block), gradients=False)
    numbers = mask_preprocess_reference.numbers_of(Sq, Sq, Sk, gradients=False)
    assert (
        torch.equal(forward.metadata, mask_preprocess_reference.preprocess_mask(visible, numbers))
        and not forward.gradients
    )
    assert torch.equal(mask_preprocess_reference.visible_scores(forward.metadata, Sq, Sk), visible)


@pytest.mark.parametrize("mod", MODS.values(), ids=MODS)
@pytest.mark.parametrize(("Sq", "Sk"), [(384, 384), (300, 450), (1, 200)])
def test_block_mask_results_equal_dense_mask_results(device: str, mod: Callable, Sq: int, Sk: int) -> None:
    leaves, wide = ([x.requires_grad_() for x in make_operands(Sq, Sk, device=device)] for _ in range(2))
    out, lse = attention(*leaves, block_mask=block_mask(mod, Sq, Sk, device), scale=0.3, return_lse=True)
    expected_out, expected_lse = attend_in_dense_scores(*wide, make_dense_mask(mod, Sq, Sk, device), 0.3)
    torch.testing.assert_close(out, expected_out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.detach(), expected_lse.detach(), rtol=1e-4, atol=1e-5)
    do = random_tensor(*out.shape).to(device)
    for actual, expected in zip(
        torch.autograd.grad(out, leaves, do), torch.autograd.grad(expected_out, wide, do), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("mod", MODS.values(), ids=MODS)
@pytest.mark.parametrize(("Sq", "Sk"), [(384, 384), (1000, 777), (65, 4096)])
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_kernel_errors_are_bounded_by_the_formula(mod: Callable, Sq: int, Sk: int, D: int, dtype: torch.dtype) -> None:
    """Run our kernels; the error must be at most twice the error of the formula in 16 bits.

    For gradients, the factor is three.
    """
    leaves = [x.requires_grad_() for x in make_operands(Sq, Sk, device="cuda", D=D, dtype=dtype)]
    low, wide = ([x.detach().to(precision).requires_grad_() for x in leaves] for precision in (dtype, torch.float64))
    mask, visible = block_mask(mod, Sq, Sk, "cuda"), make_dense_mask(mod, Sq, Sk, "cuda")
    bindings.counters(reset=True)
    out = attention(*leaves, block_mask=mask)
    do = random_tensor(*out.shape).to(out)
    grads = torch.autograd.grad(out, leaves, do)
    counts = bindings.counters(reset=True)
    assert counts["ours_fwd"] == counts["ours_bwd"] == 1
    results = [(out, *grads)]
    for tensors in (low, wide):
        expected, _ = attend_in_dense_scores(*tensors, visible)
        results.append((expected, *torch.autograd.grad(expected, tensors, do.to(expected.dtype))))
    for i, (actual, formula, exact) in enumerate(zip(*results, strict=True)):
        size = exact.norm().clamp(min=1e-30)  # the norm may be 0 if no row has a visible key
        kernel_error, formula_error = (float((x.double() - exact).norm() / size) for x in (actual, formula))
        assert kernel_error <= (3 if i else 2) * formula_error + torch.finfo(dtype).eps


@pytest.mark.gpu
def test_block_mask_of_64k_keys_needs_no_dense_mask() -> None:
    """Check the sequence length of Path-256: a window and a few fully visible blocks.

    A subset of rows is compared with fp64 scores.
    """
    S, rows = 65536, 512

    def mod(b, h, q, k) -> Tensor:
        return ((q - k).abs() < 300) | (k < 128)

    blocks = torch.arange(S // 128)  # a dense mask would take 4 GB
    near = ((blocks[:, None] - blocks).abs() <= 3) | (blocks == 0)
    lists = near.sum(1).int(), near.int().argsort(dim=1, descending=True, stable=True).int()
    mask = flex.BlockMask.from_kv_blocks(
        *(x[None, None].cuda() for x in lists), BLOCK_SIZE=128, mask_mod=mod, seq_lengths=(S, S)
    )
    lists = prepare_block_mask(mask)
    leaves = [random_tensor(1, S, 2, 64, seed=i, dtype=torch.bfloat16).cuda().requires_grad_() for i in range(3)]
    out = attention(*leaves, block_mask=lists)
    row_indices = torch.randperm(S, generator=torch.Generator().manual_seed(1))[:rows].sort().values.cuda()
    q, k, v = (x.detach().double().transpose(1, 2) for x in leaves)
    scores = q[:, :, row_indices] @ k.mT / 8
    visible = mod(0, 0, row_indices[:, None], torch.arange(S, device="cuda"))
    expected_out = (scores.masked_fill(~visible, -math.inf).softmax(-1) @ v).transpose(1, 2)
    assert float((out[:, row_indices].double() - expected_out).norm() / expected_out.norm()) < 6e-3
    do = torch.zeros_like(out)
    do[:, row_indices] = random_tensor(1, rows, 2, 64, seed=9).to(do)
    dq, dk, dv = torch.autograd.grad(out, leaves, do)
    wide = [x.clone().requires_grad_() for x in (q[:, :, row_indices], k, v)]
    exact = (wide[0] @ wide[1].mT / 8).masked_fill(~visible, -math.inf).softmax(-1) @ wide[2]
    exact = torch.autograd.grad(exact, wide, do[:, row_indices].double().transpose(1, 2))
    for actual, expected in zip((dq[:, row_indices], dk, dv), exact, strict=True):
        assert float((actual.double().transpose(1, 2) - expected).norm() / expected.norm()) < 1e-2


def test_block_mask_call_writes_to_out() -> None:
    tensors, out = make_operands(130, 200), torch.empty(2, 130, 4, 16)
    mask = block_mask(sliding, 130, 200)
    assert attention(*tensors, block_mask=mask, out=out) is out
    assert torch.equal(out, attention(*tensors, block_mask=mask))


def test_block_lists_are_cached_per_mask() -> None:
    """Build block lists once per mask; rebuild them after an in-place change or if gradients are needed later."""
    mask = block_mask(sliding, 256, 256)
    forward_lists = prepare_block_mask(mask, gradients=False)
    assert prepare_block_mask(mask, gradients=False) is forward_lists
    lists_with_gradients = prepare_block_mask(mask)
    assert lists_with_gradients is not forward_lists
    assert prepare_block_mask(mask, gradients=False) is lists_with_gradients
    mask.kv_num_blocks.clamp_(max=1)
    assert prepare_block_mask(mask) is not lists_with_gradients


def test_changes_of_a_mask_mod_are_detected() -> None:
    """Detect changes of a mask_mod.

    The test writes to closure tensors in place, creates a new function at an old address, and changes the lengths.
    """
    offset, tensors = torch.tensor(0), make_operands(128, 128)
    mask = block_mask(lambda b, h, q, k: q + offset >= k, 128, 128)
    for diagonal in (0, 1, 90):
        offset.fill_(diagonal)
        expected, _ = attend_in_dense_scores(*tensors, torch.ones(128, 128).tril(diagonal).bool())
        torch.testing.assert_close(attention(*tensors, block_mask=mask), expected)

    def make_mod(n: int) -> Callable:
        return lambda b, h, q, k: (q >= k) & (q - k < n)

    for width in range(1, 60, 3):
        mask.mask_mod = None
        mask.mask_mod = make_mod(width)
        expected, _ = attend_in_dense_scores(*tensors, torch.ones(128, 128).tril().triu(1 - width).bool())
        torch.testing.assert_close(attention(*tensors, block_mask=mask), expected)
    old_lists = prepare_block_mask(mask)
    mask.seq_lengths = (100, 128)
    assert prepare_block_mask(mask).Sq == 100 and old_lists.Sq == 128


def test_block_masks_made_in_inference_mode() -> None:
    tensors = make_operands(128, 128)
    expected, _ = attend_in_dense_scores(*tensors, make_dense_mask(causal, 128, 128))
    with torch.inference_mode():
        mask = block_mask(causal, 128, 128)
        torch.testing.assert_close(attention(*tensors, block_mask=mask), expected)
    torch.testing.assert_close(attention(*tensors, block_mask=mask), expected)
    mask = block_mask(causal, 128, 128)
    with torch.inference_mode():
        prepare_block_mask(mask)
    attention(tensors[0].requires_grad_(), *tensors[1:], block_mask=mask).sum().backward()


def test_listed_blocks_without_a_mask_mod_are_full() -> None:
    """Without a mask_mod, each listed block is full; block indices beyond the last block are ignored."""
    count, index = torch.tensor([[[1, 2]]]), torch.tensor([[[[1, 7], [0, 1]]]])
    mask = flex.BlockMask.from_kv_blocks(count.int(), index.int(), BLOCK_SIZE=128, seq_lengths=(256, 256))
    visible = mask_preprocess_reference.visible_scores(prepare_block_mask(mask).metadata, 256, 256)[0, 0]
    expected = torch.zeros(256, 256, dtype=torch.bool)
    expected[:128, 128:] = expected[128:] = True
    assert torch.equal(visible, expected)


def test_block_sparse_ops_pass_opcheck() -> None:
    q, k, v = (x.transpose(1, 2) for x in make_operands(130, 200))
    lists = prepare_block_mask(block_mask(sliding, 130, 200))
    torch.library.opcheck(FORWARD, ([x.requires_grad_() for x in (q, k, v)][0], k, v, lists.metadata, 1.0, None))
    out, lse = FORWARD(q, k, v, lists.metadata, 1.0, 0.2)
    arguments = [x.detach() for x in (torch.ones_like(out), q, k, v, lists.metadata, out, lse)]
    torch.library.opcheck(BACKWARD, (*arguments, 0.2), test_utils=("test_schema", "test_faketensor"))


def test_compiled_block_mask_call_equals_eager_call(fresh_dynamo: None, device: str) -> None:
    leaves = [x.requires_grad_() for x in make_operands(130, 200, device=device)]
    lists = prepare_block_mask(block_mask(sliding, 130, 200, device))

    def loss(q: Tensor, k: Tensor, v: Tensor, lists: PreparedBlockMask) -> Tensor:
        out, lse = attention(q, k, v, block_mask=lists, return_lse=True)
        return out.square().sum() + lse.square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    grads = torch.autograd.grad(compiled(*leaves, lists), leaves)
    for actual, expected in zip(grads, torch.autograd.grad(loss(*leaves, lists), leaves), strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("backend", ["math", "stock"])
def test_math_and_stock_blocks_run_no_kernel(kernels_on: str, backend: str) -> None:
    tensors = make_operands(130, 200, device=kernels_on, D=64, dtype=torch.bfloat16)
    bindings.counters(reset=True)
    with torch_flashplug.sdpa_backend(backend), torch.no_grad():
        attention(*tensors, block_mask=block_mask(sliding, 130, 200, kernels_on))
    assert bindings.counters(reset=True)["ours_fwd"] == 0


@pytest.mark.parametrize("Sq", [130, 65, 2])
def test_forward_runs_on_kernels(kernels_on: str, Sq: int) -> None:
    """Decode kernels must not be used, because decode kernels read no block-sparse lists."""
    tensors = make_operands(Sq, 200, device=kernels_on, D=64, dtype=torch.bfloat16)
    mask = block_mask(sliding, Sq, 200, kernels_on)
    bindings.counters(reset=True)
    with torch.no_grad():
        out = attention(*tensors, block_mask=mask)
    assert bindings.counters(reset=True)["ours_fwd"] == 1
    expected, _ = attend_in_dense_scores(*(x.double() for x in tensors), make_dense_mask(sliding, Sq, 200, kernels_on))
    assert float((out.double() - expected).norm() / expected.norm()) < 6e-3


def test_tile_height_follows_the_block_lists() -> None:
    """Check tile heights: D 64 uses 128 rows instead of 192 if two block lines of a tile visit different blocks."""
    S = 8192
    tensors = [torch.empty(1, S, 32, 64, dtype=torch.bfloat16) for _ in range(3)]
    blocks = torch.arange(S // 128)
    for is_visited, rows in (((blocks[:, None] * 37 + blocks * 11) % 10 == 0, 128), (blocks[:, None] >= blocks, 192)):
        lists = is_visited.sum(1).int(), is_visited.int().argsort(dim=1, descending=True, stable=True).int()
        sparse_lists = prepare_block_mask(flex.BlockMask.from_kv_blocks(
            *(torch.zeros_like(x)[None, None] for x in lists), *(x[None, None] for x in lists),
            BLOCK_SIZE=128, seq_lengths=(S, S),
        ), gradients=False)  # fmt: skip
        assert (sparse_lists.cost_ratio_192 > 1.4) == (rows == 128)
        plan = torch_flashplug.explain_attention(*tensors, block_mask=sparse_lists, device="h100")
        assert f"_m{rows}n" in plan.kernel


def test_explain_attention_reports_block_masks() -> None:
    tensors = make_operands(130, 200, D=64, dtype=torch.bfloat16)
    plan = torch_flashplug.explain_attention(*tensors, block_mask=block_mask(sliding, 130, 200), device="h100")
    assert plan.backend == "fa3" and plan.kernel.startswith("fwd_sm90_bf16_d64_mask") and "block_mask" in plan.call
    wide = [x.double() for x in tensors]
    plan = torch_flashplug.explain_attention(*wide, block_mask=block_mask(sliding, 130, 200), device="h100")
    assert plan.backend == "math" and "dtype" in plan.reasons["fa3"]


@pytest.mark.parametrize("mod", [sliding, per_head_mod, rows_without_keys], ids=lambda mod: mod.__name__)
@pytest.mark.parametrize("with_out", [False, True], ids=["lse", "both"])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_gradients_of_the_lse(device: str, mod: Callable, with_out: bool, scale: float | None) -> None:
    leaves = [x.double().requires_grad_() for x in make_operands(130, 200, device=device)]
    out, lse = attention(*leaves, block_mask=block_mask(mod, 130, 200, device), scale=scale, return_lse=True)
    exact, expected_out = attend_in_dense_scores(*leaves, make_dense_mask(mod, 130, 200, device), scale)
    grad_out, grad_lse, empty = torch.randn_like(out), torch.randn_like(lse), expected_out == -math.inf
    assert bool(empty.any()) == (mod is rows_without_keys)
    grads = []
    for o, x, fill_value in (
        (out, lse, math.nan),
        (exact, expected_out, 0.0),
    ):  # gradients of the LSE for rows without keys
        results, grad_outputs = [x], [grad_lse.masked_fill(empty, fill_value)]
        if with_out:
            results, grad_outputs = [o, *results], [grad_out, *grad_outputs]
        grads.append(torch.autograd.grad(results, leaves[:2], grad_outputs))
    for actual, expected in zip(*grads, strict=True):
        torch.testing.assert_close(actual, expected.nan_to_num())


def test_gradients_of_the_lse_stay_in_the_range_of_fp16(device: str) -> None:
    """Use one key for many rows, and a batch with gradients much larger than in the other batch, or not finite."""
    q = random_tensor(1, 9000, 8, 8).mul(0.1).add(1.0).half().to(device).requires_grad_()
    k, v = (random_tensor(1, 1, 1, 8, seed=i).half().to(device).requires_grad_() for i in (1, 2))
    _, lse = attention(q, k, v, block_mask=block_mask(all_visible, 9000, 1, device), return_lse=True)
    (grad_k,) = torch.autograd.grad(lse.mean(), k)
    torch.testing.assert_close(grad_k.float(), q.float().mean((0, 1, 2)).mul(8**-0.5).view_as(k), rtol=2e-3, atol=0.0)
    leaves = [x.requires_grad_() for x in make_operands(130, 200, device=device, D=64, dtype=torch.float16)]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    grad_lse = random_tensor(2, 4, 130).to(device) * torch.tensor([1e4, 1e-3], device=device)[:, None, None]
    _, lse = attention(*leaves, block_mask=block_mask(sliding, 130, 200, device), return_lse=True)
    _, expected_out = attend_in_dense_scores(*wide, make_dense_mask(sliding, 130, 200, device))
    exact = torch.autograd.grad(expected_out, wide[:2], grad_lse.double())
    for first_batch in (grad_lse[0], grad_lse[0] * math.nan):
        batch_grads = torch.stack((first_batch, grad_lse[1]))
        for actual, expected in zip(
            torch.autograd.grad(lse, leaves[:2], batch_grads, retain_graph=True), exact, strict=True
        ):
            error = (actual[1].double() - expected[1]).norm() / expected[1].norm()
            assert float(error) < 5e-3


@pytest.mark.parametrize("inside", [False, True])
def test_autocast_does_not_cast_reference_math(device: str, inside: bool) -> None:
    """Autocast casts operands, but neither the LSE nor its gradients.

    With `inside`, the backward also runs in autocast.
    """
    leaves = [x.bfloat16().requires_grad_() for x in make_operands(130, 200, device=device, D=40)]
    mask = block_mask(sliding, 130, 200, device)
    for arguments in ({"block_mask": mask}, {"causal": True}, {"causal": True, "softcap": 2.0}):
        plain, lse = attention(*leaves, **arguments, return_lse=True)
        grads = torch.autograd.grad((plain.sum(), lse.sum()), leaves[:2])
        with torch.autocast(device, dtype=torch.bfloat16):
            cast, cast_lse = attention(*leaves, **arguments, return_lse=True)
            autocast_grads = torch.autograd.grad((cast.sum(), cast_lse.sum()), leaves[:2]) if inside else None
        autocast_grads = (
            torch.autograd.grad((cast.sum(), cast_lse.sum()), leaves[:2]) if autocast_grads is None else autocast_grads
        )
        torch.testing.assert_close((cast, cast_lse, *autocast_grads), (plain, lse, *grads), rtol=0.0, atol=0.0)


@pytest.mark.parametrize("mod", [lambda b, h, q, k: q >= 10 * h - 100, lambda b, h, q, k: (q >= 600 + h) & (k < 7)])
def test_block_mask_without_partial_blocks_equals_the_dense_mask(device: str, mod: Callable) -> None:
    tensors, sizes = make_operands(256, 256, device=device), (2, 4, 256, 256)
    out = attention(*tensors, block_mask=flex.create_block_mask(mod, *sizes, device=device))
    torch.testing.assert_close(out, attend_in_dense_scores(*tensors, flex.create_mask(mod, *sizes, device=device))[0])


@pytest.mark.parametrize(("size", "dtype", "near"), [(1.0, torch.bfloat16, 1e-2), (1e6, torch.float16, 2e-3)])
def test_gradients_of_the_lse_on_kernels(kernels_on: str, size: float, dtype: torch.dtype, near: float) -> None:
    leaves = [x.requires_grad_() for x in make_operands(130, 200, device=kernels_on, D=64, dtype=dtype)]
    grad_lse = size * torch.randn(2, 4, 130, generator=torch.Generator().manual_seed(SEED)).to(kernels_on)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    bindings.counters(reset=True)
    _, lse = attention(*leaves, block_mask=block_mask(sliding, 130, 200, kernels_on), return_lse=True)
    grads = torch.autograd.grad(lse, leaves[:2], grad_lse / 1e3)
    counts = bindings.counters(reset=True)
    assert (counts["ours_fwd"], counts["ours_bwd"], counts["math_fwd"], counts["math_bwd"]) == (2, 1, 0, 0)
    _, expected_out = attend_in_dense_scores(*wide, make_dense_mask(sliding, 130, 200, kernels_on))
    for actual, expected in zip(
        grads, torch.autograd.grad(expected_out, wide[:2], grad_lse.double() / 1e3), strict=True
    ):
        assert float((actual.double() - expected).norm() / expected.norm()) < near


def assert_refused(message: str, error: type[Exception] = ValueError, **arguments: object) -> None:
    q, k, v = arguments.pop("operands", None) or make_operands(130, 200)
    with pytest.raises(error, match=message):
        attention(q, k, v, **{"block_mask": block_mask(sliding, 130, 200), **arguments})


def test_invalid_arguments_are_refused() -> None:
    assert_refused("must not be combined with other arguments, but got causal or window", causal=True)
    assert_refused("must not be combined with other arguments, but got num_splits", num_splits=1)
    assert_refused("must not be combined with other arguments, but got fixed_split_size", fixed_split_size=128)
    assert_refused("must not be combined with other arguments, but got sinks", sinks=torch.zeros(4))
    assert_refused("must not be combined with other arguments, but got softcap", softcap=3.0)
    assert_refused(
        "must not be combined with other arguments, but got lengths", seqused_k=torch.ones(2, dtype=torch.int32)
    )
    assert_refused(r"block_mask must have shape .*, but got \(1, 1, 130, 200\)", operands=make_operands(131, 200))
    assert_refused("16 bits with block_mask, but got 8",
            operands=[make_operands(130, 200)[0].bfloat16(),
                   *(x.to(torch.int8) for x in make_operands(130, 200)[1:])])  # fmt: skip
    assert_refused("but got Tensor without kv_num_blocks", TypeError, block_mask=torch.ones(130, 200))
    assert_refused(
        "must have blocks of multiples of 64, but got 32 x 32", block_mask=block_mask(sliding, 130, 200, block=32)
    )
    forward_lists = prepare_block_mask(block_mask(sliding, 130, 200), gradients=False)
    assert_refused(
        "must be made with gradients",
        block_mask=forward_lists,
        operands=[x.requires_grad_() for x in make_operands(130, 200)],
    )
    assert_refused(
        "must be on the device of q, meta, but is on cpu", operands=[x.to("meta") for x in make_operands(130, 200)]
    )
    q, k, v = (x.transpose(1, 2) for x in make_operands(130, 200))
    with pytest.raises(RuntimeError, match="mask_metadata must be int32 .*, but got torch.int32"):
        FORWARD(q, k, v, forward_lists.metadata[..., :-1], 1.0, None)
