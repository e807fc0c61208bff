"""The table: which kernels exist, and which calls they win. Data only; the dispatcher (src/plan.cpp) reads these rows, nothing else says a number.

Rows are tried in order and the first match wins. A retune is a change of rows with its date, machine and ratio.
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
    min_sq: int = 0  # query rows from which this row may be taken
    min_tiles: int = 0  # B * Hq * ceil(Sq / tile_m) from which this row may be taken

    def spec(self, dtype: str) -> KernelSpec:
        return KernelSpec(self.kind, self.arch, dtype, self.d_max, self.dv_max, self.mask, self.tile_m, self.tile_n, self.stages)


@dataclass(frozen=True, slots=True)
class ChoiceRow:
    """A class of calls and what auto mode does with it: ours where ratio >= SERVE_RATIO. d is max(D, Dv)."""

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

    @property
    def serve(self) -> bool:
        return self.ratio >= SERVE_RATIO


KERNEL_ROWS = (
    #         kind  arch d_max dv_max mask   tile_m tile_n stages min_sq min_tiles
    # D 64: three warpgroups where there are rows and tiles enough to keep them busy (S 512 full 1.05 against 0.98 x cuDNN, S 256 0.85 against 1.05;
    # causal S 2048 1.10 against 1.08, S 1024 0.94 against 1.09; 2026-11-21, H200, B*S 16k, H*D 2048). min_tiles: one for every SM of an H100.
    KernelRow("fwd", 90, 64, 64, "full", 192, 128, 2, 384, 132),
    KernelRow("fwd", 90, 64, 64, "full", 128, 128, 2),
    KernelRow("fwd", 90, 64, 64, "causal", 192, 128, 2, 2048, 132),
    KernelRow("fwd", 90, 64, 64, "causal", 128, 128, 2),
    KernelRow("fwd", 90, 128, 128, "full", 128, 128, 2),
    KernelRow("fwd", 90, 128, 128, "causal", 128, 128, 2),
)

CHOICE_ROWS: tuple[ChoiceRow, ...] = ()


def specs(arch: int) -> list[KernelSpec]:
    """Every kernel of one architecture's pack."""
    return list(dict.fromkeys(row.spec(dtype) for row in KERNEL_ROWS if row.arch == arch for dtype in DTYPES))
