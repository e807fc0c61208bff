"""Builds of kernel packs: the build tool uses the sources of the same checkout and compiles changed kernels. No GPU."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from torch_flashplug.registry import kernel_table

ROOT = Path(__file__).resolve().parents[2]
SPECS = kernel_table.specs(90) + kernel_table.specs(80)

# --- the build tool takes the sources of the same checkout

HOOK = """
import importlib.util, pathlib, sys
INSTALLED = pathlib.Path({installed!r})
class Editable:
    @staticmethod
    def find_spec(name, path=None, target=None):
        first, *rest = name.split(".")
        if first == "torch_flashplug" and rest:
            place = INSTALLED.joinpath(*rest)
            file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
            return importlib.util.spec_from_file_location(name, file)
sys.meta_path.insert(0, Editable)
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """Return a second checkout of all sources of packs.

    In the environment the first checkout is installed as scikit-build and similar tools install it: by a finder ahead
    of Python's own finders, with a table of module files.
    """
    copy = tmp_path / "checkout"
    keep = shutil.ignore_patterns("__pycache__", "*.so", "results")
    for tree in ("torch_flashplug", "tools", "src"):
        shutil.copytree(ROOT / tree, copy / tree, ignore=keep)
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(HOOK.format(installed=str(ROOT / "torch_flashplug")))
    monkeypatch.setenv("PYTHONPATH", str(hook))
    return copy


def run_aot(checkout: Path, *prelude: str) -> subprocess.CompletedProcess[str]:
    """Run the build tool of a checkout for one kernel."""
    tool = checkout / "tools" / "build" / "aot.py"
    command = [sys.executable, *(prelude or [tool]), "--arch", "sm_90a", "--out", checkout / "out"]
    command += ["--jobs", "1", "--spec", SPECS[0].name()]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_build_tool_compiles_the_sources_of_its_own_checkout(checkout):
    """The first process reads the table, and workers import the kernels; both print the paths of loaded files."""
    pytest.importorskip("cutlass")
    from torch_flashplug.codegen.fingerprint import source_fingerprint

    package = checkout / "torch_flashplug"
    for name in ("registry/kernel_table.py", "kernels/sm90/forward.py", "kernels/tiling/block_iterator.py"):
        with (package / name).open("a") as module:
            module.write("\nprint('loaded', __file__, flush=True)\n")
    process = run_aot(checkout)
    assert process.returncode == 0, process.stdout + process.stderr
    loaded = {Path(line.split()[1]) for line in process.stdout.splitlines() if line.startswith("loaded ")}
    assert loaded == {
        package / name
        for name in ("registry/kernel_table.py", "kernels/sm90/forward.py", "kernels/tiling/block_iterator.py")
    }
    report = json.loads((checkout / "out" / "flashplug_sm90a.json").read_text())
    assert [row["name"] for row in report["kernels"]] == [SPECS[0].name()]
    assert len(report["sources"]) == len(source_fingerprint()) and report["sources"] != source_fingerprint()


def test_build_tool_rejects_sources_of_a_different_checkout(checkout):
    """The foreign sources were imported before the tool."""
    code = "import runpy, sys; sys.modules['torch_flashplug'] = package = type(sys)('torch_flashplug'); "
    code += f"package.__path__ = [{str(ROOT / 'torch_flashplug')!r}]; import torch_flashplug.registry.kernel_table; "
    code += f"runpy.run_path({str(checkout / 'tools' / 'build' / 'aot.py')!r}, run_name='__main__')"
    process = run_aot(checkout, "-c", code)
    assert process.returncode != 0
    assert f"compiles the kernels in {checkout / 'torch_flashplug'}, but this process has" in process.stderr
    assert str(ROOT / "torch_flashplug" / "registry" / "kernel_table.py") in process.stderr


# --- objects are kept, and two builds compared


def test_changed_kernel_file_recompiles_only_dependent_kernels(tmp_path, monkeypatch):
    pytest.importorskip("cutlass")
    from torch_flashplug.codegen import compiler, fingerprint

    package = tmp_path / "torch_flashplug"
    shutil.copytree(ROOT / "torch_flashplug", package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    monkeypatch.setattr(fingerprint, "_PACKAGE", package)
    before = {spec: compiler.key(spec, "sm_90a") for spec in SPECS}
    for changed, hits in (
        ("kernels/sm80/backward.py", lambda spec: spec.arch == 80 and spec.is_backward),
        ("kernels/sm90/backward_dq.py", lambda spec: spec.kind == "partbwd" and not spec.is_wide_backward),
        ("kernels/sm90/backward_wide_dq.py", lambda spec: spec.is_wide_backward),
        # The bias stage, except in decode kernels, and readers of pages on Hopper use primitives of both architectures.
        (
            "kernels/primitives/sm80.py",
            lambda spec: (
                spec.arch == 80
                or (not spec.features.isdisjoint({"bias", "bias32"}) and not spec.is_decode)
                or (spec.kind == "fwd" and "paged" in spec.features)
                or spec.shares_values
            ),
        ),
        ("kernels/features/causal.py", lambda spec: "causal" in spec.features),
        ("kernels/call_args/kernel_call.py", lambda spec: True),
        ("kernels/call_args/fake_tensors.py", lambda spec: True),
        ("kernels/backward/dbias_reduce.py", lambda spec: spec.kind in {"dbias", "tilebwd"}),
        ("registry/kernel_spec.py", lambda spec: True),
        ("registry/features.py", lambda spec: False),  # a kernel depends only on the rows of the kernel
        ("registry/kernel_args.py", lambda spec: False),  # a kernel depends only on the rows of the kernel
    ):
        original = (package / changed).read_text()
        (package / changed).write_text(original + "\nCHANGED = 1\n")
        changed_kernels = [spec.name() for spec in SPECS if compiler.key(spec, "sm_90a") != before[spec]]
        assert changed_kernels == [spec.name() for spec in SPECS if hits(spec)], changed
        (package / changed).write_text(original)
    monkeypatch.setitem(fingerprint.ARGUMENTS_BY_KIND, "detbwd", fingerprint.ARGUMENTS_BY_KIND["detbwd"][1:])
    changed_kernels = {spec.kind for spec in SPECS if compiler.key(spec, "sm_90a") != before[spec]}
    assert changed_kernels == {"detbwd"}


CHANGES = {
    "comment": ("x = 1\n", "# why\nx = 1  # how\n", False),
    "blank_lines": ("x = 1\ny = 2\n", "x = 1\n\n\n\ny = (\n    2\n)\n", False),
    "docstring": ('"""Old."""\ndef f():\n    """Old."""\n    return 1\n', "def f():\n    return 1\n", False),
    "constant": ("x = 1\n", "x = 2\n", True),
    "name": ("x = 1\n", "y = 1\n", True),
    "string": ('x = 1\n"text"\n', 'x = 1\n"another"\n', True),
    "path_of_import": ("from .a import b\n", "from ..c.a import b\n", False),
    "imported_name": ("from .a import b as x\n", "from .a import c as x\n", True),
    "foreign_import": ("from a import b\n", "from c import b\n", True),
    "default": ("def f(x=1): pass\n", "def f(x=2): pass\n", True),
    "decorator": ("@a\ndef f(): pass\n", "@b\ndef f(): pass\n", True),
    "operator": ("x = a + b\n", "x = a - b\n", True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_source_fingerprint_changes_only_with_code(tmp_path, change):
    from torch_flashplug.codegen import fingerprint

    old, new, counts = CHANGES[change]
    paths = [tmp_path / "old.py", tmp_path / "new.py"]
    for path, text in zip(paths, (old, new), strict=True):
        path.write_text(text)
    assert (fingerprint._hash_and_imports(paths[0], 0)[0] != fingerprint._hash_and_imports(paths[1], 0)[0]) is counts


def test_comments_and_docstrings_change_no_byte_of_an_object(tmp_path):
    """Therefore the fingerprint of sources ignores comments and docstrings."""
    pytest.importorskip("cutlass")
    name = "decode_sm80_bf16_d64_full_m64n128s2"
    shutil.copytree(ROOT / "torch_flashplug", tmp_path / "torch_flashplug", ignore=shutil.ignore_patterns("*.so"))
    shutil.copytree(ROOT / "tools", tmp_path / "tools", ignore=shutil.ignore_patterns("results"))
    for path in [
        *(tmp_path / "torch_flashplug" / "kernels").rglob("*.py"),
        tmp_path / "torch_flashplug" / "registry" / "kernel_spec.py",
    ]:
        head, future, rest = path.read_text().partition("from __future__ import annotations\n")
        path.write_text(f"{head}# changed\n\n{future}\n# changed\n\n{rest}\n# changed\n")
    objects = {}
    for tree in (ROOT, tmp_path):
        command = [sys.executable, tree / "tools" / "build" / "aot.py", "--arch", "sm_90a"]
        command += ["--spec", name, "--jobs", "1"]
        out = tmp_path / "out" / tree.name
        subprocess.run([*command, "--out", out], check=True, timeout=300, capture_output=True)
        objects[tree] = {path.name: path.read_bytes() for path in (out / "objects").iterdir() if path.suffix != ".json"}
    assert objects[ROOT] == objects[tmp_path] and len(objects[ROOT]) == 3


COMPILE_IN_A_LOADED_PROCESS = """
import sys
if sys.argv[2] == "worker":
    sys.modules.update(dict.fromkeys(("torch", "jax", "numpy")))
sys.path.insert(0, sys.argv[1])
from tools.build import aot
import cutlass.cute as cute
from pathlib import Path
plain = cute.compile
if sys.argv[2] == "worker":
    from torch_flashplug.codegen import worker
    assert not set(worker.NEEDLESS) & {name for name, module in sys.modules.items() if module}
if sys.argv[2] == "engine":
    cute.compile = lambda *given, no_jit_engine, **more: plain(*given, **more)
aot.compile_one(sys.argv[3], aot.Store(Path(sys.argv[4]), "sm_90a", counts=sys.argv[2] == "engine"))
"""


def test_jit_engine_and_loaded_packages_change_no_byte_of_an_object(tmp_path):
    """Objects do not depend on the JIT engine or on packages without use for the compiler.

    Kernels are compiled without the engine that would run them in the compiling process. At first use, packages that
    the compiler does not need are not imported. Counts of instructions are stored separately.
    """
    pytest.importorskip("cutlass")
    name = "decode_sm80_bf16_d64_full_m64n128s2"
    files, rows = {}, {}
    for how in ("engine", "none", "worker"):
        command = [sys.executable, "-c", COMPILE_IN_A_LOADED_PROCESS, ROOT, how, name, tmp_path / how]
        (tmp_path / how).mkdir()
        subprocess.run(command, check=True, timeout=300, env=os.environ | {"CUTE_DSL_ARCH": "sm_90a"})
        files[how] = {path.suffix: path.read_bytes() for path in (tmp_path / how).iterdir() if path.suffix != ".json"}
        rows[how] = json.loads(next((tmp_path / how).glob("*.json")).read_text())
    assert set(files["none"]) == {".o", ".cubin", ".ptx"} and files["none"] == files["engine"] == files["worker"]
    assert rows["none"]["registers"] == rows["engine"]["registers"] > 0


MEASURE_AGAIN = """
import json, sys
sys.path.insert(0, sys.argv[1])
from tools.build import aot
from pathlib import Path
found = []
for name in ("fwd_sm90_bf16_d64_full_m128n128s2", "decode_sm80_bf16_d64_full_m64n128s2"):
    for row in ({"registers": 168}, {"registers": 168, "hgmma": 24}):
        stores = [aot.Store(Path(sys.argv[2]), "sm_90a", counts) for counts in (False, True)]
        for suffix in aot.SUFFIXES:
            stores[0].path(name, suffix).write_text(json.dumps(row))
        found.append([store.has(name) for store in stores])
print(found)
"""


def test_kernels_without_instruction_counts_are_measured_again(tmp_path):
    """A developer's build can share the object folder with a user's build; only Hopper kernels have counts."""
    pytest.importorskip("cutlass")
    command = [sys.executable, "-c", MEASURE_AGAIN, ROOT, tmp_path]
    output = subprocess.run(command, check=True, timeout=300, capture_output=True, text=True).stdout
    assert json.loads(output.lower()) == [[True, False], [True, True], [True, True], [True, True]]


# Prints the modules of each kernel from a forked process, which has the DSL loaded already.
LOADED = """
import os, sys
sys.path.insert(0, sys.argv[1])
from tools.build import aot
import cutlass.cute
before = set(sys.modules)
for name in sys.argv[2:]:
    if os.fork() == 0:
        from torch_flashplug.kernels import builder
        builder(aot.KernelSpec.from_name(name))
        found = (sys.modules[name].__file__ for name in set(sys.modules) - before if "flashplug" in name)
        os.write(1, (" ".join(found) + "\\n").encode())
        os._exit(0)
    if os.wait()[1]:
        sys.exit(name)
"""


def test_kernel_sources_equal_imported_modules():
    """The sources found by reading files are compared with the modules that Python loads."""
    pytest.importorskip("cutlass")
    from torch_flashplug.codegen import fingerprint

    specs = {(spec.kind, spec.arch, spec.mask): spec for spec in SPECS}.values()
    command = [sys.executable, "-c", LOADED, ROOT, *(spec.name() for spec in specs)]
    process = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    read_before = ("kernel_spec", "kernel_args", "dtypes", "features", "quant_recipes")
    tables = {ROOT / "torch_flashplug" / "registry" / f"{name}.py" for name in read_before}
    for spec, line in zip(specs, process.stdout.splitlines(), strict=True):
        loaded = {Path(file) for file in line.split() if Path(file).name != "__init__.py"}
        assert loaded | tables == set(fingerprint.sources_of(spec)), spec.name()


def test_sass_tool_compares_builds_by_instructions(tmp_path):
    """Equal kernels compare as equal; a kernel with a different mask must differ, and does."""
    pytest.importorskip("cutlass")
    objects = ROOT / "build" / "objects"
    names = ("fwd_sm90_bf16_d64_full_m64n128s2", "fwd_sm90_bf16_d64_causal_m64n128s2")
    cubin, different_cubin = (
        max(objects.glob(f"{name}-*-sm_90a-*.cubin"), key=lambda path: path.stat().st_mtime) for name in names
    )
    for folder, source in (("old", cubin), ("same", cubin), ("new", different_cubin)):
        (tmp_path / folder).mkdir()
        shutil.copy(source, tmp_path / folder / cubin.name)
    tool = [sys.executable, ROOT / "tools" / "build" / "sass.py", tmp_path / "old"]
    same, changed = (
        subprocess.run([*tool, tmp_path / folder], capture_output=True, text=True, check=False)
        for folder in ("same", "new")
    )
    assert same.returncode == 0 and "1 kernels compared, 0 differ" in same.stdout
    assert changed.returncode == 1 and "1 kernels compared, 1 differ" in changed.stdout

    hashes = tmp_path / "hashes.json"
    subprocess.run([*tool, "--save", hashes], check=True)
    assert list(json.loads(hashes.read_text())) == ["fwd_sm90_bf16_d64_full_m64n128s2 (sm_90a)"]
    tool[-1] = hashes
    same, changed = (
        subprocess.run([*tool, tmp_path / folder], capture_output=True, text=True, check=False)
        for folder in ("same", "new")
    )
    assert same.returncode == 0 and "1 kernels compared, 0 differ" in same.stdout
    assert changed.returncode == 1 and "the hash differs" in changed.stdout


# --- keys of objects


def test_cache_key_changes_with_sources_and_options(monkeypatch):
    pytest.importorskip("cutlass")
    from torch_flashplug.codegen import compiler

    spec = SPECS[0]
    before = compiler.key(spec, "sm_90a")
    assert spec.name() in before and before == compiler.key(spec, "sm_90a")
    monkeypatch.setattr(compiler, "PTXAS", {("sm_90a", spec.arch, spec.kind, spec.mask): "-O1"})
    slower = compiler.key(spec, "sm_90a")
    monkeypatch.setattr(compiler, "fingerprint", lambda spec: "changed")
    assert len({compiler.key(spec, "sm_90a"), slower, before}) == 3


def test_worker_compiles_a_kernel_outside_of_the_table(tmp_path, monkeypatch):
    """All steps of the first use run, except loading the shared object, which needs libraries of the GPU."""
    pytest.importorskip("cutlass")
    from torch_flashplug.codegen import compile_pool, jit, kernel_cache

    monkeypatch.setenv("TORCH_FLASHPLUG_CACHE_DIR", str(tmp_path))
    name = "fwd_sm90_bf16_d64_full_m128n64s2"
    assert name not in {spec.name() for spec in SPECS}
    (job,) = compile_pool.Pool(1).request([jit.compile_job(name, "sm_90a")])
    path = job.result()
    assert path.parent == tmp_path and path.suffix == ".so" and job.seconds > 0.5
    facts = kernel_cache.check(path)
    assert facts["name"] == name and b"__tvm_ffi_" + name.encode() in path.read_bytes()


def test_uncompilable_kernel_gives_a_reason_of_one_sentence(tmp_path, monkeypatch):
    pytest.importorskip("cutlass")
    from torch_flashplug.codegen import jit
    from torch_flashplug.codegen.kernel_request import CallConditions

    monkeypatch.setenv("TORCH_FLASHPLUG_CACHE_DIR", str(tmp_path))
    answer = jit.provide("fwd_sm90_bf16_d128_full_m192n256s2", "sm_90a", CallConditions())
    assert not answer.has_kernel and not answer.may_change and "\n" not in answer.reason
    assert re.search(r"could not be compiled: ValueError: .*(shared memory|registers)", answer.reason)
