"""Attention kernels on 8-bit keys and values with scales: results against fp64 of the dequantized cache.

The tests cover numbers of splits, head dims, lengths, scales and masks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from forced_splits import plan_of_forced_call
from torch import Tensor

from torch_flashplug.dispatch import bindings
from torch_flashplug.ops.quantize_reference import in_int8, rotate
from torch_flashplug.ops.quantized_kv import dequantized
from torch_flashplug.registry import kernel_table
from torch_flashplug.registry.dtypes import QUANTIZED_KV_DTYPES
from torch_flashplug.registry.kernel_spec import KernelSpec
from torch_flashplug.testing import new_case

SEED = 20261125
SPECS = [
    spec for spec in kernel_table.specs(80, "decode") if "cache8" in spec.features and "paged" not in spec.features
]
BY_FORMAT = pytest.mark.parametrize("kv", QUANTIZED_KV_DTYPES)
TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8, "e4m3": torch.float8_e4m3fn}
TORCH["e5m2"] = torch.float8_e5m2
NEAR = 5e-3  # relative, root mean square: P and O are rounded to bf16, a rotated query to the dtype of the query


@dataclass(frozen=True)
class CachedCall:
    """Call with query (B, Hq, Sq, D), 8-bit key and value, and scales (B, Hkv, Sk)."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_scale: Tensor
    v_scale: Tensor
    mask: Tensor | None = None
    rotated: bool = False

    def run(self, device: str) -> Tensor:
        """Return the output of a kernel."""
        tensors = [x.to(device) for x in (self.q, self.k, self.v, self.k_scale, self.v_scale)]
        bindings.counters(reset=True)
        mask = None if self.mask is None else self.mask.to(device)
        out = torch.ops.torch_flashplug.quantized_kv_fwd(*tensors, mask, self.rotated, None)
        assert bindings.counters(reset=True)["ours_fwd"] == 1
        return out.cpu()

    def reference(self) -> Tensor:
        """Return the reference output in fp64."""
        group = self.q.shape[1] // self.k.shape[1]
        k, v = (dequantized(x, s.double(), torch.float64) for x, s in ((self.k, self.k_scale), (self.v, self.v_scale)))
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


def make_cached_call(
    heads: tuple[int, int, int],
    seq: tuple[int, int],
    dims: tuple[int, int],
    dtypes: str = "bf16_int8",
    rotated: bool = False,
) -> CachedCall:
    (B, Hq, Hkv), (Sq, Sk), (D, Dv), (q, kv) = heads, seq, dims, dtypes.split("_")
    generator = torch.Generator().manual_seed(SEED + Sk)
    query = torch.randn(B, Hq, Sq, D, generator=generator).to(TORCH[q])
    key, value = (torch.randn(B, Hkv, Sk, size, generator=generator) for size in (D, Dv))
    (k, k_scale), (v, v_scale) = in_format(rotate(key) if rotated else key, kv), in_format(value, kv)
    return CachedCall(query, k, v, k_scale, v_scale, rotated=rotated)


def check_call(call: CachedCall, device: str, tolerance: float = NEAR) -> None:
    out, expected = call.run(device), call.reference()
    assert out.dtype == call.q.dtype and out.shape == expected.shape
    assert float((out.double() - expected).norm() / expected.norm()) < tolerance


@pytest.mark.parametrize("spec", SPECS, ids=KernelSpec.name)
def test_every_quantized_cache_kernel(kernels_on: str, spec: KernelSpec) -> None:
    """Calls are skipped if the table chooses a different kernel."""
    masked = "mask" in spec.features
    for Hq, Sq, Sk in ((4, 1, 300), (8, 1, 70), (40, 2, 129), (4, 1, 8192)):
        case = new_case(f"{spec.name()} {Hq}x{Sq}x{Sk}", (2, Hq, 2), (Sq, Sk), (spec.d, spec.dv), dtype=spec.dtype)
        plan = plan_of_forced_call(case, backend="fa2", cache8=1, **({"mask": 1} if masked else {}))
        if plan["kernel"] != spec.name() or (kernels_on == "cpu" and Sk > 500):
            continue
        call = make_cached_call((2, Hq, 2), (Sq, Sk), (spec.d, spec.dv), spec.dtype, rotated=Sk % 2 == 1)
        if masked:
            mask = torch.rand(2, 1, Sq, Sk, generator=torch.Generator().manual_seed(SEED)) < 0.4
            mask[..., 0] = True
            call = replace(call, mask=mask)
        check_call(call, kernels_on)


@BY_FORMAT
@pytest.mark.parametrize("dims", [(64, 64), (48, 16), (96, 112), (128, 128), (176, 208), (256, 256)])
def test_quantized_cache_with_different_head_dims(kernels_on: str, dims: tuple[int, int], kv: str) -> None:
    check_call(make_cached_call((1, 4, 2), (1, 130), dims, f"fp16_{kv}", rotated=kv == "int8"), kernels_on)


@BY_FORMAT
@pytest.mark.parametrize("Sk", [1, 2, 15, 16, 17, 63, 64, 65, 129, 515])
def test_quantized_cache_with_different_lengths(kernels_on: str, Sk: int, kv: str) -> None:
    check_call(make_cached_call((2, 6, 2), (1, Sk), (64, 64), f"bf16_{kv}"), kernels_on)


@pytest.mark.parametrize("rows", [(4, 1), (16, 1), (17, 1), (64, 1), (8, 4), (1, 50)])
def test_quantized_cache_with_packed_query_heads_and_queries(kernels_on: str, rows: tuple[int, int]) -> None:
    """The rows are query heads of a KV head, and queries."""
    group, Sq = rows
    check_call(make_cached_call((1, 2 * group, 2), (Sq, 200), (64, 64), rotated=True), kernels_on)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 200)])
def test_quantized_cache_with_broadcast_scales(kernels_on: str, shape: tuple[int, int, int]) -> None:
    call = make_cached_call((2, 4, 2), (1, 200), (64, 64))
    scales = (torch.rand(shape, generator=torch.Generator().manual_seed(i)).add(0.5) / 64 for i in range(2))
    check_call(CachedCall(call.q, call.k, call.v, *(scale.expand(2, 2, 200) for scale in scales)), kernels_on)


@BY_FORMAT
def test_quantized_cache_with_strided_views(kernels_on: str, kv: str) -> None:
    """Keys and values are stored with rows before heads, as a part of a longer buffer."""
    call = make_cached_call((2, 4, 2), (1, 300), (64, 64), f"bf16_{kv}")
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2)[:, :, :257] for x in (call.k, call.v))
    check_call(CachedCall(call.q, k, v, call.k_scale[..., :257], call.v_scale[..., :257]), kernels_on)


def test_keys_behind_the_last_key_are_not_read(kernels_on: str) -> None:
    call = make_cached_call((1, 4, 2), (1, 300), (64, 64), "bf16_e4m3")
    k, v, k_scale, v_scale = (x.clone() for x in (call.k, call.v, call.k_scale, call.v_scale))
    for x in (k, v):
        x.view(torch.uint8)[:, :, 200:] = 0x7F  # NaN
    for x in (k_scale, v_scale):
        x[..., 200:] = math.nan
    part = CachedCall(call.q, k[:, :, :200], v[:, :, :200], k_scale[..., :200], v_scale[..., :200])
    check_call(part, kernels_on)


@BY_FORMAT
def test_every_number_of_an_8_bit_format_is_exact(kernels_on: str, kv: str) -> None:
    """Each number, including NaN and infinities, is exact as the value of the only key."""
    numbers = torch.arange(256, dtype=torch.uint8).view(TORCH[kv]).view(4, 1, 1, 64)
    query, key = torch.ones(4, 1, 1, 64, dtype=torch.bfloat16), torch.zeros(4, 1, 1, 64, dtype=torch.uint8)
    ones = torch.ones(4, 1, 1)
    actual = CachedCall(query, key.view(TORCH[kv]), numbers, ones, ones).run(kernels_on).float()
    assert torch.equal(*(x.nan_to_num(1e9, 2e9, -2e9) for x in (actual, numbers.float())))
    # Second check: each number is the score of the second of two keys, and the value of this key is 1.
    keys = torch.zeros(4, 64, 2, 64, dtype=torch.uint8).view(TORCH[kv])
    keys[:, :, 1, :1] = numbers.view(4, 64, 1)
    values = torch.tensor([0.0, 1.0]).view(1, 1, 2, 1).expand(4, 64, 2, 64).to(TORCH[kv])
    scale = 2.0**-14 if kv == "e5m2" else 2.0**-8 if kv == "e4m3" else 2.0**-6
    scales = torch.full((4, 64, 2), scale * 8.0), torch.ones(4, 64, 2)
    actual = CachedCall(query.expand(4, 64, 1, 64), keys, values, *scales).run(kernels_on).float()[..., 0].view(4, 64)
    scores = numbers.double().view(4, 64) * scale
    expected = torch.stack((torch.zeros_like(scores), scores), -1).softmax(-1)[..., 1]
    assert torch.equal(actual.isnan(), expected.isnan())
    assert (actual.nan_to_num() - expected.nan_to_num()).abs().max() < 4e-3


def test_quantized_cache_with_large_and_small_scales(kernels_on: str) -> None:
    """Neither scale fits into fp16."""
    call = make_cached_call((1, 4, 2), (1, 200), (64, 64), "fp16_int8")
    check_call(replace(call, v_scale=call.v_scale * 2.0**-14), kernels_on, tolerance=1e-2)  # results are subnormal
    wide = {"q": call.q * 2.0**-10, "k_scale": call.k_scale * 2.0**10, "v_scale": call.v_scale * 2.0**8}
    check_call(replace(call, **wide), kernels_on)


@pytest.mark.gpu
def test_quantized_cache_with_many_keys() -> None:
    for Sk in (8192, 32768, 131072):
        call = make_cached_call((1, 8, 2), (1, Sk), (128, 128), rotated=True)
        check_call(call, "cuda")
