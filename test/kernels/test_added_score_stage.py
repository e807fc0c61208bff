"""A score stage that no kernel knows, compiled into unchanged kernel files. No GPU.

Nothing spills, the number of tensor core instructions does not change, and interpreted results match fp64.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import interpreted_kernels
import pytest
import torch

from torch_flashplug.testing import (
    DirectForward,
    Masking,
    assert_lse,
    assert_within_budget,
    attention_math,
    make_inputs,
    new_case,
)

pytest.importorskip("cutlass", reason="the DSL is needed to compile kernels")

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

import added_stage  # noqa: E402

from torch_flashplug.kernels import builder  # noqa: E402
from torch_flashplug.kernels.score_stages.pipeline import ScoreStage  # noqa: E402
from torch_flashplug.registry.kernel_spec import KernelSpec  # noqa: E402

KERNELS = ("fwd_sm90_bf16_d128_causal_m128n128s2", "fwd_sm80_bf16_d64_causal_m64n96s1")
TENSOR_CORE_COUNTS = ("hgmma", "warpgroup")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> tuple[Path, dict[str, list[dict[str, int]]]]:
    """Compile the kernels with the stage in a separate process; see added_stage.py for the results."""
    folder = tmp_path_factory.mktemp("added_stage")
    paths = os.pathsep.join(str(ROOT / name) for name in (".", "test/helpers"))
    environment = {**os.environ, "PYTHONPATH": paths, "CUTE_DSL_DUMP_DIR": str(folder), "CUTE_DSL_ARCH": "sm_90a"}
    command = [sys.executable, "-m", "added_stage", str(folder), *KERNELS]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert process.returncode == 0, process.stdout + process.stderr
    pack, resources = json.loads(process.stdout.splitlines()[-1])
    return Path(pack), resources


@pytest.mark.parametrize("name", KERNELS)
def test_added_stage_only_overrides_members(name):
    """A member without a counterpart in the base class would never be called."""
    kernel = builder(KernelSpec.from_name(name))
    members = set(dir(kernel.features))

    added_stage.add_stage(kernel)

    assert set(dir(kernel.features)) == members
    names = {name for name in dir(added_stage.KeyPositionStage) if not name.startswith("__")}
    assert names - set(dir(ScoreStage)) == {"coord"}


@pytest.mark.interpreted
@pytest.mark.parametrize("kernel", KERNELS)
def test_added_score_stage_matches_fp64_and_causes_no_spill(kernel, compiled):
    pack, resources = compiled
    base, with_stage = resources[kernel]
    assert with_stage["spills"] == 0 and with_stage["stack_bytes"] == 0, with_stage
    assert [with_stage[name] for name in TENSOR_CORE_COUNTS] == [base[name] for name in TENSOR_CORE_COUNTS]

    head_dim = 128 if "d128" in kernel else 64
    case = new_case("added_stage", (2, 2, 1), (300, 333), (head_dim, head_dim), "causal")
    inputs = make_inputs(case, "cpu", 7)
    mask = Masking(int(case.causal), added_stage.SLOPE * case.D**-0.5 * torch.arange(case.Sk, dtype=torch.float64))
    exact, low, fp32 = (
        attention_math(*inputs, mask=mask, dtype=dtype) for dtype in (torch.float64, case.torch_dtype, torch.float32)
    )
    for seed in (0, 7):  # the seed decides the order of independent operations
        interpreted_kernels.set_order_seed(pack, seed)
        forward = DirectForward(interpreted_kernels.load_kernel(pack, kernel), case, inputs)
        forward.call()
        assert_within_budget(f"{kernel}, seed {seed}", forward.out, exact.out, low.out)
        assert_lse(f"{kernel}, seed {seed}", forward.lse, exact.lse, fp32.lse)
