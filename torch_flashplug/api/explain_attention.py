"""Plans of attention() calls: the public function `explain_attention`.

The code of attention() itself runs on meta tensors, up to the op that attention() calls. Then the dispatcher is asked
for the plan of that op.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ..dispatch import bindings
from ..ops import paged
from ..ops.attention import AttentionForwardArgs, AttentionParams, namespace
from ..ops.block_mask import PreparedBlockMask, prepare_block_mask
from ..ops.quantize_ahead import QuantizedKV, planned_head_dims
from ..registry import features, quant_recipes
from ..registry.architectures import BACKENDS, KERNEL_BACKENDS
from ..registry.dispatch_table import COST_MODEL
from ..registry.kernel_spec import PAGE_GROUP_ROWS
from ..torch_hooks import describe_call
from . import startup
from .attention import attention
from .attention_args import check_out, checked_scale, values_of, window_of
from .backend import DEVICES, SPLITS_SHIFT, Plan, device_name, explain, sentences
from .varlen_plan import check_is_plan

_F_SDPA = F.scaled_dot_product_attention
_IS_CUDA, _DEVICE = torch.Tensor.is_cuda.__get__, torch.Tensor.device.__get__
_RECORDED_OPS = (
    namespace.attention_fwd,
    namespace.paged_fwd,
    namespace.quantized_kv_fwd,
    namespace.quantized_attention_fwd,
    namespace.block_sparse_fwd,
    namespace.sdpa_fwd,
)
_NEVER_NONE = {name for name, x in inspect.signature(attention).parameters.items() if x.default is not None}
_CONVERTED = "Key and value are converted to 16 bits first."
_GATHERED = "Pages are gathered first."
_QUANTIZED_AHEAD = "Key and value were quantized ahead."
_QUANTIZES_QUERY = "The call quantizes the query only."


def explain_attention(
    q: Tensor, k: Tensor | QuantizedKV, v: Tensor | None = None, *, device: str | None = None, **arguments: object
) -> Plan:  # fmt: skip
    """Return the plan of an attention() call without running the call.

    No kernel is launched, and the only synchronization is the synchronization inside prepare_block_mask(). The plan
    depends on autograd, autocast and `sdpa_backend`, as the call itself does. The backend of the plan is "math" if no
    torch_flashplug kernel runs the call. The backend is "stock" if attention() passes the call to
    F.scaled_dot_product_attention, and stock serves the call.

    Args:
        q: queries, as for attention().
        k: keys, as for attention(), or the result of quantize_kv().
        v: values, as for attention(); None with the result of quantize_kv().
        device: "h100", "h200", "a100", "l4" or "rtx4090" for the plan on that GPU; None for the plan on the device of
            the tensors.
        arguments: all other arguments of attention(), by name.

    Returns:
        The plan of the call.

    Raises:
        TypeError, ValueError, RuntimeError: attention() rejects the arguments.
        ValueError: the device is unknown.
    """
    device = device_name("explain_attention", device)
    startup.load()
    if isinstance(k, QuantizedKV):
        return _of_quantized_kv(q, k, v, device, arguments)
    v = values_of(k, v, arguments.pop("v_dim", None), is_quantized=False)
    tensors = (q, k, v)
    if not all(isinstance(x, Tensor) for x in tensors):
        attention(*tensors, **arguments)  # raises the error
    if (out := arguments.pop("out", None)) is not None:
        check_out(out, tensors, *arguments.values())
    arguments = {name: x for name, x in arguments.items() if x is not None or name in _NEVER_NONE}
    if isinstance(scale := checked_scale(arguments.get("scale")), Tensor) and not scale.is_meta:
        arguments["scale"] = float(scale)  # the op reads the value, too
    varlen_plan = arguments.pop("plan", None)  # the choice of the kernel does not depend on the plan
    if "block_mask" in arguments and not isinstance(arguments["block_mask"], PreparedBlockMask):
        arguments["block_mask"] = prepare_block_mask(
            arguments["block_mask"], gradients=describe_call.wants_grad(*tensors)
        )
    recorder = _OpRecorder(q.device if device is None else torch.device("cuda"), device)
    operands = [recorder.as_meta(x) for x in tensors]
    meta_arguments = {name: recorder.as_meta(x) for name, x in arguments.items()}
    plan = recorder.plan_of_call(lambda: attention(*operands, **meta_arguments))
    if varlen_plan is not None:
        _check_plan_argument(varlen_plan, tensors, arguments, plan)
    if plan is None:
        plan = _of_sdpa(recorder, tensors, device, is_view="tree_mask" not in arguments)
        plan = _with_copies(plan, _CONVERTED) if recorder.dequantizes else plan
        plan = _with_copies(plan, _GATHERED) if "block_table" in arguments else plan
    elif "block_table" in arguments and recorder.recorded_ops[0] is namespace.attention_fwd:
        plan = _with_copies(plan, _GATHERED)
    return replace(plan, call=_in_one_line(tensors, arguments))


def _of_quantized_kv(q: Tensor, kv: QuantizedKV, v: object, device: str | None, arguments: dict[str, object]) -> Plan:
    """Return the plan of an attention() call with the result of quantize_kv()."""
    if not isinstance(q, Tensor):
        attention(q, kv, v, **arguments)  # raises the error
    recorder = _OpRecorder(q.device if device is None else torch.device("cuda"), device)
    query, meta_kv = recorder.as_meta(q), QuantizedKV(*map(recorder.as_meta, kv))
    meta_arguments = {name: recorder.as_meta(x) for name, x in arguments.items()}
    plan = recorder.plan_of_call(lambda: attention(query, meta_kv, v, **meta_arguments))
    *_, D = kv.key_shape
    key, value = (torch.empty((*kv.key_shape[:3], size), dtype=kv.dtype, device="meta") for size in (D, kv.Dv))
    return replace(plan, call=_in_one_line((q, key, value), {"precision": kv.precision, **arguments}))


class _OpRecorder(TorchFunctionMode):
    """Mode that records which op of `_RECORDED_OPS` an attention() call reaches, and the arguments of the op.

    If an op calls a second op, both are recorded. The tensors are meta tensors that report the device of the call's
    tensors.
    """

    def __init__(self, where: torch.device, device: str | None):
        super().__init__()
        self.where, self.device = where, device
        self.recorded_ops, self.args, self.dequantizes = [], (), False

    def as_meta(self, x: object) -> object:
        """Return a meta tensor with the layout of a tensor of the call; return other objects unchanged."""
        if isinstance(x, PreparedBlockMask):
            return x._replace(metadata=self.as_meta(x.metadata))
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
        self.dequantizes |= func is namespace.dequantize
        if func is _F_SDPA or func in _RECORDED_OPS:
            self.recorded_ops.append(func)
            self.args = (*args, *kwargs.values())
        if func is _F_SDPA:
            query, _, value, *_ = args
            return query.new_empty(*query.shape[:3], value.shape[3])
        return func(*args, **kwargs)

    def plan_of_call(self, call: Callable[[], object]) -> Plan | None:
        """Run the call, and return the plan of the recorded op.

        Return None if F.scaled_dot_product_attention, or the op of F.scaled_dot_product_attention, decides.
        """
        with self:
            call()
        op = self.recorded_ops[-1]
        if op is namespace.paged_fwd:
            plan = self._of_pages()
        elif op is namespace.attention_fwd:
            a = AttentionForwardArgs.from_op(*self.args)
            facts = _call_facts(a, a.key.shape[2])
            plan = self._of_op(self.args, facts, 0, scale=a.params.scale, forced=True)  # keys are never split here
        elif op is namespace.quantized_kv_fwd:
            plan = self._of_op(
                self.args, {"cache8": 1, "mask": self.args[5] is not None}, 0, scale=self.args[7], mode=0
            )
            if not plan.kernel:
                plan = _with_copies(replace(plan, backend="stock"), _CONVERTED)
        elif op is namespace.quantized_attention_fwd:
            plan = self._of_quantized_kv(*self.args)
        elif op is namespace.block_sparse_fwd:
            # Gradients exclude decode kernels, which read no mask metadata; block_sparse_ops.cpp does the same.
            facts = {"mask": 1, "grad": 1, "cost_ratio_192": self.args[4]}
            plan = self._of_op(self.args, facts, 0, scale=self.args[5], forced=True)
        else:
            return None
        return _with_copies(plan, _CONVERTED) if self.dequantizes else plan

    def _of_pages(self) -> Plan:
        args, a = self.args, paged.PagedForwardArgs.from_op(*self.args)
        keys = a.block_table.shape[1] * a.key.shape[2]
        facts = _call_facts(a.as_attention(), keys)
        facts |= {"paged": 1, "cache8": a.k_scale is not None, "Sk": keys}
        is_packed = a.cu_seqlens_q is not None
        splits = 0 if is_packed else a.params.num_splits
        plan = self._of_op(self.args, facts, splits, scale=a.params.scale, forced=is_packed)
        is_readable = len(a.key) and (a.key.shape[2] % PAGE_GROUP_ROWS == 0 or a.block_table.shape[1] == 1)
        is_chosen = not is_packed or a.query.shape[2] >= COST_MODEL.min_paged_rows
        is_chosen = is_chosen or bindings.forced_kernels(self._mode()) is not None
        if plan.kernel and is_readable and is_chosen:
            return plan
        reason = plan.reasons.get(KERNEL_BACKENDS[-1], "The math backend is requested.")
        if plan.kernel and is_readable:
            reason = 'Kernels read the pages of packed queries in place under sdpa_backend("fa3").'
        elif plan.kernel:
            rule = f"a multiple of {PAGE_GROUP_ROWS} rows"
            reason = f"The pages have {a.key.shape[2]} rows, but kernels read pages of {rule} in place."
        is_quantized = a.k_scale is not None
        gathered = "Pages are gathered first and converted to 16 bits." if is_quantized else _GATHERED
        return _with_copies(self.plan_of_call(lambda: paged._math(*args)), gathered, reason)

    def _of_quantized_kv(
        self, query: Tensor, quantized: Tensor, samples: Tensor, value: Tensor | None, keys: int, value_dim: int,
        precision: int, is_causal: bool, scale: float | None,
    ) -> Plan:  # fmt: skip
        B, Hkv, _, D = samples.shape
        recipe = tuple(quant_recipes.RECIPES)[precision - 1]
        key, value = (samples.new_empty((B, Hkv, keys, size)) for size in (D, value_dim))
        needs = {"causal": is_causal, recipe: 1, **dict(zip(("D", "Dv"), planned_head_dims(D, value_dim), strict=True))}
        plan = self._of_op((query, key, value), needs, 0, scale=scale, mode=0)
        if not plan.kernel:
            return _with_copies(plan, _QUANTIZED_AHEAD)
        return _with_copies(replace(plan, precision=recipe), _QUANTIZED_AHEAD, _QUANTIZES_QUERY)

    def _of_op(
        self, args: tuple, needs: dict[str, float], splits: int, *, scale: float | None, forced: bool = False,
        mode: int | None = None,
    ) -> Plan:  # fmt: skip
        """Return the plan of an op: the first kernel family that can run the op, or the mode's family, else math.

        Args:
            args: the arguments of the op; the first three are query, key and value.
            needs: facts of the call in addition to the facts of the three tensors.
            splits: the requested number of splits; 0 leaves the number to the dispatcher.
            scale: the factor of the scores; None for 1 / sqrt(D).
            forced: whether a call that the kernels of a forced mode cannot run raises an error.
            mode: the mode word of an op that ignores the mode of the process and thread; None for all other ops.
        """
        described = describe_call.describe(*args[:3], None, 0.0, False, scale) | needs
        described |= {"needs": features.bits(name for name in features.NAMES if needs.get(name))}
        described |= {"softcap": needs.get("softcap", 0.0), "on_cuda": self._is_cuda()}
        mode, facts, reasons, error = self._mode() if mode is None else mode, self._facts(), {}, ""
        if bindings.backend_of(mode) in {"math", "stock"}:
            reason = f"The {bindings.backend_of(mode)} backend is requested."
            return Plan("", "math", reasons=dict.fromkeys(KERNEL_BACKENDS, reason))
        only = bindings.forced_kernels(mode) if forced else None
        for backend in KERNEL_BACKENDS if only is None else (only,):
            word = BACKENDS.index(backend) | splits << SPLITS_SHIFT
            kernel_plan = bindings.plan(described, facts, word)
            if kernel_plan["backend"] == backend:
                names = ("kernel", "splits", "copies", "note", "gradients", "sharing")
                fields = {name: kernel_plan[name] for name in names}
                is_decode = kernel_plan["kernel"].startswith("decode")
                gate = kernel_plan["gate"] if is_decode else ""
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


def _call_facts(a: AttentionForwardArgs, keys: int) -> dict[str, float]:
    """Return the facts of a call of attention_fwd besides the facts of the tensors.

    Args:
        a: the arguments of the op.
        keys: the number of keys.
    """
    params, most = a.params, a.query.shape[2] + keys
    left, right = (most if bound < 0 else min(bound, most) for bound in (params.left, params.right))
    needs = {
        "left": left,
        "right": right,
        "bottom_right": params.bottom_right,
        "window": 1,
        "ragged": a.cu_seqlens_q is not None,
        "batch_invariant": params.num_splits == 1 or params.fixed_split_size > 0,
        "split_size": params.fixed_split_size,
        "sequences": 0 if a.cu_seqlens_q is None else len(a.cu_seqlens_q) - 1,
    }
    # A setting with the name of a feature, such as softcap, needs the feature unless the setting has its default.
    defaults = AttentionParams._field_defaults
    is_set = {name: x for name, x in params._asdict().items() if x != defaults[name] and name in features.NAMES}
    return needs | is_set


def _check_plan_argument(
    varlen_plan: object, tensors: tuple[Tensor, ...], arguments: dict[str, object], plan: Plan | None
) -> None:  # fmt: skip
    """Check the argument `plan` against the arguments and the kernel of the call, as attention() does."""
    cu_seqlens_q, cu_seqlens_k, seqused_k = (
        arguments.get(name) for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")
    )
    check_is_plan(
        varlen_plan, cu_seqlens_q is not None and "block_table" not in arguments and "block_mask" not in arguments
    )
    window = window_of(arguments.get("causal", False), arguments.get("window"))
    q, k, _ = tensors
    lengths = (cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k, seqused_k)
    varlen_plan.check(q, k, lengths, window)
    if plan is not None and plan.kernel:
        varlen_plan.check_kernel(startup.kernel_names().index(plan.kernel))


def _with_copies(plan: Plan, *texts: str) -> Plan:
    """Return a plan that reports further copies of operands, ahead of the copies of the kernel."""
    return replace(plan, copies=sentences(*texts, plan.copies))


def _of_sdpa(recorder: _OpRecorder, tensors: tuple[Tensor, ...], device: str | None, *, is_view: bool) -> Plan:
    """Return the plan of the F.scaled_dot_product_attention call.

    The operands have the addresses of the caller's tensors, if the call has views of the tensors (`is_view`).
    """
    query, key, value, mask, *more = recorder.args
    twins = [_twin(x, like, is_view) for x, like in zip(tensors, (query, key, value), strict=True)]
    if mask is not None:
        mask = torch.empty(mask.shape, dtype=mask.dtype, device=twins[0].device)
    causal, scale = (more[0], more[1]) if recorder.recorded_ops[-1] is _F_SDPA else (False, more[2])
    grouped = twins[0].shape[1] != twins[1].shape[1]
    return explain(*twins, mask, 0.0, causal, scale=scale, enable_gqa=grouped, device=device)


def _twin(x: Tensor, like: Tensor, is_view: bool) -> Tensor:
    """Return the view of `x` that `like` stands for, or an empty tensor like `like` for a copy or another dtype."""
    if x.dtype != like.dtype or not is_view:
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=x.device)
    return x.as_strided(like.shape, like.stride(), x.storage_offset() + like.storage_offset())


def _in_one_line(tensors: tuple[Tensor, ...], arguments: dict[str, object]) -> str:
    parts = [f"{name} {list(x.shape)}" for name, x in zip("qkv", tensors, strict=True)]
    parts.append("/".join(dict.fromkeys(str(x.dtype).removeprefix("torch.") for x in tensors)))
    arguments = {name: x.metadata if isinstance(x, PreparedBlockMask) else x for name, x in arguments.items()}
    parts += [f"{name} {list(x.shape)}" if isinstance(x, Tensor) else f"{name}={x}" for name, x in arguments.items()]
    return ", ".join(parts + ["grad"] * describe_call.wants_grad(*tensors))
