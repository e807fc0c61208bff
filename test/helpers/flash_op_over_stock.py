"""Stock flash attention below the plugin's op registration, on a CPU.

test_flash_attention_op.py runs the file in a separate process, with a library built from stub_libtorch_cuda.cpp. The
checks: each argument arrives, errors of stock are raised, and a backward follows the backend of the forward.
"""

import ctypes
import sys

import torch

ctypes.CDLL(sys.argv[1])  # before the plugin looks for ops of torch

import interpreted_kernels  # noqa: E402
from torch import Tensor  # noqa: E402

import torch_flashplug  # noqa: E402
from torch_flashplug import sdpa_backend  # noqa: E402
from torch_flashplug.dispatch import bindings  # noqa: E402
from torch_flashplug.torch_hooks import flash_attention_op  # noqa: E402

aten = torch.ops.aten
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
OPS = [f"aten::{name}" for name in flash_attention_op._OPS]
x = torch.randn(1, 9, 2, 64, dtype=torch.bfloat16).requires_grad_()
wide = torch.randn(1, 90, 2, 64, dtype=torch.bfloat16)
packed, cu = x.detach()[0].requires_grad_(), torch.tensor([0, 4, 9], dtype=torch.int32)


def expected_stock_args(**changes: float) -> list[float]:
    """Return the arguments that stock reports, for a plain call of 9 rows with the given changes."""
    plain = {"cu_q": -1, "cu_k": -1, "max_q": 9, "max_k": 9, "p": 0, "causal": 0, "debug": 0, "scale": -1, "left": -1}
    return list((plain | {"right": -1, "used": -1, "alibi": -1, "pages": -1, "splits": -1} | changes).values())


def forward(x: Tensor, *cu_seqlens: object, p: float = 0.0, causal: bool = False, **settings: object) -> tuple:
    return aten._flash_attention_forward(x, x, x, *(cu_seqlens or (None, None)), 9, 9, p, causal, False, **settings)


def is_stock_output(out: Tensor) -> bool:
    return bool((out == 7).all())


def arguments_reach_stock() -> None:
    paged = {"seqused_k": cu[:2], "block_table": torch.zeros(2, 1, dtype=torch.int32)}
    packed_args = {"cu_q": 3, "cu_k": 3}
    for call, settings, changes in (
        ((x,), {}, {}),
        ((x,), {"causal": True, "scale": 0.5}, {"causal": 1, "scale": 0.5}),
        ((x,), {"window_size_left": 2, "window_size_right": 3}, {"left": 2, "right": 3}),  # a decode call
        ((packed, cu, cu), {"p": 0.25}, packed_args | {"p": 0.25}),
        ((packed.float(), cu, cu), {"num_splits": 1}, packed_args | {"splits": 1}),
        ((packed, cu, cu), {"alibi_slopes": torch.ones(2)}, packed_args | {"alibi": 2}),
        ((packed[:, :, :60], cu, cu), paged, packed_args | {"used": 2, "pages": 2}),
    ):
        for backend in ("auto", "fa3"):
            with sdpa_backend(backend):
                out, lse, state, *_ = forward(*call, **settings)
            assert (
                is_stock_output(out) and lse.tolist() == expected_stock_args(**changes) and state.storage_offset() == 0
            )
    out = torch.empty_like(packed)
    operands = (packed, packed, packed, cu, cu)
    lse = aten._flash_attention_forward_no_dropout_inplace(out, *operands, 9, 9, 0.5, True, False)
    assert bool((out == 8).all()) and lse.tolist() == expected_stock_args(**packed_args, p=0.5, causal=1)
    assert not any(bindings.counters(reset=True).values())


def errors_of_stock_are_raised() -> None:
    try:
        forward(x.double())
    except NotImplementedError as error:
        assert "stock has no fp64" in str(error)
    else:
        raise AssertionError("stock's error was lost")


def backward_follows_its_forward() -> None:
    """Check that a backward uses the backend of the forward, and not the backend selected for the backward."""
    with sdpa_backend("stock"):
        stock_out = forward(packed, cu, cu, causal=True, window_size_left=6)[0]
    with sdpa_backend("fa3"):
        plugin_out = forward(packed, cu, cu, causal=True)[0]
        (grad,) = torch.autograd.grad(stock_out.float().sum(), packed)
    assert bool((grad == (3 + 16) + (9 + 6) + (9 + 32)).all()) and bindings.counters(reset=True) == expected_counts(
        "ours_fwd"
    )
    with sdpa_backend("stock"):
        torch.autograd.grad(plugin_out.float().sum(), packed)
    assert bindings.counters(reset=True) == expected_counts("ours_bwd")
    # A backward does not support KV lengths, neither in stock nor in our kernels.
    state = forward(packed, cu, cu, seqused_k=cu[1:])[2]
    assert bindings.counters(reset=True) == expected_counts("ours_fwd") and state.storage_offset() == 0


def expected_counts(path: str) -> dict[str, int]:
    return dict.fromkeys(bindings.PATHS, 0) | {path: 1}


def activated_implementation_serves_short_queries() -> None:
    torch.nn.attention.activate_flash_attention_impl("FLASHPLUG")
    flash_attention_op.install("CPU")
    assert not is_stock_output(forward(x, window_size_left=2)[0])
    torch.nn.attention.restore_flash_attention_impl()
    assert is_stock_output(forward(x, window_size_left=2)[0]) and not is_stock_output(
        forward(wide, window_size_left=2)[0]
    )


with interpreted_kernels.enabled():
    flash_attention_op.install("CPU")
    assert all(has_kernel(op, "CPU") for op in OPS)
    bindings.counters(reset=True)
    arguments_reach_stock()
    errors_of_stock_are_raised()
    backward_follows_its_forward()
    activated_implementation_serves_short_queries()
    torch_flashplug.disable()
    assert not any(has_kernel(op, "CPU") for op in OPS)
print("right")
