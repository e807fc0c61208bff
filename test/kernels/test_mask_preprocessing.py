"""Mask preprocessing on the device, interpreted: bitmasks, block states and block lists against plain torch."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import sys
from pathlib import Path

import interpreted_kernels
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torch_flashplug.dispatch import library
from torch_flashplug.ops import mask_preprocess_reference
from torch_flashplug.ops.bitmask import words
from torch_flashplug.registry.kernel_spec import SPARSE_BLOCK, SPARSE_BLOCK_M_192
from torch_flashplug.registry.mask_layout import EMPTY, FULL, INDEX_BITS, PARTIAL, STATE_MASK, TILE, TILE_WORDS

ROOT = Path(__file__).resolve().parents[2]
COMPILE = """
import pathlib, sys
root, folder = sys.argv[1:]
sys.path.insert(0, root)
import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32
from tools.build import sass
from tools.ptx_interpreter import build_pack
from torch_flashplug.kernels.call_args.fake_tensors import FakeTensors
from torch_flashplug.kernels.preprocess.mask import MaskMetadata, MaskPreprocess

@cute.jit
def mask_metadata(mask: cute.Tensor, made: cute.Tensor, Sq: Int32, stream: cuda.CUstream):
    MaskPreprocess(tall=True)(mask, MaskMetadata.create(made, mask.shape[2], Sq, mask.shape[3]), stream)

options = "--enable-tvm-ffi --gpu-arch sm_90a --keep-cubin --keep-ptx"
from torch_flashplug.kernels.primitives.dtype import ELEMENTS
from torch_flashplug.registry import kernel_args, kernel_table

spec = next(spec for spec in kernel_table.specs(90, "fwd") if spec.mask == "mask")
tensors = FakeTensors(ELEMENTS["bf16"], spec, elementwise=False)
mask, metadata = (tensors.create(row) for row in kernel_args.FORWARD if row.name in {"mask", "mask_metadata"})
made = cute.compile(mask_metadata, mask, metadata, Int32(1), cute.runtime.make_fake_stream(), options=options)
file = pathlib.Path(folder) / "mask_metadata"
made.export_to_c(f"{file}.o", function_name=file.name, export_only_tvm_ffi_symbols=True)
pathlib.Path(f"{file}.ptx").write_text(made.__ptx__)
pathlib.Path(f"{file}.cubin").write_bytes(made.__cubin__)
assert sass.resources(made.__cubin__)["spills"] == 0
print(build_pack.pack([file], file.with_suffix(".so")))
"""


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("cutlass", reason="the DSL is needed to compile kernels")
    folder = tmp_path_factory.mktemp("mask_metadata")
    (folder / "compile.py").write_text(COMPILE)  # the DSL reads the source of compiled functions
    command = [sys.executable, str(folder / "compile.py"), str(ROOT), str(folder)]
    environment = {**os.environ, "CUTE_DSL_ARCH": "sm_90a"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return Path(done.stdout.split()[-1])


def random_mask(seed: int, *sizes: int) -> Tensor:
    """Return a random mask with full and empty blocks."""
    mask = torch.rand(sizes, generator=torch.Generator().manual_seed(seed)) < 0.6
    mask[..., :SPARSE_BLOCK] = True
    mask[..., SPARSE_BLOCK : 2 * SPARSE_BLOCK, :] = False
    mask[1:] = False
    return mask


MASKS = {
    **{"x".join(map(str, sizes)): lambda sizes=sizes: random_mask(len(sizes), *sizes) for sizes in (
        (1, 1, 1, 1), (2, 1, 64, 65), (1, 3, 130, 129), (2, 2, 300, 333), (1, 1, 128, 256), (1, 1, 5, 4300),
        (1, 1, 700, 64), (1, 1, 200, 128), (1, 1, 4200, 30),
    )},
    "transposed": lambda: random_mask(1, 1, 1, 333, 300).mT,
    **{f"a_row_for_all_{Sq}x{Sk}": lambda Sq=Sq, Sk=Sk: random_mask(2, 2, 3, 1, Sk).expand(2, 3, Sq, Sk) for Sq, Sk in (
        (1, 300), (64, 65), (127, 64), (128, 300), (129, 300), (200, 1), (300, 128), (4200, 333),
    )},
    "a_row_of_all": lambda: random_mask(6, 1, 1, 300)[None].expand(1, 1, 700, 300),
    "one": lambda: torch.ones(1, 1, 1, 1, dtype=torch.bool).expand(1, 1, 300, 200),
    "a_column_for_all": lambda: random_mask(3, 2, 1, 200, 1).expand(2, 1, 200, 300),
    "odd_offset": lambda: random_mask(4, 1, 2, 200, 301)[..., 1:],
    **{f"odd_rows_{i}": lambda i=i: random_mask(i, 1, 1, 140, 517 + i)[..., i:] for i in range(4)},
    "even_rows_apart": lambda: random_mask(7, 2, 1, 130, 640)[..., 5:-16],
    "every_other": lambda: random_mask(5, 1, 2, 200, 600)[..., ::2],
    "all": lambda: torch.ones(1, 1, 256, 384, dtype=torch.bool),
    "nothing": lambda: torch.zeros(1, 1, 256, 384, dtype=torch.bool),
    "bytes": lambda: torch.arange(256, dtype=torch.uint8).repeat(130).view(1, 1, 130, 256).view(torch.bool),
}  # fmt: skip


def block_states(mask: Tensor) -> Tensor:
    """Return block states (P, M, N); missing keys count as masked out, missing rows do not count."""
    P, Sq, Sk = mask.shape
    M, N = (-(-size // SPARSE_BLOCK) for size in (Sq, Sk))
    tail = (0, N * SPARSE_BLOCK - Sk, 0, M * SPARSE_BLOCK - Sq)
    visible, rows = F.pad(mask, tail), F.pad(torch.ones(P, Sq, N * SPARSE_BLOCK, dtype=torch.bool), (0, 0, *tail[2:]))
    blocks = [x.view(P, M, SPARSE_BLOCK, N, SPARSE_BLOCK) for x in (visible, ~visible & rows)]
    has_visible, has_masked = (x.any(-1).any(2) for x in blocks)
    return torch.where(has_visible, torch.where(has_masked, PARTIAL, FULL), EMPTY).int()


def tall_block_states(blocks: Tensor, Sq: int) -> Tensor:
    """Return the states of blocks of SPARSE_BLOCK_M_192 queries.

    A tall block keeps the state of the blocks of SPARSE_BLOCK queries if all states agree, and is masked (partial)
    otherwise.
    """
    lines = [
        {m * SPARSE_BLOCK_M_192 // SPARSE_BLOCK, (min((m + 1) * SPARSE_BLOCK_M_192, Sq) - 1) // SPARSE_BLOCK}
        for m in range(-(-Sq // SPARSE_BLOCK_M_192))
    ]
    parts = [blocks[:, sorted(line_indices)] for line_indices in lines]
    same = [(part == part[:, :1]).all(1) for part in parts]
    return torch.stack([part[:, 0].where(as_one, PARTIAL) for part, as_one in zip(parts, same, strict=True)], 1)


def visible_parts(mask: Tensor) -> Tensor:
    """Return for (P * tall blocks, 3, N) if TILE queries of a tall block see any key of a block of keys.

    The value is -1 if the queries do not exist.
    """
    Sq, Sk = mask.shape[1:]
    padded = F.pad(mask, (0, -Sk % SPARSE_BLOCK, 0, -Sq % SPARSE_BLOCK_M_192))
    parts = padded.unflatten(2, (-1, SPARSE_BLOCK)).any(-1).unflatten(1, (-1, TILE)).any(2).int()
    parts[:, -(-Sq // TILE) :] = -1
    return parts.unflatten(1, (-1, SPARSE_BLOCK_M_192 // TILE)).flatten(0, 1)


class MetadataReader:
    """Reader of preprocessing results in memory order."""

    def __init__(self, numbers: Tensor):
        self.numbers = numbers

    def take(self, *sizes: int) -> Tensor:
        count = torch.Size(sizes).numel()
        values, self.numbers = self.numbers[:count], self.numbers[count:]
        return values.view(sizes)

    def check_lists(self, states: Tensor, never_empty: bool, seeing: Tensor | None = None) -> None:
        """Check counts and entries of block lists.

        Args:
            states: expected states of blocks.
            never_empty: True if a list without blocks must have a single masked block.
            seeing: shape (lines, parts, N), the expected flags of masked entries, or -1 for parts that do not exist.
        """
        lines = states.flatten(0, 1)
        counts = self.take(2, len(lines)).tolist()
        entries = self.take(2, *lines.shape)
        if seeing is not None:
            for i, part in itertools.product(range(len(lines)), range(SPARSE_BLOCK_M_192 // TILE)):
                line_entries = entries[0, i, : counts[0][i]]
                expected = seeing[i, part, line_entries & (1 << INDEX_BITS) - 1]
                assert ((expected == -1) | (expected == (line_entries >> INDEX_BITS + part & 1))).all()
            entries[0] &= (1 << INDEX_BITS) - 1
        for i, line in enumerate(lines):
            masked, full = ((line == state).nonzero().flatten().tolist() for state in (PARTIAL, FULL))
            if never_empty and not masked and not full:
                masked = [0]
            assert entries[0, i, : counts[0][i]].tolist() == masked and entries[1, i, : counts[1][i]].tolist() == full


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (64, 64, 128), (65, 65, 129), (128, 333, 129), (4099, 4099, 333)])
def test_op_allocates_the_size_of_the_mask_metadata(sizes: tuple[int, int, int], gradients: bool) -> None:
    mask_preprocessing = pytest.importorskip("torch_flashplug.kernels.preprocess.mask", reason="the DSL is needed")
    count_numbers = library.lib().flashplug_mask_metadata_size
    count_numbers.restype, count_numbers.argtypes = ctypes.c_int64, [*[ctypes.c_int64] * 3, ctypes.c_int]
    assert count_numbers(*sizes, gradients) == mask_preprocessing.metadata_size(*sizes, gradients=gradients)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_mask_preprocessing_matches_plain_torch(pack: Path, name: str, gradients: bool) -> None:
    from torch_flashplug.kernels.preprocess import mask as mask_preprocessing

    mask = MASKS[name]()
    plain, rows = mask.view(torch.uint8).ne(0).flatten(0, 1), num_read_rows(mask)
    P, Sq, Sk = plain.shape
    numbers = mask_preprocessing.metadata_size(rows, Sq, Sk, gradients=gradients)
    buffer = torch.full((P * numbers + 4,), -7, dtype=torch.int32)
    kernel, output = interpreted_kernels.load_kernel(pack, "mask_metadata"), buffer[:-4].view(*mask.shape[:2], numbers)
    kernel(mask[:, :, :rows].view(torch.uint8), output, Sq, ctypes.c_void_p(None))
    check_metadata(buffer, plain, rows, gradients)


@pytest.mark.parametrize("Sq", [129, 300, 4096])
def test_broadcast_mask_row_needs_little_metadata(Sq: int) -> None:
    """The bitmask of a broadcast row has at most an eighth of the mask's bytes, for any number of queries."""
    mask_preprocessing = pytest.importorskip("torch_flashplug.kernels.preprocess.mask", reason="the DSL is needed")
    row_size, full_size = (
        mask_preprocessing.metadata_size(rows, Sq, 4096, gradients=False) for rows in (SPARSE_BLOCK, Sq)
    )
    assert row_size < full_size and (Sq < 300 or row_size * 4 <= Sq * 4096 / 8)
    assert Sq < 4096 or row_size * 100 <= Sq * 4096


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", sorted(MASKS.keys() - {"bytes"}))
def test_reference_preprocessing_matches_plain_torch(name: str, gradients: bool) -> None:
    """The mask can also be restored from the result."""
    mask_preprocessing = pytest.importorskip("torch_flashplug.kernels.preprocess.mask", reason="the DSL is needed")
    mask = MASKS[name]()
    metadata = mask_preprocess_reference.preprocess_mask(
        mask, mask_preprocessing.metadata_size(num_read_rows(mask), *mask.shape[2:], gradients=gradients)
    )
    check_metadata(F.pad(metadata.flatten(), (0, 4), value=-7), mask.flatten(0, 1), num_read_rows(mask), gradients)
    if gradients:
        assert torch.equal(mask_preprocess_reference.visible_scores(metadata, *mask.shape[2:]), mask)


def num_read_rows(mask: Tensor) -> int:
    """Return the number of mask rows read by preprocessing."""
    return min(mask.shape[2], SPARSE_BLOCK) if mask.stride(2) == 0 else mask.shape[2]


def check_metadata(numbers: Tensor, plain: Tensor, rows: int, gradients: bool) -> None:
    """Check a preprocessing result, followed by four numbers that must not be written.

    Accumulation ranks are written by the deterministic backward.
    """
    P, Sq, Sk = plain.shape
    read_mask, num_row_tiles, num_column_tiles = plain[:, :rows], -(-rows // TILE), -(-Sk // TILE)
    reader, blocks, lines = MetadataReader(numbers), block_states(plain), -(-rows // SPARSE_BLOCK)
    stored_states = reader.take(P, lines, blocks.shape[2])
    assert torch.equal(stored_states & STATE_MASK, blocks[:, :lines])
    reader.check_lists(blocks, never_empty=True)
    reader.check_lists(tall_block_states(blocks, Sq), never_empty=True, seeing=visible_parts(plain))
    assert torch.equal(reader.take(P, num_row_tiles, num_column_tiles + 1, TILE_WORDS), words(read_mask))
    if gradients:
        reader.check_lists(blocks.mT, never_empty=False)
        if rows < Sq:  # the tile behind the last tile has the same content
            read_mask = plain[:, :1].expand(-1, rows + TILE, -1)
        assert torch.equal(
            reader.take(P, num_column_tiles, num_row_tiles + 1, TILE_WORDS),
            words(read_mask.mT)[:, :, : num_row_tiles + 1],
        )
        reader.take(2, *blocks.shape)
    assert reader.numbers.tolist() == [-7] * 4
