"""Python bindings of `_C` for two torch ops.

The first op is torch's efficient attention: `_C` can register kernels for the op
(src/hooks/efficient_attention_op.cpp). The second op is torch's varlen_attn: `_C` decides about calls of the op
(src/dispatch/varlen_decision.cpp).
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from . import bindings
from .library import ints, lib, text


def set_varlen_rule(rule: str) -> None:
    """Set the running torch's rule for selecting the kernel of varlen_attn.

    Args:
        rule: one of bindings.names("varlen rules").
    """
    lib().flashplug_set_varlen_rule(bindings.names("varlen rules").index(rule))


def varlen_rule() -> str:
    """Return the rule set by set_varlen_rule(); "unknown" before the first such call."""
    return bindings.names("varlen rules")[lib().flashplug_varlen_rule()]


def decide_varlen(facts: Mapping[str, int], cc: int, mode_word: int) -> dict[str, str]:
    """Return the decision about a varlen_attn call.

    Args:
        facts: the facts of the call, with exactly the names in bindings.names("varlen call members").
        cc: the compute capability of the GPU; 90 is 9.0.
        mode_word: the mode word of `sdpa_backend`.

    Returns:
        "reason": one of bindings.names("varlen reasons"). "stock": the kernel for stock torch. "text": the reason in
        words. "row": the deciding measurement. "stock_bug": the deciding bug of stock. "error": the error raised by the
        call. The last three entries are empty where not applicable.

    Raises:
        TypeError: a fact is missing or unknown.
    """
    names = bindings.names("varlen call members")
    if differing := set(names) ^ set(facts):
        raise TypeError(f"decide_varlen: facts must be {', '.join(names)}, but {', '.join(sorted(differing))} differ.")
    values = ints([int(facts[name]) for name in names])
    return json.loads(text(lambda out, size: lib().flashplug_varlen_text(values, cc, mode_word, out, size)))


def register_efficient_ops(dispatch_key: str) -> bool:
    """Register kernels for torch's efficient attention op at a dispatch key.

    Returns:
        False if torch's own kernel of the op cannot be called as the fallback. bindings.last_error() has the reason.
    """
    return lib().flashplug_register_efficient_op(dispatch_key.encode()) == 0


def unregister_efficient_op() -> None:
    """Restore torch's own kernels of the efficient attention op."""
    lib().flashplug_unregister_efficient_op()
