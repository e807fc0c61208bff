"""Features that no product kernel has yet are compiled as stages of the kernel files as they are: nothing spills, and
the tensor cores' instructions stay what they were. No GPU, and no numbers: those come with the features.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# A stage loaded ahead, one behind the softmax and what comes back to it, both, one with a ring of its own: where
# registers are fewest.
TRIALS = {
    "fwd_sm90_bf16_d128_causal_m128n128s2": [("dropout",), ("bits", "dropout"), ("ragged",), ("bias",)],
    "fwd_sm90_bf16_d64_full_m128n128s2": [("bias",), ("bias", "dropout")],
    "fwd_sm90_bf16_d192_full_m128n112s2": [("bits", "dropout")],  # blocks of 112 keys read words of 64
    "fwd_sm90_bf16_d256_full_m128n64s2": [("bias",)],
    "fwd_sm80_bf16_d64_full_m64n96s1": [("bits",)],
    "fwd_sm80_bf16_d128_full_m128n48s1": [("ragged",)],
    "bwd_sm90_bf16_d64_causal_m64n128s4": [("bits", "dropout"), ("ragged",)],
    "bwd_sm90_bf16_d128_causal_m64n128s2": [("bits",), ("dropout",), ("bits", "dropout"), ("ragged",)],
    "bwd_sm90_bf16_d128_full_m64n128s2": [("dropout",), ("listed",), ("listed", "bits"), ("bias",)],
    "detbwd_sm90_bf16_d128_causal_m64n128s2": [("bits", "dropout")],
    "partbwd_sm90_bf16_d128_causal_m64n64s2": [("bits",), ("bits", "dropout"), ("bias",), ("ragged",)],
    "partbwd_sm90_bf16_d192_full_m64n64s2": [("dropout",)],
    "partbwd_sm90_bf16_d256_full_m64n64s2": [("bits", "dropout")],
    # Blocks from lists, with a mask's words for what they hide.
    "fwd_sm90_bf16_d128_full_m128n128s2": [
        *(("bits",), ("listed",), ("listed", "bits"), ("bias",), ("bias", "dropout"), ("ragged",)),
    ],
    "fwd_sm80_bf16_d128_full_m64n64s1": [("listed",), ("listed", "bits"), ("bias",)],
    "bwd_sm80_bf16_d64_full_m64n128s2": [("listed", "bits")],
    "bwd_sm80_bf16_d128_full_m64n128s2": [("listed",)],
    "bwd_sm90_bf16_d64_full_m64n128s4": [("listed", "bits"), ("bias",), ("bias", "dropout")],
    "detbwd_sm90_bf16_d64_full_m64n128s4": [("listed", "bits")],
    "detbwd_sm90_bf16_d128_full_m64n128s2": [("listed",), ("listed", "bits")],
    "partbwd_sm90_bf16_d128_full_m64n64s2": [("dropout",), ("listed", "bits")],
    # Sequences of different lengths on end.
    "fwd_sm90_bf16_d64_causal_m192n128s2": [("ragged",)],
    "fwd_sm90_bf16_d256_full_m128n80s2": [("ragged",)],
    "decode_sm90_bf16_d128_full_m64n64s3": [("ragged",)],
}
# Blocks masked at both ends of a run.
for kernel in (
    *("fwd_sm90_bf16_d128_full_m128n128s2", "fwd_sm80_bf16_d128_full_m128n48s1", "bwd_sm90_bf16_d64_full_m64n128s4"),
    *("bwd_sm90_bf16_d128_full_m64n128s2", "detbwd_sm90_bf16_d128_full_m64n128s2"),
):
    TRIALS[kernel] = [*TRIALS[kernel], ("window",)]
COUNTS = ("hgmma", "warpgroup")
COMPILE = """
import json, pathlib, sys
sys.path[:0] = sys.argv[1:3]
import aot, sass, trials
import cutlass.cute as cute
from torch_flashplug.spec import KernelSpec
store = aot.Store(pathlib.Path(sys.argv[4]), "sm_90a")  # the build's
for name, stages in json.loads(sys.argv[3]):
    if not stages:
        if not store.path(name).exists():
            aot.compile_one(name, store)
        print(json.dumps(store.row(name)), flush=True)
        continue
    kernel = trials.trial(KernelSpec.from_name(name), *stages)
    options = "--enable-tvm-ffi --gpu-arch sm_90a --keep-cubin"
    compiled = cute.compile(kernel, *kernel.fake_arguments(), options=options)
    print(json.dumps(sass.resources(bytes(compiled.__cubin__))), flush=True)
"""


@pytest.fixture(scope="module")
def counted(tmp_path_factory) -> dict[tuple[str, tuple[str, ...]], dict[str, int]]:
    """What each trial's cubin holds, compiled in a process of its own, and each kernel's without a stage, as built."""
    pytest.importorskip("cutlass", reason="the DSL is needed to compile kernels")
    wanted = [(name, stages) for name, trials in TRIALS.items() for stages in ((), *trials)]
    command = [sys.executable, "-c", COMPILE, ROOT / "tools", ROOT / "test", json.dumps(wanted)]
    command.append(ROOT / "build" / "objects")
    environment = {"CUTE_DSL_DUMP_DIR": str(tmp_path_factory.mktemp("dumps")), "CUTE_DSL_ARCH": "sm_90a"}
    run = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert run.returncode == 0, run.stdout + run.stderr
    rows = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    return dict(zip(wanted, rows, strict=True))


@pytest.mark.parametrize(
    "name, stages", [(name, stages) for name, trials in TRIALS.items() for stages in trials],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)  # fmt: skip
def test_a_stage_costs_no_spill_and_no_turn_of_the_tensor_cores(name, stages, counted):
    row, base = counted[name, stages], counted[name, ()]
    assert row["spills"] == 0 and row["stack_bytes"] == 0, row
    expected = [base.get(count, 0) for count in COUNTS]  # a build counts wgmma where there is any
    # A forward without a mask has a loop of whole blocks beside its first block; a backward has two loops. A list has
    # blocks that hide something and whole ones; a window has them at both ends.
    if name.startswith("fwd_sm90"):
        loops = ("listed" in stages) + 2 * ("window" in stages)
        expected = [count + loops * count // 2 for count in expected]
    elif "window" in stages:
        behind = (8, 4) if "bwd_sm90" in name else (0, 0)  # the last dQ
        expected = [count + (count - outside) // 2 for count, outside in zip(expected, behind, strict=True)]
    assert [row[count] for count in COUNTS] == expected, (row, base)


TRACE = """
import sys
sys.path[:0] = sys.argv[1:3]
import aot, trials
import cutlass.cute as cute
cute.compile(trials.say_wrong_biases)
"""


def test_threads_read_the_biases_of_their_scores():
    """By the layouts of ldmatrix and of accumulators, since nothing runs here."""
    pytest.importorskip("cutlass", reason="the DSL is needed for its layouts")
    command = [sys.executable, "-c", TRACE, ROOT / "tools", ROOT / "test"]
    environment = {"CUTE_DSL_ARCH": "sm_90a"}
    run = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert json.loads(run.stdout) == [0, 0, 0, 0], run.stdout
