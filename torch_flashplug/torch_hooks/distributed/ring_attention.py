"""Ring attention over ranks with a part of the rows each: ops torch_flashplug::ring_fwd and ring_bwd.

Each step of the ring calls sdpa_fwd or sdpa_bwd. Keys and values move from rank to rank by torch's rotaters. The
buffers have the contents and the order of torch's own ring, so ranks with a fallback to stock can take part.

A graph holds the ring as one op, because steps differ from rank to rank. A compiler need not keep the order of the
exchanges alike on all ranks.

With load balance, each rank has two chunks of rows, a head chunk and a tail chunk (torch's _HeadTailLoadBalancer). A
step then computes the first half of the keys with all queries, or all keys with the second half of the queries.
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
    """Settings of a ring, in schema order."""

    group: str
    rotate: str  # name in torch's _RotateMethod
    balanced: bool
    wide: bool  # gradients of keys and values travel in fp32
    is_causal: bool
    scale: float | None
    mode: int  # mode word of the steps


class Step(NamedTuple):
    """Parts of the keys and query rows in one step of a rank."""

    is_causal: bool = False
    half_of_keys: bool = False  # the first half
    half_of_rows: bool = False  # the second half


def steps_of(rank: int, ranks: int, is_causal: bool, balanced: bool) -> list[Step | None]:
    """Return the steps of a rank; a step without visible keys is None."""

    def step(step_idx: int) -> Step | None:
        if step_idx == 0 or not is_causal:
            return Step(is_causal)
        if balanced:
            return Step(half_of_keys=step_idx <= rank, half_of_rows=step_idx > rank)
        return Step() if step_idx <= rank else None

    return [step(step_idx) for step_idx in range(ranks)]


class _StepSlices:
    """Slices of the query rows and keys in a step."""

    def __init__(self, step: Step, rows: int, keys: int) -> None:
        self.step = step
        self.first = rows // 2 if step.half_of_rows else 0
        self.keys = keys // 2 if step.half_of_keys else keys

    def select_rows(self, x: Tensor) -> Tensor:
        return x.narrow(2, self.first, x.shape[2] - self.first)

    def select_keys(self, x: Tensor) -> Tensor:
        return x.narrow(2, 0, self.keys)


class _KvBuffer:
    """Key and value, or the gradients of key and value, in one buffer for the exchange between ranks."""

    def __init__(self, key: Tensor, value: Tensor, dtype: torch.dtype | None = None) -> None:
        self._shapes = key.shape, value.shape
        self._key_numel = key.numel()
        self.buffer = key.new_empty(key.numel() + value.numel(), dtype=dtype or key.dtype)
        for to, x in zip(self.views(), (key, value)):
            to.copy_(x)

    def views(self) -> tuple[Tensor, Tensor]:
        parts = self.buffer[: self._key_numel], self.buffer[self._key_numel :]
        return tuple(part.view(shape) for part, shape in zip(parts, self._shapes))


class _Ring:
    """Steps of the ring on this rank, and the exchange of keys and values between the steps."""

    def __init__(self, settings: Settings, query: Tensor, key: Tensor) -> None:
        from torch.distributed.tensor.experimental._context_parallel import _attention as torch_module

        self._torch_module, self._rotate = torch_module, settings.rotate
        self._group = dist.distributed_c10d._resolve_process_group(settings.group)
        self.num_ranks = dist.get_world_size(self._group)
        check(settings, query, key)
        rank = dist.get_rank(self._group)
        steps = steps_of(rank, self.num_ranks, settings.is_causal, settings.balanced)
        rows, keys = query.shape[2], key.shape[2]
        self.slices_by_step = [None if step is None else _StepSlices(step, rows, keys) for step in steps]
        self.num_computed = sum(slices is not None for slices in self.slices_by_step)

    def rotater(self, rotate: str = ""):  # noqa: ANN201  (torch's _RingRotater)
        return self._torch_module._create_rotater(
            self._group, 2, self._torch_module._RotateMethod[rotate or self._rotate]
        )

    def steps(self, key: Tensor, value: Tensor) -> Iterator[tuple[int, _StepSlices | None, Tensor, Tensor]]:
        """Yield the keys and values of each step, while the exchange for the next step is running."""
        rotater, kv_buffer = self.rotater(), _KvBuffer(key, value) if self.num_ranks > 1 else None
        for step_idx, slices in enumerate(self.slices_by_step):
            if step_idx > 0:
                kv_buffer.buffer = rotater.next_buffer()
                key, value = kv_buffer.views()
            if step_idx + 1 < self.num_ranks:
                rotater.exchange_buffers(kv_buffer.buffer)
            yield step_idx, slices, key, value


def check(settings: Settings, query: Tensor, key: Tensor) -> None:
    rows, keys = query.shape[2], key.shape[2]
    if settings.is_causal and rows != keys:
        raise NotImplementedError(
            "context_parallel: with is_causal, a rank must have as many rows as keys, but got "
            f"{rows} rows and {keys} keys."
        )
    if settings.balanced and not settings.is_causal:
        raise RuntimeError(
            "context_parallel: load balance supports is_causal=True only. Switch load balance off first: "
            "torch.distributed.tensor.experimental._attention._cp_options.enable_load_balance = False"
        )
    if settings.balanced and rows % 2:
        raise RuntimeError(
            f"context_parallel: the number of rows on a rank must be even with load balance, but got {rows}."
        )


@contextlib.contextmanager
def _cta_margin_for_collectives() -> Iterator[None]:
    before = bindings.set_cta_margin(env.RING_MARGIN.count())
    try:
        yield
    finally:
        bindings.set_cta_margin(before)


def check_balance_unchanged(settings: Settings) -> None:
    """Check that the load balance of a forward graph equals torch's current load balance.

    A graph keeps the load balance of the compilation. The rows are distributed by torch's current option. A backward
    keeps the load balance of the forward, whatever torch's option is by then.
    """
    from torch.distributed.tensor.experimental._context_parallel import _attention as torch_module

    if settings.balanced != torch_module._cp_options.enable_load_balance:
        compiled, current = ("with", "without") if settings.balanced else ("without", "with")
        raise RuntimeError(
            f"context_parallel: this graph was compiled {compiled} load balance, but the rows are distributed "
            f"{current} load balance. Call torch.compiler.reset() after a change of _cp_options.enable_load_balance, "
            "on all ranks."
        )


def _forward(query: Tensor, key: Tensor, value: Tensor, *setting_args: object) -> tuple[Tensor, Tensor]:
    settings = Settings(*setting_args)
    check_balance_unchanged(settings)
    ring, out, lse = _Ring(settings, query, key), None, None
    with _cta_margin_for_collectives():
        for _, slices, k, v in ring.steps(key, value):
            if slices is None:
                continue
            operands = slices.select_rows(query), slices.select_keys(k), slices.select_keys(v)
            step = (None, 0.0, int(slices.step.is_causal), settings.scale, settings.mode)
            step_out, step_lse, _, _ = namespace.sdpa_fwd(*operands, *step)
            if out is None:  # fp32 only for more than 2 steps: one sum needs no more digits than the terms have
                out, lse = step_out.float() if ring.num_computed > 2 else step_out, step_lse
            else:
                ring_merge.namespace.ring_merge(out, lse, step_out, step_lse, slices.first)
    return out.to(query.dtype), lse


def _backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *setting_args: object
) -> tuple[Tensor, Tensor, Tensor]:
    settings = Settings(*setting_args)
    ring = _Ring(settings, query, key)
    rotater, total, kv_buffer = ring.rotater("ALL_TO_ALL"), None, None
    with _cta_margin_for_collectives():
        for step_idx, slices, k, v in ring.steps(key, value):
            dq = dk = dv = None
            if slices is not None:
                forward_results = (slices.select_rows(out), slices.select_rows(lse).contiguous(), *_empty_seeds(query))
                operands = (
                    slices.select_rows(grad_out),
                    slices.select_rows(query),
                    slices.select_keys(k),
                    slices.select_keys(v),
                )
                step = (0.0, int(slices.step.is_causal), settings.scale, settings.mode, False)
                dq, dk, dv, _ = namespace.sdpa_bwd(*operands, None, *forward_results, *step)
            if step_idx == 0:
                kv_buffer = _KvBuffer(dk, dv, torch.float32 if settings.wide else None)
                total = dq.float() if ring.num_computed > 2 else dq
            else:
                kv_buffer.buffer = rotater.next_buffer()
                if slices is not None:
                    for sum_, part in zip(kv_buffer.views(), (dk, dv)):
                        ring_merge.namespace.ring_add(sum_, part, 0)
                    ring_merge.namespace.ring_add(total, dq, slices.first)
            if ring.num_ranks > 1:
                rotater.exchange_buffers(kv_buffer.buffer)
        if ring.num_ranks > 1:
            kv_buffer.buffer = rotater.next_buffer()
    dk, dv = map(reference.like, kv_buffer.views(), (key, value))
    return total.to(query.dtype), dk, dv


def _empty_seeds(query: Tensor) -> tuple[Tensor, Tensor]:
    empty = query.new_empty(0, dtype=torch.int64)
    return empty, empty


def register(name: str, forward: Callable, backward: Callable, library: torch.library.Library) -> None:
    """Register forward and backward ops of a name, with fakes that provide shapes alone to graphs."""
    for op, function, fake in (
        (f"{name}_fwd", forward, sdpa.empty_results), (f"{name}_bwd", backward, sdpa.empty_gradients)
    ):  # fmt: skip
        library.impl(op, sdpa.without_own_graph(function), "CompositeExplicitAutograd")
        torch.library.register_fake(f"torch_flashplug::{op}", fake, lib=library)


register("ring", _forward, _backward, _library)
