"""Installation of the CuTe DSL, the compiler of kernels: lookup, version and import."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import sys
from pathlib import Path

_HALVES = ("cu13", "cu12")  # the DSL uses the newest installed CUDA half
INSTALL = "pip install 'torch_flashplug[jit]'"


@functools.cache
def folder() -> Path | None:
    """Return the folder of the package nvidia_cutlass_dsl, or None if the package is not installed."""
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    return next((place for place in places if (place / "dsl_packages" / "cutlass").is_dir()), None)


@functools.cache
def version() -> str | None:
    """Return the version and the CUDA half of the compiler, such as "4.8.1+cu13"; None if there is no compiler.

    The version is that of the distributions with the compiler itself. The front package may be missing, because the
    front package always installs the CUDA 12 half, which is not needed here.
    """
    if folder() is None:
        return None
    for half in _HALVES:
        try:
            return f"{importlib.metadata.version(f'nvidia-cutlass-dsl-libs-{half}')}+{half}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def make_importable() -> None:
    """Add `cutlass` to sys.path. The front package does so by a path file, which may be missing.

    Raises:
        ModuleNotFoundError: the compiler is not installed.
    """
    place = folder()
    if version() is None or place is None:
        raise ModuleNotFoundError(f"the compiler (CuTe DSL) is not installed. Install it: {INSTALL}")
    if importlib.util.find_spec("cutlass") is None:
        sys.path.insert(0, str(place / "dsl_packages"))


def runtime_archive() -> Path:
    """Return the static library of the DSL's CUDA runtime, which is linked into each shared object of kernels.

    Raises:
        FileNotFoundError: the archive is missing.
    """
    archives = [folder() / half / "lib" / "libcuda_dialect_runtime_static.a" for half in _HALVES] if folder() else []
    for archive in archives:
        if archive.is_file():
            return archive
    raise FileNotFoundError(f"libcuda_dialect_runtime_static.a is not installed. Install it: {INSTALL}")
