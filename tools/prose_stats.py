"""Counts of plain language in Python sources: pronouns, first words of docstrings, and names of variables.

    python tools/prose_stats.py                          the package, test and tools of this project
    python tools/prose_stats.py DIR [DIR...]             any trees, such as an installed package
    python tools/prose_stats.py --markdown [PAGE...]     Markdown pages: README.md and docs, or the pages and folders

The table has one row for each tree or page. Pronouns are counted per 100 words of comments and docstrings. In Markdown,
all text counts except code and the targets of links.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

PRONOUNS = frozenset(
    "it its itself they them their theirs themselves this that these those what which who whom whose one ones "
    "other others another we us our ours you your yours i me my mine".split()
)
# Words that make the first line of a docstring a fragment: neither an imperative nor a noun phrase starts with them.
STARTERS = (
    *("Of", "What", "Whether", "Those", "As", "The same", "Likewise", "Where", "Beside", "That", "Which", "Whose"),
    *("How", "Who", "By", "In", "With", "For", "From", "To", "At", "On", "Under", "After", "Before", "If", "And", "Or"),
    *("Also", "Only", "Not", "Here", "There", "Both", "It", "Its", "They", "Their", "Nothing", "None", "Others"),
)
VAGUE_NAMES = frozenset(
    "given found seen mine there here own whole made taken told said known wanted some one others other now what "
    "of".split()
)


@dataclass(slots=True)
class Stats:
    """Counts of a source tree."""

    words: int = 0
    pronouns: int = 0
    docstrings: int = 0
    fragments: int = 0
    names: int = 0
    vague: int = 0

    @property
    def pronouns_per_100(self) -> float:
        """Pronouns per 100 words of comments and docstrings."""
        return 100 * self.pronouns / max(self.words, 1)

    @property
    def fragment_percent(self) -> float:
        """Percentage of docstrings with a first line that starts with a word of STARTERS."""
        return 100 * self.fragments / max(self.docstrings, 1)

    @property
    def vague_percent(self) -> float:
        """Percentage of variables with a name in VAGUE_NAMES."""
        return 100 * self.vague / max(self.names, 1)


def comments_of(source: str) -> Iterator[str]:
    """Yield the text of each comment, except directives of tools."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not re.match(r"#\s*(noqa|fmt|type|ruff|!|SPDX)", token.string):
            yield token.string.lstrip("#! ")


def docstrings_of(tree: ast.Module) -> Iterator[str]:
    """Yield the docstrings of the module, classes and functions."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield text


def variables_of(tree: ast.Module) -> Iterator[str]:
    """Yield the name of each bound variable and of each parameter."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg


def words_of(text: str) -> list[str]:
    """Return the words of a text without the unit us (microseconds)."""
    return re.findall(r"[A-Za-z][A-Za-z']*", re.sub(r"(\d)\s+us\b|\bUs\b", r"\1", text))


def add_file(stats: Stats, path: Path) -> None:
    """Add the counts of a file to `stats`.

    Raises:
        SyntaxError: the file is not valid for this version of Python.
    """
    source = path.read_text()
    tree = ast.parse(source)
    docstrings = list(docstrings_of(tree))
    for text in (*docstrings, *comments_of(source)):
        words = words_of(text)
        stats.words += len(words)
        stats.pronouns += sum(word.lower() in PRONOUNS for word in words)
    stats.docstrings += len(docstrings)
    stats.fragments += sum(bool(re.match(rf"(?:{'|'.join(STARTERS)})\b", text)) for text in docstrings)
    names = list(variables_of(tree))
    stats.names += len(names)
    stats.vague += sum(name.lstrip("_") in VAGUE_NAMES for name in names)


def text_of_markdown(source: str) -> str:
    """Return the text of a page without code blocks, inline code, and targets of links."""
    text = re.sub(r"^( *)```.*?^ *```", "", source, flags=re.S | re.M)
    return re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "", text))


def markdown_stats(path: Path) -> Stats:
    """Return the counts of words and pronouns of a Markdown page."""
    words = words_of(text_of_markdown(path.read_text()))
    return Stats(words=len(words), pronouns=sum(word.lower() in PRONOUNS for word in words))


def markdown_pages(*paths: Path) -> list[Path]:
    """Return the Markdown pages among the paths and in folders among the paths."""
    return sorted(page for path in paths for page in (path.rglob("*.md") if path.is_dir() else (path,)))


def print_pages(*paths: Path) -> None:
    """Print a table of the words and the pronouns of Markdown pages."""
    print(f"{'page':40s} {'words':>8s} {'pronouns/100':>13s}")
    for page in markdown_pages(*(paths or (ROOT / "README.md", ROOT / "docs"))):
        stats = markdown_stats(page)
        name = page.relative_to(ROOT) if page.is_relative_to(ROOT) else page
        print(f"{str(name)[-40:]:40s} {stats.words:8,d} {stats.pronouns_per_100:13.1f}")


def stats_of(*folders: Path) -> Stats:
    """Return the counts of all Python files in the folders, except files that this version of Python cannot parse."""
    stats = Stats()
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        try:
            add_file(stats, path)
        except (SyntaxError, UnicodeDecodeError, tokenize.TokenError) as error:
            print(f"{path}: left out: {error}", file=sys.stderr)
    return stats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="*", help="trees to count, one row each")
    parser.add_argument("--markdown", action="store_true", help="count Markdown pages; folders may also be pages")
    args = parser.parse_args()
    for folder in args.folders:
        if not (folder.is_dir() or (args.markdown and folder.is_file())):
            parser.error(f"folder must exist, but got {folder}")
    if args.markdown:
        print_pages(*args.folders)
        return
    trees = {str(folder): (folder,) for folder in args.folders}
    if not trees:
        trees = {name: (ROOT / name,) for name in ("torch_flashplug", "test", "tools")}
        trees["all"] = tuple(folder for folders in list(trees.values()) for folder in folders)
    print(f"{'tree':24s} {'words':>8s} {'pronouns/100':>13s} {'fragments %':>12s} {'vague names %':>14s}")
    for name, folders in trees.items():
        stats = stats_of(*folders)
        numbers = f"{stats.words:8,d} {stats.pronouns_per_100:13.1f} {stats.fragment_percent:12.1f}"
        print(f"{name[-24:]:24s} {numbers} {stats.vague_percent:14.2f}")


if __name__ == "__main__":
    main()
