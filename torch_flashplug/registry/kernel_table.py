"""Kernel table: the configurations of all kernels, and the kernel packs.

The dispatcher (src/dispatch/) reads the rows of the table and estimates the time of a launch. The dispatch table
(dispatch_table.py) says which calls auto mode serves with the kernels.

For a call, the rows with the smallest sufficient head dims compete by estimated time (cost x waves of tiles). A retune
is a change of rows, with date and machine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from . import features
from .architectures import BY_ARCH, TARGETS
from .dtypes import KERNEL_DTYPES, changes_elements, elements_of, unsupported_element_reason
from .kernel_spec import (
    MAX_CLUSTER_SIZE,
    MAX_TILE_DV,
    PEERS_AT_ONCE,
    ROWS_PER_WARPGROUP,
    WORKSPACE_UNITS,
    KernelSpec,
)

# Sets of features (features.py), by the tags in names of kernels.
FULL, CAUSAL, MASK, BIAS, BIAS32 = (("full",), ("causal",), ("mask",), ("bias",), ("bias32",))
BOTH, BIASES = FULL + CAUSAL, BIAS + BIAS32
DROPPED, MASK_DROPPED = ("dropout", "causal+dropout"), ("mask+dropout",)
BIAS_DROPPED, BIAS32_DROPPED = ("bias+dropout",), ("bias32+dropout",)
BIASES_DROPPED = BIAS_DROPPED + BIAS32_DROPPED
DROPPED_16BIT_BIAS = DROPPED + MASK_DROPPED + BIAS_DROPPED
DROPPED_ANY_BIAS = DROPPED_16BIT_BIAS + BIAS32_DROPPED
WINDOW, VARLEN = ("window",), ("window+ragged",)
EQUAL_FULL, EQUAL_CAUSAL = ("equal",), ("causal+equal",)
EQUAL = EQUAL_FULL + EQUAL_CAUSAL
SOFTCAP = ("window+softcap", "window+softcap+ragged")
PAGED_VARLEN = ("window+ragged+paged", "window+softcap+ragged+paged")  # packed queries over pages
PAGED, PAGED_CACHED = ("window+paged", "window+softcap+paged"), ("window+cache8+paged",)
BALANCED = tuple(f"{tag}+balanced" for tag in PAGED)
WITHOUT_SPILLS = ("bf16_int8", "bf16_e5m2", "fp16_int8", "fp16_e5m2")  # e4m3 on sm_80 needs more registers
QK8 = ("qk8", "causal+qk8")
IN_8BIT, IN_E4M3 = (tuple(mask + recipe for mask in ("", "causal+")) for recipe in ("8bit", "e4m3"))
BOTH_PRODUCTS_8BIT = IN_8BIT + IN_E4M3
MASK_QK8, MASK_BOTH_8BIT = ("mask+qk8",), ("mask+8bit", "mask+e4m3")
SHARED_VALUES = ("shared", "window+paged+shared")
CACHED, MASK_CACHED = ("cache8",), ("mask+cache8",)
NARROW_RANGE_DTYPES = ("fp16",)  # dtypes with a narrow range; the largest fp16 number is 65504
SECTOR_BYTES = 32  # size of a sector, the smallest unit of L2 traffic
BOX_BYTES = (128, 64)  # bytes of a row in a TMA box: the first number that divides the row; else a sector
# `last_tile` of tiles with three warpgroups. In the last tile of a head, warpgroups without rows take part only in a
# single block, and the remaining warpgroups have the SM alone. From the costs of 64, 128 and 192 rows.
LAST_TILE_OF_192_ROWS = 0.35


@dataclass(frozen=True, slots=True)
class KernelRow:
    """A row of the kernel table: a kernel for each element and each set of features, and the shapes of suitable calls.

    The properties are further members of `struct KernelRow` in src/core/tables.h.
    """

    kind: str
    arch: int
    d_max: int
    dv_max: int
    features: tuple[str, ...]
    tile_m: int
    tile_n: int
    stages: int
    cost: int = 1000  # ns for a KV block of a tile on an SM
    elementwise: bool = False
    last_tile: float = 1.0  # cost of the shortest last tile of a head, relative to a full tile
    dkdv_alone: bool = True  # split backward: dK and dV alone take less time than the fused kernel
    ctas_per_sm: int = 1  # decode: number of CTAs per SM that reads fastest
    elements: tuple[str, ...] = ()  # names of dtypes.py; empty: all elements of such kernels

    def specs(self) -> list[KernelSpec]:
        """Return the kernels of the row. Raise ValueError for an element without such kernels."""
        named = [(name, tag) for name in self.elements for tag in self.features]
        if reasons := [
            reason for name, tag in named if (reason := unsupported_element_reason(name, self.kind, self.arch, tag))
        ]:
            raise ValueError("; ".join(dict.fromkeys(reasons)))
        head, tile = (self.d_max, self.dv_max), (self.tile_m, self.tile_n, self.stages)
        return [
            KernelSpec(self.kind, self.arch, name, *head, tag, *tile, self.elementwise)
            for tag in self.features
            for name in self.elements or elements_of(self.kind, self.arch, tag)
        ]

    @property
    def sector_bytes(self) -> int:
        """Bytes of a sector, or 1 without TMA. If rows start inside a sector, every TMA box touches one more sector."""
        return SECTOR_BYTES if BY_ARCH[self.arch].has_tma else 1

    def rows_sector_aligned(self, spec: KernelSpec) -> bool:
        """Return whether the kernel is only for calls whose rows start at sectors, because the TMA boxes are narrow.

        Measured: D 72 ran at 0.79 x stock in tiles of 80 columns, and at 1.02 x stock in tiles of 128 columns. Boxes of
        64 bytes do no harm if 192 query rows share the keys.
        """
        wide, half = (spec.row_bytes("k") % box == 0 for box in BOX_BYTES)
        shared = half and self.tile_m == 3 * ROWS_PER_WARPGROUP
        return BY_ARCH[self.arch].has_tma and not wide and not shared

    @property
    def group_rows(self) -> int:
        return ROWS_PER_WARPGROUP

    def max_cluster(self, spec: KernelSpec) -> int:
        """Return the largest cluster whose CTAs add up results in shared memory."""
        supports_clusters = BY_ARCH[self.arch].supports_clusters and (not spec.is_decode or spec.combines_in_cluster)
        return MAX_CLUSTER_SIZE if supports_clusters else 1

    @property
    def peers_at_once(self) -> int:
        return PEERS_AT_ONCE

    def shares_heads(self, spec: KernelSpec) -> bool:
        """Return whether tiles of the backward may share query heads. With fp16, a partial sum could overflow."""
        return BY_ARCH[self.arch].shares_heads and spec.dtype not in NARROW_RANGE_DTYPES

    @property
    def counters(self) -> int:
        """Number of counters for a block of rows of the backward workspace; 0 if the kernel needs none."""
        return WORKSPACE_UNITS if self.kind in {"bwd", "detbwd"} else 0


# Small tiles fill more SMs, and large tiles reuse K and V more. Wide blocks (tile_n) suit long keys.
# - `cost` of fwd: measured 2026-11-21, H100, tools/tune/tune.py, S 4096 (d 256: 2048, tile 128x64: 4096), full: kernel
#   time / (waves of tiles * (KV blocks + 1)). Some costs were not measured, but taken from neighboring rows: head dims
#   (128, 64) and (64, 128), and tiles of 64 rows at head dims 160, (192, 128) and 192.
# - `cost` of fwd of sm_80: measured 2026-11-22 in the same way; D 64 128x112 from the time at 512 keys.
# - `cost` of decode: 2026-11-22, fitted together with COST_MODEL of dispatch_table.py. Tiles of 128 rows, (192, 128)
#   and 192 were fitted by whether packing pays off (bench --suite decode --filter wide_).
# - `ctas_per_sm`: measured 2026-11-24, H200, D 64 with a mask, 537 MB in 2, 3, 4 splits of 64 tiles: 152, 141, 130 us;
#   D 128: 242, 281, 250 us.
# - `cost` of decode of sm_80: 2026-11-22, H100, time over blocks with K and V in L2, on the scale of the Hopper rows;
#   256 from few calls. Two CTAs per SM hide more latency than a deeper pipeline of a single CTA. Of 22 tiles, the tiles
#   below were the fastest from memory.
# fmt: off
KERNEL_ROWS = (
    #         kind  arch d_max dv_max features tile_m tile_n stages cost
    KernelRow("fwd", 90, 64, 64, BOTH + EQUAL, 192, 128, 2, 1532, last_tile=LAST_TILE_OF_192_ROWS),
    KernelRow("fwd", 90, 64, 64, BOTH + EQUAL, 128, 128, 2, 1220),
    KernelRow("fwd", 90, 64, 64, BOTH, 64, 128, 2, 811),
    KernelRow("fwd", 90, 80, 80, BOTH, 192, 112, 2, 1583, last_tile=LAST_TILE_OF_192_ROWS),
    KernelRow("fwd", 90, 80, 80, BOTH, 128, 128, 2, 1351),
    KernelRow("fwd", 90, 80, 80, BOTH, 64, 128, 2, 985),
    KernelRow("fwd", 90, 96, 96, BOTH, 192, 112, 2, 1753, last_tile=LAST_TILE_OF_192_ROWS),
    KernelRow("fwd", 90, 96, 96, BOTH, 128, 128, 2, 1459),
    KernelRow("fwd", 90, 96, 96, BOTH, 64, 128, 2, 1093),
    KernelRow("fwd", 90, 128, 64, BOTH, 128, 128, 2, 1450),
    KernelRow("fwd", 90, 128, 64, BOTH, 64, 128, 2, 1090),
    KernelRow("fwd", 90, 64, 128, BOTH, 128, 128, 2, 1450),
    KernelRow("fwd", 90, 64, 128, BOTH, 64, 128, 2, 1090),
    KernelRow("fwd", 90, 128, 128, BOTH + EQUAL, 128, 128, 2, 1656),
    KernelRow("fwd", 90, 128, 128, FULL + EQUAL_FULL, 128, 176, 2, 2190),
    KernelRow("fwd", 90, 128, 128, FULL + EQUAL_FULL, 128, 160, 2, 2018),
    KernelRow("fwd", 90, 128, 128, CAUSAL + EQUAL_CAUSAL, 128, 160, 2, 1997),
    KernelRow("fwd", 90, 128, 128, BOTH, 64, 128, 2, 1249),
    KernelRow("fwd", 90, 160, 160, BOTH, 128, 128, 2, 1968),
    KernelRow("fwd", 90, 160, 160, BOTH, 64, 112, 2, 1300),
    KernelRow("fwd", 90, 192, 128, BOTH, 128, 128, 2, 1890),
    KernelRow("fwd", 90, 192, 128, BOTH, 64, 112, 2, 1300),
    KernelRow("fwd", 90, 192, 192, BOTH, 128, 112, 2, 1953),
    KernelRow("fwd", 90, 192, 192, BOTH, 128, 80, 2, 1467),
    KernelRow("fwd", 90, 192, 192, BOTH, 64, 96, 2, 1270),
    KernelRow("fwd", 90, 256, 256, BOTH + EQUAL, 128, 80, 2, 1836),
    KernelRow("fwd", 90, 256, 256, BOTH + EQUAL, 128, 64, 2, 1540),
    KernelRow("fwd", 90, 256, 256, BOTH, 64, 80, 2, 1280),
    # Block-sparse lists: tiles that divide blocks of 128 x 128, or have separate lists. Tiles of 192 rows (bench:
    # ours_tall) take 8 to 26 % less time for dense blocks, but visit more blocks of masks that hide much. The cost of
    # such tiles is set so that calls of 2048 rows and more use the tiles: there, all kinds of masks together gain
    # (2026-11-25, H100).
    KernelRow("fwd", 90, 64, 64, MASK, 192, 128, 2, 1950, last_tile=LAST_TILE_OF_192_ROWS),
    KernelRow("fwd", 90, 64, 64, MASK, 128, 128, 2, 1460),
    KernelRow("fwd", 90, 128, 128, MASK, 128, 128, 2, 1820),
    KernelRow("fwd", 90, 256, 256, MASK, 128, 64, 2, 1700),
    # Dropout: a single tile for each head dim, with a mask, too. The costs are not measured.
    KernelRow("fwd", 90, 64, 64, DROPPED_ANY_BIAS, 128, 128, 2, 2000),
    KernelRow("fwd", 90, 128, 128, DROPPED_16BIT_BIAS, 128, 128, 2, 2400),
    KernelRow("fwd", 90, 128, 128, BIAS32_DROPPED, 128, 64, 2, 2000),
    KernelRow("fwd", 90, 256, 256, DROPPED_16BIT_BIAS, 128, 64, 2, 2000),
    # An fp32 bias takes twice the registers and the shared memory: narrower blocks, and a split backward.
    KernelRow("fwd", 90, 64, 64, BIASES, 128, 128, 2, 1800),
    KernelRow("fwd", 90, 64, 64, BIASES, 64, 128, 2, 1200),
    KernelRow("fwd", 90, 128, 128, BIAS, 128, 128, 2, 3000),
    KernelRow("fwd", 90, 128, 128, BIAS32, 128, 64, 2, 2000),
    KernelRow("fwd", 90, 128, 128, BIAS, 64, 128, 2, 2000),
    KernelRow("fwd", 90, 192, 128, BIASES, 128, 64, 2, 1700),
    KernelRow("fwd", 90, 256, 256, BIASES, 128, 64, 2, 2200),
    # Windows and packed sequences: 2026-11-26, H100, 16k tokens with windows from 128 keys to all keys, or with
    # sequences of 4 to 8k tokens. Tiles of 64 rows are for short sequences, with two CTAs per SM. D 32 and 96,
    # 2026-11-27: 1.00 to 1.20 x the speed of the tiles of D 64 and 128.
    KernelRow("fwd", 90, 32, 32, VARLEN, 192, 128, 2, 1210),
    KernelRow("fwd", 90, 32, 32, VARLEN, 64, 128, 2, 550),
    KernelRow("fwd", 90, 64, 64, WINDOW + VARLEN, 192, 128, 2, 1430),
    KernelRow("fwd", 90, 64, 64, WINDOW + VARLEN + SOFTCAP, 128, 128, 2, 1240),
    KernelRow("fwd", 90, 64, 64, VARLEN, 64, 64, 2, 520),
    KernelRow("fwd", 90, 96, 96, VARLEN, 192, 112, 2, 1640),
    KernelRow("fwd", 90, 96, 96, VARLEN, 128, 128, 2, 1370),
    KernelRow("fwd", 90, 96, 96, VARLEN, 64, 64, 2, 560),
    KernelRow("fwd", 90, 128, 128, WINDOW + VARLEN + SOFTCAP, 128, 128, 2, 1550),
    KernelRow("fwd", 90, 128, 128, VARLEN, 64, 64, 2, 620),
    KernelRow("fwd", 90, 192, 128, WINDOW + VARLEN, 128, 112, 2, 1800),
    KernelRow("fwd", 90, 192, 192, WINDOW + VARLEN, 128, 112, 2, 2000),
    KernelRow("fwd", 90, 192, 192, VARLEN, 64, 96, 2, 1300),
    KernelRow("fwd", 90, 256, 256, WINDOW + VARLEN + SOFTCAP, 128, 80, 2, 1900),
    KernelRow("fwd", 90, 256, 256, VARLEN, 64, 80, 2, 1330),
    # Packed queries over pages: tiles and costs as for packed sequences, not measured.
    KernelRow("fwd", 90, 64, 64, PAGED_VARLEN[:1], 192, 128, 2, 1430),
    KernelRow("fwd", 90, 64, 64, PAGED_VARLEN, 128, 128, 2, 1240),
    KernelRow("fwd", 90, 64, 64, PAGED_VARLEN[:1], 64, 64, 2, 520),
    KernelRow("fwd", 90, 128, 128, PAGED_VARLEN, 128, 128, 2, 1550),
    KernelRow("fwd", 90, 128, 128, PAGED_VARLEN[:1], 64, 64, 2, 620),
    KernelRow("fwd", 90, 256, 256, PAGED_VARLEN, 128, 80, 2, 1900),
    KernelRow("fwd", 90, 256, 256, PAGED_VARLEN[:1], 64, 80, 2, 1330),
    # Head dims above 256: a tile has half of the columns of O (`column_tiles`). The costs are from 32 heads, S 8192, on
    # an H200 (docs/experiments/forward.md).
    KernelRow("fwd", 90, 320, 320, BOTH + WINDOW + VARLEN, 128, 64, 2, 1330),
    KernelRow("fwd", 90, 320, 320, BOTH, 64, 96, 2, 1250),
    KernelRow("fwd", 90, 384, 384, BOTH + WINDOW + VARLEN, 128, 48, 2, 1260),
    KernelRow("fwd", 90, 384, 384, BOTH, 64, 64, 2, 1020),
    KernelRow("fwd", 90, 512, 512, BOTH + WINDOW + VARLEN + SOFTCAP, 128, 32, 2, 1290),
    KernelRow("fwd", 90, 512, 512, MASK, 128, 64, 1, 2930),
    KernelRow("fwd", 90, 512, 512, BOTH + WINDOW, 64, 48, 2, 1040),
    # 8-bit precision: the fastest of two or three tiles each (docs/experiments/eight_bit.md).
    KernelRow("fwd", 90, 64, 64, QK8, 192, 128, 2),
    KernelRow("fwd", 90, 96, 96, QK8, 128, 128, 2),
    KernelRow("fwd", 90, 128, 128, QK8, 128, 128, 2),
    KernelRow("fwd", 90, 192, 128, QK8, 128, 128, 2),
    KernelRow("fwd", 90, 192, 192, QK8, 128, 96, 2),
    KernelRow("fwd", 90, 256, 256, QK8, 128, 80, 2),
    KernelRow("fwd", 90, 64, 64, BOTH_PRODUCTS_8BIT, 192, 128, 2),
    KernelRow("fwd", 90, 96, 96, BOTH_PRODUCTS_8BIT, 192, 128, 2),
    KernelRow("fwd", 90, 128, 128, IN_8BIT, 192, 96, 2),
    KernelRow("fwd", 90, 128, 128, IN_E4M3, 128, 224, 2),
    KernelRow("fwd", 90, 192, 128, BOTH_PRODUCTS_8BIT, 128, 160, 2),
    KernelRow("fwd", 90, 192, 192, BOTH_PRODUCTS_8BIT, 128, 160, 2),
    KernelRow("fwd", 90, 256, 256, BOTH_PRODUCTS_8BIT, 128, 128, 2),
    # 8-bit precision with a mask: tiles divide the blocks of the mask.
    KernelRow("fwd", 90, 64, 64, MASK_QK8 + MASK_BOTH_8BIT, 192, 128, 2),
    KernelRow("fwd", 90, 128, 128, MASK_QK8 + MASK_BOTH_8BIT, 128, 128, 2),
    KernelRow("fwd", 90, 192, 192, MASK_QK8, 128, 64, 2),
    KernelRow("fwd", 90, 192, 192, MASK_BOTH_8BIT, 128, 128, 2),
    KernelRow("fwd", 90, 256, 256, MASK_QK8, 128, 64, 2),
    KernelRow("fwd", 90, 256, 256, MASK_BOTH_8BIT, 128, 128, 2),
    KernelRow("bwd", 90, 64, 64, BOTH + EQUAL + WINDOW + VARLEN + SOFTCAP, 64, 128, 4),
    KernelRow("bwd", 90, 64, 64, MASK + BIASES + DROPPED_ANY_BIAS, 64, 128, 4),
    KernelRow("bwd", 90, 96, 96, BOTH + WINDOW, 64, 128, 2),
    KernelRow("bwd", 90, 128, 128, BOTH + EQUAL + WINDOW + VARLEN + SOFTCAP, 64, 128, 2),
    KernelRow("bwd", 90, 128, 128, MASK + BIAS + DROPPED, 64, 128, 2),
    # Never run on a GPU. UNTIMED_ROWS of dispatch_table.py choose the split backward instead.
    KernelRow("bwd", 90, 192, 128, BOTH, 64, 96, 2, elements=("bf16",)),
    KernelRow("bwd", 90, 192, 192, BOTH, 64, 96, 2, elements=("bf16",)),
    KernelRow("detbwd", 90, 64, 64, BOTH + WINDOW + MASK + DROPPED, 64, 128, 4),
    KernelRow("detbwd", 90, 128, 128, BOTH + WINDOW + MASK + DROPPED, 64, 128, 2),
    KernelRow("decode", 90, 64, 64, FULL + BIASES, 64, 64, 4, 300),
    KernelRow("decode", 90, 64, 64, MASK, 64, 64, 4, 300, ctas_per_sm=2),
    KernelRow("decode", 90, 64, 64, FULL, 128, 128, 4, 400),
    KernelRow("decode", 90, 128, 128, FULL + MASK + BIASES, 64, 64, 3, 500),
    KernelRow("decode", 90, 128, 128, FULL, 128, 96, 4, 1250),
    KernelRow("decode", 90, 192, 128, FULL + MASK + BIASES, 64, 64, 4, 1500),
    KernelRow("decode", 90, 192, 192, FULL + MASK, 64, 64, 4, 1500),
    KernelRow("decode", 90, 256, 256, FULL + MASK + BIASES, 64, 64, 3, 1250),
    KernelRow("decode", 90, 512, 512, FULL, 64, 32, 2, 1400),  # the costs of D 512 are computed, not measured
    KernelRow("decode", 90, 512, 512, MASK, 64, 64, 1, 2800),
    # Absorbed MLA: a tile of K is K and V. The costs are computed, not measured (docs/experiments/decode.md).
    KernelRow("decode", 90, 512, 512, SHARED_VALUES, 64, 32, 4, 1300),
    KernelRow("decode", 90, 576, 512, SHARED_VALUES, 64, 32, 4, 1400),
    KernelRow("partbwd", 90, 64, 64, BOTH + EQUAL + WINDOW + VARLEN + SOFTCAP, 64, 64, 4, dkdv_alone=False),
    KernelRow("partbwd", 90, 64, 64, MASK + BIASES + DROPPED_ANY_BIAS, 64, 64, 4, dkdv_alone=False),
    KernelRow("partbwd", 90, 128, 128, BOTH + EQUAL + WINDOW + VARLEN + SOFTCAP, 64, 64, 2),
    KernelRow("partbwd", 90, 128, 128, MASK + BIASES + DROPPED_ANY_BIAS, 64, 64, 2),
    KernelRow("partbwd", 90, 192, 128, BOTH + WINDOW + VARLEN, 64, 64, 2),
    KernelRow("partbwd", 90, 192, 192, BOTH + WINDOW + VARLEN, 64, 64, 2),
    KernelRow("partbwd", 90, 256, 256, BOTH + EQUAL + WINDOW + VARLEN + SOFTCAP, 64, 64, 2),
    KernelRow("partbwd", 90, 256, 256, MASK + BIASES + DROPPED + MASK_DROPPED, 64, 64, 2),
    # Head dims above 256: a kernel for each of dQ, dK and dV (kernels/sm90/backward_wide.py). Stages of K, Q or dO.
    # Windows and packed sequences of D 320 spill registers of the producer warp, so such calls run in the next row.
    KernelRow("partbwd", 90, 320, 320, BOTH, 64, 64, 2),
    KernelRow("partbwd", 90, 384, 384, BOTH + WINDOW + VARLEN, 64, 64, 2),
    KernelRow("partbwd", 90, 512, 512, BOTH + WINDOW + VARLEN + SOFTCAP + MASK, 64, 64, 1),
    KernelRow("tilebwd", 90, 32, 32, BIASES, 64, 64, 2),
    KernelRow("tilebwd", 90, 64, 64, BIASES, 64, 64, 2),
    KernelRow("dbias", 90, 64, 64, BIAS, 128, 128, 4),
    KernelRow("dbias", 90, 64, 64, BIASES_DROPPED, 128, 64, 4),
    KernelRow("dbias", 90, 64, 64, BIAS32, 128, 64, 4),
    KernelRow("dbias", 90, 128, 128, BIAS, 128, 128, 3),
    KernelRow("dbias", 90, 128, 128, BIASES_DROPPED, 128, 64, 4),
    KernelRow("dbias", 90, 128, 128, BIAS32, 128, 64, 4),
    KernelRow("dbias", 90, 256, 256, BIASES + BIAS_DROPPED, 128, 64, 2),
    KernelRow("decode", 80, 64, 64, FULL, 16, 64, 3, 280),
    KernelRow("decode", 80, 64, 64, FULL, 64, 128, 2, 920),
    KernelRow("decode", 80, 128, 128, FULL, 16, 128, 1, 850),
    KernelRow("decode", 80, 64, 64, MASK + BIAS, 64, 64, 3, 560),
    KernelRow("decode", 80, 128, 128, FULL + MASK + BIAS, 64, 64, 2, 800),
    KernelRow("decode", 80, 256, 256, FULL, 16, 64, 1, 1450),
    KernelRow("decode", 80, 256, 256, FULL + MASK + BIAS, 64, 64, 1, 1500),
    # 8-bit KV caches: 2026-11-25, H100, the fastest of five tiles each, with caches in memory.
    KernelRow("decode", 80, 64, 64, CACHED, 16, 64, 3, 480),
    KernelRow("decode", 80, 64, 64, CACHED, 16, 128, 2, 820),
    KernelRow("decode", 80, 64, 64, CACHED + MASK_CACHED, 64, 64, 3, 800),
    KernelRow("decode", 80, 128, 128, CACHED, 16, 64, 3, 520),
    KernelRow("decode", 80, 128, 128, CACHED, 16, 128, 2, 900),
    KernelRow("decode", 80, 128, 128, CACHED + MASK_CACHED, 64, 64, 3, 1000),
    KernelRow("decode", 80, 256, 256, CACHED, 16, 64, 2, 950),
    KernelRow("decode", 80, 256, 256, CACHED + MASK_CACHED, 64, 64, 2, 1800),
    # Paged KV caches.
    KernelRow("decode", 80, 64, 64, PAGED, 16, 64, 3, 300, ctas_per_sm=2),
    KernelRow("decode", 80, 64, 64, PAGED + PAGED_CACHED, 64, 64, 3, 600, ctas_per_sm=2),
    KernelRow("decode", 80, 64, 64, PAGED_CACHED, 16, 128, 2, 820, ctas_per_sm=2),
    KernelRow("decode", 80, 128, 128, PAGED, 16, 128, 1, 900, ctas_per_sm=2),
    KernelRow("decode", 80, 128, 128, PAGED, 64, 64, 2, 850, ctas_per_sm=2),
    KernelRow("decode", 80, 128, 128, PAGED_CACHED, 16, 64, 3, 560, ctas_per_sm=2),
    KernelRow("decode", 80, 128, 128, PAGED_CACHED, 64, 64, 3, 1000, ctas_per_sm=2, elements=WITHOUT_SPILLS),
    KernelRow("decode", 80, 256, 256, PAGED, 16, 64, 1, 1500, ctas_per_sm=2),
    KernelRow("decode", 80, 256, 256, PAGED, 64, 64, 1, 1550, ctas_per_sm=2),
    KernelRow("decode", 80, 256, 256, PAGED_CACHED, 16, 64, 2, 1000, ctas_per_sm=2, elements=WITHOUT_SPILLS),
    # Balanced splits: the tiles of the rows above. No GPU has run these kernels yet.
    KernelRow("decode", 80, 64, 64, BALANCED, 16, 64, 3, 300, ctas_per_sm=2),
    KernelRow("decode", 80, 64, 64, BALANCED, 64, 64, 3, 600, ctas_per_sm=2),
    KernelRow("decode", 80, 128, 128, BALANCED, 16, 128, 1, 900, ctas_per_sm=2),
    KernelRow("decode", 80, 128, 128, BALANCED, 64, 64, 2, 850, ctas_per_sm=2),
    KernelRow("fwd", 80, 32, 32, BOTH, 64, 128, 1, 390),
    KernelRow("fwd", 80, 64, 64, BOTH, 128, 96, 1, 1268),
    KernelRow("fwd", 80, 64, 64, FULL, 128, 112, 1, 1475),
    KernelRow("fwd", 80, 64, 64, CAUSAL, 128, 64, 1, 889),
    KernelRow("fwd", 80, 64, 64, BOTH, 64, 96, 1, 690),
    KernelRow("fwd", 80, 64, 64, WINDOW + VARLEN + SOFTCAP + MASK + BIAS32 + DROPPED + MASK_DROPPED, 64, 128, 1, 890),
    KernelRow("fwd", 80, 64, 64, BIAS + BIAS_DROPPED, 64, 64, 1, 500),
    KernelRow("fwd", 80, 96, 96, BOTH, 128, 64, 1, 1192),
    KernelRow("fwd", 80, 96, 96, BOTH, 64, 64, 1, 696),
    KernelRow("fwd", 80, 128, 128, BOTH, 128, 48, 1, 1120),
    # The mask of a window takes registers. With bf16, ptxas spills eight bytes to fit three CTAs: for windows at 64
    # keys, and for a softcap with packed sequences at 48 keys.
    KernelRow("fwd", 80, 128, 128, WINDOW + SOFTCAP[:1], 64, 48, 1, 700),
    KernelRow("fwd", 80, 128, 128, SOFTCAP[1:], 64, 32, 1, 550),
    KernelRow("fwd", 80, 128, 128, BOTH + VARLEN + MASK + BIASES + DROPPED_16BIT_BIAS, 64, 64, 1, 841),
    KernelRow("fwd", 80, 192, 128, BOTH, 64, 64, 1, 990),
    KernelRow("fwd", 80, 192, 192, BOTH, 64, 64, 1, 1210),
    KernelRow(
        "fwd", 80, 256, 256, BOTH + WINDOW + VARLEN + SOFTCAP + MASK + BIASES + DROPPED_16BIT_BIAS, 64, 64, 1, 1670
    ),
    KernelRow("fwd", 80, 64, 64, BOTH, 64, 64, 1, elementwise=True),
    KernelRow("fwd", 80, 128, 128, BOTH, 64, 64, 1, elementwise=True),
    KernelRow("fwd", 80, 256, 256, BOTH, 64, 64, 1, elementwise=True),
    KernelRow("bwd", 80, 64, 64, BOTH, 64, 128, 2),
    KernelRow("bwd", 80, 96, 96, BOTH, 64, 128, 2),
    KernelRow("bwd", 80, 128, 128, BOTH, 64, 128, 2),
    # Score stages need registers. Warps with a quarter of the columns have enough registers.
    KernelRow("bwd", 80, 64, 64, WINDOW + MASK + BIAS + DROPPED_16BIT_BIAS, 64, 64, 1),
    KernelRow("bwd", 80, 128, 128, WINDOW + MASK + BIAS + DROPPED_16BIT_BIAS, 64, 64, 1),
    KernelRow("bwd", 80, 192, 128, BOTH, 64, 64, 1),
    KernelRow("bwd", 80, 192, 192, BOTH, 64, 64, 1),
    KernelRow("bwd", 80, 256, 256, BOTH + WINDOW + MASK + BIAS + DROPPED + MASK_DROPPED, 64, 64, 1),
    KernelRow("detbwd", 80, 64, 64, BOTH, 64, 128, 2),
    KernelRow("detbwd", 80, 128, 128, BOTH, 64, 128, 2),
    KernelRow("detbwd", 80, 64, 64, MASK, 64, 64, 1),
    KernelRow("detbwd", 80, 128, 128, MASK, 64, 64, 1),
    KernelRow("detbwd", 80, 192, 128, BOTH, 64, 64, 1),
    KernelRow("detbwd", 80, 192, 192, BOTH, 64, 64, 1),
    KernelRow("detbwd", 80, 256, 256, BOTH + MASK, 64, 64, 1),
    KernelRow("bwd", 80, 64, 64, BOTH, 64, 64, 1, elementwise=True),
    KernelRow("bwd", 80, 128, 128, BOTH, 64, 64, 1, elementwise=True),
    KernelRow("bwd", 80, 256, 256, BOTH, 64, 64, 1, elementwise=True),
)

# fmt: on


@dataclass(frozen=True, slots=True)
class Pack:
    """A kernel pack: a shared object of kernels, flashplug_<name>.so, built, installed and left out as a unit."""

    name: str
    target: str  # a target of TARGETS
    contains: Callable[[KernelSpec], bool]  # True for the kernels of the pack, among the kernels for the target

    @property
    def file(self) -> str:
        return f"flashplug_{self.name}.so"

    def specs(self) -> list[KernelSpec]:
        return [spec for arch in TARGETS[self.target] for spec in specs(arch) if self.contains(spec)]

    def test_sample(self) -> list[KernelSpec]:
        """Return the kernels to compile for tests if nobody needs the rest: about a quarter by compile time."""
        return [spec for spec in self.specs() if TEST_SAMPLES[self.target](spec)]


def _has_dropout(spec: KernelSpec) -> bool:
    return "dropout" in spec.features


def _uses_8bit(spec: KernelSpec) -> bool:
    return features.recipe_of(spec.features) is not None or changes_elements(spec.features)


def _needs_forced_backend(spec: KernelSpec) -> bool:
    """Return whether no choice row serves the kernel on Hopper, so that only a forced backend runs the kernel.

    Such kernels are the kernels for every GPU since sm_80 for long calls with vector loads, and for all calls with a
    mask, a bias or dropout.
    """
    few = spec.is_decode and (spec.features <= {"window", "softcap", "paged"} or changes_elements(spec.features))
    return BY_ARCH[spec.arch].runs_on_later_gpus and not spec.elementwise and not few


def _has_bias(spec: KernelSpec) -> bool:
    return not spec.features.isdisjoint({"bias", "bias32"})


def _is_wide(spec: KernelSpec) -> bool:
    return max(spec.d, spec.dv) > MAX_TILE_DV


def _has_window(spec: KernelSpec) -> bool:
    return not spec.features.isdisjoint({"window", "equal"}) and not _uses_8bit(spec)


@functools.cache
def _smallest_tiles() -> dict[tuple, tuple[int, int]]:
    """Return the smallest tile of all kernels for the same calls, by the calls of each kernel."""
    tiles: dict[tuple, tuple[int, int]] = {}
    for spec in (spec for arch in BY_ARCH for spec in specs(arch)):
        tiles[_served_calls(spec)] = min(
            tiles.get(_served_calls(spec), (spec.tile_m, spec.tile_n)), (spec.tile_m, spec.tile_n)
        )
    return tiles


def _served_calls(spec: KernelSpec) -> tuple:
    return spec.kind, spec.arch, spec.dtype, spec.d, spec.dv, spec.mask, spec.elementwise


def _is_smallest(spec: KernelSpec) -> bool:
    """Return whether the kernel has the smallest tile for its calls. Tests interpret small calls on such tiles."""
    return (spec.tile_m, spec.tile_n) == _smallest_tiles()[_served_calls(spec)]


def _is_first_with_its_features(spec: KernelSpec) -> bool:
    """Return whether the kernel is the first with the same kind and features, among kernels at D 64 with bf16."""
    alike = (x for x in specs(spec.arch, spec.kind) if _is_bf16(x) and x.d == 64)
    return spec == next(x for x in alike if (x.mask, x.elementwise) == (spec.mask, spec.elementwise))


def _is_plain(spec: KernelSpec) -> bool:
    return spec.features <= {"causal"} and not spec.elementwise


def _is_sampled_in_fp16(spec: KernelSpec) -> bool:
    return (
        spec.dtype == "fp16" and spec.d == spec.dv == 64 and _is_plain(spec) and spec.kind in {"fwd", "decode", "bwd"}
    )


def _is_bf16(spec: KernelSpec) -> bool:
    return "bf16" in KERNEL_DTYPES[spec.dtype].operands


def _has_tested_dims(spec: KernelSpec) -> bool:
    """Return whether the short test run calls such kernels with the same head dims.

    The tested head dims are the usual head dims of models. Only 64 is tested if a kernel is only forced, is
    element-wise, or combines a mask or a bias with another feature.
    """
    combined = len(spec.features & {"mask", "bias", "bias32", "dropout", "cache8"}) > 1
    if spec.elementwise or combined or _needs_forced_backend(spec):
        return spec.d == 64
    wide = (spec.d, spec.dv) in {(512, 512), (576, 512)}  # the pack of head dims above 256
    usual = spec.d in {64, 128} or wide
    return usual or (spec.features <= {"causal"} and (spec.d, spec.dv) in {(192, 128), (256, 256)})


def _is_sampled_for_sm_90a(spec: KernelSpec) -> bool:
    is_sampled = (_is_bf16(spec) and _has_tested_dims(spec)) or _is_sampled_in_fp16(spec)
    return is_sampled and (spec.kind != "fwd" or not _is_plain(spec) or _is_smallest(spec))


# Kernels compiled by the short test run, by target. The code of a kernel depends little on the element and on the size
# of the tile. So most kernels have one element of two, and the tile that small calls use. Tests interpret the kernels
# of sm_90a. The kernels of sm_80 differ from the same kernels for sm_90a only by the work of ptxas, so a single kernel
# of each kind with each set of features is compiled. `./tools/dev test --all` compiles all kernels.
TEST_SAMPLES: dict[str, Callable[[KernelSpec], bool]] = {
    "sm_90a": _is_sampled_for_sm_90a,
    "sm_80": lambda spec: _is_bf16(spec) and spec.d == 64 and _is_first_with_its_features(spec),
}

OUTSIDE_OF_BASE_PACK = (_needs_forced_backend, _has_bias, _has_dropout, _has_window, _uses_8bit, _is_wide)
# The first pack of each target is the pack that every call needs.
PACKS = (
    Pack(
        "sm90a", "sm_90a", lambda spec: not any(belongs_elsewhere(spec) for belongs_elsewhere in OUTSIDE_OF_BASE_PACK)
    ),
    Pack(
        "sm90a_bias",
        "sm_90a",
        lambda spec: not _needs_forced_backend(spec) and _has_bias(spec) and not _has_dropout(spec),
    ),
    Pack("sm90a_fa2", "sm_90a", _needs_forced_backend),  # sdpa_backend("fa2") on Hopper, and tests
    Pack("sm90a_dropout", "sm_90a", lambda spec: not _needs_forced_backend(spec) and _has_dropout(spec)),
    Pack(
        "sm90a_window",
        "sm_90a",
        lambda spec: not _needs_forced_backend(spec) and _has_window(spec) and not _is_wide(spec),
    ),
    Pack("sm90a_wide", "sm_90a", _is_wide),  # head dims above 256
    Pack("sm90a_8bit", "sm_90a", lambda spec: not _needs_forced_backend(spec) and _uses_8bit(spec)),
    Pack("sm80", "sm_80", lambda spec: True),
)

# The packs in a wheel with kernels: the kernels for unmodified models in auto mode (test_wheel.py).
WHEEL_PACKS = ("sm90a",)


def specs(arch: int, *kinds: str) -> list[KernelSpec]:
    """Return every kernel written for an architecture, or only the kernels of the given kinds."""
    rows = [row for row in KERNEL_ROWS if row.arch == arch and (not kinds or row.kind in kinds)]
    return list(dict.fromkeys(spec for row in rows for spec in row.specs()))
