"""Golden tables of the dispatch rule: named calls x devices -> plan or reasons. No GPU; device facts are a value.

A change of the rule or the table shows as a diff here. After reading the diff, run:

    EXPECTTEST_ACCEPT=1 pytest test/dispatch/test_plan.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import expecttest
import pytest
from golden_plans import CALLS, call, operand_dtypes, plans_as_text

from torch_flashplug.api import startup
from torch_flashplug.api.backend import DEVICES
from torch_flashplug.dispatch import bindings
from torch_flashplug.dispatch.table_structs import DTYPE_IDS
from torch_flashplug.registry import dispatch_table, kernel_table
from torch_flashplug.registry.architectures import BACKENDS
from torch_flashplug.registry.dispatch_table import ANY, ChoiceRow
from torch_flashplug.registry.dtypes import DTYPE_INFO, KERNEL_DTYPES, elements_of
from torch_flashplug.registry.kernel_spec import KernelSpec
from torch_flashplug.registry.kernel_table import KernelRow

FACTS = {**DEVICES, "none": None}
# Calls that kernels cannot run, independent of the table.
REFUSED = {
    "fp32": call((1, 8, 8), (512, 512), (64, 64), **operand_dtypes("fp32")),
    "mixed_dtypes": call((1, 8, 8), (512, 512), (64, 64), **operand_dtypes("bf16", "fp16", "bf16")),
    "mask": call((1, 8, 8), (512, 512), (64, 64), mask=1),
    "dropout": call((1, 8, 8), (512, 512), (64, 64), dropout_p=0.1),
    "window": call((1, 8, 8), (512, 1024), (64, 64), window=1),
    "no_keys": call((1, 8, 8), (512, 0), (64, 64)),
    "head_dim_60": call((1, 8, 8), (512, 512), (60, 64)),
    "head_dim_256": call((1, 8, 8), (512, 512), (256, 256)),
    "last_stride_2": call((1, 8, 8), (512, 512), (64, 64), last_stride_v=2),
    "misaligned": call((1, 8, 8), (512, 512), (64, 64), align_k=2),
    "two_devices": call((1, 8, 8), (512, 512), (64, 64), on_cuda=0),
    "deterministic_grad": call((4, 16, 16), (4096, 4096), (64, 64), grad=1, deterministic=1),
    "three_reasons": call((1, 8, 8), (512, 512), (60, 264), dropout_p=0.5),
}
# A separate table for the rule itself, so that a new tuning does not change the golden table.
KERNELS = (
    KernelRow("fwd", 90, 64, 64, ("full",), 128, 128, 2),
    KernelRow("fwd", 90, 128, 128, ("full",), 128, 128, 2),
    KernelRow("fwd", 90, 128, 128, ("causal",), 128, 128, 2),
    KernelRow("decode", 90, 128, 128, ("full",), 64, 64, 2, 500),
    KernelRow("bwd", 90, 64, 64, ("full",), 64, 128, 4),
)
CHOICES = (
    ChoiceRow("fwd", "vectors", 90, False, "full", 8, 64, 0, 255, 0, ANY, 0, ratio=0.8, measured="test row: short"),
    ChoiceRow("fwd", "vectors", 90, False, "full", 8, 128, 0, ANY, 0, ANY, 0, ratio=1.1, measured="test row: full"),
    ChoiceRow(
        "fwd", "vectors", 90, False, "causal", 8, 128, 0, ANY, 0, ANY, 132, ratio=1.2, measured="test row: causal"
    ),
    ChoiceRow("fwd", "square", 90, True, "full", 8, 64, 0, ANY, 0, ANY, 0, ratio=1.0, measured="test row: grad"),
    ChoiceRow("decode", "square", 90, False, "full", 8, 128, 0, ANY, 0, ANY, 0, 1.0, "test row: decode", max_packed=32),
)


def push_tables(kernels: tuple[KernelRow, ...], rows: tuple[ChoiceRow, ...]) -> None:
    bindings.push_rows(kernels, rows, dispatch_table.COST_MODEL)


@pytest.fixture(autouse=True)
def own_table() -> Iterator[None]:
    startup.push_tables()
    yield
    startup.push_tables()


class TestGolden(expecttest.TestCase):
    def test_plans_of_the_current_table(self) -> None:
        self.assertExpectedInline(
            plans_as_text(CALLS, {"h100": DEVICES["h100"]}),
            """\
train_4k_d128_causal
  h100
    fa3 fwd_sm90_bf16_d128_causal_m128n128s2 tiles=2048 splits=1
      fwd, causal, D = Dv, gradients, D 65 to 128, Sq >= 16: 0.977 x stock (2026-11-22 H100, torch
        2.11 + cuDNN 9.19, bench --suite grad)
      gradients: bwd_sm90_bf16_d128_causal_m64n128s2
      gate: Sq*G = 4096*1 = 4096 > 64: not a decode call
train_4k_d192v128_causal
  h100
    stock
      fwd, causal, D != Dv, gradients, D 129 to 192, Sq >= 2049: 0.880 x stock (2026-11-29 H200,
        torch 2.11 + cuDNN 9.19, bench --suite grad, cells of the row)
      fa3: Such calls were measured at 0.880 x the speed of stock attention, below the serve ratio
        of the dispatch table. Stock attention is faster.
      gate: Sq*G = 4096*1 = 4096 > 64: not a decode call
prefill_4k_d128_causal
  h100
    fa3 fwd_sm90_bf16_d128_causal_m128n128s2 tiles=2048 splits=1
      fwd, causal, D 65 to 128, Sq >= 16: 1.030 x stock (2026-11-21 H100, torch 2.11 + cuDNN 9.19,
        bench --suite choice)
      gate: Sq*G = 4096*1 = 4096 > 64: not a decode call
encoder_512_d64
  h100
    fa3 fwd_sm90_bf16_d64_full_m192n128s2 tiles=576 splits=1
      fwd, full, D <= 64, Sq >= 16: 0.977 x stock (2026-11-21 H100, torch 2.11 + cuDNN 9.19, bench
        --suite choice)
      gate: Sq*G = 512*1 = 512 > 64: not a decode call
prefill_16k_d64_fp16
  h100
    fa3 fwd_sm90_fp16_d64_full_m192n128s2 tiles=1376 splits=1
      fwd, full, D <= 64, Sq >= 16: 0.977 x stock (2026-11-21 H100, torch 2.11 + cuDNN 9.19, bench
        --suite choice)
      gate: Sq*G = 16384*1 = 16384 > 64: not a decode call
one_small_tile
  h100
    fa3 decode_sm90_bf16_d64_full_m64n64s4 tiles=1 splits=1
      decode, full, D = Dv, D 57 to 64: 1.030 x stock (2026-11-22 H100, torch 2.11 + cuDNN 9.19,
        bench --suite decode)
      gate: Sq*G = 64*1 = 64 <= 64: tiles = B*Hkv*ceil(Sq*G/64) = 1 on 132 SMs: splits 1 of 1 blocks
        of 64 keys, 1 CTAs (0 % of the SMs)
odd_tail_sq113_sk203_d72
  h100
    fa3 fwd_sm90_bf16_d128_full_m64n128s2 tiles=16 splits=1
      fwd, full, D 65 to 128, Sq >= 16: 1.000 x stock (2026-11-21 H100, torch 2.11 + cuDNN 9.19,
        bench --suite choice)
      gate: Sq*G = 113*1 = 113 > 64, <= 256: about 7.434 us with packed rows, 3.747 us without: not
        a decode call
vision_4k_d72
  h100
    fa3 fwd_sm90_bf16_d96_full_m192n112s2 tiles=1408 splits=1
      fwd, full, D 65 to 128, Sq >= 16: 1.000 x stock (2026-11-21 H100, torch 2.11 + cuDNN 9.19,
        bench --suite choice)
      gate: Sq*G = 4096*1 = 4096 > 64: not a decode call
decode_1x8k_d128_gqa4
  h100
    fa3 decode_sm90_bf16_d128_full_m64n64s3 tiles=8 splits=16
      decode, full, D = Dv, D 121 to 128: 0.995 x stock (2026-11-22 H100, torch 2.11 + cuDNN 9.19,
        bench --suite decode)
      gate: Sq*G = 1*4 = 4 <= 64: tiles = B*Hkv*ceil(Sq*G/64) = 8 on 132 SMs: splits 16 of 8 blocks
        of 64 keys, 128 CTAs (96 % of the SMs)
decode_b64_1x8k_d128_gqa4
  h100
    fa3 decode_sm90_bf16_d128_full_m64n64s3 tiles=512 splits=1
      decode, full, D = Dv, D 121 to 128: 0.995 x stock (2026-11-22 H100, torch 2.11 + cuDNN 9.19,
        bench --suite decode)
      gate: Sq*G = 1*4 = 4 <= 64: tiles = B*Hkv*ceil(Sq*G/64) = 512 on 132 SMs: splits 1 of 128
        blocks of 64 keys, 512 CTAs (387 % of the SMs)
""",
        )

    def test_plans_of_the_rule_with_a_fixed_table(self) -> None:
        push_tables(KERNELS, CHOICES)
        self.assertExpectedInline(
            plans_as_text(CALLS, {"h100": DEVICES["h100"]}),
            """\
train_4k_d128_causal
  h100
    stock
      fa3: The call needs gradients, and no backward kernel takes this call on this GPU. Stock
        attention serves both forward and backward.
train_4k_d192v128_causal
  h100
    stock
      fa3: query has head dim 192, but the kernels take at most 128. Stock attention serves larger
        head dims.
prefill_4k_d128_causal
  h100
    fa3 fwd_sm90_bf16_d128_causal_m128n128s2 tiles=2048 splits=1
      fwd, causal, D 8 to 128, tiles >= 132: 1.200 x stock (test row: causal)
      gate: Sq*G = 4096*1 = 4096 > 64: not a decode call
encoder_512_d64
  h100
    fa3 fwd_sm90_bf16_d64_full_m128n128s2 tiles=768 splits=1
      fwd, full, D 8 to 128: 1.100 x stock (test row: full)
      gate: Sq*G = 512*1 = 512 > 64: not a decode call
prefill_16k_d64_fp16
  h100
    fa3 fwd_sm90_fp16_d64_full_m128n128s2 tiles=2048 splits=1
      fwd, full, D 8 to 128: 1.100 x stock (test row: full)
      gate: Sq*G = 16384*1 = 16384 > 64: not a decode call
one_small_tile
  h100
    stock
      fa3: No measured entry covers this call (compute capability 9.0, no grad): the nearest entry
        needs packed rows <= 32 (here 64). The auto mode serves measured calls only. Force a kernel
        with sdpa_backend('fa3').
      gate: Sq*G = 64*1 = 64 <= 64: tiles = B*Hkv*ceil(Sq*G/64) = 1 on 132 SMs: splits 1 of 1 blocks
        of 64 keys, 1 CTAs (0 % of the SMs)
odd_tail_sq113_sk203_d72
  h100
    fa3 fwd_sm90_bf16_d128_full_m128n128s2 tiles=8 splits=1
      fwd, full, D 8 to 128: 1.100 x stock (test row: full)
      gate: Sq*G = 113*1 = 113 > 64, <= 256: about 6.823 us with packed rows, 3.000 us without: not
        a decode call
vision_4k_d72
  h100
    fa3 fwd_sm90_bf16_d128_full_m128n128s2 tiles=2048 splits=1
      fwd, full, D 8 to 128: 1.100 x stock (test row: full)
      gate: Sq*G = 4096*1 = 4096 > 64: not a decode call
decode_1x8k_d128_gqa4
  h100
    fa3 decode_sm90_bf16_d128_full_m64n64s2 tiles=8 splits=16
      decode, full, D = Dv, D 8 to 128, packed rows <= 32: 1.000 x stock (test row: decode)
      gate: Sq*G = 1*4 = 4 <= 64: tiles = B*Hkv*ceil(Sq*G/64) = 8 on 132 SMs: splits 16 of 8 blocks
        of 64 keys, 128 CTAs (96 % of the SMs)
decode_b64_1x8k_d128_gqa4
  h100
    fa3 decode_sm90_bf16_d128_full_m64n64s2 tiles=512 splits=1
      decode, full, D = Dv, D 8 to 128, packed rows <= 32: 1.000 x stock (test row: decode)
      gate: Sq*G = 1*4 = 4 <= 64: tiles = B*Hkv*ceil(Sq*G/64) = 512 on 132 SMs: splits 1 of 128
        blocks of 64 keys, 512 CTAs (387 % of the SMs)
""",
        )

    def test_plans_on_each_device(self) -> None:
        push_tables(KERNELS, CHOICES)
        calls = {name: CALLS[name] for name in ("prefill_4k_d128_causal", "decode_1x8k_d128_gqa4")}
        self.assertExpectedInline(
            plans_as_text(calls, FACTS),
            """\
prefill_4k_d128_causal
  h100 h200
    fa3 fwd_sm90_bf16_d128_causal_m128n128s2 tiles=2048 splits=1
      fwd, causal, D 8 to 128, tiles >= 132: 1.200 x stock (test row: causal)
      gate: Sq*G = 4096*1 = 4096 > 64: not a decode call
  a100
    stock
      fa3: The GPU has compute capability 8.0, but the kernels of this backend need exactly 9.0
        (H100, H200). Stock attention serves this device.
  l4 rtx4090
    stock
      fa3: The GPU has compute capability 8.9, but the kernels of this backend need exactly 9.0
        (H100, H200). Stock attention serves this device.
  none
    stock
      fa3: There is no CUDA device. The kernels run on NVIDIA GPUs only.
decode_1x8k_d128_gqa4
  h100 h200
    fa3 decode_sm90_bf16_d128_full_m64n64s2 tiles=8 splits=16
      decode, full, D = Dv, D 8 to 128, packed rows <= 32: 1.000 x stock (test row: decode)
      gate: Sq*G = 1*4 = 4 <= 64: tiles = B*Hkv*ceil(Sq*G/64) = 8 on 132 SMs: splits 16 of 8 blocks
        of 64 keys, 128 CTAs (96 % of the SMs)
  a100
    stock
      fa3: The GPU has compute capability 8.0, but the kernels of this backend need exactly 9.0
        (H100, H200). Stock attention serves this device.
  l4 rtx4090
    stock
      fa3: The GPU has compute capability 8.9, but the kernels of this backend need exactly 9.0
        (H100, H200). Stock attention serves this device.
  none
    stock
      fa3: There is no CUDA device. The kernels run on NVIDIA GPUs only.
""",
        )

    def test_reasons_of_refused_calls(self) -> None:
        push_tables(KERNELS, CHOICES)
        self.assertExpectedInline(
            plans_as_text(REFUSED, {"h100": DEVICES["h100"]}),
            """\
fp32
  h100
    stock
      fa3: query, key and value have dtype float32, but the kernels take bfloat16 or float16. Cast
        the tensors, or use torch.autocast.
mixed_dtypes
  h100
    stock
      fa3: query, key and value must have one dtype, but have bfloat16, float16, bfloat16. Cast all
        of the tensors to bfloat16 or float16
mask
  h100
    stock
      fa3: attn_mask is given, but the kernels of this backend take no mask. Pass is_causal=True if
        the mask is causal.
dropout
  h100
    stock
      fa3: dropout_p=0.1 is given, but the kernels of this backend have no dropout. Pass
        dropout_p=0.
window
  h100
    stock
      fa3: The call has a sliding window or a bottom-right causal mask, but the kernels of this
        backend support neither. Use the math backend.
no_keys
  h100
    stock
      fa3: A dimension of a tensor is 0. Stock attention handles empty tensors.
head_dim_60
  h100
    stock
      fa3: query has head dim 60, but the kernels take multiples of 8. Pad the head dim.
head_dim_256
  h100
    stock
      fa3: query has head dim 256, but the kernels take at most 128. Stock attention serves larger
        head dims. Also: value has head dim 256, but the kernels take at most 128. Stock attention
        serves larger head dims.
last_stride_2
  h100
    stock
      fa3: value has stride 2 in the last dim, but the kernels need stride 1. Call .contiguous().
misaligned
  h100
    stock
      fa3: key is aligned to 2 bytes (base address and strides), but the kernels need 16. Call
        .contiguous() or .clone().
two_devices
  h100
    stock
      fa3: The tensors are not all on one CUDA device. Move query, key and value to the same GPU.
deterministic_grad
  h100
    stock
      fa3: torch.use_deterministic_algorithms is on, and no deterministic backward kernel takes this
        call. Use torch.no_grad() or the stock backend.
three_reasons
  h100
    stock
      fa3: dropout_p=0.5 is given, but the kernels of this backend have no dropout. Pass
        dropout_p=0. Also: query has head dim 60, but the kernels take multiples of 8. Pad the head
        dim. Also: value has head dim 264, but the kernels take at most 128. Stock attention serves
        larger head dims.
""",
        )

    def test_plans_of_forced_calls(self) -> None:
        push_tables(KERNELS, CHOICES)
        calls = {name: CALLS[name] for name in ("train_4k_d128_causal", "decode_1x8k_d128_gqa4")}
        fa3 = BACKENDS.index("fa3")
        text = plans_as_text(calls, {"h100": DEVICES["h100"], "a100": DEVICES["a100"]}, fa3)
        text += bindings.forced_error(REFUSED["three_reasons"], DEVICES["h100"], fa3) + "\n"
        text += bindings.forced_error(calls["train_4k_d128_causal"], DEVICES["l4"], BACKENDS.index("fa2")) + "\n"
        self.assertExpectedInline(
            text,
            """\
train_4k_d128_causal
  h100
    fa3 fwd_sm90_bf16_d128_causal_m128n128s2 tiles=2048 splits=1
      gradients: The efficient backward of stock follows. The reason: No kernel with causal takes
        D=128, Dv=128, Sq=4096 in 232448 bytes of shared memory. The kernel table is
        torch_flashplug/registry/kernel_table.py.
  a100
    stock
      fa3: The GPU has compute capability 8.0, but the kernels of this backend need exactly 9.0
        (H100, H200). Stock attention serves this device.
decode_1x8k_d128_gqa4
  h100
    fa3 decode_sm90_bf16_d128_full_m64n64s2 tiles=8 splits=16
      gate: Sq*G = 1*4 = 4 <= 64: tiles = B*Hkv*ceil(Sq*G/64) = 8 on 132 SMs: splits 16 of 8 blocks
        of 64 keys, 128 CTAs (96 % of the SMs)
  a100
    stock
      fa3: The GPU has compute capability 8.0, but the kernels of this backend need exactly 9.0
        (H100, H200). Stock attention serves this device.
torch_flashplug: backend 'fa3' is forced and cannot run this call (query [1, 8, 512, 60] key [1, 8, 512, 60] value [1, 8, 512, 264] bfloat16 with dropout):
  - dropout_p=0.5 is given, but the kernels of this backend have no dropout. Pass dropout_p=0.
  - query has head dim 60, but the kernels take multiples of 8. Pad the head dim.
  - value has head dim 264, but the kernels take at most 128. Stock attention serves larger head dims.
Use sdpa_backend('auto') to let stock attention serve such calls.
torch_flashplug: backend 'fa2' is forced and cannot run this call (query [4, 16, 4096, 128] key [4, 16, 4096, 128] value [4, 16, 4096, 128] bfloat16 causal with grad):
  - No kernel with causal takes D=128, Dv=128, Sq=4096 in 101376 bytes of shared memory. The kernel table is torch_flashplug/registry/kernel_table.py.
Use sdpa_backend('auto') to let stock attention serve such calls.
""",
        )


def test_kernel_name_contains_the_element_type() -> None:
    """A dtype without a kernel is refused, and never mistaken for the last dtype of a list."""
    plain = call((1, 8, 8), (512, 512), (64, 64))
    fa3 = BACKENDS.index("fa3")  # auto may have no measured rows for some dtypes
    for dtype in elements_of("fwd", 90):
        plan = bindings.plan(plain | operand_dtypes(*KERNEL_DTYPES[dtype].operands[:3]), DEVICES["h100"], fa3)
        assert f"_{dtype}_" in plan["kernel"] and KernelSpec.from_name(plan["kernel"]).dtype == dtype
    for unsupported in {*DTYPE_INFO, "none"} - {element.q for element in KERNEL_DTYPES.values()}:
        rejected = bindings.plan(plain | operand_dtypes(unsupported), DEVICES["h100"])
        assert rejected["backend"] == "stock" and not rejected["kernel"] and "dtype" in rejected["reasons"]["fa3"]


def test_gradients_without_a_backward_kernel_stay_with_stock() -> None:
    """cuDNN's backward cannot follow our forwards.

    With any different stock backward, the pair of forward and backward is slower than stock alone.
    """
    trained = call((4, 16, 16), (4096, 4096), (128, 128), grad=1)
    forwards = tuple(row for row in kernel_table.KERNEL_ROWS if row.kind == "fwd")
    assert bindings.plan(trained, DEVICES["h100"])["backend"] == "fa3"
    push_tables(forwards, dispatch_table.CHOICE_ROWS)
    plan = bindings.plan(trained, DEVICES["h100"])
    assert plan["backend"] == "stock" and "no backward kernel takes this call" in plan["reasons"]["fa3"]


def test_every_reason_of_a_refused_call_is_listed() -> None:
    call = REFUSED["three_reasons"] | {"dropout_p": 1.5}
    reasons = bindings.plan(call, DEVICES["h100"])["reasons"]["fa3"]
    for part in ("dropout_p must be from 0 to 1, but got 1.5.", "head dim 60", "head dim 264"):
        assert part in reasons


@pytest.mark.parametrize("heads, rows, sharing", [
    ((1, 40, 8), 4250, 1),  # 272 blocks: the longest tile is as long as the share of a CTA
    ((2, 24, 8), 3001, 1),
    ((1, 48, 8), 3001, 2),  # 192 blocks: the longest tile alone would take a third longer than the share of a CTA
    ((4, 12, 2), 1500, 3),
    ((1, 8, 1), 2048, 8),  # 16 blocks
    ((1, 64, 8), 4096, 1),
])  # fmt: skip
def test_causal_tiles_share_query_heads_only_if_the_longest_tile_runs_alone(
    heads: tuple[int, int, int], rows: int, sharing: int
) -> None:
    facts = call(heads, (rows, rows), (128, 128), causal=1, grad=1)
    assert bindings.plan(facts, DEVICES["h100"], BACKENDS.index("fa3"))["sharing"] == sharing


def test_tiles_of_millions_of_keys_share_no_query_heads() -> None:
    """A product of sizes beyond 63 bits must not look like a small call. Shared heads need memory for more dK and dV."""
    for rows in (1 << 20, 1 << 22, 1 << 24):
        facts = call((1, 16, 2), (rows, rows), (64, 64), causal=1, grad=1)
        assert bindings.plan(facts, DEVICES["h200"], BACKENDS.index("fa3"))["sharing"] == 1, rows


def test_reason_of_a_slower_class_names_the_setting_of_cudnn() -> None:
    rows = [dataclasses.replace(row, ratio=0.8, without_cudnn=0.9) for row in CHOICES]
    push_tables(KERNELS, tuple(rows))
    facts = call((16, 16, 16), (512, 512), (64, 64))
    settings = (0, "0.800 x the speed of stock attention,"), (1, "0.900 x the speed of stock attention without cuDNN,")
    for without_cudnn, words in settings:
        plan = bindings.plan(facts | {"without_cudnn": without_cudnn}, DEVICES["h100"])
        assert plan["backend"] == "stock" and words in plan["reasons"]["fa3"], plan["reasons"]


def test_row_of_a_plan_has_the_ratio_that_decided() -> None:
    rows = [dataclasses.replace(row, ratio=0.8, without_cudnn=1.2) for row in CHOICES]
    push_tables(KERNELS, tuple(rows))
    facts = call((16, 16, 16), (512, 512), (64, 64))
    for without_cudnn, backend, words in (
        (0, "stock", ": 0.800 x stock ("),
        (1, "fa3", ": 1.200 x stock without cuDNN ("),
    ):
        plan = bindings.plan(facts | {"without_cudnn": without_cudnn}, DEVICES["h100"])
        assert plan["backend"] == backend and words in plan["row"], plan["row"]


@pytest.mark.parametrize("heads, Sq, Sk, sharing", [
    ((1, 8, 1), 2048, 2048, 8),  # 16 blocks of keys: 128 tiles of a single head
    # 32 blocks: seven tiles each take two waves of the GPU, with one head per tile
    ((1, 14, 2), 2048, 2048, 7),
    ((2, 8, 2), 1024, 1024, 4),
    ((1, 32, 8), 1024, 1024, 2),  # 64 blocks: two waves of one head would take as long as one wave of two heads
    ((1, 32, 8), 2048, 2048, 1),  # 128 blocks: all SMs have enough work
    ((4, 8, 8), 1024, 1024, 1),  # no heads to share
    ((1, 8, 2), 128, 2048, 1),  # saves three times 128 rows
])  # fmt: skip
def test_few_key_blocks_share_query_heads_among_tiles(
    heads: tuple[int, int, int], Sq: int, Sk: int, sharing: int
) -> None:
    plan = bindings.plan(call(heads, (Sq, Sk), (64, 64), grad=1), DEVICES["h100"], BACKENDS.index("fa3"))
    assert plan["gradients"].startswith("bwd_sm90_bf16_d64_full_m64n128") and plan["sharing"] == sharing
    narrow = call(
        heads, (Sq, Sk), (64, 64), grad=1, **dict.fromkeys(("dtype_q", "dtype_k", "dtype_v"), DTYPE_IDS["fp16"])
    )
    assert bindings.plan(narrow, DEVICES["h100"], BACKENDS.index("fa3"))["sharing"] == 1
