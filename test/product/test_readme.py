"""README's commands and code are real: every command exists and takes the options shown, the Python example runs."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.S)


COMMANDS = [line for block in blocks("bash") for line in block.splitlines() if line.strip()]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def without_assignments(line: str) -> list[str]:
    words = shlex.split(line)
    while words and re.fullmatch(r"\w+=\S*", words[0]):
        words.pop(0)
    return words


def options(words: list[str]) -> list[str]:
    return [word for word in words if word.startswith("--")]


def test_there_are_commands():
    assert {"./tools/dev demo", "./tools/dev test"} <= set(COMMANDS)


@pytest.mark.parametrize(
    "line", [line for line in COMMANDS if "torch_flashplug explain" in line or "torch_flashplug info" in line]
)
def test_command_runs(line):
    done = run(sys.executable, *without_assignments(line)[1:])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize(
    "line", [line for line in COMMANDS if "tools/bench.py" in line or "torch_flashplug demo" in line]
)
def test_command_takes_its_options(line):
    words = without_assignments(line)
    stem = words[1:2] if words[1].endswith(".py") else words[1:4]
    helped = run(sys.executable, *stem, "--help")
    assert helped.returncode == 0, helped.stderr
    assert all(option in helped.stdout for option in options(words))


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("./tools/dev")])
def test_dev_knows_its_verbs(line):
    verb = shlex.split(line)[1]
    assert re.search(rf"^#   tools/dev {verb}\b", (ROOT / "tools/dev").read_text(), flags=re.M)


def test_every_command_is_one_we_know():
    known = (
        "./tools/dev ",
        "pip install ",
        "python -m torch_flashplug ",
        "python -m pytest ",
        "python tools/bench.py ",
    )
    unknown = [line for line in COMMANDS if not " ".join(without_assignments(line)).startswith(known)]
    assert not unknown


@pytest.mark.parametrize("code", blocks("python"))
def test_python_example_runs(code):
    done = run(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
