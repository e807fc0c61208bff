"""Search for the build dependencies of _C: torch and the headers of apache-tvm-ffi.

CMake and build_backend.py use this module. The packages are located without an import. In an isolated build of pip, the
packages of the target environment are found, too. The reason is that pip runs the interpreter of the target environment
and only changes the module search path.
"""

from __future__ import annotations

import importlib.util
import site
import sys
import sysconfig
from pathlib import Path

MODULES = {"torch": "torch", "apache-tvm-ffi": "tvm_ffi"}  # distribution -> module


def folder_of(module: str) -> Path | None:
    """Return the folder of an installed package, or None."""
    spec = importlib.util.find_spec(module)
    if spec is not None and spec.origin:
        return Path(spec.origin).parent
    places = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), site.getusersitepackages()]
    return next((Path(place) / module for place in places if (Path(place) / module / "__init__.py").is_file()), None)


def missing() -> list[str]:
    """Return the distributions that are not installed."""
    return [name for name, module in MODULES.items() if folder_of(module) is None]


if __name__ == "__main__":
    if absent := missing():
        print("missing", *absent, end="")
    else:
        print(folder_of("torch"), folder_of("tvm_ffi") / "include", sep=";", end="")
    sys.exit(0)
