"""Environment flags: accepted values, and errors for invalid values."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from torch_flashplug import env
from torch_flashplug.api import startup

# Each function reads a flag while the plugin is loaded, before anything is switched on.
NOT_ALLOWED = (
    (env.HOOK, "composit", startup._load_core, "must be one of stub, composite"),
    (env.BACKEND, "fa5", startup._process_backend, "must be one of"),
    (env.PRECISION, "7bit", startup._process_precision, "8bit"),
)


@pytest.mark.parametrize(("flag", "value", "read", "allowed"), NOT_ALLOWED, ids=lambda x: getattr(x, "name", ""))
def test_invalid_flag_values_are_refused(
    monkeypatch: pytest.MonkeyPatch, flag: env.Flag, value: str, read: Callable[[], object], allowed: str
) -> None:
    monkeypatch.setenv(flag.name, value)
    with pytest.raises(ValueError, match=f"{flag.name}(?=.*{value}).*({allowed})"):
        read()


@pytest.mark.parametrize("value", ["", "stub", "composite"])
def test_hook_flag_accepts_known_values(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(env.HOOK.name, value)
    assert env.HOOK.get() == value


@pytest.mark.parametrize("value", ["-1", "8.5", "many"])
def test_invalid_counts_are_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(env.RING_MARGIN.name, value)
    with pytest.raises(ValueError, match=f"{env.RING_MARGIN.name} must be .* number, 0 or more, but got '{value}'"):
        env.RING_MARGIN.count()


def test_an_empty_count_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.RING_MARGIN.name, "")
    assert env.RING_MARGIN.count() == int(env.RING_MARGIN.default)


@pytest.mark.parametrize("flag", [env.ENABLED, env.REPAIR], ids=lambda flag: flag.name)
@pytest.mark.parametrize(
    ("word", "is_on"),
    [("0", False), ("off", False), ("False", False), ("NO", False), ("1", True), ("On", True), ("true", True),
     ("yes", True), ("", None)],
)  # fmt: skip
def test_switches_understand_the_usual_words(
    monkeypatch: pytest.MonkeyPatch, flag: env.Flag, word: str, is_on: bool | None
) -> None:
    monkeypatch.setenv(flag.name, word)

    assert flag.is_on() is is_on


@pytest.mark.parametrize(
    ("word", "mode"),
    [("", env.WAIT), ("wait", env.WAIT), ("1", env.WAIT), ("ON", env.WAIT), ("Background", env.BACKGROUND),
     ("0", env.NEVER), ("off", env.NEVER)],
)  # fmt: skip
def test_modes_of_compiling_at_first_use(monkeypatch: pytest.MonkeyPatch, word: str, mode: str) -> None:
    monkeypatch.setenv(env.JIT.name, word)

    assert env.jit_mode() == mode


def run_python(code: str, **flags: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | flags | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("flag", [env.ENABLED, env.JIT, env.REPAIR, env.HOOK, env.RING_MARGIN], ids=lambda x: x.name)
def test_import_raises_for_an_unknown_value_and_lists_allowed_values(flag: env.Flag) -> None:
    done = run_python("import torch_flashplug", **{flag.name: "Maybe"})

    assert done.returncode != 0
    assert f"ValueError: {flag.name} must be " in done.stderr and "but got 'Maybe'." in done.stderr


def test_info_names_the_flag_value_of_a_disabled_plugin() -> None:
    code = """
import torch_flashplug
from torch_flashplug.cli import env_info
print(env_info.collect()["hook"]["why"])
torch_flashplug.enable()
print(env_info.collect()["hook"]["enabled"])
"""

    done = run_python(code, TORCH_FLASHPLUG="Off")

    assert done.stdout.splitlines() == ["TORCH_FLASHPLUG=Off", "True"], done.stderr


@pytest.mark.parametrize("word", ["0", "off", "False", "no"])
def test_explain_reports_that_the_plugin_is_off(word: str) -> None:
    code = """
import torch, torch_flashplug
q = torch.empty(2, 4, 4096, 64, dtype=torch.bfloat16, device="meta")
plan = torch_flashplug.explain(q, q, q, device="h100")
print(plan.backend, "|", plan.reasons["fa3"], "|", torch_flashplug.dispatch.bindings.enabled())
torch_flashplug.enable()
print(torch_flashplug.explain(q, q, q, device="h100").backend)
"""

    done = run_python(code, TORCH_FLASHPLUG=word)

    assert done.stdout.splitlines() == [
        "stock | the plugin is disabled; call torch_flashplug.enable(). | False",
        "fa3",
    ], done.stderr


def test_integrations_import_transformers_on_request() -> None:
    code = """
import sys, torch_flashplug
print("transformers" in sys.modules)
torch_flashplug.integrations.transformers.register()
print("transformers" in sys.modules)
"""

    done = run_python(code)

    assert done.stdout.split() == ["False", "True"], done.stderr
