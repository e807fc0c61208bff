"""What the build says where a package is missing, and which versions the package asks for."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = Path(sys.executable).parent  # of the development set


def test_configuring_names_the_packages_that_are_missing(tmp_path: Path) -> None:
    cmake = shutil.which("cmake", path=TOOLS) or shutil.which("cmake")
    if cmake is None:
        pytest.skip("cmake is not installed")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')  # it sees no installed package
    python.chmod(0o755)

    done = subprocess.run(
        [cmake, "-S", ROOT, "-B", tmp_path / "build", f"-DPython_EXECUTABLE={python}", "-DFLASHPLUG_PACKS="],
        capture_output=True, text=True, check=False,
    )  # fmt: skip

    said = " ".join(done.stderr.split())
    assert done.returncode != 0
    assert "torch_flashplug: torch and apache-tvm-ffi must be installed" in said
    assert "AttributeError" not in said


def test_the_package_installs_beside_programs_that_pin_tvm_ffi() -> None:
    """vLLM and SGLang pin 0.1.11, which kernels of today's packs ran under on an H100."""
    assert '"apache-tvm-ffi>=0.1.11"' in (ROOT / "pyproject.toml").read_text()
