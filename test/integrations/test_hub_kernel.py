"""Layout of the Hugging Face kernels hub: the loader alone, and the kernels package where it is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_modules import why_not_importable

from torch_flashplug.dispatch import library

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from tools.build import make_hub_kernel  # noqa: E402

REPOSITORY = "owner/torch-flashplug"
VARIANT = "torch-stable-abi211-cpu-x86_64-linux"
CHECK = """
import torch
import torch.nn.functional as F
q, k, v = (torch.randn(2, 9, heads, 16) for heads in (4, 2, 2))
out = kernel.flash_attn_func(q, k, v, causal=True)
expected = F.scaled_dot_product_attention(
    *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
).transpose(1, 2)
torch.testing.assert_close(out, expected)
assert kernel.flash_attn_varlen_func and kernel.flash_attn_with_kvcache
import torch_flashplug
print(torch_flashplug.__file__)
from torch_flashplug.dispatch import bindings
print(bindings.enabled())
"""


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a kernel repository made from a wheel of this checkout."""
    folder = tmp_path_factory.mktemp("hub")
    wheel = folder / "torch_flashplug-0.2.0-py3-none-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in (ROOT / "torch_flashplug").rglob("*.py"):
            archive.write(path, path.relative_to(ROOT))
        archive.write(library.find_built("_C.so"), "torch_flashplug/_C.so")
        archive.writestr("torch_flashplug-0.2.0.dist-info/METADATA", "Requires-Dist: torch>=2.11\n")
    make_hub_kernel.write(wheel, folder / "repository")
    yield folder / "repository"


def run_python(code: str, **environment: str) -> list[str]:
    """Run code outside of the checkout; return the printed lines."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_FLASHPLUG")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env=env | environment, cwd="/", capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()


def test_layout_has_a_variant_for_each_backend(layout: Path) -> None:
    folders = sorted(path.name for path in (layout / "build").iterdir())
    assert folders == sorted(f"torch-stable-abi211-{x}-x86_64-linux" for x in make_hub_kernel.BACKENDS)
    ids = set()
    for folder in (layout / "build").iterdir():
        facts = json.loads((folder / "metadata.json").read_text())
        ids.add(facts["id"])
        assert facts["backend"]["type"] == ("cpu" if "-cpu-" in folder.name else "cuda")
        assert (folder / "torch_flashplug" / "_C.so").exists()
    assert len(ids) == len(folders)


LOAD = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("a_kernel", {path!r})
kernel = importlib.util.module_from_spec(spec)
sys.modules["a_kernel"] = kernel
"""


def test_loader_uses_the_copy_of_the_layout_and_leaves_sdpa_alone(layout: Path) -> None:
    folder = layout / "build" / VARIANT
    code = LOAD.format(path=str(folder / "__init__.py")) + "spec.loader.exec_module(kernel)\n" + CHECK
    assert run_python(code) == [str(folder / "torch_flashplug" / "__init__.py"), "False"]


def test_loader_uses_an_imported_package(layout: Path) -> None:
    folder = layout / "build" / VARIANT
    before = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import torch_flashplug\n"
    code = before + LOAD.format(path=str(folder / "__init__.py")) + "spec.loader.exec_module(kernel)\n" + CHECK
    assert run_python(code) == [str(ROOT / "torch_flashplug" / "__init__.py"), "True"]


def test_kernels_package_loads_the_layout(layout: Path) -> None:
    if reason := why_not_importable("kernels.load"):  # test/kernels is a namespace package "kernels"
        pytest.skip(f"{reason} (checked with kernels 0.17.0)")
    code = f"from kernels import get_kernel\nkernel = get_kernel({REPOSITORY!r}, version=1)\n" + CHECK
    lines = run_python(code, LOCAL_KERNELS=f"{REPOSITORY}={layout}", HF_HUB_OFFLINE="1")
    assert lines == [str(layout / "build" / VARIANT / "torch_flashplug" / "__init__.py"), "False"]


def test_kernels_package_parses_the_variants() -> None:
    if reason := why_not_importable("kernels.variants"):
        pytest.skip(f"{reason} (checked with kernels 0.17.0)")
    from kernels import variants

    for backend in make_hub_kernel.BACKENDS:
        name = make_hub_kernel.variant("2.11", backend, "x86_64")
        parsed = variants.parse_variant(name)
        assert parsed.variant_str == name and str(parsed.framework.version) == "2.11"
        assert type(parsed.framework) is variants.TorchStableAbi
