"""Score stages in combinations that no product kernel has, compiled into unchanged kernel files. No GPU.

Nothing spills, the number of tensor core instructions does not change, and interpreted results match fp64.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import on_cpu
import pytest
import trial_calls

from torch_flashplug.registry.kernel_spec import KernelSpec
from torch_flashplug.testing import assert_bitwise_equal

ROOT = Path(__file__).resolve().parents[2]
# The trials have a stage loaded ahead, a stage behind the softmax with its derivative, and both: registers are
# scarcest there.
TRIALS = {
    "fwd_sm90_bf16_d128_causal_m128n128s2": [("bits", "dropout")],
    # Blocks of 112 keys read 64-bit words, and draw random bits for 128 keys. Both trials spill: see layouts.md.
    "fwd_sm90_bf16_d192_full_m128n112s2": [("bits",), ("dropout",)],
    "fwd_sm90_bf16_d192_full_m128n80s2": [("bits", "dropout")],
    "fwd_sm90_bf16_d64_full_m192n128s2": [("dropout",)],  # three warpgroups have fewer registers each
    "fwd_sm80_bf16_d64_full_m64n96s1": [("bits",)],
    "bwd_sm90_bf16_d64_causal_m64n128s4": [("bits",), ("dropout",)],  # both trials spill: see layouts.md
    "bwd_sm90_bf16_d128_causal_m64n128s2": [("bits",)],
    "bwd_sm90_bf16_d128_full_m64n128s2": [("listed",), ("listed", "bits")],
    "detbwd_sm90_bf16_d64_causal_m64n128s4": [("bits", "dropout")],
    "partbwd_sm90_bf16_d128_causal_m64n64s2": [("bits",), ("bits", "dropout")],
    "partbwd_sm90_bf16_d192_full_m64n64s2": [("dropout",)],
    "partbwd_sm90_bf16_d256_full_m64n64s2": [("bits",)],
    # Block-sparse lists, with a bitmask for partial blocks.
    "fwd_sm90_bf16_d128_full_m128n128s2": [
        *(("bits",), ("listed",), ("listed", "bits")),
    ],
    "fwd_sm80_bf16_d128_full_m64n64s1": [("listed",), ("listed", "bits")],
    "bwd_sm80_bf16_d64_full_m64n128s2": [("listed", "bits")],
    "bwd_sm80_bf16_d128_full_m64n128s2": [("listed",)],
    "bwd_sm90_bf16_d64_full_m64n128s4": [("listed", "bits")],
    "detbwd_sm90_bf16_d64_full_m64n128s4": [("listed", "bits")],
    "detbwd_sm90_bf16_d128_full_m64n128s2": [("listed",), ("listed", "bits")],
    "partbwd_sm90_bf16_d128_full_m64n64s2": [("listed", "bits")],
    # Packed sequences: only decode has no product kernel.
    "decode_sm90_bf16_d128_full_m64n64s3": [("ragged",)],
}
COUNTS = ("hgmma", "warpgroup")
# The script compiles into a folder named after all sources of trials, so a second run compiles nothing.
COMPILE = """
import hashlib, json, pathlib, shutil, sys
tests, root, wanted, build = sys.argv[1:]
sys.path[:0] = tests, root
from tools.build import aot, sass
from tools.ptx_interpreter import build_pack
import trials
from torch_flashplug.codegen.fingerprint import source_fingerprint
store, wanted = aot.Store(pathlib.Path(build) / "objects", "sm_90a"), json.loads(wanted)  # the build's
made_of = (source_fingerprint(), pathlib.Path(trials.__file__).read_text(), store.path(wanted[0][0]).name)
folder = pathlib.Path(build) / "interpreted" / f"trials-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]}"
for other in {*folder.parent.glob("trials-*")} - {folder}:
    shutil.rmtree(other)
folder.mkdir(parents=True, exist_ok=True)
rows, files = [], []
for name, stages in wanted:
    if stages:
        files.append(folder / trials.trial_name(name, stages))
        if not files[-1].with_suffix(".json").exists():
            trials.build(name, stages, folder)
            cubin = files[-1].with_suffix(".cubin").read_bytes()
            files[-1].with_suffix(".json").write_text(json.dumps(sass.resources(cubin)))
        rows.append(json.loads(files[-1].with_suffix(".json").read_text()))
    else:
        if not store.path(name).exists():
            aot.compile_one(name, store)
        rows.append(store.row(name))
pack = build_pack.pack(files, folder / "trials.so")
print(json.dumps([str(pack), rows]))
"""


@dataclass(frozen=True)
class BuiltTrials:
    """Resources of each trial's cubin and of each kernel without a stage, and an interpreted pack of the trials."""

    rows: dict[tuple[str, tuple[str, ...]], dict[str, int]]
    pack: Path

    def function(self, name: str, stages: tuple[str, ...]):
        return on_cpu.load_kernel(self.pack, "_".join((name, *stages)))


@pytest.fixture(scope="module")
def built_trials(tmp_path_factory) -> BuiltTrials:
    """Compile the trials in a separate process; kernels without a stage come from the build."""
    pytest.importorskip("cutlass", reason="the DSL is needed to compile kernels")
    kernels = [(name, stages) for name, trials in TRIALS.items() for stages in ((), *trials)]
    command = [sys.executable, "-c", COMPILE, ROOT / "test", ROOT, json.dumps(kernels), ROOT / "build"]
    environment = {**os.environ, "CUTE_DSL_DUMP_DIR": str(tmp_path_factory.mktemp("dumps")), "CUTE_DSL_ARCH": "sm_90a"}
    run = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, check=False, timeout=900
    )
    assert run.returncode == 0, run.stdout + run.stderr
    pack, rows = json.loads(run.stdout.splitlines()[-1])
    return BuiltTrials(dict(zip(kernels, rows, strict=True)), Path(pack))


@pytest.mark.parametrize(
    "kernel, stages", [(name, stages) for name, trials in TRIALS.items() for stages in trials],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)  # fmt: skip
def test_added_stage_causes_no_spill_and_no_tensor_core_instruction(kernel, stages, built_trials):
    row, base = built_trials.rows[kernel, stages], built_trials.rows[kernel, ()]
    assert row["spills"] == 0 and row["stack_bytes"] == 0, row
    expected = [base.get(count, 0) for count in COUNTS]  # a build counts wgmma only where there are any
    # A forward without a mask has a loop of full blocks after its first block; a backward has two loops. A list has
    # partial and full blocks.
    if kernel.startswith("fwd_sm90"):
        expected = [count + ("listed" in stages) * count // 2 for count in expected]
    assert [row[count] for count in COUNTS] == expected, (row, base)


NUMBERS = [(kernel, stages) for kernel, trials in TRIALS.items() for stages in trials]


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "kernel, stages", NUMBERS, ids=lambda value: value if isinstance(value, str) else "+".join(value)
)
def test_trial_kernels_match_fp64(kernel, stages, built_trials):
    """The two seeds use different orders of independent operations, different bitmasks and different lists."""
    spec, function = KernelSpec.from_name(kernel), built_trials.function(kernel, stages)
    for seed in (0, 7):
        on_cpu.set_order_seed(built_trials.pack, seed)
        call = trial_calls.make_call(spec, stages, seed + NUMBERS.index((kernel, stages)))
        trial_calls.check_kernel(f"{kernel} {stages} seed {seed}", function, spec, call)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "kernel, stages",
    [each for each in NUMBERS if each[0].startswith(("detbwd", "partbwd"))],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_deterministic_trial_backward_is_bitwise_equal(kernel, stages, built_trials):
    spec, function, runs = KernelSpec.from_name(kernel), built_trials.function(kernel, stages), []
    call = trial_calls.make_call(spec, stages, 1)
    for seed in (0, 1, 2):
        on_cpu.set_order_seed(built_trials.pack, seed)
        runs.append(trial_calls.backward(function, spec, call))
    for grads in runs[1:]:
        for name, expected, actual in zip(("dq", "dk", "dv"), runs[0], grads, strict=True):
            assert_bitwise_equal(f"{kernel} {name}", actual, expected)


TRACE = """
import sys
sys.path[:0] = sys.argv[1:3]
from tools.build import aot
import trials
import cutlass.cute as cute
cute.compile(trials.trace_wrong_biases)
"""


def test_threads_read_the_biases_of_their_scores():
    """The check uses the layouts of ldmatrix and of accumulators, since nothing runs in this test."""
    pytest.importorskip("cutlass", reason="the DSL is needed for its layouts")
    command = [sys.executable, "-c", TRACE, ROOT, ROOT / "test"]
    environment = {"CUTE_DSL_ARCH": "sm_90a"}
    run = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert json.loads(run.stdout) == [0, 0, 0], run.stdout
