"""The list of features: everything beyond softmax(Q K^T) V that a call may need and a kernel may support.

A new feature is an entry here and the code of the kernels. If the arguments of a call show the feature, the feature has
a reader in src/core/call_facts.h, too. The presence of a feature selects a kernel. Values, such as a probability or a
softcap, are kernel arguments. The module imports only the standard library.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

from .quant_recipes import RECIPES, Recipe


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature of calls and kernels. The bit of a feature is the position in FEATURES."""

    name: str
    tag: str  # the feature in names of kernels
    description: str  # description for a call with the feature; empty: the description of a call leaves the feature out
    unsupported_reason: str  # reason of a kernel without the feature, and the remedy; {fact}: a fact of the call
    arguments: tuple[str, ...] = ()  # optional kernel arguments (kernel_args.py) of kernels with the feature
    class_path: str = ""  # module and class under kernels/features with the code of the feature (base.py)
    decode_class_path: str = ""  # the class for decode kernels, if different
    detbwd_class_path: str = ""  # the class for deterministic backward kernels, if different
    launch_class_path: str = ""  # class of the same module, ahead of the kernel's own class: changes the launch
    is_unconditional: bool = False  # no value means "none", so kernels with the feature run no call without the feature
    score_bytes: int = 0  # shared memory that the kernels need for every score of a block
    key_bytes: int = 0  # shared memory that the kernels need for every key of a block, in addition to K and V
    recipe: str = ""  # name of a recipe (quant_recipes.py): the formats in which the kernels multiply
    uses_block_lists: bool = False  # the kernels iterate over block-sparse lists; a tile is a part of a listed block
    reads_pages: bool = False  # True for a paged KV cache; the producer of a forward looks up pages
    has_short_tiles: bool = False  # calls can have many small tiles, whose time is mostly prologue and epilogue

    def class_path_of(self, kind: str) -> str:
        """Return the module and class with the code of the feature for a kind of kernels (kernel_spec.KINDS)."""
        return {"decode": self.decode_class_path, "detbwd": self.detbwd_class_path}.get(kind) or self.class_path


# Features with a reader come first, in the order of kFeatureReaders (src/core/call_facts.h). C++ checks the order.
FEATURES = (
    Feature(
        "causal", "causal", "causal",
        "is_causal is given, but the kernels of this backend have no causal mask. Use the math backend.",
        class_path="causal.CausalFeature", is_unconditional=True,
    ),
    Feature(
        "mask", "mask", "with a mask",
        "attn_mask is given, but the kernels of this backend take no mask. Pass is_causal=True if the mask is causal.",
        arguments=("mask", "mask_metadata"), class_path="mask.MaskFeature",
        decode_class_path="decode_mask.DecodeMaskFeature",
        detbwd_class_path="mask.DeterministicMaskFeature", is_unconditional=True, uses_block_lists=True,
    ),
    Feature(
        "bias", "bias", "with a bias",
        "attn_mask has a floating-point dtype, but the kernels of this backend take no float mask. Pass a bool mask if "
        "attn_mask holds only 0 and -inf.",
        arguments=("bias", "dbias"), class_path="bias.BiasFeature", decode_class_path="decode_bias.DecodeBiasFeature",
        is_unconditional=True, score_bytes=2,
    ),
    Feature(
        "bias32", "bias32", "with an fp32 bias",
        "attn_mask has dtype float32, but the kernels of this backend take no float32 mask. Pass a bool mask if "
        "attn_mask holds only 0 and -inf.",
        arguments=("bias32", "dbias32"), class_path="bias.BiasFeature",
        decode_class_path="decode_bias.DecodeBiasFeature", is_unconditional=True, score_bytes=4,
    ),
    Feature(
        "window", "window", "with a window",
        "The call has a sliding window or a bottom-right causal mask, but the kernels of this backend support neither. "
        "Use the math backend.",
        arguments=("left", "right", "bottom_right", "sinks", "dlse"), class_path="window.WindowFeature",
        decode_class_path="decode_window.DecodeWindowFeature", is_unconditional=True,
    ),
    Feature(
        "softcap", "softcap", "with a softcap",
        "softcap={softcap} is given, but the kernels of this backend have no softcap. Use the math backend.",
        arguments=("softcap",), class_path="softcap.SoftcapFeature", is_unconditional=True,
    ),
    Feature(
        "ragged", "ragged", "with packed sequences",
        "The call has packed sequences (cu_seqlens), but the kernels of this backend take a single length for all "
        "sequences. Pad the batch, or use the math backend.",
        arguments=("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "tile_lists"), class_path="varlen.VarlenFeature",
        launch_class_path="varlen.TileListsThenKernel", is_unconditional=True, has_short_tiles=True,
    ),
    Feature(
        "dropout", "dropout", "with dropout",
        "dropout_p={dropout_p} is given, but the kernels of this backend have no dropout. Pass dropout_p=0.",
        arguments=("seed", "dropout_p"), class_path="dropout.DropoutFeature",
    ),
    Feature(
        "cache8", "cache8", "with 8-bit key and value",
        "key and value have 8 bits and scales, but the kernels of this backend support neither. Dequantize key and "
        "value first.",
        arguments=("k_scale", "v_scale", "k_is_rotated"),
        decode_class_path="quantized_kv_cache.QuantizedKvCacheFeature", is_unconditional=True, key_bytes=8,
    ),
    Feature(
        "paged", "paged", "with a paged KV cache",
        "key and value are in a paged KV cache, or in caches with KV lengths, but the kernels of this backend read "
        "contiguous rows. Gather the rows first.",
        arguments=("block_table", "seqused_k", "split_size"), class_path="paged_prefill.PagedPrefillFeature",
        decode_class_path="paged_kv.PagedKvFeature", is_unconditional=True, reads_pages=True,
    ),
    Feature(
        "equal", "equal", "with packed sequences of equal lengths",
        "The call has packed sequences that may have equal lengths, but the kernels of this backend support no such "
        "calls.",
        arguments=("cu_seqlens_q", "cu_seqlens_k"), class_path="equal_lengths.EqualLengthsFeature",
        is_unconditional=True,
    ),
    Feature(
        "shared", "shared", "with shared values",
        "value is the first columns of key, but the kernels of this backend load value separately.",
        decode_class_path="shared_values.SharedValuesFeature", is_unconditional=True,
    ),
    Feature(
        "balanced", "balanced", "with balanced splits",
        "The call has a paged KV cache of uneven lengths, but the kernels of this backend give all sequences the same "
        "number of splits.",
        arguments=("even_splits",), decode_class_path="balanced_splits.BalancedSplitsFeature", is_unconditional=True,
    ),
    # Features without a reader: a mode requests a recipe.
    *(
        Feature(
            name, name, f"with precision {name}",
            f"precision={name!r} is requested, but the kernels of this backend multiply in 16 bits.",
            arguments=("quant_workspace", "quantized_kv", "k_samples", "quantizes_kv"),
            class_path=f"quantized_qkv.{class_name}", launch_class_path="quantized_qkv.QuantizeThenKernel",
            is_unconditional=True, recipe=name,
        )
        for name, class_name in (("qk8", "Int8ScoresFeature"), ("8bit", "Int8Feature"), ("e4m3", "E4m3Feature"))
    ),
)  # fmt: skip
NAMES = tuple(feature.name for feature in FEATURES)
NO_FEATURES = "full"  # the tag of kernels without features

Features = frozenset[str]


@dataclass(frozen=True, slots=True)
class Combination:
    """A set of features that a kernel may have, with the kinds of kernels that have the set, by architecture."""

    features: Features
    kinds: dict[int, tuple[str, ...]]  # kinds of kernel_spec.KINDS, by architecture

    def supports(self, kind: str, arch: int) -> bool:
        return kind in self.kinds.get(arch, ())


_GRADIENTS = {90: ("bwd", "detbwd", "partbwd"), 80: ("bwd", "detbwd")}
_LONG = {arch: ("fwd", *kinds) for arch, kinds in _GRADIENTS.items()}
_BIASED = ("fwd", "bwd", "partbwd", "tilebwd", "dbias")
# No kernel has a set of features outside this list. The dispatcher reports such a call with a reason.
COMBINATIONS = (
    Combination(frozenset(), {arch: (*kinds, "decode") for arch, kinds in _LONG.items()}),
    Combination(frozenset({"causal"}), _LONG),
    Combination(frozenset({"mask"}), {arch: (*kinds, "decode") for arch, kinds in _LONG.items()}),
    Combination(frozenset({"bias"}), {90: (*_BIASED, "decode"), 80: ("fwd", "bwd", "decode")}),
    Combination(frozenset({"bias32"}), {90: (*_BIASED, "decode"), 80: ("fwd",)}),
    Combination(frozenset({"dropout"}), {90: _LONG[90], 80: ("fwd", "bwd")}),
    Combination(frozenset({"causal", "dropout"}), {90: _LONG[90], 80: ("fwd", "bwd")}),
    Combination(frozenset({"bias", "dropout"}), {90: ("fwd", "bwd", "partbwd", "dbias"), 80: ("fwd", "bwd")}),
    Combination(frozenset({"bias32", "dropout"}), {90: ("fwd", "bwd", "partbwd", "dbias")}),
    Combination(frozenset({"mask", "dropout"}), {90: ("fwd", "bwd", "partbwd"), 80: ("fwd", "bwd")}),
    Combination(frozenset({"window"}), {90: _LONG[90], 80: ("fwd", "bwd")}),
    *(
        Combination(frozenset({"window", *more}), {90: ("fwd", "bwd", "partbwd"), 80: ("fwd",)})
        for more in (("ragged",), ("softcap",), ("softcap", "ragged"))
    ),
    *(Combination(frozenset({"window", *more, "ragged", "paged"}), {90: ("fwd",)}) for more in ((), ("softcap",))),
    *(Combination(frozenset({*more, "equal"}), {90: ("fwd", "bwd", "partbwd")}) for more in ((), ("causal",))),
    *(
        Combination(frozenset({*more, name}), {90: ("fwd",)})
        for name in RECIPES
        for more in ((), ("causal",), ("mask",))
    ),
    *(Combination(frozenset({*more, "cache8"}), {80: ("decode",)}) for more in ((), ("mask",))),
    *(
        Combination(frozenset({"window", *more, "paged"}), {80: ("decode",)})
        for more in ((), ("softcap",), ("cache8",))
    ),
    *(Combination(frozenset({*more, "shared"}), {90: ("decode",)}) for more in ((), ("window", "paged"))),
    *(Combination(frozenset({"window", *more, "paged", "balanced"}), {80: ("decode",)}) for more in ((), ("softcap",))),
)


def select(features: Iterable[str]) -> tuple[Feature, ...]:
    """Return the features with the given names, in the order of FEATURES."""
    names = set(features)
    return tuple(feature for feature in FEATURES if feature.name in names)


def bits(features: Iterable[str]) -> int:
    return sum(1 << NAMES.index(name) for name in set(features))


def unconditional_bits(features: Iterable[str]) -> int:
    """Return the bits of the features that kernels apply to every call."""
    return bits(feature.name for feature in select(features) if feature.is_unconditional)


def bits_of_argument(argument: str) -> int:
    """Return the bits of the features whose kernels take an optional argument."""
    return bits(feature.name for feature in FEATURES if argument in feature.arguments)


def score_bytes(features: Iterable[str]) -> int:
    """Return the bytes of shared memory for every score of a block."""
    return sum(feature.score_bytes for feature in select(features))


def key_bytes(features: Iterable[str]) -> int:
    """Return the bytes of shared memory for every key of a block, in addition to K and V."""
    return sum(feature.key_bytes for feature in select(features))


@functools.cache  # read about twenty times for each kernel whenever the tables are pushed
def recipe_of(features: frozenset[str]) -> Recipe | None:
    return next((RECIPES[feature.recipe] for feature in select(features) if feature.recipe), None)


def uses_block_lists(features: Iterable[str]) -> bool:
    return any(feature.uses_block_lists for feature in select(features))


def reads_pages(features: Iterable[str]) -> bool:
    return any(feature.reads_pages for feature in select(features))


def has_short_tiles(features: Iterable[str]) -> bool:
    return any(feature.has_short_tiles for feature in select(features))


def tag_of(features: Iterable[str]) -> str:
    """Return the part of a kernel's name that names the features."""
    return "+".join(feature.tag for feature in select(features)) or NO_FEATURES


TAGS = {tag_of(combination.features): combination for combination in COMBINATIONS}  # the combination of each tag
