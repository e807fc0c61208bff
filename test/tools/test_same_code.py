"""tools/same_code.py: changes that count as changes of code."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import same_code  # noqa: E402

PYTHON = '"""Old words."""\n\ndef run(rows):\n    """Run."""\n    raise ValueError(f"bad {rows}")  # why\n'
CPP = '// Old words.\nint run(int rows) { return fail("bad // rows", \'"\'); }  /* why */\n'


@pytest.mark.parametrize(
    ("old", "new", "texts", "same"),
    [
        ("Old words", "New words", False, True),
        ("# why", "# because", False, True),
        ('    """Run."""\n', "", False, True),
        ("bad {rows}", "wrong {rows}", False, False),
        ("bad {rows}", "wrong {rows}", True, True),
        ("ValueError", "TypeError", True, False),
        ("def run(rows)", "def run(keys)", False, False),
    ],
)
def test_python_changes_are_classified(old, new, texts, same):
    changed = PYTHON.replace(old, new)
    assert changed != PYTHON
    assert (same_code.python_code(PYTHON, texts) == same_code.python_code(changed, texts)) is same


LOCALS = "def run(rows, seen):\n    found = [row for row in rows if row in seen]\n    return found, other(seen)\n"


@pytest.mark.parametrize(
    ("renames", "same"),
    [
        ({"found": "visible", "seen": "keys"}, True),
        ({"row": "rows"}, False),  # two names become a single name
        ({"other": "another"}, False),  # a global name
        ({"run": "walk"}, False),
        ({"in rows": "in seen"}, False),
    ],
)
def test_renamed_locals_are_the_same_code(renames, same):
    changed = LOCALS
    for old, new in renames.items():
        changed = re.sub(rf"\b{old}\b", new, changed)
    assert changed != LOCALS
    assert (same_code.python_code(LOCALS, False, True) == same_code.python_code(changed, False, True)) is same


@pytest.mark.parametrize(
    ("old", "new", "texts", "same"),
    [
        ("Old words", "New words", False, True),
        ("/* why */", "", False, True),
        ("{ return", "{\n  return", False, True),
        ("bad // rows", "bad // keys", False, False),  # a comment mark in a literal starts no comment
        ("bad // rows", "bad // keys", True, True),
        ("int rows", "long rows", True, False),
        ("'\"'", "'x'", True, False),
    ],
)
def test_cpp_changes_are_classified(old, new, texts, same):
    changed = CPP.replace(old, new)
    assert changed != CPP
    assert (same_code.cpp_code(CPP, texts) == same_code.cpp_code(changed, texts)) is same
