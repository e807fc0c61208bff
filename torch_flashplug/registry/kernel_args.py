"""The ABI of every kernel: its arguments by name, in order; C++ packs what is listed here (src/launch/kernel_args.h).
The stream comes last in each and is not listed. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a kernel: a tensor in global memory, or a number."""

    name: str  # a slot of src/core/tables.h, which a call fills, or a fact of src/core/call_facts.h, which fills itself
    rank: int  # dims of a tensor; of a number 0
    dtype: str  # one of DTYPES: the operand that the kernel takes it to be made like, or a fixed one
    scalar: bool  # passed by value
    optional: bool  # a feature's (features.py): TVM-FFI's None to kernels without it
    what: str  # shape of a tensor, who provides it, what it means

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES or self.scalar != (self.rank == 0):
            raise ValueError(f"argument {self.name}: dtype {self.dtype!r}, rank {self.rank}; numbers have rank 0")


DTYPES = ("query", "key", "value", "output", "fp32", "int32", "int64", "bool")


def _tensor(name: str, rank: int, dtype: str, what: str, *, optional: bool = False) -> Argument:
    return Argument(name, rank, dtype, scalar=False, optional=optional, what=what)


def _number(name: str, dtype: str, what: str, *, optional: bool = False) -> Argument:
    return Argument(name, 0, dtype, scalar=True, optional=optional, what=what)


_OPERANDS = (
    _tensor("q", 4, "query", "(B, Hq, Sq, D), the caller's"),
    _tensor("k", 4, "key", "(B, Hkv, Sk, D), the caller's"),
    _tensor("v", 4, "value", "(B, Hkv, Sk, Dv), the caller's"),
)
_RESULTS = (
    _tensor("o", 4, "output", "(B, Hq, Sq, Dv), allocated by the op"),
    _tensor("lse", 3, "fp32", "(B, Hq, Sq), allocated by the op; natural logarithm"),
)
_SCALE = _number("scale", "fp32", "of the scores")
_SCALES = (_number("scale_log2", "fp32", "scale * log2(e)"), _SCALE)
_DRAWN = (
    _tensor("counter", 1, "int32", "(1,), zero, of src/launch/counters.cpp; this launch's alone while it runs"),
    _number("num_ctas", "int32", "SMs of the device: CTAs to run"),
)

_MASK = (
    _tensor("mask", 4, "bool", "(B or 1, Hq or 1, rows, Sk), stride 0 where broadcast; empty: digested", optional=True),
    _tensor("digest", 3, "int32", "(B or 1, Hq or 1, n), what is made of the mask (mask.py)", optional=True),
)
_WHERE = "(B, Hq, Sq, Sk), stride 0 where broadcast, the last one 1; sm_80: the others multiples of 16 bytes"
_SUMMED = "(1 to B, 1 to Hq, Sq or 1, Sk or 1), allocated by the op, fewer where the bias is broadcast: summed there"
_BIAS = (
    _tensor("bias", 4, "query", _WHERE, optional=True),
    _tensor("bias32", 4, "fp32", f"{_WHERE}; in the place of the other", optional=True),
)
_BIAS_GRADIENT = (
    _tensor("dbias", 4, "query", f"{_SUMMED}; strides as the bias's", optional=True),
    _tensor("dbias32", 4, "fp32", f"{_SUMMED}; in the place of the other", optional=True),
)
_DROPOUT = (
    _tensor("seed", 1, "int64", "(1,), what bits are drawn from", optional=True),
    _number("dropout_p", "fp32", "probability with which a score is dropped", optional=True),
)
_WINDOW = (
    _number("left", "int32", "keys before a query's own that it sees", optional=True),
    _number("right", "int32", "and behind it", optional=True),
    _number("bottom_right", "int32", "whether its own key is Sk - Sq behind it, or the first one's 0", optional=True),
)
_SOFTCAP = _number("softcap", "fp32", "cap of the scores, behind their scale", optional=True)
_LENGTHS = (
    _tensor("cu_q", 1, "int32", "(sequences + 1,), where the rows of each begin, and end; B is 1", optional=True),
    _tensor("cu_k", 1, "int32", "likewise of keys", optional=True),
    _tensor("used_k", 1, "int32", "(sequences,), how many keys of each count; (0,): all", optional=True),
    _tensor("lists", 1, "int32", "(n,), scratch: lists of tiles (varlen.py); the op's", optional=True),
)
_PAGES = _tensor("pages", 2, "int32", "(B, n), numbers of each sequence's pages; k, v: (pages, Hkv, rows of a page, D)",
                 optional=True)  # fmt: skip
_SPLIT_SIZE = _number("split_size", "int32", "keys of a split, a multiple of tile_n; 0: alike", optional=True)
_SINKS = _tensor("sinks", 1, "fp32", "(Hq,), a logit in each row's sum beside keys'; (0,): none", optional=True)
_OF_LSE = _tensor("dlse", 3, "fp32", "(B, Hq, Sq), autograd's, of the LSE; (B, Hq, 0): none", optional=True)
_EIGHT = _tensor(
    "scratch8", 1, "int32", "(n,), scratch: operands in 8 bits (quantized_qkv.py); the op's", optional=True
)
_CACHE = (
    _tensor("k_scale", 3, "fp32", "(B, Hkv, Sk), stride 0 where one serves all: of a key's numbers", optional=True),
    _tensor("v_scale", 3, "fp32", "(B, Hkv, Sk), likewise of a value's", optional=True),
    _number("rotated", "int32", "whether keys are rotated (quantised.rotate): then queries are, too", optional=True),
)
_FEATURES = (*_MASK, *_BIAS, *_DROPOUT)

FORWARD = (*_OPERANDS, *_RESULTS, *_SCALES, *_DRAWN, *_FEATURES, _EIGHT, *_WINDOW, _SINKS, _SOFTCAP, *_LENGTHS)
DECODE = (
    *_OPERANDS,
    *_RESULTS,
    # Where no split goes through memory one float, at any address: nothing is written.
    _tensor("partials", 1, "fp32", "(B * Hq * Sq * splits * (Dv + 2),), where splits > cluster; the op's scratch"),
    _SCALE,
    _number("splits", "int32", "CTAs that share the keys of a tile of rows; at most one for each block of keys"),
    _number("cluster", "int32", "CTAs that add up in shared memory: all splits of a tile, at most CLUSTER; or 1"),
    _MASK[0],
    *_BIAS,
    *_CACHE,
    *_WINDOW,
    _SINKS,
    _SOFTCAP,
    _PAGES,
    _LENGTHS[2],
    _SPLIT_SIZE,
)
_GIVEN = (
    _tensor("o", 4, "output", "(B, Hq, Sq, Dv), the forward's"),
    _tensor("do", 4, "output", "(B, Hq, Sq, Dv), autograd's"),
    _tensor("lse", 3, "fp32", "(B, Hq, Sq), the forward's"),
)
_OF_ROWS = "(B, Hq, 2, Sq rounded up to scratch_rows), scratch: LSE * log2(e) (inf: none), delta"
_ROWS = _tensor("rows", 4, "fp32", _OF_ROWS)
BACKWARD = (
    *_OPERANDS,
    *_GIVEN,
    _tensor("dq", 4, "query", "(B, Hq, Sq, D), allocated by the op; not written: any of that shape"),
    _tensor("dk", 4, "key", "(B, Hkv, Sk, D), likewise; Hopper: a multiple of Hkv where tiles share query heads"),
    _tensor("dv", 4, "value", "(B, Hkv, Sk, Dv), likewise"),
    _ROWS,
    _tensor("scratch", 1, "fp32", "(n,), scratch: dQ in register order and counters; in parts: unused"),
    *_SCALES,
    *_DRAWN,
    _number("wanted", "int32", "a sum of 1 (dQ) and 2 (dK and dV); one of them: only to kernels in parts"),
    *_FEATURES,
    *_WINDOW,
    _OF_LSE,
    _SOFTCAP,
    *_LENGTHS,
)
DBIAS = (
    *_OPERANDS,
    *_GIVEN,
    _ROWS,
    *_SCALES,
    *_DRAWN,
    *_BIAS,
    *_BIAS_GRADIENT,
    *_DROPOUT,
)
TILE_BACKWARD = (
    *_OPERANDS,
    *_GIVEN[1:],
    _tensor("dq", 4, "query", "(B, Hq, Sq, D), allocated by the op"),
    _tensor("dk", 4, "key", "(B, Hq, Sk, D), likewise"),
    _tensor("dv", 4, "value", "(B, Hq, Sk, Dv), likewise"),
    *_SCALES,
    _number("ranges", "int32", "of the batch: a CTA has one head and one of them"),
    *_BIAS,
    *_BIAS_GRADIENT,
)
# Which of them a kind of kernel (spec.KINDS) takes.
OF_KIND = {
    **{"fwd": FORWARD, "decode": DECODE, "bwd": BACKWARD, "detbwd": BACKWARD, "partbwd": BACKWARD},
    "dbias": DBIAS,
    "tilebwd": TILE_BACKWARD,
}
