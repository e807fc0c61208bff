"""Trial on a Hopper GPU: gradients of head dims 264 to 512, numbers against fp64, then times against stock.

    python tools/tune/trials/wide_backward.py              checks (about 30 s), then times (about 80 s)
    python tools/tune/trials/wide_backward.py check        checks alone
    python tools/tune/trials/wide_backward.py time         times alone
    python tools/tune/trials/wide_backward.py kernels      names of the kernels, as options of tools/build/aot.py

The kernels must be in a pack, or the compiler must be installed, which takes minutes. "One stage" is a variant with a
single stage of K, Q or dO where two fit, and a longer ring of the other operand. `FAIL` begins the line of a wrong
number. TFLOP/s count 10 B H Sq Sk D of the backward alone (causal: half).

Predicted for an H100, 32 heads, S 8192, D 512 (docs/experiments/backward.md): 230 to 300 full, 210 to 280 causal, five
times stock. Results of two runs have the same bits.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

import torch_flashplug
from torch_flashplug.api import startup
from torch_flashplug.dispatch import bindings
from torch_flashplug.registry import kernel_table
from torch_flashplug.registry.kernel_spec import KernelSpec
from torch_flashplug.testing import assert_within_budget
from torch_flashplug.testing.budget import GRAD_FACTOR

START, LIMIT_S, ROUNDS = time.time(), 115, 5
NAMES = ("dq", "dk", "dv")
CHECKS = (  # B, Hq, Hkv, Sq, Sk, D, Dv
    (1, 4, 2, 65, 129, 264, 264),
    (2, 3, 3, 200, 333, 320, 320),
    (1, 8, 2, 700, 500, 384, 384),
    (1, 4, 1, 129, 1000, 448, 448),
    (1, 2, 2, 1000, 70, 512, 512),
    (2, 8, 4, 513, 640, 512, 512),
    (1, 4, 2, 300, 300, 512, 256),
    (1, 40, 8, 2000, 2000, 512, 512),
)
TIMES = (  # name, B, Hq, Hkv, S, D, causal
    ("D 512 full", 1, 32, 32, 8192, 512, False),
    ("D 512 causal", 1, 32, 32, 8192, 512, True),
    ("D 512 causal, 32 heads on 4", 1, 32, 4, 8192, 512, True),
    ("D 384 full", 1, 32, 32, 8192, 384, False),
    ("D 320 full", 1, 32, 32, 8192, 320, False),
    ("D 512 full, 2k", 4, 32, 32, 2048, 512, False),
    ("D 512 full, one head, 16k", 1, 1, 1, 16384, 512, False),
)
failures = 0


def say(*words: object) -> None:
    print(f"[{time.time() - START:5.1f}]", *words, flush=True)


def make_leaves(B: int, Hq: int, Hkv: int, Sq: int, Sk: int, D: int, Dv: int, dtype: torch.dtype) -> list[Tensor]:
    """Return fresh random q, k and v with gradients, as (B, H, S, D) views of (B, S, H, D)."""
    shapes = ((B, Sq, Hq, D), (B, Sk, Hkv, D), (B, Sk, Hkv, Dv))
    return [torch.randn(shape, device="cuda").to(dtype).transpose(1, 2).requires_grad_() for shape in shapes]


def reference(leaves: list[Tensor], grad_out: Tensor, dtype: torch.dtype, mask: Tensor | None) -> tuple[Tensor, ...]:
    """Return dq, dk and dv by definition, with every step rounded to `dtype`."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in leaves)
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
        scores = scores.masked_fill(~mask.any(-1, keepdim=True), 0.0)
    weights = scores.softmax(-1) if mask is None else scores.softmax(-1) * mask.any(-1, keepdim=True)
    return torch.autograd.grad(weights @ v.repeat_interleave(group, 1), (q, k, v), grad_out.to(dtype))


def poison(tensors: list[Tensor]) -> None:
    """Fill free blocks of the allocator with NaN, so that elements not written by a kernel show."""
    blocks = [torch.full_like(x, math.nan, dtype=dtype) for x in tensors for dtype in (x.dtype, torch.float32)]
    del blocks


def check(shape: tuple[int, ...], kind: str, dtype: torch.dtype) -> None:
    """Compare the gradients of a call with fp64, and the bits of two runs."""
    global failures  # noqa: PLW0603
    Sq, Sk = shape[3:5]
    leaves = make_leaves(*shape, dtype)
    mask = None
    if kind == "causal":
        mask = torch.ones(Sq, Sk, dtype=torch.bool, device="cuda").tril()
    elif kind == "mask":
        mask = torch.rand(Sq, Sk, device="cuda") < 0.3
        mask[: Sq // 2, Sk // 2 :] = False
    bindings.counters(reset=True)
    with torch_flashplug.sdpa_backend("fa3"):
        attn_mask = mask if kind == "mask" else None
        out = F.scaled_dot_product_attention(*leaves, attn_mask, is_causal=kind == "causal", enable_gqa=True)
        grad_out, runs = torch.randn_like(out), []
        for _ in range(2):
            poison(leaves)
            runs.append(torch.autograd.grad(out, leaves, grad_out, retain_graph=True))
    torch.cuda.synchronize()
    label = f"{kind} {dtype} {shape}"
    try:
        if bindings.counters(reset=True)["ours_bwd"] != 2:
            raise AssertionError("stock has computed the gradients")
        exact, low = (reference(leaves, grad_out, rounded, mask) for rounded in (torch.float64, dtype))
        for name, first, second, expected, plain in zip(NAMES, *runs, exact, low, strict=True):
            assert_within_budget(f"{label} {name}", first, expected, plain, factor=GRAD_FACTOR)
            if not torch.equal(first, second):
                raise AssertionError(f"{name} differs between two runs")
    except AssertionError as error:
        failures += 1
        say("FAIL", label, str(error)[:500])


def run_checks() -> None:
    for shape in CHECKS:
        for kind in ("full", "causal") if shape[5] < 400 else ("full", "causal", "mask"):
            for dtype in (torch.bfloat16, torch.float16):
                check(shape, kind, dtype)
        say("checked", shape, "failures so far:", failures)


def one_stage_rows() -> list[kernel_table.KernelRow]:
    """Return the kernel table with a single stage in backward rows of head dims above 256."""
    return [
        dataclasses.replace(row, stages=1) if row.kind == "partbwd" and row.d_max > 256 else row
        for row in kernel_table.KERNEL_ROWS
    ]


@contextmanager
def tables_of(variant: str) -> Iterator[None]:
    """Enter a scope with the kernel table of a variant."""
    if variant == "one stage":
        startup.push_tables(one_stage_rows())
    try:
        yield
    finally:
        startup.push_tables()


def kernel_names() -> list[str]:
    """Return the names of the kernels that the checks and the times need."""

    def wide(rows: Iterable[kernel_table.KernelRow]) -> list[KernelSpec]:
        specs = [spec for row in rows if row.kind in {"fwd", "partbwd"} for spec in row.specs()]
        return [spec for spec in specs if spec.arch == 90 and spec.d == spec.dv > 256]

    specs = [spec for spec in wide(kernel_table.KERNEL_ROWS) if spec.mask in {"full", "causal", "mask"}]
    specs += [spec for spec in wide(one_stage_rows()) if (spec.dtype, spec.mask) == ("bf16", "full")]
    return list(dict.fromkeys(spec.name() for spec in specs))


def time_of(run: Callable[[], object], repeats: int) -> float:
    """Return the milliseconds of a run, the mean of several runs in sequence."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats


def make_backward(backend: str, leaves: list[Tensor], causal: bool) -> Callable[[], object]:
    """Return a function that runs the backward of a call, behind the forward of the same backend."""
    with torch_flashplug.sdpa_backend(backend):
        out = F.scaled_dot_product_attention(
            *leaves, is_causal=causal, enable_gqa=leaves[0].shape[1] != leaves[1].shape[1]
        )
    grad_out = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True)


def profile(run: Callable[[], object]) -> str:
    """Return the microseconds of each kernel of a run."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    rows = [(row.key, row.device_time_total) for row in trace.key_averages() if row.device_time_total > 1]
    names = [(key[key.find("Backward") :][:28] if "Backward" in key else key[:28], us) for key, us in rows]
    return ", ".join(f"{key} {us:.0f}" for key, us in names)


def run_times() -> None:
    for name, B, Hq, Hkv, S, D, causal in TIMES:
        if time.time() - START > LIMIT_S:
            say("no time for", name)
            continue
        leaves = make_leaves(B, Hq, Hkv, S, S, D, D, torch.bfloat16)
        variants = ("fa3", "one stage", "stock") if D < 512 else ("fa3", "stock")
        runs, times = {}, {}
        for variant in variants:
            try:
                runs[variant] = make_backward("stock" if variant == "stock" else "fa3", leaves, causal)
                with tables_of(variant):
                    time_of(runs[variant], 1)
                times[variant] = []
            except torch.OutOfMemoryError:
                say(name, variant, "is out of memory")
                runs.pop(variant, None)
        for _ in range(ROUNDS):
            for variant, run in runs.items():
                with tables_of(variant):
                    times[variant].append(time_of(run, 1 if variant == "stock" else 3))
        flop = 10 * B * Hq * S * S * D * (0.5 if causal else 1.0)
        medians = {variant: statistics.median(x) for variant, x in times.items()}
        rates = ", ".join(f"{variant} {ms:.2f} ms {flop / ms / 1e9:.0f} TFLOP/s" for variant, ms in medians.items())
        ratio = f"{medians['stock'] / medians['fa3']:.2f}" if "stock" in medians else "-"
        say(f"{name}: {rates}; stock / fa3 {ratio}")
        say("   us by kernel:", profile(runs["fa3"]))


if __name__ == "__main__":
    if sys.argv[1:] == ["kernels"]:
        print(*(f"--spec {name}" for name in kernel_names()))
        sys.exit(0)
    if sys.argv[1:] != ["time"]:
        run_checks()
        say("checks done:", failures, "failures")
    if sys.argv[1:] != ["check"] and not failures:
        run_times()
    sys.exit(bool(failures))
