"""Gradients of rows with scores far below zero, for which cuDNN returns NaN.

The fault needs a single query row, or keys that end in the middle of a block.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from device_backend import use_device_backend
from stock_bug_inputs import assert_matches_fp64, random_bf16
from torch.nn.attention import SDPBackend

from torch_flashplug.api.backend import DEVICES as GPUS
from torch_flashplug.dispatch import bindings
from torch_flashplug.testing import Inputs, new_case
from torch_flashplug.torch_hooks import describe_call

CUDNN, FLASH, MATH = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH
sdpa = F.scaled_dot_product_attention


@pytest.mark.parametrize("rows, keys, change, faulty", [
    (1, 128, {}, True), (9, 192, {}, True), (2, 128, {}, False), (9, 200, {}, False),
    (1, 192, {"is_causal": True}, False), (1, 128, {"grad": False}, False), (1, 128, {"gpu": "a100"}, False),
    (9, 192, {"dropout_p": 0.1}, True), (9, 192, {"grad": False, "dropout_p": 0.1}, True),
])  # fmt: skip
def test_unmasked_partial_blocks_are_a_cudnn_fault(
    rows: int, keys: int, change: dict[str, object], faulty: bool
) -> None:
    """Check the fault of cuDNN gradients on GPUs where the fault was found.

    With dropout, the forward without gradients runs on the backend of the forward with gradients: a reentrant
    checkpoint runs both, and both must drop the same probabilities.
    """
    settings = {"is_causal": False, "grad": True, "gpu": "h100", "dropout_p": 0.0} | change
    query, key = (torch.empty(2, 4, size, 64, dtype=torch.bfloat16) for size in (rows, keys))
    query.requires_grad_(settings["grad"])
    arguments = (query, key, key, None, settings["dropout_p"], settings["is_causal"], None)
    with use_device_backend("cpu"):
        bindings.set_facts_override(GPUS[settings["gpu"]])
        choice, reason = describe_call.corrected_choice(CUDNN.value, *arguments)
        assert describe_call.corrected_choice(FLASH.value, *arguments) == (FLASH.value, "")
    # With the CPU stub backend, no call suits the efficient attention.
    assert choice == (MATH if faulty else CUDNN).value and ("NaN" in reason) is faulty


LOW = {  # heads, lengths, head dims
    "one_row": ((1, 2, 2), (1, 128), (64, 64)),
    "one_row_of_groups": ((2, 8, 2), (1, 200), (128, 128)),
    "one_row_of_wide_heads": ((1, 2, 2), (1, 64), (256, 256)),
    "half_block": ((1, 2, 2), (9, 192), (80, 80)),
    "half_block_of_mixed_dims": ((1, 2, 2), (70, 64), (192, 128)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("level", [-80.0, -89.0, -122.0, -300.0])
@pytest.mark.parametrize("name", LOW)
def test_gradients_are_right_for_very_negative_lse(name: str, level: float) -> None:
    """cuDNN returns NaN below -88.7."""
    heads, (Sq, Sk), (D, Dv) = LOW[name]
    torch.manual_seed(1)
    q, k, v = (
        random_bf16(*heads[:2], Sq, D) * 0.1,
        random_bf16(heads[0], heads[2], Sk, D) * 0.1,
        random_bf16(heads[0], heads[2], Sk, Dv),
    )
    q[..., 0], k[..., 0] = 1.0, (level - math.log(Sk)) * D**0.5
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    bindings.counters(reset=True)
    out = sdpa(*leaves, enable_gqa=True)
    inputs = Inputs(*(tensor.detach() for tensor in leaves), random_bf16(*out.shape))
    grads = torch.autograd.grad(out, leaves, inputs.grad_out)
    assert bindings.counters()["ours_bwd"] == 1
    assert_matches_fp64(name, new_case(name, heads, (Sq, Sk), (D, Dv)), inputs, out.detach(), grads)
