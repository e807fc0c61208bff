"""Who asks for kernels, and where they run: backends, the architectures that kernels are written for, the targets that
they are compiled for. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """Kernels that are written for one architecture, and the backend that asks for them."""

    backend: str
    arch: int  # 90: compute capability 9.0
    later: bool  # every GPU since runs them; else that one alone
    gpus: str  # that run them, in words: "these kernels need ..."
    tma: bool = False  # operands come in boxes of rows
    clusters: bool = False  # CTAs add up in each other's shared memory
    shares_heads: bool = False  # tiles of a backward may share the query heads of a KV head
    wgmma: bool = False  # products of warpgroups, which share registers unevenly: reports of packs count both

    def runs_on(self, cc: int) -> bool:
        return cc >= self.arch if self.later else cc == self.arch


FAMILIES = (  # in the order in which auto asks
    Family(
        "fa3", 90, later=False, gpus="exactly 9.0 (H100, H200)", tma=True, clusters=True, shares_heads=True, wgmma=True
    ),
    Family("fa2", 80, later=True, gpus="8.0 or more"),
)
BY_ARCH = {family.arch: family for family in FAMILIES}
KERNEL_BACKENDS = tuple(family.backend for family in FAMILIES)
# Mode ids are positions in this tuple; the enum in src/core/flashplug.h mirrors it and test_facts holds the two
# together.
BACKENDS = ("auto", "math", "stock", *KERNEL_BACKENDS)
# What is compiled for, and the kernels that run there, by their architecture: those of sm_80 (mma.sync, cp.async) on
# every GPU since, those of sm_90 (wgmma, TMA) on Hopper alone.
_CC = {"sm_80": 80, "sm_90a": 90, "sm_100": 100, "sm_120": 120}
TARGETS = {target: tuple(family.arch for family in FAMILIES if family.runs_on(cc)) for target, cc in _CC.items()}


def targets_of(cc: int) -> list[str]:
    """The one whose code GPUs of this compute capability run, that of the same major number (90 is 9.0); or none."""
    return [target for target, of in _CC.items() if of // 10 == cc // 10]
