"""Dispatch table: the measured classes of calls, and which of the classes auto mode serves.

The module has only data. The dispatcher (src/dispatch/) reads the rows, and the first match wins. A new measurement is
a change of rows, with date, machine and ratio. Such a change compiles no kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

from .kernel_spec import MAX_CLUSTER_SIZE

# Classes of operands. Kernels with vector loads distinguish D == Dv ("square") and D != Dv ("mixed"). Element-wise
# kernels distinguish the property that rules out vector loads: head dims that are no multiple of 8 ("odd_dims"),
# addresses or strides that are no multiple of 16 bytes ("unaligned"), and a strided last dim ("strided"). "vectors" in
# a row stands for the first two classes.
OPERAND_CLASSES = ("square", "mixed", "odd_dims", "unaligned", "strided")
_OPERANDS_DESCRIPTION = {
    **{"vectors": "", "square": "D = Dv", "mixed": "D != Dv", "odd_dims": "D or Dv no multiple of 8"},
    **{"unaligned": "misaligned", "strided": "last dim not contiguous"},
}
# Rows with gradients count tiles in units of so many keys: the tiles of the backward. The number differs from that of
# the forward if few query rows meet many keys.
KEYS_OF_TILE = 128
ANY = 1 << 40  # upper end of a range without a limit
SERVE_RATIO = 0.97  # auto mode serves a class of calls only if stock time / kernel time reached the ratio


@dataclass(frozen=True, slots=True)
class CostModel:
    """Constants of estimated times of kernels, and limits of decode calls (src/dispatch/split_heuristic.cpp)."""

    # A call with at most so many packed query rows, Sq * (Hq / Hkv), is a decode call. A tile has as many rows.
    max_decode_rows: int
    max_packed_rows: int  # largest number of packed rows for a decode kernel that is estimated to beat the forward
    packed_wave_ns: float  # extra ns of a decode kernel for each wave of CTAs (prologue and epilogue), over the forward
    occupancy: float  # share of the SMs that tiles must fill if keys cannot be split (is_causal: few are visible)
    cluster_ns: float  # ns of splitting in a cluster: the wait of the CTAs for each other
    cluster_rate: float  # bytes per ns at which a warpgroup adds up results of the other CTAs of the cluster
    combine_ns: float  # ns of splitting without a cluster: the launch of a second kernel
    combine_rate: float  # bytes per ns of partial results, written to memory and read back
    read_efficiency: float  # reached share of the memory rate when reading K and V
    # Smallest number of query rows, one after the other, that tiles must save by sharing the query heads of a KV head
    # in a backward. The results of such tiles must be added up. Estimated: steps of 64 rows take 1.2 to 2.2 us, two
    # sums take 6 us.
    min_rows_saved: int = 512
    # Query rows in the time of adding up the results of such a tile. Estimated: 128 keys of D 128 are 260 KB, written
    # and read back in 10 us.
    rows_per_sum: int = 384
    # ns that CTAs must save by sharing SMs. More splits wait longer if most keys are masked out.
    min_gain_of_sharing_ns: float = 1700
    max_cluster: int = MAX_CLUSTER_SIZE  # largest number of CTAs of a cluster
    # Smallest mean length of packed sequences, and smallest estimated ns of the dense forward, for launching a dense
    # kernel with work only for equal lengths. 16 rows: the dense kernel takes 1.42 times as long as the kernel of
    # packed sequences (D 64 and 128); 512 rows: 0.89 to 0.93 times (2026-11-27 H100, bench --suite varlen). Lengths
    # between were not measured. For different lengths, a launch in vain takes 1 to 2 us (estimated).
    min_equal_rows: int = 256
    # The same for gradients. No length by default: dK and dV of D 256 were wrong on an H200 on 2026-11-29. The cause is
    # known and repaired, but the repair did not run on a GPU (docs/experiments/varlen.md).
    min_equal_rows_of_gradients: int = 1 << 40
    min_equal_ns: float = 60000
    # Largest number of packed query rows of a decode call with shared values (MLA): four queries of 128 heads.
    max_shared_rows: int = 512
    # Smallest number of keys for a kernel with shared values, unless a backend is forced. No number by default: the
    # kernels never ran on a GPU (docs/experiments/decode.md).
    min_shared_keys: int = 1 << 40
    # Smallest number of rows of packed queries for a forward kernel that reads the pages of a KV cache in place. No
    # number by default, so that pages are gathered: the kernel did not run on a GPU (docs/experiments/varlen.md).
    min_paged_rows: int = 1 << 40
    # Largest number of sequences of a decode with balanced splits (kernels/features/balanced_splits.py), because every
    # CTA reads all KV lengths. No call by default: no GPU has run the kernels. 512 is a sensible limit for trials.
    max_balanced_sequences: int = 0
    # Splits of uneven lengths, for each CTA that the SMs hold at once. Simulated: 3 comes within 1 to 3 % of the best
    # number in each of four batches (docs/experiments/decode.md).
    items_per_slot: float = 3.0
    # Share of the SMs that clusters of so many CTAs may fill; 0: no limit. The GPU places clusters of more than two
    # CTAs next to each other on some SMs, while other SMs idle. Clusters of three keep three quarters of the SMs evenly
    # busy, larger clusters keep half.
    cluster_share: tuple[float, ...] = (0, 0, 0, 0.75, *[0.5] * (MAX_CLUSTER_SIZE - 3))
    unknown_rate: float = 3352  # bytes per ns assumed for a device with an unknown memory rate: the rate of an H100


MAX_SPLITS = 255  # limit of num_splits: the bits of a mode word (Mode in src/core/core.h)
# Head dims of the kernels, except kernels with shared values; rows are read in units of 16 bytes.
MAX_HEAD_DIM, HEAD_DIM_STEP = 512, 8
# Largest head dim of pages, caches and 8 bits, and of gradients in auto mode: backward kernels of larger head dims were
# not timed. Also the largest head dim with measured faults of stock, and of torch's entries other than F.sdpa.
MAX_GENERAL_HEAD_DIM = 256
SPLIT_UNIT = 128  # fixed_split_size is a multiple, because a split must be a multiple of any tile_n


@dataclass(frozen=True, slots=True)
class ChoiceRow:
    """A measured class of calls. Auto mode serves the class with a kernel if ratio >= SERVE_RATIO.

    `d_min` and `d_max` limit max(D, Dv). Rows with gradients measured forward and backward together, both by kernels of
    this project. Rows of kind "partbwd" hold in every mode: the split backward runs if ratio, the fused time / the time
    of the split backward, reaches SERVE_RATIO.
    """

    kind: str  # kind of the kernel: "fwd", "decode" or "partbwd"
    operands: str  # one of OPERAND_CLASSES, or "vectors"
    arch: int
    grad: bool
    mask: str  # exact features of the calls: the tag of a set of features.py
    d_min: int
    d_max: int
    min_sq: int
    max_sq: int
    min_sk: int
    max_sk: int
    min_tiles: int
    ratio: float  # stock default time / kernel time, the lowest measured in the class
    measured: str  # date, machine, suite
    # The same ratio if the program has switched cuDNN off, with torch.backends.cuda.enable_cudnn_sdp(False). 0: not
    # measured, so `ratio` counts.
    without_cudnn: float = 0.0
    tile_m: int = 0  # only calls with a kernel of so many query rows in a tile; 0: any
    min_packed: int = 1  # only calls with at least so many query rows for a KV head, Sq * (Hq / Hkv)
    max_packed: int = ANY
    elements: tuple[str, ...] = ("bf16", "fp16")  # elements of the measured kernels

    @property
    def serve(self) -> bool:
        return self.ratio >= SERVE_RATIO

    @property
    def ratio_without_cudnn(self) -> float:
        return self.without_cudnn or self.ratio

    @property
    def serve_without_cudnn(self) -> bool:
        return self.ratio_without_cudnn >= SERVE_RATIO

    @property
    def description(self) -> str:
        """Text of the class. The text does not depend on the position of the row in the table."""
        ranges = (
            ("D", self.d_min, self.d_max),
            ("Sq", self.min_sq, self.max_sq),
            ("Sk", self.min_sk, self.max_sk),
            ("tiles", self.min_tiles, ANY),
            ("packed rows", self.min_packed, self.max_packed),
        )
        words = [self.kind, self.mask, _OPERANDS_DESCRIPTION[self.operands], "gradients" if self.grad else ""]
        words += [text for name, low, high in ranges if (text := _range(name, low, high))]
        words += [f"tiles of {self.tile_m} rows" if self.tile_m else ""]
        return ", ".join(filter(None, words))

    @property
    def keys_of_tile(self) -> int:
        """Number of keys in a tile, or 0 if the row counts tiles of the forward."""
        return KEYS_OF_TILE if self.grad and self.kind == "fwd" and self.operands in {"square", "mixed"} else 0


# Stock kernels of torch's varlen_attn, and the facts of a call that a row may require: VarlenKernel and VarlenFact of
# src/core/tables.h.
VARLEN_KERNELS = ("flash", "cudnn")
VARLEN_FACTS = (
    "misaligned",  # an address or a stride of an operand is no multiple of 16 bytes, or a dim is broadcast
    "unusual_scale",  # the scale is zero, negative or not finite
    # Forms of calls. A row holds for a form only if the row names the form.
    "paged_decode",  # block_table, and max_q is 1 without num_splits=1: the decode kernel
    "paged_rows",  # all other calls with block_table
    "split_hint",  # num_splits is given and is not 1
)


@dataclass(frozen=True, slots=True)
class VarlenRow:
    """A class of calls of torch's varlen_attn, by the kernel that stock would run.

    The first matching row decides. Auto mode serves the class if stock is wrong, or if ratio >= SERVE_RATIO. Calls
    without a row fall back to stock.
    """

    stock: str  # one of VARLEN_KERNELS
    cc: int  # compute capability of the GPU
    measured: str  # date, machine, torch and suite; for a fault of stock, the evidence
    ratio: float = 0.0  # stock time / kernel time, the lowest measured
    facts: tuple[str, ...] = ()  # facts of VARLEN_FACTS that must all hold
    wrong: str = ""  # wrong effect of stock: the end of "stock would ..."

    @property
    def serve(self) -> bool:
        return bool(self.wrong) or self.ratio >= SERVE_RATIO


def _range(name: str, low: int, high: int) -> str:
    """Return the text of a range of numbers, or "" for a range without limits."""
    if high == ANY:
        return f"{name} >= {low}" if low > 1 else ""
    return f"{name} {low}" if low == high else f"{name} {low} to {high}" if low > 1 else f"{name} <= {high}"


# Fitted 2026-11-22 on H100 and H200, together with `cost` of the decode kernels' rows, to 1443 times of 101 calls on
# each machine (tools/tune/tune.py gate: numbers of splits, in a cluster or not, K and V from memory and from L2).
# `packed_wave_ns` is fitted to 108 calls, with packed rows and without. The constants are meaningful only together,
# because reading and computing overlap.
COST_MODEL = CostModel(
    max_decode_rows=64, max_packed_rows=256, packed_wave_ns=5500, occupancy=0.8, cluster_ns=50, cluster_rate=8.7,
    combine_ns=590, combine_rate=10000, read_efficiency=0.876,
)  # fmt: skip
_BIASES = "2026-11-24 H100, torch 2.11 + cuDNN 9.19, bench --suite masks"
_BIASES_AGAIN = "2026-11-28 H100, torch 2.11 + cuDNN 9.19, bench --suite masks"
_DROPOUT = "2026-11-24 H100, torch 2.11 + cuDNN 9.19, bench --suite dropout"
_NO_GRAD = "2026-11-21 H100, torch 2.11 + cuDNN 9.19, bench --suite choice"
_GRAD = "2026-11-21 H100, torch 2.11 + cuDNN 9.19, bench --suite grad"
_WIDE = _GRAD.replace("2026-11-21", "2026-11-22")
_GROUPED = "2026-11-23 H200, torch 2.11 + cuDNN 9.19, bench --suite grad"
_FEW = "2026-11-24 H200, torch 2.11 + cuDNN 9.19, bench --suite grad"
_FORWARD = "2026-11-21 H100, torch 2.11 + cuDNN 9.19, bench --suite forward"
_PARTS = "2026-11-21 H100, bursts, B*S 16384, H*D 2048, square (docs/experiments/backward.md)"
_PARTS_OF_96 = "2026-11-29 H200, bursts, B*S 16384, D 72, 80, 96, 20 heads on 20 and 5 (docs/experiments/backward.md)"
_UNTIMED = "not measured: 1.0 stands for an unknown ratio (docs/experiments/backward.md)"
_GRAD_AGAIN = "2026-11-29 H200, torch 2.11 + cuDNN 9.19, bench --suite grad, cells of the row"
_LARGE = "2026-11-29 H200, torch 2.11 + cuDNN 9.19 (docs/experiments/forward.md)"
_ODD = "2026-11-22 H100, torch 2.11 + cuDNN 9.19, bench --suite odd"
_DECODE = "2026-11-22 H100, torch 2.11 + cuDNN 9.19, bench --suite decode"
_GROWING = "2026-11-27 H100, torch 2.11 + cuDNN 9.19, one more key per call: stock plans anew, 36 to 75 ms of host time"
_SHORT = "2026-11-27 H100, torch 2.11, cuDNN 9.19, D 32, 40, 64, 200 to 256 rows and keys (docs/experiments/forward.md)"
_EIGHT = "2026-11-26 H100 and H200, torch 2.11, bench --suite eightbit"
_WINDOWS = "2026-11-26 H100, 16k tokens, by the profiler (docs/experiments/varlen.md)"
_MASKS = "2026-11-24 H200, torch 2.11 + cuDNN 9.19, bench --suite masks"
_BF16 = ("bf16",)
_LOWER = "2026-11-27 H100, torch 2.11, causal_lower_right, D 64 and 128 (docs/experiments/masks.md)"
_CACHES = "2026-11-24 H200, torch 2.11 + cuDNN 9.19, bench --suite maskdecode"
# Calls with fewer query rows are decode calls. If such calls come to these rows (is_causal), no suite measured the
# calls.
_MIN_SQ = 16
# `ratio` is the lowest ratio of the suite in the class (642 shapes in all without gradients).
# fmt: off
CHOICE_ROWS: tuple[ChoiceRow, ...] = (
    #         kind  operands arch grad  mask d_min d_max min_sq max_sq min_sk max_sk min_tiles
    ChoiceRow("fwd", "vectors", 90, False, "full", 1, 64, _MIN_SQ, 256, 1025, ANY, 264, 0.967, _NO_GRAD, tile_m=128),
    ChoiceRow("fwd", "vectors", 90, False, "full", 1, 64, 193, 256, 193, 256, 264, 0.852, _SHORT, 0.970),
    ChoiceRow("fwd", "vectors", 90, False, "full", 1, 64, _MIN_SQ, ANY, 1, ANY, 0, 0.977, _NO_GRAD),
    ChoiceRow("fwd", "vectors", 90, False, "causal", 1, 64, _MIN_SQ, 512, 1, 512, 1024, 0.958, _FORWARD, 1.879, 128),
    ChoiceRow("fwd", "vectors", 90, False, "causal", 1, 64, _MIN_SQ, ANY, 1, ANY, 0, 1.049, _NO_GRAD),
    ChoiceRow("fwd", "vectors", 90, False, "full", 65, 128, _MIN_SQ, ANY, 1, ANY, 0, 1.000, _NO_GRAD),
    ChoiceRow("fwd", "vectors", 90, False, "causal", 65, 128, _MIN_SQ, ANY, 1, ANY, 0, 1.030, _NO_GRAD),
    ChoiceRow("fwd", "vectors", 90, False, "full", 129, 256, _MIN_SQ, ANY, 1, ANY, 0, 1.007, _NO_GRAD),
    # By memory.
    ChoiceRow("fwd", "vectors", 90, False, "causal", 193, 256, 257, 512, 257, 512, 528, 0.965, _FORWARD, 1.754),
    ChoiceRow("fwd", "vectors", 90, False, "causal", 129, 256, _MIN_SQ, ANY, 1, ANY, 0, 0.989, _NO_GRAD),
    # Head dims above 256: 31 forward cells and 6 decode cells. Stock runs efficient attention; for grouped heads, math.
    ChoiceRow("fwd", "square", 90, False, "full", 257, 512, _MIN_SQ, ANY, 1, ANY, 0, 1.68, _LARGE),
    ChoiceRow("fwd", "square", 90, False, "causal", 257, 512, _MIN_SQ, ANY, 1, ANY, 0, 1.67, _LARGE),
    ChoiceRow("decode", "square", 90, False, "full", 257, 512, 1, ANY, 1, ANY, 0, 1.61, _LARGE),
    # Decode: 469 cells with groups of 1, 4, 16, 32 and 64 query heads, and 98 cells with more than 64 packed rows. The
    # ratios hold for K and V from memory, as between the layers of a model. Kernels for larger head dims pad with
    # zeros. For few keys, the padding does not dominate the time.
    ChoiceRow("decode", "square", 90, False, "full", 1, 256, 1, ANY, 1, ANY, 0, 1.427, _DECODE, min_packed=65),
    ChoiceRow("decode", "mixed", 90, False, "full", 1, 256, 1, ANY, 1, ANY, 0, 1.427, _DECODE, min_packed=65),
    ChoiceRow("decode", "square", 90, False, "full", 33, 56, 1, ANY, 1, 1024, 0, 1.041, _DECODE, max_packed=16),
    ChoiceRow("decode", "square", 90, False, "full", 1, 56, 1, ANY, 1, ANY, 0, 0.873, _DECODE, max_packed=16),
    ChoiceRow("decode", "square", 90, False, "full", 57, 64, 1, ANY, 1, ANY, 0, 1.030, _DECODE),
    ChoiceRow("decode", "square", 90, False, "full", 65, 120, 1, ANY, 1, 1024, 0, 1.108, _DECODE, max_packed=16),
    # By kernel time alone, the lowest ratio is 0.902. A program that replays a CUDA graph of stock with a fixed length
    # could lose so much.
    ChoiceRow("decode", "square", 90, False, "full", 65, 112, 1, ANY, 1, ANY, 0, 566, _GROWING, max_packed=16),
    ChoiceRow("decode", "square", 90, False, "full", 121, 128, 1, ANY, 1, ANY, 0, 0.995, _DECODE),
    ChoiceRow("decode", "square", 90, False, "full", 129, 192, 1, ANY, 1, ANY, 0, 1.048, _DECODE, max_packed=16),
    ChoiceRow("decode", "square", 90, False, "full", 193, 248, 1, ANY, 1, 1024, 0, 1.193, _DECODE, max_packed=16),
    ChoiceRow("decode", "square", 90, False, "full", 193, 248, 1, ANY, 1, ANY, 0, 0.926, _DECODE, max_packed=16),
    ChoiceRow("decode", "square", 90, False, "full", 249, 256, 1, ANY, 1, ANY, 0, 1.067, _DECODE),
    ChoiceRow("decode", "square", 90, False, "full", 1, 256, 1, ANY, 1, ANY, 0, 655, _GROWING, min_packed=17),
    # D != Dv: (64, 128), (128, 64), (192, 128). 2026-11-28: growing caches of 13 pairs of head dims
    # (tools/models/growing_cache.py --unequal), 38 to 66 ms of host time.
    ChoiceRow("decode", "mixed", 90, False, "full", 65, 128, 1, ANY, 1, 1024, 0, 1.068, _DECODE, max_packed=16),
    ChoiceRow("decode", "mixed", 90, False, "full", 129, 192, 1, ANY, 1, ANY, 0, 1.110, _DECODE, max_packed=16),
    ChoiceRow("decode", "mixed", 90, False, "full", 1, 256, 1, ANY, 1, ANY, 0, 707, _GROWING),
    # Decode kernels for every GPU, for the calls in which the Hopper kernels are slower than stock: cp.async reads only
    # the bytes of a row, TMA reads whole boxes. Also measured on an H200: the ratio of D 120 is from the H200 (H100:
    # 1.083), and D 112 is left out because of the H200 (0.897).
    ChoiceRow("decode", "square", 80, False, "full", 1, 56, 1, ANY, 1, ANY, 0, 1.009, _DECODE, max_packed=16),
    ChoiceRow("decode", "square", 80, False, "full", 113, 120, 1, ANY, 1025, ANY, 0, 1.025, _DECODE, max_packed=16),
    ChoiceRow("decode", "square", 80, False, "full", 193, 248, 1, ANY, 1025, ANY, 0, 1.110, _DECODE, max_packed=16),
    # Element-wise kernels for every GPU, for calls that the Hopper kernels cannot read (396 cells, square). The served
    # classes are short calls, which stock copies first, and all calls with a strided last dim, which stock runs as
    # math.
    ChoiceRow("fwd", "strided", 80, False, "full", 1, 64, 1, ANY, 1, ANY, 0, 3.40, _ODD),
    ChoiceRow("fwd", "strided", 80, False, "causal", 1, 64, 1, ANY, 1, ANY, 0, 4.31, _ODD),
    ChoiceRow("fwd", "strided", 80, False, "full", 65, 128, 1, ANY, 1, ANY, 0, 2.23, _ODD),
    ChoiceRow("fwd", "strided", 80, False, "causal", 65, 128, 1, ANY, 1, ANY, 0, 2.70, _ODD),
    ChoiceRow("fwd", "strided", 80, False, "full", 129, 256, 1, ANY, 1, ANY, 0, 1.66, _ODD),
    ChoiceRow("fwd", "strided", 80, False, "causal", 129, 256, 1, ANY, 1, ANY, 0, 1.96, _ODD),
    ChoiceRow("fwd", "strided", 80, True, "full", 1, 64, 1, ANY, 1, ANY, 0, 2.77, _ODD),
    ChoiceRow("fwd", "strided", 80, True, "causal", 1, 64, 1, ANY, 1, ANY, 0, 3.97, _ODD),
    ChoiceRow("fwd", "strided", 80, True, "full", 65, 128, 1, ANY, 1, ANY, 0, 2.14, _ODD),
    ChoiceRow("fwd", "strided", 80, True, "causal", 65, 128, 1, ANY, 1, ANY, 0, 3.16, _ODD),
    ChoiceRow("fwd", "strided", 80, True, "full", 129, 256, 1, ANY, 1, ANY, 0, 1.57, _ODD),
    ChoiceRow("fwd", "strided", 80, True, "causal", 129, 256, 1, ANY, 1, ANY, 0, 2.02, _ODD),
    ChoiceRow("fwd", "odd_dims", 80, False, "full", 1, 64, 1, 256, 1, 256, 0, 1.16, _ODD),
    ChoiceRow("fwd", "odd_dims", 80, False, "full", 1, 64, 1, 1024, 1, 1024, 129, 0.34, _ODD),
    ChoiceRow("fwd", "odd_dims", 80, False, "full", 1, 64, 1, 1024, 1, 1024, 0, 1.36, _ODD),
    ChoiceRow("fwd", "odd_dims", 80, False, "causal", 1, 64, 1, 256, 1, 256, 0, 1.57, _ODD),
    ChoiceRow("fwd", "odd_dims", 80, False, "causal", 1, 64, 1, 1024, 1, 1024, 513, 0.69, _ODD),
    ChoiceRow("fwd", "odd_dims", 80, False, "causal", 1, 64, 1, 1024, 1, 1024, 0, 1.08, _ODD),
    ChoiceRow("fwd", "odd_dims", 80, False, "full", 65, 128, 1, 64, 1, 64, 0, 3.96, _ODD),
    ChoiceRow("fwd", "odd_dims", 80, False, "full", 65, 128, 1, 256, 1, 256, 129, 0.73, _ODD),
    ChoiceRow("fwd", "odd_dims", 80, False, "full", 65, 128, 1, 256, 1, 256, 0, 2.80, _ODD),
    ChoiceRow("fwd", "odd_dims", 80, False, "causal", 65, 128, 1, 256, 1, 256, 0, 1.32, _ODD),
    ChoiceRow("fwd", "odd_dims", 80, False, "full", 129, 256, 1, 64, 1, 64, 0, 1.58, _ODD),
    ChoiceRow("fwd", "odd_dims", 80, False, "full", 129, 256, 1, 256, 1, 256, 129, 0.63, _ODD),
    ChoiceRow("fwd", "odd_dims", 80, False, "full", 129, 256, 1, 256, 1, 256, 0, 1.07, _ODD),
    ChoiceRow("fwd", "odd_dims", 80, False, "causal", 129, 256, 1, 64, 1, 64, 0, 1.57, _ODD),
    ChoiceRow("fwd", "odd_dims", 80, False, "causal", 129, 256, 1, 256, 1, 256, 129, 0.95, _ODD),
    ChoiceRow("fwd", "odd_dims", 80, False, "causal", 129, 256, 1, 256, 1, 256, 0, 1.20, _ODD),
    ChoiceRow("fwd", "unaligned", 80, False, "full", 1, 64, 1, 64, 1, 64, 0, 1.47, _ODD),
    ChoiceRow("fwd", "unaligned", 80, False, "full", 1, 64, 1, 256, 1, 256, 129, 0.22, _ODD),
    ChoiceRow("fwd", "unaligned", 80, False, "full", 1, 64, 1, 256, 1, 256, 0, 0.99, _ODD),
    ChoiceRow("fwd", "unaligned", 80, False, "causal", 1, 64, 1, 64, 1, 64, 0, 1.71, _ODD),
    ChoiceRow("fwd", "unaligned", 80, False, "causal", 1, 64, 1, 256, 1, 256, 129, 0.56, _ODD),
    ChoiceRow("fwd", "unaligned", 80, False, "causal", 1, 64, 1, 256, 1, 256, 0, 1.49, _ODD),
    ChoiceRow("fwd", "unaligned", 80, False, "full", 65, 128, 1, 64, 1, 64, 129, 0.86, _ODD),
    ChoiceRow("fwd", "unaligned", 80, False, "full", 65, 128, 1, 64, 1, 64, 0, 1.43, _ODD),
    ChoiceRow("fwd", "unaligned", 80, False, "causal", 65, 128, 1, 64, 1, 64, 129, 0.92, _ODD),
    ChoiceRow("fwd", "unaligned", 80, False, "causal", 65, 128, 1, 64, 1, 64, 0, 1.42, _ODD),
    # Element-wise kernels for the forward and the backward of the same classes.
    ChoiceRow("fwd", "odd_dims", 80, True, "full", 1, 64, 1, 256, 1, 256, 0, 2.72, _ODD),
    ChoiceRow("fwd", "odd_dims", 80, True, "full", 1, 64, 1, 1024, 1, 1024, 513, 0.51, _ODD),
    ChoiceRow("fwd", "odd_dims", 80, True, "full", 1, 64, 1, 1024, 1, 1024, 0, 1.60, _ODD),
    ChoiceRow("fwd", "odd_dims", 80, True, "causal", 1, 64, 1, 256, 1, 256, 0, 2.57, _ODD),
    ChoiceRow("fwd", "odd_dims", 80, True, "causal", 1, 64, 1, 1024, 1, 1024, 513, 0.72, _ODD),
    ChoiceRow("fwd", "odd_dims", 80, True, "causal", 1, 64, 1, 1024, 1, 1024, 0, 1.55, _ODD),
    ChoiceRow("fwd", "odd_dims", 80, True, "full", 65, 128, 1, 256, 1, 256, 0, 1.20, _ODD),
    ChoiceRow("fwd", "odd_dims", 80, True, "full", 65, 128, 1, 1024, 1, 1024, 513, 0.62, _ODD),
    ChoiceRow("fwd", "odd_dims", 80, True, "full", 65, 128, 1, 1024, 1, 1024, 0, 1.00, _ODD),
    ChoiceRow("fwd", "odd_dims", 80, True, "causal", 65, 128, 1, 256, 1, 256, 0, 1.60, _ODD),
    ChoiceRow("fwd", "odd_dims", 80, True, "causal", 65, 128, 1, 1024, 1, 1024, 513, 0.82, _ODD),
    ChoiceRow("fwd", "odd_dims", 80, True, "causal", 65, 128, 1, 1024, 1, 1024, 0, 1.06, _ODD),
    ChoiceRow("fwd", "odd_dims", 80, True, "full", 129, 256, 1, 64, 1, 64, 0, 1.19, _ODD),
    ChoiceRow("fwd", "odd_dims", 80, True, "full", 129, 256, 1, 1024, 1, 1024, 129, 0.44, _ODD),
    ChoiceRow("fwd", "odd_dims", 80, True, "full", 129, 256, 1, 256, 1, 256, 0, 1.84, _ODD),
    ChoiceRow("fwd", "odd_dims", 80, True, "full", 129, 256, 1, 1024, 1, 1024, 0, 1.29, _ODD),
    ChoiceRow("fwd", "odd_dims", 80, True, "causal", 129, 256, 1, 64, 1, 64, 0, 1.79, _ODD),
    ChoiceRow("fwd", "odd_dims", 80, True, "causal", 129, 256, 1, 1024, 1, 1024, 129, 0.53, _ODD),
    ChoiceRow("fwd", "odd_dims", 80, True, "causal", 129, 256, 1, 256, 1, 256, 0, 2.74, _ODD),
    ChoiceRow("fwd", "odd_dims", 80, True, "causal", 129, 256, 1, 1024, 1, 1024, 0, 1.19, _ODD),
    ChoiceRow("fwd", "unaligned", 80, True, "full", 1, 64, 1, 64, 1, 64, 0, 1.20, _ODD),
    ChoiceRow("fwd", "unaligned", 80, True, "full", 1, 64, 1, 1024, 1, 1024, 129, 0.31, _ODD),
    ChoiceRow("fwd", "unaligned", 80, True, "full", 1, 64, 1, 1024, 1, 1024, 0, 1.20, _ODD),
    ChoiceRow("fwd", "unaligned", 80, True, "causal", 1, 64, 1, 256, 1, 256, 0, 1.15, _ODD),
    ChoiceRow("fwd", "unaligned", 80, True, "causal", 1, 64, 1, 1024, 1, 1024, 129, 0.39, _ODD),
    ChoiceRow("fwd", "unaligned", 80, True, "causal", 1, 64, 1, 1024, 1, 1024, 0, 1.22, _ODD),
    ChoiceRow("fwd", "unaligned", 80, True, "full", 65, 128, 1, 64, 1, 64, 0, 1.26, _ODD),
    ChoiceRow("fwd", "unaligned", 80, True, "full", 65, 128, 1, 1024, 1, 1024, 129, 0.24, _ODD),
    ChoiceRow("fwd", "unaligned", 80, True, "full", 65, 128, 1, 1024, 1, 1024, 0, 1.08, _ODD),
    ChoiceRow("fwd", "unaligned", 80, True, "causal", 65, 128, 1, 64, 1, 64, 0, 1.18, _ODD),
    ChoiceRow("fwd", "unaligned", 80, True, "causal", 65, 128, 1, 256, 1, 256, 129, 0.53, _ODD),
    ChoiceRow("fwd", "unaligned", 80, True, "causal", 65, 128, 1, 256, 1, 256, 0, 1.25, _ODD),
    # Split backward instead of the fused backward; the ratio is fused time / split time. With few steps, the workspace
    # of the fused kernel does not pay off.
    ChoiceRow("partbwd", "vectors", 90, True, "full", 65, 96, 1, 128, 1, 128, 0, 1.082, _PARTS_OF_96),
    ChoiceRow("partbwd", "vectors", 90, True, "causal", 65, 96, 1, 256, 1, 256, 0, 0.973, _PARTS_OF_96),
    ChoiceRow("partbwd", "vectors", 90, True, "full", 97, 128, 1, 256, 1, 256, 0, 1.075, _PARTS),
    ChoiceRow("partbwd", "vectors", 90, True, "causal", 97, 128, 1, 512, 1, 512, 0, 1.093, _PARTS),
    ChoiceRow("partbwd", "vectors", 90, True, "causal", 1, 64, 1, 256, 1, 256, 0, 1.062, _PARTS),
    # The fused backward of D 129 to 192 never ran on a GPU. The split backward is chosen, whatever the ratio may be.
    ChoiceRow("partbwd", "vectors", 90, True, "full", 129, 192, 1, ANY, 1, ANY, 0, 1.0, _UNTIMED),
    ChoiceRow("partbwd", "vectors", 90, True, "causal", 129, 192, 1, ANY, 1, ANY, 0, 1.0, _UNTIMED),
    # The limits are numbers of keys visible to a query, and mean lengths of sequences. For sequences of text with a
    # mean length of 512, D 128 has a ratio of 0.86.
    ChoiceRow("partbwd", "vectors", 90, True, "window", 1, 64, 1, ANY, 1, 128, 0, 1.082, _WINDOWS),
    ChoiceRow("partbwd", "vectors", 90, True, "window", 65, 128, 1, ANY, 1, 256, 0, 1.150, _WINDOWS),
    ChoiceRow("partbwd", "vectors", 90, True, "window+ragged", 1, 64, 1, ANY, 1, 128, 0, 1.523, _WINDOWS),
    ChoiceRow("partbwd", "vectors", 90, True, "window+ragged", 65, 128, 1, ANY, 1, 256, 0, 1.683, _WINDOWS),
    # Gradients: forward and backward by kernels of this project. 280 shapes have head dims up to 128. 168 shapes have
    # head dims without a separate kernel (docs/experiments/backward.md names a disturbed cell). 278 shapes have larger
    # head dims or D != Dv. Tiles are blocks of 128 keys. With few query steps, loading K and V does not pay off, and
    # few tiles do not fill the GPU.
    #
    # Short queries, with a decode kernel as the forward: 64 rows with 64 keys (12 cells) and with 384 keys (12 cells).
    ChoiceRow("decode", "square", 90, True, "full", 1, 256, 33, 64, 1, 384, 0, 1.117, _FEW),
    ChoiceRow("fwd", "square", 90, True, "full", 1, 128, _MIN_SQ, 256, 1025, ANY, 0, 1.059, _GRAD_AGAIN, 1.172),
    ChoiceRow("fwd", "square", 90, True, "full", 1, 128, 1025, ANY, 1, 1024, 64, 1.042, _GRAD),
    ChoiceRow("fwd", "square", 90, True, "full", 1, 128, 1025, ANY, 1, 1024, 0, 0.885, _GRAD_AGAIN, 0.877),
    ChoiceRow("fwd", "square", 90, True, "full", 1, 64, _MIN_SQ, ANY, 1, ANY, 0, 1.047, _GRAD),
    # Four query heads or more for a KV head, and few tiles of keys. On an H100, the cells waited for the host code of
    # stock: 1.47.
    ChoiceRow("fwd", "square", 90, True, "full", 121, 128, 513, 2048, 513, 2048, 65, 1.136, _GROUPED, min_packed=4096),
    ChoiceRow("fwd", "square", 90, True, "full", 121, 128, 513, 2048, 513, 2048, 0, 0.987, _GRAD_AGAIN, 1.046, 0, 4096),
    ChoiceRow("fwd", "square", 90, True, "full", 65, 128, _MIN_SQ, ANY, 1, ANY, 0, 1.032, _GRAD),
    ChoiceRow("fwd", "square", 90, True, "causal", 1, 64, _MIN_SQ, ANY, 1, ANY, 0, 1.066, _GRAD),
    ChoiceRow("fwd", "square", 90, True, "causal", 65, 128, _MIN_SQ, ANY, 1, ANY, 0, 0.977, _WIDE),
    ChoiceRow("fwd", "square", 90, True, "full", 129, 256, _MIN_SQ, 256, 1025, ANY, 0, 1.052, _GRAD_AGAIN, 1.181),
    ChoiceRow("fwd", "square", 90, True, "full", 129, 256, 2049, ANY, 1, 256, 64, 1.706, _WIDE),
    ChoiceRow("fwd", "square", 90, True, "full", 129, 256, 2049, ANY, 1, 256, 0, 1.637, _GRAD_AGAIN, 1.783),
    ChoiceRow("fwd", "square", 90, True, "full", 129, 256, _MIN_SQ, ANY, 1, ANY, 0, 1.089, _WIDE),
    ChoiceRow("fwd", "square", 90, True, "causal", 129, 256, _MIN_SQ, ANY, 1, ANY, 0, 1.123, _WIDE),
    # Bool masks (410 cells with more rows than a decode, 216 decode cells). If the ratio is below 1, stock still
    # returns wrong results for rows without a visible key (stock_bugs.py). The lowest decode ratios are for random bits
    # that differ by head. Partly filled caches have 1.8 to 45, full caches 0.78 (D 80), 1.01 (D 64) and more.
    ChoiceRow("decode", "square", 90, False, "mask", 1, 64, 1, ANY, 1, ANY, 0, 0.688, _CACHES),
    ChoiceRow("decode", "square", 90, False, "mask", 65, 128, 1, ANY, 1, ANY, 0, 0.638, _CACHES),
    ChoiceRow("decode", "square", 90, False, "mask", 129, 256, 1, ANY, 1, ANY, 0, 1.184, _CACHES),
    ChoiceRow("decode", "mixed", 90, False, "mask", 129, 192, 1, ANY, 1, ANY, 0, 0.986, _CACHES),
    ChoiceRow("fwd", "square", 90, False, "mask", 1, 64, 65, 128, 1025, ANY, 0, 0.84, _MASKS),
    ChoiceRow("fwd", "square", 90, False, "mask", 1, 64, 65, ANY, 1, ANY, 0, 1.04, _MASKS),
    ChoiceRow("fwd", "square", 90, False, "mask", 65, 128, 65, ANY, 1, ANY, 0, 1.16, _MASKS),
    ChoiceRow("fwd", "square", 90, False, "mask", 129, 256, 65, ANY, 1, ANY, 0, 1.57, _MASKS),
    ChoiceRow("fwd", "mixed", 90, False, "mask", 129, 192, 65, 128, 1025, ANY, 0, 0.95, _MASKS),
    ChoiceRow("fwd", "mixed", 90, False, "mask", 129, 192, 65, ANY, 1, ANY, 0, 0.99, _MASKS),
    ChoiceRow("fwd", "square", 90, True, "mask", 1, 256, 65, ANY, 1, ANY, 0, 1.12, _MASKS),
    ChoiceRow("fwd", "mixed", 90, True, "mask", 129, 192, 65, 512, 4097, ANY, 0, 0.868, _MASKS),
    ChoiceRow("fwd", "mixed", 90, True, "mask", 129, 192, 65, ANY, 1, ANY, 0, 1.11, _MASKS),
    # Float masks (370 cells, including 41 decode cells). If the ratio is below 1, stock still returns wrong results for
    # rows without a visible key (stock_bugs.py). Padding masks (B, 1, 1, S) have 0.96 and more since the kernels read
    # such a mask as a single row (H200). The lowest ratio of fp32 masks is D 64, Sq 16384, because of the bytes of the
    # bias. With gradients, the lowest ratios are for a single tile or for 256 keys. The rows do not distinguish calls
    # that need the gradient of the mask: with that gradient, the lowest ratio is 1.78 (16 cells).
    ChoiceRow("decode", "square", 90, False, "bias", 1, 64, 1, ANY, 1, ANY, 0, 0.943, _BIASES_AGAIN),
    ChoiceRow("decode", "square", 90, False, "bias", 65, 128, 1, ANY, 1, ANY, 0, 0.959, _BIASES_AGAIN),
    ChoiceRow("decode", "square", 90, False, "bias", 129, 256, 1, ANY, 1, ANY, 0, 1.162, _BIASES_AGAIN),
    ChoiceRow("decode", "mixed", 90, False, "bias", 129, 192, 1, ANY, 1, ANY, 0, 0.991, _BIASES_AGAIN),
    ChoiceRow("fwd", "square", 90, False, "bias", 1, 64, 65, ANY, 1, ANY, 0, 0.944, _BIASES_AGAIN),
    ChoiceRow("fwd", "square", 90, False, "bias", 65, 128, 65, ANY, 1, ANY, 0, 0.910, _BIASES_AGAIN),
    ChoiceRow("fwd", "square", 90, False, "bias", 129, 256, 65, ANY, 1, ANY, 0, 0.994, _BIASES),
    ChoiceRow("fwd", "mixed", 90, False, "bias", 129, 192, 65, ANY, 1, ANY, 0, 0.951, _BIASES_AGAIN),
    ChoiceRow("fwd", "square", 90, False, "bias32", 1, 64, 1, ANY, 1, ANY, 0, 0.773, _BIASES_AGAIN),
    ChoiceRow("fwd", "square", 90, False, "bias32", 65, 256, 1, ANY, 1, ANY, 0, 1.076, _BIASES_AGAIN),
    ChoiceRow("fwd", "square", 90, True, "bias", 1, 128, 1, ANY, 1, ANY, 0, 0.976, _BIASES_AGAIN),
    ChoiceRow("fwd", "square", 90, True, "bias32", 1, 64, 1, ANY, 1, ANY, 0, 1.018, _BIASES_AGAIN),
    ChoiceRow("fwd", "square", 90, True, "bias32", 65, 128, 1, ANY, 1, ANY, 0, 0.981, _BIASES),
    ChoiceRow("fwd", "square", 90, True, "bias", 193, 256, 1, ANY, 1, ANY, 0, 1.016, _BIASES_AGAIN),
    ChoiceRow("fwd", "square", 90, True, "bias32", 193, 256, 1, ANY, 1, ANY, 0, 1.634, _MASKS),
    # 8-bit precision, if allowed. The ratio is the time of the 16-bit kernel / the time of the whole 8-bit call, the
    # lower value of H100 and H200. Of 96 cells, 14 were faster on both machines by more than the spread.
    ChoiceRow("fwd", "square", 90, False, "8bit", 121, 128, 8192, ANY, 8192, ANY, 1024, 1.020, _EIGHT),
    ChoiceRow("fwd", "square", 90, False, "e4m3", 121, 128, 16384, ANY, 16384, ANY, 1024, 1.060, _EIGHT),
    ChoiceRow("fwd", "square", 90, False, "8bit", 185, 192, 8192, ANY, 8192, ANY, 1024, 1.039, _EIGHT),
    ChoiceRow("fwd", "square", 90, False, "e4m3", 185, 192, 8192, ANY, 8192, ANY, 1024, 1.065, _EIGHT),
    ChoiceRow("fwd", "square", 90, False, "8bit", 249, 256, 4096, ANY, 4096, ANY, 1024, 1.043, _EIGHT),
    ChoiceRow("fwd", "square", 90, False, "e4m3", 249, 256, 8192, ANY, 8192, ANY, 1024, 1.215, _EIGHT),
    ChoiceRow("fwd", "square", 90, False, "qk8", 249, 256, 8192, ANY, 8192, ANY, 1024, 1.019, _EIGHT),
    ChoiceRow("fwd", "square", 90, False, "causal+8bit", 249, 256, 16384, ANY, 16384, ANY, 1024, 1.204, _EIGHT),
    ChoiceRow("fwd", "square", 90, False, "causal+e4m3", 249, 256, 16384, ANY, 16384, ANY, 1024, 1.197, _EIGHT),
    # Dropout of 0.1 (96 cells), forward and backward. Forward-only calls use the same rows (as_with_gradients() of
    # src/core/call_facts.h). The lowest ratio of forward-only calls is 0.93, because short calls wait for the host.
    ChoiceRow("fwd", "square", 90, True, "dropout", 1, 128, 128, ANY, 128, ANY, 0, 1.160, _DROPOUT),
    ChoiceRow("fwd", "square", 90, True, "causal+dropout", 1, 128, 512, ANY, 512, ANY, 0, 1.139, _DROPOUT),
    ChoiceRow("fwd", "square", 90, True, "mask+dropout", 1, 128, 128, ANY, 128, ANY, 0, 1.259, _DROPOUT),
    ChoiceRow("fwd", "square", 90, True, "bias+dropout", 1, 128, 128, ANY, 128, ANY, 0, 1.100, _DROPOUT),
    # D != Dv with the split backward: (128, 64), (64, 128), (192, 128), with Sq = Sk.
    ChoiceRow("fwd", "mixed", 90, True, "full", 65, 128, 1, 1024, 1, 1024, 0, 0.931, _GRAD_AGAIN, 0.989),
    ChoiceRow("fwd", "mixed", 90, True, "full", 65, 128, 257, ANY, 1025, ANY, 0, 1.073, _WIDE),
    ChoiceRow("fwd", "mixed", 90, True, "causal", 65, 128, _MIN_SQ, ANY, 1, ANY, 0, 0.988, _WIDE),
    ChoiceRow("fwd", "mixed", 90, True, "full", 129, 192, 256, ANY, 256, ANY, 0, 1.176, _WIDE),
    ChoiceRow("fwd", "mixed", 90, True, "causal", 129, 192, _MIN_SQ, 2048, 1, ANY, 0, 1.111, _WIDE),
    ChoiceRow("fwd", "mixed", 90, True, "causal", 129, 192, 2049, ANY, 1, ANY, 0, 0.880, _GRAD_AGAIN, 6.174),
    # Lower-right masks of torch.nn.attention.bias, which stock serves by efficient attention
    # (src/hooks/efficient_attention_op.cpp). Up to 16 heads, 1024 rows and 2048 keys, the kernels wait for the host:
    # forwards have ratios of 0.57 to 0.74.
    ChoiceRow("fwd", "mixed", 90, False, "window", 1, 128, 2048, ANY, 4096, ANY, 512, 2.75, _LOWER, elements=_BF16),
    ChoiceRow("fwd", "mixed", 90, True, "window", 1, 128, 2048, ANY, 4096, ANY, 512, 4.14, _LOWER, elements=_BF16),
)
# fmt: on
# Without these rows, kernels that never ran on a GPU would be chosen.
UNTIMED_ROWS = tuple(row for row in CHOICE_ROWS if row.measured == _UNTIMED)
# Up to torch 2.13, varlen_attn runs on flash attention. From torch 2.14 on, varlen_attn prefers cuDNN. Nobody has timed
# cuDNN against these kernels, so such calls have only rows for faults of stock. Nobody has timed stock's pages and
# stock's splits against these kernels, so such calls have no rows.
VARLEN_ROWS: tuple[VarlenRow, ...] = (
    VarlenRow("flash", 90, "2026-11-27 H100, torch 2.11, bench --suite ragged and window", 1.05),
    VarlenRow(
        "cudnn",
        90,
        "pytorch#194818: torch 2.14 read wrong addresses or ended the CUDA context, torch 2.15 raises; not run here",
        facts=("misaligned",),
        wrong="return wrong numbers, end the CUDA context (torch 2.14) or raise (torch 2.15)",
    ),
    VarlenRow(
        "cudnn",
        90,
        "2026-11-22 H100, torch 2.11 + cuDNN 9.19: padded rows in F.sdpa, scales 0, -1/8, -1 and -8",
        facts=("unusual_scale",),
        wrong="return NaN",
    ),
)
