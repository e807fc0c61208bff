"""attention(): what F.scaled_dot_product_attention has no argument for. Windows and sinks are kernels' (windowed.py)
where they are long or differentiated; what is left of a window of few rows is a call of F.scaled_dot_product_attention.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from . import problem
from .cached import FORMATS, IN_WORDS, dequantised
from .spec import ROWS_PER_WARPGROUP as FEW_ROWS
from .windowed import Window

_LARGEST = torch.finfo(torch.float32).max
SIXTEEN_BITS, LARGEST_DIM = (torch.bfloat16, torch.float16), 256
CAUSAL = (False, True, "bottom_right", "top_left")
Scale = Tensor | float


def attention(  # noqa: PLR0913
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: Tensor | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q k^T scale) v of q (B, Sq, Hq, D), k (B, Sk, Hkv, D) and v (B, Sk, Hkv, Dv); returns (B, Sq, Hq, Dv) in
    the dtype of q. Hq is a multiple of Hkv. Mind the order: F.scaled_dot_product_attention has heads before rows.

    causal: True or "bottom_right" lets the last query see all keys, "top_left" the first query one (as is_causal of
    F.scaled_dot_product_attention). window: (left, right), how many keys before and after its own a query sees; None or
    -1: all on that side. Its own key is that of causal; without causal, as to the bottom right. causal sets right to 0.
    A row that sees no key is 0, its LSE -inf. scale: 1 / sqrt(D) if None.

    softcap: scores, scaled, become softcap * tanh(score / softcap) (arXiv 2408.00118); 0.0: they do not.
    sinks: (Hq,), of any floating-point dtype: a logit of each head, neither scaled nor masked, that is in the sum of
    its softmax and has no value (arXiv 2309.17453; s_aux of gpt-oss). return_lse: (out, lse) with lse (B, Hq, Sq), in
    fp32 (fp64 of fp64), the natural logarithm of that sum. Gradients of q, k, v, sinks go through both.

    cu_seqlens_q, cu_seqlens_k: (sequences + 1,) int32, on the device of q: sequences of different lengths on end, as in
    torch.nn.attention.varlen. Then q is (T, Hq, D), k (Tk, Hkv, D), v (Tk, Hkv, Dv), rows cu_seqlens_q[i] to
    cu_seqlens_q[i + 1] are those of sequence i and see its keys alone; out is (T, Hq, Dv), lse (Hq, T). cu_seqlens_k
    is cu_seqlens_q if None. A sequence may have no rows, or no keys; rows behind the last sequence are zeros. Their
    values are not looked at on the host: starts that do not grow give wrong numbers, and no bad access. max_seqlen_q,
    max_seqlen_k: not needed, taken for the sake of other libraries' calls. seqused_k: (sequences,) int32, how many keys
    of each count, the first ones; also beside tensors of four dims, of each batch. No gradients then.

    k and v may have 8 bits, a cache's: int8, float8_e4m3fn or float8_e5m2, q being bf16 or fp16. Then a number is what
    it says times k_scale or v_scale, in fp32: a number or a tensor (), (Hkv,), (B, Hkv) or (B, Hkv, Sk), of which a dim
    may be 1; None is 1, which int8 does not take. Few query rows (up to 64 for each KV head) are a kernel's that reads
    the 8 bits; more, and such with softcap, sinks or return_lse, have K and V made 16 bits first (bf16, also for a
    query in fp16). No gradients. Rotated and shifted keys: QuantizedTensor.

    Raises ValueError or TypeError for what it does not take.
    """
    seen = _window(causal, window)
    if isinstance(softcap, bool) or not isinstance(softcap, int | float) or not 0.0 <= softcap <= _LARGEST:
        raise ValueError(f"attention: softcap={softcap!r}; give a cap, or 0.0 for none")
    softcap = float(softcap)
    if any(x is not None for x in (cu_seqlens_q, cu_seqlens_k, seqused_k)):
        in_8_bits = any(isinstance(x, Tensor) and x.dtype in FORMATS for x in (q, k, v))
        if in_8_bits or k_scale is not None or v_scale is not None:
            raise ValueError("attention: k and v in 8 bits beside lengths are not built; give them in 16 bits")
        given = (cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k, seqused_k)
        on_end = cu_seqlens_q is not None or cu_seqlens_k is not None
        out, lse = (_on_end if on_end else _some_of_each)((q, k, v), sinks, given, (*seen, softcap, scale))
        return (out, lse) if return_lse else out
    _check_operands(q, k, v)
    eight = _check_dtypes(q, k, v)
    sinks = _as_sinks(sinks, q)
    query, key, value = (x.transpose(1, 2) for x in (q, k, v))
    keys, scales = _some_keys(seen, q.shape[1], k.shape[1]), ()
    if eight:
        scales = (_scale("k_scale", k_scale, key)[:, :, keys], _scale("v_scale", v_scale, value)[:, :, keys])
    elif k_scale is not None or v_scale is not None:
        raise ValueError(f"attention: k_scale, v_scale are for {IN_WORDS}; k and v are {k.dtype} and {v.dtype}")
    key, value = key[:, :, keys], value[:, :, keys]
    more = sinks is not None or return_lse or softcap != 0.0
    if more:
        _refuse_forward_mode()
    if eight and more:
        dtype = torch.bfloat16 if q.dtype == torch.float16 else q.dtype  # fp16 has no room for what scales make of them
        key, value = (dequantised(x, s, dtype) for x, s in zip((key, value), scales, strict=True))
        query, eight = query.to(dtype), False
    if eight:
        mask = _as_mask(seen, query, key)
        out = torch.ops.torch_flashplug.cached_fwd(query, key, value, *scales, mask, False, scale)
    elif more and softcap == 0.0 and _are_few_rows(query, key, value):
        out, lse = _beside_sinks(query, key, value, sinks, _as_mask(seen, query, key), scale)
    elif more or (_is_for_kernels(seen, query, key, value) and forward_ad._current_level < 0):
        given = (*problem.under_autocast(q.device.type, query, key, value), sinks, None, None, None)
        out, lse = torch.ops.torch_flashplug.attention_fwd(*given, *seen, softcap, scale)
    else:
        top_left = _is_top_left(seen, query.shape[2], key.shape[2])
        mask = None if top_left else _as_mask(seen, query, key)
        settings = {"is_causal": top_left, "scale": scale, "enable_gqa": query.shape[1] != key.shape[1]}
        out = F.scaled_dot_product_attention(query, key, value, mask, **settings)
    out = out.transpose(1, 2)
    out = out.to(q.dtype) if scales else out
    return (out, lse) if return_lse else out


def _check_operands(q: Tensor, k: Tensor, v: Tensor) -> None:
    """(batch, rows, heads, head dim)."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 4:
            given = f"{x.dim()}-D" if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"attention: {name} is {given}; give a tensor (batch, rows, heads, head dim)")
    if not q.device == k.device == v.device:
        raise ValueError(f"attention: q, k, v are on {q.device}, {k.device}, {v.device}; give one device")
    (B, _, Hq, D), (_, Sk, Hkv, _) = q.shape, k.shape
    if k.shape != (B, Sk, Hkv, D) or v.shape[:3] != (B, Sk, Hkv) or (Hkv and Hq % Hkv) or (Hq and not Hkv):
        given = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        raise ValueError(f"attention: {given} do not fit; give (B, Sq, Hq, D), (B, Sk, Hkv, D), (B, Sk, Hkv, Dv)")


def _as_sinks(sinks: Tensor | None, q: Tensor) -> Tensor | None:
    """In the dtype of the LSE."""
    if sinks is None:
        return None
    if not isinstance(sinks, Tensor) or sinks.shape != q.shape[-2:-1] or sinks.is_complex():
        given = tuple(sinks.shape) if isinstance(sinks, Tensor) else type(sinks).__name__
        raise ValueError(f"attention: sinks are {given}; give a real tensor (Hq,) = ({q.shape[-2]},)")
    return sinks.to(q.device, torch.promote_types(torch.float32, q.dtype))


# ---- sequences of different lengths ----

Lengths = tuple[Tensor | None, Tensor | None, Tensor | None]  # cu_seqlens_q, cu_seqlens_k, seqused_k
# seen: of Window, then softcap and scale


def _on_end(
    operands: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None, given: Lengths, seen: tuple
) -> tuple[Tensor, Tensor]:
    """(T, Hq, Dv) and (Hq, T)."""
    for name, x in zip("qkv", operands, strict=True):
        if not isinstance(x, Tensor) or x.dim() != 3:
            rank = f"{x.dim()}-D" if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"attention: {name} is {rank}; beside cu_seqlens give a tensor (rows, heads, head dim)")
    q, (cu_q, cu_k, used_k) = operands[0], given
    _check_numbers("cu_seqlens_q", cu_q, "sequences + 1", q.device)
    _check_numbers("cu_seqlens_k", cu_k, "sequences + 1", q.device)
    if used_k is not None:
        _check_numbers("seqused_k", used_k, "sequences", q.device)
    if cu_q.shape != cu_k.shape or not cu_q.shape[0] or (used_k is not None and used_k.shape[0] + 1 != cu_q.shape[0]):
        shapes = ", ".join(str(tuple(x.shape)) for x in given if x is not None)
        raise ValueError(f"attention: cu_seqlens and seqused_k are {shapes}; give numbers of as many sequences")
    _check_same(*operands)
    _refuse_forward_mode()
    batch = [x.unsqueeze(0) for x in problem.under_autocast(operands[0].device.type, *operands)]
    _check_operands(*batch)
    lengths = (None if x is None else x.contiguous() for x in given)
    batch = [x.transpose(1, 2) for x in batch]
    out, lse = torch.ops.torch_flashplug.attention_fwd(*batch, _as_sinks(sinks, q), *lengths, *seen)
    return out.transpose(1, 2).squeeze(0), lse.squeeze(0)


def _some_of_each(
    operands: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None, given: Lengths, seen: tuple
) -> tuple[Tensor, Tensor]:
    """Batches, of whose keys some count: (B, Sq, Hq, Dv) and (B, Hq, Sq)."""
    _check_operands(*operands)
    q, k = operands[:2]
    _check_numbers("seqused_k", given[2], "batch", q.device)
    if given[2].shape[0] != q.shape[0]:
        raise ValueError(f"attention: seqused_k is {tuple(given[2].shape)}; give (batch,) = ({q.shape[0]},)")
    of_keys = [_rows_on_end(x) for x in operands[1:]]
    if of_keys[0][1] != of_keys[1][1] or not _have_kernels(*(x.transpose(1, 2) for x in operands)):
        of_keys = [(x.flatten(0, 1), k.shape[1]) for x in operands[1:]]
    rows, steps, used = q.flatten(0, 1), (q.shape[1], of_keys[0][1]), given[2].clamp(max=k.shape[1])
    starts = [torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device) * step for step in steps]
    starts[1][-1:].clamp_(max=of_keys[0][0].shape[0])
    out, lse = _on_end((rows, *(x for x, _ in of_keys)), sinks, (*starts, used), seen)
    return out.unflatten(0, q.shape[:2]), lse.unflatten(1, q.shape[:2]).transpose(0, 1)


def _rows_on_end(x: Tensor) -> tuple[Tensor, int]:
    """(B, S, H, D) as (T, H, D) without a copy where batches are whole numbers of rows apart, and how many."""
    (B, S, *more), (of_batch, of_row, *strides) = x.shape, x.stride()
    if B < 2 or S < 1 or of_row < 1 or of_batch % of_row or (torch.is_grad_enabled() and x.requires_grad):
        return x.flatten(0, 1), S
    apart = of_batch // of_row
    if apart <= S:
        return x.flatten(0, 1), S
    return x.as_strided(((B - 1) * apart + S, *more), (of_row, *strides)), apart


def _check_numbers(name: str, x: object, size: str, device: torch.device) -> None:
    if not isinstance(x, Tensor) or x.dim() != 1 or x.dtype != torch.int32 or x.device != device:
        given = f"{x.dtype} {tuple(x.shape)} on {x.device}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"attention: {name} is {given}; give int32 ({size},) on {device}")


# ---- what operands may be ----


def _check_dtypes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether k and v have 8 bits."""
    if k.dtype not in FORMATS and v.dtype not in FORMATS:
        _check_same(q, k, v)
        return False
    if k.dtype != v.dtype or not q.dtype.is_floating_point or q.dtype in FORMATS:
        given = f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}"
        raise ValueError(f"attention: {given}; k and v have one of {IN_WORDS}, and q 16 bits")
    if forward_ad._current_level >= 0:
        raise RuntimeError("attention: k and v in 8 bits have no derivative, forward mode's neither; give 16 bits")
    return True


def _refuse_forward_mode() -> None:
    if forward_ad._current_level >= 0:
        raise RuntimeError(
            "attention: softcap, sinks, return_lse and lengths have no forward-mode derivative; use reverse mode"
        )


def _check_same(q: Tensor, k: Tensor, v: Tensor) -> None:
    """But for what autocast makes the same."""
    if not q.dtype == k.dtype == v.dtype and not problem.is_autocast(q.device.type):
        raise ValueError(f"attention: q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; give one dtype")
    if not all(x.dtype.is_floating_point for x in (q, k, v)):
        raise ValueError(f"attention: q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; give floating-point ones")


# ---- which keys a query sees ----


def _window(causal: bool | str, window: tuple[int | None, int | None] | None) -> Window:
    if not isinstance(causal, bool | str) or causal not in CAUSAL:
        raise ValueError(f"attention: causal={causal!r}; use False, True, 'bottom_right' or 'top_left'")
    bounds = (None, None) if window is None else window
    if not isinstance(bounds, tuple | list) or len(bounds) != 2 or not all(map(_is_bound, bounds)):
        raise ValueError(f"attention: window={window!r}; give (left, right), each -1, None or a number of keys")
    left, right = (-1 if bound is None else bound for bound in bounds)
    return Window(left, 0 if causal else right, causal != "top_left")


def _is_bound(bound: object) -> bool:
    return bound is None or (isinstance(bound, int) and not isinstance(bound, bool) and -1 <= bound < 2**62)


def _some_keys(seen: Window, Sq: int, Sk: int) -> slice:
    """Those that some query sees: the same window, of them alone."""
    if not seen.bottom_right:
        return slice(0, Sk if seen.right < 0 else min(Sk, Sq + seen.right))
    return slice(0 if seen.left < 0 else max(0, Sk - Sq - seen.left), Sk)


def _hides_left(seen: Window, Sq: int, Sk: int) -> bool:
    last = Sk - 1 if seen.bottom_right else Sq - 1  # the last query's own key
    return 0 <= seen.left < last


def _hides_right(seen: Window, Sq: int, Sk: int) -> bool:
    first = Sk - Sq if seen.bottom_right else 0
    return seen.right >= 0 and first + seen.right < Sk - 1


def _is_top_left(seen: Window, Sq: int, Sk: int) -> bool:
    """What is_causal says."""
    corner = not seen.bottom_right or Sq == Sk
    return corner and seen.right == 0 and _hides_right(seen, Sq, Sk) and not _hides_left(seen, Sq, Sk)


def _as_mask(seen: Window, query: Tensor, key: Tensor) -> Tensor | None:
    """(Sq, Sk) bool, or None where all is seen."""
    Sq, Sk = query.shape[2], key.shape[2]
    hides = _hides_left(seen, Sq, Sk) or _hides_right(seen, Sq, Sk)
    return seen.seen(Sq, Sk, query.device) if hides else None


def _is_for_kernels(seen: Window, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether something is hidden that F.scaled_dot_product_attention needs a mask for, and kernels of ours do not. Few
    rows are better off with the mask: their keys are split.
    """
    Sq, Sk = query.shape[2], key.shape[2]
    hides = _hides_left(seen, Sq, Sk) or _hides_right(seen, Sq, Sk)
    if not hides or _is_top_left(seen, Sq, Sk) or not _have_kernels(query, key, value):
        return False
    return not _are_few_rows(query, key, value)


def _have_kernels(query: Tensor, key: Tensor, value: Tensor) -> bool:
    dims = (query.shape[3], value.shape[3])
    taken = query.is_cuda and query.dtype == key.dtype == value.dtype and query.dtype in SIXTEEN_BITS
    return taken and all(dim % 8 == 0 and dim <= LARGEST_DIM for dim in dims)


def _are_few_rows(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether kernels of decode, which split the keys, take them: forward alone."""
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    few = key.shape[1] > 0 and query.shape[2] * (query.shape[1] // key.shape[1]) <= FEW_ROWS
    return few and not differentiated and _have_kernels(query, key, value)


def _beside_sinks(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Output and LSE of an op that has no sinks: they take their share of each row's sum from what comes out."""
    out, lse, *_ = torch.ops.torch_flashplug.sdpa_fwd(query, key, value, mask, 0.0, 0, scale, 0)
    if sinks is None:
        return out, lse
    total = torch.logaddexp(lse, sinks.unsqueeze(-1))
    share = torch.exp(lse - total).masked_fill(lse == -torch.inf, 0.0)
    return (out * share.unsqueeze(-1)).to(out.dtype), total


# ---- 8 bits ----


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
