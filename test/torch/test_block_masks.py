"""attention(block_mask=): FlexAttention's BlockMasks as lists of blocks, what is made of them, numbers and gradients
against the mask they stand for, what torch's tools make of the ops, what is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

import torch_flashplug
from torch_flashplug import BlockLists, attention, block_lists
from torch_flashplug.dispatch import bindings
from torch_flashplug.ops import mask_preprocess_reference

SEED = 20261126
FORWARD, BACKWARD = torch.ops.torch_flashplug.listed_fwd, torch.ops.torch_flashplug.listed_bwd


def causal(b, h, q, k) -> Tensor:
    return q >= k


def sliding(b, h, q, k) -> Tensor:
    return (q - k).abs() <= 70


def documents(b, h, q, k) -> Tensor:
    return (q // 90 == k // 90) & (q >= k)


def of_heads(b, h, q, k) -> Tensor:
    return (q + k + 40 * h + 17 * b) % 300 < 140


def none_for_some(b, h, q, k) -> Tensor:
    return (q >= 200) & (k < 130)


def all_seen(b, h, q, k) -> Tensor:
    return q >= 0


MODS = {of.__name__: of for of in (causal, sliding, documents, of_heads, none_for_some, all_seen)}


def drawn(*sizes: int, seed: int = SEED, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operands(
    Sq: int, Sk: int, *, device: str = "cpu", heads: tuple[int, int] = (4, 2), D: int = 16, dtype=torch.float32
) -> list[Tensor]:
    """(B, S, H, D)."""
    sizes = (Sq, heads[0]), (Sk, heads[1]), (Sk, heads[1])
    return [drawn(2, rows, of, D, seed=SEED + i, dtype=dtype).to(device) for i, (rows, of) in enumerate(sizes)]


def block_mask(mod: Callable, Sq: int, Sk: int, device: str = "cpu", block: int | tuple[int, int] = 128) -> object:
    per_plane = mod is of_heads
    sizes = (2 if per_plane else None, 4 if per_plane else None, Sq, Sk)
    return flex.create_block_mask(mod, *sizes, device=device, BLOCK_SIZE=block)


def dense(mod: Callable, Sq: int, Sk: int, device: str = "cpu") -> Tensor:
    per_plane = mod is of_heads
    return flex.create_mask(mod, 2 if per_plane else None, 4 if per_plane else None, Sq, Sk, device=device)


def by_definition(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * (q.shape[3] ** -0.5 if scale is None else scale)).masked_fill(~seen, -math.inf)
    return (scores.softmax(-1).nan_to_num() @ v).transpose(1, 2), scores.logsumexp(-1)


@pytest.mark.parametrize("mod", MODS.values(), ids=MODS)
@pytest.mark.parametrize(("Sq", "Sk"), [(128, 128), (384, 384), (300, 450), (65, 1), (1, 200), (250, 64)])
@pytest.mark.parametrize("block", [128, (256, 128), (64, 192)], ids=str)
def test_digest(mod: Callable, Sq: int, Sk: int, block: int | tuple[int, int]) -> None:
    """Of a BlockMask the same comes as of the mask it stands for: each list, state and word."""
    lists = block_lists(block_mask(mod, Sq, Sk, block=block))
    seen = dense(mod, Sq, Sk)
    right = mask_preprocess_reference.digest(seen, mask_preprocess_reference.numbers_of(Sq, Sq, Sk))
    assert torch.equal(mask_preprocess_reference.seen(lists.digest, Sq, Sk), seen)
    assert torch.equal(lists.digest, right)
    forward = block_lists(block_mask(mod, Sq, Sk, block=block), gradients=False)
    numbers = mask_preprocess_reference.numbers_of(Sq, Sq, Sk, gradients=False)
    assert torch.equal(forward.digest, mask_preprocess_reference.digest(seen, numbers)) and not forward.gradients
    assert torch.equal(mask_preprocess_reference.seen(forward.digest, Sq, Sk), seen)


@pytest.mark.parametrize("mod", MODS.values(), ids=MODS)
@pytest.mark.parametrize(("Sq", "Sk"), [(384, 384), (300, 450), (1, 200)])
def test_as_the_mask(device: str, mod: Callable, Sq: int, Sk: int) -> None:
    leaves, wide = ([x.requires_grad_() for x in operands(Sq, Sk, device=device)] for _ in range(2))
    out, lse = attention(*leaves, block_mask=block_mask(mod, Sq, Sk, device), scale=0.3, return_lse=True)
    right, of_keys = by_definition(*wide, dense(mod, Sq, Sk, device), 0.3)
    torch.testing.assert_close(out, right, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.detach(), of_keys.detach(), rtol=1e-4, atol=1e-5)
    do = drawn(*out.shape).to(device)
    for got, one in zip(torch.autograd.grad(out, leaves, do), torch.autograd.grad(right, wide, do), strict=True):
        torch.testing.assert_close(got, one, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("mod", MODS.values(), ids=MODS)
@pytest.mark.parametrize(("Sq", "Sk"), [(384, 384), (1000, 777), (65, 4096)])
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_kernels(mod: Callable, Sq: int, Sk: int, D: int, dtype: torch.dtype) -> None:
    """Ours run, and are nearer to fp64 than twice what 16 bits are by the formula."""
    leaves = [x.requires_grad_() for x in operands(Sq, Sk, device="cuda", D=D, dtype=dtype)]
    low, wide = ([x.detach().to(of).requires_grad_() for x in leaves] for of in (dtype, torch.float64))
    mask, seen = block_mask(mod, Sq, Sk, "cuda"), dense(mod, Sq, Sk, "cuda")
    bindings.counters(reset=True)
    out = attention(*leaves, block_mask=mask)
    do = drawn(*out.shape).to(out)
    grads = torch.autograd.grad(out, leaves, do)
    counts = bindings.counters(reset=True)
    assert counts["ours_fwd"] == counts["ours_bwd"] == 1
    found = [(out, *grads)]
    for of in (low, wide):
        right, _ = by_definition(*of, seen)
        found.append((right, *torch.autograd.grad(right, of, do.to(right.dtype))))
    for i, (ours, formula, exact) in enumerate(zip(*found, strict=True)):
        size = exact.norm().clamp(min=1e-30)  # of rows that see nothing 0
        wrong, theirs = (float((x.double() - exact).norm() / size) for x in (ours, formula))
        assert wrong <= (3 if i else 2) * theirs + torch.finfo(dtype).eps


@pytest.mark.gpu
def test_64k_keys() -> None:
    """Path-256's length: a window and a few blocks that all see, as by rows of the scores."""
    S, rows = 65536, 512

    def mod(b, h, q, k) -> Tensor:
        return ((q - k).abs() < 300) | (k < 128)

    blocks = torch.arange(S // 128)  # a mask of all scores would take 4 GB
    near = ((blocks[:, None] - blocks).abs() <= 3) | (blocks == 0)
    lists = near.sum(1).int(), near.int().argsort(dim=1, descending=True, stable=True).int()
    mask = flex.BlockMask.from_kv_blocks(
        *(x[None, None].cuda() for x in lists), BLOCK_SIZE=128, mask_mod=mod, seq_lengths=(S, S)
    )
    lists = block_lists(mask)
    leaves = [drawn(1, S, 2, 64, seed=i, dtype=torch.bfloat16).cuda().requires_grad_() for i in range(3)]
    out = attention(*leaves, block_mask=lists)
    at = torch.randperm(S, generator=torch.Generator().manual_seed(1))[:rows].sort().values.cuda()
    q, k, v = (x.detach().double().transpose(1, 2) for x in leaves)
    scores = q[:, :, at] @ k.mT / 8
    seen = mod(0, 0, at[:, None], torch.arange(S, device="cuda"))
    right = (scores.masked_fill(~seen, -math.inf).softmax(-1) @ v).transpose(1, 2)
    assert float((out[:, at].double() - right).norm() / right.norm()) < 6e-3
    do = torch.zeros_like(out)
    do[:, at] = drawn(1, rows, 2, 64, seed=9).to(do)
    dq, dk, dv = torch.autograd.grad(out, leaves, do)
    wide = [x.clone().requires_grad_() for x in (q[:, :, at], k, v)]
    exact = (wide[0] @ wide[1].mT / 8).masked_fill(~seen, -math.inf).softmax(-1) @ wide[2]
    exact = torch.autograd.grad(exact, wide, do[:, at].double().transpose(1, 2))
    for got, one in zip((dq[:, at], dk, dv), exact, strict=True):
        assert float((got.double().transpose(1, 2) - one).norm() / one.norm()) < 1e-2


def test_out() -> None:
    given, into = operands(130, 200), torch.empty(2, 130, 4, 16)
    mask = block_mask(sliding, 130, 200)
    assert attention(*given, block_mask=mask, out=into) is into
    assert torch.equal(into, attention(*given, block_mask=mask))


def test_known_again() -> None:
    """Made once for a mask, again where it is written to or gradients come to be wanted."""
    mask = block_mask(sliding, 256, 256)
    first = block_lists(mask, gradients=False)
    assert block_lists(mask, gradients=False) is first
    more = block_lists(mask)
    assert more is not first and block_lists(mask, gradients=False) is more
    mask.kv_num_blocks.clamp_(max=1)
    assert block_lists(mask) is not more


def test_what_a_mask_mod_holds_is_looked_at_again() -> None:
    """Tensors in its closure that were written to, another function at an old one's place, other lengths."""
    offset, given = torch.tensor(0), operands(128, 128)
    mask = block_mask(lambda b, h, q, k: q + offset >= k, 128, 128)
    for moved in (0, 1, 90):
        offset.fill_(moved)
        right, _ = by_definition(*given, torch.ones(128, 128).tril(moved).bool())
        torch.testing.assert_close(attention(*given, block_mask=mask), right)

    def of_width(n: int) -> Callable:
        return lambda b, h, q, k: (q >= k) & (q - k < n)

    for width in range(1, 60, 3):
        mask.mask_mod = None
        mask.mask_mod = of_width(width)
        right, _ = by_definition(*given, torch.ones(128, 128).tril().triu(1 - width).bool())
        torch.testing.assert_close(attention(*given, block_mask=mask), right)
    known = block_lists(mask)
    mask.seq_lengths = (100, 128)
    assert block_lists(mask).Sq == 100 and known.Sq == 128


def test_inference_mode() -> None:
    given = operands(128, 128)
    right, _ = by_definition(*given, dense(causal, 128, 128))
    with torch.inference_mode():
        mask = block_mask(causal, 128, 128)
        torch.testing.assert_close(attention(*given, block_mask=mask), right)
    torch.testing.assert_close(attention(*given, block_mask=mask), right)
    mask = block_mask(causal, 128, 128)
    with torch.inference_mode():
        block_lists(mask)
    attention(given[0].requires_grad_(), *given[1:], block_mask=mask).sum().backward()


def test_lists_alone() -> None:
    """Without a mask_mod all of a listed block is seen; numbers beyond the last block are left out."""
    count, index = torch.tensor([[[1, 2]]]), torch.tensor([[[[1, 7], [0, 1]]]])
    mask = flex.BlockMask.from_kv_blocks(count.int(), index.int(), BLOCK_SIZE=128, seq_lengths=(256, 256))
    seen = mask_preprocess_reference.seen(block_lists(mask).digest, 256, 256)[0, 0]
    right = torch.zeros(256, 256, dtype=torch.bool)
    right[:128, 128:] = right[128:] = True
    assert torch.equal(seen, right)


def test_opcheck() -> None:
    q, k, v = (x.transpose(1, 2) for x in operands(130, 200))
    lists = block_lists(block_mask(sliding, 130, 200))
    torch.library.opcheck(FORWARD, ([x.requires_grad_() for x in (q, k, v)][0], k, v, lists.digest, 1.0, None))
    out, lse = FORWARD(q, k, v, lists.digest, 1.0, 0.2)
    given = [x.detach() for x in (torch.ones_like(out), q, k, v, lists.digest, out, lse)]
    torch.library.opcheck(BACKWARD, (*given, 0.2), test_utils=("test_schema", "test_faketensor"))


def test_compiled(fresh_dynamo: None, device: str) -> None:
    leaves = [x.requires_grad_() for x in operands(130, 200, device=device)]
    lists = block_lists(block_mask(sliding, 130, 200, device))

    def called(q: Tensor, k: Tensor, v: Tensor, lists: BlockLists) -> Tensor:
        out, lse = attention(q, k, v, block_mask=lists, return_lse=True)
        return out.square().sum() + lse.square().sum()

    compiled = torch.compile(called, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(*leaves, lists), leaves)
    for got, one in zip(found, torch.autograd.grad(called(*leaves, lists), leaves), strict=True):
        torch.testing.assert_close(got, one)


@pytest.mark.parametrize("backend", ["math", "stock"])
def test_asked_for_mathematics(kernels_on: str, backend: str) -> None:
    given = operands(130, 200, device=kernels_on, D=64, dtype=torch.bfloat16)
    bindings.counters(reset=True)
    with torch_flashplug.sdpa_backend(backend), torch.no_grad():
        attention(*given, block_mask=block_mask(sliding, 130, 200, kernels_on))
    assert bindings.counters(reset=True)["ours_fwd"] == 0


@pytest.mark.parametrize("Sq", [130, 65, 2])
def test_on_kernels(kernels_on: str, Sq: int) -> None:
    """Not those of few rows, which read no lists."""
    given = operands(Sq, 200, device=kernels_on, D=64, dtype=torch.bfloat16)
    mask = block_mask(sliding, Sq, 200, kernels_on)
    bindings.counters(reset=True)
    with torch.no_grad():
        out = attention(*given, block_mask=mask)
    assert bindings.counters(reset=True)["ours_fwd"] == 1
    right, _ = by_definition(*(x.double() for x in given), dense(sliding, Sq, 200, kernels_on))
    assert float((out.double() - right).norm() / right.norm()) < 6e-3


def test_tall_tiles() -> None:
    """Where their two lines see other blocks, D 64 has tiles of 128 rows instead of 192."""
    S = 8192
    given = [torch.empty(1, S, 32, 64, dtype=torch.bfloat16) for _ in range(3)]
    blocks = torch.arange(S // 128)
    for listed, rows in (((blocks[:, None] * 37 + blocks * 11) % 10 == 0, 128), (blocks[:, None] >= blocks, 192)):
        lists = listed.sum(1).int(), listed.int().argsort(dim=1, descending=True, stable=True).int()
        made = block_lists(flex.BlockMask.from_kv_blocks(
            *(torch.zeros_like(x)[None, None] for x in lists), *(x[None, None] for x in lists),
            BLOCK_SIZE=128, seq_lengths=(S, S),
        ), gradients=False)  # fmt: skip
        assert (made.tall > 1.4) == (rows == 128)
        plan = torch_flashplug.explain_attention(*given, block_mask=made, device="h100")
        assert f"_m{rows}n" in plan.kernel


def test_explained() -> None:
    given = operands(130, 200, D=64, dtype=torch.bfloat16)
    plan = torch_flashplug.explain_attention(*given, block_mask=block_mask(sliding, 130, 200), device="h100")
    assert plan.backend == "fa3" and plan.kernel.startswith("fwd_sm90_bf16_d64_mask") and "block_mask" in plan.call
    wide = [x.double() for x in given]
    plan = torch_flashplug.explain_attention(*wide, block_mask=block_mask(sliding, 130, 200), device="h100")
    assert plan.backend == "math" and "dtype" in plan.reasons["fa3"]


@pytest.mark.parametrize("mod", [sliding, of_heads, none_for_some], ids=lambda mod: mod.__name__)
@pytest.mark.parametrize("of_out", [False, True], ids=["lse", "both"])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_gradients_of_the_lse(device: str, mod: Callable, of_out: bool, scale: float | None) -> None:
    leaves = [x.double().requires_grad_() for x in operands(130, 200, device=device)]
    out, lse = attention(*leaves, block_mask=block_mask(mod, 130, 200, device), scale=scale, return_lse=True)
    exact, right = by_definition(*leaves, dense(mod, 130, 200, device), scale)
    grad_out, grad_lse, empty = torch.randn_like(out), torch.randn_like(lse), right == -math.inf
    assert bool(empty.any()) == (mod is none_for_some)
    grads = []
    for o, x, of_empty in ((out, lse, math.nan), (exact, right, 0.0)):  # what comes back for rows without keys
        results, given = [x], [grad_lse.masked_fill(empty, of_empty)]
        if of_out:
            results, given = [o, *results], [grad_out, *given]
        grads.append(torch.autograd.grad(results, leaves[:2], given))
    for got, one in zip(*grads, strict=True):
        torch.testing.assert_close(got, one.nan_to_num())


def test_gradients_of_the_lse_stay_in_the_range_of_fp16(device: str) -> None:
    """Where all of many rows see one key, and where a batch's are many times another's, or not finite."""
    q = drawn(1, 9000, 8, 8).mul(0.1).add(1.0).half().to(device).requires_grad_()
    k, v = (drawn(1, 1, 1, 8, seed=i).half().to(device).requires_grad_() for i in (1, 2))
    _, lse = attention(q, k, v, block_mask=block_mask(all_seen, 9000, 1, device), return_lse=True)
    (found,) = torch.autograd.grad(lse.mean(), k)
    torch.testing.assert_close(found.float(), q.float().mean((0, 1, 2)).mul(8**-0.5).view_as(k), rtol=2e-3, atol=0.0)
    leaves = [x.requires_grad_() for x in operands(130, 200, device=device, D=64, dtype=torch.float16)]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    grad_lse = drawn(2, 4, 130).to(device) * torch.tensor([1e4, 1e-3], device=device)[:, None, None]
    _, lse = attention(*leaves, block_mask=block_mask(sliding, 130, 200, device), return_lse=True)
    _, right = by_definition(*wide, dense(sliding, 130, 200, device))
    exact = torch.autograd.grad(right, wide[:2], grad_lse.double())
    for of_first in (grad_lse[0], grad_lse[0] * math.nan):
        given = torch.stack((of_first, grad_lse[1]))
        for got, one in zip(torch.autograd.grad(lse, leaves[:2], given, retain_graph=True), exact, strict=True):
            error = (got[1].double() - one[1]).norm() / one[1].norm()
            assert float(error) < 5e-3


@pytest.mark.parametrize("inside", [False, True])
def test_autocast_leaves_mathematics_as_it_is(device: str, inside: bool) -> None:
    """Operands are cast; the LSE and what is made of it are not. inside: the backward, too."""
    leaves = [x.bfloat16().requires_grad_() for x in operands(130, 200, device=device, D=40)]
    mask = block_mask(sliding, 130, 200, device)
    for beside in ({"block_mask": mask}, {"causal": True}, {"causal": True, "softcap": 2.0}):
        plain, lse = attention(*leaves, **beside, return_lse=True)
        grads = torch.autograd.grad((plain.sum(), lse.sum()), leaves[:2])
        with torch.autocast(device, dtype=torch.bfloat16):
            cast, of_cast = attention(*leaves, **beside, return_lse=True)
            found = torch.autograd.grad((cast.sum(), of_cast.sum()), leaves[:2]) if inside else None
        found = torch.autograd.grad((cast.sum(), of_cast.sum()), leaves[:2]) if found is None else found
        torch.testing.assert_close((cast, of_cast, *found), (plain, lse, *grads), rtol=0.0, atol=0.0)


@pytest.mark.parametrize("mod", [lambda b, h, q, k: q >= 10 * h - 100, lambda b, h, q, k: (q >= 600 + h) & (k < 7)])
def test_no_block_is_partial(device: str, mod: Callable) -> None:
    given, sizes = operands(256, 256, device=device), (2, 4, 256, 256)
    out = attention(*given, block_mask=flex.create_block_mask(mod, *sizes, device=device))
    torch.testing.assert_close(out, by_definition(*given, flex.create_mask(mod, *sizes, device=device))[0])


@pytest.mark.parametrize(("size", "dtype", "near"), [(1.0, torch.bfloat16, 1e-2), (1e6, torch.float16, 2e-3)])
def test_gradients_of_the_lse_on_kernels(kernels_on: str, size: float, dtype: torch.dtype, near: float) -> None:
    leaves = [x.requires_grad_() for x in operands(130, 200, device=kernels_on, D=64, dtype=dtype)]
    grad_lse = size * torch.randn(2, 4, 130, generator=torch.Generator().manual_seed(SEED)).to(kernels_on)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    bindings.counters(reset=True)
    _, lse = attention(*leaves, block_mask=block_mask(sliding, 130, 200, kernels_on), return_lse=True)
    found = torch.autograd.grad(lse, leaves[:2], grad_lse / 1e3)
    counts = bindings.counters(reset=True)
    assert (counts["ours_fwd"], counts["ours_bwd"], counts["math_fwd"], counts["math_bwd"]) == (2, 1, 0, 0)
    _, right = by_definition(*wide, dense(sliding, 130, 200, kernels_on))
    for got, one in zip(found, torch.autograd.grad(right, wide[:2], grad_lse.double() / 1e3), strict=True):
        assert float((got.double() - one).norm() / one.norm()) < near


def refused(message: str, error: type[Exception] = ValueError, **arguments: object) -> None:
    q, k, v = arguments.pop("operands", None) or operands(130, 200)
    with pytest.raises(error, match=message):
        attention(q, k, v, **{"block_mask": block_mask(sliding, 130, 200), **arguments})


def test_refused() -> None:
    refused("must not be combined with other arguments, but got causal or window", causal=True)
    refused("must not be combined with other arguments, but got num_splits", num_splits=1)
    refused("must not be combined with other arguments, but got fixed_split_size", fixed_split_size=128)
    refused("must not be combined with other arguments, but got sinks", sinks=torch.zeros(4))
    refused("must not be combined with other arguments, but got softcap", softcap=3.0)
    refused("must not be combined with other arguments, but got lengths", seqused_k=torch.ones(2, dtype=torch.int32))
    refused(r"block_mask must have shape .*, but got \(1, 1, 130, 200\)", operands=operands(131, 200))
    refused("16 bits with block_mask, but got 8",
            operands=[operands(130, 200)[0].bfloat16(),
                      *(x.to(torch.int8) for x in operands(130, 200)[1:])])  # fmt: skip
    refused("but got Tensor without kv_num_blocks", TypeError, block_mask=torch.ones(130, 200))
    refused("must have blocks of multiples of 64, but got 32 x 32", block_mask=block_mask(sliding, 130, 200, block=32))
    made = block_lists(block_mask(sliding, 130, 200), gradients=False)
    refused("must be made with gradients", block_mask=made, operands=[x.requires_grad_() for x in operands(130, 200)])
    refused("must be on the device of q, meta, but is on cpu", operands=[x.to("meta") for x in operands(130, 200)])
    q, k, v = (x.transpose(1, 2) for x in operands(130, 200))
    with pytest.raises(RuntimeError, match="digest must be int32 .*, but got torch.int32"):
        FORWARD(q, k, v, made.digest[..., :-1], 1.0, None)
