"""Compilation of C++ snippets against the headers of the C++ core (`src/`)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import torch

TORCH = Path(torch.__file__).parent
OPTIONS = ("-std=c++20", "-DTORCH_TARGET_VERSION=0x020B000000000000", f"-I{Path(__file__).parents[2] / 'src'}",
           "-isystem", str(TORCH / "include"), f"-L{TORCH / 'lib'}", f"-Wl,-rpath,{TORCH / 'lib'}")  # fmt: skip


def compiles(source: str, *options: str) -> bool:
    """Return True if the source compiles; without options, only the syntax is checked and no file is written."""
    command = ["c++", *OPTIONS, *(options or ("-fsyntax-only",)), "-x", "c++", "-", "-x", "none", "-l:libtorch_cpu.so"]
    return subprocess.run(command, input=source, text=True, capture_output=True, check=False).returncode == 0
