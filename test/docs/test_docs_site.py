"""Documentation site of ./tools/dev docs: navigation, the entries of the API reference, and links between pages.

The tests need neither mkdocs nor the network, and import nothing of torch_flashplug.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import prose_stats  # noqa: E402

yaml = pytest.importorskip("yaml")

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
MODULES = (
    "torch_flashplug",
    "torch_flashplug.flash_attn",
    "torch_flashplug.integrations.context_parallel",
    "torch_flashplug.integrations.transformers",
)


def nav_pages(entries: list[object]) -> list[str]:
    """Return the pages of a `nav` section of mkdocs.yml in order."""
    pages = []
    for entry in entries:
        (target,) = entry.values() if isinstance(entry, dict) else (entry,)
        pages += nav_pages(target) if isinstance(target, list) else [target]
    return pages


def text_without_code(page: Path) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.S)


def anchors_of(page: Path) -> set[str]:
    """Return the anchors of the headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), re.M)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


def test_navigation_lists_each_page_once() -> None:
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())

    assert settings["strict"] is True
    assert sorted(nav_pages(settings["nav"])) == [page.relative_to(DOCS).as_posix() for page in PAGES]


def test_overview_links_each_page() -> None:
    linked = set(re.findall(r"\]\(([\w/]+\.md)\)", (DOCS / "README.md").read_text()))

    assert not [page for page in DOCS.glob("*.md") if page.name not in linked | {"README.md"}]


def tree_of(module: str) -> tuple[ast.Module, bool]:
    """Return the syntax tree of a module, and whether the module is a package."""
    path = ROOT.joinpath(*module.split("."))
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()), path.is_dir()


def public_names(module: str) -> list[str]:
    """Return the names in `__all__` of a module."""
    for node in ast.walk(tree_of(module)[0]):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return []


def docstring_of(module: str, name: str) -> str | None:
    """Return the docstring of a function or class, followed through imports, or None if nothing defines the name."""
    tree, is_package = tree_of(module)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            return ast.get_docstring(node)
        if isinstance(node, ast.ImportFrom) and name in {alias.asname or alias.name for alias in node.names}:
            package = module.split(".")[: len(module.split(".")) + is_package - node.level]
            source = ".".join([*package, node.module]) if node.level else node.module
            return docstring_of(source, name)
    return None


def reference_entries() -> list[str]:
    return re.findall(r"^::: (\S+)$", (DOCS / "reference.md").read_text(), re.M)


@pytest.mark.parametrize("module", MODULES)
def test_reference_has_an_entry_for_each_public_name(module: str) -> None:
    entries = reference_entries()

    assert public_names(module)
    assert not set(public_names(module)) - {entry.rpartition(".")[2] for entry in entries}
    assert len(entries) == len(set(entries))


@pytest.mark.parametrize("entry", reference_entries())
def test_entries_of_the_reference_have_docstrings(entry: str) -> None:
    module, _, name = entry.rpartition(".")

    assert docstring_of(module, name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_relative_links_and_anchors_resolve(page: Path) -> None:
    for link, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", text_without_code(page)):
        if link.startswith(("http://", "https://")):
            continue
        target = (page.parent / link).resolve() if link else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors_of(target), f"{page.name}: {link}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_links_stay_inside_the_site(page: Path) -> None:
    """Pictures of tools/results are the only files of other folders; docs/site_hooks.py copies these pictures."""
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text_without_code(page)) if "://" not in link]
    outside = [link for link in links if not (page.parent / link).resolve().is_relative_to(DOCS)]

    assert all(re.fullmatch(r"(\.\./)+tools/results/[\w-]+\.png", link) for link in outside)


def test_pronouns_of_a_page_are_counted_outside_of_code(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("It is `this` [one](which.md).\n\n```python\nthat = those\n```\n\nPlain words.\n")

    stats = prose_stats.markdown_stats(page)

    assert (stats.words, stats.pronouns) == (5, 2)  # It, one


MOST_PRONOUNS = 4.0  # per 100 words


@pytest.mark.parametrize("page", (ROOT / "README.md", *PAGES), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_name_things_instead_of_pointing_at_them(page: Path) -> None:
    assert prose_stats.markdown_stats(page).pronouns_per_100 < MOST_PRONOUNS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_pages_start_with_purpose_readers_and_an_example(page: Path) -> None:
    title, purpose, *rest = page.read_text().split("\n\n")

    assert title.startswith("# ") and title.count("\n") == 0
    assert "page" in purpose and re.search(r"readers|developers|programs that", purpose + rest[0])
    assert re.search(r"[Ee]xample", purpose + rest[0] + rest[1]) or "```" in "".join(rest[:3])
