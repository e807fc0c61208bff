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
# A stage loaded ahead, one behind the softmax and what comes back to it, both: where registers are fewest.
TRIALS = {
    "fwd_sm90_bf16_d128_causal_m128n128s2": [("bits",), ("dropout",), ("bits", "dropout")],
    "fwd_sm90_bf16_d192_full_m128n112s2": [("bits", "dropout")],  # blocks of 112 keys read words of 64
    "fwd_sm80_bf16_d128_full_m128n48s1": [("bits",)],
    "bwd_sm90_bf16_d64_causal_m64n128s4": [("bits", "dropout")],
    "bwd_sm90_bf16_d128_causal_m64n128s2": [("bits",), ("dropout",), ("bits", "dropout")],
    "bwd_sm90_bf16_d128_full_m64n128s2": [("dropout",), ("listed",), ("listed", "bits")],
    "detbwd_sm90_bf16_d128_causal_m64n128s2": [("bits", "dropout")],
    "partbwd_sm90_bf16_d128_causal_m64n64s2": [("bits",), ("bits", "dropout")],
    "partbwd_sm90_bf16_d192_full_m64n64s2": [("dropout",)],
    "partbwd_sm90_bf16_d256_full_m64n64s2": [("bits", "dropout")],
    # Blocks from lists, with a mask's words for what they hide.
    "fwd_sm90_bf16_d128_full_m128n128s2": [("listed",), ("listed", "bits")],
    "fwd_sm80_bf16_d128_full_m64n64s1": [("listed",), ("listed", "bits")],
    "bwd_sm80_bf16_d64_full_m64n128s2": [("listed", "bits")],
    "bwd_sm80_bf16_d128_full_m64n128s2": [("listed",)],
    "bwd_sm90_bf16_d64_full_m64n128s4": [("listed", "bits")],
    "detbwd_sm90_bf16_d64_full_m64n128s4": [("listed", "bits")],
    "detbwd_sm90_bf16_d128_full_m64n128s2": [("listed",), ("listed", "bits")],
    "partbwd_sm90_bf16_d128_full_m64n64s2": [("dropout",), ("listed", "bits")],
}
# Blocks masked at both ends of a run.
for kernel in (
    *("fwd_sm90_bf16_d128_full_m128n128s2", "fwd_sm80_bf16_d128_full_m128n48s1", "bwd_sm90_bf16_d64_full_m64n128s4"),
    *("bwd_sm90_bf16_d128_full_m64n128s2", "detbwd_sm90_bf16_d128_full_m64n128s2"),
):
    TRIALS[kernel] = [*TRIALS[kernel], ("window",)]
COUNTS = ("hgmma", "warpgroup")
COMPILE = """
import json, sys
sys.path[:0] = sys.argv[1:3]
import aot, sass, trials
import cutlass.cute as cute
from torch_flashplug.spec import KernelSpec
for name, stages in json.loads(sys.argv[3]):
    kernel = trials.trial(KernelSpec.from_name(name), *stages)
    options = "--enable-tvm-ffi --gpu-arch sm_90a --keep-cubin"
    compiled = cute.compile(kernel, *kernel.fake_arguments(), options=options)
    print(json.dumps(sass.resources(bytes(compiled.__cubin__))), flush=True)
"""


@pytest.fixture(scope="module")
def counted(tmp_path_factory) -> dict[tuple[str, tuple[str, ...]], dict[str, int]]:
    """What each trial's cubin holds, and each kernel's without a stage, compiled in a process of its own."""
    pytest.importorskip("cutlass", reason="the DSL is needed to compile kernels")
    wanted = [(name, stages) for name, trials in TRIALS.items() for stages in ((), *trials)]
    command = [sys.executable, "-c", COMPILE, ROOT / "tools", ROOT / "test", json.dumps(wanted)]
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
    expected = [base[count] for count in COUNTS]
    # A forward without a mask has a loop of whole blocks beside its first block; a backward has two loops. A list has
    # blocks that hide something and whole ones; a window has them at both ends.
    if name.startswith("fwd_sm90"):
        loops = ("listed" in stages) + 2 * ("window" in stages)
        expected = [count + loops * count // 2 for count in expected]
    elif "window" in stages:
        behind = (8, 4) if "bwd_sm90" in name else (0, 0)  # the last dQ
        expected = [count + (count - outside) // 2 for count, outside in zip(expected, behind, strict=True)]
    assert [row[count] for count in COUNTS] == expected, (row, base)
