"""Wheels: on which systems _C loads."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from torch_flashplug import library

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import shared_object  # noqa: E402

# manylinux_2_28, but for the last of libstdc++, which is that of GCC 8.
CEILINGS = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
LIBRARIES = {"libtorch_cpu.so", "libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6", "libdl.so.2"}
LOADERS = {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}  # the dynamic loader itself
NEWEST_GCC = 12  # of machines that build wheels: later headers ask for more of libstdc++


@pytest.fixture(scope="module")
def built() -> Path:
    """_C of the developer's build, or the one that is installed."""
    found = library.find_built("_C.so")
    assert found is not None
    return found


def test_c_loads_on_systems_as_old_as_torch_does(built: Path) -> None:
    compiler = re.search(rb"GCC: \(.*?\) (\d+)\.", built.read_bytes())
    if compiler is None or int(compiler[1]) > NEWEST_GCC:
        pytest.skip(f"this _C was not built by g++ {NEWEST_GCC} or older, which wheels are built by")
    needed = shared_object.read_file(built)
    assert needed.versions and {name.rpartition("_")[0] for name in needed.versions} <= set(CEILINGS)
    assert not needed.above(CEILINGS), "src/portable.h or src/portable.cpp must avoid these symbols"


def test_c_needs_no_library_of_a_python_or_a_cuda(built: Path) -> None:
    needed = set(shared_object.read_file(built).libraries)
    assert "libtorch_cpu.so" in needed and not needed - LIBRARIES - LOADERS


def test_c_exports_its_own_functions_alone(built: Path) -> None:
    """Code of libstdc++ that is compiled into _C must serve no other library."""
    exported = shared_object.read_file(built).defined
    assert exported and not {name for name in exported if not name.startswith("flashplug_")}


def test_versions_above_a_ceiling_are_found() -> None:
    needed = shared_object.SharedObject(
        "x86_64", (), {"GLIBC_2.28": (), "GLIBC_2.34": ("dlopen",), "GLIBC_2.2.5": (), "OTHER_9": ()},
        frozenset(), frozenset(),
    )  # fmt: skip
    assert needed.above(CEILINGS) == {"GLIBC_2.34": ("dlopen",)}


def test_what_is_no_shared_object_is_refused() -> None:
    with pytest.raises(ValueError, match="must be an ELF file of 64 bits"):
        shared_object.read(b"MZ")
