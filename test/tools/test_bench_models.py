"""Suites `groups`, `everyday` and `models` in the small form for CPUs, their data, and the energy of calls."""

from __future__ import annotations

import json
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

pytest.importorskip("rich")

from tools.bench import (  # noqa: E402
    baselines,
    bench,
    decoder_stack,
    energy,
    public_models,
    report,
    result_schema,
    runner,
    workloads,
)
from tools.bench.suites import dense, everyday, model_stack  # noqa: E402
from torch_flashplug.testing import Candidate, Timing  # noqa: E402

SDPA = F.scaled_dot_product_attention
GROUPED = "train_d64_causal_b1s8192_h28x4_small"


@pytest.fixture(autouse=True)
def shorten_timing(monkeypatch):
    for suite in (dense, everyday, model_stack):
        monkeypatch.setattr(suite, "ROUND_MS", 0.1)
    monkeypatch.setattr(workloads, "CPU_LENGTH", 40)


def new_bench(suite: str, name_filter: str, **providers: baselines.Provider) -> runner.Bench:
    available, absent = baselines.providers(bench.SUITE_PROVIDERS[suite])
    bench_run = runner.Bench(
        "cpu", 1, time.monotonic() + 100, name_filter, True, available | providers, dict(absent)
    )  # fmt: skip
    bench_run.last_clocks = time.monotonic()
    return bench_run


def run_suite(suite: str, name_filter: str, **providers: baselines.Provider) -> runner.Bench:
    bench_run = new_bench(suite, name_filter, **providers)
    bench.SUITES[suite](bench_run)
    return bench_run


def without_dk(q, k, v, **kwargs):
    """Compute attention whose gradient of the keys is zero."""
    return SDPA(q, k.detach() + 0 * k, v, **kwargs)


# ---- groups ----


def test_groups_times_ungrouped_heads_beside_grouped_heads():
    (row,) = run_suite("groups", GROUPED).rows
    assert row["shape"] == [1, 28, 4, 40, 40, 64, 64] and row["mask"] == "causal"
    assert row["ungrouped_ms"] > 0 and {"ours_fa3", result_schema.UNGROUPED, "stock"} <= set(row["spread"])
    assert set(row["errors"]["stock"]) == {"max", "rms", "dq_rms", "dk_rms", "dv_rms"}
    assert row["flop"] == 3.5 * 2 * 28 * 40 * 40 * 128 / 2
    full = result_schema.full(result_schema.rounded(row))
    assert full["grouped_over_ungrouped"] == pytest.approx(row["ungrouped_ms"] / row["ours_ms"], rel=2e-3)


def test_groups_has_every_size():
    cases = workloads.groups()
    assert {(case.B, case.Sq) for case in cases} == {(8, 2048), (4, 4096), (2, 8192), (1, 8192)}
    assert {(case.Hq, case.Hkv) for case in cases} == {(32, 8), (64, 8), (28, 4), (48, 8)}
    assert {(case.D, case.causal) for case in cases} == {(d, c) for d in (64, 96, 128, 256) for c in (False, True)}
    assert len(cases) == 4 * 4 * 4 * 2 and all(case.flop == workloads.ungrouped(case).flop for case in cases)
    assert all(workloads.size_for(case, "cuda") == case for case in cases)


@pytest.mark.parametrize("ours_runs", [True, False])
def test_wrong_gradient_ends_the_run_only_if_our_kernels_ran(ours_runs, monkeypatch):
    monkeypatch.setattr(runner, "auto_plan_of", lambda inputs, case: "fa3" if ours_runs else "stock")
    wrong = baselines.Provider("ours_fa3", without_dk, baselines.plugin_off, ours=True)
    if ours_runs:
        with pytest.raises(SystemExit, match="dk of ours_fa3 is wrong"):
            run_suite("groups", GROUPED, ours_fa3=wrong)
        return
    (row,) = run_suite("groups", GROUPED, ours_fa3=wrong).rows
    assert row["errors"]["ours_fa3"]["dk_rms"] > 10 * row["errors"]["stock"]["dk_rms"]


def test_peer_without_a_backward_is_refused():
    forward_only = baselines.Provider("fa3", lambda *qkv, **kwargs: SDPA(*qkv, **kwargs).detach(), baselines.plugin_off)
    (row,) = run_suite("groups", GROUPED, fa3=forward_only).rows
    assert "fa3" not in row["peers_ms"] and "does not require grad" in row["refused"]["fa3"]


class CompilerError(Exception):
    """Exception of a compiler, unrelated to RuntimeError."""


def fail_to_compile(*qkv, **kwargs):
    raise CompilerError("no code")


def test_failed_compilation_of_a_peer_is_refused_and_that_of_ours_raised():
    peer = baselines.Provider("fa4", fail_to_compile, baselines.plugin_off)
    (row,) = run_suite("groups", GROUPED, fa4=peer).rows
    assert row["refused"]["fa4"] == "CompilerError: no code" and "stock" in row["peers_ms"]
    with pytest.raises(CompilerError):
        run_suite("groups", GROUPED, ours_fa3=replace(peer, name="ours_fa3", ours=True))


# ---- everyday ----


@pytest.mark.parametrize("kind", ["forward", "train", "decode"])
def test_everyday_times_a_call_of_each_kind(kind, monkeypatch):
    call = next(call for call in public_models.model_calls() if (call.model, call.kind) == ("Qwen2.5-7B", kind))
    monkeypatch.setattr(public_models, "model_calls", lambda: [call])
    (row,) = run_suite("everyday", "Qwen").rows
    assert row["case"] == f"{call.case.name}_small" and (row["model"], row["kind"]) == ("Qwen2.5-7B", kind)
    assert row["ours"] == "ours_auto" and "stock" in row["peers_ms"] and row["auto_over_stock"] > 0
    assert row["shape"][3] == (1 if kind == "decode" else 40) and row["auto_plan"] == "stock"
    assert ("dv_rms" in row["errors"]["stock"]) == (kind == "train")
    assert result_schema.full(result_schema.lean(row))["flop"] == row["flop"]


def test_everyday_notes_device_times(monkeypatch):
    call = public_models.model_calls()[0]
    monkeypatch.setattr(everyday, "graphed", lambda candidate, calls: candidate)
    bench_run = new_bench("everyday", "")
    candidates = {"stock": Candidate(lambda: None), "ours_auto": Candidate(lambda: None)}
    monkeypatch.setattr(bench_run, "device", "cuda")
    timings = {"stock": Timing((0.5,)), "ours_auto": Timing((0.1,))}
    monkeypatch.setattr(everyday, "time_interleaved", lambda replayed, **options: {n: Timing((4.0,)) for n in replayed})
    device_ms, refused = everyday._device_times(bench_run, candidates, timings)
    assert device_ms == {"stock": 1.0, "ours_auto": 0.4} and refused == {} and call.direction == "fwd"


def test_calls_of_models_cover_everyday_sizes():
    calls = public_models.model_calls()
    cases = [call.case for call in calls]
    assert len(calls) >= 30 and {call.model for call in calls} == set(public_models.HEADS)
    assert {call.kind for call in calls} == {"forward", "train", "decode"}
    for sizes, required in (
        ({case.Sq for case in cases}, {1, 197, 577, 1025, 1500, 3001, 4250}),
        ({case.Hq // case.Hkv for case in cases}, {1, 3, 4, 5, 6, 7, 8}),
        ({case.D for case in cases}, {64, 72, 80, 96, 112, 128, 192, 256}),
    ):
        assert required <= sizes, required - sizes
    by_kind = {kind: [call.case for call in calls if call.kind == kind] for kind in public_models.SIZES}
    for kind in ("forward", "train"):
        assert {case.D for case in by_kind[kind]} >= {64, 80, 96, 128, 256}
    assert all(case.Sq == 1 and not case.causal for case in by_kind["decode"])


# ---- models ----


@pytest.mark.parametrize("kind", ["prefill", "train", "decode"])
def test_models_times_the_plugin_off_and_on(kind):
    bench_run = run_suite("models", f"{kind}_8k_small")
    (row,) = bench_run.rows
    assert row["ours_ms"] > 0 and set(row["peers_ms"]) == {"stock"} and row["kind"] == kind
    assert 0 < row["errors"]["ours_auto"] < 0.05 and "energy_j" not in row
    assert bench_run.absent["energy"] == "NVML measures GPUs only, and the device is cpu"


@contextmanager
def attention_by(attend):
    F.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        F.scaled_dot_product_attention = SDPA


@pytest.mark.parametrize("attend, tensor", [
    (lambda *qkv, **kwargs: SDPA(*qkv, **kwargs) * 1.05, "attention 0"),
    (without_dk, r"gradient of layers\.0\.attention_norm\.weight"),
])  # fmt: skip
def test_wrong_attention_of_the_plugin_ends_the_run(attend, tensor):
    wrong = baselines.Provider("ours_auto", SDPA, lambda: attention_by(attend), ours=True)
    with pytest.raises(SystemExit, match=f"train_8k_small: {tensor} of ours_auto is wrong"):
        run_suite("models", "train_8k", ours_auto=wrong)


def test_stack_of_layers_has_the_size_of_llama_3_8b():
    shape = decoder_stack.LLAMA_3_8B
    with torch.device("meta"):
        stack = decoder_stack.DecoderStack(shape, 8)
    assert sum(parameter.numel() for parameter in stack.layers.parameters()) == 4 * 218_112_000
    sizes = {(call.kind, call.length) for call in model_stack.CALLS}
    assert {("prefill", 8192), ("prefill", 32768), ("train", 8192), ("decode", 8192), ("decode", 65536)} <= sizes
    heads = public_models.HEADS["Llama-3.1-8B"]
    assert (shape.heads, shape.kv_heads, shape.head_dim) == (heads.query, heads.kv, heads.dim)


def test_decode_of_the_last_token_equals_the_prefill():
    shape, tokens = decoder_stack.SMALL, 9
    stack = decoder_stack.random_stack(shape, 16, "cpu", torch.float32)
    x, recorded = torch.randn(2, tokens, shape.hidden), []

    def record(q, k, v, **kwargs):
        recorded.append((k.clone(), v.clone()))
        return SDPA(q, k, v, **kwargs)

    with torch.no_grad(), attention_by(record):
        prefilled = stack(x)
    for keys_and_values in recorded:
        for tensor in keys_and_values:
            tensor[:, :, -1] = float("nan")  # decode writes the last entry
    cache = decoder_stack.KvCache(tuple(recorded))
    with torch.no_grad():
        decoded = stack(x[:, -1:], cache)
    torch.testing.assert_close(decoded, prefilled[:, -1:])
    with pytest.raises(ValueError, match="x must have one token if a cache is passed, but got 9"):
        stack(x, cache)


def test_fp32_reference_equals_the_stack():
    case = replace(model_stack.CALLS[2].case(decoder_stack.SMALL), Sq=7, Sk=7, dtype="fp32")
    step = model_stack._step(decoder_stack.SMALL, "train", case, "cpu")
    step = replace(step, stack=decoder_stack.random_stack(decoder_stack.SMALL, 16, "cpu", torch.float32))
    tensors, exact = step.named_tensors(), step.in_fp32().named_tensors()
    assert list(tensors) == list(exact) and "gradient of x" in tensors and "attention 1" in tensors
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, exact[name], rtol=1e-4, atol=1e-4)


# ---- energy ----


class StubNvml:
    """Stub of pynvml: a counter in millijoules."""

    def __init__(self) -> None:
        self.millijoules, self.handles = 0, []

    def nvmlInit(self) -> None:
        self.handles.append("init")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert self.handles == ["init"]
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        assert handle == "GPU-1234"
        return self.millijoules


@pytest.fixture
def stub_nvml(monkeypatch) -> StubNvml:
    nvml = StubNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda idx: SimpleNamespace(uuid="1234"))
    return nvml


def test_energy_is_counted_per_call(stub_nvml):
    meter, reason = energy.open_meter("cuda")
    scopes = []

    def candidate(millijoules: int) -> Candidate:
        @contextmanager
        def scope():
            scopes.append(millijoules)
            yield

        def call():
            stub_nvml.millijoules += millijoules

        return Candidate(call, scope)

    candidates = {"ours_auto": candidate(2000), "stock": candidate(3000)}
    timings = {"ours_auto": Timing((100.0,)), "stock": Timing((300.0,))}
    joules = energy.energy_per_call(meter, candidates, timings, 3, "cpu")
    assert reason == "" and joules == {"ours_auto": pytest.approx(2.0), "stock": pytest.approx(3.0)}
    assert scopes == [3000, 2000, 2000, 3000, 3000, 2000]


def test_missing_or_refusing_nvml_is_a_reason(stub_nvml, monkeypatch):
    def refuse(handle):
        raise RuntimeError("Not Supported")

    stub_nvml.nvmlDeviceGetTotalEnergyConsumption = refuse
    assert energy.open_meter("cuda") == (None, "RuntimeError: Not Supported")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    meter, reason = energy.open_meter("cuda")
    assert meter is None and reason.startswith("ModuleNotFoundError") and "pynvml" in reason


# ---- files ----


def test_program_writes_rows_with_energy_and_omits_derived_columns(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(energy, "open_meter", lambda device: (energy.EnergyMeter(None, None), ""))
    monkeypatch.setattr(energy, "energy_per_call", lambda *args: {"ours_auto": 0.5, "stock": 0.75})
    options = ["--suite", "models", "--device", "cpu", "--rounds", "1", "--filter", "decode_64k"]
    monkeypatch.setattr(sys, "argv", ["bench.py", *options, "--out", str(tmp_path)])
    monkeypatch.setattr(report, "plot", lambda document, labels, path: None)
    bench.main()
    (path,) = tmp_path.glob("models-*.json")
    (row,) = json.loads(path.read_text())["rows"]
    assert row["energy_j"] == {"ours_auto": 0.5, "stock": 0.75} and "energy_ratio" not in row
    document = result_schema.read(path)
    assert document["rows"][0]["energy_ratio"] == 1.5 and path.read_text() == result_schema.text_of(document)
    assert "ratio of energy: 1.500" in capsys.readouterr().out


def test_pictures_of_the_suites_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib import pyplot

    heading = {"gpu": "cpu", "torch": "2", "cudnn": 1, "date": "today", "commit": "abc"}
    row = {
        "case": "train_d64_b1", "ours_ms": 1.0, "peers_ms": {"stock": 2.0}, "ratio": 2.0, "ungrouped_ms": 0.9,
        "spread": {"ours_fa3": 0.1, "stock": 0.1}, "shape": [1, 8, 2, 64, 64, 64, 64], "mask": "full",
        "device_ms": {"ours_fa3": 0.5, "stock": 0.4},
    }  # fmt: skip
    rows = [row, row | {"case": "train_d64_causal_b1", "mask": "causal", "shape": [2, 8, 2, 64, 64, 64, 64]}]
    document = result_schema.with_derived_columns(heading | {"rows": rows})
    assert [row["grouped_over_ungrouped"] for row in document["rows"]] == [0.9, 0.9]
    assert document["rows"][0]["device_ratio"] == 0.8
    for suite in ("groups", "everyday", "models"):
        picture = report.plot(document | {"suite": suite}, baselines.labels(), tmp_path / f"{suite}.png")
        pyplot.close("all")
        assert 3_000 < picture.stat().st_size <= result_schema.PICTURE_BYTES
