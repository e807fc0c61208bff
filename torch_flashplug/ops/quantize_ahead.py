"""The ops quantize_kv and quantized_attention_fwd: key and value that are quantized once and used by several calls.

The file has the schemas, the layout of quantized key and value in memory, the fake and autograd rules, and the
reference math on any device. The kernels are called in src/ops/quantized_ops.cpp. A kernel that quantizes its own
operands does the same work in two parts, so that the results have the same bits.

The scale of a block of keys belongs to the tile of a kernel. All kernels of a recipe and of head dims, with a causal
mask or without, have blocks of the same size (`KvLayout.select`).
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..registry.dispatch_table import HEAD_DIM_STEP
from ..registry.kernel_table import KERNEL_ROWS
from ..registry.quant_recipes import KEY_ORDER, RECIPES, WORKSPACE_ALIGNMENT, describe, precision_number
from . import quantize_reference
from .quantized_kv import no_gradient
from .sdpa import CAUSAL_NONE, CAUSAL_TOP_LEFT, empty_in_layout_of, mathematics, namespace

_ARCH = 90  # architecture of the kernels that multiply 8-bit numbers
_WORD = torch.int32
_PLANNED_UNIT = 16  # rows of so many 16-bit elements are whole sectors
_NAMES = tuple(RECIPES)
_DTYPES = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)

_library = torch.library.Library("torch_flashplug", "FRAGMENT")
for _name in ("quantize_kv", "_quantize_kv_math"):
    _library.define(f"{_name}(Tensor key, Tensor value, int precision) -> Tensor", tags=_TAGS)
for _name, _int in (("quantized_attention_fwd", "SymInt"), ("_quantized_attention_math", "int")):
    _library.define(
        f"{_name}(Tensor query, Tensor quantized_kv, Tensor key_samples, Tensor? value, {_int} keys, {_int} value_dim, "
        "int precision, bool is_causal, float? scale) -> (Tensor out, Tensor lse)",
        tags=_TAGS,
    )


class Part(NamedTuple):
    """A tensor within quantized key and value."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def words(self) -> int:
        """Number of 32-bit words up to the next part."""
        num_bytes = math.prod(self.shape) * self.dtype.itemsize
        return -(-num_bytes // WORKSPACE_ALIGNMENT) * (WORKSPACE_ALIGNMENT // _WORD.itemsize)


class KvLayout(NamedTuple):
    """Layout of quantized key and value: the recipe, and the padded head dims and the block size of the kernel.

    kernels/features/quantized_qkv.py writes and reads the layout.
    """

    recipe: str
    d: int
    dv: int
    block: int

    @staticmethod
    @functools.cache
    def select(precision: int, D: int, Dv: int) -> KvLayout | None:
        """Return the layout for a recipe number and head dims; None if no kernel has such head dims."""
        recipe = _NAMES[precision - 1]
        rows = [row for row in KERNEL_ROWS if (row.kind, row.arch) == ("fwd", _ARCH) and recipe in row.features]
        fitting = [row for row in rows if row.d_max >= D and row.dv_max >= Dv]
        if not fitting or D % HEAD_DIM_STEP or Dv % HEAD_DIM_STEP:
            return None
        row = fitting[0]  # the rows are in the order of their head dims
        return KvLayout(recipe, row.d_max, row.dv_max, row.tile_n)

    def parts(self, B: int, Hkv: int, Sk: int, Dv: int) -> tuple[Part, ...]:
        """Return the parts in memory order."""
        recipe = RECIPES[self.recipe]
        scales = Part("k_scale", torch.float32, (B, Hkv, -(-Sk // self.block)))
        parts = (Part("k", _DTYPES[recipe.scores], (B, Hkv, Sk, self.d)), scales)
        if recipe.values is None:
            return parts
        padded = -(-Sk // len(KEY_ORDER)) * len(KEY_ORDER)
        channels = (Part(name, torch.float32, (B, Hkv, self.dv)) for name in ("v_scale", "v_mean"))
        return parts[0], Part("v", _DTYPES[recipe.values], (B, Hkv, Dv, padded)), scales, *channels

    def words(self, *sizes: int) -> int:
        """Return the number of 32-bit words for the sizes (B, Hkv, Sk, Dv)."""
        return sum(part.words for part in self.parts(*sizes))

    def views(self, quantized_kv: Tensor, *sizes: int) -> dict[str, Tensor]:
        """Return views of the parts by name."""
        views, start = {}, 0
        for part in self.parts(*sizes):
            num_words = math.prod(part.shape) * part.dtype.itemsize
            memory = quantized_kv[start : start + part.words].view(torch.int8)
            views[part.name] = memory[:num_words].view(part.dtype).view(part.shape)
            start += part.words
        return views


class QuantizedKV(NamedTuple):
    """Key and value in 8 bits: the result of `quantize_kv()`, in place of `k` and `v` of `attention()`.

    The tensors are in the layout that kernels read. B is the batch size, Hkv the number of KV heads, Sk the length, and
    D and Dv are the head dims of key and value.
    """

    quantized: Tensor  # (n,) int32: key, value and scales in 8 bits and fp32 (`parts`)
    key_samples: Tensor  # (B, Hkv, keys, D): sampled keys in 16 bits, for the row shifts of queries
    value: Tensor | None  # (B, Hkv, Sk, Dv) in 16 bits where the recipe keeps values in 16 bits, else None
    Sk: int
    Dv: int
    precision: str  # name of the recipe: "qk8", "8bit" or "e4m3"

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensors that were quantized, and of queries."""
        return self.key_samples.dtype

    @property
    def device(self) -> torch.device:
        return self.key_samples.device

    @property
    def key_shape(self) -> tuple[int, int, int, int]:
        """Shape (B, Sk, Hkv, D) of the key, as `attention()` takes keys."""
        B, Hkv, _, D = self.key_samples.shape
        return B, self.Sk, Hkv, D

    @property
    def parts(self) -> dict[str, Tensor]:
        """Views of the quantized tensors.

        "k" is (B, Hkv, Sk, d), with keys shifted and rotated, and with d at least D. "k_scale" is (B, Hkv, blocks of
        keys). With 8-bit values, "v" is (B, Hkv, Dv, Sk rounded up to 16) with keys in the order of the kernels,
        and "v_scale" and "v_mean" are (B, Hkv, dv), with dv at least Dv.
        """
        B, Sk, Hkv, D = self.key_shape
        layout = KvLayout.select(precision_number(self.precision), D, self.Dv)
        return layout.views(self.quantized, B, Hkv, Sk, self.Dv)

    def __repr__(self) -> str:
        return f"QuantizedKV({self.key_shape}, Dv={self.Dv}, {describe(self.precision)}, device={self.device})"


def planned_head_dims(D: int, Dv: int) -> tuple[int, int]:
    """Return the head dims by which a kernel is selected: whole units of 16 (`plan_recipe` in quantized_ops.cpp)."""
    return tuple(-(-dim // _PLANNED_UNIT) * _PLANNED_UNIT for dim in (D, Dv))


def sampled_keys(key: Tensor) -> Tensor:
    """Return a copy of a key (B, Hkv, Sk, D) that has the same samples, with at most `SAMPLED_KEYS` keys.

    The copy of a longer key has the sampled rows at the positions that are sampled of so many keys, and zeros between.
    """
    if key.shape[2] <= quantize_reference.SAMPLED_KEYS:
        return key.clone(memory_format=torch.contiguous_format)
    return quantize_reference.spread_samples(key)


# ---- shapes ----


def _layout(precision: int, D: int, Dv: int) -> KvLayout:
    torch._check(
        1 <= precision <= len(RECIPES),
        lambda: f"quantize_kv: precision must be the number of a recipe, 1 to {len(RECIPES)}, but got {precision}.",
    )
    layout = KvLayout.select(precision, int(D), int(Dv))
    torch._check(
        layout is not None,
        lambda: f"quantize_kv: head dims must be multiples of {HEAD_DIM_STEP} up to 256, but got {D} and {Dv}.",
    )
    return layout


def _quantize_fake(key: Tensor, value: Tensor, precision: int) -> Tensor:
    B, Hkv, Sk, D = key.shape
    Dv = value.shape[3]
    return key.new_empty(_layout(precision, D, Dv).words(B, Hkv, Sk, Dv), dtype=_WORD)


def _attention_fake(
    query: Tensor, quantized_kv: Tensor, key_samples: Tensor, value: Tensor | None, keys: int, value_dim: int,
    *settings: object,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows = query.shape[:3]
    return empty_in_layout_of(query, (*rows, value_dim)), query.new_empty(rows, dtype=torch.float32)


# ---- reference math ----


@mathematics
def _quantize(key: Tensor, value: Tensor, precision: int) -> Tensor:
    """Quantize key and value in torch, in the layout of the kernels."""
    (B, Hkv, Sk, D), Dv = key.shape, value.shape[3]
    layout = _layout(precision, D, Dv)
    padded = F.pad(key, (0, layout.d - D))
    operands = quantize_reference.quantize(padded[:, :, :0], padded, value, RECIPES[layout.recipe], layout.block)
    quantized_kv = torch.zeros(layout.words(B, Hkv, Sk, Dv), dtype=_WORD, device=key.device)
    for name, part in layout.views(quantized_kv, B, Hkv, Sk, Dv).items():
        number = getattr(operands, name)
        part[..., : number.shape[-1]].copy_(number)
    return quantized_kv


@mathematics
def _attend(
    query: Tensor, quantized_kv: Tensor, key_samples: Tensor, value: Tensor | None, keys: int, value_dim: int,
    precision: int, is_causal: bool, scale: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute attention of a query in its own dtype with quantized key and value, in fp32."""
    B, Hkv, _, D = key_samples.shape
    layout = _layout(precision, D, value_dim)
    sizes = (B, Hkv, keys, value_dim)
    _check_attention(query, quantized_kv, key_samples, layout.words(*sizes))
    parts = layout.views(quantized_kv, *sizes)
    k_scale = parts["k_scale"].repeat_interleave(layout.block, -1)[..., :keys]
    key = parts["k"].float() * k_scale.unsqueeze(-1)
    mean = 0.0
    if "v" in parts:
        mean = parts["v_mean"][..., :value_dim].unsqueeze(2)
        rows = quantize_reference.in_natural_order(parts["v"].float()).mT[:, :, :keys]
        value = rows * parts["v_scale"][..., :value_dim].unsqueeze(2) + mean
    scale = D**-0.5 if scale is None else scale
    rotated = quantize_reference.rotate(F.pad(query.float(), (0, layout.d - D)))
    causal_mode = CAUSAL_TOP_LEFT if is_causal else CAUSAL_NONE
    out, lse, *_ = namespace._math_fwd(rotated, key, value.float(), None, 0.0, causal_mode, scale, 0)
    shift = quantize_reference.mean_of_finite(quantize_reference.sample(key_samples.float()))
    row_shift = (query.float() * shift.repeat_interleave(query.shape[1] // Hkv, 1)).sum(-1)
    result = empty_in_layout_of(query, (*query.shape[:3], value_dim)).copy_(out)
    return result, lse + row_shift * scale


def _check_attention(query: Tensor, quantized_kv: Tensor, key_samples: Tensor, words: int) -> None:
    """Raise RuntimeError if the arguments do not fit together. Reads sizes, hence for real tensors only."""
    B, Hkv, _, D = key_samples.shape
    torch._check(
        query.dim() == 4 and query.shape[0] == B and query.shape[3] == D and Hkv > 0 and query.shape[1] % Hkv == 0
        and query.dtype == key_samples.dtype and tuple(quantized_kv.shape) == (words,) and quantized_kv.dtype == _WORD,
        lambda: (
            f"quantized_attention_fwd: query must be {key_samples.dtype} ({B}, Hq, Sq, {D}), Hq a multiple of {Hkv}, "
            f"and quantized_kv int32 ({words},), but got {query.dtype} {tuple(query.shape)} and {quantized_kv.dtype} "
            f"{tuple(quantized_kv.shape)}."
        ),
    )  # fmt: skip


def _register() -> None:
    for name, function, fake in (
        ("quantize_kv", _quantize, _quantize_fake),
        ("_quantize_kv_math", _quantize, _quantize_fake),
        ("quantized_attention_fwd", _attend, _attention_fake),
        ("_quantized_attention_math", _attend, _attention_fake),
    ):
        _library.impl(name, function, "CompositeExplicitAutograd" if name.startswith("_") else "CPU")
        torch.library.register_fake(f"torch_flashplug::{name}", fake, lib=_library)
        torch.library.register_autograd(f"torch_flashplug::{name}", no_gradient, lib=_library)


_register()
