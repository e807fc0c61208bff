"""Kernel packs that run without a GPU: host code as it is compiled, kernels by their PTX, which an interpreter executes
on CPU memory (tools/interpreter). Numbers are those of the kernels' own arithmetic; times say nothing.

    python tools/interpreted.py --target sm_90a --out DIR           every kernel that the build has for that target
    python tools/interpreted.py --target sm_90a --out DIR --spec fwd_sm90_bf16_d128_causal_m128n128s2
    python tools/interpreted.py --target sm_90a --out DIR --spec ... --compile      it need not have been built

Writes DIR/interpreted_sm_90a.so and, beside it, a folder of PTX. What it cannot show: what ptxas makes of the PTX,
orders of memory accesses that only a GPU knows, speed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import os
import shutil
import struct
import subprocess
from collections.abc import Iterable
from pathlib import Path

import aot
import filelock

SOURCES = aot.ROOT / "tools" / "interpreter"
# Signed numbers wrap as registers do; it runs where it was built.
FLAGS = ("-std=c++20", "-O3", "-march=native", "-fwrapv", "-fPIC", "-Wall", "-Wextra")
OBJECTS = aot.ROOT / "build" / "objects"
RUNTIME = aot.ROOT / "build" / "interpreter"


def runtime() -> list[Path]:
    """Return the interpreter's objects, and compile those that are not there yet side by side.

    Measured: 2026-11-28, two cores, GCC 12: 17 s for all files with -O3. -O1 takes 5 s less, but interprets a prefill
    of 1024 bytes in 0.5 s instead of 0.3 s, and its objects would not serve the tests.
    """
    headers = b"".join(path.read_bytes() for path in sorted(SOURCES.glob("*.h")))
    compiler = os.environ.get("CXX") or "c++"

    def object_of(source: Path) -> Path:
        digest = hashlib.sha256(headers + source.read_bytes() + repr((compiler, FLAGS)).encode()).hexdigest()[:16]
        return RUNTIME / f"{source.stem}-{digest}.o"

    def compile_source(source: Path) -> None:
        part = object_of(source).with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, *FLAGS, "-c", str(source), "-o", str(part)], check=True)
        part.replace(object_of(source))

    RUNTIME.mkdir(parents=True, exist_ok=True)
    sources = sorted(SOURCES.glob("*.cpp"))
    with filelock.FileLock(RUNTIME / "lock"), concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        missing = [source for source in sources if not object_of(source).exists()]
        # The largest files come first, so that none of them is compiled alone at the end.
        missing.sort(key=lambda source: source.stat().st_size, reverse=True)
        pending = [pool.submit(compile_source, source) for source in missing]
        for number, done in enumerate(concurrent.futures.as_completed(pending), 1):
            done.result()
            aot.say(f"interpreter of PTX: {number} of {len(missing)} C++ files compiled")
    return [object_of(source) for source in sources]


def name_of(cubin: bytes) -> str:
    """What the interpreter looks for when it is given this cubin (name_of in tools/interpreter/cuda.cpp): FNV-1a of
    what lies before the section headers.
    """
    digest = 0xCBF29CE484222325
    (end,) = struct.unpack_from("<Q", cubin, 0x28)
    for byte in cubin[:end]:
        digest = ((digest ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return f"{digest:016x}.ptx"


def pack(kernels: Iterable[Path], file: Path) -> Path:
    """Links a pack of kernels, each a path without suffix of an object, its cubin and its PTX (aot.Store.path), unless
    the one that is there was linked of the same.
    """
    kernels = sorted(kernels)
    file.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f"{file}.lock"):
        parts = runtime()
        stamp, made_of = file.with_suffix(".txt"), "\n".join(map(str, (*kernels, *parts)))
        if file.exists() and stamp.exists() and stamp.read_text() == made_of:
            return file
        folder = file.with_name(f"{file.name}.ptx")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for kernel in kernels:
            shutil.copy(f"{kernel}.ptx", folder / name_of(Path(f"{kernel}.cubin").read_bytes()))
        # Its CUDA is its own, whatever the process has loaded.
        objects = [Path(f"{kernel}.o") for kernel in kernels]
        aot.link(objects, file, [*parts, "-Wl,-Bsymbolic", "-lstdc++", "-lm"])
        stamp.write_text(made_of)
    return file


def kernels_of(target: str, names: Iterable[str], compile_missing: bool = False) -> list[Path]:
    """Return where the files of kernels lie, each as a path without suffix.

    Args:
        target: what the kernels are compiled for.
        names: of the kernels.
        compile_missing: whether kernels that no build has made are compiled now.

    Raises:
        SystemExit: a build has not made one of them, and it is not to be compiled.
    """
    store, names = aot.Store(OBJECTS, target, counts=False), list(names)
    if compile_missing and not all(map(store.has, names)):
        OBJECTS.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(OBJECTS / "compile.lock"):  # check and the demo may want one kernel at once
            aot.compile_all(names, store, os.cpu_count() or 1)
    if missing := [name for name in names if not store.has(name)]:
        raise SystemExit(f"{', '.join(missing)}: not built; ./tools/dev build, or tools/aot.py --objects {OBJECTS}")
    return [store.path(name, "") for name in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=aot.TARGETS, required=True, help="what the kernels were compiled for")
    parser.add_argument("--spec", action="append", help="only this kernel (repeatable)")
    parser.add_argument("--compile", action="store_true", help="compile kernels that no build has made")
    parser.add_argument("--sample", action="store_true", help="only kernels of configs.SAMPLES")
    parser.add_argument("--out", type=Path, required=True, help="folder for the pack")
    args = parser.parse_args()
    packs = [pack for pack in aot.kernel_table.PACKS if pack.target == args.target]
    specs = (spec for one in packs for spec in (one.sample() if args.sample else one.specs()))
    names = args.spec or sorted({spec.name() for spec in specs})
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        if args.compile:
            pool.submit(runtime)  # beside the kernels, whose compiler uses one core each
        kernels = kernels_of(args.target, names, args.compile)
    print(pack(kernels, args.out / f"interpreted_{args.target}.so"))


if __name__ == "__main__":
    main()
