"""Long-prompt part of the demo: one causal prefill of 131072 bytes, and the memory needed by attention."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import torch_flashplug

from . import model as gpt
from .inference import CPU_SHAPE, GPU_SHAPE
from .input_text import as_tokens, read_text, repeated

GPU_LENGTH, CPU_LENGTH = 131072, 1024
GIB = 2**30
LOW, SINGLE = 2, 4  # bytes of a bf16 number and of an fp32 number


def _prefill_seconds(model: gpt.ByteGPT, prompt: torch.Tensor, wait) -> tuple[float, bool]:
    """Run the prefill twice. Return the seconds of the second run, and whether all logits are finite."""
    for _ in range(2):
        wait()
        start = time.perf_counter()
        logits, _ = gpt.prefill(model, prompt, prompt.shape[1])
        wait()
    return time.perf_counter() - start, bool(logits.isfinite().all())


def _measured_bytes(shape: gpt.Shape, length: int) -> int:
    """Return the peak memory of one attention call besides the inputs, from the caching allocator, in bytes."""
    draw = {"device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(1, shape.heads, length, shape.head_dim, **draw)
    k, v = (torch.randn(1, shape.kv_heads, length, shape.head_dim, **draw) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shape.heads != shape.kv_heads)
    torch.cuda.synchronize()
    del out
    return torch.cuda.max_memory_allocated() - before


@torch.inference_mode()
def run(file: str | None = None, *, console: Console | None = None) -> None:
    """Print the time of the prefill and a table of memory.

    Without a GPU, the prompt is short and only serves as a test. Then nothing is timed, and the memory is computed.
    """
    console = console or Console(width=max(Console().width, 120))
    on_gpu = torch.cuda.is_available()
    device, shape, length = ("cuda", GPU_SHAPE, GPU_LENGTH) if on_gpu else ("cpu", CPU_SHAPE, CPU_LENGTH)
    content, origin = read_text(file)
    version = f"[bold]torch_flashplug {torch_flashplug.__version__}[/]"
    console.print(f"{version} demo, long prompt, torch {torch.__version__}")
    model = gpt.build(shape, device, torch.bfloat16)
    prompt = as_tokens(repeated(content, length)).to(device)[None]
    seconds, finite = _prefill_seconds(model, prompt, torch.cuda.synchronize if on_gpu else lambda: None)
    took = f"{seconds:.3f} s, " if on_gpu else ""
    console.print(
        f"prefill of {length} bytes ({origin}, repeated), {shape.layers} layers, {shape.heads} heads over "
        f"{shape.kv_heads} KV heads of {shape.head_dim}: {took}logits {'finite' if finite else 'NOT FINITE'}"
    )
    rows = shape.heads * GPU_LENGTH
    table = Table(title=f"Memory of one attention call over {GPU_LENGTH} bytes, beyond its inputs")
    for column in ("what", "GiB", "how known"):
        table.add_column(column, justify="right" if column == "GiB" else "left")
    scores = rows * GPU_LENGTH
    outputs = rows * (shape.head_dim * LOW + SINGLE)
    table.add_row("output and LSE", f"{outputs / GIB:.3f}", "arithmetic")
    if on_gpu:
        table.add_row("F.sdpa with the plugin, peak", f"{_measured_bytes(shape, length) / GIB:.3f}", "measured")
    table.add_row("math: scores and probabilities in bf16", f"{2 * LOW * scores / GIB:.0f}", "arithmetic")
    console.print(table)
