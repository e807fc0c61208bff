"""Wheels: systems that can load _C, packs unpacked at first use, and wheels in fresh environments.

No test needs a GPU.
"""

from __future__ import annotations

import base64
import ctypes
import errno
import hashlib
import itertools
import json
import logging
import lzma
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path

import pytest
import torch

from torch_flashplug import env
from torch_flashplug.api import startup
from torch_flashplug.api.backend import DEVICES
from torch_flashplug.cli import check, env_info, warmup
from torch_flashplug.codegen import host_cpu, jit, kernel_cache, linker
from torch_flashplug.codegen.kernel_request import CallConditions, KernelAnswer
from torch_flashplug.dispatch import bindings, kernel_sets, library, packs
from torch_flashplug.registry import kernel_table

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.build import make_wheel, shared_object  # noqa: E402

CEILINGS = make_wheel.CEILINGS
NEWEST_GCC = 12  # the compiler of machines that build wheels; later headers need a newer libstdc++


@pytest.fixture(scope="module")
def built_extension() -> Path:
    """Return _C of the developer's build, or the installed _C."""
    path = library.find_built("_C.so")
    assert path is not None
    return path


def test_c_loads_on_the_oldest_systems_of_torch(built_extension: Path) -> None:
    compiler = re.search(rb"GCC: \(.*?\) (\d+)\.", built_extension.read_bytes())
    if compiler is None or int(compiler[1]) > NEWEST_GCC:
        pytest.skip(f"this _C was not built by g++ {NEWEST_GCC} or older, which wheels are built by")
    needed = shared_object.read_file(built_extension)
    assert needed.versions and {name.rpartition("_")[0] for name in needed.versions} <= set(CEILINGS)
    assert not needed.above(CEILINGS), "src/core/portable.h or src/core/portable.cpp must avoid these symbols"


def test_c_links_no_python_or_cuda_library(built_extension: Path) -> None:
    needed = set(shared_object.read_file(built_extension).libraries)
    assert "libtorch_cpu.so" in needed and not needed - make_wheel.LIBRARIES


def test_c_exports_only_flashplug_functions(built_extension: Path) -> None:
    """Functions of libstdc++ compiled into _C must not serve a second library."""
    exported = shared_object.read_file(built_extension).defined
    assert exported and not {name for name in exported if not name.startswith("flashplug_")}


def test_version_ceilings_match_the_wheels_of_torch() -> None:
    assert CEILINGS["GLIBC"] <= (2, 28) and CEILINGS["GLIBCXX"] <= (3, 4, 24) and make_wheel.PLATFORM.endswith("_2_28")


def test_versions_above_a_ceiling_are_found() -> None:
    needed = shared_object.SharedObject(
        "x86_64", (), {"GLIBC_2.28": (), "GLIBC_2.34": ("dlopen",), "GLIBC_2.2.5": (), "OTHER_9": ()},
        frozenset(), frozenset(),
    )  # fmt: skip
    assert needed.above(CEILINGS) == {"GLIBC_2.34": ("dlopen",)}


def test_files_without_an_elf_header_are_refused() -> None:
    with pytest.raises(ValueError, match="must be an ELF file of 64 bits"):
        shared_object.read(b"MZ")


# ---- packs ----

KERNEL, OTHER = "fwd_sm90_bf16_d128_causal_m128n128s2", "fwd_sm90_bf16_d64_causal_m64n128s2"
TARGET = "sm_90a"
CALL = CallConditions()


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return a shared object with the host function of one kernel, which returns 7."""
    folder = tmp_path_factory.mktemp("code")
    (folder / "code.c").write_text(f"int __tvm_ffi_{KERNEL}(void) {{ return 7; }}")
    compiler = linker.c_compiler()
    assert compiler is not None
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "code.so", folder / "code.c"], check=True)
    return (folder / "code.so").read_bytes()


class Install:
    """Folder with installed packs, and an empty cache with a fallback folder."""

    def __init__(self, folder: Path, code: bytes):
        self.code = code
        self.built, self.cache, self.second = folder / "built", folder / "cache", folder / "tmp"
        for new_folder in (self.built, self.second):
            new_folder.mkdir()

    def put(self, compressed: bool = True, **more: object) -> packs.InstalledPack:
        """Install a pack of KERNEL, and return the pack."""
        facts = {"kernels": [{"name": KERNEL}], "cpu": sorted(host_cpu.features())}
        facts |= {"sha256": hashlib.sha256(self.code).hexdigest()} | more
        (self.built / "flashplug_sm90a.json").write_text(json.dumps(facts))
        if compressed:
            (self.built / "flashplug_sm90a.so.xz").write_bytes(lzma.compress(self.code))
        else:
            (self.built / "flashplug_sm90a.so").write_bytes(self.code)
        self.forget()
        (pack,) = packs.installed()
        return pack

    def unpacked(self, folder: Path) -> list[Path]:
        return sorted(folder.glob("**/flashplug_sm90a-*.so"))

    @staticmethod
    def forget() -> None:
        """Clear the memory of this process, as if the process were new."""
        for memory in (packs._compressed, packs._open, packs._report, kernel_cache._report):
            memory.cache_clear()


@pytest.fixture
def install(tmp_path: Path, code: bytes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    installation = Install(tmp_path, code)
    monkeypatch.setattr(library, "build_folders", lambda: [installation.built])
    monkeypatch.setenv(env.CACHE_DIR.name, str(installation.cache))
    monkeypatch.setattr("tempfile.tempdir", str(installation.second))
    yield installation
    installation.forget()


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return the logged warnings."""
    return lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def call(function: int) -> int:
    return ctypes.CFUNCTYPE(ctypes.c_int)(function)()


def test_compressed_pack_is_unpacked_at_the_first_kernel(install, warnings):
    pack = install.put()
    assert packs.unpacked_path(pack) is None
    first = packs.provide(KERNEL, TARGET)
    (path,) = install.unpacked(install.cache)
    changed = path.stat().st_ino
    install.forget()
    again = packs.provide(KERNEL, TARGET)

    assert first is not None and call(first.function) == 7 and again is not None and call(again.function) == 7
    assert packs.unpacked_path(pack) == path and path.stat().st_ino == changed and not warnings()


def test_kernels_missing_in_packs_are_left_to_the_compiler(install):
    install.put()
    assert packs.provide(OTHER, TARGET) is None and packs.provide(KERNEL, "sm_80") is None
    assert not install.unpacked(install.cache)  # no call needed the pack
    assert packs.packed_kernels(TARGET) == {KERNEL} and packs.packed_kernels("sm_80") == set()


def test_compressed_packs_are_searched_before_compiling(install, monkeypatch):
    install.put()
    compiler_requests = []
    monkeypatch.setattr(jit, "provide", lambda name, *more: compiler_requests.append(name) or KernelAnswer(reason="no"))
    assert startup.provide(KERNEL, 90, CALL).function and not compiler_requests
    assert startup.provide(OTHER, 90, CALL).reason == "no" and compiler_requests == [OTHER]


def test_following_kernels_held_by_a_pack_are_not_compiled(install, monkeypatch):
    install.put()
    monkeypatch.setattr(kernel_sets, "kernels_needed_next", lambda *facts: [OTHER, KERNEL])
    monkeypatch.setattr(bindings, "device_facts", dict)
    monkeypatch.setattr(jit, "provide", lambda name, target, circumstances, following: following())
    assert startup.provide(OTHER, 90, CALL) == [OTHER]


def test_unwritable_folder_is_skipped(install, warnings):
    """Emulate a read-only home."""
    install.put()
    install.cache.write_text("a file where the folder should be")
    assert packs.provide(KERNEL, TARGET).function
    assert len(install.unpacked(install.second)) == 1 and not warnings()


def test_full_disk_is_skipped(install, warnings, monkeypatch):
    install.put()
    write = kernel_cache.write_atomically

    def full(folder: Path, name: str, data: bytes) -> Path:
        if folder == install.cache:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(folder, name, data)

    monkeypatch.setattr(kernel_cache, "write_atomically", full)
    assert packs.provide(KERNEL, TARGET).function
    assert not install.unpacked(install.cache) and len(install.unpacked(install.second)) == 1 and not warnings()


def test_without_any_folder_kernels_are_compiled(install, warnings):
    """Make every folder unusable; a single warning must be logged for any number of kernels."""
    install.put()
    for folder in (install.cache, *(place for place in kernel_cache.folders() if place != install.cache)):
        folder.write_text("a file where the folder should be")
    assert packs.provide(KERNEL, TARGET) is None and packs.provide(KERNEL, TARGET) is None
    (line,) = warnings()
    assert "flashplug_sm90a.so.xz is not used: the pack cannot be unpacked" in line
    assert line.endswith("Its kernels are compiled at first use")


@pytest.mark.parametrize("damage", ["cut", "other"])
def test_a_damaged_pack_is_not_loaded(install, warnings, damage):
    pack = install.put()
    data = pack.path.read_bytes()
    pack.path.write_bytes(data[:-20] if damage == "cut" else lzma.compress(install.code + b"x"))
    assert packs.provide(KERNEL, TARGET) is None and not install.unpacked(install.cache)
    (line,) = warnings()
    assert "flashplug_sm90a.so.xz is not used" in line and "Install the wheel again" in line


@pytest.mark.parametrize("damage", ["cut", "changed", "writable"])
def test_damaged_unpacked_pack_is_unpacked_again(install, warnings, damage):
    install.put()
    packs.provide(KERNEL, TARGET)
    (path,) = install.unpacked(install.cache)
    data = path.read_bytes()
    if damage == "writable":
        path.chmod(0o666)
    else:
        path.unlink()  # the process holds the file open
        path.write_bytes(data[:-100] if damage == "cut" else data[:100] + bytes([data[100] ^ 1]) + data[101:])
    install.forget()
    assert call(packs.provide(KERNEL, TARGET).function) == 7
    assert kernel_cache.check(path)["name"] == "flashplug_sm90a" and len(warnings()) == 1


def test_concurrent_processes_share_an_unpacked_pack(install):
    install.put()
    program = (
        "import sys; from pathlib import Path; from torch_flashplug.dispatch import library, packs;"
        f"library.build_folders = lambda: [Path({str(install.built)!r})];"
        f"print(bool(packs.provide({KERNEL!r}, {TARGET!r}).function))"
    )
    places = {env.CACHE_DIR.name: str(install.cache), "TMPDIR": str(install.second), env.ENABLED.name: "0"}
    running = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=os.environ | places)
        for _ in range(3)
    ]
    assert [process.communicate()[0].strip() for process in running] == ["True"] * 3
    assert len(install.unpacked(install.cache)) == 1 and not list(install.cache.glob(".writing-*"))


@pytest.mark.parametrize("compressed", [True, False], ids=["compressed", "plain"])
def test_pack_for_an_unsupported_cpu_is_not_loaded(install, warnings, monkeypatch, compressed):
    """The host code of such a pack would end the process with an illegal instruction.

    A single warning must be logged.
    """
    pack = install.put(compressed, cpu=[*sorted(host_cpu.features()), "avx1024"])
    loaded: list[Path | None] = []
    monkeypatch.setattr(bindings, "load_pack", lambda path, target: loaded.append(path))
    packs.register()
    packs.register()
    assert loaded == [None] * 2 * len(kernel_table.PACKS) and packs.provide(KERNEL, TARGET) is None
    (line,) = warnings()
    assert f"{pack.path.name} is not used: the pack was compiled for a CPU with avx1024, which this CPU lacks" in line
    assert packs.packed_kernels(TARGET) == set() and env_info.packs()[0]["unusable"]
    assert "in 1 pack" not in check.kernels().text


def test_unused_cpu_features_are_ignored(install):
    """Packs built on a CPU of one vendor must load on a CPU of a second vendor."""
    assert not {"sse4a", "smep"} & host_cpu.features()
    pack = install.put(cpu=[*sorted(host_cpu.features()), "sse4a", "smep", "hypervisor"])
    assert not pack.unusable_reason() and host_cpu.missing_features(["avx1024", "sse4a", "amx_x"]) == [
        "amx_x",
        "avx1024",
    ]


def test_host_code_has_no_vendor_specific_instruction():
    """Check compiled objects instead of packs, because packs also contain code of the compiler's package."""
    objects = sorted((ROOT / "build" / "objects").glob("*.o"))
    if shutil.which("objdump") is None or not objects or platform.machine() != "x86_64":
        pytest.skip("needs objdump and the objects of a build")
    sample = [str(path) for path in objects[:: max(1, len(objects) // 100)]]
    disassembly = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", *sample], capture_output=True, text=True, check=True
    )
    used = set(re.findall(r"^ *[0-9a-f]+:\t(\S+)", disassembly.stdout, re.M))
    assert {"mov", "call", "ret"} <= used and not used & {"extrq", "insertq", "movntss", "movntsd"}


def test_a_plain_pack_is_loaded_by_c(install, monkeypatch):
    pack = install.put(compressed=False)
    loaded: list[Path | None] = []
    monkeypatch.setattr(bindings, "load_pack", lambda path, target: loaded.append(path))
    packs.register()
    assert [path for path in loaded if path] == [pack.path] and len(loaded) == len(kernel_table.PACKS)
    assert packs.provide(KERNEL, TARGET) is None


def test_a_pack_without_a_report_is_loaded(install):
    pack = install.put(compressed=False)
    (install.built / "flashplug_sm90a.json").unlink()
    (pack,) = packs.installed()
    assert not pack.unusable_reason() and pack.kernels() == [KERNEL]


def test_info_and_check_report_packs(install, capsys):
    install.put()
    (facts,) = env_info.packs()
    assert facts["kernels"] == [KERNEL] and facts["compressed"] and facts["unpacked"] is None
    env_info.show(env_info.collect())
    assert "flashplug_sm90a.so.xz: 1 kernels, 0.0 MB; unpacked: at first use" in capsys.readouterr().out
    assert check.kernels() == check.CheckResult(check.PASS, "kernels", "1 in 1 pack, unpacked at first use")
    packs.provide(KERNEL, TARGET)
    assert Path(env_info.packs()[0]["unpacked"]).parent == install.cache
    assert check.kernels().text == "1 in 1 pack" and env_info.collect()["cache"]["kernels"] == 0


def test_pruning_keeps_the_installed_pack(install):
    install.put()
    packs.provide(KERNEL, TARGET)
    kernel_cache.write(install.cache, "flashplug_sm90a-0123456789abcdef.so", install.code, {"cpu": []})
    (kept,) = [path for path in install.unpacked(install.cache) if packs.is_current(path)]
    assert warmup.prune() == 1 and install.unpacked(install.cache) == [kept]


DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (192, 128))
HEADS = ((32, 8), (12, 12))
USUAL = tuple((frozenset(plain), frozenset({"mask"})) for plain in (("causal",), ()))
GRADIENTS = (
    {},
    {"needs_gradients": True, "has_decode_calls": False},
    {"needs_gradients": True, "has_decode_calls": False, "is_deterministic": True},
)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_core_packs_hold_the_kernels_of_usual_layers(dtype):
    """Check prompts, decode and training, for all lengths and batch sizes of kernel_sets."""
    startup.load()
    core = {
        spec.name() for pack in kernel_table.PACKS if pack.name in kernel_table.WHEEL_PACKS for spec in pack.specs()
    }
    kernels_of_layers = set()
    for dims, features, gradients in itertools.product(DIMS, USUAL, GRADIENTS):
        layer = kernel_sets.AttentionLayer(HEADS, dims, dtype, features, **gradients)
        kernels_of_layers |= set(kernel_sets.kernels_of(layer.calls(), DEVICES["h100"]))
    assert len(kernels_of_layers) > 50 and not kernels_of_layers - core


# ---- wheels ----

TAG = "py3-none-manylinux_2_28"


@pytest.fixture
def small_wheel(tmp_path: Path) -> Path:
    """Return a wheel with a few files, like a wheel of the build."""
    path = tmp_path / f"torch_flashplug-1.2.3-{TAG}_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("torch_flashplug/__init__.py", "x = 1\n")
        archive.writestr("torch_flashplug-1.2.3.dist-info/METADATA", "Name: torch_flashplug\nVersion: 1.2.3\n\ntext\n")
        archive.writestr("torch_flashplug-1.2.3.dist-info/WHEEL", f"Tag: {TAG}_x86_64\n")
        archive.writestr("torch_flashplug-1.2.3.dist-info/RECORD", "torch_flashplug/__init__.py,,\n")
    return path


def test_wheel_with_packs_has_a_local_version(small_wheel, tmp_path, code):
    """A wheel with packs must not be published: indexes refuse local versions and the classifier."""
    pack = tmp_path / "flashplug_sm90a.so"
    pack.write_bytes(code)
    pack.with_suffix(".json").write_text(json.dumps({"kernels": [{"name": KERNEL}], "cpu": ["avx2"]}))
    (tmp_path / "out").mkdir()

    core_wheel = make_wheel.add_packs(small_wheel, [pack], tmp_path / "out")

    assert core_wheel.name == f"torch_flashplug-1.2.3+core-{TAG}_x86_64.whl"
    with zipfile.ZipFile(core_wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    info = "torch_flashplug-1.2.3+core.dist-info"
    metadata = files[f"{info}/METADATA"].decode()
    assert "Version: 1.2.3+core\n" in metadata and "Classifier: Private :: Do Not Upload\n" in metadata
    assert lzma.decompress(files["torch_flashplug/flashplug_sm90a.so.xz"]) == code
    report = json.loads(files["torch_flashplug/flashplug_sm90a.json"])
    assert report["sha256"] == hashlib.sha256(code).hexdigest() and report["cpu"] == ["avx2"]
    rows = [line.rsplit(",", 2) for line in files.pop(f"{info}/RECORD").decode().splitlines()]
    assert [row for row in rows if row[0] == f"{info}/RECORD"] == [[f"{info}/RECORD", "", ""]]
    hashes = {name: base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
              for name, data in files.items()}  # fmt: skip
    assert {name: digest.removeprefix("sha256=") for name, digest, _ in rows if digest} == hashes


def test_wheels_page_states_the_license():
    page = " ".join((ROOT / "docs" / "wheels.md").read_text().split()).lower()
    for text in (page, make_wheel.NOT_TO_BE_PUBLISHED.lower()):
        assert "for your own machines; not to be published" in text and "libcuda_dialect_runtime_static.a" in text


def error_of_check(cpu: str, **facts: object) -> str:
    """Return the error of make_wheel.check() for a _C with the given facts."""
    needed = {"machine": "x86_64", "libraries": (), "versions": {}, "unversioned": frozenset(), "defined": frozenset()}
    with pytest.MonkeyPatch.context() as patch, zipfile.ZipFile(io := BytesIO(), "w") as archive:
        archive.writestr(make_wheel.EXTENSION, b"")
        archive.close()
        patch.setattr(shared_object, "read", lambda data: shared_object.SharedObject(**needed | facts))
        with pytest.raises(make_wheel.BadWheel) as error:
            make_wheel.check(io, cpu)
    return str(error.value)


def test_unloadable_wheels_are_refused():
    assert "must be for aarch64, but is for x86_64" in error_of_check("aarch64")
    error = error_of_check("x86_64", versions={"GLIBC_2.34": ("dlopen",), "GLIBC_2.28": ("fcntl64",)})
    assert "more than manylinux_2_28 has (GLIBC_2.34: dlopen)" in error
    assert "but needs {'libc++.so.1'}" in error_of_check("x86_64", libraries=("libc++.so.1", "libc.so.6"))


def developer_build_files() -> dict[Path, int]:
    """Return the files of build/dev with their modification times."""
    return {path: path.stat().st_mtime_ns for path in (ROOT / "build" / "dev").rglob("*") if path.is_file()}


def build_wheel(folder: Path, *options: str) -> Path:
    """Build a wheel as ./tools/dev wheel does."""
    before = developer_build_files()
    command = [sys.executable, "tools/build/make_wheel.py", "--out", str(folder), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert developer_build_files() == before
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def plain_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"), "--no-core")


class Environment:
    """Fresh virtual environment with the packages of this environment, without the plugin, and with one wheel."""

    def __init__(self, folder: Path, wheel: Path):
        self.folder, self.cache = folder, folder / "cache"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
        self.python = folder / "venv" / "bin" / "python"
        (self.packages,) = (folder / "venv").glob("lib/python*/site-packages")
        for path in Path(torch.__file__).parents[1].iterdir():
            if not path.name.startswith(("torch_flashplug", "_editable", "__")) and path.suffix != ".pth":
                (self.packages / path.name).symlink_to(path)
        words = ("install", "--no-deps", "--no-index", "--disable-pip-version-check", str(wheel))
        subprocess.run([sys.executable, "-m", "pip", "--python", self.python, *words], check=True, capture_output=True)

    def run(self, *words: str, **variables: str) -> str:
        """Return the standard output of Python."""
        places = {env.CACHE_DIR.name: str(self.cache), "TMPDIR": str(self.folder), "PYTHONPATH": ""}
        done = subprocess.run(
            [str(self.python), *words], cwd=self.folder, capture_output=True, text=True, check=False,
            env=os.environ | places | variables,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


CALL_PROGRAM = """
import torch, torch_flashplug
from torch_flashplug.dispatch import library
q = torch.randn(1, 2, 64, 64)
torch.nn.functional.scaled_dot_product_attention(q, q, q)
print(library.find_built("_C.so"))
print(torch_flashplug.explain(q.bfloat16(), q.bfloat16(), q.bfloat16(), device="h100"))
"""


@pytest.mark.nightly
def test_the_wheel_without_kernels_runs_in_a_fresh_environment(plain_wheel, tmp_path):
    assert plain_wheel.name.endswith(f"{TAG}_{platform.machine()}.whl") and "+" not in plain_wheel.name
    assert plain_wheel.stat().st_size < 1.5e6
    environment = Environment(tmp_path, plain_wheel)
    extension, plan = environment.run("-c", CALL_PROGRAM).split("\n", 1)
    assert Path(extension).parent == environment.packages / "torch_flashplug" and "backend     fa3" in plan
    facts = json.loads(environment.run("-m", "torch_flashplug", "info", "--json"))
    assert facts["packs"] == []
    assert "compiled at first use" in environment.run("-m", "torch_flashplug", "check")


PACK_PROGRAM = f"""
import ctypes, sys
ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)  # stands in for CUDA's runtime
from torch_flashplug.api import startup
from torch_flashplug.codegen.kernel_request import CallConditions
answer = startup.provide({KERNEL!r}, 90, CallConditions())
print(bool(answer.function), "cutlass" in sys.modules, answer.reason)
"""


@pytest.mark.nightly
def test_wheel_with_a_pack_loads_kernels_in_a_fresh_environment(plain_wheel, tmp_path):
    """Load a kernel without the compiler.

    The pack has one kernel, which the test compiles unless a build left the object.
    """
    folder = tmp_path / "pack"
    words = ("--arch", TARGET, "--spec", KERNEL, "--out", str(folder), "--objects", "build/objects")
    subprocess.run([sys.executable, "tools/build/aot.py", *words], cwd=ROOT, check=True, capture_output=True)
    pack = folder / "flashplug_sm90a.so"
    environment = Environment(tmp_path, make_wheel.add_packs(plain_wheel, [pack], tmp_path))
    needed = sorted(name for name in shared_object.read_file(pack).unversioned if name.startswith("cuda"))
    (tmp_path / "cuda.c").write_text("\n".join(f"int {name}(void) {{ return 0; }}" for name in needed))
    cuda = tmp_path / "cuda.so"
    subprocess.run([linker.c_compiler(), "-shared", "-fPIC", "-o", cuda, tmp_path / "cuda.c"], check=True)

    assert "1 in 1 pack, unpacked at first use" in environment.run("-m", "torch_flashplug", "check")
    for _ in range(2):
        assert environment.run("-c", PACK_PROGRAM, str(cuda), **{env.JIT.name: "0"}).split() == ["True", "False"]
    (unpacked,) = environment.cache.glob("flashplug_sm90a-*.so")
    assert f"unpacked: {unpacked}" in environment.run("-m", "torch_flashplug", "info")


@pytest.mark.nightly
def test_wheel_for_aarch64_is_built(tmp_path):
    """Cross-compile a wheel for the requirements of torch on that CPU. The wheel was never run."""
    if shutil.which(make_wheel.CROSS_COMPILER.format("aarch64")) is None or platform.machine() != "x86_64":
        pytest.skip("g++-aarch64-linux-gnu is not installed")
    wheel = build_wheel(tmp_path, "--cpu", "aarch64")
    assert wheel.name.endswith(f"{TAG}_aarch64.whl")
    assert "libtorch_cpu.so" in make_wheel.check(wheel, "aarch64").libraries
