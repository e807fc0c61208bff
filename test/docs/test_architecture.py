"""Rules for the shape of the code: import directions, length limits, allowed places of names, and pages about files."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from torch_flashplug import env
from torch_flashplug.registry import kernel_spec
from torch_flashplug.registry.architectures import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "torch_flashplug"
SOURCE_FOLDERS = ("src", "torch_flashplug", "test", "tools")
TEST_ROOT = {"conftest.py", "ceilings.py", "nightly.py"}  # files beside the folders of tests
PAGES = ("README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")))
TEXT = {".py", ".cpp", ".h", ".c", ".md", ".toml", ".txt", ".yml", ".json", ""}

# Layers from top to bottom: a module imports from its own folder and from rows below its own row, never from above.
LAYERS = (
    ("__main__",),
    ("cli", "demo"),
    ("testing",),
    ("__init__", "_autoload"),
    ("integrations",),
    ("flash_attn",),
    ("api",),
    ("torch_hooks",),
    ("ops",),
    ("dispatch",),
    ("codegen",),
    ("kernels",),
    ("registry",),
    ("deprecation", "env", "version"),
)
KERNEL_FILES = tuple(f"sm{family.arch}" for family in FAMILIES)  # folders of kernels; no kernel imports a second one
# Layers inside of kernels/, with the rule of LAYERS.
KERNEL_LAYERS = (
    ("__init__",),
    KERNEL_FILES,
    ("features",),
    ("preprocess", "mainloop", "backward", "decode"),
    ("score_stages",),
    ("tiling", "call_args"),
    ("primitives",),
)
COMPOSED = {  # calls that launch kernels of two files, or a kernel with the launches and roles of another
    "sm90/backward_96_keys.py": {"backward"},
    "sm90/backward_split.py": {"backward_dq", "backward_dkdv"},
    "sm90/backward_wide.py": {"backward_wide_dq", "backward_wide_dkdv"},
    "sm90/decode_shared.py": {"decode"},
}
STDLIB_ONLY = {"deprecation", "env", "version", "registry"}
NO_TORCH = {*STDLIB_ONLY, "dispatch", "codegen", "kernels", "__main__"}
TORCHLESS_VERBS = {"cli/model_config.py", "cli/config_classes.py"}
CUTLASS = {"codegen", "kernels"}
LAZY = {"kernels": {"codegen"}}  # imported inside functions only, and only in these folders

MAX_LINES = 800
MAX_FUNCTION = 120
MAX_PARAMETERS, MAX_BOOLS = 10, 3
# "path" or "path:function" -> why it must break a ceiling
EXCUSED: dict[str, str] = {
    **{
        f"torch_flashplug/torch_hooks/distributed/ring_merge_triton.py:{x}": "Triton takes no structs"
        for x in ("_merge", "_add")
    },
    "torch_flashplug/api/attention.py:attention": "one function for what others have three for, by the field's names",
    "torch_flashplug/integrations/vllm.py:__init__": "vLLM's arguments",
    "torch_flashplug/api/varlen_plan.py:plan_varlen": "as many of the same arguments as lists depend on",
    **{
        f"torch_flashplug/flash_attn.py:{name}": "another package's arguments"
        for name in ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")
    },
}

# Files in which words of one concern may appear: pattern -> files.
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
    """Return every source file, relative to the root, without results and build products."""
    names = []
    for folder in SOURCE_FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            relative = path.relative_to(ROOT).as_posix()
            skip = "__pycache__" in relative or relative.startswith("tools/results") or path.suffix in {".so", ".pyc"}
            if path.is_file() and not skip and not re.fullmatch(r"torch_flashplug/flashplug_\w+\.json", relative):
                names.append(relative)
    return names


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def module_of(path: Path) -> str:
    """Return the first name under the package: "demo" for demo/model.py, "__init__" for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def imports(path: Path) -> Iterator[tuple[str, bool, bool]]:
    """Yield (absolute dotted name, is lazy, is for types only) for every import in a file."""
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


def package_part(name: str) -> str | None:
    """Return the folder or module of the package named by an absolute import; "__init__" for the package itself."""
    first, *rest = name.split(".")
    if first != "torch_flashplug":
        return None
    return rest[0] if rest and (rest[0] in row_of(LAYERS) and rest[0] != "__init__") else "__init__"


def row_of(layers: tuple[tuple[str, ...], ...]) -> dict[str, int]:
    """Return the row of each folder or module; 0 is the top."""
    return {name: row for row, names in enumerate(layers) for name in names}


def test_every_folder_has_a_layer():
    assert {module_of(path) for path in python_files("torch_flashplug")} == set(row_of(LAYERS))
    inside = {
        path.relative_to(PACKAGE / "kernels").with_suffix("").parts[0]
        for path in python_files("torch_flashplug/kernels")
    }
    assert inside == set(row_of(KERNEL_LAYERS))


@pytest.mark.parametrize("path", python_files("torch_flashplug"), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_imports_point_down(path):
    home, rows = module_of(path), row_of(LAYERS)
    for name, lazy, types_only in imports(path):
        target = package_part(name)
        if target is not None and target != home and not types_only:
            assert rows[home] < rows[target], f"{home} imports {target}, which is in the same layer or above"
            if target in LAZY:
                assert lazy and home in LAZY[target], f"{target} is imported lazily, by {LAZY[target]} alone"
        top = name.split(".")[0]
        if top == "cutlass":
            assert home in CUTLASS and (lazy or home == "kernels"), "only codegen (lazily) and kernels import the DSL"
        if top == "torch":
            verb = path.relative_to(PACKAGE).as_posix()
            assert home not in NO_TORCH and verb not in TORCHLESS_VERBS, f"{verb} must work without torch"
        if home in STDLIB_ONLY and target is None:
            assert top in sys.stdlib_module_names, f"{home} imports {top}; it is standard library only"


def test_imports_inside_of_kernels_point_down():
    rows = row_of(KERNEL_LAYERS)
    for path in python_files("torch_flashplug/kernels"):
        inside = path.relative_to(PACKAGE / "kernels")
        home = inside.with_suffix("").parts[0]
        for name, _, types_only in imports(path):
            if not name.startswith("torch_flashplug.kernels.") or types_only:
                continue
            folder, *rest = name.removeprefix("torch_flashplug.kernels.").split(".")
            if folder != home:
                assert rows[home] < rows[folder], f"{inside} imports {folder}, which is in the same layer or above"
            elif home in KERNEL_FILES:
                allowed = ("common", *COMPOSED.get(inside.as_posix(), ()))  # common.py contains no kernel
                assert rest[0] in allowed, f"{inside} imports another kernel: {name}"


def test_imports_have_no_cycle():
    """Imports inside of a folder, or inside of a function, count too."""
    modules = {}
    for path in python_files("torch_flashplug"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph = {}
    for module, path in modules.items():
        names = {name for name, _, types_only in imports(path) if not types_only}
        graph[module] = {name if name in modules else name.rpartition(".")[0] for name in names} & modules.keys() - {
            module
        }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"these modules import each other: {' -> '.join(error.args[1])}")


INTERFACE = {"may_mask"}  # names of methods of score stages and block iterators
# Words that a kernel file must not use, because stages, block iterators and tile addressing handle features.
FEATURES = r"\b(causal|window|band|bits|bias|dropout|softcap|sinks?|ragged|paged|listed|mask)\b"


def test_kernel_files_name_no_feature():
    for path in python_files(*(f"torch_flashplug/kernels/{folder}" for folder in KERNEL_FILES)):
        tree = tree_of(path)
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        names |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and type(node.value) is str}
        docstrings = {ast.get_docstring(node, clean=False) for node in ast.walk(tree)
                      if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))}  # fmt: skip
        feature_names = {
            name for name in names - docstrings - INTERFACE if re.search(FEATURES, name.lower().replace("_", " "))
        }
        assert not feature_names, (
            f"{path.name} names a feature: {feature_names}; ask the block iterator, the score pipeline or the tile "
            "addressing"
        )


# Functions with parameters of torch's protocols, which pass tuples: autograd functions and overrides of tensors.
_PROTOCOL_PARAMETERS = {"inputs", "output", "args"}


def test_host_code_packs_no_parameters_into_tuples() -> None:
    """Forbid parameters of the bare type `tuple`, and slices of parameters that hold several settings."""
    for path in [*python_files("torch_flashplug/api", "torch_flashplug/ops"), PACKAGE / "flash_attn.py"]:
        bare, slices = [], []
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.arg) and node.annotation is not None and node.arg not in _PROTOCOL_PARAMETERS:
                bare += [node.lineno] * ("tuple" in ast.unparse(node.annotation).split(" | "))
            if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
                slices += [node.lineno] * (ast.unparse(node.value) in {"params", "settings"})
        assert not bare, f"{path.name}, lines {bare}: name the values in a dataclass, such as AttentionParams"
        assert not slices, f"{path.name}, lines {slices}: read the settings by name"


def test_kernels_pass_structs_and_no_bare_tuples():
    for path in python_files("torch_flashplug/kernels"):
        tree = tree_of(path)
        notes = [node.annotation for node in ast.walk(tree) if isinstance(node, (ast.arg, ast.AnnAssign))]
        bare = [note.lineno for note in notes if note is not None and "tuple" in ast.unparse(note).split(" | ")]
        assert not bare, f"{path.name}, lines {bare}: say what is in the tuple, or make it a dataclass"


def code_of(path: Path) -> list[str]:
    """Return the lines of code, without imports, comments and lines of punctuation."""
    lines = (line.strip() for line in path.read_text().splitlines())
    return [line for line in lines if re.search(r"\w", line) and not re.match(r"#|import |from ", line)]


def kernel_files_of(arch: int) -> list[Path]:
    """Return the kernels of an architecture, and its primitives."""
    kernels = PACKAGE / "kernels"
    return [*sorted((kernels / f"sm{arch}").glob("*.py")), kernels / "primitives" / f"sm{arch}.py"]


def test_kernel_families_share_no_duplicated_code():
    """Code shared by the kernels for Hopper and the kernels for sm_80 must exist only once, in parts."""
    num_lines = 6  # lines
    families = [
        {tuple(code[i : i + num_lines]): path.name for path in kernel_files_of(arch)
         for code in (code_of(path),) for i in range(len(code) - num_lines + 1)}
        for arch in (80, 90)
    ]  # fmt: skip
    assert all(len(runs) > 100 for runs in families)
    twins = {(families[0][lines], families[1][lines]): lines for lines in families[0].keys() & families[1].keys()}
    assert not twins, f"these stand in both families; move them to parts: {twins}"


def test_nothing_imports_tools_or_tests():
    for path in python_files("torch_flashplug"):
        assert not [name for name, _, _ in imports(path) if name.split(".")[0] in {"tools", "test", "tests"}]


def test_import_loads_neither_the_compiler_nor_sympy():
    """An import of sympy alone would double the import time of the plugin; torch imports sympy on demand."""
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
    for function in functions(path):
        if f"{name}:{function.name}" in EXCUSED:
            continue
        where = f"{name}:{function.lineno} {function.name}"
        lines = (function.end_lineno or function.lineno) - function.lineno + 1
        assert lines <= MAX_FUNCTION, f"{where}: {lines} lines, at most {MAX_FUNCTION}"
        arguments = function.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        named = [argument for argument in named if argument.arg not in {"self", "cls"}]
        assert len(named) <= MAX_PARAMETERS, (
            f"{where}: {len(named)} parameters, at most {MAX_PARAMETERS}; pass a struct"
        )
        bools = [a for a in named if isinstance(a.annotation, ast.Name) and a.annotation.id == "bool"]
        assert len(bools) <= MAX_BOOLS, f"{where}: {len(bools)} bool parameters, at most {MAX_BOOLS}"


@pytest.mark.parametrize("path", python_files(*SOURCE_FOLDERS[1:]), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_module_has_a_docstring(path):
    assert ast.get_docstring(tree_of(path)), "a module starts with what it owns"


# ---- words and their places ----

# Constants shared by kernels and the host: file and name in kernels/ -> name in kernel_spec.py.
SHARED_NUMBERS = {
    ("backward/workspace", "UNITS"): "WORKSPACE_UNITS",
    ("decode/split_kv", "AT_ONCE"): "PEERS_AT_ONCE",
}


@pytest.mark.parametrize("where", SHARED_NUMBERS, ids="-".join)
def test_constants_of_kernels_and_host_are_equal(where):
    part, name = where
    values = [
        node.value.value
        for node in tree_of(PACKAGE / "kernels" / f"{part}.py").body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
    ]
    assert values == [getattr(kernel_spec, SHARED_NUMBERS[where])]


@pytest.mark.parametrize("pattern", HOMES)
def test_restricted_words_appear_only_in_allowed_files(pattern):
    files = {
        name for name in files_on_disk() if name.startswith("src/") and re.search(pattern, (ROOT / name).read_text())
    }
    assert files <= HOMES[pattern]


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
    """A module must read the flag, or call a function of env.py that reads the flag."""
    home = PACKAGE / "env.py"
    other_sources = "\n".join(path.read_text() for path in python_files("torch_flashplug") if path != home)
    readers = {
        function.name: ast.unparse(function) for function in functions(home) if function.name != "check"
    }  # `check` reads all flags
    assert [flag for flag in vars(env).values() if isinstance(flag, env.Flag)] == list(env.FLAGS)
    for name in [name for name, flag in vars(env).items() if isinstance(flag, env.Flag)]:
        read = re.compile(rf"\b{name}\.(get|is_on|count)\(")
        called = [
            reader for reader, code in readers.items() if read.search(code) and f"env.{reader}()" in other_sources
        ]
        assert called or read.search(other_sources), f"nothing reads {name}"


def _tracked_text() -> Iterator[tuple[str, str]]:
    for name in [*files_on_disk(), *PAGES, "CMakeLists.txt", "pyproject.toml", ".ci/run"]:
        path = ROOT / name
        if path.is_file() and path.suffix in TEXT:
            yield name, path.read_bytes().decode("utf-8")


def test_text_is_ascii_and_names_no_machine():
    places = re.compile("|".join((r"/wor" + r"k/", r"/roo" + r"t/", r"/hom" + r"e/\w", r"\.pyen" + "v")))
    for name, text in _tracked_text():
        assert text.isascii(), f"{name}: {[c for c in text if not c.isascii()][:5]}"
        assert not (match := places.search(text)), f"{name} names a place on one machine: {match}"


# ---- pages about the files ----


def section(page: str, heading: str) -> str:
    return (ROOT / page).read_text().split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


def rows_of_table(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the table rows in a section, without header and rule."""
    lines = [line for line in section(page, heading).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines][2:]


FOLDERS = sorted({Path(name).parent for name in files_on_disk() if name.startswith("torch_flashplug/")})


@pytest.mark.parametrize("folder", FOLDERS[1:], ids=str)
def test_docstring_of_a_folder_lists_its_files(folder):
    text = ast.get_docstring(tree_of(ROOT / folder / "__init__.py"))
    inside = {path.name for path in (ROOT / folder).iterdir() if path.suffix in {".py", ".c"} or path.is_dir()}
    for name in inside - {"__init__.py", "__pycache__"}:
        assert re.search(rf"^- `{name.removesuffix('.py')}[`/]", text, re.M), (
            f"{folder}/__init__.py does not list {name}"
        )


def test_architecture_page_lists_the_folders_and_files():
    page = (ROOT / "docs" / "architecture.md").read_text()
    on_disk = {f"{Path(name).parent.as_posix()}/" for name in files_on_disk()}
    on_disk |= {name for name in files_on_disk() if name.startswith("src/")}
    on_disk |= {name for name in files_on_disk() if name.startswith("tools/") and name.count("/") == 1}
    on_disk = {name for name in on_disk if "data" not in name}
    named = set(re.findall(r"`([\w./]+)`", page))
    missing = sorted(on_disk - named - {"tools/results/"})
    assert not missing, f"docs/architecture.md lacks {missing}"
    gone = sorted(name for name in named if "/" in name and not name.startswith("aten") and not (ROOT / name).exists())
    assert not gone, f"docs/architecture.md names what does not exist: {gone}"


def test_texts_name_files_that_exist():
    """A path may start at the root, at the package or at a folder inside of it."""
    names = [*files_on_disk(), *PAGES, "docs/site_hooks.py"]
    names += [f"tools/results/{path.name}" for path in (ROOT / "tools/results").iterdir()]
    of_torch = re.compile(r"torch/|CMakeFiles/")
    for name, text in _tracked_text():
        for path in re.findall(r"(?<![\w./<*-])((?:\w+/)+\w+\.(?:py|cpp|h|c))\b", text):
            exists = any(file == path or file.endswith(f"/{path}") for file in names)
            assert exists or of_torch.match(path), f"{name} names {path}, which does not exist"


def test_readme_environment_is_env_py():
    rows_by_flag = {row[0].strip("`"): row[1:] for row in rows_of_table("README.md", "Environment")}
    assert list(rows_by_flag) == [flag.name for flag in env.FLAGS]
    for flag in env.FLAGS:
        default, text = rows_by_flag[flag.name]
        assert (default.strip("`"), text.replace("`", "")) == (flag.default or "-", flag.help.replace("`", ""))


def test_install_page_has_the_values_of_each_environment_variable():
    names = [row[0].strip("`") for row in rows_of_table("docs/install.md", "Environment variables")]
    assert names == [flag.name for flag in env.FLAGS]


def test_tests_and_helpers_are_in_separate_folders():
    """Modules shared by several test files must be in test/helpers/."""
    paths = list((ROOT / "test").rglob("*.py"))
    for path in paths:
        folder = path.parent.relative_to(ROOT / "test").as_posix()
        is_test = folder not in {".", "helpers"}
        assert path.name.startswith("test_") == is_test, path
        assert folder != "." or path.name in TEST_ROOT, path
    names = [path.name for path in paths]
    assert len(names) == len(set(names)), "pytest and the tables of nightly.py name files without their folder"
