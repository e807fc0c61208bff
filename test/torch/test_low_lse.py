"""Gradients of rows whose scores are all far below zero, which cuDNN makes NaN: one query row, and keys that end in the
middle of a block.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from faults import check, half
from standin import road_to
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
def test_unmasked_rest_of_blocks_is_a_fault(rows: int, keys: int, change: dict[str, object], faulty: bool) -> None:
    """Of cuDNN's gradients, on the GPUs where it was seen. With dropout a forward without gradients is whose the one
    with them is: a reentrant checkpoint runs both, which must drop the same.
    """
    settings = {"is_causal": False, "grad": True, "gpu": "h100", "dropout_p": 0.0} | change
    query, key = (torch.empty(2, 4, size, 64, dtype=torch.bfloat16) for size in (rows, keys))
    query.requires_grad_(settings["grad"])
    given = (query, key, key, None, settings["dropout_p"], settings["is_causal"], None)
    with road_to("cpu"):
        bindings.set_facts_override(GPUS[settings["gpu"]])
        became, said = describe_call.right_choice(CUDNN.value, *given)
        assert describe_call.right_choice(FLASH.value, *given) == (FLASH.value, "")
    # Beside the stand-in nothing is efficient's.
    assert became == (MATH if faulty else CUDNN).value and ("NaN" in said) is faulty


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
def test_gradients_are_right_where_the_lse_of_rows_is_very_negative(name: str, level: float) -> None:
    """cuDNN gives NaN below -88.7."""
    heads, (Sq, Sk), (D, Dv) = LOW[name]
    torch.manual_seed(1)
    q, k, v = half(*heads[:2], Sq, D) * 0.1, half(heads[0], heads[2], Sk, D) * 0.1, half(heads[0], heads[2], Sk, Dv)
    q[..., 0], k[..., 0] = 1.0, (level - math.log(Sk)) * D**0.5
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    bindings.counters(reset=True)
    out = sdpa(*leaves, enable_gqa=True)
    inputs = Inputs(*(tensor.detach() for tensor in leaves), half(*out.shape))
    grads = torch.autograd.grad(out, leaves, inputs.grad_out)
    assert bindings.counters()["ours_bwd"] == 1
    check(name, new_case(name, heads, (Sq, Sk), (D, Dv)), inputs, out.detach(), grads)
