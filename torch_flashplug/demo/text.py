"""What the demo reads: a text file's bytes, as many as are wanted, as tokens."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor


def read_text(file: str | None) -> tuple[bytes, str]:
    """The text and where it came from: the file given, else README.md of a checkout, else our own source."""
    if file is not None:
        path = Path(file)
        if not path.is_file():
            raise SystemExit(f"demo: no file {file}; give a text file, or none for the built-in text")
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
        raise SystemExit(f"demo: {origin} is empty; give a file with some text")
    return content, origin


def repeated(content: bytes, length: int) -> bytes:
    """`length` bytes of a text that starts anew where it ends."""
    return (content * -(-length // len(content)))[:length]


def as_tokens(content: bytes) -> Tensor:
    """Bytes as int64 (len,), on the CPU."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).long()
