"""Compile the kernel table into one pack per target (spec.TARGETS). Needs no GPU and no nvcc, only the DSL's wheel and
a C compiler.

    python tools/aot.py --arch sm_90a --out DIR --report report.json
    python tools/aot.py --arch sm_90a --out DIR --spec fwd_sm90_bf16_d128_causal_m128n128s2

The pack exports one symbol per kernel, `__tvm_ffi_<spec name>`. Any kernel that fails to compile or spills fails the
build. What is compiled are the kernels beside this file, whatever is installed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import types
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

# the DSL imports torch, which must not start an installed copy of this package
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "torch_flashplug"


class Beside:
    """Finds our modules where their package's path says. An editable install has a finder ahead of Python's own, which
    knows each module by name and takes it from the checkout that was installed, be that another one.
    """

    @staticmethod
    def find_spec(name: str, path=None, target=None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, path, target) if name.startswith(f"{PACKAGE.name}.") else None


# The package's __init__ loads torch and _C, which is being built beside us: import its kernel modules without it.
if PACKAGE.name not in sys.modules:
    package = types.ModuleType(PACKAGE.name)
    package.__path__ = [str(PACKAGE)]
    sys.modules[PACKAGE.name] = package
sys.meta_path.insert(0, Beside)
sys.path.insert(0, str(ROOT / "tools"))

import sass  # noqa: E402

from torch_flashplug import configs  # noqa: E402
from torch_flashplug.compile import compile_spec, source_fingerprint  # noqa: E402
from torch_flashplug.spec import TARGETS, KernelSpec  # noqa: E402


def check_sources() -> None:
    """Raises ImportError if a module of ours that has been imported is another checkout's: a pack must not hold its
    kernels.
    """
    ours = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == PACKAGE.name}
    files = {name: Path(file).resolve() for name, module in ours.items() if (file := getattr(module, "__file__", None))}
    if foreign := [f"{name} from {file}" for name, file in files.items() if not file.is_relative_to(PACKAGE)]:
        raise ImportError(
            f"{Path(__file__).name} compiles the kernels in {PACKAGE}, but this process has {', '.join(foreign)}; "
            f"import it before {PACKAGE.name}, in a process of its own"
        )


check_sources()


def start_worker(folder: str) -> None:
    """The DSL reads its dump folder once, when it is imported; workers must not share one, because dumps of two kernels
    share a name.
    """
    os.environ["CUTE_DSL_DUMP_DIR"] = tempfile.mkdtemp(dir=folder)


def compile_one(name: str, folder: str, target: str) -> dict:
    """Worker: one kernel to one object; returns its row of the report."""
    compiled = compile_spec(KernelSpec.from_name(name), target, keep_cubin=True)
    check_sources()  # the kernel's own modules have been imported by now
    path = Path(folder) / f"{name}.o"
    compiled.export(path)
    row = {"name": name, "seconds": round(compiled.seconds, 2), "object_bytes": path.stat().st_size}
    row["smem_bytes"] = compiled.spec.smem_bytes()
    return row | (sass.resources(compiled.cubin) or {})


def compile_all(names: list[str], folder: Path, jobs: int, target: str = "sm_90a") -> list[dict]:
    """All kernels in parallel processes, with a progress bar; the first failure stops the build."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    spawn = multiprocessing.get_context("spawn")
    columns = (
        TextColumn("compiling kernels"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with (
        Progress(*columns) as progress,
        concurrent.futures.ProcessPoolExecutor(jobs, spawn, start_worker, (str(folder),)) as pool,
    ):
        task = progress.add_task("", total=len(names))
        pending = [pool.submit(compile_one, name, str(folder), target) for name in names]
        rows = []
        for done in concurrent.futures.as_completed(pending):
            rows.append(done.result())
            progress.update(task, advance=1, description=rows[-1]["name"])
    return sorted(rows, key=lambda row: names.index(row["name"]))


def link(objects: list[Path], pack: Path) -> None:
    """One shared library; CUDA's and TVM-FFI's symbols come from the libraries the process has loaded."""
    import nvidia_cutlass_dsl
    import tvm_ffi.libinfo

    archives = sorted(
        p for base in nvidia_cutlass_dsl.__path__ for p in Path(base).glob("cu13/lib/libcuda_dialect_runtime_static.a")
    )
    if not archives:
        raise SystemExit("libcuda_dialect_runtime_static.a not found: pip install 'nvidia-cutlass-dsl[cu13]'")
    compiler = os.environ.get("CC") or (sysconfig.get_config_var("CC") or "cc").split()[0]
    compiler = compiler if shutil.which(compiler) else "cc"
    ffi = Path(tvm_ffi.libinfo.find_libtvm_ffi())
    command = [compiler, "-shared", "-fPIC", "-O2", "-fvisibility=hidden", "-Wl,--exclude-libs,ALL", "-o", pack]
    command += [ROOT / "src" / "pack_error.c", *objects, archives[-1], ffi, "-ldl"]
    subprocess.run(list(map(str, command)), check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="sm_90a", choices=TARGETS, help="what to compile for")
    parser.add_argument("--out", type=Path, required=True, help="folder for the pack")
    parser.add_argument(
        "--report",
        type=Path,
        help="JSON with the sources' fingerprint and every kernel's registers, spills, shared memory, HGMMAs, seconds",
    )
    parser.add_argument("--spec", action="append", help="only this kernel (repeatable); it need not be in the table")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()

    start = time.perf_counter()
    names = args.spec or [spec.name() for arch in TARGETS[args.arch] for spec in configs.specs(arch)]
    args.out.mkdir(parents=True, exist_ok=True)
    pack = args.out / f"flashplug_{args.arch.replace('_', '')}.so"
    with tempfile.TemporaryDirectory() as scratch:
        rows = compile_all(names, Path(scratch), args.jobs, args.arch)
        link([Path(scratch) / f"{name}.o" for name in names], pack)
    if args.report:
        args.report.parent.mkdir(parents=True, exist_ok=True)
        report = {"arch": args.arch, "sources": source_fingerprint(), "kernels": rows}
        args.report.write_text(json.dumps(report, indent=1) + "\n")
    spilled = [row["name"] for row in rows if row.get("spills") or row.get("stack_bytes")]
    if spilled:
        raise SystemExit(f"spilled registers: {', '.join(spilled)}; lower tile_n or tile_m of their rows in configs.py")
    print(f"{pack}: {len(rows)} kernels, {pack.stat().st_size / 1e6:.1f} MB, {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
