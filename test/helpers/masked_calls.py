"""Calls of F.sdpa with a bool or float mask: kernel results and gradients, compared with fp64 and with plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from deterministic import deterministic_gradients
from forced_splits import forced_mode, plan_of_forced_call
from fp64_gradients import check_gradients_of_case
from torch import Tensor

import torch_flashplug
from torch_flashplug.dispatch import bindings
from torch_flashplug.testing import Case, Inputs, Masking, assert_lse, assert_within_budget, make_inputs, oracle, plain
from torch_flashplug.testing.oracle import Attention

SEED, BOOL_MASK_SEED = 20261124, 20261123
HEADS = (2, 4, 2)  # B, Hq, Hkv
BACKENDS = {90: "fa3", 80: "fa2"}


def random_mask(*sizes: int, share: float = 0.6) -> Tensor:
    return torch.rand(sizes, generator=torch.Generator().manual_seed(BOOL_MASK_SEED)) < share


def random_bias(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(SEED)) * 2


def bias_dtype(case: Case, wide: bool) -> torch.dtype:
    return torch.float32 if wide else case.torch_dtype


def copy_with_strides(mask: Tensor, device: str, dtype: torch.dtype | None = None) -> Tensor:
    """Copy a mask to a device, and to a dtype, with equal strides and offset."""
    memory = torch.empty(0, dtype=mask.dtype).set_(mask.untyped_storage()).to(device, dtype)
    return memory.as_strided(mask.size(), mask.stride(), mask.storage_offset())


def reference_results(case: Case, inputs: Inputs, mask: Tensor) -> tuple[Attention, Attention]:
    """Return the results of fp64 and of plain torch, with NaN replaced, because masked-out NaN must not be read."""
    clean, masking = [tensor.nan_to_num() for tensor in inputs], Masking(bias=mask)
    return oracle(case, clean, masking), plain(case, clean, masking)


def run_with_references(
    case: Case, mask: Tensor, device: str, backend: str = "fa3", *, inputs: Inputs | None = None, seed: int = SEED
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs of the plugin kernel, of fp64 and of plain torch.

    Args:
        case: sizes of the call.
        mask: the bool or float mask.
        device: device of the tensors.
        backend: the forced backend.
        inputs: query, key and value; by default, the inputs of the case.
        seed: seed of the inputs of the case.
    """
    inputs = make_inputs(case, device, seed) if inputs is None else inputs
    bindings.counters(reset=True)
    with torch_flashplug.sdpa_backend(backend):
        out = F.scaled_dot_product_attention(*inputs, attn_mask=mask, enable_gqa=case.gqa, scale=case.scale)
    assert bindings.counters()["ours_fwd"] == 1
    exact, low = reference_results(case, inputs, mask)
    return out, exact.out, low.out


def check_decode(case: Case, inputs: Inputs, mask: Tensor, num_splits: int = 0, backend: str = "fa3") -> None:
    """Check output and LSE of the plugin op, served by a decode kernel."""
    fact = {torch.bool: "mask", torch.float32: "bias32"}.get(mask.dtype, "bias")
    assert plan_of_forced_call(case, num_splits, backend=backend, **{fact: 1})["kernel"].startswith("decode_")
    bindings.counters(reset=True)
    operands = (*inputs, mask, 0.0, 0, case.scale, forced_mode(num_splits, backend))
    out, lse = torch.ops.torch_flashplug.sdpa_fwd(*operands)[:2]
    assert bindings.counters()["ours_fwd"] == 1
    exact, low = reference_results(case, inputs, mask)
    name = f"{case.name} in {num_splits} splits"
    assert_within_budget(name, out, exact.out, low.out, seed=SEED)
    assert_lse(name, lse, exact.lse, low.lse, seed=SEED)
    assert (out[exact.lse.isneginf()] == 0).all(), "rows without visible keys"


def check_gradients(
    case: Case,
    mask: Tensor,
    device: str,
    *,
    order: bool = False,
    leaf_names: str = "qkv",
    backend: str = "fa3",
    seed: int = SEED,
) -> None:
    """Check the requested gradients of query, key and value from a plugin backward."""
    inputs = make_inputs(case, device, seed)
    leaves = [getattr(inputs, name).requires_grad_() for name in leaf_names]
    bindings.counters(reset=True)
    with torch_flashplug.sdpa_backend(backend), deterministic_gradients(order):
        out = F.scaled_dot_product_attention(*inputs, attn_mask=mask, enable_gqa=case.gqa)
        grads = torch.autograd.grad(out, leaves, inputs.grad_out)
    counts = bindings.counters()
    assert counts["ours_fwd"] == counts["ours_bwd"] == 1
    grads_by_name = dict(zip((f"d{name}" for name in leaf_names), grads, strict=True))
    check_gradients_of_case(case.name, case, inputs, grads_by_name, Masking(bias=mask), seed=seed)
