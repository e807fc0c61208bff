"""What attention() may be given, and what has kernels."""

from __future__ import annotations

import numbers

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..ops.attention import Window
from ..ops.quantized_kv import FORMATS, IN_WORDS, multiplied_in
from ..registry.kernel_spec import ROWS_PER_WARPGROUP as FEW_ROWS
from ..torch_hooks import describe_call, tracing

SIXTEEN_BITS, LARGEST_DIM = (torch.bfloat16, torch.float16), 256
_LARGEST = torch.finfo(torch.float32).max
_CAUSAL = (False, True, "bottom_right", "top_left")
MOST_SPLITS, SPLIT_UNIT = 255, 128  # kMaxSplits and kSplitUnit of src/core/flashplug.h
Scale = Tensor | float
Scales = tuple[Scale | None, Scale | None]  # of k and v
NO_SCALES: Scales = (None, None)


def check_bound(name: str, bound: object) -> None:
    if bound is None or isinstance(bound, torch.SymInt):
        return
    if not is_int(bound):
        raise TypeError(f"attention: {name} is {type(bound).__name__}; give an int, or None")
    if bound < 0:
        raise ValueError(f"attention: {name}={bound}; give 0 or more, or None")


def is_int(x: object) -> bool:
    """NumPy's count; True and False do not."""
    return isinstance(x, int | numbers.Integral) and not isinstance(x, bool)


def splits_of(num_splits: int | None) -> int:
    """As ops take them: 0 for None."""
    if num_splits is None:
        return 0
    if not is_int(num_splits) or not 1 <= num_splits <= MOST_SPLITS:
        raise ValueError(f"attention: num_splits={num_splits!r}; give 1 to {MOST_SPLITS}, or None")
    return int(num_splits)


def split_size_of(fixed_split_size: int | None, num_splits: int | None) -> int:
    """Likewise. num_splits: None beside a size."""
    if fixed_split_size is None:
        return 0
    if not is_int(fixed_split_size) or not 1 <= fixed_split_size < 2**62 or fixed_split_size % SPLIT_UNIT:
        given = f"fixed_split_size={fixed_split_size!r}"
        raise ValueError(f"attention: {given}; give a multiple of {SPLIT_UNIT} keys, or None")
    if num_splits is not None:
        raise ValueError(f"attention: num_splits={num_splits} beside fixed_split_size={fixed_split_size}; give one")
    return int(fixed_split_size)


def softcap_of(softcap: float) -> float:
    if isinstance(softcap, bool) or not isinstance(softcap, int | float) or not 0.0 <= softcap <= _LARGEST:
        raise ValueError(f"attention: softcap={softcap!r}; give a cap, or 0.0 for none")
    return float(softcap)


def window_of(causal: bool | str, window: tuple[int | None, int | None] | None) -> Window:
    if not isinstance(causal, bool | str) or causal not in _CAUSAL:
        raise ValueError(f"attention: causal={causal!r}; use False, True, 'bottom_right' or 'top_left'")
    bounds = (None, None) if window is None else window
    if not isinstance(bounds, tuple | list) or len(bounds) != 2 or not all(map(_is_bound, bounds)):
        raise ValueError(f"attention: window={window!r}; give (left, right), each -1, None or a number of keys")
    left, right = (-1 if bound is None else int(bound) for bound in bounds)
    return Window(left, 0 if causal else right, causal != "top_left")


def _is_bound(bound: object) -> bool:
    return bound is None or (is_int(bound) and -1 <= bound < 2**62)


def check_split_size(size: int, window: tuple[int, int], query: Tensor, value: Tensor, keys: int) -> None:
    """Of rows (B, Hq, Sq, D), and as many keys as a sequence has room for, whose values are (.., Hkv, .., Dv); as
    splits_of_size of src/dispatch/split_heuristic.cpp, and check_splits of src/ops/attention_ops.cpp.
    """
    Hkv, Dv = value.shape[1], value.shape[3]
    if not size or not is_few(query.shape[1], query.shape[2], Hkv):
        return
    if min(window) >= 0:
        keys = min(keys, sum(window) + query.shape[2] + SPLIT_UNIT - 1)
    if keys > MOST_SPLITS * size:
        least = -(-keys // (MOST_SPLITS * SPLIT_UNIT)) * SPLIT_UNIT
        raise ValueError(
            f"attention: fixed_split_size={size} makes more than {MOST_SPLITS} splits of {keys} keys, the most that a "
            f"sequence has room for; give at least {least}"
        )
    partials = query.shape[:3].numel() * max(-(-keys // size), 2) * (Dv + 2)
    if partials >= 2**31:
        raise ValueError(
            f"attention: fixed_split_size={size} makes {partials} partial results, of at most 2^31 - 1; give "
            "a larger one, or fewer sequences"
        )


def heads_fit(Hq: int, Hkv: int) -> bool:
    return not Hq % Hkv if Hkv else not Hq


def check_rank(name: str, x: object, rank: int, what: str, of: str = "attention") -> None:
    if not isinstance(x, Tensor) or x.dim() != rank:
        given = f"{x.dim()}-D" if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{of}: {name} must be {what}, but got {given}.")


def check_operands(q: Tensor, k: Tensor, v: Tensor) -> None:
    """(batch, rows, heads, head dim)."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_rank(name, x, 4, "a tensor of shape (batch, length, heads, head dim)")
    check_fit(q, k, v, (*q.shape,), (*k.shape,), (*v.shape,))


def check_fit(q: Tensor, k: Tensor, v: Tensor, *sizes: tuple[int, ...]) -> None:
    """Raise ValueError where devices or sizes do not go together. sizes: of all three, (batch, rows, heads, head dim).
    Packed sequences say theirs with a batch of 1, so that no view has to be made of them.
    """
    if not q.device == k.device == v.device:
        raise ValueError(f"attention: q, k, v are on {q.device}, {k.device}, {v.device}; give one device")
    of_q, of_k, of_v = sizes
    (B, _, Hq, D), (_, Sk, Hkv, _) = of_q, of_k
    if of_k != (B, Sk, Hkv, D) or of_v[:3] != (B, Sk, Hkv) or not heads_fit(Hq, Hkv):
        given = f"q {of_q}, k {of_k}, v {of_v}"
        raise ValueError(f"attention: {given} do not fit; give (B, Sq, Hq, D), (B, Sk, Hkv, D), (B, Sk, Hkv, Dv)")


def as_sinks(sinks: Tensor | None, q: Tensor) -> Tensor | None:
    """In the dtype of the LSE."""
    if sinks is None:
        return None
    fits = isinstance(sinks, Tensor) and sinks.shape == q.shape[-2:-1] and sinks.is_floating_point()
    if not fits or (sinks.is_meta and not q.is_meta):
        is_tensor = isinstance(sinks, Tensor)
        given = f"{tuple(sinks.shape)}, {sinks.dtype} on {sinks.device}" if is_tensor else type(sinks).__name__
        raise ValueError(f"attention: sinks are {given}; give floating-point numbers (Hq,) = ({q.shape[-2]},)")
    return sinks.to(q.device, torch.promote_types(torch.float32, q.dtype))


def check_dtypes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether k and v have 8 bits."""
    if k.dtype not in FORMATS and v.dtype not in FORMATS:
        check_same(q, k, v)
        return False
    if k.dtype != v.dtype or not q.dtype.is_floating_point or q.dtype in FORMATS:
        given = f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}"
        raise ValueError(f"attention: {given}; k and v have one of {IN_WORDS}, and q 16 bits")
    if forward_ad._current_level >= 0:
        raise RuntimeError(
            "attention: gradients are not supported for 8-bit key and value, in forward mode either. "
            "Pass bf16 or fp16 tensors."
        )
    return True


def refuse_forward_mode() -> None:
    if forward_ad._current_level >= 0:
        raise RuntimeError(
            "attention: softcap, sinks, return_lse and lengths have no forward-mode derivative; use reverse mode"
        )


def check_same(q: Tensor, k: Tensor, v: Tensor) -> None:
    """But for what autocast makes the same, which is all but fp64."""
    dtypes = {q.dtype, k.dtype, v.dtype}
    if len(dtypes) > 1 and (torch.float64 in dtypes or not describe_call.is_autocast(q.device.type)):
        raise ValueError(f"attention: q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; give one dtype")
    if not all(x.dtype.is_floating_point for x in (q, k, v)):
        raise ValueError(f"attention: q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; give floating-point ones")


def have_kernels(query: Tensor, key: Tensor, value: Tensor) -> bool:
    dims = (query.shape[3], value.shape[3])
    taken = query.is_cuda and query.dtype == key.dtype == value.dtype and query.dtype in SIXTEEN_BITS
    return taken and all(dim % 8 == 0 and dim <= LARGEST_DIM for dim in dims)


def is_few(Hq: int, Sq: int, Hkv: int) -> bool:
    return Hkv > 0 and Sq * (Hq // Hkv) <= FEW_ROWS


def are_few_rows(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether kernels of decode, which split the keys, take them: forward alone."""
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    few = is_few(query.shape[1], query.shape[2], key.shape[1])
    read = (query, query, query) if key.dtype in FORMATS else (query, key, value)  # paged_fwd knows which of 8 bits
    return few and not differentiated and have_kernels(*read)


def scale_of(name: str, scale: Scale | None, x: Tensor) -> Tensor:
    """(B, Hkv, Sk) fp32, broadcast by strides of 0. x: (B, Hkv, Sk, ...)."""
    wanted = x.shape[:3]
    if scale is None:
        if x.dtype == torch.int8:
            raise ValueError(f"attention: {name} is None; int8 takes a number, (), (Hkv,), (B, Hkv) or (B, Hkv, Sk)")
        scale = 1.0
    if not isinstance(scale, Tensor | int | float) or (isinstance(scale, Tensor) and scale.is_complex()):
        raise TypeError(f"attention: {name} is {type(scale).__name__}; give a number or a tensor of real ones")
    if not isinstance(scale, Tensor):
        return torch.full((1, 1, 1), float(scale), dtype=torch.float32, device=x.device).expand(wanted)
    if scale.device != x.device and scale.dim() > 0:
        raise ValueError(f"attention: {name} is on {scale.device}, k and v are on {x.device}")
    shape = {0: (1, 1, 1), 1: (1, *scale.shape, 1), 2: (*scale.shape, 1), 3: tuple(scale.shape)}.get(scale.dim())
    if shape is None or any(size not in (1, full) for size, full in zip(shape, wanted, strict=True)):
        raise ValueError(
            f"attention: {name} {tuple(scale.shape)} does not fit B, Hkv, Sk = {tuple(wanted)}; "
            "give (), (Hkv,), (B, Hkv) or (B, Hkv, Sk)"
        )
    return scale.to(x.device, torch.float32).reshape(shape).expand(wanted)


def scales_of(eight: bool, scales: Scales, key: Tensor, value: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Of (B, Hkv, Sk, ...), in 8 bits or not."""
    if eight:
        return scale_of("k_scale", scales[0], key), scale_of("v_scale", scales[1], value)
    if any(x is not None for x in scales):
        raise ValueError(f"attention: k_scale, v_scale are for {IN_WORDS}; k and v are {key.dtype} and {value.dtype}")
    return None, None


def in_16_bits(
    query: Tensor, key: Tensor, value: Tensor, k_scale: Tensor | None, v_scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """What ops get that take no 8 bits, and no autocast."""
    if k_scale is not None:
        dequantise = torch.ops.torch_flashplug.dequantise
        key, value = dequantise(query, key, k_scale), dequantise(query, value, v_scale)
        query = query.to(multiplied_in(query))
    return describe_call.under_autocast(query.device.type, query, key, value)


# ---- a given tensor for the output ----


def check_out(out: Tensor, operands: tuple[Tensor, Tensor, Tensor], *more: object) -> None:
    """Of operands that fit: what is wrong with others is said by whoever takes them. more: what else the call reads."""
    q, _, v = operands
    if not all(isinstance(x, Tensor) and x.dim() for x in operands):
        return
    eight = v.dtype in FORMATS
    dtype = q.dtype if eight else describe_call.under_autocast(q.device.type, q)[0].dtype
    wanted = ((*q.shape[:-1], v.shape[-1]), dtype, q.device)
    if not isinstance(out, Tensor) or (tuple(out.shape), out.dtype, out.device) != wanted:
        given = f"{out.dtype} {tuple(out.shape)} on {out.device}" if isinstance(out, Tensor) else type(out).__name__
        raise ValueError(f"attention: out must be {dtype} {wanted[0]} on {q.device}, but got {given}.")
    given = (out, *operands, *(x for x in more if isinstance(x, Tensor)))
    if not torch.compiler.is_compiling():
        if out.is_neg():
            raise ValueError(
                "attention: out must not be a lazily negated view (out.is_neg()). Pass a tensor that owns its memory."
            )
        if _meets_itself(out) or any(_overlap(out, x) for x in given[1:]):
            raise ValueError(
                "attention: out must own its memory, but shares memory with itself or an operand. Pass a new tensor."
            )
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        raise RuntimeError("attention: there are no gradients through out; call it under torch.no_grad(), or without")
    refuse_forward_mode()


def _meets_itself(x: Tensor) -> bool:
    """Whether two elements may lie at one place."""
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def _overlap(x: Tensor, y: Tensor) -> bool:
    """Whether they may have bytes in common. Of layouts that lie within each other it is known of those that share a
    stride between their rows, such as q, k, v and out in one tensor.
    """
    if x.is_meta or y.is_meta or x.device != y.device or not (x.numel() and y.numel()):
        return False
    low, other = x.untyped_storage(), y.untyped_storage()
    if low.data_ptr() + low.nbytes() <= other.data_ptr() or other.data_ptr() + other.nbytes() <= low.data_ptr():
        return False
    (low, dims), (other, others) = ((t.data_ptr(), _dims_in_bytes(t)) for t in (x, y))
    apart = other - low
    if apart >= _extent(dims) or -apart >= _extent(others):
        return False
    for step in {stride for stride, _ in (*dims, *others)}:
        inner, within = ([dim for dim in all_dims if dim[0] < step] for all_dims in (dims, others))
        outer = [stride for stride, _ in (*dims, *others) if stride >= step]
        place = apart % step
        if not any(stride % step for stride in outer) and _extent(inner) <= place <= step - _extent(within):
            return False
    return True


def _dims_in_bytes(x: Tensor) -> list[tuple[int, int]]:
    """(stride, size), an element's own bytes among them."""
    size = x.element_size()
    return [(1, size), *((s * size, n) for s, n in zip(x.stride(), x.shape, strict=True) if n > 1 and s)]


def _extent(dims: list[tuple[int, int]]) -> int:
    return 1 + sum(stride * (size - 1) for stride, size in dims)


def _is_plain(query: Tensor, more: tuple[object, ...]) -> bool:
    """Return whether autograd, a tracer or a subclass of Tensor has nothing to do with a call."""
    if torch.compiler.is_compiling() or type(query) is not Tensor:
        return False
    if not torch.is_grad_enabled():
        return True
    return not query.requires_grad and not any(isinstance(x, Tensor) and x.requires_grad for x in more)


def written(op: str, into: Tensor | None, query: Tensor, *more: object) -> tuple[Tensor, Tensor]:
    """Output and LSE of attention_fwd or paged_fwd, in a tensor (B, Hq, Sq, Dv) where one is given. more: what schemas
    have behind query, but for the mode.
    """
    namespace, mode = torch.ops.torch_flashplug, tracing.mode_of_block()
    if into is None or into.dtype != query.dtype:
        if _is_plain(query, more):
            # The Python rule of autograd would take 6 us a call to find that it has nothing to do.
            with torch._C._AutoDispatchBelowAutograd():
                out, lse = getattr(namespace, op)(query, *more, mode)
        else:
            out, lse = getattr(namespace, op)(query, *more, mode)
        return out if into is None else into.copy_(out), lse
    lse = getattr(namespace, f"{op}_out")(into, query, *more, mode)
    if not torch.compiler.is_compiling() and not into.is_inference():
        torch.autograd.graph.increment_version(into)  # the op has no kernel that does
    return into, lse
