"""Decode with shared values (absorbed MLA): V is the first columns of K, and kernels read K alone.

Results are compared with fp64, for even and odd numbers of KV blocks, and for splits. The warpgroups of a kernel take
KV blocks in turn and exchange maxima and probabilities. So the scores rise in the blocks of one warpgroup, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from golden_plans import call
from torch import Tensor

import torch_flashplug
from torch_flashplug import attention
from torch_flashplug.api.attention_args import is_shared_decode_call
from torch_flashplug.api.backend import DEVICES
from torch_flashplug.dispatch import bindings
from torch_flashplug.ops.attention import Window
from torch_flashplug.registry import dispatch_table, kernel_table
from torch_flashplug.registry.kernel_spec import KernelSpec
from torch_flashplug.torch_hooks import describe_call

SEED = 20261129
SPECS = [spec for spec in kernel_table.specs(90, "decode") if "shared" in spec.features]
DENSE, PAGED = ([spec for spec in SPECS if ("paged" in spec.features) == paged] for paged in (False, True))
BLOCK = 32  # keys of a KV block
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
NEAR, NEAR_LSE = 5e-3, 1e-4  # relative, root mean square; relative to 1 and to the largest LSE
SCALE = 192**-0.5
H100, FA3 = DEVICES["h100"], torch_flashplug.sdpa_backend("fa3").mode
OP = torch.ops.torch_flashplug.paged_fwd


@pytest.fixture(autouse=True)
def forced() -> Iterator[None]:
    """Force the kernels, which auto mode does not select."""
    with torch_flashplug.sdpa_backend("fa3"), torch.no_grad():
        yield


def operands(
    spec: KernelSpec, heads: int, Sq: int, Sk: int, device: str, *, B: int = 1, contents: str = "plain"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query (B, heads, Sq, D), key (B, 1, Sk, D), and the value, a view of the key."""
    draw = torch.Generator().manual_seed(SEED + Sk)
    q, k = torch.randn(B, heads, Sq, spec.d, generator=draw), torch.randn(B, 1, Sk, spec.d, generator=draw)
    position = torch.arange(Sk).view(-1, 1)
    if contents == "rising":  # in the blocks of the second warpgroup only
        k *= torch.where(position // BLOCK % 2 == 1, 0.1 + 3.0 * position / Sk, 0.1)
    if contents == "large":  # scores of about 1e4
        k *= torch.where(position % 3 == 0, 60.0, 1.0)
        q *= 4.0
    q, k = (x.to(device, DTYPES[spec.dtype]) for x in (q, k))
    return q, k, k[..., : spec.dv]


def reference(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return output and LSE in fp64."""
    scores = q.double() @ k.double().mT * SCALE
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    return scores.softmax(-1).nan_to_num() @ v.double(), scores.logsumexp(-1)


def check(results: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    (out, lse), (exact, exact_lse) = results, expected
    assert out.isfinite().all()
    assert float((out.double() - exact).norm() / exact.norm().clamp(min=1e-9)) < NEAR
    torch.testing.assert_close(lse.double(), exact_lse, rtol=NEAR_LSE, atol=NEAR_LSE)


def run_sdpa(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and LSE of the kernel that serves F.sdpa, and check that F.sdpa has the same output."""
    bindings.counters(reset=True)
    out = F.scaled_dot_product_attention(q, k, v, scale=SCALE, enable_gqa=True)
    again, lse, *_ = torch.ops.torch_flashplug.sdpa_fwd(q, k, v, None, 0.0, 0, SCALE, FA3)
    assert bindings.counters(reset=True)["ours_fwd"] == 2
    assert torch.equal(out, again)
    return out, lse


@pytest.mark.parametrize("spec", DENSE, ids=KernelSpec.name)
@pytest.mark.parametrize("contents", ["plain", "rising", "large"])
@pytest.mark.parametrize("Sk", [1, BLOCK, BLOCK + 1, 2 * BLOCK, 5 * BLOCK - 3])
def test_every_dense_kernel(kernels_on: str, spec: KernelSpec, contents: str, Sk: int) -> None:
    q, k, v = operands(spec, 16, 2, Sk, kernels_on, contents=contents)
    check(run_sdpa(q, k, v), reference(q, k, v))


@pytest.mark.parametrize("spec", DENSE, ids=KernelSpec.name)
def test_tiles_of_many_heads_and_splits(kernels_on: str, spec: KernelSpec) -> None:
    """128 heads are two tiles of the same KV head. 1 x 1000 keys are split among CTAs."""
    q, k, v = operands(spec, 128, 1, 70, kernels_on, B=2)
    check(run_sdpa(q, k, v), reference(q, k, v))
    plan = bindings.plan(call((1, 16, 1), (1, 1000), (spec.d, spec.dv), shared_values=1), H100, FA3)
    assert plan["splits"] > 1 and plan["cluster"] == 1
    q, k, v = operands(spec, 16, 1, 1000, kernels_on)
    check(run_sdpa(q, k, v), reference(q, k, v))


def test_narrower_heads_fill_up_the_tile(kernels_on: str) -> None:
    """D 544 and Dv 480 take the tile of D 576 and Dv 512. The columns of K behind V do not reach the output."""
    spec = next(spec for spec in DENSE if spec.d == 576)
    q, k, _ = operands(spec, 16, 1, 3 * BLOCK, kernels_on)
    q, k = q[..., :544].contiguous(), k[..., :544].contiguous()
    check(run_sdpa(q, k, k[..., :480]), reference(q, k, k[..., :480]))


@pytest.mark.parametrize("spec", PAGED, ids=KernelSpec.name)
@pytest.mark.parametrize("rows", [16, 48, 64, 192])
def test_every_paged_kernel(kernels_on: str, spec: KernelSpec, rows: int) -> None:
    """Pages are in random order, and rows behind the KV length are NaN. Tokens are drafts: four queries, causal."""
    draw, used = torch.Generator().manual_seed(SEED), (70, 0, 129, 2)
    n = -(-max(used) // rows)
    pages = torch.randperm(len(used) * n + 2, generator=draw)[: len(used) * n].view(len(used), n).int()
    pool = torch.randn(len(used) * n + 2, 1, rows, spec.d, generator=draw).to(DTYPES[spec.dtype])
    q = torch.randn(len(used), 16, 4, spec.d, generator=draw).to(DTYPES[spec.dtype])
    sinks = torch.randn(16, generator=draw)
    keys = torch.arange(n * rows)
    expected = []
    for batch, count in enumerate(used):
        k = pool[pages[batch].long(), 0].flatten(0, 1)[:count].unsqueeze(0).unsqueeze(0)
        visible = Window(-1, 0).to_mask(4, count, keys.device)
        out, lse = reference(q[batch : batch + 1], k, k[..., : spec.dv], visible)
        all_lse = torch.logaddexp(lse, sinks.double().view(1, -1, 1))
        expected.append((out * (lse - all_lse).exp().nan_to_num().unsqueeze(-1), all_lse))
        for page, first in zip(pages[batch].long(), range(0, n * rows, rows), strict=True):
            pool[page, :, max(0, count - first) :] = math.nan
    q, pool, pages, sinks = (x.to(kernels_on) for x in (q, pool, pages, sinks))
    lengths = torch.tensor(used, device=kernels_on).int()
    for settings in ({}, {"num_splits": 3}, {"fixed_split_size": 128}):
        bindings.counters(reset=True)
        results = OP(
            q, pool, pool[..., : spec.dv], pages, lengths, None, None, sinks, -1, 0, True, 0.0, SCALE, **settings
        )
        assert bindings.counters(reset=True)["ours_fwd"] == 1
        check(tuple(x.cpu() for x in results), tuple(map(torch.cat, zip(*expected, strict=True))))


def test_pages_of_other_sizes_have_no_kernel(kernels_on: str) -> None:
    """A TMA box has 16 rows of a single page."""
    pool, q = torch.randn(4, 1, 24, 576).bfloat16(), torch.randn(1, 16, 1, 576).bfloat16()
    table, lengths = torch.tensor([[2, 0]]).int(), torch.tensor([40]).int()
    q, pool, table, lengths = (x.to(kernels_on) for x in (q, pool, table, lengths))
    with pytest.raises(RuntimeError, match="head dim 576"):
        OP(q, pool, pool[..., :512], table, lengths, None, None, None, -1, 0, True, 0.0, SCALE)


# ---- without kernels ----

MLA = (2, 128, 1), (2, 4096), (576, 512)


def test_auto_mode_selects_no_kernel_with_shared_values() -> None:
    """The kernels never ran on a GPU. A limit of keys, off by default, would permit the kernels."""
    assert dispatch_table.COST_MODEL.min_shared_keys > 2**31
    for dims in ((576, 512), (512, 512)):
        plan = bindings.plan(call(*MLA[:2], dims, shared_values=1), H100)
        assert "shared" not in plan["kernel"] and plan == bindings.plan(call(*MLA[:2], dims), H100)
        assert "shared" in bindings.plan(call(*MLA[:2], dims, shared_values=1), H100, FA3)["kernel"]


@pytest.mark.parametrize(
    "facts",
    [
        {"shared_values": 0},
        {"shared_values": 1, "grad": 1},
        {"shared_values": 1, "causal": 1},
        {"shared_values": 1, "bias": 1},
    ],
)
def test_calls_without_a_kernel_give_the_reason_of_the_head_dim(facts: dict) -> None:
    plan = bindings.plan(call(*MLA, **facts), H100, FA3)
    assert plan["backend"] == "stock" and plan["reasons"]["fa3"]


def test_more_rows_than_a_decode_and_narrow_heads_keep_their_kernels() -> None:
    for rows, dims in ((5, (512, 512)), (1, (128, 128)), (1, (256, 256))):
        shared, apart = (
            bindings.plan(call((2, 128, 1), (rows, 4096), dims, shared_values=x), H100, FA3) for x in (1, 0)
        )
        assert shared == apart and shared["backend"] == "fa3"


def _views(k: Tensor) -> Iterator[tuple[bool, Tensor]]:
    yield True, k[..., :512]
    yield True, k
    yield False, k[..., :512].clone()
    yield False, k[..., 64:]
    yield False, torch.cat((k, k), -2)[..., ::2, :512]
    yield False, k[:, :, 1:, :512]


def test_shared_values_are_recognized_by_memory_alone() -> None:
    q, k = torch.randn(1, 16, 1, 576), torch.randn(1, 1, 8, 576)
    for is_shared, v in _views(k):
        assert describe_call.shares_values(q, k, v) == is_shared
    assert not is_shared_decode_call(q, k, k[..., :512])  # not on a GPU


@pytest.mark.parametrize("arguments", [{"causal": True}, {"return_lse": True}, {"window": (3, 0)}, {}], ids=str)
def test_v_dim_equals_a_copy_of_the_columns(arguments: dict) -> None:
    q, k = torch.randn(2, 3, 16, 576), torch.randn(2, 9, 1, 576)
    with torch_flashplug.sdpa_backend("auto"):
        shared = attention(q, k, v_dim=512, scale=SCALE, **arguments)
        view, copied = (attention(q, k, v, scale=SCALE, **arguments) for v in (k[..., :512], k[..., :512].clone()))
    torch.testing.assert_close(shared, copied)
    torch.testing.assert_close(view, copied)


def test_gradients_flow_to_the_keys() -> None:
    q, k = torch.randn(1, 2, 4, 72, dtype=torch.float64), torch.randn(1, 5, 1, 72, dtype=torch.float64)
    with torch.enable_grad(), torch_flashplug.sdpa_backend("auto"):
        assert torch.autograd.gradcheck(
            lambda q, k: attention(q, k, v_dim=64, causal=True), (q.requires_grad_(), k.requires_grad_())
        )


@pytest.mark.parametrize(
    ("values", "v_dim", "error", "text"),
    [
        (None, None, TypeError, "v must be a tensor, but got None"),
        ("v", 512, ValueError, "v_dim must be None with v, but got 512"),
        (None, 577, ValueError, "v_dim must be an int from 1 to the head dim of k, 576, but got 577"),
        (None, 0, ValueError, "but got 0"),
        (None, True, ValueError, "but got True"),
        (None, 512.0, ValueError, "but got 512.0"),
    ],
)
def test_errors_of_v_dim(values: str | None, v_dim: object, error: type[Exception], text: str) -> None:
    q, k = torch.randn(1, 1, 16, 576), torch.randn(1, 8, 1, 576)
    with pytest.raises(error, match=text):
        attention(q, k, None if values is None else k, v_dim=v_dim)
