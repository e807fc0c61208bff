"""Worker process that compiles kernels for the process that started the worker: `python worker.py`.

The worker reads a line of JSON per kernel from standard input, and answers each line with a line on standard
output. The worker ends at the end of the input. The worker imports neither torch nor the package's `__init__`, has no
access to a GPU, and imports the compiler at the first kernel. Kernels pass to the requesting process only as files.

A request has the keys `name`, `target`, `key` and `folders`. The entry is written to the first writable folder. An
answer has `path` and `seconds`, or the path null, `error` and `traceback`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
import types
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
# Packages imported by the compiler if installed, but not needed here. Importing the packages takes 40 % of the time
# until the first kernel is compiled.
NEEDLESS = ("torch", "jax", "numpy")


def import_package_without_torch() -> None:
    """Make the package's modules importable without `__init__`, and make imports of NEEDLESS fail."""
    sys.modules.update(dict.fromkeys(NEEDLESS))
    package = types.ModuleType(PACKAGE.name)
    package.__path__ = [str(PACKAGE)]
    sys.modules[PACKAGE.name] = package
    sys.path[0] = str(PACKAGE.parent)  # instead of this file's folder
    from torch_flashplug import env

    env.extend_path_of_worker()


def compile_kernel(request: dict) -> dict[str, object]:
    """Compile one kernel and write the cache entry.

    Raises:
        OSError: no folder is writable.
        ValueError, RuntimeError: the kernel does not compile or does not link.
    """
    from torch_flashplug.codegen import compiler, host_cpu, kernel_cache, linker
    from torch_flashplug.registry.kernel_spec import KernelSpec

    start = time.perf_counter()
    compiled = compiler.compile_spec(KernelSpec.from_name(request["name"]), request["target"])
    with tempfile.TemporaryDirectory() as scratch:
        code, suffix = Path(scratch) / "kernel.o", kernel_cache.OBJECT
        compiled.export(code)
        if linker.c_compiler() is not None:
            suffix = kernel_cache.SHARED
            linker.link([code], Path(scratch) / "kernel.so")
            code = Path(scratch) / "kernel.so"
        seconds = round(time.perf_counter() - start, 2)
        facts = {"name": request["name"], "seconds": seconds, "cpu": sorted(host_cpu.features())}
        name, places = request["key"] + suffix, map(Path, request["folders"])
        path = kernel_cache.write_to_first(places, name, code.read_bytes(), facts)
    return {"path": str(path), "seconds": seconds}


def answer_to(request: dict) -> dict[str, object]:
    """Compile a kernel, and return the answer, with the error if the kernel cannot be compiled."""
    try:
        return compile_kernel(request)
    except BaseException as error:
        return {"path": None, "error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of the compiler must not be read as an answer
    import_package_without_torch()
    for line in sys.stdin:
        answers.write(json.dumps(answer_to(json.loads(line))) + "\n")


if __name__ == "__main__":
    main()
