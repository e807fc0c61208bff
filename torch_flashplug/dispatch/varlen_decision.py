"""Kernels of _C over torch's efficient attention (src/hooks/efficient_attention_op.cpp); what _C decides about calls of
torch's varlen_attn (src/dispatch/varlen_decision.cpp), for Python that asks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from . import bindings
from .library import ints, lib, text


def know_varlen_rule(rule: str) -> None:
    """Say how the running torch chooses the kernel of its varlen_attn: one of native.names("varlen rules")."""
    lib().flashplug_know_varlen_rule(bindings.names("varlen rules").index(rule))


def varlen_rule() -> str:
    """Return what know_varlen_rule() was told last; "unknown" before that."""
    return bindings.names("varlen rules")[lib().flashplug_varlen_rule()]


def varlen_verdict(facts: Mapping[str, int], cc: int, mode_word: int) -> dict[str, str]:
    """Return what is decided of a call with these facts on a GPU of that compute capability.

    `facts` has all of native.names("varlen facts"). The result has "exit" (one of native.names("varlen exits")),
    "stock" (the kernel that torch would run), "said" (why, in words), and, empty where they do not apply, "row" (the
    measurement that decided), "rescue" (what stock would do that is wrong) and "error" (what the call raises).
    """
    known = bindings.names("varlen facts")
    if unlike := set(known) ^ set(facts):
        raise TypeError(f"varlen_verdict: facts must be {', '.join(known)}, but {', '.join(sorted(unlike))} differ")
    values = ints([int(facts[name]) for name in known])
    return json.loads(text(lambda out, size: lib().flashplug_varlen_text(values, cc, mode_word, out, size)))


def open_efficient(dispatch_key: str) -> bool:
    """Put kernels over torch's efficient attention at that key; return False where this torch's cannot be called below.

    native.last_error() then says why.
    """
    return lib().flashplug_open_efficient(dispatch_key.encode()) == 0


def close_efficient() -> None:
    """Put torch's own kernels in place again."""
    lib().flashplug_close_efficient()
