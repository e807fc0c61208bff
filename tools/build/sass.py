"""Contents of cubins (registers, spills and typical Hopper instructions), and comparison of the SASS of two builds.

    python tools/build/sass.py OLD NEW [--filter TEXT]     folders of cubins, which aot.py writes next to objects
    python tools/build/sass.py FOLDER --save FILE.json        hashes of the instructions, as a base of later comparisons
    python tools/build/sass.py FILE.json NEW [--filter TEXT]  hashes against a folder of cubins

The command compares the instructions of each kernel that both sides have, and prints the number of different lines.
The exit status is 1 if any kernel differs. A change of structure leaves all instructions equal. Hashes say only that a
kernel differs, but a base of hashes needs no build of the old tree. The tool uses NVIDIA's disassemblers from pip
(nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm), and only on cubins of this project.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import difflib
import functools
import hashlib
import importlib.metadata
import json
import operator
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
    """Return the path of a disassembler that pip installed, or None if the disassembler is absent."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((str(f.locate()) for f in files if f.name == name), None)


def usage(cubin: bytes) -> dict[str, int] | None:
    """Return the registers (maximum over all kernels) and the stack bytes of a cubin, or None without cuobjdump.

    A kernel without stack bytes spills nothing.
    """
    cuobjdump = tool("nvidia-cuda-cuobjdump", "cuobjdump")
    if not cuobjdump:
        return None
    with _on_disk(cubin) as path:
        text = subprocess.run([cuobjdump, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    registers, stack = (list(map(int, re.findall(rf"{field}:(\d+)", text))) for field in ("REG", "STACK"))
    return {"registers": max(registers), "stack_bytes": sum(stack)}


def resources(cubin: bytes) -> dict[str, int] | None:
    """Return the result of `usage` and the instruction counts of all kernels, or None without the disassemblers."""
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
    """Return the text of every instruction of a cubin without addresses, and the remaining lines of the listing.

    Names of kernels are left out, because a name contains the signature of the Python function with all types.

    Raises:
        RuntimeError: the disassembler is missing.
    """
    nvdisasm = tool("nvidia-cuda-nvdisasm", "nvdisasm")
    if nvdisasm is None:
        raise RuntimeError("nvdisasm is missing: pip install nvidia-cuda-nvdisasm")
    listing = re.sub(r"kernel_\w+", "kernel", _disassemble(nvdisasm, cubin))
    lines = (re.sub(r"/\*[0-9a-f]{4,}\*/", "", line).strip() for line in listing.splitlines())
    return [line for line in lines if line and not line.startswith(("//", ".headerflags"))]


def differing(old: Path, new: Path) -> int:
    """Return the number of instruction lines that differ between two cubins; 0 if the instructions are equal."""
    if old.read_bytes() == new.read_bytes():
        return 0
    before, after = instructions(old), instructions(new)
    changed = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes() if before != after else ()
    return sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in changed if tag != "equal")


def instruction_hash(cubin: Path) -> str:
    """Return a hash of the instructions of a cubin, equal for kernels that differ in their names alone."""
    return hashlib.sha256("\n".join(instructions(cubin)).encode()).hexdigest()[:16]


def cubins(folder: Path) -> dict[str, Path]:
    """Return the cubins of a folder by kernel name and target. The latest cubin of a kernel counts."""
    by_kernel = {}
    for path in sorted(folder.glob("*.cubin"), key=lambda path: path.stat().st_mtime):
        name, _, rest = path.stem.partition("-")
        by_kernel[f"{name} ({re.search(r'sm_[^-]+', rest)[0]})"] = path
    return by_kernel


def hashes(source: Path) -> dict[str, str]:
    """Return the instruction hashes by kernel name and target, from a file of hashes or a folder of cubins."""
    if source.is_file():
        return json.loads(source.read_text())
    paths = cubins(source)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return dict(zip(paths, pool.map(instruction_hash, paths.values()), strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="folder of cubins or file of hashes")
    parser.add_argument("new", type=Path, nargs="?", help="folder of cubins")
    parser.add_argument("--save", type=Path, help="write the hashes of the first folder to this file")
    parser.add_argument("--filter", default="", help="compare only kernels with this text in the name")
    args = parser.parse_args()
    if args.save:
        saved = hashes(args.old)
        args.save.write_text(json.dumps(saved, indent=0, sort_keys=True) + "\n")
        print(f"{len(saved)} hashes written to {args.save}")
        return 0
    if args.new is None:
        parser.error("NEW must be a folder of cubins, but is missing. Give NEW or --save.")
    has_hashes = args.old.is_file()
    read, compare = (hashes, operator.ne) if has_hashes else (cubins, differing)
    old, new = read(args.old), read(args.new)
    both = [name for name in new if name in old and args.filter in name]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        counts = dict(zip(both, pool.map(lambda name: compare(old[name], new[name]), both), strict=True))
    for name, count in counts.items():
        if count:
            print(f"{name}: {'the hash differs' if has_hashes else f'{count} lines differ'}")
    different = sum(count > 0 for count in counts.values())
    alone = [name for name in {*old, *new} if args.filter in name and (name in old) != (name in new)]
    print(f"{len(both)} kernels compared, {different} differ; {len(alone)} in one folder only")
    return 1 if different or not both else 0


if __name__ == "__main__":
    sys.exit(main())
