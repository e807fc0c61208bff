"""Comparison of code without comments: shows that a commit of words changes no code.

    python tools/same_code.py [COMMIT] [--texts] [--names]       the working tree against COMMIT (HEAD by default)

Python files are compared as syntax trees without docstrings, and C++ files as text without comments and blanks.
`--texts` ignores the contents of string literals, as in a commit that rewrites error messages. `--names` lets local
variables and parameters of Python functions have other names, as long as each function renames them one to one. Files
whose code differs are printed, and the exit status is then 1.
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


class _NumberedLocals(ast.NodeTransformer):
    """Replaces each local variable and parameter of a function by its number in order of appearance.

    Nested functions and comprehensions share the numbers of the outermost function, in which their names are looked up.
    """

    def __init__(self) -> None:
        self.numbers: dict[str, str] | None = None  # None: outside of functions

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if self.numbers is not None:
            node.name = self.numbers.get(node.name, node.name)
            return self.generic_visit(node)
        bound = [name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)]
        bound += [argument.arg for argument in ast.walk(node) if isinstance(argument, ast.arg)]
        bound += [inner.name for inner in ast.walk(node) if isinstance(inner, ast.FunctionDef) and inner is not node]
        bound += [handler.name for handler in ast.walk(node) if isinstance(handler, ast.ExceptHandler) and handler.name]
        self.numbers = {name: f"local {number}" for number, name in enumerate(dict.fromkeys(bound))}
        node = self.generic_visit(node)
        self.numbers = None
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = (self.numbers or {}).get(node.id, node.id)
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.arg = (self.numbers or {}).get(node.arg, node.arg)
        return self.generic_visit(node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        node.name = (self.numbers or {}).get(node.name, node.name)
        return self.generic_visit(node)


def python_code(source: str, texts: bool, names: bool = False) -> str:
    """Return a text that is equal for two Python sources if and only if their code is equal.

    Args:
        source: the source of one module.
        texts: whether the contents of string literals may differ.
        names: whether local variables and parameters of functions may have other names.
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    if texts:
        tree = _WithoutTexts().visit(tree)
    if names:
        tree = _NumberedLocals().visit(tree)
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


def code_of(name: str, source: str, texts: bool, names: bool) -> str | None:
    """Return the code of a file, or None where the file is neither Python nor C++."""
    if name.endswith(".py"):
        return python_code(source, texts, names)
    return cpp_code(source, texts) if Path(name).suffix in CPP else None


def differing(commit: str, texts: bool, names: bool) -> list[str]:
    """Return the names of the changed files whose code differs from the commit's.

    Args:
        commit: the commit to compare with.
        texts: whether the contents of string literals may differ.
        names: whether local variables and parameters of Python functions may have other names.
    """

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    files = []
    for file in git("diff", "--name-only", "--diff-filter=M", commit).splitlines():
        old = code_of(file, git("show", f"{commit}:{file}"), texts, names)
        if old is not None and old != code_of(file, (ROOT / file).read_text(), texts, names):
            files.append(file)
    return files


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", default="HEAD", help="the commit to compare with (default HEAD)")
    parser.add_argument("--texts", action="store_true", help="let the contents of string literals differ")
    parser.add_argument("--names", action="store_true", help="let local variables and parameters have other names")
    args = parser.parse_args()
    files = differing(args.commit, args.texts, args.names)
    print("\n".join(f"{file}: the code differs" for file in files) or "the code is the same")
    return 1 if files else 0


if __name__ == "__main__":
    sys.exit(main())
