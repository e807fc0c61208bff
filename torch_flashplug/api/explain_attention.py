"""Plans of attention() calls: the public function `explain_attention`.

The code of attention() itself runs on meta tensors, up to the op that attention() calls. Then the dispatcher is asked
for the plan of that op.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ..dispatch import bindings
from ..ops import paged
from ..ops.attention import Window, namespace
from ..ops.block_mask import BlockLists, block_lists
from ..registry import features
from ..registry.architectures import BACKENDS, KERNEL_BACKENDS
from ..torch_hooks import describe_call
from . import startup
from .attention import attention
from .attention_args import check_out, window_of
from .backend import DEVICES, SPLITS_SHIFT, Plan, explain
from .varlen_plan import check_is_plan

_F_SDPA = F.scaled_dot_product_attention
_IS_CUDA, _DEVICE = torch.Tensor.is_cuda.__get__, torch.Tensor.device.__get__
_ENDS = (
    *(namespace.attention_fwd, namespace.paged_fwd, namespace.cached_fwd, namespace.listed_fwd, namespace.sdpa_fwd),
)
_NEVER_NONE = {name for name, x in inspect.signature(attention).parameters.items() if x.default is not None}
_WHOLE = "key and value are converted to 16 bits first"
_TOGETHER = 16  # kernels read pages of a multiple of this many rows in place: can_be_read of src/ops/attention_ops.cpp


def explain_attention(
    q: Tensor, k: Tensor, v: Tensor, *, device: str | None = None, **arguments: object
) -> Plan:  # fmt: skip
    """Return the plan of an attention() call without running the call.

    No kernel is launched, and the only synchronization is the synchronization inside block_lists(). The plan depends on
    autograd, autocast and `sdpa_backend`, as the call itself does. The backend of the plan is "math" if no
    torch_flashplug kernel runs the call. The backend is "stock" if attention() passes the call to
    F.scaled_dot_product_attention, and stock serves the call.

    Args:
        q: queries, as for attention().
        k: keys, as for attention().
        v: values, as for attention().
        device: "h100", "h200", "a100", "l4" or "rtx4090" for the plan on that GPU; None for the plan on the device of
            the tensors.
        arguments: all other arguments of attention(), by name.

    Returns:
        The plan of the call.

    Raises:
        TypeError, ValueError, RuntimeError: attention() rejects the arguments, except that a `plan` made for a
            different kernel is not noticed.
        ValueError: the device is unknown.
    """
    if device is not None and device not in DEVICES:
        raise ValueError(
            f"explain_attention: device must be one of {', '.join(DEVICES)}, or None for the tensors' own device, but "
            f"got {device!r}."
        )
    startup.load()
    tensors = (q, k, v)
    if not all(isinstance(x, Tensor) for x in tensors):
        attention(*tensors, **arguments)  # raises the error
    if (out := arguments.pop("out", None)) is not None:
        check_out(out, tensors, *arguments.values())
    arguments = {name: x for name, x in arguments.items() if x is not None or name in _NEVER_NONE}
    varlen_plan = arguments.pop("plan", None)  # the kernel does not depend on the plan
    if "block_mask" in arguments and not isinstance(arguments["block_mask"], BlockLists):
        arguments["block_mask"] = block_lists(arguments["block_mask"], gradients=describe_call.wants_grad(*tensors))
    road = _Road(q.device if device is None else torch.device("cuda"), device)
    operands, meta_arguments = [road.faked(x) for x in tensors], {name: road.faked(x) for name, x in arguments.items()}
    plan = road.follow(lambda: attention(*operands, **meta_arguments))
    if varlen_plan is not None:
        _check_lists(varlen_plan, tensors, arguments)
    if plan is None:
        plan = _of_sdpa(road, tensors, device)
        plan = _behind(_WHOLE, plan) if road.dequantises else plan
    elif "block_table" in arguments and road.ends[0] is namespace.attention_fwd:
        plan = _behind("pages are gathered first", plan)
    return replace(plan, call=_in_one_line(tensors, arguments))


class _Road(TorchFunctionMode):
    """Mode that records which op of `_ENDS` an attention() call reaches, and the arguments of the op.

    If an op calls a second op, both are recorded. The tensors are meta tensors that report the device of the call's
    tensors.
    """

    def __init__(self, where: torch.device, device: str | None):
        super().__init__()
        self.where, self.device = where, device
        self.ends, self.args, self.dequantises = [], (), False

    def faked(self, x: object) -> object:
        """Return a meta tensor with the layout of a tensor of the call; return other objects unchanged."""
        if isinstance(x, BlockLists):
            return x._replace(digest=self.faked(x.digest))
        if not isinstance(x, Tensor):
            return x
        like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        like.lies_on = x.device if self.device is None else self.where
        return like.requires_grad_(x.requires_grad)

    def __torch_function__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        if func in (_IS_CUDA, _DEVICE):
            where = getattr(args[0], "lies_on", self.where)
            return where if func == _DEVICE else where.type == "cuda"
        args, kwargs = tree_map_only(torch.device, lambda _: torch.device("meta"), (args, kwargs or {}))
        self.dequantises |= func is namespace.dequantise
        if func is _F_SDPA or func in _ENDS:
            self.ends.append(func)
            self.args = (*args, *kwargs.values())
        if func is _F_SDPA:
            query, _, value, *_ = args
            return query.new_empty(*query.shape[:3], value.shape[3])
        return func(*args, **kwargs)

    def follow(self, call: Callable[[], object]) -> Plan | None:
        """Run the call, and return the plan of the recorded op.

        Return None if F.scaled_dot_product_attention, or the op of F.scaled_dot_product_attention, decides.
        """
        with self:
            call()
        end = self.ends[-1]
        if end is namespace.paged_fwd:
            plan = self._of_pages()
        elif end is namespace.attention_fwd:
            call_facts = _Given(*self.args)
            needs = call_facts.needs(call_facts.key.shape[2])
            plan = self._of_op(self.args, needs, 0, forced=True)  # keys are never split here
        elif end is namespace.cached_fwd:
            plan = self._of_op(self.args, {"cache8": 1, "mask": self.args[5] is not None}, 0, mode=0)
            if not plan.kernel:
                plan = _behind(_WHOLE, replace(plan, backend="stock"))
        elif end is namespace.listed_fwd:
            plan = self._of_op(self.args, {"mask": 1, "grad": 1, "tall": self.args[4]}, 0, forced=True)
        else:
            return None
        return _behind(_WHOLE, plan) if self.dequantises else plan

    def _of_pages(self) -> Plan:
        q, k, v, pages, used, k_scale, _, sinks, *settings, _ = paged_args = self.args
        keys, call_facts = pages.shape[1] * k.shape[2], _Given(q, k, v, sinks, None, None, used, *settings)
        needs = call_facts.needs(keys) | {"paged": 1, "cache8": k_scale is not None, "Sk": keys}
        plan = self._of_op(paged_args, needs, call_facts.num_splits)
        is_read_in_place = len(k) and (k.shape[2] % _TOGETHER == 0 or pages.shape[1] == 1)
        if plan.kernel and is_read_in_place:
            return plan
        reason = (
            f"pages have {k.shape[2]} rows"
            if plan.kernel
            else plan.reasons.get(KERNEL_BACKENDS[-1], "math is asked for")
        )
        copy_text = " and converted to 16 bits" * (k_scale is not None)
        return _behind(f"pages are gathered first{copy_text}: {reason}", self.follow(lambda: paged._math(*paged_args)))

    def _of_op(
        self, args: tuple, needs: dict[str, float], splits: int, *, forced: bool = False, mode: int | None = None
    ) -> Plan:
        """Return the plan of an op: the first kernel family that can run the op, or the mode's family, else math.

        Args:
            args: the arguments of the op; the first three are query, key and value.
            needs: facts of the call in addition to the facts of the three tensors.
            splits: the requested number of splits; 0 leaves the number to the dispatcher.
            forced: whether a call that the kernels of a forced mode cannot run raises an error.
            mode: the mode word of an op that ignores the mode of the process and thread; None for all other ops.
        """
        described = describe_call.describe(*args[:3], None, 0.0, False, None) | needs
        described |= {"needs": features.bits(name for name in features.NAMES if needs.get(name))}
        described |= {"softcap": needs.get("softcap", 0.0), "on_cuda": self._is_cuda()}
        mode, facts, reasons, error = self._mode() if mode is None else mode, self._facts(), {}, ""
        if bindings.backend_of(mode) in {"math", "stock"}:
            return Plan("", "math", reasons=dict.fromkeys(KERNEL_BACKENDS, f"{bindings.backend_of(mode)} is asked for"))
        only = bindings.forced_kernels(mode) if forced else None
        for backend in KERNEL_BACKENDS if only is None else (only,):
            word = BACKENDS.index(backend) | splits << SPLITS_SHIFT
            kernel_plan = bindings.plan(described, facts, word)
            if kernel_plan["backend"] == backend:
                fields = {name: kernel_plan[name] for name in ("kernel", "splits", "copies", "gradients", "sharing")}
                gate = (
                    kernel_plan["gate"] if kernel_plan["kernel"].startswith("decode") else ""
                )  # only decode kernels have a gate
                return Plan("", backend, **fields, gate=gate, reasons=reasons)
            reasons[backend] = kernel_plan["reasons"].get(backend, "")
            error = "" if only is None else bindings.forced_error(described, facts, word)
        return Plan("", "math", reasons=reasons, error=error)

    def _mode(self) -> int:
        return bindings.effective_mode() if self._is_cuda() else 0

    def _facts(self) -> dict[str, int]:
        if self.device is not None:
            return DEVICES[self.device]
        return bindings.device_facts(self.where.index or 0) if self._is_cuda() else bindings.NO_DEVICE

    def _is_cuda(self) -> bool:
        return self.where.type == "cuda"


class _Given(NamedTuple):
    """Arguments of attention_fwd, in schema order."""

    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None
    cu_q: Tensor | None
    cu_k: Tensor | None
    used_k: Tensor | None
    left: int
    right: int
    bottom_right: bool
    softcap: float
    scale: float | None
    num_splits: int = 0
    fixed_split_size: int = 0
    plan: Tensor | None = None
    plan_key: int = 0
    mode: int = 0  # not read here: `_Road._mode()` has the mode

    def needs(self, keys: int) -> dict[str, float]:
        """Return the facts of the call besides the facts of the tensors.

        Args:
            keys: the number of keys.
        """
        rows = self.query.shape[2]
        bounds = (rows + keys if bound < 0 else min(bound, rows + keys) for bound in (self.left, self.right))
        facts = dict(zip(Window._fields, (*bounds, self.bottom_right), strict=True))
        facts |= {"window": 1, "softcap": self.softcap, "ragged": self.cu_q is not None}
        facts |= {
            "batch_invariant": self.num_splits == 1 or self.fixed_split_size > 0,
            "split_size": self.fixed_split_size,
        }
        return facts | {"sequences": 0 if self.cu_q is None else len(self.cu_q) - 1}


def _check_lists(plan: object, tensors: tuple[Tensor, ...], arguments: dict[str, object]) -> None:
    """Check the argument `plan` as attention() does, except for the kernel that the plan was made for."""
    cu_q, cu_k, used = (arguments.get(name) for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k"))
    check_is_plan(plan, cu_q is not None and "block_table" not in arguments and "block_mask" not in arguments)
    window = window_of(arguments.get("causal", False), arguments.get("window"))
    plan.check(*tensors[:2], (cu_q, cu_q if cu_k is None else cu_k, used), window)


def _behind(first: str, plan: Plan) -> Plan:
    return replace(plan, copies="; ".join(x for x in (first, plan.copies) if x))


def _of_sdpa(road: _Road, tensors: tuple[Tensor, ...], device: str | None) -> Plan:
    """Return the plan of the F.scaled_dot_product_attention call, with the addresses of the caller's tensors."""
    query, key, value, mask, *more = road.args
    twins = [_twin(x, like) for x, like in zip(tensors, (query, key, value), strict=True)]
    if mask is not None:
        mask = torch.empty(mask.shape, dtype=mask.dtype, device=twins[0].device)
    causal, scale = (more[0], more[1]) if road.ends[-1] is _F_SDPA else (False, more[2])
    grouped = twins[0].shape[1] != twins[1].shape[1]
    return explain(*twins, mask, 0.0, causal, scale=scale, enable_gqa=grouped, device=device)


def _twin(x: Tensor, like: Tensor) -> Tensor:
    """Return the view of `x` that `like` stands for, or an empty tensor like `like` if the dtypes differ."""
    if x.dtype != like.dtype:
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=x.device)
    return x.as_strided(like.shape, like.stride(), x.storage_offset() + like.storage_offset())


def _in_one_line(tensors: tuple[Tensor, ...], arguments: dict[str, object]) -> str:
    parts = [f"{name} {list(x.shape)}" for name, x in zip("qkv", tensors, strict=True)]
    parts.append("/".join(dict.fromkeys(str(x.dtype).removeprefix("torch.") for x in tensors)))
    arguments = {name: x.digest if isinstance(x, BlockLists) else x for name, x in arguments.items()}
    parts += [f"{name} {list(x.shape)}" if isinstance(x, Tensor) else f"{name}={x}" for name, x in arguments.items()]
    return ", ".join(parts + ["grad"] * describe_call.wants_grad(*tensors))
