"""Float masks at any address, in calls with dropout served by the cuDNN attention of stock.

The workaround is in src/hooks/stock_workarounds.cpp.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from stock_bug_inputs import random_bf16
from torch.nn.attention import SDPBackend, sdpa_kernel

from torch_flashplug import sdpa_backend

# cuDNN accepts no dim of 3
MASKS = {"whole": (2, 4, 129), "of_a_batch": (2, 1, 129), "of_all": (129,), "of_keys": (1, 1, 1)}


@pytest.mark.gpu
@pytest.mark.isolated(120)
@pytest.mark.parametrize("names_with_grad", ["", "qkv"])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("D", [192, 240])
@pytest.mark.parametrize("kind", MASKS)
def test_float_masks_with_dropout_at_any_address(kind: str, D: int, offset: int, names_with_grad: str) -> None:
    """Check masks for which cuDNN fails or ends the CUDA context without the plugin.

    The first columns of the output are P with its dropout.
    """
    torch.manual_seed(5)
    p, keys = 0.1, 128
    q, k = (
        random_bf16(2, 4, 129, D).requires_grad_("q" in names_with_grad),
        random_bf16(2, 4, keys, D).requires_grad_("k" in names_with_grad),
    )
    v = torch.eye(keys, D, device="cuda", dtype=q.dtype).expand(2, 4, keys, D).contiguous()
    v.requires_grad_("v" in names_with_grad)
    mask = random_bf16(math.prod(MASKS[kind]) * keys + offset)[offset:].view(*MASKS[kind], keys)
    with sdpa_backend("stock"), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p)
    grad_out = random_bf16(*out.shape)
    leaves = [x for x in (q, k, v) if x.requires_grad]
    grads = torch.autograd.grad(out, leaves, grad_out) if leaves else ()
    torch.cuda.synchronize()
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    kept = out.detach()[..., :keys] != 0
    assert 0.05 < 1 - kept.double().mean() < 0.15
    P = (wide[0] @ wide[1].mT * D**-0.5 + mask.double()).softmax(-1)
    exact = P * kept / (1 - p) @ wide[2]
    answers = (exact, *torch.autograd.grad(exact, wide, grad_out.double()))
    for actual, expected in zip((out, *grads), answers):
        assert float((actual.detach().double() - expected.detach()).norm() / expected.detach().norm()) < 2e-2
