"""Named attention problems (cases) and input tensors for the cases.

Tests, benchmarks and bug reports use the name of a case, never a tuple of numbers. A case is plain data.
`make_inputs(case, device, seed)` returns the same numbers for the same seed on the same kind of device. Every multiple
of 8 up to 256 is a head dim of a case. The lengths lie at and next to the edges of tiles (64, 128, 192 rows).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..registry.dtypes import DTYPE_INFO

DTYPES = {name: getattr(torch, info.torch_name) for name, info in DTYPE_INFO.items()}

GUARD = 8  # elements of NaN around a "slice" layout: a multiple of 16 bytes, so TMA can still read the view


@dataclass(frozen=True, slots=True)
class Case:
    """Attention problem with q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv)."""

    name: str
    B: int
    Hq: int
    Hkv: int
    Sq: int
    Sk: int
    D: int
    Dv: int
    causal: bool = False
    dtype: str = "bf16"
    layout: str = "bshd"  # memory layout of the tensors: a key of LAYOUTS
    scale: float | None = None
    tags: frozenset[str] = frozenset()  # "grad": gradients are always tested; else for every fourth case

    @property
    def gqa(self) -> bool:
        return self.Hq != self.Hkv

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def flop(self) -> float:
        """Multiply-adds of the two products, each counted as 2 operations; half of the count with a causal mask."""
        return 2.0 * self.B * self.Hq * self.Sq * self.Sk * (self.D + self.Dv) * (0.5 if self.causal else 1.0)

    def sizes(self) -> dict[str, int]:
        """Return the facts of the call for the dispatch, without the dtype."""
        names = ("B", "Hq", "Hkv", "Sq", "Sk", "D", "Dv", "causal")
        return {name: int(getattr(self, name)) for name in names}

    def with_dtype(self, dtype: str) -> Case:
        return replace(self, dtype=dtype)

    def sdpa_kwargs(self) -> dict[str, object]:
        """Return the keyword arguments of F.scaled_dot_product_attention for the case."""
        kwargs: dict[str, object] = {}
        if self.causal:
            kwargs["is_causal"] = True
        if self.scale is not None:
            kwargs["scale"] = self.scale
        if self.gqa:
            kwargs["enable_gqa"] = True
        return kwargs


@dataclass(frozen=True, slots=True)
class Inputs:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad_out: torch.Tensor

    def __iter__(self):
        return iter((self.q, self.k, self.v))


def _bhsd(shape, draw):
    return draw(shape)


def _bshd(shape, draw):
    b, h, s, d = shape
    return draw((b, s, h, d)).transpose(1, 2)


def _sbhd(shape, draw):
    b, h, s, d = shape
    return draw((s, b, h, d)).permute(1, 2, 0, 3)


def _slice(shape, draw):
    """Return a view into a larger buffer with NaN outside the view, so a read outside the view changes the result."""
    b, h, s, d = shape
    values = draw(shape)
    buffer = torch.full((b, h, s + 2, d + 2 * GUARD), float("nan"), dtype=values.dtype, device=values.device)
    view = buffer[:, :, 1 : s + 1, GUARD : GUARD + d]
    view.copy_(values)
    return view


def _expand0(shape, draw):
    """Return one stored batch entry and head, expanded with stride 0 to the whole shape."""
    _, _, s, d = shape
    return draw((1, 1, s, d)).expand(shape)


def _unaligned_unit_dim(shape, draw):
    """Return a tensor with odd strides of size-1 dims; torch promises nothing about such strides."""
    values = draw(shape)
    strides = [stride if size > 1 else 3 for size, stride in zip(shape, values.stride(), strict=True)]
    strides[-1] = 1
    return values.as_strided(shape, strides)


def _off_by_one(shape, draw):
    """Return a tensor with every row one element past an address aligned for vector loads."""
    values = draw(shape)
    buffer = torch.full((values.numel() + 1,), float("nan"), dtype=values.dtype, device=values.device)
    view = buffer[1:].view(shape)
    view.copy_(values)
    return view


def _odd_rows(shape, draw):
    """Return a tensor with a row stride of an odd number of elements."""
    b, h, s, d = shape
    return draw((b, h, s, d + 1 + d % 2))[..., :d]


def _columns(shape, draw):
    """Return a tensor with distant addresses for neighboring elements of a row."""
    b, h, s, d = shape
    return draw((b, h, d, s)).transpose(2, 3)


LAYOUTS = {
    "bhsd": _bhsd,
    "bshd": _bshd,
    "sbhd": _sbhd,
    "slice": _slice,
    "expand0": _expand0,
    "unaligned_unit_dim": _unaligned_unit_dim,
    "off_by_one": _off_by_one,
    "odd_rows": _odd_rows,
    "columns": _columns,
    "packed_qkv": None,
}


def make_inputs(case: Case, device: str | torch.device = "cuda", seed: int = 0, requires_grad: bool = False) -> Inputs:
    """Return N(0, 1) tensors of `case` in the layout of the case; grad_out has the layout of an output (bshd)."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def draw(shape):
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(case.torch_dtype)

    q_shape, k_shape = (case.B, case.Hq, case.Sq, case.D), (case.B, case.Hkv, case.Sk, case.D)
    v_shape, out_shape = (case.B, case.Hkv, case.Sk, case.Dv), (case.B, case.Hq, case.Sq, case.Dv)
    if case.layout == "packed_qkv":
        packed = draw((case.B, case.Sq, case.Hq + 2 * case.Hkv, case.D)).transpose(1, 2)
        q, k, v = packed.split((case.Hq, case.Hkv, case.Hkv), dim=1)
    else:
        lay = LAYOUTS[case.layout]
        q = (_bhsd if case.layout == "expand0" else lay)(q_shape, draw)
        k, v = lay(k_shape, draw), lay(v_shape, draw)
    tensors = [t.detach().requires_grad_(requires_grad) for t in (q, k, v)]
    return Inputs(*tensors, grad_out=_bshd(out_shape, draw))


def make_lookup(case: Case, device: str | torch.device = "cuda", seed: int = 0) -> tuple[Inputs, torch.Tensor]:
    """Return inputs with an exactly known output, and the expected output.

    Each query row attends to one key, so the output row is the row of v for the key, bit for bit. q[i] = k[target[i]]
    with entries +-1: the target key scores D, all other keys score about sqrt(D). With scale 4 the rest of the softmax
    rounds away. A wrong index, which a tolerance could hide, shows as a wrong integer.
    """
    generator = torch.Generator(device=device).manual_seed(seed)

    def integers(low, high, shape):
        return torch.randint(low, high, shape, generator=generator, device=device)

    k = (integers(0, 2, (case.B, case.Hkv, case.Sk, case.D)) * 2 - 1).to(case.torch_dtype)
    v = integers(-64, 65, (case.B, case.Hkv, case.Sk, case.Dv)).to(case.torch_dtype)
    target = integers(0, case.Sk, (case.B, case.Hq, case.Sq))
    if case.causal:
        target = target % (torch.arange(case.Sq, device=device).clamp(max=case.Sk - 1) + 1)
    group = case.Hq // case.Hkv
    rows = target.reshape(case.B, case.Hkv, group * case.Sq, 1)
    q = k.gather(2, rows.expand(-1, -1, -1, case.D)).reshape(case.B, case.Hq, case.Sq, case.D)
    expected = v.gather(2, rows.expand(-1, -1, -1, case.Dv)).reshape(case.B, case.Hq, case.Sq, case.Dv)
    return Inputs(q, k, v, grad_out=torch.zeros_like(expected)), expected


def new_case(
    name: str, heads: tuple[int, int, int], seq: tuple[int, int], dims: tuple[int, int], *tags: str, **more
) -> Case:
    causal = "causal" in tags
    return Case(name, *heads, *seq, *dims, causal=causal, tags=frozenset(tags), **more)


# Square self-attention at and next to the edges of the tiles (64, 128, 192 query rows; 128 keys).
_EDGE_LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 511, 512, 513, 1024)
_EDGES = tuple(
    new_case(f"square_s{s}_d{d}" + ("_causal" if mask else ""), (2, 3, 3), (s, s), (d, d), *mask)
    for s in _EDGE_LENGTHS for d in (64, 128) for mask in ((), ("causal",))
)  # fmt: skip

# Every head dim of the range at the edges; D != Dv both ways round.
_DIMS = tuple((d, d) for d in range(8, 257, 8))
_DIMS_DIFFER = ((64, 32), (64, 8), (128, 64), (96, 128), (8, 128), (40, 64), (128, 8), (192, 128), (136, 96),
                (128, 192), (256, 64), (8, 256), (200, 248))  # fmt: skip
_HEAD_DIMS = tuple(
    new_case(f"head_d{d}v{dv}" + ("_causal" if mask else ""), (2, 2, 2), (200, 333), (d, dv), *mask)
    for d, dv in _DIMS + _DIMS_DIFFER
    for mask in ((), ("causal",))
)  # fmt: skip

_GQA = tuple(
    new_case(f"gqa{g}_d{d}" + ("_causal" if mask else ""), (2, 2 * g, 2), (300, 300), (d, d), "gqa", *mask)
    for g in (2, 3, 4, 5, 8) for d in (64, 128) for mask in ((), ("causal",))
) + (
    new_case("mqa_h16_d128_causal", (2, 16, 1), (257, 257), (128, 128), "gqa", "causal"),
    new_case("gqa7_hkv3_d64", (1, 21, 3), (130, 258), (64, 64), "gqa"),
)  # fmt: skip

# Unequal lengths Sq and Sk, both ways, full and top-left causal.
_LENGTHS_DIFFER = ((113, 203), (203, 113), (129, 1024), (1024, 129), (1, 300), (300, 1), (64, 4099), (799, 3), (3, 799),
                   (385, 127))  # fmt: skip
_RECTANGLES = tuple(
    new_case(f"rect_{sq}x{sk}_d{d}" + ("_causal" if mask else ""), (2, 2, 2), (sq, sk), (d, d), *mask)
    for sq, sk in _LENGTHS_DIFFER
    for d in (64, 128) for mask in ((), ("causal",))
)  # fmt: skip

_NAMED = (
    new_case("one_key", (2, 4, 4), (77, 1), (64, 64)),
    new_case("one_key_d128_causal", (2, 4, 4), (77, 1), (128, 128), "causal"),
    new_case("one_query", (2, 4, 4), (1, 1000), (128, 128)),
    new_case("grad_d192_v128_causal", (2, 2, 2), (200, 333), (192, 128), "causal", "grad"),
    new_case("one_by_one", (1, 1, 1), (1, 1), (64, 64)),
    new_case("cross_77_d64", (2, 10, 10), (1024, 77), (64, 64), "cross"),
    new_case("cross_77_d128", (2, 8, 8), (1024, 77), (128, 128), "cross"),
    new_case("cross_350_d128", (1, 66, 66), (192, 350), (128, 128), "cross"),
    new_case("vit_197_d64", (8, 12, 12), (197, 197), (64, 64)),
    new_case("odd_tail_sq4099_d64", (1, 2, 2), (4099, 4099), (64, 64)),
    new_case("odd_tail_sq4099_d128_causal", (1, 2, 2), (4099, 4099), (128, 128), "causal"),
    new_case("train_4k_d64_causal", (1, 8, 8), (4096, 4096), (64, 64), "causal", "large"),
    new_case("train_4k_d128_causal_gqa4", (1, 8, 2), (4096, 4096), (128, 128), "causal", "gqa", "large"),
    new_case("prefill_8k_d128_causal", (1, 4, 1), (8192, 8192), (128, 128), "causal", "gqa", "large"),
    new_case("prefill_16k_d64", (1, 2, 2), (16384, 16384), (64, 64), "large"),
    new_case("many_heads_d64", (96, 24, 24), (33, 33), (64, 64), "many"),
    new_case(
        "many_heads_d128_causal", (70000, 1, 1), (8, 8), (128, 128), "causal", "many"
    ),  # beyond 65535: of the grid dimensions, x alone can hold B*H
    new_case("many_heads_h70000_d64", (1, 70000, 1), (3, 9), (64, 64), "gqa", "many"),
    new_case("decode_1x8k_d128_gqa4", (1, 32, 8), (1, 8192), (128, 128), "gqa", "decode"),
    new_case("decode_8x1k_d64", (8, 16, 16), (1, 1024), (64, 64), "decode"),
    new_case("verify_4x2k_d128_gqa4", (2, 16, 4), (4, 2048), (128, 128), "gqa", "decode"),
    # Grids large enough for the kernels of more than 64 query rows with D != Dv, and of 192 rows under a causal mask.
    new_case("grid_2k_d64_causal_gqa4", (1, 32, 8), (2048, 2048), (64, 64), "causal", "gqa"),
    new_case("grid_1k_d128v64", (2, 16, 16), (1024, 1023), (128, 64), "dv"),
    new_case("grid_1k_d128v64_causal", (2, 16, 16), (1023, 1024), (128, 64), "causal", "dv"),
    new_case("grid_1k_d64v128", (2, 16, 16), (1024, 1023), (64, 128), "dv"),
    new_case("grid_1k_d64v128_causal", (2, 16, 16), (1023, 1024), (64, 128), "causal", "dv"),
    new_case("grid_2k_d80", (1, 16, 16), (2048, 2047), (80, 80), "dv"),
    new_case("grid_2k_d80_causal_gqa4", (1, 32, 8), (2048, 2048), (64, 80), "causal", "gqa"),
    new_case("grid_2k_d72v80_causal_gqa4", (1, 32, 8), (2048, 2048), (72, 80), "causal", "gqa"),
    new_case("grid_2k_d96_causal_gqa4", (1, 32, 8), (2048, 2048), (96, 96), "causal", "gqa"),
    new_case("grid_1k_d192v128_causal", (2, 16, 16), (1023, 1024), (192, 128), "causal", "dv"),
    new_case("grid_1k_d256_causal_gqa4", (2, 16, 4), (1023, 1024), (256, 256), "causal", "gqa"),
    new_case("scale_large_d64_causal", (2, 2, 2), (130, 130), (64, 64), "causal", scale=2.0),
)

_LAID_OUT = (
    ("bhsd", (2, 3, 3), (200, 333)),
    ("sbhd", (2, 3, 3), (200, 333)),
    ("slice", (2, 3, 3), (200, 333)),
    ("expand0", (2, 3, 3), (200, 333)),
    ("packed_qkv", (2, 4, 2), (200, 200)),
    ("unaligned_unit_dim", (1, 1, 1), (200, 333)),
)
_LAYOUTS = tuple(
    new_case(f"layout_{layout}_d{d}" + ("_causal" if mask else ""), heads, seq, (d, d), *mask, layout=layout)
    for layout, heads, seq in _LAID_OUT
    for d in (40, 64, 128) for mask in ((), ("causal",))
) + (
    new_case("layout_unaligned_unit_dim_one_query", (1, 1, 1), (1, 1), (64, 64), layout="unaligned_unit_dim"),
)  # fmt: skip

# The smallest calls with kernels in the dispatch that no case above reaches: (B, H), (Sq, Sk), (D, Dv).
_ROWS = tuple(
    new_case(f"row_d{dims[0]}v{dims[1]}_{sq}x{sk}" + ("_causal" if mask else ""), (b, h, h), (sq, sk), dims, *mask)
    for (b, h), (sq, sk), dims, *mask in (
        ((2, 24), (300, 100), (80, 80)), ((2, 20), (300, 100), (80, 80), "causal"),
        ((2, 24), (300, 100), (96, 96)), ((1, 12), (768, 100), (96, 96)), ((2, 20), (300, 100), (96, 96), "causal"),
        ((1, 12), (768, 100), (160, 160)), ((2, 20), (300, 100), (160, 160), "causal"),
        ((1, 12), (768, 100), (192, 128)),
        ((1, 12), (768, 100), (192, 192)), ((1, 12), (768, 300), (192, 192)),
        ((1, 8), (1023, 100), (192, 192), "causal"), ((1, 24), (511, 300), (192, 192), "causal"),
        ((1, 12), (768, 100), (256, 256)), ((1, 12), (768, 300), (256, 256)),
        ((1, 8), (1536, 300), (256, 256), "causal"),
    )
)  # fmt: skip

# Short queries (decode): every decode row of the kernel table, odd head dims, one tile of packed heads from 1 row to
# 64. The keys lie at and next to the edges of a block, and in many blocks: (B, Hq, Hkv), (Sq, Sk), (D, Dv).
_DECODE = tuple(
    new_case(
        f"decode_h{heads[1]}x{heads[2]}_d{dims[0]}v{dims[1]}_{sq}x{sk}", heads, (sq, sk), dims, *tags, "decode"
    )
    for heads, (sq, sk), dims, *tags in (
        *(
            ((2, 8, 2), rows, dims, "gqa")
            for dims in ((64, 64), (128, 128), (192, 128), (192, 192), (256, 256))
            for rows in ((1, 1), (2, 63), (5, 64), (16, 65), (1, 4097))
        ),
        ((2, 8, 2), (3, 4097), (40, 40), "gqa"), ((2, 8, 2), (1, 127), (72, 72), "gqa"),
        ((2, 8, 2), (7, 1000), (72, 40), "gqa"), ((1, 6, 2), (4, 129), (184, 120), "gqa"),
        ((1, 64, 1), (1, 4097), (128, 128), "gqa"), ((3, 9, 1), (7, 65), (64, 64), "gqa"),
        ((2, 4, 4), (1, 4097), (128, 128)), ((2, 4, 4), (64, 1000), (64, 64)),
        ((40, 32, 4), (1, 1000), (128, 128), "gqa"),
    )
)  # fmt: skip

# Addresses, strides and head dims that neither TMA nor 16-byte vectors can read.
ODD_CASES: tuple[Case, ...] = tuple(
    new_case(f"odd_{layout}_d{dims[0]}v{dims[1]}" + ("_causal" if mask else ""), (2, 4, 2), (200, 333), dims, "gqa",
             *mask, layout=layout)
    for layout, dims in (
        *((layout, (d, d)) for layout in ("off_by_one", "odd_rows", "columns") for d in (64, 128, 256)),
        ("bhsd", (7, 7)), ("bhsd", (33, 33)), ("bhsd", (65, 127)), ("bhsd", (66, 130)), ("bhsd", (255, 255)),
        ("bshd", (1, 100)), ("columns", (77, 20)),
    )
    for mask in ((), ("causal",))
)  # fmt: skip
CASES: tuple[Case, ...] = _EDGES + _HEAD_DIMS + _GQA + _RECTANGLES + _NAMED + _LAYOUTS + _ROWS + _DECODE

# Head dims above 256, which only forwards on Hopper have: filled up to 320, 384 or 512, in halves of the columns of O.
_WIDE_DIMS = ((264, 264), (320, 320), (328, 328), (384, 384), (448, 448), (504, 504), (512, 512), (512, 256),
              (320, 512), (256, 512), (64, 264), (512, 8))  # fmt: skip
WIDE_CASES: tuple[Case, ...] = tuple(
    new_case(f"wide_d{d}v{dv}_{sq}x{sk}" + ("_causal" if mask else ""), (1, 4, 2), (sq, sk), (d, dv), "gqa", *mask)
    for d, dv in _WIDE_DIMS
    for (sq, sk), *mask in (((65, 129),), ((129, 70), "causal"))
) + tuple(
    new_case(f"wide_d512_{sq}x{sk}" + ("_causal" if mask else ""), (2, 1, 1), (sq, sk), (512, 512), *mask)
    for sq, sk in ((65, 1), (66, 63), (127, 64), (128, 65), (257, 300))
    for mask in ((), ("causal",))
) + tuple(
    new_case(f"wide_row_d{d}" + ("_causal" if mask else ""), (1, 66, 66), (127, 90), (d, d), *mask)
    for d in (320, 384, 512)
    for mask in ((), ("causal",))
) + tuple(
    new_case(f"wide_decode_h{hq}x{hkv}_d{d}v{dv}_{sq}x{sk}", (1, hq, hkv), (sq, sk), (d, dv), "gqa", "decode")
    for (hq, hkv), (sq, sk), (d, dv) in (
        ((8, 1), (1, 1), (512, 512)), ((64, 1), (1, 65), (512, 512)), ((4, 2), (5, 1000), (264, 320)),
        ((6, 2), (3, 129), (512, 256)),
    )
) + (
    new_case("wide_slice_d328v384", (2, 3, 3), (70, 100), (328, 384), layout="slice"),
    new_case("wide_mqa_h64_d512", (1, 64, 1), (65, 70), (512, 512), "gqa"),
)  # fmt: skip
# Gradients of head dims above 256, with odd and even numbers of blocks, and keys without queries.
WIDE_GRADIENT_CASES: tuple[Case, ...] = tuple(
    new_case(f"wide_grad_d{d}v{dv}_{sq}x{sk}" + ("_causal" if mask else ""), (1, 4, 2), (sq, sk), (d, dv), "gqa", *mask)
    for d, dv in ((264, 264), (320, 320), (384, 384), (448, 448), (512, 512), (512, 264), (320, 512))
    for (sq, sk), *mask in (((65, 129),), ((129, 70), "causal"))
) + tuple(
    new_case(f"wide_grad_d512_{sq}x{sk}" + ("_causal" if mask else ""), (2, 2, 1), (sq, sk), (512, 512), "gqa", *mask)
    for sq, sk in ((1, 65), (64, 64), (70, 200), (200, 1))
    for mask in ((), ("causal",))
) + (
    new_case("wide_grad_slice_d328v384", (2, 3, 3), (70, 100), (328, 384), layout="slice"),
    new_case("wide_grad_mqa_h6_d512", (1, 6, 1), (65, 70), (512, 512), "gqa"),
    new_case("wide_grad_shared_h8_d512", (1, 8, 1), (512, 70), (512, 512), "gqa"),
)  # fmt: skip
_ALL_CASES = CASES + ODD_CASES + WIDE_CASES + WIDE_GRADIENT_CASES
_BY_NAME = {case.name: case for case in _ALL_CASES}
if len(_BY_NAME) != len(_ALL_CASES):
    raise RuntimeError("cases: two cases have the same name")


def case_named(name: str) -> Case:
    """Return the case of a name.

    Raises:
        ValueError: no case has the name. The message lists close names.
    """
    if name not in _BY_NAME:
        import difflib

        close = ", ".join(difflib.get_close_matches(name, _BY_NAME, n=5)) or "none"
        raise ValueError(f"case_named: name must be a case name, but got {name!r}. Close names: {close}.")
    return _BY_NAME[name]
