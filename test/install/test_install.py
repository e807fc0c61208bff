"""Build errors for missing packages, versions required by the package, and docs/install.md compared with the code."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from torch_flashplug import __main__
from torch_flashplug.codegen import compile_pool, kernel_cache
from torch_flashplug.registry import kernel_table

ROOT = Path(__file__).resolve().parents[2]
TOOLS = Path(sys.executable).parent  # of the development set


@pytest.mark.parametrize(
    ("present", "missing_packages"),
    [((), "torch and apache-tvm-ffi"), (("torch",), "apache-tvm-ffi"), (("tvm_ffi",), "torch")],
    ids=["none", "torch", "tvm_ffi"],
)
def test_configuring_reports_missing_packages(tmp_path: Path, present: tuple[str, ...], missing_packages: str) -> None:
    cmake = shutil.which("cmake", path=TOOLS) or shutil.which("cmake")
    if cmake is None:
        pytest.skip("cmake is not installed")
    for name in present:
        (tmp_path / "packages" / name).mkdir(parents=True)
        (tmp_path / "packages" / name / "__init__.py").touch()
    python = tmp_path / "python"
    # The interpreter must see no other packages.
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path / "packages"}" exec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)

    done = subprocess.run(
        [cmake, "-S", ROOT, "-B", tmp_path / "build", f"-DPython_EXECUTABLE={python}", "-DFLASHPLUG_PACKS="],
        capture_output=True, text=True, check=False,
    )  # fmt: skip

    error = " ".join(done.stderr.split())
    assert done.returncode != 0
    assert f"torch_flashplug: {missing_packages} must be installed" in error
    assert "Traceback" not in error


def test_package_accepts_the_tvm_ffi_version_pinned_by_vllm() -> None:
    """vLLM and SGLang pin 0.1.11. Kernels of the current packs ran under 0.1.11 on an H100."""
    assert '"apache-tvm-ffi>=0.1.11"' in (ROOT / "pyproject.toml").read_text()


def test_pages_name_every_runtime_dependency() -> None:
    (listed_names,) = re.findall(r"^dependencies = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.M)
    requirements = re.findall(r'"([\w-]+)(?:>=([\d.]+))?"', listed_names)
    page = " ".join((ROOT / "docs" / "developing.md").read_text().split())
    (sentence,) = re.findall(r"A machine that only runs kernels needs (.*?)\. ", page)
    assert len(requirements) == len(listed_names.split(","))
    assert not [name for name, _ in requirements if name not in sentence]
    assert f"apache-tvm-ffi ({dict(requirements)['apache-tvm-ffi']} or later" in sentence


PAGE = " ".join((ROOT / "docs" / "install.md").read_text().split())


def test_install_page_names_every_option_of_warmup() -> None:
    (verbs,) = (action.choices for action in __main__._parser()._actions if action.dest == "verb")
    options = {option for action in verbs["warmup"]._actions for option in action.option_strings} - {"-h", "--help"}

    assert not [option for option in options if not re.search(rf"`{option}[` ]", PAGE)]


def test_numbers_of_the_install_page_equal_the_code() -> None:
    assert f"not used for {kernel_cache.UNUSED_DAYS} days" in PAGE
    assert f"held for {compile_pool.LOCK_SECONDS} s counts as stuck" in PAGE
    assert f"as many as CPUs, at most {compile_pool.MAX_WORKERS} |" in PAGE
    assert compile_pool.MAX_WORKERS == 8 and "may use CPUs, at most eight" in PAGE


def test_packs_named_on_the_install_page_exist() -> None:
    named = re.search(r'such as `"([\w;]+)"`', PAGE)[1].split(";")
    tiers = re.findall(r"set\(PACKS_OF_TIER_(\w+) ", (ROOT / "CMakeLists.txt").read_text())

    assert set(named) <= {pack.name for pack in kernel_table.PACKS}
    assert not [tier for tier in tiers if f"| `{tier}` |" not in PAGE]


def test_versions_of_the_install_page_equal_the_package() -> None:
    build, requirements = ((ROOT / name).read_text() for name in ("pyproject.toml", "tools/requirements.txt"))
    pinned = re.search(r"^torch==([\d.]+)", requirements, re.M)[1]
    oldest = re.search(r'requires-python = ">=([\d.]+)"', build)[1]

    assert f"| Python | {oldest} or later" in PAGE
    assert re.search(rf"\| [\d., ]*{re.escape(pinned)}[\d., ]* \| [\d.]+ \|", PAGE)
    assert re.search(r'^jit = \["([\w-]+)', build, re.M)[1] in PAGE


LOG_LINES = {
    "pip": "  Downloading torch-2.13.0.whl (180.0 MB)",
    "ninja": "  [3/12] Building CXX object CMakeFiles/_C.dir/src/hooks/sdp_choice.cpp.o",
    "packs": "[aot] 7 of 377 kernels, 20 s, about 900 s left: fwd_sm90",
}


@pytest.mark.parametrize("source", LOG_LINES)
def test_dev_script_shows_progress(source: str, tmp_path: Path) -> None:
    """Show the latest progress line once, no further lines of the log, and return the exit status of the command."""
    log, line = tmp_path / "log", LOG_LINES[source]
    log.write_text(f"Requirement already satisfied: pip\n  [1/12] an earlier line\n{line}\nSome warning\n")
    script = f"""
        set -euo pipefail
        eval "$(sed -n '/^show_progress()/,/^}}/p' tools/dev)"
        (sleep 3; exit 7) &
        show_progress $! '{log}' 1
    """

    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 7
    assert done.stderr == f"  {line.strip()}\n" and not done.stdout
