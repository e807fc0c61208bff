"""Suites varlen, window, softcap and sinks: torch_flashplug.attention compared with all peers that support the calls.

The suites also time the project's kernels without the feature of the suite (`ours_without_feature`), and with tile
lists from a plan (`ours_plan`). All times are device times of replayed CUDA graphs.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.attention import varlen
from torch.nn.attention.flex_attention import create_block_mask

from tools.bench import baselines
from tools.bench.result_schema import GRADIENT_FLOP, WITHOUT_FEATURE
from tools.bench.runner import Bench, complete_call, row_of, time_with_peers
from torch_flashplug import attention, plan_varlen, sdpa_backend

TOKENS, WIDTH = 16384, 2048  # rows of a call, and heads x head dim
SEED = 20261126
LARGEST_ERROR = 0.01  # largest allowed relative error against fp64: above, a result is wrong
ROUND_MS, GRAPH_MS, GRAPH_CALLS = 10.0, 2.0, 10
ROWS_CHECKED = 64  # checked rows: the last rows of the first sequence and of the longest sequence
CAP = 50.0  # softcap of Gemma 2
PLANNED = "ours_plan"
SINKS = {"fa3": ("sinks", torch.bfloat16), "fa4": ("learnable_sink", torch.float32)}  # argument name and dtype of sinks


@dataclass(frozen=True, slots=True)
class Call:
    """Self-attention call in bf16: packed sequences if `is_packed`, else a batch of sequences of equal length."""

    name: str
    lengths: tuple[int, ...]
    d: int
    heads: tuple[int, int]
    left: int = -1  # number of visible keys before the query's own position; -1: all
    softcap: float = 0.0
    sinks: bool = False
    is_packed: bool = False
    direction: str = "fwd"
    causal: bool = True

    @property
    def scores(self) -> int:
        """Number of visible scores of a head."""
        if not self.causal:
            return sum(s * s for s in self.lengths)
        windows = [(s, s if self.left < 0 else min(s, self.left + 1)) for s in self.lengths]
        return sum(w * (w + 1) // 2 + (s - w) * w for s, w in windows)

    @property
    def flop(self) -> float:
        return 4.0 * self.scores * self.heads[0] * self.d * GRADIENT_FLOP.get(self.direction, 1.0)

    def facts(self) -> dict[str, object]:
        longest = max(self.lengths)
        mask = f"window_{self.left}" if self.left >= 0 else "causal" if self.causal else "full"
        shape = [len(self.lengths), *self.heads, longest, longest, self.d, self.d]
        return {"shape": shape, "d": self.d, "s": longest, "mask": mask, "dtype": "bf16", "flop": self.flop}


def _zipf(total: int) -> tuple[int, ...]:
    """Return Zipf-distributed sequence lengths, as in natural text: few long and many short sequences, shuffled."""
    shares = [1.0 / rank for rank in range(1, 33)]
    lengths = [max(1, int(total * share / sum(shares))) for share in shares]
    lengths[0] += total - sum(lengths)
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(SEED)).tolist()
    return tuple(lengths[i] for i in order)


def _heads(d: int) -> tuple[int, int]:
    return WIDTH // d, WIDTH // d


def packed() -> Iterator[Call]:
    """Yield calls with packed sequences of equal lengths, of Zipf-distributed lengths, and of very short lengths.

    A batch could also hold the sequences of equal lengths. The calls with very short lengths have thousands of
    sequences.
    """
    for direction in ("fwd", "train"):
        for d in (64, 128, 256):
            heads = _heads(d)
            for s in (512, 2048, 8192, 16384):
                name, lengths = f"{direction}_equal_d{d}_s{s}", (s,) * (TOKENS // s)
                yield Call(name, lengths, d, heads, is_packed=True, direction=direction)
            yield Call(f"{direction}_zipf_d{d}", _zipf(TOKENS), d, heads, is_packed=True, direction=direction)
            for number, s in ((1024, 16), (4096, 4)):
                name = f"{direction}_short_d{d}_{number}x{s}"
                yield Call(name, (s,) * number, d, heads, is_packed=True, direction=direction)
        for d in (32, 96, 192):
            yield Call(f"{direction}_zipf_d{d}", _zipf(TOKENS), d, _heads(d), is_packed=True, direction=direction)
        yield Call(f"{direction}_zipf_gqa_d128", _zipf(TOKENS), 128, (32, 8), is_packed=True, direction=direction)
        for d in (64, 128, 256):
            name = f"{direction}_zipf_full_d{d}"
            yield Call(name, _zipf(TOKENS), d, _heads(d), is_packed=True, direction=direction, causal=False)


def window() -> Iterator[Call]:
    for direction in ("fwd", "train"):
        for d, lengths in ((64, (8192,)), (128, (8192, 16384, 32768)), (256, (8192,))):
            for s in lengths:
                for left in (128, 1024, 4096):
                    name, batch = f"{direction}_window{left}_d{d}_s{s}", (s,) * max(1, TOKENS // s)
                    yield Call(name, batch, d, _heads(d), left - 1, direction=direction)


def softcap() -> Iterator[Call]:
    for direction in ("fwd", "train"):
        for d in (64, 128, 256):
            for s in (2048, 8192):
                name = f"{direction}_softcap_d{d}_s{s}"
                yield Call(name, (s,) * (TOKENS // s), d, _heads(d), softcap=CAP, direction=direction)


def sinks() -> Iterator[Call]:
    """Yield calls with sinks, with the sizes of gpt-oss and with a further head dim.

    gpt-oss has 64 query heads and 8 KV heads of head dim 64, and a window of 128 in every second layer.
    """
    for direction in ("fwd", "train"):
        for d, heads in ((64, (64, 8)), (128, _heads(128))):
            for left in (-1, 127):
                for s in (2048, 8192):
                    mask = "causal" if left < 0 else f"window{left + 1}"
                    name = f"{direction}_sinks_{mask}_d{d}_s{s}"
                    yield Call(name, (s,) * (TOKENS // s), d, heads, left, sinks=True, direction=direction)


@dataclass(frozen=True, slots=True)
class Operands:
    """Operands of a call in the form (T, H, D). `batch` returns views in the form (B, S, H, D)."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    cu: Tensor
    of_heads: Tensor  # sinks

    def batch(self, call: Call) -> list[Tensor]:
        return [x.unflatten(0, (len(call.lengths), -1)) for x in (self.q, self.k, self.v)]

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v


def _operands(call: Call, device: str) -> Operands:
    generator, total = torch.Generator(device).manual_seed(SEED), sum(call.lengths)
    Hq, Hkv = call.heads
    drawn = [
        torch.randn(total, heads, call.d, device=device, generator=generator).bfloat16()
        for heads in (Hq, Hkv, Hkv, Hq)
    ]  # fmt: skip
    leaves = [x.requires_grad_(call.direction == "train") for x in drawn[:3]]
    cu = torch.tensor((0, *call.lengths), device=device).cumsum(0).int()
    of_heads = torch.randn(Hq, device=device, generator=generator).requires_grad_(call.direction == "train")
    return Operands(*leaves, drawn[3], cu, of_heads)


# ---- candidates: each function takes a call and the operands, and returns a function that computes (T, Hq, D) ----

Attend = Callable[[], Tensor]


def _ours(call: Call, x: Operands) -> Attend:
    settings = {"causal": call.causal, "window": None if call.left < 0 else (call.left, None), "softcap": call.softcap}
    settings["sinks"] = x.of_heads if call.sinks else None
    if call.is_packed:
        return lambda: attention(*x.leaves, **settings, cu_seqlens_q=x.cu)
    return lambda: attention(*x.batch(call), **settings).flatten(0, 1)


def _plain(call: Call, x: Operands) -> Attend:
    if len(set(call.lengths)) > 1 or (call.left >= 0 and not call.sinks):
        raise NotImplementedError("no plain kernel of ours computes a comparable call")
    return _ours(replace(call, softcap=0.0, sinks=False, is_packed=False), x)


def _planned(call: Call, x: Operands) -> Attend:
    """Return a call with precomputed tile lists, as in all layers of a model except the first."""
    if not call.is_packed:
        raise NotImplementedError("plans exist only for packed sequences")
    settings = {"causal": call.causal, "cu_seqlens_q": x.cu}
    varlen_plan = plan_varlen(*x.leaves, **settings, gradients=call.direction == "train")
    return lambda: attention(*x.leaves, **settings, plan=varlen_plan)


def _only(call: Call, **takes: bool) -> None:
    """Check that a peer supports the features of a call.

    Raises:
        NotImplementedError: the call has a feature that is not True in `takes`.
    """
    for name, asked in (("softcap", call.softcap), ("sinks", call.sinks), ("is_packed", call.is_packed)):
        if asked and not takes.get(name):
            raise NotImplementedError(f"the peer does not support {name}")


def _varlen(call: Call, x: Operands) -> Attend:
    _only(call, is_packed=True)
    longest = max(call.lengths)
    grouped = {"enable_gqa": True} if "enable_gqa" in varlen.varlen_attn.__kwdefaults__ else {}
    settings = {"window_size": (call.left, 0 if call.causal else -1), **grouped}
    return lambda: varlen.varlen_attn(*x.leaves, x.cu, x.cu, longest, longest, **settings)


def _wheel(name: str, call: Call, x: Operands) -> Attend:
    """Return a call of a FlashAttention wheel, which takes (B, S, H, D), or packed sequences in the varlen function."""
    function = baselines.wheel(name)
    if function is None:
        raise ImportError("not installed")
    window_size = (call.left, 0 if call.left >= 0 else -1)
    arguments = {"causal": call.causal, "window_size": window_size, "softcap": call.softcap}
    if call.sinks:
        sinks, dtype = SINKS[name]
        arguments[sinks] = x.of_heads.to(dtype)
    if not call.is_packed:
        return lambda: _first(function(*x.batch(call), **arguments)).flatten(0, 1)
    of_lengths, longest = sys.modules[function.__module__].flash_attn_varlen_func, max(call.lengths)
    arguments |= {"cu_seqlens_q": x.cu, "cu_seqlens_k": x.cu, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return lambda: _first(of_lengths(*x.leaves, **arguments))


def _fa3(call: Call, x: Operands) -> Attend:
    if call.direction == "train":
        raise NotImplementedError("the wheel has no backward")
    return _wheel("fa3", call, x)


def _fa4(call: Call, x: Operands) -> Attend:
    return _wheel("fa4", call, x)


def _first(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def _flex(call: Call, x: Operands) -> Attend:
    _only(call, softcap=True)
    length, behind, cap = call.lengths[0], call.left if call.left >= 0 else call.lengths[0], call.softcap
    rule = create_block_mask(
        lambda b, h, row, key: (row >= key) & (row - key <= behind), None, None, length, length, x.q.device
    )
    more = {"score_mod": lambda score, *place: cap * torch.tanh(score / cap)} if cap else {}

    def attend() -> Tensor:
        operands = (tensor.transpose(1, 2) for tensor in x.batch(call))
        return baselines._flex(*operands, block_mask=rule, enable_gqa=True, **more).transpose(1, 2).flatten(0, 1)

    return attend


FUNCTIONS = {
    **{"ours_fa3": _ours, WITHOUT_FEATURE: _plain, PLANNED: _planned},
    **{"varlen": _varlen, "fa3": _fa3, "fa4": _fa4, "flex": _flex},
}
PEERS = {"fa3", "fa4", "flex"}  # peers that --providers can leave out
PROVIDERS = {"ours_fa3", "stock", *PEERS}  # default of --providers in bench.py


def _error(call: Call, x: Operands, out: Tensor) -> float:
    """Return the relative error of the last rows of two sequences against fp64."""
    results, right = [], []
    for sequence in (0, call.lengths.index(max(call.lengths))):
        end, length = int(x.cu[sequence + 1]), call.lengths[sequence]
        rows, keys = slice(end - min(ROWS_CHECKED, length), end), slice(end - length, end)
        exact = replace(call, lengths=(length,), is_packed=False)
        q, k, v = (tensor[None].double() for tensor in (x.q[rows], x.k[keys], x.v[keys]))
        settings = {"window": None if exact.left < 0 else (exact.left, None), "softcap": exact.softcap}
        sinks = x.of_heads.double() if exact.sinks else None
        with sdpa_backend("math"):
            right.append(attention(q, k, v, causal=call.causal, sinks=sinks, **settings)[0])
        results.append(out[rows].double())
    right = torch.cat(right)
    return float((torch.cat(results) - right).norm() / right.norm())


def _measure(bench: Bench, call: Call) -> None:
    x = _operands(call, bench.device)
    makers = {
        name: functools.partial(function, call, x)
        for name, function in FUNCTIONS.items()
        if name not in PEERS or name in bench.providers
    }
    timings, plain, errors, refused = time_with_peers(
        bench, call.name, makers, error_of=functools.partial(_error, call, x),
        once=functools.partial(complete_call, call.direction, x.leaves, x.grad_out),
        largest_error=LARGEST_ERROR, round_ms=ROUND_MS, calls=_calls(call),
    )  # fmt: skip
    planned = timings.pop(PLANNED, None)
    row = row_of(call.name, timings, **call.facts(), errors=errors, refused=refused, grad=call.direction == "train")
    variants = {WITHOUT_FEATURE: plain, PLANNED: planned}
    row["all_ms"] |= {name: timing.ms for name, timing in variants.items() if timing is not None}
    bench.add(row)


def _calls(call: Call) -> int:
    return 1 if call.direction == "train" else max(1, min(GRAPH_CALLS, int(GRAPH_MS / (call.flop / 4e11))))


def _suite(bench: Bench, calls: Iterator[Call]) -> None:
    for call in calls:
        if bench.take(call.name):
            _measure(bench, call)


def suite_varlen(bench: Bench) -> None:
    _suite(bench, packed())


def suite_window(bench: Bench) -> None:
    _suite(bench, window())


def suite_softcap(bench: Bench) -> None:
    _suite(bench, softcap())


def suite_sinks(bench: Bench) -> None:
    _suite(bench, sinks())
