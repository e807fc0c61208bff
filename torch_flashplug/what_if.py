"""The plan of a call given by its shapes alone, on a GPU that need not be here: the `explain` verb."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .api import DEVICES, Plan, explain, sdpa_backend
from .problem import DTYPES


@dataclass(frozen=True, slots=True)
class Shapes:
    """q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv); mask: 2 to 4 dims that broadcast to (B, Hq, Sq, Sk)."""

    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    mask: tuple[int, ...] | None = None


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
    """The plan for contiguous tensors of these shapes; of a mask's gradient nothing is asked. device "": this machine's
    GPU, else the first preset.
    """
    where, preset = _place(device)
    kind = torch.bool if mask_dtype == "bool" else DTYPES[mask_dtype]
    mask = None if shapes.mask is None else torch.empty(shapes.mask, dtype=kind, device=where)
    q, k, v = (
        torch.empty(shape, dtype=DTYPES[dtype], device=where, requires_grad=grad)
        for shape in (shapes.q, shapes.k, shapes.v)
    )
    with sdpa_backend(backend), torch.set_grad_enabled(grad):
        gqa = shapes.q[1] != shapes.k[1]
        return explain(q, k, v, mask, dropout, causal, enable_gqa=gqa, device=preset)
