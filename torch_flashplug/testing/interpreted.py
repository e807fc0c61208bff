"""Kernels without a GPU: calls of F.scaled_dot_product_attention on CPU tensors run a kernel's PTX, interpreted.

The path of such a call is that of an H100, from F.sdpa to the kernel's last store. Only the device is missing, so that
numbers are the kernel's own and times mean nothing. The interpreter belongs to a checkout: tools/interpreted.py, which
a process of its own runs, compiles it and one kernel, and links both into a pack. `check` and the demo use this module,
and test/on_cpu.py does.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from .. import env
from ..api import backend, startup
from ..codegen import dsl
from ..codegen.provided import Circumstances, Provided
from ..dispatch import bindings, callbacks, packs

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "interpreted.py"
PACKS = ROOT / "build" / "interpreted"
DEVICE, TARGET = "h100", "sm_90a"  # the GPU that calls are planned for, and what its kernels are compiled for
PROGRESS = "[aot] "  # how a line of progress starts that tools/aot.py prints


class BuildError(RuntimeError):
    """A kernel or the interpreter could not be compiled. The message has the last lines of the compiler."""


def missing() -> str:
    """Return what this machine lacks to interpret a kernel; an empty text where it lacks nothing."""
    if not TOOL.is_file():
        return "needs a checkout of torch_flashplug: the interpreter in tools/ is not installed"
    if dsl.version() is None:
        return f"needs the compiler of kernels (CuTe DSL): {dsl.INSTALL}"
    if shutil.which(env.cpp_compiler()) is None:
        return f"needs a C++ compiler: {env.cpp_compiler()} is not installed; install g++, or set CXX"
    return ""


def kernel_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **settings: object) -> str:
    """Return the name of the kernel that this call runs on an H100; an empty text where stock torch serves it."""
    return backend.explain(query, key, value, **settings, device=DEVICE).kernel or ""


def build(kernel: str, progress: Callable[[str], None] = lambda line: None) -> Path:
    """Return a pack of one kernel that runs on this CPU.

    Measured: 2026-11-28, 44 s of CPU time the first time, of which the interpreter takes 33 s; 1 s afterwards.

    Args:
        kernel: the name of a kernel. It is taken from build/objects, or compiled now.
        progress: called with each line of progress.

    Raises:
        BuildError: the compiler failed.
    """
    command = [sys.executable, str(TOOL), "--target", TARGET, "--spec", kernel, "--out", str(PACKS / kernel)]
    lines: list[str] = []
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([*command, "--compile"], **pipes) as process:
        for line in process.stdout:
            if line.startswith(PROGRESS):
                progress(line.removeprefix(PROGRESS).rstrip())
            elif line.strip():
                lines.append(line.rstrip())
    if process.returncode != 0 or not lines:
        raise BuildError(f"{TOOL.name} failed: {' '.join(lines[-5:])}")
    return Path(lines[-1])


@contextlib.contextmanager
def kernels(
    pack: Path, provide: Callable[[str, int, Circumstances], Provided | str] = lambda *_: "it is not in the pack"
) -> Iterator[None]:
    """Run calls of F.sdpa on CPU tensors by the kernels of a pack, as if this machine had an H100.

    All that is changed is put back at the end: packs, device facts, the registered ops, and whether the plugin is on.

    Args:
        pack: a shared object that tools/interpreted.py has linked.
        provide: answers for kernels outside the pack, as up_calls.set_compile takes it; there are none by default.

    Raises:
        RuntimeError: torch's choice function for CPU tensors cannot be hooked.
    """
    startup.load()
    was_enabled = bindings.enabled()
    bindings.set_facts_override(backend.DEVICES[DEVICE])
    bindings.set_standin(2)
    bindings.clear_packs()
    bindings.load_pack(pack, TARGET)
    callbacks.set_compile(provide)
    bindings.register_ops("CPU")
    startup.push_tables()  # C++ looks for kernels again
    torch._fused_sdp_choice(*torch.empty(3, 1, 1, 8, 8).unbind())  # resolves the CPU slot of torch's stub
    try:
        backend.enable()
        if bindings.install(bindings.CPU_SLOT) != 0:
            raise RuntimeError(f"torch_flashplug: CPU tensors cannot be hooked: {bindings.last_error()}")
        yield
    finally:
        bindings.uninstall(bindings.CPU_SLOT)
        bindings.set_standin(False)
        bindings.set_facts_override(None)
        bindings.unregister_ops()
        bindings.register_ops("CUDA")
        bindings.clear_packs()
        callbacks.set_compile(startup.provide)
        packs.register()
        startup.push_tables()
        if not was_enabled:
            backend.disable()
