"""The CPU features that the host code of compiled kernels may use.

The compiler makes host code for the CPU that it runs on. Such code ends a process with an illegal instruction on a CPU
that lacks a feature, so that the features are a part of a kernel's key.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import re
from pathlib import Path

# Extensions of the instruction set that LLVM chooses instructions from. Other words of /proc/cpuinfo describe virtual
# machines, power and security, and change with the kernel of the operating system.
_EXTENSIONS = re.compile(
    r"p?ni|sse\w*|ssse3|avx\w*|amx\w*|fma4?|f16c|bmi\w*|abm|lzcnt|popcnt|movbe|adx|v?aes|v?pclmulqdq|sha_ni|gfni|tbm|xop"
    r"|lahf_lm|cx16|rdrnd|rdseed|prfchw|3dnowprefetch|movdir\w*|serialize|cldemote|clwb|clflushopt|fsgsbase"
    r"|asimd\w*|sve\w*|sme\w*|atomics|crc32|fp|fphp|dcpop|i8mm|bf16|lrcpc|fcma|jscvt|pmull|sha\w*|sm[34]|flagm\w*|uscat"
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


@functools.cache
def tag() -> str:
    """Return a word for the architecture and its features, such as "x86_64-3f1c09ab"."""
    machine = platform.machine()
    return f"{machine}-{hashlib.sha256(' '.join(sorted(features())).encode()).hexdigest()[:8]}"
