"""Masks digested on the device, interpreted: words, states and lists against plain torch."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import on_cpu
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torch_flashplug import library
from torch_flashplug.spec import LISTED
from torch_flashplug.words import THREADS, TILE, words

ROOT = Path(__file__).resolve().parents[2]
NONE, MASKED, WHOLE = range(3)
COMPILE = """
import pathlib, sys
tools, folder = sys.argv[1:]
sys.path.insert(0, tools)
import cutlass.cute as cute
from cutlass import Int32, Uint8
import interpreted, sass
from torch_flashplug.kernels.parts.digest import Digest
sizes, strides = (tuple(make() for _ in range(4)) for make in (cute.sym_int, cute.sym_int64))
mask = cute.runtime.make_fake_tensor(Uint8, sizes, strides, assumed_align=1)
scratch = cute.runtime.make_fake_tensor(Int32, (cute.sym_int(),), (1,), assumed_align=16)
files = []
for gradients in (False, True):
    options = "--enable-tvm-ffi --gpu-arch sm_90a --keep-cubin --keep-ptx"
    stream = cute.runtime.make_fake_stream()
    made = cute.compile(Digest(gradients=gradients), mask, scratch, stream, options=options)
    file = pathlib.Path(folder) / f"digest_{int(gradients)}"
    made.export_to_c(f"{file}.o", function_name=file.name, export_only_tvm_ffi_symbols=True)
    pathlib.Path(f"{file}.ptx").write_text(made.__ptx__)
    pathlib.Path(f"{file}.cubin").write_bytes(made.__cubin__)
    assert sass.resources(made.__cubin__)["spills"] == 0
    files.append(file)
print(interpreted.pack(files, pathlib.Path(folder) / "digest.so"))
"""


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("cutlass", reason="the DSL is needed to compile kernels")
    command = [sys.executable, "-c", COMPILE, str(ROOT / "tools"), str(tmp_path_factory.mktemp("digest"))]
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
    "a_row_for_all": lambda: random(2, 2, 1, 1, 300).expand(2, 1, 200, 300),
    "a_column_for_all": lambda: random(3, 2, 1, 200, 1).expand(2, 1, 200, 300),
    "odd_offset": lambda: random(4, 1, 2, 200, 301)[..., 1:],
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


class Digested:
    """What a digest left, read in its order."""

    def __init__(self, numbers: Tensor):
        self.numbers = numbers

    def take(self, *sizes: int) -> Tensor:
        count = torch.Size(sizes).numel()
        taken, self.numbers = self.numbers[:count], self.numbers[count:]
        return taken.view(sizes)

    def check_lists(self, states: Tensor, never_empty: bool) -> None:
        lines = states.flatten(0, 1)
        counts = self.take(2, len(lines)).tolist()
        found = self.take(2, *lines.shape)
        for i, line in enumerate(lines):
            masked, whole = ((line == kind).nonzero().flatten().tolist() for kind in (MASKED, WHOLE))
            if never_empty and not masked and not whole:
                masked = [0]
            assert found[0, i, : counts[0][i]].tolist() == masked and found[1, i, : counts[1][i]].tolist() == whole


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 64, 128), (2, 65, 129), (8, 4099, 333)])
def test_the_op_makes_room_for_it(sizes: tuple[int, int, int]) -> None:
    digest = pytest.importorskip("torch_flashplug.kernels.parts.digest", reason="the DSL is needed")
    made = library.lib().flashplug_digest_numbers
    made.restype, made.argtypes = ctypes.c_int64, [ctypes.c_int64] * 3
    assert made(*sizes) == digest.numbers(*sizes, gradients=False)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_digested(pack: Path, name: str, gradients: bool) -> None:
    from torch_flashplug.kernels.parts import digest

    mask = MASKS[name]()
    plain = mask.view(torch.uint8).ne(0).flatten(0, 1)
    P, Sq, Sk = plain.shape
    scratch = torch.full((digest.numbers(P, Sq, Sk, gradients=gradients) + 4,), -7, dtype=torch.int32)
    kernel = on_cpu.function(pack, f"digest_{int(gradients)}")
    kernel(mask.view(torch.uint8), scratch, ctypes.c_void_p(None))
    left, blocks, rows, columns = Digested(scratch), states(plain), -(-Sq // TILE), -(-Sk // TILE)
    assert torch.equal(left.take(*blocks.shape), blocks)
    left.check_lists(blocks, never_empty=True)
    assert torch.equal(left.take(P, rows, columns + 1, THREADS), words(plain))
    if gradients:
        left.check_lists(blocks.mT, never_empty=False)
        assert torch.equal(left.take(P, columns, rows + 1, THREADS), words(plain.mT))
    assert left.numbers.tolist() == [-7] * 4
