"""Hopper mechanisms: rings of TMA buffers, the queue of tiles, turns between warpgroups, wgmma on one warpgroup's 64
rows.

All waits and arrivals of a kernel go through Ring, TileQueue, Turns and join_warpgroup(s); a kernel never touches a
barrier itself.
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

SLAB = 16  # rows of one warp's part of an output, stored by one TMA instruction per 64 columns
EVICT_NORMAL, EVICT_FIRST = 0x1000000000000000, 0x12F0000000000000  # L2 policies of TMA loads
# Whole numbers up to 2^22, added to the first, are by the second more than they are, read as fp32: of conversions an SM
# does half as many as it multiplies.
FLOAT_OF_ZERO, OFFSET = 0x4B400000, 1.5 * 2.0**23
MAIL_SLOTS = 2  # tile numbers on their way from a producer warp to its consumers


@dataclass(frozen=True)
class Ring:
    """Buffers that the producer warp fills, mostly by TMA, and warpgroups drain. Slot and phase follow from the running
    count of blocks, so there is no state to carry.

    A slot has two mbarriers: `full` completes when the bytes have landed, `empty` when every consumer warp has let go.
    """

    full: cute.Pointer
    empty: cute.Pointer
    stages: int
    slot_bytes: int

    @classmethod
    def create(cls, smem: cutlass.memory.SmemAllocator, stages: int, slot_bytes: int) -> Ring:
        barriers = smem.allocate_array(cutlass.Int64, 2 * stages)
        return cls(barriers, barriers + stages, stages, slot_bytes)

    def part(self, index: Int32, stages: int) -> Ring:
        """One of several rings made as one."""
        return Ring(self.full + index * stages, self.empty + index * stages, stages, self.slot_bytes)

    def init(self, consumer_warps: int, producer_warps: int = 1):
        """One thread, before anybody waits."""
        for slot in range(self.stages):
            cute.arch.mbarrier_init(self.full + slot, producer_warps)
            cute.arch.mbarrier_init(self.empty + slot, consumer_warps)

    @property
    def power_of_two(self) -> bool:
        """Bits serve for slot and phase: the hottest loop is four instructions shorter than with a signed remainder."""
        return self.stages & (self.stages - 1) == 0

    def slot(self, count: Int32) -> Int32:
        return count & (self.stages - 1) if self.power_of_two else count % self.stages

    def phase(self, count: Int32) -> Int32:
        rounds = count >> (self.stages.bit_length() - 1) if self.power_of_two else count // self.stages
        return rounds & 1

    @cute.jit
    def wait_free(self, count: Int32):
        """Producer warp: wait until the slot is free; a fresh slot counts as freed."""
        cute.arch.mbarrier_wait(self.empty + self.slot(count), self.phase(count) ^ 1)

    @cute.jit
    def acquire(self, count: Int32):
        """Producer warp: wait until the slot is free, then announce the bytes."""
        self.wait_free(count)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.full + self.slot(count), self.slot_bytes)

    def arrival(self, count: Int32) -> cute.Pointer:
        """The mbarrier that a TMA load of this block must signal."""
        return self.full + self.slot(count)

    @cute.jit
    def wait(self, count: Int32):
        """Consumer: the bytes of this block are there."""
        cute.arch.mbarrier_wait(self.full + self.slot(count), self.phase(count))

    @cute.jit
    def release(self, count: Int32):
        """Consumer warp: its wgmmas that read this block have been waited for."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.empty + self.slot(count))

    @cute.jit
    def fill(self, count: Int32):
        """Producer warp: the slot holds its block, where no bytes are announced."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.arrival(count))

    @cute.jit
    def fill_behind_copies(self, count: Int32):
        """Producer warp: the slot holds its block once all lanes' copies (cp.async) have landed."""
        # Each lane adds an arrival to those that are awaited, and arrives when its copies have landed.
        text, arrival = "cp.async.mbarrier.arrive.shared::cta.b64 [{$r0}];", self.arrival(count)
        cute.arch.inline_ptx(text, read_only_args=[arrival.toint()])
        cute.arch.sync_warp()
        self.fill(count)


@dataclass(frozen=True)
class Operand:
    """One tensor: the TMA atom that moves its tiles, its TMA coordinates (rows, cols, heads, batch), its place in
    shared memory.
    """

    atom: cute.CopyAtom
    m: cute.Tensor
    s: cute.Tensor

    def head(self, head: Int32, batch: Int32) -> Operand:
        """The same operand, of one head."""
        return Operand(self.atom, self.m[None, None, head, batch], self.s)

    def tiles(
        self, shape: tuple[int, int], coordinate: tuple[int | None, int | None]
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """Shared and global tiles of one head as TMA moves them: (TMA, slot), (TMA, tiles along the free mode of
        `coordinate`).
        """
        g = cute.local_tile(self.m, shape, coordinate)  # (rows, cols, tiles)
        return cpasync.tma_partition(
            self.atom, 0, cute.make_layout(1), cute.group_modes(self.s, 0, 2), cute.group_modes(g, 0, 2)
        )


@dataclass(frozen=True)
class Input:
    """How TMA brings one operand: boxes of rows x columns into so many slots of shared memory. Sizes and a layout, both
    known when traced: made once to launch, and again in the kernel.
    """

    element: Element
    rows: int
    columns: int
    slots: int
    layout: cute.ComposedLayout  # (rows, columns, slot)

    @classmethod
    def create(cls, element: Element, rows: int, columns: int, slots: int, major: str = "rows") -> Input:
        """major: "rows" or "columns", along which elements lie on end in global memory."""
        order = {"rows": LayoutEnum.ROW_MAJOR, "columns": LayoutEnum.COL_MAJOR}[major]
        sizes = (ROWS_PER_WARPGROUP, rows, columns)
        return cls(element, rows, columns, slots, hopper.make_smem_layout_b(order, sizes, element.dtype, slots))

    @property
    def bytes(self) -> int:
        """Of a box."""
        return self.rows * self.columns * self.element.bytes

    def tma(self, m: cute.Tensor) -> tuple[cute.CopyAtom, cute.Tensor]:
        """The atom that loads boxes of m (rows, columns, heads, batch), and its coordinates."""
        one, box = cute.slice_(self.layout, (None, None, 0)), (self.rows, self.columns)
        return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), m, one, box)

    def ring(self, smem: cutlass.memory.SmemAllocator, boxes: int = 1, more_bytes: int = 0) -> Ring:
        """Of slots, or of so many slots at once; more_bytes: what lands with them."""
        return Ring.create(smem, self.slots // boxes, boxes * self.bytes + more_bytes)

    def buffer(self, smem: cutlass.memory.SmemAllocator) -> cute.Tensor:
        return smem.allocate_tensor(self.element.dtype, self.layout.outer, 1024, self.layout.inner)


def output_tma(element: Element, m: cute.Tensor, columns: int) -> tuple[cute.CopyAtom, cute.Tensor]:
    """The atom that stores a warp's SLAB rows of m (rows, columns, heads, batch), and its coordinates."""
    layout = slab_layout(element.dtype, SLAB, columns)
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), m, layout, (SLAB, columns))


def create_mail(smem: cutlass.memory.SmemAllocator) -> tuple[cute.Tensor, Ring]:
    """What a TileQueue sends numbers through."""
    ring = Ring.create(smem, MAIL_SLOTS, 0)
    return cute.make_tensor(smem.allocate_array(Int32, MAIL_SLOTS), cute.make_layout(MAIL_SLOTS)), ring


def rows_first(t: cute.Tensor) -> cute.Tensor:
    """(rows, columns, heads, batch) view of (batch, heads, rows, columns), as tiles want it."""
    return cute.make_tensor(t.iterator, cute.select(t.layout, mode=[2, 3, 1, 0]))


def columns_first(t: cute.Tensor) -> cute.Tensor:
    """(columns, rows, heads, batch) view of the same: V as the N x K operand of the second product."""
    return cute.make_tensor(t.iterator, cute.select(t.layout, mode=[3, 2, 1, 0]))


def transposed(s: cute.Tensor) -> cute.Tensor:
    """(columns, rows, slot) view of (rows, columns, slot): the same bytes, as the other major mode reads them."""
    return cute.make_tensor(s.iterator, cute.select(s.layout, mode=[1, 0, 2]))


@cute.jit
def load_block(
    atom: cute.CopyAtom,
    tXgX: cute.Tensor,
    tXsX: cute.Tensor,
    ring: Ring,
    block: Int32,
    count: Int32,
    policy: cutlass.Int64 | None = None,
):
    """Producer warp: one block of Q (64 rows), K or V as the ring's block number `count`, once its slot is free."""
    ring.acquire(count)
    slot, arrival = tXsX[None, ring.slot(count)], ring.arrival(count)
    cute.copy(atom, tXgX[None, block], slot, tma_bar_ptr=arrival, cache_policy=policy)


def slab_layout(dtype: type[cutlass.Numeric], rows: int, columns: int) -> cute.ComposedLayout:
    """An output in shared memory: each warp's SLAB rows are contiguous, so that a warp stores them on its own."""
    kind = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, dtype, columns)
    return cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, dtype), (rows, columns), order=(1, 0))


@cute.jit
def store_slabs(
    rX: cute.Tensor, sX: cute.Tensor, out: Operand, first: Int32, mma: cute.TiledMma, column_block: int = 0
):
    """A warpgroup's accumulator in 16 bits through sX (64, columns) to global memory, from slab `first` on, into that
    block of as many columns; each warp sends its rows when it has them.
    """
    columns, thread = cute.size(sX, mode=[1]), cute.arch.thread_idx()[0] % WARPGROUP
    warp_in_group = cute.arch.make_warp_uniform(thread // WARP)
    matrices = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), rX.element_type)
    to_smem = cute.make_tiled_copy_C(matrices, mma).get_slice(thread)
    cute.copy(to_smem, to_smem.retile(rX), to_smem.partition_D(sX))
    cute.arch.fence_proxy("async.shared", space="cta")  # the TMA store reads what stmatrix wrote
    cute.arch.sync_warp()
    slab = Operand(out.atom, out.m, cute.local_tile(sX, (SLAB, columns), (warp_in_group, 0)))
    tXsX, tXgX = slab.tiles((SLAB, columns), (None, column_block))
    cute.copy(out.atom, tXsX, tXgX[None, first + warp_in_group])
    cute.arch.cp_async_bulk_commit_group()


@dataclass(frozen=True)
class TileQueue:
    """CTA c starts with tile c. The producer warp draws each further one from a counter in global memory and mails it
    to the consumers.

    Every tile is followed by exactly one draw, so whoever makes draw number `total` knows it is the last and puts the
    counter back to zero: a launch leaves the counter as it found it, and no host ever clears it.

    Where tiles wait for earlier ones, a CTA draws its first tile, too. Then every tile before a drawn one is in the
    hands of a CTA that runs; with the first tiles dealt out it could be a CTA's that waits for an SM, for ever.
    """

    counter: cute.Pointer  # global Int32
    mail: cute.Tensor  # (MAIL_SLOTS,) Int32 in shared memory
    ring: Ring  # of the mail's slots
    total: Int32
    first_drawn: bool = False

    @cute.jit
    def draw(self) -> Int32:
        """Producer warp: a ticket, on its way from memory until `post` looks at it."""
        ticket = Int32(0)
        if cute.arch.lane_idx() == 0:
            ticket = cute.arch.atomic_add(self.counter, Int32(1), sem="relaxed", scope="gpu")
        return ticket

    @cute.jit
    def post(self, nth: Int32, ticket: Int32) -> Int32:
        """Producer warp: the ticket's tile as this CTA's nth mail; its number, `total` or more when there is none."""
        ticket = cute.arch.shuffle_sync(ticket, 0)
        last = self.total - 1
        if cutlass.const_expr(self.first_drawn):
            last += cute.arch.grid_dim()[0]
        # All lanes store: a branch of one lane here makes ptxas lay out every wait of the kernel worse (-2 %).
        if ticket == last:
            cute.arch.store(self.counter, Int32(0))
        number = ticket
        if cutlass.const_expr(not self.first_drawn):
            number = cute.arch.grid_dim()[0] + ticket
        self.ring.wait_free(nth)
        with cute.arch.elect_one():
            self.mail[self.ring.slot(nth)] = number
            cute.arch.mbarrier_arrive(self.ring.arrival(nth))
        return number

    @cute.jit
    def take(self, nth: Int32) -> Int32:
        """Consumer warp: the tile of this CTA's nth mail."""
        self.ring.wait(nth)
        number = self.mail[self.ring.slot(nth)]
        cute.arch.sync_warp()
        self.ring.release(nth)
        return cute.arch.make_warp_uniform(number)


@dataclass(frozen=True)
class Turns:
    """Warpgroups issue their products in rotation, so that one's softmax runs under another's tensor-core work
    (FlashAttention-3's ping-pong).

    Warpgroup w waits on named barrier first + w, where its predecessor arrives; the last one arrives once at the start
    to let the first begin.
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
    def take(self):
        if cutlass.const_expr(self.count > 1):
            cute.arch.barrier(barrier_id=self.first + self.warpgroup, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def pass_on(self):
        if cutlass.const_expr(self.count > 1):
            successor = (self.warpgroup + 1) % self.count
            cute.arch.barrier_arrive(barrier_id=self.first + successor, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def skip(self):
        """A turn without a product."""
        self.take()
        self.pass_on()


@cute.jit
def join_warpgroup(first: int, wg: Int32):
    """Consumer: the four warps of warpgroup wg wait for each other, on named barrier first + wg."""
    cute.arch.barrier(barrier_id=first + wg, number_of_threads=WARPGROUP)


@cute.jit
def join_warpgroups(name: int, count: cutlass.Constexpr[int]):
    """Consumers: all of their warpgroups wait for each other."""
    cute.arch.barrier(barrier_id=name, number_of_threads=count * WARPGROUP)


@cute.jit
def join_cluster():
    """Every thread: what CTAs of the cluster have stored in their own shared memory can be read by all.

    Fences of shared memory only: a barrier that releases waits for global memory too, half a microsecond (PTX ISA,
    fence.sync_restrict).
    """
    cute.arch.inline_ptx("fence.release.sync_restrict::shared::cta.cluster;")
    cute.arch.cluster_arrive_relaxed()
    cute.arch.cluster_wait()
    cute.arch.inline_ptx("fence.acquire.sync_restrict::shared::cluster.cluster;")


@cute.jit
def start_cta(warp_idx: Int32, atoms: tuple[cute.CopyAtom, ...], rings: tuple[tuple, ...]):
    """Every thread, before roles part: TMA descriptors on their way, barriers ready. rings: (ring, consumer warps), and
    producer warps where these are not one.
    """
    if warp_idx == 0:
        for atom in atoms:
            cpasync.prefetch_descriptor(atom)
        with cute.arch.elect_one():
            for ring, *warps in rings:
                ring.init(*warps)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()


def make_mma(
    dtype: type[cutlass.Numeric], columns: int, left: str, right: str, sums: type[cutlass.Numeric] = Float32
) -> cute.TiledMma:
    """64 x columns on one warpgroup, operands from "rows" (K-major in shared memory), "columns" (MN-major) or
    "registers"; sums: what it adds up in.
    """
    major = {"rows": OperandMajorMode.K, "columns": OperandMajorMode.MN, "registers": OperandMajorMode.K}
    source = warpgroup.OperandSource.RMEM if left == "registers" else warpgroup.OperandSource.SMEM
    return hopper.make_trivial_tiled_mma(
        dtype, dtype, major[left], major[right], sums, (1, 1, 1), (ROWS_PER_WARPGROUP, columns), source
    )


@dataclass(frozen=True)
class Product:
    """acc (+)= A B on one warpgroup. Two atoms, because setting ACCUMULATE inside a traced loop would leak an SSA value
    out of it.
    """

    begin: cute.TiledMma  # overwrites the accumulator
    add: cute.TiledMma  # adds to it

    @classmethod
    def create(cls, make_mma) -> Product:
        begin, add = make_mma(), make_mma()
        begin.set(warpgroup.Field.ACCUMULATE, False)
        add.set(warpgroup.Field.ACCUMULATE, True)
        return cls(begin, add)

    def issue(self, acc: cute.Tensor, tA: cute.Tensor, tB: cute.Tensor, accumulate: bool) -> None:
        """One committed group of asynchronous wgmmas; tA (MMA, 1, K or more), tB (MMA, 1, K)."""
        self.multiply(acc, tA, tB, accumulate)
        warpgroup.commit_group()

    def multiply(self, acc: cute.Tensor, tA: cute.Tensor, tB: cute.Tensor, accumulate: bool) -> None:
        """The same, without the commit."""
        for k in range(cute.size(tB, mode=[2])):
            mma = self.add if accumulate or k > 0 else self.begin
            cute.gemm(mma, acc, tA[None, None, k], tB[None, None, k], acc)


@dataclass(frozen=True)
class SlotProduct:
    """acc (+)= A B, B from a slot of a ring."""

    product: Product
    left: cute.Tensor  # (MMA, 1, K)
    right: cute.Tensor  # (MMA, 1, K, slot)
    acc: cute.Tensor

    @property
    def values(self) -> cute.Tensor:
        """(2, columns) of a thread."""
        return rows_and_columns(self.acc)

    def start(self, slot: Int32) -> None:
        """Overwrites the accumulator; one committed group."""
        self.product.issue(self.acc, self.left, self.right[None, None, None, slot], accumulate=False)

    def add(self, slot: Int32) -> None:
        """Adds to it; one committed group."""
        self.product.issue(self.acc, self.left, self.right[None, None, None, slot], accumulate=True)


def zeros(mma: cute.TiledMma, shape: tuple[int, int], sums: type[cutlass.Numeric] = Float32) -> cute.Tensor:
    """Accumulator of one warpgroup, (64, N), cleared."""
    acc = cute.make_rmem_tensor(mma.partition_shape_C(shape), sums)
    acc.fill(sums(0))
    return acc


@dataclass(frozen=True)
class Start:
    """What an accumulator of whole numbers begins with, in shared memory. Loads land while a warpgroup waits for its
    turn; as many moves ptxas would put behind the barrier, where other warpgroups wait for them.
    """

    four: cute.Pointer  # (4,) Int32

    @classmethod
    def create(cls, smem: cutlass.memory.SmemAllocator) -> Start:
        """By every thread, ahead of start_cta."""
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
    """The same registers of an accumulator that began with FLOAT_OF_ZERO, in fp32: whole numbers and OFFSET; exactly:
    without that.
    """
    floats = cute.make_tensor(cute.recast_ptr(acc.iterator, dtype=Float32), acc.layout)
    if exactly:
        for i in range(cute.size(acc)):
            floats[i] = floats[i] - OFFSET
    return floats
