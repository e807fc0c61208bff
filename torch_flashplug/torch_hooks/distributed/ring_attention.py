"""Ring attention over ranks that each hold some rows: ops torch_flashplug::ring_fwd and ring_bwd, whose steps are our
ops. Keys and values go round; torch's rotaters move them, and the buffers are those of torch's own ring, in the same
order, so that ranks whose calls stay stock's can take part.

A graph holds the ring as one op: steps differ from rank to rank, and what a compiler makes of each rank's need not
exchange in the same order.

Balanced: each rank has two chunks of rows, one from the head and one from the tail (torch's _HeadTailLoadBalancer).
Then a step meets either the first half of the keys, or all of them with the second half of its queries.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ... import env
from ...dispatch import bindings
from ...ops import reference, sdpa
from . import ring_merge

_SETTINGS = "str group, str rotate, bool balanced, bool wide, bool is_causal, float? scale, int mode"
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)

_library = torch.library.Library("torch_flashplug", "FRAGMENT")
_library.define(f"ring_fwd(Tensor query, Tensor key, Tensor value, {_SETTINGS}) -> (Tensor out, Tensor lse)", tags=TAGS)
_library.define(
    f"ring_bwd(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, {_SETTINGS}) "
    "-> (Tensor dq, Tensor dk, Tensor dv)",
    tags=TAGS,
)

namespace = torch.ops.torch_flashplug


class Settings(NamedTuple):
    """Of a ring, in schema order."""

    group: str
    rotate: str  # a name of torch's _RotateMethod
    balanced: bool
    wide: bool  # gradients of keys and values travel in fp32
    is_causal: bool
    scale: float | None
    mode: int  # mode word of the steps


class Step(NamedTuple):
    """What a rank's queries meet in one turn."""

    is_causal: bool = False
    half_of_keys: bool = False  # the first
    half_of_rows: bool = False  # the second


def steps_of(rank: int, ranks: int, is_causal: bool, balanced: bool) -> list[Step | None]:
    """None: nothing that these rows see."""

    def step(turn: int) -> Step | None:
        if turn == 0 or not is_causal:
            return Step(is_causal)
        if balanced:
            return Step(half_of_keys=turn <= rank, half_of_rows=turn > rank)
        return Step() if turn <= rank else None

    return [step(turn) for turn in range(ranks)]


class _Cut:
    """What a step takes of rows and of keys."""

    def __init__(self, step: Step, rows: int, keys: int) -> None:
        self.step = step
        self.first = rows // 2 if step.half_of_rows else 0
        self.keys = keys // 2 if step.half_of_keys else keys

    def of_rows(self, x: Tensor) -> Tensor:
        return x.narrow(2, self.first, x.shape[2] - self.first)

    def of_keys(self, x: Tensor) -> Tensor:
        return x.narrow(2, 0, self.keys)


class _Pair:
    """Key and value, or their gradients, in one buffer, which goes round."""

    def __init__(self, key: Tensor, value: Tensor, dtype: torch.dtype | None = None) -> None:
        self._shapes = key.shape, value.shape
        self._cut = key.numel()
        self.buffer = key.new_empty(key.numel() + value.numel(), dtype=dtype or key.dtype)
        for to, x in zip(self.views(), (key, value)):
            to.copy_(x)

    def views(self) -> tuple[Tensor, Tensor]:
        parts = self.buffer[: self._cut], self.buffer[self._cut :]
        return tuple(part.view(shape) for part, shape in zip(parts, self._shapes))


class _Ring:
    def __init__(self, settings: Settings, query: Tensor, key: Tensor) -> None:
        from torch.distributed.tensor.experimental._context_parallel import _attention as torchs

        self._torchs, self._rotate = torchs, settings.rotate
        self._group = dist.distributed_c10d._resolve_process_group(settings.group)
        self.ranks = dist.get_world_size(self._group)
        check(settings, query, key)
        rank = dist.get_rank(self._group)
        steps = steps_of(rank, self.ranks, settings.is_causal, settings.balanced)
        rows, keys = query.shape[2], key.shape[2]
        self.cuts = [None if step is None else _Cut(step, rows, keys) for step in steps]
        self.made = sum(cut is not None for cut in self.cuts)  # steps

    def rotater(self, rotate: str = ""):  # noqa: ANN201  (torch's _RingRotater)
        return self._torchs._create_rotater(self._group, 2, self._torchs._RotateMethod[rotate or self._rotate])

    def turns(self, key: Tensor, value: Tensor) -> Iterator[tuple[int, _Cut | None, Tensor, Tensor]]:
        """Keys and values of each turn, while those of the next are on their way."""
        rotater, pair = self.rotater(), _Pair(key, value) if self.ranks > 1 else None
        for turn, cut in enumerate(self.cuts):
            if turn > 0:
                pair.buffer = rotater.next_buffer()
                key, value = pair.views()
            if turn + 1 < self.ranks:
                rotater.exchange_buffers(pair.buffer)
            yield turn, cut, key, value


def check(settings: Settings, query: Tensor, key: Tensor) -> None:
    rows, keys = query.shape[2], key.shape[2]
    if settings.is_causal and rows != keys:
        raise NotImplementedError(f"context_parallel: is_causal with {rows} rows and {keys} keys on a rank")
    if settings.balanced and not settings.is_causal:
        raise RuntimeError(
            "context_parallel: load balance is for is_causal=True; for other calls switch it off first: "
            "torch.distributed.tensor.experimental._attention._cp_options.enable_load_balance = False"
        )
    if settings.balanced and rows % 2:
        raise RuntimeError(f"context_parallel: {rows} rows on a rank; load balance needs an even number of them")


@contextlib.contextmanager
def _room_for_collectives() -> Iterator[None]:
    before = bindings.set_cta_margin(env.RING_MARGIN.count())
    try:
        yield
    finally:
        bindings.set_cta_margin(before)


def check_balance(settings: Settings) -> None:
    """Of a forward. A graph holds the load balance that it was compiled under, and rows lie as torch says now. (A
    backward's are its forward's, whatever torch says by then.)
    """
    from torch.distributed.tensor.experimental._context_parallel import _attention as torchs

    if settings.balanced != torchs._cp_options.enable_load_balance:
        made, now = ("with", "without") if settings.balanced else ("without", "with")
        raise RuntimeError(
            f"context_parallel: this graph was compiled {made} load balance, and rows lie {now} it; compile again "
            "(torch.compiler.reset()) behind a change of _cp_options.enable_load_balance, on all ranks"
        )


def _forward(query: Tensor, key: Tensor, value: Tensor, *given: object) -> tuple[Tensor, Tensor]:
    s = Settings(*given)
    check_balance(s)
    ring, out, lse = _Ring(s, query, key), None, None
    with _room_for_collectives():
        for _, cut, k, v in ring.turns(key, value):
            if cut is None:
                continue
            operands = cut.of_rows(query), cut.of_keys(k), cut.of_keys(v)
            step = (None, 0.0, int(cut.step.is_causal), s.scale, s.mode)
            step_out, step_lse, _, _ = namespace.sdpa_fwd(*operands, *step)
            if out is None:  # one sum needs no more digits than what it is made of
                out, lse = step_out.float() if ring.made > 2 else step_out, step_lse
            else:
                ring_merge.namespace.ring_merge(out, lse, step_out, step_lse, cut.first)
    return out.to(query.dtype), lse


def _backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *given: object
) -> tuple[Tensor, Tensor, Tensor]:
    s = Settings(*given)
    ring = _Ring(s, query, key)
    rotater, total, pair = ring.rotater("ALL_TO_ALL"), None, None
    with _room_for_collectives():
        for turn, cut, k, v in ring.turns(key, value):
            dq = dk = dv = None
            if cut is not None:
                known = (cut.of_rows(out), cut.of_rows(lse).contiguous(), *_nothing_drawn(query))
                operands = cut.of_rows(grad_out), cut.of_rows(query), cut.of_keys(k), cut.of_keys(v)
                step = (0.0, int(cut.step.is_causal), s.scale, s.mode, False)
                dq, dk, dv, _ = namespace.sdpa_bwd(*operands, None, *known, *step)
            if turn == 0:
                pair = _Pair(dk, dv, torch.float32 if s.wide else None)
                total = dq.float() if ring.made > 2 else dq
            else:
                pair.buffer = rotater.next_buffer()
                if cut is not None:
                    for sum_, part in zip(pair.views(), (dk, dv)):
                        ring_merge.namespace.ring_add(sum_, part, 0)
                    ring_merge.namespace.ring_add(total, dq, cut.first)
            if ring.ranks > 1:
                rotater.exchange_buffers(pair.buffer)
        if ring.ranks > 1:
            pair.buffer = rotater.next_buffer()
    dk, dv = map(reference.like, pair.views(), (key, value))
    return total.to(query.dtype), dk, dv


def _nothing_drawn(query: Tensor) -> tuple[Tensor, Tensor]:
    empty = query.new_empty(0, dtype=torch.int64)
    return empty, empty


def register(name: str, forward: Callable, backward: Callable, library: torch.library.Library) -> None:
    """Both ops of that name, of which graphs know shapes alone."""
    for op, function, fake in (
        (f"{name}_fwd", forward, sdpa.empty_results), (f"{name}_bwd", backward, sdpa.empty_gradients)
    ):  # fmt: skip
        library.impl(op, sdpa.never_a_frame(function), "CompositeExplicitAutograd")
        torch.library.register_fake(f"torch_flashplug::{op}", fake, lib=library)


register("ring", _forward, _backward, _library)
