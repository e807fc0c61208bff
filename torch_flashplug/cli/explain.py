"""The plan of a call given by its shapes alone, on a GPU that need not be here: the `explain` verb."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..api.backend import DEVICES, Plan, explain, sdpa_backend
from ..torch_hooks.describe_call import DTYPES

_LIMIT = 58  # torch counts bytes in 63 bits, and numbers have up to 8 bytes


@dataclass(frozen=True, slots=True)
class Shapes:
    """q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv); mask: 2 to 4 dims that broadcast to (B, Hq, Sq, Sk)."""

    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    mask: tuple[int, ...] | None = None


def _check(shapes: Shapes) -> None:
    """Raise ValueError for shapes of tensors, or of their scores, that torch cannot count.

    Args:
        shapes: the shapes of one call.
    """
    scores = (*shapes.q[:3], *shapes.k[2:3])
    given = {"query": shapes.q, "key": shapes.k, "value": shapes.v, "attn_mask": shapes.mask or (), "scores": scores}
    for name, shape in given.items():
        if math.prod(max(size, 1) for size in shape) >= 1 << _LIMIT:
            raise ValueError(
                f"{name} must have fewer than 2^{_LIMIT} numbers, but got the shape {','.join(map(str, shape))}. "
                "Give smaller sizes."
            )


def _place(device: str) -> tuple[str, str | None]:
    """Where the tensors lie, and the preset that explain() is asked for."""
    if device:
        return "meta", device
    return ("cuda", None) if torch.cuda.is_available() else ("meta", next(iter(DEVICES)))


def plan(
    shapes: Shapes,
    *,
    dtype: str = "bf16",
    mask_dtype: str = "bool",
    dropout: float = 0.0,
    causal: bool = False,
    grad: bool = False,
    device: str = "",
    backend: str = "auto",
) -> Plan:
    """Return the plan for contiguous tensors of these shapes; of a mask's gradient nothing is asked.

    Args:
        shapes: the shapes of the call.
        dtype: the name of the tensors' dtype.
        mask_dtype: the name of the mask's dtype.
        dropout: the probability of dropout.
        causal: whether is_causal is set.
        grad: whether gradients are wanted.
        device: a key of DEVICES; empty: this machine's GPU, else the first preset.
        backend: the backend that is forced, as sdpa_backend() takes it.

    Raises:
        ValueError: a size or another argument is out of range, or this machine's GPU has no room for the tensors.
    """
    _check(shapes)
    where, preset = _place(device)
    kind = torch.bool if mask_dtype == "bool" else DTYPES[mask_dtype]
    try:
        mask = None if shapes.mask is None else torch.empty(shapes.mask, dtype=kind, device=where)
        q, k, v = (
            torch.empty(shape, dtype=DTYPES[dtype], device=where, requires_grad=grad)
            for shape in (shapes.q, shapes.k, shapes.v)
        )
    except torch.OutOfMemoryError:
        raise ValueError(
            "the tensors must fit into this machine's GPU, but it ran out of memory. Give --device."
        ) from None
    with sdpa_backend(backend), torch.set_grad_enabled(grad):
        gqa = shapes.q[1] != shapes.k[1]
        return explain(q, k, v, mask, dropout, causal, enable_gqa=gqa, device=preset)
