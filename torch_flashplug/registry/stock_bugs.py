"""Table of the calls for which stock torch crashes, raises or returns wrong results, with the evidence.

Auto mode serves such calls wherever a kernel can run, whatever the speed. The dispatcher (src/dispatch/) checks the
rows of this table before any choice row.
"""

from __future__ import annotations

from dataclasses import dataclass

# Facts of a call that a row may require, in the order of CallFact in src/core/tables.h.
FACTS = (
    "unaligned_base",  # the address of an operand is no multiple of 16 bytes
    "unaligned_unit_dim",  # the stride of an operand's dim of size 1 is no multiple of 16 bytes
    "broadcast_query",  # a dim of query has stride 0
    "mixed_dims",  # D != Dv
    "head_dims_aligned",  # D and Dv fill whole 16-byte units
    "one_row",  # Sq == 1
    "one_key",  # Sk == 1
    "unusual_scale",  # the scale is zero (32-bit subnormals count as zero) or negative
    "last_dim_contiguous",  # the last dims are contiguous; otherwise stock uses math, which is correct
    "mask",  # attn_mask is bool
    "bias",  # attn_mask has the dtype of the query
    "bias32",  # attn_mask is fp32, and the query has 16 bits
    "all_dropped",  # dropout_p is 1
    "beyond_grid",  # more than 65535 batches or query heads
    "gradients",  # autograd will need a backward, or may need a backward (dropout under a reentrant checkpoint)
    "half_key_block",  # Sk is a multiple of 128, plus 64
)


@dataclass(frozen=True, slots=True)
class StockBug:
    """A class of calls: all calls for which all `facts` are true."""

    facts: tuple[str, ...]
    stock: str  # effect of stock: the end of "stock would ..."
    evidence: str  # date, machine, and observed calls
    features: tuple[str, ...] = ("causal",)  # features (features.py) of the observed calls


_SEEN = "2026-11-22 H100, torch 2.11 + cuDNN 9.19"
_STRIDE_OF_ONE = (
    "raise if the efficient attention serves the call (value is not correctly aligned, no kernel found), which reads "
    "the stride of a dim of size 1"
)
_NAN_BELOW = "if the LSE of a row is below -88.7 (cuDNN, whose exp(0 - LSE) overflows)"
STOCK_BUGS: tuple[StockBug, ...] = (
    StockBug(
        ("unaligned_base", "last_dim_contiguous", "head_dims_aligned", "one_row"),
        "end the CUDA context (misaligned address, or failure of cuDNN's execute)",
        f"{_SEEN}: q (1, 32, 1, 16), k (1, 8, 1, 16) at an odd storage offset; q (1, 4, 1, 128), k (1, 1, 3, 128)",
    ),
    StockBug(
        ("unaligned_base", "last_dim_contiguous", "head_dims_aligned", "one_key"),
        "end the CUDA context (misaligned address)",
        f"{_SEEN}: q (5, 21, 1, 128), k (5, 3, 1, 128) at an odd storage offset",
    ),
    StockBug(
        ("broadcast_query", "mixed_dims", "last_dim_contiguous", "head_dims_aligned"),
        "raise (cuDNN: the stride for the last dimension), and end the process at a second call",
        f"{_SEEN}: q (2, 3, 64, 80) expanded over heads, Dv 64",
    ),
    StockBug(
        ("unaligned_unit_dim", "last_dim_contiguous", "head_dims_aligned", "one_row"),
        _STRIDE_OF_ONE,
        f"{_SEEN}: gradients, as with one key",
    ),
    StockBug(
        ("unaligned_unit_dim", "last_dim_contiguous", "head_dims_aligned", "one_key"),
        _STRIDE_OF_ONE,
        f"{_SEEN}: gradients of v (2, 4, 1, 96), by transpose from (2, 4, 96, 1); q (1, 1, 4, 32), v (1, 1, 1, 256)",
    ),
    StockBug(
        ("unusual_scale",),
        "return NaN (cuDNN and flash, with is_causal or padded rows)",
        f"{_SEEN}: scales 0, -1/8, -1 and -8, lengths 129 to 333",
    ),
    StockBug(
        ("mask", "last_dim_contiguous", "head_dims_aligned"),
        "attend to all keys in rows without a visible key (cuDNN), and return NaN gradients at some lengths",
        f"{_SEEN}: left-padded batches; dQ at lengths of 64 more than a multiple of 128 (pytorch#196678); "
        "2026-11-25 H100: also with dropout: q (1, 7, 64, 216), Dv 8; q (1, 18, 160, 208), Sk 64",
        features=("mask", "dropout"),
    ),
    StockBug(
        ("bias32", "last_dim_contiguous", "head_dims_aligned"),
        "read an fp32 mask as a 16-bit mask (cuDNN: NaN)",
        f"{_SEEN}: pytorch#191612, q in bf16 and fp16; 2026-11-24 H200: also with dropout_p 0.1",
        features=("bias32", "dropout"),
    ),
    StockBug(
        ("bias", "last_dim_contiguous", "head_dims_aligned"),
        "return 0 for rows hidden by finfo.min (cuDNN, efficient), whose keys all count alike, and return NaN "
        "gradients at some lengths",
        f"{_SEEN}: dQ at lengths of 64 more than a multiple of 128 (pytorch#196678)",
        features=("bias", "dropout"),
    ),
    StockBug(
        ("all_dropped", "last_dim_contiguous", "head_dims_aligned"),
        "raise for dropout_p 1, or return NaN (efficient attention, which divides by 1 - dropout_p)",
        "2026-11-25 H100, torch 2.11: q (1, 1, 1, 128), k (1, 1, 96, 128), is_causal; math returns zeros",
        features=("causal", "mask", "bias", "bias32", "dropout"),
    ),
    StockBug(
        ("beyond_grid", "gradients", "last_dim_contiguous", "head_dims_aligned"),
        "raise (failure of cuDNN's execute beyond 65535 batches or heads)",
        "2026-11-27 H100, torch 2.11 + cuDNN 9.19: (65536, 1, 16, 64), (1, 65536, 16, 64), (70000, 1, 128, 64)",
        features=("causal", "dropout"),
    ),
    StockBug(
        ("beyond_grid", "one_row", "last_dim_contiguous", "head_dims_aligned"),
        "raise (CUDA error: invalid argument)",
        "2026-11-27 H100, torch 2.11: (70000, 1, 1, 64), also without gradients",
    ),
    StockBug(
        ("gradients", "one_row", "last_dim_contiguous", "head_dims_aligned"),
        f"return NaN for all of dK and dV {_NAN_BELOW}",
        "2026-11-27 H100, torch 2.11 + cuDNN 9.19: Sk 64 to 512, D 64 to 256, LSE -89 to -300; cuDNN 9.25 and 9.26 on "
        "an H200: cudnn-frontend#1072",
        features=(),
    ),
    StockBug(
        ("gradients", "half_key_block", "last_dim_contiguous", "head_dims_aligned"),
        f"return NaN for dQ {_NAN_BELOW}",
        "2026-11-27 H100, torch 2.11 + cuDNN 9.19: Sq 1 to 192, Sk 64 and 192, D 64 to 256; also with dropout: q "
        "(1, 2, 9, 64), Sk 192; masked: pytorch#196678",
        features=("dropout",),
    ),
)
