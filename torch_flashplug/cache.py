"""Disk cache of compiled kernels: one object file per key, built once however many processes ask, rebuilt if found
broken.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from . import env

log = logging.getLogger("torch_flashplug.cache")
T = TypeVar("T")


def directory() -> Path:
    """Where objects are kept: TORCH_FLASHPLUG_CACHE_DIR, else the per-user cache folder."""
    chosen = env.CACHE_DIR.get()
    if chosen:
        return Path(chosen)
    import platformdirs

    return Path(platformdirs.user_cache_dir("torch_flashplug"))


def load_or_build(key: str, build: Callable[[Path], None], load: Callable[[Path], T]) -> T:
    """Load the object of `key`, building it first if it is absent or does not load. `build` writes the path it is
    given.
    """
    import filelock

    folder = directory()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{key}.o"
    with filelock.FileLock(folder / f"{key}.lock"):
        if path.exists():
            try:
                return load(path)
            except Exception as error:
                log.warning("dropping a broken cache entry, %s: %s", path.name, error)
                path.unlink()
        _write_atomically(path, build)
        return load(path)


def _write_atomically(path: Path, build: Callable[[Path], None]) -> None:
    """Another process sees the whole object or none."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".o")
    os.close(handle)
    try:
        build(Path(temporary))
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
