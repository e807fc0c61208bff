"""README and docs: commands, Python examples and links.

Every command exists and takes the options shown. The Python examples run on a CPU. Files named on the pages exist.
README is short and links all pages.
"""

from __future__ import annotations

import ast
import functools
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torch_flashplug.registry import dispatch_table

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
LINES, COLUMNS = 200, 120


def blocks_of(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), flags=re.S)


BASH = [block for page in PAGES for block in blocks_of(page, "bash")]
COMMANDS = sorted({line for block in BASH for line in block.splitlines() if line.strip()})
TOOLS = (
    *("tools/bench/bench.py", "tools/bench/report.py", "tools/models/programs.py", "tools/fuzz/fuzz.py"),
    "tools/build/make_hub_kernel.py",
)
VERBS = ("torch_flashplug demo", "torch_flashplug warmup")


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= LINES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_lines_are_short(page):
    assert not [line for line in page.read_text().splitlines() if len(line) > COLUMNS]


def test_readme_states_the_serve_ratio_of_auto():
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"measured at {dispatch_table.SERVE_RATIO} x stock torch's speed or more" in text


def test_one_range_of_torch_versions_is_stated():
    """Compare the range of torch versions on pages, in sources and in the build.

    The pinned and the installed version must be in the range. docs/developing.md, "another torch version", describes
    how to change the range.
    """
    build, cmake = (ROOT / "pyproject.toml").read_text(), (ROOT / "CMakeLists.txt").read_text()
    named = "\n".join(path.read_text() for path in (*PAGES, *(ROOT / "src").rglob("*.cpp")))
    ((first, last),) = set(re.findall(r"torch (\d+\.\d+) to (\d+\.\d+)", named))
    assert re.findall(r'"torch>=(.*?)"', build) == [first]
    assert re.findall(r"torch ([\d.]+) (?:or|and) later", (ROOT / "README.md").read_text() + cmake) == [first] * 2
    major, minor = map(int, first.split("."))
    assert f"TORCH_TARGET_VERSION=0x{major:02X}{minor:02X}" in cmake
    pinned = re.search(r"^torch==(\S+)", (ROOT / "tools" / "requirements.txt").read_text(), re.M)[1]
    for version in (pinned, torch.__version__):
        assert (major, minor) <= tuple(map(int, version.split(".")[:2])) <= tuple(map(int, last.split("."))), version


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_on_pages_exist(page):
    text = page.read_text()
    links = [page.parent / link for link in re.findall(r"\]\(([^)#]+)\)", text)]
    paths = [ROOT / path for path in re.findall(r"\b(?:test|tools|docs|src)/[\w/.-]+\.\w+", text)]
    assert not [path for path in links + paths if not path.exists()]
    names = re.findall(r"`(test_\w+)(?:\.py)?`", text)
    assert not [name for name in names if not list((ROOT / "test").rglob(f"{name}.py"))]


@functools.cache
def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


@functools.cache
def help_of(*stem: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, *stem, "--help")


def without_assignments(line: str) -> list[str]:
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"\w+=\S*", words[0]):
        words.pop(0)
    return words


def options(words: list[str]) -> list[str]:
    return [word for word in words if word.startswith("--")]


def test_pages_contain_commands():
    assert {"./tools/dev demo", "./tools/dev test"} <= set(COMMANDS)


@pytest.mark.parametrize(
    "line", [line for line in COMMANDS if re.search("torch_flashplug (explain|info|.*--list)", line)]
)
def test_commands_on_pages_run(line):
    done = run(sys.executable, *without_assignments(line)[1:])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("line", [line for line in COMMANDS if any(tool in line for tool in (*TOOLS, *VERBS))])
def test_command_accepts_the_options_shown(line):
    words = without_assignments(line)
    helped = help_of(*(words[1:2] if words[1].endswith(".py") else words[1:4]))
    assert helped.returncode == 0, helped.stderr
    assert all(option in helped.stdout for option in options(words))


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("./tools/dev")])
def test_dev_script_documents_the_verbs_shown(line):
    verb = shlex.split(line)[1]
    assert re.search(rf"^#   tools/dev {verb}\b", (ROOT / "tools/dev").read_text(), flags=re.M)


def test_every_command_has_a_known_prefix():
    known_prefixes = (
        "./tools/dev ",
        "pip install ",
        "pip uninstall ",
        "python -m torch_flashplug ",
        "python -m pytest ",
        *(f"python {tool} " for tool in TOOLS),
    )
    unknown = [line for line in COMMANDS if not " ".join(without_assignments(line)).startswith(known_prefixes)]
    assert not unknown


RUN_EXAMPLES = """
import re, sys
for number, code in enumerate(re.findall(r"```python\\n(.*?)```", open(sys.argv[1]).read(), flags=re.S)):
    exec(compile(code, f"<example {number} of {sys.argv[1]}>", "exec"), {"__name__": "example"})
    import torch_flashplug
    torch_flashplug.enable()
"""


@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page, "python")], ids=lambda page: page.name)
def test_python_examples_run(page):
    """Run all examples of a page in one process, each with a separate namespace."""
    if "transformers" in page.read_text():
        pytest.importorskip("transformers")
    done = run(sys.executable, "-c", RUN_EXAMPLES, str(page))
    assert done.returncode == 0, done.stderr


def test_examples_without_execution_are_valid_python():
    examples = [code for page in PAGES for code in blocks_of(page, "py")]
    assert examples
    for code in examples:
        ast.parse(code)


def test_readme_links_every_page():
    linked = set(re.findall(r"\]\((docs/[\w.]+)\)", (ROOT / "README.md").read_text()))
    assert linked == {f"docs/{page.name}" for page in PAGES[1:]}


def test_explain_commands_for_hopper_gpus_report_kernels():
    lines = [line for line in COMMANDS if "explain --device h" in line]
    plans = [run(sys.executable, *shlex.split(line)[1:]).stdout for line in lines]
    assert lines and not [plan for plan in plans if not re.search(r"^backend +fa[23]$", plan, re.M)]
