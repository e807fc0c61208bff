"""Attention on key and value in 8 bits with scales, by kernels: numbers against fp64 of what the cache says, in any
number of splits, of any head dims, lengths, scales and masks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from splits import planned
from torch import Tensor

from torch_flashplug.dispatch import bindings
from torch_flashplug.ops.quantize_reference import in_int8, rotate
from torch_flashplug.ops.quantized_kv import dequantised
from torch_flashplug.registry import kernel_table
from torch_flashplug.registry.dtypes import FORMATS
from torch_flashplug.registry.kernel_spec import KernelSpec
from torch_flashplug.testing import new_case

SEED = 20261125
SPECS = [
    spec for spec in kernel_table.specs(80, "decode") if "cache8" in spec.features and "paged" not in spec.features
]
BY_FORMAT = pytest.mark.parametrize("kv", FORMATS)
TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8, "e4m3": torch.float8_e4m3fn}
TORCH["e5m2"] = torch.float8_e5m2
NEAR = 5e-3  # relative, root mean square: P and O in bf16, a rotated query in the query's


@dataclass(frozen=True)
class Cached:
    """A call: query (B, Hq, Sq, D), key and value in 8 bits, scales (B, Hkv, Sk)."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_scale: Tensor
    v_scale: Tensor
    mask: Tensor | None = None
    rotated: bool = False

    def run(self, device: str) -> Tensor:
        """By a kernel."""
        tensors = [x.to(device) for x in (self.q, self.k, self.v, self.k_scale, self.v_scale)]
        bindings.counters(reset=True)
        mask = None if self.mask is None else self.mask.to(device)
        out = torch.ops.torch_flashplug.cached_fwd(*tensors, mask, self.rotated, None)
        assert bindings.counters(reset=True)["ours_fwd"] == 1
        return out.cpu()

    def right(self) -> Tensor:
        """In fp64."""
        group = self.q.shape[1] // self.k.shape[1]
        k, v = (dequantised(x, s.double(), torch.float64) for x, s in ((self.k, self.k_scale), (self.v, self.v_scale)))
        q = rotate(self.q.float()) if self.rotated else self.q
        scores = q.double() @ k.repeat_interleave(group, 1).mT * self.q.shape[3] ** -0.5
        if self.mask is not None:
            scores = scores.masked_fill(~self.mask, -math.inf)
        return scores.softmax(-1).nan_to_num() @ v.repeat_interleave(group, 1)


def in_format(x: Tensor, kv: str) -> tuple[Tensor, Tensor]:
    if kv == "int8":
        return in_int8(x)
    scale = x.abs().amax(-1) / torch.finfo(TORCH[kv]).max
    return (x / scale.unsqueeze(-1)).to(TORCH[kv]), scale


def drawn(
    heads: tuple[int, int, int],
    seq: tuple[int, int],
    dims: tuple[int, int],
    of: str = "bf16_int8",
    rotated: bool = False,
) -> Cached:
    (B, Hq, Hkv), (Sq, Sk), (D, Dv), (q, kv) = heads, seq, dims, of.split("_")
    generator = torch.Generator().manual_seed(SEED + Sk)
    query = torch.randn(B, Hq, Sq, D, generator=generator).to(TORCH[q])
    key, value = (torch.randn(B, Hkv, Sk, size, generator=generator) for size in (D, Dv))
    (k, k_scale), (v, v_scale) = in_format(rotate(key) if rotated else key, kv), in_format(value, kv)
    return Cached(query, k, v, k_scale, v_scale, rotated=rotated)


def check(call: Cached, device: str, near: float = NEAR) -> None:
    out, right = call.run(device), call.right()
    assert out.dtype == call.q.dtype and out.shape == right.shape
    assert float((out.double() - right).norm() / right.norm()) < near


@pytest.mark.parametrize("spec", SPECS, ids=KernelSpec.name)
def test_every_kernel(kernels_on: str, spec: KernelSpec) -> None:
    """Where the table gives it a call."""
    masked = "mask" in spec.features
    for Hq, Sq, Sk in ((4, 1, 300), (8, 1, 70), (40, 2, 129), (4, 1, 8192)):
        case = new_case(f"{spec.name()} {Hq}x{Sq}x{Sk}", (2, Hq, 2), (Sq, Sk), (spec.d, spec.dv), dtype=spec.dtype)
        plan = planned(case, backend="fa2", cache8=1, **({"mask": 1} if masked else {}))
        if plan["kernel"] != spec.name() or (kernels_on == "cpu" and Sk > 500):
            continue
        call = drawn((2, Hq, 2), (Sq, Sk), (spec.d, spec.dv), spec.dtype, rotated=Sk % 2 == 1)
        if masked:
            seen = torch.rand(2, 1, Sq, Sk, generator=torch.Generator().manual_seed(SEED)) < 0.4
            seen[..., 0] = True
            call = replace(call, mask=seen)
        check(call, kernels_on)


@BY_FORMAT
@pytest.mark.parametrize("dims", [(64, 64), (48, 16), (96, 112), (128, 128), (176, 208), (256, 256)])
def test_head_dims(kernels_on: str, dims: tuple[int, int], kv: str) -> None:
    check(drawn((1, 4, 2), (1, 130), dims, f"fp16_{kv}", rotated=kv == "int8"), kernels_on)


@BY_FORMAT
@pytest.mark.parametrize("Sk", [1, 2, 15, 16, 17, 63, 64, 65, 129, 515])
def test_lengths(kernels_on: str, Sk: int, kv: str) -> None:
    check(drawn((2, 6, 2), (1, Sk), (64, 64), f"bf16_{kv}"), kernels_on)


@pytest.mark.parametrize("rows", [(4, 1), (16, 1), (17, 1), (64, 1), (8, 4), (1, 50)])
def test_rows(kernels_on: str, rows: tuple[int, int]) -> None:
    """Query heads of one KV head, and queries."""
    group, Sq = rows
    check(drawn((1, 2 * group, 2), (Sq, 200), (64, 64), rotated=True), kernels_on)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 200)])
def test_scales_are_broadcast(kernels_on: str, shape: tuple[int, int, int]) -> None:
    call = drawn((2, 4, 2), (1, 200), (64, 64))
    scales = (torch.rand(shape, generator=torch.Generator().manual_seed(i)).add(0.5) / 64 for i in range(2))
    check(Cached(call.q, call.k, call.v, *(scale.expand(2, 2, 200) for scale in scales)), kernels_on)


@BY_FORMAT
def test_strides(kernels_on: str, kv: str) -> None:
    """Rows before heads, and a part of a longer buffer."""
    call = drawn((2, 4, 2), (1, 300), (64, 64), f"bf16_{kv}")
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2)[:, :, :257] for x in (call.k, call.v))
    check(Cached(call.q, k, v, call.k_scale[..., :257], call.v_scale[..., :257]), kernels_on)


def test_what_lies_behind_the_last_key_is_not_read(kernels_on: str) -> None:
    call = drawn((1, 4, 2), (1, 300), (64, 64), "bf16_e4m3")
    k, v, k_scale, v_scale = (x.clone() for x in (call.k, call.v, call.k_scale, call.v_scale))
    for x in (k, v):
        x.view(torch.uint8)[:, :, 200:] = 0x7F  # NaN
    for x in (k_scale, v_scale):
        x[..., 200:] = math.nan
    part = Cached(call.q, k[:, :, :200], v[:, :, :200], k_scale[..., :200], v_scale[..., :200])
    check(part, kernels_on)


@BY_FORMAT
def test_every_number_of_a_format(kernels_on: str, kv: str) -> None:
    """As the value of the only key: exact, NaN and infinities too."""
    numbers = torch.arange(256, dtype=torch.uint8).view(TORCH[kv]).view(4, 1, 1, 64)
    query, key = torch.ones(4, 1, 1, 64, dtype=torch.bfloat16), torch.zeros(4, 1, 1, 64, dtype=torch.uint8)
    ones = torch.ones(4, 1, 1)
    got = Cached(query, key.view(TORCH[kv]), numbers, ones, ones).run(kernels_on).float()
    assert torch.equal(*(x.nan_to_num(1e9, 2e9, -2e9) for x in (got, numbers.float())))
    # And as the score of the second of two keys, whose value is 1.
    keys = torch.zeros(4, 64, 2, 64, dtype=torch.uint8).view(TORCH[kv])
    keys[:, :, 1, :1] = numbers.view(4, 64, 1)
    values = torch.tensor([0.0, 1.0]).view(1, 1, 2, 1).expand(4, 64, 2, 64).to(TORCH[kv])
    scale = 2.0**-14 if kv == "e5m2" else 2.0**-8 if kv == "e4m3" else 2.0**-6
    scales = torch.full((4, 64, 2), scale * 8.0), torch.ones(4, 64, 2)
    got = Cached(query.expand(4, 64, 1, 64), keys, values, *scales).run(kernels_on).float()[..., 0].view(4, 64)
    scores = numbers.double().view(4, 64) * scale
    right = torch.stack((torch.zeros_like(scores), scores), -1).softmax(-1)[..., 1]
    assert torch.equal(got.isnan(), right.isnan())
    assert (got.nan_to_num() - right.nan_to_num()).abs().max() < 4e-3


def test_large_and_small_scales(kernels_on: str) -> None:
    """In fp16, which has no room for either."""
    call = drawn((1, 4, 2), (1, 200), (64, 64), "fp16_int8")
    check(replace(call, v_scale=call.v_scale * 2.0**-14), kernels_on, near=1e-2)  # results are subnormal
    wide = {"q": call.q * 2.0**-10, "k_scale": call.k_scale * 2.0**10, "v_scale": call.v_scale * 2.0**8}
    check(replace(call, **wide), kernels_on)


@pytest.mark.gpu
def test_long_caches() -> None:
    for Sk in (8192, 32768, 131072):
        call = drawn((1, 8, 2), (1, Sk), (128, 128), rotated=True)
        check(call, "cuda")
