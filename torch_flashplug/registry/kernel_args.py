"""ABI of the kernels: the arguments of each kind of kernel by name, in order.

C++ packs the arguments in the order of the lists (src/launch/kernel_args.h). The CUDA stream is the last argument of
every kernel and is not listed. The module imports only the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a kernel: a tensor in global memory, or a number."""

    name: str  # filled by a call (src/core/tables.h), or a fact of src/core/call_facts.h, filled automatically
    rank: int  # number of dims of a tensor; 0 for a number
    dtype: str  # a name of DTYPES: the operand with the same dtype, or a fixed dtype
    is_optional: bool  # belongs to a feature (features.py); kernels without the feature get TVM-FFI's None
    description: str  # shape of a tensor, the provider, and the meaning

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"argument {self.name}: dtype must be one of {', '.join(DTYPES)}, but got {self.dtype!r}")

    @property
    def is_scalar(self) -> bool:
        """True if the argument is passed by value."""
        return self.rank == 0


DTYPES = ("query", "key", "value", "output", "fp32", "int32", "int64", "bool")


def _tensor(name: str, rank: int, dtype: str, description: str, *, is_optional: bool = False) -> Argument:
    return Argument(name, rank, dtype, is_optional=is_optional, description=description)


def _number(name: str, dtype: str, description: str, *, is_optional: bool = False) -> Argument:
    return Argument(name, 0, dtype, is_optional=is_optional, description=description)


_OPERANDS = (
    _tensor("q", 4, "query", "(B, Hq, Sq, D), query of the caller"),
    _tensor("k", 4, "key", "(B, Hkv, Sk, D), key of the caller"),
    _tensor("v", 4, "value", "(B, Hkv, Sk, Dv), value of the caller"),
)
_RESULTS = (
    _tensor("o", 4, "output", "(B, Hq, Sq, Dv), allocated by the op"),
    _tensor("lse", 3, "fp32", "(B, Hq, Sq), natural logarithm, allocated by the op"),
)
_SCALE = _number("scale", "fp32", "scale of the scores")
_SCALES = (_number("scale_log2", "fp32", "scale * log2(e)"), _SCALE)
_TILE_SCHEDULER = (
    _tensor(
        "counter", 1, "int32", "(1,), zero, from src/launch/counters.cpp; used by no other launch at the same time"
    ),
    _number("num_ctas", "int32", "number of CTAs to run: the SMs of the device"),
)

_MASK = (
    _tensor(
        "mask",
        4,
        "bool",
        "(B or 1, Hq or 1, rows, Sk), stride 0 in broadcast dims; empty: preprocessed",
        is_optional=True,
    ),
    _tensor("mask_metadata", 3, "int32", "(B or 1, Hq or 1, n), metadata of the mask (mask.py)", is_optional=True),
)
_BIAS_SHAPE = "(B, Hq, Sq, Sk), stride 0 in broadcast dims, last stride 1; sm_80: other strides multiples of 16 bytes"
_BIAS_GRADIENT_SHAPE = (
    "(1 to B, 1 to Hq, Sq or 1, Sk or 1), allocated by the op; summed along broadcast dims of the bias"
)
_BIAS = (
    _tensor("bias", 4, "query", _BIAS_SHAPE, is_optional=True),
    _tensor("bias32", 4, "fp32", f"{_BIAS_SHAPE}; instead of bias", is_optional=True),
)
_BIAS_GRADIENT = (
    _tensor("dbias", 4, "query", f"{_BIAS_GRADIENT_SHAPE}; strides as in bias", is_optional=True),
    _tensor("dbias32", 4, "fp32", f"{_BIAS_GRADIENT_SHAPE}; instead of dbias", is_optional=True),
)
_DROPOUT = (
    _tensor("seed", 1, "int64", "(1,), seed of the dropout bits", is_optional=True),
    _number("dropout_p", "fp32", "probability of dropping a score", is_optional=True),
)
_WINDOW = (
    _number("left", "int32", "number of visible keys before the key of the query's position", is_optional=True),
    _number("right", "int32", "number of visible keys behind the key of the query's position", is_optional=True),
    _number("bottom_right", "int32", "1: query i has key i + Sk - Sq; 0: key i", is_optional=True),
)
_SOFTCAP = _number("softcap", "fp32", "softcap of the scaled scores", is_optional=True)
_LENGTHS = (
    _tensor(
        "cu_seqlens_q", 1, "int32", "(sequences + 1,), starts of the query rows, and the end; B is 1", is_optional=True
    ),
    _tensor("cu_seqlens_k", 1, "int32", "(sequences + 1,), starts of the keys, and the end", is_optional=True),
    _tensor("seqused_k", 1, "int32", "(sequences,), KV length of each sequence; (0,): all keys", is_optional=True),
    _tensor("tile_lists", 1, "int32", "(n,), workspace of the op: tile lists (varlen.py)", is_optional=True),
)
_BLOCK_TABLE = _tensor("block_table", 2, "int32", "(B, n), page indices; k and v are (pages, Hkv, rows of a page, D)",
                 is_optional=True)  # fmt: skip
_SPLIT_SIZE = _number("split_size", "int32", "keys of a split, a multiple of tile_n; 0: equal splits", is_optional=True)
_EVEN_SPLITS = _number(
    "even_splits", "int32", "balanced splits: splits of the longest sequence if lengths are even", is_optional=True
)
_SINKS = _tensor("sinks", 1, "fp32", "(Hq,), a further logit in the softmax of each row; (0,): none", is_optional=True)
_LSE_GRADIENT = _tensor(
    "dlse", 3, "fp32", "(B, Hq, Sq), gradient of the LSE, from autograd; (B, Hq, 0): none", is_optional=True
)
_QUANTIZED = (
    _tensor("quant_workspace", 1, "int32", "(n,), workspace of the op: Q in 8 bits (quantized_qkv.py)",
            is_optional=True),
    _tensor("quantized_kv", 1, "int32", "(n,), K and V in 8 bits: workspace of the op, or the caller's",
            is_optional=True),
    _tensor("k_samples", 4, "key", "(B, Hkv, keys, D): k, or a copy of the sampled keys of k", is_optional=True),
    _number("quantizes_kv", "int32", "1: the call quantizes K and V; 0: quantized_kv holds them already",
            is_optional=True),
)  # fmt: skip
_CACHE = (
    _tensor("k_scale", 3, "fp32", "(B, Hkv, Sk), scale of each key, stride 0 in broadcast dims", is_optional=True),
    _tensor("v_scale", 3, "fp32", "(B, Hkv, Sk), scale of each value, stride 0 in broadcast dims", is_optional=True),
    _number(
        "k_is_rotated",
        "int32",
        "1: keys are rotated (quantize_reference.py), so queries are rotated, too",
        is_optional=True,
    ),
)
_FEATURES = (*_MASK, *_BIAS, *_DROPOUT)

FORWARD = (
    *_OPERANDS,
    *_RESULTS,
    *_SCALES,
    *_TILE_SCHEDULER,
    *_FEATURES,
    *_QUANTIZED,
    *_WINDOW,
    _SINKS,
    _SOFTCAP,
    *_LENGTHS,
    _BLOCK_TABLE,
)
DECODE = (
    *_OPERANDS,
    *_RESULTS,
    # If no split goes through memory, `partials` is a single float at any address, and nothing is written.
    _tensor("partials", 1, "fp32", "(B * Hq * Sq * splits * (Dv + 2),) if splits > cluster; workspace of the op"),
    _SCALE,
    _number("splits", "int32", "CTAs that share the keys of a tile; balanced: items (balanced_splits.py)"),
    _number("cluster", "int32", "CTAs that combine in shared memory: all splits (<= MAX_CLUSTER_SIZE), or 1"),
    _MASK[0],
    *_BIAS,
    *_CACHE,
    *_WINDOW,
    _SINKS,
    _SOFTCAP,
    _BLOCK_TABLE,
    _LENGTHS[2],
    _SPLIT_SIZE,
    _EVEN_SPLITS,
)
_FORWARD_RESULTS = (
    _tensor("o", 4, "output", "(B, Hq, Sq, Dv), output of the forward"),
    _tensor("do", 4, "output", "(B, Hq, Sq, Dv), gradient of the output, from autograd"),
    _tensor("lse", 3, "fp32", "(B, Hq, Sq), LSE of the forward"),
)
_ROW_STATS_SHAPE = (
    "(B, Hq, 2, Sq rounded up to workspace_block_rows), workspace: LSE * log2(e) (inf: no visible key), delta"
)
_ROW_STATS = _tensor("row_stats", 4, "fp32", _ROW_STATS_SHAPE)
BACKWARD = (
    *_OPERANDS,
    *_FORWARD_RESULTS,
    _tensor("dq", 4, "query", "(B, Hq, Sq, D), allocated by the op; any tensor of the shape if not needed"),
    _tensor("dk", 4, "key", "(B, Hkv, Sk, D), like dq; Hopper: a multiple of Hkv heads if tiles share query heads"),
    _tensor("dv", 4, "value", "(B, Hkv, Sk, Dv), like dk"),
    _ROW_STATS,
    _tensor(
        "dq_workspace", 1, "fp32", "(n,), workspace: dQ in register order, and counters; unused by the split backward"
    ),
    *_SCALES,
    *_TILE_SCHEDULER,
    _number(
        "needs_grad",
        "int32",
        "gradients to compute: sum of 1 (dQ) and 2 (dK and dV); a single part only for the split backward",
    ),
    *_FEATURES,
    *_WINDOW,
    _LSE_GRADIENT,
    _SOFTCAP,
    *_LENGTHS,
)
DBIAS = (
    *_OPERANDS,
    *_FORWARD_RESULTS,
    _ROW_STATS,
    *_SCALES,
    *_TILE_SCHEDULER,
    *_BIAS,
    *_BIAS_GRADIENT,
    *_DROPOUT,
)
TILE_BACKWARD = (
    *_OPERANDS,
    *_FORWARD_RESULTS[1:],
    _tensor("dq", 4, "query", "(B, Hq, Sq, D), allocated by the op"),
    _tensor("dk", 4, "key", "(B, Hq, Sk, D), allocated by the op"),
    _tensor("dv", 4, "value", "(B, Hq, Sk, Dv), allocated by the op"),
    *_SCALES,
    _number("ranges", "int32", "number of ranges of the batch: a CTA has a head and a range"),
    *_BIAS,
    *_BIAS_GRADIENT,
)
# Arguments of each kind of kernel (kernel_spec.KINDS).
ARGUMENTS_BY_KIND = {
    **{"fwd": FORWARD, "decode": DECODE, "bwd": BACKWARD, "detbwd": BACKWARD, "partbwd": BACKWARD},
    "dbias": DBIAS,
    "tilebwd": TILE_BACKWARD,
}
