"""The benchmark's names: calls, suites, who takes part, and the page that says how to run them. Nothing is timed."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from functools import wraps
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))

pytest.importorskip("rich")

import bench  # noqa: E402
import providers  # noqa: E402
import records  # noqa: E402
import ring_plan  # noqa: E402
import workloads  # noqa: E402

MEASURING = [ROOT / "tools" / f"{name}.py" for name in ("bench", "decode", "harness")]
ELSEWHERE = {"gate": "tools/gate.py"}  # lists of calls that no suite times
FUNCTIONS = {
    name: function for name, function in inspect.getmembers(workloads, inspect.isfunction)
    if function.__module__ == "workloads" and not name.startswith("_")
}  # fmt: skip
LISTS = {name for name, function in FUNCTIONS.items() if inspect.get_annotations(function)["return"] == "list[Case]"}


class Asked:
    """A benchmark that notes which cases a suite has, and takes none."""

    def __init__(self) -> None:
        self.cases: list[str] = []

    def take(self, name: str) -> bool:
        self.cases.append(name)
        return False


@pytest.fixture(scope="module")
def asked() -> dict[str, tuple[list[str], set[str]]]:
    """Of each suite its cases, and which lists of workloads.py they are of."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        made: set[str] = set()

        def noting(name: str):
            known = getattr(workloads, name)

            @wraps(known)
            def function(*args, **kwargs):
                made.add(name)
                return known(*args, **kwargs)

            return function

        for name in LISTS:
            patch.setattr(workloads, name, noting(name))
        for suite, run in bench.SUITES.items():
            made.clear()
            run(one := Asked())
            found[suite] = one.cases, set(made)
    return found


def test_every_list_of_calls_is_timed(asked):
    timed = set().union(*(made for _, made in asked.values()))
    assert timed | set(ELSEWHERE) == LISTS and not timed & set(ELSEWHERE)
    for name, path in ELSEWHERE.items():
        assert f"workloads.{name}()" in (ROOT / path).read_text()
    assert {call.name for call in workloads.EVERYDAY} <= set(asked["host"][0])


def test_every_function_of_workloads_is_used():
    used = {
        node.attr for path in (ROOT / "tools").glob("*.py") for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "workloads"
    }  # fmt: skip
    assert set(FUNCTIONS) <= used and all(hasattr(workloads, name) for name in used)


@pytest.mark.parametrize("suite", bench.SUITES)
def test_a_case_has_its_name_once(suite, asked):
    """Rows and --filter go by it; gradients of a case may come again, behind all forwards."""
    cases, _ = asked[suite]
    times = {cases.count(name) for name in cases}
    assert times == ({2} if suite == "odd" else {1})


def groups(path: Path) -> Iterator[set[str]]:
    """Sets, tuples and lists of names."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Set | ast.Tuple | ast.List):
            yield {one.value for one in node.elts if isinstance(one, ast.Constant)}


def test_who_takes_part_is_known():
    """By the rows of providers.py, all of which somebody times."""
    names = set(providers.labels())
    by_default, by_name = (set().union(*providers.providers(wanted)) for wanted in (None, names))
    assert by_name == names == by_default.union(*bench.WANTED.values())
    assert set(bench.WANTED) <= set(bench.SUITES) and providers.SLOW | providers.FORWARD_ONLY <= names
    assert set(records.OURS) == set(providers.OURS)
    for path in MEASURING:
        assert set(re.findall(r'"(ours_(?!ms")\w+)"', path.read_text())) <= names
        for group in groups(path):
            assert group <= names or not group & names, f"{path.name}: {group - names} not in tools/providers.py"


def test_the_page_has_every_suite():
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    described = dict(re.findall(r"^python tools/bench\.py --suite (\w+)\b.* # (.+)$", page, re.MULTILINE))
    assert list(described) == list(bench.SUITES) and all(described.values())
    assert set(re.findall(r"--suite (\w+)", (ROOT / "docs" / "gpu.md").read_text())) <= set(bench.SUITES)
    helped = re.findall(r"^    --suite (\w+)(?: \| (\w+))?  ", bench.__doc__, re.MULTILINE)
    assert [name for names in helped for name in names if name] == list(bench.SUITES)


def test_kept_results_are_of_suites_that_there_are():
    kept = {records.read(path).get("suite") for path in (ROOT / "tools" / "results").glob("*.json")}
    assert kept - {"fuzz", "programs", "gate"} == set(bench.SUITES)


def test_the_paper_plan():
    """The page has what the arithmetic says."""
    page = (ROOT / "docs" / "several_gpus.md").read_text()
    assert "\n".join(ring_plan.table()) in page
    for link in (ring_plan.NVLINK, ring_plan.NETWORK):
        assert f" {ring_plan.hidden_from(link)}" in page.replace("\n", " ")
