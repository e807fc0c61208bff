"""Hopper primitives: shared-memory pipelines, the tile scheduler, the warpgroup order barrier, and wgmma products.

A product covers the 64 rows of a warpgroup. All waits and arrivals of a kernel go through `Pipeline`,
`DynamicTileScheduler`, `WarpgroupOrder`, `sync_warpgroup` and `sync_warpgroups`. A kernel never touches a barrier
directly.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.tensor_utils import LayoutEnum

from ...registry.kernel_spec import ROWS_PER_WARPGROUP, WARP, WARPGROUP
from .dtype import Element
from .fragments import rows_and_columns

ROWS_PER_WARP = 16  # rows of a warp's part of an output, stored by a single TMA instruction per 64 columns
EVICT_NORMAL, EVICT_FIRST = 0x1000000000000000, 0x12F0000000000000  # L2 cache policies of TMA loads
# An integer up to 2^22, added to the bits FLOAT_OF_ZERO and read as fp32, is the integer plus OFFSET. The conversion
# costs nothing. An SM executes only half as many conversion instructions as multiplications.
FLOAT_OF_ZERO, OFFSET = 0x4B400000, 1.5 * 2.0**23
TILE_INDEX_STAGES = 2  # pipeline stages for tile indices on the way from a producer warp to the consumers


@dataclass(frozen=True)
class Pipeline:
    """A multi-stage shared-memory pipeline, as CUTLASS PipelineTmaAsync.

    Producer warps fill the stages, mostly by TMA. Consumer warpgroups read and release the stages. Stage index and
    phase follow from the running count of blocks, so there is no pipeline state to carry.

    Each stage has two mbarriers. `full` completes when the bytes have landed. `empty` completes when every consumer
    warp has released the stage.
    """

    full: cute.Pointer
    empty: cute.Pointer
    stages: int
    stage_bytes: int

    @classmethod
    def create(cls, smem: cutlass.memory.SmemAllocator, stages: int, stage_bytes: int) -> Pipeline:
        barriers = smem.allocate_array(cutlass.Int64, 2 * stages)
        return cls(barriers, barriers + stages, stages, stage_bytes)

    def sub_pipeline(self, index: Int32, stages: int) -> Pipeline:
        """Return pipeline number `index` of several pipelines created together.

        Args:
            index: number of the pipeline.
            stages: stages of each pipeline.
        """
        return Pipeline(self.full + index * stages, self.empty + index * stages, stages, self.stage_bytes)

    def init(self, consumer_warps: int, producer_warps: int):
        """Initialize the barriers. A single thread calls `init` before any thread waits."""
        for stage in range(self.stages):
            cute.arch.mbarrier_init(self.full + stage, producer_warps)
            cute.arch.mbarrier_init(self.empty + stage, consumer_warps)

    @property
    def power_of_two(self) -> bool:
        """True if bit operations can replace the signed division by the number of stages.

        The hottest loop is four instructions shorter with bit operations than with a signed remainder.
        """
        return self.stages & (self.stages - 1) == 0

    def stage_index(self, count: Int32) -> Int32:
        return count & (self.stages - 1) if self.power_of_two else count % self.stages

    def phase(self, count: Int32) -> Int32:
        rounds = count >> (self.stages.bit_length() - 1) if self.power_of_two else count // self.stages
        return rounds & 1

    @cute.jit
    def producer_wait(self, count: Int32):
        """Wait until the stage is free (producer warp). A stage never filled before counts as free."""
        cute.arch.mbarrier_wait(self.empty + self.stage_index(count), self.phase(count) ^ 1)

    @cute.jit
    def producer_acquire(self, count: Int32):
        """Wait until the stage is free, then announce the bytes to the full barrier (producer warp)."""
        self.producer_wait(count)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.full + self.stage_index(count), self.stage_bytes)

    def arrival(self, count: Int32) -> cute.Pointer:
        """Return the mbarrier to be signaled by a TMA load of block number `count`."""
        return self.full + self.stage_index(count)

    @cute.jit
    def consumer_wait(self, count: Int32):
        """Wait until the bytes of block number `count` have landed (consumer)."""
        cute.arch.mbarrier_wait(self.full + self.stage_index(count), self.phase(count))

    @cute.jit
    def consumer_release(self, count: Int32):
        """Release the stage to the producer. The caller is a consumer warp.

        The caller must have waited for every wgmma reading the stage.
        """
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.empty + self.stage_index(count))

    @cute.jit
    def producer_commit(self, count: Int32):
        """Mark the stage as full, in a pipeline without announced bytes (producer warp)."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.arrival(count))

    @cute.jit
    def producer_commit_after_copies(self, count: Int32):
        """Mark the stage as full once the cp.async copies of all lanes have landed (producer warp)."""
        # Each lane adds an arrival to the number awaited, and arrives when the copies of the lane have landed.
        text, arrival = "cp.async.mbarrier.arrive.shared::cta.b64 [{$r0}];", self.arrival(count)
        cute.arch.inline_ptx(text, read_only_args=[arrival.toint()])
        cute.arch.sync_warp()
        self.producer_commit(count)


@dataclass(frozen=True)
class TmaOperand:
    """Tensor with its TMA atom, the TMA coordinates (rows, cols, heads, batch) and the shared-memory buffer.

    `atom` loads or stores tiles of the tensor.
    """

    atom: cute.CopyAtom
    m: cute.Tensor
    s: cute.Tensor

    def head(self, head: Int32, batch: Int32) -> TmaOperand:
        """Return the operand restricted to a head."""
        return TmaOperand(self.atom, self.m[None, None, head, batch], self.s)

    def tiles(
        self, shape: tuple[int, int], coordinate: tuple[int | None, int | None]
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """Return the shared and the global tiles of a head, partitioned for TMA.

        Args:
            shape: rows and columns of a tile.
            coordinate: tile coordinate, None in the free mode.

        Returns:
            The shared tiles (TMA, stage) and the global tiles (TMA, tiles along the free mode of `coordinate`).
        """
        g = cute.local_tile(self.m, shape, coordinate)  # (rows, cols, tiles)
        return cpasync.tma_partition(
            self.atom, 0, cute.make_layout(1), cute.group_modes(self.s, 0, 2), cute.group_modes(g, 0, 2)
        )

    def blocks(self, shape: tuple[int, int], coordinate: tuple[int | None, int | None]) -> TmaBlocks:
        """Return the blocks of a head along the free mode of `coordinate`, as in `tiles()`."""
        return TmaBlocks(self.atom, *self.tiles(shape, coordinate))


@dataclass(frozen=True)
class TmaBlocks:
    """Blocks of K or V of a head, loaded by a producer warp. Each block is one tile of the TMA atom."""

    atom: cute.CopyAtom
    shared_tiles: cute.Tensor  # (TMA, stage)
    global_tiles: cute.Tensor  # (TMA, blocks)

    def load(self, pipeline: Pipeline, block: Int32, count: Int32) -> None:
        """Load a block as block number `count` of the pipeline, as soon as the stage is free."""
        load_block(self.atom, self.global_tiles, self.shared_tiles, pipeline, block, count)


@dataclass(frozen=True)
class TmaLoadConfig:
    """TMA load configuration of an operand: boxes of rows x columns and a number of stages in shared memory.

    The object holds only sizes and a layout, both known at trace time. Host code creates an object for the launch, and
    the kernel creates an equal object again.
    """

    element: Element
    rows: int
    columns: int
    stages: int
    layout: cute.ComposedLayout  # (rows, columns, stage)

    @classmethod
    def in_column_halves(cls, element: Element, rows: int, columns: int, stages: int) -> TmaLoadConfig:
        """Create the configuration of an operand whose halves of the columns are whole atoms of the swizzle."""
        kind = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, element.dtype, columns // 2)
        atom = warpgroup.make_smem_layout_atom(kind, element.dtype)
        layout = cute.tile_to_shape(atom, (rows, columns, stages), order=(0, 1, 2))
        return cls(element, rows, columns, stages, layout)

    @classmethod
    def create(cls, element: Element, rows: int, columns: int, stages: int, major: str = "rows") -> TmaLoadConfig:
        """Create the configuration.

        Args:
            element: element type of the operand.
            rows: rows of a box.
            columns: columns of a box.
            stages: stages in shared memory.
            major: "rows" or "columns", the direction in which elements are contiguous in global memory.
        """
        order = {"rows": LayoutEnum.ROW_MAJOR, "columns": LayoutEnum.COL_MAJOR}[major]
        sizes = (ROWS_PER_WARPGROUP, rows, columns)
        return cls(element, rows, columns, stages, hopper.make_smem_layout_b(order, sizes, element.dtype, stages))

    @property
    def bytes(self) -> int:
        """Bytes of a box."""
        return self.rows * self.columns * self.element.bytes

    def tma(self, m: cute.Tensor) -> tuple[cute.CopyAtom, cute.Tensor]:
        """Return the atom to load boxes of `m` (rows, columns, heads, batch), and the TMA coordinates of `m`."""
        stage_layout, box = cute.slice_(self.layout, (None, None, 0)), (self.rows, self.columns)
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), m, stage_layout, box)

    def create_pipeline(self, smem: cutlass.memory.SmemAllocator, boxes: int = 1, more_bytes: int = 0) -> Pipeline:
        """Create a pipeline for the stages of the operand.

        Args:
            smem: allocator of shared memory.
            boxes: boxes per pipeline stage.
            more_bytes: bytes of further data landing together with the boxes of a stage.
        """
        return Pipeline.create(smem, self.stages // boxes, boxes * self.bytes + more_bytes)

    def buffer(self, smem: cutlass.memory.SmemAllocator) -> cute.Tensor:
        return smem.allocate_tensor(self.element.dtype, self.layout.outer, 1024, self.layout.inner)


def output_tma(element: Element, m: cute.Tensor, columns: int) -> tuple[cute.CopyAtom, cute.Tensor]:
    """Return the atom to store the ROWS_PER_WARP rows of a warp to `m`, and the TMA coordinates of `m`.

    Args:
        element: element type of the output.
        m: global tensor (rows, columns, heads, batch).
        columns: columns of a stored tile.
    """
    layout = slab_layout(element.dtype, ROWS_PER_WARP, columns)
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), m, layout, (ROWS_PER_WARP, columns))


@dataclass(frozen=True)
class PipelineWarps:
    """Pipeline with the numbers of warps that arrive at its barriers."""

    pipeline: Pipeline
    consumers: int
    producers: int = 1

    def init(self) -> None:
        self.pipeline.init(self.consumers, self.producers)


@dataclass(frozen=True)
class TileIndexPipeline:
    """Pipeline of the tile indices that a `DynamicTileScheduler` publishes."""

    indices: cute.Tensor  # (TILE_INDEX_STAGES,) Int32 in shared memory
    pipeline: Pipeline

    @classmethod
    def create(cls, smem: cutlass.memory.SmemAllocator) -> TileIndexPipeline:
        pipeline = Pipeline.create(smem, TILE_INDEX_STAGES, 0)
        array = smem.allocate_array(Int32, TILE_INDEX_STAGES)
        return cls(cute.make_tensor(array, cute.make_layout(TILE_INDEX_STAGES)), pipeline)


def rows_first(t: cute.Tensor) -> cute.Tensor:
    """Return a (rows, columns, heads, batch) view of (batch, heads, rows, columns), the order used by tiles."""
    return cute.make_tensor(t.iterator, cute.select(t.layout, mode=[2, 3, 1, 0]))


def columns_first(t: cute.Tensor) -> cute.Tensor:
    """Return a (columns, rows, heads, batch) view of (batch, heads, rows, columns).

    This view of V is the N x K operand of the second product.
    """
    return cute.make_tensor(t.iterator, cute.select(t.layout, mode=[3, 2, 1, 0]))


def transposed(s: cute.Tensor) -> cute.Tensor:
    """Return a (columns, rows, stage) view of (rows, columns, stage).

    The view reads the same bytes in the opposite major mode.
    """
    return cute.make_tensor(s.iterator, cute.select(s.layout, mode=[1, 0, 2]))


@cute.jit
def load_block(
    atom: cute.CopyAtom,
    tXgX: cute.Tensor,
    tXsX: cute.Tensor,
    pipeline: Pipeline,
    block: Int32,
    count: Int32,
    policy: cutlass.Int64 | None = None,
):
    """Load a block of Q (64 rows), K or V as block number `count` of the pipeline (producer warp).

    The load waits until the stage is free.

    Args:
        atom: TMA atom of the operand.
        tXgX: global tiles (TMA, tiles).
        tXsX: shared tiles (TMA, stage).
        pipeline: pipeline of the operand.
        block: index of the global tile.
        count: running count of blocks in the pipeline.
        policy: L2 cache policy.
    """
    pipeline.producer_acquire(count)
    stage, arrival = tXsX[None, pipeline.stage_index(count)], pipeline.arrival(count)
    cute.copy(atom, tXgX[None, block], stage, tma_bar_ptr=arrival, cache_policy=policy)


def slab_layout(dtype: type[cutlass.Numeric], rows: int, columns: int) -> cute.ComposedLayout:
    """Return the shared-memory layout of an output.

    The ROWS_PER_WARP rows of each warp are contiguous, so that warps store rows independently.
    """
    kind = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, dtype, columns)
    return cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, dtype), (rows, columns), order=(1, 0))


@cute.jit
def store_slabs(
    rX: cute.Tensor, sX: cute.Tensor, out: TmaOperand, first: Int32, mma: cute.TiledMma, column_block: int = 0
):
    """Store the accumulator of a warpgroup, in 16 bits, through shared memory to global memory.

    Each warp starts the TMA store of its rows as soon as the rows are in shared memory. The caller waits for the bulk
    group before writing sX again.

    Args:
        rX: registers of the accumulator in 16 bits.
        sX: shared-memory buffer (64, columns).
        out: output operand, restricted to a head.
        first: index of the warpgroup's first slab, in units of ROWS_PER_WARP rows of the output.
        mma: tiled MMA with the accumulator layout.
        column_block: column block of the output, in units of the columns of sX.
    """
    columns, thread = cute.size(sX, mode=[1]), cute.arch.thread_idx()[0] % WARPGROUP
    warp_in_group = cute.arch.make_warp_uniform(thread // WARP)
    matrices = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), rX.element_type)
    to_smem = cute.make_tiled_copy_C(matrices, mma).get_slice(thread)
    cute.copy(to_smem, to_smem.retile(rX), to_smem.partition_D(sX))
    cute.arch.fence_proxy("async.shared", space="cta")  # the TMA store must see the data written by stmatrix
    cute.arch.sync_warp()
    slab = TmaOperand(out.atom, out.m, cute.local_tile(sX, (ROWS_PER_WARP, columns), (warp_in_group, 0)))
    tXsX, tXgX = slab.tiles((ROWS_PER_WARP, columns), (None, column_block))
    cute.copy(out.atom, tXsX, tXgX[None, first + warp_in_group])
    cute.arch.cp_async_bulk_commit_group()


@dataclass(frozen=True)
class DynamicTileScheduler:
    """Dynamic persistent tile scheduler.

    CTA c starts with tile c. The producer warp fetches each further tile index from a counter in global memory and
    publishes the index to the consumers through a shared-memory pipeline.

    Every tile is followed by exactly one fetch. Fetch number `total` is therefore the last fetch, and the warp behind
    this fetch resets the counter to zero. A launch leaves the counter unchanged, and the host never clears it.

    In kernels whose tiles wait for earlier tiles, a CTA fetches the first tile, too (`fetches_first_tile`). Every tile
    before a fetched tile then belongs to a running CTA. If the first tiles were assigned statically, an earlier tile
    could belong to a CTA waiting for an SM forever.
    """

    counter: cute.Pointer  # global Int32
    tile_index: TileIndexPipeline
    total: Int32
    fetches_first_tile: bool = False

    @cute.jit
    def fetch_next(self) -> Int32:
        """Fetch the next value of the counter (producer warp).

        The value may still be on the way from memory until `publish` reads it.
        """
        counter_value = Int32(0)
        if cute.arch.lane_idx() == 0:
            counter_value = cute.arch.atomic_add(self.counter, Int32(1), sem="relaxed", scope="gpu")
        return counter_value

    @cute.jit
    def publish(self, nth: Int32, counter_value: Int32) -> Int32:
        """Publish the tile index of a fetched counter value as tile number `nth` of the CTA (producer warp).

        Returns:
            The tile index. A value of `total` or more means: no tile is left.
        """
        counter_value = cute.arch.shuffle_sync(counter_value, 0)
        last = self.total - 1
        if cutlass.const_expr(self.fetches_first_tile):
            last += cute.arch.grid_dim()[0]
        # All lanes store. With a branch for a single lane, ptxas lays out every wait of the kernel worse (-2 %).
        if counter_value == last:
            cute.arch.store(self.counter, Int32(0))
        number = counter_value
        if cutlass.const_expr(not self.fetches_first_tile):
            number = cute.arch.grid_dim()[0] + counter_value
        pipeline = self.tile_index.pipeline
        pipeline.producer_wait(nth)
        with cute.arch.elect_one():
            self.tile_index.indices[pipeline.stage_index(nth)] = number
            cute.arch.mbarrier_arrive(pipeline.arrival(nth))
        return number

    @cute.jit
    def receive(self, nth: Int32) -> Int32:
        """Receive the tile index of tile number `nth` of the CTA (consumer warp)."""
        pipeline = self.tile_index.pipeline
        pipeline.consumer_wait(nth)
        number = self.tile_index.indices[pipeline.stage_index(nth)]
        cute.arch.sync_warp()
        pipeline.consumer_release(nth)
        return cute.arch.make_warp_uniform(number)


@dataclass(frozen=True)
class WarpgroupOrder:
    """Warpgroup order barrier: warpgroups issue products in rotation.

    The softmax of a warpgroup then overlaps with the tensor-core work of the next warpgroup (ping-pong scheduling of
    FlashAttention-3).

    Warpgroup w waits on named barrier `first` + w, where the predecessor of w arrives. The last warpgroup arrives once
    at the start, to let the first warpgroup begin.
    """

    first: int
    warpgroup: Int32
    count: int

    @cute.jit
    def start(self):
        if cutlass.const_expr(self.count > 1):
            if self.warpgroup == self.count - 1:
                cute.arch.barrier_arrive(barrier_id=self.first, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def wait_turn(self):
        if cutlass.const_expr(self.count > 1):
            cute.arch.barrier(barrier_id=self.first + self.warpgroup, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def signal_next(self):
        if cutlass.const_expr(self.count > 1):
            successor = (self.warpgroup + 1) % self.count
            cute.arch.barrier_arrive(barrier_id=self.first + successor, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def skip_turn(self):
        """Take a turn without issuing a product."""
        self.wait_turn()
        self.signal_next()


@cute.jit
def sync_warpgroup(first: int, wg: Int32):
    """Synchronize the four warps of consumer warpgroup `wg`, on named barrier `first` + wg."""
    cute.arch.barrier(barrier_id=first + wg, number_of_threads=WARPGROUP)


@cute.jit
def sync_warpgroups(name: int, count: cutlass.Constexpr[int]):
    """Synchronize all consumer warpgroups."""
    cute.arch.barrier(barrier_id=name, number_of_threads=count * WARPGROUP)


@cute.jit
def sync_cluster():
    """Synchronize the cluster. All threads of all CTAs call this function.

    Data stored by the CTAs in local shared memory is then visible to all CTAs of the cluster. The fences
    cover only shared memory. A cluster barrier with release semantics also waits for global memory, and so costs half a
    microsecond (PTX ISA, fence.sync_restrict).
    """
    cute.arch.inline_ptx("fence.release.sync_restrict::shared::cta.cluster;")
    cute.arch.cluster_arrive_relaxed()
    cute.arch.cluster_wait()
    cute.arch.inline_ptx("fence.acquire.sync_restrict::shared::cluster.cluster;")


@cute.jit
def start_cta(warp_idx: Int32, atoms: tuple[cute.CopyAtom, ...], pipelines: tuple[PipelineWarps, ...]):
    """Prefetch the TMA descriptors and initialize the barriers. Every thread calls `start_cta` before roles part.

    Args:
        warp_idx: index of the warp in the CTA.
        atoms: TMA atoms whose descriptors are prefetched.
        pipelines: pipelines of the CTA, with the numbers of their warps.
    """
    if warp_idx == 0:
        for atom in atoms:
            cpasync.prefetch_descriptor(atom)
        with cute.arch.elect_one():
            for pipeline_warps in pipelines:
                pipeline_warps.init()
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()


def make_mma(
    dtype: type[cutlass.Numeric], columns: int, left: str, right: str, sums: type[cutlass.Numeric] = Float32
) -> cute.TiledMma:
    """Return the tiled MMA of 64 x `columns` on a warpgroup.

    Args:
        dtype: type of both operands.
        columns: columns of the product.
        left: source of the left operand: "rows" (K-major in shared memory), "columns" (MN-major) or "registers".
        right: source of the right operand, "rows" or "columns".
        sums: type of the accumulator.
    """
    major = {"rows": OperandMajorMode.K, "columns": OperandMajorMode.MN, "registers": OperandMajorMode.K}
    source = warpgroup.OperandSource.RMEM if left == "registers" else warpgroup.OperandSource.SMEM
    return hopper.make_trivial_tiled_mma(
        dtype, dtype, major[left], major[right], sums, (1, 1, 1), (ROWS_PER_WARPGROUP, columns), source
    )


@dataclass(frozen=True)
class WgmmaProduct:
    """The product acc (+)= A B on a warpgroup.

    There are two atoms, because setting ACCUMULATE inside a traced loop would leak an SSA value out of the loop.
    """

    begin: cute.TiledMma  # overwrites the accumulator
    add: cute.TiledMma  # adds to the accumulator

    @classmethod
    def create(cls, make_mma) -> WgmmaProduct:
        begin, add = make_mma(), make_mma()
        begin.set(warpgroup.Field.ACCUMULATE, False)
        add.set(warpgroup.Field.ACCUMULATE, True)
        return cls(begin, add)

    def issue(self, acc: cute.Tensor, tA: cute.Tensor, tB: cute.Tensor, accumulate: bool) -> None:
        """Issue a committed group of asynchronous wgmmas.

        Args:
            acc: accumulator of the warpgroup.
            tA: left operand (MMA, 1, K or more).
            tB: right operand (MMA, 1, K).
            accumulate: add to the accumulator instead of overwriting.
        """
        self.multiply(acc, tA, tB, accumulate)
        warpgroup.commit_group()

    def multiply(self, acc: cute.Tensor, tA: cute.Tensor, tB: cute.Tensor, accumulate: bool) -> None:
        """Issue the wgmmas of a product without committing the group.

        Args:
            acc: accumulator of the warpgroup.
            tA: left operand (MMA, 1, K or more).
            tB: right operand (MMA, 1, K).
            accumulate: add to the accumulator instead of overwriting.
        """
        for k in range(cute.size(tB, mode=[2])):
            mma = self.add if accumulate or k > 0 else self.begin
            cute.gemm(mma, acc, tA[None, None, k], tB[None, None, k], acc)


@dataclass(frozen=True)
class StageProduct:
    """The product acc (+)= A B with B in a stage of a pipeline."""

    product: WgmmaProduct
    left: cute.Tensor  # (MMA, 1, K)
    right: cute.Tensor  # (MMA, 1, K, stage)
    acc: cute.Tensor

    @property
    def values(self) -> cute.Tensor:
        """Accumulator values of a thread, as (2, columns)."""
        return rows_and_columns(self.acc)

    def start(self, stage: Int32) -> None:
        """Overwrite the accumulator with the product. The wgmmas form one committed group."""
        self.product.issue(self.acc, self.left, self.right[None, None, None, stage], accumulate=False)

    def add(self, stage: Int32) -> None:
        """Add the product to the accumulator. The wgmmas form one committed group."""
        self.product.issue(self.acc, self.left, self.right[None, None, None, stage], accumulate=True)


def zeros(mma: cute.TiledMma, shape: tuple[int, int], sums: type[cutlass.Numeric] = Float32) -> cute.Tensor:
    """Return a zeroed accumulator (64, N) of a warpgroup."""
    acc = cute.make_rmem_tensor(mma.partition_shape_C(shape), sums)
    acc.fill(sums(0))
    return acc


@dataclass(frozen=True)
class AccumulatorInit:
    """Initial value of an integer accumulator, in shared memory.

    The shared-memory loads complete while a warpgroup waits for the order barrier. ptxas would place the equivalent
    register moves behind the barrier, where the next warpgroups wait.
    """

    four: cute.Pointer  # (4,) Int32

    @classmethod
    def create(cls, smem: cutlass.memory.SmemAllocator) -> AccumulatorInit:
        """Create the initial value. Every thread calls `create` before `start_cta`."""
        four = smem.allocate_tensor(Int32, cute.make_layout(4), 16)
        four.fill(FLOAT_OF_ZERO)
        return cls(four.iterator)

    def load(self, acc: cute.Tensor) -> None:
        flat, text = cute.make_tensor(acc.iterator, cute.make_layout(cute.size(acc))), "{{$w0}, {$w1}, {$w2}, {$w3}}"
        for i in range(0, cute.size(acc), 4):
            four = cute.arch.inline_ptx(
                f"ld.volatile.shared.v4.b32 {text}, [{{$r0}}];",
                write_only_types=[Int32] * 4, read_only_args=[self.four.toint()],
            )  # fmt: skip
            for number, value in enumerate(four):
                flat[i + number] = value


def as_floats(acc: cute.Tensor, exactly: bool) -> cute.Tensor:
    """Return the registers of an integer accumulator as fp32 values.

    The accumulator must have started with FLOAT_OF_ZERO.

    Args:
        acc: the integer accumulator.
        exactly: subtract OFFSET. Otherwise each value is the integer plus OFFSET.
    """
    floats = cute.make_tensor(cute.recast_ptr(acc.iterator, dtype=Float32), acc.layout)
    if exactly:
        for i in range(cute.size(acc)):
            floats[i] = floats[i] - OFFSET
    return floats
