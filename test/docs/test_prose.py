"""Plain language in Python sources, by the counts of tools/prose_stats.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import prose_stats  # noqa: E402

# By tree: pronouns per 100 words, percent of docstrings that are fragments, percent of variables with a vague name. The
# numbers may only go down. The aim is 3.5, 3 and 0.2 for each tree.
CEILINGS = {
    "torch_flashplug": (2.0, 0.2, 0.1),
    "test": (2.6, 0.1, 0.1),
    "tools": (2.8, 0.1, 0.1),
}


@pytest.mark.parametrize("tree", CEILINGS)
def test_counts_stay_below_the_ceilings(tree):
    stats = prose_stats.stats_of(ROOT / tree)
    counts = stats.pronouns_per_100, stats.fragment_percent, stats.vague_percent
    assert all(count <= ceiling for count, ceiling in zip(counts, CEILINGS[tree], strict=True)), counts


def test_counts_of_a_file(tmp_path):
    text = '"""Of a thing, what it does."""\n\n# It is one of those.\nfound, kernel = 1, 2\n\n\ndef run(given): ...\n'
    (tmp_path / "one.py").write_text(text)
    stats = prose_stats.stats_of(tmp_path)
    assert (stats.words, stats.pronouns) == (11, 5)  # what, it, It, one, those
    assert (stats.docstrings, stats.fragments) == (1, 1)
    assert (stats.names, stats.vague) == (3, 2)  # found and given, not kernel


def test_directives_of_tools_are_not_counted(tmp_path):
    (tmp_path / "one.py").write_text("import os  # noqa: F401\n# fmt: off\n#!/usr/bin/env python\n")
    assert prose_stats.stats_of(tmp_path).words == 0


def test_invalid_python_files_are_skipped(tmp_path, capsys):
    (tmp_path / "one.py").write_text("def (:\n")
    assert prose_stats.stats_of(tmp_path).words == 0
    assert "one.py: left out" in capsys.readouterr().err


def test_missing_folder_is_refused():
    command = [sys.executable, ROOT / "tools" / "prose_stats.py", "no_such_folder"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "folder must exist, but got no_such_folder" in done.stderr
