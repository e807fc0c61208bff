"""Disk cache of compiled kernels, with one file per kernel, which is checked before loading.

An entry is a shared object (.so), or an object file (.o) if no C compiler is installed. The code is
followed by the facts of the entry as JSON, the length of the facts, and a SHA-256 of all preceding bytes. So a file is
either complete or broken, and files of different entries cannot be mixed. Loaders ignore bytes after the sections of an
object.

Entries are code that the process runs. An entry is loaded only if file and folder belong to the user or to root, and if
no other user can write to file or folder.
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
_LENGTH = 8  # bytes that hold the length of the facts
_TAIL = len(_MAGIC) + _LENGTH + hashlib.sha256().digest_size
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
# Names of the files that the cache writes: entries of kernels and packs, hashes of sources, locks, and temporary files
# of killed processes. A folder may also hold the user's own files, which the cache neither reads nor deletes.
_ENTRY_NAME = re.compile(r"(?:[\w+]+-[0-9a-f]{16}-sm_\d+a?\S*|flashplug_\w+-[0-9a-f]{16})\.(?:so|o)")
_OTHER_NAME = re.compile(
    r"sources-[0-9a-f]{64}\.json|slot-\d+\.lock|[\w+]+-[0-9a-f]{16}\S*\.lock|\.(?:writing|probe)-\S{8}"
)
UNUSED_DAYS = 90  # an entry not loaded for this number of days is deleted
_is_exclusive = False  # whether the chosen folder has no fallback; use_only_folder() sets it


class BrokenEntry(Exception):
    """Error for an entry whose content differs from the written content."""


class DistrustedEntry(Exception):
    """Error for an entry that other users may have written."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Checked entry of the cache.

    Attributes:
        path: the file.
        facts: the facts recorded by the writer, such as the compilation time in seconds.
    """

    path: Path
    facts: dict[str, object]


# ---- folders ----


def chosen_folder() -> Path:
    """Return the folder of TORCH_FLASHPLUG_CACHE_DIR, or the user's cache folder if the variable is empty.

    The path starts with ~ if the home directory is unknown. Entries are neither read from nor written to such a path.
    """
    if chosen := env.CACHE_DIR.get():
        return Path(os.path.expanduser(chosen))
    import platformdirs

    try:
        return Path(platformdirs.user_cache_dir("torch_flashplug"))
    except RuntimeError:  # a user without an entry in the password file, and without HOME
        return Path("~/.cache/torch_flashplug")


def fallback_folder() -> Path:
    """Return the folder used if the chosen folder is not writable, as with a read-only home or a full disk.

    Each value of TORCH_FLASHPLUG_CACHE_DIR has a separate fallback folder, so that an empty chosen folder always means
    an empty cache.
    """
    tag = ""
    if env.CACHE_DIR.get():
        tag = "-" + hashlib.sha256(os.path.abspath(chosen_folder()).encode()).hexdigest()[:8]
    return Path(tempfile.gettempdir()) / f"torch_flashplug-{os.getuid()}{tag}"


def folders() -> list[Path]:
    """Return the folders of the cache, in the order of reading and writing."""
    return [chosen_folder()] if _is_exclusive else [chosen_folder(), fallback_folder()]


def use_only_folder(folder: Path) -> str:
    """Make a folder the cache of this process and the worker processes, without a fallback.

    Returns:
        The reason why entries cannot be written to the folder; empty if entries can be written.
    """
    global _is_exclusive  # noqa: PLW0603
    if not (reason := prepare(folder)):
        env.set_cache_dir(str(folder))
        _is_exclusive = True
    return reason


def is_entry(path: Path) -> bool:
    """Return whether a file has the name of an entry."""
    return _ENTRY_NAME.fullmatch(path.name) is not None


def entries_in(folder: Path) -> list[Path]:
    """Return the entries of a folder, unchecked; an empty list if the folder does not exist.

    Raises:
        OSError: the folder cannot be read.
    """
    try:
        return sorted(filter(is_entry, folder.iterdir()))
    except (FileNotFoundError, NotADirectoryError):
        return []


def prepare(folder: Path) -> str:
    """Create a folder for entries, readable by all users and writable only by the owner.

    Returns:
        The reason why entries cannot be written to the folder; empty if entries can be written.
    """
    if str(folder).startswith("~"):
        return f"the home directory in {folder} is unknown"
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        if reason := distrust_reason(folder):
            return reason
        handle, probe = tempfile.mkstemp(dir=folder, prefix=".probe-")
        os.close(handle)
        os.unlink(probe)
    except OSError as error:
        return _error_text(error)
    return ""


def distrust_reason(path: Path) -> str:
    """Return why code from a file or folder must not be loaded; empty if loading is allowed.

    Raises:
        OSError: the file or folder does not exist.
    """
    facts = path.stat()
    if not (stat.S_ISREG(facts.st_mode) or stat.S_ISDIR(facts.st_mode)):
        return f"{path} is not a regular file"
    if facts.st_uid not in (os.getuid(), 0):
        return f"{path} belongs to user {facts.st_uid}, not to this user or root"
    if facts.st_mode & _OTHERS_MAY_WRITE:
        return f"{path} can be written by other users (chmod go-w {path})"
    return ""


def _error_text(error: OSError) -> str:
    return f"{error.strerror or type(error).__name__}: {error.filename or ''}".rstrip(": ")


# ---- reading ----


def find(key: str) -> Entry | None:
    """Return the entry of a key, or None.

    Entries that must not be loaded are reported once. Broken entries are deleted.
    """
    names = [f"{key}{suffix}" for suffix in (SHARED, OBJECT)]
    return next(_checked(folder / name for folder in folders() for name in names), None)


def find_matching(pattern: str) -> Iterator[Entry]:
    """Yield the entries with keys that match an fnmatch pattern, the newest entry of a folder first."""
    for folder in folders():
        with contextlib.suppress(OSError):
            paths = [path for path in folder.glob(pattern) if is_entry(path)]
            yield from _checked(sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True))


def _checked(paths: Iterable[Path]) -> Iterator[Entry]:
    for path in paths:
        try:
            if path.exists():
                yield Entry(path, check(path))
        except DistrustedEntry as error:
            _report(str(error))  # the file is kept, because the file may belong to a different user
        except BrokenEntry as error:
            with contextlib.suppress(OSError):
                path.unlink()
            _report(str(error))
        except OSError:
            continue  # a process deleted the file, or a network file system is unavailable


def check(path: Path) -> dict[str, object]:
    """Check owner, mode and content of an entry, and return the facts of the entry.

    Raises:
        DistrustedEntry: the file or the folder belongs to a different user, or other users can write to the file or
            the folder.
        BrokenEntry: the content differs from the written content.
        OSError: the entry cannot be read.
    """
    if reason := distrust_reason(path.parent) or distrust_reason(path):
        raise DistrustedEntry(reason)
    data = path.read_bytes()
    if data[-_TAIL:][: len(_MAGIC)] != _MAGIC:
        raise BrokenEntry(f"{path} is cut short")
    if hashlib.sha256(data[: -hashlib.sha256().digest_size]).digest() != data[-hashlib.sha256().digest_size :]:
        raise BrokenEntry(f"{path} does not have the content that was written")
    length = int.from_bytes(data[-_TAIL + len(_MAGIC) :][:_LENGTH], "little")
    with contextlib.suppress(OSError):
        os.utime(path)  # so that prune() keeps entries in use
    return json.loads(data[-_TAIL - length : -_TAIL])


@functools.cache
def _report(reason: str) -> None:
    """Log once per reason that an entry is not used."""
    log.warning("torch_flashplug: a kernel cache entry is not used and will be made again: %s", reason)


def load(path: Path) -> ctypes.CDLL:
    """Open the shared object of a checked entry, even on a file system mounted without execute permission.

    Raises:
        OSError: the shared object does not load. The content of the entry is intact. So this process lacks something
            that the shared object needs, such as a library.
    """
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        if "failed to map segment" not in str(error):
            raise
    handle = os.memfd_create(path.stem[:200])
    with open(handle, "wb", closefd=False) as copy:
        copy.write(path.read_bytes())
    return ctypes.CDLL(
        f"/proc/self/fd/{handle}"
    )  # the handle stays open, because the path of the library contains the number


# ---- writing ----


def writable_folders() -> tuple[list[Path], list[str]]:
    """Return the writable folders of the cache, and the reasons why the remaining folders are not writable."""
    reasons = {folder: prepare(folder) for folder in folders()}
    writable = [folder for folder, reason in reasons.items() if not reason]
    first, reason = next(iter(reasons.items()))
    if reason and writable:
        _report_fallback(first, writable[0], reason)
    return writable, list(filter(None, reasons.values()))


@functools.cache
def _report_fallback(folder: Path, fallback: Path, reason: str) -> None:
    """Log once that kernels are kept in the fallback folder instead of the chosen folder."""
    log.warning("torch_flashplug: the kernel cache is %s, because %s cannot be written: %s", fallback, folder, reason)


def write_to_first(places: Iterable[Path], name: str, code: bytes, facts: dict[str, object]) -> Path:
    """Write an entry to the first writable folder.

    Raises:
        OSError: no folder is writable; the message has the reason for each folder.
    """
    reasons = []
    for folder in places:
        try:
            if not (reason := prepare(folder)):  # creates the folder again if the folder was deleted meanwhile
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
    """Write a file atomically: other processes see the complete file or no file, even if this process is killed.

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
    """Try to take the lock of a key, and yield whether the lock was taken.

    The operating system releases the locks of a killed process. On a file system without locks, every lock counts as
    free. Entries are written atomically. So two processes that compile the same kernel do no harm.
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
    """Delete the cache's own files that were not used for a number of days, and return the paths of the deleted files.

    The cache's own files are entries, locks and temporary files of killed processes. All other files are kept.
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
