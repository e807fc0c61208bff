"""Kernels without a GPU: F.scaled_dot_product_attention calls on CPU tensors interpret the PTX of a kernel.

Such a call takes the path of a call on an H100, from F.sdpa to the last store of the kernel. Only the device is
missing. So the numbers are the numbers of the kernel, and the times mean nothing. The interpreter is part of a
checkout. tools/ptx_interpreter/build_pack.py, run in a separate process, compiles the interpreter and a kernel, and
links both into a pack. `check`, the demo and test/helpers/interpreted_kernels.py use `interpreted`.
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
from ..codegen.kernel_request import CallConditions, KernelAnswer
from ..dispatch import bindings, callbacks, packs

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "ptx_interpreter" / "build_pack.py"
PACKS = ROOT / "build" / "interpreted"
DEVICE, TARGET = "h100", "sm_90a"  # the GPU of the plans, and the compile target of the GPU
PROGRESS = "[aot] "  # prefix of the progress lines of tools/build/aot.py


class BuildError(RuntimeError):
    """Error for a failed compilation of a kernel or of the interpreter; the message has the compiler's last lines."""


def missing() -> str:
    """Return the missing requirement for interpreting a kernel on this machine; empty if there is none."""
    if not TOOL.is_file():
        return "needs a checkout of torch_flashplug, because the interpreter in tools/ is not installed"
    if dsl.version() is None:
        return f"needs the compiler of kernels (CuTe DSL): {dsl.INSTALL}"
    if shutil.which(env.cpp_compiler()) is None:
        return f"needs a C++ compiler, but {env.cpp_compiler()} is not installed; install g++, or set CXX"
    return ""


def kernel_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **settings: object) -> str:
    """Return the name of the kernel for the call on an H100; empty if stock torch serves the call."""
    return backend.explain(query, key, value, **settings, device=DEVICE).kernel or ""


def build(kernel: str, progress: Callable[[str], None] = lambda line: None) -> Path:
    """Return a pack of one kernel that runs on this CPU.

    Measured: 2026-11-28, 44 s of CPU time for the first call (33 s for the interpreter); 1 s for later calls.

    Args:
        kernel: the name of a kernel. The kernel is taken from build/objects, or compiled now.
        progress: a function called with each line of progress.

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
    pack: Path,
    provide: Callable[[str, int, CallConditions], KernelAnswer | str] = lambda *_: "the kernel is not in the pack",
) -> Iterator[None]:
    """Run F.sdpa calls on CPU tensors with the kernels of a pack, as if this machine had an H100.

    At the end, the changed state is restored: packs, device facts, the registered ops, and whether the plugin is on.

    Args:
        pack: a shared object linked by tools/ptx_interpreter/build_pack.py.
        provide: a function that provides kernels outside of the pack, as for set_compile_callback(). By default,
            there are no such kernels.

    Raises:
        RuntimeError: torch's choice function for CPU tensors cannot be hooked.
    """
    startup.load()
    was_enabled = bindings.enabled()
    bindings.set_facts_override(backend.DEVICES[DEVICE])
    bindings.set_cpu_stub(2)
    bindings.clear_packs()
    bindings.load_pack(pack, TARGET)
    callbacks.set_compile_callback(provide)
    bindings.register_ops("CPU")
    startup.push_tables()  # makes C++ search the kernels again
    torch._fused_sdp_choice(
        *torch.empty(3, 1, 1, 8, 8).unbind()
    )  # makes torch resolve the CPU entry of the dispatch stub
    try:
        backend.enable()
        if bindings.install(bindings.CPU_SLOT) != 0:
            raise RuntimeError(f"torch_flashplug: CPU tensors cannot be hooked: {bindings.last_error()}")
        yield
    finally:
        bindings.uninstall(bindings.CPU_SLOT)
        bindings.set_cpu_stub(False)
        bindings.set_facts_override(None)
        bindings.unregister_ops()
        bindings.register_ops("CUDA")
        bindings.clear_packs()
        callbacks.set_compile_callback(startup.provide)
        packs.register()
        startup.push_tables()
        if not was_enabled:
            backend.disable()
