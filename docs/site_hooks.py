"""Hooks of mkdocs for ./tools/dev docs: pictures of tools/results belong to the site.

Pages link to the pictures by a path that is valid in the repository: ../tools/results/NAME.png.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

RESULTS = Path(__file__).resolve().parents[1] / "tools" / "results"
LINK = "../tools/results/"


def on_files(files: Files, config: Any) -> Files:
    """Add the pictures of tools/results to the site, in the folder results."""
    for picture in sorted(RESULTS.glob("*.png")):
        files.append(File.generated(config, f"results/{picture.name}", abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Let links to the pictures of tools/results lead to the folder results of the site."""
    return markdown.replace(f"]({LINK}", "](results/")
