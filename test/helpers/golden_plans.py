"""Named calls and plans as text, from which the golden tables are made."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from torch_flashplug.dispatch import bindings
from torch_flashplug.dispatch.table_structs import DTYPE_IDS

Call = Mapping[str, int | float]


def call(heads: tuple[int, int, int], rows: tuple[int, int], dims: tuple[int, int], **facts: int | float) -> Call:
    """Return the sizes of a call: heads (B, Hq, Hkv), rows (Sq, Sk), dims (D, Dv)."""
    names = ("B", "Hq", "Hkv", "Sq", "Sk", "D", "Dv")
    return dict(zip(names, (*heads, *rows, *dims), strict=True)) | facts


def operand_dtypes(*names: str) -> Call:
    """Return the dtypes of query, key and value.

    Args:
        names: three names of `dtypes.DTYPE_INFO`, or a single name for all three. An unknown name stands for a dtype
            without kernels.
    """
    operands = ("dtype_q", "dtype_k", "dtype_v")
    return dict(zip(operands, (DTYPE_IDS.get(name, len(DTYPE_IDS)) for name in names * (3 // len(names))), strict=True))


# Calls decided by the dispatch table.
CALLS = {
    "train_4k_d128_causal": call((4, 16, 16), (4096, 4096), (128, 128), causal=1, grad=1),
    "train_4k_d192v128_causal": call((4, 16, 16), (4096, 4096), (192, 128), causal=1, grad=1),
    "prefill_4k_d128_causal": call((4, 16, 16), (4096, 4096), (128, 128), causal=1),
    "encoder_512_d64": call((16, 12, 12), (512, 512), (64, 64)),
    "prefill_16k_d64_fp16": call((1, 16, 16), (16384, 16384), (64, 64), **operand_dtypes("fp16")),
    "one_small_tile": call((1, 1, 1), (64, 64), (64, 64)),
    "odd_tail_sq113_sk203_d72": call((2, 4, 4), (113, 203), (72, 72)),
    "vision_4k_d72": call((4, 16, 16), (4096, 4096), (72, 72)),
    "decode_1x8k_d128_gqa4": call((1, 32, 8), (1, 8192), (128, 128)),
    "decode_b64_1x8k_d128_gqa4": call((64, 32, 8), (1, 8192), (128, 128)),
}


def wrap_text(text: str, indent: str) -> str:
    return textwrap.fill(text, 100, initial_indent=indent, subsequent_indent=indent + "  ")


def plan_as_lines(plan: dict, backends: Sequence[str]) -> list[str]:
    """Return a plan as lines: the chosen kernel, the reason for each rejected backend, the gate."""
    summary = f"{plan['backend']} {plan['kernel']}".strip()
    if plan["kernel"]:
        summary += f" tiles={plan['tiles']} splits={plan['splits']}"
    lines = [wrap_text(summary, "    ")]
    if plan["row"]:
        lines.append(wrap_text(plan["row"], "      "))
    if plan["gradients"]:
        lines.append(wrap_text(f"gradients: {plan['gradients']}", "      "))
    lines += [
        wrap_text(f"{backend}: {plan['reasons'][backend]}", "      ")
        for backend in backends
        if backend != plan["backend"]
    ]
    if plan["gate"]:
        lines.append(wrap_text(f"gate: {plan['gate']}", "      "))
    return lines


def plans_as_text(
    calls: Mapping[str, Call],
    devices: Mapping[str, dict | None],
    mode: int = 0,
    backends: Sequence[str] = ("fa3",),
) -> str:
    """Return the plans of all calls on all devices as text; devices with equal plans share an entry."""
    lines = []
    for name, facts in calls.items():
        lines.append(name)
        answers: dict[str, list[str]] = {}
        for device, device_facts in devices.items():
            answers.setdefault("\n".join(plan_as_lines(bindings.plan(facts, device_facts, mode), backends)), []).append(
                device
            )
        for answer, names in answers.items():
            lines += [f"  {' '.join(names)}", answer]
    return "\n".join(lines) + "\n"
