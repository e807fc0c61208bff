"""The command line: the demo on a CPU and on a GPU, explain and info as text and as JSON."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys

import pytest
import torch

from torch_flashplug import env
from torch_flashplug.__main__ import main
from torch_flashplug.api import DEVICES
from torch_flashplug.demo import model as gpt
from torch_flashplug.demo import train

DECODE = ("explain", "--device", "h100", "--q", "1,32,1,128", "--k", "1,8,8192,128", "--dtype", "bf16", "--causal")


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The demo in a process of its own: it times, and switches the plugin on and off."""
    command = [sys.executable, "-m", "torch_flashplug", "demo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


@pytest.fixture
def output(capsys):
    """output(*arguments): what the command line prints."""

    def run(*arguments: str) -> str:
        main([*arguments])
        return capsys.readouterr().out

    return run


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("Some plain text to read, again and again. " * 20)
    return str(path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU form of the demo")
def test_demo_without_gpu(text_file):
    done = demo(text_file, "--rounds", "3")
    assert done.returncode == 0, done.stderr
    shown = done.stdout
    assert "no GPU here" in shown
    for part in ("prefill", "decode", "on h100", "Greedy bytes: all", "plugin off", "RMS error against fp64"):
        assert part in shown


def test_long_demo(text_file):
    """With a GPU the peak is measured; everywhere the arithmetic of the math backend stands beside it."""
    done = demo(text_file, "--long")
    assert done.returncode == 0, done.stderr
    assert "logits finite" in done.stdout and "scores and probabilities" in done.stdout
    assert ("measured" in done.stdout) == torch.cuda.is_available()


def trained(shown: str) -> dict[str, list[str]]:
    """Cells of the training's table: attention -> speed, spread, ratio, memory, losses, difference."""
    rows = [[cell.strip() for cell in line.split("\u2502")[1:-1]] for line in shown.splitlines()]
    return {name: cells for name, *cells in filter(None, rows) if any(" to " in cell for cell in cells)}


def test_training_demo(tmp_path):
    """On its own text, a README or so: few repetitions, hence curves without steep parts that blow roundings up."""
    picture = tmp_path / "made" / "losses.png"
    done = demo("--train", "--rounds", "3", "--picture", str(picture))
    assert done.returncode == 0, done.stderr
    runs, on_gpu = trained(done.stdout), torch.cuda.is_available()
    assert set(runs) >= {"auto", "plugin off", "flash (FA2)", "math"} | ({"cuDNN", "efficient"} if on_gpu else set())
    assert ("fa3 forced" in runs) == on_gpu
    for name, (speed, _, _, peak, losses, _) in runs.items():
        first, last = map(float, losses.split(" to "))
        assert float(speed) > 0 and last < 0.8 * first, name
        assert (float(peak) > 0) if on_gpu else (peak == "-")
    differences = {name: float(cells[-1]) for name, cells in runs.items()}
    assert differences["plugin off"] == 0 < differences["math"]
    spread_of_stock = max(differences[name] for name in runs if name not in {"auto", "fa3 forced"})
    assert differences["auto"] <= (3 * spread_of_stock if on_gpu else 0)
    said = "forward by fa3" if on_gpu else "stock's CPU attention runs it, forward and backward"
    assert said in re.sub(r"\s+", " ", done.stdout)
    if importlib.util.find_spec("matplotlib"):
        assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    else:
        assert "matplotlib is not installed" in done.stdout


def test_training_shows_curves_only_where_matplotlib_is(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    runs = {train.BASE: train.Run(torch.ones(3), None)}
    assert train.plot(runs, tmp_path / "losses.png") == "No picture: matplotlib is not installed."
    assert not list(tmp_path.iterdir())


def test_training_leaves_out_what_stock_cannot_run():
    """A backend without a kernel is named with its reason; an error of ours is an error."""
    model = gpt.build(train.CPU_SHAPE, "cpu", torch.float32)
    text = torch.zeros(1, 1, 9, dtype=torch.int64)

    def broken():
        raise RuntimeError("No kernel here. More words.")

    runs, absent = train.train_all(model, text, {"math": broken})
    assert not runs and absent == {"math": "No kernel here"}
    with pytest.raises(RuntimeError, match="No kernel here"):
        train.train_all(model, text, {"auto": broken})


def test_training_and_prefill_are_one_model():
    """Logits at every position, without a cache, are those of a prefill that ends there; also: attention is causal."""
    model = gpt.build(train.CPU_SHAPE, "cpu", torch.float32)
    texts = torch.arange(2 * 24).view(2, 24) * 37 % gpt.BYTES
    with torch.inference_mode():
        logits = model(texts)
        for row, stop in ((0, 24), (1, 24), (1, 5)):
            last, cache = gpt.prefill(model, texts[row : row + 1, :stop], 24)
            torch.testing.assert_close(logits[row, stop - 1], last[0], rtol=1e-4, atol=1e-4)
            assert cache.length == stop


def test_demo_has_its_own_text():
    from torch_flashplug.demo.text import read_text

    content, origin = read_text(None)
    assert content and origin in {"README.md", "the package's own source"}


def test_demo_names_a_missing_file():
    done = demo("no_such_file.txt")
    assert done.returncode != 0
    assert "no_such_file.txt" in done.stderr and "Traceback" not in done.stderr
    both = demo("--train", "--long")
    assert both.returncode != 0 and "not allowed with" in both.stderr


@pytest.mark.gpu
def test_demo_on_gpu():
    done = demo("--rounds", "3")
    assert done.returncode == 0, done.stderr
    assert "Greedy bytes" in done.stdout and "fa3" in done.stdout


def test_explain_says_backend_and_gate(output):
    shown = output(*DECODE)
    assert "stock" in shown and "132 SMs" in shown


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("more", ((), ("--grad",), ("--backend", "fa3"), ("--v", "1,8,8192,64")))
def test_explain_as_json(output, device, more):
    plan = json.loads(output(*DECODE, *more, "--device", device, "--json"))
    assert plan["backend"] in {"fa3", "stock"}
    assert plan["reasons"]
    forced_on_hopper = DEVICES[device]["cc"] == 90 and "fa3" in more
    assert (plan["backend"] == "fa3") == forced_on_hopper


@pytest.mark.parametrize(
    "wrong", (("--q", "1,2,3"), ("--device", "b200"), ("--backend", "fastest")), ids=lambda words: words[0]
)  # fmt: skip
def test_explain_words_its_errors(wrong, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*DECODE, *wrong])
    assert ended.value.code != 0
    assert wrong[1] in str(ended.value.code) + capsys.readouterr().err


def test_info_is_whole(output):
    facts = json.loads(output("info", "--json"))
    assert set(facts) >= {"torch_flashplug", "torch", "packages", "devices", "hook", "packs", "cache", "environment"}
    assert list(facts["environment"]) == [flag.name for flag in env.FLAGS]
    for pack in facts["packs"]:
        assert pack["symbols"] == len(pack["kernels"]) > 0
    assert len(facts["devices"]) == torch.cuda.device_count()


def test_info_is_readable(output):
    shown = output("info")
    assert torch.__version__ in shown and "hook" in shown
