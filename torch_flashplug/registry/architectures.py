"""Backends, architectures of the kernels, and compilation targets.

The module imports only the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """The kernels written for an architecture, and the backend that selects the kernels."""

    backend: str
    arch: int  # 90: compute capability 9.0
    runs_on_later_gpus: bool  # later GPUs run the kernels, too; else only GPUs of `arch`
    gpus: str  # GPUs able to run the kernels, as text for a reason of explain()
    measured_cc: int = 0  # compute capability of the GPUs of the measured rows (dispatch_table.py); 0: none
    has_tma: bool = False  # TMA loads the operands in boxes of rows
    supports_clusters: bool = False  # CTAs of a cluster add up results in each other's shared memory
    shares_heads: bool = False  # tiles of a backward may share the query heads of a KV head
    # Warpgroups share registers unevenly, so reports of packs count the registers of both kinds.
    has_wgmma: bool = False

    def runs_on(self, cc: int) -> bool:
        return cc >= self.arch if self.runs_on_later_gpus else cc == self.arch


FAMILIES = (  # in the order in which auto mode tries the families
    Family(
        "fa3",
        90,
        runs_on_later_gpus=False,
        gpus="exactly 9.0 (H100, H200)",
        measured_cc=90,
        has_tma=True,
        supports_clusters=True,
        shares_heads=True,
        has_wgmma=True,
    ),
    Family("fa2", 80, runs_on_later_gpus=True, gpus="8.0 or more", measured_cc=90),
)
BY_ARCH = {family.arch: family for family in FAMILIES}
KERNEL_BACKENDS = tuple(family.backend for family in FAMILIES)
# Mode ids are positions in this tuple. The enum in src/core/core.h mirrors the tuple, and test_call_facts compares
# both.
BACKENDS = ("auto", "math", "stock", *KERNEL_BACKENDS)
# Compilation targets, with the architectures of the kernels that run on each. Kernels for sm_80 (mma.sync, cp.async)
# run on every GPU since sm_80. Kernels for sm_90 (wgmma, TMA) run only on Hopper.
_TARGET_CC = {"sm_80": 80, "sm_90a": 90, "sm_100": 100, "sm_120": 120}
TARGETS = {target: tuple(family.arch for family in FAMILIES if family.runs_on(cc)) for target, cc in _TARGET_CC.items()}


def is_measured(cc: int) -> bool:
    """Return whether auto mode has measured rows for GPUs of a compute capability."""
    return any(family.measured_cc == cc for family in FAMILIES)


def targets_of(cc: int) -> list[str]:
    """Return the target of the same major compute capability (90 is 9.0) in a list, or an empty list."""
    return [target for target, target_cc in _TARGET_CC.items() if target_cc // 10 == cc // 10]
