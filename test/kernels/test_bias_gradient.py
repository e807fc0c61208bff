"""The gradient of a bias by its own kernel, against fp64: whatever it is broadcast to, however it is made, in the same
bits in every run. Interpreted.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from pathlib import Path

import on_cpu
import pytest
import torch
from torch import Tensor

from torch_flashplug import configs
from torch_flashplug.arguments import DBIAS
from torch_flashplug.spec import KernelSpec
from torch_flashplug.testing import (
    Case,
    Masking,
    assert_bitwise_equal,
    assert_within_budget,
    attention_math,
    bias_grad_math,
    make_inputs,
    new_case,
)
from torch_flashplug.testing.budget import GRAD_FACTOR, cancelled_bias_sums
from torch_flashplug.testing.direct import in_order

pytestmark = pytest.mark.interpreted
SEED, CTAS = 20261124, 3
SPECS = {spec.name(): spec for spec in configs.specs(90, "dbias")}
HEADS = (2, 4, 2)  # B, Hq, Hkv
# Which of (B, Hq, Sq, Sk) a bias has.
SHAPES = {
    **{"whole": "bhqk", "over_batch": "hqk", "over_heads": "bqk", "over_both": "qk", "rows": "bhq", "keys": "bhk"},
    **{"keys_of_batch": "bk", "one_row": "k", "one_column": "q", "one_head": "h", "one": ""},
}


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return on_cpu.build(tmp_path_factory.mktemp("dbias"), *SPECS)


def padded(*sizes: int, dtype: torch.dtype, fill: float = math.nan) -> Tensor:
    """Rows of whole 16 bytes."""
    unit = 16 // dtype.itemsize
    return torch.full((*sizes[:-1], -(-sizes[-1] // unit) * unit), fill, dtype=dtype)[..., : sizes[-1]]


def drawn(case: Case, dims: str, dtype: torch.dtype, seed: int = SEED) -> Tensor:
    """Some of it hides a score, or all of a row."""
    sizes = [size if dim in dims else 1 for dim, size in zip("bhqk", (case.B, case.Hq, case.Sq, case.Sk), strict=True)]
    generator = torch.Generator().manual_seed(seed)
    bias = padded(*sizes, dtype=dtype)
    bias.copy_(torch.randn(sizes, generator=generator) * 2)
    bias[torch.rand(sizes, generator=generator) < 0.1] = -math.inf
    if sizes[2] > 70:
        bias[..., 70, :] = -math.inf
    bias[..., -1] = 0.5
    return bias


def expanded(case: Case, bias: Tensor) -> Tensor:
    """(B, Hq, Sq, Sk), as kernels take it."""
    return bias.expand(case.B, case.Hq, case.Sq, bias.shape[3] if case.Sk > bias.shape[3] else case.Sk)


class Direct:
    """One kernel on one problem: call() writes `gradient`, whose neighbours are NaN."""

    def __init__(self, function: Callable[..., None], spec: KernelSpec, case: Case, bias: Tensor):
        inputs = make_inputs(case, "cpu", SEED)
        given = attention_math(*inputs, scale=case.scale, mask=Masking(bias=bias))
        rows = -(-case.Sq // spec.scratch_rows) * spec.scratch_rows
        scale = case.D**-0.5 if case.scale is None else case.scale
        self.gradient = padded(*bias.shape, dtype=bias.dtype)
        wide = "32" * ("bias32" in spec.features)
        whole = bias
        if bias.shape[3] < case.Sk:  # TMA wants rows
            whole = padded(*bias.shape[:3], case.Sk, dtype=bias.dtype).copy_(bias)
        whole = whole.expand(case.B, case.Hq, case.Sq, case.Sk)
        self._counter = torch.zeros(1, dtype=torch.int32)
        values = dict(zip("qkv", inputs, strict=True)) | {"do": inputs.grad_out}
        values |= {"o": given.out.to(case.torch_dtype), "lse": given.lse.float(), "counter": self._counter}
        values |= {"rows": torch.full((case.B, case.Hq, 2, rows), math.nan), "num_ctas": CTAS}
        values |= {"scale_log2": scale * math.log2(math.e), "scale": scale}
        values |= {f"bias{wide}": whole, f"dbias{wide}": self.gradient}
        self._values, self._function = in_order(DBIAS, values), function

    def call(self) -> Tensor:
        self.gradient.fill_(math.nan)
        self._function(*self._values, ctypes.c_void_p(None))
        assert self._counter.item() == 0
        return self.gradient.clone()


def check(pack: Path, spec: KernelSpec, case: Case, dims: str, seed: int = 0) -> Tensor:
    dtype = torch.float32 if "bias32" in spec.features else case.torch_dtype
    bias, inputs = drawn(case, dims, dtype), make_inputs(case, "cpu", SEED)
    on_cpu.seed(pack, seed)
    direct = Direct(on_cpu.function(pack, spec.name()), spec, case, bias)
    found = direct.call()
    exact, low = (
        bias_grad_math(*inputs, inputs.grad_out, scale=case.scale, mask=Masking(bias=bias), dtype=number)
        for number in (torch.float64, case.torch_dtype)
    )
    cancelled = float(cancelled_bias_sums(inputs.v, inputs.grad_out, bias))
    budget = {"factor": GRAD_FACTOR, "cancelled": cancelled}
    assert_within_budget(f"{spec.name()} {case.name} {dims}", found, exact, low, **budget, seed=SEED)
    if "k" in dims:
        assert (found[bias == -math.inf] == 0).all()
    around = direct.gradient.untyped_storage().nbytes() // dtype.itemsize - direct.gradient.numel()
    memory = torch.empty(0, dtype=dtype).set_(direct.gradient.untyped_storage())
    assert memory.isnan().sum() == around
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernel", SPECS)
def test_shapes(pack: Path, kernel: str, shape: str) -> None:
    spec = SPECS[kernel]
    case = new_case(shape, HEADS, (150, 203), (spec.d, spec.d), dtype=spec.dtype)
    check(pack, spec, case, SHAPES[shape])


@pytest.mark.parametrize("sizes", [(1, 1), (1, 300), (300, 1), (63, 65), (65, 63), (129, 129), (300, 333), (128, 256)])
@pytest.mark.parametrize("dims", ["bhqk", "hqk", "qk", "bhk", "hq", ""])
def test_sizes(pack: Path, sizes: tuple[int, int], dims: str) -> None:
    spec = SPECS["dbias_sm90_bf16_d64_bias_m128n128s4"]
    check(pack, spec, new_case(f"{sizes}", (2, 3, 3), sizes, (64, 64)), dims)


@pytest.mark.parametrize("d", [8, 40, 72, 128])
def test_narrow_heads(pack: Path, d: int) -> None:
    spec = SPECS[f"dbias_sm90_fp16_d{64 if d <= 64 else 128}_bias32_m128n64s4"]
    check(pack, spec, new_case(f"narrow {d}", (1, 2, 1), (100, 80), (d, d), dtype="fp16"), "hqk")


@pytest.mark.parametrize("kernel", SPECS)
@pytest.mark.parametrize("dims", ["qk", "k", "q"])
def test_same_bits_in_every_order(pack: Path, kernel: str, dims: str) -> None:
    spec = SPECS[kernel]
    case = new_case("repeated", (2, 4, 2), (300, 200), (spec.d, spec.d), dtype=spec.dtype)
    first, *others = (check(pack, spec, case, dims, seed) for seed in range(4))
    for other in others:
        assert_bitwise_equal(f"{kernel} {dims}", other, first)
