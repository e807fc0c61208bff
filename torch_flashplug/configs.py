"""The table: which kernels exist, and which calls they win. Data only; the dispatcher (src/plan.cpp) reads these rows,
and adds its estimate of a launch's time.

The rows of the smallest head dims that hold a call compete for it by estimated time (cost x waves of tiles). Of choice
rows the first match wins. A retune is a change of rows with its date, machine and ratio.
"""

from __future__ import annotations

from dataclasses import dataclass

from .spec import DTYPES, KernelSpec

ANY = 1 << 40  # upper end of an open range
SERVE_RATIO = 0.97  # auto takes a class of calls only where stock time / our time reached this
DECODE_ROWS = 64  # Sq * (Hq / Hkv) up to here is a decode-shaped call: packed query rows of one tile
DECODE_OCCUPANCY = 0.8  # share of the SMs that decode tiles must fill; below it the keys must be split


@dataclass(frozen=True, slots=True)
class KernelRow:
    """A kernel in every dtype, and the calls whose shapes it fits."""

    kind: str
    arch: int
    d_max: int
    dv_max: int
    mask: str
    tile_m: int
    tile_n: int
    stages: int
    cost: int = 1000  # ns of one KV block of one tile on one SM

    def spec(self, dtype: str) -> KernelSpec:
        return KernelSpec(
            self.kind, self.arch, dtype, self.d_max, self.dv_max, self.mask, self.tile_m, self.tile_n, self.stages
        )


@dataclass(frozen=True, slots=True)
class ChoiceRow:
    """A class of calls and what auto mode does with it: ours where ratio >= SERVE_RATIO. d is max(D, Dv). Of kind
    "partbwd", and in every mode: in parts where ratio, fused time / time in parts, reaches that.
    """

    kind: str
    arch: int
    grad: bool
    mask: str
    d_min: int
    d_max: int
    min_sq: int
    max_sq: int
    min_sk: int
    max_sk: int
    min_tiles: int
    ratio: float  # stock default time / our time, the lowest seen in the class
    measured: str  # date, machine, suite
    tile_m: int = 0  # only calls whose kernel has this many query rows; 0: any

    @property
    def serve(self) -> bool:
        return self.ratio >= SERVE_RATIO


# Small tiles fill more SMs, large ones reuse K and V more; wide blocks (tile_n) suit long keys. cost: 2026-11-21, H100,
# tools/tune.py, S 4096 (d 256: 2048, 128x64 4096), full: kernel time / (waves of tiles * (KV blocks + 1)). Not measured
# but taken from neighbours: (128, 64), (64, 128), and 64 rows at 160, (192, 128) and 192.
# fmt: off
KERNEL_ROWS = (
    #         kind  arch d_max dv_max mask tile_m tile_n stages cost
    KernelRow("fwd", 90, 64, 64, "full", 192, 128, 2, 1532),
    KernelRow("fwd", 90, 64, 64, "full", 128, 128, 2, 1220),
    KernelRow("fwd", 90, 64, 64, "full", 64, 128, 2, 811),
    KernelRow("fwd", 90, 64, 64, "causal", 192, 128, 2, 1532),
    KernelRow("fwd", 90, 64, 64, "causal", 128, 128, 2, 1220),
    KernelRow("fwd", 90, 64, 64, "causal", 64, 128, 2, 811),
    KernelRow("fwd", 90, 80, 80, "full", 192, 112, 2, 1583),
    KernelRow("fwd", 90, 80, 80, "full", 128, 128, 2, 1351),
    KernelRow("fwd", 90, 80, 80, "full", 64, 128, 2, 985),
    KernelRow("fwd", 90, 80, 80, "causal", 192, 112, 2, 1583),
    KernelRow("fwd", 90, 80, 80, "causal", 128, 128, 2, 1351),
    KernelRow("fwd", 90, 80, 80, "causal", 64, 128, 2, 985),
    KernelRow("fwd", 90, 96, 96, "full", 192, 112, 2, 1753),
    KernelRow("fwd", 90, 96, 96, "full", 128, 128, 2, 1459),
    KernelRow("fwd", 90, 96, 96, "full", 64, 128, 2, 1093),
    KernelRow("fwd", 90, 96, 96, "causal", 192, 112, 2, 1753),
    KernelRow("fwd", 90, 96, 96, "causal", 128, 128, 2, 1459),
    KernelRow("fwd", 90, 96, 96, "causal", 64, 128, 2, 1093),
    KernelRow("fwd", 90, 128, 64, "full", 128, 128, 2, 1450),
    KernelRow("fwd", 90, 128, 64, "full", 64, 128, 2, 1090),
    KernelRow("fwd", 90, 128, 64, "causal", 128, 128, 2, 1450),
    KernelRow("fwd", 90, 128, 64, "causal", 64, 128, 2, 1090),
    KernelRow("fwd", 90, 64, 128, "full", 128, 128, 2, 1450),
    KernelRow("fwd", 90, 64, 128, "full", 64, 128, 2, 1090),
    KernelRow("fwd", 90, 64, 128, "causal", 128, 128, 2, 1450),
    KernelRow("fwd", 90, 64, 128, "causal", 64, 128, 2, 1090),
    KernelRow("fwd", 90, 128, 128, "full", 128, 128, 2, 1656),
    KernelRow("fwd", 90, 128, 128, "full", 128, 176, 2, 2190),
    KernelRow("fwd", 90, 128, 128, "full", 128, 160, 2, 2018),
    KernelRow("fwd", 90, 128, 128, "full", 64, 128, 2, 1249),
    KernelRow("fwd", 90, 128, 128, "causal", 128, 128, 2, 1656),
    KernelRow("fwd", 90, 128, 128, "causal", 128, 160, 2, 1997),
    KernelRow("fwd", 90, 128, 128, "causal", 64, 128, 2, 1249),
    KernelRow("fwd", 90, 160, 160, "full", 128, 128, 2, 1968),
    KernelRow("fwd", 90, 160, 160, "full", 64, 112, 2, 1300),
    KernelRow("fwd", 90, 160, 160, "causal", 128, 128, 2, 1968),
    KernelRow("fwd", 90, 160, 160, "causal", 64, 112, 2, 1300),
    KernelRow("fwd", 90, 192, 128, "full", 128, 128, 2, 1890),
    KernelRow("fwd", 90, 192, 128, "full", 64, 112, 2, 1300),
    KernelRow("fwd", 90, 192, 128, "causal", 128, 128, 2, 1890),
    KernelRow("fwd", 90, 192, 128, "causal", 64, 112, 2, 1300),
    KernelRow("fwd", 90, 192, 192, "full", 128, 112, 2, 1953),
    KernelRow("fwd", 90, 192, 192, "full", 128, 80, 2, 1467),
    KernelRow("fwd", 90, 192, 192, "full", 64, 96, 2, 1270),
    KernelRow("fwd", 90, 192, 192, "causal", 128, 112, 2, 1953),
    KernelRow("fwd", 90, 192, 192, "causal", 128, 80, 2, 1467),
    KernelRow("fwd", 90, 192, 192, "causal", 64, 96, 2, 1270),
    KernelRow("fwd", 90, 256, 256, "full", 128, 80, 2, 1836),
    KernelRow("fwd", 90, 256, 256, "full", 128, 64, 2, 1540),
    KernelRow("fwd", 90, 256, 256, "full", 64, 80, 2, 1280),
    KernelRow("fwd", 90, 256, 256, "causal", 128, 80, 2, 1836),
    KernelRow("fwd", 90, 256, 256, "causal", 128, 64, 2, 1540),
    KernelRow("fwd", 90, 256, 256, "causal", 64, 80, 2, 1280),
    KernelRow("bwd", 90, 64, 64, "full", 64, 128, 4),
    KernelRow("bwd", 90, 64, 64, "causal", 64, 128, 4),
    KernelRow("bwd", 90, 128, 128, "full", 64, 128, 2),
    KernelRow("bwd", 90, 128, 128, "causal", 64, 128, 2),
    KernelRow("detbwd", 90, 64, 64, "full", 64, 128, 4),
    KernelRow("detbwd", 90, 64, 64, "causal", 64, 128, 4),
    KernelRow("detbwd", 90, 128, 128, "full", 64, 128, 2),
    KernelRow("detbwd", 90, 128, 128, "causal", 64, 128, 2),
    KernelRow("partbwd", 90, 64, 64, "full", 64, 64, 4),
    KernelRow("partbwd", 90, 64, 64, "causal", 64, 64, 4),
    KernelRow("partbwd", 90, 128, 128, "full", 64, 64, 2),
    KernelRow("partbwd", 90, 128, 128, "causal", 64, 64, 2),
    KernelRow("partbwd", 90, 192, 128, "full", 64, 64, 2),
    KernelRow("partbwd", 90, 192, 128, "causal", 64, 64, 2),
    KernelRow("partbwd", 90, 192, 192, "full", 64, 64, 2),
    KernelRow("partbwd", 90, 192, 192, "causal", 64, 64, 2),
    KernelRow("partbwd", 90, 256, 256, "full", 64, 64, 2),
    KernelRow("partbwd", 90, 256, 256, "causal", 64, 64, 2),
)

_NO_GRAD = "2026-11-21 H100, torch 2.11 + cuDNN 9.19, bench --suite choice"
_GRAD = "2026-11-21 H100, torch 2.11 + cuDNN 9.19, bench --suite grad"
_BACKWARD = _GRAD + ", with our backward"
_FORWARD = "2026-11-21 H100, torch 2.11 + cuDNN 9.19, bench --suite forward"
_PARTS = "2026-11-21 H100, bursts, B*S 16384, H*D 2048, square (tools/results/LOG.md)"
# Fewer query rows are decode, which wants split keys: our kernel does not split them, and no suite measured it there.
_MIN_SQ = 16
# ratio is the lowest that the suite saw in the class (642 shapes in all without gradients, 388 with).
CHOICE_ROWS: tuple[ChoiceRow, ...] = (
    #         kind  arch grad  mask d_min d_max min_sq max_sq min_sk max_sk min_tiles
    ChoiceRow("fwd", 90, False, "full", 1, 64, _MIN_SQ, 256, 1025, ANY, 264, 0.967, _NO_GRAD, tile_m=128),
    ChoiceRow("fwd", 90, False, "full", 1, 64, _MIN_SQ, ANY, 1, ANY, 0, 0.977, _NO_GRAD),
    ChoiceRow("fwd", 90, False, "causal", 1, 64, _MIN_SQ, 512, 1, 512, 1024, 0.958, _FORWARD, tile_m=128),
    ChoiceRow("fwd", 90, False, "causal", 1, 64, _MIN_SQ, ANY, 1, ANY, 0, 1.049, _NO_GRAD),
    ChoiceRow("fwd", 90, False, "full", 65, 128, _MIN_SQ, ANY, 1, ANY, 0, 1.000, _NO_GRAD),
    ChoiceRow("fwd", 90, False, "causal", 65, 128, _MIN_SQ, ANY, 1, ANY, 0, 1.030, _NO_GRAD),
    ChoiceRow("fwd", 90, False, "full", 129, 256, _MIN_SQ, ANY, 1, ANY, 0, 1.007, _NO_GRAD),
    ChoiceRow("fwd", 90, False, "causal", 193, 256, 257, 512, 257, 512, 528, 0.965, _FORWARD),  # bound by memory
    ChoiceRow("fwd", 90, False, "causal", 129, 256, _MIN_SQ, ANY, 1, ANY, 0, 0.989, _NO_GRAD),
    # Our forward with cuDNN's backward, both together.
    ChoiceRow("fwd", 90, True, "full", 1, 64, _MIN_SQ, ANY, 1, ANY, 0, 0.993, _GRAD),
    ChoiceRow("fwd", 90, True, "causal", 1, 64, _MIN_SQ, ANY, 1, ANY, 0, 1.016, _GRAD),
    ChoiceRow("fwd", 90, True, "full", 65, 128, _MIN_SQ, ANY, 1, ANY, 0, 0.998, _GRAD),
    ChoiceRow("fwd", 90, True, "causal", 65, 128, _MIN_SQ, ANY, 1, ANY, 0, 0.977, _GRAD),
    # Our backward after any forward, both together (280 shapes); tiles are blocks of 128 keys. Few steps of queries do
    # not pay for loading K and V, and few tiles do not fill the GPU.
    # In parts instead of fused, ratio of their times: few steps do not pay for a fused kernel's scratch.
    ChoiceRow("partbwd", 90, True, "full", 65, 128, 1, 256, 1, 256, 0, 1.075, _PARTS),
    ChoiceRow("partbwd", 90, True, "causal", 65, 128, 1, 512, 1, 512, 0, 1.093, _PARTS),
    ChoiceRow("partbwd", 90, True, "causal", 1, 64, 1, 256, 1, 256, 0, 1.062, _PARTS),
    ChoiceRow("bwd", 90, True, "full", 1, 128, 1, 256, 1025, ANY, 0, 0.890, _BACKWARD),
    ChoiceRow("bwd", 90, True, "full", 1, 128, 1025, ANY, 1, 1024, 64, 1.042, _BACKWARD),
    ChoiceRow("bwd", 90, True, "full", 1, 128, 1025, ANY, 1, 1024, 0, 0.436, _BACKWARD),
    ChoiceRow("bwd", 90, True, "full", 1, 64, 1, ANY, 1, ANY, 0, 1.047, _BACKWARD),
    ChoiceRow("bwd", 90, True, "full", 121, 128, 1, ANY, 1, ANY, 0, 1.032, _BACKWARD),
    ChoiceRow("bwd", 90, True, "causal", 1, 64, 1, ANY, 1, ANY, 0, 1.066, _BACKWARD),
    ChoiceRow("bwd", 90, True, "causal", 121, 128, 1, ANY, 1, ANY, 0, 0.981, _BACKWARD),
)
# fmt: on


def specs(arch: int, *kinds: str) -> list[KernelSpec]:
    """Every kernel of one architecture's pack, or of these kinds alone."""
    rows = [row for row in KERNEL_ROWS if row.arch == arch and (not kinds or row.kind in kinds)]
    return list(dict.fromkeys(row.spec(dtype) for row in rows for dtype in DTYPES))
