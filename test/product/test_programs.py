"""tools/programs.py by itself: on the stand-in, unmodified models come out as well with the plugin as without, in both
orders; and its comparison fails where it should.
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
from standin import Road, road_to

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import growing
import program_models
import program_table
import programs

SCENARIOS = ("forward", "train")
CORRUPTED = "bert.encoder.layer.0.attention.self.value.weight"

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "no_autograd_cache")


@pytest.fixture
def standin() -> Iterator[Road]:
    """Not the real device, whose errors are the tool's business: there stock has to be alone in its process."""
    with road_to("cpu") as road:
        yield road


def rows(road: Road, program: str, order: str = "stock_first", scenarios: tuple[str, ...] = SCENARIOS) -> list[dict]:
    sides = {"stock": road.off, "ours": contextlib.nullcontext}
    if order == "plugin_first":
        sides = dict(reversed(sides.items()))
    found = list(programs.examine(programs.Task(order, program, scenarios, "cpu", quick=True), sides))
    assert [record["side"] for record in found] == [side for side in sides for _ in scenarios]
    alone = [record for record in found if record["side"] == "stock"]
    document = programs.assemble({program: {"alone": alone, order: found}}, [order])
    assert document["failed"] == [] and [row["scenario"] for row in document["rows"]] == list(scenarios)
    return document["rows"]


@pytest.mark.parametrize(
    "program, order",
    [("bert", "stock_first"), ("bert", "plugin_first"), ("deepseek_v3", "plugin_first")],  # no mask; D != Dv
)
def test_errors_are_stocks(standin: Road, program: str, order: str) -> None:
    forward, train = rows(standin, program, order)
    assert programs.violations([forward, train]) == []
    assert 0 < forward["error_ours"] < 0.05 and 0 < train["mean_ours"] < 0.05
    assert forward["calls"] == forward["served"] == train["served"] == 2
    assert train["backwards"] == {"math_bwd": 2} and train["reasons"] == {}  # the stand-in has no kernel for it


def test_compiled_and_generated(standin: Road) -> None:
    made = rows(standin, "phi3", scenarios=("greedy_dynamic", "greedy_static", "compiled_forward"))
    dynamic, static, compiled = made
    assert programs.violations(made) == []
    assert dynamic["served"] == dynamic["calls"] == 2 * program_models.QUICK_NEW_TOKENS
    assert static["served"] == static["calls"] == dynamic["calls"] and static["reasons"] == {}
    assert compiled["dims"] == "" and compiled["error_ours"] > 0  # its eager twin was not asked for


def test_a_wrong_gradient_is_a_violation(standin: Road, monkeypatch: pytest.MonkeyPatch) -> None:
    run = program_models.run

    def corrupted(*arguments: object) -> dict[str, torch.Tensor]:
        found = run(*arguments)
        if programs.bindings.enabled() and found[CORRUPTED].dtype == torch.bfloat16:  # not the reference
            found[CORRUPTED] = found[CORRUPTED] * 1.1
        return found

    monkeypatch.setattr(program_models, "run", corrupted)
    (train,) = rows(standin, "bert", scenarios=("train",))
    assert train["worst_ours"] == CORRUPTED
    assert programs.violations([train])[0].startswith("bert train stock_first: error 0.1")


def test_not_a_number_is_a_violation() -> None:
    good = {"scenario": "forward", "squares": {"output": [1.0, 1e4]}}
    bad = good | {"squares": {"output": [float("nan"), 1e4]}}
    assert programs.violations([programs.new_row("bert", "stock_first", good, good, good)]) == []
    assert programs.violations([programs.new_row("bert", "stock_first", good, good, bad)])
    assert programs.violations(
        [programs.new_row("bert", "stock_first", good, good, bad, bad)]
    )  # math's excuses nothing


def test_the_formulas_own_error_excuses_nothing_and_is_told() -> None:
    """Where stock is more exact than its eager calls (a compiled graph takes math)."""

    def of(error: float) -> dict:
        return {"scenario": "train", "squares": {"weight": [error**2, 1.0]}}

    for error, told in ((1.09e-3, False), (1.11e-3, True)):
        row = programs.new_row("bert", "stock_first", of(1e-3), of(1e-3), of(error), of(2e-3))
        assert row["error_math"] == pytest.approx(2e-3)
        assert [line.endswith("stock alone 0.001, its math 0.002") for line in programs.violations([row])] == [
            True
        ] * told


def test_what_cannot_run_is_told(standin: Road, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = dataclasses.replace(program_models.PROGRAMS["bert"], model="BertOfTomorrow")
    monkeypatch.setitem(programs.PROGRAMS, "bert", missing)
    with pytest.raises(LookupError, match="has no BertOfTomorrow"):
        rows(standin, "bert")
    monkeypatch.setitem(programs.PROGRAMS, "bert", dataclasses.replace(missing, model="BertForMaskedLM"))
    monkeypatch.setattr(program_models, "run", lambda *arguments: 1 / 0)
    task = programs.Task("stock_first", "bert", SCENARIOS, "cpu", quick=True)
    found = list(programs.examine(task, {"ours": contextlib.nullcontext}))
    assert [record["failed"] for record in found] == ["ZeroDivisionError: division by zero"] * 2
    failed = programs.assemble({"bert": {"stock_first": found}}, ["stock_first"])["failed"]
    assert {failure["scenario"] for failure in failed} == set(SCENARIOS)


def test_a_child_is_a_process_of_its_own() -> None:
    """What run_all starts, with the command that it starts it with."""
    task = programs.Task("stock_first", "gpt2", ("forward",), "cpu", quick=True)
    found = programs.start([task], 1, time.monotonic() + 200)
    assert [record["side"] for record in found] == ["stock", "ours"] and not any("failed" in record for record in found)


def test_times_taken_again_leave_no_old_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    old = {"scenario": "forward", "order": "stock_first", "error_ours": 0.01, "stock_ms": 2.0, "ours_ms": 1.0}
    old |= {"ours_over_stock": 0.5, "spread": 0.1}
    header = {"commit": "abc", "date": "2026-11-24", "gpu": "NVIDIA H200", "command": "programs.py"}
    rows = [{"program": program} | old for program in ("bert", "gpt2", "llama")]
    new = {"stock_ms": 2.0, "ours_ms": 2.2, "ours_over_stock": 1.1, "spread": 0.01}
    told = [
        {"program": "bert", "scenario": "forward", "side": "times"} | new,
        {"program": "gpt2", "scenario": "*", "side": "times", "failed": "no end after 1 s"},
    ]
    monkeypatch.setattr(programs, "start", lambda *arguments: told)
    again = programs.time_again(header | {"rows": rows, "absent": {}, "failed": []}, ["bert", "gpt2"], 1.0)
    bert, gpt2, llama = again["rows"]
    assert bert == rows[0] | new and llama == rows[2]  # which was not asked for
    assert gpt2 == {"program": "gpt2", "scenario": "forward", "order": "stock_first", "error_ours": 0.01}
    assert again["errors_of"] == header and again["failed"] == told[1:]
    assert program_table.slower(again["rows"]) == ["bert forward: 1.100 (spread 0.010)"]


def test_a_cache_that_is_planned_at_every_length_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timed on a CPU, where a slow call is one that sleeps."""
    cache = growing.Cache(32, 16, 4, 2, 10)
    attend = torch.nn.functional.scaled_dot_product_attention
    seen = []

    def planned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> torch.Tensor:
        seen.append(k.size(2))
        time.sleep(0.01)
        return attend(q, k, v, **options)

    assert growing.violations([{**dataclasses.asdict(cache), "ms": 0.29}]) == []
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", planned)
    ms = growing.median_ms(cache, "cpu", tokens=3)
    assert seen == list(range(11, 11 + growing.WARMUP + 3))
    said = growing.violations([{**dataclasses.asdict(cache), "ms": ms}])[0]
    assert said.startswith("growing cache D 32, Dv 16, 4 heads")
