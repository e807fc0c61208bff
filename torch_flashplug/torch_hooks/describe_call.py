"""What Python tensors say of one F.sdpa call, for native.plan(): explain() and Plan B use it; served calls are read in
C++, which also makes the facts of a call of what is said here (src/core/call_facts.h).

Mirrors the first questions of src/hooks/sdp_choice.cpp. Reads hints of symbolic sizes, so it never adds a guard.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from ..dispatch import bindings
from ..dispatch import table_structs as rows
from ..ops import mask_preprocess_reference, sdpa
from ..registry.dtypes import NUMBERS
from ..registry.kernel_spec import ROWS_PER_WARPGROUP

DTYPES = {name: getattr(torch, number.torch) for name, number in NUMBERS.items()}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_OTHER_DTYPE = len(rows.DTYPE_IDS)
_RIGHT_CHOICE = sdpa.namespace._right_choice.default
_AT_CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
_HAVE_AUTOCAST = {kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(kind)}  # to trace
SUBCLASS = "a tensor subclass (DTensor, ...) decides what it does with attention; stock's ops are what it knows"


def wants_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def decides_itself(*tensors: Tensor) -> bool:
    """One of them is of a class that Python dispatches, and not only traces."""
    return any(
        type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
        and not isinstance(tensor, (FakeTensor, FunctionalTensor))
        for tensor in tensors
    )


def sizes_of_traced(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None
) -> tuple[tuple[int | None, ...], ...] | None:
    """What the router asks about operands that Python dispatches, all of them 4-d: their sizes as far as they are
    known, None for one that depends on data. None for all: stock serves the call.
    """
    if decides_itself(query, key, value) or (attn_mask is not None and _mask_is_stocks(query, key, attn_mask)):
        return None
    return tuple(hints(tensor.shape) for tensor in (query, key, value))


def _mask_is_stocks(query: Tensor, key: Tensor, attn_mask: Tensor) -> bool:
    """It decides itself, or is stock's to refuse, or of bool and one that a graph has as floats: what is not
    functionalized is recorded as it comes, without tracing.py.
    """
    recorded = get_proxy_mode() is not None and not isinstance(query, FunctionalTensor)
    lost = recorded and attn_mask.dtype == torch.bool
    return decides_itself(attn_mask) or lost or misfit(query, key, attn_mask) is not None


def takes_math(mode: int) -> bool:
    """The router answers math before it looks at the tensors. torch.nn.attention.sdpa_kernel counts, but not against a
    process-wide backend.
    """
    if not bindings.enabled() or bindings.backend_of(mode) != "math":
        return False
    return bindings.is_preference(mode) or (kernels_allowed() and torch.backends.cuda.math_sdp_enabled())


def kernels_allowed() -> bool:
    """By torch.nn.attention.sdpa_kernel: our class of backends."""
    return torch.backends.cuda.flash_sdp_enabled() or torch._C._get_overrideable_sdp_enabled()


def _becomes_floats(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> bool:
    """Return whether F.sdpa makes floats of a bool mask, also for kernels of ours: under functorch and dispatch modes
    (`as_floats` of src/hooks/sdp_choice.cpp).
    """
    if mask.dtype != torch.bool:
        return False
    if any(_is_transformed(tensor) for tensor in (query, key, value, mask)):
        return True
    if get_proxy_mode() is not None and not isinstance(query, FunctionalTensor):
        return True
    only_traced = any(isinstance(tensor, (FakeTensor, FunctionalTensor)) for tensor in (query, key, value))
    return not only_traced and torch._C._len_torch_dispatch_stack() > 0


def _is_transformed(tensor: Tensor) -> bool:
    """By torch.func, but for functionalize, which is undone before attention is asked for."""
    functorch = torch._C._functorch
    return functorch.is_functorch_wrapped_tensor(tensor) and not functorch.is_functionaltensor(tensor)


def adds_batch_dim() -> bool:
    """Return whether this torch gives 3-D operands a batch dim before it chooses a backend; 2.14 is the first."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 14)


def as_router_gets(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the tensors of an F.sdpa call as torch hands them to its choice function."""
    operands = (query, key, value)
    if not adds_batch_dim() or any(tensor.is_nested or tensor.dim() != 3 for tensor in operands):
        return (*operands, attn_mask)
    while attn_mask is not None and attn_mask.dim() < 4:
        attn_mask = attn_mask.unsqueeze(0)
    query, key, value = (tensor.unsqueeze(0) for tensor in operands)
    return query, key, value, attn_mask


def has_no_elements(*tensors: Tensor) -> bool:
    """One of them, as far as is known: neither nested nor of symbolic sizes."""
    return not any(tensor.is_nested for tensor in tensors) and any(0 in hints(tensor.shape) for tensor in tensors)


def math_takes_empty(attn_mask: Tensor | None, is_causal: bool) -> bool:
    """Whether math serves operands without elements, which others of stock's may end the process for: unless it may
    not, or refuses is_causal beside a mask, which torch does not define.
    """
    return torch.backends.cuda.math_sdp_enabled() and not (is_causal and attn_mask is not None)


def is_autocast(device_type: str) -> bool:
    return device_type in _HAVE_AUTOCAST and torch.is_autocast_enabled(device_type)


def under_autocast(device_type: str, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """What attention gets of its operands and a mask where autocast is on: floats but fp64 in its dtype."""
    if not is_autocast(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    wide = [tensor is not None and tensor.is_floating_point() and tensor.dtype != torch.float64 for tensor in tensors]
    return tuple(tensor.to(dtype) if cast else tensor for tensor, cast in zip(tensors, wide))


def misfit(query: Tensor, key: Tensor, mask: Tensor) -> str | None:
    """Why a mask is none that kernels take, as mask_fits of src/operands/mask.cpp; None if it is. Sizes that depend on
    data may fit.
    """
    if mask.dtype not in {torch.bool, torch.float32, query.dtype}:
        return f"attn_mask is of {mask.dtype}, kernels take bool, fp32 or the query's dtype"
    if mask.layout != torch.strided:
        return f"attn_mask is of layout {mask.layout}, kernels take dense ones"
    if not 2 <= mask.dim() <= 4:
        return f"attn_mask {list(mask.shape)} has {mask.dim()} dims, kernels take 2 to 4"
    wanted = hints((*query.shape[:3], key.shape[2]))
    pairs = zip(hints(mask.shape), wanted[-mask.dim() :])
    if not all(None in {have, want} or have in {1, want} for have, want in pairs):
        return f"attn_mask {list(mask.shape)} does not broadcast to (batch, heads, rows, keys), {list(wanted)}"
    if mask.device != query.device:
        return f"attn_mask is on {mask.device}, query on {query.device}"
    if mask.dtype == torch.bool and None not in wanted:
        (stride,), (Sq, Sk) = hints(mask.stride()[-2:-1]), wanted[2:]
        looked_at = mask_preprocess_reference.looked_at(Sq) if stride == 0 or hints(mask.shape)[-2] == 1 else Sq
        if mask_preprocess_reference.numbers_of(looked_at, Sq, Sk) > mask_preprocess_reference.MOST_NUMBERS[0]:
            return f"attn_mask {list(mask.shape)} has more scores than kernels count"
    return None


def outside_dispatcher(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, enable_gqa: bool, mode: int
) -> str | None:
    """Why the dispatcher is not asked about this call at all; None if it is. Not for calls that takes_math() has."""
    if not bindings.enabled():
        return "the plugin is disabled; call torch_flashplug.enable()"
    if any(tensor.dim() != 4 for tensor in (query, key, value)):
        return (
            "query, key and value need 4 dims (batch, heads, rows, head dim); stock attention takes or rejects others"
        )
    if not query.device == key.device == value.device:
        return "query, key and value are on different devices; stock attention rejects the call"
    if has_no_elements(query, key, value):
        return "operands have no elements; stock attention takes or rejects them, its math if the plugin is asked"
    if any(tensor.is_nested for tensor in (query, key, value)):
        return "nested tensors go by stock's choice; what comes to its flash attention may be ours (docs/support.md)"
    if decides_itself(query, key, value, *([] if attn_mask is None else [attn_mask])):
        return SUBCLASS
    sizes = [hints(tensor.shape) for tensor in (query, key, value)]
    if any(None in size for size in sizes):
        return (
            "sizes depend on data: in a traced graph the op decides when it runs, where kernels take such calls at "
            "all (with a bool attn_mask only if forced); else stock attention serves this call"
        )
    if not bindings.shapes_fit(sizes, enable_gqa):
        return (
            "shapes need broadcasting or do not fit (more than one key head, and another number of query heads, need "
            "enable_gqa=True); stock attention decides"
        )
    unfit = None if attn_mask is None else misfit(query, key, attn_mask)
    if unfit is not None:
        return f"{unfit}; stock attention takes or rejects it"
    if not kernels_allowed():
        return (
            "torch.nn.attention.sdpa_kernel allows neither FLASH_ATTENTION nor OVERRIDEABLE, "
            "the two that stand for this plugin"
        )
    if bindings.backend_of(mode) == "math":
        return "math is forced, but torch.nn.attention.sdpa_kernel does not allow it; stock attention decides"
    return None


def refusal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
    *,
    by_math: bool,
) -> str:
    """What stock raises for a call, as its math tells of tensors without data; "" if nothing, or where it is not known
    what it would get. by_math: it is math that gets it, the only one to refuse some probabilities, and is_causal beside
    a mask.
    """
    given = [tensor for tensor in (query, key, value, attn_mask) if tensor is not None]
    if any(tensor.is_nested for tensor in given) or decides_itself(*given):
        return ""
    sizes = [hints(tensor.shape) for tensor in given]
    if any(None in size for size in sizes) or len({tensor.device for tensor in given}) > 1:
        return ""
    shown = [torch.empty(size, dtype=tensor.dtype, device="meta") for size, tensor in zip(sizes, given)]
    settings = {"dropout_p": dropout_p, "is_causal": is_causal} if by_math else {}
    try:
        F.scaled_dot_product_attention(*shown, **settings, enable_gqa=enable_gqa)
    except (RuntimeError, IndexError) as error:
        return str(error)
    return ""


def describe(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> dict[str, float]:
    """Of native.problem_facts(), for a call that outside_dispatcher() lets through; `on_cuda` as query says."""
    operands = (query, key, value)
    grad = wants_grad(*operands, *([] if attn_mask is None else [attn_mask]))
    is_mask = attn_mask is not None and attn_mask.dtype == torch.bool and not _becomes_floats(*operands, attn_mask)
    is_wide = attn_mask is not None and _is_wide(attn_mask, query)
    problem: dict[str, float] = {
        "causal": is_causal,
        "mask": is_mask,
        "bias": attn_mask is not None and not is_mask and not is_wide,
        "bias32": is_wide,
        "dropout_p": dropout_p,
        "scale": bindings.SCALE_IDS[bindings.kind_of_scale(scale)],
        "on_cuda": query.is_cuda,
        "grad": grad,
        "bias_grad": attn_mask is not None and wants_grad(attn_mask),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    for letter, tensor in zip("qkv", operands):
        problem[f"dtype_{letter}"] = rows.DTYPE_IDS.get(_NAMES.get(tensor.dtype, ""), _OTHER_DTYPE)
    return bindings.with_operands(
        problem,
        [hints(tensor.shape) for tensor in operands],
        [hints(tensor.stride()) for tensor in operands],
        [_address(tensor) for tensor in operands],
        [tensor.element_size() for tensor in operands],
    )


def _is_wide(mask: Tensor, query: Tensor) -> bool:
    """is_wide_bias of src/core/call_facts.h."""
    return mask.dtype == torch.float32 and query.dtype != torch.float32


def bias_in_words(query: Tensor, key: Tensor, mask: Tensor, few: bool, hopper: bool) -> str:
    """Say how kernels read a float mask that fits (src/operands/bias.cpp).

    Args:
        query, key, mask: operands of the call.
        few: whether the kernel is one of decode.
        hopper: whether the kernel is written for Hopper, and reads rows wherever they begin.
    """
    sizes = (*hints(query.shape[:3]), *hints(key.shape[2:3]))
    missing, unit = 4 - mask.dim(), 16 // mask.element_size()
    given = [(1, 0)] * missing + list(zip(hints(mask.shape), hints(mask.stride())))
    strides = [0 if have == 1 else stride for have, stride in given]
    aligned = _address(mask) % 16 == 0 and all(stride % unit == 0 for stride in strides[:3])
    shared = not few and strides[2] == 0 and sizes[2] > ROWS_PER_WARPGROUP
    repeats, anywhere = shared and not hopper, hopper and not shared
    said = f"{str(mask.dtype).removeprefix('torch.')} {list(mask.shape)}, "
    if (aligned or anywhere) and not repeats and (strides[3] == 1 or sizes[3] == 1):
        return f"{said}read where it lies"
    rows = math.prod(size for size, stride in zip(sizes[:3], strides) if stride != 0)
    copied = rows * (ROWS_PER_WARPGROUP if repeats else 1) * -(-sizes[3] // unit) * 16
    if repeats:
        why = f"the same for all queries: {ROWS_PER_WARPGROUP} rows of it"
    elif _address(mask) % 16:
        why = f"strides {list(mask.stride())}, an address that is no multiple of 16 bytes"
    else:
        why = f"strides {list(mask.stride())}"
    return f"{said}{why}: copied into rows of whole 16 bytes first, {copied / 1e6:.1f} MB"


def is_asked(mode: int) -> bool:
    """The router has a say in calls of this mode: also in which of stock's backends takes one that stays with stock."""
    return bindings.enabled() and kernels_allowed() and bindings.backend_of(mode) not in {"math", "stock"}


def right_choice(
    choice: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> tuple[int, str]:
    """What the router makes of stock's choice for a call, both of SDPBackend's numbers (src/hooks/stock_bugs.cpp), and
    what is wrong with that one; "": nothing. Past whatever would trace it: only facts are read.
    """
    right, fault = _RIGHT_CHOICE.redispatch(_AT_CUDA, query, key, value, attn_mask, dropout_p, is_causal, scale, choice)
    return right, bindings.fault_said(fault)


def hints(sizes: tuple) -> tuple[int | None, ...]:
    return tuple(size.node.hint if isinstance(size, torch.SymInt) else size for size in sizes)


def _address(tensor: Tensor) -> int:
    """In bytes. Storages of tensors that are only traced will be aligned, those that torch.func wraps are not shown."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return 0
    real = type(tensor) in {Tensor, torch.nn.Parameter} and not tensor.is_meta
    (offset,) = hints((tensor.storage_offset(),))
    return tensor.data_ptr() if real else offset * tensor.element_size()
