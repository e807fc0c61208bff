"""Head dims above 256 through each entry of a program: attention(), flash_attn names, varlen_attn, and traced F.sdpa.

The kernels are interpreted, or run on a GPU. Results are compared with fp64 math of the same operands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import interpreted_kernels
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

import torch_flashplug
from torch_flashplug import attention, flash_attn
from torch_flashplug.dispatch import bindings
from torch_flashplug.torch_hooks import varlen_attn as varlen_attn_hook

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
SEED, B, HQ, HKV, S, D = 20261129, 2, 4, 2, 70, 512
TOLERANCE = {"atol": 2e-2, "rtol": 2e-2}


def draw(device: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of shapes (B, S, heads, D)."""
    generator = torch.Generator().manual_seed(SEED)
    return tuple(torch.randn(B, S, heads, D, generator=generator).to(dtype).to(device) for heads in (HQ, HKV, HKV))


def exact(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
    """Return the output in fp64 math, of shape (B, S, HQ, D)."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(HQ // HKV, 1) for x in (k, v))
    scores = q @ k.mT / D**0.5
    if causal:
        scores = scores.masked_fill(~torch.ones(S, S, dtype=torch.bool, device=q.device).tril(), float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2)


@pytest.fixture
def one_kernel_call() -> Iterator[None]:
    """Force Hopper kernels, and check that exactly one forward of the test ran on a kernel."""
    bindings.counters(reset=True)
    with torch_flashplug.sdpa_backend("fa3"), torch.no_grad():
        yield
    counts = bindings.counters(reset=True)
    assert counts["ours_fwd"] == 1, counts


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def packed(x: Tensor) -> Tensor:
    return x.reshape(B * S, *x.shape[2:])


def starts(device: str) -> Tensor:
    return torch.arange(B + 1, dtype=torch.int32, device=device) * S


def flash_attn_packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    cu = starts(q.device)
    return flash_attn.flash_attn_varlen_func(packed(q), packed(k), packed(v), cu, cu, S, S, causal=True).view_as(q)


def torch_packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    cu = starts(q.device)
    settings = {"window_size": (-1, 0), "enable_gqa": True}
    return varlen_attn(packed(q), packed(k), packed(v), cu, cu, S, S, **settings).view_as(q)


def attention_packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(packed(q), packed(k), packed(v), causal=True, cu_seqlens_q=starts(q.device)).view_as(q)


ENTRIES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "sdpa": sdpa,
    "attention": lambda q, k, v: attention(q, k, v, causal=True),
    "attention_packed": attention_packed,
    "flash_attn": lambda q, k, v: flash_attn.flash_attn_func(q, k, v, causal=True),
    "flash_attn_packed": flash_attn_packed,
    "varlen_attn": torch_packed,
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_entries_of_wide_heads(kernels_on: str, one_kernel_call: None, entry: str) -> None:
    q, k, v = draw(kernels_on)
    with interpreted_kernels.installed_at(varlen_attn_hook, kernels_on):
        out = ENTRIES[entry](q, k, v)
    torch.testing.assert_close(out.double(), exact(q, k, v, causal=True), **TOLERANCE)


def test_gradients_of_varlen_attn_outside_of_the_block(kernels_on: str) -> None:
    """The backward of a forced forward runs on kernels, too: stock has no backward for such head dims."""
    q, k, v = (x.requires_grad_() for x in draw(kernels_on))
    bindings.counters(reset=True)
    with interpreted_kernels.installed_at(varlen_attn_hook, kernels_on):
        with torch_flashplug.sdpa_backend("fa3"):
            out = torch_packed(q, k, v)
        actual = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    assert bindings.counters(reset=True)["ours_bwd"] == 1
    expected = torch.autograd.grad(exact(q, k, v, causal=True).square().sum(), (q, k, v))
    for name, x, y in zip("qkv", actual, expected, strict=True):
        assert ((x.double() - y).norm() / y.norm()).item() < 2e-2, name


def test_varlen_attn_of_wide_heads_has_to_be_forced(kernels_on: str) -> None:
    """Auto mode leaves the call to torch, which raises its own error."""
    q, k, v = draw(kernels_on)
    with interpreted_kernels.installed_at(varlen_attn_hook, kernels_on), pytest.raises((RuntimeError, ValueError)):
        torch_packed(q, k, v)
    operands = (*map(packed, (q, k, v)), starts(kernels_on), starts(kernels_on), S, S)
    plan = torch_flashplug.explain_varlen(*operands, device="h100")
    assert plan.backend == "stock" and "head dims [512]" in str(plan.reasons)


def test_autocast_of_wide_heads(kernels_on: str, one_kernel_call: None) -> None:
    """F.sdpa of fp32 operands under autocast runs in the autocast dtype."""
    q, k, v = draw(kernels_on, torch.float32)
    with torch.autocast(kernels_on, torch.bfloat16):
        out = sdpa(q, k, v)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), exact(q, k, v, causal=True), **TOLERANCE)


def test_vmap_over_wide_heads(kernels_on: str, one_kernel_call: None) -> None:
    """The dim of vmap becomes part of the batch of one kernel call."""
    q, k, v = (torch.stack((x, x.flip(0))) for x in draw(kernels_on))
    out = torch.vmap(sdpa)(q, k, v)
    for i in range(2):
        torch.testing.assert_close(out[i].double(), exact(q[i], k[i], v[i], causal=True), **TOLERANCE)


def test_compiled_graph_of_wide_heads(kernels_on: str, one_kernel_call: None) -> None:
    q, k, v = draw(kernels_on)
    out = torch.compile(sdpa, fullgraph=True, backend="aot_eager")(q, k, v)
    torch.testing.assert_close(out.double(), exact(q, k, v, causal=True), **TOLERANCE)


def test_exported_program_of_wide_heads(kernels_on: str, one_kernel_call: None) -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return sdpa(q, k, v)

    q, k, v = draw(kernels_on)
    program = torch.export.export(Layer(), (q, k, v)).run_decompositions()
    torch.testing.assert_close(program.module()(q, k, v).double(), exact(q, k, v, causal=True), **TOLERANCE)
