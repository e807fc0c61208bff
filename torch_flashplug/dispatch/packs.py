"""Installed kernel packs: shared objects beside _C, and compressed ones (.so.xz) that are unpacked at first use.

A pack is unpacked into the folder of the kernel cache, as an entry like a kernel that was compiled there: it is written
atomically, and its owner, mode and SHA-256 are checked before it is loaded.

The host code of a pack is made for the CPU that compiled it. The report beside a pack (.json) has the features of that
CPU, and a pack is not loaded on a CPU that lacks one of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import logging
import lzma
import re
from dataclasses import dataclass
from pathlib import Path

from ..codegen import host_cpu, kernel_cache
from ..codegen.provided import Provided
from ..registry import kernel_table
from . import bindings, library

log = logging.getLogger("torch_flashplug.packs")

COMPRESSED = ".xz"
_SYMBOL = re.compile(rb"__tvm_ffi_([a-z]+_sm\d+_\w+)\x00")


class NotUnpacked(Exception):
    """A compressed pack that cannot be used."""


@dataclass(frozen=True, slots=True)
class InstalledPack:
    """A kernel pack that is installed.

    Attributes:
        name: of the row in configs.PACKS.
        target: a key of TARGETS.
        path: the shared object, or the compressed one.
        report: what the tool that built it wrote beside it; empty where nothing lies there.
    """

    name: str
    target: str
    path: Path
    report: dict

    @property
    def is_compressed(self) -> bool:
        """Whether it must be unpacked first."""
        return self.path.suffix == COMPRESSED

    @property
    def key(self) -> str:
        """The key of the unpacked pack in the kernel cache, which is another one for each content."""
        return f"flashplug_{self.name}-{str(self.report.get('sha256', ''))[:16]}"

    def kernels(self) -> list[str]:
        """Return the names of the kernels that it holds: by its report, or by its symbols where it has none."""
        if self.is_compressed or "kernels" in self.report:
            return sorted(row["name"] for row in self.report.get("kernels", ()))
        return sorted({match.decode() for match in _SYMBOL.findall(self.path.read_bytes())})

    def unusable(self) -> str:
        """Return why this machine must not load it; empty where it may."""
        lacking = host_cpu.lacking(self.report.get("cpu", ()))
        return f"it was compiled for a CPU with {', '.join(lacking)}, which this CPU lacks" if lacking else ""


def installed() -> list[InstalledPack]:
    """Return the packs that are installed, in the order of configs.PACKS. A compressed one counts where no other is."""
    packs = []
    for pack in kernel_table.PACKS:
        path = library.find_built(pack.file) or library.find_built(pack.file + COMPRESSED)
        if path is not None:
            report = path.with_name(pack.file).with_suffix(".json")
            packs.append(InstalledPack(pack.name, pack.target, path, _read(report)))
    return packs


def _read(report: Path) -> dict:
    try:
        return json.loads(report.read_text())
    except (OSError, ValueError):
        return {}


def register() -> None:
    """Tell C++ of the packs that lie beside _C ready to load. C++ opens one when a kernel is first needed."""
    usable = {}
    for pack in installed():
        if reason := pack.unusable():
            _report(pack.path, reason)
        elif not pack.is_compressed:
            usable[pack.name] = pack.path
    for pack in kernel_table.PACKS:
        bindings.load_pack(usable.get(pack.name), pack.target)


def provide(name: str, target: str) -> Provided | None:
    """Return a kernel of a compressed pack, which is unpacked at its first kernel; None if no such pack has it.

    Args:
        name: of a KernelSpec.
        target: a key of TARGETS.
    """
    for pack in _compressed():
        if pack.target == target and name in pack.kernels():
            opened = _open(pack.path)
            if opened is not None:
                with contextlib.suppress(AttributeError):
                    return Provided.of_library(opened, name)
    return None


def held(target: str) -> set[str]:
    """Return the names of the kernels of a target that the packs have, those aside that this machine must not load."""
    usable = [pack for pack in installed() if pack.target == target and not pack.unusable()]
    return {name for pack in usable for name in pack.kernels()}


@functools.cache
def _compressed() -> list[InstalledPack]:
    return [pack for pack in installed() if pack.is_compressed and not pack.unusable()]


@functools.cache
def _open(path: Path) -> ctypes.CDLL | None:
    """Unpack and load a compressed pack, once in a process; None, and one line in the log, where that fails."""
    pack = next(pack for pack in _compressed() if pack.path == path)
    try:
        return kernel_cache.load(unpack(pack))
    except (NotUnpacked, OSError) as error:
        _report(path, str(error))
        return None


def unpacked(pack: InstalledPack) -> Path | None:
    """Return where a compressed pack was unpacked; None if it was not. The file is not checked."""
    places = (folder / (pack.key + kernel_cache.SHARED) for folder in kernel_cache.folders())
    return next((place for place in places if place.is_file()), None)


def unpack(pack: InstalledPack) -> Path:
    """Return the unpacked form of a compressed pack. Processes that unpack it at once write the same file.

    Raises:
        NotUnpacked: the file is damaged, or no folder of the kernel cache takes it.
    """
    if entry := kernel_cache.find(pack.key):
        return entry.path
    try:
        code = lzma.decompress(pack.path.read_bytes())
    except (OSError, lzma.LZMAError, EOFError) as error:
        raise NotUnpacked(f"it cannot be read ({error}). Install the wheel again") from None
    if hashlib.sha256(code).hexdigest() != pack.report.get("sha256"):
        raise NotUnpacked("its content is not what was built. Install the wheel again")
    facts = {"name": f"flashplug_{pack.name}", "cpu": pack.report.get("cpu", [])}
    try:
        return kernel_cache.write_to_first(kernel_cache.folders(), pack.key + kernel_cache.SHARED, code, facts)
    except OSError as error:
        raise NotUnpacked(f"it cannot be unpacked: {error}") from None


def is_current(path: Path) -> bool:
    """Whether an entry of the kernel cache is an installed pack."""
    return path.stem in {pack.key for pack in installed() if pack.is_compressed}


@functools.cache
def _report(path: Path, reason: str) -> None:
    log.warning(
        "torch_flashplug: kernel pack %s is not used: %s. Its kernels are compiled at first use", path.name, reason
    )
