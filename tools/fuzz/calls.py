"""Random calls of F.scaled_dot_product_attention as plain data, and the random generator of the calls.

A pair (seed, index) determines a call. The kinds of calls are rows of KINDS. This module neither makes nor checks a
call: tools/fuzz/fuzz.py does both.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from random import Random

import torch

from torch_flashplug.testing import cases

DTYPES = {**cases.DTYPES, "fp64": torch.float64}
DIMS = "bhsd"
# Lengths at and next to the edges of tiles, of vectors, and of blocks in the kernels of stock.
EDGES = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 79, 95, 96, 97, 111, 112, 113, 127, 128, 129,
         160, 191, 192, 193, 255, 256, 257, 319, 320, 383, 384, 385, 511, 512, 513, 700, 767, 769, 1023, 1025,
         1500)  # fmt: skip
LONG = (2049, 3000, 4097)
OPERAND_ROWS, MAX_HEADS = 32, 600  # reading an operand row costs as much as OPERAND_ROWS products with the row
SOME = ("qkv", "qkv", "q", "k", "v", "qk", "kv", "qv")


@dataclass(frozen=True, slots=True)
class Layout:
    """Memory layout of a tensor (b, h, s, d). All remaining elements of the buffer are NaN."""

    order: str = DIMS  # memory order of the dims, outermost first
    offset: int = 0  # elements before the tensor in the storage
    pad: tuple[int, int, int] = (0, 0, 0)  # additional heads, rows and columns in the buffer
    step: int = 1  # stride of the elements of a row
    expand: str = ""  # dims with stride 0, which are stored once
    ones: int = 0  # stride of dims of size 1; 0: the stride that torch computes


@dataclass(frozen=True, slots=True)
class Call:
    """Random call with q (B, Hq, Sq, D), k (B, Hkv, Sk, D) and v (B, Hkv, Sk, Dv), and the settings of the call."""

    kind: str
    seed: int  # seed of the random values
    B: int
    Hq: int
    Hkv: int
    Sq: int
    Sk: int
    D: int
    Dv: int
    dtype: str = "bf16"
    causal: bool = False
    scale: float | None = None
    low: float = 0.0  # approximate LSE of all rows; 0: the LSE is not controlled
    q: Layout = Layout()
    k: Layout = Layout()
    v: Layout = Layout()
    packed: bool = False  # q, k and v are heads of a single tensor, in the layout of q
    wants: str = ""  # letters of the operands that need gradients; m is the mask
    grad_out: Layout = Layout()
    # A call that runs before the checked call. "same": an equal call with first_grad. "stock": an equal call with
    # first_grad and the plugin disabled. "memory": an equal call for which the GPU memory may not suffice.
    first: str = ""
    first_grad: Layout = Layout()
    mask: str = ""  # "bool", "blind" (some rows without visible keys), "float", "inf", "float32", "lower_right"
    mask_dims: str = ""  # letters among b, h, q and k of the dims with a size above 1
    mask_layout: Layout = Layout()
    dropout: float = 0.0
    deterministic: bool = False
    way: str = ""  # way in which the program makes the call: a key of WAYS in transforms.py
    allow: str = ""  # "no_cudnn", "flash", "efficient": the backends allowed with torch.nn.attention.sdpa_kernel

    def facts(self) -> dict[str, object]:
        """Return the fields that differ from the defaults, in a form that JSON can hold."""
        return _unusual(self)

    @property
    def empty(self) -> bool:
        return 0 in (self.B, self.Hq, self.Sq, self.Sk)


def _unusual(record: Call | Layout) -> dict[str, object]:
    fields = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if value != field.default:
            fields[field.name] = _unusual(value) if isinstance(value, Layout) else value
    return fields


# ---- sizes ----


def _head_dim(rng: Random) -> int:
    near = rng.random()
    if near < 0.35:
        return rng.choice((64, 128, 192, 256))
    return 8 * rng.randint(1, 32) if near < 0.75 else rng.randint(1, 256)


def _length(rng: Random, most: int) -> int:
    length = rng.choice(LONG) if rng.random() < 0.02 else rng.choice(EDGES)
    return length if length <= most else rng.choice([edge for edge in EDGES if edge <= max(most, 1)])


def _sizes(rng: Random, work: int, **fixed: int) -> dict[str, int]:
    """Draw sizes of a call whose two matrix products take at most about `work` multiply-adds.

    Sizes in `fixed` are not drawn.
    """
    D = fixed.get("D") or _head_dim(rng)
    Dv = fixed.get("Dv") or (D if rng.random() < 0.7 else _head_dim(rng))
    width = D + Dv
    Sq = fixed.get("Sq") or _length(rng, work // width)
    Sk = fixed.get("Sk") or (
        Sq if rng.random() < 0.35 and Sq * Sq * width <= work else _length(rng, work // width // Sq)
    )
    heads = work // (width * max(Sq * Sk, OPERAND_ROWS * (Sq + Sk)))
    heads = max(1, min(heads, MAX_HEADS if rng.random() < 0.03 else rng.choice((1, 4, 12, 48))))
    group = min(heads, rng.choice((1, 1, 1, 2, 3, 4, 5, 7, 8, 16)))
    Hkv = 1 if rng.random() < 0.25 else rng.randint(1, min(16, heads // group))
    B = rng.randint(1, max(1, heads // (group * Hkv)))
    drawn = {"B": B, "Hq": group * Hkv, "Hkv": Hkv, "Sq": Sq, "Sk": Sk, "D": D, "Dv": Dv}
    return drawn | fixed


def _scale(rng: Random, dtype: str) -> float | None:
    if rng.random() < 0.7:
        return None
    huge = 12.0 if dtype == "fp16" else 1000.0  # with a larger scale, scores overflow fp16
    return rng.choice((1.0, 0.3, rng.uniform(0.01, 2.0), 1e-4, 1e-2, huge, huge / 10))


def _wants(rng: Random) -> str:
    draw = rng.random()
    return "" if draw < 0.45 else "qkv" if draw < 0.8 else rng.choice(("q", "k", "v", "qk", "qv", "kv"))


def _call(rng: Random, kind: str, sizes: dict[str, int], **more: object) -> Call:
    dtype = str(more.pop("dtype", None) or rng.choice(("bf16", "bf16", "fp16")))
    usual = {"causal": rng.random() < 0.4, "scale": _scale(rng, dtype), "wants": _wants(rng)}
    order = rng.choice(("bhsd", "bshd"))
    usual |= dict.fromkeys(("q", "k", "v"), Layout(order)) | {"grad_out": Layout(rng.choice(("bhsd", "bshd")))}
    return Call(kind, rng.getrandbits(31), **sizes, **({"dtype": dtype} | usual | more))


# ---- layouts ----


def _misaligned(rng: Random, **more: object) -> Layout:
    return Layout(rng.choice(("bhsd", "bshd")), offset=rng.choice((1, 2, 3, 4, 5, 7, 9, 12, 15)), **more)


def _layout(rng: Random) -> Layout:
    traits: dict[str, object] = {}
    for _ in range(rng.choice((0, 1, 1, 2))):
        traits |= rng.choice((
            {"offset": rng.randint(1, 15)},
            {"pad": (rng.randint(0, 2), rng.randint(0, 3), 16 * rng.randint(0, 2))},
            {"pad": (rng.randint(0, 1), rng.randint(0, 3), rng.randint(1, 9))},
            {"step": 2},
            {"expand": rng.choice(("b", "h", "bh"))},
            {"ones": rng.choice((1, 3, 5, 12, 77))},
        ))  # fmt: skip
    return Layout(rng.choice(("bhsd", "bhsd", "bshd", "sbhd", "bhds", "hbsd")), **traits)


def _three(rng: Random) -> dict[str, object]:
    return {x: _layout(rng) for x in "qkv"}


def _some(rng: Random, share: float = 0.5) -> dict[str, object]:
    return _three(rng) if rng.random() < share else {}


def _grad_layout(rng: Random) -> Layout:
    draw = rng.random()
    if draw < 0.15:
        return Layout(expand=DIMS)  # the layout of a gradient from .sum().backward()
    return _misaligned(rng) if draw < 0.4 else Layout(rng.choice(("bhsd", "bshd", "sbhd", "bhds")))


# ---- kinds of calls: each function draws the sizes and the unusual settings ----

Drawn = tuple[dict[str, int], dict[str, object]]


def _plain(rng: Random, work: int) -> Drawn:
    return _sizes(rng, work), {}


def _decode(rng: Random, work: int) -> Drawn:
    width = _head_dim(rng)
    keys = min(rng.choice((*EDGES[-16:], *LONG, 8192, 9001)), max(1, work // (2 * width * OPERAND_ROWS)))
    sizes = _sizes(rng, work, Sq=rng.choice((1, 1, 1, 2, 4, 16, 24)), Sk=keys, D=width)
    return sizes, {"wants": "" if rng.random() < 0.8 else "qkv"}


def _tiny(rng: Random, work: int) -> Drawn:
    return _sizes(rng, work, B=1, Hq=1, Hkv=1, Sq=rng.randint(1, 5), Sk=rng.randint(1, 5)), _three(rng)


def _layouts(rng: Random, work: int) -> Drawn:
    sizes = _sizes(rng, work)
    if rng.random() < 0.85:
        return sizes, _three(rng)
    rows = min(sizes["Sq"], sizes["Sk"])
    packed = Layout(rng.choice(("bhsd", "bshd", "sbhd")), offset=rng.choice((0, 0, 0, rng.randint(1, 15))))
    return sizes | {"Sq": rows, "Sk": rows, "Dv": sizes["D"]}, {"packed": True, "q": packed}


def _grad_out(rng: Random, work: int) -> Drawn:
    wants = rng.choice(SOME)
    return _sizes(rng, work), {"wants": wants, "grad_out": _grad_layout(rng), **_some(rng, 0.3)}


def _twice(first: str, rng: Random, work: int) -> Drawn:
    """Draw calls with both orders of grad_out, in layouts and head dims that every fused kernel of stock supports."""
    orders = rng.sample(("bhsd", "bshd"), 2)
    D = rng.choice((64, 80, 96, 112, 128, 8 * rng.randint(1, 16)))
    sizes = _sizes(rng, work, D=D, Dv=D, Sq=rng.choice(EDGES[10:22]), Sk=rng.choice(EDGES[10:22]))
    grads = {"grad_out": Layout(orders[0]), "first_grad": Layout(orders[1])}
    return sizes, {"wants": "qkv", "first": first, "scale": None, **grads}


def _fault2(rng: Random, work: int) -> Drawn:
    """Draw calls with misaligned base addresses, and with a single row or a single key."""
    short = rng.choice(({"Sq": 1, "Sk": 1}, {"Sq": 1}, {"Sk": 1}))
    return _sizes(rng, work, **short), {x: _misaligned(rng) for x in rng.choice(SOME)}


def _fault3(rng: Random, work: int) -> Drawn:
    """Draw calls with misaligned base addresses, a single row and a few keys."""
    return _sizes(rng, work, Sq=1, Sk=rng.randint(2, 17)), {x: _misaligned(rng) for x in rng.choice(SOME)}


def _fault4(rng: Random, work: int) -> Drawn:
    """Draw calls with a broadcast query and Dv != D."""
    expand = rng.choice(("h", "b", "bh"))
    D, Dv = rng.sample((16, 32, 40, 64, 72, 80, 96, 128, 192, 256), 2)
    sizes = _sizes(rng, work // 4, D=D, Dv=Dv, Sq=rng.choice(EDGES[:22]))
    sizes |= {"B": sizes["B"] + ("b" in expand), "Hq": sizes["Hq"] + sizes["Hkv"] * ("h" in expand)}
    return sizes, {"q": Layout(rng.choice(("bhsd", "bshd")), expand=expand)}


def _fault5(rng: Random, work: int) -> Drawn:
    """Draw calls with gradients and a single row or a single key, whose stride is odd."""
    short, which = rng.choice((("Sk", "v"), ("Sk", "k"), ("Sk", "kv"), ("Sq", "q")))
    odd = rng.choice((Layout("bhds"), Layout(ones=rng.choice((1, 3, 5, 7, 77)))))
    sizes = _sizes(rng, work, **({short: 1} if rng.random() < 0.7 else {"Sq": 1, "Sk": 1}))
    return sizes, {"wants": "qkv", "grad_out": _grad_layout(rng)} | dict.fromkeys(which, odd)


def _fault6(rng: Random, work: int) -> Drawn:
    """Draw calls with a scale that is zero or negative."""
    return _sizes(rng, work), {"scale": rng.choice((0.0, 0.0, -0.0, -1.0, -0.125, -rng.uniform(0.01, 2.0)))}


def _fault10(rng: Random, work: int) -> Drawn:
    """Draw calls with all scores far below zero, and with a single row or a key count that ends inside a block."""
    short = rng.choice(({"Sq": 1}, {"Sk": rng.choice((64, 192, 320))}, {}))
    low = rng.choice((-80.0, -89.0, -122.0, -300.0))
    return _sizes(rng, work, **short), {
        "wants": "qkv",
        "scale": None,
        "low": low,
        "dropout": rng.choice((0.0, 0.0, 0.1)),
    }


def _mask_layout(rng: Random) -> Layout:
    """Draw a contiguous mask at some address for half of the calls, else a slice, a permuted or an expanded mask."""
    offset = rng.choice((0, 0, 0, 1, 2, 4, 8))
    if rng.random() < 0.5:
        return Layout(offset=offset)
    traits = rng.choice((
        {"pad": (rng.randint(0, 2), rng.randint(0, 3), rng.randint(1, 9))},
        {"pad": (0, 0, 8 * rng.randint(1, 3))},
        {"expand": rng.choice(("b", "h", "s", "bh"))},
        {"step": 2},
        {},
    ))  # fmt: skip
    return Layout(rng.choice(("bhsd", "bshd", "sbhd", "bhds", "bsdh")), offset, **traits)


def _lower_right(rng: Random, work: int) -> Drawn:
    """Draw calls with a mask of torch.nn.attention.bias.

    Each row has a visible key, because torch returns NaN for rows without visible keys.
    """
    sizes = _sizes(rng, work)
    rows, keys = sorted((sizes["Sq"], sizes["Sk"]))
    dtype = {"dtype": "fp32"} if rng.random() < 0.2 else {}
    masked = {"causal": False, "mask": "lower_right", "mask_dims": "qk", "way": "lower_right"}
    return sizes | {"Sq": rows, "Sk": keys}, masked | dtype | _some(rng)


def _mask(rng: Random, work: int) -> Drawn:
    mask, dims = rng.choice(("bool", "blind", "float", "inf", "float32")), ("qk", "bqk", "hqk", "bhqk", "bk", "k")
    learned = {"wants": _wants(rng) + "m"} if mask not in {"bool", "blind"} and rng.random() < 0.4 else {}
    masked = {"causal": False, "scale": None, "mask": mask, "mask_dims": rng.choice(dims)} | learned
    masked |= {"mask_layout": _mask_layout(rng)}
    return _sizes(rng, work), masked | _some(rng, 0.3) | {"dropout": rng.choice((0.0, 0.0, 0.0, 0.1))}


def _ways(rng: Random, work: int) -> Drawn:
    """Draw calls in checkpoints, dispatch modes and transforms: half of the calls with a mask, some with dropout."""
    way = rng.choice(("checkpoint", "reentrant", "selective", "flop_counter", "vjp", "vmap"))
    sizes, more = _mask(rng, work) if rng.random() < 0.5 else (_sizes(rng, work), {})
    dropout = rng.choice((0.0, 0.1)) if way in {"checkpoint", "reentrant"} else 0.0
    learned = "m" if way != "vmap" and "m" in more.get("wants", "") else ""
    return sizes, more | {"way": way, "wants": f"qkv{learned}", "dropout": dropout}


def _memory(rng: Random, work: int) -> Drawn:
    """Draw calls that first run with limited GPU memory, which may be exhausted in forward or backward."""
    sizes, more = _mask(rng, work) if rng.random() < 0.5 else (_sizes(rng, work), _some(rng, 0.3))
    return sizes, more | {"first": "memory", "wants": "qkvm" if "m" in more.get("wants", "") else "qkv"}


def _many(rng: Random, work: int) -> Drawn:
    """Draw calls with more batches or heads than the second dim of a CUDA grid allows, if the work permits."""
    D, rows = rng.choice((16, 32, 40, 64)), rng.choice((3, 8, 16))
    many = 65536 + rng.randint(0, 3000) if work >= 1 << 29 else max(2, work // (4 * D * rows * OPERAND_ROWS))
    sizes = {"B": many, "Hq": 1, "Hkv": 1} if rng.random() < 0.5 else {"B": 1, "Hq": many, "Hkv": many}
    masked = {"mask": rng.choice(("bool", "blind")), "mask_dims": "qk", "causal": False} if rng.random() < 0.3 else {}
    return sizes | {"Sq": rows, "Sk": rows, "D": D, "Dv": D}, {"wants": rng.choice(("qkv", "qkv", "")), **masked}


def _wide(rng: Random, work: int) -> Drawn:
    """Draw calls in fp32 and fp64, partly at odd offsets and with masks."""
    masked = {"mask": "float", "mask_dims": rng.choice(("hqk", "qk", "bhqk")), "causal": False, "scale": None}
    masked |= {"mask_layout": _mask_layout(rng)}
    more = masked if rng.random() < 0.3 else {}
    return _sizes(rng, work // 4), {"dtype": rng.choice(("fp32", "fp64")), **_some(rng), **more}


def _deterministic(rng: Random, work: int) -> Drawn:
    grads = {"wants": rng.choice(SOME), "grad_out": _grad_layout(rng)}
    return _sizes(rng, work), {"deterministic": True, **grads, **_some(rng)}


def _allowed(rng: Random, work: int) -> Drawn:
    """Draw calls for which stock may not select cuDNN. The checks of cuDNN look at nothing, so cuDNN would be taken."""
    allow, dropout = rng.choice(("no_cudnn", "flash", "efficient")), rng.choice((0.0, 0.0, 0.1))
    return _sizes(rng, work), {"allow": allow, "dropout": dropout, "grad_out": _grad_layout(rng), **_some(rng, 0.8)}


def _empty(rng: Random, work: int) -> Drawn:
    return _sizes(rng, work) | rng.choice(({"B": 0}, {"Sq": 0}, {"Sk": 0}, {"Hq": 0, "Hkv": 0}, {"Sq": 0, "Sk": 0})), {}


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    weight: int
    draw: Callable[[Random, int], Drawn]


KINDS = (
    Kind("plain", 24, _plain),
    Kind("decode", 8, _decode),
    Kind("tiny", 4, _tiny),
    Kind("layouts", 24, _layouts),
    Kind("grad_out", 10, _grad_out),
    Kind("repeat", 5, functools.partial(_twice, "same")),
    Kind("stock_first", 4, functools.partial(_twice, "stock")),
    Kind("fault2", 2, _fault2),
    Kind("fault3", 2, _fault3),
    Kind("fault4", 2, _fault4),
    Kind("fault5", 2, _fault5),
    Kind("fault6", 2, _fault6),
    Kind("fault10", 2, _fault10),
    Kind("mask", 5, _mask),
    Kind("lower_right", 2, _lower_right),
    Kind("dropout", 4, lambda rng, work: (_sizes(rng, work), {"dropout": rng.choice((0.1, 0.5, 1)), **_some(rng)})),
    Kind("deterministic", 4, _deterministic),
    Kind("wide", 2, _wide),
    Kind("ways", 8, _ways),
    Kind("memory", 2, _memory),
    Kind("many", 1, _many),
    Kind("allowed", 4, _allowed),
    Kind("empty", 1, _empty),
)
NAMES = tuple(kind.name for kind in KINDS)
_BY_WEIGHT = tuple(itertools.accumulate(kind.weight for kind in KINDS))


def _begin(seed: int, index: int) -> tuple[Random, Kind]:
    rng = Random(f"{seed}/{index}")
    return rng, rng.choices(KINDS, cum_weights=_BY_WEIGHT)[0]


def draw(seed: int, index: int, work: int) -> Call:
    """Return the call of a seed and an index.

    Args:
        seed: the seed of the run.
        index: the index of the call.
        work: upper bound of the call's multiply-adds; callers pass less if there is no GPU.
    """
    rng, kind = _begin(seed, index)
    sizes, more = kind.draw(rng, work)
    return _call(rng, kind.name, sizes, **more)


def indices(seed: int, only: Collection[str] = NAMES) -> Iterator[int]:
    """Return an endless iterator over the indices of the calls of the given kinds."""
    return (index for index in itertools.count() if _begin(seed, index)[1].name in only)
