"""Every row of the table builds, fits the machine and spills nothing; the kernel cache survives races and corruption.
No GPU.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from torch_flashplug import cache, configs
from torch_flashplug.spec import REGISTER_SPLIT, SMEM_BYTES, TARGETS, KernelSpec

ROOT = Path(__file__).resolve().parents[2]
SPECS = configs.specs(90) + configs.specs(80)
# Targets of which no GPU was at hand and no pack is built: what spills nothing there, either.
COMPILED_ONLY = dict.fromkeys(
    ("sm_100", "sm_120"),
    [spec for spec in configs.specs(80) if spec.dtype == "bf16" and spec.d in {64, 128} and spec.kind != "detbwd"
     and (spec.kind != "bwd" or spec.d == 64 or spec.elementwise) and spec.tile_n != 112],
)  # fmt: skip
BUILT = [("sm_90a", spec) for spec in SPECS] + [("sm_80", spec) for spec in configs.specs(80)]
BUILT += [(target, spec) for target, specs in COMPILED_ONLY.items() for spec in specs]


def build(target: str, out: Path) -> dict[str, dict]:
    """What the tool that builds packs says of a target: {kernel name: row}, and the pack's path under "pack"."""
    command = [sys.executable, ROOT / "tools" / "aot.py", "--arch", target, "--out", out]
    command += ["--report", out / "report.json"]
    for spec in COMPILED_ONLY.get(target, ()):
        command += ["--spec", spec.name()]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = json.loads((out / "report.json").read_text())["kernels"]
    return {row["name"]: row for row in rows} | {"pack": out / f"flashplug_{target.replace('_', '')}.so"}


@pytest.fixture(scope="session")
def reports(tmp_path_factory) -> dict[str, dict[str, dict]]:
    """The whole table compiled once, for every target."""
    pytest.importorskip("cutlass", reason="the DSL is needed to compile kernels")
    return {target: build(target, tmp_path_factory.mktemp(target)) for target in TARGETS}


# --- the tool that builds packs takes the sources beside it

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
    """A second checkout of what packs are made of, in an environment that has this one installed as scikit-build and
    others do it: by a finder ahead of Python's own, which knows every module's file.
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
    """Its tool, asked for one kernel."""
    tool = checkout / "tools" / "aot.py"
    command = [sys.executable, *(prelude or [tool]), "--arch", "sm_90a", "--out", checkout / "out"]
    command += ["--report", checkout / "report.json", "--jobs", "1", "--spec", SPECS[0].name()]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_a_checkout_compiles_its_own_kernels(checkout):
    """The table is read in the first process, kernels are imported by workers: both say where they are from."""
    pytest.importorskip("cutlass")
    from torch_flashplug.compile import source_fingerprint

    package = checkout / "torch_flashplug"
    for name in ("configs.py", "kernels/fwd_sm90.py", "kernels/parts/geometry.py"):
        with (package / name).open("a") as module:
            module.write("\nprint('loaded', __file__, flush=True)\n")
    run = run_aot(checkout)
    assert run.returncode == 0, run.stdout + run.stderr
    loaded = {Path(line.split()[1]) for line in run.stdout.splitlines() if line.startswith("loaded ")}
    assert loaded == {package / name for name in ("configs.py", "kernels/fwd_sm90.py", "kernels/parts/geometry.py")}
    report = json.loads((checkout / "report.json").read_text())
    assert [row["name"] for row in report["kernels"]] == [SPECS[0].name()]
    assert len(report["sources"]) == len(source_fingerprint()) and report["sources"] != source_fingerprint()


def test_another_checkouts_sources_are_refused(checkout):
    """Where they were imported before the tool was."""
    code = "import runpy, sys; sys.modules['torch_flashplug'] = package = type(sys)('torch_flashplug'); "
    code += f"package.__path__ = [{str(ROOT / 'torch_flashplug')!r}]; import torch_flashplug.configs; "
    code += f"runpy.run_path({str(checkout / 'tools' / 'aot.py')!r}, run_name='__main__')"
    run = run_aot(checkout, "-c", code)
    assert run.returncode != 0
    assert f"compiles the kernels in {checkout / 'torch_flashplug'}, but this process has" in run.stderr
    assert str(ROOT / "torch_flashplug" / "configs.py") in run.stderr


# --- the table


@pytest.mark.parametrize("spec", SPECS, ids=KernelSpec.name)
def test_row_is_legal_and_named_once(spec):
    assert spec.check() is None
    assert KernelSpec.from_name(spec.name()) == spec
    assert [s.name() for s in SPECS].count(spec.name()) == 1
    assert spec.threads * 128 <= 65536 and spec.smem_bytes() <= SMEM_BYTES[spec.arch]


def test_every_target_is_built():
    assert {target for target, _ in BUILT} == set(TARGETS)


def forward_products(spec: KernelSpec) -> tuple[int, int]:
    """wgmmas, one per 16 of the inner dimension: scores once per loop body and once before, output once per body and
    once after; a diagonal block of two warpgroups' width has scores of half that width too, where ptxas lets it. And
    fences, of which an early rescale, which touches O between two batches, takes one more in each body.
    """
    bodies = 2 if spec.mask == "causal" else 1
    halves = spec.mask == "causal" and spec.tile_n == 128 and spec.dv <= spec.d
    products = (bodies + 1) * (spec.d // 16 + spec.tile_n // 16) + halves * (spec.d // 16)
    return products, 4 * (bodies + 1 + halves) + bodies * spec.early_rescale


def backward_products(spec: KernelSpec) -> tuple[int, int]:
    """Scores, dP, dV, dK and dQ in each of two loop bodies, masked and not; dQ of the last step after them."""
    dq = spec.tile_n // 16
    return 2 * (spec.d // 16 + spec.dv // 16 + 2 * (spec.tile_m // 16) + dq) + dq, 2 * 10 + 3


def part_products(spec: KernelSpec) -> tuple[int, int]:
    """dQ's kernel: scores and dP before two loop bodies and in each, dQ in each and after them. dK and dV's: the first
    warpgroup's scores likewise, the second one's dP before one body and in it, both sums in each.
    """
    bodies, sums = 2, spec.tile_n // 16
    dq = (bodies + 1) * (spec.d // 16 + spec.dv // 16 + sums)
    dkdv = (bodies + 1) * (spec.d // 16) + 2 * (spec.dv // 16) + (bodies + 1) * 2 * sums
    return dq + dkdv, 40


def decode_products(spec: KernelSpec) -> tuple[int, int]:
    """Scores before the one loop body and in it, output in it and after it; all twice, alone and in a cluster."""
    return 4 * (spec.d // 16 + spec.tile_n // 16), 16


PRODUCTS = {
    "fwd": forward_products,
    "bwd": backward_products,
    "detbwd": backward_products,
    "partbwd": part_products,
    "decode": decode_products,
}
SPLITS_OF_REGISTERS = {"partbwd": 4, "decode": 0}  # setmaxnreg; others: once up and once down


@pytest.mark.parametrize("target, spec", BUILT, ids=lambda value: getattr(value, "name", lambda: value)())
def test_kernel_spills_nothing(target, spec, reports):
    row = reports[target][spec.name()]
    assert row["spills"] == 0 and row["stack_bytes"] == 0, row
    assert row["registers"] <= min(255, 65536 // spec.threads), row


@pytest.mark.parametrize("spec", configs.specs(90), ids=KernelSpec.name)
def test_kernel_is_what_its_row_says(spec, reports):
    row = reports["sm_90a"][spec.name()]
    # At entry a thread has its share of the register file; the split takes over from there, where there is one.
    assert row["registers"] <= 65536 // (spec.threads * (spec.ctas_per_sm if spec.is_decode else 1)), row
    assert row["usetmaxreg"] == SPLITS_OF_REGISTERS.get(spec.kind, 2), row
    hgmma, fences = PRODUCTS[spec.kind](spec)
    assert row["hgmma"] == hgmma, row
    # ptxas brackets each batch of wgmmas with a few WARPGROUP instructions; dozens mean it has serialised them.
    assert row["warpgroup"] <= fences, row


@pytest.mark.parametrize("target", TARGETS)
def test_pack_exports_the_table_and_nothing_else(target, reports):
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", reports[target]["pack"]], capture_output=True, text=True, check=True
    ).stdout.split()[2::3]
    assert sorted(symbols) == sorted(f"__tvm_ffi_{spec.name()}" for built, spec in BUILT if built == target)


@pytest.mark.parametrize(
    "change, number",
    [
        ({"tile_m": 256}, "tile_m=256"),
        ({"tile_n": 8}, "tile_n=8"),
        ({"stages": 3}, "stages=3"),
        ({"stages": 4}, "232448"),
        ({"tile_m": 192, "d": 64}, "160"),
        ({"d": 72}, "(72, 128)"),
        ({"kind": "bwd"}, "(64, 128)"),
        ({"kind": "decode", "stages": 4}, "232448"),
        ({"kind": "partbwd", "tile_m": 64, "tile_n": 64, "stages": 1}, "2 or 4 stages"),
        ({"elementwise": True}, "16-byte"),
        ({"arch": 80}, "stages=2"),
        ({"arch": 80, "stages": 1}, "280 registers"),
        ({"arch": 80, "stages": 1, "tile_m": 192}, "192x128"),
        ({"arch": 80, "stages": 1, "tile_m": 64, "d": 72}, "(72, 128)"),
        ({"kind": "decode", "mask": "causal"}, "no mask"),
        ({"arch": 80, "kind": "decode", "tile_m": 64, "elementwise": True}, "vectors"),
        ({"arch": 80, "kind": "partbwd", "tile_m": 64, "tile_n": 64}, "in parts"),
        ({"arch": 80, "kind": "bwd", "d": 96, "dv": 96, "tile_m": 64, "tile_n": 64, "stages": 1, "elementwise": True},
         "96 for both"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value,
)
def test_illegal_tile_says_the_number(change, number):
    base = dict(kind="fwd", arch=90, dtype="bf16", d=128, dv=128, mask="full", tile_m=128, tile_n=128, stages=2)
    reason = KernelSpec(**(base | change)).check()
    assert reason and number in reason


def test_a_spec_is_of_its_architecture():
    specs = {arch: next(spec for spec in SPECS if spec.arch == arch) for arch in (80, 90)}
    for spec in specs.values():
        assert pickle.loads(pickle.dumps(spec)) == copy.deepcopy(spec) == dataclasses.replace(spec) == spec
    with pytest.raises(ValueError, match="arch=80"):
        dataclasses.replace(specs[90], arch=80)
    with pytest.raises(ValueError, match="arch=70"):
        KernelSpec("fwd", 70, "bf16", 64, 64, "full", 64, 64, 1)
    assert type(type(specs[90]).from_name(specs[80].name())) is type(specs[80])


@pytest.mark.parametrize("name", ["", "fwd", "fwd_sm70_bf16_d64_full_m128n128s2", "fwd_sm90_fp32_d64_full_m128n128s2",
                                  "fwd_sm90_bf16_d64_full_m128n128s2x"])  # fmt: skip
def test_a_wrong_kernel_name_is_refused(name):
    with pytest.raises(ValueError, match="is not a kernel name"):
        KernelSpec.from_name(name)


def test_register_split_fits_the_register_file():
    for warpgroups, (producer, consumer) in REGISTER_SPLIT.items():
        assert 128 * (producer + warpgroups * consumer) <= 65536


# --- the cache


def read_checked(path: Path) -> bytes:
    """A loader that refuses a truncated object."""
    data = path.read_bytes()
    if not data.endswith(b"end"):
        raise OSError(f"{path.name} is truncated")
    return data


def test_cache_builds_once_and_rebuilds_what_is_broken(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FLASHPLUG_CACHE_DIR", str(tmp_path))
    builds = []

    def build(path: Path) -> None:
        builds.append(path)
        path.write_bytes(b"object end")

    assert cache.load_or_build("key", build, read_checked) == b"object end"
    assert cache.load_or_build("key", build, read_checked) == b"object end"
    assert len(builds) == 1
    (tmp_path / "key.o").write_bytes(b"obj")
    assert cache.load_or_build("key", build, read_checked) == b"object end"
    assert len(builds) == 2


def test_failed_build_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FLASHPLUG_CACHE_DIR", str(tmp_path))

    def build(path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("compiler died")

    with pytest.raises(RuntimeError, match="compiler died"):
        cache.load_or_build("key", build, read_checked)
    assert not list(tmp_path.glob("*.o"))


RACER = """
import sys, time
from pathlib import Path
from torch_flashplug import cache
def build(path):
    with open(sys.argv[1], "a") as log: log.write("built\\n")
    time.sleep(0.5)
    path.write_bytes(b"object end")
assert cache.load_or_build("key", build, Path.read_bytes) == b"object end"
"""


def test_racing_processes_build_once(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FLASHPLUG_CACHE_DIR", str(tmp_path / "cache"))
    racers = [subprocess.Popen([sys.executable, "-c", RACER, tmp_path / "log"]) for _ in range(3)]
    assert [racer.wait(timeout=120) for racer in racers] == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "built\n"


def test_cache_key_follows_the_sources(monkeypatch):
    pytest.importorskip("cutlass")
    from torch_flashplug import compile as compiler

    spec = SPECS[0]
    before = compiler.key(spec, "sm_90a")
    assert spec.name() in before and before == compiler.key(spec, "sm_90a")
    monkeypatch.setattr(compiler, "PTXAS", {("sm_90a", spec.kind, spec.mask): "-O1"})
    slower = compiler.key(spec, "sm_90a")
    monkeypatch.setattr(compiler, "source_fingerprint", lambda: "changed")
    assert len({compiler.key(spec, "sm_90a"), slower, before}) == 3


def test_jit_provides_a_kernel_outside_the_packs(tmp_path, monkeypatch):
    pytest.importorskip("cutlass")
    monkeypatch.setenv("TORCH_FLASHPLUG_CACHE_DIR", str(tmp_path))
    from torch_flashplug import compile as compiler

    name = "fwd_sm90_bf16_d64_full_m128n64s2"
    assert name not in {spec.name() for spec in SPECS}
    handle = compiler.provide(name, "sm_90a")
    assert handle and compiler.provide(name, "sm_90a") == handle
    assert [path.name.startswith(name) for path in tmp_path.glob("*.o")] == [True]


def test_jit_failure_is_one_clear_sentence():
    from torch_flashplug import compile as compiler

    with pytest.raises(RuntimeError, match=r"m192n256.*shared memory|registers.*tools/aot.py --arch sm_90a --spec"):
        compiler.provide("fwd_sm90_bf16_d128_full_m192n256s2", "sm_90a")
