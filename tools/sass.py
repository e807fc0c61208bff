"""What a cubin holds: registers, spills and the instructions that show a Hopper kernel is what its source says.

Uses NVIDIA's disassemblers from pip (nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm) on our own cubins only.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

COUNTED = ("HGMMA", "USETMAXREG", "STL", "LDL", "UTMALDG", "UTMASTG", "WARPGROUP")


def tool(package: str, name: str) -> str | None:
    """Path of a disassembler that pip installed; None where it is absent."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((str(f.locate()) for f in files if f.name == name), None)


def resources(cubin: bytes) -> dict[str, int] | None:
    """Registers (the most of any kernel), stack bytes and instruction counts (of all) in a cubin; None without the
    disassemblers.
    """
    cuobjdump, nvdisasm = tool("nvidia-cuda-cuobjdump", "cuobjdump"), tool("nvidia-cuda-nvdisasm", "nvdisasm")
    if not cuobjdump or not nvdisasm:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = subprocess.run([cuobjdump, "-res-usage", path], capture_output=True, text=True, check=True).stdout
        listing = subprocess.run([nvdisasm, "-c", path], capture_output=True, text=True, check=True).stdout
    registers, stack = (list(map(int, re.findall(rf"{field}:(\d+)", usage))) for field in ("REG", "STACK"))
    opcodes = Counter(re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)", listing, re.MULTILINE))
    counts = {opcode.lower(): opcodes[opcode] for opcode in COUNTED}
    spills = counts.pop("stl") + counts.pop("ldl")
    return {"registers": max(registers), "stack_bytes": sum(stack), "spills": spills, **counts}
