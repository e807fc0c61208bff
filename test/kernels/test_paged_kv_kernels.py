"""Attention kernels on paged KV caches: results against fp64 of each sequence, in 16 bits and in 8 bits.

The tests cover lengths, page sizes and windows. Keys that belong to no sequence are not read.
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
SPECS = [spec for spec in kernel_table.specs(80, "decode") if spec.features & {"paged", "balanced"} == {"paged"}]
IN_16, IN_8 = ([spec for spec in SPECS if ("cache8" in spec.features) == eight] for eight in (False, True))
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
HEADS = (8, 2)
NEAR, NEAR_LSE = 5e-3, 1e-3  # relative, root mean square; absolute
EVERYTHING = Window()


@dataclass(frozen=True)
class PagedCall:
    """Call with a paged KV cache.

    Shapes: q (B, Hq, Sq, D); pages (num_pages, Hkv, rows, D), in 8 bits with scales; block table (B, n); KV lengths
    (B,).
    """

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
        """Return output and LSE of a kernel."""
        operands = (self.q, self.k, self.v, self.numbers, self.used, *self.scales, self.sinks)
        bindings.counters(reset=True)
        tensors = (None if x is None else x.to(device) for x in operands)
        out, lse = OP(*tensors, *self.window, self.softcap, None, fixed_split_size=self.split_size)
        assert bindings.counters(reset=True)["ours_fwd"] == 1
        return out.cpu(), lse.cpu()

    def keys_of(self, which: str, batch: int) -> Tensor:
        """Return the visible keys or values of a sequence, (Hkv, KV length, D), as stored in the pages, in fp64."""
        pool, scale = getattr(self, which), self.scales["kv".index(which)]
        pages = pool.double() if scale is None else pool.double() * scale.double().unsqueeze(-1)
        pages_of_sequence = pages[self.numbers[batch].long().clamp(0, len(pool) - 1)]
        return pages_of_sequence.transpose(0, 1).flatten(1, 2)[:, : self.used[batch]]

    def reference(self) -> tuple[Tensor, Tensor]:
        """Return output and LSE in fp64, computed for each sequence."""
        group, outs, lses = self.q.shape[1] // self.k.shape[1], [], []
        for batch in range(len(self.q)):
            k, v = (self.keys_of(which, batch).repeat_interleave(group, 0) for which in "kv")
            scores = self.q[batch].double() @ k.mT * self.q.shape[3] ** -0.5
            if self.softcap:
                scores = self.softcap * torch.tanh(scores / self.softcap)
            visible = self.window.to_mask(scores.shape[1], scores.shape[2], scores.device)
            scores = scores.masked_fill(~visible, -math.inf)
            if self.sinks is not None:
                logit = self.sinks.double().view(-1, 1, 1).expand(-1, scores.shape[1], 1)
                scores = torch.cat((scores, logit), -1)
            weights = scores.softmax(-1).nan_to_num()
            outs.append(weights[..., : v.shape[1]] @ v)
            lses.append(scores.logsumexp(-1))
        return torch.stack(outs), torch.stack(lses)


def make_paged_call(
    used: tuple[int, ...], rows: int, dims: tuple[int, int] = (64, 64), *, Sq: int = 1, dtype=torch.bfloat16,
    heads: tuple[int, int] = HEADS, seed: int = SEED,
) -> PagedCall:  # fmt: skip
    """Return a random call.

    Pages are in random order, and some belong to no sequence. Block table entries behind the KV length are invalid
    numbers.
    """
    draw = torch.Generator().manual_seed(seed)
    n = max(1, *(-(-count // rows) for count in used))
    pages = len(used) * n + 3
    numbers = torch.randperm(pages, generator=draw)[: len(used) * n].view(len(used), n).int()
    for i, count in enumerate(used):
        numbers[i, -(-count // rows) :] = (-1, 2**31 - 1)[i % 2]
    sizes = ((len(used), heads[0], Sq, dims[0]), (pages, heads[1], rows, dims[0]), (pages, heads[1], rows, dims[1]))
    tensors = [torch.randn(size, generator=draw).to(dtype) for size in sizes]
    return PagedCall(*tensors, numbers, torch.tensor(used).int(), window=Window(-1, 0))


def quantize_cache(call: PagedCall, kind: str) -> PagedCall:
    """Return the call with pages in an 8-bit format."""
    if kind == "int8":
        (k, k_scale), (v, v_scale) = (in_int8(x.float()) for x in (call.k, call.v))
    else:
        to = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[kind]
        k, v = ((x.float() / 2).to(to) for x in (call.k, call.v))
        k_scale = v_scale = torch.full(k.shape[:3], 2.0)
    return replace(call, k=k, v=v, scales=(k_scale, v_scale))


def check_call(call: PagedCall, device: str) -> None:
    (out, lse), (expected_out, expected_lse) = call.run(device), call.reference()
    assert out.isfinite().all()
    assert float((out.double() - expected_out).norm() / expected_out.norm().clamp(min=1e-9)) < NEAR
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=NEAR_LSE)


@pytest.mark.parametrize("spec", IN_16, ids=KernelSpec.name)
def test_every_16_bit_paged_kernel(
    kernels_on: str, spec: KernelSpec, kernel_alone: Callable[[KernelSpec], None]
) -> None:
    kernel_alone(spec)
    call = make_paged_call(
        (70, 0, 129, 33), 16, (spec.d, spec.dv), Sq=1 if spec.tile_m == 16 else 5, dtype=DTYPES[spec.dtype]
    )
    check_call(replace(call, softcap=3.0 if "softcap" in spec.features else 0.0), kernels_on)


@pytest.mark.parametrize("spec", IN_8, ids=KernelSpec.name)
def test_every_8_bit_paged_kernel(
    kernels_on: str, spec: KernelSpec, kernel_alone: Callable[[KernelSpec], None]
) -> None:  # fmt: skip
    kernel_alone(spec)
    dtype, kind = spec.dtype.split("_")
    call = make_paged_call(
        (70, 0, 129, 33), 16, (spec.d, spec.dv), Sq=1 if spec.tile_m == 16 else 5, dtype=DTYPES[dtype]
    )
    check_call(quantize_cache(call, kind), kernels_on)


@pytest.mark.parametrize("rows", [16, 32, 48, 64, 128, 256])
def test_pages_of_different_sizes(kernels_on: str, rows: int) -> None:
    check_call(make_paged_call((rows - 1, rows, rows + 1, 1, 0, 3 * rows), rows, (128, 128)), kernels_on)


@pytest.mark.parametrize("rows", [1, 7, 100, 333])
def test_single_page_per_sequence_with_any_number_of_rows(kernels_on: str, rows: int) -> None:
    check_call(make_paged_call((rows, max(rows - 1, 0), 0), rows), kernels_on)


@pytest.mark.parametrize("window", [(-1, 0), (0, 0), (15, 0), (63, 0), (64, 0), (100, 0), (40, 3), (-1, -1)], ids=str)
@pytest.mark.parametrize("Sq", [1, 3])
def test_paged_cache_with_windows_and_sinks(kernels_on: str, Sq: int, window: tuple[int, int]) -> None:
    call = make_paged_call((200, 5, 65, 130), 16, Sq=Sq)
    check_call(replace(call, window=Window(*window)), kernels_on)
    check_call(replace(call, window=Window(*window), sinks=torch.tensor([-3.0, 0.0, 2.0, 50.0] * 2)), kernels_on)


def test_one_long_sequence_and_many_short_sequences(kernels_on: str) -> None:
    """The keys of one sequence are split among many CTAs; then many sequences have a single CTA each.

    A sink is added to a single sum.
    """
    sinks = torch.randn(8, generator=torch.Generator().manual_seed(1))
    for used in ((3000,), tuple(range(20, 60))):
        check_call(replace(make_paged_call(used, 32, heads=(8, 8)), sinks=sinks), kernels_on)


LENGTHS_OF_SPLITS = (0, 1, 127, 128, 129, 256, 300)


@pytest.mark.parametrize("window", [(-1, 0), (40, 3), (200, 0), (-1, -1)], ids=str)
@pytest.mark.parametrize("Sq", [1, 3])
@pytest.mark.parametrize("option", ["", "softcap", "sinks", "int8"])
def test_splits_of_a_fixed_size(kernels_on: str, option: str, Sq: int, window: tuple[int, int]) -> None:
    """Lengths surround the multiples of the split size; no key is left out."""
    call = replace(make_paged_call(LENGTHS_OF_SPLITS, 16, Sq=Sq), window=Window(*window), split_size=128)
    changed = {"softcap": {"softcap": 3.0}, "sinks": {"sinks": torch.tensor([-3.0, 0.0, 2.0, 50.0] * 2)}}
    check_call(
        quantize_cache(call, "int8") if option == "int8" else replace(call, **changed.get(option, {})), kernels_on
    )


def test_split_size_above_all_lengths(kernels_on: str) -> None:
    check_call(replace(make_paged_call(LENGTHS_OF_SPLITS, 16), split_size=2**40), kernels_on)


def test_invalid_split_sizes_raise(kernels_on: str) -> None:
    for size, message in (
        (-128, "fixed_split_size=-128 with num_splits=0 is not valid"),
        (100, "in multiples of 128"),
        (128, "makes 256 splits of"),
    ):
        call = replace(make_paged_call((255 * 128 + 16,) if size == 128 else (16,), 16), split_size=size)
        with pytest.raises(RuntimeError, match=message):
            call.run(kernels_on)


def test_all_sequences_share_one_page(kernels_on: str) -> None:
    call = make_paged_call((100, 48), 16)
    check_call(replace(call, numbers=torch.zeros_like(call.numbers)), kernels_on)


@pytest.mark.parametrize("kind", ["", "int8"])
def test_unused_pages_and_keys_are_not_read(kernels_on: str, kind: str) -> None:
    """Unused pages and keys behind the KV length are NaN."""
    call = make_paged_call((70, 0, 129, 33), 16)
    call = quantize_cache(call, kind) if kind else call
    clean = call.run(kernels_on)
    poisoned = {name: (call.scales["kv".index(name)] if kind else getattr(call, name)).clone() for name in "kv"}
    is_used = torch.zeros(call.k.shape[0], call.k.shape[2], dtype=torch.bool)
    for numbers, count in zip(call.numbers.tolist(), call.used.tolist(), strict=True):
        for key in range(count):
            is_used[numbers[key // 16], key % 16] = True
    for x in poisoned.values():
        x.transpose(1, 2)[~is_used] = math.nan
    changed = {"scales": tuple(poisoned.values())} if kind else poisoned
    for actual, expected in zip(replace(call, **changed).run(kernels_on), clean, strict=True):
        assert_bitwise_equal("poisoned", actual, expected)


def test_pages_with_interleaved_keys_and_values(kernels_on: str) -> None:
    """Memory is laid out (pages, rows, Hkv, D), with K and V of a row next to each other."""
    call = make_paged_call((70, 33), 16)
    cache = torch.stack((call.k, call.v), -2).permute(0, 2, 1, 3, 4).contiguous()
    k, v = (cache[..., i, :].transpose(1, 2) for i in range(2))
    check_call(replace(call, k=k, v=v), kernels_on)


def test_many_query_rows_use_the_reference_math() -> None:
    """The reference math of packed sequences serves such calls on a CPU."""
    call = make_paged_call((70, 0, 129), 16, Sq=40, dtype=torch.float32)
    operands = (call.q, call.k, call.v, call.numbers, call.used, None, None, None)
    out, lse = OP(*operands, *call.window, 0.0, None)
    expected_out, expected_lse = call.reference()
    torch.testing.assert_close(out.double(), expected_out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)
