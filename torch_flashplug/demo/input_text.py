"""Input text of the demo: the bytes of a text file, repeated to a requested length, as tokens."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor


def read_text(file: str | None) -> tuple[bytes, str]:
    """Return the text and the origin of the text.

    The text is the given file, or else the README.md of a checkout, or else the source of this package.
    """
    if file is not None:
        path = Path(file)
        if not path.is_file():
            raise SystemExit(
                f"demo: file must be an existing text file, but got {file}. Leave it out for the built-in text."
            )
        content, origin = path.read_bytes(), str(path)
    else:
        package = Path(__file__).resolve().parent.parent
        readme = package.parent / "README.md"
        if readme.is_file():
            content, origin = readme.read_bytes(), "README.md"
        else:
            sources = sorted(package.glob("*.py"))
            content, origin = b"".join(source.read_bytes() for source in sources), "the package's own source"
    if not content:
        raise SystemExit(f"demo: file must contain text, but {origin} is empty. Pass a different file.")
    return content, origin


def repeated(content: bytes, length: int) -> bytes:
    """Return `length` bytes of a text that is repeated endlessly."""
    return (content * -(-length // len(content)))[:length]


def as_tokens(content: bytes) -> Tensor:
    """Return bytes as an int64 tensor (len,) on the CPU."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).long()
