"""Plan of a call described by shapes alone, for a GPU that need not be present: the `explain` verb."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..api.backend import DEVICES, Plan, explain, sdpa_backend
from ..torch_hooks.describe_call import DTYPES

_LIMIT = 58  # log2 of elements: torch counts bytes in 63 bits, and an element may have 8 bytes


@dataclass(frozen=True, slots=True)
class Shapes:
    """Shapes of the tensors of one call.

    Attributes:
        q: (B, Hq, Sq, D).
        k: (B, Hkv, Sk, D).
        v: (B, Hkv, Sk, Dv).
        mask: 2 to 4 dims that broadcast to (B, Hq, Sq, Sk); None for a call without a mask.
    """

    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    mask: tuple[int, ...] | None = None


def _check(shapes: Shapes) -> None:
    """Check that torch can count the elements of each tensor and of the scores.

    Args:
        shapes: the shapes of one call.

    Raises:
        ValueError: a tensor, or the scores, would have 2^58 elements or more.
    """
    scores = (*shapes.q[:3], *shapes.k[2:3])
    shapes_by_name = {
        "query": shapes.q,
        "key": shapes.k,
        "value": shapes.v,
        "attn_mask": shapes.mask or (),
        "scores": scores,
    }
    for name, shape in shapes_by_name.items():
        if math.prod(max(size, 1) for size in shape) >= 1 << _LIMIT:
            raise ValueError(
                f"{name} must have fewer than 2^{_LIMIT} elements, but got the shape {','.join(map(str, shape))}. "
                "Use smaller sizes."
            )


def _device_and_preset(device: str) -> tuple[str, str | None]:
    """Return the device of the tensors, and the `device` argument for explain()."""
    if device.lower() in DEVICES:
        return "meta", device.lower()
    if device:
        raise ValueError(f"--device must be one of {', '.join(DEVICES)}, but got {device!r}.")
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
    """Return the plan of a call with contiguous tensors; a mask never requires a gradient.

    Args:
        shapes: the shapes of the call.
        dtype: the name of the tensors' dtype.
        mask_dtype: the name of the mask's dtype.
        dropout: the probability of dropout.
        causal: whether is_causal is set.
        grad: whether the call needs gradients.
        device: a key of `DEVICES`. Empty: this machine's GPU, or the first preset on a machine without a GPU.
        backend: the forced backend, as for sdpa_backend().

    Raises:
        ValueError: an argument is out of range, or this machine's GPU has too little memory for the tensors.
    """
    _check(shapes)
    tensor_device, preset = _device_and_preset(device)
    kind = torch.bool if mask_dtype == "bool" else DTYPES[mask_dtype]
    try:
        mask = None if shapes.mask is None else torch.empty(shapes.mask, dtype=kind, device=tensor_device)
        q, k, v = (
            torch.empty(shape, dtype=DTYPES[dtype], device=tensor_device, requires_grad=grad)
            for shape in (shapes.q, shapes.k, shapes.v)
        )
    except torch.OutOfMemoryError:
        raise ValueError(
            "the tensors must fit into the memory of this machine's GPU, but the GPU ran out of memory. Pass --device."
        ) from None
    with sdpa_backend(backend), torch.set_grad_enabled(grad):
        gqa = shapes.q[1] != shapes.k[1]
        return explain(q, k, v, mask, dropout, causal, enable_gqa=gqa, device=preset)
