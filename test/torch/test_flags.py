"""Environment flags whose values are not allowed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from torch_flashplug import _start, env

# Each is read when the plugin is loaded, before anything is switched on.
NOT_ALLOWED = (
    (env.HOOK, "composit", _start._load_core, "use one of stub, composite"),
    (env.BACKEND, "fa5", _start._process_backend, "use one of"),
    (env.PRECISION, "7bit", _start._process_precision, "8bit"),
)


@pytest.mark.parametrize(("flag", "value", "read", "allowed"), NOT_ALLOWED, ids=lambda x: getattr(x, "name", ""))
def test_a_value_that_no_flag_has(
    monkeypatch: pytest.MonkeyPatch, flag: env.Flag, value: str, read: Callable[[], object], allowed: str
) -> None:
    monkeypatch.setenv(flag.name, value)
    with pytest.raises(ValueError, match=f"{flag.name}.*{value}.*({allowed})"):
        read()


@pytest.mark.parametrize("value", ["", "stub", "composite"])
def test_a_hook_that_there_is(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(env.HOOK.name, value)
    assert env.HOOK.get() == value


@pytest.mark.parametrize("value", ["-1", "", "8.5", "many"])
def test_a_count_that_is_none(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(env.RING_MARGIN.name, value)
    with pytest.raises(ValueError, match=f"{env.RING_MARGIN.name}='{value}'; use a number, 0 or more"):
        env.RING_MARGIN.count()
