"""Sets of kernels that a model needs, as selected by the dispatcher for the attention calls of the model.

The dispatcher selects the kernel of a call within 50 us and without a GPU. So a grid of lengths and batches takes
milliseconds.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..registry import kernel_table
from ..registry.dtypes import ELEMENTS_16BIT
from ..registry.kernel_spec import KernelSpec
from . import bindings
from .table_structs import DTYPE_IDS

Call = Mapping[str, float]  # facts of a call, as bindings.plan() takes them

LENGTHS = (16, 17, 64, 100, 128, 200, 256, 300, 384, 512, 700, 1024, 1500, 2048, 3000, 4096, 6000, 8192, 16384, 32768,
           65536, 131072)  # fmt: skip
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
MAX_TOKENS = 1 << 21  # tokens of a batch; no GPU has the memory for larger batches
# Guesses for a model of which only one kernel is known. The guessed calls are planned while a call waits. So there are
# few of them.
GUESSED_HEADS = ((32, 8), (16, 16))
GUESSED_BATCHES = (1, 4, 32)
SHORT_QUERY_ROWS = (1, 2, 4, 8, 16, 32, 64, 100, 128)  # query rows of decode calls, and of short prompts after a cache
DROPOUT_P = 0.1
SDPA_FEATURES = frozenset({"causal", "mask", "bias", "bias32", "dropout"})  # features of F.sdpa calls


@dataclass(frozen=True)
class AttentionLayer:
    """Kind of attention layer, described by the properties on which kernels depend.

    Attributes:
        heads: pairs (query heads, KV heads); several pairs if the calls of the layer differ.
        dims: head dim of query and key, and head dim of value.
        dtype: "bf16" or "fp16".
        features: for each kind of call, the features of the call, such as {"causal"} or {"mask"}.
        has_decode_calls: whether decode calls with one or a few query rows follow, both without and with a mask.
        has_cross_attention: whether decoders also attend to an encoder.
        needs_gradients: whether the calls need gradients.
        needs_bias_gradient: whether the calls also need gradients of a bias.
        is_deterministic: whether gradients are deterministic.
        max_length: the length of the longest sequence.
        batches: numbers of sequences in a batch.
    """

    heads: Sequence[tuple[int, int]]
    dims: tuple[int, int]
    dtype: str = "bf16"
    features: Sequence[frozenset[str]] = field(default=(frozenset({"causal"}), frozenset({"mask"})))
    has_decode_calls: bool = True
    has_cross_attention: bool = False
    needs_gradients: bool = False
    needs_bias_gradient: bool = False
    is_deterministic: bool = False
    max_length: int = LENGTHS[-1]
    batches: Sequence[int] = BATCHES

    def calls(self) -> Iterator[Call]:
        """Yield the calls, the most usual calls first."""
        lengths = [length for length in LENGTHS if length <= self.max_length] or [self.max_length]
        prefills = [(rows, rows, features) for features in self.features for rows in lengths]
        short_calls = itertools.product(
            SHORT_QUERY_ROWS if self.has_decode_calls else (), lengths, (frozenset(), frozenset({"mask"}))
        )
        # Several query rows after a cache have different visible keys, which requires a mask. Rows that attend to an
        # encoder need no mask.
        decodes = [x for x in short_calls if x[0] <= x[1] and (x[0] == 1 or x[2] or self.has_cross_attention)]
        operand = DTYPE_IDS[self.dtype]
        names = ("B", "Hq", "Hkv", "Sq", "Sk", "D", "Dv")
        for (rows, keys, features), (q_heads, kv_heads), batch in itertools.product(
            prefills + decodes, self.heads, self.batches
        ):
            if batch * keys <= MAX_TOKENS:
                call = dict(zip(names, (batch, q_heads, kv_heads, rows, keys, *self.dims), strict=True))
                call |= dict.fromkeys(("dtype_q", "dtype_k", "dtype_v"), operand) | dict.fromkeys(features, 1)
                call |= {"dropout_p": DROPOUT_P} if "dropout" in features else {}
                if self.needs_gradients and rows == keys:
                    call |= {"grad": 1, "deterministic": self.is_deterministic}
                    call |= (
                        {"bias_grad": 1}
                        if self.needs_bias_gradient and not features.isdisjoint({"bias", "bias32"})
                        else {}
                    )
                yield call


_KERNEL = re.compile(r"\b[a-z]+_sm\d+_\w[\w+]*")


def kernels_of(calls: Iterable[Call], facts: Mapping[str, int], mode: int = 0) -> list[str]:
    """Return the names of the kernels that serve these calls on a GPU, forward and backward, in order of first use.

    Args:
        calls: the facts of each call.
        facts: the facts of the GPU, from bindings.device_facts() or api.backend.DEVICES.
        mode: a mode word of `sdpa_backend`; 0 is auto.
    """
    names: dict[str, None] = {}
    for call in calls:
        plan = bindings.plan(call, facts, mode)
        names |= dict.fromkeys(_KERNEL.findall(f"{plan['kernel']} {plan['gradients']}"))
    return list(names)


def kernels_needed_next(spec: KernelSpec, facts: Mapping[str, int], training: bool, deterministic: bool) -> list[str]:
    """Return the kernels that a model is expected to need soon after a given kernel.

    Args:
        spec: the kernel needed now.
        facts: the facts of the GPU.
        training: whether the calls may need gradients.
        deterministic: whether the gradients must be deterministic.
    """
    if not spec.features <= SDPA_FEATURES or spec.dtype not in ELEMENTS_16BIT:
        return _kernels_with_same_dims(spec, training)
    is_plain = spec.features <= {"causal", "mask"}
    is_decoder = is_plain and (spec.is_decode or bool(spec.features))
    model = AttentionLayer(
        GUESSED_HEADS,
        (spec.d, spec.dv),
        spec.dtype,
        (frozenset({"causal"}), frozenset({"mask"})) if is_decoder else (spec.features,),
        has_decode_calls=is_decoder and not training,
        needs_gradients=training,
        needs_bias_gradient=spec.kind == "dbias",
        is_deterministic=deterministic,
        batches=GUESSED_BATCHES,
    )
    return kernels_of(model.calls(), facts)


def _kernels_with_same_dims(spec: KernelSpec, training: bool) -> list[str]:
    """Return the kernels of attention() with the same head dims, dtype and features."""
    specs = (candidate for row in kernel_table.KERNEL_ROWS if row.arch == spec.arch for candidate in row.specs())
    return [
        candidate.name()
        for candidate in specs
        if (candidate.d, candidate.dv, candidate.dtype, candidate.features)
        == (spec.d, spec.dv, spec.dtype, spec.features)
        and (training or not candidate.is_backward)
    ]


def kernel_names_in(text: str) -> list[str]:
    """Return the kernel names in a text, such as a log of plans, in order of first appearance."""
    names = []
    for name in dict.fromkeys(_KERNEL.findall(text)):
        try:
            KernelSpec.from_name(name)
        except (ValueError, KeyError):
            continue
        names.append(name)
    return names
