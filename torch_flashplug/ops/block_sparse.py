"""The ops torch_flashplug::listed_fwd and listed_bwd: block-sparse attention (FlashAttention, arXiv 2205.14135, section
3.3) by lists of blocks that were made ahead of the call (block_mask.py). Schema, fake, autograd, and their mathematics
on any device (_listed_math_fwd and _bwd, whose memory is O(Sq * Sk)); kernels are called in src/ops/attention_ops.cpp,
those of masks, which one by `tall`, the work of tiles of TALL rows over that of others. Their backward knows no
gradient of the
LSE: that is made of two more calls.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import mask_preprocess_reference, reference
from .sdpa import empty_gradients, empty_results, mathematics, never_a_frame, not_twice

_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
_FORWARD = "Tensor query, Tensor key, Tensor value, Tensor digest, "
_BACKWARD = (
    "Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor digest, Tensor out, Tensor lse, float? scale"
)
_library = torch.library.Library("torch_flashplug", "FRAGMENT")
for _name, _more in (
    ("listed_fwd", "float tall, float? scale, int block_mode=0"), ("_listed_math_fwd", "float? scale")
):  # fmt: skip
    _library.define(f"{_name}({_FORWARD}{_more}) -> (Tensor out, Tensor lse)", tags=_TAGS)
for _name, _more in (("listed_bwd", ", int block_mode=0"), ("_listed_math_bwd", "")):
    _library.define(f"{_name}({_BACKWARD}{_more}) -> (Tensor dq, Tensor dk, Tensor dv)", tags=_TAGS)

_ANYWHERE = "CompositeExplicitAutograd"
HALF_OF_FP16 = 2.0**15  # of its largest numbers
namespace = torch.ops.torch_flashplug


def _scores(
    query: Tensor, key: Tensor, value: Tensor, digest: Tensor, scale: float | None
) -> tuple[reference.Scores, Tensor]:
    """Return the masked scores, and what is seen, bool (B or 1, Hq or 1, Sq, Sk).

    Products need the latter, too: rows and keys of blocks that no list names may hold NaN, which kernels do not read.
    """
    check(query, key, digest)
    seen = mask_preprocess_reference.seen(digest, query.shape[2], key.shape[2])
    return reference.scores_of(query, key, value, scale).where(seen), seen


def check(query: Tensor, key: Tensor, digest: Tensor) -> None:
    """RuntimeError where lists are none of this call. Reads sizes: for real tensors only."""
    Sq, Sk = query.shape[2], key.shape[2]
    numbers = [mask_preprocess_reference.numbers_of(Sq, Sq, Sk, gradients=gradients) for gradients in (False, True)]
    torch._check(
        digest.dtype == torch.int32 and digest.dim() == 3 and digest.shape[0] in (1, query.shape[0])
        and digest.shape[1] in (1, query.shape[1]) and digest.shape[2] in numbers,
        lambda: f"lists of blocks are {digest.dtype} {tuple(digest.shape)}; of this call they are int32 "
        f"(B or 1, Hq or 1, {numbers[0]} or {numbers[1]})",
    )  # fmt: skip


@mathematics
def _math_forward(
    query: Tensor, key: Tensor, value: Tensor, digest: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    s, seen = _scores(query, key, value, digest, scale)
    probabilities, lse = s.softmax()
    out, _ = empty_results(query, key, value)
    return out.copy_(reference.product_of_seen(probabilities, s.value, seen)), lse


@mathematics
def _math_backward(  # noqa: PLR0913
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, digest: Tensor, out: Tensor, lse: Tensor,
    scale: float | None, mode: int = 0,
) -> tuple[Tensor, ...]:  # fmt: skip
    s, seen = _scores(query, key, value, digest, scale)
    return reference.gradients(s, query, key, value, reference.Known(grad_out, out, lse), seen)[:3]


@never_a_frame
def _math_on_cpu(  # noqa: PLR0913
    query: Tensor, key: Tensor, value: Tensor, digest: Tensor, tall: float, scale: float | None, mode: int = 0
) -> tuple[Tensor, Tensor]:
    return _math_forward(query, key, value, digest, scale)


# ---- autograd ----


def _setup_context(ctx, inputs: tuple, output: tuple) -> None:
    *tensors, ctx.tall, ctx.scale, ctx.mode = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple:
    query, key, value, digest, out, lse = ctx.saved_tensors
    dq = dk = dv = None
    if grad_out is not None:
        given = (grad_out, query, key, value, digest, out, lse, ctx.scale, ctx.mode)
        dq, dk, dv = namespace.listed_bwd(*given)
    if grad_lse is not None:
        of_query, of_key = _of_lse(ctx, grad_lse, query, key, digest, lse)
        dq, dk = (of_query, of_key) if dq is None else (dq + of_query, dk + of_key)
    return dq, dk, dv, None, None, None, None


def _of_lse(
    ctx, grad_lse: Tensor, query: Tensor, key: Tensor, digest: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return dQ and dK of dS = P dLSE: dQ = scale dLSE P K, an output whose values are the keys, and
    dK = scale P^T (dLSE Q), such an output's dV. Where a row sees no key P is 0, whatever dLSE and Q are.
    """
    scale = query.shape[3] ** -0.5 if ctx.scale is None else ctx.scale
    none = (lse == -math.inf).unsqueeze(-1)
    grad_lse, finite = grad_lse.unsqueeze(-1).masked_fill(none, 0.0), query.masked_fill(none, 0.0)
    narrow = query.dtype == torch.float16 and query.numel() > 0
    unit = _unit(grad_lse, finite, key) if narrow else grad_lse.new_ones(1, 1, 1, 1)
    keys, _ = namespace.listed_fwd(query, key, key, digest, ctx.tall, ctx.scale, ctx.mode)
    weighed = finite * (grad_lse / unit.repeat_interleave(query.shape[1] // unit.shape[1], 1))
    given = (weighed.to(query.dtype), query, key, key, digest, keys, lse, ctx.scale, ctx.mode)
    of_key = namespace.listed_bwd(*given)[2].to(grad_lse.dtype) * (scale * unit)
    return (keys * (scale * grad_lse)).to(query.dtype), of_key.to(key.dtype)


def _unit(grad_lse: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """(B, Hkv, 1, 1): by which dLSE is divided on its way through fp16, so that neither its products with Q nor their
    sums over rows leave that range; a KV head's own, lest one of another size, or NaN, reaches it.
    """
    of_heads = [x.abs().unflatten(1, (key.shape[1], -1)).flatten(2) for x in (grad_lse, query.to(grad_lse.dtype))]
    weights, queries = (x.amax(2) for x in of_heads)
    unit = torch.maximum(weights, of_heads[0].sum(2) * queries / HALF_OF_FP16)
    return unit.clamp(min=torch.finfo(unit.dtype).tiny)[..., None, None]


def _register() -> None:
    for name, on_cpu, anywhere, fake in (
        ("listed_fwd", _math_on_cpu, _math_forward, empty_results),
        ("listed_bwd", _math_backward, _math_backward, empty_gradients),
    ):
        for op, of, key in ((name, on_cpu, "CPU"), (f"_{name.replace('_', '_math_', 1)}", anywhere, _ANYWHERE)):
            _library.impl(op, of, key)
            torch.library.register_fake(f"torch_flashplug::{op}", fake, lib=_library)
    forward, backward = "torch_flashplug::listed_fwd", "torch_flashplug::listed_bwd"
    torch.library.register_autograd(forward, _backward, setup_context=_setup_context, lib=_library)
    torch.library.register_autograd(backward, not_twice("listed_bwd"), lib=_library)


_register()
