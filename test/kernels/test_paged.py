"""Attention on keys and values in pages, by kernels: numbers against fp64 of each sequence, of any lengths, pages and
windows, in 16 bits and 8; what no sequence has is not read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from torch_flashplug.dispatch import bindings
from torch_flashplug.ops.attention import Window
from torch_flashplug.ops.quantize_reference import in_int8
from torch_flashplug.registry import kernel_table
from torch_flashplug.registry.kernel_spec import KernelSpec
from torch_flashplug.testing import assert_bitwise_equal

SEED = 20261126
OP = torch.ops.torch_flashplug.paged_fwd
SPECS = [spec for spec in kernel_table.specs(80, "decode") if "paged" in spec.features]
IN_16, IN_8 = ([spec for spec in SPECS if ("cache8" in spec.features) == eight] for eight in (False, True))
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
HEADS = (8, 2)
NEAR, NEAR_LSE = 5e-3, 1e-3  # relative, root mean square; absolute
EVERYTHING = Window()


@dataclass(frozen=True)
class Call:
    """q (B, Hq, Sq, D); pools (pages, Hkv, rows, D), of 8 bits with scales; numbers (B, n); used (B,)."""

    q: Tensor
    k: Tensor
    v: Tensor
    numbers: Tensor
    used: Tensor
    scales: tuple[Tensor | None, Tensor | None] = (None, None)
    sinks: Tensor | None = None
    window: Window = field(default=EVERYTHING)
    softcap: float = 0.0
    split_size: int = 0

    def run(self, device: str) -> tuple[Tensor, Tensor]:
        """By a kernel."""
        given = (self.q, self.k, self.v, self.numbers, self.used, *self.scales, self.sinks)
        bindings.counters(reset=True)
        tensors = (None if x is None else x.to(device) for x in given)
        out, lse = OP(*tensors, *self.window, self.softcap, None, fixed_split_size=self.split_size)
        assert bindings.counters(reset=True)["ours_fwd"] == 1
        return out.cpu(), lse.cpu()

    def keys_of(self, which: str, batch: int) -> Tensor:
        """(Hkv, keys that count, D) fp64, as a pool says."""
        pool, scale = getattr(self, which), self.scales["kv".index(which)]
        pages = pool.double() if scale is None else pool.double() * scale.double().unsqueeze(-1)
        mine = pages[self.numbers[batch].long().clamp(0, len(pool) - 1)]
        return mine.transpose(0, 1).flatten(1, 2)[:, : self.used[batch]]

    def right(self) -> tuple[Tensor, Tensor]:
        """In fp64, sequence by sequence."""
        group, outs, lses = self.q.shape[1] // self.k.shape[1], [], []
        for batch in range(len(self.q)):
            k, v = (self.keys_of(which, batch).repeat_interleave(group, 0) for which in "kv")
            scores = self.q[batch].double() @ k.mT * self.q.shape[3] ** -0.5
            if self.softcap:
                scores = self.softcap * torch.tanh(scores / self.softcap)
            seen = self.window.seen(scores.shape[1], scores.shape[2], scores.device)
            scores = scores.masked_fill(~seen, -math.inf)
            if self.sinks is not None:
                logit = self.sinks.double().view(-1, 1, 1).expand(-1, scores.shape[1], 1)
                scores = torch.cat((scores, logit), -1)
            weights = scores.softmax(-1).nan_to_num()
            outs.append(weights[..., : v.shape[1]] @ v)
            lses.append(scores.logsumexp(-1))
        return torch.stack(outs), torch.stack(lses)


def drawn(
    used: tuple[int, ...], rows: int, dims: tuple[int, int] = (64, 64), *, Sq: int = 1, dtype=torch.bfloat16,
    heads: tuple[int, int] = HEADS, seed: int = SEED,
) -> Call:  # fmt: skip
    """Pages in any order, some of which nobody has; numbers behind those that count say anything."""
    draw = torch.Generator().manual_seed(seed)
    n = max(1, *(-(-count // rows) for count in used))
    pages = len(used) * n + 3
    numbers = torch.randperm(pages, generator=draw)[: len(used) * n].view(len(used), n).int()
    for i, count in enumerate(used):
        numbers[i, -(-count // rows) :] = (-1, 2**31 - 1)[i % 2]
    sizes = ((len(used), heads[0], Sq, dims[0]), (pages, heads[1], rows, dims[0]), (pages, heads[1], rows, dims[1]))
    tensors = [torch.randn(size, generator=draw).to(dtype) for size in sizes]
    return Call(*tensors, numbers, torch.tensor(used).int(), window=Window(-1, 0))


def in_8_bits(call: Call, kind: str) -> Call:
    """The pools of a call, in a format."""
    if kind == "int8":
        (k, k_scale), (v, v_scale) = (in_int8(x.float()) for x in (call.k, call.v))
    else:
        to = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[kind]
        k, v = ((x.float() / 2).to(to) for x in (call.k, call.v))
        k_scale = v_scale = torch.full(k.shape[:3], 2.0)
    return replace(call, k=k, v=v, scales=(k_scale, v_scale))


def check(call: Call, device: str) -> None:
    (out, lse), (right, of_keys) = call.run(device), call.right()
    assert out.isfinite().all()
    assert float((out.double() - right).norm() / right.norm().clamp(min=1e-9)) < NEAR
    torch.testing.assert_close(lse.double(), of_keys, rtol=0, atol=NEAR_LSE)


@pytest.mark.parametrize("spec", IN_16, ids=KernelSpec.name)
def test_every_kernel(kernels_on: str, spec: KernelSpec, kernel_alone: Callable[[KernelSpec], None]) -> None:
    kernel_alone(spec)
    call = drawn((70, 0, 129, 33), 16, (spec.d, spec.dv), Sq=1 if spec.tile_m == 16 else 5, dtype=DTYPES[spec.dtype])
    check(replace(call, softcap=3.0 if "softcap" in spec.features else 0.0), kernels_on)


@pytest.mark.parametrize("spec", IN_8, ids=KernelSpec.name)
def test_every_kernel_of_8_bits(
    kernels_on: str, spec: KernelSpec, kernel_alone: Callable[[KernelSpec], None]
) -> None:  # fmt: skip
    kernel_alone(spec)
    dtype, kind = spec.dtype.split("_")
    call = drawn((70, 0, 129, 33), 16, (spec.d, spec.dv), Sq=1 if spec.tile_m == 16 else 5, dtype=DTYPES[dtype])
    check(in_8_bits(call, kind), kernels_on)


@pytest.mark.parametrize("rows", [16, 32, 48, 64, 128, 256])
def test_pages_of_any_size(kernels_on: str, rows: int) -> None:
    check(drawn((rows - 1, rows, rows + 1, 1, 0, 3 * rows), rows, (128, 128)), kernels_on)


@pytest.mark.parametrize("rows", [1, 7, 100, 333])
def test_one_page_each_has_any_number_of_rows(kernels_on: str, rows: int) -> None:
    check(drawn((rows, max(rows - 1, 0), 0), rows), kernels_on)


@pytest.mark.parametrize("window", [(-1, 0), (0, 0), (15, 0), (63, 0), (64, 0), (100, 0), (40, 3), (-1, -1)], ids=str)
@pytest.mark.parametrize("Sq", [1, 3])
def test_windows(kernels_on: str, Sq: int, window: tuple[int, int]) -> None:
    call = drawn((200, 5, 65, 130), 16, Sq=Sq)
    check(replace(call, window=Window(*window)), kernels_on)
    check(replace(call, window=Window(*window), sinks=torch.tensor([-3.0, 0.0, 2.0, 50.0] * 2)), kernels_on)


def test_many_splits_and_one(kernels_on: str) -> None:
    """One sequence's keys among many CTAs, many sequences a CTA each; with sinks, which are of one sum."""
    sinks = torch.randn(8, generator=torch.Generator().manual_seed(1))
    for used in ((3000,), tuple(range(20, 60))):
        check(replace(drawn(used, 32, heads=(8, 8)), sinks=sinks), kernels_on)


LENGTHS_OF_SPLITS = (0, 1, 127, 128, 129, 256, 300)


@pytest.mark.parametrize("window", [(-1, 0), (40, 3), (200, 0), (-1, -1)], ids=str)
@pytest.mark.parametrize("Sq", [1, 3])
@pytest.mark.parametrize("beside", ["", "softcap", "sinks", "int8"])
def test_splits_of_a_size(kernels_on: str, beside: str, Sq: int, window: tuple[int, int]) -> None:
    """Of lengths around its multiples; no key is left out."""
    call = replace(drawn(LENGTHS_OF_SPLITS, 16, Sq=Sq), window=Window(*window), split_size=128)
    changed = {"softcap": {"softcap": 3.0}, "sinks": {"sinks": torch.tensor([-3.0, 0.0, 2.0, 50.0] * 2)}}
    check(in_8_bits(call, "int8") if beside == "int8" else replace(call, **changed.get(beside, {})), kernels_on)


def test_a_size_that_nobody_has_twice(kernels_on: str) -> None:
    check(replace(drawn(LENGTHS_OF_SPLITS, 16), split_size=2**40), kernels_on)


def test_sizes_that_are_none(kernels_on: str) -> None:
    for size, says in (
        (-128, "fixed_split_size=-128 with num_splits=0 is not valid"),
        (100, "in multiples of 128"),
        (128, "makes 256 splits of"),
    ):
        call = replace(drawn((255 * 128 + 16,) if size == 128 else (16,), 16), split_size=size)
        with pytest.raises(RuntimeError, match=says):
            call.run(kernels_on)


def test_all_pages_the_same(kernels_on: str) -> None:
    call = drawn((100, 48), 16)
    check(replace(call, numbers=torch.zeros_like(call.numbers)), kernels_on)


@pytest.mark.parametrize("kind", ["", "int8"])
def test_what_no_sequence_has_is_not_read(kernels_on: str, kind: str) -> None:
    """NaN in pages of nobody, and behind the keys that count."""
    call = drawn((70, 0, 129, 33), 16)
    call = in_8_bits(call, kind) if kind else call
    clean = call.run(kernels_on)
    poisoned = {name: (call.scales["kv".index(name)] if kind else getattr(call, name)).clone() for name in "kv"}
    has = torch.zeros(call.k.shape[0], call.k.shape[2], dtype=torch.bool)
    for numbers, count in zip(call.numbers.tolist(), call.used.tolist(), strict=True):
        for key in range(count):
            has[numbers[key // 16], key % 16] = True
    for x in poisoned.values():
        x.transpose(1, 2)[~has] = math.nan
    changed = {"scales": tuple(poisoned.values())} if kind else poisoned
    for got, one in zip(replace(call, **changed).run(kernels_on), clean, strict=True):
        assert_bitwise_equal("poisoned", got, one)


def test_pools_of_any_strides(kernels_on: str) -> None:
    """(pages, rows, Hkv, D) in memory, K and V beside each other."""
    call = drawn((70, 33), 16)
    both = torch.stack((call.k, call.v), -2).permute(0, 2, 1, 3, 4).contiguous()
    k, v = (both[..., i, :].transpose(1, 2) for i in range(2))
    check(replace(call, k=k, v=v), kernels_on)


def test_more_rows_are_gathered() -> None:
    """By the mathematics of sequences on end here."""
    call = drawn((70, 0, 129), 16, Sq=40, dtype=torch.float32)
    given = (call.q, call.k, call.v, call.numbers, call.used, None, None, None)
    out, lse = OP(*given, *call.window, 0.0, None)
    right, of_keys = call.right()
    torch.testing.assert_close(out.double(), right, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), of_keys, rtol=1e-5, atol=1e-5)
