"""Kernels of a second library at the CUDA key of torch's attention ops: neither overwritten nor lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import competing_library
import pytest

SCRIPT = Path(competing_library.__file__)


@pytest.mark.parametrize("order", competing_library.ORDERS)
def test_kernels_of_a_second_library_are_kept(order: str) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), order], cwd=SCRIPT.parents[2], capture_output=True, text=True,
                          check=False, timeout=240)  # fmt: skip
    assert done.stdout.endswith("right\n"), done.stdout + done.stderr
