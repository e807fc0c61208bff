"""Several ranks: DTensors, context_parallel, and plain tensors divided by torch.

Each rank is a process; test/helpers/rank_*.py hold the cases. On the CPU, the tests use gloo and the CPU stub backend;
on two GPUs, the tests use the kernels.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from device_backend import DeviceBackend
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel

import torch_flashplug

ON = [pytest.param("cpu", id="cpu"), pytest.param("cuda", marks=pytest.mark.gpu2)]
MODULES = (
    "rank_benchmarks",
    "rank_context_parallel_blocks",
    "rank_demo",
    "rank_dtensor",
    "rank_plain_tensors",
    "rank_context_parallel",
)
OFF = {"TORCH_FLASHPLUG": "0"}


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize("module", MODULES)
def test_cases_on_two_ranks(module: str, device: str) -> None:
    ranks.run(module, 2, device)


FOUR = {
    "rank_dtensor": ("mesh_of_two_dims", "heads_that_do_not_divide", "attention_ops"),
    "rank_plain_tensors": ("ulysses", "lengths"),
    "rank_context_parallel": ("both_apis", "heads", "not_balanced", "compiled", "deterministic"),
}


@pytest.mark.parametrize("module", FOUR)
def test_cases_on_four_ranks(module: str) -> None:
    ranks.run(module, 4, cases=FOUR[module])


@pytest.mark.parametrize("device", ON)
def test_plugin_off_on_one_rank(device: str) -> None:
    """Turn the plugin off on one rank. No decision of the plugin may change the exchanged data."""
    ranks.run("rank_mixed_plugin", 2, device, settings={1: OFF})


def test_plugin_off_on_the_first_of_four_ranks() -> None:
    ranks.run("rank_mixed_plugin", 4, cases=("rings",), settings={0: OFF})


@pytest.fixture
def mesh(device: str) -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh(device, (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("grad", [False, True])
def test_dtensors_on_one_rank_with_both_hooks(hooked_backend: DeviceBackend, mesh: DeviceMesh, grad: bool) -> None:
    """Use both hooks."""
    plain = hooked_backend.qkv(grad=grad)
    sharded = [distribute_tensor(tensor.detach(), mesh, [Shard(1)]).requires_grad_(grad) for tensor in plain]
    assert torch_flashplug.explain(*sharded, is_causal=True, device="h100").part
    out = F.scaled_dot_product_attention(*sharded, is_causal=True)
    assert hooked_backend.pop_path_counts().get("ours_fwd") == 1
    expected = F.scaled_dot_product_attention(*plain, is_causal=True)
    torch.testing.assert_close(out.full_tensor(), expected, atol=2e-2, rtol=2e-2)
    if grad:
        out.full_tensor().float().square().sum().backward()
        expected.float().square().sum().backward()
        for sharded_leaf, plain_leaf in zip(sharded, plain):
            torch.testing.assert_close(sharded_leaf.grad.full_tensor(), plain_leaf.grad, atol=6e-2, rtol=6e-2)


def test_distributed_demo_divides_a_model_in_two_ways(tmp_path: Path) -> None:
    """Run the demo on the CPU, where stock serves the calls, and check the output for two ways to divide a model."""
    command = [
        sys.executable,
        "-m",
        "torch_flashplug",
        "demo",
        "--gpus",
        "2",
        "--picture",
        str(tmp_path / "losses.png"),
    ]
    surroundings = {**os.environ, "PYTHONPATH": str(ranks.ROOT), "OMP_NUM_THREADS": "1"}
    limits = {"cwd": ranks.ROOT, "env": surroundings, "timeout": 90}
    done = subprocess.run(command, check=False, capture_output=True, text=True, **limits)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    rows = [line.split("\u2502")[1:-1] for line in done.stdout.splitlines() if " to " in line and "\u2502" in line]
    assert [row[0].strip() for row in rows] == ["auto", "plugin off"] * 2, done.stdout
    for row in rows:
        first, last = map(float, row[1].split(" to "))
        assert last < first and float(row[2]) == 0.0, done.stdout  # the same kernels give the same losses
    assert "tokens / s" not in done.stdout and "speed" not in done.stdout, "a CPU compared with itself"
    assert "tensor parallel" in done.stdout and ((tmp_path / "losses.png").exists() or "No picture" in done.stdout)


def test_attention_in_a_context_parallel_block_is_refused() -> None:
    """Refuse attention() in a context_parallel block.

    The function would see only the rows of one rank, or a ring, depending on the arguments.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh, q = init_device_mesh("cpu", (1,)), torch.randn(1, 8, 2, 16)
        with context_parallel(mesh, buffers=[q], buffer_seq_dims=[1]):
            with pytest.raises(RuntimeError, match="outside of context_parallel, .* only the rows of one rank"):
                torch_flashplug.attention(q, q, q, softcap=2.0)
    finally:
        dist.destroy_process_group()
    assert torch_flashplug.attention(q, q, q, softcap=2.0).shape == q.shape


def test_import_loads_no_dtensor() -> None:
    """An import of DTensor takes a second."""
    code = (
        "import sys, torch; had = set(sys.modules); import torch_flashplug; "
        "new = {name for name in set(sys.modules) - had if name.startswith('torch.distributed')}; assert not new, new"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ranks.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
