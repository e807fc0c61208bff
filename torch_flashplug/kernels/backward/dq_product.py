"""Product dQ = dS K of a step of the fused backward on Hopper, and its addition to the dQ workspace."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import warpgroup

from ..primitives import sm90
from .pre_post_process import WARPGROUPS
from .workspace import DqWorkspace

DS_STAGES = 2  # stages of dS: a warpgroup writes the next dS while its peer may still multiply with the previous dS


@dataclass(frozen=True)
class DqProduct:
    """Product dQ = dS K of a step: 64 rows and the warpgroup's half of the columns.

    Each warp adds its 16 rows to global memory on its own.
    """

    product: sm90.WgmmaProduct
    left: cute.Tensor  # dS: (MMA, 1, 64/16, stage and warpgroup)
    right: cute.Tensor  # K: (MMA, 1, 64/16, warpgroup whose keys are summed)
    pipeline: sm90.Pipeline  # pipeline of dS
    acc: cute.Tensor  # fp32: 64 x half of the columns
    staging: cute.Tensor  # (floats of a unit,): the warp's part of the staging buffer
    workspace: DqWorkspace
    # Pipeline of the staging buffer, if an accumulator warp does the adding; released when written.
    staged: sm90.Pipeline | None

    @cute.jit
    def multiply(self, count: Int32):
        """Issue the product with dS number `count` as soon as both warpgroups have written this dS.

        Before the first dS (`count` is -1) the product reads undefined data, and its result is never sent.
        """
        if count >= 0:
            self.pipeline.producer_wait(count + DS_STAGES)
        first_stage = self.pipeline.stage_index(count) * WARPGROUPS
        for w in cutlass.range_constexpr(WARPGROUPS):
            left = self.left[None, None, None, first_stage + w]
            self.product.multiply(self.acc, left, self.right[None, None, None, w], accumulate=w > 0)
        warpgroup.commit_group()

    @cute.jit
    def send(self, unit: Int32, earlier_steps: Int32, count: Int32):
        """Add the product to a unit of the dQ workspace.

        Args:
            unit: unit of the dQ workspace.
            earlier_steps: steps of the tile before this step. With 0, no dS of the tile has been multiplied yet, and
                nothing is sent.
            count: number of the dS among all steps of the CTA.
        """
        if earlier_steps > 0:
            self.wait_for_staging(count)
            quads = cute.size(self.acc) // 4
            lane_layout = cute.make_layout((4, quads), stride=(1, sm90.WARP * 4))
            lanes = cute.make_tensor(self.staging.iterator + cute.arch.lane_idx() * 4, lane_layout)
            cute.autovec_copy(cute.make_tensor(self.acc.iterator, cute.make_layout((4, quads))), lanes)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            if cutlass.const_expr(self.staged is not None):
                self.staged.consumer_release(count)
            else:
                with cute.arch.elect_one():
                    self.workspace.add(unit, self.staging)

    @cute.jit
    def wait_for_staging(self, count: Int32):
        """Wait until the previous contents of the staging buffer have been read."""
        if cutlass.const_expr(self.staged is not None):
            if count > 0:
                self.staged.consumer_wait(count - 1)
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()


@dataclass(frozen=True)
class PendingDq:
    """Product dQ of the previous step, which still has to be added to the workspace."""

    unit: Int32  # unit of the dQ workspace
    earlier_steps: Int32  # steps of the same tile before this step
