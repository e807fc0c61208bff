"""The public function `attention()`, with features for which F.scaled_dot_product_attention has no argument.

Long or differentiable calls with a window or sinks run on the kernels behind `attention.py`. A short forward-only call
with a window is converted to a mask and passed to F.scaled_dot_product_attention.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from ..ops.attention import NO_LENGTHS, NO_PLAN, AttentionParams, Window
from ..ops.paged import check_page_numbers
from ..ops.quantize_ahead import QuantizedKV
from ..torch_hooks import describe_call
from . import direct_attention
from .attention_args import (
    DENSE_RULE,
    Scale,
    Scales,
    call_op_with_out,
    check_bound,
    check_dtypes,
    check_operands,
    check_out,
    check_rank,
    check_same,
    checked_scale,
    dequantize_to_16bit,
    has_kernel,
    is_decode_call,
    is_shared_decode_call,
    normalize_kv_scales,
    normalize_sinks,
    params_of,
    refuse_forward_mode,
    softcap_of,
    values_of,
    window_of,
)
from .block_sparse import block_sparse_attention
from .masked_attention import attend_beside_sinks, tree_attention
from .quantize_kv import quantized_attention
from .varlen import check_pages, kv_length_attention, paged_attention, varlen_attention
from .varlen_plan import VarlenPlan, check_is_plan

_F_SDPA = torch._C._nn.scaled_dot_product_attention  # torch's built-in function; context_parallel replaces the name


def attention(  # noqa: PLR0913
    q: Tensor,
    k: Tensor | QuantizedKV,
    v: Tensor | None = None,
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
    tree_mask: Tensor | None = None,
    num_splits: int | None = None,
    fixed_split_size: int | None = None,
    plan: VarlenPlan | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    v_dim: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute softmax(q k^T scale) v with features for which F.scaled_dot_product_attention has no argument.

    Length comes before heads here, whereas F.scaled_dot_product_attention has heads before length. B is the batch size.
    Sq and Sk are the lengths of query and key. Hq and Hkv are the numbers of heads, and Hq is a multiple of Hkv. D and
    Dv are the head dims of key and value. T and Tk are the total numbers of tokens of packed sequences.

    A query row without visible keys gets zeros; the LSE of such a row is -inf, or the sink of the head. Gradients of q,
    k, v and sinks flow through the output and through the LSE.

    Args:
        q (Tensor): Queries (B, Sq, Hq, D), or (T, Hq, D) with `cu_seqlens_q`. Kernels take bf16 and fp16 on a GPU. Any
            other floating-point dtype runs as torch math, without a kernel.
        k (Tensor or QuantizedKV): Keys (B, Sk, Hkv, D), packed keys (Tk, Hkv, D), or with `block_table` a pool of pages
            (pages, rows of a page, Hkv, D). Dtype of `q`, or the 8 bits of a quantized cache: int8, float8_e4m3fn or
            float8_e5m2, with `q` in bf16 or fp16 for kernels. A kernel reads the 8 bits of decode calls (up to 64 query
            rows for each KV head). Calls with more query rows, or with a softcap, first convert K and V to 16 bits. So
            do decode calls without sequence lengths but with sinks or `return_lse`. The converted dtype is bf16, also
            for an fp16 query. 8-bit keys have no gradients. `QuantizedTensor` holds rotated and shifted keys. The
            result of `quantize_kv()` stands for `k` and `v` together. The only other arguments are then `causal` (False
            or "top_left", or any if Sq equals Sk), `scale`, `out` and `return_lse`, and there are no gradients.
        v (Tensor or None): Values, shaped as `k` with Dv in place of D, and with the dtype of `k`. None only with a
            `QuantizedKV`, or with `v_dim`.
        causal (bool or str): True and "bottom_right" make all keys visible to the last query. "top_left" makes one key
            visible to the first query, as `is_causal` of F.scaled_dot_product_attention does. Any value but False sets
            the right bound of `window` to 0.
        window (tuple or None): (left, right), the numbers of keys before and after a query's own key that are visible.
            None or -1 stands for all keys on that side. `causal` defines a query's own key; without `causal`, the
            diagonal ends at the bottom right.
        softcap (float): Scaled scores become softcap * tanh(score / softcap) (arXiv 2408.00118). 0.0: no softcap.
        sinks (Tensor or None): (Hq,), any floating-point dtype: one logit for each head, neither scaled nor masked. A
            sink is part of the softmax sum and has no value (arXiv 2309.17453; `s_aux` of gpt-oss). A sink must be
            finite, or -inf for no sink; the result for inf and NaN is undefined.
        scale (float or None): Factor of the scores before the softcap. None: 1 / sqrt(D). The scale of absorbed MLA
            is the caller's: 1 / sqrt(192) in DeepSeek-V3, where D is 576.
        cu_seqlens_q (Tensor or None): (sequences + 1,) int32 on the device of `q`: cumulative lengths of packed
            sequences, as in torch.nn.attention.varlen. Rows cu_seqlens_q[i] to cu_seqlens_q[i + 1] belong to sequence
            i, and only the keys of sequence i are visible to these rows. A sequence may have no rows or no keys. Rows
            before the first sequence and after the last sequence become zeros; their contents, in tensors and in
            gradients, are never read. The host does not check the values: a decreasing `cu_seqlens_q` gives wrong
            numbers, but no access outside the tensors.
        cu_seqlens_k (Tensor or None): (sequences + 1,) int32, cumulative lengths of the keys. None: `cu_seqlens_q`.
        max_seqlen_q (int or None): Not needed, except that 1 together with `cu_seqlens_q` and `block_table` says that
            each sequence has at most one query row.
        max_seqlen_k (int or None): Not needed.
        seqused_k (Tensor or None): (sequences,) int32, or (B,) with 4-D tensors: the KV length of each sequence. Keys
            from that length on are not visible. No gradients.
        block_table (Tensor or None): (B, n) int32, the page numbers of each sequence in a paged KV cache, together with
            `seqused_k` (B,). `q` is (B, Sq, Hq, D), or packed (T, Hq, D) with `cu_seqlens_q`. For decode (up to 64
            query rows for each KV head; packed queries need `max_seqlen_q=1`) a kernel reads the pages in place, if
            the rows of a page are a multiple of 16. Under `sdpa_backend("fa3")`, a kernel also reads the pages of
            packed queries in place. In all other cases, all pages of the tables are first copied into contiguous
            tensors. No gradients.
        k_scale (Tensor, float or None): Factor of 8-bit keys: a key is the stored number times `k_scale`, in fp32. A
            number or a tensor of shape (), (Hkv,), (B, Hkv) or (B, Hkv, Sk), where a dim may be 1; with `block_table`
            (pages, Hkv, rows of a page). None stands for 1, which int8 does not allow.
        v_scale (Tensor, float or None): Factor of 8-bit values, in the form of `k_scale`.
        block_mask (BlockMask, PreparedBlockMask or None): A BlockMask of torch.nn.attention.flex_attention of shape (B
            or 1, Hq or 1, Sq, Sk), or the result of `prepare_block_mask()`. The mask lists the visible blocks of keys
            for each block of queries, and its `mask_mod` masks scores in partial blocks. No other argument may mask
            keys then. The result of preprocessing is kept with a BlockMask, so only the first call waits for the
            device.
            Gradients of q, k and v exist; gradients through the LSE cost a second forward and a second backward.
        tree_mask (Tensor or None): (B, Sq, Sq) bool, a draft tree of speculative decoding. The last Sq keys of each
            sequence belong to the query rows, and tree_mask[b, i, j] is True where row i sees the key of row j. All
            earlier keys are visible, as far as the left bound of `window` allows. With `block_table` and `seqused_k`,
            or with a cache. Kernels read a mask over all keys, and pages are first copied into contiguous tensors. No
            gradients.
        num_splits (int or None): Number of CTAs among which the keys of decode are split, 1 to 255. None: the fastest
            number. 1 also promises batch-invariant results: a sequence gets the same bits of results and gradients
            alone and in any batch, for calls of the same form. The promise holds on one GPU, with equal dtype, head
            dims, heads and settings. The forms are: decode, with the same number of rows in each call, of dense
            batches, caches or pages (a multiple of 16 rows) without gradients; dense batches of more query rows, with
            the same number of rows in each call; packed sequences; packed sequences with pages. The selected kernels
            may be slower for short sequences and for a few long sequences. The promise holds for kernels, not for torch
            math.
        fixed_split_size (int or None): Number of keys in a split of decode, a multiple of 128, in place of
            `num_splits`. Each sequence is split after every `fixed_split_size` of its own keys, counted from the KV
            block in which the window begins. The promise is that of `num_splits=1`, for any width of `block_table`, and
            a long sequence still occupies many CTAs. A different size rounds differently. The capacity of a sequence,
            given by `block_table` or `k`, may be up to 255 splits. Calls of more query rows are not split.
        plan (VarlenPlan or None): The result of `plan_varlen()` for these packed sequences, so that the call does not
            build the lists of tiles again. The results are bitwise the same.
        out (Tensor or None): Tensor with the shape, dtype and device of the result, which is written to and returned.
            `out` may share no memory with any other tensor of the call. Kernels write directly into an `out` whose rows
            are whole multiples of 16 bytes. In all other cases, and without a kernel, the result is copied into `out`.
            No gradients.
        return_lse (bool): Also return the LSE, the natural logarithm of the softmax sum.
        v_dim (int or None): Number of columns of `k` used as values, in place of `v`: the values are
            `k[..., :v_dim]`. Absorbed MLA has D 576 and `v_dim` 512, and a single KV head. The result is the same as
            with a copy of the columns as `v`. Decode on an H100 or H200 (up to 512 query rows for each KV head,
            without gradients) can read `k` once, under `sdpa_backend("fa3")`, also for a view `k[..., :v_dim]` passed
            as `v`. Auto mode does not select the kernels, because the kernels never ran on a GPU.

    Returns:
        The output (B, Sq, Hq, Dv), or (T, Hq, Dv) for packed sequences, in the dtype of `q`. With `return_lse`, a pair
        of the output and the LSE (B, Hq, Sq) or (Hq, T), in fp32 (fp64 for fp64 operands).

    Raises:
        TypeError: An argument has an unsupported type or number of dims.
        ValueError: A value, shape, dtype or device is unsupported, or `plan` was made for a different call.
        RuntimeError: A derivative does not exist (forward mode, `out`), or the call is inside context_parallel.
    """
    is_quantized = isinstance(k, QuantizedKV)
    v = values_of(k, v, v_dim, is_quantized=is_quantized)
    called = F.scaled_dot_product_attention
    # Dynamo of torch 2.14 cannot trace a method of the built-in function's __module__.
    if called is not _F_SDPA and str(getattr(called, "__module__", "")).startswith("torch.distributed."):
        raise RuntimeError(
            "attention: attention() must be called outside of context_parallel, but got a call inside, where tensors "
            "hold only the rows of one rank. Call F.scaled_dot_product_attention there."
        )
    is_more_than_sdpa = cu_seqlens_q is not None or seqused_k is not None or window is not None or sinks is not None
    is_more_than_sdpa = is_more_than_sdpa or return_lse or type(softcap) is not float or softcap != 0.0
    if is_more_than_sdpa and not torch.compiler.is_compiling() and forward_ad._current_level < 0:
        results = direct_attention.attend(
            q, k, v, causal, window, softcap, sinks, scale, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
            seqused_k, block_table, k_scale, v_scale, block_mask, tree_mask, num_splits, fixed_split_size, plan, out,
            return_lse,
        )  # fmt: skip
        if results is not None:
            return results
    check_bound("max_seqlen_q", max_seqlen_q), check_bound("max_seqlen_k", max_seqlen_k)
    params = params_of(causal, window, softcap, scale, num_splits, fixed_split_size)
    operands, scales = (q, k, v), (k_scale, v_scale)
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_k)
    if out is not None and not is_quantized:
        check_out(out, operands, sinks, *scales, *lengths, block_table, tree_mask)
    if plan is not None and not is_quantized:
        check_is_plan(plan, cu_seqlens_q is not None and block_table is None and block_mask is None)
    if tree_mask is not None:
        conflicts = {
            "causal or the right bound of window": params.window.right >= 0, "softcap": softcap != 0.0,
            "cu_seqlens_q": cu_seqlens_q is not None, "cu_seqlens_k": cu_seqlens_k is not None,
            "num_splits": num_splits is not None, "fixed_split_size": fixed_split_size is not None,
            "block_mask": block_mask is not None, "plan": plan is not None, "a QuantizedKV": is_quantized,
        }  # fmt: skip
        names = [name for name, is_used in conflicts.items() if is_used]
        results = tree_attention(operands, sinks, tree_mask, seqused_k, block_table, scales, params, names, out)
        return results if return_lse else results[0]
    if block_mask is not None or is_quantized:
        conflicts = {
            "causal or window": params.window.is_bounded and not is_quantized, "window": is_quantized and bool(window),
            "softcap": softcap != 0.0, "sinks": sinks is not None, "k_scale, v_scale": scales != (None, None),
            "block_table": block_table is not None, "lengths": any(x is not None for x in lengths),
            "num_splits": num_splits is not None, "fixed_split_size": fixed_split_size is not None,
            "block_mask": is_quantized and block_mask is not None, "plan": is_quantized and plan is not None,
        }  # fmt: skip
        names = [name for name, is_used in conflicts.items() if is_used]
        results = (
            quantized_attention(q, k, v, causal, params, names, out)
            if is_quantized
            else block_sparse_attention(operands, block_mask, names, scale, out)
        )
        return results if return_lse else results[0]
    if block_table is not None:
        results = paged_attention(operands, sinks, block_table, lengths, scales, params, max_seqlen_q, out)
    elif cu_seqlens_q is not None or cu_seqlens_k is not None:
        lengths = (cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k, seqused_k)
        results = varlen_attention(operands, sinks, lengths, params, scales, out, plan)
    elif seqused_k is not None:
        results = kv_length_attention(operands, sinks, seqused_k, params, scales, out)
    else:
        results = _dense_attention(operands, sinks, params, scales, return_lse, out)
    result = results[0] if out is None else out
    return (result, results[1]) if return_lse else result


def _dense_attention(  # noqa: PLR0913
    operands: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None, params: AttentionParams, scales: Scales,
    return_lse: bool, out_buffer: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attend to all keys of a dense batch; return (B, Sq, Hq, Dv) and, where the call computes an LSE, (B, Hq, Sq)."""
    (q, k, v), window, scale = operands, params.window, params.scale
    check_operands(q, k, v)
    is_quantized = check_dtypes(q, k, v)
    query, key, value = (x.transpose(1, 2) for x in operands)
    if _is_for_kv_lengths(params, sinks, return_lse, query, key, value):
        kv_lengths = torch.full(k.shape[:1], k.shape[1], dtype=torch.int32, device=k.device)
        return kv_length_attention(operands, sinks, kv_lengths, params, scales, out_buffer)
    sinks = normalize_sinks(sinks, q)
    visible_keys, kv_scales = (
        _some_keys(window, q.shape[1], k.shape[1]),
        normalize_kv_scales(is_quantized, scales, key, value),
    )
    key, value = key[:, :, visible_keys], value[:, :, visible_keys]
    needs_attention_op = sinks is not None or return_lse or params.softcap != 0.0 or params.requests_splits
    if needs_attention_op:
        refuse_forward_mode()
    if is_quantized:
        kv_scales = tuple(x[:, :, visible_keys] for x in kv_scales)
    if is_quantized and needs_attention_op:
        query, key, value = dequantize_to_16bit(query, key, value, *kv_scales)
    out_buffer = None if out_buffer is None else out_buffer.transpose(1, 2)
    lse, filled = None, False
    if is_quantized and not needs_attention_op:
        mask = _as_mask(window, query, key)
        out = torch.ops.torch_flashplug.quantized_kv_fwd(
            query, key, value, *kv_scales, attn_mask=mask, k_is_rotated=False, scale=scale
        )
    elif needs_attention_op and params.softcap == 0.0 and is_decode_call(query, key, value):
        out, lse = attend_beside_sinks(query, key, value, sinks, _as_mask(window, query, key), scale)
    elif needs_attention_op or (_is_for_kernels(window, query, key, value) and forward_ad._current_level < 0):
        inputs = describe_call.under_autocast(q.device.type, query, key, value)
        op_args = (*inputs, sinks, *NO_LENGTHS, *params, *NO_PLAN)
        (out, lse), filled = call_op_with_out("attention_fwd", out_buffer, *op_args), out_buffer is not None
    else:
        top_left = _is_top_left(window, query.shape[2], key.shape[2])
        mask = None if top_left else _as_mask(window, query, key)
        if query.device.type == "cpu" and isinstance(scale, int | float):
            if not -math.inf < scale < math.inf:
                # Without a mask, torch's CPU kernel drops the NaN scores of a scale that is not finite.
                top_left, mask = False, window.to_mask(query.shape[2], key.shape[2], query.device)
            elif top_left and scale <= 0.0:
                query, scale = _with_positive_scale(query, scale)
        is_grouped = _decided(query.shape[1] != key.shape[1])
        sdpa_kwargs = {"is_causal": _decided(top_left), "scale": scale, "enable_gqa": is_grouped}
        out = F.scaled_dot_product_attention(query, key, value, mask, **sdpa_kwargs)
    if out_buffer is not None and not filled:
        out_buffer.copy_(out)
    out = out.transpose(1, 2)
    return out.to(q.dtype) if is_quantized else out, lse


def _is_for_kv_lengths(  # noqa: PLR0913
    params: AttentionParams, sinks: Tensor | None, return_lse: bool, query: Tensor, key: Tensor, value: Tensor
) -> bool:
    """Return True if the kernels for caches with KV lengths run a call, with the length of the cache as KV length.

    F.scaled_dot_product_attention has no argument for the call. Calls with shared values have no further kernels.
    """
    if params.requests_splits and is_decode_call(query, key, value):
        return True
    Sq, Sk, window = query.shape[2], key.shape[2], params.window
    hides = _hides_left(window, Sq, Sk) or _hides_right(window, Sq, Sk)
    needs_op = hides or sinks is not None or return_lse or params.requests_splits
    return needs_op and params.softcap == 0.0 and is_shared_decode_call(query, key, value)


def check_before(  # noqa: PLR0913
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool | str, window: tuple[int, int], softcap: float,
    sinks: Tensor | None, scale: float | None, seqused_k: Tensor, block_table: Tensor | None,
) -> None:  # fmt: skip
    """Raise the errors of attention() for these arguments, before the caller writes into caches."""
    window_of(causal, window), softcap_of(softcap), checked_scale(scale)
    check_rank("q", q, 4, DENSE_RULE)
    normalize_sinks(sinks, q)
    if block_table is None:
        check_operands(q, k, v)
        check_same(q, k, v)
    else:
        check_pages(q, k, v, block_table, seqused_k, q.shape[0])
        check_dtypes(q, k, v)
        check_page_numbers(block_table, seqused_k, *k.shape[:2])


# ---- visible keys of a query ----


def _some_keys(window: Window, Sq: int, Sk: int) -> slice:
    """Return the range of keys visible to at least one query. The window stays valid for this range alone."""
    if not window.bottom_right:
        return slice(0, Sk if window.right < 0 else min(Sk, Sq + window.right))
    return slice(0 if window.left < 0 else max(0, Sk - Sq - window.left), Sk)


def _hides_left(window: Window, Sq: int, Sk: int) -> bool:
    last = Sk - 1 if window.bottom_right else Sq - 1  # position of the last query's own key
    return 0 <= window.left < last


def _hides_right(window: Window, Sq: int, Sk: int) -> bool:
    first = Sk - Sq if window.bottom_right else 0
    return window.right >= 0 and first + window.right < Sk - 1


def _is_top_left(window: Window, Sq: int, Sk: int) -> bool:
    """Return True if the window equals `is_causal` of F.scaled_dot_product_attention."""
    corner = not window.bottom_right or Sq == Sk
    return corner and window.right == 0 and _hides_right(window, Sq, Sk) and not _hides_left(window, Sq, Sk)


def _as_mask(window: Window, query: Tensor, key: Tensor) -> Tensor | None:
    """Return the window as a bool mask (Sq, Sk), or None if all keys are visible to all queries."""
    Sq, Sk = query.shape[2], key.shape[2]
    hides = _hides_left(window, Sq, Sk) or _hides_right(window, Sq, Sk)
    return window.to_mask(Sq, Sk, query.device) if hides else None


def _is_for_kernels(window: Window, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return True if a kernel runs this window without the mask needed by F.scaled_dot_product_attention.

    Decode calls are faster with the mask, because the keys of a masked decode call are split.
    """
    Sq, Sk = query.shape[2], key.shape[2]
    hides = _hides_left(window, Sq, Sk) or _hides_right(window, Sq, Sk)
    if not hides or _is_top_left(window, Sq, Sk) or not has_kernel(query, key, value):
        return False
    return not is_decode_call(query, key, value)


def _with_positive_scale(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """Return a query and a positive scale with the same scores and the same gradients.

    Torch's CPU kernel puts -inf where is_causal masks a score and multiplies by the scale afterwards. The product is
    +inf where the scale is negative, and NaN where it is 0, of either sign.
    """
    return (-query, -scale) if scale < 0.0 else (query * 0.0, 1.0)


def _decided(flag: bool) -> bool:
    """Return the flag as a plain bool.

    A comparison of traced sizes is a symbol, even after bool(), and F.scaled_dot_product_attention takes no symbol.
    """
    if flag:  # noqa: SIM103
        return True
    return False
