"""Unit tests of tools/fuzz/fuzz.py on the CPU stub backend.

Every kind of call is drawn and right in every mode, wrong results are found, and a killed worker is reported. On a GPU,
run python tools/fuzz/fuzz.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from tools.fuzz import calls as fuzz_calls  # noqa: E402
from tools.fuzz import check as fuzz_check  # noqa: E402
from tools.fuzz import fuzz  # noqa: E402
from tools.fuzz import tensors as fuzz_tensors  # noqa: E402
from tools.fuzz.calls import Call  # noqa: E402
from tools.fuzz.check import Outcome, answer, check, is_stock_fault, plugin_on  # noqa: E402
from tools.fuzz.tensors import CallTensors  # noqa: E402

SEED = 20261122
CALLS_PER_KIND = 12  # calls of each kind
WORK = fuzz.WORK["cpu"]
BY_KIND = pytest.mark.parametrize("kind", fuzz_calls.NAMES)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread, because small products wait longer for threads than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def draw_calls(kind: str, count: int = CALLS_PER_KIND, work: int = WORK) -> list[Call]:
    numbers = itertools.islice(fuzz_calls.indices(SEED, [kind]), count)
    return [fuzz_calls.draw(SEED, index, work) for index in numbers]


@pytest.mark.interpreted
@BY_KIND
def test_interpreted_calls_are_right(kind: str) -> None:
    """Force kernels, which run or refuse the call; a subset of tools/fuzz/fuzz.py --device interpreted."""
    with plugin_on(fuzz.INTERPRETED) as off:
        for call in draw_calls(kind, 3, fuzz.WORK[fuzz.INTERPRETED] // 4):
            tensors = fuzz_tensors.make_tensors(call, "cpu")
            answers = answer(tensors)
            for mode in ("fa3", "fa2"):
                outcome = check(tensors, answers, mode, off)
                assert not outcome.bad, (mode, outcome, call)


@BY_KIND
def test_calls_of_each_kind_are_right_in_every_mode(kind: str) -> None:
    statuses = set()
    with plugin_on("cpu") as off:
        for call in draw_calls(kind):
            tensors = fuzz_tensors.make_tensors(call, "cpu")
            answers = answer(tensors)
            for mode in fuzz.MODES:
                outcome = check(tensors, answers, mode, off)
                assert not outcome.bad, (mode, outcome, call)
                statuses.add((mode, outcome.status))
    assert ("auto", "right") in statuses
    assert ("fa2", "refused" if kind in {"mask", "dropout", "wide", "ways"} else "right") in statuses
    assert kind != "dropout" or ("fa3", "right") in statuses


@BY_KIND
def test_an_index_determines_a_call(kind: str) -> None:
    calls = draw_calls(kind)
    assert calls == draw_calls(kind) and {call.kind for call in calls} == {kind}
    assert len(set(calls)) == CALLS_PER_KIND
    assert json.loads(json.dumps([call.facts() for call in calls]))


@BY_KIND
def test_layouts_keep_values_within_nan_guards(kind: str) -> None:
    """Compare with the plain layout, and expect NaN between the stored numbers."""
    for call in draw_calls(kind):
        tensors = fuzz_tensors.make_tensors(call, "cpu")
        for buffer, stored in tensors.guards:
            assert int(buffer.isnan().sum()) == buffer.numel() - stored
        for tensor in (tensors.q, tensors.k, tensors.v, tensors.grad_out, tensors.first_grad):
            assert not tensor.isnan().any()
        assert torch.equal(tensors.grad_out, tensors.first_grad)


def is_misaligned(tensor: Tensor) -> bool:
    return tensor.storage_offset() * tensor.element_size() % 16 != 0


def log_sums(tensors: CallTensors) -> Tensor:
    """Return the LSE of a call whose keys are all visible."""
    keys = tensors.k.double().repeat_interleave(tensors.call.Hq // tensors.call.Hkv, dim=1)
    return (tensors.q.double() @ keys.mT * tensors.call.D**-0.5).logsumexp(-1)


TRAITS: dict[str, Callable[[CallTensors], bool]] = {
    "fault2": lambda p: 1 in (p.call.Sq, p.call.Sk) and any(map(is_misaligned, (p.q, p.k, p.v))),
    "fault3": lambda p: p.call.Sq == 1 < p.call.Sk and any(map(is_misaligned, (p.q, p.k, p.v))),
    "fault4": lambda p: p.call.D != p.call.Dv and any(n > 1 and s == 0 for n, s in zip(p.q.shape, p.q.stride())),
    "fault5": lambda p: p.call.wants == "qkv" and any(t.shape[2] == 1 and t.stride(2) % 8 for t in (p.q, p.k, p.v)),
    "fault6": lambda p: p.call.scale <= 0,
    "fault10": lambda p: bool((log_sums(p) - p.call.low).abs().max() < 2),
}


@pytest.mark.parametrize("kind", TRAITS)
def test_faults_have_their_trait(kind: str) -> None:
    for call in draw_calls(kind, 50):
        assert TRAITS[kind](fuzz_tensors.make_tensors(call, "cpu")), call


# ---- detection of wrong results ----


def modify(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Change a single element and keep the strides."""
    last = tuple(n - 1 for n in tensor.shape)
    tensor[last] = change(tensor[last])
    return tensor


def misread_order(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory order (B, S, H, D) is misread as (B, H, S, D): fault 1."""
    return tensor.transpose(1, 2).reshape(tensor.shape)


SPOILED: dict[str, tuple[str, Callable]] = {
    "one element": ("out .*max error", lambda p, g, run: run(g) | {"out": modify(run(g)["out"], lambda x: x + 0.5)}),
    "a NaN": ("out .*nan", lambda p, g, run: run(g) | {"out": modify(run(g)["out"], lambda x: x * float("nan"))}),
    "a gradient": ("dk .*max error", lambda p, g, run: run(g) | {"dk": modify(run(g)["dk"], lambda x: x + 0.5)}),
    "the order of grad_out": ("dq .*dk .*dv ", lambda p, g, run: run(misread_order(g))),
    "strides": ("out has strides", lambda p, g, run: run(g) | {"out": run(g)["out"].transpose(1, 2).clone(
        memory_format=torch.contiguous_format).transpose(1, 2)}),
    "a write beside": ("buffer was written", lambda p, g, run: run(p.guards[0][0][-1:].zero_() + g)),
    "an error": ("RuntimeError: no", lambda p, g, run: (_ for _ in ()).throw(RuntimeError("no"))),
}  # fmt: skip


@pytest.mark.parametrize("kind", SPOILED)
def test_wrong_results_are_found(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text, spoil = SPOILED[kind]
    honest = fuzz_check.attend
    monkeypatch.setattr(fuzz_check, "attend", lambda p, g: spoil(p, g, lambda grad: honest(p, grad)))
    call = Call("plain", 1, B=2, Hq=4, Hkv=2, Sq=33, Sk=65, D=64, Dv=64, wants="qkv")
    tensors = fuzz_tensors.make_tensors(call, "cpu")
    with plugin_on("cpu") as off:
        outcome = check(tensors, answer(tensors), "auto", off)
    assert outcome.status == ("raised" if kind == "an error" else "wrong")
    with pytest.raises(AssertionError, match=text):
        raise AssertionError(outcome.detail)
    assert not is_stock_fault(call, "auto", outcome)


def test_nondeterministic_bits_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest, times = fuzz_check.attend, itertools.count()

    def flickering(tensors: CallTensors, grad_out: Tensor) -> dict[str, Tensor]:
        run = honest(tensors, grad_out)
        run["out"][0, 0, 0, 0] *= 1.0 + 2**-8 * (next(times) % 2)  # the last digit of bf16
        return run

    monkeypatch.setattr(fuzz_check, "attend", flickering)
    call = Call("deterministic", 1, B=1, Hq=1, Hkv=1, Sq=8, Sk=8, D=64, Dv=64, deterministic=True)
    tensors = fuzz_tensors.make_tensors(call, "cpu")
    with plugin_on("cpu") as off:
        outcome = check(tensors, answer(tensors), "auto", off)
    assert "other bits the second time" in outcome.detail


def test_known_faults_of_stock_are_recognized() -> None:
    sizes = {"B": 1, "Hq": 1, "Hkv": 1, "Sq": 8, "Sk": 8, "D": 64, "Dv": 64}
    ordered, masked = Call("grad_out", 1, **sizes, deterministic=True), Call("mask", 1, **sizes, mask="float32")
    refused = Outcome("raised", "RuntimeError: cuDNN has no deterministic backward")
    assert is_stock_fault(ordered, "auto", refused) and not is_stock_fault(ordered, "fa3", refused)
    assert not is_stock_fault(ordered, "auto", dataclasses.replace(refused, paths={"ours_fwd": 1}))
    assert not is_stock_fault(masked, "auto", refused) and not is_stock_fault(masked, "auto", Outcome("wrong"))
    counted = Call("ways", 1, **sizes, way="flop_counter")
    uncounted = Outcome("raised", "AssertionError: sdpa_flop_count: query/key/value shapes are incompatible")
    grouped = dataclasses.replace(counted, Hq=2)
    assert is_stock_fault(grouped, "auto", uncounted) and not is_stock_fault(counted, "auto", uncounted)
    assert not is_stock_fault(grouped, "auto", dataclasses.replace(uncounted, paths={"ours_fwd": 1}))


# ---- processes ----


class Dead:
    """Stub of a process that has ended."""

    exitcode = -11

    def kill(self) -> None: ...

    def join(self) -> None: ...


def test_dead_worker_is_reported_and_remaining_work_continues() -> None:
    index, *other_indices = itertools.islice(fuzz_calls.indices(SEED, ["fault2"]), 3)
    fuzz_run = fuzz.Fuzz(SEED, "cpu", fuzz.MODES, iter([]))
    remaining_modes = {index: ["auto", "fa3"], other_indices[0]: ["auto", "fa3", "fa2"]}
    fuzz_run.handle_death(fuzz.Worker(Dead(), None, 0, remaining_modes, current=(index, "auto")), "crash")
    (finding,) = fuzz_run.findings
    assert (finding["status"], finding["index"], finding["mode"]) == ("crash", index, "auto")
    assert list(fuzz_run.again) == [(index, ["fa3"]), (other_indices[0], ["auto", "fa3", "fa2"])]
    while fuzz_run.repetitions or fuzz_run.running:
        fuzz_run.repeat_findings()
        time.sleep(0.05)
    assert (finding["alone"], finding["stock"]) == ("right", "right")


def test_fuzz_command_writes_a_report(tmp_path: Path) -> None:
    base = [sys.executable, ROOT / "tools" / "fuzz" / "fuzz.py"]
    limits = {"capture_output": True, "text": True, "timeout": 120, "check": False}
    options = ["--device", "cpu", "--workers", "1", "--calls", "60", "--out", tmp_path]
    done = subprocess.run([*base, "60", str(SEED), *options], **limits)  # noqa: PLW1510
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("fuzz-*.json")
    report = json.loads(path.read_text())
    assert report["calls"] == dict.fromkeys(fuzz.MODES, 60) and report["findings"] == []
    assert report["served"]["fa2"]["ours_fwd"] > 30 and sum(report["kinds"].values()) == 180
    index = next(fuzz_calls.indices(SEED, ["fault4"]))
    done = subprocess.run([*base, "0", str(SEED), "--call", str(index), "--device", "cpu"], **limits)  # noqa: PLW1510
    assert done.returncode == 0, done.stdout + done.stderr
    assert "backend" in done.stdout and json.loads(done.stdout.splitlines()[-1])["status"] == "right"
