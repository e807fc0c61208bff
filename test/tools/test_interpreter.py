"""Errors detected by the interpreter in wrong kernels.

Interpreted tests are worth only as much as this detection. Mutants are the PTX of a kernel with a single change. The
unchanged kernel gives bitwise equal results in any order of independent operations.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import interpreted_kernels
import pytest

from torch_flashplug.testing import (
    DirectForward,
    assert_bitwise_equal,
    assert_lse,
    assert_within_budget,
    make_inputs,
    new_case,
    oracle,
    plain,
)

pytestmark = pytest.mark.interpreted
HOPPER, AMPERE = "fwd_sm90_bf16_d64_causal_m128n128s2", "fwd_sm80_bf16_d64_causal_m64n96s1"
SEEDS = range(4)
# Kernel, pattern and replacement of each mutant.
MUTANTS = {
    "products are not waited for": (HOPPER, r"wgmma\.wait_group\.sync\.aligned\s+\d+;", ""),
    "stores are not fenced": (HOPPER, r"fence\.proxy\.async\.shared::cta;", ""),
    "copies are not waited for": (
        HOPPER,
        r"mbarrier\.try_wait\.parity\.shared\.b64 P1, [^;]*;",
        "setp.eq.s32 P1, 0, 0;",
    ),
    "fewer bytes are expected": (HOPPER, r"(mbarrier\.arrive\.expect_tx[^,]*, \[[^]]*\]), %r\d+;", r"\1, 128;"),
    "a store's source is written over": (HOPPER, r"cp\.async\.bulk\.wait_group\.read\s+0;", ""),
    "accumulators begin with what was there": (HOPPER, r"setp\.ne\.b32 p, [^;]*;", "setp.eq.s32 p, 0, 0;"),
    "rows of another swizzle": (HOPPER, r"46116862\d{11}", "-9223371761976868864"),
    "keys beyond the last": (HOPPER, r"(selp\.f32 [^,]*, )(%r\d+), 0fFF800000", r"\1\2, \2"),
    "copies of a thread are not waited for": (AMPERE, r"cp\.async\.wait_group\s+\d+;", ""),
    "no barrier": (AMPERE, r"bar\.sync\s+0;", ""),
    "another fragment": (AMPERE, r"ldmatrix\.sync\.aligned\.m8n8\.x4\.trans", "ldmatrix.sync.aligned.m8n8.x4"),
}


@pytest.fixture
def build_mutant(tmp_path: Path) -> Callable[..., Path]:
    """Return a function for building a pack of a single kernel with optionally changed PTX."""

    def build_pack(kernel: str, pattern: str = "", replacement: str = "") -> Path:
        pack = interpreted_kernels.build(tmp_path, kernel)
        (text,) = pack.with_name(f"{pack.name}.ptx").iterdir()
        changed, count = re.subn(pattern, replacement, text.read_text()) if pattern else (text.read_text(), 1)
        assert count, f"{kernel} has no {pattern}"
        text.write_text(changed)
        return pack

    return build_pack


def run_kernel(pack: Path, kernel: str, seed: int) -> DirectForward:
    """Run a kernel on a small number of SMs with several tiles each, and raise if results are wrong.

    The last tiles extend beyond the ends of the tensors.
    """
    case = new_case("several_tiles", (2, 2, 1), (300, 333), (64, 64), "causal")
    inputs = make_inputs(case, "cpu", 7)
    interpreted_kernels.set_order_seed(pack, seed)
    forward = DirectForward(interpreted_kernels.load_kernel(pack, kernel), case, inputs)
    forward.call()
    exact, low = oracle(case, inputs), plain(case, inputs)
    assert_within_budget(f"{kernel}, seed {seed}", forward.out, exact.out, low.out, seed=7)
    assert_lse(f"{kernel}, seed {seed}", forward.lse, exact.lse, low.lse, seed=7)
    return forward


@pytest.mark.parametrize("kernel", [HOPPER, AMPERE])
def test_execution_orders_give_bitwise_equal_outputs(kernel: str, build_mutant: Callable[..., Path]) -> None:
    pack = build_mutant(kernel)
    reference, *runs = (run_kernel(pack, kernel, seed) for seed in SEEDS)
    for seed, run_with_seed in enumerate(runs, 1):
        assert_bitwise_equal(f"seed {seed}", run_with_seed.out, reference.out)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_interpreter_detects_wrong_kernels(mutant: str, build_mutant: Callable[..., Path]) -> None:
    kernel, pattern, replacement = MUTANTS[mutant]
    pack = build_mutant(kernel, pattern, replacement)
    noticed = []
    for seed in SEEDS:
        try:
            run_kernel(pack, kernel, seed)
        except (RuntimeError, AssertionError) as error:
            noticed.append(error)
    assert noticed, "every order gave right numbers"


def test_unknown_opcode_raises_with_its_ptx_line(build_mutant: Callable[..., Path]) -> None:
    pack = build_mutant(AMPERE, r"ex2\.approx\.ftz\.f32", "ex3.approx.ftz.f32")
    with pytest.raises(RuntimeError, match=r"PTX line \d+: no opcode ex3\.approx\.ftz\.f32"):
        run_kernel(pack, AMPERE, 0)


def test_deadlocked_kernel_raises_with_the_waiting_instruction(build_mutant: Callable[..., Path]) -> None:
    pack = build_mutant(HOPPER, r"cp\.async\.bulk\.tensor\.4d\.shared::cta\.global[^;]*;", "")
    with pytest.raises(RuntimeError, match=r"nothing can go on: \s*CTA 0 .*: mbarrier\.try_wait.*line \d+"):
        run_kernel(pack, HOPPER, 0)
