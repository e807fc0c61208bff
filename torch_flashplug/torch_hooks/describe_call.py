"""Facts of an F.sdpa call read from Python tensors, for bindings.plan().

explain() and the composite hook use this module. For served calls, C++ reads the tensors. C++ also computes the facts
of a call from the values collected here (src/core/call_facts.h).

The functions mirror the first decisions of src/hooks/sdp_choice.cpp. Only the hints of symbolic sizes are read, so that
no guard is added.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from ..dispatch import bindings
from ..dispatch.table_structs import DTYPE_IDS
from ..ops import sdpa
from ..registry.dtypes import DTYPE_INFO, NAMED_DTYPES

DTYPES = {name: getattr(torch, info.torch_name) for name, info in DTYPE_INFO.items()}
# The number of each dtype in the tables of C++; any other dtype has the next number.
_DTYPE_IDS = {getattr(torch, info.torch_name): DTYPE_IDS[name] for name, info in (DTYPE_INFO | NAMED_DTYPES).items()}
_OTHER_DTYPE = len(_DTYPE_IDS)
_CORRECTED_CHOICE = sdpa.namespace._corrected_choice.default
_AT_CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
# Computed at import, so that tracing is_autocast() does not trace is_autocast_available().
_HAVE_AUTOCAST = {kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(kind)}
SUBCLASS = "a tensor subclass (DTensor, ...) handles attention itself, and supports only stock's ops"


def wants_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def decides_itself(*tensors: Tensor) -> bool:
    """Return whether a tensor is of a subclass with a Python dispatch of ops, other than the classes for tracing."""
    return any(
        type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
        and not isinstance(tensor, (FakeTensor, FunctionalTensor))
        for tensor in tensors
    )


def size_hints_of_traced(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None
) -> tuple[tuple[int | None, ...], ...] | None:
    """Return the sizes of query, key and value of a traced call, with hints for symbolic sizes.

    The choice hook (src/hooks/sdp_choice.cpp) calls this function for 4-D operands, through the trace callback. A size
    that depends on data is None. The result is None if an operand has a Python dispatch of its own, or if the mask is
    unsupported. The callback then asks dtensor.local_part(), and stock serves the call if there is no answer.
    """
    if decides_itself(query, key, value) or (attn_mask is not None and _mask_is_stocks(query, key, attn_mask)):
        return None
    return tuple(hints(tensor.shape) for tensor in (query, key, value))


def _mask_is_stocks(query: Tensor, key: Tensor, attn_mask: Tensor) -> bool:
    """Return whether stock must serve the call because of the mask.

    There are three cases. The mask is of a subclass with a Python dispatch of ops. The mask is invalid, so that stock
    raises the error. Or the mask is a bool mask that a graph records as floats: calls that are not functionalized are
    recorded unchanged, without tracing.py.
    """
    is_recorded = get_proxy_mode() is not None and not isinstance(query, FunctionalTensor)
    becomes_floats = is_recorded and attn_mask.dtype == torch.bool
    return decides_itself(attn_mask) or becomes_floats or misfit(query, key, attn_mask) is not None


def takes_math(mode: int) -> bool:
    """Return whether the dispatcher selects math before reading the tensors.

    torch.nn.attention.sdpa_kernel must allow math, except if math is the backend of the whole process.
    """
    if not bindings.enabled() or bindings.backend_of(mode) != "math":
        return False
    return bindings.is_preference(mode) or (kernels_allowed() and torch.backends.cuda.math_sdp_enabled())


def kernels_allowed() -> bool:
    """Return whether torch.nn.attention.sdpa_kernel allows a backend that stands for this plugin."""
    return torch.backends.cuda.flash_sdp_enabled() or torch._C._get_overrideable_sdp_enabled()


def _becomes_floats(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> bool:
    """Return whether F.sdpa converts a bool mask to floats before any backend, ours included, gets the mask.

    F.sdpa does so under functorch and under dispatch modes (`as_floats` of src/hooks/sdp_choice.cpp). C++ cannot answer
    for explain() and for the composite hook. C++ looks at the tensors and modes below all tracing. This function runs
    above, where functionalization still wraps the tensors and where the modes of the tracer are active.
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
    """Return whether torch.func wraps a tensor, except for functionalize, which is undone before attention runs."""
    functorch = torch._C._functorch
    return functorch.is_functorch_wrapped_tensor(tensor) and not functorch.is_functionaltensor(tensor)


def adds_batch_dim() -> bool:
    """Return whether torch adds a batch dim to 3-D operands before choosing a backend, as torch 2.14 and later do."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 14)


def as_choice_hook_gets(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the tensors of an F.sdpa call in the form passed to torch's choice function."""
    operands = (query, key, value)
    if not adds_batch_dim() or any(tensor.is_nested or tensor.dim() != 3 for tensor in operands):
        return (*operands, attn_mask)
    while attn_mask is not None and attn_mask.dim() < 4:
        attn_mask = attn_mask.unsqueeze(0)
    query, key, value = (tensor.unsqueeze(0) for tensor in operands)
    return query, key, value, attn_mask


def has_no_elements(*tensors: Tensor) -> bool:
    """Return whether a tensor is known to be empty; nested tensors and unknown symbolic sizes do not count."""
    return not any(tensor.is_nested for tensor in tensors) and any(0 in hints(tensor.shape) for tensor in tensors)


def math_takes_empty(attn_mask: Tensor | None, is_causal: bool) -> bool:
    """Return whether math serves operands without elements, for which other stock backends can abort the process.

    Math does so if torch allows math, and unless the call has both is_causal and a mask, which torch does not define.
    """
    return torch.backends.cuda.math_sdp_enabled() and not (is_causal and attn_mask is not None)


def is_autocast(device_type: str) -> bool:
    return device_type in _HAVE_AUTOCAST and torch.is_autocast_enabled(device_type)


def under_autocast(device_type: str, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the tensors that attention receives under autocast: all floats except fp64 in the autocast dtype."""
    if not is_autocast(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    wide = [tensor is not None and tensor.is_floating_point() and tensor.dtype != torch.float64 for tensor in tensors]
    return tuple(tensor.to(dtype) if cast else tensor for tensor, cast in zip(tensors, wide))


def misfit(query: Tensor, key: Tensor, mask: Tensor) -> str | None:
    """Return why kernels do not support a mask; None if kernels support the mask.

    The rules are in src/operands/mask.cpp. Sizes that depend on data are assumed to be supported.
    """
    scores = hints((*query.shape[:3], key.shape[2]))
    is_dense = mask.layout == torch.strided
    obstacle = bindings.mask_obstacle(
        {
            "is_bool": mask.dtype == torch.bool,
            "is_fp32": mask.dtype == torch.float32,
            "has_query_dtype": mask.dtype == query.dtype,
            "is_dense": is_dense,
            "is_on_query_device": mask.device == query.device,
        },
        hints(mask.shape),
        hints(mask.stride()) if is_dense else (),  # a sparse mask has no strides, and C++ asks for none
        scores,
    )
    if obstacle == "dtype":
        return f"attn_mask must have dtype bool, fp32 or the query's dtype for the kernels, but has {mask.dtype}"
    if obstacle == "layout":
        return f"attn_mask must be dense for the kernels, but has layout {mask.layout}"
    if obstacle == "dims":
        return f"attn_mask must have 2 to 4 dims for the kernels, but has {mask.dim()} dims, {list(mask.shape)}"
    if obstacle == "shape":
        return (
            f"attn_mask must broadcast to (batch, heads, rows, keys), {list(scores)}, but has shape {list(mask.shape)}"
        )
    if obstacle == "device":
        return f"attn_mask must be on the query's device, {query.device}, but is on {mask.device}"
    if obstacle == "size":
        return f"attn_mask {list(mask.shape)} is too large: the kernels cannot index all scores"
    return None


def outside_dispatcher(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, enable_gqa: bool, mode: int
) -> str | None:
    """Return why the dispatcher does not consider this call; None if the dispatcher does.

    Calls for which takes_math() is True must not come here. C++ decides about switches, shapes and masks. The remaining
    questions are about plain facts: dims, devices, elements and the classes of tensors. The choice hook cannot answer
    them for explain(), for three reasons. explain() describes calls for any device, but the hook stops at tensors
    outside of a GPU. The hook stops at classes of calls without a measured entry, whose plan explain() shows. And the
    hook itself asks Python about subclasses and about hints of symbolic sizes (size_hints_of_traced()).
    """
    if not bindings.enabled():
        return "the plugin is disabled; call torch_flashplug.enable()"
    if any(tensor.dim() != 4 for tensor in (query, key, value)):
        return "query, key and value must have 4 dims (batch, heads, rows, head dim); stock attention decides"
    if not query.device == key.device == value.device:
        return "query, key and value are on different devices; stock attention rejects the call"
    if has_no_elements(query, key, value):
        return "operands have no elements; stock attention decides (stock's math if the plugin is consulted)"
    if any(tensor.is_nested for tensor in (query, key, value)):
        return "stock chooses the backend of nested tensors; kernels may serve stock's flash calls (docs/support.md)"
    if decides_itself(query, key, value, *([] if attn_mask is None else [attn_mask])):
        return SUBCLASS
    sizes = [hints(tensor.shape) for tensor in (query, key, value)]
    if any(None in size for size in sizes):
        return (
            "sizes depend on data: in a traced graph, the op decides at run time, if kernels support such calls (calls "
            "with a bool attn_mask only if a backend is forced); otherwise stock attention serves this call"
        )
    obstacle = shape_obstacle(*sizes, enable_gqa)
    if obstacle is not None:
        return f"{obstacle}; stock attention decides"
    obstacle = None if attn_mask is None else misfit(query, key, attn_mask)
    if obstacle is not None:
        return f"{obstacle}; stock attention decides"
    if not kernels_allowed():
        return (
            "torch.nn.attention.sdpa_kernel allows neither FLASH_ATTENTION nor OVERRIDEABLE, "
            "the two backends that stand for this plugin"
        )
    if bindings.backend_of(mode) == "math":
        return "math is forced, but torch.nn.attention.sdpa_kernel does not allow math; stock attention decides"
    return None


def shape_obstacle(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], enable_gqa: bool
) -> str | None:  # fmt: skip
    """Return why kernels do not support the sizes of a 4-dim call; None if kernels support the sizes.

    The rules are in src/core/call_facts.cpp.
    """
    obstacle = bindings.shape_obstacle((query, key, value), enable_gqa)
    if obstacle == "batch":
        return f"the kernels need equal batch sizes, but got {query[0]}, {key[0]} and {value[0]}"
    if obstacle == "head dim":
        return f"the kernels need equal head dims of query and key, but got {query[3]} and {key[3]}"
    if obstacle == "value heads":
        return f"the kernels need as many heads of value as of key, but got {value[1]} and {key[1]}"
    if obstacle == "value rows":
        return f"the kernels need as many rows of value as of key, but got {value[2]} and {key[2]}"
    if obstacle == "groups":
        return f"the key heads must divide the query heads, but got {key[1]} and {query[1]}"
    if obstacle == "heads":
        return f"query and key must have as many heads without enable_gqa=True, but got {query[1]} and {key[1]}"
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
    """Return the error that stock raises for a call, found by running stock's math on meta tensors.

    The text is empty if stock raises nothing, or if the operands that stock would receive are not known.

    Args:
        query: queries of F.sdpa.
        key: keys of F.sdpa.
        value: values of F.sdpa.
        attn_mask: the mask of F.sdpa, or None.
        dropout_p: the probability of dropout.
        is_causal: whether the call is causal.
        enable_gqa: whether the call permits grouped heads.
        by_math: whether math receives the call. Only math rejects some probabilities, and is_causal with a mask.
    """
    tensors = [tensor for tensor in (query, key, value, attn_mask) if tensor is not None]
    if any(tensor.is_nested for tensor in tensors) or decides_itself(*tensors):
        return ""
    sizes = [hints(tensor.shape) for tensor in tensors]
    if any(None in size for size in sizes) or len({tensor.device for tensor in tensors}) > 1:
        return ""
    on_meta = [torch.empty(size, dtype=tensor.dtype, device="meta") for size, tensor in zip(sizes, tensors)]
    settings = {"dropout_p": dropout_p, "is_causal": is_causal} if by_math else {}
    try:
        F.scaled_dot_product_attention(*on_meta, **settings, enable_gqa=enable_gqa)
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
    """Return the facts of a call, as named in bindings.problem_facts().

    outside_dispatcher() must have returned None for the call. `on_cuda` is taken from the query.
    """
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
        "without_cudnn": not torch.backends.cuda.cudnn_sdp_enabled(),
    }
    for letter, tensor in zip("qkv", operands):
        problem[f"dtype_{letter}"] = _DTYPE_IDS.get(tensor.dtype, _OTHER_DTYPE)
    facts = bindings.with_operands(
        problem,
        [hints(tensor.shape) for tensor in operands],
        [hints(tensor.stride()) for tensor in operands],
        [_address(tensor) for tensor in operands],
        [tensor.element_size() for tensor in operands],
    )
    # Equal offsets of traced tensors are no evidence of a single storage.
    return facts if _is_real(key) and _is_real(value) else facts | {"shared_values": 0.0}


def shares_values(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether the values are the first columns of the keys, in the same memory."""
    return bool(describe(query, key, value, None, 0.0, is_causal=False, scale=None)["shared_values"])


def _is_wide(mask: Tensor, query: Tensor) -> bool:
    """Return whether a mask is an fp32 bias for operands of a different dtype.

    is_wide_bias of src/core/call_facts.h has the same rule.
    """
    return mask.dtype == torch.float32 and query.dtype != torch.float32


def bias_in_words(query: Tensor, key: Tensor, mask: Tensor, kernel: str) -> str:
    """Return the text of `explain` on how a kernel reads a supported float mask.

    The rules are in src/operands/bias.cpp.

    Args:
        query: queries of the call.
        key: keys of the call.
        mask: the float mask.
        kernel: name of the kernel.
    """
    score_sizes = (*hints(query.shape[:3]), *hints(key.shape[2:3]))
    mask_args = hints(mask.shape), hints(mask.stride()), _address(mask), mask.element_size()
    how, copy_sizes = bindings.bias_read(kernel, *mask_args, score_sizes)  # "in place", "repeated" or "copied"
    dtype_and_shape = f"{str(mask.dtype).removeprefix('torch.')} {list(mask.shape)}, "
    if how == "in place":
        return f"{dtype_and_shape}read in place, without a copy"
    unit = 16 // mask.element_size()
    num_bytes = math.prod(copy_sizes[:3]) * -(-copy_sizes[3] // unit) * 16
    if how == "repeated":
        why = f"the same for all queries, repeated to {copy_sizes[2]} rows"
    elif _address(mask) % 16:
        why = f"strides {list(mask.stride())}, address not a multiple of 16 bytes"
    else:
        why = f"strides {list(mask.stride())}"
    return f"{dtype_and_shape}{why}: first copied to rows of a multiple of 16 bytes, {num_bytes / 1e6:.1f} MB"


def is_asked(mode: int) -> bool:
    """Return whether the dispatcher decides about calls of this mode.

    The dispatcher then also corrects the choice among stock's backends for calls served by stock.
    """
    return bindings.enabled() and kernels_allowed() and bindings.backend_of(mode) not in {"math", "stock"}


def corrected_choice(
    choice: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> tuple[int, str]:
    """Return the dispatcher's correction of stock's choice for a call (src/hooks/stock_bugs.cpp).

    The op is called below all tracing, because only facts of the call are read.

    Args:
        choice: stock's choice, a number of SDPBackend.
        query: queries of F.sdpa.
        key: keys of F.sdpa.
        value: values of F.sdpa.
        attn_mask: the mask of F.sdpa, or None.
        dropout_p: the probability of dropout.
        is_causal: whether the call is causal.
        scale: the factor of the scores, or None.

    Returns:
        The corrected choice, a number of SDPBackend, and the bug of stock's choice in words; empty if there is no bug.
    """
    call_args = (query, key, value, attn_mask, dropout_p, is_causal, scale)
    corrected, fault = _CORRECTED_CHOICE.redispatch(_AT_CUDA, *call_args, choice)
    return corrected, bindings.fault_said(fault)


def hints(sizes: tuple) -> tuple[int | None, ...]:
    return tuple(size.node.hint if isinstance(size, torch.SymInt) else size for size in sizes)


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor in bytes, as far as alignment matters.

    For a traced tensor, the storage is assumed to be aligned, so that the offset alone counts. The storage of a tensor
    wrapped by torch.func is hidden; the address is then 0.
    """
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return 0
    (offset,) = hints((tensor.storage_offset(),))
    return tensor.data_ptr() if _is_real(tensor) else offset * tensor.element_size()


def _is_real(tensor: Tensor) -> bool:
    """Return whether a tensor has an address."""
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return type(tensor) in {Tensor, torch.nn.Parameter} and not tensor.is_meta and not is_wrapped
