"""attention() with windows, sinks and an LSE.

The tests cover results, gradients, the tools of torch on the ops, and refused calls. test_window_kernels.py checks the
numbers of the kernels.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torch_flashplug import attention
from torch_flashplug.api.masked_attention import attend_beside_sinks
from torch_flashplug.dispatch import bindings
from torch_flashplug.ops.attention import Window

SEED = 20261125
FORWARD, BACKWARD = torch.ops.torch_flashplug.attention_fwd, torch.ops.torch_flashplug.attention_bwd


def random_tensor(*sizes: int, dtype: torch.dtype = torch.float32, seed: int = SEED) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_operands(
    Sq: int, Sk: int, *, heads: tuple[int, int] = (4, 2), D: int = 16, dtype=torch.float32
) -> list[Tensor]:
    """Return q, k and v of shape (B, S, H, D)."""
    sizes = (Sq, heads[0]), (Sk, heads[1]), (Sk, heads[1])
    return [random_tensor(2, rows, num_heads, D, dtype=dtype, seed=i) for i, (rows, num_heads) in enumerate(sizes)]


def attend_in_dense_scores(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, sinks: Tensor | None = None, scale: float | None = None,
    softcap: float = math.inf,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap < math.inf:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, -math.inf)
    sink_scores = torch.full_like(scores[..., :1], -math.inf) if sinks is None else sinks.view(-1, 1, 1)
    scores = torch.cat((scores, sink_scores.expand_as(scores[..., :1])), -1)
    return (scores.softmax(-1).nan_to_num()[..., :-1] @ v).transpose(1, 2), scores.logsumexp(-1)


def is_between(low: int, x: Tensor, high: int) -> Tensor:
    return (low <= x) & (x <= high)


# Arguments of attention(), and the visibility of a key by its offset from the query: bottom-right, then top-left
# alignment.
SETTINGS = {
    "window": ({"window": (3, 2)}, lambda behind, _: is_between(-3, behind, 2)),
    "left": ({"window": (3, None)}, lambda behind, _: behind >= -3),
    "right": ({"window": [-1, 2]}, lambda behind, _: behind <= 2),
    "causal": ({"causal": True}, lambda behind, _: behind <= 0),
    "causal_window": ({"causal": True, "window": (5, 5)}, lambda behind, _: is_between(-5, behind, 0)),
    "top_left": ({"causal": "top_left", "window": (5, -1)}, lambda _, behind: is_between(-5, behind, 0)),
    "own": ({"window": (0, 0)}, lambda behind, _: behind == 0),
    "far": ({"window": (99, 99)}, lambda behind, _: is_between(-99, behind, 99)),
    "none": ({}, lambda behind, _: is_between(-99, behind, 99)),
}


def make_visibility(setting: str, Sq: int, Sk: int, device: str = "cpu") -> Tensor:
    behind = torch.arange(Sk, device=device) - torch.arange(Sq, device=device)[:, None]
    return SETTINGS[setting][1](behind - (Sk - Sq), behind)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("seq", [(12, 12), (7, 20), (20, 7), (1, 9), (9, 1)], ids=str)
def test_windows_and_causal_modes_equal_dense_masks(device: str, setting: str, seq: tuple[int, int]) -> None:
    (Sq, Sk), (arguments, _), visible = seq, SETTINGS[setting], make_visibility(setting, *seq, device)
    q, k, v = (x.to(device) for x in make_operands(Sq, Sk))
    sinks = random_tensor(4).to(device)
    expected, expected_lse = attend_in_dense_scores(q, k, v, visible)
    torch.testing.assert_close(attention(q, k, v, **arguments), expected, rtol=1e-4, atol=1e-5)
    out, lse = attention(q, k, v, **arguments, return_lse=True)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-5)
    out, lse = attention(q, k, v, **arguments, sinks=sinks, scale=0.3, return_lse=True)
    expected, expected_lse_with_sinks = attend_in_dense_scores(q, k, v, visible, sinks, 0.3)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse_with_sinks, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("softcap", [0.3, 5.0])
def test_softcap_applies_before_masking(device: str, softcap: float) -> None:
    """Softcap applies to scaled scores before masking; sinks are not capped."""
    q, k, v = (x.to(device) for x in make_operands(7, 20))
    sinks = (random_tensor(4) * 9).to(device)
    visible = make_visibility("causal_window", 7, 20, device)
    expected, expected_lse = attend_in_dense_scores(q, k, v, visible, sinks, 2.0, softcap)
    settings = {"causal": True, "window": (5, 0), "softcap": softcap, "scale": 2.0}
    out, lse = attention(q, k, v, **settings, sinks=sinks, return_lse=True)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-5)
    expected, _ = attend_in_dense_scores(q, k, v, visible, None, 2.0, softcap)
    torch.testing.assert_close(attention(q, k, v, **settings), expected, rtol=1e-4, atol=1e-5)


def test_outputs_have_the_layout_and_dtype_of_the_query() -> None:
    """The output has the layout of the query with rows before heads; the LSE is fp32."""
    q, k, v = make_operands(5, 9, dtype=torch.float16)
    out, lse = attention(q, k, v, window=(2, 0), sinks=torch.zeros(4, dtype=torch.bfloat16), return_lse=True)
    assert out.dtype == torch.float16 and out.shape == q.shape and lse.dtype == torch.float32 and lse.shape == (2, 4, 5)
    assert out.transpose(1, 2).is_contiguous() or out.is_contiguous()


@pytest.mark.parametrize("setting", ["window", "causal", "top_left"])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_window_gradients_match_dense_masks(setting: str, with_sinks: bool, softcap: float) -> None:
    """Check gradients of the output and the LSE, also for rows without visible keys."""
    q, k, v = (x.requires_grad_() for x in make_operands(7, 5, dtype=torch.float64, D=4))
    leaves = (q, k, v, *([random_tensor(4, dtype=torch.float64).requires_grad_()] if with_sinks else []))
    arguments, _ = SETTINGS[setting]
    rows = make_visibility(setting, 7, 5).any(-1) | with_sinks  # the LSE of the remaining rows is -inf

    def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        out, lse = attention(q, k, v, **arguments, sinks=sinks, softcap=softcap, return_lse=True)
        return out, lse[:, :, rows]

    assert torch.autograd.gradcheck(call, leaves)
    lse = call(*leaves)[1]
    assert all(x.isfinite().all() for x in torch.autograd.grad(lse.sum(), leaves))  # the loss does not use the output


@pytest.mark.parametrize(
    "arguments", [{"softcap": 1.0}, {"sinks": torch.zeros(4)}, {"window": (3, 0), "return_lse": True},
                  {"seqused_k": torch.tensor([3, 4], dtype=torch.int32)}], ids=lambda case: next(iter(case))
)  # fmt: skip
def test_forward_mode_is_refused(arguments: dict[str, object]) -> None:
    """Forward mode must raise an error instead of returning a zero derivative."""
    q, k, v = make_operands(5, 5)
    with pytest.raises(RuntimeError, match="forward-mode derivatives are not supported"):
        torch.func.jvp(lambda q: attention(q, k, v, **arguments), (q,), (torch.ones_like(q),))


def test_second_derivative_is_refused() -> None:
    q, k, v = (x.requires_grad_() for x in make_operands(5, 5))
    out, _ = attention(q, k, v, causal=True, return_lse=True)
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        grad.sum().backward()


def test_decode_reads_only_keys_in_the_window() -> None:
    """Decode must not read keys outside the window."""
    q, k, v = make_operands(2, 50)
    expected = attention(q, k, v, causal=True, window=(7, 0))
    k[:, :41], v[:, :41] = math.nan, math.inf
    torch.testing.assert_close(attention(q, k, v, causal=True, window=(7, 0)), expected)
    out, _ = attention(q, k, v, causal=True, window=(7, 0), sinks=torch.zeros(4), return_lse=True)
    assert out.isfinite().all()


def test_sinks_on_ops_without_sinks() -> None:
    """Compare the decode path of a GPU with the op that supports sinks, also for rows without keys."""
    q, k, v = (x.transpose(1, 2) for x in make_operands(6, 3))
    visible = Window(-1, 0).to_mask(6, 3, torch.device("cpu"))
    for sinks in (None, random_tensor(4), torch.full((4,), -math.inf)):
        expected_out = FORWARD(q, k, v, sinks, None, None, None, -1, 0, True, 0.0, 0.3)
        for actual, expected in zip(attend_beside_sinks(q, k, v, sinks, visible, 0.3), expected_out, strict=True):
            torch.testing.assert_close(actual, expected)


def test_few_rows_run_on_decode_kernels(kernels_on: str) -> None:
    q, k, v = (x.to(kernels_on, torch.bfloat16) for x in make_operands(2, 300, D=64))
    sinks = random_tensor(4).to(kernels_on)
    expected = attention(*(x.float() for x in (q, k, v)), causal=True, window=(200, 0), sinks=sinks, return_lse=True)
    out, lse = attention(q, k, v, causal=True, window=(200, 0), sinks=sinks, return_lse=True)
    torch.testing.assert_close(out.float(), expected[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, expected[1], rtol=1e-3, atol=1e-3)


def test_8_bits_with_windows_and_sinks() -> None:
    q = random_tensor(2, 3, 4, 64, dtype=torch.bfloat16)
    k8, v8 = (random_tensor(2, 40, 2, 64, seed=i).mul(30).to(torch.int8) for i in (1, 2))
    scales = {"k_scale": 1 / 30, "v_scale": 1 / 30}
    k, v, sinks = k8 / 30, v8 / 30, random_tensor(4)
    for arguments in ({"causal": True, "window": (9, 0)}, {"window": (9, 4), "sinks": sinks}):
        out, expected = attention(q, k8, v8, **arguments, **scales), attention(q.float(), k, v, **arguments)
        assert out.dtype == q.dtype and float((out - expected).norm() / expected.norm()) < 1e-2


@pytest.mark.parametrize("sinks", [False, True])
def test_attention_ops_pass_opcheck(device: str, sinks: bool) -> None:
    q, k, v = (x.transpose(1, 2).to(device).requires_grad_() for x in make_operands(9, 12))
    sinks_tensor = random_tensor(4).to(device).requires_grad_() if sinks else None
    torch.library.opcheck(FORWARD, (q, k, v, sinks_tensor, None, None, None, 4, 1, True, 0.0, None))
    out, lse = FORWARD(q, k, v, sinks_tensor, None, None, None, 4, 1, True, 0.0, 0.2)
    kept = [x.detach() for x in (q, k, v, out, lse)]
    grads = (torch.ones_like(kept[3]), torch.ones_like(kept[4]) if sinks else None)
    torch.library.opcheck(BACKWARD, (*grads, *kept, None, None, 4, 1, True, 0.0, 0.2, sinks))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_window_call_equals_eager_call(device: str, dynamic: bool) -> None:
    """Compile a single graph and compare values and gradients with eager."""

    def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        out, lse = attention(q * 1.0, k, v, causal=True, window=(6, 0), sinks=sinks, return_lse=True)
        return out.float().sum() + (lse * 0.5).sum()

    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for Sq, Sk in ((12, 12), (9, 20)):
        leaves = [x.to(device).requires_grad_() for x in (*make_operands(Sq, Sk), random_tensor(4))]
        expected = torch.autograd.grad(call(*leaves), leaves)
        grads = torch.autograd.grad(compiled(*leaves), leaves)
        for actual, exact in zip(grads, expected, strict=True):
            torch.testing.assert_close(actual, exact)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("causal", [False, True, "top_left"])
def test_compiled_window_call_with_symbolic_sizes(device: str, causal: bool | str) -> None:
    """Emulate a growing cache: symbolic sizes must not reach F.sdpa as scalar arguments."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, causal=causal)

    call = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    for Sq, Sk in ((6, 6), (1, 9), (5, 20)):
        q, k, v = (x.to(device) for x in make_operands(Sq, Sk))
        torch.testing.assert_close(call(q, k, v), attend(q, k, v))


def with_window(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    return attention(q, k, v, window=(3, 1), sinks=sinks, return_lse=True)


@pytest.mark.parametrize("dims", [(0, 0, 0, None), (0, 0, 0, 0), (None, 0, 0, None), (0, None, None, 0)], ids=str)
def test_vmap_over_operands_and_sinks(dims: tuple[int | None, ...]) -> None:
    """Map over operands, and over sinks, which all batches share."""
    stacked = (*(torch.stack([x, 2 * x]) for x in make_operands(6, 8)), random_tensor(2, 4))
    inputs = [x if dim == 0 else x[0] for x, dim in zip(stacked, dims, strict=True)]
    mapped = torch.func.vmap(with_window, in_dims=dims)(*inputs)
    for i in range(2):
        expected = with_window(*(x[i] if dim == 0 else x for x, dim in zip(inputs, dims, strict=True)))
        for actual, exact in zip(mapped, expected, strict=True):
            torch.testing.assert_close(actual[i], exact)


@pytest.mark.parametrize("with_sinks", [False, True])
def test_batched_gradients_equal_separate_gradients(with_sinks: bool) -> None:
    """Check batched gradients, as computed for jacobians."""
    leaves = [x.requires_grad_() for x in (*make_operands(6, 8), *([random_tensor(4)] if with_sinks else []))]
    out, lse = with_window(*leaves[:3], leaves[3] if with_sinks else None)
    grads = random_tensor(3, *out.shape, seed=1), random_tensor(3, *lse.shape, seed=2)
    batched = torch.autograd.grad((out, lse), leaves, grads, is_grads_batched=True, retain_graph=True)
    for i in range(3):
        expected = torch.autograd.grad((out, lse), leaves, tuple(x[i] for x in grads), retain_graph=True)
        for actual, exact in zip(batched, expected, strict=True):
            torch.testing.assert_close(actual[i], exact)


# ---- refused calls ----


def test_invalid_arguments_are_refused() -> None:
    q, k, v = make_operands(5, 9)
    for error, message, arguments in (
        (ValueError, r"window must be \(left, right\), .*, but got 3", {"window": 3}),
        (ValueError, r"window must be .*, but got \(1, 2, 3\)", {"window": (1, 2, 3)}),
        (ValueError, "each a number of keys, -1 or None", {"window": (-2, 0)}),
        (ValueError, "each a number of keys, -1 or None", {"window": (1.5, 0)}),
        (ValueError, "each a number of keys, -1 or None", {"window": (True, 0)}),
        (
            ValueError,
            r"sinks must be a floating-point tensor of shape \(Hq,\) = \(4,\), .* but got .* \(3,\)",
            {"sinks": torch.zeros(3)},
        ),
        (
            ValueError,
            r"sinks must be a floating-point tensor .*, but got torch.int64 \(4,\) on cpu",
            {"sinks": torch.zeros(4).long()},
        ),
        (
            ValueError,
            r"on meta only if q is, but got torch.float32 \(4,\) on meta",
            {"sinks": torch.zeros(4, device="meta")},
        ),
        (ValueError, "sinks must be .*, but got float", {"sinks": 1.0}),
        (ValueError, "softcap must be a finite number, .*, but got -1.0", {"softcap": -1.0}),
        (ValueError, "softcap must be a finite number, .*, but got None", {"softcap": None}),
        (ValueError, "softcap must be a finite number, .*, but got inf", {"softcap": math.inf}),
        (ValueError, "sinks must be .*, but got torch.complex64", {"sinks": torch.zeros(4, dtype=torch.complex64)}),
    ):
        with pytest.raises(error, match=message):
            attention(q, k, v, **arguments)
    for tensors in ((q, k, v.double()), (q.int(), k.int(), v.int())):
        for arguments in ({}, {"window": (1, 1), "return_lse": True}):
            with pytest.raises(ValueError, match="must have one dtype|must have floating-point dtypes"):
                attention(*tensors, **arguments)


def test_autocast_acts_as_on_f_sdpa(device: str) -> None:
    """Autocast must have the effect of autocast on F.scaled_dot_product_attention, for each implementation."""
    q, k, v = (x.to(device) for x in make_operands(9, 9))
    expected = attention(q, k, v)
    with torch.autocast(device, dtype=torch.bfloat16):
        used = torch.full((2,), 9, dtype=torch.int32, device=device)
        for arguments in ({}, {"sinks": torch.full((4,), -math.inf)}, {"seqused_k": used}):
            out = attention(q, k, v.bfloat16(), **arguments)
            assert out.dtype == torch.bfloat16
            torch.testing.assert_close(out.float(), expected, rtol=5e-2, atol=2e-2)


def test_ops_refuse_invalid_arguments(device: str) -> None:
    q, k, v = (x.transpose(1, 2).to(device, torch.bfloat16) for x in make_operands(5, 9, D=64))
    sinks = torch.zeros(4, device=device)
    for arguments in (
        (q, k, v, sinks, None, None, None, -2, 0, True, 0.0),
        (q, k, v, sinks, None, None, None, 2, 0, True, -1.0),
        (q, k, v, sinks[:3], None, None, None, 1, 0, True, 0.0),
        (q[0], k, v, None, None, None, None, 1, 0, True, 0.0),
        (q, k[:, :, :4], v, None, None, None, None, 1, 0, True, 0.0),
        (q, k, v, None, torch.tensor([0, 5, 5], dtype=torch.int32), None, None, 1, 0, True, 0.0),
    ):
        with pytest.raises(RuntimeError):
            FORWARD(*arguments, None)


def test_no_keys_and_no_rows() -> None:
    q, k, v = make_operands(5, 0)
    out, lse = attention(q, k, v, causal=True, sinks=torch.arange(4.0), return_lse=True)
    assert (out == 0).all() and torch.equal(lse, torch.arange(4.0).view(1, 4, 1).expand(2, 4, 5))
    out, lse = attention(*make_operands(0, 5), causal=True, return_lse=True)
    assert out.shape == (2, 0, 4, 16) and lse.shape == (2, 4, 0)


@pytest.mark.parametrize("mode", ["math", "stock"])
def test_math_and_stock_blocks_run_reference_math(device: str, mode: str) -> None:
    import torch_flashplug

    q, k, v = (x.to(device, torch.bfloat16) for x in make_operands(40, 40, D=64))
    bindings.counters(reset=True)
    with torch_flashplug.sdpa_backend(mode):
        attention(q, k, v, window=(3, 3), return_lse=True)
    assert bindings.counters(reset=True)["ours_fwd"] == 0


def test_window_mask_matches_the_definition() -> None:
    for window in (Window(2, 1), Window(0, 0, bottom_right=False), Window(-1, 0), Window(3, -1)):
        for Sq, Sk in ((4, 6), (6, 4), (3, 3)):
            visible = window.to_mask(Sq, Sk, torch.device("cpu"))
            ahead = Sk - Sq if window.bottom_right else 0
            for i in range(Sq):
                for j in range(Sk):
                    behind = j - i - ahead
                    left, right = (9 if bound < 0 else bound for bound in window[:2])
                    inside = -left <= behind <= right
                    assert bool(visible[i, j]) == inside


def test_window_over_all_keys_equals_f_sdpa(device: str) -> None:
    q, k, v = (x.to(device) for x in make_operands(6, 6))
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    for arguments, settings in (({"window": (5, 5)}, {}), ({"causal": True, "window": (5, None)}, {"is_causal": True})):
        expected = F.scaled_dot_product_attention(*turned, **settings, enable_gqa=True).transpose(1, 2)
        assert torch.equal(attention(q, k, v, **arguments), expected)
