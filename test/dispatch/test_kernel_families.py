"""Plans for the kernels of every GPU since sm_80. No GPU; golden tables as in test_plan.py.

The tests cover: kernels within the shared memory of a GPU, calls read element by element, calls selected by auto, and
the family of the backward.
"""

from __future__ import annotations

from collections.abc import Iterator

import expecttest
import pytest
from golden_plans import CALLS, call, operand_dtypes, plans_as_text

from torch_flashplug.api import startup
from torch_flashplug.api.backend import DEVICES, SPLITS_SHIFT
from torch_flashplug.codegen import compiler
from torch_flashplug.dispatch import bindings
from torch_flashplug.registry import dispatch_table, kernel_table
from torch_flashplug.registry.architectures import BACKENDS, TARGETS
from torch_flashplug.registry.dispatch_table import ANY, ChoiceRow
from torch_flashplug.registry.kernel_spec import SMEM_BYTES, KernelSpec
from torch_flashplug.registry.kernel_table import KernelRow

FA3, FA2 = (BACKENDS.index(name) for name in ("fa3", "fa2"))
BOTH = ("fa3", "fa2")
GPUS = {name: DEVICES[name] for name in ("h100", "a100", "l4", "rtx4090")}
# Calls whose tensors vector loads cannot read.
BY_ELEMENT = {
    "head_dim_60": call((1, 8, 8), (512, 512), (60, 64)),
    "head_dim_12_causal": call((1, 8, 8), (512, 512), (12, 12), causal=1),
    "head_dims_250": call((1, 8, 8), (512, 512), (250, 250)),
    "last_stride_2": call((1, 8, 8), (512, 512), (128, 128), last_stride_v=2),
    "misaligned": call((1, 8, 8), (512, 512), (64, 64), align_k=2),
}
REFUSED = {
    "fp32": call((1, 8, 8), (512, 512), (64, 64), **operand_dtypes("fp32")),
    "no_keys": call((1, 8, 8), (512, 0), (64, 64)),
    "two_devices": call((1, 8, 8), (512, 512), (64, 64), on_cuda=0),
    "three_reasons": call((1, 8, 8), (512, 512), (60, 264), dropout_p=1.5, bias=1),
}
# A separate table: vector kernels up to head dim 128 in two sizes, element-wise kernels up to 64, and all backwards.
FORWARDS = (
    KernelRow("fwd", 90, 128, 128, ("full",), 128, 128, 2),
    KernelRow("fwd", 80, 64, 64, ("full",), 64, 64, 1),
    KernelRow("fwd", 80, 128, 128, ("full",), 128, 64, 1),
    KernelRow("fwd", 80, 64, 64, ("full",), 64, 64, 1, 4000, elementwise=True),
)
HOPPER_BACKWARDS = (
    KernelRow("bwd", 90, 128, 128, ("full",), 64, 128, 2),
    KernelRow("detbwd", 90, 128, 128, ("full",), 64, 128, 2),
)
AMPERE_BACKWARDS = (
    KernelRow("bwd", 80, 128, 128, ("full",), 64, 64, 1),
    KernelRow("bwd", 80, 64, 64, ("full",), 64, 64, 1, elementwise=True),
)


def choice_row(operands: str, grad: bool = False) -> ChoiceRow:
    return ChoiceRow("fwd", operands, 80, grad, "full", 1, 256, 0, ANY, 0, ANY, 0, ratio=1.1, measured="test row")


def push_tables(kernels: tuple[KernelRow, ...], rows: tuple[ChoiceRow, ...] = ()) -> None:
    bindings.push_rows(kernels, rows, dispatch_table.COST_MODEL)


@pytest.fixture(autouse=True)
def restored_table() -> Iterator[None]:
    yield
    startup.push_tables()


class TestGolden(expecttest.TestCase):
    def setUp(self) -> None:
        startup.push_tables()

    def test_plans_of_forced_calls_on_each_gpu(self) -> None:
        names = ("prefill_4k_d128_causal", "prefill_16k_d64_fp16", "odd_tail_sq113_sk203_d72", "vision_4k_d72")
        calls = {name: CALLS[name] for name in names} | {"wide_d256": call((1, 16, 16), (4096, 4096), (256, 256))}
        text = plans_as_text(calls, GPUS, FA2, ("fa2",))
        calls = {name: CALLS[name] for name in ("decode_1x8k_d128_gqa4", "decode_b64_1x8k_d128_gqa4")}
        text += plans_as_text(calls, {"a100": DEVICES["a100"]}, FA2, ("fa2",))
        self.assertExpectedInline(
            text,
            """\
prefill_4k_d128_causal
  h100 a100 l4 rtx4090
    fa2 fwd_sm80_bf16_d128_causal_m128n48s1 tiles=2048 splits=1
prefill_16k_d64_fp16
  h100 a100 l4 rtx4090
    fa2 fwd_sm80_fp16_d64_full_m128n96s1 tiles=2048 splits=1
odd_tail_sq113_sk203_d72
  h100 a100 l4 rtx4090
    fa2 fwd_sm80_bf16_d96_full_m64n64s1 tiles=16 splits=1
vision_4k_d72
  h100 a100 l4 rtx4090
    fa2 fwd_sm80_bf16_d96_full_m128n64s1 tiles=2048 splits=1
wide_d256
  h100 a100 l4 rtx4090
    fa2 fwd_sm80_bf16_d256_full_m64n64s1 tiles=1024 splits=1
decode_1x8k_d128_gqa4
  a100
    fa2 decode_sm80_bf16_d128_full_m16n128s1 tiles=8 splits=13
      gate: Sq*G = 1*4 = 4 <= 64: tiles = B*Hkv*ceil(Sq*G/16) = 8 on 108 SMs: splits 13 of 5 blocks
        of 128 keys, 104 CTAs (96 % of the SMs)
decode_b64_1x8k_d128_gqa4
  a100
    fa2 decode_sm80_bf16_d128_full_m16n128s1 tiles=512 splits=1
      gate: Sq*G = 1*4 = 4 <= 64: tiles = B*Hkv*ceil(Sq*G/16) = 512 on 108 SMs: splits 1 of 64
        blocks of 128 keys, 512 CTAs (474 % of the SMs)
""",
        )

    def test_plans_of_forced_elementwise_calls(self) -> None:
        self.assertExpectedInline(
            plans_as_text(BY_ELEMENT, GPUS, FA2, ("fa2",)),
            """\
head_dim_60
  h100 a100 l4 rtx4090
    fa2 fwd_sm80_bf16_d64_full_m64n64s1e tiles=64 splits=1
head_dim_12_causal
  h100 a100 l4 rtx4090
    fa2 fwd_sm80_bf16_d64_causal_m64n64s1e tiles=64 splits=1
head_dims_250
  h100 a100 l4 rtx4090
    fa2 fwd_sm80_bf16_d256_full_m64n64s1e tiles=64 splits=1
last_stride_2
  h100 a100 l4 rtx4090
    fa2 fwd_sm80_bf16_d128_full_m64n64s1e tiles=64 splits=1
misaligned
  h100 a100 l4 rtx4090
    fa2 fwd_sm80_bf16_d64_full_m64n64s1e tiles=64 splits=1
""",
        )

    def test_plans_of_auto_on_each_gpu(self) -> None:
        calls = {"prefill_4k_d128_causal": CALLS["prefill_4k_d128_causal"], "head_dim_60": BY_ELEMENT["head_dim_60"]}
        self.assertExpectedInline(
            plans_as_text(calls, GPUS | {"none": None}, 0, BOTH),
            """\
prefill_4k_d128_causal
  h100
    fa3 fwd_sm90_bf16_d128_causal_m128n128s2 tiles=2048 splits=1
      fwd, causal, D 65 to 128, Sq >= 16: 1.030 x stock (2026-11-21 H100, torch 2.11 + cuDNN 9.19,
        bench --suite choice)
      fa2: fa3 has priority and serves this call.
      gate: Sq*G = 4096*1 = 4096 > 64: not a decode call
  a100
    stock
      fa3: The GPU has compute capability 8.0, but the kernels of this backend need exactly 9.0
        (H100, H200). Stock attention serves this device.
      fa2: The auto mode serves measured calls only, and no GPU of compute capability 8.0 was
        available for measurements. Opt in with TORCH_FLASHPLUG_BACKEND=fa2 or sdpa_backend('fa2').
  l4 rtx4090
    stock
      fa3: The GPU has compute capability 8.9, but the kernels of this backend need exactly 9.0
        (H100, H200). Stock attention serves this device.
      fa2: The auto mode serves measured calls only, and no GPU of compute capability 8.9 was
        available for measurements. Opt in with TORCH_FLASHPLUG_BACKEND=fa2 or sdpa_backend('fa2').
  none
    stock
      fa3: There is no CUDA device. The kernels run on NVIDIA GPUs only.
      fa2: There is no CUDA device. The kernels run on NVIDIA GPUs only.
head_dim_60
  h100
    fa2 fwd_sm80_bf16_d64_full_m64n64s1e tiles=64 splits=1
      fwd, full, D or Dv no multiple of 8, D <= 64, Sq <= 1024, Sk <= 1024: 1.360 x stock
        (2026-11-22 H100, torch 2.11 + cuDNN 9.19, bench --suite odd)
      fa3: query has head dim 60, but the kernels take multiples of 8. Pad the head dim.
      gate: Sq*G = 512*1 = 512 > 64: not a decode call
  a100
    stock
      fa3: The GPU has compute capability 8.0, but the kernels of this backend need exactly 9.0
        (H100, H200). Stock attention serves this device. Also: query has head dim 60, but the
        kernels take multiples of 8. Pad the head dim.
      fa2: The auto mode serves measured calls only, and no GPU of compute capability 8.0 was
        available for measurements. Opt in with TORCH_FLASHPLUG_BACKEND=fa2 or sdpa_backend('fa2').
  l4 rtx4090
    stock
      fa3: The GPU has compute capability 8.9, but the kernels of this backend need exactly 9.0
        (H100, H200). Stock attention serves this device. Also: query has head dim 60, but the
        kernels take multiples of 8. Pad the head dim.
      fa2: The auto mode serves measured calls only, and no GPU of compute capability 8.9 was
        available for measurements. Opt in with TORCH_FLASHPLUG_BACKEND=fa2 or sdpa_backend('fa2').
  none
    stock
      fa3: There is no CUDA device. The kernels run on NVIDIA GPUs only. Also: query has head dim
        60, but the kernels take multiples of 8. Pad the head dim.
      fa2: There is no CUDA device. The kernels run on NVIDIA GPUs only.
""",
        )

    def test_reasons_of_refused_calls_on_each_gpu(self) -> None:
        text = plans_as_text(REFUSED, {"a100": DEVICES["a100"]}, FA2, ("fa2",))
        text += bindings.forced_error(REFUSED["three_reasons"], DEVICES["l4"], FA2) + "\n"
        text += bindings.forced_error(CALLS["encoder_512_d64"], DEVICES["a100"] | {"cc": 75}, FA2) + "\n"
        self.assertExpectedInline(
            text,
            """\
fp32
  a100
    stock
      fa2: query, key and value have dtype float32, but the kernels take bfloat16 or float16. Cast
        the tensors, or use torch.autocast.
no_keys
  a100
    stock
      fa2: A dimension of a tensor is 0. Stock attention handles empty tensors.
two_devices
  a100
    stock
      fa2: The tensors are not all on one CUDA device. Move query, key and value to the same GPU.
three_reasons
  a100
    stock
      fa2: dropout_p must be from 0 to 1, but got 1.5. Pass a valid probability: on a GPU, stock
        attention ends the process with an invalid one. Also: query has head dim 60, but the kernels
        take multiples of 8. Pad the head dim. Also: value has head dim 264, but the kernels take at
        most 256. Stock attention serves larger head dims.
torch_flashplug: backend 'fa2' is forced and cannot run this call (query [1, 8, 512, 60] key [1, 8, 512, 60] value [1, 8, 512, 264] bfloat16 with a bias with dropout):
  - dropout_p must be from 0 to 1, but got 1.5. Pass a valid probability: on a GPU, stock attention ends the process with an invalid one.
  - query has head dim 60, but the kernels take multiples of 8. Pad the head dim.
  - value has head dim 264, but the kernels take at most 128. Stock attention serves larger head dims.
Use sdpa_backend('auto') to let stock attention serve such calls.
torch_flashplug: backend 'fa2' is forced and cannot run this call (query [16, 12, 512, 64] key [16, 12, 512, 64] value [16, 12, 512, 64] bfloat16):
  - The GPU has compute capability 7.5, but the kernels of this backend need 8.0 or more. Stock attention serves this device.
Use sdpa_backend('auto') to let stock attention serve such calls.
""",
        )


# ---- the kernel row ----


def test_planned_kernel_fits_the_shared_memory_of_the_gpu() -> None:
    push_tables(kernel_table.KERNEL_ROWS)
    for device in ("l4", "a100"):
        for d in (*range(1, 9), *range(16, 257, 8)):
            problem = call((1, 8, 8), (1024, 1024), (d, d))
            kernel = KernelSpec.from_name(bindings.plan(problem, DEVICES[device], FA2)["kernel"])
            assert kernel.smem_bytes() <= DEVICES[device]["smem_bytes"], (device, d)
            assert kernel.elementwise == (d % 8 != 0)
    wide = call((1, 8, 8), (4096, 4096), (256, 256))
    with_known_size, with_unknown_size = (
        bindings.plan(wide, DEVICES["a100"] | {"smem_bytes": size}, FA2) for size in (99 << 10, 0)
    )
    assert KernelSpec.from_name(with_known_size["kernel"]).smem_bytes() <= 99 << 10
    assert KernelSpec.from_name(with_unknown_size["kernel"]).smem_bytes() <= SMEM_BYTES[80]
    nothing_fits = bindings.plan(wide, DEVICES["a100"] | {"smem_bytes": 1024}, FA2)
    assert nothing_fits["backend"] == "stock" and "1024 bytes of shared memory" in nothing_fits["reasons"]["fa2"]


def test_layout_is_the_reason_without_elementwise_kernels() -> None:
    push_tables(FORWARDS[:3])
    reasons = {name: bindings.plan(BY_ELEMENT[name], DEVICES["a100"], FA2)["reasons"]["fa2"] for name in BY_ELEMENT}
    for name, part in {"head_dim_60": "multiples of 8", "last_stride_2": "stride 2", "misaligned": "2 bytes"}.items():
        assert part in reasons[name]


def test_elementwise_kernels_do_not_serve_vector_layouts() -> None:
    push_tables(FORWARDS[3:])
    plan = bindings.plan(CALLS["encoder_512_d64"], DEVICES["a100"], FA2)
    assert plan["backend"] == "stock" and "No kernel takes D=64" in plan["reasons"]["fa2"]


def test_sm80_splits_need_a_decode_kernel_and_no_cluster() -> None:
    push_tables(FORWARDS)
    problem, forced = CALLS["decode_1x8k_d128_gqa4"], FA2 | 4 << SPLITS_SHIFT
    assert "num_splits=4" in bindings.plan(problem, DEVICES["h100"], forced)["reasons"]["fa2"]
    decode = KernelRow("decode", 80, 128, 128, ("full",), 64, 64, 1, 500)
    push_tables((*FORWARDS, decode))
    for mode, splits in ((forced, 4), (FA2, 16)):
        plan = bindings.plan(problem, DEVICES["h100"], mode)
        assert (plan["backend"], plan["kernel"]) == ("fa2", decode.specs()[0].name())
        assert (plan["splits"], plan["cluster"]) == (splits, 1)
    push_tables((*FORWARDS, KernelRow("decode", 90, 128, 128, ("full",), 64, 64, 3, 500)))
    assert bindings.plan(problem, DEVICES["h100"], FA3 | 4 << SPLITS_SHIFT)["cluster"] == 4


# ---- auto ----


def test_auto_selects_fa2_only_on_measured_hopper_gpus() -> None:
    odd, plain = BY_ELEMENT["head_dim_60"], CALLS["encoder_512_d64"]
    push_tables(FORWARDS, (choice_row("odd_dims"), choice_row("vectors")))
    plan = bindings.plan(odd, DEVICES["h100"])
    assert (plan["backend"], plan["kernel"]) == ("fa2", FORWARDS[3].specs()[0].name())
    assert "head dim 60" in plan["reasons"]["fa3"] and "fa2 has priority" in plan["reasons"]["stock"]
    assert plan["row"].startswith("fwd, full, D or Dv no multiple of 8")
    assert bindings.plan(plain, DEVICES["h100"])["kernel"] == FORWARDS[1].specs()[0].name()  # there is no row for fa3
    for device in ("a100", "l4", "rtx4090"):
        plan = bindings.plan(odd, DEVICES[device])
        assert plan["backend"] == "stock" and "TORCH_FLASHPLUG_BACKEND=fa2" in plan["reasons"]["fa2"]
    push_tables(FORWARDS, ())
    plan = bindings.plan(odd, DEVICES["h100"])
    assert plan["backend"] == "stock" and "Force a kernel with sdpa_backend('fa2')" in plan["reasons"]["fa2"]


@pytest.mark.parametrize(
    "name, kind", [("head_dim_60", "odd_dims"), ("last_stride_2", "strided"), ("misaligned", "unaligned")]
)
def test_elementwise_layout_classes_have_separate_rows(name, kind) -> None:
    for measured in ("odd_dims", "strided", "unaligned", "vectors"):
        push_tables(kernel_table.KERNEL_ROWS, (choice_row(measured),))
        plan = bindings.plan(BY_ELEMENT[name], DEVICES["h100"])
        assert plan["backend"] == ("fa2" if measured == kind else "stock"), measured


def test_fa3_has_priority_over_fa2() -> None:
    hopper = ChoiceRow("fwd", "vectors", 90, False, "full", 1, 256, 0, ANY, 0, ANY, 0, ratio=1.1, measured="test row")
    push_tables(FORWARDS, (choice_row("vectors"), hopper))
    plan = bindings.plan(CALLS["encoder_512_d64"], DEVICES["h100"])
    assert plan["backend"] == "fa3" and "fa3 has priority" in plan["reasons"]["fa2"]
    forced = bindings.plan(CALLS["encoder_512_d64"], DEVICES["h100"], FA2)
    assert forced["backend"] == "fa2" and forced["reasons"]["fa3"] == "fa2 is forced."


# ---- asked for by the whole process ----


def test_preference_overrides_rows_and_falls_back_to_stock() -> None:
    push_tables(FORWARDS, ())
    for device in ("h100", "a100", "l4"):
        assert bindings.plan(CALLS["encoder_512_d64"], DEVICES[device], FA2 | bindings.PREFERENCE)["backend"] == "fa2"
    masked = CALLS["encoder_512_d64"] | {"mask": 1}
    plan = bindings.plan(masked, DEVICES["a100"], FA2 | bindings.PREFERENCE)
    assert plan["backend"] == "stock" and "attn_mask is given" in plan["reasons"]["fa2"]
    hopper_alone = bindings.plan(CALLS["encoder_512_d64"], DEVICES["a100"], FA3 | bindings.PREFERENCE)
    assert hopper_alone["backend"] == "stock" and "9.0" in hopper_alone["reasons"]["fa3"]


def test_preference_keeps_gradients_deterministic() -> None:
    """The table has no deterministic backward kernel, so a nondeterministic backward of stock would follow."""
    push_tables(FORWARDS + AMPERE_BACKWARDS)
    assert bindings.plan(ORDERED, DEVICES["a100"], FA2)["backend"] == "fa2"
    plan = bindings.plan(ORDERED, DEVICES["a100"], FA2 | bindings.PREFERENCE)
    assert plan["backend"] == "stock" and "use_deterministic_algorithms" in plan["reasons"]["fa2"]


def test_preference_falls_back_to_stock_without_a_backward_kernel() -> None:
    """No element-wise backward holds 130 columns on devices with 99 KB of shared memory."""
    push_tables(kernel_table.KERNEL_ROWS)
    wide = call((1, 32, 32), (4096, 4096), (130, 130), grad=1)
    plan = bindings.plan(wide, DEVICES["l4"], FA2 | bindings.PREFERENCE)
    assert plan["backend"] == "stock" and "no backward kernel takes this call" in plan["reasons"]["fa2"]
    for device, problem in (("l4", wide | {"grad": 0}), ("a100", wide)):
        assert bindings.plan(problem, DEVICES[device], FA2 | bindings.PREFERENCE)["backend"] == "fa2"


# ---- gradients ----

PLAIN = call((4, 8, 8), (1024, 1024), (128, 128), grad=1)
ODD = call((4, 8, 8), (1024, 1024), (60, 60), grad=1)
ORDERED = PLAIN | {"deterministic": 1}


@pytest.mark.parametrize(
    "problem, device, mode, backwards, kernel",
    [
        (PLAIN, "h100", FA2, HOPPER_BACKWARDS, HOPPER_BACKWARDS[0]),  # while the table has no sm_80 backward
        (PLAIN, "h100", FA2, HOPPER_BACKWARDS + AMPERE_BACKWARDS, AMPERE_BACKWARDS[0]),
        (PLAIN, "h100", FA3, HOPPER_BACKWARDS + AMPERE_BACKWARDS, HOPPER_BACKWARDS[0]),
        (PLAIN, "a100", FA2, HOPPER_BACKWARDS + AMPERE_BACKWARDS, AMPERE_BACKWARDS[0]),
        (PLAIN, "a100", FA2, HOPPER_BACKWARDS, None),
        (ODD, "h100", FA2, HOPPER_BACKWARDS + AMPERE_BACKWARDS, AMPERE_BACKWARDS[1]),
        (ODD, "h100", FA2, HOPPER_BACKWARDS, None),
        (ODD, "l4", FA2, HOPPER_BACKWARDS + AMPERE_BACKWARDS, AMPERE_BACKWARDS[1]),
        (ORDERED, "a100", FA2, HOPPER_BACKWARDS + AMPERE_BACKWARDS, None),  # the sm_80 backwards are not deterministic
        (ORDERED, "h100", FA2, HOPPER_BACKWARDS + AMPERE_BACKWARDS, HOPPER_BACKWARDS[1]),
    ],
)
def test_backward_follows_the_family_of_the_forward(problem, device, mode, backwards, kernel) -> None:
    push_tables(FORWARDS + backwards)
    plan = bindings.plan(problem, DEVICES[device], mode)
    assert plan["backend"] == BACKENDS[mode]
    if kernel is None:
        follows = "math" if problem is ODD else "efficient"  # efficient attention reads no rows of 60 columns
        assert plan["gradients"].startswith(f"The {follows} backward of stock follows. The reason: No kernel")
    else:
        assert plan["gradients"] == kernel.specs()[0].name()


def test_elementwise_gradients_need_rows_for_both_directions() -> None:
    push_tables(FORWARDS + HOPPER_BACKWARDS + AMPERE_BACKWARDS, (choice_row("odd_dims", grad=True),))
    plan = bindings.plan(ODD, DEVICES["h100"])
    assert plan["backend"] == "fa2" and plan["gradients"].startswith(AMPERE_BACKWARDS[1].specs()[0].name())
    ordered = bindings.plan(ODD | {"deterministic": 1}, DEVICES["h100"])
    assert ordered["backend"] == "stock" and "deterministic" in ordered["reasons"]["fa2"]


# ---- targets of GPUs ----


@pytest.mark.parametrize(
    "cc, target", [(80, "sm_80"), (86, "sm_80"), (89, "sm_80"), (90, "sm_90a"), (100, "sm_100"), (120, "sm_120")]
)
def test_compute_capability_maps_to_a_target(cc, target):
    assert compiler.target_of(cc) == target


@pytest.mark.parametrize("cc", [75, 110])
def test_gpu_without_a_target_raises(cc):
    with pytest.raises(
        ValueError, match=rf"sm_80, sm_90a.*, but the GPU has compute capability {cc // 10}\.{cc % 10}$"
    ):
        compiler.target_of(cc)


def test_target_compiles_only_kernels_of_its_architectures() -> None:
    hopper, ampere = (kernel_table.specs(arch)[0] for arch in (90, 80))
    with pytest.raises(ValueError, match=r"fwd_sm90_.*: sm_80 runs kernels that are written for sm_80"):
        compiler.compile_spec(hopper, "sm_80")
    with pytest.raises(ValueError, match="target must be one of sm_80, .*, but got 'sm_75'"):
        compiler.compile_spec(ampere, "sm_75")


def test_cache_key_contains_the_target() -> None:
    pytest.importorskip("cutlass", reason="the key names the compiler's version")
    ampere = kernel_table.specs(80)[0]
    assert len({compiler.key(ampere, target) for target in TARGETS}) == len(TARGETS)
