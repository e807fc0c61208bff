"""Estimated times of ring attention on more GPUs than were available (table of docs/several_gpus.md).

    python tools/ring_plan.py            prints the table of the page

The times are arithmetic, not measurements. The inputs are kernel rates measured on one H100, and byte counts divided by
the rates of memory and links. Each exchange overlaps the step before the exchanged data is used. The module needs only
the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass

HEADS, KV_HEADS, D = 32, 8, 128  # bf16, causal, balanced
MEMORY = 2.9e12  # bytes per second of elementwise kernels
NVLINK, NETWORK = 329e9, 45e9  # bytes per second received by a GPU: measured between two H100; 400 Gb/s network
RAMP = 380  # overhead of a call in rows: short calls do not reach the rates of long calls


@dataclass(frozen=True, slots=True)
class Kernels:
    """Rates of the kernels.

    `full`, `causal`, `full_backward` and `causal_backward` are TFLOP/s of long calls. `merge` and `merge_dq` are the
    bytes that merging moves for each element of a rank's output. `merge_dkv` is the bytes for each element of a rank's
    keys and values in the backward.
    """

    full: float
    causal: float
    full_backward: float
    causal_backward: float
    merge: float
    merge_dq: float
    merge_dkv: float


OURS = Kernels(671, 684, 607, 580, merge=10, merge_dq=8, merge_dkv=12)
CUDNN = Kernels(612, 553, 538, 517, merge=32.5, merge_dq=11.5, merge_dkv=40)  # ring of torch
PLANS = (
    (2, NVLINK, (16384, 32768, 65536, 131072)),
    (8, NVLINK, (131072, 524288, 1048576)),
    (64, NETWORK, (131072, 524288, 1048576)),
    (256, NETWORK, (1048576, 4194304)),
    (1024, NETWORK, (1048576, 4194304, 8388608)),
)


def milliseconds(kernels: Kernels, s: int, ranks: int, link: float) -> float:
    """Return the time in milliseconds of forward and backward for a call of s rows in one layer."""
    rows = s // ranks
    half = rows * rows / 2 * HEADS * D * 1e-12
    out, keys = HEADS * rows * D, 2 * KV_HEADS * rows * D  # elements

    def step(flop: float, rate: float, least: int) -> float:
        return flop * half / (rate / (1 + RAMP / least))

    exchange = keys * 2 / link
    merged = kernels.merge * out / MEMORY
    forward = step(4, kernels.causal, rows) + merged
    forward += (ranks - 1) * max(step(4, kernels.full, rows // 2) + merged, exchange)
    added = (kernels.merge_dq * out + kernels.merge_dkv * keys) / MEMORY
    gradients = 2 * exchange  # fp32
    backward = step(10, kernels.causal_backward, rows) + added + gradients
    backward += (ranks - 1) * max(step(10, kernels.full_backward, rows // 2) + added, exchange + gradients)
    return (forward + backward) * 1e3


def table() -> list[str]:
    lines = [
        "| GPUs | link, GB/s | rows | rows a GPU | torch's ring on cuDNN, ms | ours, ms | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for ranks, link, sizes in PLANS:
        for s in sizes:
            stock, ours = (milliseconds(kernels, s, ranks, link) for kernels in (CUDNN, OURS))
            cells = (
                ranks,
                f"{link / 1e9:.0f}",
                f"{s // 1024}k",
                s // ranks,
                f"{stock:.1f}",
                f"{ours:.1f}",
                f"{stock / ours:.2f}",
            )
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def hidden_from(link: float) -> int:
    """Return the rows per GPU above which the exchange of keys and values takes less time than a forward step."""
    return round(2 * KV_HEADS * 2 / link * OURS.full * 1e12 / (2 * HEADS))


if __name__ == "__main__":
    print("\n".join(table()))
    for name, link in (("NVLink", NVLINK), ("400 Gb/s", NETWORK)):
        print(f"{name}: an exchange is hidden from {hidden_from(link)} rows per GPU on")
