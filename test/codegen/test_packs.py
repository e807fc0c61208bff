"""Every row of the kernel table is legal, was built, fits the machine and spills nothing. No GPU.

Measurements are read from the reports of the build; nothing is compiled a second time.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import interpreted_kernels
import pytest

from torch_flashplug.codegen import compiler
from torch_flashplug.dispatch import library
from torch_flashplug.registry import features, kernel_table
from torch_flashplug.registry.architectures import FAMILIES, TARGETS
from torch_flashplug.registry.kernel_spec import SMEM_BYTES, KernelSpec

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from tools.build import sass  # noqa: E402

SPECS = [spec for family in FAMILIES for spec in kernel_table.specs(family.arch)]


def _compiled_elsewhere(spec: KernelSpec) -> bool:
    """Return True if an sm_80 kernel is compiled for targets that have no pack and no GPU for tests."""
    if spec.dtype != "bf16" or spec.d not in {64, 128} or spec.kind == "detbwd" or spec.tile_n == 112:
        return False
    if interpreted_kernels.not_built():  # the short run compiles a single kernel of each kind
        return spec == next(x for x in kernel_table.specs(80, spec.kind) if x.dtype == "bf16" and x.d == 64)
    small = spec.kind != "bwd" or spec.d == 64 or spec.elementwise
    return small and spec.features <= {"causal", "mask"}


COMPILED_ONLY = dict.fromkeys(("sm_100", "sm_120"), list(filter(_compiled_elsewhere, kernel_table.specs(80))))
BUILT = [(pack.target, spec) for pack in kernel_table.PACKS for spec in pack.specs()]
BUILT += [(target, spec) for target, specs in COMPILED_ONLY.items() for spec in specs]
# Maximum numbers of kernels: each kernel costs seconds of every clean build and 90 KB. A feature gets a separate pack.
# Only the feature kernels for every GPU are in packs with other kernels: 88 in sm90a_fa2 and in sm80. sm90a has 30
# kernels with masks, four for gradients of D 72 to 96 (1.1 to 1.3 x those of 128), and four for fused gradients of
# D 192 and (192, 128), with five products for seven.
CEILINGS = {"sm90a": 232, "sm90a_bias": 80, "sm90a_fa2": 228, "sm90a_dropout": 90, "sm90a_8bit": 190, "sm80": 380}
# D 192: 1.25 to 1.4 x the kernels of 256; D 32 and 96: up to 1.2 x those of 64, 128; gradients of D 96: 1.1 to 1.3 x.
# 46 dense kernels for packed sequences of equal lengths, 0.90 to 0.94 (with gradients 0.79 to 0.92) before.
# 20 kernels for packed queries over pages, instead of a gather of all pages.
CEILINGS["sm90a_window"] = 198
# Head dims above 256: 320 and 384 save 1.3 to 2 x the work of 512. 26 kernels compute gradients, where stock takes 5 x
# the time (predicted). Eight kernels read K and V of absorbed MLA once.
CEILINGS["sm90a_wide"] = 82


def test_packs_have_no_more_kernels_than_allowed():
    sizes = {pack.name: len(pack.specs()) for pack in kernel_table.PACKS}
    too_large = {name: size for name, size in sizes.items() if size > CEILINGS[name]}
    assert not too_large, f"raise CEILINGS for {too_large} with the reason, or add fewer kernels"


def test_every_kernel_of_the_table_is_in_a_pack():
    packed = {spec for pack in kernel_table.PACKS for spec in pack.specs()}
    assert not {spec.name() for spec in {*SPECS} - packed}, "kernels of no pack, which no machine would have"


def rows_of_report(report: Path) -> dict[str, dict]:
    """Return {kernel name: row} of a report of the build tool, made from the current sources."""
    from torch_flashplug.codegen.fingerprint import source_fingerprint

    contents = json.loads(report.read_text())
    assert contents["sources"] == source_fingerprint(), f"{report} is of other sources; run ./tools/dev build"
    return {row["name"]: row for row in contents["kernels"]}


def measured_row(reports: dict[str, dict[str, dict]], target: str, spec: KernelSpec) -> dict:
    """Return the measurements of a kernel."""
    interpreted_kernels.skip_unless_built(spec.name(), target)
    return reports[target][spec.name()]


def built_pack(pack: kernel_table.Pack) -> Path:
    """Return the path of a pack of this build; packs are not compiled a second time."""
    path = library.find_built(pack.file)
    assert path is not None, f"{pack.file} was not built; run ./tools/dev build"
    return path


def compile_pack(target: str, out: Path) -> Path:
    """Compile the pack of a target left out by the build; objects are kept with the build's objects."""
    command = [sys.executable, ROOT / "tools" / "build" / "aot.py", "--arch", target, "--out", out]
    command += ["--objects", ROOT / "build" / "objects"]
    for spec in COMPILED_ONLY[target]:
        command += ["--spec", spec.name()]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    return out / f"flashplug_{target.replace('_', '')}.so"


@pytest.fixture(scope="session")
def packs(tmp_path_factory) -> dict[str, list[Path]]:
    """Return the packs of each target: built packs, and packs that are only compiled."""
    pytest.importorskip("cutlass", reason="the DSL is needed to compile kernels")
    paths = {target: [compile_pack(target, tmp_path_factory.mktemp(target))] for target in COMPILED_ONLY}
    for pack in kernel_table.PACKS:
        paths.setdefault(pack.target, []).append(built_pack(pack))
    return paths


@pytest.fixture(scope="session")
def reports(packs) -> dict[str, dict[str, dict]]:
    """Return {target: {kernel name: row}} for the entire table."""
    return {
        target: {name: row for path in paths for name, row in rows_of_report(path.with_suffix(".json")).items()}
        for target, paths in packs.items()
    }


@pytest.mark.parametrize("spec", SPECS, ids=KernelSpec.name)
def test_kernel_spec_is_legal_and_has_a_unique_name(spec):
    assert spec.check() is None
    assert KernelSpec.from_name(spec.name()) == spec
    assert [s.name() for s in SPECS].count(spec.name()) == 1
    assert spec.threads * 128 <= 65536 and spec.smem_bytes() <= SMEM_BYTES[spec.arch]


def test_samples_cover_every_family_and_feature():
    for pack in kernel_table.PACKS:
        samples, all_specs = (
            {(spec.kind, spec.arch, spec.mask, spec.elementwise) for spec in specs}
            for specs in (pack.test_sample(), pack.specs())
        )
        assert samples == all_specs, pack.name
    num_samples, num_specs = (
        sum(map(len, map(take, kernel_table.PACKS)))
        for take in (kernel_table.Pack.test_sample, kernel_table.Pack.specs)
    )
    assert num_samples < num_specs / 3  # docs/developing.md says so


def test_every_target_is_built():
    assert {target for target, _ in BUILT} == set(TARGETS)


def forward_products(spec: KernelSpec) -> tuple[int, int]:
    """Return the number of wgmmas and fences of a forward.

    There is a wgmma per 16 elements of the inner dimension. Scores are computed once in each loop body and once
    before the loops, outputs once in each body and once after the loops. A diagonal block as wide as two warpgroups
    also has scores of half the width, if ptxas permits. An early rescale, which touches O between two batches, needs
    one more fence in each body.
    """
    bodies = 2 if spec.features & {"causal", "mask", "window"} else 1  # partial blocks have a separate loop body
    recipe = features.recipe_of(spec.features)
    halves = bool(spec.features & {"causal", "window"}) and spec.tile_n == 128 and spec.dv <= spec.d and recipe is None
    halves = halves and not ("softcap" in spec.features and spec.d <= 64)
    scores, output = (bodies + 1 + halves) * (spec.d // 16), (bodies + 1) * (spec.tile_n // 16)
    # 8-bit products have different instruction names
    products = (recipe is None) * scores + (spec.bytes_of("v") == 2) * output
    return products, 4 * (bodies + 1 + halves) + bodies * spec.early_rescale


def backward_bodies(spec: KernelSpec) -> int:
    """Return the number of loop bodies over query steps; a window has partial steps at both ends."""
    return 3 if "window" in spec.features else 2


def backward_products(spec: KernelSpec) -> tuple[int, int]:
    """Return the number of wgmmas and fences of a fused backward.

    Each loop body, with and without masking, has scores, dP, dV, dK and dQ. The dQ of the last step follows the loops.
    """
    dq, bodies = spec.tile_n // 16, backward_bodies(spec)
    return bodies * (spec.d // 16 + spec.dv // 16 + 2 * (spec.tile_m // 16) + dq) + dq, bodies * 10 + 3


def num_main_kernels(spec: KernelSpec) -> int:
    """Return the number of main kernels: a dense causal backward has another kernel for groups of query heads."""
    return 2 if spec.kind == "bwd" and spec.features - {"equal"} == {"causal"} else 1


def part_products(spec: KernelSpec) -> tuple[int, int]:
    """Return the number of wgmmas and fences of a split backward.

    The dQ kernel has scores and dP before two loop bodies and in each, and dQ in each body and after the loops. In the
    dK and dV kernel, the first warpgroup has scores before the bodies and in each, the second warpgroup has dP before
    one body and in this body, and both sums are in each body.
    """
    bodies, sums = backward_bodies(spec), spec.tile_n // 16
    if spec.is_wide_backward:
        return wide_products(spec, bodies)
    dq = 3 * (spec.d // 16 + spec.dv // 16 + sums)
    dkdv = (bodies + 1) * (spec.d // 16) + 2 * (spec.dv // 16) + (bodies + 1) * 2 * sums
    return dq + dkdv, 20 * bodies


def wide_products(spec: KernelSpec, bodies: int) -> tuple[int, int]:
    """Return the number of wgmmas and WARPGROUP instructions of a split backward with head dims above 256.

    In the kernels of dQ and dK, the first warpgroup has scores and the output in each loop body, the second warpgroup
    has dP and the output in one body. In the kernel of dV, the second warpgroup has the output alone. Before each box
    of 64 columns there is a wait for the box, which ptxas surrounds with WARPGROUP instructions.
    """
    step, boxes = spec.d // 16 + spec.tile_n // 16, spec.d // 64
    products = (2 + 1) * step + (bodies + 1) * step + bodies * step + spec.tile_n // 16
    ring, whole = 2 * boxes + 6, boxes + 5
    return products, (2 * whole + ring) + (bodies * whole + ring) + (bodies * ring + 4)


def decode_products(spec: KernelSpec) -> tuple[int, int]:
    """Return the number of wgmmas and fences of decode.

    Scores are computed before the one loop body and in it, outputs in the body and after it. The code exists twice: for
    a single CTA and for a cluster. With shared values, the loop body has the scores of a block, and outputs of two
    blocks. The last block of an odd number follows the loop.
    """
    if spec.shares_values:
        return 2 * (spec.d // 16) + 3 * (spec.tile_n // 16), 10
    return 4 * (spec.d // 16 + spec.tile_n // 16), 16


def bias_products(spec: KernelSpec) -> tuple[int, int]:
    """Return the number of wgmmas and fences of a bias gradient: scores and dP in the one loop body."""
    return spec.d // 16 + spec.dv // 16, 5


def tile_products(spec: KernelSpec) -> tuple[int, int]:
    """Return the number of wgmmas and fences of a single-tile backward.

    The one loop body has scores, dP, dV, dK and dQ.
    """
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
QUANTISING = 256  # threads of a quantizing CTA (kernels/preprocess/quantize.py)


def max_threads(spec: KernelSpec) -> int:
    """Return the threads of the reported kernel: the kernel with the most registers of a launch."""
    return min(spec.threads, QUANTISING) if features.recipe_of(spec.features) else spec.threads


# setmaxnreg instructions; remaining kernels have an increase and a decrease
SPLITS_OF_REGISTERS = {"partbwd": 4, "decode": 0}
WIDE_BACKWARD_SPLITS = 6  # three kernels


@pytest.mark.parametrize("target, spec", BUILT, ids=lambda value: getattr(value, "name", lambda: value)())
def test_kernel_spills_nothing(target, spec, reports):
    row = measured_row(reports, target, spec)
    assert row["stack_bytes"] == 0 and row.get("spills", 0) == 0, row
    assert row["registers"] <= min(255, 65536 // max_threads(spec)), row


def with_counts(row: dict, spec: KernelSpec) -> dict:
    """Return a row of a report with counts of instructions.

    The short run's build leaves counts out, because counting takes half a second per kernel. In the short run, this
    function counts kernels of head dim 64.
    """
    if "hgmma" in row:
        return row
    if spec.d != 64:
        pytest.skip("the build did not count its instructions; ./tools/dev build does")
    cubin = ROOT / "build" / "objects" / f"{compiler.key(spec, 'sm_90a')}.cubin"
    return row | sass.resources(cubin.read_bytes())


@pytest.mark.parametrize("spec", kernel_table.specs(90), ids=KernelSpec.name)
def test_kernel_has_the_expected_registers_and_tensor_core_instructions(spec, reports):
    row = with_counts(measured_row(reports, "sm_90a", spec), spec)
    # At entry, each thread has an equal share of the register file. A register split, if there is one, takes over
    # afterwards.
    assert row["registers"] <= 65536 // (max_threads(spec) * (spec.ctas_per_sm if spec.is_decode else 1)), row
    kernels = num_main_kernels(spec)
    splits = WIDE_BACKWARD_SPLITS if spec.is_wide_backward else SPLITS_OF_REGISTERS.get(spec.kind, 2)
    splits = 2 if spec.shares_values else splits
    assert row["usetmaxreg"] == splits * kernels, row
    hgmma, fences = PRODUCTS[spec.kind](spec)
    assert row["hgmma"] == hgmma * kernels, row
    # ptxas brackets each batch of wgmmas with a few WARPGROUP instructions; dozens mean that ptxas has serialized the
    # batches.
    assert row["warpgroup"] <= fences * kernels, row


@pytest.mark.parametrize("target", TARGETS)
def test_packs_export_exactly_the_kernels_of_the_table(target, packs):
    """Packs export only the samples after a build of samples."""
    symbols = subprocess.run(
        ["nm", "-D", "-P", "--defined-only", *packs[target]], capture_output=True, text=True, check=True
    ).stdout
    exported = [line.split()[0] for line in symbols.splitlines() if not line.endswith(":")]
    table = {spec.name() for built, spec in BUILT if built == target} - interpreted_kernels.not_built(target)
    assert sorted(exported) == sorted(f"__tvm_ffi_{name}" for name in table)


def test_build_files_name_all_packs():
    """CMake's tiers name all packs; by default, neither CMake nor pip builds a pack."""
    cmake, pip = ((ROOT / name).read_text() for name in ("CMakeLists.txt", "pyproject.toml"))
    (auto_packs,) = re.findall(r"set\(AUTO_PACKS (.*)\)", cmake)
    (further_packs,) = re.findall(r"set\(PACKS_OF_TIER_all \${AUTO_PACKS} (.*)\)", cmake)
    assert {*auto_packs.split(), *further_packs.split()} == {pack.name for pack in kernel_table.PACKS}
    assert not {"sm80", "sm90a_8bit"} & set(auto_packs.split())
    assert 'set(FLASHPLUG_PACKS "" CACHE' in cmake and 'env = "FLASHPLUG_PACKS", default = ""' in pip
