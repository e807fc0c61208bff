"""Hashes of the sources of kernels.

Comments, docstrings, blank lines and the paths of files do not affect the hash, because an object does not depend on
such changes. The hash of a source is the hash of the syntax tree without docstrings. Python 3.10 to 3.14 compute the
same hash.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path

from ..registry import features
from ..registry.dtypes import DTYPE_INFO, KERNEL_DTYPES
from ..registry.kernel_args import ARGUMENTS_BY_KIND
from ..registry.kernel_spec import KernelSpec

_PACKAGE = Path(__file__).resolve().parent.parent


def fingerprint(spec: KernelSpec) -> str:
    """Return the hash of everything with an effect on the code of a kernel.

    The hash covers the kernel's module, all imported modules of this package, the modules of the kernel's features, and
    the kernel's rows of the tables. A change of a kernel file or of a feature does not change the hashes of
    unrelated kernels.
    """
    operands = KERNEL_DTYPES[spec.dtype].operands
    rows = [(operands, *(DTYPE_INFO[name] for name in operands))]
    rows += [
        (
            x.tag,
            x.class_path_of(spec.kind),
            x.arguments,
            x.is_unconditional,
            x.score_bytes,
            x.key_bytes,
            *filter(None, (x.launch_class_path,)),
        )
        for x in features.select(spec.features)
    ]
    rows += [(x.name, x.dtype, x.is_scalar, x.is_optional) for x in ARGUMENTS_BY_KIND[spec.kind]]
    return _hash_of([path for path in sources_of(spec) if path not in _tables()], repr(rows))


def source_fingerprint() -> str:
    """Return the hash of all kernel sources, the spec, and the tables of arguments, elements and features."""
    return _hash_of(_all_sources())


def raw_fingerprint() -> str:
    """Return the hash of the bytes of all sources.

    The computation takes milliseconds. The hash changes with every comment.
    """
    digest = hashlib.sha256()
    for path in _all_sources():
        data = path.read_bytes()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:16]


def sources_of(spec: KernelSpec) -> list[Path]:
    """Return the source files of this package for the code of a kernel. The files are read, not imported."""
    from ..kernels import builder_path

    module, _ = builder_path(spec)
    names = [feature.class_path_of(spec.kind) for feature in features.select(spec.features)]
    parts = [name.rpartition(".")[0].split(".") for name in names if name]
    sources: set[Path] = set()
    pending = [_PACKAGE.joinpath("kernels", *module.split(".")).with_suffix(".py")]
    pending += [_PACKAGE.joinpath("kernels", "features", *part).with_suffix(".py") for part in parts]
    while pending:
        path = pending.pop()
        if path not in sources:
            sources.add(path)
            pending += _hash_and_imports(path, path.stat().st_mtime_ns)[1]
    return sorted(sources)


def _tables() -> list[Path]:
    """Return the files of the tables. A kernel depends only on the rows for the kernel's arguments and features."""
    return [_PACKAGE / "registry" / f"{table}.py" for table in ("kernel_args", "dtypes", "features")]


def _all_sources() -> list[Path]:
    return sorted([*_tables(), _PACKAGE / "registry" / "kernel_spec.py", *(_PACKAGE / "kernels").rglob("*.py")])


def _hash_of(files: list[Path], more: str = "") -> str:
    digests = sorted(_hash_and_imports(path, path.stat().st_mtime_ns)[0] for path in files)
    return hashlib.sha256("\n".join([more, *digests]).encode()).hexdigest()[:16]


@functools.cache
def _hash_and_imports(path: Path, changed: int) -> tuple[str, list[Path]]:
    """Return the hash of a source file, and the imported source files of this package.

    The result is cached, because a build reads the same few files hundreds of times.

    Args:
        path: the source.
        changed: the modification time of the source in ns.
    """
    tree = ast.parse(path.read_text(), str(path))
    files = []
    for node in _run_nodes(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            module_path = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            files += [module_path.with_suffix(".py"), *(module_path / f"{alias.name}.py" for alias in node.names)]
    text = "".join(_tree_text(tree))
    return hashlib.sha256(text.encode()).hexdigest(), [file for file in files if file.is_file()]


def _run_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a syntax tree, except blocks for type checkers, whose imports never run."""
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _run_nodes(child)


_OPENERS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _tree_text(node: object) -> Iterator[str]:
    """Yield the syntax tree as text.

    Empty fields are left out, because newer versions of Python have additional, empty fields.
    """
    if isinstance(node, list):
        yield "["
        for item in node:
            yield from _tree_text(item)
        yield "]"
    elif not isinstance(node, ast.AST):
        yield f"{node!r},"
    else:
        yield f"{type(node).__name__}("
        is_import = isinstance(node, ast.ImportFrom) and node.level
        for name, value in ast.iter_fields(node):
            if value is None or value == [] or (is_import and name in {"module", "level"}):
                continue  # the hashes of the imported files tell which file is imported
            if name == "body" and isinstance(node, _OPENERS) and ast.get_docstring(node, clean=False) is not None:
                value = value[1:]  # noqa: PLW2901
            yield f"{name}="
            yield from _tree_text(value)
        yield ")"
