"""Comparison of code without comments: shows that a commit of words changes no code.

    python tools/same_code.py [COMMIT] [--texts]         the working tree against COMMIT (HEAD by default)

Python files are compared as syntax trees without docstrings, and C++ files as text without comments and blanks. With
`--texts` the contents of string literals do not count either, as in a commit that rewrites error messages. Files whose
code differs are printed, and the exit status is then 1.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CPP = {".cpp", ".h", ".c"}
_CPP_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)
    |(?P<raw>R"(?P<mark>[^(\s]*)\(.*?\)(?P=mark)")
    |(?P<text>"(?:\\.|[^"\\\n])*")
    |(?P<character>'(?:\\.|[^'\\\n])+')""",
    re.DOTALL | re.VERBOSE,
)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class _WithoutTexts(ast.NodeTransformer):
    """Replaces each string literal and f-string by an empty string."""

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Constant("") if isinstance(node.value, str) else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return ast.Constant("")


def python_code(source: str, texts: bool) -> str:
    """Return a text that is equal for two Python sources if and only if their code is equal.

    Args:
        source: the source of one module.
        texts: whether the contents of string literals may differ.
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    if texts:
        tree = _WithoutTexts().visit(tree)
    return ast.dump(tree)


def cpp_code(source: str, texts: bool) -> str:
    """Return a text that is equal for two C++ sources if and only if their code is equal.

    Args:
        source: the source of one file.
        texts: whether the contents of string literals may differ.
    """

    def replacement(match: re.Match[str]) -> str:
        if match["comment"] is not None:
            return " "
        return '""' if texts and match["character"] is None else match[0]

    text = re.sub(r"\s+", " ", _CPP_TOKEN.sub(replacement, source))
    text = re.sub(r" ?([^\w\s]) ?", r"\1", text)
    return re.sub(r'(?:"")+', '""', text).strip() if texts else text.strip()


def code_of(name: str, source: str, texts: bool) -> str | None:
    """Return the code of a file, or None where the file is neither Python nor C++."""
    if name.endswith(".py"):
        return python_code(source, texts)
    return cpp_code(source, texts) if Path(name).suffix in CPP else None


def differing(commit: str, texts: bool) -> list[str]:
    """Return the names of the changed files whose code differs from the commit's.

    Args:
        commit: the commit to compare with.
        texts: whether the contents of string literals may differ.
    """

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    names = []
    for name in git("diff", "--name-only", "--diff-filter=M", commit).splitlines():
        old = code_of(name, git("show", f"{commit}:{name}"), texts)
        if old is not None and old != code_of(name, (ROOT / name).read_text(), texts):
            names.append(name)
    return names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", default="HEAD", help="the commit to compare with (default HEAD)")
    parser.add_argument("--texts", action="store_true", help="let the contents of string literals differ")
    args = parser.parse_args()
    names = differing(args.commit, args.texts)
    print("\n".join(f"{name}: the code differs" for name in names) or "the code is the same")
    return 1 if names else 0


if __name__ == "__main__":
    sys.exit(main())
