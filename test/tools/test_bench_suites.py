"""Names in the benchmark: calls, suites, providers, and the page with the commands. Nothing is timed."""

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
sys.path.append(str(ROOT))

pytest.importorskip("rich")

from tools.bench import baselines, bench, result_schema, workloads  # noqa: E402

MEASURING_NAMES = ("bench", "runner", "suites/dense", "suites/decode", "suites/everyday", "suites/model_stack")
MEASURING = [ROOT / "tools" / "bench" / f"{name}.py" for name in MEASURING_NAMES]
UNMEASURED = {"largedims", "models", "pagedprefill"}  # suites without kept results so far
LISTS_WITHOUT_A_SUITE = {"gate": "tools/tune/split_heuristic.py"}  # lists of calls without a suite
FUNCTIONS = {
    name: function for name, function in inspect.getmembers(workloads, inspect.isfunction)
    if function.__module__ == workloads.__name__ and not name.startswith("_")
}  # fmt: skip
LISTS = {name for name, function in FUNCTIONS.items() if inspect.get_annotations(function)["return"] == "list[Case]"}


class RecordingBench:
    """Benchmark that records the cases of a suite and runs none."""

    device = "cuda"

    def __init__(self) -> None:
        self.cases: list[str] = []

    def take(self, name: str) -> bool:
        self.cases.append(name)
        return False


@pytest.fixture(scope="module")
def recorded_suites() -> dict[str, tuple[list[str], set[str]]]:
    """Return the cases of each suite, and the names of the used lists of workloads.py."""
    recorded = {}
    with pytest.MonkeyPatch.context() as patch:
        used_lists: set[str] = set()

        def recording(name: str):
            original = getattr(workloads, name)

            @wraps(original)
            def function(*args, **kwargs):
                used_lists.add(name)
                return original(*args, **kwargs)

            return function

        for name in LISTS:
            patch.setattr(workloads, name, recording(name))
        for suite, run in bench.SUITES.items():
            used_lists.clear()
            run(recorder := RecordingBench())
            recorded[suite] = recorder.cases, set(used_lists)
    return recorded


def test_every_list_of_calls_is_timed(recorded_suites):
    timed = set().union(*(used_lists for _, used_lists in recorded_suites.values()))
    assert timed | set(LISTS_WITHOUT_A_SUITE) == LISTS and not timed & set(LISTS_WITHOUT_A_SUITE)
    for name, path in LISTS_WITHOUT_A_SUITE.items():
        assert f"workloads.{name}()" in (ROOT / path).read_text()
    assert {call.name for call in workloads.EVERYDAY} <= set(recorded_suites["host"][0])


def test_every_function_of_workloads_is_used():
    used = {
        node.attr for path in (ROOT / "tools").rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "workloads"
    }  # fmt: skip
    assert set(FUNCTIONS) <= used and all(hasattr(workloads, name) for name in used)


@pytest.mark.parametrize("suite", bench.SUITES)
def test_case_names_are_unique(suite, recorded_suites):
    """Rows and --filter identify a case by name.

    In the suite `odd`, gradients repeat a name after all forwards.
    """
    cases, _ = recorded_suites[suite]
    times = {cases.count(name) for name in cases}
    assert times == ({2} if suite == "odd" else {1})


def name_groups(path: Path) -> Iterator[set[str]]:
    """Yield the names in each set, tuple and list."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Set | ast.Tuple | ast.List):
            yield {constant.value for constant in node.elts if isinstance(constant, ast.Constant)}


def test_every_provider_is_known():
    """Compare with the rows of baselines.py; each provider must be timed by a suite."""
    names = set(baselines.labels())
    by_default, by_name = (set().union(*baselines.providers(names_wanted)) for names_wanted in (None, names))
    assert by_name == names == by_default.union(*bench.SUITE_PROVIDERS.values())
    assert set(bench.SUITE_PROVIDERS) <= set(bench.SUITES) and baselines.SLOW | baselines.FORWARD_ONLY <= names
    assert set(result_schema.OURS) == set(baselines.OURS)
    for path in MEASURING:
        assert set(re.findall(r'"(ours_(?!ms")\w+)"', path.read_text())) <= names
        for group in name_groups(path):
            assert group <= names or not group & names, f"{path.name}: {group - names} not in tools/bench/baselines.py"


def test_benchmarks_page_lists_every_suite():
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    described = dict(re.findall(r"^python tools/bench/bench\.py --suite (\w+)\b.* # (.+)$", page, re.MULTILINE))
    assert list(described) == list(bench.SUITES) and all(described.values())
    assert set(re.findall(r"--suite (\w+)", (ROOT / "docs" / "gpu.md").read_text())) <= set(bench.SUITES)
    helped = re.findall(r"^    --suite (\w+)(?: \| (\w+))?  ", bench.__doc__, re.MULTILINE)
    assert [name for names in helped for name in names if name] == list(bench.SUITES)


def test_kept_results_belong_to_existing_suites():
    kept = {result_schema.read(path).get("suite") for path in (ROOT / "tools" / "results").glob("*.json")}
    kept = {bench.OLD_NAMES.get(suite, suite) for suite in kept}
    assert kept - {"fuzz", "programs", "gate"} == set(bench.SUITES) - UNMEASURED
    assert UNMEASURED <= set(bench.SUITES) and not set(bench.OLD_NAMES) & set(bench.SUITES)
