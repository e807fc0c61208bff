"""The gradient of a bias against fp64, whatever it is broadcast to, in the same bits in every run: the kernel alone,
interpreted, and through F.sdpa, on a GPU or interpreted, under the bias's own sizes and strides.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from pathlib import Path

import on_cpu
import pytest
import torch
import torch.nn.functional as F
from splits import planned
from torch import Tensor

import torch_flashplug
from torch_flashplug.dispatch import bindings
from torch_flashplug.ops import dropout_reference
from torch_flashplug.registry import kernel_table
from torch_flashplug.registry.dtypes import WHOLE
from torch_flashplug.registry.kernel_args import DBIAS
from torch_flashplug.registry.kernel_spec import KernelSpec
from torch_flashplug.testing import (
    Case,
    Masking,
    assert_bitwise_equal,
    assert_within_budget,
    attention_math,
    bias_grad_math,
    make_inputs,
    new_case,
    oracle_grads,
    plain_grads,
)
from torch_flashplug.testing.budget import GRAD_FACTOR, cancelled_bias_sums, cancelled_sums
from torch_flashplug.testing.direct import in_order

SEED, CTAS, DROPOUT_P = 20261124, 3, 0.3
SPECS = {spec.name(): spec for spec in kernel_table.specs(90, "dbias")}
HEADS = (2, 4, 2)  # B, Hq, Hkv
NAMES = ("dq", "dk", "dv")
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


def masking(spec: KernelSpec, case: Case, bias: Tensor) -> Masking:
    """With what a kernel drops."""
    if "dropout" not in spec.features:
        return Masking(bias=bias)
    kept = dropout_reference.dropout_mask(torch.tensor(SEED), case.B, case.Hq, case.Sq, case.Sk, DROPOUT_P)
    return Masking(bias=bias, kept=kept, kept_share=dropout_reference.share_of(DROPOUT_P))


class Direct:
    """One kernel on one problem: call() writes `gradient`, whose neighbours are NaN."""

    def __init__(self, function: Callable[..., None], spec: KernelSpec, case: Case, bias: Tensor):
        inputs = make_inputs(case, "cpu", SEED)
        given = attention_math(*inputs, scale=case.scale, mask=masking(spec, case, bias))
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
        if "dropout" in spec.features:
            values |= {"seed": torch.tensor([SEED]), "dropout_p": DROPOUT_P}
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
        bias_grad_math(*inputs, inputs.grad_out, scale=case.scale, mask=masking(spec, case, bias), dtype=number)
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


# ---- the kernel alone ----


@pytest.mark.interpreted
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernel", SPECS)
def test_shapes(pack: Path, kernel: str, shape: str) -> None:
    spec = SPECS[kernel]
    case = new_case(shape, HEADS, (150, 203), (spec.d, spec.d), dtype=spec.dtype)
    check(pack, spec, case, SHAPES[shape])


@pytest.mark.interpreted
@pytest.mark.parametrize("sizes", [(1, 1), (1, 300), (300, 1), (63, 65), (65, 63), (129, 129), (300, 333), (128, 256)])
@pytest.mark.parametrize("dims", ["bhqk", "hqk", "qk", "bhk", "hq", ""])
def test_sizes(pack: Path, sizes: tuple[int, int], dims: str) -> None:
    spec = SPECS["dbias_sm90_bf16_d64_bias_m128n128s4"]
    check(pack, spec, new_case(f"{sizes}", (2, 3, 3), sizes, (64, 64)), dims)


@pytest.mark.interpreted
@pytest.mark.parametrize("d", [8, 40, 72, 128])
def test_narrow_heads(pack: Path, d: int) -> None:
    spec = SPECS[f"dbias_sm90_fp16_d{64 if d <= 64 else 128}_bias32_m128n64s4"]
    check(pack, spec, new_case(f"narrow {d}", (1, 2, 1), (100, 80), (d, d), dtype="fp16"), "hqk")


@pytest.mark.interpreted
@pytest.mark.parametrize("kernel", SPECS)
@pytest.mark.parametrize("dims", ["qk", "k", "q"])
def test_same_bits_in_every_order(pack: Path, kernel: str, dims: str) -> None:
    spec = SPECS[kernel]
    case = new_case("repeated", (2, 4, 2), (300, 200), (spec.d, spec.d), dtype=spec.dtype)
    first, *others = (check(pack, spec, case, dims, seed) for seed in range(4))
    for other in others:
        assert_bitwise_equal(f"{kernel} {dims}", other, first)


# ---- through F.sdpa ----


def normal(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(SEED)) * 2


# What may stand in the place of (B, Hq, Sq, Sk), for 300 rows and 333 keys; what it is cast to keeps its strides.
BIASES: dict[str, Callable[[], Tensor]] = {
    "by_both": lambda: normal(2, 4, 300, 333),
    "by_batch": lambda: normal(2, 1, 300, 333),
    "by_head": lambda: normal(4, 300, 333),
    "for_all": lambda: normal(300, 333),
    "keys": lambda: normal(2, 1, 1, 333),
    "keys_of_all": lambda: normal(1, 333),
    "rows": lambda: normal(2, 4, 300, 1),
    "head": lambda: normal(4, 1, 1),
    "one": lambda: normal(1, 1),
    "heads_innermost": lambda: normal(300, 333, 4).permute(2, 0, 1)[None],
    "transposed": lambda: normal(333, 300).mT,
    "odd_offset": lambda: normal(300, 344)[:, 7:340],
    "padded": lambda: normal(1, 4, 300, 336)[..., :333],
}  # fmt: skip


def laid_out(bias: Tensor, device: str, dtype: torch.dtype) -> Tensor:
    """The same strides and offset, of another dtype; some of it, and a row, hides."""
    bias = torch.empty(0, dtype=bias.dtype).set_(bias.untyped_storage()).as_strided(bias.shape, bias.stride(), 0)
    bias[torch.rand(bias.shape, generator=torch.Generator().manual_seed(SEED)) < 0.1] = -math.inf
    if bias.shape[-2] > 70:
        bias[..., 70, :] = -math.inf
    memory = torch.empty(0, dtype=bias.dtype).set_(bias.untyped_storage()).to(device, dtype)
    return memory.as_strided(bias.size(), bias.stride(), bias.storage_offset())


def dtype_of(case: Case, wide: bool) -> torch.dtype:
    return torch.float32 if wide else case.torch_dtype


def check_all(case: Case, bias: Tensor, device: str, *, wanted: str = "qkvb", given: Tensor | None = None) -> Tensor:
    """Gradients of those that are wanted, by a backward of ours; that of the bias. given: what F.sdpa gets of it."""
    inputs = make_inputs(case, device, SEED)
    leaves = [(bias if name == "b" else getattr(inputs, name)).requires_grad_() for name in wanted]
    bindings.counters(reset=True)
    with torch_flashplug.sdpa_backend("fa3"):
        mask = bias if given is None else given
        out = F.scaled_dot_product_attention(*inputs, attn_mask=mask, enable_gqa=case.gqa, scale=case.scale)
        found = dict(zip(wanted, torch.autograd.grad(out, leaves, inputs.grad_out), strict=True))
    counts = bindings.counters()
    assert counts["ours_fwd"] == counts["ours_bwd"] == 1
    rule, dbias = Masking(bias=bias.detach()), found.pop("b")
    exact, low = (dict(zip(NAMES, of(case, inputs, rule), strict=True)) for of in (oracle_grads, plain_grads))
    cancelled = cancelled_sums(*inputs, inputs.grad_out, case.scale)
    for name, got in ((f"d{one}", gradient) for one, gradient in found.items()):
        budget = {"factor": GRAD_FACTOR, "cancelled": float(cancelled[name])}
        assert_within_budget(f"{case.name} {name}", got, exact[name], low[name], **budget, seed=SEED)
    right, yardstick = (
        bias_grad_math(*inputs, inputs.grad_out, scale=case.scale, mask=rule, dtype=dtype)
        for dtype in (torch.float64, case.torch_dtype)
    )
    budget = {"factor": GRAD_FACTOR, "cancelled": float(cancelled_bias_sums(inputs.v, inputs.grad_out, bias))}
    assert_within_budget(f"{case.name} dbias", dbias, right, yardstick, **budget, seed=SEED)
    if given is None:
        assert dbias.stride() == torch.empty_like(bias).stride()
    return dbias


@pytest.mark.parametrize("wide", [False, True], ids=["16", "fp32"])
@pytest.mark.parametrize("bias", BIASES)
def test_biases(kernels_on: str, bias: str, wide: bool) -> None:
    case = new_case(f"{bias} {wide}", HEADS, (300, 333), (64, 64), dtype=WHOLE[len(bias) % 2])
    given = laid_out(BIASES[bias](), kernels_on, dtype_of(case, wide))
    first = check_all(case, given, kernels_on)
    assert_bitwise_equal(case.name, check_all(case, given, kernels_on), first)


@pytest.mark.parametrize("spec", [s for s in SPECS.values() if "dropout" not in s.features], ids=KernelSpec.name)
def test_every_kernel(kernels_on: str, spec: KernelSpec) -> None:
    """Beside a backward, and alone."""
    wide = "bias32" in spec.features
    case = new_case(spec.name(), (2, 2, 1), (200, 333), (spec.d, spec.d), dtype=spec.dtype)
    facts = {"bias32" if wide else "bias": 1, "grad": 1, "bias_grad": 1}
    assert spec.name() in planned(case, backend="fa3", **facts)["gradients"]
    given = laid_out(normal(200, 333), kernels_on, dtype_of(case, wide))
    for wanted in ("qkvb", "b"):
        check_all(case, given, kernels_on, wanted=wanted)


@pytest.mark.parametrize("wanted", ["b", "qb", "kb", "vb"])
@pytest.mark.parametrize("bias", ["for_all", "heads_innermost"])
def test_some_gradients(kernels_on: str, wanted: str, bias: str) -> None:
    case = new_case(f"{wanted} {bias}", HEADS, (300, 333), (128, 128))
    check_all(case, laid_out(BIASES[bias](), kernels_on, case.torch_dtype), kernels_on, wanted=wanted)


@pytest.mark.parametrize("sizes", [(1, 1), (1, 300), (300, 1), (63, 65), (65, 63), (129, 65)])
@pytest.mark.parametrize("planes", [(), (3,), (2, 1)])
def test_sizes_of_calls(kernels_on: str, sizes: tuple[int, int], planes: tuple[int, ...]) -> None:
    case = new_case(f"sizes {sizes} {planes}", (2, 3, 3), sizes, (64, 64))
    check_all(case, normal(*planes, *sizes).to(kernels_on, case.torch_dtype), kernels_on)


@pytest.mark.parametrize("scale", [0.0, -0.5, 3.0])
def test_scales(kernels_on: str, scale: float) -> None:
    case = new_case("scales", (2, 2, 2), (70, 136), (64, 64), scale=scale)
    check_all(case, normal(70, 136).to(kernels_on, case.torch_dtype), kernels_on)


@pytest.mark.parametrize("wide", [False, True], ids=["16", "fp32"])
@pytest.mark.parametrize("keys", [49, 250, 251])
def test_rows_at_any_address(kernels_on: str, keys: int, wide: bool) -> None:
    """The gradient is written as it lies: nothing is copied, and nothing beside it is written."""
    case = new_case(f"rows of {keys}", (2, 4, 4), (129, keys), (64, 64))
    bias = normal(4, 129, keys).to(kernels_on, dtype_of(case, wide))
    check_all(case, bias, kernels_on)
    inputs = make_inputs(case, kernels_on, SEED)
    with torch_flashplug.sdpa_backend("fa3"):
        out = F.scaled_dot_product_attention(*inputs, attn_mask=bias.requires_grad_())
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            torch.autograd.grad(out, bias, inputs.grad_out)
    assert "aten::copy_" not in {event.key for event in profile.key_averages()}


def test_an_expanded_bias(kernels_on: str) -> None:
    """Whose own gradient autograd sums from that of its view."""
    case = new_case("expanded", HEADS, (150, 133), (64, 64), dtype="fp16")
    bias = normal(1, 4, 150, 133).to(kernels_on, case.torch_dtype).requires_grad_()
    check_all(case, bias, kernels_on, given=bias.expand(2, 4, 150, 133))


def largest_allocation(work: Callable[[], object]) -> int:
    """In bytes, on the CPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    events = profile.profiler.kineto_results.events()
    return max(event.nbytes() for event in events if event.name() == "[memory]")


@pytest.mark.parametrize("bias", ["for_all", "keys_of_all", "heads_innermost"])
def test_memory_is_of_the_size_of_the_bias(kernels_on: str, bias: str) -> None:
    """Of broadcast ones nothing has a place for every score."""
    case = new_case("memory", (8, 4, 4), (300, 333), (64, 64))
    given = laid_out(BIASES[bias](), kernels_on, case.torch_dtype).requires_grad_()
    inputs = make_inputs(case, kernels_on, SEED)
    with torch_flashplug.sdpa_backend("fa3"):
        out = F.scaled_dot_product_attention(*inputs, attn_mask=given)

        def backward() -> None:
            bindings.counters(reset=True)
            torch.autograd.grad(out, given, inputs.grad_out)
            assert bindings.counters()["ours_bwd"] == 1

        if kernels_on == "cpu":
            taken = largest_allocation(backward)
        else:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            backward()
            taken = torch.cuda.max_memory_allocated() - before
    scores = case.B * case.Hq * case.Sq * case.Sk * case.torch_dtype.itemsize
    assert taken < scores / 2


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("bias", ["for_all", "heads_innermost", "keys"])
def test_graphs_have_the_same_bits_and_strides(kernels_on: str, bias: str) -> None:
    case = new_case(f"graph {bias}", HEADS, (300, 333), (64, 64))
    given = laid_out(BIASES[bias](), kernels_on, case.torch_dtype).requires_grad_()
    inputs = make_inputs(case, kernels_on, SEED)
    leaves = [tensor.requires_grad_() for tensor in (*inputs, given)]

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    found = []
    with torch_flashplug.sdpa_backend("fa3"):
        for run in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
            bindings.counters(reset=True)
            found.append(torch.autograd.grad(run(*leaves), leaves, inputs.grad_out)[3])
            assert bindings.counters()["ours_bwd"] == 1
    assert_bitwise_equal(case.name, found[1], found[0])
    assert found[1].stride() == found[0].stride() == torch.empty_like(given).stride()
