"""attention(): what F.scaled_dot_product_attention has no argument for. Windows and sinks are kernels' (attention.py)
where they are long or differentiated; what is left of a window of few rows is a call of F.scaled_dot_product_attention.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from ..ops.attention import NO_PLAN, Window
from ..torch_hooks import describe_call
from .attention_args import (
    Scale,
    Scales,
    are_few_rows,
    as_sinks,
    check_bound,
    check_dtypes,
    check_operands,
    check_out,
    check_rank,
    check_same,
    have_kernels,
    in_16_bits,
    refuse_forward_mode,
    scales_of,
    softcap_of,
    split_size_of,
    splits_of,
    window_of,
    written,
)
from .block_sparse import of_blocks
from .varlen import check_pages, in_pages, on_end, some_of_each
from .varlen_plan import LengthsPlan, check_is_plan

_F_SDPA = torch._C._nn.scaled_dot_product_attention  # the built-in one; context_parallel puts its own in its place


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
    block_table: Tensor | None = None,
    k_scale: Scale | None = None,
    v_scale: Scale | None = None,
    block_mask: object | None = None,
    num_splits: int | None = None,
    fixed_split_size: int | None = None,
    plan: LengthsPlan | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q k^T scale) v of q (B, Sq, Hq, D), k (B, Sk, Hkv, D) and v (B, Sk, Hkv, Dv); returns (B, Sq, Hq, Dv) in
    the dtype of q. Hq is a multiple of Hkv. Mind the order: F.scaled_dot_product_attention has heads before rows.

    causal: True or "bottom_right" lets the last query see all keys, "top_left" the first query one (as is_causal of
    F.scaled_dot_product_attention). window: (left, right), how many keys before and after its own a query sees; None or
    -1: all on that side. Its own key is that of causal; without causal, as to the bottom right. causal sets right to 0.
    A row that sees no key is 0, its LSE -inf, or its sink. scale: 1 / sqrt(D) if None.

    softcap: scores, scaled, become softcap * tanh(score / softcap) (arXiv 2408.00118); 0.0: they do not.
    sinks: (Hq,), of any floating-point dtype: a logit of each head, neither scaled nor masked, that is in the sum of
    its softmax and has no value (arXiv 2309.17453; s_aux of gpt-oss); finite, or -inf for none: what inf or NaN gives,
    nothing says. return_lse: (out, lse) with lse (B, Hq, Sq), in fp32 (fp64 of fp64), the natural logarithm of that
    sum. Gradients of q, k, v, sinks go through both.

    cu_seqlens_q, cu_seqlens_k: (sequences + 1,) int32, on the device of q: packed sequences of different lengths, as in
    torch.nn.attention.varlen. Then q is (T, Hq, D), k (Tk, Hkv, D), v (Tk, Hkv, Dv), rows cu_seqlens_q[i] to
    cu_seqlens_q[i + 1] are those of sequence i and see its keys alone; out is (T, Hq, Dv), lse (Hq, T). cu_seqlens_k
    is cu_seqlens_q if None. A sequence may have no rows, or no keys. Rows ahead of the first sequence and behind the
    last one are zeros, and what tensors and gradients hold there is never read. The host does not look at the starts:
    starts that do not grow give wrong numbers, and no bad access. max_seqlen_q, max_seqlen_k: not needed, but for
    max_seqlen_q=1 beside block_table. seqused_k: (sequences,) int32, how many keys of each count, the first ones; also
    beside tensors of four dims, of each batch. No gradients then.

    block_table: (B, n) int32, beside seqused_k (B,): k and v are pools of pages (pages, rows, Hkv, D), of which
    sequence i has those of these numbers, and seqused_k[i] keys of them; q is (B, Sq, Hq, D), or on end (T, Hq, D)
    beside cu_seqlens_q. Few query rows (up to 64 for each KV head; on end where max_seqlen_q=1 says that each sequence
    has one at most) are a kernel's that reads pages where they lie, of 16 rows or a multiple; other pages, and those of
    more rows, are gathered first, into a copy of all that the tables name. No gradients.

    k and v may have 8 bits, a cache's: int8, float8_e4m3fn or float8_e5m2, q being bf16 or fp16. Then a number is what
    it says times k_scale or v_scale, in fp32: a number or a tensor (), (Hkv,), (B, Hkv) or (B, Hkv, Sk), of which a dim
    may be 1, of pages (pages, Hkv, rows); None is 1, which int8 does not take. Few query rows (up to 64 for each KV
    head) are a kernel's that reads the 8 bits; more, such with softcap, and without lengths such with sinks or
    return_lse, have K and V made 16 bits first (bf16, also for a query in fp16). No gradients. Rotated and shifted
    keys: QuantizedTensor. Where no kernel runs, q may have any floating-point dtype.

    num_splits: among how many CTAs the keys of few query rows are split; None: as many as are fast. 1 promises more:
    on one GPU and of one dtype, head dims, heads and settings, results and gradients of a sequence are the same bits
    alone and in any batch of calls of its form, which are: few rows, as many in each call, of batches, caches or pages
    (of 16 rows or a multiple) without gradients; more rows of batches, likewise; sequences on end; the same from pages.
    Such kernels may be slower, for short sequences and a few long ones. It holds for kernels; mathematics is torch's.

    fixed_split_size: in the place of num_splits, a number of keys, a multiple of 128: those of few rows are split after
    so many of each sequence's own, counted from the block of keys that its window begins in. It promises what
    num_splits=1 does, whatever the width of block_table, and a long sequence is many CTAs' all the same. Another size
    rounds otherwise. block_table, or k, may have room for 255 splits of a sequence. Keys of more rows are not split.

    plan: what plan() has made of these lengths, beside cu_seqlens_q: kernels' lists of tiles, which else each call has
    made. Results are the same bits. ValueError where it was made for another call.

    out: a tensor like the result, which is written to it and returned; it may share no memory with the others. Kernels
    write to it where rows lie in whole 16 bytes; else, and where none runs, it is copied to. No gradients.

    block_mask: a BlockMask of torch.nn.attention.flex_attention, (B or 1, Hq or 1, Sq, Sk), or block_lists() of one:
    which blocks of keys a block of queries sees, and what its mask_mod hides of those listed as partial. Beside it
    nothing else hides keys. What is made of a BlockMask is kept with it: the first call waits for the device.
    Gradients of q, k, v, also by the LSE, at the cost of a forward and a backward more.

    Raises ValueError or TypeError for what it does not take.
    """
    called = F.scaled_dot_product_attention
    # Dynamo of torch 2.14 cannot trace a method of the built-in function's __module__.
    if called is not _F_SDPA and str(getattr(called, "__module__", "")).startswith("torch.distributed."):
        raise RuntimeError(
            "attention: in context_parallel it sees the rows of one rank alone; call F.scaled_dot_product_attention"
        )
    check_bound("max_seqlen_q", max_seqlen_q), check_bound("max_seqlen_k", max_seqlen_k)
    seen = (*window_of(causal, window), softcap_of(softcap), scale)
    seen = (*seen, splits_of(num_splits), split_size_of(fixed_split_size, num_splits))
    operands, scales = (q, k, v), (k_scale, v_scale)
    given = (cu_seqlens_q, cu_seqlens_k, seqused_k)
    if out is not None:
        check_out(out, operands, sinks, *scales, *given, block_table)
    if plan is not None:
        check_is_plan(plan, cu_seqlens_q is not None and block_table is None and block_mask is None)
    if block_mask is not None:
        beside = {
            "causal or window": seen[:2] != (-1, -1), "softcap": softcap != 0.0, "sinks": sinks is not None,
            "k_scale, v_scale": any(x is not None for x in scales), "block_table": block_table is not None,
            "lengths": any(x is not None for x in given), "num_splits": num_splits is not None,
            "fixed_split_size": fixed_split_size is not None,
        }  # fmt: skip
        found = of_blocks(operands, block_mask, [name for name, asked in beside.items() if asked], scale, out)
        return found if return_lse else found[0]
    if block_table is not None:
        found = in_pages(operands, sinks, block_table, given, scales, seen, max_seqlen_q, out)
    elif cu_seqlens_q is not None or cu_seqlens_k is not None:
        given = (cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k, seqused_k)
        found = on_end(operands, sinks, given, seen, scales, out, plan)
    elif seqused_k is not None:
        found = some_of_each(operands, sinks, seqused_k, seen, scales, out)
    else:
        found = _batches(operands, sinks, seen, scales, return_lse, out)
    result = found[0] if out is None else out
    return (result, found[1]) if return_lse else result


def _batches(  # noqa: PLR0913
    operands: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None, settings: tuple, scales: Scales, return_lse: bool,
    into: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Of one length, all of whose keys count: (B, Sq, Hq, Dv) and, if it is asked for, (B, Hq, Sq)."""
    (q, k, v), (*window, softcap, scale, splits, split_size) = operands, settings
    seen, by_kind = Window(*window), splits != 0 or split_size != 0
    check_operands(q, k, v)
    eight = check_dtypes(q, k, v)
    query, key, value = (x.transpose(1, 2) for x in operands)
    if by_kind and are_few_rows(query, key, value):
        used = torch.full(k.shape[:1], k.shape[1], dtype=torch.int32, device=k.device)
        return some_of_each(operands, sinks, used, settings, scales, into)
    sinks = as_sinks(sinks, q)
    keys, of_keys = _some_keys(seen, q.shape[1], k.shape[1]), scales_of(eight, scales, key, value)
    key, value = key[:, :, keys], value[:, :, keys]
    more = sinks is not None or return_lse or softcap != 0.0 or by_kind
    if more:
        refuse_forward_mode()
    if eight:
        of_keys = tuple(x[:, :, keys] for x in of_keys)
    if eight and more:
        query, key, value = in_16_bits(query, key, value, *of_keys)
    into = None if into is None else into.transpose(1, 2)
    lse, filled = None, False
    if eight and not more:
        mask = _as_mask(seen, query, key)
        out = torch.ops.torch_flashplug.cached_fwd(query, key, value, *of_keys, mask, False, scale)
    elif more and softcap == 0.0 and are_few_rows(query, key, value):
        out, lse = _beside_sinks(query, key, value, sinks, _as_mask(seen, query, key), scale)
    elif more or (_is_for_kernels(seen, query, key, value) and forward_ad._current_level < 0):
        given = (*describe_call.under_autocast(q.device.type, query, key, value), sinks, None, None, None)
        (out, lse), filled = written("attention_fwd", into, *given, *settings, *NO_PLAN), into is not None
    else:
        top_left = _is_top_left(seen, query.shape[2], key.shape[2])
        mask = None if top_left else _as_mask(seen, query, key)
        if query.device.type == "cpu" and isinstance(scale, int | float):
            if not -math.inf < scale < math.inf:
                # Without a mask torch's CPU kernel drops the NaN that such a scale makes of scores.
                top_left, mask = False, seen.seen(query.shape[2], key.shape[2], query.device)
            elif top_left and scale <= 0.0:
                query, scale = _with_positive_scale(query, scale)
        grouped = _decided(query.shape[1] != key.shape[1])
        told = {"is_causal": _decided(top_left), "scale": scale, "enable_gqa": grouped}
        out = F.scaled_dot_product_attention(query, key, value, mask, **told)
    if into is not None and not filled:
        into.copy_(out)
    out = out.transpose(1, 2)
    return out.to(q.dtype) if eight else out, lse


def check_before(  # noqa: PLR0913
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool | str, window: tuple, softcap: float, sinks: Tensor | None,
    scale: float | None, seqused_k: Tensor, block_table: Tensor | None,
) -> None:  # fmt: skip
    """What attention() raises of such arguments, ahead of what the caller does to caches."""
    window_of(causal, window), softcap_of(softcap)
    if scale is not None and not isinstance(scale, int | float):
        raise TypeError(f"attention: scale is {type(scale).__name__}; give a number, or None")
    check_rank("q", q, 4, "a tensor of shape (batch, length, heads, head dim)")
    as_sinks(sinks, q)
    if block_table is None:
        check_operands(q, k, v)
        check_same(q, k, v)
    else:
        check_pages(q, k, v, block_table, seqused_k, q.shape[0])
        check_dtypes(q, k, v)


# ---- which keys a query sees ----


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
    if not hides or _is_top_left(seen, Sq, Sk) or not have_kernels(query, key, value):
        return False
    return not are_few_rows(query, key, value)


def _with_positive_scale(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """Return a query and a positive scale that give the same scores, whose gradients agree, too.

    Torch's CPU kernel puts -inf where is_causal hides a score and multiplies by the scale afterwards. The product is
    +inf where the scale is negative, and NaN where it is 0, of either sign.
    """
    return (-query, -scale) if scale < 0.0 else (query * 0.0, 1.0)


def _decided(told: bool) -> bool:
    """Of traced sizes a comparison is a symbol, also after bool(), and F.scaled_dot_product_attention takes none."""
    if told:  # noqa: SIM103
        return True
    return False


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
