"""What the interpreter makes of kernels that are wrong: tests that run interpreted are worth what it notices. Mutants
are a kernel's own PTX with one thing changed; the kernel itself gives the same bits in whatever order things happen.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import on_cpu
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
# What is changed, in which kernel, and into what.
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
def packed(tmp_path: Path) -> Callable[..., Path]:
    """A pack of one kernel, whose PTX may be changed."""

    def made(kernel: str, pattern: str = "", other: str = "") -> Path:
        pack = on_cpu.build(tmp_path, kernel)
        (text,) = pack.with_name(f"{pack.name}.ptx").iterdir()
        changed, count = re.subn(pattern, other, text.read_text()) if pattern else (text.read_text(), 1)
        assert count, f"{kernel} has no {pattern}"
        text.write_text(changed)
        return pack

    return made


def run(pack: Path, kernel: str, seed: int) -> DirectForward:
    """Several tiles for each of its few SMs, the last ones beyond the tensors' ends; raises where numbers are wrong."""
    case = new_case("several_tiles", (2, 2, 1), (300, 333), (64, 64), "causal")
    inputs = make_inputs(case, "cpu", 7)
    on_cpu.seed(pack, seed)
    forward = DirectForward(on_cpu.function(pack, kernel), case, inputs)
    forward.call()
    exact, low = oracle(case, inputs), plain(case, inputs)
    assert_within_budget(f"{kernel}, seed {seed}", forward.out, exact.out, low.out, seed=7)
    assert_lse(f"{kernel}, seed {seed}", forward.lse, exact.lse, low.lse, seed=7)
    return forward


@pytest.mark.parametrize("kernel", [HOPPER, AMPERE])
def test_orders_give_the_same_bits(kernel: str, packed: Callable[..., Path]) -> None:
    pack = packed(kernel)
    first, *others = (run(pack, kernel, seed) for seed in SEEDS)
    for seed, other in enumerate(others, 1):
        assert_bitwise_equal(f"seed {seed}", other.out, first.out)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_kernel_is_noticed(mutant: str, packed: Callable[..., Path]) -> None:
    kernel, pattern, other = MUTANTS[mutant]
    pack = packed(kernel, pattern, other)
    noticed = []
    for seed in SEEDS:
        try:
            run(pack, kernel, seed)
        except (RuntimeError, AssertionError) as error:
            noticed.append(error)
    assert noticed, "every order gave right numbers"


def test_what_it_does_not_know_is_an_error_with_its_line(packed: Callable[..., Path]) -> None:
    pack = packed(AMPERE, r"ex2\.approx\.ftz\.f32", "ex3.approx.ftz.f32")
    with pytest.raises(RuntimeError, match=r"PTX line \d+: no opcode ex3\.approx\.ftz\.f32"):
        run(pack, AMPERE, 0)


def test_a_kernel_that_waits_for_ever_ends_and_says_where(packed: Callable[..., Path]) -> None:
    pack = packed(HOPPER, r"cp\.async\.bulk\.tensor\.4d\.shared::cta\.global[^;]*;", "")
    with pytest.raises(RuntimeError, match=r"nothing can go on: \s*CTA 0 .*: mbarrier\.try_wait.*line \d+"):
        run(pack, HOPPER, 0)
