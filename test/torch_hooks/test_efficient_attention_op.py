"""The efficient attention op of torch, registered over stock.

Our kernels serve lower-right causal masks that flash attention cannot run. Operands that stock misreads are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import interpreted_kernels
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, bias, sdpa_kernel

from torch_flashplug import attention, explain, sdpa_backend
from torch_flashplug.dispatch import bindings
from torch_flashplug.torch_hooks import efficient_attention_op

SEED, LOWER_RIGHT = 20261127, 2
EFFICIENT = SDPBackend.EFFICIENT_ATTENTION
aten = torch.ops.aten


@pytest.fixture
def patched_device(kernels_on: str) -> Iterator[str]:
    with interpreted_kernels.installed_at(efficient_attention_op, kernels_on):
        yield kernels_on


def random_leaves(
    device: str, *sizes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, offset: int = 0
) -> list[Tensor]:
    """Return leaves that begin `offset` elements after an aligned address."""
    leaves = []
    for number, size in enumerate(sizes):
        values = torch.randn(size, generator=torch.Generator().manual_seed(SEED + number)).to(device, dtype)
        buffer = torch.zeros(values.numel() + offset, dtype=dtype, device=device)
        leaves.append(buffer[offset:].view(size).copy_(values).detach().requires_grad_())
    return leaves


def attend_in_fp32(leaves: list[Tensor], grad_out: Tensor) -> tuple[Tensor, ...]:
    """Return output and gradients of operands (B, S, H, D) in fp32, with bottom-right causal masking."""
    wide = [x.detach().float().requires_grad_() for x in leaves]
    with sdpa_backend("math"):
        out = attention(*wide, causal="bottom_right")
    return out.detach(), *torch.autograd.grad(out, wide, grad_out.float())


def assert_near(actual: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> None:
    for result, expected in zip(actual, exact, strict=True):
        assert (
            result.shape == expected.shape
            and float((result.float() - expected.float()).norm() / expected.norm()) < 1e-2
        )


# ---- calls served by the plugin ----


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize(("Sq", "dims"), [(96, (64, 128)), (70, (64, 64)), (160, (64, 64))], ids=str)
def test_lower_right_masks_of_many_rows_run_on_kernels(
    patched_device: str, Sq: int, dims: tuple[int, int], offset: int
) -> None:
    """Call the op as torch.nn.attention.bias does.

    The first rows of the shape (160, 130) see no key.
    """
    D, Dv = dims
    leaves = random_leaves(patched_device, (2, Sq, 2, D), (2, 130, 2, D), (2, 130, 2, Dv), offset=offset)
    bindings.counters(reset=True)
    with sdpa_backend("fa3"):
        out, lse, _, _, rows, keys = aten._efficient_attention_forward(
            *leaves, None, None, None, None, None, 0.0, LOWER_RIGHT, True
        )
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    grads = torch.autograd.grad(out, leaves, grad_out)
    counts = bindings.counters(reset=True)
    assert counts["ours_fwd"] == counts["ours_bwd"] == 1
    assert out.is_contiguous() and (rows, keys) == (Sq, 130) and lse.shape == (2, 2, -(-Sq // 32) * 32)
    assert bool(lse[..., Sq:].isposinf().all()) and [x.shape for x in grads] == [x.shape for x in leaves]
    assert_near((out.detach(), *grads), attend_in_fp32(leaves, grad_out))


@pytest.mark.parametrize("change", ["few_rows", "plain", "dropout", "not_allowed", "stock", "auto"])
def test_unsupported_calls_run_stock(patched_device: str, change: str) -> None:
    """Check calls that stay with stock; in auto, calls without a measured row."""
    rows = 8 if change == "few_rows" else 96
    q, k, v = (x.detach() for x in random_leaves(patched_device, (1, rows, 2, 64), (1, 130, 2, 64), (1, 130, 2, 128)))
    kind, p = (0 if change == "plain" else LOWER_RIGHT), (0.1 if change == "dropout" else 0.0)
    bindings.counters(reset=True)

    def call() -> None:
        with sdpa_kernel(EFFICIENT if change == "not_allowed" else list(SDPBackend.__members__.values())[1:]):
            with sdpa_backend(change if change in {"stock", "auto"} else "fa3"):
                aten._efficient_attention_forward(q, k, v, None, None, None, None, None, p, kind)

    if (
        patched_device == "cpu"
    ):  # A CPU build of torch has no such kernel; the kernel of a CUDA build refuses CPU tensors.
        with pytest.raises(RuntimeError, match="no efficient attention here|must be a CUDA tensor"):
            call()
    else:
        call()
    assert bindings.counters(reset=True)["ours_fwd"] == 0


@pytest.mark.parametrize(("dims", "served"), [((64, 64), "fa3"), ((64, 128), "stock"), ((264, 264), "stock")])
def test_explain_reports_lower_right_masks(dims: tuple[int, int], served: str) -> None:
    D, Dv = dims
    q, k, v = (torch.empty(2, 4, s, d, dtype=torch.bfloat16, device="meta") for s, d in ((96, D), (130, D), (130, Dv)))
    plan = explain(q, k, v, bias.causal_lower_right(96, 130), device="h100")
    assert plan.backend == served and "lower right" in plan.call
    few = explain(q[:, :, :8], k, v, bias.causal_lower_right(8, 130), device="h100")
    why = "64 query rows" if D < 256 else "head dims up to 256"
    assert few.backend == "stock" and all(why in reason for reason in few.reasons.values())
    with sdpa_backend("fa3"):
        assert explain(q, k, v, bias.causal_lower_right(96, 130), device="h100").backend == (
            "fa3" if D < 256 else "stock"
        )
    long = [x.new_empty(2, 16, s, x.shape[3]) for x, s in ((q, 2048), (k, 4096), (v, 4096))]
    assert explain(*long, bias.causal_lower_right(2048, 4096), device="h100").backend == ("fa3" if D < 256 else "stock")
    with sdpa_backend("stock"):
        assert explain(q, k, v, bias.causal_lower_right(96, 130), device="h100").backend == "stock"
    square = explain(q, q, q, bias.causal_lower_right(96, 96), device="h100")
    assert square.call == explain(q, q, q, is_causal=True, device="h100").call
    assert explain(q, k, v, bias.causal_upper_left(96, 130), device="h100").call.endswith("causal")


# ---- calls served by stock ----


# dtype, head dims, and the backend that can serve the calls
KINDS: dict[str, tuple[torch.dtype, tuple[int, int], str]] = {
    "mixed_dims": (torch.bfloat16, (64, 128), "fa3"),
    "fp32": (torch.float32, (64, 64), "stock"),
    "fp32_mixed_dims": (torch.float32, (64, 32), "stock"),
}


@pytest.mark.gpu
@pytest.mark.isolated(120)
@pytest.mark.parametrize("offset", [0, 1, 4])
@pytest.mark.parametrize("backend", ["auto", "fa3", "stock"])
@pytest.mark.parametrize("rows", [8, 96])
@pytest.mark.parametrize("kind", KINDS)
def test_lower_right_masks_at_any_address(kind: str, rows: int, backend: str, offset: int) -> None:
    """Check the masks of torch.nn.attention.bias, unmodified.

    In stock alone, odd addresses raise or end the CUDA context (fp32).
    """
    dtype, (D, Dv), family = KINDS[kind]
    leaves = random_leaves("cuda", (2, 4, rows, D), (2, 4, 130, D), (2, 4, 130, Dv), dtype=dtype, offset=offset)
    bindings.counters(reset=True)
    with sdpa_backend(backend):
        out = F.scaled_dot_product_attention(*leaves, bias.causal_lower_right(rows, 130))
    (grad_out,) = random_leaves(
        "cuda", (2, rows, 4, Dv), dtype=dtype, offset=offset
    )  # in the memory order of the kernel
    grads = torch.autograd.grad(out, leaves, grad_out.detach().transpose(1, 2))
    torch.cuda.synchronize()
    served = backend == family == "fa3" and rows > 64
    counts = bindings.counters(reset=True)
    assert counts["ours_fwd"] == counts["ours_bwd"] == served
    exact = attend_in_fp32([x.detach().transpose(1, 2) for x in leaves], grad_out.detach())
    assert_near((out.detach(), *grads), tuple(x.transpose(1, 2) for x in exact))


@pytest.mark.gpu
@pytest.mark.parametrize("learns", [False, True], ids=["forward", "gradients"])
def test_auto_serves_long_lower_right_masks(learns: bool) -> None:
    leaves = random_leaves("cuda", (2, 16, 2048, 64), (2, 16, 4096, 64), (2, 16, 4096, 128))
    leaves = [x.detach().requires_grad_(learns) for x in leaves]
    bindings.counters(reset=True)
    out = F.scaled_dot_product_attention(*leaves, bias.causal_lower_right(2048, 4096))
    (grad_out,) = random_leaves("cuda", (2, 2048, 16, 128))
    grads = torch.autograd.grad(out, leaves, grad_out.detach().transpose(1, 2)) if learns else ()
    counts = bindings.counters(reset=True)
    assert counts["ours_fwd"] == 1 and counts["ours_bwd"] == learns
    exact = attend_in_fp32([x.detach().transpose(1, 2) for x in leaves], grad_out.detach())
    assert_near((out.detach(), *grads), tuple(x.transpose(1, 2) for x in exact[: 1 + len(grads)]))


@pytest.mark.gpu
@pytest.mark.parametrize("grad", [False, True])
def test_calls_without_a_mask_stay_with_stock(grad: bool) -> None:
    x = torch.randn(1, 2, 16, 64, device="cuda", requires_grad=grad)
    with sdpa_kernel(EFFICIENT):
        out = F.scaled_dot_product_attention(x, x, x)
    wide = x.detach().double()
    exact = (wide @ wide.mT * 0.125).softmax(-1) @ wide
    torch.testing.assert_close(out.detach().double(), exact, rtol=1e-4, atol=1e-4)


MASKS: dict[str, Callable[[Callable[..., Tensor]], Tensor]] = {  # memory layouts of a mask
    "whole": lambda odd: odd(8, 7, 512),
    "odd_length": lambda odd: odd(8, 7, 504)[..., :500],
    "of_keys": lambda odd: odd(1, 1, 512).expand(8, 7, 512),
    "rows_apart": lambda odd: odd(8, 7, 1024)[..., :512],
    "of_a_batch": lambda odd: odd(5, 1, 7, 512),
}


@pytest.mark.gpu
@pytest.mark.isolated(120)
@pytest.mark.parametrize("offset", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("learned", [False, True], ids=["mask", "learned"])
@pytest.mark.parametrize("kind", MASKS)
def test_masks_at_any_address_are_read_right(kind: str, learned: bool, dtype: torch.dtype, offset: int) -> None:
    """Check masks at unaligned addresses.

    The efficient attention of stock reads 16 bytes of a mask at a time. Without the plugin, stock raises or ends the
    CUDA context.
    """

    def odd(*size: int) -> Tensor:
        return random_leaves("cuda", size, dtype=dtype, offset=offset)[0].detach()

    mask = MASKS[kind](odd).requires_grad_(learned)
    Sk = mask.shape[-1]
    q = random_leaves("cuda", (1, 8, 7, 128), dtype=dtype)[0].detach().expand(5, 8, 7, 128).requires_grad_()
    k, v = random_leaves("cuda", (5, 8, Sk, 128), (5, 8, Sk, 8), dtype=dtype, offset=1)
    with sdpa_backend("stock"), sdpa_kernel(EFFICIENT):
        out = F.scaled_dot_product_attention(q, k, v, mask)
    (grad_out,) = random_leaves("cuda", (5, 7, 8, 8), dtype=dtype, offset=1)
    inputs_with_grad = [q, k, v, *[mask] * learned]
    grads = torch.autograd.grad(out, inputs_with_grad, grad_out.detach().transpose(1, 2))
    torch.cuda.synchronize()
    wide = [x.detach().double().requires_grad_() for x in (q, k, v, mask)]
    exact = (wide[0] @ wide[1].mT * 128**-0.5 + wide[3]).softmax(-1) @ wide[2]
    answers = torch.autograd.grad(exact, wide[: len(inputs_with_grad)], grad_out.detach().transpose(1, 2).double())
    assert_near((out.detach(), *grads), (exact.detach(), *answers))
