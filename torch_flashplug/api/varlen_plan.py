"""plan(): what calls of attention() of sequences on end may share. Kernels walk over lists of tiles, which each call
makes of its lengths ahead of them (kernels/features/varlen.py); calls of the same lengths, as a model's layers are, may
find them made.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..ops import attention
from ..ops.attention import Window
from ..ops.quantized_kv import multiplied_in
from ..torch_hooks import describe_call
from .attention_args import softcap_of, split_size_of, splits_of, window_of
from .varlen_args import Lengths, check_on_end


class _Seen(NamedTuple):
    """A tensor, as far as the host can tell it from another, and from what it was."""

    place: tuple[int | None, torch.Size, tuple[int, ...]]  # its address, None of fake ones; shape, strides
    version: int | None  # as autograd counts what is written to it; None: nobody does, of those of inference mode

    @classmethod
    def now(cls, x: Tensor | None) -> _Seen | None:
        if x is None:
            return None
        try:
            address = None if isinstance(x, FakeTensor) else x.data_ptr()
        except RuntimeError:  # of vmap's
            address = None
        return cls((address, x.shape, x.stride()), _version(x))


def _version(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version


class LengthsPlan(NamedTuple):
    """What plan() returns, and attention() takes."""

    lists: Tensor | None  # (1 or 2, n) int32, of the forward's kernel and the backward's; None: no kernel of ours runs
    key: int  # which kernels those are, and what else the lists are made of: src/operands/varlen_tile_list.cpp
    rows: int
    keys: int
    window: Window
    lengths: Lengths  # as they were given
    seen_as: tuple[_Seen | None, ...]  # those tensors then

    @property
    def of_op(self) -> tuple[Tensor | None, int]:
        return self.lists, self.key

    def check(self, q: Tensor, k: Tensor, given: Lengths, window: tuple[int, int, bool]) -> None:
        """ValueError where it was made for another call, as far as the host knows; graphs compare no tensors."""
        for what, made_for, now in (
            ("q.shape[0]", self.rows, q.shape[0]),
            ("k.shape[0]", self.keys, k.shape[0]),
            ("the window (left, right, bottom_right)", tuple(self.window), tuple(window)),
        ):
            if made_for != now:
                raise ValueError(
                    f"attention: plan must be made for this call, but {what} was {made_for} and is {now} now. "
                    "Create a new plan."
                )
        if torch.compiler.is_compiling():
            return
        names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")
        for name, x, made_of, then in zip(names, given, self.lengths, self.seen_as, strict=True):
            now = _Seen.now(x)
            if (now and now.place) != (then and then.place):
                raise ValueError(
                    f"attention: plan was created from a different {name} tensor. "
                    "Pass the same tensor, or create a new plan."
                )
            # x.data counts for itself.
            if now and not now.version == then.version == _version(made_of):
                raise ValueError(f"attention: {name} was written to after plan was created. Create a new plan.")


def check_is_plan(plan: object, on_end: bool) -> None:
    """What attention() asks of it ahead of anything else."""
    if not isinstance(plan, LengthsPlan):
        raise TypeError(
            f"attention: plan must be the result of torch_flashplug.plan() or None, but got {type(plan).__name__}."
        )
    if not on_end:
        raise ValueError(
            "attention: plan must be used with cu_seqlens_q, and without block_table and block_mask. Leave plan out."
        )


@torch.inference_mode(False)  # what is kept may meet gradients later
@torch.no_grad()
def _lists(operands: list[Tensor], lengths: Lengths, seen: tuple, gradients: bool) -> tuple[Tensor, int]:
    return attention.namespace._plan_lists(*operands, *(None if x is None else x.contiguous() for x in lengths), *seen,
                                          gradients)  # fmt: skip


def plan(  # noqa: PLR0913
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    num_splits: int | None = None,
    fixed_split_size: int | None = None,
    gradients: bool | None = None,
) -> LengthsPlan:
    """For attention(..., plan=): lists of tiles of these lengths, made once for all calls that share them. Arguments
    are those of the calls; of q (T, Hq, D), k (Tk, Hkv, D) and v (Tk, Hkv, Dv) no values are read, so that the first
    layer's will do. gradients: whether lists of the backward are made, too; None: if q, k or v requires a gradient. A
    backward that finds none makes them.

    Calls may differ in sinks and scale; another window, another kernel (by heads, head dims, dtype, softcap, splits,
    sdpa_backend), other numbers of rows or keys, other tensors of lengths, or such as were written to since, are
    another call's: attention() raises ValueError then. Mind who counts: autograd does, so what is written through
    .data, NumPy or DLPack, and to tensors that were made in torch.inference_mode, goes unnoticed, and the lists are
    those of the old lengths: make the plan again with every batch. Where no kernel of ours runs the call (on the CPU,
    in fp32, under "math") there are no lists, the plan changes nothing, and kernels are not compared.

    One or two launches on the current stream, and nothing waits for the host. In a CUDA graph the lists are made with
    every replay if plan() is captured, too; lists from ahead of it stay those of the lengths they were made of, and the
    plan must live as long as the graph, as every tensor that replays read. A plan is made outside of torch.compile, and
    may be given to what is compiled, as an argument (an attribute of a module is a constant to Dynamo, which compiles
    anew for each): there rows, keys and window are compared, as kernels are (RuntimeError), but not which tensors the
    lengths are.

    Raises ValueError or TypeError for what attention() does not take.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError("plan: call plan() outside of torch.compile. Pass the plan to the compiled function.")
    splits = splits_of(num_splits), split_size_of(fixed_split_size, num_splits)
    seen = (*window_of(causal, window), softcap_of(softcap), None, *splits)
    given = (cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k, seqused_k)
    eight = check_on_end((q, k, v), given)
    operands = [x.unsqueeze(0).transpose(1, 2) for x in (q, k, v)]
    lists, key = _lists(_as_multiplied(operands, eight), given, seen, _wants(gradients, operands))
    seen_as, window = tuple(map(_Seen.now, given)), Window(*seen[:3])
    return LengthsPlan(lists if key else None, key, q.shape[0], k.shape[0], window, given, seen_as)


def _wants(gradients: bool | None, operands: list[Tensor]) -> bool:
    if gradients is not None and not isinstance(gradients, bool):
        raise TypeError(f"plan: gradients must be True, False or None, but got {type(gradients).__name__}.")
    return describe_call.wants_grad(*operands) if gradients is None else gradients


def _as_multiplied(operands: list[Tensor], eight: bool) -> list[Tensor]:
    """In the dtypes that ops get; what attention() would make of others has no memory to be read."""
    told = [x.to("meta") for x in operands]
    if eight:
        told = [x.to(multiplied_in(told[0])) for x in told]
    told = describe_call.under_autocast(operands[0].device.type, *told)
    return [
        x if x.dtype == like.dtype else torch.empty(x.shape, dtype=like.dtype, device=x.device)
        for x, like in zip(operands, told, strict=True)
    ]
