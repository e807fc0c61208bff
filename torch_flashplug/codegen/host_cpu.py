"""The CPU features that the host code of compiled kernels may use.

The compiler makes host code for the CPU that it runs on. Such code ends a process with an illegal instruction on a CPU
that lacks a feature, so that the features are a part of a kernel's key.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import re
from collections.abc import Iterable
from pathlib import Path

# Extensions of the instruction set that LLVM chooses instructions from. Other words of /proc/cpuinfo describe virtual
# machines, power and security, and change with the kernel of the operating system. Left out is sse4a, which CPUs of one
# maker alone have: no kernel's host code has its instructions (test_wheel.py), and packs are built on CPUs of both.
_EXTENSIONS = re.compile(
    r"p?ni|(?!sse4a)sse\w*|ssse3|avx\w*|amx\w*|fma4?|f16c|bmi\w*|abm|lzcnt|popcnt|movbe|adx|v?aes|v?pclmulqdq|sha_ni"
    r"|gfni|tbm|xop|lahf_lm|cx16|rdrnd|rdseed|prfchw|3dnowprefetch|movdir\w*|serialize|cldemote|clwb|clflushopt"
    r"|fsgsbase|asimd\w*|sve\w*|(?!smep)sme\w*|atomics|crc32|fp|fphp|dcpop|i8mm|bf16|lrcpc|fcma|jscvt|pmull|sha\w*"
    r"|sm[34]|flagm\w*|uscat"
)


@functools.cache
def features() -> frozenset[str]:
    """Return the instruction set extensions of this CPU; empty where the operating system does not tell."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return frozenset(word for word in (line[1].split() if line else ()) if _EXTENSIONS.fullmatch(word))


def lacking(wanted: Iterable[str]) -> list[str]:
    """Return the extensions among these words that this CPU lacks, in order. Words that are none do not count.

    Args:
        wanted: features of the CPU that made the code, as features() had them.
    """
    return sorted(word for word in set(wanted) - features() if _EXTENSIONS.fullmatch(word))


@functools.cache
def tag() -> str:
    """Return a word for the architecture and its features, such as "x86_64-3f1c09ab"."""
    machine = platform.machine()
    return f"{machine}-{hashlib.sha256(' '.join(sorted(features())).encode()).hexdigest()[:8]}"
