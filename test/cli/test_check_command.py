"""The `check` verb: each line passes, fails with a remedy, or is skipped without a GPU."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import torch_flashplug
from torch_flashplug import env
from torch_flashplug.cli import check, env_info
from torch_flashplug.dispatch import bindings
from torch_flashplug.testing import interpreted

NAMES = ("torch", "_C", "hook", "kernels", "GPU", "numbers", "speed", "interpret")


def test_current_installation_passes(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [check_function() for check_function in check.CHECKS]
    assert tuple(line.name for line in lines) == NAMES
    assert all(line.text and bool(line.remedy) == (line.status == check.FAIL) for line in lines)
    skipped = {line.name for line in lines if line.status == check.SKIP}
    assert skipped == ({"interpret"} if torch.cuda.is_available() else {"hook", "GPU", "numbers", "speed"})
    assert check.run() == 0
    shown = capsys.readouterr().out
    assert "bug report" in shown and f"PASS: 0 of {len(NAMES)} checks failed" in shown


@pytest.mark.gpu
def test_gpu_checks_pass() -> None:
    for check_function in (check.gpu, check.numbers, check.speed):
        line = check_function()
        assert line.status == check.PASS, line


def test_disabled_plugin_fails() -> None:
    command = [sys.executable, "-m", "torch_flashplug", "check"]
    environment = os.environ | {env.ENABLED.name: "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1 and "FAIL hook      off: TORCH_FLASHPLUG=0\n     remedy    unset" in done.stdout


def test_kernels_need_packs_or_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_info, "packs", list)
    assert check.kernels().status == check.PASS and "compiled at first use by CuTe DSL" in check.kernels().text
    monkeypatch.setattr(check.kernel_cache, "prepare", lambda folder: "Read-only file system")
    line = check.kernels()
    assert line.status == check.FAIL and env.CACHE_DIR.name in line.remedy
    monkeypatch.setattr(check.dsl, "version", lambda: None)
    line = check.kernels()
    assert line.status == check.FAIL and "[jit]" in line.remedy
    monkeypatch.setenv(env.JIT.name, "0")
    assert check.kernels().remedy == f"unset {env.JIT.name}"


def test_old_gpu_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    line = check.gpu()
    assert line.status == check.FAIL and "Tesla T4, compute capability 7.5" in line.text and "8.0" in line.remedy
    assert check.numbers().status == check.speed().status == check.SKIP


# ---- the kernel interpreted without a GPU ----


@pytest.mark.interpreted
def test_interpreted_kernel_passes_with_the_error_of_a_kernel() -> None:
    """Compare the error of the kernel with known bounds.

    The kernel rounds P to bf16 and accumulates in fp32. The error must therefore be smaller than the error of math with
    every step in bf16. The error cannot be smaller than a single rounding of the output.
    """
    line = check.interpreted_kernel()

    assert line.status == check.PASS, line
    pattern = r"^(fwd_sm90_\w+), .* (\S+e-\d+), plain bf16 math (\S+e-\d+)$"
    kernel, kernel_error, math_error = re.search(pattern, line.text).groups()
    assert (interpreted.PACKS / kernel).is_dir()
    assert 1e-4 < float(kernel_error) < float(math_error) < 1e-2


@pytest.mark.interpreted
@pytest.mark.parametrize("count", [1, 0], ids=["one of them", "all of them"])
def test_kernel_with_wrong_exponentials_fails(count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Replace exp2(x) by 1: the numbers are finite and wrong, and the comparison with fp64 must detect the error."""
    monkeypatch.setattr(interpreted, "PACKS", tmp_path)
    real_build = interpreted.build

    def build_mutant(kernel: str, progress: object) -> Path:
        pack = real_build(kernel)
        (ptx,) = pack.with_name(f"{pack.name}.ptx").iterdir()
        pattern, replacement = r"ex2\.approx\.ftz\.f32\s+(\S+), (\S+);", r"mov.f32 \1, 0f3F800000;"
        text, num_changed = re.subn(pattern, replacement, ptx.read_text(), count=count)
        assert num_changed == count or num_changed > 100
        ptx.write_text(text)
        return pack

    monkeypatch.setattr(interpreted, "build", build_mutant)

    line = check.interpreted_kernel()

    assert line.status == check.FAIL and "budget" in line.text, line


@pytest.mark.interpreted
def test_kernel_without_execution_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock returns right numbers, which must not count as numbers of a kernel."""
    monkeypatch.setattr(interpreted, "kernels", lambda pack: contextlib.nullcontext())

    line = check.interpreted_kernel()

    assert line.status == check.FAIL and "did not run" in line.text, line


@pytest.mark.interpreted
def test_failing_compiler_is_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "build_pack.py"
    tool.write_text("import sys; print('[aot] 1 of 2'); sys.exit('cc1plus: out of memory')")
    monkeypatch.setattr(interpreted, "TOOL", tool)

    line = check.interpreted_kernel()

    assert line.status == check.FAIL and "cc1plus: out of memory" in line.text and line.remedy
    assert "[aot]" not in line.text


@pytest.mark.interpreted
def test_an_installation_without_tools_skips_the_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(interpreted, "TOOL", tmp_path / "tools" / "build_pack.py")

    line = check.interpreted_kernel()

    assert line.status == check.SKIP and "checkout" in line.text


@pytest.mark.interpreted
@pytest.mark.parametrize("missing", ["compiler of kernels", "C++ compiler"])
def test_missing_compiler_is_reported(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing == "C++ compiler":
        monkeypatch.setenv("CXX", "no_such_compiler")
    else:
        monkeypatch.setattr(interpreted.dsl, "version", lambda: None)

    line = check.interpreted_kernel()

    assert line.status == check.SKIP and missing in line.text and "install" in line.text


@pytest.mark.interpreted
def test_mode_with_stock_calls_is_reported() -> None:
    with torch_flashplug.sdpa_backend("stock"):
        # The mode of a block applies only on GPUs, but explain() asks for an H100.
        line = check.interpreted_kernel()

    assert line.status == check.SKIP and "mode stock" in line.text


@pytest.mark.interpreted
@pytest.mark.parametrize("enabled", [True, False])
def test_interpreted_kernels_restore_the_state(enabled: bool) -> None:
    q = torch.randn(1, 2, 64, 64).bfloat16()
    pack = interpreted.build(interpreted.kernel_of(q, q, q, is_causal=True))
    packs, facts = env_info.packs(), bindings.device_facts()
    if not enabled:
        torch_flashplug.disable()
    try:
        with interpreted.kernels(pack):
            bindings.counters(reset=True)
            F.scaled_dot_product_attention(q, q, q, is_causal=True)
            inside = bindings.counters(reset=True)
        F.scaled_dot_product_attention(q, q, q, is_causal=True)
        outside = bindings.counters(reset=True)

        assert bindings.enabled() == enabled
    finally:
        torch_flashplug.enable()

    assert inside["ours_fwd"] == 1 and not any(outside.values())
    assert not bindings.installed(bindings.CPU_SLOT)
    assert (env_info.packs(), bindings.device_facts()) == (packs, facts)
