"""Mask preprocessing: converts a bool mask to a bitmask and block-sparse lists.

The readers are score_stages/bitmask.py and tiling/block_sparse.py. The lists contain the partial blocks and the full
blocks. Two small kernels on the device do the conversion. No step waits for the host, and a CUDA graph converts the
mask contents of each replay.

The mask is (B or 1, Hq or 1, rows, Sk) of any strides, with stride 0 for broadcast dimensions. Each plane is converted
once. `rows` is Sq, or min(Sq, SPARSE_BLOCK) for a mask with equal rows for all queries. States and bitmask then cover
only these rows, while the lists cover all query rows.

Tiles of SPARSE_BLOCK_M_192 queries have separate lists, for blocks of SPARSE_BLOCK_M_192 rows. Such a block overlaps
two block rows of SPARSE_BLOCK queries. The metadata always has space for these lists, but only kernels
with such tiles fill the space.

All metadata lies in a single array of 32-bit values, (B or 1, Hq or 1, metadata_size()), ordered by section and then by
plane. The data for gradients is created only if the array has space for it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Int32, Int64, Uint16

from ...registry.kernel_spec import (
    MMA_ATOM_M,
    ORDER_BLOCK_N,
    ROWS_PER_WARPGROUP,
    SPARSE_BLOCK,
    SPARSE_BLOCK_M_192,
    WARP,
    WARPGROUP,
)
from ...registry.mask_layout import (
    EMPTY,
    FULL,
    INDEX_BITS,
    PARTIAL,
    STATE_BITS,
    STATE_MASK,
    TILE,
    TILE_WORDS,
    WORD_BITS,
)
from ..primitives.fragments import single_bit
from ..primitives.vector_access import vector_at
from ..score_stages.bitmask import shifted
from ..tiling.block_sparse import BlockSparseLists

TILES = SPARSE_BLOCK // TILE
WARPS = WARPGROUP // WARP  # warps of a CTA, equal to the 32-bit words in a row of a block
PITCH = WARPS + 1  # words from row to row in shared memory, chosen so that consecutive rows begin in different banks
BYTES = 16  # bytes of a vector
BEFORE, BEHIND = 3, 4  # extra bytes read before and behind 16 unaligned bytes
PER_ROW = SPARSE_BLOCK // BYTES


def metadata_size(rows: int | Int32, Sq: int | Int32, Sk: int | Int32, *, gradients: bool) -> int | Int32:
    """Return the number of 32-bit values in the metadata of a plane. src/operands/mask.cpp computes the same number."""
    lines, M, N = ((size + SPARSE_BLOCK - 1) // SPARSE_BLOCK for size in (rows, Sq, Sk))
    of_rows, of_columns, tall = (
        (size + unit - 1) // unit for size, unit in ((rows, TILE), (Sk, TILE), (Sq, SPARSE_BLOCK_M_192))
    )
    count = lines * N + 2 * (M + tall) * (N + 1) + of_rows * (of_columns + 1) * TILE_WORDS
    if gradients:
        count += 2 * (N + M * N) + of_columns * (of_rows + 1) * TILE_WORDS + 2 * M * N
    return count


@dataclass(frozen=True)
class MaskMetadata:
    """Mask metadata: the memory layout of all sections.

    Plane (batch, head) has index batch * of_batch + head * of_head.
    """

    start: cute.Pointer
    sizes: tuple[Int32, Int32, Int32]  # planes, Sq, Sk
    rows: Int32  # rows of the mask. If fewer than Sq, all mask rows are equal
    of_batch: Int32
    of_head: Int32
    gradients: cutlass.Boolean

    @classmethod
    def create(cls, mask_metadata: cute.Tensor, rows: Int32, Sq: Int32, Sk: Int32) -> MaskMetadata:
        batches, heads, capacity = mask_metadata.shape
        planes = cutlass.select_(batches > 1, heads, 0), cutlass.select_(heads > 1, 1, 0)
        gradients = capacity > metadata_size(rows, Sq, Sk, gradients=False)
        return cls(mask_metadata.iterator, (batches * heads, Sq, Sk), rows, *planes, gradients)

    @property
    def blocks(self) -> tuple[Int32, Int32]:
        """Numbers of block rows and block columns of a plane."""
        return tuple(cute.ceil_div(size, SPARSE_BLOCK) for size in self.sizes[1:])

    @property
    def tall(self) -> Int32:
        """Number of rows of SPARSE_BLOCK_M_192 blocks of a plane."""
        return cute.ceil_div(self.sizes[1], SPARSE_BLOCK_M_192)

    @property
    def lines(self) -> Int32:
        """Number of block rows with separate states. Later block rows have the state of the last of these rows."""
        return cute.ceil_div(self.rows, SPARSE_BLOCK)

    @property
    def tiles(self) -> tuple[Int32, Int32]:
        """Numbers of tile rows and tile columns of the bitmask of a plane."""
        return tuple(cute.ceil_div(size, TILE) for size in (self.rows, self.sizes[2]))

    def offsets(self) -> tuple[Int64, ...]:
        """Return the offsets of all sections.

        Returns:
            The offsets of the states, the key lists, the key lists of SPARSE_BLOCK_M_192 blocks, the bitmask by rows,
                the query lists, the bitmask by columns, and the accumulation ranks.
        """
        (M, N), (rows, columns), planes = self.blocks, self.tiles, Int64(self.sizes[0])
        lengths = (
            *(planes * self.lines * N, *(2 * planes * m * (N + 1) for m in (M, self.tall))),
            planes * rows * (columns + 1) * TILE_WORDS,
            *(2 * planes * N * (M + 1), planes * columns * (rows + 1) * TILE_WORDS),  # sections for gradients
        )
        return tuple(itertools.accumulate(lengths, initial=Int64(0)))

    def states(self) -> cute.Tensor:
        """Return the states (n,) of all blocks of all planes. STATE_MASK bits of a state are EMPTY, PARTIAL or FULL."""
        return self.vector(0)

    def words(self, transposed: bool) -> cute.Tensor:
        return self.vector(5 if transposed else 3)

    def lists(self, transposed: bool, ordered: bool = False, listed_rows: int = SPARSE_BLOCK) -> BlockSparseLists:
        """Return the block-sparse lists.

        Args:
            transposed: lists of query blocks for each KV block, instead of KV blocks for each query block.
            ordered: include the accumulation ranks.
            listed_rows: query rows of a block (SPARSE_BLOCK or SPARSE_BLOCK_M_192).
        """
        M, N = self.blocks
        section, lines, capacity = (
            (4, N, M) if transposed else (2, self.tall, N) if listed_rows == SPARSE_BLOCK_M_192 else (1, M, N)
        )
        (*_, ranks), start, R = self.offsets(), self.start + self.offsets()[section], self.sizes[0] * lines
        counts, index = cute.make_layout(R), cute.make_layout((R, capacity), stride=(capacity, 1))
        partial = cute.make_tensor(start, counts), cute.make_tensor(start + 2 * R, index)
        full = cute.make_tensor(start + R, counts), cute.make_tensor(start + (2 * R + Int64(R) * capacity), index)
        lists = BlockSparseLists(*partial, *full, self.of_batch * lines, self.of_head * lines)
        if not ordered:
            return lists
        partial_ranks, full_ranks = (self.start + (ranks + which * Int64(R) * capacity) for which in range(2))
        return replace(
            lists, partial_rank=cute.make_tensor(partial_ranks, index), full_rank=cute.make_tensor(full_ranks, index)
        )

    def vector(self, section: int) -> cute.Tensor:
        return cute.make_tensor(self.start + self.offsets()[section], cute.make_layout(1))


class MaskPreprocess:
    """Launcher of mask preprocessing: a kernel with a CTA per block of each plane, then a kernel with a warp per list.

    `tall` also creates the lists of SPARSE_BLOCK_M_192 blocks.
    """

    def __init__(self, *, tall: bool):
        self.tall = tall

    def tall_lists(self, metadata: MaskMetadata) -> Int32:
        """Return the number of SPARSE_BLOCK_M_192 lists of a plane."""
        return metadata.tall if self.tall else Int32(0)

    @cute.jit
    def __call__(self, mask: cute.Tensor, metadata: MaskMetadata, stream: cuda.CUstream):
        (M, N), planes = metadata.blocks, metadata.sizes[0]
        grid = (planes * metadata.lines, N, 1)
        self.pack(mask, metadata).launch(grid=grid, block=(WARPGROUP, 1, 1), stream=stream)
        lists = planes * (M + self.tall_lists(metadata) + cutlass.select_(metadata.gradients, N, 0))
        self.sort(metadata).launch(grid=(lists, 1, 1), block=(WARP, 1, 1), stream=stream)

    @cute.kernel
    def pack(self, mask: cute.Tensor, metadata: MaskMetadata):
        """Store the bitmask and the state of a block. Each CTA handles a block."""
        smem = cutlass.memory.SmemAllocator()
        matrix = cute.make_layout((SPARSE_BLOCK, WARPS), stride=(PITCH, 1))
        bits, transposed_bits = (smem.allocate_tensor(Int32, matrix, 16) for _ in range(2))
        flags = smem.allocate_tensor(Int32, cute.make_layout(WARPS), 16)
        line, n, _ = cute.arch.block_idx()
        plane, m = line // metadata.lines, line % metadata.lines
        self.load(mask, metadata, plane, m, n, bits)
        cute.arch.sync_threads()
        self.store_state(bits, flags, metadata, line, m, n)
        self.store_words(bits, metadata, plane, m, n, transposed=False)
        if metadata.gradients:
            transpose(bits, transposed_bits)
            cute.arch.sync_threads()
            self.store_words(transposed_bits, metadata, plane, n, m, transposed=True)

    @cute.jit
    def load(self, mask: cute.Tensor, metadata: MaskMetadata, plane: Int32, m: Int32, n: Int32, bits: cute.Tensor):
        """Load a block as bits (queries, keys / 32), with 0 outside of the mask.

        There are three paths. If rows allow vector loads, threads load vectors. If keys are contiguous and enough
        further keys lie on either side, threads load 4-byte words. Otherwise each warp loads 32 columns of a row at a
        time.
        """
        heads, rows, (_, _, Sk) = mask.shape[1], metadata.rows, metadata.sizes
        batch, head, row, column = plane // heads, plane % heads, m * SPARSE_BLOCK, n * SPARSE_BLOCK
        thread, aligned = cute.arch.thread_idx()[0], mask.iterator.toint() % BYTES == 0
        for stride in mask.stride[:3]:
            aligned = aligned & (stride % BYTES == 0)
        halves = cute.make_tensor(
            cute.recast_ptr(bits.iterator, dtype=Uint16),
            cute.make_layout((SPARSE_BLOCK, PER_ROW), stride=(2 * PITCH, 1)),
        )
        dense, has_margin = mask.stride[3] == 1, (column >= BEFORE) & (column + SPARSE_BLOCK + BEHIND <= Sk)
        if dense & aligned & (column + SPARSE_BLOCK <= Sk):
            for i in cutlass.range_constexpr(SPARSE_BLOCK * PER_ROW // WARPGROUP):
                r, c = (i * WARPGROUP + thread) // PER_ROW, thread % PER_ROW
                row_bits = Int32(0)
                if row + r < rows:
                    row_bits = bits_of_bytes(mask, (batch, head, row + r, column + c * BYTES))
                halves[r, c] = row_bits.to(Uint16)
        elif dense & has_margin:
            for i in cutlass.range_constexpr(SPARSE_BLOCK * PER_ROW // WARPGROUP):
                r, c = (i * WARPGROUP + thread) // PER_ROW, thread % PER_ROW
                safe_row = cutlass.min(row + r, rows - 1)
                start = mask.iterator + offset_of(mask, (batch, head, safe_row, column + c * BYTES))
                row_bits = cutlass.select_(row + r < rows, bits_of_words(bytes_at(start)), Int32(0))
                halves[r, c] = Int32(row_bits).to(Uint16)
        else:
            column += thread
            for r in cutlass.range(SPARSE_BLOCK, unroll=8):
                value = Int32(0)
                if row + r < rows:
                    if column < Sk:
                        value = mask[batch, head, row + r, column].to(Int32)
                ballot = cute.arch.vote_ballot_sync(value != 0)
                if thread % WARP == 0:
                    bits[r, thread // WARP] = ballot

    @cute.jit
    def store_state(
        self, bits: cute.Tensor, flags: cute.Tensor, metadata: MaskMetadata, line: Int32, m: Int32, n: Int32
    ):  # fmt: skip
        """Compute and store the state of a block. Each thread examines a row. Rows beyond the mask are ignored."""
        thread = cute.arch.thread_idx()[0]
        any_bits, all_bits = Int32(0), Int32(-1)
        for word in cutlass.range_constexpr(WARPS):
            any_bits, all_bits = any_bits | bits[thread, word], all_bits & bits[thread, word]
        row_exists = m * SPARSE_BLOCK + thread < metadata.rows
        has_visible, has_masked = (
            cute.arch.vote_any_sync(row_exists & condition) for condition in (any_bits != 0, all_bits != -1)
        )
        flags[thread // WARP] = cutlass.select_(has_visible, 1, 0) + cutlass.select_(has_masked, 2, 0)
        cute.arch.sync_threads()
        if thread == 0:
            upper, lower = flags[0] | flags[1], flags[2] | flags[3]
            block_flags = upper | lower
            masked = PARTIAL | (upper & 1 | (lower & 1) << 1) << STATE_BITS
            state = cutlass.select_(block_flags == 1, Int32(FULL), masked)
            state = cutlass.select_((block_flags & 1) == 0, Int32(EMPTY), state)
            cute.arch.store(metadata.states().iterator + (Int64(line) * metadata.blocks[1] + n), state)

    @cute.jit
    def store_words(
        self, bits: cute.Tensor, metadata: MaskMetadata, plane: Int32, line: Int32, block: Int32,
        transposed: cutlass.Constexpr[bool],
    ):  # fmt: skip
        """Store the bitmask tiles of a block.

        Args:
            bits: bits of the block.
            metadata: the mask metadata.
            plane: index of the plane.
            line: index of the block row.
            block: index of the block in the row.
            transposed: store the transposed bitmask. `line` and `block` then count columns and rows.
        """
        rows, columns = reversed(metadata.tiles) if transposed else metadata.tiles
        words, thread = metadata.words(transposed), cute.arch.thread_idx()[0]
        row = thread // WARP * MMA_ATOM_M + thread % WARP // 4
        for i, j in [(i, j) for i in range(TILES) for j in range(TILES)]:
            word = Int32(0)
            for half, r in [(half, r) for half in range(2) for r in range(2)]:
                of_row = bits[i * TILE + row + 8 * r, 2 * j + half]
                word = word | (every_fourth_pair(of_row >> (thread % 4 * 2)) << (WORD_BITS // 2 * half + r))
            tile_row = plane * rows + line * TILES + i
            if line * TILES + i < rows and block * TILES + j <= columns:
                offset = (Int64(tile_row) * (columns + 1) + block * TILES + j) * TILE_WORDS + thread
                cute.arch.store(words.iterator + offset, word)
            # The tile behind the last tile of a row is zero. Masks with equal rows for all queries are an exception:
            # there the extra tile of a column equals each tile of the column.
            if cutlass.const_expr(j == TILES - 1):
                extra_word = Int32(0)
                if cutlass.const_expr(transposed):
                    extra_word = cutlass.select_(metadata.rows < metadata.sizes[1], word, extra_word)
                if line * TILES + i < rows and (block + 1) * TILES == columns:
                    offset = (Int64(tile_row) * (columns + 1) + columns) * TILE_WORDS + thread
                    cute.arch.store(words.iterator + offset, extra_word)

    @cute.kernel
    def sort(self, metadata: MaskMetadata):
        """Build lists: KV blocks of query blocks, then of SPARSE_BLOCK_M_192 blocks, then query blocks of KV blocks."""
        (M, N), lines, planes = metadata.blocks, metadata.lines, metadata.sizes[0]
        list_idx = cute.arch.block_idx()[0]
        tall_idx = list_idx - planes * M
        key_idx = tall_idx - planes * self.tall_lists(metadata)
        if list_idx < planes * M:
            self.build_row_list(metadata, list_idx, list_idx // M, list_idx % M * SPARSE_BLOCK, SPARSE_BLOCK)
        elif key_idx >= 0:
            first, steps = Int64(key_idx // N) * lines * N + key_idx % N, (N, lines, M)
            self.build_list(metadata.lists(True), metadata.states(), key_idx, (first, first), steps, Int32(0), 0)
        elif cutlass.const_expr(self.tall):
            self.build_row_list(
                metadata,
                tall_idx,
                tall_idx // metadata.tall,
                tall_idx % metadata.tall * SPARSE_BLOCK_M_192,
                SPARSE_BLOCK_M_192,
            )

    @cute.jit
    def build_row_list(
        self, metadata: MaskMetadata, list_idx: Int32, plane: Int32, begin: Int32, listed_rows: cutlass.Constexpr[int]
    ):
        """Build the list of `listed_rows` query rows of a plane, from both block rows with these query rows."""
        (_, N), lines = metadata.blocks, metadata.lines
        rows = begin // SPARSE_BLOCK, (begin + listed_rows - 1) // SPARSE_BLOCK
        first = tuple((Int64(plane) * lines + cutlass.min(row, lines - 1)) * N for row in rows)
        lists, steps, half = (
            metadata.lists(False, listed_rows=listed_rows),
            (Int32(1), N, N),
            begin % SPARSE_BLOCK // TILE,
        )
        self.build_list(lists, metadata.states(), list_idx, first, steps, half, listed_rows)

    @cute.jit
    def build_list(
        self, lists: BlockSparseLists, states: cute.Tensor, line: Int32, first: tuple[Int64, Int64],
        steps: tuple[Int32, Int32, Int32], half: Int32, listed_rows: cutlass.Constexpr[int],
    ):  # fmt: skip
        """Build a list from the states of one or two block rows.

        If two states are equal, the block gets their common state. Otherwise the block is partial. A list of KV blocks
        is never empty: without visible keys, the list contains a single block, whose bitmask masks all scores.

        Args:
            lists: the block-sparse lists.
            states: states of all blocks.
            line: index of the list.
            first: indices of the first states of both block rows.
            steps: distance between the states of a row, number of states, and number of blocks. Blocks behind the last
                state use the last state.
            half: index of the first TILE rows within the first block row.
            listed_rows: query rows of a block, or 0 for lists of query blocks.
        """
        stride, num_states, count = steps
        lane, start = cute.arch.lane_idx(), Int64(line) * lists.partial.shape[1]
        before = (1 << lane) - 1
        num_partial, num_full = Int32(0), Int32(0)
        for begin in cutlass.range(0, count, WARP, unroll=1):
            nth, lane_kind, entry = begin + lane, Int32(EMPTY), begin + lane
            if nth < count:
                offset = Int64(cutlass.min(nth, num_states - 1)) * stride
                state, second_state = (
                    cute.arch.load(states.iterator + (first_state + offset), Int32) for first_state in first
                )
                lane_kind = cutlass.select_(
                    (state ^ second_state) & STATE_MASK == 0, state & STATE_MASK, Int32(PARTIAL)
                )
                if cutlass.const_expr(listed_rows == SPARSE_BLOCK_M_192):
                    visible_halves = seen_halves(state) | seen_halves(second_state) << 2
                    entry = nth | (visible_halves >> half & (1 << SPARSE_BLOCK_M_192 // TILE) - 1) << INDEX_BITS
            partial_lanes, full_lanes = (
                cute.arch.vote_ballot_sync(lane_kind == block_kind) for block_kind in (PARTIAL, FULL)
            )
            if lane_kind == PARTIAL:
                cute.arch.store(
                    lists.partial.iterator + (start + num_partial + cute.arch.popc(partial_lanes & before)), entry
                )
            if lane_kind == FULL:
                cute.arch.store(lists.full.iterator + (start + num_full + cute.arch.popc(full_lanes & before)), nth)
            num_partial, num_full = num_partial + cute.arch.popc(partial_lanes), num_full + cute.arch.popc(full_lanes)
        if lane == 0:
            if num_partial + num_full == 0:  # block iterators read the first entry even of an empty list
                cute.arch.store(lists.partial.iterator + start, Int32(0))
                cute.arch.store(lists.full.iterator + start, Int32(0))
                num_partial = Int32(1 if listed_rows > 0 else 0)
            cute.arch.store(lists.partial_count.iterator + line, num_partial)
            cute.arch.store(lists.full_count.iterator + line, num_full)


class AccumulationRanks:
    """Launcher of the kernel for accumulation ranks, required by a deterministic backward (BlockSparseLists).

    The rank of an entry in a list of query blocks is the number of later ranges of ORDER_BLOCK_N keys that list the
    same query block.
    """

    @cute.jit
    def __call__(self, metadata: MaskMetadata, stream: cuda.CUstream):
        M, N = metadata.blocks
        grid = (metadata.sizes[0] * N, cute.ceil_div(M, WARPGROUP), 1)
        self.count(metadata).launch(grid=grid, block=(WARPGROUP, 1, 1), stream=stream)

    @cute.kernel
    def count(self, metadata: MaskMetadata):
        """Count the ranks of a list.

        Each CTA handles a part of a list, and each thread handles an entry of either kind.
        """
        lists = metadata.lists(True, ordered=True)
        line, part, _ = cute.arch.block_idx()
        entry = part * WARPGROUP + cute.arch.thread_idx()[0]
        self.count_later(metadata, line, entry, lists.partial_count, lists.partial, lists.partial_rank)
        self.count_later(metadata, line, entry, lists.full_count, lists.full, lists.full_rank)

    @cute.jit
    def count_later(
        self, metadata: MaskMetadata, line: Int32, entry: Int32, count: cute.Tensor, index: cute.Tensor,
        ranks: cute.Tensor
    ):  # fmt: skip
        (M, N), lines, states = metadata.blocks, metadata.lines, metadata.states()
        offset = Int64(line) * M + entry
        if entry < cute.arch.load(count.iterator + line, Int32):
            m = cutlass.min(cute.arch.load(index.iterator + offset, Int32), lines - 1)
            first, later = (Int64(line // N) * lines + m) * N, Int32(0)
            for n in cutlass.range(line % N + 1, N, unroll=4):
                state = cute.arch.load(states.iterator + (first + n), Int32)
                shares = cutlass.min(
                    cute.ceil_div(metadata.sizes[2] - n * SPARSE_BLOCK, ORDER_BLOCK_N), SPARSE_BLOCK // ORDER_BLOCK_N
                )
                later += cutlass.select_(state == EMPTY, Int32(0), shares)
            cute.arch.store(ranks.iterator + offset, later)


def seen_halves(state: Int32) -> Int32:
    """Return a bit for each TILE rows of a block, set if a key is visible to the rows."""
    return cutlass.select_(state == FULL, Int32(3), state >> STATE_BITS)


def bits_of_bytes(mask: cute.Tensor, place: tuple[Int32, Int32, Int32, Int32]) -> Int32:
    """Return a bit for each of 16 mask bytes: 1 unless the whole byte is 0.

    A bool view of other data may contain any byte value.
    """
    return bits_of_words(vector_at(mask.iterator + offset_of(mask, place), Int32, BYTES // 4).load())


def offset_of(mask: cute.Tensor, place: tuple[Int32, Int32, Int32, Int32]) -> Int64:
    return sum(Int64(index) * stride for index, stride in zip(place, mask.stride, strict=True))


def bytes_at(start: cute.Pointer) -> list[Int32]:
    """Return 16 bytes from any address, in four words.

    Up to BEFORE bytes before the address and BEHIND bytes behind the 16 bytes are read.
    """
    first = start.toint() & 3
    words = cute.make_ptr(Int32, start.toint() - first, cute.AddressSpace.gmem, assumed_align=4)
    aligned_words = [cute.arch.load(words + i, Int32) for i in range(BYTES // 4 + 1)]
    return [shifted(low, high, Int32(first) * 8) for low, high in itertools.pairwise(aligned_words)]


def bits_of_words(four: cute.TensorSSA | list[Int32]) -> Int32:
    """Return a bit for each of 16 bytes in four words."""
    bits = Int32(0)
    for i in range(BYTES // 4):
        low = (four[i] & 0x7F7F7F7F) + 0x7F7F7F7F  # the addition carries into the top bit of each nonzero byte
        ones = (low | four[i]) >> 7 & 0x01010101
        # Each product of two powers of two lands at a separate bit. Bits 24 to 27 hold the four results.
        bits = bits | ((ones * 0x01020408 >> 24 & 15) << 4 * i)
    return bits


def every_fourth_pair(bits: Int32) -> Int32:
    """Return bits 0 and 1 of each byte, in sequence, at every other position."""
    bits = bits & 0x03030303
    spread = (bits | bits << 1) & 0x05050505
    spread = (spread | spread >> 4) & 0x00FF00FF
    return (spread | spread >> 8) & 0xFFFF


@cute.jit
def transpose(bits: cute.Tensor, transposed_bits: cute.Tensor):
    """Transpose the bits of a block. Each warp handles 32 rows."""
    thread, lane = cute.arch.thread_idx()[0], cute.arch.lane_idx()
    for word in cutlass.range_constexpr(WARPS):
        of_row, of_column = bits[thread, word], Int32(0)
        for bit in cutlass.range_constexpr(WARP):
            ballot = cute.arch.vote_ballot_sync((of_row & single_bit(bit)) != 0)
            of_column = cutlass.select_(lane == bit, ballot, of_column)
        transposed_bits[word * WARP + lane, thread // WARP] = of_column


assert ROWS_PER_WARPGROUP == TILE and TILE_WORDS == WARPGROUP
