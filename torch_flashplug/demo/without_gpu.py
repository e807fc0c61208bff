"""Demo for machines without a GPU: the model's prefill runs on one interpreted torch_flashplug kernel.

The PTX of the kernel is interpreted on this CPU (interpreted.py). The outputs are compared with fp64 and with stock
torch. Nothing is timed, because without a GPU stock torch serves every call, with and without the plugin.
"""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ..dispatch import bindings
from ..testing import Masking, attention_math, interpreted, measure_error
from . import benchmark_table
from . import model as gpt
from .call_recorder import Call, OutputRecorder
from .scopes import plugin_off


def show(console: Console, model: gpt.ByteGPT, prompt: Tensor, closing: str) -> None:
    """Print the errors of an interpreted kernel, the measured speeds, and the closing sentence."""
    _show_kernel(console, model, prompt)
    benchmark_table.show(console)
    console.print(closing)


def _show_kernel(console: Console, model: gpt.ByteGPT, prompt: Tensor) -> None:
    """Run the prefill on the kernel that an H100 would use, and print the errors, or why no kernel can run."""
    if lack := interpreted.missing():
        console.print(f"No kernel runs on this CPU: the interpreter {lack}.")
        return
    with plugin_off(), OutputRecorder() as stock:
        stock_logits, _ = gpt.prefill(model, prompt, prompt.shape[1])
    first = stock.calls[0]
    kernel = interpreted.kernel_of(first.q, first.k, first.v, **first.kwargs)
    if not kernel:
        console.print("No kernel runs on this CPU: stock torch would serve this prefill on an H100, too.")
        return
    console.print(f"Kernel {kernel}: compiled for an H100, interpreted from its PTX on this CPU.")
    try:
        pack = interpreted.build(kernel, lambda line: console.print(f"  {line}", highlight=False))
    except interpreted.BuildError as error:
        console.print(f"The kernel could not be built: {error}", markup=False)
        return
    logits, ours, num_served = prefill_on(pack, model, prompt)
    console.print(_errors_table(ours))
    console.print(
        f"{num_served} of the prefill's {len(ours.calls)} attention calls ran on this kernel, through F.sdpa and the "
        f"dispatcher. {_next_byte(logits, stock_logits)}"
    )


def prefill_on(pack: Path, model: gpt.ByteGPT, prompt: Tensor) -> tuple[Tensor, OutputRecorder, int]:
    """Run the prompt through the unchanged model, with attention by the kernel of an interpreted pack.

    Returns:
        The logits after the prompt, the attention calls with outputs, and the number of calls served by the kernel.
    """
    with interpreted.kernels(pack), OutputRecorder() as recorder:
        bindings.counters(reset=True)
        logits, _ = gpt.prefill(model, prompt, prompt.shape[1])
        num_served = bindings.counters(reset=True)["ours_fwd"]
    return logits, recorder, num_served


def call_errors(call: Call, out: Tensor) -> tuple[float, float, float]:
    """Return the RMS errors against fp64 of an output, of stock torch, and of plain math in the call's dtype."""
    settings = {"scale": call.kwargs.get("scale"), "mask": Masking(int(call.causal))}
    exact, plain = (
        attention_math(call.q, call.k, call.v, **settings, dtype=dtype).out for dtype in (torch.float64, call.q.dtype)
    )
    with plugin_off():
        stock = call.run()
    return tuple(measure_error(result, exact, plain).rms for result in (out, stock, plain))


def _errors_table(recorder: OutputRecorder) -> Table:
    """Return the table of errors, with one row for each attention call."""
    table = Table(title="RMS error against fp64 math (smaller is better)")
    for column in ("call", "our kernel, interpreted", "stock torch on the CPU", "plain bf16 math", "ours / stock"):
        table.add_column(column, justify="left" if column == "call" else "right")
    for layer, (call, out) in enumerate(zip(recorder.calls, recorder.outs, strict=True), 1):
        ours, stock, plain = call_errors(call, out)
        ratio = f"{ours / stock:.3f}" if stock else "-"
        table.add_row(f"prefill, layer {layer}", f"{ours:.3e}", f"{stock:.3e}", f"{plain:.3e}", ratio)
    return table


def _next_byte(logits: Tensor, stock_logits: Tensor) -> str:
    """Return a sentence that compares the next bytes predicted by the two prefills."""
    ours, stock = int(logits.argmax()), int(stock_logits.argmax())
    apart = float((logits.float() - stock_logits.float()).abs().max())
    verdict = "as with stock torch" if ours == stock else f"but {stock} with stock torch"
    return f"The next byte is {ours}, {verdict}; the logits of both differ by at most {apart:.4f}."
