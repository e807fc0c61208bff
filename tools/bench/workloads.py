"""Calls of the benchmarks as data: the grid of peers, the lattice for the ChoiceRows, and everyday calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from torch_flashplug.testing import Case, make_inputs

MASKS = ("full", "causal")
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
TOKENS = 16384  # batch x length of the grid
WIDTH = 2048  # heads x head dim of the grid
CPU_LENGTH = 128  # longest sequence of the small form of a case


def _case(
    name: str, heads: tuple[int, int, int], seq: tuple[int, int], dims: tuple[int, int], causal: bool = False, **more
):
    return Case(name, *heads, *seq, *dims, causal=causal, **more)


def grid(prefix: str, dims: tuple[int, ...] = (64, 128, 256)) -> list[Case]:
    """Return the grid of the project's baselines, with a constant number of tokens for all lengths, in BSHD layout."""
    return [
        _case(f"{prefix}_d{d}_{mask}_s{s}", (TOKENS // s, WIDTH // d, WIDTH // d), (s, s), (d, d), mask == "causal")
        for d in dims
        for mask in MASKS
        for s in LENGTHS
    ]


def size_for(case: Case, device: str) -> Case:
    """Return the case for a GPU, or on a CPU a small form of the case with a name of its own.

    The small form shows that a suite runs. Its times mean nothing.
    """
    if device != "cpu":
        return case
    lengths = {"Sq": min(case.Sq, CPU_LENGTH), "Sk": min(case.Sk, CPU_LENGTH)}
    return replace(case, name=f"{case.name}_small", B=1, **lengths)


def groups() -> list[Case]:
    """Return training cases of grouped heads, at the sizes of large language models."""
    heads, seqs = ((32, 8), (64, 8), (28, 4), (48, 8)), ((8, 2048), (4, 4096), (2, 8192), (1, 8192))
    return [
        _case(f"train_d{d}_{mask}_b{b}s{s}_h{hq}x{hkv}", (b, hq, hkv), (s, s), (d, d), mask == "causal")
        for d in (128, 64, 96, 256) for mask in MASKS[::-1] for hq, hkv in heads for b, s in seqs
    ]  # fmt: skip


def large_head_dims(prefix: str) -> list[Case]:
    """Return cases of head dims above 256: 32 heads, also on 4 KV heads, and a single head as in image decoders."""
    heads = [(1, 32, 32), (1, 32, 4)]
    shapes = [(d, of_batch, s) for d in (512, 384, 320) for of_batch in heads for s in (4096, 8192)]
    shapes += [(512, (4, 32, 32), 2048), (512, (1, 1, 1), 16384), (448, (1, 32, 32), 8192)]
    return [
        _case(f"{prefix}_d{d}_{mask}_b{b}s{s}_h{hq}x{hkv}", (b, hq, hkv), (s, s), (d, d), mask == "causal")
        for d, (b, hq, hkv), s in shapes for mask in MASKS
    ]  # fmt: skip


def large_head_dims_decode() -> list[Case]:
    """Return decode cases of D 512 with at least 256 MB of keys and values."""
    calls = (((32, 8, 1), 4096), ((128, 8, 1), 1024), ((8, 32, 4), 4096), ((1, 16, 16), 8192), ((4, 16, 1), 32768))
    return [
        _case(f"decode_d512_b{b}h{hq}x{hkv}_k{keys}", (b, hq, hkv), (1, keys), (512, 512))
        for (b, hq, hkv), keys in calls
    ]


def ungrouped(case: Case) -> Case:
    """Return the case with as many KV heads as query heads: the same FLOP, and more bytes of K and V."""
    return replace(case, name=f"{case.name}_ungrouped", Hkv=case.Hq)


def masked() -> list[Case]:
    """Return the sizes of the grid for calls with masks."""
    return [case for case in grid("masked") if not case.causal]


def dropout_cases() -> list[Case]:
    """Return the grid cases with lengths typical for training, and short cases."""
    short = [_named_by_shape(heads, (s, s), (64, 64)) for heads, s in (((16, 12, 12), 128), ((16, 12, 12), 256))]
    short += [_named_by_shape((2, 8, 8), (s, s), (128, 128)) for s in (128, 512)]
    shapes = (((16, 12, 12), (64, 64)), ((2, 12, 12), (64, 64)), ((2, 8, 8), (128, 128)))
    short += [_named_by_shape(heads, (s, s), dims, causal=True) for heads, dims in shapes for s in (128, 256, 384)]
    return [*(case for case in grid("dropout", (64, 128)) if 512 <= case.Sq <= 8192), *short]


def _named_by_shape(
    heads: tuple[int, int, int], seq: tuple[int, int], dims: tuple[int, int], causal: bool = False
) -> Case:
    (B, Hq, Hkv), (Sq, Sk), (D, Dv) = heads, seq, dims
    return _case(f"{'causal_' * causal}d{D}v{Dv}_b{B}h{Hq}x{Hkv}_q{Sq}k{Sk}", heads, seq, dims, causal)


def masked_outside_grid() -> list[Case]:
    """Return further cases for calls with masks, outside the grid.

    The cases have few tiles, few query rows, unusual lengths and head counts, and head dims that kernels pad.
    """
    calls = (
        *(((1, 8, 8), (s, s)) for s in (128, 512, 1024, 4096)),
        ((64, 12, 12), (128, 128)),
        ((16, 12, 12), (77, 77)),
        ((2, 16, 16), (2048, 256)),
        ((4, 16, 16), (64, 1024)),
        ((8, 16, 16), (100, 1500)),
        ((1, 32, 8), (256, 4096)),
        ((1, 32, 8), (16, 4096)),
        ((8, 32, 8), (1, 4096)),
        ((1, 32, 8), (1, 32768)),
        ((1, 32, 8), (65, 32768)),
        ((1, 32, 8), (128, 32768)),
        ((1, 8, 8), (512, 32768)),
    )
    dims = ((64, 64), (80, 80), (128, 128), (192, 128), (256, 256))
    return [_named_by_shape(heads, seq, dim) for dim in dims for heads, seq in calls]


def masked_decode() -> list[Case]:
    """Return decode cases with masks.

    The KV caches range from small caches to caches whose splits occupy all SMs. The cases have grouped and ungrouped
    heads, and one or several query rows. The last cases have head dims outside the grid.
    """
    calls = (
        *(((1, 32, 8), (1, keys)) for keys in (256, 4096, 32768)),
        *(((8, 32, 8), (1, keys)) for keys in (256, 1024, 4096, 4099, 32768)),
        *(((32, 16, 16), (1, keys)) for keys in (1024, 4096)),
        *(((1, 32, 8), (rows, 8192)) for rows in (4, 16)),
        *(((4, 16, 16), (rows, 1024)) for rows in (4, 17, 64)),
        ((4, 16, 16), (64, 8192)),
    )
    grid = [(*call, dim) for dim in ((64, 64), (128, 128), (256, 256)) for call in calls]
    beside = [(*call, dim) for dim in ((80, 80), (192, 128)) for call in calls[3:8:2]]
    return [_named_by_shape(*call) for call in grid + beside]


def cached() -> list[Case]:
    """Return decode cases of one query row, with KV caches of 4 MB to 1 GB in 16 bits."""
    calls = (
        *(((1, 32, 8), keys, 128) for keys in (1024, 8192, 32768)),
        *(((8, 32, 8), keys, 128) for keys in (1024, 8192)),
        ((32, 32, 8), 4096, 128),
        ((16, 16, 16), 4096, 128),
        ((8, 64, 1), 8192, 128),
        *(((1, 32, 8), keys, 64) for keys in (8192, 32768)),
        *(((8, 32, 8), keys, 64) for keys in (8192, 16384)),
        ((32, 16, 16), 4096, 64),
        *(((1, 16, 8), keys, 256) for keys in (8192, 32768)),
        ((8, 16, 8), 4096, 256),
        ((32, 8, 8), 4096, 256),
        ((8, 32, 8), 8192, 96),
    )
    return [_named_by_shape(heads, (1, keys), (d, d)) for heads, keys, d in calls]


def paged() -> list[Case]:
    """Return decode cases of one query row, with at least 32 MB of K and V."""
    calls = (
        *(((1, 32, 8), keys, 128) for keys in (8192, 65536)),
        *(((8, 32, 8), keys, 128) for keys in (1024, 8192)),
        *(((b, 32, 8), 2048, 128) for b in (32, 128)),
        ((16, 16, 16), 4096, 128),
        ((8, 64, 8), 8192, 64),
        ((8, 16, 8), 4096, 256),
    )
    return [_named_by_shape(heads, (1, keys), (d, d)) for heads, keys, d in calls]


@dataclass(frozen=True, slots=True)
class UnevenBatch:
    """Decode of one query row per sequence, with a paged KV cache of uneven KV lengths."""

    name: str
    lengths: tuple[int, ...]
    shared: int = 0  # leading keys that all sequences share, in the same pages

    @property
    def case(self) -> Case:
        """The batch with the mean length."""
        mean = sum(self.lengths) // len(self.lengths)
        return _case(self.name, (len(self.lengths), 32, 8), (1, mean), (128, 128), causal=False)


UNEVEN = (
    UnevenBatch("uneven_17_of_300_to_9000", tuple(300 + 8700 * i // 16 for i in range(17))),
    UnevenBatch("uneven_60000_and_31_of_500", (60000, *(500,) * 31)),
    UnevenBatch("uneven_zipf_64", tuple(max(64, 32000 // (i * 37 % 64 + 1)) for i in range(64))),
    UnevenBatch("uneven_24_shared_prefix", tuple(4096 + 64 * i for i in range(24)), shared=4096),
)


def eight_bits() -> list[Case]:
    """Return the grid cases of at least 2k rows, and cases with grouped heads and further head dims."""
    beside = (((4, 16, 4), 4096, (128, 128)), ((2, 21, 21), 8192, (96, 96)), ((2, 8, 8), 8192, (192, 192)),
              ((2, 8, 8), 8192, (192, 128)))  # fmt: skip
    further = [_named_by_shape(heads, (s, s), dims, causal) for heads, s, dims in beside for causal in (False, True)]
    return [*(case for case in grid("grid") if case.Sq >= 2048), *further]


def head_dims() -> list[Case]:
    """Return cases with head dims outside the grid, at a single medium size."""
    return [
        _case(f"fwd_d{d}v{dv}_{mask}", (4, 16, 16), (4096, 4096), (d, dv), mask == "causal")
        for d, dv in ((80, 80), (96, 96), (160, 160), (192, 192), (192, 128))
        for mask in MASKS
    ]


def latency() -> list[Case]:
    """Return cases that take microseconds, and a few longer cases.

    A row of `calls` is ((B, Hq, Hkv), (Sq, Sk), D, causal).
    """
    calls = (
        ((1, 12, 12), (128, 128), 64, False),
        ((1, 12, 12), (512, 512), 64, False),
        ((1, 16, 16), (197, 197), 64, False),
        ((8, 16, 16), (197, 197), 64, False),
        ((1, 32, 8), (512, 512), 128, True),
        ((1, 32, 8), (2048, 2048), 128, True),
        ((1, 32, 8), (8192, 8192), 128, True),
        ((2, 24, 24), (4096, 4096), 128, False),
        ((2, 10, 10), (4096, 77), 64, False),
        ((1, 32, 8), (16, 4096), 128, False),
        ((4, 32, 8), (64, 8192), 128, False),
    )
    name = "b{}h{}kv{}_{}x{}_d{}{}"
    return [
        _case(name.format(*heads, *seq, d, "_causal" if causal else ""), heads, seq, (d, d), causal)
        for heads, seq, d, causal in calls
    ]


# (B, Hq, Hkv), (Sq, Sk), D of the decode table. The last two rows are decode calls of the latency table.
_DECODE = (
    ((1, 32, 8), (1, 1024), 128),
    ((1, 32, 8), (1, 8192), 128),
    ((1, 32, 8), (1, 65536), 128),
    ((8, 32, 8), (1, 8192), 128),
    ((16, 32, 8), (1, 1024), 128),
    ((32, 32, 8), (1, 8192), 128),
    ((1, 32, 32), (1, 8192), 128),
    ((128, 32, 8), (1, 2048), 128),
    ((1, 8, 1), (1, 131072), 128),
    ((4, 16, 2), (1, 32768), 256),
    ((1, 32, 8), (16, 4096), 128),
    ((4, 32, 8), (64, 8192), 128),
)
_SWEEP_KEYS = (128, 512, 2048, 8192, 32768, 131072, 1048576)
_SWEEP_BATCHES = (1, 4, 16, 64, 256)
_MAX_KV_BYTES = 1 << 30


def _decode_sweep() -> list[tuple]:
    """Return decode calls of many lengths and batch sizes, with head groups of 1, 4 and 32.

    Calls with several query rows, a head group of 64, or further head dims have fewer batch sizes.
    """
    spots = ((32, 8), 4, 128), ((32, 8), 16, 128), ((64, 1), 1, 128), ((32, 8), 1, 64), ((32, 8), 1, 256)
    sweep = [(heads, 1, 128, _SWEEP_BATCHES) for heads in ((32, 32), (32, 8), (32, 1))]
    sweep += [(*spot, (1, 16)) for spot in spots]
    return [
        ((b, *heads), (sq, sk), d) for heads, sq, d, batches in sweep for b in batches for sk in _SWEEP_KEYS
        if 4 * b * heads[1] * sk * d <= _MAX_KV_BYTES
    ]  # fmt: skip


def _decode_dims() -> list[tuple]:
    """Return decode calls with head dims that a larger kernel serves, with D != Dv, and with more rows.

    The calls with more rows have head dims with a dedicated kernel.
    """
    dims = (8, 16, 32, 40, 48, 56, 72, 80, 96, 112, 120, 160, 192, 200, 224, 248, (64, 128), (128, 64), (192, 128))
    heads = (1, 32, 8), (16, 32, 8), (8, 16, 16), (16, 16, 1)
    calls = [(h, (1, sk), d) for d in dims for h in heads for sk in (512, 8192)]
    calls += [((2, 32, 8), (4, sk), d) for d in dims for sk in (512, 8192)]
    rows = ((1, 32, 1), 1), ((16, 32, 1), 1), ((64, 32, 1), 1), ((1, 64, 1), 1), ((16, 64, 1), 1), ((2, 32, 8), 16)
    return calls + [(h, (sq, sk), d) for d in (64, 256) for h, sq in rows for sk in (128, 512, 2048, 8192)]


def _decode_wide() -> list[tuple]:
    """Return decode calls with more than 64 rows per KV head (the size of a tile): drafts and chunks of queries."""
    calls = [((b, 32, 8), (sq, sk), 128) for b in (1, 4, 16) for sq in (24, 32, 64) for sk in (512, 2048, 8192, 32768)]
    calls += [((b, 32, 1), (sq, sk), 128) for b in (1, 16) for sq in (4, 8) for sk in (512, 2048, 8192, 32768)]
    calls += [((1, 32, 32), (sq, sk), 128) for sq in (65, 128, 256) for sk in (512, 2048, 8192, 32768)]
    calls += [((b, 32, 8), (sq, sk), d) for d in (64, 256) for b in (1, 8) for sq in (32, 64) for sk in (512, 8192)]
    dims = (40, 80, 96, 112, 192, (192, 128), (64, 128))
    return calls + [((b, 32, 8), (48, sk), d) for d in dims for b in (1, 8) for sk in (512, 8192)]


def decode() -> list[Case]:
    """Return decode cases: few query rows against many keys.

    Names start with "decode_" (the table of the project's baselines), "sweep_", "dims_" or "wide_".
    """
    name = "{}_b{}h{}kv{}_{}x{}_d{}"
    lists = {"decode": _DECODE, "sweep": _decode_sweep(), "dims": _decode_dims(), "wide": _decode_wide()}
    cases = []
    for prefix, (heads, seq, dims) in [(prefix, call) for prefix, calls in lists.items() for call in calls]:
        d, dv = dims if isinstance(dims, tuple) else (dims, dims)
        label = f"{d}v{dv}" if d != dv else d
        cases.append(_case(name.format(prefix, *heads, *seq, label), heads, seq, (d, dv)))
    return cases


def gate() -> list[Case]:
    """Return decode cases for the tuning of the decode gate, which must find the best number of KV splits."""
    heads = (
        (1, 32, 8),
        (1, 32, 1),
        (1, 64, 1),
        (4, 32, 8),
        (8, 32, 8),
        (16, 64, 1),
        (64, 32, 1),
        (1, 32, 32),
        (9, 8, 8),
    )
    calls = [(h, (1, sk), 128) for h in heads for sk in (256, 512, 2048, 8192, 32768)]
    calls += [((b, 32, 8), (sq, sk), 128) for b in (1, 4) for sq in (4, 16) for sk in (512, 4096, 32768)]
    calls += [((b, 32, 8), (1, sk), d) for b in (1, 8) for d in (64, 256) for sk in (512, 4096, 32768)]
    wide = [((b, 32, 8), sq) for b in (1, 4, 16) for sq in (24, 64)] + [((1, 32, 1), 8), ((16, 32, 1), 8)]
    calls += [(h, (sq, sk), 128) for h, sq in wide for sk in (512, 4096, 32768)]
    calls += [((b, 32, 8), (64, sk), d) for b in (1, 8) for d in (64, 256) for sk in (512, 4096)]
    name = "gate_b{}h{}kv{}_{}x{}_d{}"
    return [_case(name.format(*heads, *seq, d), heads, seq, (d, d)) for heads, seq, d in calls]


# Peak rates of an H100 SXM at the nominal 1.83 GHz: 4096 bf16 FLOP and 16 exponentials per clock and SM, with 132 SMs,
# and 3.35 TB/s of memory. The running maxima need one additional exponential in thirty. (Guide to Hopper attention,
# sections 1.1 and 1.4.)
_CLOCK, _SMS = 1.83e9, 132
_FLOP, _EXP, _BYTES = 4096 * _CLOCK * _SMS, 16 / 1.03 * _CLOCK * _SMS, 3.35e12


def bound_ms(case: Case) -> float:
    """Return a lower bound for the time of a forward kernel in ms.

    The bound is the slowest of tensor cores, exponentials and memory.
    """
    scores = case.B * case.Hq * case.Sq * case.Sk * (0.5 if case.causal else 1.0)
    rows = case.B * (case.Hq * case.Sq + case.Hkv * case.Sk)
    return 1e3 * max(case.flop / _FLOP, scores / _EXP, 2 * rows * (case.D + case.Dv) / _BYTES)


# (B, Hq, Hkv) and (Sq, Sk) of the lattice. Head dims with a dedicated kernel are measured on the whole lattice. Head
# dims that a larger kernel serves are measured at a few points (spots).
_HEADS = ((1, 8, 8), (1, 32, 8), (4, 16, 16), (16, 16, 16))
_SQUARE = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
_OWN_DIMS = ((64, 64), (128, 128), (256, 256))
_SPOTS = (8, 16, 32, 40, 72, 80, 88, 96, 104, 112, 120, 144, 160, 176, 192, 224)
_SPOT_DIMS = (*((d, d) for d in _SPOTS), (128, 64), (64, 128), (192, 128))
_SPOT_LENGTHS = (256, 1024, 4096)
_RECTANGLES = ((1024, 77), (4096, 77), (16, 4096), (64, 8192), (256, 4096), (2048, 512), (64, 384))
_MAX_SCORES = 1 << 33  # largest B * Hq * Sq * Sk: larger problems give no new information


def _lattice_lengths(dims: tuple[int, int], mask: str) -> list[tuple[int, int]]:
    if dims not in _OWN_DIMS:
        return [(s, s) for s in _SPOT_LENGTHS]
    return [(s, s) for s in _SQUARE] + (list(_RECTANGLES) if mask == "full" else [])


def choice_lattice() -> list[Case]:
    """Return shapes over the whole range, so that each class of calls shows the limit below which stock is faster."""
    cases = []
    for d, dv in _OWN_DIMS + _SPOT_DIMS:
        for mask in MASKS:
            for b, hq, hkv in _HEADS:
                for sq, sk in _lattice_lengths((d, dv), mask):
                    if b * hq * sq * sk <= _MAX_SCORES:
                        name = f"d{d}v{dv}_{mask}_b{b}h{hq}kv{hkv}_{sq}x{sk}"
                        cases.append(_case(name, (b, hq, hkv), (sq, sk), (d, dv), mask == "causal"))
    return cases


def grouped_lattice() -> list[Case]:
    """Return cases of query heads that share few KV blocks, and ungrouped heads as a reference."""
    heads = (1, 8, 1), (1, 8, 2), (1, 14, 2), (1, 32, 8), (2, 32, 8), (4, 8, 2), (1, 8, 8)
    seqs = *((s, s) for s in (256, 512, 1024, 2048, 4096)), (4096, 77), (2048, 512)
    return [
        _named_by_shape(h, seq, dims, causal)
        for dims in ((64, 64), (128, 128), (192, 128), (256, 256)) for causal in (False, True)
        for h in heads for seq in seqs if not causal or seq[0] == seq[1]
    ]  # fmt: skip


def odd_lattice() -> list[Case]:
    """Return cases with addresses, strides or head dims that the Hopper kernels cannot read."""
    kinds = (("off_by_one", 64), ("odd_rows", 128), ("columns", 64), ("columns", 128), ("columns", 256), ("bhsd", 20),
             ("bhsd", 33), ("bhsd", 100), ("bhsd", 250))  # fmt: skip
    return [
        _case(f"odd_{layout}_d{d}_{mask}_b{b}h{hq}kv{hkv}_{s}", (b, hq, hkv), (s, s), (d, d), mask == "causal",
              layout=layout)
        for layout, d in kinds for mask in MASKS for b, hq, hkv in ((1, 8, 8), (1, 32, 8), (16, 16, 16))
        for s in (64, 256, 1024, 4096) if b * hq * s * s <= 1 << 30
    ]  # fmt: skip


TINY = _case("tiny", (1, 8, 8), (128, 128), (64, 64), layout="bhsd")
TINY_DECODE = _case("tiny_decode", (1, 32, 8), (1, 1024), (128, 128))  # split-KV


@dataclass(frozen=True, slots=True)
class Everyday:
    """Call from everyday code: a case, an extra argument of F.sdpa, and whether gradients are computed."""

    case: Case
    extra: str = ""  # "", "bool_mask", "padding_mask", "float_bias", "dropout"
    grad: bool = False

    @property
    def name(self) -> str:
        return self.case.name + ("_" + self.extra if self.extra else "") + ("_fwd_bwd" if self.grad else "")

    def build(self, device: str) -> Callable[[], object]:
        """Return a function that makes the call on fixed inputs, as user code does."""
        inputs = make_inputs(self.case, device, requires_grad=self.grad)
        kwargs = self.case.sdpa_kwargs() | extra_arguments(self.extra, self.case, device)
        if not self.grad:

            def call():
                with torch.no_grad():
                    return F.scaled_dot_product_attention(*inputs, **kwargs)

            return call

        def step():
            out = F.scaled_dot_product_attention(*inputs, **kwargs)
            return torch.autograd.grad(out, tuple(inputs), inputs.grad_out)

        return step


def extra_arguments(extra: str, case: Case, device: str) -> dict[str, object]:
    generator = torch.Generator(device=device).manual_seed(1)
    if extra == "bool_mask":
        return {"attn_mask": torch.rand(1, 1, case.Sq, case.Sk, device=device, generator=generator) > 0.1}
    if extra == "padding_mask":
        lengths = torch.randint(case.Sk // 2, case.Sk, (case.B, 1, 1, 1), device=device, generator=generator)
        return {"attn_mask": torch.arange(case.Sk, device=device) < lengths}
    if extra == "float_bias":
        bias = torch.randn(1, case.Hq, case.Sq, case.Sk, device=device, generator=generator)
        return {"attn_mask": bias.to(case.torch_dtype)}
    return {"dropout_p": 0.1} if extra == "dropout" else {}


EVERYDAY: tuple[Everyday, ...] = (
    Everyday(_case("tiny_128", (1, 8, 8), (128, 128), (64, 64))),
    Everyday(_case("prompt_17_llama", (1, 32, 8), (17, 17), (128, 128), True)),
    Everyday(_case("prompt_128_llama", (1, 32, 8), (128, 128), (128, 128), True)),
    Everyday(_case("prompt_512_llama", (1, 32, 8), (512, 512), (128, 128), True)),
    Everyday(_case("prompt_2k_llama", (1, 32, 8), (2048, 2048), (128, 128), True)),
    Everyday(_case("prompt_8k_llama", (1, 32, 8), (8192, 8192), (128, 128), True)),
    Everyday(_case("prompt_2k_fp16", (1, 32, 32), (2048, 2048), (128, 128), True, dtype="fp16")),
    Everyday(_case("chunk_512_of_4k", (1, 32, 8), (512, 4096), (128, 128))),
    Everyday(_case("decode_b1_1k", (1, 32, 8), (1, 1024), (128, 128))),
    Everyday(_case("decode_b1_8k", (1, 32, 8), (1, 8192), (128, 128))),
    Everyday(_case("decode_b8_8k", (8, 32, 8), (1, 8192), (128, 128))),
    Everyday(_case("decode_b64_2k", (64, 32, 8), (1, 2048), (128, 128))),
    Everyday(_case("verify_16_of_4k", (1, 32, 8), (16, 4096), (128, 128))),
    Everyday(_case("bert_512", (8, 12, 12), (512, 512), (64, 64))),
    Everyday(_case("bert_512", (8, 12, 12), (512, 512), (64, 64)), "padding_mask"),
    Everyday(_case("vit_197", (8, 16, 16), (197, 197), (64, 64))),
    Everyday(_case("vit_197_d80", (8, 16, 16), (197, 197), (80, 80))),
    Everyday(_case("diffusion_4k", (2, 24, 24), (4096, 4096), (128, 128))),
    Everyday(_case("cross_4k_77", (2, 10, 10), (4096, 77), (64, 64))),
    Everyday(_case("masked_1k", (2, 16, 16), (1024, 1024), (64, 64)), "bool_mask"),
    Everyday(_case("bias_1k", (2, 16, 16), (1024, 1024), (64, 64)), "float_bias"),
    Everyday(_case("head_256", (1, 16, 16), (2048, 2048), (256, 256), True)),
    Everyday(_case("head_192_128", (1, 16, 16), (2048, 2048), (192, 128), True)),
    Everyday(_case("fp32_1k", (1, 16, 16), (1024, 1024), (64, 64), dtype="fp32")),
    Everyday(_case("train_1k_d64", (8, 12, 12), (1024, 1024), (64, 64), True), grad=True),
    Everyday(_case("train_4k_d128", (1, 16, 16), (4096, 4096), (128, 128), True), grad=True),
    Everyday(_case("train_4k_d128_gqa4", (1, 32, 8), (4096, 4096), (128, 128), True), grad=True),
    Everyday(_case("train_tiny", (1, 8, 8), (128, 128), (64, 64)), grad=True),
    Everyday(_case("train_vit_197", (32, 12, 12), (197, 197), (64, 64)), grad=True),
    Everyday(_case("train_1k_d64", (8, 12, 12), (1024, 1024), (64, 64), True), "dropout", grad=True),
    Everyday(_case("train_fp32_512", (2, 8, 8), (512, 512), (64, 64), dtype="fp32"), grad=True),
)
