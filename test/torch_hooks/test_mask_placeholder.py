"""Bool masks from F.sdpa to our op.

A placeholder replaces the mask between the choice hook and the op. The placeholder belongs to a single call, and no
other code can observe the placeholder.
"""

from __future__ import annotations

import contextlib
import functools
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from compile_cpp import TORCH
from device_backend import DeviceBackend
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import torch_flashplug
from torch_flashplug.dispatch import bindings

OVERRIDEABLE_OP = torch.ops.aten._scaled_dot_product_fused_attention_overrideable
CAUSAL = torch.ones(128, 128, dtype=torch.bool).tril()
SCRIPT = """
def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
"""


def attend_in_fp64(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = (q.double() @ k.double().mT * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).nan_to_num() @ v.double()


def check(out: Tensor, *call: Tensor) -> None:
    torch.testing.assert_close(out.double(), attend_in_fp64(*call), atol=2e-2, rtol=2e-2)


class PassThroughMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def causal_mask_on(device_backend: DeviceBackend) -> Tensor:
    return CAUSAL.to(device_backend.device)


def test_masked_calls_run_on_kernels(hooked_backend: DeviceBackend) -> None:
    q, k, v = hooked_backend.qkv()
    for mask in (
        causal_mask_on(hooked_backend),
        ~causal_mask_on(hooked_backend),
        causal_mask_on(hooked_backend)[None],
        causal_mask_on(hooked_backend)[:1],
    ):
        check(F.scaled_dot_product_attention(q, k, v, mask), q, k, v, mask)
        assert hooked_backend.pop_path_counts()["ours_fwd"] == 1


def test_mask_applies_to_a_single_call(device_backend: DeviceBackend) -> None:
    """Repeat the query of a masked call with a float mask, without a mask, and with the op itself."""
    q, k, v = device_backend.qkv()
    mask, every = causal_mask_on(device_backend), torch.ones_like(causal_mask_on(device_backend))
    zeros = torch.zeros(128, 128, dtype=q.dtype, device=q.device)
    for call in (
        lambda: F.scaled_dot_product_attention(q, k, v, zeros),
        lambda: F.scaled_dot_product_attention(q, k, v),
        lambda: OVERRIDEABLE_OP(q, k, v, zeros)[0],
        lambda: OVERRIDEABLE_OP(q, k, v)[0],
    ):
        check(F.scaled_dot_product_attention(q, k, v, mask), q, k, v, mask)
        check(call(), q, k, v, every)


def call_without_op(device_backend: DeviceBackend, *call: Tensor) -> None:
    """Call F.sdpa while the op is not registered; the choice hook is still asked."""
    device_backend.pop_path_counts()
    bindings.unregister_ops()
    try:
        with pytest.raises(NotImplementedError):
            F.scaled_dot_product_attention(*call)
    finally:
        bindings.register_ops(device_backend.device.upper())
    assert device_backend.pop_path_counts()["routed_ours"] == 1


def test_mask_of_a_failed_call_is_dropped(device_backend: DeviceBackend) -> None:
    q, k, v = device_backend.qkv()
    mask, zeros = causal_mask_on(device_backend).clone(), torch.zeros(128, 128, dtype=q.dtype, device=q.device)
    for _ in range(2):
        call_without_op(device_backend, q, k, v, mask)
        check(OVERRIDEABLE_OP(q, k, v, zeros)[0], q, k, v, torch.ones_like(mask))
        check(F.scaled_dot_product_attention(q, k, v, mask), q, k, v, causal_mask_on(device_backend))
    assert torch.equal(mask, causal_mask_on(device_backend))


@pytest.mark.parametrize("expanded", [False, True])
def test_mask_row_shared_by_262144_queries_is_served(device_backend: DeviceBackend, expanded: bool) -> None:
    """Pass a mask shared by all queries, preprocessed as 128 rows.

    A separate mask row for each query would have more scores than kernels can index.
    """
    rows = 1 << 18
    q = torch.zeros(1, 1, rows, 64, dtype=torch.bfloat16, device=device_backend.device)
    row = torch.ones(1, 1, 1, rows, dtype=torch.bool, device=device_backend.device)
    dense = torch.ones(2 * rows, dtype=torch.bool, device=device_backend.device).as_strided((rows, rows), (1, 1))
    row = row.expand(-1, -1, rows, -1) if expanded else row
    call_without_op(device_backend, q, q, q, row)
    assert torch_flashplug.explain(q, q, q, row, device="h100").backend == "fa3"
    refused = torch_flashplug.explain(q, q, q, dense, device="h100")
    assert refused.backend == "stock" and "too large: the kernels cannot index all scores" in refused.reasons["fa3"]


def test_masked_calls_under_a_dispatch_mode_run_on_kernels(device_backend: DeviceBackend) -> None:
    q, k, v = device_backend.qkv()
    mask = causal_mask_on(device_backend)
    device_backend.pop_path_counts()
    with PassThroughMode():
        check(F.scaled_dot_product_attention(q, k, v, mask), q, k, v, mask)
    assert device_backend.pop_path_counts()["ours_fwd"] == 1


def test_traced_function_accepts_any_mask(device_backend: DeviceBackend) -> None:
    """torch.jit.trace records calls, and a placeholder of a mask would become a constant of the trace."""
    q, k, v = device_backend.qkv()

    def attend(*call: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*call)

    traced = torch.jit.trace(attend, (q, k, v, causal_mask_on(device_backend)))
    for mask in (causal_mask_on(device_backend), causal_mask_on(device_backend).mT.contiguous()):
        check(traced(q, k, v, mask), q, k, v, mask)


def test_scripted_function_runs_on_kernels(device_backend: DeviceBackend) -> None:
    q, k, v = device_backend.qkv()
    scripted = torch.jit.CompilationUnit(SCRIPT).attend
    for mask in (causal_mask_on(device_backend), causal_mask_on(device_backend).mT.contiguous()):
        device_backend.pop_path_counts()
        check(scripted(q, k, v, mask), q, k, v, mask)
        assert device_backend.pop_path_counts()["ours_fwd"] == 1


def test_masks_are_per_thread(device_backend: DeviceBackend) -> None:
    """All threads use the same query."""
    q, k, v = device_backend.qkv()
    masks = [causal_mask_on(device_backend).roll(shift, 0) for shift in range(4)]
    outs: dict[int, list[Tensor]] = {}

    def work(number: int) -> None:
        outs[number] = [F.scaled_dot_product_attention(q, k, v, masks[number]) for _ in range(50)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(masks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, thread_outs in outs.items():
        for out in thread_outs:
            check(out, q, k, v, masks[number])


def count_users_of_storage(tensor: Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def test_masks_are_released_after_the_call(device_backend: DeviceBackend) -> None:
    """Neither the call nor autograd may keep the mask. Autograd keeps about a quarter of its size."""
    q, k, v = device_backend.qkv(grad=True)
    mask = causal_mask_on(device_backend).repeat(4, 4).contiguous()
    q, k, v = (x.repeat(1, 1, 4, 1) for x in (q, k, v))
    before = count_users_of_storage(mask)
    out = F.scaled_dot_product_attention(q, k, v, mask)
    assert device_backend.pop_path_counts()["ours_fwd"] == 1
    kept = out.grad_fn._saved_attn_bias
    assert kept.dtype == torch.int32 and kept.nbytes <= 0.4 * mask.nbytes
    assert count_users_of_storage(mask) == before
    call_without_op(device_backend, q, k, v, mask)
    F.scaled_dot_product_attention(q, k, v)
    assert count_users_of_storage(mask) == before


def test_a_mask_may_change_before_the_backward(hooked_backend: DeviceBackend) -> None:
    """Gradients must use the mask of the forward."""
    q, k, v = hooked_backend.qkv(grad=True)
    mask = causal_mask_on(hooked_backend).clone()
    out = F.scaled_dot_product_attention(q, k, v, mask)
    assert hooked_backend.pop_path_counts()["ours_fwd"] == 1
    mask.logical_not_()
    grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    exact_inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact = attend_in_fp64(*exact_inputs, causal_mask_on(hooked_backend))
    for actual, expected in zip(grads, torch.autograd.grad(exact.square().sum(), exact_inputs), strict=True):
        torch.testing.assert_close(actual.double(), expected, atol=0.2, rtol=0.2)


def test_gradients_of_a_masked_call_are_right(hooked_backend: DeviceBackend) -> None:
    for forced in ("auto", "fa3"):
        q, k, v = hooked_backend.qkv(grad=True)
        mask = causal_mask_on(hooked_backend).clone()
        mask[5] = False
        hooked_backend.pop_path_counts()
        with torch_flashplug.sdpa_backend(forced):
            out = F.scaled_dot_product_attention(q, k, v, mask)
            grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
        assert hooked_backend.pop_path_counts()["ours_fwd"] == 1
        exact_inputs = [x.detach().double().requires_grad_() for x in (q, k, v)]
        exact = attend_in_fp64(*exact_inputs, mask)
        for actual, expected in zip(grads, torch.autograd.grad(exact.square().sum(), exact_inputs), strict=True):
            torch.testing.assert_close(actual.double(), expected.nan_to_num(), atol=0.2, rtol=0.2)


def test_an_int32_mask_is_refused_as_torch_does(device_backend: DeviceBackend) -> None:
    """int32 is the dtype of the bitmask that kernels read instead of a mask."""
    q, k, v = device_backend.qkv()
    numbers = torch.ones(1, 1, 60000, dtype=torch.int32, device=q.device)
    with pytest.raises(RuntimeError, match="Expected attn_mask dtype to be bool or float"):
        F.scaled_dot_product_attention(q, k, v, numbers)
    with pytest.raises(RuntimeError, match="attn_mask must be bool, float32 .* got int32"):
        OVERRIDEABLE_OP(q, k, v, numbers)


def test_sparse_mask_falls_back_to_stock(device_backend: DeviceBackend) -> None:
    q, k, v = device_backend.qkv()
    with device_backend.disabled():
        with pytest.raises((RuntimeError, NotImplementedError)) as stock:
            F.scaled_dot_product_attention(q, k, v, causal_mask_on(device_backend).to_sparse())
    with pytest.raises(type(stock.value)):
        F.scaled_dot_product_attention(q, k, v, causal_mask_on(device_backend).to_sparse())
    assert device_backend.pop_path_counts().get("routed_ours", 0) == 0


CALLER = """
#include <ATen/ops/scaled_dot_product_attention.h>
#include <torch/library.h>
// Two calls with a mask that is the caller's own variable: results, and how often it was another one afterwards.
std::tuple<at::Tensor, at::Tensor, int64_t> twice(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                  const at::Tensor& mask) {
  const std::optional<at::Tensor> mine = mask;
  const at::Tensor first = at::scaled_dot_product_attention(q, k, v, mine);
  int64_t others = !mine->is_same(mask);
  const at::Tensor second = at::scaled_dot_product_attention(q, k, v, mine);
  others += !mine->is_same(mask);
  return {first, second, others};
}
// One that other threads could read.
at::Tensor shared(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& mask) {
  const auto anyones = std::make_unique<const std::optional<at::Tensor>>(mask);
  return at::scaled_dot_product_attention(q, k, v, *anyones);
}
TORCH_LIBRARY(mask_caller, m) {
  m.def("twice", &twice);
  m.def("shared", &shared);
}
"""


def test_cpp_caller_keeps_the_mask_variable(device_backend: DeviceBackend, tmp_path: Path) -> None:
    library = tmp_path / "caller.so"
    options = ("-std=c++20", "-shared", "-fPIC", "-O0", "-isystem", str(TORCH / "include"))
    libraries = (f"-L{TORCH / 'lib'}", "-lc10", "-ltorch_cpu")
    command = ["c++", *options, "-x", "c++", "-", "-x", "none", *libraries, "-o", str(library)]
    subprocess.run(command, input=CALLER, text=True, check=True)
    torch.ops.load_library(library)
    q, k, v = device_backend.qkv()
    mask = causal_mask_on(device_backend).clone()
    device_backend.pop_path_counts()
    *outs, num_replaced = torch.ops.mask_caller.twice(q, k, v, mask)
    assert (
        device_backend.pop_path_counts()["ours_fwd"] == 2
        and num_replaced == 0
        and torch.equal(mask, causal_mask_on(device_backend))
    )
    for out in outs:
        check(out, q, k, v, mask)
    check(torch.ops.mask_caller.shared(q, k, v, mask), q, k, v, mask)
    assert device_backend.pop_path_counts().get("ours_fwd", 0) == 0


def test_op_accepts_either_a_mask_or_a_causal_mode(device_backend: DeviceBackend) -> None:
    q, k, v = device_backend.qkv()
    op = torch.ops.torch_flashplug.sdpa_fwd
    check(op(q, k, v, causal_mask_on(device_backend), 0.0, 0, None, 0)[0], q, k, v, causal_mask_on(device_backend))
    with pytest.raises(RuntimeError, match="causal_mode must be 0 if attn_bias is given"):
        op(q, k, v, causal_mask_on(device_backend), 0.0, 1, None, 0)
    with pytest.raises(RuntimeError, match="causal_mode is 7"):
        op(q, k, v, None, 0.0, 7, None, 0)
    with pytest.raises(RuntimeError, match="attn_mask must be bool, float32 .* got int32"):
        op(q, k, v, causal_mask_on(device_backend).int(), 0.0, 0, None, 0)


# ---- saved tensors, and hooks that receive saved tensors before the op has run ----


def saved_on_cpu() -> object:
    return torch.autograd.graph.save_on_cpu()


def saved_as_copies() -> object:
    return torch.autograd.graph.saved_tensors_hooks(Tensor.clone, lambda tensor: tensor)


@pytest.mark.parametrize("rows", [4, 128])
@pytest.mark.parametrize("hooks", [contextlib.nullcontext, saved_on_cpu, saved_as_copies])
@pytest.mark.parametrize("forced", ["auto", "fa3"])
def test_saved_tensor_hooks_receive_the_mask(kernels_on: str, hooks: Callable, rows: int, forced: str) -> None:
    """Hooks copy a saved tensor before the mask metadata is filled in, so hooks receive the bytes of the mask."""
    mask = CAUSAL[-rows:].to(kernels_on)
    tensors = [tensor.to(kernels_on, torch.bfloat16) for tensor in torch.randn(3, 1, 2, 128, 64).unbind()]
    tensors[0] = tensors[0][:, :, -rows:]
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    bindings.counters(reset=True)
    with torch_flashplug.sdpa_backend(forced), hooks():
        out = F.scaled_dot_product_attention(*leaves, mask)
    result = torch.autograd.grad(out.double().square().sum(), leaves)
    assert bindings.counters()["ours_fwd"] == bindings.counters()["ours_bwd"] == 1
    exact = [tensor.double().requires_grad_() for tensor in tensors]
    for actual, expected in zip(result, torch.autograd.grad(attend_in_fp64(*exact, mask).square().sum(), exact)):
        torch.testing.assert_close(actual.double(), expected, atol=0.1, rtol=0.1)


def test_gradients_of_a_nonreentrant_checkpoint(hooked_backend: DeviceBackend) -> None:
    """The hooks of the checkpoint hold placeholders, and the forward runs again in the backward."""
    mask, grads = causal_mask_on(hooked_backend), []
    for run in (F.scaled_dot_product_attention, functools.partial(checkpoint, F.scaled_dot_product_attention)):
        options = {"use_reentrant": False} if isinstance(run, functools.partial) else {}
        inputs = hooked_backend.qkv(grad=True)
        run(*inputs, mask, **options).float().square().sum().backward()
        grads.append([tensor.grad for tensor in inputs])
    assert hooked_backend.pop_path_counts()["ours_fwd"] == 3
    for actual, expected in zip(*grads):
        torch.testing.assert_close(actual, expected)


def test_mask_without_storage_falls_back_to_stock(device_backend: DeviceBackend) -> None:
    q, k, v = device_backend.qkv()
    zero_mask = torch._efficientzerotensor((128, 128), dtype=torch.bool, device=device_backend.device)
    F.scaled_dot_product_attention(q, k, v, zero_mask)
    assert device_backend.pop_path_counts() == {"routed_stock": 1} and bindings.take_last_exit() == "mask"
