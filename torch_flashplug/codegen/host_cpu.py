"""CPU features allowed in the host code of compiled kernels.

The compiler emits host code for the CPU of the compiling machine. On a CPU without one of the features, such code ends
the process with an illegal instruction. So the features are a part of a kernel's cache key.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import re
from collections.abc import Iterable
from pathlib import Path

# Extensions of the instruction set from which LLVM selects instructions. The remaining words of /proc/cpuinfo describe
# virtual machines, power and security, and change with the kernel of the operating system. sse4a is left out, because
# only the CPUs of a single vendor have sse4a. No kernel's host code contains sse4a instructions (test_wheel.py), and
# packs are built on CPUs of both vendors.
_EXTENSIONS = re.compile(
    r"p?ni|(?!sse4a)sse\w*|ssse3|avx\w*|amx\w*|fma4?|f16c|bmi\w*|abm|lzcnt|popcnt|movbe|adx|v?aes|v?pclmulqdq|sha_ni"
    r"|gfni|tbm|xop|lahf_lm|cx16|rdrnd|rdseed|prfchw|3dnowprefetch|movdir\w*|serialize|cldemote|clwb|clflushopt"
    r"|fsgsbase|asimd\w*|sve\w*|(?!smep)sme\w*|atomics|crc32|fp|fphp|dcpop|i8mm|bf16|lrcpc|fcma|jscvt|pmull|sha\w*"
    r"|sm[34]|flagm\w*|uscat"
)


@functools.cache
def features() -> frozenset[str]:
    """Return the instruction set extensions of this CPU; empty if the operating system does not list the extensions."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return frozenset(word for word in (line[1].split() if line else ()) if _EXTENSIONS.fullmatch(word))


def missing_features(needed: Iterable[str]) -> list[str]:
    """Return the sorted extensions missing on this CPU. Words other than names of extensions are ignored.

    Args:
        wanted: the features of the compiling machine's CPU, from features() on the compiling machine.
    """
    return sorted(word for word in set(needed) - features() if _EXTENSIONS.fullmatch(word))


@functools.cache
def tag() -> str:
    """Return a word for the architecture and the CPU features, such as "x86_64-3f1c09ab"."""
    machine = platform.machine()
    return f"{machine}-{hashlib.sha256(' '.join(sorted(features())).encode()).hexdigest()[:8]}"
