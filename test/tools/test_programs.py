"""Unit tests of tools/models/programs.py, on the CPU stub backend.

Unmodified models give results as good with the plugin as without, in both orders. The comparison of the tool must fail
for wrong results.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from device_backend import DeviceBackend, use_device_backend

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tools.models import growing_cache, program_models, program_table, programs

SCENARIOS = ("forward", "train")
CORRUPTED = "bert.encoder.layer.0.attention.self.value.weight"

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "no_autograd_cache")


@pytest.fixture
def cpu_stub_backend() -> Iterator[DeviceBackend]:
    """Provide the CPU stub backend.

    The tool itself checks the errors of a real device, where stock needs a separate process.
    """
    with use_device_backend("cpu") as device_backend:
        yield device_backend


def compare_program(
    device_backend: DeviceBackend, program: str, order: str = "stock_first", scenarios: tuple[str, ...] = SCENARIOS
) -> list[dict]:
    sides = {"stock": device_backend.disabled, "ours": contextlib.nullcontext}
    if order == "plugin_first":
        sides = dict(reversed(sides.items()))
    records = list(programs.examine(programs.Task(order, program, scenarios, "cpu", quick=True), sides))
    assert [record["side"] for record in records] == [side for side in sides for _ in scenarios]
    alone = [record for record in records if record["side"] == "stock"]
    document = programs.assemble({program: {"alone": alone, order: records}}, [order])
    assert document["failed"] == [] and [row["scenario"] for row in document["rows"]] == list(scenarios)
    return document["rows"]


@pytest.mark.parametrize(
    "program, order",
    [("bert", "stock_first"), ("bert", "plugin_first"), ("deepseek_v3", "plugin_first")],  # no mask; D != Dv
)
def test_errors_are_comparable_to_stock(cpu_stub_backend: DeviceBackend, program: str, order: str) -> None:
    forward, train = compare_program(cpu_stub_backend, program, order)
    assert programs.violations([forward, train]) == []
    assert 0 < forward["error_ours"] < 0.05 and 0 < train["mean_ours"] < 0.05
    assert forward["calls"] == forward["served"] == train["served"] == 2
    # the CPU stub backend has no backward kernel
    assert train["backwards"] == {"math_bwd": 2} and train["reasons"] == {}


def test_compiled_and_generating_programs_are_served(cpu_stub_backend: DeviceBackend) -> None:
    all_rows = compare_program(
        cpu_stub_backend, "phi3", scenarios=("greedy_dynamic", "greedy_static", "compiled_forward")
    )
    dynamic, static, compiled = all_rows
    assert programs.violations(all_rows) == []
    assert dynamic["served"] == dynamic["calls"] == 2 * program_models.QUICK_NEW_TOKENS
    assert static["served"] == static["calls"] == dynamic["calls"] and static["reasons"] == {}
    assert compiled["dims"] == "" and compiled["error_ours"] > 0  # the eager twin was not requested


def test_a_wrong_gradient_is_a_violation(cpu_stub_backend: DeviceBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    run_program = program_models.run

    def corrupted(*arguments: object) -> dict[str, torch.Tensor]:
        results = run_program(*arguments)
        if programs.bindings.enabled() and results[CORRUPTED].dtype == torch.bfloat16:  # not the reference
            results[CORRUPTED] = results[CORRUPTED] * 1.1
        return results

    monkeypatch.setattr(program_models, "run", corrupted)
    (train,) = compare_program(cpu_stub_backend, "bert", scenarios=("train",))
    assert train["worst_ours"] == CORRUPTED
    assert programs.violations([train])[0].startswith("bert train stock_first: error 0.1")


def test_nan_is_a_violation() -> None:
    good = {"scenario": "forward", "squares": {"output": [1.0, 1e4]}}
    bad = good | {"squares": {"output": [float("nan"), 1e4]}}
    assert programs.violations([programs.new_row("bert", "stock_first", good, good, good)]) == []
    assert programs.violations([programs.new_row("bert", "stock_first", good, good, bad)])
    assert programs.violations(
        [programs.new_row("bert", "stock_first", good, good, bad, bad)]
    )  # an error of math does not excuse the error


def test_error_of_math_is_reported_and_excuses_nothing() -> None:
    """Report calls in which stock is more exact than its eager calls, because a compiled graph uses math."""

    def make_record(error: float) -> dict:
        return {"scenario": "train", "squares": {"weight": [error**2, 1.0]}}

    for error, is_violation in ((1.09e-3, False), (1.11e-3, True)):
        row = programs.new_row(
            "bert", "stock_first", make_record(1e-3), make_record(1e-3), make_record(error), make_record(2e-3)
        )
        assert row["error_math"] == pytest.approx(2e-3)
        assert [line.endswith("stock alone 0.001, its math 0.002") for line in programs.violations([row])] == [
            True
        ] * is_violation


def test_failing_programs_are_reported(cpu_stub_backend: DeviceBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = dataclasses.replace(program_models.PROGRAMS["bert"], model="BertOfTomorrow")
    monkeypatch.setitem(programs.PROGRAMS, "bert", missing)
    with pytest.raises(LookupError, match="has no BertOfTomorrow"):
        compare_program(cpu_stub_backend, "bert")
    monkeypatch.setitem(programs.PROGRAMS, "bert", dataclasses.replace(missing, model="BertForMaskedLM"))
    monkeypatch.setattr(program_models, "run", lambda *arguments: 1 / 0)
    task = programs.Task("stock_first", "bert", SCENARIOS, "cpu", quick=True)
    records = list(programs.examine(task, {"ours": contextlib.nullcontext}))
    assert [record["failed"] for record in records] == ["ZeroDivisionError: division by zero"] * 2
    failed = programs.assemble({"bert": {"stock_first": records}}, ["stock_first"])["failed"]
    assert {failure["scenario"] for failure in failed} == set(SCENARIOS)


def test_child_process_examines_a_task() -> None:
    """Start a child process by the command that run_all uses."""
    task = programs.Task("stock_first", "gpt2", ("forward",), "cpu", quick=True)
    records = programs.start([task], 1, time.monotonic() + 200)
    assert [record["side"] for record in records] == ["stock", "ours"] and not any(
        "failed" in record for record in records
    )


def test_new_times_replace_old_times(monkeypatch: pytest.MonkeyPatch) -> None:
    old = {"scenario": "forward", "order": "stock_first", "error_ours": 0.01, "stock_ms": 2.0, "ours_ms": 1.0}
    old |= {"ours_over_stock": 0.5, "spread": 0.1}
    header = {"commit": "abc", "date": "2026-11-24", "gpu": "NVIDIA H200", "command": "programs.py"}
    rows = [{"program": program} | old for program in ("bert", "gpt2", "llama")]
    new = {"stock_ms": 2.0, "ours_ms": 2.2, "ours_over_stock": 1.1, "spread": 0.01}
    new_records = [
        {"program": "bert", "scenario": "forward", "side": "times"} | new,
        {"program": "gpt2", "scenario": "*", "side": "times", "failed": "no end after 1 s"},
    ]
    monkeypatch.setattr(programs, "start", lambda *arguments: new_records)
    updated = programs.time_again(header | {"rows": rows, "absent": {}, "failed": []}, ["bert", "gpt2"], 1.0)
    bert, gpt2, llama = updated["rows"]
    assert bert == rows[0] | new and llama == rows[2]  # no new times were requested for llama
    assert gpt2 == {"program": "gpt2", "scenario": "forward", "order": "stock_first", "error_ours": 0.01}
    assert updated["errors_of"] == header and updated["failed"] == new_records[1:]
    assert program_table.slower(updated["rows"]) == ["bert forward: 1.100 (spread 0.010)"]


def test_planning_at_every_cache_length_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time on a CPU, where a slow call sleeps."""
    cache = growing_cache.Cache(32, 16, 4, 2, 10)
    attend = torch.nn.functional.scaled_dot_product_attention
    key_counts = []

    def planned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> torch.Tensor:
        key_counts.append(k.size(2))
        time.sleep(0.01)
        return attend(q, k, v, **options)

    assert growing_cache.violations([{**dataclasses.asdict(cache), "ms": 0.29}]) == []
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", planned)
    ms = growing_cache.median_ms(cache, "cpu", tokens=3)
    assert key_counts == list(range(11, 11 + growing_cache.WARMUP + 3))
    violation = growing_cache.violations([{**dataclasses.asdict(cache), "ms": ms}])[0]
    assert violation.startswith("growing cache D 32, Dv 16, 4 heads")
