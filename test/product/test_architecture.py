"""Rules that hold the code in shape: who imports whom, how long things may be, where names may appear, what the
pages say of the files.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from torch_flashplug import env
from torch_flashplug.registry import features, kernel_spec

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "torch_flashplug"
SOURCE_FOLDERS = ("src", "torch_flashplug", "test", "tools")
TEST_FOLDERS = ("plan", "kernels", "torch", "product")
PAGES = ("README.md", "tools/results/LOG.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
TEXT = {".py", ".cpp", ".h", ".c", ".md", ".toml", ".txt", ".yml", ".json", ""}

# A module may import those to the right of it, never back. A package name stands for its modules, which may import
# each other.
ORDER = (
    *("__main__", "demo", "warmup", "what_if", "check", "inventory", "_autoload", "__init__", "explained_varlen"),
    *("interpreted", "explained", "api", "_start", "model_config", "config_classes", "kernel_sets"),
    *("composite", "repair"),
    *("integrations",),
    *("flash_attn", "attention", "listed", "plans"),
    *("sequences", "operands", "causal_bias", "problem", "tracing", "paged", "windowed", "block_sparse"),
    *("ops", "cached", "up_calls", "overrides", "recomputation"),
    *("packs", "doors", "native", "library", "rows", "codegen", "kernels", "reference"),
    *("block_masks", "digested", "dropped", "lists", "words", "testing", "quantised", "env", "choices"),
    *("rescues", "configs", "blocks", "spec"),
    *("families", "elements", "features", "arguments", "recipes"),
)
COMPOSED = {"backward_split.py": {"dq_sm90", "dkdv_sm90"}}  # one call that launches kernels of two files
STDLIB_ONLY = {
    *("env", "spec", "configs", "choices", "rescues", "recipes", "families", "elements", "features", "arguments"),
}
NO_TORCH = {
    *STDLIB_ONLY,
    "kernel_sets",
    "model_config",
    "config_classes",
    "native",
    "library",
    "packs",
    "rows",
    "up_calls",
    "codegen",
    "kernels",
    "__main__",
}
CUTLASS = {"codegen", "kernels"}
LAZY = {"kernels": {"codegen"}}  # imported inside functions only, and only there
# Parts that others are made of.
BELOW = {
    *("arguments.operands", "cache8", "digest", "element", "fragments", "listed", "packed", "pieces", "quantise"),
    *("ragged", "rotate", "scaled", "scheduler", "scores", "scratch", "sm80", "sm90", "softmax", "stored", "walk"),
    "window",
}

# Which seams import.
PARTS_OF_FEATURES = {part.rpartition(".")[0] for one in features.FEATURES for part in (one.part, one.decode)}

MAX_LINES = 800
MAX_FUNCTION, MAX_KERNEL_FUNCTION = 120, 90
MAX_PARAMETERS, MAX_BOOLS = 10, 3
# "path" or "path:function" -> why it must break a ceiling
EXCUSED: dict[str, str] = {
    **{
        f"torch_flashplug/kernels/parts/arguments/{kind}.py:__call__": "a kernel's ABI: TVM-FFI takes no structs"
        for kind in ("forward", "decode", "backward", "dbias", "tilebwd")
    },
    "test/trials.py:__call__": "the same, and one more",
    **{f"torch_flashplug/torch_hooks/distributed/ring_merge_triton.py:{x}": "Triton takes no structs" for x in ("_merge", "_add")},
    "torch_flashplug/api/attention.py:attention": "one function for what others have three for, by the field's names",
    "torch_flashplug/api/varlen_plan.py:plan": "as many of the same arguments as lists depend on",
    **{
        f"torch_flashplug/flash_attn.py:{name}": "another package's arguments"
        for name in ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")
    },
}

# Where words of one concern may appear: pattern -> files.
HOMES = {
    r"_ZN[0-9K]": {"src/stock/torch_symbols.cpp", "src/stock/stock_kernels.cpp", "src/core/errors.cpp"},
    r"DLTensor|TVMFFIAny": {"src/launch/kernel_args.h", "src/launch/kernel_args.cpp", "src/launch/launch.cpp"},
    r"\bgetenv\b": set(),
}
ENVIRON_HOMES = {
    "torch_flashplug/env.py": "the flags",
    "torch_flashplug/codegen/compiler.py": "tells the DSL its target architecture",
}


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def files_on_disk() -> list[str]:
    """Every source file, relative to the root; results and build products left out."""
    found = []
    for folder in SOURCE_FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            relative = path.relative_to(ROOT).as_posix()
            skip = "__pycache__" in relative or relative.startswith("tools/results") or path.suffix in {".so", ".pyc"}
            if path.is_file() and not skip and not re.fullmatch(r"torch_flashplug/flashplug_\w+\.json", relative):
                found.append(relative)
    return found


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def module_of(path: Path) -> str:
    """First name under the package: "demo" for demo/model.py, "__init__" for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def imports(path: Path) -> Iterator[tuple[str, bool, bool]]:
    """(absolute dotted name, lazily, for types only) of every import in a file."""
    package = ("torch_flashplug", *path.relative_to(PACKAGE).parent.parts)
    tree = tree_of(path)
    lazy = {
        id(node) for function in ast.walk(tree) if isinstance(function, ast.FunctionDef) for node in ast.walk(function)
    }
    guarded = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.dump(branch.test)
        for node in ast.walk(branch)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            stem = ".".join((*base, *([node.module] if node.module else [])))
            names = [f"{stem}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            yield name, id(node) in lazy, id(node) in guarded


def own(name: str) -> str | None:
    """Module of ours that an absolute import names; "__init__" for names of the package itself."""
    first, *rest = name.split(".")
    if first != "torch_flashplug":
        return None
    return rest[0] if rest and rest[0] in ORDER else "__init__"


def test_every_module_has_its_place_in_the_order():
    modules = {module_of(path) for path in python_files("torch_flashplug")}
    assert modules == set(ORDER)


@pytest.mark.parametrize("path", python_files("torch_flashplug"), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_imports_point_one_way(path):
    here = module_of(path)
    for name, lazy, types_only in imports(path):
        there = own(name)
        if there is not None and there != here and not types_only:
            assert ORDER.index(here) < ORDER.index(there), f"{here} imports {there}, which stands above it"
            if there in LAZY:
                assert lazy and here in LAZY[there], f"{there} is imported lazily, by {LAZY[there]} alone"
        top = name.split(".")[0]
        if top == "cutlass":
            assert here in CUTLASS and (lazy or here == "kernels"), "only codegen (lazily) and kernels know the DSL"
        if top == "torch":
            assert here not in NO_TORCH, f"{here} works without torch"
        if here in STDLIB_ONLY and there is None:
            assert top in sys.stdlib_module_names, f"{here} imports {top}; it is standard library only"


def test_kernels_know_only_parts_and_parts_only_what_all_share():
    for path in python_files("torch_flashplug/kernels"):
        inside = path.relative_to(PACKAGE / "kernels").parts
        for name, _, _ in imports(path):
            if not name.startswith("torch_flashplug.kernels."):
                continue
            target = name.removeprefix("torch_flashplug.kernels.").split(".")
            if inside[0] == "parts":
                what = ".".join(inside[1:]).removesuffix(".py")
                below = {*BELOW, "seams"} if what in PARTS_OF_FEATURES else BELOW
                known = any(f"{'.'.join(target[1:])}.".startswith(f"{part}.") for part in below)
                assert target[0] == "parts" and known, (
                    f"{inside}: a part imports only spec and {', '.join(sorted(BELOW))}, not {target}"
                )
            elif inside != ("__init__.py",):
                known = target[0] == "parts" or target[0] in COMPOSED.get(inside[0], ())
                assert known, f"{inside}: kernels never import each other ({target})"


# What a kernel file must not know by name: stages, walks and pieces do.
FEATURES = r"\b(causal|window|band|bits|bias|dropout|softcap|sinks?|ragged|paged|listed|mask)\b"


def test_kernel_files_name_no_feature():
    for path in sorted((PACKAGE / "kernels").glob("*_sm*.py")):
        tree = tree_of(path)
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        names |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and type(node.value) is str}
        docstrings = {ast.get_docstring(node, clean=False) for node in ast.walk(tree)
                      if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))}  # fmt: skip
        found = {name for name in names - docstrings if re.search(FEATURES, name.lower().replace("_", " "))}
        assert not found, f"{path.name} names a feature: {found}; ask the walk, the chain or the piece"


def test_kernels_pass_structs_and_no_bare_tuples():
    for path in python_files("torch_flashplug/kernels"):
        tree = tree_of(path)
        notes = [node.annotation for node in ast.walk(tree) if isinstance(node, (ast.arg, ast.AnnAssign))]
        bare = [note.lineno for note in notes if note is not None and "tuple" in ast.unparse(note).split(" | ")]
        assert not bare, f"{path.name}, lines {bare}: say what is in the tuple, or make it a dataclass"


def code_of(path: Path) -> list[str]:
    """Lines that do something: imports, comments and lone punctuation left out."""
    lines = (line.strip() for line in path.read_text().splitlines())
    return [line for line in lines if re.search(r"\w", line) and not re.match(r"#|import |from ", line)]


def test_families_look_alike_nowhere():
    """What Hopper's kernels and those for every GPU since sm_80 have in common stands in parts, once."""
    run = 6  # lines
    families = [
        {tuple(code[i : i + run]): path.name for path in sorted((PACKAGE / "kernels").rglob(f"*sm{arch}.py"))
         for code in (code_of(path),) for i in range(len(code) - run + 1)}
        for arch in (80, 90)
    ]  # fmt: skip
    assert all(len(runs) > 100 for runs in families)
    twins = {(families[0][lines], families[1][lines]): lines for lines in families[0].keys() & families[1].keys()}
    assert not twins, f"these stand in both families; move them to parts: {twins}"


def test_nothing_imports_tools_or_tests():
    for path in python_files("torch_flashplug"):
        assert not [name for name, _, _ in imports(path) if name.split(".")[0] in {"tools", "test", "tests"}]


def test_import_brings_neither_the_compiler_nor_sympy():
    """Sympy alone would make our import take twice as long; torch imports it where it is needed."""
    unwanted = {"cutlass", "tvm_ffi", "rich", "matplotlib", "sympy"}
    code = "import sys, torch; before = set(sys.modules); import torch_flashplug; "
    code += f"bad = {unwanted} & (set(sys.modules) - before); assert not bad, bad"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ---- ceilings ----


@pytest.mark.parametrize("name", files_on_disk())
def test_file_length(name):
    lines = len((ROOT / name).read_text().splitlines())
    assert lines <= MAX_LINES, f"{name}: {lines} lines, at most {MAX_LINES}; split it by concern"


def functions(path: Path) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("path", python_files(*SOURCE_FOLDERS[1:]), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_function_size(path):
    name = path.relative_to(ROOT).as_posix()
    limit = MAX_KERNEL_FUNCTION if "/kernels/" in name else MAX_FUNCTION
    for function in functions(path):
        if f"{name}:{function.name}" in EXCUSED:
            continue
        where = f"{name}:{function.lineno} {function.name}"
        lines = (function.end_lineno or function.lineno) - function.lineno + 1
        assert lines <= limit, f"{where}: {lines} lines, at most {limit}"
        arguments = function.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        named = [argument for argument in named if argument.arg not in {"self", "cls"}]
        assert len(named) <= MAX_PARAMETERS, (
            f"{where}: {len(named)} parameters, at most {MAX_PARAMETERS}; pass a struct"
        )
        bools = [a for a in named if isinstance(a.annotation, ast.Name) and a.annotation.id == "bool"]
        assert len(bools) <= MAX_BOOLS, f"{where}: {len(bools)} bool parameters, at most {MAX_BOOLS}"


@pytest.mark.parametrize("path", python_files(*SOURCE_FOLDERS[1:]), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_module_says_what_it_owns(path):
    assert ast.get_docstring(tree_of(path)), "a module starts with what it owns"


# ---- words and their homes ----

# What kernels and the host count in alike: file and name there -> its value in kernel_spec.py.
SHARED_NUMBERS = {
    ("scratch", "UNITS"): "SCRATCH_UNITS",
    ("combine", "AT_ONCE"): "PEERS_AT_ONCE",
}


@pytest.mark.parametrize("where", SHARED_NUMBERS, ids="-".join)
def test_numbers_that_kernels_and_host_share(where):
    part, name = where
    values = [
        node.value.value
        for node in tree_of(PACKAGE / "kernels" / "parts" / f"{part}.py").body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
    ]
    assert values == [getattr(kernel_spec, SHARED_NUMBERS[where])]


@pytest.mark.parametrize("pattern", HOMES)
def test_words_stay_at_home(pattern):
    found = {
        name for name in files_on_disk() if name.startswith("src/") and re.search(pattern, (ROOT / name).read_text())
    }
    assert found <= HOMES[pattern]


def test_environment_is_read_in_one_place():
    for path in python_files("torch_flashplug"):
        name = path.relative_to(ROOT).as_posix()
        if name in ENVIRON_HOMES:
            continue
        for node in ast.walk(tree_of(path)):
            reads = isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}
            assert not reads, f"{name}:{node.lineno} reads the environment; only env.py does"
            flag = (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and re.fullmatch(r"TORCH_FLASHPLUG\w*", node.value)
            )
            assert not flag, f"{name}:{node.lineno} names an environment flag; take it from env.py"


def test_each_environment_flag_is_read():
    """By a module, or by a function of env.py that one calls."""
    home = PACKAGE / "env.py"
    others = "\n".join(path.read_text() for path in python_files("torch_flashplug") if path != home)
    readers = {one.name: ast.unparse(one) for one in functions(home) if one.name != "check"}  # it reads all
    assert [flag for flag in vars(env).values() if isinstance(flag, env.Flag)] == list(env.FLAGS)
    for name in [name for name, flag in vars(env).items() if isinstance(flag, env.Flag)]:
        read = re.compile(rf"\b{name}\.(get|is_on|count)\(")
        called = [reader for reader, code in readers.items() if read.search(code) and f"env.{reader}()" in others]
        assert called or read.search(others), f"nothing reads {name}"


def _tracked_text() -> Iterator[tuple[str, str]]:
    for name in [*files_on_disk(), *PAGES, "CMakeLists.txt", "pyproject.toml", ".ci/run"]:
        path = ROOT / name
        if path.is_file() and path.suffix in TEXT:
            yield name, path.read_bytes().decode("utf-8")


def test_text_is_ascii_and_names_no_machine():
    places = re.compile("|".join((r"/wor" + r"k/", r"/roo" + r"t/", r"/hom" + r"e/\w", r"\.pyen" + "v")))
    for name, text in _tracked_text():
        assert text.isascii(), f"{name}: {[c for c in text if not c.isascii()][:5]}"
        assert not (found := places.search(text)), f"{name} names a place on one machine: {found}"


# ---- what the pages say ----


def section(page: str, heading: str) -> str:
    return (ROOT / page).read_text().split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


def rows_of_table(page: str, heading: str) -> list[list[str]]:
    """Cells of the table rows in a section, header and rule left out."""
    lines = [line for line in section(page, heading).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines][2:]


def test_the_map_is_the_files_on_disk():
    entries = section("docs/developing.md", "Where things are").split("\n- ")[1:]
    mapped = {path for entry in entries for path in re.findall(r"`([^`]+)`", entry.split(": ", 1)[0])}
    missing = [path for path in mapped if not (ROOT / path).exists()]
    assert not missing, f"the map names what does not exist: {missing}"
    folders = tuple(path for path in mapped if path.endswith("/"))
    unmapped = [name for name in files_on_disk() if name not in mapped and not name.startswith(folders)]
    assert not unmapped, f"the map of docs/developing.md lacks {unmapped}"


def test_readme_environment_is_env_py():
    said = {row[0].strip("`"): row[1:] for row in rows_of_table("README.md", "Environment")}
    assert list(said) == [flag.name for flag in env.FLAGS]
    for flag in env.FLAGS:
        default, text = said[flag.name]
        assert (default.strip("`"), text.replace("`", "")) == (flag.default or "-", flag.help.replace("`", ""))


def test_tests_lie_in_folders_by_concern():
    """What several of them share lies above."""
    for path in (ROOT / "test").rglob("*.py"):
        assert path.name.startswith("test_") == (path.parent.name in TEST_FOLDERS), path
    names = [path.name for path in (ROOT / "test").rglob("test_*.py")]
    assert len(names) == len(set(names))
