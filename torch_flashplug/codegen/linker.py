"""Linking of compiled kernels into a shared object, which loads even where the kernel compiler is not installed."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .. import env
from . import dsl

ERROR_REPORTERS = Path(__file__).parent / "pack_error.c"


def c_compiler() -> str | None:
    """Return the C compiler: the variable CC, Python's own compiler, or cc; None if no compiler is installed."""
    command = env.c_compiler() or (sysconfig.get_config_var("CC") or "").split()
    return next((name for name in (*command[:1], "cc", "gcc", "clang") if shutil.which(name)), None)


def tvm_ffi_library() -> Path:
    """Return the path of libtvm_ffi.so, which shared objects of kernels need.

    tvm_ffi is not imported here, because the import takes a second.

    Raises:
        FileNotFoundError: apache-tvm-ffi is not installed.
    """
    spec = importlib.util.find_spec("tvm_ffi")
    library = Path(spec.origin).parent / "lib" / "libtvm_ffi.so" if spec and spec.origin else None
    if library is None or not library.is_file():
        raise FileNotFoundError("libtvm_ffi.so is not installed. Install it: pip install apache-tvm-ffi")
    return library


def link(objects: Sequence[Path], target: Path, more: Sequence[str | Path] = ()) -> None:
    """Link objects into one shared object.

    Symbols of CUDA and TVM-FFI are resolved from the libraries loaded in the process.

    Args:
        objects: object files of kernels.
        target: the shared object to write.
        more: additional files and options for the linker.

    Raises:
        FileNotFoundError: no C compiler is installed, or a library is missing.
        RuntimeError: the linker failed; the message has the output of the linker.
    """
    compiler = c_compiler()
    if compiler is None:
        raise FileNotFoundError("no C compiler is installed. Install gcc, or set CC")
    command = [compiler, "-shared", "-fPIC", "-O2", "-fvisibility=hidden", "-Wl,--exclude-libs,ALL", "-o", target]
    command += [ERROR_REPORTERS, *objects, *more, dsl.runtime_archive(), tvm_ffi_library(), "-ldl"]
    done = subprocess.run(list(map(str, command)), check=False, capture_output=True, text=True)
    if done.returncode != 0 or not Path(target).is_file():
        message = done.stderr.strip()[-2000:] or f"the compiler wrote no file, with exit status {done.returncode}"
        raise RuntimeError(f"{compiler} could not link {Path(target).name}: {message}")


def link_failure_reason() -> str:
    """Return why linking fails on this machine; empty if linking a small shared object succeeds."""
    with tempfile.TemporaryDirectory() as scratch:
        try:
            link([], Path(scratch) / "empty.so")
        except (OSError, RuntimeError) as error:
            return str(error)
    return ""
