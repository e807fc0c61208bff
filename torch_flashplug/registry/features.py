"""THE list of features: what calls of attention may need beyond softmax(Q K^T) V, and kernels take. A new one is a line
here, its row in src/core/call_facts.h, which reads calls, and what its kernels do.

Presence is a matter of which kernel runs; values (a probability, a cap) are arguments. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .quant_recipes import RECIPES, Recipe


@dataclass(frozen=True, slots=True)
class Feature:
    """One of them. Its bit is its place in FEATURES."""

    name: str
    tag: str  # in names of kernels
    said: str  # of a call that needs it, in words; empty: left out
    words: str  # why a kernel without it cannot run such a call, and what to do; {fact}: that fact of the call
    arguments: tuple[str, ...] = ()  # optional ones (kernel_args.py), which its kernels take
    part: str = ""  # module and class under kernels/features: what its kernels do (base.py)
    decode: str = ""  # the same of decode kernels, where these do it in another way
    detbwd: str = ""  # and of backwards in order
    ahead: str = ""  # class of that module that stands ahead of its kernels' own: how they are launched
    always: bool = False  # no value of it means "none": kernels that have it run no call without it
    score_bytes: int = 0  # of shared memory that its kernels need for every score of a block
    key_bytes: int = 0  # and for every key of one, beside K and V
    recipe: str = ""  # of quant_recipes.py: what its kernels multiply operands in
    lists: bool = False  # its kernels walk over lists of blocks, whose parts tiles are
    short: bool = False  # its calls may have many tiles of few rows and keys, all start and end

    def part_of(self, kind: str) -> str:
        """Of a kind of kernels (spec.KINDS)."""
        return {"decode": self.decode, "detbwd": self.detbwd}.get(kind) or self.part


FEATURES = (
    Feature(
        "causal", "causal", "causal",
        "is_causal is given, and there are kernels without a mask alone; use the math backend",
        part="causal.Causal", always=True,
    ),
    Feature(
        "mask", "mask", "masked",
        "attn_mask is given, these kernels take none; pass is_causal=True if that is what it says",
        arguments=("mask", "digest"), part="mask.Mask", decode="decode_mask.MaskOfFew", detbwd="mask.OrderedMask",
        always=True, lists=True,
    ),
    Feature(
        "bias", "bias", "with a bias",
        "attn_mask is of floats, these kernels take none; pass a bool mask if it holds 0 and -inf alone",
        arguments=("bias", "dbias"), part="bias.Bias", decode="decode_bias.BiasOfFew", always=True,
        score_bytes=2,
    ),
    Feature(
        "bias32", "bias32", "with a bias of fp32",
        "attn_mask is of fp32, these kernels take none; pass a bool mask if it holds 0 and -inf alone",
        arguments=("bias32", "dbias32"), part="bias.Bias", decode="decode_bias.BiasOfFew", always=True,
        score_bytes=4,
    ),
    Feature(
        "window", "window", "in a window",
        "the mask is a window or causal to the bottom right, these kernels take none; use the math backend",
        arguments=("left", "right", "bottom_right", "sinks", "dlse"), part="window.Windowed",
        decode="decode_window.WindowOfFew", always=True,
    ),
    Feature(
        "softcap", "softcap", "with a softcap", "softcap={softcap}, these kernels have none; use the math backend",
        arguments=("softcap",), part="softcap.Softcapped", always=True,
    ),
    Feature(
        "ragged", "ragged", "of sequences on end",
        "cu_seqlens are given, these kernels take one length for all sequences; pad them, or use the math backend",
        arguments=("cu_q", "cu_k", "used_k", "lists"), part="varlen.Lengths",
        ahead="varlen.AfterLists", always=True, short=True,
    ),
    Feature(
        "dropout", "dropout", "with dropout", "dropout_p={dropout_p}, these kernels have no dropout; pass dropout_p=0",
        arguments=("seed", "dropout_p"), part="dropout.Dropped",
    ),
    *(
        Feature(
            name, name, f"in {name}", f"precision={name!r} is asked for, these kernels multiply in 16 bits",
            arguments=("scratch8",), part=f"quantized_qkv.{part}", always=True, recipe=name,
        )
        for name, part in (("qk8", "Int8Scores"), ("8bit", "EightBit"), ("e4m3", "E4m3"))
    ),
    Feature(
        "cache8", "cache8", "with K and V in 8 bits",
        "key and value have 8 bits and scales, these kernels take neither; dequantise them first",
        arguments=("k_scale", "v_scale", "rotated"), decode="quantized_kv_cache.CacheInEightBits",
        always=True, key_bytes=8,
    ),
    Feature(
        "paged", "paged", "in pages",
        "key and value lie in pages, or in caches with lengths; these kernels read rows on end; gather them first",
        arguments=("pages", "used_k", "split_size"), decode="paged_kv.Paged", always=True,
    ),
)  # fmt: skip
NAMES = tuple(feature.name for feature in FEATURES)
NONE = "full"  # the tag of kernels without any

Features = frozenset[str]


@dataclass(frozen=True, slots=True)
class Combination:
    """A set of features that a kernel may have, and which kinds of kernels have it on which architecture."""

    features: Features
    kinds: dict[int, tuple[str, ...]]  # of spec.KINDS, by architecture

    def of(self, kind: str, arch: int) -> bool:
        return kind in self.kinds.get(arch, ())


_GRADIENTS = {90: ("bwd", "detbwd", "partbwd"), 80: ("bwd", "detbwd")}
_LONG = {arch: ("fwd", *kinds) for arch, kinds in _GRADIENTS.items()}
_BIASED = ("fwd", "bwd", "partbwd", "tilebwd", "dbias")
# Anything else is a reason why not, never a kernel.
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
        Combination(frozenset({"window", *beside}), {90: ("fwd", "bwd", "partbwd"), 80: ("fwd",)})
        for beside in (("ragged",), ("softcap",), ("softcap", "ragged"))
    ),
    *(
        Combination(frozenset({*beside, name}), {90: ("fwd",)})
        for name in RECIPES for beside in ((), ("causal",), ("mask",))
    ),
    *(Combination(frozenset({*beside, "cache8"}), {80: ("decode",)}) for beside in ((), ("mask",))),
    *(
        Combination(frozenset({"window", *beside, "paged"}), {80: ("decode",)})
        for beside in ((), ("softcap",), ("cache8",))
    ),
)


def of(features: Iterable[str]) -> tuple[Feature, ...]:
    """Those of these names, in their order."""
    wanted = set(features)
    return tuple(feature for feature in FEATURES if feature.name in wanted)


def bits(features: Iterable[str]) -> int:
    return sum(1 << NAMES.index(name) for name in set(features))


def always(features: Iterable[str]) -> int:
    """Bits of those without which their kernels run no call."""
    return bits(feature.name for feature in of(features) if feature.always)


def bringing(argument: str) -> int:
    """Bits of those whose kernels take this optional argument."""
    return bits(feature.name for feature in FEATURES if argument in feature.arguments)


def score_bytes(features: Iterable[str]) -> int:
    """Of shared memory for every score of a block."""
    return sum(feature.score_bytes for feature in of(features))


def key_bytes(features: Iterable[str]) -> int:
    """Likewise for every key."""
    return sum(feature.key_bytes for feature in of(features))


def recipe_of(features: Iterable[str]) -> Recipe | None:
    return next((RECIPES[feature.recipe] for feature in of(features) if feature.recipe), None)


def walks_lists(features: Iterable[str]) -> bool:
    return any(feature.lists for feature in of(features))


def has_short_tiles(features: Iterable[str]) -> bool:
    return any(feature.short for feature in of(features))


def tag_of(features: Iterable[str]) -> str:
    """The part of a kernel's name that says its features."""
    return "+".join(feature.tag for feature in of(features)) or NONE


TAGS = {tag_of(combination.features): combination for combination in COMBINATIONS}  # what a tag stands for
