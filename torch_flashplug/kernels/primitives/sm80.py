"""Primitives of sm_80, available on every later GPU, too: swizzled shared-memory tiles, cp.async, ldmatrix, mma.sync.

mma.sync works on slabs of 16 rows.

A tile lies in shared memory in panels of 64 columns, or of 32 columns if the head dim has an odd number of such panels.
The rows of a panel are consecutive, with 128 or 64 bytes each. The swizzle permutes the 16-byte units of a row by the
row index. Neither the eight rows of an ldmatrix read nor the eight rows of a cp.async write then share a bank. The
permutation is an exclusive or, so a thread needs one address per pair of units of a panel row. Everything else is a
constant offset.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.base_dsl import Arch
from cutlass.cute.nvgpu import warp

from ...registry.kernel_spec import MMA_ATOM_M, WARP
from .dtype import Element
from .fragments import OperandA, rows_and_columns, target_from
from .vector_access import vector_at

VECTOR = 8  # elements of a 16-byte unit
VECTOR_BYTES = 16
PAIR = 16  # columns of an ldmatrix: two units
NARROW, WIDE = 32, 64  # columns of a panel

Accumulators = tuple[cute.Tensor, ...]  # an accumulator per slab of rows
Fragments = tuple[cute.Tensor, ...]  # a fragment per slab of rows, for 16 of the inner dimension


@dataclass(frozen=True)
class SmemTile:
    """Tile of rows x columns 16-bit elements in shared memory."""

    start: Int32  # address, a multiple of 128
    rows: int
    columns: int

    @property
    def panel(self) -> int:
        """Columns of a panel."""
        return NARROW if self.columns % WIDE else WIDE

    @property
    def row_bytes(self) -> int:
        return self.panel * 2

    @property
    def panel_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def bytes(self) -> int:
        return self.columns // self.panel * self.panel_bytes

    def unit(self, row: Int32, unit: Int32) -> Int32:
        """Return the address of a 16-byte unit of the first panel.

        The same row of a further panel is a multiple of `panel_bytes` away. The same unit of row + 8 n is 8 n *
        `row_bytes` away.
        """
        swizzle = row % 8 if self.panel == WIDE else row // 2 % 4
        return self.start + row * self.row_bytes + (unit ^ swizzle) * VECTOR_BYTES

    def at_offset(self, num_bytes: Int32 | int) -> SmemTile:
        """Return an equal tile, `num_bytes` further on."""
        return SmemTile(self.start + num_bytes, self.rows, self.columns)

    def offset(self, row: int, column: int) -> int:
        """Return the offset from a lane's address to a row of a slab and the panel that holds the column."""
        return row * self.row_bytes + column // self.panel * self.panel_bytes


@dataclass(frozen=True)
class LdmatrixView:
    """A lane's view of a tile for ldmatrix, which loads four 8 x 8 matrices: 16 rows and 16 columns.

    Without transposition, the matrices are an operand A with the rows of the tile as rows, or two operands B with the
    rows of the tile as columns. With transposition, the matrices are an operand A with the columns of the tile as rows,
    or two operands B with the columns of the tile as columns.
    """

    tile: SmemTile
    addresses: tuple[Int32, ...]  # an address per pair of units of a panel row
    atom: cute.CopyAtom

    @classmethod
    def create(
        cls, tile: SmemTile, dtype, operand: str, transposed: bool = False, first_row: Int32 | int = 0
    ) -> LdmatrixView:
        """Create the view.

        Args:
            tile: the tile.
            dtype: element type.
            operand: "A" or "B".
            transposed: load transposed matrices.
            first_row: first row, a multiple of 8.
        """
        lane = cute.arch.lane_idx()
        if (operand == "A") != transposed:  # the second matrix is eight rows below the first
            row, unit = lane % 16, lane // 16
        else:  # or to the right of the first
            row, unit = lane % 8 + lane // 16 * 8, lane // 8 % 2
        start = tile.unit(first_row + row, unit)
        addresses = tuple(start ^ (32 * pair) for pair in range(tile.panel // PAIR))
        return cls(tile, addresses, cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transposed, 4), dtype))

    def retarget(self, tile: SmemTile, transposed: bool) -> LdmatrixView:
        """Return a view of the same locations in a second tile with equally wide panels.

        If `transposed` differs, rows and columns are exchanged: an operand A becomes operands B. All addresses derive
        from a single address, so that a loop over changing tiles keeps a single register.
        """
        address = self.addresses[0] + (tile.start - self.tile.start)
        opaque_address = cute.arch.inline_ptx(
            "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[address]
        )
        addresses = tuple(opaque_address ^ (32 * pair) for pair in range(len(self.addresses)))
        return LdmatrixView(
            tile, addresses, cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transposed, 4), self.atom.value_type)
        )

    def rebase(self, tile: SmemTile) -> LdmatrixView:
        """Return a view of the same locations in a tile at a constant distance."""
        away = tile.start - self.tile.start
        return LdmatrixView(tile, tuple(a + away for a in self.addresses), self.atom)

    def skip_rows(self, rows: Int32) -> LdmatrixView:
        """Return a view in which rows count from `rows` on, a multiple of 8."""
        return LdmatrixView(self.tile, tuple(a + rows * self.tile.row_bytes for a in self.addresses), self.atom)

    def panel_slice(self, nth: Int32, pairs: int) -> LdmatrixView:
        """Return a view of part number `nth` of every panel row, where a part has `pairs` pairs of units.

        Columns count from the start of the part.
        """
        swizzle = nth * (32 * pairs)
        return LdmatrixView(self.tile, tuple((self.addresses[0] ^ swizzle) ^ (32 * p) for p in range(pairs)), self.atom)

    def fetch(self, row: int, column: int, fragment: cute.Tensor) -> None:
        """Load 16 rows and 16 columns from (row, column) on into `fragment`, created by `allocate_fragment`."""
        address = self.addresses[column % self.tile.panel // PAIR] + self.tile.offset(row, column)
        pointer = cute.make_ptr(fragment.element_type, address, cute.AddressSpace.smem, assumed_align=VECTOR_BYTES)
        cute.copy(self.atom, cute.make_tensor(pointer, cute.make_layout((VECTOR, 1))), fragment)


def allocate_fragment(dtype) -> cute.Tensor:
    """Return registers for one ldmatrix."""
    return cute.make_rmem_tensor((VECTOR, 1), dtype)


@dataclass(frozen=True)
class MmaProduct:
    """The product acc += A B on a warp, for slabs of 16 rows with an accumulator ((2, 2), 1, columns / 8) each."""

    mma: cute.TiledMma
    dtype: type[cutlass.Numeric]

    @classmethod
    def create(cls, dtype) -> MmaProduct:
        return cls(cute.make_tiled_mma(warp.MmaF16BF16Op(dtype, Float32, (16, 8, 16))), dtype)

    def step(self, accs: Accumulators, lefts: Fragments, right: cute.Tensor, first: int) -> None:
        """Multiply 16 of the inner dimension.

        Args:
            accs: an accumulator per slab.
            lefts: left fragments (8,), one per slab.
            right: right fragment (8,), for the 16 columns from `first` on.
            first: first column.
        """
        b = cute.make_tensor(right.iterator, cute.make_layout(((2, 2), 2), stride=((1, 2), 4)))
        for acc, left in zip(accs, lefts, strict=True):
            a = cute.make_tensor(left.iterator, cute.make_layout(((2, 2, 2), 1), stride=((1, 2, 4), 0)))
            layout = cute.make_layout(((2, 2), 1, 2), stride=((1, 2), 0, 4))
            acc_columns = cute.make_tensor(acc.iterator + first // 2, layout)
            cute.gemm(self.mma, acc_columns, a, b, acc_columns)

    def scores(self, accs: Accumulators, left: LdmatrixView, right: LdmatrixView, first: int = 0) -> None:
        """Compute acc = A B^T for each slab.

        A is the slab's rows of `left` (an operand A). B is as many rows of `right` (an operand B), from `first` on, as
        acc has columns.
        """
        lefts, fragment = tuple(allocate_fragment(self.dtype) for _ in accs), allocate_fragment(self.dtype)
        for acc in accs:
            acc.fill(0.0)
        for column in range(0, left.tile.columns, PAIR):
            for s, left_fragment in enumerate(lefts):
                left.fetch(s * MMA_ATOM_M, column, left_fragment)
            for row in range(0, cute.size(accs[0]) * 2, MMA_ATOM_M):
                right.fetch(first + row, column, fragment)
                self.step(accs, lefts, fragment, row)

    def accumulate(self, accs: Accumulators, lefts: Fragments, right: LdmatrixView, row: int) -> None:
        """Compute acc += A B for 16 rows of B, from `row` on, and all columns of B.

        Args:
            accs: an accumulator per slab.
            lefts: left fragments (8,), one per slab.
            right: view of B, transposed, as an operand B.
            row: first row of B.
        """
        fragment, first = allocate_fragment(self.dtype), 0
        for panel in range(0, right.tile.columns, right.tile.panel):
            for pair in range(len(right.addresses)):
                right.fetch(row, panel + pair * PAIR, fragment)
                self.step(accs, lefts, fragment, first)
                first += PAIR


def accumulator(columns: int) -> cute.Tensor:
    """Return a zeroed fp32 accumulator of 16 rows on a warp."""
    acc = cute.make_rmem_tensor(((2, 2), 1, columns // 8), Float32)
    acc.fill(0.0)
    return acc


@dataclass(frozen=True)
class SmemCopier:
    """Copies of tiles by all threads of a CTA or of a warp.

    Each thread copies a unit of a panel row, with a fixed row step.
    """

    threads: int
    element: Element
    elementwise: bool  # copy element by element, for any addresses and strides

    def partition(self, tile: SmemTile, thread: Int32) -> tuple[Int32, Int32, int]:
        """Return the thread's row and unit, and the number of rows to the thread's next row."""
        units = tile.panel // VECTOR
        return thread // units, thread % units, self.threads // units

    @cute.jit
    def load(self, gX: cute.Tensor, first_row: Int32, tile: SmemTile, all_rows_exist: cutlass.Constexpr[bool] = False):
        """Start loading rows of gX (rows, columns) into shared memory, with zeros beyond the ends.

        Args:
            gX: global tensor.
            first_row: first row to load.
            tile: destination.
            all_rows_exist: True if all rows of the tile exist in gX.
        """
        thread = cute.arch.lane_idx() if self.threads == WARP else cute.arch.thread_idx()[0]
        row, unit, step = self.partition(tile, thread)
        unit_address, source = tile.unit(row, unit), first_row + row
        if cutlass.const_expr(self.elementwise):
            # The loop is not unrolled: eight loads in flight are enough for the registers.
            for r in cutlass.range(0, tile.rows - row, step, unroll=1):
                for p in cutlass.range(tile.columns // tile.panel, unroll=1):
                    target = unit_address + r * tile.row_bytes + p * tile.panel_bytes
                    self.gather(gX, source + r, unit * VECTOR + p * tile.panel, target)
        else:
            start = gX.iterator.toint() + (Int64(source) * gX.stride[0] + unit * VECTOR) * 2
            for r in cutlass.range_constexpr(0, tile.rows, step):
                row_exists = cutlass.Boolean(True) if all_rows_exist else source < gX.shape[0] - r
                # The row step of a warp may be four; bit 2 of the row index then changes.
                swizzled = unit_address ^ (r % 8 * VECTOR_BYTES)
                row_address, target = start + gX.stride[0] * (2 * r), swizzled + r * tile.row_bytes
                if cutlass.const_expr(r + step <= tile.rows):
                    copy_row(row_address, target, tile, gX.shape[1] - unit * VECTOR, row_exists)
                elif row < tile.rows - r:  # the last rows do not need all threads
                    copy_row(row_address, target, tile, gX.shape[1] - unit * VECTOR, row_exists)

    @cute.jit
    def gather(self, gX: cute.Tensor, row: Int32, column: Int32, target: Int32):
        """Load a unit, element by element. Addresses beyond the ends are replaced by the last addresses inside."""
        rows, columns = gX.shape
        unit = cute.make_rmem_tensor((VECTOR,), self.element.dtype)
        for i in cutlass.range_constexpr(VECTOR):
            value = gX[cutlass.min(row, rows - 1), cutlass.min(column + i, columns - 1)]
            is_inside = (row < rows) & (column + i < columns)
            unit[i] = cutlass.select_(is_inside, value, self.element.dtype(0.0))
        cute.autovec_copy(unit, shared_vector(target, self.element.dtype))

    @cute.jit
    def store(self, acc: cute.Tensor, gX: cute.Tensor, row: Int32, tile: SmemTile, slab: Int32):
        """Store a warp's accumulator in 16 bits to rows of gX from `row` on, through the warp's slab of the tile.

        No further warp uses the slab at this time.
        """
        values = rows_and_columns(acc)
        if cutlass.const_expr(self.elementwise):
            store_elements(values, gX, row)
        else:
            cute.arch.sync_warp()  # all lanes have finished reading the slab
            store_panel_slice(acc, tile, slab * MMA_ATOM_M, 0, tile.panel // PAIR, self.element)
            cute.arch.sync_warp()
            lane, units = cute.arch.lane_idx(), tile.panel // VECTOR
            r0, unit = lane // units, lane % units
            rows, columns = gX.shape
            for r in cutlass.range_constexpr(0, MMA_ATOM_M, WARP // units):
                start = tile.unit(slab * MMA_ATOM_M + r0 + r, unit)
                for p in cutlass.range_constexpr(tile.columns // tile.panel):
                    column = unit * VECTOR + p * tile.panel
                    if row + r0 + r < rows and column < columns:
                        target = vector_at(gX[row + r0 + r, None].iterator + column, self.element.dtype, VECTOR)
                        cute.autovec_copy(shared_vector(start + p * tile.panel_bytes, self.element.dtype), target)

    @cute.jit
    def store_tile(self, tile: SmemTile, gX: cute.Tensor, first_row: Int32):
        """Store a tile to the existing rows of gX from `first_row` on."""
        row, unit, step = self.partition(tile, cute.arch.thread_idx()[0])
        rows, columns = gX.shape
        for r in cutlass.range(row, tile.rows, step, unroll=1):
            for p in cutlass.range_constexpr(tile.columns // tile.panel):
                source = shared_vector(tile.unit(r, unit) + p * tile.panel_bytes, self.element.dtype)
                column = unit * VECTOR + p * tile.panel
                if cutlass.const_expr(self.elementwise):
                    for c in cutlass.range_constexpr(VECTOR):
                        if first_row + r < rows and column + c < columns:
                            gX[first_row + r, column + c] = source[c]
                elif first_row + r < rows and column < columns:
                    target = vector_at(gX[first_row + r, None].iterator + column, self.element.dtype, VECTOR)
                    cute.autovec_copy(source, target)


@cute.jit
def copy_row(source: Int64, target: Int32, tile: SmemTile, columns: Int32, row_exists: cutlass.Boolean):
    """Copy a thread's units of a row, one unit per panel, from a global to a shared address.

    The units are zeros if the row does not exist, or has too few columns from the thread's first column on.

    Args:
        source: global address.
        target: shared-memory address.
        tile: the destination tile.
        columns: number of columns from the thread's first column on.
        row_exists: whether the row exists.
    """
    for p in cutlass.range_constexpr(tile.columns // tile.panel):
        size = cutlass.select_(row_exists & (p * tile.panel < columns), Int32(VECTOR_BYTES), Int32(0))
        copy_unit(source + p * tile.row_bytes, target + p * tile.panel_bytes, size)


def copy_unit(source: Int64, target: Int32, size: Int32) -> None:
    """Start copying 16 bytes from global to shared memory. The last 16 - size bytes are not read and become zero."""
    text = "cp.async.cg.shared.global.L2::128B [{$r0}], [{$r1}], 16, {$r2};"
    cute.arch.inline_ptx(text, read_only_args=[target, source, size])


def shared_vector(address: Int32, dtype) -> cute.Tensor:
    """Return a unit of shared memory as a tensor."""
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=VECTOR_BYTES)
    return cute.make_tensor(pointer, cute.make_layout(VECTOR))


@cute.jit
def store_elements(values: cute.Tensor, gX: cute.Tensor, row: Int32):
    """Store a warp's 16 rows, (2, columns) per thread, to rows of gX from `row` on."""
    lane = cute.arch.lane_idx()
    rows, columns = gX.shape
    for r in cutlass.range_constexpr(2):
        for c in cutlass.range_constexpr(cute.size(values, mode=[1])):
            coord = row + lane // 4 + 8 * r, c // 2 * 8 + lane % 4 * 2 + c % 2
            if coord[0] < rows and coord[1] < columns:
                gX[coord] = values[r, c].to(gX.element_type)


def store_panel_slice(
    acc: cute.Tensor, tile: SmemTile, first_row: Int32, nth: Int32 | int, pairs: int, element: Element
) -> None:
    """Write a warp's 16 rows in 16 bits into part number `nth` of every panel of a tile.

    A part is `pairs` pairs of units wide.
    """
    values, lane = rows_and_columns(acc), cute.arch.lane_idx()
    for u in range(2 * pairs):
        start = tile.unit(first_row + lane // 4, nth * (2 * pairs) + u) + lane % 4 * 4
        for p in range(tile.columns // tile.panel):
            for r in range(2):
                c = 2 * (p * 2 * pairs + u)
                pair_address = start + tile.offset(8 * r, p * tile.panel)
                store_packed(pair_address, element.pack_pair(values[r, c], values[r, c + 1]))


def store_operand(weights: OperandA, tile: SmemTile, first_row: Int32, first: int) -> None:
    """Write a warp's 16 rows, already in 16 bits, into a tile with a single panel, from column `first` on."""
    lane = cute.arch.lane_idx()
    start = tile.unit(first_row + lane // 4, 0) + lane % 4 * 4
    for i in range(cute.size(weights.pairs)):
        store_packed((start ^ (first * 2 + i // 2 * VECTOR_BYTES)) + tile.offset(i % 2 * 8, 0), weights.pairs[i])


def store_packed(address: Int32, pair: Int32) -> None:
    """Write two elements into shared memory."""
    cute.arch.store(cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=4), pair)


@cute.jit
def wait_for_copies(num_pending: cutlass.Constexpr[int] = 0):
    """Wait for all copies into shared memory, except for the last `num_pending` groups, and synchronize the CTA.

    Every thread calls `wait_for_copies`. Afterwards the copied data is visible to all threads, and no thread still
    reads the previous data.
    """
    cute.arch.cp_async_commit_group()
    cute.arch.cp_async_wait_group(num_pending)
    cute.arch.sync_threads()


def add_quad(target: Int64, quad: tuple[Float32, ...]) -> None:
    """Add four floats to 16-byte aligned global memory.

    A single instruction does so if the target supports vector reductions.
    """
    if target_from(Arch.sm_90):
        text = "red.relaxed.gpu.global.add.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};"
        cute.arch.inline_ptx(text, read_only_args=[target, *quad])
    else:
        for i, value in enumerate(quad):
            text = f"red.relaxed.gpu.global.add.f32 [{{$r0}} + {4 * i}], {{$r1}};"
            cute.arch.inline_ptx(text, read_only_args=[target, value])


@cute.jit
def spin_until_count(counter: cute.Pointer, expected: Int32):
    """Wait until a counter reaches `expected`.

    In contrast to workspace.wait_for_count, there is no load ahead of the loop. With such a load, the deterministic
    backward of D 192 spills registers.
    """
    while cute.arch.load(counter, Int32, sem="acquire", scope="gpu") < expected:
        pass
