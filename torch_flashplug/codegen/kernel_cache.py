"""The disk cache of compiled kernels: one file for each kernel, checked before it is loaded.

An entry is a shared object (.so), or an object file (.o) where no C compiler is installed. Behind its code lie the
facts of the entry as JSON, their length and a SHA-256 of all of it, so that one file is whole or broken, and no group
of files can be mixed. Loaders ignore what lies behind the sections of an object.

Entries are code that the process runs. An entry is loaded only if it and its folder belong to the user or to root, and
no one else can write them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import logging
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .. import env

log = logging.getLogger("torch_flashplug.cache")

SHARED, OBJECT = ".so", ".o"
_MAGIC = b"flashplug entry 1\n"
_LENGTH = 8  # bytes of the length of the facts
_TAIL = len(_MAGIC) + _LENGTH + hashlib.sha256().digest_size
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
# The names of the files that are written here: entries of kernels and of packs, the hashes of sources, locks, and what
# a killed process leaves behind. A folder may hold files of its user, too, which are neither read nor deleted.
_ENTRY_NAME = re.compile(r"(?:[\w+]+-[0-9a-f]{16}-sm_\d+a?\S*|flashplug_\w+-[0-9a-f]{16})\.(?:so|o)")
_OTHER_NAME = re.compile(
    r"sources-[0-9a-f]{64}\.json|slot-\d+\.lock|[\w+]+-[0-9a-f]{16}\S*\.lock|\.(?:writing|probe)-\S{8}"
)
UNUSED_DAYS = 90  # after which an entry that nobody loaded is deleted
_exclusive = False  # whether the chosen folder has no fallback; use_alone() sets it


class BrokenEntry(Exception):
    """An entry whose content is not what was written."""


class DistrustedEntry(Exception):
    """An entry that other users may have written."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A checked entry.

    Attributes:
        path: the file.
        facts: what the writer noted, such as the seconds that compilation took.
    """

    path: Path
    facts: dict[str, object]


# ---- folders ----


def chosen_folder() -> Path:
    """Return the folder that users know: TORCH_FLASHPLUG_CACHE_DIR, else the user's cache folder.

    The path starts with ~ where no home directory is known; entries are neither read nor written there.
    """
    if chosen := env.CACHE_DIR.get():
        return Path(os.path.expanduser(chosen))
    import platformdirs

    try:
        return Path(platformdirs.user_cache_dir("torch_flashplug"))
    except RuntimeError:  # a user without an entry in the password file, and without HOME
        return Path("~/.cache/torch_flashplug")


def fallback_folder() -> Path:
    """Return the folder that serves where the chosen one cannot be written: a read-only home or a full disk.

    Each folder that TORCH_FLASHPLUG_CACHE_DIR names has a fallback of its own: an empty folder is an empty cache.
    """
    tag = ""
    if env.CACHE_DIR.get():
        tag = "-" + hashlib.sha256(os.path.abspath(chosen_folder()).encode()).hexdigest()[:8]
    return Path(tempfile.gettempdir()) / f"torch_flashplug-{os.getuid()}{tag}"


def folders() -> list[Path]:
    """Return the folders that entries are looked for in and written to, in this order."""
    return [chosen_folder()] if _exclusive else [chosen_folder(), fallback_folder()]


def use_alone(folder: Path) -> str:
    """Make a folder the cache of this process and its workers, without a fallback.

    Returns:
        Why entries cannot be written there; empty where they can.
    """
    global _exclusive  # noqa: PLW0603
    if not (reason := prepare(folder)):
        env.set_cache_dir(str(folder))
        _exclusive = True
    return reason


def is_entry(path: Path) -> bool:
    """Return whether the name of a file is that of an entry."""
    return _ENTRY_NAME.fullmatch(path.name) is not None


def entries_in(folder: Path) -> list[Path]:
    """Return the entries of a folder, unchecked; none where there is no folder.

    Raises:
        OSError: the folder cannot be read.
    """
    try:
        return sorted(filter(is_entry, folder.iterdir()))
    except (FileNotFoundError, NotADirectoryError):
        return []


def prepare(folder: Path) -> str:
    """Make a folder of entries, readable by all and writable by its owner alone.

    Returns:
        Why entries cannot be written there; empty where they can.
    """
    if str(folder).startswith("~"):
        return f"the home directory in {folder} is unknown"
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        if reason := distrusted(folder):
            return reason
        handle, probe = tempfile.mkstemp(dir=folder, prefix=".probe-")
        os.close(handle)
        os.unlink(probe)
    except OSError as error:
        return _said(error)
    return ""


def distrusted(path: Path) -> str:
    """Return why code from this file or folder is not loaded; empty where it is. Raises OSError if it is not there."""
    facts = path.stat()
    if not (stat.S_ISREG(facts.st_mode) or stat.S_ISDIR(facts.st_mode)):
        return f"{path} is not a regular file"
    if facts.st_uid not in (os.getuid(), 0):
        return f"{path} belongs to user {facts.st_uid}, not to this user or root"
    if facts.st_mode & _OTHERS_MAY_WRITE:
        return f"{path} can be written by other users (chmod go-w {path})"
    return ""


def _said(error: OSError) -> str:
    return f"{error.strerror or type(error).__name__}: {error.filename or ''}".rstrip(": ")


# ---- reading ----


def find(key: str) -> Entry | None:
    """Return the entry of a key, or None. Entries that must not be loaded are reported once, broken ones deleted."""
    names = [f"{key}{suffix}" for suffix in (SHARED, OBJECT)]
    return next(_checked(folder / name for folder in folders() for name in names), None)


def find_like(pattern: str) -> Iterator[Entry]:
    """Yield the entries whose keys match a pattern of fnmatch, the newest of a folder first."""
    for folder in folders():
        with contextlib.suppress(OSError):
            found = [path for path in folder.glob(pattern) if is_entry(path)]
            yield from _checked(sorted(found, key=lambda path: path.stat().st_mtime, reverse=True))


def _checked(paths: Iterable[Path]) -> Iterator[Entry]:
    for path in paths:
        try:
            if path.exists():
                yield Entry(path, check(path))
        except DistrustedEntry as error:
            _report(str(error))  # the file stays: it may be another user's
        except BrokenEntry as error:
            with contextlib.suppress(OSError):
                path.unlink()
            _report(str(error))
        except OSError:
            continue  # deleted by another process, or a network file system that is away


def check(path: Path) -> dict[str, object]:
    """Check owner, mode and content of an entry, and return its facts.

    Raises:
        DistrustedEntry: the file or its folder belongs to another user, or others can write it.
        BrokenEntry: the content is not what was written.
        OSError: the entry cannot be read.
    """
    if reason := distrusted(path.parent) or distrusted(path):
        raise DistrustedEntry(reason)
    data = path.read_bytes()
    if data[-_TAIL:][: len(_MAGIC)] != _MAGIC:
        raise BrokenEntry(f"{path} is cut short")
    if hashlib.sha256(data[: -hashlib.sha256().digest_size]).digest() != data[-hashlib.sha256().digest_size :]:
        raise BrokenEntry(f"{path} has another content than was written")
    length = int.from_bytes(data[-_TAIL + len(_MAGIC) :][:_LENGTH], "little")
    with contextlib.suppress(OSError):
        os.utime(path)  # so that prune() keeps what is in use
    return json.loads(data[-_TAIL - length : -_TAIL])


@functools.cache
def _report(reason: str) -> None:
    """Log once that an entry is not used."""
    log.warning("torch_flashplug: an entry of the kernel cache is not used and will be made again: %s", reason)


def load(path: Path) -> ctypes.CDLL:
    """Open the shared object of a checked entry, also from a file system that forbids to execute files.

    Raises:
        OSError: it does not load. Its content is what was written, so that something else is missing in this process.
    """
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        if "failed to map segment" not in str(error):
            raise
    handle = os.memfd_create(path.stem[:200])
    with open(handle, "wb", closefd=False) as copy:
        copy.write(path.read_bytes())
    return ctypes.CDLL(f"/proc/self/fd/{handle}")  # stays open: its number is the library's name


# ---- writing ----


def writable_folders() -> tuple[list[Path], list[str]]:
    """Return the folders that entries can be written to, and why not to the others."""
    reasons = {folder: prepare(folder) for folder in folders()}
    writable = [folder for folder, reason in reasons.items() if not reason]
    first, reason = next(iter(reasons.items()))
    if reason and writable:
        _report_fallback(first, writable[0], reason)
    return writable, list(filter(None, reasons.values()))


@functools.cache
def _report_fallback(folder: Path, fallback: Path, reason: str) -> None:
    """Log once that kernels are kept in another folder than the chosen one."""
    log.warning("torch_flashplug: the kernel cache is %s, because %s cannot be written: %s", fallback, folder, reason)


def write_to_first(places: Iterable[Path], name: str, code: bytes, facts: dict[str, object]) -> Path:
    """Write an entry to the first of these folders that takes it.

    Raises:
        OSError: none of the folders takes it; the text has the reason of each.
    """
    reasons = []
    for folder in places:
        try:
            if not (reason := prepare(folder)):  # a folder may have been deleted since it was made
                return write(folder, name, code, facts)
        except OSError as error:
            reason = f"{folder}: {error.strerror or error}"
        reasons.append(reason)
    raise OSError(f"the kernel cache cannot be written ({'; '.join(reasons)})")


def write(folder: Path, name: str, code: bytes, facts: dict[str, object]) -> Path:
    """Write an entry.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
    """
    text = json.dumps(facts).encode()
    data = code + text + _MAGIC + len(text).to_bytes(_LENGTH, "little")
    return write_atomically(folder, name, data + hashlib.sha256(data).digest())


def write_atomically(folder: Path, name: str, data: bytes) -> Path:
    """Write a file. Other processes see the whole file or none, also if this process is killed.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
    """
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=".writing-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, folder / name)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return folder / name


@contextlib.contextmanager
def locked(folder: Path, key: str) -> Iterator[bool]:
    """Try to take the lock of a key, and say whether it was taken. A killed process gives its locks back.

    A file system without locks counts as one whose locks are free: entries are written atomically, so that two
    processes that compile the same kernel do no harm.
    """
    import filelock

    lock = filelock.FileLock(folder / f"{key}.lock", timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout:
        yield False
        return
    except (OSError, NotImplementedError):
        yield True
        return
    try:
        yield True
    finally:
        lock.release()


def prune(folder: Path, days: float = UNUSED_DAYS) -> list[Path]:
    """Delete the cache's own files that were not used for so many days, and return their paths.

    Entries, locks and what killed processes left are the cache's own. Other files in the folder stay.
    """
    deleted = []
    oldest = time.time() - days * 86400
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if is_entry(path) or _OTHER_NAME.fullmatch(path.name):
                with contextlib.suppress(OSError):
                    if path.stat().st_mtime < oldest:
                        path.unlink()
                        deleted.append(path)
    return deleted
