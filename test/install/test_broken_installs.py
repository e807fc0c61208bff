"""Broken caches and installations.

`import torch` and calls must work in all cases, each fault must give one clear warning, and distrusted kernels must not
be loaded. No test needs a GPU: compiled kernels are C functions, written by a stub of the compiler.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from torch_flashplug import env
from torch_flashplug.cli import env_info, warmup
from torch_flashplug.codegen import compile_pool, dsl, host_cpu, jit, kernel_cache, linker
from torch_flashplug.codegen.kernel_request import CallConditions, KernelAnswer
from torch_flashplug.registry import kernel_table

ROOT = Path(__file__).resolve().parents[2]
KERNEL, TARGET = "decode_sm80_bf16_d64_full_m64n128s2", "sm_90a"
OTHER = "fwd_sm90_bf16_d128_causal_m128n128s2"
CALL = CallConditions()

# Worker without a compiler: copies the shared object of the fixture `code` for each kernel, and logs the name.
WORKER = """
import json, os, sys, time
sys.path.insert(0, {root!r})
sys.modules["torch_flashplug"] = package = type(sys)("torch_flashplug")
package.__path__ = [{package!r}]
from pathlib import Path
from torch_flashplug.codegen import host_cpu, kernel_cache
for line in sys.stdin:
    request = json.loads(line)
    with open({log!r}, "a") as log:
        log.write(request["name"] + "\\n")
    time.sleep({seconds})
    {fault}
    reasons = []
    for folder in map(Path, request["folders"]):
        try:
            code = Path({code!r}).read_bytes()
            facts = {{"name": request["name"], "seconds": {seconds}, "cpu": sorted(host_cpu.features())}}
            path = kernel_cache.write(folder, request["key"] + ".so", code, facts)
            print(json.dumps({{"path": str(path), "seconds": {seconds}}}), flush=True)
            break
        except OSError as error:
            reasons.append(str(error))
    else:
        print(json.dumps({{"path": None, "error": "; ".join(reasons), "traceback": ""}}), flush=True)
"""


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a shared object with a host function for each of two kernels."""
    folder = tmp_path_factory.mktemp("code")
    functions = "\n".join(f"int __tvm_ffi_{name}(void) {{ return {len(name)}; }}" for name in (KERNEL, OTHER))
    (folder / "code.c").write_text(functions)
    compiler = linker.c_compiler()
    assert compiler is not None
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "code.so", folder / "code.c"], check=True)
    return folder / "code.so"


class Cache:
    """Empty cache with a fallback folder and a stub worker."""

    def __init__(self, folder: Path, code: Path):
        self.folder, self.code, self.log = folder / "cache", code, folder / "log"
        self.worker = folder / "worker.py"
        self.set_worker()

    def set_worker(self, seconds: float = 0.01, fault: str = "pass") -> None:
        places = {"root": str(ROOT), "package": str(ROOT / "torch_flashplug"), "log": str(self.log)}
        self.worker.write_text(WORKER.format(**places, code=str(self.code), seconds=seconds, fault=fault))

    def compiled(self) -> list[str]:
        return self.log.read_text().split() if self.log.exists() else []

    def put(self, name: str = KERNEL, **facts: object) -> Path:
        """Write an entry, as a worker does."""
        kernel_cache.prepare(self.folder)
        facts = {"name": name, "seconds": 1.0, "cpu": sorted(host_cpu.features())} | facts
        return kernel_cache.write(self.folder, jit.compile_job(name, TARGET).key + ".so", self.code.read_bytes(), facts)


@pytest.fixture
def cache(tmp_path: Path, code: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cache]:
    new_cache = Cache(tmp_path, code)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv(env.CACHE_DIR.name, str(new_cache.folder))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(compile_pool, "WORKER", new_cache.worker)
    monkeypatch.setattr(compile_pool, "_pool", compile_pool.Pool())
    monkeypatch.setattr(compile_pool, "IDLE_SECONDS", 0.2)
    monkeypatch.setattr(dsl, "version", lambda: "4.8.1+cu13")
    monkeypatch.setattr(jit, "_loaded", {})
    jit._fingerprints.cache_clear()
    kernel_cache._report.cache_clear()
    yield new_cache
    jit._fingerprints.cache_clear()


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return the logged warnings."""
    return lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def provide(name: str = KERNEL, conditions: CallConditions = CALL, **more: object) -> KernelAnswer:
    return jit.provide(name, TARGET, conditions, **more)


# ---- working caches ----


def test_kernel_is_compiled_once_and_then_cached(cache, warnings):
    first = provide()
    jit._loaded.clear()
    again = provide()

    assert first.function and again.function
    assert cache.compiled() == [KERNEL]
    (line,) = warnings()
    assert f"kernel {KERNEL} was compiled at its first use: the call waited" in line and "warmup" in line


def test_second_process_loads_the_entry_without_the_compiler(cache):
    """Load an entry within milliseconds, from a read-only folder."""
    cache.put()
    os.chmod(cache.folder, 0o555)
    program = (
        "import sys, time, torch_flashplug; from torch_flashplug.codegen import jit;"
        "from torch_flashplug.codegen.kernel_request import CallConditions; start = time.perf_counter();"
        f"answer = jit.provide({KERNEL!r}, {TARGET!r}, CallConditions());"
        "print(bool(answer.function), 'cutlass' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_cache_miss_compiles_the_following_kernels(cache):
    provide(next_kernels=lambda: [OTHER, KERNEL])
    (job,) = compile_pool.pool().request([jit.compile_job(OTHER, TARGET)])
    assert job.result().exists()
    assert sorted(cache.compiled()) == sorted([KERNEL, OTHER])


def test_other_threads_run_while_a_call_waits(cache):
    import threading

    cache.set_worker(seconds=0.5)
    counted = [0]
    done = threading.Event()

    def count() -> None:
        while not done.is_set():
            counted[0] += 1
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    provide()
    done.set()
    thread.join()
    assert counted[0] > 50


RACER = """
import sys
sys.path.insert(0, {root!r})
sys.modules["torch_flashplug"] = package = type(sys)("torch_flashplug")
package.__path__ = [{package!r}]
from pathlib import Path
from torch_flashplug.codegen import compile_pool, dsl, jit
from torch_flashplug.codegen.kernel_request import CallConditions
compile_pool.WORKER = Path({worker!r})
dsl.version = lambda: "4.8.1+cu13"
answers = [jit.provide(name, {target!r}, CallConditions(), lambda: {names!r}) for name in {names!r}]
assert all(answer.function for answer in answers), answers
"""


def test_eight_racing_processes_compile_each_kernel_once(cache):
    cache.set_worker(seconds=0.3)
    places = {"root": str(ROOT), "package": str(ROOT / "torch_flashplug"), "worker": str(cache.worker)}
    program = RACER.format(**places, target=TARGET, names=[KERNEL, OTHER])
    racers = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(8)]
    assert [racer.wait(timeout=120) for racer in racers] == [0] * 8
    assert sorted(cache.compiled()) == sorted([KERNEL, OTHER])


# ---- broken entries: each is compiled again, with one warning ----


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-50])


def _change(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _let_others_write(path: Path) -> None:
    path.chmod(0o666)


BROKEN = {
    "cut_short": (_cut, "cut short"),
    "empty": (_empty, "cut short"),
    "changed": (_change, "does not have the content that was written"),
    "writable_by_others": (_let_others_write, "can be written by other users"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_entry_is_compiled_again(cache, warnings, fault):
    damage, reason = BROKEN[fault]
    damage(cache.put())

    assert provide().function

    assert cache.compiled() == [KERNEL]
    assert sum(reason in line for line in warnings()) == 1 and len(warnings()) == 2


def test_entry_of_a_different_owner_is_not_loaded(cache, warnings, monkeypatch):
    path = cache.put()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    monkeypatch.setattr(kernel_cache, "distrust_reason", lambda path, real=kernel_cache.distrust_reason: real(path))
    os.chown(path, 54321, -1)
    os.chown(cache.folder, 12345, -1)

    with pytest.raises(kernel_cache.DistrustedEntry, match="belongs to user 54321"):
        kernel_cache.check(path)


def test_folder_writable_by_any_user_is_not_used(cache, warnings):
    cache.put()
    cache.folder.chmod(0o777)

    answer = provide()

    assert answer.function and cache.compiled() == [KERNEL]
    assert str(answer.library._name).startswith(str(cache.folder.parent / "tmp"))
    assert any("can be written by other users (chmod go-w" in line for line in warnings())


def test_distrusted_file_is_not_deleted(cache, warnings):
    """The file may belong to a different user, when root examines the cache of the user."""
    path = cache.put()
    cache.folder.chmod(0o777)

    assert kernel_cache.find(path.stem) is None

    assert path.exists() and len(warnings()) == 1


def test_internal_fault_of_the_pool_ends_the_wait(cache, monkeypatch):
    """Emulate a missing package that the pool needs."""

    def fail(folder: Path, key: str) -> None:
        raise ModuleNotFoundError("No module named 'filelock'")

    monkeypatch.setattr(kernel_cache, "locked", fail)
    answer = provide()
    assert not answer.has_kernel and "ModuleNotFoundError: No module named 'filelock'" in answer.reason


def test_entry_for_an_unsupported_cpu_is_not_loaded(cache):
    """Host code with instructions missing on this CPU would end the process."""
    cache.put(cpu=["avx10_2"])
    path = next(cache.folder.glob("*.so"))
    path.rename(path.with_name(path.name.replace(host_cpu.tag(), "x86_64-00000000")))
    assert jit.find_entry(KERNEL, TARGET) is None


def test_entry_for_a_lesser_cpu_is_loaded(cache):
    path = cache.put(cpu=sorted(host_cpu.features())[:1])
    path.rename(path.with_name(path.name.replace(host_cpu.tag(), "x86_64-00000000")))
    assert provide().function and not cache.compiled()


def test_entries_of_older_sources_are_not_loaded(cache, monkeypatch):
    cache.put()
    monkeypatch.setattr(jit, "_sources", lambda spec: "0123456789abcdef")
    assert jit.find_entry(KERNEL, TARGET) is None


def test_unloadable_code_leaves_the_call_to_stock(cache):
    """The content of the entry is right, so the fault is in this process. Nothing may be compiled repeatedly."""
    cache.code = ROOT / "README.md"
    cache.put()
    answer = provide()
    assert not answer.has_kernel and "does not load" in answer.reason and not cache.compiled()


def test_file_system_without_execution_is_supported(cache, monkeypatch):
    import ctypes

    cache.put()
    real = ctypes.CDLL

    def open_library(name: str) -> ctypes.CDLL:
        if not name.startswith("/proc/self/fd/"):
            raise OSError(f"{name}: failed to map segment from shared object: Operation not permitted")
        return real(name)

    monkeypatch.setattr(kernel_cache.ctypes, "CDLL", open_library)
    assert provide().function and not cache.compiled()


# ---- folders and locks ----


def test_unwritable_home_uses_the_fallback_folder(cache, monkeypatch):
    """Put a file in place of the folder, because root may write to every folder."""
    cache.folder.parent.mkdir(exist_ok=True)
    cache.folder.write_text("")
    assert provide().function
    assert list((cache.folder.parent / "tmp").glob(f"torch_flashplug-*/{KERNEL}*.so"))


def test_unwritable_folders_are_reported(cache, monkeypatch):
    monkeypatch.setattr(kernel_cache, "prepare", lambda folder: "Read-only file system")
    answer = provide()
    assert not answer.has_kernel and "no folder for compiled kernels: Read-only file system" in answer.reason


def test_full_disk_is_reported(cache):
    """Fill both disks: stock serves, and the warning names the reason.

    If only the first folder is full, the fallback folder receives the entry.
    """
    full = "(_ for _ in ()).throw(OSError(28, 'No space left on device'))"
    cache.set_worker(fault=f"kernel_cache.os.fsync = lambda handle: {full}")
    answer = provide()
    assert not answer.has_kernel and "No space left on device" in answer.reason
    assert not [path for path in cache.folder.iterdir() if path.suffix == ".so" or path.name.startswith(".")]


def test_killed_worker_is_restarted(cache):
    cache.set_worker(
        fault="os.path.exists('{0}') or (open('{0}', 'w'), os.kill(os.getpid(), 9))".format(
            cache.worker.parent / "once"
        )
    )
    assert provide().function
    assert cache.compiled() == [KERNEL, KERNEL]


def test_repeatedly_dying_worker_is_reported(cache, warnings):
    cache.set_worker(fault="print('no such compiler', file=sys.stderr); os._exit(3)")
    answer = provide()
    assert not answer.has_kernel and "the compiling process died with status 3 (no such compiler)" in answer.reason


def test_partial_file_of_a_killed_writer_is_no_entry(cache):
    kernel_cache.prepare(cache.folder)
    (cache.folder / ".writing-x").write_bytes(b"half")
    assert provide().function and cache.compiled() == [KERNEL]


@contextlib.contextmanager
def lock_holder(folder: Path, key: str) -> Iterator[subprocess.Popen]:
    """Run a process that holds a lock."""
    lock = str(folder / f"{key}.lock")
    program = f"import filelock, time; filelock.FileLock({lock!r}).acquire(); print(1, flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    process.stdout.read(1)
    yield process
    process.kill()
    process.wait()


def test_lock_of_a_killed_owner_is_taken(cache):
    kernel_cache.prepare(cache.folder)
    with lock_holder(cache.folder, jit.compile_job(KERNEL, TARGET).key) as process:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert provide().function


def test_stuck_lock_is_ignored(cache, monkeypatch):
    monkeypatch.setattr(compile_pool, "LOCK_SECONDS", 0.3)
    kernel_cache.prepare(cache.folder)
    with lock_holder(cache.folder, jit.compile_job(KERNEL, TARGET).key):
        assert provide().function


def test_file_system_without_locks_is_supported(cache, monkeypatch):
    import filelock

    def refuse(lock: filelock.FileLock) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    assert provide().function


def test_forked_child_compiles_kernels(cache):
    provide(OTHER)
    child = os.fork()
    if child == 0:
        os._exit(0 if provide().function else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# ---- no compiler, no permission to compile ----


def test_missing_compiler_is_reported(cache, monkeypatch):
    monkeypatch.setattr(dsl, "version", lambda: None)
    answer = provide()
    assert not answer.has_kernel and not answer.may_change
    assert "no compiler is installed. Run `pip install 'torch_flashplug[jit]'`" in answer.reason


def test_cached_entries_serve_without_a_compiler(cache, monkeypatch):
    """Emulate a container filled by `warmup --out`."""
    cache.put()
    monkeypatch.setattr(dsl, "version", lambda: None)
    assert provide().function


def test_jit_flag_forbids_compiling(cache, monkeypatch):
    monkeypatch.setenv(env.JIT.name, "0")
    answer = provide()
    assert not answer.has_kernel and f"{env.JIT.name}=0 forbids compiling" in answer.reason and not cache.compiled()
    cache.put()
    assert provide().function


def test_nothing_is_compiled_while_a_graph_is_captured(cache):
    answer = provide(conditions=CallConditions(is_capturing=True))
    assert not answer.has_kernel and answer.may_change and "python -m torch_flashplug warmup" in answer.reason
    assert not cache.compiled()
    cache.put()
    assert provide(conditions=CallConditions(is_capturing=True)).function


def test_background_mode_serves_by_stock_first(cache, monkeypatch):
    monkeypatch.setenv(env.JIT.name, "background")
    cache.set_worker(seconds=0.3)
    answer = provide()
    assert not answer.has_kernel and answer.may_change
    assert provide(OTHER, conditions=CallConditions(must_wait=True)).function
    deadline = time.monotonic() + 20
    while not (answer := provide()).has_kernel and time.monotonic() < deadline:
        time.sleep(0.05)
    assert answer.function and sorted(cache.compiled()) == sorted([KERNEL, OTHER])


def test_no_c_compiler_is_needed_to_read_the_cache(cache, monkeypatch):
    cache.put()
    monkeypatch.setattr(linker, "c_compiler", lambda: None)
    assert provide().function


def test_interrupt_is_raised_after_the_call_returns(cache, monkeypatch):
    def interrupt(job: compile_pool.Job) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(compile_pool.Job, "result", interrupt)
    # a process that a shell started in the background ignores SIGINT
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            assert provide().may_change
            for _ in range(100):  # the interrupt does not end a sleep
                time.sleep(0.05)
    finally:
        signal.signal(signal.SIGINT, before)


# ---- installations ----


def run_python(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a subprocess with additional environment variables."""
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=os.environ | variables
    )


@pytest.mark.parametrize("variable", ["", "1"])
def test_import_torch_works_without_the_extension(tmp_path, variable):
    program = (
        "import sys; sys.modules['torch_flashplug.dispatch.library'] = None; import torch; print(torch.ones(1).item())"
    )
    done = run_python(program, TORCH_FLASHPLUG=variable)
    assert done.returncode == 0 and done.stdout.strip() == "1.0", done.stderr


def test_truncated_pack_is_reported(tmp_path):
    (tmp_path / "pack.so").write_bytes(b"\x7fELF")
    program = f"""
import torch, torch_flashplug
from torch_flashplug.api import startup
from torch_flashplug.dispatch import bindings
from torch_flashplug.api.backend import DEVICES
bindings.set_facts_override(DEVICES["h100"]); bindings.set_cpu_stub(2); bindings.clear_packs()
bindings.load_pack({str(tmp_path / "pack.so")!r}, "sm_90a"); bindings.register_ops("CPU")
bindings.install(bindings.CPU_SLOT)
q = torch.randn(1, 8, 256, 64, dtype=torch.bfloat16)
out = torch.nn.functional.scaled_dot_product_attention(q, q, q)
bindings.uninstall(bindings.CPU_SLOT)
torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, q, q), atol=0.02, rtol=0)
"""
    done = run_python(program, **{env.JIT.name: "0"})
    assert done.returncode == 0, done.stderr
    assert "pack.so does not load" in done.stderr and done.stderr.count("stock attention serves") == 1


def test_entries_store_facts(cache):
    path = cache.put(seconds=2.5)
    assert kernel_cache.check(path)["seconds"] == 2.5
    assert json.dumps(kernel_cache.check(path))


def test_unused_entries_are_deleted(cache):
    old, new = cache.put(KERNEL), cache.put(OTHER)
    os.utime(old, (0, 0))
    assert kernel_cache.prune(cache.folder) == [old] and new.exists()


# ---- files that do not belong to the cache ----

USERS_FILES = (".env", ".gitconfig", "config.json", "libuser.so", "main.o", "poetry.lock", "fwd_sm90-notes.so")


def test_files_of_users_stay(cache):
    """A cache folder chosen by the user may hold a model or be a home directory."""
    entry = cache.put()
    files = [cache.folder / name for name in USERS_FILES]
    for file in files:
        file.write_text("mine")
        os.utime(file, (0, 0))
    os.utime(entry, (0, 0))

    assert kernel_cache.prune(cache.folder) == [entry]
    assert warmup.prune() == 0 and list(kernel_cache.find_matching("*")) == []
    assert all(file.read_text() == "mine" for file in files)
    assert env_info.collect()["cache"]["kernels"] == 0


def test_temporary_files_of_the_cache_are_deleted(cache):
    entry = cache.put()
    names = (f"{entry.stem}.lock", "slot-3.lock", f"sources-{'0' * 64}.json", ".writing-abcd_123", ".probe-abcd_123")
    files = [cache.folder / name for name in names]
    for file in files:
        file.touch()
        os.utime(file, (0, 0))
    assert set(kernel_cache.prune(cache.folder)) == set(files) and entry.exists()


def test_entry_names_match_the_pattern(cache):
    """Check that every written key matches the pattern of entry names."""
    assert kernel_cache.is_entry(cache.put())
    names = [spec.name() for pack in kernel_table.PACKS for spec in pack.specs()]
    keys = [f"{name}-0123456789abcdef-sm_90a-O2-x86_64-01234567-4.8.1+cu13" for name in names]
    assert all(kernel_cache.is_entry(Path(f"{key}{suffix}")) for key in keys for suffix in (".so", ".o"))
    assert kernel_cache.is_entry(Path("flashplug_sm90a_8bit-0123456789abcdef.so"))


def test_pipe_in_place_of_an_entry_is_not_read(cache, warnings):
    path = cache.folder / f"{jit.compile_job(KERNEL, TARGET).key}.so"
    kernel_cache.prepare(cache.folder)
    os.mkfifo(path)
    assert jit.find_entry(KERNEL, TARGET) is None
    assert "is not a regular file" in warnings()[0]


# ---- folders ----


def test_out_folder_ignores_kernels_of_the_fallback(cache, monkeypatch):
    """A container receives only the folder of `--out`."""
    monkeypatch.setattr(kernel_cache, "_is_exclusive", False)
    monkeypatch.setenv(env.CACHE_DIR.name, "")
    fallback = kernel_cache.fallback_folder()
    kernel_cache.prepare(fallback)
    facts = {"name": KERNEL, "seconds": 1.0, "cpu": sorted(host_cpu.features())}
    kernel_cache.write(fallback, jit.compile_job(KERNEL, TARGET).key + ".so", cache.code.read_bytes(), facts)
    assert warmup.missing([KERNEL], TARGET, packs=False) == []

    warmup.use_folder(cache.folder)

    outcome = warmup.compile_all([KERNEL], 90, packs=False)
    assert outcome.compiled == (KERNEL,) and outcome.folders == (cache.folder,)
    assert len(kernel_cache.entries_in(cache.folder)) == 1


def test_each_cache_folder_has_a_separate_fallback(cache, monkeypatch):
    """Kernels left by an earlier process in the fallback of a different folder must not be used."""
    first = kernel_cache.fallback_folder()
    monkeypatch.setenv(env.CACHE_DIR.name, str(cache.folder / "other"))
    assert kernel_cache.fallback_folder() != first


def test_the_fallback_of_a_home_is_the_same_in_each_directory(cache, monkeypatch):
    monkeypatch.setenv(env.CACHE_DIR.name, "~/kernels")
    first = kernel_cache.fallback_folder()
    monkeypatch.chdir(cache.folder.parent)
    assert kernel_cache.fallback_folder() == first


def test_the_fallback_is_reported(cache, warnings, monkeypatch):
    file = cache.folder.parent / "file"
    file.write_text("")
    monkeypatch.setenv(env.CACHE_DIR.name, str(file))
    outcome = warmup.compile_all([KERNEL], 90, packs=False)
    fallback = kernel_cache.fallback_folder()
    assert warmup.report(outcome).endswith(f"Cache: {fallback}")
    assert f"the kernel cache is {fallback}, because {file} cannot be written" in warnings()[0]
    assert env_info.collect()["cache"]["fallback"]["kernels"] == 1
    assert warmup.report(warmup.compile_all([KERNEL], 90, packs=False)).endswith(f"1 were there. Cache: {fallback}")


@pytest.mark.parametrize("folder", ["~nobody_has_this_name/x", ""])
def test_unknown_home_uses_the_fallback_folder(cache, folder, monkeypatch):
    def unknown(*_: object) -> str:
        raise RuntimeError("could not determine the home directory")

    monkeypatch.setenv(env.CACHE_DIR.name, folder)
    monkeypatch.setattr("platformdirs.user_cache_dir", unknown)
    writable, reasons = kernel_cache.writable_folders()
    assert writable == [kernel_cache.fallback_folder()] and "home directory" in reasons[0]
    assert env_info.collect()["cache"]["kernels"] == 0
    assert jit.provide(KERNEL, TARGET, CALL).has_kernel


@pytest.mark.parametrize("problem", ["denied", "long"])
def test_unreadable_cache_is_reported(cache, problem, monkeypatch):
    folder = cache.folder if problem == "denied" else cache.folder / ("x" * 300)
    monkeypatch.setenv(env.CACHE_DIR.name, str(folder))
    kernel_cache.prepare(cache.folder)
    if problem == "denied":
        denied = PermissionError(13, "Permission denied")
        monkeypatch.setattr(Path, "iterdir", lambda path: (_ for _ in ()).throw(denied))
    facts = env_info.collect()["cache"]
    assert facts["problem"].startswith("the folder cannot be read: ") and facts["kernels"] == 0
    env_info.show(env_info.collect())


# ---- linkers ----


def test_compiler_without_output_is_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", "true")
    with pytest.raises(RuntimeError, match=r"true could not link x.so: the compiler wrote no file, with exit status 0"):
        linker.link([], tmp_path / "x.so")
    assert "true could not link" in linker.link_failure_reason()
    monkeypatch.delenv("CC")
    assert linker.link_failure_reason() == ""


def test_object_files_are_replaced_if_a_c_compiler_is_installed(cache, monkeypatch):
    path = cache.put()
    path.rename(path.with_suffix(".o"))
    assert warmup.missing([KERNEL], TARGET, packs=False) == [KERNEL]
    monkeypatch.setattr(linker, "c_compiler", lambda: None)
    assert warmup.missing([KERNEL], TARGET, packs=False) == []
