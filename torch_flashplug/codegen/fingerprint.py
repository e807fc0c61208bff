"""Hashes of the sources that a kernel is compiled from.

Comments, docstrings, blank lines and the places of files do not count, because they do not change an object. The hash
of a source is that of its syntax tree without docstrings. Python 3.10 to 3.14 agree on the hash.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path

from ..registry import features
from ..registry.dtypes import ELEMENTS, NUMBERS
from ..registry.kernel_args import OF_KIND
from ..registry.kernel_spec import KernelSpec

_PACKAGE = Path(__file__).resolve().parent.parent


def fingerprint(spec: KernelSpec) -> str:
    """Return the hash of everything that the code of one kernel depends on.

    These are the kernel's module and all modules of ours that it imports, the modules of its features, and its rows
    of the tables. A change of one kernel file or of one feature leaves the hashes of the other kernels as they are.
    """
    operands = ELEMENTS[spec.dtype].operands
    rows = [(operands, *(NUMBERS[name] for name in operands))]
    rows += [
        (x.tag, x.part_of(spec.kind), x.arguments, x.always, x.score_bytes, x.key_bytes, *filter(None, (x.ahead,)))
        for x in features.of(spec.features)
    ]
    rows += [(x.name, x.dtype, x.scalar, x.optional) for x in OF_KIND[spec.kind]]
    return _hash_of([path for path in sources_of(spec) if path not in _tables()], repr(rows))


def source_fingerprint() -> str:
    """Return the hash of all kernels, the spec, and the tables of arguments, elements and features."""
    return _hash_of(_all_sources())


def raw_fingerprint() -> str:
    """Return the hash of the bytes of all sources. It takes milliseconds, and changes with every comment."""
    digest = hashlib.sha256()
    for path in _all_sources():
        data = path.read_bytes()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:16]


def sources_of(spec: KernelSpec) -> list[Path]:
    """Return the files of ours that the code of a kernel is made by. They are read, not imported."""
    from ..kernels import BUILDERS

    module, _ = BUILDERS[spec.kind, spec.arch]
    names = [feature.part_of(spec.kind) for feature in features.of(spec.features)]
    parts = [name.rpartition(".")[0].split(".") for name in names if name]
    found: set[Path] = set()
    waiting = [_PACKAGE.joinpath("kernels", *module.split(".")).with_suffix(".py")]
    waiting += [_PACKAGE.joinpath("kernels", "features", *part).with_suffix(".py") for part in parts]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += _read(path, path.stat().st_mtime_ns)[1]
    return sorted(found)


def _tables() -> list[Path]:
    """Return the tables, of which a kernel depends on its own rows alone."""
    return [_PACKAGE / "registry" / f"{table}.py" for table in ("kernel_args", "dtypes", "features")]


def _all_sources() -> list[Path]:
    return sorted([*_tables(), _PACKAGE / "registry" / "kernel_spec.py", *(_PACKAGE / "kernels").rglob("*.py")])


def _hash_of(files: list[Path], more: str = "") -> str:
    digests = sorted(_read(path, path.stat().st_mtime_ns)[0] for path in files)
    return hashlib.sha256("\n".join([more, *digests]).encode()).hexdigest()[:16]


@functools.cache
def _read(path: Path, changed: int) -> tuple[str, list[Path]]:
    """Return the hash of one source, and the files of ours that the source imports.

    Args:
        path: the source.
        changed: its time of change in ns. A build asks for the same few files hundreds of times.
    """
    tree = ast.parse(path.read_text(), str(path))
    files = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            place = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            files += [place.with_suffix(".py"), *(place / f"{alias.name}.py" for alias in node.names)]
    text = "".join(_words(tree))
    return hashlib.sha256(text.encode()).hexdigest(), [file for file in files if file.is_file()]


_OPENERS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _words(node: object) -> Iterator[str]:
    """Yield the syntax tree as text. Empty fields are left out, since newer versions of Python have more of them."""
    if isinstance(node, list):
        yield "["
        for item in node:
            yield from _words(item)
        yield "]"
    elif not isinstance(node, ast.AST):
        yield f"{node!r},"
    else:
        yield f"{type(node).__name__}("
        is_import = isinstance(node, ast.ImportFrom) and node.level
        for name, value in ast.iter_fields(node):
            if value is None or value == [] or (is_import and name in {"module", "level"}):
                continue  # which file is imported shows in the files' hashes
            if name == "body" and isinstance(node, _OPENERS) and ast.get_docstring(node, clean=False) is not None:
                value = value[1:]  # noqa: PLW2901
            yield f"{name}="
            yield from _words(value)
        yield ")"
