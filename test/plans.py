"""Named calls, and dispatch plans as text, for the golden tables."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from torch_flashplug.dispatch import bindings
from torch_flashplug.dispatch.table_structs import DTYPE_IDS

Call = Mapping[str, int | float]


def call(heads: tuple[int, int, int], rows: tuple[int, int], dims: tuple[int, int], **more: int | float) -> Call:
    """Return a call with heads (B, Hq, Hkv), rows (Sq, Sk) and dims (D, Dv)."""
    names = ("B", "Hq", "Hkv", "Sq", "Sk", "D", "Dv")
    return dict(zip(names, (*heads, *rows, *dims), strict=True)) | more


def made_of(*names: str) -> Call:
    """Return the dtypes of query, key and value by name (elements.NUMBERS).

    A single name stands for all three operands. An unknown name stands for a dtype without kernels.
    """
    operands = ("dtype_q", "dtype_k", "dtype_v")
    return dict(zip(operands, (DTYPE_IDS.get(name, len(DTYPE_IDS)) for name in names * (3 // len(names))), strict=True))


# Calls for which the dispatch table decides.
CALLS = {
    "train_4k_d128_causal": call((4, 16, 16), (4096, 4096), (128, 128), causal=1, grad=1),
    "train_4k_d192v128_causal": call((4, 16, 16), (4096, 4096), (192, 128), causal=1, grad=1),
    "prefill_4k_d128_causal": call((4, 16, 16), (4096, 4096), (128, 128), causal=1),
    "encoder_512_d64": call((16, 12, 12), (512, 512), (64, 64)),
    "prefill_16k_d64_fp16": call((1, 16, 16), (16384, 16384), (64, 64), **made_of("fp16")),
    "one_small_tile": call((1, 1, 1), (64, 64), (64, 64)),
    "odd_tail_sq113_sk203_d72": call((2, 4, 4), (113, 203), (72, 72)),
    "vision_4k_d72": call((4, 16, 16), (4096, 4096), (72, 72)),
    "decode_1x8k_d128_gqa4": call((1, 32, 8), (1, 8192), (128, 128)),
    "decode_b64_1x8k_d128_gqa4": call((64, 32, 8), (1, 8192), (128, 128)),
}


def wrapped(text: str, indent: str) -> str:
    return textwrap.fill(text, 100, initial_indent=indent, subsequent_indent=indent + "  ")


def described(plan: dict, backends: Sequence[str]) -> list[str]:
    """Return a plan as lines: the selected kernel, the reason against each rejected backend, and the gate."""
    taken = f"{plan['backend']} {plan['kernel']}".strip()
    if plan["kernel"]:
        taken += f" tiles={plan['tiles']} splits={plan['splits']}"
    lines = [wrapped(taken, "    ")]
    if plan["row"]:
        lines.append(wrapped(plan["row"], "      "))
    if plan["gradients"]:
        lines.append(wrapped(f"gradients: {plan['gradients']}", "      "))
    lines += [
        wrapped(f"{backend}: {plan['reasons'][backend]}", "      ")
        for backend in backends
        if backend != plan["backend"]
    ]
    if plan["gate"]:
        lines.append(wrapped(f"gate: {plan['gate']}", "      "))
    return lines


def table_of(
    calls: Mapping[str, Call],
    devices: Mapping[str, dict | None],
    mode: int = 0,
    backends: Sequence[str] = ("fa3",),
) -> str:
    """Return a text with the plan of every call on every device. Devices with equal plans share a paragraph."""
    lines = []
    for name, problem in calls.items():
        lines.append(name)
        answers: dict[str, list[str]] = {}
        for device, facts in devices.items():
            answers.setdefault("\n".join(described(bindings.plan(problem, facts, mode), backends)), []).append(device)
        for answer, names in answers.items():
            lines += [f"  {' '.join(names)}", answer]
    return "\n".join(lines) + "\n"
