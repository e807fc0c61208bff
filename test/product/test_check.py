"""The `check` verb: each line passes, fails with a remedy, or is skipped where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from torch_flashplug import check, env, inventory

NAMES = ("torch", "_C", "hook", "kernels", "GPU", "numbers", "speed")


def test_this_installation_passes(capsys: pytest.CaptureFixture[str]) -> None:
    found = [one() for one in check.CHECKS]
    assert tuple(line.name for line in found) == NAMES
    assert all(line.text and bool(line.remedy) == (line.status == check.FAIL) for line in found)
    skipped = {line.name for line in found if line.status == check.SKIP}
    assert skipped == (set() if torch.cuda.is_available() else {"hook", "GPU", "numbers", "speed"})
    assert check.run() == 0
    shown = capsys.readouterr().out
    assert "bug report" in shown and f"PASS: 0 of {len(NAMES)} checks failed" in shown


@pytest.mark.gpu
def test_a_gpu_gets_a_number_and_a_time() -> None:
    for one in (check.gpu, check.numbers, check.speed):
        line = one()
        assert line.status == check.PASS, line


def test_a_plugin_that_is_off_fails() -> None:
    command = [sys.executable, "-m", "torch_flashplug", "check"]
    environment = os.environ | {env.ENABLED.name: "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1 and "FAIL hook      off: TORCH_FLASHPLUG=0\n     remedy    unset" in done.stdout


def test_kernels_need_packs_or_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inventory, "packs", list)
    assert check.kernels().status == check.PASS and "compiled at first use by CuTe DSL" in check.kernels().text
    monkeypatch.setattr(check.kernel_cache, "prepare", lambda folder: "Read-only file system")
    line = check.kernels()
    assert line.status == check.FAIL and env.CACHE_DIR.name in line.remedy
    monkeypatch.setattr(check.dsl, "version", lambda: None)
    line = check.kernels()
    assert line.status == check.FAIL and "[jit]" in line.remedy
    monkeypatch.setenv(env.JIT.name, "0")
    assert check.kernels().remedy == f"unset {env.JIT.name}"


def test_a_gpu_that_is_too_old_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    line = check.gpu()
    assert line.status == check.FAIL and "Tesla T4, compute capability 7.5" in line.text and "8.0" in line.remedy
    assert check.numbers().status == check.speed().status == check.SKIP
