"""Installed kernel packs: shared objects beside `_C`, and compressed packs (.so.xz), which are unpacked at first use.

A pack is unpacked into the folder of the kernel cache, as a cache entry like a compiled kernel. The entry is written
atomically. The owner, mode and SHA-256 of the entry are checked before the entry is loaded.

The host code of a pack is compiled for the CPU of the build machine. The report beside a pack (.json) lists the
features of that CPU. A pack is not loaded on a CPU that lacks a listed feature.
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
from ..codegen.kernel_request import KernelAnswer
from ..registry import kernel_table
from . import bindings, library

log = logging.getLogger("torch_flashplug.packs")

COMPRESSED = ".xz"
_SYMBOL = re.compile(rb"__tvm_ffi_([a-z]+_sm\d+_\w+)\x00")


class NotUnpacked(Exception):
    """Error for a compressed pack that cannot be used."""


@dataclass(frozen=True, slots=True)
class InstalledPack:
    """Installed kernel pack.

    Attributes:
        name: the name of the row in kernel_table.PACKS.
        target: a key of TARGETS.
        path: the shared object, or the compressed shared object.
        report: the report written by the build tool; empty if the file is missing.
    """

    name: str
    target: str
    path: Path
    report: dict

    @property
    def is_compressed(self) -> bool:
        """True if the pack must be unpacked before loading."""
        return self.path.suffix == COMPRESSED

    @property
    def key(self) -> str:
        """Key of the unpacked pack in the kernel cache; packs with different contents have different keys."""
        return f"flashplug_{self.name}-{str(self.report.get('sha256', ''))[:16]}"

    def kernels(self) -> list[str]:
        """Return the names of the kernels in the pack, from the report, or from the symbols if there is no report."""
        if self.is_compressed or "kernels" in self.report:
            return sorted(row["name"] for row in self.report.get("kernels", ()))
        return sorted({match.decode() for match in _SYMBOL.findall(self.path.read_bytes())})

    def unusable_reason(self) -> str:
        """Return why loading the pack is forbidden on this machine; empty if loading is allowed."""
        if missing := host_cpu.missing_features(self.report.get("cpu", ())):
            return f"the pack was compiled for a CPU with {', '.join(missing)}, which this CPU lacks"
        return ""


def installed() -> list[InstalledPack]:
    """Return the installed packs, in the order of kernel_table.PACKS.

    A compressed pack counts only if the same pack is not also installed uncompressed.
    """
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
    """Register the uncompressed packs beside `_C` with C++, which opens a pack when a kernel is first needed."""
    usable = {}
    for pack in installed():
        if reason := pack.unusable_reason():
            _report(pack.path, reason)
        elif not pack.is_compressed:
            usable[pack.name] = pack.path
    for pack in kernel_table.PACKS:
        bindings.load_pack(usable.get(pack.name), pack.target)


def provide(name: str, target: str) -> KernelAnswer | None:
    """Return a kernel of a compressed pack, which is unpacked at the first use; None if no such pack has the kernel.

    Args:
        name: the name of a `KernelSpec`.
        target: a key of TARGETS.
    """
    for pack in _compressed():
        if pack.target == target and name in pack.kernels():
            opened = _open(pack.path)
            if opened is not None:
                with contextlib.suppress(AttributeError):
                    return KernelAnswer.of_library(opened, name)
    return None


def packed_kernels(target: str) -> set[str]:
    """Return the names of the kernels of a target in all packs that this machine may load."""
    usable = [pack for pack in installed() if pack.target == target and not pack.unusable_reason()]
    return {name for pack in usable for name in pack.kernels()}


@functools.cache
def _compressed() -> list[InstalledPack]:
    return [pack for pack in installed() if pack.is_compressed and not pack.unusable_reason()]


@functools.cache
def _open(path: Path) -> ctypes.CDLL | None:
    """Unpack and load a compressed pack once per process; on failure, log one line and return None."""
    pack = next(pack for pack in _compressed() if pack.path == path)
    try:
        return kernel_cache.load(unpack(pack))
    except (NotUnpacked, OSError) as error:
        _report(path, str(error))
        return None


def unpacked_path(pack: InstalledPack) -> Path | None:
    """Return the path of the unpacked form of a compressed pack, unchecked; None if there is no such file."""
    places = (folder / (pack.key + kernel_cache.SHARED) for folder in kernel_cache.folders())
    return next((place for place in places if place.is_file()), None)


def unpack(pack: InstalledPack) -> Path:
    """Return the unpacked form of a compressed pack. Processes that unpack the pack concurrently write the same file.

    Raises:
        NotUnpacked: the file is damaged, or no folder of the kernel cache is writable.
    """
    if entry := kernel_cache.find(pack.key):
        return entry.path
    try:
        code = lzma.decompress(pack.path.read_bytes())
    except (OSError, lzma.LZMAError, EOFError) as error:
        raise NotUnpacked(f"the pack cannot be read ({error}). Install the wheel again") from None
    if hashlib.sha256(code).hexdigest() != pack.report.get("sha256"):
        raise NotUnpacked("the content differs from the content that was built. Install the wheel again")
    facts = {"name": f"flashplug_{pack.name}", "cpu": pack.report.get("cpu", [])}
    try:
        return kernel_cache.write_to_first(kernel_cache.folders(), pack.key + kernel_cache.SHARED, code, facts)
    except OSError as error:
        raise NotUnpacked(f"the pack cannot be unpacked: {error}") from None


def is_current(path: Path) -> bool:
    """Return whether an entry of the kernel cache is an installed pack."""
    return path.stem in {pack.key for pack in installed() if pack.is_compressed}


@functools.cache
def _report(path: Path, reason: str) -> None:
    log.warning(
        "torch_flashplug: kernel pack %s is not used: %s. Its kernels are compiled at first use", path.name, reason
    )
