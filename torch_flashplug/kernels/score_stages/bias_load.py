"""Bias tiles in shared memory (score_stages/bias.py), and the loads of the producer warp, wherever rows begin.

Where every row begins at a multiple of 16 bytes (a unit), TMA loads a tile, swizzled as operands are.

If all queries share such a row, lanes copy the units of the row into a few tile rows. Threads of the first query read
these tile rows. Every thread then reads the values of the thread with the first query and the same keys. TMA would
fetch the same row 64 times, which takes twice as long as 64 different rows.

Elsewhere lanes copy units with cp.async. The first unit of a row then holds up to seven elements before the row, and
the consumer adds this shift to its addresses. Rows of such a tile are a unit longer than the tile is wide. This unit
holds the end of a shifted row, and eight rows lie in different banks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.utils.hopper_helpers as hopper
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.tensor_utils import LayoutEnum

from ...registry.kernel_spec import COPY_UNIT
from ..primitives import sm90
from .pipeline import ScoreLayout

SWIZZLE_ALIGNMENT = 1024  # bytes


@dataclass(frozen=True)
class BiasTileLayout:
    """Sizes of a warpgroup's bias tile, compile-time constants."""

    dtype: type[cutlass.Numeric]
    rows: int  # queries
    columns: int  # keys
    transposed: bool  # True in a backward, whose scores are (keys, queries)

    @classmethod
    def for_warpgroup(cls, score_layout: ScoreLayout, dtype: type[cutlass.Numeric]) -> BiasTileLayout:
        """Return the tile sizes of a warpgroup's part of a block."""
        sizes = (sm90.ROWS_PER_WARPGROUP, score_layout.columns)
        return cls(dtype, *(reversed(sizes) if score_layout.transposed else sizes), score_layout.transposed)

    @property
    def has_spare_registers(self) -> bool:
        """True if the producer warp has registers for several copies at once."""
        return not self.transposed

    @property
    def wide(self) -> bool:
        """True for an fp32 bias."""
        return self.dtype.width == 32

    @property
    def element_bytes(self) -> int:
        return self.dtype.width // 8

    @property
    def unit(self) -> int:
        """Elements of a unit."""
        return COPY_UNIT // self.element_bytes

    @property
    def pitch(self) -> int:
        """Elements from a row to the next in a tile of shifted rows."""
        return self.columns + self.unit

    @property
    def pitch_bytes(self) -> int:
        return self.pitch * self.element_bytes

    @property
    def bytes(self) -> int:
        """Bytes of a tile of shifted rows."""
        return self.rows * self.pitch_bytes

    @property
    def swizzled(self) -> cute.ComposedLayout:
        """Layout (rows, columns) of a tile loaded by TMA."""
        sizes = (sm90.ROWS_PER_WARPGROUP, self.rows, self.columns)
        layout = hopper.make_smem_layout_b(LayoutEnum.ROW_MAJOR, sizes, self.dtype, 1)
        return cute.slice_(layout, (None, None, 0))

    @property
    def box_bytes(self) -> int:
        """Bytes of a tile loaded by TMA."""
        return self.rows * self.columns * self.element_bytes

    def buffer(self, smem: cutlass.memory.SmemAllocator, warpgroups: int) -> cute.Tensor:
        """Allocate (elements of a stage, warpgroup); a stage has space for either layout."""
        assert self.bytes % SWIZZLE_ALIGNMENT == 0, "every stage begins where a swizzled tile may"
        layout = cute.make_layout((self.rows * self.pitch, warpgroups))
        return smem.allocate_tensor(self.dtype, layout, SWIZZLE_ALIGNMENT)

    def tile(self, stage: cute.Pointer) -> cute.Tensor:
        """Return the tensor (rows, columns) of a tile loaded by TMA."""
        layout = self.swizzled
        return cute.make_tensor(cute.recast_ptr(stage, layout.inner, dtype=self.dtype), layout.outer)

    @property
    def rows_read(self) -> tuple[int, ...]:
        """Rows of a tile that the threads of `reader` read."""
        if self.transposed:
            pairs = range(0, self.rows, 8)
            return tuple(r + i for r in pairs for i in (0, 1)) if self.wide else tuple(pairs[::2])
        return (0, 8) if self.wide else (0,)

    def reader(self, thread: Int32, bias: cute.Tensor) -> Int32:
        """Return the thread of the warpgroup whose part of a tile the given thread reads.

        If all queries share a row, this is the thread of the same keys and of the first query. The bits of a thread
        index that select keys are those of ldmatrix for 16 bits, and those of an accumulator for fp32.
        """
        if self.transposed:
            keys = 0b1111100 if self.wide else 0b1101000
        else:
            keys = 0b0000011 if self.wide else 0b0010000
        return thread & cutlass.select_(self.is_one_row(bias), Int32(keys), Int32(sm90.WARPGROUP - 1))

    def is_one_row(self, bias: cute.Tensor) -> cutlass.Boolean:
        """Return True if all queries share a row.

        The stride is hidden from LLVM. A value derived from the stride would take a register across the loop, and the
        backward with fp32 masks has none left.
        """
        by_row = Int64(bias.stride[2])
        by_row = Int32(by_row) | Int32(by_row >> 32)
        return (by_row if self.has_spare_registers else opaque(by_row)) == 0

    def tma(self, bias: cute.Tensor) -> tuple[cute.CopyAtom, cute.Tensor]:
        """Return the TMA atom that loads tiles of a bias (B, Hq, Sq, Sk), and its coordinates (Sq, Sk, Hq, B).

        A TMA descriptor must be valid for any bias, even if no tile is loaded by TMA. Therefore the address and the
        strides are rounded down to whole units.
        """
        start = cute.make_ptr(
            self.dtype, bias.iterator.toint() & -COPY_UNIT, cute.AddressSpace.gmem, assumed_align=COPY_UNIT
        )
        by_batch, by_head, by_row = (
            cute.assume(Int64(stride) // self.unit * self.unit, divby=self.unit) for stride in bias.stride[:3]
        )
        m = cute.make_tensor(start, cute.make_layout(bias.shape, stride=(by_batch, by_head, by_row, 1)))
        op, size = cpasync.CopyBulkTensorTileG2SOp(), (self.rows, self.columns)
        return cpasync.make_tiled_tma_atom(op, sm90.rows_first(m), self.swizzled, size)

    def is_unit_aligned(self, bias: cute.Tensor) -> cutlass.Boolean:
        """Return True if every row begins at a unit."""
        low = Int32(bias.iterator.toint() & (COPY_UNIT - 1))
        for stride in bias.stride[:3]:
            low = low | Int32(stride & (self.unit - 1))
        return cute.arch.make_warp_uniform(low) == 0


@dataclass(frozen=True)
class BiasPlane:
    """Rows of the bias of a single batch entry and head."""

    tiles: BiasTileLayout
    bias: cute.Tensor  # (B, Hq, Sq, Sk)
    batch: Int32
    head: Int32

    @property
    def stride(self) -> Int64:
        """Elements from a row to the next."""
        return Int64(self.bias.stride[2])

    @property
    def start(self) -> Int64:
        """Address of the first element of the plane."""
        by_batch, by_head, _, _ = self.bias.stride
        element = Int64(self.batch) * by_batch + Int64(self.head) * by_head
        return self.bias.iterator.toint() + element * self.tiles.element_bytes

    @property
    def first_shift(self) -> Int32:
        """Elements between the start of a unit and the first element of the plane."""
        return (Int32(self.start) & (COPY_UNIT - 1)) // self.tiles.element_bytes

    def shift(self, row: Int32) -> Int32:
        """Return the number of elements between the start of a unit and the first element of a row."""
        return (self.first_shift + row * Int32(self.stride)) & (self.tiles.unit - 1)

    @cute.jit
    def load(
        self, row: Int32, column: Int32, tma: tuple[cute.CopyAtom, cute.Tensor], stage: cute.Pointer,
        pipeline: sm90.Pipeline,
        count: Int32,
    ):  # fmt: skip
        """Load the tile at a row and a column of tiles, executed by the producer warp."""
        tiles, (_, _, queries, keys) = self.tiles, self.bias.shape
        if tiles.is_unit_aligned(self.bias):
            if tiles.is_one_row(self.bias):
                pipeline.producer_wait(count)
                self.copy_row(column, tiles.tile(stage))
                pipeline.producer_commit_after_copies(count)
            else:
                atom, m = tma
                pipeline.producer_acquire(count)
                operand = sm90.TmaOperand(atom, m, tiles.tile(stage)).head(self.head, self.batch)
                to, boxes = operand.tiles((tiles.rows, tiles.columns), (None, None))
                cute.copy(atom, boxes[None, row, column], to, tma_bar_ptr=pipeline.arrival(count))
        else:
            pipeline.producer_wait(count)
            query, key = row * tiles.rows, column * tiles.columns
            # Inside of the bias every unit exists, including the unit behind each row, and no unit is cut off.
            inside = (query + tiles.rows <= queries) & (key + tiles.pitch <= keys)
            if cutlass.const_expr(not tiles.has_spare_registers):
                self.copy_rows(query, key, stage, is_inside=False)
            elif inside:
                self.copy_rows(query, key, stage, is_inside=True)
            else:
                self.copy_rows(query, key, stage, is_inside=False)
            pipeline.producer_commit_after_copies(count)

    @cute.jit
    def copy_row(self, column: Int32, tile: cute.Tensor):
        """Copy the row that all queries share into the tile rows that are read, executed by all lanes."""
        tiles, keys = self.tiles, self.bias.shape[3]
        units = tiles.columns // tiles.unit
        for first_unit in cutlass.range_constexpr(0, units, sm90.WARP):
            unit = first_unit + opaque(cute.arch.lane_idx())
            if unit < units:
                key = opaque(column) * tiles.columns + unit * tiles.unit
                plane = replace(self, batch=opaque(self.batch), head=opaque(self.head))
                source = plane.start + key * tiles.element_bytes
                size = cutlass.min(cutlass.max((keys - key) * tiles.element_bytes, 0), COPY_UNIT)
                for row in cutlass.range_constexpr(len(tiles.rows_read)):
                    copy_unit(unit_address(tile, tiles.rows_read[row], unit), source, size)

    @cute.jit
    def copy_rows(self, query: Int32, key: Int32, stage: cute.Pointer, is_inside: cutlass.Constexpr[bool]):
        """Copy the units of the tile's width, then the unit behind each row, executed by all lanes.

        Neighboring lanes copy neighboring units.
        """
        units = self.tiles.columns // self.tiles.unit
        lanes, lane = 1 << (units - 1).bit_length(), opaque(cute.arch.lane_idx())
        if lane % lanes < units:
            self.copy(query, lane // lanes, sm90.WARP // lanes, lane % lanes, key, stage, is_inside)
        self.copy(query, lane, sm90.WARP, Int32(units), key, stage, is_inside)

    @cute.jit
    def copy(
        self, query: Int32, first: Int32, step: cutlass.Constexpr[int], unit: Int32, key: Int32, stage: cute.Pointer,
        is_inside: cutlass.Constexpr[bool],
    ):  # fmt: skip
        """Copy a unit of every step-th tile row, from row `first` on, executed by a single lane."""
        tiles, (_, _, queries, keys) = self.tiles, self.bias.shape
        row, target = query + first, stage.toint() + first * tiles.pitch_bytes + unit * COPY_UNIT
        address = self.start + (Int64(row) * self.stride + key) * tiles.element_bytes + unit * COPY_UNIT
        num_bytes = cutlass.min(keys - key, tiles.columns) * tiles.element_bytes - unit * COPY_UNIT
        num_rows = queries - row
        for i in cutlass.range(tiles.rows // step, unroll=4 if tiles.has_spare_registers else 1):
            size = Int32(COPY_UNIT)
            if cutlass.const_expr(not is_inside):
                size = cutlass.min(cutlass.max(num_bytes + (Int32(address) & (COPY_UNIT - 1)), 0), COPY_UNIT)
                size = cutlass.select_(i * step < num_rows, size, 0)
            copy_unit(target + i * (step * tiles.pitch_bytes), address & -COPY_UNIT, size)
            address += step * self.stride * tiles.element_bytes


def unit_address(tile: cute.Tensor, row: int, unit: Int32) -> Int32:
    """Return the shared-memory address of a unit of a row of a swizzled tile.

    Tiles whose rows r with r % 8 = 1 are filled have the 128-byte swizzle. No swizzle moves rows 8 * j.
    """
    element_bytes = tile.element_type.width // 8
    offset = cute.crd2idx((row, unit * (COPY_UNIT // element_bytes)), tile.layout) * element_bytes
    return (tile.iterator.toint() + offset) ^ (row % 8 * COPY_UNIT)


def opaque(value: Int32) -> Int32:
    """Return the same value, hidden from LLVM, which would keep derived values across loops.

    The producer warp has few registers, and consumers of a backward have none left.
    """
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value])


def copy_unit(target: Int32, source: Int64, size: Int32) -> None:
    """Start a lane's copy of `size` bytes of a unit into shared memory; the remaining bytes become 0."""
    text = "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};"
    cute.arch.inline_ptx(text, read_only_args=[target, source, size])
