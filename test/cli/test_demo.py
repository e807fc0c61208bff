"""The command line: the demo on a CPU and on a GPU, explain and info as text and as JSON."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

import torch_flashplug
from torch_flashplug import env
from torch_flashplug.__main__ import main
from torch_flashplug.api.backend import DEVICES
from torch_flashplug.demo import benchmark_table, inference, train, without_gpu
from torch_flashplug.demo import model as demo_model
from torch_flashplug.registry.architectures import FAMILIES
from torch_flashplug.testing import interpreted

ROOT = Path(__file__).resolve().parents[2]
DECODE = ("explain", "--device", "h100", "--q", "1,32,1,128", "--k", "1,8,8192,128", "--dtype", "bf16", "--causal")


def run_demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the demo in a subprocess, because the demo measures times and switches the plugin on and off."""
    command = [sys.executable, "-m", "torch_flashplug", "demo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=560, check=False)


@pytest.fixture
def output(capsys):
    """Return a function that runs the command line and returns the printed text."""

    def run(*arguments: str) -> str:
        main([*arguments])
        return capsys.readouterr().out

    return run


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("Some plain text to read, again and again. " * 20)
    return str(path)


without_a_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU form of the demo")
# Column titles and labels that must not appear on a CPU: they would compare a CPU with itself, or give CPU kernels the
# names of GPU kernels.
TIMES = ("times plugin off", "tokens / s", "bytes/s", "speed / plugin off", " ms ", "flash (FA2)")


@without_a_gpu
def test_demo_without_gpu_shows_plans_a_kernel_and_measured_speeds(text_file):
    done = run_demo(text_file)

    assert done.returncode == 0, done.stderr
    shown = " ".join(done.stdout.split())
    assert "no GPU here" in shown and not [title for title in TIMES if title in shown]
    for device in ("h100", "h200", "a100"):
        assert re.search(rf"on [\w, ]*\b{device}\b", shown), device
    (kernel,) = re.findall(r"Kernel (fwd_sm90_\w+): compiled for an H100, interpreted from its PTX", shown)
    assert shown.index(kernel) < shown.index(f"Kernel {kernel}"), "it is the kernel of the plan for an H100"
    assert "2 of the prefill's 2 attention calls ran on this kernel" in shown
    assert set(table_rows(done.stdout, "RMS error against fp64")) == {"prefill, layer 1", "prefill, layer 2"}
    assert shown.endswith(" ".join(inference.ON_H100.split()))


@pytest.fixture
def small_prefill():
    """Return a model and a prompt whose prefill would run on one of our kernels on an H100."""
    model = demo_model.build(inference.CPU_SHAPE, "cpu", torch.bfloat16)
    return model, torch.arange(200).view(1, 200) * 37 % demo_model.BYTES


def print_prefill_errors(model, prompt) -> tuple[dict[str, list[str]], str]:
    """Return the error table printed by the demo for a prefill, and the full text."""
    console = Console(width=120, record=True, file=io.StringIO())
    with torch.inference_mode():
        without_gpu.show(console, model, prompt, "That is all.")
    text = console.export_text()
    return table_rows(text, "RMS error against fp64"), " ".join(text.split())


@pytest.mark.interpreted
def test_printed_errors_equal_errors_of_the_interpreted_kernel(small_prefill):
    """Compute the errors again from the kernel outputs, with fp64 math independent of the demo."""
    model, prompt = small_prefill

    errors, _ = print_prefill_errors(model, prompt)

    (pack,) = interpreted.PACKS.glob("fwd_sm90_bf16_d64_causal_m64n128s2/*.so")
    with torch.inference_mode():
        _, recorder, num_served = without_gpu.prefill_on(pack, model, prompt)
    assert num_served == len(recorder.calls) == len(errors) == 2
    for (plugin_error, stock, _, ratio), call, out in zip(errors.values(), recorder.calls, recorder.outs, strict=True):
        with sdpa_kernel(SDPBackend.MATH):
            exact = F.scaled_dot_product_attention(*(x.double() for x in (call.q, call.k, call.v)), **call.kwargs)
        assert float(plugin_error) == pytest.approx(float((out.double() - exact).square().mean().sqrt()), rel=1e-3)
        assert float(stock) == pytest.approx(float((call.run().double() - exact).square().mean().sqrt()), rel=1e-3)
        assert not torch.equal(out, call.run()), "the outputs are stock torch's"
        assert float(ratio) == pytest.approx(float(plugin_error) / float(stock), abs=2e-3) and 0.8 < float(ratio) < 1.2


@pytest.mark.interpreted
def test_a_wrong_kernel_shows_in_the_errors(small_prefill, monkeypatch, tmp_path):
    """Keep the scores of masked keys: the changed selp uses the score instead of -inf in both cases."""
    monkeypatch.setattr(interpreted, "PACKS", tmp_path)
    real_build = interpreted.build

    def build_mutant(kernel, progress):
        pack = real_build(kernel)
        (ptx,) = pack.with_name(f"{pack.name}.ptx").iterdir()
        text, count = re.subn(r"(selp\.f32[^,]*, )(%r\d+), 0fFF800000", r"\1\2, \2", ptx.read_text())
        assert count
        ptx.write_text(text)
        return pack

    monkeypatch.setattr(interpreted, "build", build_mutant)

    errors, _ = print_prefill_errors(*small_prefill)

    assert float(errors["prefill, layer 1"][-1]) > 10


@pytest.mark.interpreted
def test_calls_served_by_stock_are_not_counted(small_prefill, monkeypatch):
    monkeypatch.setattr(interpreted, "kernels", lambda pack: contextlib.nullcontext())

    _, text = print_prefill_errors(*small_prefill)

    assert "0 of the prefill's 2 attention calls ran on this kernel" in text


@pytest.mark.interpreted
def test_demo_explains_a_missing_kernel(small_prefill, monkeypatch, tmp_path):
    monkeypatch.setattr(interpreted, "TOOL", tmp_path / "build_pack.py")
    monkeypatch.setattr(benchmark_table, "RESULTS", tmp_path)

    errors, text = print_prefill_errors(*small_prefill)

    assert not errors and "the interpreter needs a checkout" in text
    assert "tools/results of a checkout" in text and text.endswith("That is all.")


def test_measured_speeds_equal_the_page():
    """Compare with docs/benchmarks.md, which test_results.py compares with the result files."""
    console = Console(width=160, record=True, file=io.StringIO())
    benchmark_table.show(console)

    shown = {
        cells[-1].removesuffix(".json"): cells[:-2] for cells in table_rows(console.export_text(), "Measured").values()
    }

    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert set(shown) == {f"{name}-h100" for name in benchmark_table.SUITES}
    for name, (calls, stock, stock_lowest, best, best_lowest) in shown.items():
        assert f"| {name} | {calls} | {best} | {best_lowest} | {stock} | {stock_lowest} |" in page


def test_long_demo_reports_peak_memory(text_file):
    """Check the peak memory: measured on a GPU, and always next to the computed memory of the math backend."""
    done = run_demo(text_file, "--long")
    assert done.returncode == 0, done.stderr
    assert "logits finite" in done.stdout and "scores and probabilities" in done.stdout
    assert ("measured" in done.stdout) == torch.cuda.is_available()
    assert bool(re.search(r"\d s\b", done.stdout)) == torch.cuda.is_available(), "seconds of a CPU"


def table_rows(shown: str, title: str) -> dict[str, list[str]]:
    """Return the cells of the table with the given title: first column -> remaining columns."""
    below_header = shown.partition(title)[2].partition("\u2521")[2]
    body = below_header.partition("\u2514")[0]
    cut = [[cell.strip() for cell in line.split("\u2502")[1:-1]] for line in body.splitlines()]
    return {name: cells for name, *cells in filter(None, cut)}


def test_training_demo_reports_speeds_losses_and_gradients(tmp_path):
    """Check speeds, losses and gradients of every attention.

    The gradients of our kernels must be as near to fp64 as stock, and the losses must match stock.
    """
    picture = tmp_path / "made" / "losses.png"
    done = run_demo("--train", "--rounds", "1", "--repeats", "2", "--picture", str(picture))
    assert done.returncode == 0, done.stderr
    shown, on_gpu = done.stdout, torch.cuda.is_available()
    speeds, losses, gradients = (
        table_rows(shown, title) for title in ("Training, steps of", "Losses, ", "Errors of grad")
    )
    assert on_gpu or not [title for title in TIMES if title in shown]
    stock_names = {"cuDNN", "efficient", "flash (FA2)"} if on_gpu else {"CPU flash"}
    assert set(losses) >= {"auto", "plugin off", "math"} | stock_names
    assert ("fa3 forced" in losses) == on_gpu
    assert set(losses) == set(gradients) and set(speeds) == (set(losses) if on_gpu else set())
    for name, (speed, _, _, peak) in speeds.items():
        assert float(speed) > 0 and float(peak) > 0, name
    differences = {}
    for name, (course, difference, spread, _) in losses.items():
        first, last = map(float, course.split(" to "))
        assert last < 0.8 * first and float(spread) > 0, name
        differences[name] = float(difference)
    assert differences["plugin off"] == 0 < differences["math"]
    assert on_gpu or losses["auto"] == losses["plugin off"]
    plugin_names = {"auto", "fa3 forced"} & set(gradients)
    errors = {name: [float(cell.rstrip("%")) for cell in cells] for name, cells in gradients.items()}
    for column, stock_names in enumerate(zip(*(errors[name] for name in errors if name not in plugin_names))):
        assert all(0 < errors[name][column] <= 1.5 * max(stock_names) for name in plugin_names)
    message = "forward by fa3" if on_gpu else "stock's CPU attention runs it, forward and backward"
    assert message in re.sub(r"\s+", " ", shown)
    if importlib.util.find_spec("matplotlib"):
        assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    else:
        assert "matplotlib is not installed" in shown


class _Scaled(torch.autograd.Function):
    """Identity function with a gradient 2 % too large."""

    @staticmethod
    def forward(_, x):
        return x.view_as(x)

    @staticmethod
    def backward(_, grad):
        return grad * 1.02


class WrongKeys(TorchFunctionMode):
    """Attention mode whose dk is 2 % too large."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            q, k, v = args
            args = q, _Scaled.apply(k), v
        return func(*args, **(kwargs or {}))


def test_training_shows_a_wrong_gradient():
    model = demo_model.build(train.CPU_SHAPE, "cpu", torch.float32)
    text = torch.arange(2 * 65).view(2, 65) * 37 % demo_model.BYTES
    scopes = {train.BASE: contextlib.nullcontext, "wrong": WrongKeys}
    trainer = train.Trainer(model, "cpu")
    errors = train.call_errors(trainer, text, scopes)
    right, wrong = errors[train.BASE], errors["wrong"]
    assert max(right) < 0.012 and wrong[1] > 0.018
    assert (wrong[0], wrong[2]) == (right[0], right[2])


def test_training_counts_steps_with_separate_bands():
    base = train.Run(torch.tensor([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]), None)
    second = train.Run(torch.tensor([[1.5, 2.1, 0.5], [3.0, 3.0, 0.9]]), None)
    assert base.steps_apart(base) == 0
    assert base.steps_apart(second) == second.steps_apart(base) == 2


def test_training_repeats_from_perturbed_weights():
    model = demo_model.build(train.CPU_SHAPE, "cpu", torch.float32)
    text = torch.arange(3 * 33).view(3, 1, 33) * 37 % demo_model.BYTES
    runs, _ = train.train_all(model, text, {train.BASE: contextlib.nullcontext, "same": contextlib.nullcontext}, 2)
    first_losses, second_losses = (run.losses for run in runs.values())
    assert first_losses.shape == (2, 3) and torch.equal(first_losses, second_losses)
    assert 0 < (first_losses[0] - first_losses[1]).abs().max() < 0.1


def test_training_plots_curves_only_with_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    runs = {train.BASE: train.Run(torch.ones(2, 3), None)}
    assert train.plot(runs, tmp_path / "losses.png") == "No picture: matplotlib is not installed."
    assert not list(tmp_path.iterdir())


def test_training_skips_unavailable_stock_backends():
    """A stock backend without a kernel is named with the reason; an error of the plugin is raised."""
    model = demo_model.build(train.CPU_SHAPE, "cpu", torch.float32)
    text = torch.zeros(1, 1, 9, dtype=torch.int64)

    def broken():
        raise RuntimeError("No kernel here. More words.")

    runs, absent = train.train_all(model, text, {"math": broken}, 1)
    assert not runs and absent == {"math": "No kernel here"}
    with pytest.raises(RuntimeError, match="No kernel here"):
        train.train_all(model, text, {"auto": broken}, 1)


def test_training_and_prefill_give_equal_logits():
    """Compare logits at every position without a cache with prefills ending at the position.

    The comparison also shows that attention is causal.
    """
    model = demo_model.build(train.CPU_SHAPE, "cpu", torch.float32)
    texts = torch.arange(2 * 24).view(2, 24) * 37 % demo_model.BYTES
    with torch.inference_mode():
        logits = model(texts)
        for row, stop in ((0, 24), (1, 24), (1, 5)):
            last, cache = demo_model.prefill(model, texts[row : row + 1, :stop], 24)
            torch.testing.assert_close(logits[row, stop - 1], last[0], rtol=1e-4, atol=1e-4)
            assert cache.length == stop


def test_demo_has_a_default_text():
    from torch_flashplug.demo.input_text import read_text

    content, origin = read_text(None)
    assert content and origin in {"README.md", "the package's own source"}


def test_demo_names_a_missing_file():
    done = run_demo("no_such_file.txt")
    assert done.returncode != 0
    assert "no_such_file.txt" in done.stderr and "Traceback" not in done.stderr
    both = run_demo("--train", "--long")
    assert both.returncode != 0 and "not allowed with" in both.stderr


@pytest.mark.gpu
def test_demo_generates_bytes_on_a_gpu():
    done = run_demo("--rounds", "3")
    assert done.returncode == 0, done.stderr
    assert "Greedy bytes" in done.stdout and "fa3" in done.stdout


def test_explain_prints_backend_and_gate(output):
    shown = output(*DECODE)
    assert "stock" in shown and "132 SMs" in shown


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("forced", (None, *FAMILIES), ids=lambda family: family and family.backend)
@pytest.mark.parametrize("more", ((), ("--grad",), ("--v", "1,8,8192,64")))
def test_explain_prints_a_plan_as_json(output, device, forced, more):
    backend_option = ("--backend", forced.backend) if forced else ()
    plan = json.loads(output(*DECODE, *more, *backend_option, "--device", device, "--json"))
    served = forced is not None and forced.runs_on(DEVICES[device]["cc"])
    assert plan["backend"] == (forced.backend if served else "stock")
    assert plan["reasons"]


WRONG = (("--q", "1,2,3"), ("--device", "b200"), ("--backend", "fastest"), ("--mask", "8192"), ("--mask-dtype", "fp8"))


def test_explain_of_masks_and_dropout(output):
    train = ("explain", "--device", "h200", "--q", "4,16,512,64", "--k", "4,16,512,64", "--grad", "--dropout", "0.1")
    masked = json.loads(output(*train, "--mask", "4,1,512,512", "--json"))
    assert masked["backend"] == "fa3" and "mask+dropout" in masked["kernel"] and "mask bool [4, 1" in masked["call"]
    biased = json.loads(output(*train, "--mask", "512,512", "--mask-dtype", "bf16", "--json"))
    assert "bias+dropout" in biased["kernel"] and "dropout 0.1" in biased["call"]


@pytest.mark.parametrize("option", ["--rounds", "--repeats", "--gpus"])
def test_demo_refuses_negative_counts(option, capsys):
    with pytest.raises(SystemExit):
        main(["demo", option, "-1"])
    assert "must be a whole number, 1 or more, or 0 for the default, but got '-1'" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", WRONG, ids=lambda words: words[0])
def test_explain_reports_invalid_options(wrong, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*DECODE, *wrong])
    assert ended.value.code != 0
    assert wrong[1] in str(ended.value.code) + capsys.readouterr().err


def test_version_needs_no_verb(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"torch_flashplug {torch_flashplug.__version__}\n"


def test_info_lists_all_facts(output):
    facts = json.loads(output("info", "--json"))
    assert set(facts) >= {"torch_flashplug", "torch", "packages", "devices", "hook", "packs", "cache", "environment"}
    assert list(facts["environment"]) == [flag.name for flag in env.FLAGS]
    for pack in facts["packs"]:
        assert pack["symbols"] == len(pack["kernels"]) > 0
    assert len(facts["devices"]) == torch.cuda.device_count()


def test_info_is_readable(output):
    shown = output("info")
    assert torch.__version__ in shown and "hook" in shown


def test_info_works_without_rich_and_demo_names_rich():
    """rich is an optional package: `info` must work without rich, and the demo must name the missing package."""
    code = "import sys; sys.modules['rich'] = None; from torch_flashplug.__main__ import main; main(sys.argv[1:])"
    results = [
        subprocess.run([sys.executable, "-c", code, verb], capture_output=True, text=True, check=False)
        for verb in ("info", "demo")
    ]
    assert results[0].returncode == 0 and "Environment" in results[0].stdout
    assert (
        results[1].returncode != 0 and "pip install rich" in results[1].stderr and "Traceback" not in results[1].stderr
    )


def test_precision_demo_compares_8_bit_kernels():
    """Check both rows. On a GPU, every call of the second row runs in 8 bits, with nearly the same quality."""
    done = run_demo("--precision", "fp8")
    assert done.returncode == 0, done.stderr
    shown = table_rows(done.stdout, "reading it")
    assert list(shown) == ["16bit", "8bit"]
    (value_of_16_bits, num_calls, *_), (value_of_8_bits, num_8_bit_calls, *_) = shown.values()
    assert int(num_calls) > 0 and abs(float(value_of_8_bits) / float(value_of_16_bits) - 1) < 0.01
    assert int(num_8_bit_calls) == (int(num_calls) if torch.cuda.is_available() else 0)
    wrong = run_demo("--precision", "7bit")
    assert (
        wrong.returncode != 0
        and "precision must be one of 16bit, qk8, 8bit, e4m3, fp8, but got '7bit'" in wrong.stderr
        and "Traceback" not in wrong.stderr
    )


def test_serving_demo_writes_equal_bytes_on_each_server():
    """All servers must write equal bytes on a CPU; on a GPU, 16-bit rounding may sometimes change a byte."""
    done = run_demo("--serve")
    assert done.returncode == 0, done.stderr
    assert torch.cuda.is_available() or not [title for title in TIMES if title in done.stdout]
    shown = table_rows(done.stdout, "bytes each")
    names = ["padded, F.sdpa without the plugin", "padded, F.sdpa", "packed and paged, attention()"]
    assert list(shown) == [*names, "mixed steps, pages gathered", "mixed steps, calls of the adapters"]
    for *speeds, equal in shown.values():
        num_equal, num_total = map(int, equal.split(" of "))
        assert len(speeds) == (3 if torch.cuda.is_available() else 0)
        assert all(float(speed.replace(",", "")) > 0 for speed in speeds if speed)
        assert num_equal == num_total or (torch.cuda.is_available() and num_equal > num_total // 4)
