"""The ceilings on the time of tests (test/ceilings.py)."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import ceilings
import nightly
import pytest

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture
def plugin() -> ceilings.Ceilings:
    """Return the plugin on a machine as fast as the machine used to measure the ceilings."""
    ceilings_plugin = ceilings.Ceilings()
    ceilings_plugin.factor = 1.0
    return ceilings_plugin


def item(test: str = "test_one", file: str = "test_file.py") -> pytest.Item:
    return SimpleNamespace(path=Path(file), originalname=test, name=f"{test}[0]")


def test_slow_test_fails(plugin):
    plugin.check(item(), 4.9)
    with pytest.raises(pytest.fail.Exception, match=r"test_file.py::test_one took 5.1 s of CPU time, but 5.0 s"):
        plugin.check(item(), 5.1)


def test_slow_file_fails_once(plugin):
    plugin.of_files["test_file.py"] = 60.1
    with pytest.raises(pytest.fail.Exception, match=r"test_file.py took 60.1 s"):
        plugin.check(item(), 1.0)
    plugin.check(item(), 1.0)


def test_slow_test_does_not_change_the_time_of_the_file(plugin):
    plugin.of_files["test_file.py"] = 30.0
    with pytest.raises(pytest.fail.Exception):
        plugin.check(item(), 5.1)
    assert plugin.of_files["test_file.py"] == 30.0


def test_rows_of_the_table_replace_the_usual_ceiling(plugin, monkeypatch):
    monkeypatch.setitem(ceilings.SECONDS, "test_file.py::test_one", 8)
    plugin.check(item(), 7.9)
    with pytest.raises(pytest.fail.Exception, match=r"but 8.0 s are allowed"):
        plugin.check(item(), 8.1)
    with pytest.raises(pytest.fail.Exception):
        plugin.check(item("test_other"), 7.9)


def test_time_of_a_slow_test_is_measured(plugin):
    """Run the hook as pytest does, around a busy loop that reads the clock of the hook.

    The clock of the hook advances in coarse steps, so another clock would differ from it by a step.
    """
    hook = plugin.pytest_runtest_call(item())
    next(hook)
    start = ceilings.cpu_seconds()
    while ceilings.cpu_seconds() - start < 0.1:
        pass
    with pytest.raises(StopIteration):
        hook.send(None)
    assert 0.099 < plugin.of_files["test_file.py"] < 5


@pytest.mark.parametrize("name", [*ceilings.SECONDS, *nightly.ONE_OF])
def test_tables_name_existing_tests(name):
    file, _, test = name.partition("::")
    (path,) = TESTS.rglob(file)
    assert not test or re.search(rf"^def {test}\(", path.read_text(), re.MULTILINE)
