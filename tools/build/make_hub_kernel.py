"""Layout of the Hugging Face kernels hub for `torch_flashplug.flash_attn`, from a wheel of `make_wheel.py`.

    python tools/build/make_hub_kernel.py --wheel dist/torch_flashplug-....whl --out dist/hub
    LOCAL_KERNELS=OWNER/torch-flashplug=dist/hub python -c 'import kernels; kernels.get_kernel(...)'

The tool writes build/VARIANT/ for each backend: a loader with the three functions, metadata.json, and the package of
the wheel. _C uses the stable ABI of torch and no CUDA library, so VARIANT is torch-stable-abi211-BACKEND-CPU-linux, and
the same files serve each backend. Nothing is uploaded. A folder made from the wheel with packs must not be published,
for the reasons in docs/wheels.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import zipfile
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))

from tools.build.make_wheel import NOT_TO_BE_PUBLISHED

PACKAGE = "torch_flashplug"
NAME = "torch-flashplug"  # name of the kernel
VERSION = 1  # version of the functions, as the hub counts versions
BACKENDS = ("cu120", "cu130", "cpu")  # the hub selects a backend of the same major version, and of no newer minor
ARCHS = ["9.0a"]  # GPUs on which the kernels were run
FUNCTIONS = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")
LOADER = f'''"""Functions of flash_attn on the kernels of {PACKAGE}, for the kernels package.

A process has one copy of {PACKAGE}: the copy imported first. Without an earlier import, the loader imports the copy
beside the loader, and leaves torch.nn.functional.scaled_dot_product_attention unchanged.
"""

import importlib.util
import sys
from pathlib import Path


def _load():
    if "{PACKAGE}" in sys.modules:
        return
    path = Path(__file__).parent / "{PACKAGE}" / "__init__.py"
    spec = importlib.util.spec_from_file_location("{PACKAGE}", path)
    package = importlib.util.module_from_spec(spec)
    sys.modules["{PACKAGE}"] = package
    try:
        spec.loader.exec_module(package)
    except BaseException:
        del sys.modules["{PACKAGE}"]
        raise
    package.disable()


_load()

from {PACKAGE}.flash_attn import {", ".join(FUNCTIONS)}  # noqa: E402

__all__ = [{", ".join(f'"{name}"' for name in FUNCTIONS)}]
'''


def variant(framework_version: str, backend: str, cpu: str) -> str:
    """Return the name of a build variant, such as torch-stable-abi211-cu130-x86_64-linux."""
    return f"torch-stable-abi{framework_version.replace('.', '')}-{backend}-{cpu}-linux"


def torch_version(archive: zipfile.ZipFile) -> str:
    """Return the least version of torch that a wheel requires, such as 2.11."""
    (name,) = (entry for entry in archive.namelist() if entry.endswith(".dist-info/METADATA"))
    return re.search(r"^Requires-Dist: torch>=(\d+\.\d+)", archive.read(name).decode(), re.M)[1]


def metadata(digest: str, backend: str) -> dict[str, object]:
    """Return the contents of metadata.json."""
    of_backend: dict[str, object] = {"type": "cpu"} if backend == "cpu" else {"type": "cuda", "archs": ARCHS}
    return {
        "name": NAME,
        "id": f"_{PACKAGE}_{backend}_{digest[:12]}",  # the name of the module; one for each build and backend
        "version": VERSION,
        "license": "BSD-3-Clause",
        "python-depends": ["tvm-ffi"],
        "backend": of_backend,
    }


def write(wheel: Path, out: Path, backends: tuple[str, ...] = BACKENDS) -> list[Path]:
    """Write the layout of a wheel for all backends, and return the folders of the variants."""
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    cpu = re.search(r"(x86_64|aarch64)$", wheel.stem)[1]
    folders = []
    with zipfile.ZipFile(wheel) as archive:
        entries = [name for name in archive.namelist() if name.startswith(f"{PACKAGE}/")]
        for backend in backends:
            folder = out / "build" / variant(torch_version(archive), backend, cpu)
            archive.extractall(folder, entries)
            (folder / "__init__.py").write_text(LOADER)
            (folder / "metadata.json").write_text(json.dumps(metadata(digest, backend), indent=2) + "\n")
            folders.append(folder)
    return folders


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, required=True, help="a wheel of tools/build/make_wheel.py")
    parser.add_argument("--out", type=Path, required=True, help="folder of the kernel repository")
    args = parser.parse_args()
    for folder in write(args.wheel, args.out):
        print(f"[hub] {folder}", flush=True)
    with zipfile.ZipFile(args.wheel) as archive:
        if any(name.endswith(".so.xz") for name in archive.namelist()):
            print("".join(f"[hub] {line}\n" for line in NOT_TO_BE_PUBLISHED.splitlines()), end="", flush=True)


if __name__ == "__main__":
    main()
