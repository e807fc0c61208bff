"""Ahead-of-time compilation of the kernel table into kernel packs (kernel_table.PACKS).

    python tools/build/aot.py --pack sm90a --out DIR              flashplug_sm90a.so, and a report (.json)
    python tools/build/aot.py --pack sm90a --pack sm80 --out DIR  two packs, whose kernels are compiled side by side
    python tools/build/aot.py --pack sm90a --sample --out DIR     only the kernels of the pack tested without a GPU
    python tools/build/aot.py --arch sm_90a --out DIR             every pack of the target
    python tools/build/aot.py --arch sm_90a --out DIR --spec fwd_sm90_bf16_d128_causal_m128n128s2

The tool needs no GPU and no nvcc, only the wheel of the DSL and a C compiler. A pack exports one symbol per kernel,
`__tvm_ffi_<spec name>`. The build fails if a kernel fails to compile or spills registers. With --counts the report also
has the instruction counts of Hopper kernels, and each count takes half a second.

The tool compiles the kernels of the checkout in which this file lies, even if a different copy is installed. Objects
are kept in DIR/objects, named by kernel and by a hash of the sources of the kernel. So only kernels with changed
sources are compiled again. Three files lie next to each object: the cubin (compared by tools/build/sass.py), the PTX
(run by tools/ptx_interpreter) and the kernel's row of the report.
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

# The DSL imports torch. torch must not autoload an installed copy of this package.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "torch_flashplug"


class CheckoutFinder:
    """Import finder that takes the modules of this package from the path of the package.

    An editable install puts a finder ahead of Python's own finder. The finder of the editable install knows each module
    by name and loads the module from the installed checkout. This file may belong to a different checkout.
    """

    @staticmethod
    def find_spec(name: str, path=None, target=None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, path, target) if name.startswith(f"{PACKAGE.name}.") else None


# `__init__` of the package loads torch and _C. _C is being built in parallel with this tool, so the kernel modules are
# imported without `__init__`.
if PACKAGE.name not in sys.modules:
    package = types.ModuleType(PACKAGE.name)
    package.__path__ = [str(PACKAGE)]
    sys.modules[PACKAGE.name] = package
sys.meta_path.insert(0, CheckoutFinder)
sys.path.insert(0, str(ROOT))

from tools.build import sass  # noqa: E402
from torch_flashplug.codegen import host_cpu  # noqa: E402
from torch_flashplug.codegen.compiler import compile_spec, key  # noqa: E402
from torch_flashplug.codegen.fingerprint import source_fingerprint  # noqa: E402
from torch_flashplug.codegen.linker import link  # noqa: E402
from torch_flashplug.registry import kernel_table  # noqa: E402
from torch_flashplug.registry.architectures import BY_ARCH, TARGETS  # noqa: E402
from torch_flashplug.registry.kernel_spec import KernelSpec  # noqa: E402


def check_sources() -> None:
    """Check that all imported modules of this package come from this checkout.

    A pack must not hold kernels of a different checkout.

    Raises:
        ImportError: an imported module belongs to a different checkout.
    """
    ours = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == PACKAGE.name}
    files = {name: Path(file).resolve() for name, module in ours.items() if (file := getattr(module, "__file__", None))}
    if foreign := [f"{name} from {file}" for name, file in files.items() if not file.is_relative_to(PACKAGE)]:
        raise ImportError(
            f"{Path(__file__).name} compiles the kernels in {PACKAGE}, but this process has imported "
            f"{', '.join(foreign)}. Import {Path(__file__).name} before {PACKAGE.name}, in a separate process."
        )


check_sources()


def start_worker(folder: str) -> None:
    """Give the worker process a dump folder of the DSL.

    The DSL reads the path of the dump folder once, when the DSL is imported. Workers must not share a folder, because
    the dumps of two kernels can have equal names.
    """
    os.environ["CUTE_DSL_DUMP_DIR"] = tempfile.mkdtemp(dir=folder)


SUFFIXES = (".o", ".cubin", ".ptx", ".json")  # suffixes of the files that a store holds for each kernel


@dataclass(frozen=True)
class Store:
    """Folder of the compiled objects of a single target."""

    folder: Path
    target: str
    counts: bool = True  # whether to count instructions of kernels with wgmma, where register splits show in the counts

    def path(self, name: str, suffix: str = ".json") -> Path:
        """Return the path of a file of a kernel."""
        return self.folder / (key(KernelSpec.from_name(name), self.target) + suffix)

    def has(self, name: str) -> bool:
        if not all(self.path(name, suffix).exists() for suffix in SUFFIXES):
            return False
        return not self.counts_of(name) or "hgmma" in self.row(name)

    def counts_of(self, name: str) -> bool:
        """Return True if the report row of this kernel must have instruction counts."""
        tools = sass.tool("nvidia-cuda-cuobjdump", "cuobjdump") and sass.tool("nvidia-cuda-nvdisasm", "nvdisasm")
        return bool(self.counts and tools and BY_ARCH[KernelSpec.from_name(name).arch].has_wgmma)

    def row(self, name: str) -> dict:
        return json.loads(self.path(name).read_text())

    def drop_others(self, names: list[str]) -> None:
        """Delete the files of kernels and sources that are not named: earlier versions leave such files behind."""
        keep = {self.path(name).stem for name in names}
        for path in self.folder.glob(f"*-{self.target}*"):
            if path.stem not in keep:
                path.unlink()


def compile_one(name: str, store: Store) -> str:
    """Compile a kernel to an object, a cubin, a PTX file and a row of the report, in a worker process."""
    try:
        compiled = compile_spec(KernelSpec.from_name(name), store.target, keep_code=True)
    except Exception as error:  # exceptions of the DSL cannot be sent to the parent process
        raise RuntimeError(f"{name}: {type(error).__name__}: {error}") from None
    check_sources()  # the modules of this kernel have been imported by compile_spec
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
    """Compile the kernels missing from the store, in parallel processes. The first failure stops the build."""
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
    """Print a line of progress. tools/dev shows such lines during the build."""
    print(f"[aot] {text}", flush=True)


def build(packs: dict[Path, list[str]], store: Store, jobs: int) -> None:
    """Build packs of a single target, and write the report of each pack next to the pack.

    Args:
        packs: the file of each pack, and the names of the pack's kernels.
        store: the store of the target.
        jobs: number of worker processes.
    """
    compile_all([name for names in packs.values() for name in names], store, jobs)
    for file, names in packs.items():
        write(file, names, store)


def write(file: Path, names: list[str], store: Store) -> None:
    """Link kernels of the store into a pack, and write the report of the pack."""
    start = time.perf_counter()
    rows = [store.row(name) for name in names]
    spilled = [row["name"] for row in rows if row.get("spills") or row.get("stack_bytes")]
    if spilled:
        raise SystemExit(
            f"kernels must not spill registers, but these do: {', '.join(spilled)}. Lower tile_n or tile_m in the rows "
            "of these kernels in kernel_table.py."
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
    selection = parser.add_mutually_exclusive_group(required=True)
    selection.add_argument("--pack", choices=packs, action="append", help="a pack to build (repeatable)")
    selection.add_argument("--arch", choices=TARGETS, help="build all packs of this target; with --spec: the target")
    parser.add_argument(
        "--sample", action="store_true", help="compile only the kernels named in kernel_table.TEST_SAMPLES"
    )
    parser.add_argument("--spec", action="append", help="compile only this kernel (repeatable), in the table or not")
    parser.add_argument("--out", type=Path, required=True, help="folder for packs and reports")
    parser.add_argument("--objects", type=Path, help="folder in which objects are kept (default OUT/objects)")
    parser.add_argument("--counts", action="store_true", help="count instructions of Hopper kernels for the report")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    if args.spec and not args.arch:
        parser.error("--spec needs --arch, the target to compile for")

    args.out.mkdir(parents=True, exist_ok=True)
    objects = args.objects or args.out / "objects"
    if args.spec:
        file = args.out / f"flashplug_{args.arch.replace('_', '')}.so"
        build({file: args.spec}, Store(objects, args.arch, args.counts), args.jobs)
        return
    packs_to_build = [pack for pack in kernel_table.PACKS if pack.name in (args.pack or ()) or pack.target == args.arch]
    for target in dict.fromkeys(pack.target for pack in packs_to_build):  # a process compiles for a single target
        store = Store(objects, target, args.counts)
        kernels = {
            args.out / pack.file: [spec.name() for spec in (pack.test_sample() if args.sample else pack.specs())]
            for pack in packs_to_build
            if pack.target == target
        }
        build(kernels, store, args.jobs)
        store.drop_others([spec.name() for arch in TARGETS[target] for spec in kernel_table.specs(arch)])


if __name__ == "__main__":
    main()
