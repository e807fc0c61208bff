"""Plans of varlen_attn calls: the public function `explain_varlen`.

C++ decides whether torch_flashplug serves a call (src/dispatch/varlen_decision.cpp), from the facts that the op passes,
too. The kernel is the kernel that attention() would run.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from ..dispatch import bindings, varlen_decision
from ..registry.architectures import KERNEL_BACKENDS
from ..registry.dispatch_table import HEAD_DIM_STEP, MAX_GENERAL_HEAD_DIM
from ..torch_hooks import describe_call
from ..torch_hooks import varlen_attn as varlen_hooks
from . import startup
from .attention_args import checked_scale
from .backend import DEVICES, Plan, device_name, sdpa_backend, sentences
from .explain_attention import explain_attention

_SETTINGS = ("scale", "window_size", "enable_gqa", "seqused_k", "block_table", "num_splits", "return_aux", "out")
_UNIT = 16  # bytes of cuDNN's loads
_WINDOWS = {(-1, -1): "none", (-1, 0): "causal"}  # all other windows: "other"
_STOCK = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def explain_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    device: str | None = None,
    **settings: object,
) -> Plan:
    """Return the plan of a torch.nn.attention.varlen.varlen_attn call without running the call.

    With `out` among the settings, the plan is that of varlen_attn_out. The plan depends on `sdpa_backend`,
    torch.nn.attention.sdpa_kernel and autograd, as the call itself does.

    Args:
        query: packed queries (T, Hq, D).
        key: packed keys (Tk, Hkv, D).
        value: packed values (Tk, Hkv, Dv).
        cu_seq_q: int32 (sequences + 1,), the start of each sequence in query.
        cu_seq_k: int32 (sequences + 1,), the start of each sequence in key; or None.
        max_q: the length of the longest sequence of queries.
        max_k: the length of the longest sequence of keys.
        device: "h100", "h200", "a100", "l4" or "rtx4090" for the plan on that GPU. None for the plan on the tensors'
            own device. From torch 2.15 on, varlen_attn asks the GPU for stock's kernel. With a named device, stock's
            kernel is then assumed to be cuDNN for every call that cuDNN supports on Hopper.
        settings: all other arguments of varlen_attn, by name, and `out`.

    Returns:
        The plan of the call.

    Raises:
        TypeError: a setting is no argument of varlen_attn, or the scale is no number.
        ValueError: the device is unknown.
    """
    if unknown := set(settings) - set(_SETTINGS):
        raise TypeError(
            f"explain_varlen: settings must be among {', '.join(_SETTINGS)}, but got {', '.join(sorted(unknown))}. "
            "Pass the arguments of varlen_attn by name."
        )
    device = device_name("explain_varlen", device)
    checked_scale(settings.get("scale"), "explain_varlen")
    startup.load()
    from torch.nn.attention import varlen  # the import takes a second or more

    varlen_hooks.prepare()
    settings = {"window_size": (-1, -1), **settings}
    call = _in_one_line((query, key, value), (cu_seq_q, cu_seq_k), (max_q, max_k), settings)
    if device is None and not query.is_cuda:
        return _stocks(call, f"The tensors are on {query.device.type}.")
    if (place := varlen_hooks.other_owner()) and bindings.enabled():
        return _stocks(call, f"The op of torch runs the kernels of another library, registered at {place}")
    try:
        backend = _backend(varlen, (query, key, value, cu_seq_q, cu_seq_k), max_q, settings, device)
    except (RuntimeError, ValueError) as refused:
        return replace(_stocks(call, "The call is rejected by torch before the op runs."), error=str(refused))
    facts = _facts((query, key, value), cu_seq_k, max_q, settings)
    facts |= {"backend": backend, "unknown_value": 0}  # varlen_attn passes known arguments only
    cc = DEVICES[device]["cc"] if device is not None else bindings.device_facts(query.device.index or 0)["cc"]
    mode = bindings.effective_mode()
    decision = varlen_decision.decide_varlen(facts, cc, mode)
    stock = _STOCK[decision["stock"]].name
    if decision["reason"] not in {"served", "forced"}:
        return replace(_stocks(call, decision["text"]), error=decision["error"], stock_choice=stock)
    attention_args = {"scale": settings.get("scale"), "window": tuple(settings["window_size"])}
    attention_args |= {"seqused_k": settings.get("seqused_k"), "num_splits": settings.get("num_splits") or None}
    attention_args |= {"cu_seqlens_q": cu_seq_q} | _keys(cu_seq_k, max_q, settings)
    forced = bindings.forced_kernels(mode)
    kernel_backend = bindings.backend_of(mode) if bindings.backend_of(mode) in KERNEL_BACKENDS else KERNEL_BACKENDS[0]
    try:
        with sdpa_backend(kernel_backend):
            plan = explain_attention(query, key, value, device=device, **attention_args)
    except (TypeError, ValueError) as refused:  # in auto, stock raises an error in its own words
        return replace(_stocks(call, str(refused)), error=str(refused) if forced else "", stock_choice=stock)
    if not plan.kernel and not forced:
        return replace(_stocks(call, plan.error), reasons=plan.reasons, stock_choice=stock)
    wrong = decision["stock_bug"] and f"{decision['stock_bug']} ({decision['row']})"
    row = "" if wrong else decision["row"]
    return replace(plan, call=call, row=row, stock_bug=wrong, stock_choice=stock)


def _keys(cu_seq_k: Tensor | None, max_q: int, settings: dict[str, object]) -> dict[str, object]:
    """Return the arguments of attention() for the keys of a call, as in src/hooks/varlen_pages.cpp."""
    if settings.get("block_table") is None:
        return {"cu_seqlens_k": cu_seq_k}
    is_decode = max_q == 1 and settings.get("num_splits") != 1
    return {"block_table": settings["block_table"], "max_seqlen_q": 1 if is_decode else None}


def _stocks(call: str, why: str) -> Plan:
    return Plan(call, "stock", reasons=dict.fromkeys(KERNEL_BACKENDS, sentences(why)))


def _backend(
    varlen: object, tensors: tuple[Tensor | None, ...], max_q: int, settings: dict[str, object], device: str | None
) -> int:  # fmt: skip
    """Return the number of the SDPBackend that torch passes to the op of varlen_attn.

    The number is -1 if torch passes none, or if the number is not known here.

    Raises:
        RuntimeError, ValueError: torch rejects the call before the op runs.
    """
    if varlen_decision.varlen_rule() != "argument":
        return -1
    varlen._validate_scale(settings.get("scale"))
    if device is None:
        optional = (settings.get(name) for name in ("seqused_k", "block_table", "num_splits"))
        return varlen._select_backend(*tensors, max_q, list(settings["window_size"]), *optional)
    cudnn, flash = torch._C._get_cudnn_sdp_enabled(), torch._C._get_flash_sdp_enabled()
    if cudnn and not flash:
        return SDPBackend.CUDNN_ATTENTION.value
    return -1 if cudnn else SDPBackend.FLASH_ATTENTION.value


def _facts(
    operands: tuple[Tensor, ...], cu_seq_k: Tensor | None, max_q: int, settings: dict[str, object]
) -> dict[str, int]:
    """Return the facts of a call of varlen_attn, in the form of facts_of_call() of src/hooks/varlen_attn.cpp.

    `backend` and `unknown_value` are facts of the op alone, and are missing.
    """
    query, key, value = operands
    rule = varlen_decision.varlen_rule()
    key_dims = 3 if settings.get("block_table") is None else 4
    return {
        "rule": bindings.names("varlen rules").index(rule),
        "allowed": rule != "argument" or describe_call.kernels_allowed(),
        "writes_out": settings.get("out") is not None,
        "enable_gqa": bool(settings.get("enable_gqa", False)),
        "max_q": max_q,
        "heads_q": query.shape[-2],
        "heads_k": key.shape[-2],
        "D": query.shape[-1],
        "Dv": value.shape[-1],
        "dtype": _number_of(query.dtype),
        "window": bindings.names("varlen windows").index(_WINDOWS.get(tuple(settings["window_size"]), "other")),
        "splits": -1 if settings.get("num_splits") is None else settings["num_splits"],
        "paged": settings.get("block_table") is not None,
        "has_cu_seqlens_k": cu_seq_k is not None,
        "has_seqused_k": settings.get("seqused_k") is not None,
        "readable": all(map(_is_readable, operands, (3, key_dims, key_dims))),
        "out_fits": _out_fits(settings.get("out"), query, value),
        "misaligned": not all(map(_lies_as_cudnn_wants, operands)),
        "unusual_scale": bindings.kind_of_scale(settings.get("scale")) != "positive",
    }


def _number_of(dtype: torch.dtype) -> int:
    """Return the index of a dtype in bindings.dtypes(), whose last entry stands for all dtypes not listed."""
    names = list(bindings.dtypes())
    name = str(dtype).removeprefix("torch.")
    return names.index(name) if name in names else len(names) - 1


def _out_fits(out: Tensor | None, query: Tensor, value: Tensor) -> bool:
    has_shape = out is None or out.shape == (*query.shape[:-1], value.shape[-1])
    return has_shape and (out is None or (out.dtype == query.dtype and out.device == query.device))


def _is_readable(x: Tensor, dims: int) -> bool:
    is_supported = x.dtype in (torch.bfloat16, torch.float16) and x.dim() == dims
    return is_supported and x.shape[-1] % HEAD_DIM_STEP == 0 and x.shape[-1] <= MAX_GENERAL_HEAD_DIM


def _lies_as_cudnn_wants(x: Tensor) -> bool:
    *strides, last = x.stride()
    is_broadcast = any(size > 1 and stride == 0 for size, stride in zip(x.shape[:-1], strides, strict=True))
    is_aligned = all(stride * x.element_size() % _UNIT == 0 for stride in strides)
    address = 0 if x.is_meta else x.data_ptr()
    return last == 1 and is_aligned and not is_broadcast and address % _UNIT == 0


def _in_one_line(
    operands: tuple[Tensor, ...], starts: tuple[Tensor | None, ...], longest: tuple[int, int], settings: dict
) -> str:
    parts = [f"{name} {list(x.shape)}" for name, x in zip("qkv", operands, strict=True)]
    parts.append(str(operands[0].dtype).removeprefix("torch."))
    parts += [f"cu_seq_{name} {list(x.shape)}" for name, x in zip("qk", starts, strict=True) if x is not None]
    parts += [f"max_{name}={number}" for name, number in zip("qk", longest, strict=True)]
    passed = {name: x for name, x in settings.items() if x is not None}
    parts += [f"{name} {list(x.shape)}" if isinstance(x, Tensor) else f"{name}={x}" for name, x in passed.items()]
    return ", ".join(parts + ["grad"] * describe_call.wants_grad(*operands))
