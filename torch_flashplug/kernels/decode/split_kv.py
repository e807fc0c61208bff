"""Partial results of split-KV attention, and both ways to reduce them.

The CTAs of a cluster reduce the partial results through distributed shared memory. Otherwise a separate kernel reduces
the partial results in global memory.

A split s of a row has a normalized output O_s over the keys of the split. Further values are the unscaled maximum
m_s and the sum l_s of exp(scale (S - m_s)). With m = max m_s and w_s = l_s exp(scale (m_s - m)), O and LSE are:

    O = sum w_s O_s / sum w_s
    LSE = scale m + ln(sum w_s)

FlashDecoding (Dao et al. 2023) stores LSE_s instead of m_s and l_s. An LSE_s in fp32 has lost ln(l_s) if scores are
large, such as the finfo.min of a mask. A split without keys has l_s = 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.memory
from cutlass import Float32, Int32, Int64
from cutlass.base_dsl import Arch

from ...registry.kernel_spec import WARP
from ..primitives.dtype import Element
from ..primitives.fragments import LOG2_E, target_from
from ..primitives.vector_access import QUAD, vector_at
from ..score_stages.pipeline import ScorePipeline

COLUMN_LANES = 8  # lanes of a warp at 128 bytes of a partial row; the remaining lanes handle further splits
WARPS = 8
PEER_PAD = 8  # floats between rows: eight rows of an accumulator then lie in different banks
AT_ONCE = 4  # number of splits that a thread loads at once
FEW = 8  # up to this number of splits, every lane handles different columns
MANY = 33  # from this number of splits on, the warps of a CTA share a row


@dataclass(frozen=True)
class WorkspacePartials:
    """Partial results in global memory, fp32: (rows, splits, Dv) outputs, then (rows, splits, 2) maxima and sums.

    The row index is (batch * Hq + head) * Sq + query.
    """

    start: cute.Pointer
    rows: Int32
    splits: Int32
    Dv: Int32

    @property
    def outputs(self) -> Int64:
        """Number of outputs in the workspace. Maxima and sums follow."""
        return Int64(self.rows) * self.splits

    def index(self, row: Int32, split: Int32) -> Int64:
        """Return the index of the output of a split of a row."""
        return Int64(row) * self.splits + split

    def output(self, row: Int32, split: Int32) -> cute.Pointer:
        return self.start + self.index(row, split) * self.Dv

    def weight(self, row: Int32, split: Int32) -> cute.Pointer:
        """Return the pointer to the maximum and the sum of a partial result."""
        return self.start + self.outputs * self.Dv + self.index(row, split) * 2

    def of_row(self, row: Int32, rows_of_sequence: Int32) -> WorkspacePartials:
        """Combine: return the partial results of a row. The results of the previous kernel are visible."""
        return self

    def has(self, row: Int32) -> cutlass.Boolean:
        """Combine: return whether the row exists, and has partial results."""
        return row < self.rows

    def order_splits(self, split_size: Int32 | None) -> Int32:
        """Return the number of splits that determines the accumulation order.

        Splits of a fixed size (more than 0) always have the same order. In this order, empty splits behind the rest
        change no bit of the result.
        """
        splits = self.splits
        return splits if split_size is None else cutlass.select_(split_size > 0, Int32(FEW + 1), splits)

    def weight_of(self, row: Int32, split: Int32) -> tuple[Float32, Float32]:
        return loaded(self.weight(row, split))

    def load_quad(self, row: Int32, split: Int32, column: Int32, quad: cute.Tensor):
        cute.autovec_copy(vector_at(self.output(row, split) + column, Float32, QUAD), quad)


@dataclass(frozen=True)
class ClusterPartials:
    """Partial results in the shared memory of each CTA of a cluster, fp32.

    The buffer holds the outputs of all rows, with rows `pitch` floats apart, then maxima and sums.
    """

    start: cute.Pointer
    rows: int
    pitch: int
    splits: Int32  # number of CTAs in the cluster

    @classmethod
    def create(cls, buffer: cute.Tensor, rows: int, columns: int, count: Int32) -> ClusterPartials:
        """Create the partial results in a shared-memory buffer.

        Args:
            buffer: unused buffer with space for rows * (columns + PEER_PAD + 2) floats.
            rows: number of rows.
            columns: columns of the output.
            count: number of CTAs in the cluster.
        """
        assert cute.cosize(buffer) * buffer.element_type.width >= rows * (columns + PEER_PAD + 2) * Float32.width
        start = cute.make_ptr(Float32, buffer.iterator.toint(), cute.AddressSpace.smem, assumed_align=16)
        return cls(start, rows, columns + PEER_PAD, count)

    def output(self, row: Int32) -> cute.Pointer:
        """Return the pointer to an output row of this CTA."""
        return self.start + row * self.pitch

    def weight(self, row: Int32) -> cute.Pointer:
        """Return the pointer to the maximum and the sum of a row of this CTA."""
        return self.start + self.rows * self.pitch + row * 2

    def weight_of(self, row: Int32, peer: Int32) -> tuple[Float32, Float32]:
        return loaded(self.at_peer(self.weight(row), peer), ss="cluster")

    def load_quad(self, row: Int32, peer: Int32, column: Int32, quad: cute.Tensor):
        # The store gives the registers defined values. `quad.load()` then yields the type of four floats, without a
        # public name. The store does not appear in SASS.
        quad.fill(0.0)
        value = cute.arch.load(self.at_peer(self.output(row) + column, peer), quad.load().type, ss="cluster")
        quad.store(cute.TensorSSA(value, (QUAD,), Float32))

    def at_peer(self, pointer: cute.Pointer, peer: Int32) -> cute.Pointer:
        """Return the address of the same location in CTA `peer`, for loads from the shared memory of the cluster."""
        peer_pointer = cute.arch.map_dsmem_ptr(pointer, peer)
        return cute.make_ptr(Float32, peer_pointer.toint(), cute.AddressSpace.smem, assumed_align=4)


class SplitKvCombine:
    """Kernel that computes O in 16 bits and the LSE from `WorkspacePartials`.

    If the architecture allows, the kernel starts while the previous kernel still runs, and waits for its results.
    """

    def __init__(self, element: Element):
        self.element = element

    @cute.jit
    def __call__(
        self, mO: cute.Tensor, mLSE: cute.Tensor, partials: WorkspacePartials, scale: Float32,
        score_pipeline: ScorePipeline, stream: cuda.CUstream, split_size: Int32 | None = None,
    ):  # fmt: skip
        """Launch the kernel.

        Args:
            mO: output (B, Hq, Sq, Dv).
            mLSE: LSE (B, Hq, Sq) in fp32.
            partials: the partial results.
            scale: scale of the maxima.
            score_pipeline: score stages of the kernel that computed the partial results.
            stream: CUDA stream.
            split_size: see `WorkspacePartials.order_splits`.
        """
        rows, order_splits = partials.rows, partials.order_splits(split_size)
        rows_of_cta = cutlass.select_(order_splits >= MANY, Int32(1), Int32(WARPS))
        columns = cutlass.select_(order_splits <= FEW, Int32(WARP * QUAD), Int32(COLUMN_LANES * QUAD))
        arguments = (mO, mLSE, partials.start, partials.splits, scale, score_pipeline.sinks, split_size)
        self.kernel(*arguments, type(partials)).launch(
            grid=(cute.ceil_div(rows, rows_of_cta), cute.ceil_div(partials.Dv, columns), 1),
            block=(WARPS * WARP, 1, 1),
            stream=stream,
            use_pdl=starts_early(),
        )

    @cute.kernel
    def kernel(
        self, mO: cute.Tensor, mLSE: cute.Tensor, start: cute.Pointer, splits: Int32, scale: Float32,
        sinks: cute.Tensor | None, split_size: Int32 | None, workspace_class: cutlass.Constexpr[type],
    ):  # fmt: skip
        B, Hq, Sq, Dv = mO.shape
        workspace = workspace_class(start, B * Hq * Sq, splits, Dv)
        smem = cutlass.memory.SmemAllocator()
        layout = cute.make_ordered_layout((2 + QUAD, COLUMN_LANES, WARPS), (2, 1, 0))
        shared = smem.allocate_tensor(Float32, layout, 16)
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block, chunk, _ = cute.arch.block_idx()
        order_splits = workspace.order_splits(split_size)
        is_few_splits, is_many_splits = order_splits <= FEW, order_splits >= MANY
        row = cutlass.select_(is_many_splits, block, block * WARPS + warp)
        lanes = cutlass.select_(is_few_splits, Int32(WARP), Int32(COLUMN_LANES))
        column = (chunk * lanes + lane % lanes) * QUAD
        begin = lane // lanes + cutlass.select_(is_many_splits, warp * (WARP // COLUMN_LANES), Int32(0))
        step = cutlass.select_(is_many_splits, Int32(WARPS), Int32(1)) * (WARP // lanes)

        wait_for_previous_kernel()
        partials = workspace.of_row(row, Hq * Sq)
        partial = PartialResult.create(scale)
        if partials.has(row):
            for first in cutlass.range(begin, partials.splits, step * AT_ONCE, unroll=1):
                partial.add(partials, row, first, step, cutlass.min(column, Dv - QUAD))
        if order_splits > FEW:
            partial.join_lanes()
        if is_many_splits:
            partial.join_warps(shared, warp)
        writes = (lane < lanes) & partials.has(row) & ((warp == 0) | (order_splits < MANY))
        if writes:
            index, query = row // Sq, row % Sq
            batch, head = index // Hq, index % Hq
            lse = partial.finalize(sinks, head)
            if column < Dv:
                partial.write(mO[batch, head, query, None].iterator + column, self.element)
            if column == 0:
                mLSE[batch, head, query] = lse


def starts_early() -> bool:
    """Return whether the target supports programmatic dependent launch.

    A kernel then starts before the previous kernel ends.
    """
    return target_from(Arch.sm_90)


def wait_for_previous_kernel() -> None:
    """Wait for the results of the previous kernel, then allow the next kernel to start.

    The next kernel waits in turn.
    """
    if starts_early():
        cute.arch.griddepcontrol_wait()
        # Not earlier, because CTAs of the next kernel would share SMs with the CTAs awaited by this kernel.
        cute.arch.griddepcontrol_launch_dependents()


def loaded(pointer: cute.Pointer, **load_options: str) -> tuple[Float32, Float32]:
    """Load two consecutive floats."""
    return tuple(cute.arch.load(pointer + i, Float32, **load_options) for i in range(2))


@dataclass(frozen=True)
class PartialResult:
    """Partial result of a thread: some splits of a row, four columns."""

    top: cute.Tensor  # (1,) largest score, not yet scaled
    total: cute.Tensor  # (1,) sum of the weights, relative to exp(scale * top)
    out: cute.Tensor  # (4,) weighted sum of outputs
    scale: Float32

    @classmethod
    def create(cls, scale: Float32) -> PartialResult:
        top, total, out = (cute.make_rmem_tensor((n,), Float32) for n in (1, 1, QUAD))
        top.fill(-Float32.inf)
        total.fill(0.0)
        out.fill(0.0)
        return cls(top, total, out, scale)

    @cute.jit
    def add(self, partials: WorkspacePartials | ClusterPartials, row: Int32, first: Int32, step: Int32, column: Int32):
        """Add the splits first, first + step, and so on: AT_ONCE splits.

        Splits beyond the last split have no effect.
        """
        top, total = (cute.make_rmem_tensor((AT_ONCE,), Float32) for _ in range(2))
        out = cute.make_rmem_tensor((QUAD, AT_ONCE), Float32)
        for i in cutlass.range_constexpr(AT_ONCE):
            split = first + i * step
            clamped_split = cutlass.min(split, partials.splits - 1)
            highest, weight = partials.weight_of(row, clamped_split)
            top[i] = cutlass.select_(split < partials.splits, highest, -Float32.inf)
            total[i] = cutlass.select_(split < partials.splits, weight, Float32(0.0))
            partials.load_quad(row, clamped_split, column, out[None, i])
            for c in cutlass.range_constexpr(QUAD):  # an output may be inf, and 0 * inf is NaN
                out[c, i] = cutlass.select_(split < partials.splits, out[c, i], Float32(0.0))
        for i in cutlass.range_constexpr(AT_ONCE):
            for c in cutlass.range_constexpr(QUAD):
                out[c, i] = out[c, i] * total[i]
            self.merge(top[i], total[i], out[None, i])

    @cute.jit
    def merge(self, top: Float32, total: Float32, out: cute.Tensor):
        """Merge a second partial result of the same columns."""
        highest, scale_log2 = cute.arch.fmax(self.top[0], top), self.scale * LOG2_E
        base = 0.0 if highest == -Float32.inf else highest
        own_factor = cute.math.exp2((self.top[0] - base) * scale_log2, fastmath=True)
        merged_factor = cute.math.exp2((top - base) * scale_log2, fastmath=True)
        self.top[0] = highest
        self.total[0] = self.total[0] * own_factor + total * merged_factor
        for i in cutlass.range_constexpr(QUAD):
            self.out[i] = self.out[i] * own_factor + out[i] * merged_factor

    def lse(self) -> Float32:
        return self.top[0] * self.scale + cute.math.log(self.total[0], fastmath=True)

    def finalize_row(self, score_pipeline: ScorePipeline, head: Int32) -> Float32:
        return self.finalize(score_pipeline.sinks, head)

    @cute.jit
    def finalize(self, sinks: cute.Tensor | None, head: Int32) -> Float32:
        """Finish the sum and return the LSE.

        Args:
            sinks: a logit per head. The logit is part of the sum and has no output.
            head: head index.
        """
        lse = self.lse()
        if cutlass.const_expr(sinks is not None):
            if head < sinks.shape[0]:
                lse = self.with_logit(sinks[head])
        return lse

    @cute.jit
    def with_logit(self, logit: Float32) -> Float32:
        """Add a logit in natural units to the sum, and return the LSE."""
        top = cutlass.select_(self.total[0] == 0.0, -Float32.inf, self.top[0] * self.scale)
        highest = cute.arch.fmax(top, logit)
        base = cutlass.select_(highest == -Float32.inf, Float32(0.0), highest)
        keys = cute.math.exp2((top - base) * LOG2_E, fastmath=True)
        self.total[0] = self.total[0] * keys + cute.math.exp2((logit - base) * LOG2_E, fastmath=True)
        for i in cutlass.range_constexpr(QUAD):
            self.out[i] = self.out[i] * keys
        return base + cute.math.log(self.total[0], fastmath=True)

    @cute.jit
    def write(self, target: cute.Pointer, element: cutlass.Constexpr[Element]):
        """Write the columns of the normalized output in 16 bits."""
        inverse = 0.0 if self.total[0] == 0.0 else cute.arch.rcp_approx(self.total[0])
        pair_pointer = cute.make_ptr(Int32, target.toint(), cute.AddressSpace.gmem, assumed_align=8)
        pairs = cute.make_tensor(pair_pointer, cute.make_layout(2))
        for i in cutlass.range_constexpr(2):
            pairs[i] = element.pack_pair(self.out[2 * i] * inverse, self.out[2 * i + 1] * inverse)

    @cute.jit
    def store_partial(self, partials: WorkspacePartials, row: Int32, split: Int32, column: Int32):
        """Store the columns of the normalized output, and once per row the maximum and the sum, as a partial result."""
        inverse = 0.0 if self.total[0] == 0.0 else cute.arch.rcp_approx(self.total[0])
        for i in cutlass.range_constexpr(QUAD):
            self.out[i] = self.out[i] * inverse
        cute.autovec_copy(self.out, vector_at(partials.output(row, split) + column, Float32, QUAD))
        if column == 0:
            cute.arch.store(partials.weight(row, split), self.top[0])
            cute.arch.store(partials.weight(row, split) + 1, self.total[0])

    @cute.jit
    def join_lanes(self):
        """Merge the lanes with the same columns. Afterwards all lanes have the sum."""
        for bits in (COLUMN_LANES, 2 * COLUMN_LANES):
            peer_out = cute.make_rmem_tensor((QUAD,), Float32)
            top = cute.arch.shuffle_sync_bfly(self.top[0], offset=bits)
            total = cute.arch.shuffle_sync_bfly(self.total[0], offset=bits)
            for i in cutlass.range_constexpr(QUAD):
                peer_out[i] = cute.arch.shuffle_sync_bfly(self.out[i], offset=bits)
            self.merge(top, total, peer_out)

    @cute.jit
    def join_warps(self, shared: cute.Tensor, warp: Int32):
        """Merge all warps of the CTA, in the order of warps. Afterwards the first warp has the sum.

        Args:
            shared: shared memory (6, lane, warp).
            warp: index of the warp.
        """
        lane = cute.arch.lane_idx()
        if lane < COLUMN_LANES:
            shared[0, lane, warp], shared[1, lane, warp] = self.top[0], self.total[0]
            for i in cutlass.range_constexpr(QUAD):
                shared[2 + i, lane, warp] = self.out[i]
        cute.arch.sync_threads()
        if warp == 0 and lane < COLUMN_LANES:
            for w in cutlass.range_constexpr(1, WARPS):
                warp_out = cute.make_rmem_tensor((QUAD,), Float32)
                for i in cutlass.range_constexpr(QUAD):
                    warp_out[i] = shared[2 + i, lane, w]
                self.merge(shared[0, lane, w], shared[1, lane, w], warp_out)
