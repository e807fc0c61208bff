"""Trial kernels: kernel files with score stages in combinations that no product kernel has.

test_seams.py compiles, counts and interprets these kernels.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from torch_flashplug.kernels import builder
from torch_flashplug.kernels.call_args.kernel_call import make_call, parameter
from torch_flashplug.kernels.features.base import KernelFeatures
from torch_flashplug.kernels.primitives.dtype import ELEMENTS
from torch_flashplug.kernels.primitives.fragments import column_of, rows_and_columns
from torch_flashplug.kernels.score_stages.bias import CHUNK, chunk_mma, matrices
from torch_flashplug.kernels.score_stages.bitmask import BitmaskStage, BitmaskTiles, BlockSparseBitmaskStage
from torch_flashplug.kernels.score_stages.dropout import DropoutStage
from torch_flashplug.kernels.score_stages.pipeline import ScoreLayout, ScorePipeline
from torch_flashplug.kernels.tiling.block_iterator import BlockIterator
from torch_flashplug.kernels.tiling.block_sparse import BlockSparseIterator, BlockSparseLists
from torch_flashplug.kernels.tiling.tile import TileAddressing
from torch_flashplug.kernels.tiling.varlen import ENTRY, VarlenAddressing, VarlenTileList
from torch_flashplug.registry.kernel_args import OF_KIND
from torch_flashplug.registry.kernel_spec import ROWS_PER_WARPGROUP, SMEM_BYTES, WARP, WARPGROUP, KernelSpec


@dataclass(frozen=True)
class Planes:
    """Bitmasks in both orientations (score_stages/bitmask.py), with strides in planes per batch entry and per head."""

    rows: cute.Tensor  # (n,) Int32
    columns: cute.Tensor
    of_batch: Int32
    of_head: Int32


@dataclass(frozen=True)
class Extra:
    """Additional arguments of a trial kernel, as a flat struct, since TVM-FFI supports no nested structs."""

    mask_rows: cute.Tensor
    mask_columns: cute.Tensor
    mask_of_batch: Int32
    mask_of_head: Int32
    drawn_from: cute.Tensor  # (1,) Int64
    drops: Float32  # dropout probability
    # (R,) and (R, C) Int32
    masked_key_count: cute.Tensor
    masked_keys: cute.Tensor
    whole_key_count: cute.Tensor
    whole_keys: cute.Tensor
    key_rows_of_batch: Int32
    key_rows_of_head: Int32
    masked_query_count: cute.Tensor
    masked_queries: cute.Tensor
    whole_query_count: cute.Tensor
    whole_queries: cute.Tensor
    query_rows_of_batch: Int32
    query_rows_of_head: Int32
    masked_turn: cute.Tensor
    whole_turn: cute.Tensor
    # (n, ENTRY) and (2,) Int32
    row_tiles: cute.Tensor
    row_head: cute.Tensor
    key_tiles: cute.Tensor
    key_head: cute.Tensor
    scratch_tiles: cute.Tensor
    scratch_head: cute.Tensor

    @property
    def mask(self) -> Planes:
        return Planes(self.mask_rows, self.mask_columns, self.mask_of_batch, self.mask_of_head)

    @property
    def lists(self) -> BlockSparseIterator:
        keys = (self.masked_key_count, self.masked_keys, self.whole_key_count, self.whole_keys)
        queries = (self.masked_query_count, self.masked_queries, self.whole_query_count, self.whole_queries)
        of_keys = BlockSparseLists(*keys, self.key_rows_of_batch, self.key_rows_of_head)
        planes = (self.query_rows_of_batch, self.query_rows_of_head)
        return BlockSparseIterator(of_keys, BlockSparseLists(*queries, *planes, self.masked_turn, self.whole_turn))

    def tile_addressing(self, k: cute.Tensor) -> VarlenAddressing:
        rows, keys = VarlenTileList(self.row_tiles, self.row_head), VarlenTileList(self.key_tiles, self.key_head)
        return VarlenAddressing(
            rows, keys, VarlenTileList(self.scratch_tiles, self.scratch_head), total_keys=k.shape[2]
        )


EXTRA = inspect.Parameter("extra", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Extra)


class TrialFeatures(KernelFeatures):
    """Features of a trial kernel: the block iterator and stage of the spec, followed by the stages of the trial."""

    stages: tuple[str, ...]

    @property
    def short(self) -> bool:
        return "ragged" in self.stages

    def tile_addressing(self, call) -> TileAddressing:
        return call.extra.tile_addressing(call.k) if "ragged" in self.stages else super().tile_addressing(call)

    def block_iterator(self, call) -> BlockIterator:
        return call.extra.lists if "listed" in self.stages else super().block_iterator(call)

    def score_pipeline(self, call) -> ScorePipeline:
        stages = super().score_pipeline(call).stages
        if "bits" in self.stages:
            stages = (
                *stages,
                self.words(call.extra.mask, BlockSparseBitmaskStage if "listed" in self.stages else BitmaskStage),
            )
        if "dropout" in self.stages:
            stages = (
                *stages,
                DropoutStage.create(call.extra.drawn_from, call.extra.drops, call.q.shape[1]),
            )
        return ScorePipeline(stages)

    def words(self, planes: Planes, kind: type[BitmaskTiles]) -> BitmaskTiles:
        return kind(planes.columns if self.transposed else planes.rows, planes.of_batch, planes.of_head)


def fake_vector(dtype: type, align: int, size: int | None = None) -> cute.Tensor:
    """Return a contiguous one-dimensional tensor argument; its size is symbolic unless `size` is an integer."""
    return cute.runtime.make_fake_tensor(dtype, (cute.sym_int() if size is None else size,), (1,), assumed_align=align)


def fake_list(rank: int) -> cute.Tensor:
    sizes, strides = (cute.sym_int() for _ in range(rank)), (cute.sym_int64() for _ in range(rank - 1))
    return cute.runtime.make_fake_tensor(Int32, tuple(sizes), (*strides, 1))


def fake_extra() -> Extra:
    def fake(field: dataclasses.Field) -> object:
        if field.name.endswith("_tiles"):
            return cute.runtime.make_fake_tensor(Int32, (cute.sym_int(), ENTRY), (ENTRY, 1), assumed_align=16)
        if field.name in {"row_head", "key_head", "scratch_head"}:
            return fake_vector(Int32, 4, size=2)
        if field.name == "drawn_from":
            return fake_vector(Int64, 8, size=1)
        if field.name.startswith("mask_") and field.type == "cute.Tensor":
            return fake_vector(Int32, 16)
        if field.type == "cute.Tensor":
            return fake_list(1 if field.name.endswith("_count") else 2)
        return Float32(1.0) if field.type == "Float32" else Int32(1)

    return Extra(*map(fake, dataclasses.fields(Extra)))


def make_trial_kernel(spec: KernelSpec, *stages: str):
    """Return a kernel of `builder()` with additional stages, for cute.compile with the kernel's `fake_arguments()`."""
    assert spec.smem_bytes() <= SMEM_BYTES[spec.arch], f"{spec.name()}: {spec.smem_bytes()} B of shared memory"
    kernel = builder(spec)
    base = type(kernel)

    def add_stages(part) -> None:
        part_features = part.features
        kind = type("TrialFeatures", (TrialFeatures, type(part_features)), {"stages": stages})
        part.features = kind(part_features.element, part_features.spec, part_features.transposed)

    class Trial(base):
        __call__ = make_call([*map(parameter, OF_KIND[spec.kind]), EXTRA])

        def fake_arguments(self) -> tuple:
            *arguments, stream = base.fake_arguments(self)
            return (*arguments, fake_extra(), stream)

    kernel.__class__ = Trial
    for part in (kernel, kernel.query_gradient, kernel.key_gradients) if spec.is_split_backward else (kernel,):
        add_stages(part)
    return kernel


def trial_name(name: str, stages: Sequence[str]) -> str:
    """Return the name of a trial's function and files."""
    return "_".join((name, *stages))


def build(name: str, stages: Sequence[str], folder: Path) -> None:
    """Write the object, the PTX and the cubin of a trial to a folder, in this order."""
    kernel = make_trial_kernel(KernelSpec.from_name(name), *stages)
    options = "--enable-tvm-ffi --gpu-arch sm_90a --keep-cubin --keep-ptx"
    compiled, symbol = cute.compile(kernel, *kernel.fake_arguments(), options=options), trial_name(name, stages)
    compiled.export_to_c(str(folder / f"{symbol}.o"), function_name=symbol, export_only_tvm_ffi_symbols=True)
    (folder / f"{symbol}.ptx").write_text(compiled.__ptx__)
    (folder / f"{symbol}.cubin").write_bytes(bytes(compiled.__cubin__))


def bias_elements_read(transposed: bool, columns: int) -> list[list[list[tuple[int, int]]]]:
    """Return the bias tile element read by each of 128 threads for each score of the thread, as [thread][r][c].

    ldmatrix is modelled after the PTX ISA. Call this function while a kernel is traced; its work is done during
    tracing.
    """
    form = ScoreLayout(ELEMENTS["bf16"], 1, columns, transposed)
    copies = [matrices(form, thread) for thread in range(WARPGROUP)]
    values = cute.make_rmem_tensor(chunk_mma(form).partition_shape_C((ROWS_PER_WARPGROUP, CHUNK)), form.element.dtype)
    target, scores = copies[0].retile(values).layout, rows_and_columns(values).layout
    tile = cute.make_identity_tensor((ROWS_PER_WARPGROUP, columns))

    def lines_of(chunk: int) -> list[cute.Tensor]:
        """Return for each thread a tensor of shape ((elements of a line, instruction), 1, 1)."""
        part = cute.local_tile(tile, (ROWS_PER_WARPGROUP, CHUNK), (0, chunk))
        return [copy.partition_S(part) for copy in copies]

    def read_by(thread: int, lines: list[cute.Tensor]) -> list[list[tuple[int, int]]]:
        lane, warp, registers = thread % WARP, thread // WARP * WARP, {}
        for nth in range(CHUNK // 16):  # instructions with four matrices of 8 x 8 each
            for i in range(8):
                matrix, line, position = i // 2, lane // 4, lane % 4 * 2 + i % 2
                if transposed:
                    line, position = position, line
                source = lines[warp + matrix * 8 + line]  # lane 8 m + l holds the start of line l of matrix m
                registers[cute.crd2idx(((i, nth), 0, 0), target)] = tuple(source[(position, nth), 0, 0])
        return [[registers[cute.crd2idx((r, c), scores)] for c in range(CHUNK // 4)] for r in range(2)]

    chunks = [lines_of(chunk) for chunk in range(columns // CHUNK)]
    parts = [[read_by(thread, lines) for lines in chunks] for thread in range(WARPGROUP)]
    return [[sum(rows, []) for rows in zip(*of_thread, strict=True)] for of_thread in parts]


def count_wrong_biases(transposed: bool, columns: int) -> int:
    """Return the number of scores that would get the bias of a different score."""
    read = bias_elements_read(transposed, columns)
    return sum(
        read[thread][r][c] != (thread // WARP * 16 + thread % WARP // 4 + 8 * r, thread % 4 * 2 + column_of(c))
        for thread in range(WARPGROUP)
        for r in range(2)
        for c in range(columns // 4)
    )


def print_wrong_biases() -> None:
    """Print the counts for the reads of kernels: blocks and half blocks of the forward, steps of the backward."""
    print([count_wrong_biases(*read) for read in ((False, 128), (False, 64), (True, 64))])


@cute.jit
def trace_wrong_biases():
    """Print the counts during compilation, in plain Python, since the DSL would turn the loops into device loops."""
    print_wrong_biases()
