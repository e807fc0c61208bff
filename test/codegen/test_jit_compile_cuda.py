"""Kernels compiled at first use on a GPU: numbers, gradients on the thread of autograd, and graphs.

Each test starts with an empty cache and without kernel packs. The tests are skipped where the compiler is not
installed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from torch_flashplug import env
from torch_flashplug.codegen import dsl

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(dsl.version() is None, reason="the compiler (CuTe DSL) is not installed"),
]

PRELUDE = """
import os, subprocess, sys, torch, torch_flashplug
import torch.nn.functional as F
from torch_flashplug.api import startup
from torch_flashplug.dispatch import bindings
bindings.clear_packs()
startup.push_tables()
bindings.counters(reset=True)
torch.manual_seed(0)
q, k, v, grad_out = (torch.randn(1, 16, 512, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4))

def exact(q, k, v):
    scores = (q.double() @ k.double().mT / q.shape[-1] ** 0.5)
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cuda").triu(1)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v.double()

def error(result, expected):
    return float((result.double() - expected).norm() / expected.norm())
"""

TRAIN = """
leaves = [x.clone().requires_grad_() for x in (q, k, v)]
out = F.scaled_dot_product_attention(*leaves, is_causal=True)
grads = torch.autograd.grad(out, leaves, grad_out)
doubles = [x.double().requires_grad_() for x in (q, k, v)]
expected = exact(*doubles)
assert error(out, expected) < 0.005, error(out, expected)
for grad, expected_grad in zip(grads, torch.autograd.grad(expected, doubles, grad_out.double())):
    assert error(grad, expected_grad) < 0.01, error(grad, expected_grad)
counts = bindings.counters()
assert counts["ours_fwd"] == counts["ours_bwd"] == 1, counts
"""

GRAPH = """
with torch_flashplug.sdpa_backend("stock"):
    F.scaled_dot_product_attention(q, k, v, is_causal=True)  # cuDNN allocates at its first call, which graphs forbid

def record():
    bindings.counters(reset=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert error(out, exact(q, k, v)) < 0.005
    return bindings.counters()["ours_fwd"]

cold = record()
shape = ",".join(map(str, q.shape))
command = [sys.executable, "-m", "torch_flashplug", "warmup", "--shapes", shape, shape, "--causal", "--out",
           os.environ["CACHE"]]
subprocess.run(command, check=True)
assert (cold, record()) == (0, 1)
"""


def run(program: str, cache: Path) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {env.CACHE_DIR.name: str(cache), "CACHE": str(cache)}
    command = [sys.executable, "-c", PRELUDE + program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200, env=variables)
    assert done.returncode == 0, done.stderr[-4000:]
    return done


def test_forward_and_backward_are_compiled_and_right(tmp_path: Path) -> None:
    """The backward kernel is compiled together with the forward kernel, so that the backward may find the kernel."""
    first = run(TRAIN, tmp_path)
    waited = re.findall(r"kernel (\w+?)_\S+ was compiled at its first use", first.stderr)
    assert waited in (["fwd"], ["fwd", "bwd"])
    again = run(TRAIN, tmp_path)
    assert "was compiled" not in again.stderr


def test_cuda_graph_records_kernels_only_after_warmup(tmp_path: Path) -> None:
    done = run(GRAPH, tmp_path)
    assert done.stderr.count("nothing is compiled while a CUDA graph is captured") == 1
    assert "python -m torch_flashplug warmup" in done.stderr
