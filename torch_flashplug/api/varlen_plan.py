"""The public function `plan_varlen()`: lists of tiles shared by several calls of `attention()` with packed sequences.

Kernels iterate over lists of tiles. Without a plan, each call builds the lists from the sequence lengths just before
the kernel (kernels/features/varlen.py). Calls with the same lengths, such as the layers of a model, can reuse one plan.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..deprecation import renamed_attribute
from ..ops import attention
from ..ops.attention import AttentionParams, Window
from ..ops.quantized_kv import multiplied_in
from ..torch_hooks import describe_call
from .attention_args import params_of
from .varlen_args import Lengths, check_varlen

KEY_ROW_BITS = 12  # kRowBits of src/operands/varlen_tile_list.cpp


class TensorVersion(NamedTuple):
    """Identity and version of a tensor, as far as the host can know both."""

    layout: tuple[int | None, torch.Size, tuple[int, ...]]  # address (None for fake tensors), shape, strides
    version: int | None  # autograd's count of writes; None for inference tensors, whose writes nothing counts

    @classmethod
    def of(cls, x: Tensor | None) -> TensorVersion | None:
        if x is None:
            return None
        try:
            address = None if isinstance(x, FakeTensor) else x.data_ptr()
        except RuntimeError:  # a tensor of vmap has no address
            address = None
        return cls((address, x.shape, x.stride()), _version(x))


def _version(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version


class VarlenPlan(NamedTuple):
    """Lists of tiles for packed sequences: the result of `plan_varlen()`, an argument of `attention()`."""

    lists: Tensor | None  # (1 or 2, n) int32, for the forward kernel and the backward kernel; None: no kernel runs
    key: int  # the kernels, and a hash of the other facts behind the lists: src/operands/varlen_tile_list.cpp
    rows: int
    keys: int
    window: Window
    lengths: Lengths  # the caller's tensors
    versions: tuple[TensorVersion | None, ...]  # identities and versions of `lengths` when the plan was made

    seen_as = renamed_attribute("VarlenPlan", "seen_as", "versions")

    @property
    def op_args(self) -> tuple[Tensor | None, int]:
        return self.lists, self.key

    def check(self, q: Tensor, k: Tensor, lengths: Lengths, window: Window) -> None:
        """Raise ValueError if the plan belongs to a different call, as far as the host knows.

        Compiled graphs compare sizes and the window, but no tensors.
        """
        for fact, planned, actual in (
            ("q.shape[0]", self.rows, q.shape[0]),
            ("k.shape[0]", self.keys, k.shape[0]),
            ("the window (left, right, bottom_right)", tuple(self.window), tuple(window)),
        ):
            if planned != actual:
                raise ValueError(
                    f"attention: plan must be made for this call, but {fact} was {planned} and is {actual} now. "
                    "Create a new plan."
                )
        if torch.compiler.is_compiling():
            return
        names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")
        for name, x, planned_tensor, recorded in zip(names, lengths, self.lengths, self.versions, strict=True):
            current = TensorVersion.of(x)
            if (current and current.layout) != (recorded and recorded.layout):
                raise ValueError(
                    f"attention: plan was created from a different {name} tensor. "
                    "Pass the same tensor, or create a new plan."
                )
            # `x.data` has a version counter of its own, so both tensors are compared.
            if current and not current.version == recorded.version == _version(planned_tensor):
                raise ValueError(f"attention: {name} was written to after plan was created. Create a new plan.")

    def check_kernel(self, kernel_row: int) -> None:
        """Raise ValueError if the plan has lists, but for a different forward kernel.

        Args:
            kernel_row: Index of the kernel in the kernel table of `_C`.
        """
        planned_row = (self.key >> KEY_ROW_BITS) % (1 << KEY_ROW_BITS) - 1
        if self.lists is not None and planned_row != kernel_row:
            raise ValueError(  # the text of src/operands/varlen_tile_list.cpp
                "attention: plan was made for another call: the kernel, the window or the number of rows, keys or "
                "sequences differs. Make the plan with the arguments of this call, under the same sdpa_backend."
            )


def check_is_plan(plan: object, is_varlen: bool) -> None:
    """Check the type of a plan, and that the call has packed sequences."""
    if not isinstance(plan, VarlenPlan):
        raise TypeError(
            "attention: plan must be the result of torch_flashplug.plan_varlen() or None, "
            f"but got {type(plan).__name__}."
        )
    if not is_varlen:
        raise ValueError(
            "attention: plan must be used with cu_seqlens_q, and without block_table and block_mask. Leave plan out."
        )


@torch.inference_mode(False)  # later calls with gradients may use the kept tensors
@torch.no_grad()
def _lists(operands: list[Tensor], lengths: Lengths, params: AttentionParams, gradients: bool) -> tuple[Tensor, int]:
    cu_seqlens_q, cu_seqlens_k, seqused_k = (None if x is None else x.contiguous() for x in lengths)
    return attention.namespace._plan_lists(
        *operands,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_k=seqused_k,
        **params._asdict(),
        gradients=gradients,
    )


def plan_varlen(  # noqa: PLR0913
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
) -> VarlenPlan:
    """Build the lists of tiles of packed sequences once, for all calls of `attention()` with the same lengths.

    The work is one or two launches on the current stream, and the host waits for nothing. Calls may differ in sinks and
    scale. `attention()` raises ValueError for a call with a different window, kernel, number of query rows or keys, or
    with different tensors of lengths. The kernel depends on heads, head dims, dtype, softcap, splits and
    `sdpa_backend`. `attention()` also raises ValueError if the tensors of lengths were written to after plan_varlen().

    Autograd counts writes. Writes through `.data`, NumPy or DLPack, and writes to tensors created in
    torch.inference_mode, stay unnoticed. The lists are then those of the old lengths. Make a new plan for every batch
    in these cases.

    If no kernel runs the call (on a CPU, in fp32, under "math"), the plan has no lists, changes nothing, and kernels
    are not compared.

    A CUDA graph with a captured plan_varlen() builds the lists in every replay. Lists built before the capture stay
    those of the old lengths, and the plan must live as long as the graph, as every tensor read by replays. A plan is
    made outside of torch.compile and passed to the compiled function as an argument. Dynamo treats an attribute of a
    module as a constant and compiles again for each plan. Compiled code compares rows, keys, window and kernels
    (RuntimeError for kernels). Compiled code does not compare the identity of the tensors of lengths.

    Args:
        q (Tensor): Packed queries (T, Hq, D). No values of `q`, `k` and `v` are read, so that the tensors of a model's
            first layer serve for all layers.
        k (Tensor): Packed keys (Tk, Hkv, D).
        v (Tensor): Packed values (Tk, Hkv, Dv).
        cu_seqlens_q (Tensor): (sequences + 1,) int32, as in the calls of `attention()`.
        cu_seqlens_k (Tensor or None): (sequences + 1,) int32, as in the calls. None: `cu_seqlens_q`.
        seqused_k (Tensor or None): (sequences,) int32, KV lengths, as in the calls.
        causal (bool or str): As in the calls.
        window (tuple or None): As in the calls.
        softcap (float): As in the calls.
        num_splits (int or None): As in the calls.
        fixed_split_size (int or None): As in the calls.
        gradients (bool or None): Also build the lists of the backward. None: if q, k or v requires a gradient. A
            backward without lists in the plan builds new lists.

    Returns:
        The plan, for the argument `plan` of `attention()`.

    Raises:
        TypeError: `attention()` would not take the type of an argument, or `gradients` is no bool.
        ValueError: `attention()` would not take an argument.
        RuntimeError: The call is inside torch.compile.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "plan_varlen: plan_varlen() must be called outside of torch.compile. "
            "Pass the plan to the compiled function."
        )
    params = params_of(causal, window, softcap, None, num_splits, fixed_split_size)
    lengths = (cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k, seqused_k)
    is_quantized = check_varlen((q, k, v), lengths)
    operands = [x.unsqueeze(0).transpose(1, 2) for x in (q, k, v)]
    lists, key = _lists(_as_multiplied(operands, is_quantized), lengths, params, _wants(gradients, operands))
    versions = tuple(map(TensorVersion.of, lengths))
    return VarlenPlan(lists if key else None, key, q.shape[0], k.shape[0], params.window, lengths, versions)


def _wants(gradients: bool | None, operands: list[Tensor]) -> bool:
    if gradients is not None and not isinstance(gradients, bool):
        raise TypeError(f"plan_varlen: gradients must be True, False or None, but got {type(gradients).__name__}.")
    return describe_call.wants_grad(*operands) if gradients is None else gradients


def _as_multiplied(operands: list[Tensor], is_quantized: bool) -> list[Tensor]:
    """Return operands in the dtypes of ops. A tensor of a converted dtype is empty, as nothing reads the values."""
    meta_operands = [x.to("meta") for x in operands]
    if is_quantized:
        meta_operands = [x.to(multiplied_in(meta_operands[0])) for x in meta_operands]
    meta_operands = describe_call.under_autocast(operands[0].device.type, *meta_operands)
    return [
        x if x.dtype == like.dtype else torch.empty(x.shape, dtype=like.dtype, device=x.device)
        for x, like in zip(operands, meta_operands, strict=True)
    ]
