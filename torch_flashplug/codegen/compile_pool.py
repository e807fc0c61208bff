"""Pool of worker processes for compiling requested kernels in parallel, without access to a GPU.

Each worker thread owns a worker process (worker.py). A thread takes the first kernel not being compiled by a different
process of the host. So ranks with requests for the same kernels share the work. Permits limit the number of kernels
compiled in parallel on a host. Kernels and permits are file locks in the kernel cache.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .. import env
from . import kernel_cache

log = logging.getLogger("torch_flashplug.compile")

WORKER = Path(__file__).with_name("worker.py")
MAX_WORKERS = 8  # per process
MAX_PER_HOST = 64
POLL_SECONDS = 0.02  # interval for checking kernels compiled by different processes
LOCK_SECONDS = 60  # age at which a lock counts as stuck, and the kernel is compiled without the lock
IDLE_SECONDS = 10  # time without work until a worker ends


class CompileError(RuntimeError):
    """Error for a kernel that could not be compiled."""


@dataclass(eq=False, slots=True)
class Job:
    """Request for a kernel.

    Attributes:
        name: the name of the kernel.
        target: a key of TARGETS.
        key: the key of the kernel's cache entry.
        done: an event, set when `path` or `error` is known.
        path: the cache entry; None before the kernel is done, and after a failure.
        error: the reason of a failure.
        traceback: the traceback of a failure.
        seconds: the compilation time in a worker of the own process; 0 if a different process compiled the kernel.
        first_attempt_time: the time of the first attempt to compile the kernel (monotonic seconds); infinite before.
    """

    name: str
    target: str
    key: str
    done: threading.Event = field(default_factory=threading.Event)
    path: Path | None = None
    error: str = ""
    traceback: str = ""
    seconds: float = 0.0
    first_attempt_time: float = math.inf

    def finish(self, path: Path | None, error: str = "", traceback: str = "", seconds: float = 0.0) -> None:
        """Set the outcome, and wake all waiting threads."""
        self.path, self.error, self.traceback, self.seconds = path, error, traceback, seconds
        self.done.set()

    def result(self) -> Path:
        """Wait for the kernel, and return the cache entry. All threads of the process keep running meanwhile.

        Raises:
            CompileError: the kernel could not be compiled.
        """
        self.done.wait()
        if self.path is None:
            raise CompileError(self.error)
        return self.path


class Worker:
    """Worker process, started for the first kernel."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._errors = None
        self._target = ""

    def compile(self, job: Job, folders: Sequence[Path]) -> dict[str, object]:
        """Return the worker's answer as arguments for `Job.finish`. A dead worker is restarted once."""
        request = {"name": job.name, "target": job.target, "key": job.key, "folders": list(map(str, folders))}
        for _ in range(2):
            process = self._started(job.target)
            with contextlib.suppress(OSError, ValueError):
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
                if line := process.stdout.readline():
                    answer = json.loads(line)
                    return answer | {"path": Path(answer["path"]) if answer["path"] else None}
            status = self._end()
        return {"path": None, "error": f"the compiling process died with status {status}"}

    def _started(self, target: str) -> subprocess.Popen[str]:
        if self._process is not None and self._target != target:
            self._end()
        if self._process is None:
            self._target = target
            self._errors = tempfile.TemporaryFile()
            self._process = subprocess.Popen(
                [sys.executable, "-S", str(WORKER)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
                env=env.worker_environment(target), start_new_session=True,
            )  # fmt: skip
        return self._process

    def _end(self) -> str:
        """End the process. Return the exit status and the last line written to standard error."""
        with contextlib.suppress(OSError):  # raised if the process has not read all input
            self._process.stdin.close()
        try:
            status = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        self._process.stdout.close()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        self._errors.close()
        self._process = None
        return f"{status} ({lines[-1]})" if lines else str(status)

    def close(self) -> None:
        if self._process is not None:
            self._end()


class Pool:
    """Kernels needed now or soon by the process, and the threads for providing the kernels."""

    def __init__(self, workers: int = 0) -> None:
        """Create a pool without threads.

        Args:
            workers: number of kernels compiled in parallel; 0 for the number of CPUs of the process, at most 8.
        """
        self._workers = workers or env.num_compile_workers(MAX_WORKERS)
        self._condition = threading.Condition()
        self._waiting: list[Job] = []  # in the order of need
        self._running: dict[str, Job] = {}
        self._threads = 0

    def request(self, jobs: Sequence[Job], first: bool = False) -> list[Job]:
        """Request kernels. A kernel requested earlier is not requested twice.

        Args:
            jobs: the kernels.
            first: whether the kernels are needed before all waiting kernels.

        Returns:
            For each kernel, the job to wait for.
        """
        with self._condition:
            jobs_by_key = {job.key: job for job in (*self._waiting, *self._running.values())}
            answers = [jobs_by_key.get(job.key, job) for job in jobs]
            new_jobs = [job for job in answers if job.key not in jobs_by_key]
            if first:
                requested_keys = {job.key for job in answers}
                later_jobs = [job for job in self._waiting if job.key not in requested_keys]
                self._waiting = [job for job in answers if job.key not in self._running] + later_jobs
            else:
                self._waiting += new_jobs
            for _ in range(min(self._workers, len(self._waiting) + len(self._running)) - self._threads):
                self._threads += 1
                threading.Thread(target=self._serve, name="flashplug-compile", daemon=True).start()
            self._condition.notify_all()
        return answers

    def _serve(self) -> None:
        """Compile kernels until none was requested for IDLE_SECONDS. Each thread of the pool runs `_serve`."""
        worker = Worker()
        try:
            folders, reasons = kernel_cache.writable_folders()
            for folder in folders:
                kernel_cache.prune(folder)
            while (candidates := self._candidates()) is not None:
                if not folders:
                    raise OSError(f"no folder for compiled kernels: {'; '.join(reasons)}")
                if not self._serve_one(candidates, worker, folders):
                    time.sleep(POLL_SECONDS)
        except BaseException as error:  # threads that wait for a kernel must not wait forever
            self._fail_all(str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}")
        finally:
            worker.close()

    def _candidates(self) -> list[Job] | None:
        """Return the waiting kernels, at least one; None if the thread must end."""
        with self._condition:
            if self._condition.wait_for(lambda: self._waiting, IDLE_SECONDS):
                return list(self._waiting)
            self._threads -= 1
            return None

    def _fail_all(self, error: str) -> None:
        """Finish all waiting kernels with an error, because the thread cannot continue."""
        with self._condition:
            jobs, self._waiting = self._waiting, []
            self._threads -= 1
        for job in jobs:
            job.finish(None, error)

    def _serve_one(self, candidates: Sequence[Job], worker: Worker, folders: Sequence[Path]) -> bool:
        """Provide the first kernel that can be provided now; return False if there is none."""
        with contextlib.ExitStack() as locks:
            has_permit = self._lock(locks, folders[0], *_permit_names())
            return any(self._try(job, worker, folders, has_permit) for job in candidates)

    def _try(self, job: Job, worker: Worker, folders: Sequence[Path], has_permit: bool) -> bool:
        """Provide a kernel. Return False if a different process or thread does, or if the host is busy."""
        job.first_attempt_time = min(job.first_attempt_time, time.monotonic())
        is_stuck = (
            time.monotonic() - job.first_attempt_time > LOCK_SECONDS
        )  # locks of different processes then no longer count
        with contextlib.ExitStack() as locks:
            if (entry := kernel_cache.find(job.key)) is None:
                if not is_stuck and not (has_permit and self._lock(locks, folders[0], job.key)):
                    return False
                entry = kernel_cache.find(job.key)  # a process may have written the entry before the lock was taken
            if not self._take(job):
                return False
            try:
                job.finish(**({"path": entry.path} if entry else worker.compile(job, folders)))
            except BaseException as error:  # threads that wait for the kernel must not wait forever
                job.finish(None, f"{type(error).__name__}: {error}")
            finally:
                self._release(job)
        return True

    def _lock(self, locks: contextlib.ExitStack, folder: Path, *keys: str) -> bool:
        """Take the first free lock; return False if no lock is free."""
        return any(locks.enter_context(kernel_cache.locked(folder, key)) for key in keys)

    def _take(self, job: Job) -> bool:
        """Assign a kernel to the calling thread; return False if a different thread was faster."""
        with self._condition:
            if job not in self._waiting:
                return False
            self._waiting.remove(job)
            self._running[job.key] = job
            return True

    def _release(self, job: Job) -> None:
        with self._condition:
            self._running.pop(job.key, None)


def _permit_names() -> list[str]:
    """Return the names of the locks for limiting the number of kernels compiled in parallel on a host."""
    return [f"slot-{number}" for number in range(env.num_compile_workers(MAX_PER_HOST, per_host=True))]


_pool = Pool()


def pool() -> Pool:
    """Return the pool of the process."""
    return _pool


def _renew() -> None:
    """Replace the pool in a forked child process.

    A forked child does not have the threads of the pool. The threads may have held locks at the time of the fork.
    """
    global _pool  # noqa: PLW0603
    _pool = Pool()


os.register_at_fork(after_in_child=_renew)
