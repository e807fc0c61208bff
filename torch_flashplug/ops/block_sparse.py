"""The ops torch_flashplug::block_sparse_fwd and block_sparse_bwd: attention by block-sparse lists.

Block-sparse attention is that of FlashAttention (arXiv 2205.14135, section 3.3). The lists are made before the call
(block_mask.py). This file has the schema, the fake and autograd rules, and the reference math on any device
(`_block_sparse_math_fwd` and `_block_sparse_math_bwd`, with O(Sq * Sk) memory). The kernels, called in
src/ops/block_sparse_ops.cpp, are those for bool masks. The argument `cost_ratio_192`, the work of tiles of 192 query
rows over the work of the usual tiles, selects the kernel. The backward op takes no gradient of the LSE. Autograd
computes the gradients of the LSE by two further calls.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import mask_preprocess_reference, reference
from .sdpa import empty_gradients, empty_results, mathematics, not_twice, without_own_graph

_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
_FORWARD = "Tensor query, Tensor key, Tensor value, Tensor mask_metadata, "
_BACKWARD = f"Tensor grad_out, {_FORWARD}Tensor out, Tensor lse, float? scale"
_library = torch.library.Library("torch_flashplug", "FRAGMENT")
for _name, _settings in (
    ("block_sparse_fwd", "float cost_ratio_192, float? scale, int block_mode=0"),
    ("_block_sparse_math_fwd", "float? scale"),
):
    _library.define(f"{_name}({_FORWARD}{_settings}) -> (Tensor out, Tensor lse)", tags=_TAGS)
for _name, _more in (("block_sparse_bwd", ", int block_mode=0"), ("_block_sparse_math_bwd", "")):
    _library.define(f"{_name}({_BACKWARD}{_more}) -> (Tensor dq, Tensor dk, Tensor dv)", tags=_TAGS)

_ANYWHERE = "CompositeExplicitAutograd"
HALF_OF_FP16 = 2.0**15  # half of the largest numbers of fp16
namespace = torch.ops.torch_flashplug


def _scores_and_mask(
    query: Tensor, key: Tensor, value: Tensor, mask_metadata: Tensor, scale: float | None
) -> tuple[reference.Scores, Tensor]:
    """Return the scores with -inf where hidden, and the bool mask (B or 1, Hq or 1, Sq, Sk), True for visible scores.

    Matrix products need the mask, too: rows and keys of unlisted blocks may hold NaN, which must not reach visible
    rows.

    Raises:
        RuntimeError: the metadata belong to a different call.
    """
    check(query, key, mask_metadata)
    visible = mask_preprocess_reference.visible_scores(mask_metadata, query.shape[2], key.shape[2])
    return reference.scores_of(query, key, value, scale).where(visible), visible


def check(query: Tensor, key: Tensor, mask_metadata: Tensor) -> None:
    """Raise RuntimeError if the lists belong to a different call. Reads sizes, hence for real tensors only."""
    Sq, Sk = query.shape[2], key.shape[2]
    numbers = [mask_preprocess_reference.numbers_of(Sq, Sq, Sk, gradients=gradients) for gradients in (False, True)]
    torch._check(
        mask_metadata.dtype == torch.int32 and mask_metadata.dim() == 3
        and mask_metadata.shape[0] in (1, query.shape[0]) and mask_metadata.shape[1] in (1, query.shape[1])
        and mask_metadata.shape[2] in numbers,
        lambda: f"block_sparse_fwd: mask_metadata must be int32 (B or 1, Hq or 1, {numbers[0]} or {numbers[1]}), "
        f"but got {mask_metadata.dtype} {tuple(mask_metadata.shape)}.",
    )  # fmt: skip


@mathematics
def _math_forward(
    query: Tensor, key: Tensor, value: Tensor, mask_metadata: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    s, visible = _scores_and_mask(query, key, value, mask_metadata, scale)
    probabilities, lse = s.softmax()
    out, _ = empty_results(query, key, value)
    return out.copy_(reference.product_of_visible(probabilities, s.value, visible)), lse


@mathematics
def _math_backward(  # noqa: PLR0913
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, mask_metadata: Tensor, out: Tensor, lse: Tensor,
    scale: float | None, mode: int = 0,
) -> tuple[Tensor, ...]:  # fmt: skip
    s, visible = _scores_and_mask(query, key, value, mask_metadata, scale)
    return reference.gradients(s, query, key, value, reference.BackwardInputs(grad_out, out, lse), visible)[:3]


@without_own_graph
def _math_on_cpu(  # noqa: PLR0913
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask_metadata: Tensor,
    cost_ratio_192: float,
    scale: float | None,
    mode: int = 0,
) -> tuple[Tensor, Tensor]:
    return _math_forward(query, key, value, mask_metadata, scale)


# ---- autograd ----


def _setup_context(ctx, inputs: tuple, output: tuple) -> None:
    *tensors, ctx.cost_ratio_192, ctx.scale, ctx.mode = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple:
    query, key, value, mask_metadata, out, lse = ctx.saved_tensors
    dq = dk = dv = None
    if grad_out is not None:
        dq, dk, dv = namespace.block_sparse_bwd(
            grad_out, query, key, value, mask_metadata, out, lse, scale=ctx.scale, block_mode=ctx.mode
        )
    if grad_lse is not None:
        of_query, of_key = _of_lse(ctx, grad_lse, query, key, mask_metadata, lse)
        dq, dk = (of_query, of_key) if dq is None else (dq + of_query, dk + of_key)
    return dq, dk, dv, None, None, None, None


def _of_lse(
    ctx, grad_lse: Tensor, query: Tensor, key: Tensor, mask_metadata: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return dQ and dK of the LSE, from dS = P dLSE.

    dQ = scale dLSE P K is the output of attention with the keys as values. dK = scale P^T (dLSE Q) is the dV of the
    same attention. In a row without visible keys, P is 0 for any dLSE and Q.
    """
    scale = query.shape[3] ** -0.5 if ctx.scale is None else ctx.scale
    none = (lse == -math.inf).unsqueeze(-1)
    grad_lse, finite = grad_lse.unsqueeze(-1).masked_fill(none, 0.0), query.masked_fill(none, 0.0)
    narrow = query.dtype == torch.float16 and query.numel() > 0
    unit = _unit(grad_lse, finite, key) if narrow else grad_lse.new_ones(1, 1, 1, 1)
    settings = {"scale": ctx.scale, "block_mode": ctx.mode}
    keys, _ = namespace.block_sparse_fwd(
        query, key, key, mask_metadata, cost_ratio_192=ctx.cost_ratio_192, **settings
    )  # fmt: skip
    weighed = finite * (grad_lse / unit.repeat_interleave(query.shape[1] // unit.shape[1], 1))
    _, _, dv = namespace.block_sparse_bwd(
        weighed.to(query.dtype), query, key, key, mask_metadata, keys, lse, **settings
    )  # fmt: skip
    of_key = dv.to(grad_lse.dtype) * (scale * unit)
    return (keys * (scale * grad_lse)).to(query.dtype), of_key.to(key.dtype)


def _unit(grad_lse: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return the divisor of dLSE for the computation in fp16, (B, Hkv, 1, 1).

    With the divisor, neither products of dLSE and Q nor sums of products over rows exceed the range of fp16. Each KV
    head has a divisor, so that large values or NaN in a different head have no influence.
    """
    of_heads = [x.abs().unflatten(1, (key.shape[1], -1)).flatten(2) for x in (grad_lse, query.to(grad_lse.dtype))]
    weights, queries = (x.amax(2) for x in of_heads)
    unit = torch.maximum(weights, of_heads[0].sum(2) * queries / HALF_OF_FP16)
    return unit.clamp(min=torch.finfo(unit.dtype).tiny)[..., None, None]


def _register() -> None:
    for name, on_cpu, anywhere, fake in (
        ("block_sparse_fwd", _math_on_cpu, _math_forward, empty_results),
        ("block_sparse_bwd", _math_backward, _math_backward, empty_gradients),
    ):
        math_op = f"_block_sparse_math_{name.removeprefix('block_sparse_')}"
        for op, function, key in ((name, on_cpu, "CPU"), (math_op, anywhere, _ANYWHERE)):
            _library.impl(op, function, key)
            torch.library.register_fake(f"torch_flashplug::{op}", fake, lib=_library)
    forward, backward = "torch_flashplug::block_sparse_fwd", "torch_flashplug::block_sparse_bwd"
    torch.library.register_autograd(forward, _backward, setup_context=_setup_context, lib=_library)
    torch.library.register_autograd(backward, not_twice("block_sparse_bwd"), lib=_library)


_register()
