"""torch.nn.attention.varlen on kernels of ours: its private ops, at a device's dispatch key, where torch has no kernel
of its own. So nothing is overridden, a call that is not ours goes to the body that torch would have run, and
uninstall() leaves no trace. Autograd, fakes and compilation are torch's.

In auto calls are ours on the GPUs where suite ragged found every class of them faster than stock (docs/benchmarks.md),
if they are so long that nobody waits for the host, which takes some 20 us more for ours; else where a block of
sdpa_backend, or the process, asks for "fa3" or "fa2". The LSE of a row without keys is inf, as stock has it; a gradient
of the LSE is torch's to drop. A module of ours may not import torch.nn.attention.varlen: it brings torch._dynamo, a
second or more.
"""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor

from .. import native, windowed
from ..families import BACKENDS, KERNEL_BACKENDS

_OPS = ("_varlen_attn", "_varlen_attn_out", "_varlen_attn_backward")
_SERVED = ("auto", *KERNEL_BACKENDS)
_SIXTEEN_BITS, _LARGEST_DIM = (torch.bfloat16, torch.float16), 256
_MEASURED = 90  # compute capability of the GPUs that were measured; and of those that have backwards of these
_LEAST_FLOP = 2e10  # of a call in auto, if all sequences were as long as each other: 80 us of stock's, or more
_libraries: dict[str, torch.library.Library] = {}  # by device type


def install(device: str = "CUDA") -> None:
    """Ahead of torch's own import of the module, too. "CPU" serves the tests' stand-in."""
    if device in _libraries:
        return
    library = _libraries[device] = torch.library.Library("torch_attn", "IMPL")
    for name, kernel in zip(_OPS, (_forward, _forward_out, _backward), strict=True):
        library.impl(name, kernel, device)


def uninstall() -> None:
    while _libraries:
        _libraries.popitem()[1]._destroy()


def _stocks(name: str):  # noqa: ANN202
    """The body of one of torch's ops, whose module has been imported by whoever called it."""
    return getattr(sys.modules["torch.nn.attention.varlen"], name)._init_fn


def _forward(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, *more: object
) -> tuple[Tensor, Tensor, Tensor]:
    """more, of which those that are None at the end may lack: max_q, max_k, is_causal, scale, window_size, enable_gqa,
    seqused_k, block_table, num_splits.
    """
    asked = _asked((query, key, value), cu_seq_k, more)
    found = None if asked is None else _attend(*_on_end(query, key, value), None, cu_seq_q, cu_seq_k, *asked)
    if found is None:
        return _stocks("_varlen_attn")(query, key, value, cu_seq_q, cu_seq_k, *more)
    out, lse = found[0], found[1].squeeze(0)
    drawn = torch.empty(3, dtype=torch.uint64, device=query.device)[1:]  # by its offset the backward knows it
    return _as_faked(out, query), lse.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=math.inf), drawn


def _attend(*given: object) -> tuple[Tensor, Tensor] | None:
    """By kernels alone: None where auto has none for the call after all, a pack left out say."""
    if native.backend_of(native.effective_mode()) != "auto":
        return windowed.namespace.attention_fwd(*given)
    before = native.set_mode(BACKENDS.index(KERNEL_BACKENDS[0]))
    try:
        return windowed.namespace.attention_fwd(*given)
    except RuntimeError:  # what else may be wrong stock says in its words
        return None
    finally:
        native.set_mode(before)


def _forward_out(out: Tensor, query: Tensor, key: Tensor, value: Tensor, *more: object) -> Tensor:
    if _asked((query, key, value), more[1], more[2:]) is None:
        return _stocks("_varlen_attn_out")(out, query, key, value, *more)
    found, lse, _ = _forward(query, key, value, *more)
    out.copy_(found)
    return lse


def _backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, cu_seq_q: Tensor,
    cu_seq_k: Tensor, *more: object,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """more: max_q, max_k, is_causal, rng_state, scale, window_size."""
    _, _, is_causal, drawn, scale, window = (*more, None, None)[:6]
    if drawn.storage_offset() != 1:
        return _stocks("_varlen_attn_backward")(grad_out, query, key, value, out, lse, cu_seq_q, cu_seq_k, *more)
    given = (*_on_end(grad_out), None, *_on_end(query, key, value, out), lse.unsqueeze(0), cu_seq_q, cu_seq_k)
    *grads, _ = windowed.namespace.attention_bwd(*given, *_window(is_causal, window), 0.0, scale, False)
    return tuple(map(_as_faked, grads, (query, key, value)))


def _on_end(*tensors: Tensor) -> list[Tensor]:
    """(T, H, D) -> (1, H, T, D)."""
    return [x.unsqueeze(0).transpose(1, 2) for x in tensors]


def _as_faked(x: Tensor, operand: Tensor) -> Tensor:
    """(1, H, T, D) -> (T, H, D), laid out as torch's fakes say: like the operand."""
    x = x.transpose(1, 2).squeeze(0)
    if operand.is_contiguous() and x.is_contiguous():
        return x
    like = torch.empty_like(operand)
    return x if x.stride() == like.stride() else like.copy_(x)


def _window(is_causal: bool, window: list[int] | None) -> windowed.Window:
    left, right = (-1, -1) if window is None else window
    return windowed.Window(left, 0 if is_causal else right)


def _asked(operands: tuple[Tensor, ...], cu_seq_k: Tensor | None, more: tuple) -> tuple | None:
    """The op's other arguments, of a call that is ours; None: it is stock's. RuntimeError where our backend
    is forced, and has not what the call needs.
    """
    mode = native.effective_mode()
    backend = native.backend_of(mode)
    if not native.enabled() or backend not in _SERVED:
        return None
    is_causal, scale, window, _, seqused_k, block_table, num_splits = (*more[2:], *(None,) * 7)[:7]
    query, key, value = operands
    dims = (query.shape[2], value.shape[2])
    takes = cu_seq_k is not None and block_table is None and num_splits in (None, 1) and query.dtype in _SIXTEEN_BITS
    takes = takes and all(dim % 8 == 0 and dim <= _LARGEST_DIM for dim in dims)
    # Elsewhere kernels of lengths have no backward: mathematics would follow, where stock has one.
    forced = native.forced_kernels(mode) is not None
    long = backend != "auto" or (takes and _is_long(query, key, cu_seq_k))
    if takes and long and (forced or _is_measured(query.device)):
        return seqused_k, *_window(bool(is_causal), window), 0.0, scale
    if not forced:
        return None
    lacks = {
        "no cu_seq_k": cu_seq_k is None,
        "block_table": block_table is not None,
        f"num_splits={num_splits}": num_splits not in (None, 1),
        f"{query.dtype}": query.dtype not in _SIXTEEN_BITS,
        f"head dims {sorted(set(dims))}": any(dim % 8 or dim > _LARGEST_DIM for dim in dims),
    }
    said = ", ".join(name for name, lacking in lacks.items() if lacking)
    raise RuntimeError(f"varlen_attn: kernels of ours do not take {said}; call it outside of sdpa_backend({backend!r})")


def _is_measured(device: torch.device) -> bool:
    return native.device_facts(device.index or 0)["cc"] == _MEASURED


def _is_long(query: Tensor, key: Tensor, cu_seq_k: Tensor) -> bool:
    (rows, heads, D), sequences = query.shape, max(len(cu_seq_k) - 1, 1)
    return 4 * rows * heads * D * key.shape[0] >= _LEAST_FLOP * sequences
