"""Calls on which stock torch is known to be wrong or to fail.

Auto serves the calls listed in stock_bugs.py; stock_bugs.cpp lists calls for which a different backend of stock is
right. Further tests cover scales that are not positive, the plan made by the choice hook for calls with gradients, and
the math backward as a step of ring attention.
"""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F
from device_backend import OPEN_GATE, DeviceBackend
from golden_plans import call
from stock_bug_inputs import assert_matches_fp64, misaligned, random_bf16
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_flashplug
from torch_flashplug.api.backend import DEVICES
from torch_flashplug.dispatch import bindings
from torch_flashplug.ops import sdpa as sdpa_ops
from torch_flashplug.registry import kernel_table, stock_bugs
from torch_flashplug.registry.dispatch_table import ANY, ChoiceRow
from torch_flashplug.testing import Inputs, new_case
from torch_flashplug.torch_hooks import describe_call

sdpa = F.scaled_dot_product_attention


# ---- calls that stock gets wrong ----

# One call for each row of stock_bugs.STOCK_BUGS, with and without the triggering fact.
CALLS_WITH_BUG = {
    "unaligned_base_one_row": (call((1, 32, 8), (1, 100), (16, 16)), {"unaligned_base_k": 1, "align_k": 2}),
    "unaligned_base_one_key": (call((5, 21, 3), (70, 1), (128, 128)), {"unaligned_base_q": 1, "align_q": 8}),
    "broadcast_query": (call((2, 3, 3), (64, 64), (80, 64)), {"broadcast_q": 1}),
    "stride_of_one_row": (call((2, 4, 4), (1, 64), (96, 96)), {"unaligned_unit_dim_q": 1}),
    "stride_of_one_key": (call((2, 4, 4), (64, 1), (96, 96), grad=1), {"unaligned_unit_dim_v": 1}),
    "zero_scale": (call((4, 8, 8), (4096, 4096), (64, 64), causal=1), {"scale": bindings.SCALE_IDS["zero"]}),
    "negative_scale": (call((4, 8, 8), (4096, 4096), (64, 64), grad=1), {"scale": bindings.SCALE_IDS["negative"]}),
    "mask": (call((4, 8, 8), (200, 200), (64, 64), grad=1), {"mask": 1}),
    "bias": (call((4, 8, 8), (200, 200), (64, 64), grad=1), {"bias": 1}),
    "bias32": (call((4, 8, 8), (200, 200), (64, 64)), {"bias32": 1}),
    "all_dropped": (call((1, 1, 1), (1, 96), (128, 128), causal=1, dropout=1, dropout_p=0.5), {"dropout_p": 1.0}),
    "many_batches": (call((65535, 2, 2), (16, 16), (128, 64), grad=1, dropout=1, dropout_p=0.1), {"B": 65536}),
    "many_heads_of_one_row": (call((1, 65535, 65535), (1, 16), (40, 32)), {"Hq": 65536, "Hkv": 65536}),
    "gradients_of_one_row": (call((1, 2, 2), (1, 128), (64, 64), grad=1, causal=1), {"causal": 0}),
    "gradients_of_half_a_block": (call((1, 2, 2), (9, 200), (128, 128), grad=1), {"Sk": 192}),
}


@pytest.mark.parametrize("name", CALLS_WITH_BUG)
def test_auto_serves_calls_that_fail_in_stock(name: str) -> None:
    plain, fault = CALLS_WITH_BUG[name]
    assert not bindings.plan(plain, DEVICES["h100"])["stock_bug"]
    plan = bindings.plan(plain | fault, DEVICES["h100"])
    assert plan["backend"] in {"fa3", "fa2"} and plan["kernel"]
    assert any(plan["stock_bug"] == f"{row.stock} ({row.evidence})" for row in stock_bugs.STOCK_BUGS)
    assert plan["row"] == "" and bool(plan["gradients"]) == bool(plain.get("grad"))
    assert bindings.plan(plain | fault, DEVICES["a100"])["backend"] == "stock"  # no fault was found on an A100


def test_noncontiguous_rows_are_no_stock_bug() -> None:
    """Stock uses math for such rows, and math is right."""
    plain, fault = CALLS_WITH_BUG["unaligned_base_one_row"]
    assert not bindings.plan(plain | fault | {"last_stride_v": 64}, DEVICES["h100"])["stock_bug"]


@pytest.mark.parametrize(("scale", "kind"), [
    (1e-50, "zero"), (-1e-39, "zero"), (-0.0, "zero"), (1.2e-38, "positive"), (None, "positive"),
    (-2.0, "negative"), (1e39, "not finite"), (math.nan, "not finite"), (-math.inf, "not finite"),
])  # fmt: skip
def test_scales_are_classified_as_32_bit_floats(scale: float | None, kind: str) -> None:
    """Scales are stored as 32-bit floats."""
    assert bindings.kind_of_scale(scale) == kind


def test_every_stock_bug_row_is_tested() -> None:
    tried = {bindings.plan(plain | fault, DEVICES["h100"])["stock_bug"] for plain, fault in CALLS_WITH_BUG.values()}
    assert tried == {f"{row.stock} ({row.evidence})" for row in stock_bugs.STOCK_BUGS}


FAULTS = {
    "one_row_unaligned_base": lambda: (
        misaligned((1, 32, 1, 16)),
        misaligned((1, 8, 1, 16)),
        misaligned((1, 8, 1, 16)),
        {},
    ),
    "one_row_128": lambda: (misaligned((5, 21, 1, 128)), misaligned((5, 3, 1, 128)), misaligned((5, 3, 1, 128), 3), {}),
    "one_row_few_keys": lambda: (random_bf16(1, 4, 1, 128), random_bf16(1, 1, 3, 128), misaligned((1, 1, 3, 128)), {}),
    "one_key": lambda: (misaligned((2, 4, 70, 64), 7), misaligned((2, 4, 1, 64)), random_bf16(2, 4, 1, 64), {}),
    "broadcast_heads": lambda: (
        random_bf16(2, 1, 64, 80).expand(2, 3, 64, 80),
        random_bf16(2, 3, 64, 80),
        random_bf16(2, 3, 64, 64),
        {},
    ),
    "broadcast_batch": lambda: (
        random_bf16(1, 28, 2, 16).expand(5, 28, 2, 16),
        random_bf16(5, 28, 2, 16),
        random_bf16(5, 28, 2, 64),
        {},
    ),
    "stride_of_one_key": lambda: (
        random_bf16(2, 4, 7, 96),
        random_bf16(2, 4, 1, 96),
        random_bf16(2, 4, 96, 1).transpose(2, 3),
        {},
    ),
    "stride_of_one_row": lambda: (
        random_bf16(2, 4, 96, 1).transpose(2, 3),
        random_bf16(2, 4, 9, 96),
        random_bf16(2, 4, 9, 96),
        {},
    ),
    "zero_scale": lambda: (
        random_bf16(2, 8, 200, 64),
        random_bf16(2, 2, 333, 64),
        random_bf16(2, 2, 333, 64),
        {"scale": 0.0},
    ),
    "zero_scale_causal": lambda: (*(random_bf16(2, 8, 200, 64) for _ in range(3)), {"scale": 0.0, "is_causal": True}),
    "negative_scale": lambda: (*(random_bf16(2, 8, 129, 128) for _ in range(3)), {"scale": -0.125}),
    "negative_scale_causal": lambda: (
        *(random_bf16(2, 8, 200, 96) for _ in range(3)),
        {"scale": -1.0, "is_causal": True},
    ),
    "tiny_scale_causal": lambda: (*(random_bf16(2, 8, 129, 64) for _ in range(3)), {"scale": 1e-50, "is_causal": True}),
    "negative_scale_decode": lambda: (
        random_bf16(2, 8, 1, 64),
        random_bf16(2, 2, 999, 64),
        random_bf16(2, 2, 999, 64),
        {"scale": -1.0},
    ),
}


@pytest.mark.gpu
@pytest.mark.isolated(120)
@pytest.mark.parametrize("grad", [False, True], ids=["forward", "gradients"])
@pytest.mark.parametrize("name", FAULTS)
def test_auto_is_right_where_stock_fails(name: str, grad: bool) -> None:
    torch.manual_seed(1)
    q, k, v, kwargs = FAULTS[name]()
    case = new_case(
        name, (q.shape[0], q.shape[1], k.shape[1]), (q.shape[2], k.shape[2]), (q.shape[3], v.shape[3]),
        *["causal"] * kwargs.get("is_causal", False), scale=kwargs.get("scale"),
    )  # fmt: skip
    q, k, v = (tensor.detach().requires_grad_(grad) for tensor in (q, k, v))
    bindings.counters(reset=True)
    for _ in range(2):  # some faults of stock appear at the second call
        out = sdpa(q, k, v, **kwargs, enable_gqa=q.shape[1] != k.shape[1])
    inputs = Inputs(q.detach(), k.detach(), v.detach(), random_bf16(*out.shape))
    grads = torch.autograd.grad(out, (q, k, v), inputs.grad_out) if grad else ()
    took = bindings.counters()
    torch.cuda.synchronize()
    assert_matches_fp64(name, case, inputs, out.detach(), grads)
    assert took["ours_fwd"] == 2 and took["ours_bwd"] == grad, took
    assert torch_flashplug.explain(q, k, v, **kwargs, enable_gqa=q.shape[1] != k.shape[1]).stock_bug


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fp32", "masked", "masked_fp32"])
@pytest.mark.parametrize("scale", [0.0, -0.25, -1.0])
def test_scales_are_right_without_a_kernel_of_the_plugin(scale: float, kind: str) -> None:
    masked = kind != "fp32"
    dtype = torch.bfloat16 if masked else torch.float32
    q, k, v = (torch.randn(2, 4, 129, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
    mask = torch.ones(129, 129, dtype=torch.bool, device="cuda").tril()
    bias = torch.zeros(129, 129, device="cuda").masked_fill(~mask, -math.inf)
    kwargs = {"attn_mask": bias if kind == "masked_fp32" else mask} if masked else {"is_causal": True}
    out = sdpa(q, k, v, scale=scale, **kwargs)
    grad_out = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), grad_out)
    wide = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    exact = (wide[0] @ wide[1].mT * scale).masked_fill(~mask, -math.inf).softmax(-1) @ wide[2]
    answers = (exact, *torch.autograd.grad(exact, wide, grad_out.double()))
    for actual, expected in zip((out, *grads), answers, strict=True):
        error = (actual.double() - expected).norm() / expected.norm().clamp_min(1e-2 * expected.numel() ** 0.5)
        assert error < 2e-2, error


@pytest.mark.gpu
@pytest.mark.isolated(120)
@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("rows", [1, 200])
def test_dropout_of_one_gives_zero_outputs_and_gradients(rows: int, offset: int) -> None:
    q, k, v = (misaligned((1, 2, size, 128), offset) for size in (rows, 96, 96))
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    bindings.counters(reset=True)
    out = sdpa(*leaves, dropout_p=1.0, is_causal=True)
    grads = torch.autograd.grad(out, leaves, random_bf16(*out.shape))
    torch.cuda.synchronize()
    assert bindings.counters()["ours_fwd"] == 1
    assert not any(tensor.any() for tensor in (out, *grads))  # NaN also counts as true


@pytest.mark.gpu
@pytest.mark.isolated(120)
@pytest.mark.parametrize("kind", ["misaligned", "wide", "dropout", "compiled"])
def test_mask_gradient_without_operand_gradients(kind: str) -> None:
    """Compute only the gradient of a mask.

    The efficient attention of stock keeps no LSE if no operand needs a gradient, but its backward reads the LSE. The
    result is an error or the end of the CUDA context. Our kernels serve the misaligned calls (as copies) and the calls
    with dropout, and cannot serve the remaining calls.
    """
    sizes = {"misaligned": (257, 9, 64), "wide": (129, 96, 264), "dropout": (33, 33, 64), "compiled": (33, 40, 264)}
    Sq, Sk, D = sizes[kind]
    q = misaligned((1, 1, Sq, D)) if kind == "misaligned" else random_bf16(1, 1, Sq, D)
    k, v, mask = random_bf16(1, 1, Sk, D), random_bf16(1, 1, Sk, D), random_bf16(Sq, Sk).requires_grad_()
    attend = torch.compile(sdpa) if kind == "compiled" else sdpa
    p = 0.1 * (kind == "dropout")
    bindings.counters(reset=True)
    out = attend(q, k, v, attn_mask=mask, dropout_p=p)
    grad_out = random_bf16(*out.shape)
    (grad,) = torch.autograd.grad(out, mask, grad_out)
    torch.cuda.synchronize()
    assert bindings.counters()["ours_fwd"] == (kind in {"misaligned", "dropout"})
    wide = mask.detach().double().requires_grad_()
    exact = (q.double() @ k.double().mT * D**-0.5 + wide).softmax(-1) @ v.double()
    (expected,) = torch.autograd.grad(exact, wide, grad_out.double())
    if kind == "dropout":
        assert grad.isfinite().all() and grad.any()
    else:
        torch.testing.assert_close(grad.double(), expected, atol=3e-2, rtol=3e-2)


@pytest.mark.gpu
def test_nonpositive_scales_under_vmap() -> None:
    """Masked calls use math, because torch's vmap rule for the efficient attention refuses the mask."""
    q, k, v = (random_bf16(2, 4, 129, 64) for _ in range(3))
    mask = torch.ones(129, 129, dtype=torch.bool, device="cuda").tril()
    queries = torch.stack([q, q.neg(), q * 2])
    outs = torch.vmap(lambda query: sdpa(query, k, v, attn_mask=mask, scale=-0.5))(queries)
    for out, query in zip(outs, queries):
        scores = (query.double() @ k.double().mT * -0.5).masked_fill(~mask, -math.inf)
        torch.testing.assert_close(out.double(), scores.softmax(-1) @ v.double(), atol=2e-2, rtol=2e-2)
    masks = torch.stack([mask, ~mask | torch.eye(129, dtype=torch.bool, device="cuda")])
    for out, entry in zip(torch.vmap(lambda entry: sdpa(q, k, v, attn_mask=entry, scale=-0.5))(masks), masks):
        scores = (q.double() @ k.double().mT * -0.5).masked_fill(~entry, -math.inf)
        torch.testing.assert_close(out.double(), scores.softmax(-1) @ v.double(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("scale", [0.0, -0.25, 1e-50])
def test_nonpositive_scales_run_on_kernels(device_backend: DeviceBackend, scale: float) -> None:
    q, k, v = device_backend.qkv(grad=True)
    assert bindings.plan(describe_call.describe(q, k, v, None, 0.0, False, scale) | {"on_cuda": 1},
                       DEVICES["h100"])["backend"] == "fa3"  # fmt: skip
    device_backend.pop_path_counts()
    out = sdpa(q, k, v, scale=scale)
    out.sum().backward()
    took = device_backend.pop_path_counts()
    assert took["ours_fwd"] == 1
    exact = (q.double() @ k.double().transpose(-1, -2) * scale).softmax(-1) @ v.double()
    torch.testing.assert_close(out.double(), exact, atol=2e-2, rtol=2e-2)
    if scale in {0.0, 1e-50}:
        assert not q.grad.any() and not k.grad.any()


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_masked_calls_with_nonpositive_scales_are_right(hooked_backend: DeviceBackend, scale: float) -> None:
    """Use a float mask too, for which stock would have taken a kernel that returns NaN."""
    q, k, v = hooked_backend.qkv(rows=65)
    mask = torch.ones(65, 65, dtype=torch.bool, device=q.device).tril()
    out = sdpa(q, k, v, attn_mask=torch.where(mask, 0.0, -math.inf).to(q.dtype), scale=scale)
    scores = (q.double() @ k.double().transpose(-1, -2) * scale).masked_fill(~mask, -math.inf)
    torch.testing.assert_close(out.double(), scores.softmax(-1) @ v.double(), atol=2e-2, rtol=2e-2)
    assert hooked_backend.pop_path_counts()["ours_fwd"] == 1


def test_forced_math_accepts_boolean_masks(hooked_backend: DeviceBackend) -> None:
    q, k, v = hooked_backend.qkv(rows=65)
    mask = torch.ones(65, 65, dtype=torch.bool, device=q.device).tril()
    with torch_flashplug.sdpa_backend("math"):
        torch.testing.assert_close(sdpa(q, k, v, attn_mask=mask), sdpa(q, k, v, is_causal=True), atol=2e-2, rtol=2e-2)


def test_forced_math_refuses_mixed_dtypes_and_integer_masks(hooked_backend: DeviceBackend) -> None:
    q, k, v = hooked_backend.qkv(rows=65)
    counts = torch.ones(65, 65, dtype=torch.int64, device=q.device)
    with torch_flashplug.sdpa_backend("math"):
        with pytest.raises(RuntimeError, match="same dtype"):
            sdpa(q, k.float(), v)
        with pytest.raises(RuntimeError, match="attn_mask dtype"):
            sdpa(q, k, v, attn_mask=counts)


def test_explain_accepts_nested_tensors() -> None:
    nested = torch.nested.nested_tensor([torch.randn(4, rows, 64) for rows in (3, 5)])
    assert "q nested" in torch_flashplug.explain(nested, nested, nested).call


def test_op_keeps_the_plan_of_the_choice_hook(device_backend: DeviceBackend) -> None:
    """Route one call class to our kernels with gradients and to stock without gradients.

    The op must keep the plan of the choice hook.
    """
    rows = [
        ChoiceRow("fwd", operands, 90, grad, "full", 1, 256, 0, ANY, 0, ANY, 0, ratio=ratio, measured="test row")
        for operands, grad, ratio in (("square", True, 2.0), ("vectors", False, 0.5))
    ]
    bindings.push_rows(kernel_table.KERNEL_ROWS, rows, OPEN_GATE)
    for grad in (True, False):
        q, k, v = device_backend.qkv(grad=grad)
        device_backend.pop_path_counts()
        sdpa(q, k, v)
        took = device_backend.pop_path_counts()
        assert took.get("ours_fwd", 0) == grad and took.get("routed_ours", 0) == grad, took


@pytest.mark.parametrize("ratio", [0.5, 2.0])
def test_rows_without_cudnn_follow_the_setting_of_torch(device_backend: DeviceBackend, ratio: float) -> None:
    """Measure a class at 1 / ratio of stock, and at `ratio` of stock without cuDNN.

    The hook must choose the owner of a call by torch's setting of cuDNN, also if the call repeats.
    """
    sizes = "vectors", 90, False, "full", 1, 256, 0, ANY, 0, ANY, 0
    row = ChoiceRow("fwd", *sizes, ratio=1 / ratio, measured="test row", without_cudnn=ratio)
    bindings.push_rows(kernel_table.KERNEL_ROWS, [row], OPEN_GATE)
    q, k, v = device_backend.qkv()
    try:
        for cudnn in (True, False, True):
            torch.backends.cuda.enable_cudnn_sdp(cudnn)
            ours = (1 / ratio if cudnn else ratio) > 1
            device_backend.pop_path_counts()
            sdpa(q, k, v)
            assert device_backend.pop_path_counts().get("ours_fwd", 0) == ours
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


# ---- the math backward uses the output and LSE of the forward ----


@pytest.mark.parametrize("causal", [sdpa_ops.CAUSAL_NONE, sdpa_ops.CAUSAL_TOP_LEFT])
@pytest.mark.parametrize("biased", [False, True])
def test_math_backward_is_a_step_of_a_ring(causal: int, biased: bool) -> None:
    """Add gradients over two halves of the keys, each computed with the output and LSE of all keys.

    The sum must equal the gradients over all keys. A row without visible keys in a half gets no gradient from the half.
    """
    torch.manual_seed(3)
    q, k, v, grad_out = (torch.randn(2, 4, 24, 16, dtype=torch.float64) for _ in range(4))
    bias = torch.randn(2, 1, 24, 24, dtype=torch.float64) if biased and not causal else None
    settings = (0.0, causal, None, 0)
    out, lse, seed, offset = sdpa_ops.namespace.sdpa_fwd(q, k, v, bias, *settings)
    full_grads = sdpa_ops.namespace.sdpa_bwd(
        grad_out, q, k, v, bias, out, lse, seed, offset, *settings, bias is not None
    )
    half_grads = []
    for keys in (slice(0, 12), slice(12, 24)):
        mask = bias[..., keys] if bias is not None else None
        if causal:  # the first rows see no key of the second half
            mask = torch.ones(24, 24, dtype=torch.bool).tril()[:, keys]
        arguments = (grad_out, q, k[:, :, keys], v[:, :, keys], mask, out, lse, seed, offset)
        half_grads.append(sdpa_ops.namespace.sdpa_bwd(*arguments, 0.0, sdpa_ops.CAUSAL_NONE, None, 0, bias is not None))
    torch.testing.assert_close(half_grads[0][0] + half_grads[1][0], full_grads[0])
    for i in (1, 2):
        torch.testing.assert_close(torch.cat([part[i] for part in half_grads], 2), full_grads[i])
    if bias is not None:
        torch.testing.assert_close(torch.cat([part[3] for part in half_grads], 3), full_grads[3])


@pytest.mark.usefixtures("fresh_dynamo")
def test_single_key_head_is_broadcast(device_backend: DeviceBackend) -> None:
    """Check a single key head without enable_gqa: eager, compiled and under vmap.

    The math of stock broadcasts the key head in the same way.
    """
    q, k, v = (tensor.detach() for tensor in device_backend.qkv())
    k, v = k[:, :1], v[:, :1]
    exact = (q.double() @ k.double().mT * q.shape[-1] ** -0.5).softmax(-1) @ v.double()
    attentions = {
        "eager": sdpa,
        "compiled": torch.compile(sdpa, backend="aot_eager", dynamic=True),
        "mapped": lambda *operands: torch.vmap(sdpa, in_dims=(0, None, None))(operands[0][None], *operands[1:])[0],
    }
    for attend in attentions.values():
        device_backend.pop_path_counts()
        leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
        out = attend(*leaves)
        assert device_backend.pop_path_counts()["ours_fwd"] == 1
        torch.testing.assert_close(out.double(), exact, atol=2e-2, rtol=2e-2)
        grads = torch.autograd.grad(out.float().sum(), leaves)
        assert [grad.shape for grad in grads] == [leaf.shape for leaf in leaves]


def _heads(B: int, H: int, S: int, D: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [torch.randn(B, H, S, D, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]


# Our kernels cannot run these calls, and the default backend of stock returns wrong results, raises or crashes.
CALLS_FOR_STOCK = {
    "no_batch": (lambda: _heads(0, 4, 16, 64), lambda: {}),
    "no_batch_causal": (lambda: _heads(0, 3, 385, 192, torch.float16), lambda: {"is_causal": True}),
    "no_heads": (lambda: _heads(1, 0, 64, 47, torch.float16), lambda: {}),
    "no_heads_wide": (lambda: _heads(1, 0, 1023, 224), lambda: {}),
    "no_rows": (lambda: [_heads(2, 4, 0, 64)[0], *_heads(2, 4, 16, 64)[1:]], lambda: {}),
    "all_dropped": (lambda: _heads(2, 4, 65, 157), lambda: {"dropout_p": 1.0}),
    "all_dropped_causal": (lambda: _heads(1, 4, 96, 33, torch.float16), lambda: {"dropout_p": 1.0, "is_causal": True}),
    "wide_mask_dropped": (lambda: _heads(2, 4, 130, 192), lambda: {"attn_mask": wide(130), "dropout_p": 0.1}),
    "wide_mask_dropped_d256": (lambda: _heads(1, 3, 65, 256, torch.float16),
                               lambda: {"attn_mask": wide(65), "dropout_p": 0.1}),
    "wide_mask_of_large_heads": (lambda: _heads(2, 4, 130, 264), lambda: {"attn_mask": wide(130)}),
}  # fmt: skip


def wide(size: int) -> Tensor:
    """Return a random fp32 float mask with -inf at hidden keys."""
    bias = torch.randn(size, size, device="cuda")
    return bias.masked_fill_(bias > 0.5, -math.inf)


@pytest.mark.parametrize("backend, allowed, expected_choice", [
    ("auto", ("MATH", "FLASH_ATTENTION"), "MATH"), ("fa3", ("MATH", "FLASH_ATTENTION"), "MATH"),
    ("auto", ("FLASH_ATTENTION",), ""), ("auto", ("MATH",), ""), ("stock", ("MATH", "FLASH_ATTENTION"), ""),
])  # fmt: skip
def test_explain_reports_math_for_operands_without_elements(
    backend: str, allowed: tuple[str, ...], expected_choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choice function of stock must not be called, because stock divides by the number of heads."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch, "_fused_sdp_choice", None)
    with FakeTensorMode() as mode, torch_flashplug.sdpa_backend(backend):
        with sdpa_kernel([getattr(SDPBackend, name) for name in allowed]):
            metas = (torch.empty((2, 0, 16, 64), dtype=torch.bfloat16, device="meta") for _ in range(3))
            plan = torch_flashplug.explain(*(FakeTensor(mode, tensor, torch.device("cuda:0")) for tensor in metas))
    assert (plan.backend, plan.stock_choice, plan.error) == ("stock", expected_choice, "")


@pytest.mark.gpu
@pytest.mark.isolated(120)
@pytest.mark.parametrize("name", CALLS_FOR_STOCK)
def test_unsupported_calls_run_on_a_correct_stock_backend(name: str) -> None:
    """Math gives the expected numbers, including calls with dropout."""
    operands, settings = CALLS_FOR_STOCK[name]
    torch.manual_seed(3)
    inputs, kwargs = operands(), settings()
    results = []
    bindings.counters(reset=True)
    for allowed in (contextlib.nullcontext(), sdpa_kernel(SDPBackend.MATH)):
        torch.manual_seed(5)
        with allowed:
            out = sdpa(*inputs, **kwargs)
            results.append((out, *torch.autograd.grad(out, inputs, torch.ones_like(out))))
    torch.cuda.synchronize()
    for actual, expected in zip(*results, strict=True):
        assert actual.isfinite().all()
        torch.testing.assert_close(actual, expected, rtol=0.0, atol=0.0)
    assert bindings.counters()["ours_fwd"] == 0
    plan = torch_flashplug.explain(*inputs, **kwargs)
    assert plan.backend == "stock" and plan.stock_choice.startswith("MATH"), plan
