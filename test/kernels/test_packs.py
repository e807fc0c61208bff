"""Every row of the table is legal, was built, fits the machine and spills nothing. What the build measured is read, not
compiled a second time. No GPU.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import on_cpu
import pytest

from torch_flashplug.codegen import compiler
from torch_flashplug.dispatch import library
from torch_flashplug.registry import features, kernel_table
from torch_flashplug.registry.architectures import FAMILIES, TARGETS
from torch_flashplug.registry.kernel_spec import SMEM_BYTES, KernelSpec

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import sass  # noqa: E402

SPECS = [spec for family in FAMILIES for spec in kernel_table.specs(family.arch)]


def _compiled_elsewhere(spec: KernelSpec) -> bool:
    """Whether a kernel for every GPU is compiled for the targets of which no GPU was at hand and no pack is built."""
    if spec.dtype != "bf16" or spec.d not in {64, 128} or spec.kind == "detbwd" or spec.tile_n == 112:
        return False
    if on_cpu.not_built():  # the short run compiles one kernel of each kind
        return spec == next(x for x in kernel_table.specs(80, spec.kind) if x.dtype == "bf16" and x.d == 64)
    small = spec.kind != "bwd" or spec.d == 64 or spec.elementwise
    return small and spec.features <= {"causal", "mask"}


COMPILED_ONLY = dict.fromkeys(("sm_100", "sm_120"), list(filter(_compiled_elsewhere, kernel_table.specs(80))))
BUILT = [(pack.target, spec) for pack in kernel_table.PACKS for spec in pack.specs()]
BUILT += [(target, spec) for target, specs in COMPILED_ONLY.items() for spec in specs]
# At most so many kernels: each costs every clean build seconds and 90 KB. A feature gets a pack of its own.
# Those of every GPU have theirs among the others: 72 in sm90a_fa2 and in sm80. Masks are in 30 of sm90a.
CEILINGS = {"sm90a": 225, "sm90a_bias": 80, "sm90a_fa2": 215, "sm90a_dropout": 90, "sm90a_8bit": 190, "sm80": 365}
CEILINGS["sm90a_window"] = 130  # D 192: 1.25 to 1.4 x the kernels of 256; D 32 and 96: up to 1.2 x those of 64, 128


def test_every_kernel_of_the_table_is_in_a_pack():
    packed = {spec for pack in kernel_table.PACKS for spec in pack.specs()}
    assert not {spec.name() for spec in {*SPECS} - packed}, "configs.PACKS leaves them out: no machine would have them"


def table_of(report: Path) -> dict[str, dict]:
    """{kernel name: row} of a report by the tool that builds packs, made of today's sources."""
    from torch_flashplug.codegen.fingerprint import source_fingerprint

    told = json.loads(report.read_text())
    assert told["sources"] == source_fingerprint(), f"{report} is of other sources; run ./tools/dev build"
    return {row["name"]: row for row in told["kernels"]}


def row_of(reports: dict[str, dict[str, dict]], target: str, spec: KernelSpec) -> dict:
    """What was measured of it."""
    on_cpu.need(spec.name(), target)
    return reports[target][spec.name()]


def built(pack: kernel_table.Pack) -> Path:
    """Of this build: packs are not compiled a second time."""
    path = library.find_built(pack.file)
    assert path is not None, f"{pack.file} was not built; run ./tools/dev build"
    return path


def compiled(target: str, out: Path) -> Path:
    """The pack of a target that the build leaves out. Its objects are kept with the build's."""
    command = [sys.executable, ROOT / "tools" / "aot.py", "--arch", target, "--out", out]
    command += ["--objects", ROOT / "build" / "objects"]
    for spec in COMPILED_ONLY[target]:
        command += ["--spec", spec.name()]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return out / f"flashplug_{target.replace('_', '')}.so"


@pytest.fixture(scope="session")
def packs(tmp_path_factory) -> dict[str, list[Path]]:
    """By target: the build's, and those that are only compiled."""
    pytest.importorskip("cutlass", reason="the DSL is needed to compile kernels")
    found = {target: [compiled(target, tmp_path_factory.mktemp(target))] for target in COMPILED_ONLY}
    for pack in kernel_table.PACKS:
        found.setdefault(pack.target, []).append(built(pack))
    return found


@pytest.fixture(scope="session")
def reports(packs) -> dict[str, dict[str, dict]]:
    """{target: {kernel name: row}} of the whole table."""
    return {
        target: {name: row for path in paths for name, row in table_of(path.with_suffix(".json")).items()}
        for target, paths in packs.items()
    }


@pytest.mark.parametrize("spec", SPECS, ids=KernelSpec.name)
def test_row_is_legal_and_named_once(spec):
    assert spec.check() is None
    assert KernelSpec.from_name(spec.name()) == spec
    assert [s.name() for s in SPECS].count(spec.name()) == 1
    assert spec.threads * 128 <= 65536 and spec.smem_bytes() <= SMEM_BYTES[spec.arch]


def test_samples_have_every_family_and_feature():
    for pack in kernel_table.PACKS:
        samples, whole = (
            {(spec.kind, spec.arch, spec.mask, spec.elementwise) for spec in specs}
            for specs in (pack.sample(), pack.specs())
        )
        assert samples == whole, pack.name
    few, all_of_them = (
        sum(map(len, map(take, kernel_table.PACKS))) for take in (kernel_table.Pack.sample, kernel_table.Pack.specs)
    )
    assert f"{few:,} of {all_of_them:,}" in (ROOT / "docs" / "developing.md").read_text()


def test_every_target_is_built():
    assert {target for target, _ in BUILT} == set(TARGETS)


def forward_products(spec: KernelSpec) -> tuple[int, int]:
    """wgmmas, one per 16 of the inner dimension: scores once per loop body and once before, output once per body and
    once after; a diagonal block of two warpgroups' width has scores of half that width too, where ptxas lets it. And
    fences, of which an early rescale, which touches O between two batches, takes one more in each body.
    """
    bodies = 2 if spec.features & {"causal", "mask", "window"} else 1  # a block that hides something has its own
    recipe = features.recipe_of(spec.features)
    halves = bool(spec.features & {"causal", "window"}) and spec.tile_n == 128 and spec.dv <= spec.d and recipe is None
    halves = halves and not ("softcap" in spec.features and spec.d <= 64)
    scores, output = (bodies + 1 + halves) * (spec.d // 16), (bodies + 1) * (spec.tile_n // 16)
    products = (recipe is None) * scores + (spec.bytes_of("v") == 2) * output  # those in 8 bits have other names
    return products, 4 * (bodies + 1 + halves) + bodies * spec.early_rescale


def backward_bodies(spec: KernelSpec) -> int:
    """Of steps of queries: those of a window that hide something are at both ends."""
    return 3 if "window" in spec.features else 2


def backward_products(spec: KernelSpec) -> tuple[int, int]:
    """Scores, dP, dV, dK and dQ in each loop body, masked and not; dQ of the last step after them."""
    dq, bodies = spec.tile_n // 16, backward_bodies(spec)
    return bodies * (spec.d // 16 + spec.dv // 16 + 2 * (spec.tile_m // 16) + dq) + dq, bodies * 10 + 3


def part_products(spec: KernelSpec) -> tuple[int, int]:
    """dQ's kernel: scores and dP before two loop bodies and in each, dQ in each and after them. dK and dV's: the first
    warpgroup's scores likewise, the second one's dP before one body and in it, both sums in each.
    """
    bodies, sums = backward_bodies(spec), spec.tile_n // 16
    dq = 3 * (spec.d // 16 + spec.dv // 16 + sums)
    dkdv = (bodies + 1) * (spec.d // 16) + 2 * (spec.dv // 16) + (bodies + 1) * 2 * sums
    return dq + dkdv, 20 * bodies


def decode_products(spec: KernelSpec) -> tuple[int, int]:
    """Scores before the one loop body and in it, output in it and after it; all twice, alone and in a cluster."""
    return 4 * (spec.d // 16 + spec.tile_n // 16), 16


def bias_products(spec: KernelSpec) -> tuple[int, int]:
    """Scores and dP in the one loop body."""
    return spec.d // 16 + spec.dv // 16, 5


def tile_products(spec: KernelSpec) -> tuple[int, int]:
    """Scores and dP, and the sums dV, dK and dQ, in the one loop body."""
    return 2 * (spec.d // 16) + 2 * (spec.tile_m // 16) + spec.tile_n // 16, 5


PRODUCTS = {
    "fwd": forward_products,
    "bwd": backward_products,
    "detbwd": backward_products,
    "partbwd": part_products,
    "decode": decode_products,
    "dbias": bias_products,
    "tilebwd": tile_products,
}
QUANTISING = 256  # threads of a CTA that makes operands in 8 bits (kernels/preprocess/quantize.py)


def most_threads(spec: KernelSpec) -> int:
    """Of the kernel that is reported: the one with the most registers of those that are launched together."""
    return min(spec.threads, QUANTISING) if features.recipe_of(spec.features) else spec.threads


SPLITS_OF_REGISTERS = {"partbwd": 4, "decode": 0}  # setmaxnreg; others: once up and once down


@pytest.mark.parametrize("target, spec", BUILT, ids=lambda value: getattr(value, "name", lambda: value)())
def test_kernel_spills_nothing(target, spec, reports):
    row = row_of(reports, target, spec)
    assert row["stack_bytes"] == 0 and row.get("spills", 0) == 0, row
    assert row["registers"] <= min(255, 65536 // most_threads(spec)), row


def counted(row: dict, spec: KernelSpec) -> dict:
    """Return a row of a report with counts of instructions, which the short run's build leaves out. Counting takes half
    a second a kernel, so that in the short run those of head dim 64 are counted here.
    """
    if "hgmma" in row:
        return row
    if spec.d != 64:
        pytest.skip("the build did not count its instructions; ./tools/dev build does")
    cubin = ROOT / "build" / "objects" / f"{compiler.key(spec, 'sm_90a')}.cubin"
    return row | sass.resources(cubin.read_bytes())


@pytest.mark.parametrize("spec", kernel_table.specs(90), ids=KernelSpec.name)
def test_kernel_is_what_its_row_says(spec, reports):
    row = counted(row_of(reports, "sm_90a", spec), spec)
    # At entry a thread has its share of the register file; the split takes over from there, where there is one.
    assert row["registers"] <= 65536 // (most_threads(spec) * (spec.ctas_per_sm if spec.is_decode else 1)), row
    assert row["usetmaxreg"] == SPLITS_OF_REGISTERS.get(spec.kind, 2), row
    hgmma, fences = PRODUCTS[spec.kind](spec)
    assert row["hgmma"] == hgmma, row
    # ptxas brackets each batch of wgmmas with a few WARPGROUP instructions; dozens mean it has serialised them.
    assert row["warpgroup"] <= fences, row


@pytest.mark.parametrize("target", TARGETS)
def test_packs_export_the_table_and_nothing_else(target, packs):
    """Or its samples."""
    symbols = subprocess.run(
        ["nm", "-D", "-P", "--defined-only", *packs[target]], capture_output=True, text=True, check=True
    ).stdout
    exported = [line.split()[0] for line in symbols.splitlines() if not line.endswith(":")]
    table = {spec.name() for built, spec in BUILT if built == target} - on_cpu.not_built(target)
    assert sorted(exported) == sorted(f"__tvm_ffi_{name}" for name in table)


def test_builds_name_the_packs_that_there_are():
    """CMake's tiers; no pack is built by default, neither by CMake nor by pip."""
    cmake, pip = ((ROOT / name).read_text() for name in ("CMakeLists.txt", "pyproject.toml"))
    (auto,) = re.findall(r"set\(AUTO_PACKS (.*)\)", cmake)
    (others,) = re.findall(r"set\(PACKS_OF_TIER_all \${AUTO_PACKS} (.*)\)", cmake)
    assert {*auto.split(), *others.split()} == {pack.name for pack in kernel_table.PACKS}
    assert not {"sm80", "sm90a_8bit"} & set(auto.split())
    assert 'set(FLASHPLUG_PACKS "" CACHE' in cmake and 'env = "FLASHPLUG_PACKS", default = ""' in pip
