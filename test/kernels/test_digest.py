"""Masks digested on the device, interpreted: words, states and lists against plain torch."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import sys
from pathlib import Path

import on_cpu
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torch_flashplug.dispatch import library
from torch_flashplug.ops import mask_preprocess_reference
from torch_flashplug.ops.bitmask import words
from torch_flashplug.registry.kernel_spec import LISTED, TALL
from torch_flashplug.registry.mask_layout import FLAGS, KIND, MASKED, NONE, THREADS, TILE, WHOLE

ROOT = Path(__file__).resolve().parents[2]
COMPILE = """
import pathlib, sys
tools, folder = sys.argv[1:]
sys.path.insert(0, tools)
import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32
import interpreted, sass
from torch_flashplug.kernels.call_args.operands import fake_digest, fake_mask
from torch_flashplug.kernels.preprocess.mask import Digest, Digested

@cute.jit
def digest(mask: cute.Tensor, made: cute.Tensor, Sq: Int32, stream: cuda.CUstream):
    Digest(tall=True)(mask, Digested.create(made, mask.shape[2], Sq, mask.shape[3]), stream)

options = "--enable-tvm-ffi --gpu-arch sm_90a --keep-cubin --keep-ptx"
made = cute.compile(digest, fake_mask(), fake_digest(), Int32(1), cute.runtime.make_fake_stream(), options=options)
file = pathlib.Path(folder) / "digest"
made.export_to_c(f"{file}.o", function_name=file.name, export_only_tvm_ffi_symbols=True)
pathlib.Path(f"{file}.ptx").write_text(made.__ptx__)
pathlib.Path(f"{file}.cubin").write_bytes(made.__cubin__)
assert sass.resources(made.__cubin__)["spills"] == 0
print(interpreted.pack([file], file.with_suffix(".so")))
"""


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("cutlass", reason="the DSL is needed to compile kernels")
    folder = tmp_path_factory.mktemp("digest")
    (folder / "compile.py").write_text(COMPILE)  # the DSL reads what it compiles
    command = [sys.executable, str(folder / "compile.py"), str(ROOT / "tools"), str(folder)]
    environment = {**os.environ, "CUTE_DSL_ARCH": "sm_90a"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return Path(done.stdout.split()[-1])


def random(seed: int, *sizes: int) -> Tensor:
    """With blocks that see everything, and some that see nothing."""
    mask = torch.rand(sizes, generator=torch.Generator().manual_seed(seed)) < 0.6
    mask[..., :LISTED] = True
    mask[..., LISTED : 2 * LISTED, :] = False
    mask[1:] = False
    return mask


MASKS = {
    **{"x".join(map(str, sizes)): lambda sizes=sizes: random(len(sizes), *sizes) for sizes in (
        (1, 1, 1, 1), (2, 1, 64, 65), (1, 3, 130, 129), (2, 2, 300, 333), (1, 1, 128, 256), (1, 1, 5, 4300),
        (1, 1, 700, 64), (1, 1, 200, 128), (1, 1, 4200, 30),
    )},
    "transposed": lambda: random(1, 1, 1, 333, 300).mT,
    **{f"a_row_for_all_{Sq}x{Sk}": lambda Sq=Sq, Sk=Sk: random(2, 2, 3, 1, Sk).expand(2, 3, Sq, Sk) for Sq, Sk in (
        (1, 300), (64, 65), (127, 64), (128, 300), (129, 300), (200, 1), (300, 128), (4200, 333),
    )},
    "a_row_of_all": lambda: random(6, 1, 1, 300)[None].expand(1, 1, 700, 300),
    "one": lambda: torch.ones(1, 1, 1, 1, dtype=torch.bool).expand(1, 1, 300, 200),
    "a_column_for_all": lambda: random(3, 2, 1, 200, 1).expand(2, 1, 200, 300),
    "odd_offset": lambda: random(4, 1, 2, 200, 301)[..., 1:],
    **{f"odd_rows_{i}": lambda i=i: random(i, 1, 1, 140, 517 + i)[..., i:] for i in range(4)},
    "even_rows_apart": lambda: random(7, 2, 1, 130, 640)[..., 5:-16],
    "every_other": lambda: random(5, 1, 2, 200, 600)[..., ::2],
    "all": lambda: torch.ones(1, 1, 256, 384, dtype=torch.bool),
    "nothing": lambda: torch.zeros(1, 1, 256, 384, dtype=torch.bool),
    "bytes": lambda: torch.arange(256, dtype=torch.uint8).repeat(130).view(1, 1, 130, 256).view(torch.bool),
}  # fmt: skip


def states(mask: Tensor) -> Tensor:
    """(P, M, N): keys that do not exist are hidden, rows that do not exist say nothing."""
    P, Sq, Sk = mask.shape
    M, N = (-(-size // LISTED) for size in (Sq, Sk))
    tail = (0, N * LISTED - Sk, 0, M * LISTED - Sq)
    seen, rows = F.pad(mask, tail), F.pad(torch.ones(P, Sq, N * LISTED, dtype=torch.bool), (0, 0, *tail[2:]))
    blocks = [x.view(P, M, LISTED, N, LISTED) for x in (seen, ~seen & rows)]
    some, hidden = (x.any(-1).any(2) for x in blocks)
    return torch.where(some, torch.where(hidden, MASKED, WHOLE), NONE).int()


def tall(blocks: Tensor, Sq: int) -> Tensor:
    """Of TALL queries: those of which the lines that they lie in say the same, others are masked."""
    lines = [{m * TALL // LISTED, (min((m + 1) * TALL, Sq) - 1) // LISTED} for m in range(-(-Sq // TALL))]
    parts = [blocks[:, sorted(of)] for of in lines]
    same = [(part == part[:, :1]).all(1) for part in parts]
    return torch.stack([part[:, 0].where(as_one, MASKED) for part, as_one in zip(parts, same, strict=True)], 1)


def seeing(mask: Tensor) -> Tensor:
    """(P * tall blocks, 3, N): whether TILE queries of a tall block see something of a block of keys; -1: there are no
    such queries.
    """
    Sq, Sk = mask.shape[1:]
    padded = F.pad(mask, (0, -Sk % LISTED, 0, -Sq % TALL))
    parts = padded.unflatten(2, (-1, LISTED)).any(-1).unflatten(1, (-1, TILE)).any(2).int()
    parts[:, -(-Sq // TILE) :] = -1
    return parts.unflatten(1, (-1, TALL // TILE)).flatten(0, 1)


class Digested:
    """What a digest left, read in its order."""

    def __init__(self, numbers: Tensor):
        self.numbers = numbers

    def take(self, *sizes: int) -> Tensor:
        count = torch.Size(sizes).numel()
        taken, self.numbers = self.numbers[:count], self.numbers[count:]
        return taken.view(sizes)

    def check_lists(self, states: Tensor, never_empty: bool, seeing: Tensor | None = None) -> None:
        """seeing: (lines, parts, N), what masked entries say of parts that exist; of others -1."""
        lines = states.flatten(0, 1)
        counts = self.take(2, len(lines)).tolist()
        found = self.take(2, *lines.shape)
        if seeing is not None:
            for i, part in itertools.product(range(len(lines)), range(TALL // TILE)):
                of = found[0, i, : counts[0][i]]
                right = seeing[i, part, of & (1 << FLAGS) - 1]
                assert ((right == -1) | (right == (of >> FLAGS + part & 1))).all()
            found[0] &= (1 << FLAGS) - 1
        for i, line in enumerate(lines):
            masked, whole = ((line == kind).nonzero().flatten().tolist() for kind in (MASKED, WHOLE))
            if never_empty and not masked and not whole:
                masked = [0]
            assert found[0, i, : counts[0][i]].tolist() == masked and found[1, i, : counts[1][i]].tolist() == whole


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (64, 64, 128), (65, 65, 129), (128, 333, 129), (4099, 4099, 333)])
def test_the_op_makes_room_for_it(sizes: tuple[int, int, int], gradients: bool) -> None:
    digest = pytest.importorskip("torch_flashplug.kernels.preprocess.mask", reason="the DSL is needed")
    made = library.lib().flashplug_digest_numbers
    made.restype, made.argtypes = ctypes.c_int64, [*[ctypes.c_int64] * 3, ctypes.c_int]
    assert made(*sizes, gradients) == digest.numbers(*sizes, gradients=gradients)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_digested(pack: Path, name: str, gradients: bool) -> None:
    from torch_flashplug.kernels.preprocess import mask as digest

    mask = MASKS[name]()
    plain, rows = mask.view(torch.uint8).ne(0).flatten(0, 1), rows_of(mask)
    P, Sq, Sk = plain.shape
    numbers = digest.numbers(rows, Sq, Sk, gradients=gradients)
    scratch = torch.full((P * numbers + 4,), -7, dtype=torch.int32)
    kernel, made = on_cpu.function(pack, "digest"), scratch[:-4].view(*mask.shape[:2], numbers)
    kernel(mask[:, :, :rows].view(torch.uint8), made, Sq, ctypes.c_void_p(None))
    check(scratch, plain, rows, gradients)


@pytest.mark.parametrize("Sq", [129, 300, 4096])
def test_a_row_for_all_takes_little(Sq: int) -> None:
    """An eighth of the mask's bytes at most, however many queries share it."""
    digest = pytest.importorskip("torch_flashplug.kernels.preprocess.mask", reason="the DSL is needed")
    row, all_ = (digest.numbers(rows, Sq, 4096, gradients=False) for rows in (LISTED, Sq))
    assert row < all_ and (Sq < 300 or row * 4 <= Sq * 4096 / 8)
    assert Sq < 4096 or row * 100 <= Sq * 4096


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", sorted(MASKS.keys() - {"bytes"}))
def test_torch_makes_the_same(name: str, gradients: bool) -> None:
    """And finds the mask in it."""
    digest = pytest.importorskip("torch_flashplug.kernels.preprocess.mask", reason="the DSL is needed")
    mask = MASKS[name]()
    made = mask_preprocess_reference.digest(mask, digest.numbers(rows_of(mask), *mask.shape[2:], gradients=gradients))
    check(F.pad(made.flatten(), (0, 4), value=-7), mask.flatten(0, 1), rows_of(mask), gradients)
    if gradients:
        assert torch.equal(mask_preprocess_reference.seen(made, *mask.shape[2:]), mask)


def rows_of(mask: Tensor) -> int:
    """That are looked at."""
    return min(mask.shape[2], LISTED) if mask.stride(2) == 0 else mask.shape[2]


def check(numbers: Tensor, plain: Tensor, rows: int, gradients: bool) -> None:
    """A digest, and four numbers that nobody wrote to. Turns are the ordered backward's to write."""
    P, Sq, Sk = plain.shape
    looked, of_rows, of_columns = plain[:, :rows], -(-rows // TILE), -(-Sk // TILE)
    left, blocks, lines = Digested(numbers), states(plain), -(-rows // LISTED)
    found = left.take(P, lines, blocks.shape[2])
    assert torch.equal(found & KIND, blocks[:, :lines])
    left.check_lists(blocks, never_empty=True)
    left.check_lists(tall(blocks, Sq), never_empty=True, seeing=seeing(plain))
    assert torch.equal(left.take(P, of_rows, of_columns + 1, THREADS), words(looked))
    if gradients:
        left.check_lists(blocks.mT, never_empty=False)
        if rows < Sq:  # the tile behind the last is like the others
            looked = plain[:, :1].expand(-1, rows + TILE, -1)
        assert torch.equal(left.take(P, of_columns, of_rows + 1, THREADS), words(looked.mT)[:, :, : of_rows + 1])
        left.take(2, *blocks.shape)
    assert left.numbers.tolist() == [-7] * 4
