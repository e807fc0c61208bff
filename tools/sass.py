"""What a cubin holds: registers, spills and the instructions that show a Hopper kernel is what its source says; and
whether two builds hold the same instructions.

    python tools/sass.py OLD NEW [--filter TEXT]        folders of cubins, as tools/aot.py keeps beside its objects

says of each kernel that both have whether its instructions differ, and in how many lines; it exits with 1 if some do.
A change of structure leaves them as they are. Uses NVIDIA's disassemblers from pip (nvidia-cuda-cuobjdump,
nvidia-cuda-nvdisasm) on our own cubins only.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import difflib
import functools
import importlib.metadata
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

COUNTED = ("HGMMA", "USETMAXREG", "STL", "LDL", "UTMALDG", "UTMASTG", "WARPGROUP")


@functools.cache
def tool(package: str, name: str) -> str | None:
    """Path of a disassembler that pip installed; None where it is absent."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((str(f.locate()) for f in files if f.name == name), None)


def usage(cubin: bytes) -> dict[str, int] | None:
    """Registers (the most of any kernel) and stack bytes, without which nothing is spilled; None without cuobjdump."""
    cuobjdump = tool("nvidia-cuda-cuobjdump", "cuobjdump")
    if not cuobjdump:
        return None
    with _on_disk(cubin) as path:
        text = subprocess.run([cuobjdump, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    registers, stack = (list(map(int, re.findall(rf"{field}:(\d+)", text))) for field in ("REG", "STACK"))
    return {"registers": max(registers), "stack_bytes": sum(stack)}


def resources(cubin: bytes) -> dict[str, int] | None:
    """And instruction counts, of all its kernels; None without the disassemblers."""
    used, nvdisasm = usage(cubin), tool("nvidia-cuda-nvdisasm", "nvdisasm")
    if not used or not nvdisasm:
        return None
    with _on_disk(cubin) as path:
        listing = _disassemble(nvdisasm, path)
    opcodes = Counter(re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)", listing, re.MULTILINE))
    counts = {opcode.lower(): opcodes[opcode] for opcode in COUNTED}
    spills = counts.pop("stl") + counts.pop("ldl")
    return {**used, "spills": spills, **counts}


@contextlib.contextmanager
def _on_disk(cubin: bytes) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        yield path


def _disassemble(nvdisasm: str, cubin: Path) -> str:
    return subprocess.run([nvdisasm, "-c", cubin], capture_output=True, text=True, check=True).stdout


def instructions(cubin: Path) -> list[str]:
    """Text of every instruction of a cubin, kernel after kernel, without its address; and of what else is listed.
    Raises RuntimeError without the disassembler. Names of kernels are left out: they hold the signature of the Python
    function, types and all.
    """
    nvdisasm = tool("nvidia-cuda-nvdisasm", "nvdisasm")
    if nvdisasm is None:
        raise RuntimeError("nvdisasm is missing: pip install nvidia-cuda-nvdisasm")
    listing = re.sub(r"kernel_\w+", "kernel", _disassemble(nvdisasm, cubin))
    lines = (re.sub(r"/\*[0-9a-f]{4,}\*/", "", line).strip() for line in listing.splitlines())
    return [line for line in lines if line and not line.startswith(("//", ".headerflags"))]


def differing(old: Path, new: Path) -> int:
    """Lines of two cubins' instructions that only one of them has; 0: they are the same."""
    if old.read_bytes() == new.read_bytes():
        return 0
    before, after = instructions(old), instructions(new)
    changed = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes() if before != after else ()
    return sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in changed if tag != "equal")


def cubins(folder: Path) -> dict[str, Path]:
    """{kernel name and target: cubin} of a folder of objects; of several of one kernel the latest."""
    found = {}
    for path in sorted(folder.glob("*.cubin"), key=lambda path: path.stat().st_mtime):
        name, _, rest = path.stem.partition("-")
        found[f"{name} ({re.search(r'sm_[^-]+', rest)[0]})"] = path
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--filter", default="", help="only kernels whose name contains this")
    args = parser.parse_args()
    old, new = cubins(args.old), cubins(args.new)
    both = [name for name in new if name in old and args.filter in name]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        counts = dict(zip(both, pool.map(lambda name: differing(old[name], new[name]), both), strict=True))
    for name, count in counts.items():
        if count:
            print(f"{name}: {count} lines differ")
    different = sum(count > 0 for count in counts.values())
    alone = [name for name in {*old, *new} if args.filter in name and (name in old) != (name in new)]
    print(f"{len(both)} kernels compared, {different} differ; {len(alone)} in one folder only")
    return 1 if different or not both else 0


if __name__ == "__main__":
    sys.exit(main())
