"""Wheel builder of this checkout: a wheel without kernels, and a wheel with the core packs.

    python tools/build/make_wheel.py                 dist/: both wheels, for x86-64
    python tools/build/make_wheel.py --no-core       only the wheel without kernels, which compiles kernels at first use
    python tools/build/make_wheel.py --cpu aarch64   only the wheel without kernels, cross-compiled and never run

`./tools/dev wheel` calls this tool. A wheel serves every Python from 3.10 on. A wheel is refused if _C needs more than
manylinux_2_28 provides. The wheel with packs is only for machines of the builder and must not be published, for the
reasons in docs/wheels.md.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import lzma
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

from tools.build import find_dependencies, shared_object

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "wheel"  # separate from build/dev, the folder of the developer's build
PLATFORM = "manylinux_2_28"
# Newest symbol versions of manylinux_2_28. The last version of libstdc++ is left out.
CEILINGS = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
LIBRARIES = frozenset(
    ("libtorch_cpu.so", "libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6", "libdl.so.2")
    + ("ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1")  # the dynamic loader
)
CROSS_COMPILER = "{}-linux-gnu-g++"
EXTENSION = "torch_flashplug/_C.so"
LOCAL_VERSION = "core"  # local part of the version: package indexes refuse versions with a local part
NOT_TO_BE_PUBLISHED = """For your own machines; not to be published.
Kernel packs contain libcuda_dialect_runtime_static.a of nvidia-cutlass-dsl, whose license does not allow
redistribution. Copy the wheel only to machines of your own, and give other people the wheel without kernels."""


class BadWheel(Exception):
    """Error for a wheel that must not leave this machine."""


# ---- the wheel without kernels ----


def build(cpu: str, folder: Path) -> Path:
    """Build _C and the wheel without kernels into a folder, and return the wheel.

    Raises:
        BadWheel: the build failed, or _C needs more than the platform provides.
    """
    settings = {
        "build-dir": str(BUILD / cpu),
        "wheel.tags": f"py3-none-{PLATFORM}_{cpu}",
        "wheel.reproducible": "true",
        "cmake.define.FLASHPLUG_PACKS": "",
        "cmake.define.CMAKE_BUILD_TYPE": "Release",
    }
    if cpu != platform.machine():
        compiler = CROSS_COMPILER.format(cpu)
        if shutil.which(compiler) is None:
            raise BadWheel(f"{compiler} is not installed. Install the package g++-{cpu.replace('_', '-')}-linux-gnu")
        settings |= {
            "cmake.define.CMAKE_SYSTEM_NAME": "Linux",
            "cmake.define.CMAKE_SYSTEM_PROCESSOR": cpu,
            "cmake.define.CMAKE_CXX_COMPILER": compiler,
        }
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", folder, ROOT]
    command += [f"--config-settings={name}={value}" for name, value in settings.items()]
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    variables = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PATH": path}
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, check=False, capture_output=True, text=True,
        env=os.environ | variables | {"FLASHPLUG_PACKS": ""},
    )  # fmt: skip
    if done.returncode != 0:
        raise BadWheel(f"the build failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    (wheel,) = folder.glob(f"*{PLATFORM}_{cpu}.whl")
    check(wheel, cpu)
    return wheel


def check(wheel: Path, cpu: str) -> shared_object.SharedObject:
    """Return the libraries and symbols that the _C of a wheel needs.

    Raises:
        BadWheel: _C needs more than the machines of the wheel's platform provide.
    """
    with zipfile.ZipFile(wheel) as archive:
        needed = shared_object.read(archive.read(EXTENSION))
    if needed.machine != cpu:
        raise BadWheel(f"{EXTENSION} must be for {cpu}, but is for {needed.machine}")
    if above := needed.above(CEILINGS):
        details = "; ".join(f"{version}: {', '.join(symbols)}" for version, symbols in above.items())
        raise BadWheel(
            f"{EXTENSION} needs more than {PLATFORM} has ({details}). Extend src/core/portable.h, or use g++ 12"
        )
    if foreign := set(needed.libraries) - LIBRARIES:
        raise BadWheel(f"{EXTENSION} must need no library but {', '.join(sorted(LIBRARIES))}, but needs {foreign}")
    torch = shared_object.read_file(find_dependencies.folder_of("torch") / "lib" / "libtorch_cpu.so")
    if absent := needed.unversioned - torch.defined:
        raise BadWheel(f"{EXTENSION} needs functions that torch does not have: {', '.join(sorted(absent))}")
    return needed


# ---- the wheel with packs ----


def build_packs(names: Sequence[str]) -> list[Path]:
    """Compile kernel packs in a separate process, and return the packs. Current packs are kept.

    aot.py requires a separate process.
    """
    folder = BUILD / "packs"
    words = [word for name in names for word in ("--pack", name)]
    command = [sys.executable, ROOT / "tools" / "build" / "aot.py", *words, "--out", folder]
    # The objects are shared with ./tools/dev build, which needs the instruction counts.
    command += ["--objects", ROOT / "build" / "objects", "--counts"]
    if subprocess.run(list(map(str, command)), check=False).returncode != 0:
        raise BadWheel("the kernel packs could not be compiled")
    return [folder / f"flashplug_{name}.so" for name in names]


def core_packs() -> list[str]:
    """Return the names of the core packs, from the table of this checkout, even if a different copy is installed."""
    code = "from tools.build import aot; print(*aot.kernel_table.WHEEL_PACKS)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.split()


def add_packs(wheel: Path, packs: Sequence[Path], folder: Path) -> Path:
    """Write and return a copy of a wheel with added kernel packs, compressed with xz.

    Args:
        wheel: the wheel without kernels.
        packs: shared objects; the report (.json) of each pack lies next to the pack.
        folder: the folder for the new wheel.
    """
    name, version, *tags = wheel.stem.split("-")
    local = f"{version}+{LOCAL_VERSION}"
    target = folder / f"{'-'.join((name, local, *tags))}.whl"
    info, new_info = f"{name}-{version}.dist-info/", f"{name}-{local}.dist-info/"
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as out:
        record: list[str] = []
        for entry in source.infolist():
            data = source.read(entry)
            if entry.filename == f"{info}RECORD":
                continue
            if entry.filename == f"{info}METADATA":
                data = _local_metadata(data.decode(), version, local).encode()
            entry.filename = entry.filename.replace(info, new_info, 1)
            _add(out, record, entry, data)
        for pack in packs:
            code = pack.read_bytes()
            report = json.loads(pack.with_suffix(".json").read_text())
            report |= {"sha256": hashlib.sha256(code).hexdigest(), "bytes": len(code)}
            packed = zipfile.ZipInfo(f"torch_flashplug/{pack.name}.xz")
            _add(out, record, packed, lzma.compress(code, preset=9 | lzma.PRESET_EXTREME))
            report_entry = zipfile.ZipInfo(f"torch_flashplug/{pack.stem}.json")
            report_entry.compress_type = zipfile.ZIP_DEFLATED
            _add(out, record, report_entry, json.dumps(report).encode())
        record.append(f"{new_info}RECORD,,\n")
        out.writestr(zipfile.ZipInfo(f"{new_info}RECORD"), "".join(record))
    return target


def _local_metadata(text: str, version: str, local: str) -> str:
    private = "Classifier: Private :: Do Not Upload\n"
    return re.sub(rf"^Version: {re.escape(version)}\n", f"Version: {local}\n{private}", text, count=1, flags=re.M)


def _add(out: zipfile.ZipFile, record: list[str], entry: zipfile.ZipInfo, data: bytes) -> None:
    entry.external_attr = entry.external_attr or 0o644 << 16
    out.writestr(entry, data)
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    record.append(f"{entry.filename},sha256={digest},{len(data)}\n")


# ---- the command ----


def say(wheel: Path, text: str) -> None:
    print(f"[wheel] {wheel}: {wheel.stat().st_size / 1e6:.2f} MB, {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", choices=tuple(shared_object.MACHINES.values()), default=platform.machine())
    parser.add_argument("--no-core", action="store_true", help="only the wheel without kernels")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for the wheels (default dist/)")
    args = parser.parse_args()
    start = time.monotonic()
    is_foreign = args.cpu != platform.machine()
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            built = build(args.cpu, Path(scratch))
            plain = Path(shutil.move(built, args.out / built.name))
        versions = ", ".join(_newest(check(plain, args.cpu)))
        say(plain, f"without kernels; needs {versions}; {time.monotonic() - start:.0f} s")
        if is_foreign:
            print(f"[wheel] built for {args.cpu}, never run. Kernel packs are only for this machine's CPU", flush=True)
        elif not args.no_core:
            names = core_packs()
            core = add_packs(plain, build_packs(names), args.out)
            say(core, f"with {', '.join(names)}; {time.monotonic() - start:.0f} s")
            print("".join(f"[wheel] {line}\n" for line in NOT_TO_BE_PUBLISHED.splitlines()), end="", flush=True)
    except BadWheel as error:
        sys.exit(f"tools/build/make_wheel.py: {error}")


def _newest(needed: shared_object.SharedObject) -> list[str]:
    """Return the newest needed versions of glibc and of libstdc++."""

    def number(version: str) -> tuple[int, ...]:
        return tuple(map(int, re.findall(r"\d+", version)))

    families = ([name for name in needed.versions if name.startswith(family)] for family in ("GLIBC_", "GLIBCXX_"))
    return [max(names, key=number) for names in families if names]


if __name__ == "__main__":
    main()
