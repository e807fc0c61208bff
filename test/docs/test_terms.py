"""Retired terms: words that the texts of the project no longer use, because the field has another term."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import prose_stats  # noqa: E402

# Pattern -> the term to use. Texts are comments, docstrings and pages.
RETIRED = {
    r"\bon end\b|\bragged\b": "packed sequences, varlen",
    r"\bkeys that count\b|\bsome of each\b": "KV length",
    r"\bin pages\b": "paged KV cache",
    r"\bfew rows\b|\bof few\b": "decode, few query rows",
    r"\bdigest(s|ed)?\b": "mask preprocessing, MaskMetadata; a hash",
    r"\bhides\b": "masks out",
    r"\bbent\b|\bbends?\b|\bweighs?\b": "score modification, softmax",
    r"\bwalks?\b": "block iterator",
    r"\bpieces?\b": "tile coordinate, tile addressing",
    r"\bslots?\b": "pipeline stage",
    r"\btickets?\b|\bmail\b": "tile scheduler",
    r"\bscratch\b": "workspace",
    r"\bby kind\b": "batch-invariant",
    r"\bjudges?\b|\bverdicts?\b": "dispatch, decision",
    r"\bdoors?\b|\broads?\b|\bcarriers?\b": "op, op overload, backend",
    r"\bstand-?ins?\b": "CPU stub backend",
    r"\bin the mean\b": "on average",
    r"\bseams?\b": "kernel features",
    r"\bquantis\w+|\bnormalis\w+|\bspecialis\w+|\bsynchronis\w+": "American spelling",
}
# Uses by tree.
ALLOWED = {"torch_flashplug": 0, "src": 0, "test": 0, "tools": 0, "docs": 0}


def texts_of(tree: str) -> list[tuple[str, str]]:
    """Return the file name and the text of each comment, docstring and page of a tree."""
    texts = []
    for path in sorted((ROOT / tree).rglob("*")):
        if "results" in path.parts or "__pycache__" in path.parts:
            continue
        name = path.relative_to(ROOT).as_posix()
        if path.suffix == ".py":
            source = path.read_text()
            words = (*prose_stats.docstrings_of(ast.parse(source)), *prose_stats.comments_of(source))
        elif path.suffix in {".cpp", ".h", ".c"}:
            words = re.findall(r"//[^\n]*|/\*.*?\*/", path.read_text(), re.S)
        elif path.suffix == ".md":
            words = (re.sub(r"```.*?```", "", path.read_text(), flags=re.S),)
        else:
            continue
        texts += [(name, re.sub(r"`[^`]*`|[\w/]+\.(?:py|cpp|h|md)\b", "", text)) for text in words]
    return texts


@pytest.mark.parametrize("tree", ALLOWED)
def test_texts_have_no_retired_terms(tree):
    uses = Counter()
    for name, text in texts_of(tree):
        for pattern in RETIRED:
            uses.update((name, match[0].lower()) for match in re.finditer(pattern, text, re.I))
    assert uses.total() <= ALLOWED[tree], (uses.total(), uses.most_common(20))


def test_code_names_and_file_names_are_no_terms(tmp_path, monkeypatch):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("`ragged` of test_ragged.py, and a ragged batch.\n```\nragged\n```\n")
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    ((_, text),) = texts_of("docs")
    assert len(re.findall("ragged", text)) == 1
