"""Suite multi: attention over several GPUs of one host, with one process for each GPU.

The suite compares the plugin in auto mode with the default of stock and with the flash backend of stock, all through
torch's context_parallel. Further cases are Ulysses with plain all-to-alls, and BLOCKS blocks of a Llama. The heads
of the Llama blocks are divided as DTensors and as plain tensors.

A time is the time of a call on the slowest rank, starting at a barrier, as the median of interleaved rounds. The first
rank decides the number of calls in a round, because decisions by the local clocks could differ between ranks.
`steps_ms` is the time of the attention calls alone in the plugin's ring, on the rank with the most calls. `margin_ms`
is the time of the plugin with a number of SMs left to NCCL.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend

from tools.bench.ranks import from_first_rank, max_over_ranks, restart_watchdog, time_on_ranks
from tools.bench.result_schema import GRADIENT_FLOP
from tools.bench.runner import Bench, refusal, row_of
from torch_flashplug import env, sdpa_backend
from torch_flashplug.demo import llama
from torch_flashplug.demo.model import Shape
from torch_flashplug.demo.scopes import Scope, plugin_off, stock_backend
from torch_flashplug.testing import (
    Candidate,
    attention_math,
    grads_math,
    make_inputs,
    measure_error,
    new_case,
    plain_grads,
)
from torch_flashplug.testing.budget import GRAD_FACTOR, OUT_FACTOR
from torch_flashplug.testing.oracle import Masking
from torch_flashplug.torch_hooks.distributed import context_parallel
from torch_flashplug.torch_hooks.distributed.ring_attention import steps_of

HEADS, KV_HEADS, D = 32, 8, 128
BLOCKS = 4  # with a single block, the start-up time of the host would count; a real model step overlaps this time
CHECKED_ROWS = 2048  # rows of the call that is first compared with fp64
MARGINS = (8, 16)
PEERS: dict[str, Scope] = {
    "ours_auto": lambda: sdpa_backend("auto"),
    "stock": plugin_off,
    "stock_flash": lambda: stock_backend(SDPBackend.FLASH_ATTENTION),
}


@dataclass(frozen=True, slots=True)
class Call:
    """Causal attention call of S rows over all ranks, with or without gradients, or a call of Llama blocks."""

    name: str
    s: int
    way: str  # "ring", "ulysses" or "blocks"
    rotate: str = "allgather"
    direction: str = "train"
    margins: bool = False

    def facts(self) -> dict[str, object]:
        flop = 2.0 * HEADS * self.s * self.s * D * GRADIENT_FLOP.get(self.direction, 1.0)
        shape = [1, HEADS, KV_HEADS, self.s, self.s, D, D]
        return {"shape": shape, "d": D, "s": self.s, "mask": "causal", "dtype": "bf16", "flop": flop}


def calls() -> Iterator[Call]:
    for s in (16384, 32768, 65536, 131072):
        yield Call(f"train_ring_allgather_s{s}", s, "ring", margins=s in (16384, 65536))
    for s in (16384, 65536):
        yield Call(f"train_ring_alltoall_s{s}", s, "ring", "alltoall", margins=True)
        yield Call(f"fwd_ring_allgather_s{s}", s, "ring", direction="fwd")
        yield Call(f"train_ulysses_s{s}", s, "ulysses")
    yield Call("train_blocks_dtensor_s4096", 4096, "blocks")


# ---- calls ----


def _draw(heads: int, rows: int, device: str, grad: bool) -> Tensor:
    """Return a random contiguous tensor.

    Projections produce a different layout. Stock's cuDNN in a ring was observed to refuse the layout of projections,
    and only on some ranks.
    """
    return torch.randn(1, heads, rows, D, device=device, dtype=torch.bfloat16, requires_grad=grad)


def _operands(s: int, device: str) -> list[Tensor]:
    """Return q, k, v and the gradient of the output for this rank."""
    rows = s // dist.get_world_size()
    tensors = [_draw(heads, rows, device, True) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [*tensors, _draw(HEADS, rows, device, False)]


def _attend(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, direction: str) -> list[Tensor]:
    with torch.set_grad_enabled(direction == "train"):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return [out, *(torch.autograd.grad(out, (q, k, v), grad) if direction == "train" else ())]


@contextlib.contextmanager
def ring(s: int, rotate: str, device: str) -> Iterator[None]:
    """Enter torch's context_parallel, and restore F.sdpa after an error, because torch 2.11 leaves F.sdpa patched."""
    from torch.distributed.tensor import experimental
    from torch.distributed.tensor.experimental._attention import set_rotate_method
    from torch.distributed.tensor.experimental._context_parallel import _attention as torchs

    set_rotate_method(rotate)
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("cp",))
    sdpa = F.scaled_dot_product_attention
    try:
        with experimental.context_parallel(mesh, buffers=[torch.zeros(s, device=device)], buffer_seq_dims=[0]):
            yield
    finally:
        if F.scaled_dot_product_attention is not sdpa:
            torchs._disable_context_parallel_dispatcher_impl()


def _ring_call(call: Call, device: str) -> Callable[[], object]:
    operands = _operands(call.s, device)
    return lambda: _attend(*operands, call.direction)


class AllToAll(torch.autograd.Function):
    """All-to-all from (B, H, S / W, D) to (B, H / W, S, D), and in the opposite direction."""

    @staticmethod
    def forward(ctx, x: Tensor, scatter: int, gather: int) -> Tensor:
        ctx.back = gather, scatter
        parts = torch.stack([part.contiguous() for part in x.chunk(dist.get_world_size(), scatter)])
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts)
        return torch.cat(received.unbind(0), gather)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return AllToAll.apply(grad, *ctx.back), None, None


def _ulysses_call(call: Call, device: str) -> Callable[[], object]:
    q, k, v, grad = _operands(call.s, device)

    def run() -> tuple[Tensor, ...]:
        heads = (AllToAll.apply(x, 1, 2) for x in (q, k, v))
        out = AllToAll.apply(F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True), 2, 1)
        return torch.autograd.grad(out, (q, k, v), grad)

    return run


def _blocks_call(local: bool, s: int, device: str) -> Callable[[], object]:
    shape = Shape(layers=1, heads=HEADS, kv_heads=KV_HEADS, head_dim=D)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    blocks = [llama.Block(shape).to(device, torch.bfloat16) for _ in range(BLOCKS)]
    for block in blocks:
        llama.tensor_parallel(block, mesh, local)
    hidden = torch.randn(2, s, shape.width, device=device, dtype=torch.bfloat16)

    def run() -> None:
        x = hidden
        for block in blocks:
            x = block(x, None)
        x.sum().backward()

    return run


def _steps_call(call: Call, device: str) -> Callable[[], object]:
    """Return a function that makes only the attention calls of the ring on this rank."""
    world, local = dist.get_world_size(), call.s // dist.get_world_size()
    step_tensors = []
    for step in steps_of(dist.get_rank(), world, True, True):
        rows, keys = local // (1 + step.half_of_rows), local // (1 + step.half_of_keys)
        q, grad = _draw(HEADS, rows, device, True), _draw(HEADS, rows, device, False)
        k, v = (_draw(KV_HEADS, keys, device, True) for _ in range(2))
        step_tensors.append((q, k, v, grad, step.is_causal))

    def run() -> None:
        for q, k, v, grad, causal in step_tensors:
            with torch.set_grad_enabled(call.direction == "train"):
                out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
            if call.direction == "train":
                torch.autograd.grad(out, (q, k, v), grad)

    return run


# ---- numbers ----


def check(device: str) -> dict[str, dict[str, float]]:
    """Return the errors of the plugin's ring against fp64, each divided by the error budget of a single device.

    Raises:
        SystemExit: a quotient is larger than 1.
    """
    from torch.distributed.tensor.experimental._attention import _HeadTailLoadBalancer, context_parallel_unshard

    world, rank = dist.get_world_size(), dist.get_rank()
    case = new_case("ring", (1, 8, 2), (CHECKED_ROWS,) * 2, (D, D), "causal")
    inputs = make_inputs(case, device)
    tensors = (*inputs, inputs.grad_out)
    order = _HeadTailLoadBalancer(CHECKED_ROWS, world, device)._generate_indices()[0].long().chunk(world)[rank]
    parts = [x.index_select(2, order).requires_grad_(i < 3) for i, x in enumerate(tensors)]
    mask = Masking(1)
    exact = attention_math(*inputs, scale=None, mask=mask).out, *grads_math(*tensors, mask=mask)
    low = attention_math(*inputs, scale=None, mask=mask, dtype=torch.bfloat16).out, *plain_grads(case, inputs)
    errors = {}
    for rotate in ("allgather", "alltoall"):
        with PEERS["ours_auto"](), ring(CHECKED_ROWS, rotate, device):
            results = [x.detach() for x in _attend(*parts, "train")]
            results = context_parallel_unshard(init_device_mesh(device, (world,)), results, [2] * len(results))
        reports = {
            name: measure_error(x, right, plain, OUT_FACTOR if name == "out" else GRAD_FACTOR)
            for name, x, right, plain in zip(("out", "dq", "dk", "dv"), results, exact, low, strict=True)
        }
        errors[rotate] = {
            name: round(max(report.rms / report.budget_rms, report.max / report.budget_max), 3)
            for name, report in reports.items()
        }
    if max(max(by_name.values()) for by_name in errors.values()) > 1.0:
        raise SystemExit(f"ring: wrong, nothing is timed: {errors}")
    return errors


# ---- suite ----


def _candidates(call: Call, device: str) -> tuple[dict[str, Candidate], dict[str, str]]:
    """Return the candidates that can run the call on all ranks, and the reasons of the refusals."""
    makers = {"ring": _ring_call, "ulysses": _ulysses_call}
    if call.way == "blocks":
        run, local = (_blocks_call(local, call.s, device) for local in (False, True))
        candidates = {name: Candidate(run, PEERS[name]) for name in ("ours_auto", "stock")}
        candidates |= {name.replace("_auto", "") + "_local": Candidate(local, PEERS[name]) for name in list(candidates)}
    else:
        run = makers[call.way](call, device)
        candidates = {name: Candidate(run, scope) for name, scope in PEERS.items()}
    refused = {}
    for name, candidate in list(candidates.items()):
        restart_watchdog()
        try:
            with candidate.scope():
                candidate.call()
        except (RuntimeError, NotImplementedError) as error:
            refused[name] = refusal(error)
        if max_over_ranks(name in refused):
            refused.setdefault(name, "a different rank refused")
            del candidates[name]
    return candidates, refused


def _peaks(candidates: Mapping[str, Candidate]) -> dict[str, float]:
    """Return the memory in MiB that each call needs on this rank in addition to the operands."""
    peaks = {}
    for name, candidate in candidates.items():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with candidate.scope():
            candidate.call()
        torch.cuda.synchronize()
        peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
    return peaks


@contextlib.contextmanager
def _margin(ctas: int) -> Iterator[None]:
    before = os.environ.get(env.RING_MARGIN.name)
    os.environ[env.RING_MARGIN.name] = str(ctas)
    try:
        yield
    finally:
        os.environ.pop(env.RING_MARGIN.name)
        if before is not None:
            os.environ[env.RING_MARGIN.name] = before


@contextlib.contextmanager
def _gathered() -> Iterator[None]:
    context_parallel.use("gather")
    try:
        yield
    finally:
        context_parallel.use("ring")


def _measure(bench: Bench, call: Call) -> None:
    device = bench.device
    around = ring(call.s, call.rotate, device) if call.way == "ring" else contextlib.nullcontext()
    with around:
        candidates, refused = _candidates(call, device)
        peaks = _peaks(candidates) if device == "cuda" else {}
        variants = {}
        if call.way == "ring" and "ours_auto" in candidates:
            scopes = {f"margin{ctas}": lambda ctas=ctas: _margin(ctas) for ctas in MARGINS} if call.margins else {}
            scopes |= {"gather": _gathered} if call.rotate == "allgather" else {}
            variants = {name: Candidate(candidates["ours_auto"].call, scope) for name, scope in scopes.items()}
        timings = time_on_ranks({**candidates, **variants}, bench.rounds, device)
        if variants and peaks:
            peaks |= _peaks(variants)
    more = {"variants_ms": {name: timings.pop(name).ms for name in variants}}
    if call.way == "ring":
        alone = {"steps": Candidate(_steps_call(call, device), PEERS["ours_auto"])}
        more["steps_ms"] = time_on_ranks(alone, bench.rounds, device)["steps"].ms
    row = row_of(call.name, timings, **call.facts(), **more, peak_mib=peaks, refused=refused)
    row["ranks"] = dist.get_world_size()
    if dist.get_rank() == 0:
        bench.add(row)


def suite_multi(bench: Bench) -> None:
    if dist.is_initialized() and bench.check:
        errors = check(bench.device)
        if dist.get_rank() == 0:
            print("errors divided by the error budget:", errors, flush=True)
    for call in calls():
        if from_first_rank(bench.take(call.name)):
            restart_watchdog()
            _measure(bench, call)
