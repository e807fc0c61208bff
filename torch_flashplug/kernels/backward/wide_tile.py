"""Parts of the backward kernels for head dims above 256: operands in boxes, and the products of a consumer warpgroup.

Each of the three kernels (dQ, dK, dV) computes a single output of 64 rows: 64 queries, or 64 keys. Registers of a
single warpgroup do not hold so many columns, so both consumer warpgroups have a part of the columns. Operands are cut
into boxes of 64 rows and 64 columns, which TMA loads one by one. There are three groups of operands:

- held: operands of the 64 rows, loaded once per tile;
- whole: the right operand of the output, with all its boxes in shared memory, loaded once per step;
- boxed: a right operand of scores only. Its boxes pass through a ring, and each box leaves after a single use.

    kernel  scores (warpgroup 1)        gradient of P (warpgroup 2)     output
    dQ      S = Q K^T, K whole          dP = dO V^T, V boxed            dQ += dS K
    dK      S^T = K Q^T, Q whole        dP^T = V dO^T, dO boxed         dK += dS^T Q
    dV      S^T = K Q^T, Q boxed        none                            dV += P^T dO, dO whole

P and dS cross shared memory in a single buffer: warpgroup 1 writes P, warpgroup 2 replaces P by dS.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import warp, warpgroup
from cutlass.tensor_utils import LayoutEnum

from ...registry.kernel_spec import BACKWARD_WARPGROUPS, BOX_COLUMNS, ROWS_PER_WARPGROUP, HopperSpec
from ..primitives import fragments, sm90
from ..primitives.dtype import Element

ROWS, ROWS_PER_WARP = ROWS_PER_WARPGROUP, sm90.ROWS_PER_WARP
WARPS = sm90.WARPGROUP // sm90.WARP  # warps of a warpgroup
BOX_STEPS = BOX_COLUMNS // 16  # wgmmas of the scores of a box


class WideBarrier(enum.IntEnum):
    """Named barriers of the consumer warpgroups; barrier 0 is `sync_threads`."""

    OPERANDS_READ = 1  # OPERANDS_READ + w: all warps of warpgroup w have finished the last product of a tile


@dataclass(frozen=True)
class WidePipelines:
    """Pipelines of a kernel: from the producer warp to the consumers, and between the warpgroups."""

    held: tuple[sm90.Pipeline, ...]  # a pipeline for each held operand, a single stage with all boxes
    whole: tuple[sm90.Pipeline, ...]  # a pipeline for each box of the whole operand
    boxed: sm90.Pipeline  # ring of boxes
    p: sm90.Pipeline  # P, from warpgroup 1 to warpgroup 2
    ds: sm90.Pipeline  # dS, from warpgroup 2 to warpgroup 1


@dataclass(frozen=True)
class WideSmem:
    """Operands in shared memory, each (64, 64, box)."""

    held: tuple[cute.Tensor, ...]
    whole: cute.Tensor  # boxes of stage 0, then boxes of stage 1
    boxed: cute.Tensor
    weights: cute.Tensor  # (64, 64, 1): P, then dS


@dataclass(frozen=True)
class WideTile:
    """Sizes and buffers of a kernel, all known at trace time."""

    element: Element
    columns: int  # columns of every operand and of the output
    num_held: int  # 2 for dQ and dK, 1 for dV
    stages: int  # stages of the whole operand
    ring: int  # boxes in the ring

    @classmethod
    def create(cls, spec: HopperSpec, element: Element, num_held: int) -> WideTile:
        return cls(element, spec.d, num_held, *spec.wide_buffers(num_held))

    @property
    def boxes(self) -> int:
        """Number of boxes of 64 rows of an operand."""
        return self.columns // BOX_COLUMNS

    @property
    def has_ds(self) -> bool:
        """True if warpgroup 2 computes dS. Otherwise, the output is a product with P."""
        return self.num_held == 2

    def output_boxes(self, wg: int) -> range:
        """Return the boxes of the output and of the whole operand that belong to a warpgroup."""
        half = self.boxes // BACKWARD_WARPGROUPS
        return range(half, self.boxes) if wg else range(half)

    def box(self, num_boxes: int) -> sm90.TmaLoadConfig:
        """Return the TMA load configuration of an operand with `num_boxes` boxes in shared memory."""
        return sm90.TmaLoadConfig.create(self.element, ROWS, BOX_COLUMNS, num_boxes)

    def tma(self, m: cute.Tensor) -> tuple[cute.CopyAtom, cute.Tensor]:
        """Return the atom to load boxes of `m` (rows, columns, heads, batch), and the TMA coordinates of `m`."""
        return self.box(1).tma(m)

    def create_pipelines(self, smem: cutlass.memory.SmemAllocator) -> WidePipelines:
        box_bytes = self.box(1).bytes
        return WidePipelines(
            tuple(sm90.Pipeline.create(smem, 1, self.boxes * box_bytes) for _ in range(self.num_held)),
            tuple(sm90.Pipeline.create(smem, self.stages, box_bytes) for _ in range(self.boxes)),
            sm90.Pipeline.create(smem, self.ring, box_bytes),
            *(sm90.Pipeline.create(smem, 1, 0) for _ in range(2)),
        )

    def allocate_smem(self, smem: cutlass.memory.SmemAllocator) -> WideSmem:
        weights = hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (ROWS, ROWS, ROWS), self.element.dtype, 1)
        return WideSmem(
            tuple(self.box(self.boxes).buffer(smem) for _ in range(self.num_held)),
            self.box(self.stages * self.boxes).buffer(smem),
            self.box(self.ring).buffer(smem),
            smem.allocate_tensor(self.element.dtype, weights.outer, 1024, weights.inner),
        )

    def pipelines_and_warps(self, pipelines: WidePipelines) -> tuple[sm90.PipelineWarps, ...]:
        """Return the pipelines with the numbers of their warps.

        In the kernel of dV, outputs of both warpgroups leave through the only held operand, so both release the
        operand. A box of the whole operand is released by the warpgroup with the same box of the output. Products of
        scores with the box are complete before.
        """
        consumers = WARPS * (1 if self.has_ds else BACKWARD_WARPGROUPS)
        return (
            *(sm90.PipelineWarps(pipeline, consumers) for pipeline in pipelines.held),
            *(sm90.PipelineWarps(pipeline, WARPS) for pipeline in (*pipelines.whole, pipelines.boxed)),
            *(sm90.PipelineWarps(pipeline, WARPS, WARPS) for pipeline in (pipelines.p, pipelines.ds)),
        )

    @cute.jit
    def load_held(
        self, operands: tuple[sm90.TmaOperand, ...], pipelines: WidePipelines, block: Int32, tile_count: Int32
    ):
        """Load the held operands of a tile, each restricted to a head (producer warp).

        The loop is not unrolled, because the producer warp has 24 registers.
        """
        for x, pipeline in zip(operands, pipelines.held, strict=True):
            pipeline.producer_acquire(tile_count)
            for b in cutlass.range(self.boxes, unroll=1):
                tXsX, tXgX = x.tiles((ROWS, BOX_COLUMNS), (None, b))
                cute.copy(x.atom, tXgX[None, block], tXsX[None, b], tma_bar_ptr=pipeline.arrival(tile_count))

    def load_step(
        self, whole: sm90.TmaOperand, boxed: sm90.TmaOperand, pipelines: WidePipelines, block: Int32, step: Int32
    ) -> None:
        """Load the whole and the boxed operand of a step, box by box (producer warp).

        Args:
            whole: the whole operand, restricted to a head.
            boxed: the boxed operand, restricted to a head.
            pipelines: pipelines of the kernel.
            block: block of 64 rows of both operands.
            step: running count of steps.
        """
        ring = pipelines.boxed
        # The ring is ahead: a box of the whole operand may have to wait for the output of the step before.
        for i in range(self.boxes + self.ring):
            if i < self.boxes:
                tXsX, tXgX = boxed.tiles((ROWS, BOX_COLUMNS), (None, i))
                sm90.load_block(boxed.atom, tXgX, tXsX, ring, block, step * self.boxes + i)
            if (b := i - self.ring) >= 0:
                pipeline, (tXsX, tXgX) = pipelines.whole[b], whole.tiles((ROWS, BOX_COLUMNS), (None, b))
                pipeline.producer_acquire(step)
                stage = tXsX[None, pipeline.stage_index(step) * self.boxes + b]
                cute.copy(whole.atom, tXgX[None, block], stage, tma_bar_ptr=pipeline.arrival(step))

    def make_consumer(self, wg: int, shared: WideSmem, pipelines: WidePipelines) -> WideConsumer:
        """Return the products, operands and accumulators of consumer warpgroup `wg`."""
        dtype, thread = self.element.dtype, cute.arch.thread_idx()[0] % sm90.WARPGROUP
        product = sm90.WgmmaProduct.create(lambda: sm90.make_mma(dtype, ROWS, "rows", "rows"))
        mma = product.add.get_slice(thread)
        takes_scores, reads_ring = wg < self.num_held, self.has_ds == (wg == 1)
        scores = weights = values = None
        acc = sm90.zeros(mma, (ROWS, ROWS))
        if takes_scores:
            right = shared.boxed if reads_ring else shared.whole
            scores = BoxProduct(
                product,
                mma.make_fragment_A(mma.partition_A(shared.held[wg])),
                mma.make_fragment_B(mma.partition_B(right)),
                acc,
            )
            weights = fragments.OperandA.create(acc, self.element)
            values = cute.make_tensor(cute.recast_ptr(weights.pairs.iterator, dtype=dtype), acc.layout)
        # The warpgroup that computes the weights of the output has the weights in registers.
        from_registers = takes_scores and reads_ring
        boxes = self.output_boxes(wg)
        columns, source = len(boxes) * BOX_COLUMNS, "registers" if from_registers else "rows"
        sums = sm90.WgmmaProduct.create(lambda: sm90.make_mma(dtype, columns, source, "columns"))
        sums_mma = sums.add.get_slice(thread)
        left = sums_mma.make_fragment_A(sums_mma.partition_A(shared.weights[None, None, 0]))
        left = weights.fragment if from_registers else left
        right = sums_mma.make_fragment_B(sums_mma.partition_B(self.columns_of(shared.whole, boxes)))
        output = sm90.StageProduct(sums, left, right, sm90.zeros(sums_mma, (ROWS, columns)))
        to_smem, from_smem = (
            cute.make_tiled_copy_C(cute.make_copy_atom(op(False, 4), dtype), product.add).get_slice(thread)
            for op in (warp.StMatrix8x8x16bOp, warp.LdMatrix8x8x16bOp)
        )
        sWeights = shared.weights[None, None, 0]

        def store(values):
            cute.copy(to_smem, to_smem.retile(values), to_smem.partition_D(sWeights))

        def load(values):
            cute.copy(from_smem, from_smem.partition_S(sWeights), from_smem.retile(values))

        return WideConsumer(self, wg, pipelines, scores, reads_ring, weights, values, output, store, load)

    def columns_of(self, sWhole: cute.Tensor, boxes: range) -> cute.Tensor:
        """Return boxes of the whole operand as a right operand (columns, 64, stage) of the output.

        Args:
            sWhole: the whole operand (64, 64, box).
            boxes: the consecutive boxes of a warpgroup.
        """
        box = cute.slice_(sm90.transposed(sWhole).layout, (None, None, 0))  # (columns of a box, rows)
        size = ROWS * BOX_COLUMNS
        columns = cute.make_layout((BOX_COLUMNS, len(boxes)), stride=(1, size))
        rows = cute.get(box, mode=[1])
        stages = cute.make_layout(self.stages, stride=self.boxes * size)
        layout = cute.make_layout(
            (columns.shape, rows.shape, stages.shape), stride=(columns.stride, rows.stride, stages.stride)
        )
        return cute.make_tensor(sWhole.iterator + boxes[0] * size, layout)


@dataclass(frozen=True)
class BoxProduct:
    """The product A B of scores, over boxes of 64 columns of both operands."""

    product: sm90.WgmmaProduct
    left: cute.Tensor  # (MMA, 1, 4, box)
    right: cute.Tensor  # (MMA, 1, 4, buffer)
    acc: cute.Tensor

    def multiply(self, box: int, buffer: Int32) -> None:
        """Issue the wgmmas of a box. The first box overwrites the accumulator."""
        left, right = self.left[None, None, None, box], self.right[None, None, None, buffer]
        self.product.multiply(self.acc, left, right, accumulate=box > 0)


@dataclass(frozen=True)
class WideConsumer:
    """State of a consumer warpgroup: scores or the gradient of P, weights of the output, and columns of the output."""

    tile: WideTile
    wg: int  # 0 computes P; 1 computes dS, or nothing
    pipelines: WidePipelines
    scores: BoxProduct | None
    reads_ring: bool  # the right operand of the scores is the boxed operand
    weights: fragments.OperandA | None  # P or dS in 16 bits
    values: cute.Tensor | None  # the registers of `weights`, in the order of the scores
    output: sm90.StageProduct  # the warpgroup's columns of the output
    store: Callable  # stores the weights to shared memory
    load: Callable  # loads P from shared memory

    @property
    def has_weights(self) -> bool:
        """True if the left operand of the output is in registers."""
        return self.scores is not None and self.reads_ring

    @property
    def output_weights(self) -> sm90.Pipeline:
        """Pipeline of the left operand of the output in shared memory: dS, or P in the kernel of dV."""
        return self.pipelines.ds if self.tile.has_ds else self.pipelines.p

    @property
    def releases_late(self) -> bool:
        """True if the output of a step is complete, and its operands are released, in the next step."""
        return self.has_weights or (self.scores is not None and self.tile.stages > 1)

    @cute.jit
    def multiply_scores(self, step: Int32, begin: Int32):
        """Compute the scores of a step, or the gradient of P, and complete the output of the step before.

        Args:
            step: running count of steps.
            begin: running count of the first step of the tile.
        """
        boxes, ring = self.tile.boxes, self.pipelines.boxed
        warpgroup.fence()
        if cutlass.const_expr(self.reads_ring):
            for b in cutlass.range_constexpr(boxes):
                count = step * boxes + b
                ring.consumer_wait(count)
                self.scores.multiply(b, ring.stage_index(count))
                warpgroup.commit_group()
                warpgroup.wait_group(1)
                if cutlass.const_expr(b > 0):
                    ring.consumer_release(count - 1)
                else:
                    self.release_previous(step, begin)
            warpgroup.wait_group(0)
            ring.consumer_release(step * boxes + boxes - 1)
        else:
            for b in cutlass.range_constexpr(boxes):
                pipeline = self.pipelines.whole[b]
                pipeline.consumer_wait(step)
                self.scores.multiply(b, pipeline.stage_index(step) * boxes + b)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            if cutlass.const_expr(self.releases_late):
                self.release_previous(step, begin)

    @cute.jit
    def release_previous(self, step: Int32, begin: Int32):
        """Release the operands of the output of the step before, unless `step` is the first step of the tile."""
        if step > begin:
            self.release(step - 1)

    @cute.jit
    def release(self, step: Int32):
        """Release the operands of the output of a step, which is complete."""
        for b in self.tile.output_boxes(self.wg):
            self.pipelines.whole[b].consumer_release(step)
        if cutlass.const_expr(not self.has_weights):
            self.output_weights.consumer_release(step)

    @cute.jit
    def send_p(self, step: Int32):
        """Store P of a step to shared memory for the second warpgroup, once the weights before have been read."""
        self.output_weights.producer_wait(step)
        self.send(self.pipelines.p, step)

    @cute.jit
    def send_ds(self, step: Int32):
        """Store dS of a step to shared memory for the first warpgroup. Each warp replaces P that only the warp read."""
        self.send(self.pipelines.ds, step)

    @cute.jit
    def send(self, pipeline: sm90.Pipeline, step: Int32):
        """Store the weights to shared memory, and mark the buffer as full."""
        self.store(self.values)
        cute.arch.fence_proxy("async.shared", space="cta")  # products read shared memory written by stmatrix
        cute.arch.sync_warp()
        pipeline.producer_commit(step)

    @cute.jit
    def receive_p(self, step: Int32):
        """Load P of a step from shared memory."""
        self.pipelines.p.consumer_wait(step)
        self.load(self.values)

    @cute.jit
    def add_output(self, step: Int32):
        """Add the product of a step to the output."""
        for b in self.tile.output_boxes(self.wg):
            self.pipelines.whole[b].consumer_wait(step)
        if cutlass.const_expr(not self.has_weights):
            self.output_weights.consumer_wait(step)
        warpgroup.fence()
        self.output.add(self.pipelines.whole[0].stage_index(step))
        if cutlass.const_expr(not self.releases_late):
            warpgroup.wait_group(0)
            self.release(step)

    @cute.jit
    def finish(self, step: Int32, begin: Int32):
        """Complete the output of a tile with the steps from `begin` to before `step`."""
        if cutlass.const_expr(self.releases_late):
            warpgroup.wait_group(0)
            self.release_previous(step, begin)
        sm90.sync_warpgroup(WideBarrier.OPERANDS_READ, self.wg)

    @cute.jit
    def store_output(self, out: sm90.TmaOperand, shared: WideSmem, block: Int32, factor: Float32):
        """Store the warpgroup's columns of the output in 16 bits, through the boxes of a held operand.

        The warpgroup has read the held operand to the end. The function waits until the boxes are free again.

        Args:
            out: output, restricted to a head.
            shared: operands in shared memory.
            block: block of 64 rows.
            factor: factor of the output.
        """
        element, boxes = self.tile.element, self.tile.output_boxes(self.wg)
        held, first = shared.held[self.wg if self.tile.has_ds else 0], 0 if self.tile.has_ds else boxes[0]
        mma = sm90.make_mma(element.dtype, BOX_COLUMNS, "rows", "columns")
        layout = sm90.slab_layout(element.dtype, ROWS, BOX_COLUMNS)
        for i in cutlass.range_constexpr(len(boxes)):
            acc = self.output.acc.iterator + i * (BOX_COLUMNS // 2)
            registers = cute.make_tensor(acc, mma.partition_shape_C((ROWS, BOX_COLUMNS)))
            rX = cute.make_rmem_tensor_like(registers, element.dtype)
            rX.store((registers.load() * factor).to(element.dtype))
            start = held[None, None, first + i].iterator
            start = cute.recast_ptr(start, layout.inner, dtype=element.dtype)
            sX = cute.make_tensor(start, layout.outer)
            sm90.store_slabs(rX, sX, out, block * (ROWS // ROWS_PER_WARP), mma, boxes[i])
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
