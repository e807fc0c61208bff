"""Stubs of servers against the sources of an installed vLLM or SGLang, and entry points in fresh processes.

The stubs record the names and signatures used by the adapters. A source is only parsed, because the import of a package
may need a GPU.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_stubs import SOURCES

try:
    import tomllib
except ImportError:  # Python 3.10
    tomllib = None

ROOT = Path(__file__).resolve().parents[2]
CHECKED = {"vllm": "0.33.0", "sglang": "0.5.23", "kernels": "0.17.0"}  # docs/serving.md names the versions


def members(tree: ast.Module | ast.ClassDef) -> dict[str, ast.AST]:
    """Return functions, classes and assigned names of a module or a class, also below `if`, and attributes of self."""
    nodes: dict[str, ast.AST] = {}

    def visit(node: ast.AST, in_method: bool) -> None:
        for child in ast.iter_child_nodes(node):
            is_function = isinstance(child, ast.FunctionDef)
            if not in_method and (is_function or isinstance(child, ast.ClassDef)):
                nodes.setdefault(child.name, child)
            if isinstance(child, ast.Assign | ast.AnnAssign):
                targets = child.targets if isinstance(child, ast.Assign) else [child.target]
                nodes.update((name, child) for target in targets for name in names_of(target, in_method))
            if not isinstance(child, ast.ClassDef) and (not is_function or isinstance(tree, ast.ClassDef)):
                visit(child, in_method or is_function)

    visit(tree, False)
    return nodes


def names_of(target: ast.AST, in_method: bool) -> Iterator[str]:
    """Yield the names bound by an assignment: variables, or in a method the attributes of self."""
    for node in ast.walk(target):
        if isinstance(node, ast.Name) and not in_method:
            yield node.id
        elif isinstance(node, ast.Attribute) and in_method and ast.unparse(node.value) == "self":
            yield node.attr


def parameters(function: ast.FunctionDef) -> list[str]:
    args = function.args
    return [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)]


def differences(stub: ast.Module | ast.ClassDef, source: ast.Module | ast.ClassDef, where: str) -> list[str]:
    """Return the names and parameters of a stub that the source lacks."""
    lines, actual = [], members(source)
    for name, node in members(stub).items():
        if name not in actual:
            inherits = isinstance(source, ast.ClassDef) and source.bases
            if not (name.startswith("__") and inherits):  # such as __members__ of an Enum
                lines.append(f"{where}.{name} is missing")
        elif isinstance(node, ast.ClassDef) and isinstance(actual[name], ast.ClassDef):
            lines += differences(node, actual[name], f"{where}.{name}")
        elif isinstance(node, ast.FunctionDef) and isinstance(actual[name], ast.FunctionDef):
            expected, found_names = parameters(node), parameters(actual[name])
            if found_names[: len(expected)] != expected:
                lines.append(f"{where}.{name} has parameters {found_names}, not {expected}")
    return lines


def source_of(module: str) -> str:
    """Return the source of a module of an installed package, or skip the test."""
    package = module.split(".", maxsplit=1)[0]
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.origin:
        pytest.skip(f"{package} is not installed (checked with {CHECKED[package]})")
    path = Path(spec.origin).parent.joinpath(*module.split(".")[1:])
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


@pytest.mark.parametrize("module", SOURCES)
def test_stubs_match_the_installed_package(module: str) -> None:
    assert not differences(ast.parse(SOURCES[module]), ast.parse(source_of(module)), module)


def test_differences_are_reported() -> None:
    stub = "class A:\n    x: int\n    def f(self, a, b): ...\ndef g(a): ...\nE = 1\n"
    source = "class A:\n    def __init__(self):\n        self.x = 1\n    def f(self, a, c): ...\nif True:\n    E = 2\n"
    lines = differences(ast.parse(stub), ast.parse(source), "m")
    assert lines == ["m.A.f has parameters ['self', 'a', 'c'], not ['self', 'a', 'b']", "m.g is missing"]


# ---- facts about the start of a server, in the sources ----


def test_sglang_loads_plugins_before_the_command_line_is_parsed() -> None:
    launch, serve = source_of("sglang.launch_server"), source_of("sglang.cli.serve")
    main = launch[launch.index('if __name__ == "__main__"') :]
    assert main.index("load_plugins()") < main.index("prepare_server_args(")
    assert "backend.run(request)" in serve[serve.index("    load_plugins()") :]


def test_vllm_loads_plugins_before_the_command_line_is_parsed() -> None:
    text = source_of("vllm.engine.arg_utils")
    body = text[text.index("class AsyncEngineArgs") :]
    assert body.index("load_general_plugins()") < body.index("EngineArgs.add_cli_args(parser)")
    assert "AttentionBackendEnum[value.upper()]" in source_of("vllm.config.attention")


@pytest.mark.parametrize("package", ["vllm", "sglang"])
def test_pins_of_servers_allow_this_package(package: str) -> None:
    """Check the pins of apache-tvm-ffi and torch of both programs."""
    source_of(package)
    requirements = pytest.importorskip("packaging.requirements")
    pins = {}
    for text in importlib.metadata.requires(package) or ():
        requirement = requirements.Requirement(text)
        for specifier in requirement.specifier:
            if specifier.operator == "==" and requirement.marker is None:
                pins[requirement.name] = specifier.version
    text = (ROOT / "pyproject.toml").read_text()
    ours = [requirements.Requirement(x) for x in re.findall(r'"((?:torch|apache-tvm-ffi)>=[^"]*)"', text)]
    assert {x.name for x in ours} == {"torch", "apache-tvm-ffi"} <= set(pins)
    assert all(pins[x.name] in x.specifier for x in ours)


# ---- entry points ----

LOAD = """
import importlib.metadata, sys
from importlib.metadata import EntryPoint
value = dict(
    vllm=("vllm.general_plugins", "torch_flashplug._autoload:register_vllm"),
    sglang=("sglang.srt.plugins", "torch_flashplug._autoload:register_sglang"),
)[sys.argv[1]]
real = importlib.metadata.entry_points
def entry_points(**kw):
    return [EntryPoint("flashplug", value[1], value[0])] if kw.get("group") == value[0] else real(**kw)
importlib.metadata.entry_points = entry_points
"""
STATE = """
package = sys.modules.get("torch_flashplug")
state = "absent" if package is None else "active" if hasattr(package, "enable") else "inert"
"""
VLLM = """
from vllm import plugins
from vllm.v1.attention.backends import registry
plugins.load_general_plugins()
plugins.plugins_loaded = False
plugins.load_general_plugins()
assert list(registry.AttentionBackendEnum.__members__).count("FLASHPLUG") == 1
member = registry.AttentionBackendEnum.__members__["FLASHPLUG"]
assert (member.get_path() if hasattr(member, "get_path") else member) == "torch_flashplug.integrations.vllm.Backend"
"""
SGLANG = """
from sglang.srt import plugins
from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
plugins.load_plugins()
plugins._plugins_loaded = False
plugins.load_plugins()
assert ATTENTION_BACKEND_CHOICES.count("flashplug") == 1
try:
    ATTENTION_BACKENDS["flashplug"](None)
except AttributeError as error:
    assert "use_mla_backend" in str(error), error
"""


def run_python(code: str, server: str, source: str, **environment: str) -> str:
    """Run code in a process where the entry point of the package is the only plugin, and return the printed text."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_FLASHPLUG")}
    env["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(ROOT / "test" / "helpers"), os.environ.get("PYTHONPATH", "")))
    stubs = "import server_stubs\nserver_stubs.install()\n" if source == "stubs" else ""
    command = [sys.executable, "-c", stubs + LOAD + code, server]
    done = subprocess.run(command, env=env | environment, capture_output=True, text=True, timeout=300, check=False)
    if source == "installed" and "Error: No module named" in done.stderr:
        pytest.skip(f"{server} cannot be imported here: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize("source", ["stubs", "installed"])
@pytest.mark.parametrize(("server", "code"), [("vllm", VLLM), ("sglang", SGLANG)])
def test_entry_points_register_a_name_once(server: str, code: str, source: str) -> None:
    if source == "installed":
        source_of(server)
    assert run_python(code + "print('registered')", server, source) == "registered"


@pytest.mark.parametrize(
    ("before", "expected"),
    [("", "absent"), ("import torch_flashplug", "active")],
    ids=["alone", "after import"],
)
def test_entry_points_do_not_activate_the_plugin(before: str, expected: str) -> None:
    """A server process that never uses the package keeps stock attention; an active package stays active."""
    code = f"{before}\nfrom vllm import plugins\nplugins.load_general_plugins()\n{STATE}"
    code += "import torch_flashplug\nassert hasattr(torch_flashplug, 'enable')\nprint(state)"
    assert run_python(code, "vllm", "stubs") == expected


def test_plugins_of_other_packages_import_a_complete_package(tmp_path: Path) -> None:
    (tmp_path / "their_plugin.py").write_text("import torch_flashplug\nfunction = torch_flashplug.attention\n")
    code = f"""
sys.path.insert(0, {str(tmp_path)!r})
EntryPoint("theirs", "their_plugin:function", "vllm.general_plugins").load()
"""
    assert run_python(f"{code}{STATE}print(state)", "vllm", "stubs") == "active"


def test_entry_points_of_the_project_name_functions() -> None:
    if tomllib is None:
        pytest.skip("tomllib needs Python 3.11")
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    from torch_flashplug import _autoload

    for group, function in (("vllm.general_plugins", "register_vllm"), ("sglang.srt.plugins", "register_sglang")):
        assert groups[group] == {"flashplug": f"torch_flashplug._autoload:{function}"}
        assert callable(getattr(_autoload, function))
