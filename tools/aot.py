"""Compile the kernel table into packs (configs.PACKS). Needs no GPU and no nvcc, only the DSL's wheel and a C compiler.

    python tools/aot.py --pack sm90a --out DIR                  flashplug_sm90a.so, and .json: what was measured of it
    python tools/aot.py --pack sm90a --pack sm80 --out DIR      both, whose kernels are compiled side by side
    python tools/aot.py --pack sm90a --sample --out DIR         the kernels of it that are tested where no GPU is
    python tools/aot.py --arch sm_90a --out DIR                 every pack of that target
    python tools/aot.py --arch sm_90a --out DIR --spec fwd_sm90_bf16_d128_causal_m128n128s2

A pack exports one symbol per kernel, `__tvm_ffi_<spec name>`. Any kernel that fails to compile or spills fails the
build. With --counts the report has the instructions of Hopper's kernels, too, which takes half a second a kernel. What
is compiled are the kernels beside this file, whatever is installed. Objects are kept in DIR/objects, by kernel and by
the sources that it comes from: only kernels whose sources changed are compiled again. Beside each lie its cubin, which
tools/sass.py compares, its PTX, which tools/interpreted.py runs, and its row of the report.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import sys
import tempfile
import time
import types
from dataclasses import dataclass
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

from torch_flashplug.codegen import host_cpu  # noqa: E402
from torch_flashplug.codegen.compiler import compile_spec, key  # noqa: E402
from torch_flashplug.codegen.fingerprint import source_fingerprint  # noqa: E402
from torch_flashplug.codegen.linker import link  # noqa: E402
from torch_flashplug.registry import kernel_table  # noqa: E402
from torch_flashplug.registry.architectures import BY_ARCH, TARGETS  # noqa: E402
from torch_flashplug.registry.kernel_spec import KernelSpec  # noqa: E402


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


SUFFIXES = (".o", ".cubin", ".ptx", ".json")  # of what a store holds of a kernel


@dataclass(frozen=True)
class Store:
    """Objects that were compiled once, of one target."""

    folder: Path
    target: str
    counts: bool = True  # whether instructions are counted where wgmma and register splits show in them

    def path(self, name: str, suffix: str = ".json") -> Path:
        """Where a kernel's files lie."""
        return self.folder / (key(KernelSpec.from_name(name), self.target) + suffix)

    def has(self, name: str) -> bool:
        if not all(self.path(name, suffix).exists() for suffix in SUFFIXES):
            return False
        return not self.counts_of(name) or "hgmma" in self.row(name)

    def counts_of(self, name: str) -> bool:
        """Whether the row of this kernel is to have counts of instructions."""
        tools = sass.tool("nvidia-cuda-cuobjdump", "cuobjdump") and sass.tool("nvidia-cuda-nvdisasm", "nvdisasm")
        return bool(self.counts and tools and BY_ARCH[KernelSpec.from_name(name).arch].wgmma)

    def row(self, name: str) -> dict:
        return json.loads(self.path(name).read_text())

    def drop_others(self, names: list[str]) -> None:
        """What earlier sources left behind."""
        keep = {self.path(name).stem for name in names}
        for path in self.folder.glob(f"*-{self.target}*"):
            if path.stem not in keep:
                path.unlink()


def compile_one(name: str, store: Store) -> str:
    """Worker: one kernel to one object, its cubin and its row of the report."""
    try:
        compiled = compile_spec(KernelSpec.from_name(name), store.target, keep=True)
    except Exception as error:  # those of the DSL cannot cross to another process
        raise RuntimeError(f"{name}: {type(error).__name__}: {error}") from None
    check_sources()  # the kernel's own modules have been imported by now
    path = store.path(name, ".o")
    compiled.export(path)
    store.path(name, ".cubin").write_bytes(compiled.cubin)
    store.path(name, ".ptx").write_text(compiled.ptx)
    row = {"name": name, "seconds": round(compiled.seconds, 2), "object_bytes": path.stat().st_size}
    row["smem_bytes"] = compiled.spec.smem_bytes()
    measure = sass.resources if store.counts_of(name) else sass.usage
    row |= measure(compiled.cubin) or {}
    store.path(name).write_text(json.dumps(row))
    return name


def compile_all(names: list[str], store: Store, jobs: int) -> None:
    """Those that are not in the store, in parallel processes; the first failure stops the build."""
    store.folder.mkdir(parents=True, exist_ok=True)
    missing = [name for name in names if not store.has(name)]
    say(f"{len(names) - len(missing)} of {len(names)} kernels for {store.target} are up to date")
    spawn = multiprocessing.get_context("spawn")
    start = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as dumps,
        concurrent.futures.ProcessPoolExecutor(jobs, spawn, start_worker, (dumps,)) as pool,
    ):
        pending = [pool.submit(compile_one, name, store) for name in missing]
        for number, done in enumerate(concurrent.futures.as_completed(pending), 1):
            if done.exception() is not None:
                pool.shutdown(cancel_futures=True)
            seconds = time.perf_counter() - start
            left = seconds / number * (len(missing) - number)
            say(f"{number} of {len(missing)} kernels, {seconds:.0f} s, about {left:.0f} s left: {done.result()}")


def say(text: str) -> None:
    """A line of progress, which tools/dev shows as it comes."""
    print(f"[aot] {text}", flush=True)


def build(packs: dict[Path, list[str]], store: Store, jobs: int) -> None:
    """Packs of one target, by the names of their kernels, and the report of each beside it."""
    compile_all([name for names in packs.values() for name in names], store, jobs)
    for file, names in packs.items():
        write(file, names, store)


def write(file: Path, names: list[str], store: Store) -> None:
    """Link a pack of kernels that are in the store, and write its report."""
    start = time.perf_counter()
    rows = [store.row(name) for name in names]
    spilled = [row["name"] for row in rows if row.get("spills") or row.get("stack_bytes")]
    if spilled:
        raise SystemExit(
            f"spilled registers: {', '.join(spilled)}; lower tile_n or tile_m of their rows in kernel_table.py"
        )
    link([store.path(name, ".o") for name in names], file)
    report = {
        "arch": store.target,
        "sources": source_fingerprint(),
        "cpu": sorted(host_cpu.features()),
        "kernels": rows,
    }
    file.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    say(f"{file}: {len(rows)} kernels, {file.stat().st_size / 1e6:.1f} MB, {time.perf_counter() - start:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    packs = {pack.name: pack for pack in kernel_table.PACKS}
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--pack", choices=packs, action="append", help="a pack to build (repeatable)")
    what.add_argument("--arch", choices=TARGETS, help="all packs of that target; with --spec: what to compile for")
    parser.add_argument("--sample", action="store_true", help="of packs, the kernels of configs.SAMPLES alone")
    parser.add_argument("--spec", action="append", help="only this kernel (repeatable); it need not be in the table")
    parser.add_argument("--out", type=Path, required=True, help="folder for packs and reports")
    parser.add_argument("--objects", type=Path, help="folder in which objects are kept; OUT/objects")
    parser.add_argument("--counts", action="store_true", help="count instructions of Hopper's kernels for the report")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    if args.spec and not args.arch:
        parser.error("--spec needs --arch: what to compile for")

    args.out.mkdir(parents=True, exist_ok=True)
    objects = args.objects or args.out / "objects"
    if args.spec:
        file = args.out / f"flashplug_{args.arch.replace('_', '')}.so"
        build({file: args.spec}, Store(objects, args.arch, args.counts), args.jobs)
        return
    wanted = [pack for pack in kernel_table.PACKS if pack.name in (args.pack or ()) or pack.target == args.arch]
    for target in dict.fromkeys(pack.target for pack in wanted):  # a process compiles for one alone
        store = Store(objects, target, args.counts)
        specs = {pack: pack.sample() if args.sample else pack.specs() for pack in wanted if pack.target == target}
        build({args.out / pack.file: [spec.name() for spec in of] for pack, of in specs.items()}, store, args.jobs)
        store.drop_others([spec.name() for arch in TARGETS[target] for spec in kernel_table.specs(arch)])


if __name__ == "__main__":
    main()
