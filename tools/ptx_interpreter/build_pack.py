"""Kernel packs that run without a GPU.

    python tools/ptx_interpreter/build_pack.py --target sm_90a --out DIR   every kernel of the build for the target
    python tools/ptx_interpreter/build_pack.py --target sm_90a --out DIR --spec fwd_sm90_bf16_d128_causal_m128n128s2
    python tools/ptx_interpreter/build_pack.py ... --spec ... --compile    compiles the kernel if missing

The host code of a kernel runs as compiled. An interpreter executes the PTX of the kernel on CPU memory
(tools/ptx_interpreter). The results come from the arithmetic of the kernel. The run times have no meaning.

The tool writes DIR/interpreted_sm_90a.so, and a folder of PTX next to the pack. An interpreted kernel cannot show three
things: errors of ptxas, orders of memory accesses that occur only on a GPU, and speed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import filelock

sys.path.append(str(Path(__file__).resolve().parents[2]))

from tools.build import aot

SOURCES = aot.ROOT / "tools" / "ptx_interpreter"
# -fwrapv: signed integers wrap around, as registers do. -march=native: the code only runs on the build machine.
FLAGS = ("-std=c++20", "-O3", "-march=native", "-fwrapv", "-fPIC", "-Wall", "-Wextra")
OBJECTS = aot.ROOT / "build" / "objects"
RUNTIME = aot.ROOT / "build" / "interpreter"


def runtime() -> list[Path]:
    """Return the objects of the interpreter, and compile missing objects in parallel.

    Measured: 2026-11-28, two cores, GCC 12: 17 s for all files with -O3. -O1 takes 5 s less, but interprets a prefill
    of 1024 bytes in 0.5 s instead of 0.3 s. Objects of -O1 would not serve the tests.
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
        # The largest files come first, so that no large file is compiled alone at the end.
        missing.sort(key=lambda source: source.stat().st_size, reverse=True)
        pending = [pool.submit(compile_source, source) for source in missing]
        for number, done in enumerate(concurrent.futures.as_completed(pending), 1):
            done.result()
            aot.say(f"interpreter of PTX: {number} of {len(missing)} C++ files compiled")
    return [object_of(source) for source in sources]


def name_of(cubin: bytes) -> str:
    """Return the PTX file name that the interpreter searches for a cubin.

    The name is the FNV-1a hash of the bytes before the section headers. `name_of` in tools/ptx_interpreter/cuda.cpp
    computes an equal name.
    """
    digest = 0xCBF29CE484222325
    (end,) = struct.unpack_from("<Q", cubin, 0x28)
    for byte in cubin[:end]:
        digest = ((digest ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return f"{digest:016x}.ptx"


def pack(kernels: Iterable[Path], file: Path) -> Path:
    """Link a pack of kernels, unless the existing pack was linked from the same files.

    Args:
        kernels: a path without suffix for each kernel; the object, the cubin and the PTX have this path plus a suffix
            (`aot.Store.path`).
        file: the pack to write.

    Returns:
        The path of the pack.
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
        # -Bsymbolic: the pack calls the linked CUDA functions of the interpreter, whatever the process has loaded.
        objects = [Path(f"{kernel}.o") for kernel in kernels]
        aot.link(objects, file, [*parts, "-Wl,-Bsymbolic", "-lstdc++", "-lm"])
        stamp.write_text(made_of)
    return file


def kernels_of(target: str, names: Iterable[str], compile_missing: bool = False) -> list[Path]:
    """Return the paths of kernel files, each without suffix.

    Args:
        target: the compile target of the kernels.
        names: the names of the kernels.
        compile_missing: whether to compile missing kernels.

    Raises:
        SystemExit: a kernel is missing and `compile_missing` is False.
    """
    store, names = aot.Store(OBJECTS, target, counts=False), list(names)
    if compile_missing and not all(map(store.has, names)):
        OBJECTS.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(OBJECTS / "compile.lock"):  # check and the demo may compile the same kernel
            aot.compile_all(names, store, os.cpu_count() or 1)
    if missing := [name for name in names if not store.has(name)]:
        remedy = f"Run ./tools/dev build, or tools/build/aot.py --objects {OBJECTS}"
        raise SystemExit(f"{', '.join(missing)}: not built. {remedy}")
    return [store.path(name, "") for name in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=aot.TARGETS, required=True, help="compile target of the kernels")
    parser.add_argument("--spec", action="append", help="only this kernel (repeatable)")
    parser.add_argument("--compile", action="store_true", help="compile missing kernels")
    parser.add_argument("--sample", action="store_true", help="only kernels of kernel_table.TEST_SAMPLES")
    parser.add_argument("--out", type=Path, required=True, help="folder for the pack")
    args = parser.parse_args()
    packs = [pack for pack in aot.kernel_table.PACKS if pack.target == args.target]
    specs = (
        spec for kernel_pack in packs for spec in (kernel_pack.test_sample() if args.sample else kernel_pack.specs())
    )
    names = args.spec or sorted({spec.name() for spec in specs})
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        if args.compile:
            pool.submit(runtime)  # in parallel with the kernels, whose compiler uses one core per kernel
        kernels = kernels_of(args.target, names, args.compile)
    print(pack(kernels, args.out / f"interpreted_{args.target}.so"))


if __name__ == "__main__":
    main()
