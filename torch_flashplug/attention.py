"""attention(): what F.scaled_dot_product_attention has no argument for."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from .cached import FORMATS, IN_WORDS, seen

CAUSAL = (False, True, "bottom_right", "top_left")
Scale = Tensor | float


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | str = False,
    scale: float | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
) -> Tensor:
    """softmax(q k^T scale) v of q (B, Sq, Hq, D), k (B, Sk, Hkv, D) and v (B, Sk, Hkv, Dv); returns (B, Sq, Hq, Dv) in
    the dtype of q. Hq is a multiple of Hkv. Mind the order: F.scaled_dot_product_attention has heads before rows.

    causal: True or "bottom_right" lets the last query see all keys, "top_left" the first query one (as is_causal of
    F.scaled_dot_product_attention). scale: 1 / sqrt(D) if None.

    k and v may have 8 bits, a cache's: int8, float8_e4m3fn or float8_e5m2, q being bf16 or fp16. Then a number is what
    it says times k_scale or v_scale, in fp32: a number or a tensor (), (Hkv,), (B, Hkv) or (B, Hkv, Sk), of which a dim
    may be 1; None is 1, which int8 does not take. Few query rows (up to 64 for each KV head) are a kernel's that reads
    the 8 bits; more have K and V made 16 bits first (bf16, also for a query in fp16). No gradients. Rotated and shifted
    keys: QuantizedTensor.

    Raises ValueError or TypeError for what it does not take.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 4:
            given = f"{x.dim()}-D" if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"attention: {name} is {given}; give a tensor (batch, rows, heads, head dim)")
    if not isinstance(causal, bool | str) or causal not in CAUSAL:
        raise ValueError(f"attention: causal={causal!r}; use False, True, 'bottom_right' or 'top_left'")
    if not q.device == k.device == v.device:
        raise ValueError(f"attention: q, k, v are on {q.device}, {k.device}, {v.device}; give one device")
    B, Sq, Hq, D = q.shape
    _, Sk, Hkv, _ = k.shape
    if k.shape != (B, Sk, Hkv, D) or v.shape[:3] != (B, Sk, Hkv) or (Hkv and Hq % Hkv) or (Hq and not Hkv):
        given = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        raise ValueError(f"attention: {given} do not fit; give (B, Sq, Hq, D), (B, Sk, Hkv, D), (B, Sk, Hkv, Dv)")
    query, key, value = (x.transpose(1, 2) for x in (q, k, v))
    mask, top_left = _causal(causal, Sq, Sk, q.device)
    if k.dtype not in FORMATS and v.dtype not in FORMATS:
        if k_scale is not None or v_scale is not None:
            raise ValueError(f"attention: k_scale, v_scale are for {IN_WORDS}; k and v are {k.dtype} and {v.dtype}")
        settings = {"is_causal": top_left, "scale": scale, "enable_gqa": Hq != Hkv}
        return F.scaled_dot_product_attention(query, key, value, mask, **settings).transpose(1, 2)
    if k.dtype != v.dtype or not q.dtype.is_floating_point or q.dtype in FORMATS:
        given = f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}"
        raise ValueError(f"attention: {given}; k and v have one of {IN_WORDS}, and q 16 bits")
    if forward_ad._current_level >= 0:
        raise RuntimeError("attention: k and v in 8 bits have no derivative, forward mode's neither; give 16 bits")
    if top_left:
        mask = seen(Sq, Sk, q.device)
    scales = (_scale("k_scale", k_scale, key), _scale("v_scale", v_scale, value))
    return torch.ops.torch_flashplug.cached_fwd(query, key, value, *scales, mask, False, scale).transpose(1, 2)


def _causal(causal: bool | str, Sq: int, Sk: int, device: torch.device) -> tuple[Tensor | None, bool]:
    """A mask, or that it is causal to the top left, or neither."""
    if causal is False or (causal != "top_left" and Sq == 1):
        return None, False
    if causal == "top_left" or Sq == Sk:
        return None, True
    return seen(Sq, Sk, device, Sk - Sq), False


def _scale(name: str, scale: Scale | None, x: Tensor) -> Tensor:
    """(B, Hkv, Sk) fp32, broadcast by strides of 0. x: (B, Hkv, Sk, ...)."""
    wanted = x.shape[:3]
    if scale is None:
        if x.dtype == torch.int8:
            raise ValueError(f"attention: {name} is None; int8 takes a number, (), (Hkv,), (B, Hkv) or (B, Hkv, Sk)")
        scale = 1.0
    if not isinstance(scale, Tensor | int | float) or (isinstance(scale, Tensor) and scale.is_complex()):
        raise TypeError(f"attention: {name} is {type(scale).__name__}; give a number or a tensor of real ones")
    if not isinstance(scale, Tensor):
        return torch.full((1, 1, 1), float(scale), dtype=torch.float32, device=x.device).expand(wanted)
    if scale.device != x.device and scale.dim() > 0:
        raise ValueError(f"attention: {name} is on {scale.device}, k and v are on {x.device}")
    shape = {0: (1, 1, 1), 1: (1, *scale.shape, 1), 2: (*scale.shape, 1), 3: tuple(scale.shape)}.get(scale.dim())
    if shape is None or any(size not in (1, full) for size, full in zip(shape, wanted, strict=True)):
        raise ValueError(
            f"attention: {name} {tuple(scale.shape)} does not fit B, Hkv, Sk = {tuple(wanted)}; "
            "give (), (Hkv,), (B, Hkv) or (B, Hkv, Sk)"
        )
    return scale.to(x.device, torch.float32).reshape(shape).expand(wanted)
