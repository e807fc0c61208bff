"""Specification of a compiled kernel, and the check that the hardware can hold the kernel.

The module defines the kinds of kernels, the name of a kernel (pack symbol, cache key, log line), and the budgets that
make a tile legal. The kernel table, the compiler, the tuner and the tests use the module.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from . import features
from .dtypes import DTYPES, KERNEL_DTYPES

# Kinds of kernels:
# - fwd: forward.
# - bwd: fused backward.
# - detbwd: deterministic backward, with the same accumulation order in every run.
# - partbwd: split backward in two parts, dQ and dK with dV. A part may be left out. The order is always the same.
# - decode: forward of short queries, whose keys may be split.
# - dbias: gradient of a bias, summed along broadcast dims, together with any backward or alone.
# - tilebwd: single-tile backward: all gradients, with the gradient of a bias, of sequences that fit into a tile.
KINDS = ("fwd", "bwd", "detbwd", "partbwd", "decode", "dbias", "tilebwd")
FEATURE_TAGS = tuple(features.TAGS)

WARP, WARPGROUP = 32, 128  # threads
MMA_ATOM_M = 16  # rows of an mma.sync, and rows of a warp in a wgmma
FP32_BYTES = 4
SMEM_BYTES = {80: 166912, 90: 232448}  # usable shared memory of one CTA, by architecture
SMEM_RESERVED = 1024  # further shared memory that every CTA takes
L2_BYTES = {90: 50 << 20}
MAX_REGISTERS = 255  # largest number of registers of a thread
WORKSPACE_UNITS = 8  # units of a block of rows in the backward workspace (UNITS of kernels/backward/workspace.py)
PEERS_AT_ONCE = 4  # CTAs of a cluster whose results a decode reads at a time (AT_ONCE of kernels/decode/split_kv.py)
REGISTER_FILE = 65536
BACKWARD_TILE = (64, 128)  # tile_m, tile_n: preprocess and postprocess of the backward rely on the sizes
SPLIT_BACKWARD_TILE = (64, 64)  # tile of a split backward, and of a backward with four warps for the columns of 32 keys
SINGLE_TILE = (64, 64)  # tile of a single-tile backward: the largest numbers of queries and keys of a sequence
BIAS_TILES = ((128, 64), (128, 128))  # tiles of dbias
SPARSE_BLOCK = 128  # block-sparse lists: rows and keys of a block
ORDER_BLOCK_N = 64  # block-sparse lists: keys in a unit of the accumulation order
PAGE_GROUP_ROWS = 16  # rows copied together by a thread; a page read in place has a multiple of so many rows
MAX_TOTAL_ROWS = 1 << 30  # limit of the rows and keys of all packed sequences together
# Query rows of a block in the second set of block-sparse lists. Tiles of 192 rows use the set, because 192 is no
# divisor of SPARSE_BLOCK.
SPARSE_BLOCK_M_192 = 192

# Hopper
ROWS_PER_WARPGROUP = 64  # rows of a wgmma
MAX_CLUSTER_SIZE = 8  # largest cluster that every Hopper GPU can place (clusters of 16 ran slower if placed)
MAX_Q_TILES = 3  # largest number of Q tiles in shared memory: in use, arriving, and leaving as O
BARRIER_BYTES = 1024  # bytes of mbarriers, rounded up to the alignment of swizzled tiles


class RegisterSplit(NamedTuple):
    """Registers per thread after the register split.

    The total 128 * (producer + number of consumer warpgroups * consumer) is at most the registers of the CTA at the
    launch: 65536, but 64512 with two consumer warpgroups. With a larger total, the last warpgroup would wait forever.
    """

    producer: int  # registers of a thread of the producer warpgroup
    consumer: int  # registers of a thread of a consumer warpgroup


REGISTER_SPLIT = {  # by the number of consumer warpgroups
    1: RegisterSplit(56, 256),
    2: RegisterSplit(24, 240),
    3: RegisterSplit(32, 160),
}
BUSY_REGISTER_SPLIT = RegisterSplit(40, 232)  # two consumer warpgroups, and a producer that computes
TWO_CTA_REGISTER_SPLIT = RegisterSplit(40, 216)  # of CTAs with one consumer warpgroup, with two CTAs per SM
REGISTER_OVERHEAD = 28  # registers for addresses, row state and loop counters of a consumer, as seen in SASS
OVERHEAD_OF_96_KEYS = 24  # the same for a backward of 96 keys, whose threads hold row statistics of two rows
COPY_UNIT = 16  # bytes: copies of a bias move multiples of the unit (kernels/score_stages/bias_load.py)
SWIZZLED_LINE = 128  # bytes of a line in the TMA swizzle
BACKWARD_WARPGROUPS = 2
DQ_TILE_M = BACKWARD_WARPGROUPS * ROWS_PER_WARPGROUP  # query rows of a CTA of the split backward's dQ kernel
DQ_WRITERS = 2  # idle warps of a backward CTA that clear the dQ workspace and write dQ
DQ_WRITER_BYTES = 12 * 1024  # bytes of the workspace in flight for each dQ writer
KV_IN_REGISTERS_D = 64  # up to this head dim, the five matrix products of a backward step have separate registers
EARLY_RESCALE_DV = 256  # from this dim on, O is rescaled during the next Q K product, not after the P V product
MAX_TILE_DV = 256  # columns of O that a warpgroup holds: the limit of a wgmma, and of registers
BOX_COLUMNS = 64  # columns of a box of operands of a wide split backward, a line of the TMA swizzle
WIDE_RINGS = (4, 3)  # numbers of boxes in the ring of a wide split backward, in the order of preference
SPLIT_PADDING = 10  # decode: floats of a row of results beside the columns (PEER_PAD of split_kv.py, and two)

_HALF_SMEM = (SMEM_BYTES[90] + SMEM_RESERVED) // 2 - SMEM_RESERVED

EIGHT_BIT_DEPTH = 32  # elements of a row in a step of an 8-bit product; 16-bit products take as many bytes

# sm_80
AMPERE_OVERHEAD = 24  # REGISTER_OVERHEAD of kernels whose warps also load
AMPERE_NARROW = 128  # up to this head dim, a warp owns two slabs of rows and reads K and V half as often
AMPERE_COLUMNS = 64  # columns of dK and dV of 32 keys, held by a backward warp
AMPERE_SCORES = 32  # registers of the scores, the gradient of the scores, or dQ in a backward
# decode with 8-bit caches: smallest shared memory of a CTA, so that a Hopper SM has two CTAs. With three CTAs on some
# SMs, a cache of 512 MB took 110 us; with two CTAs per SM, 97 us (H100).
QUANTIZED_KV_MIN_SMEM_BYTES = 76 << 10
# decode: floats between rows of results, so that eight rows of an accumulator are in different banks
RESULT_ROW_PADDING = 8


class RegisterBudget(NamedTuple):
    """Registers of a thread that multiplies."""

    needed: int  # approximate number of registers that the thread needs
    available: int


class WideBuffers(NamedTuple):
    """Shared-memory buffers of a kernel of a wide split backward (kernels/backward/wide_tile.py)."""

    stages: int  # stages of the operand that is loaded as a whole
    ring: int  # boxes of 64 rows and BOX_COLUMNS columns in the ring


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """The identity of a compiled kernel. Equal specs share an object file.

    The resources of a kernel depend on the architecture, so an instance is a HopperSpec or an AmpereSpec. Both classes
    define these members:
    - `threads` and `smem_bytes()`: the threads and the shared memory of a CTA.
    - `accumulator_registers()`: the accumulator registers of a thread that multiplies.
    - `register_budget()`: the registers that such a thread needs, and the available registers.
    - `illegal_shape()`: None, or the property of the tile that no kernel can have, with the legal values.
    """

    kind: str  # a kind of KINDS
    arch: int  # 80 or 90: the architecture of the code; TARGETS has the GPUs that run the code
    dtype: str  # a name of DTYPES
    d: int  # head dim of Q and K in the tile; smaller head dims are padded with zeros
    dv: int  # head dim of V and O in the tile; smaller head dims are padded with zeros
    mask: str  # a name of FEATURE_TAGS: the tag of the features
    tile_m: int  # query rows of a CTA (fwd) or of a step (bwd)
    tile_n: int  # keys of a step (fwd) or of a CTA (bwd)
    stages: int  # pipeline stages: steps in flight in shared memory
    elementwise: bool = False  # sm_80: loads and stores of single elements, at any addresses and strides

    def __new__(cls, kind: str = "", arch: int = 0, *rest: object, **named: object) -> KernelSpec:
        """Create an instance of the class for `arch`. Unpickling calls the method without arguments."""
        return object.__new__(_SPEC_CLASSES.get(arch, cls) if cls is KernelSpec else cls)

    def __post_init__(self) -> None:
        if type(self) is not _SPEC_CLASSES.get(self.arch):
            archs = ", ".join(f"{arch} ({family.__name__})" for arch, family in _SPEC_CLASSES.items())
            raise ValueError(f"a {type(self).__name__} of arch={self.arch}; KernelSpec(...) makes {archs}")

    def name(self) -> str:
        head = f"d{self.d}" if self.d == self.dv else f"d{self.d}v{self.dv}"
        tile = f"m{self.tile_m}n{self.tile_n}s{self.stages}" + "e" * self.elementwise
        return f"{self.kind}_sm{self.arch}_{self.dtype}_{head}_{self.mask}_{tile}"

    @classmethod
    def from_name(cls, name: str) -> KernelSpec:
        """Return the spec of a kernel name, the inverse of `name()`. Raise ValueError for any other text."""
        match = _NAME.fullmatch(name)
        if not match or int(match[2]) not in _SPEC_CLASSES:
            raise ValueError(f"{name!r} is not a kernel name; one looks like fwd_sm90_bf16_d128_causal_m128n128s2")
        kind, arch, dtype, d, dv, mask, *tile, elements = match.groups()
        return KernelSpec(kind, int(arch), dtype, int(d), int(dv or d), mask, *map(int, tile), elements == "e")

    @property
    def features(self) -> features.Features:
        return features.TAGS[self.mask].features

    @property
    def is_backward(self) -> bool:
        return self.kind not in {"fwd", "decode"}

    @property
    def is_decode(self) -> bool:
        return self.kind == "decode"

    @property
    def shares_values(self) -> bool:
        """True if V is the first columns of K, so that the kernel keeps K alone."""
        return "shared" in self.features

    @property
    def is_split_backward(self) -> bool:
        return self.kind == "partbwd"

    @property
    def is_backward_of_96_keys(self) -> bool:
        """True for a fused backward whose warpgroups own dV and dK, because the registers of one do not hold both."""
        return self.kind == "bwd" and self.arch == 90 and self.d + self.dv > 2 * BACKWARD_TILE[1]

    @property
    def is_wide_backward(self) -> bool:
        """True for a split backward with separate kernels for dQ, dK and dV, because registers hold no two outputs."""
        return self.is_split_backward and max(self.d, self.dv) > MAX_TILE_DV

    @property
    def is_single_tile(self) -> bool:
        """True for a single-tile backward, which takes sequences that fit into a tile."""
        return self.kind == "tilebwd"

    @property
    def is_deterministic(self) -> bool:
        """True for a deterministic backward: all key blocks add to a query in the same order in every run."""
        return self.kind == "detbwd"

    @property
    def workspace_block_rows(self) -> int:
        """Number that the rows in the backward workspace are rounded up to a multiple of.

        With block-sparse lists, kernels visit all parts of a listed block, also parts behind the last row.
        """
        return SPARSE_BLOCK if features.uses_block_lists(self.features) else self.tile_m

    @property
    def column_tiles(self) -> int:
        """Number of tiles with the same rows. Each has an equal part of the columns of V and O."""
        return 1

    @property
    def listed_rows(self) -> int:
        """Number of query rows of the blocks in the block-sparse lists of the kernel."""
        return SPARSE_BLOCK_M_192 if self.kind == "fwd" and self.tile_m == SPARSE_BLOCK_M_192 else SPARSE_BLOCK

    @property
    def ctas_per_sm(self) -> int:
        """Number of CTAs per SM of a decode: 2 if shared memory and registers suffice, else 1.

        With two CTAs, a CTA starts or ends while the other CTA streams.
        """
        two_fit = 2 * (self.smem_bytes() + SMEM_RESERVED) <= SMEM_BYTES[self.arch] + SMEM_RESERVED
        return 1 + (two_fit and self.register_budget().needed <= self._decode_registers(2))

    def _decode_registers(self, ctas: int) -> int:
        """Return the registers of a thread without register split. Each scheduler has a quarter of the registers."""
        return min(MAX_REGISTERS, REGISTER_FILE // (-(-self.threads * ctas // WARPGROUP) * WARPGROUP) // 8 * 8)

    def row_bytes(self, operand: str) -> int:
        """Return the bytes of a row of "q", "k", "v" or "o". A gradient has the dtype of the tensor."""
        return (self.d if operand in "qk" else self.dv) * self.bytes_of(operand)

    def bytes_of(self, operand: str) -> int:
        """Return the bytes of an element of an operand in the format that kernels multiply."""
        recipe = features.recipe_of(self.features)
        eight = recipe is not None and (operand in "qk" or (operand == "v" and recipe.values is not None))
        return 1 if eight else KERNEL_DTYPES[self.dtype].num_bytes(operand)

    def kv_bytes(self) -> int:
        beside = features.key_bytes(self.features)
        values = 0 if self.shares_values else self.row_bytes("v")
        return self.stages * self.tile_n * (self.row_bytes("k") + values + beside)

    def _stage_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes that score stages keep for a block. Score stages of a decode keep nothing."""
        return 0 if self.is_decode else rows * columns * features.score_bytes(self.features)

    def _step_bytes(self) -> int:
        """Return the bytes of a backward step: Q, dO, LSE and delta."""
        return self.tile_m * (self.row_bytes("q") + self.row_bytes("o") + 2 * FP32_BYTES)

    def _keys_bytes(self) -> int:
        """Return the bytes of K, V and two dS buffers of a backward, or of K, V, P and dS."""
        weights = 2 * self.tile_m * KERNEL_DTYPES[self.dtype].num_bytes("q")
        return self.tile_n * (self.row_bytes("k") + self.row_bytes("v") + weights)

    def check(self) -> str | None:
        """Return None if the kernel can be built, else a sentence with the value, the limit and the remedy."""
        illegal = self.illegal_shape()
        if illegal is None and self.is_decode and self.elementwise:
            illegal = "a decode kernel must use vector loads, but is element-wise"
        if illegal is None and not features.TAGS[self.mask].supports(self.kind, self.arch):
            tags = (tag for tag, combination in features.TAGS.items() if combination.supports(self.kind, self.arch))
            illegal = (
                f"features {self.mask}; a {self.kind} of sm_{self.arch} must have {' or '.join(tags)} (features.py)"
            )
        in_blocks = self.listed_rows % self.tile_m == 0 and SPARSE_BLOCK % self.tile_n == 0
        if illegal is None and features.uses_block_lists(self.features) and not in_blocks:
            tall = f", or {SPARSE_BLOCK_M_192} rows" * (self.kind == "fwd")
            illegal = (
                f"tile {self.tile_m}x{self.tile_n}; with {self.mask}, use divisors of {SPARSE_BLOCK} for both{tall}"
            )
        if illegal is not None:
            return f"{self.name()}: {illegal}"
        need, limit = self.smem_bytes(), SMEM_BYTES[self.arch]
        if need > limit:
            return f"{self.name()}: needs {need} B of shared memory, sm_{self.arch} has {limit}; lower stages or tile_n"
        registers = self.register_budget()
        if registers.needed > registers.available:
            need, limit = registers
            return f"{self.name()}: needs about {need} registers, a thread has {limit}; lower tile_n or tile_m"
        return None


@dataclass(frozen=True, slots=True)
class HopperSpec(KernelSpec):
    """A kernel for Hopper: consumer warpgroups multiply (wgmma), and a producer warpgroup loads (TMA)."""

    @property
    def warpgroups(self) -> int:
        """Number of consumer warpgroups. Each owns 64 rows of the CTA, or a part of the columns."""
        if self.is_backward and not self.is_single_tile:
            return BACKWARD_WARPGROUPS
        return self.tile_m // ROWS_PER_WARPGROUP * self.column_warpgroups

    @property
    def threads(self) -> int:
        return WARPGROUP * self.warpgroups + (WARPGROUP if self.splits_registers else WARP)

    @property
    def splits_registers(self) -> bool:
        """True if a producer warpgroup gives registers away. The producer of most decode kernels is a single warp."""
        return not self.is_decode or self.column_warpgroups > 1

    @property
    def column_tiles(self) -> int:
        """Number of tiles with the same rows. O of more than MAX_TILE_DV columns does not fit in registers."""
        return -(-self.dv // MAX_TILE_DV) if self.kind == "fwd" else 1

    @property
    def column_warpgroups(self) -> int:
        """Number of warpgroups of a decode with the same rows. Each has an equal part of the columns of O."""
        return -(-self.dv // MAX_TILE_DV) if self.is_decode else 1

    @property
    def combines_in_cluster(self) -> bool:
        """True if the results of a decode CTA fit in the stages of V, where the CTAs of a cluster read them."""
        results = self.tile_m * (self.dv + SPLIT_PADDING) * FP32_BYTES
        fits = results <= self.stages * self.tile_n * self.row_bytes("v")
        return self.is_decode and fits and not self.shares_values

    @property
    def shared_p_bytes(self) -> int:
        """Bytes of the probabilities exchanged by the warpgroups of a decode with shared values.

        The number is 0 if K has columns beyond V: the probabilities replace the columns.
        """
        has_box = self.d > self.dv or not self.shares_values
        return 0 if has_box else self.stages * self.tile_m * self.tile_n * self.bytes_of("q")

    @property
    def tile_dv(self) -> int:
        """Number of columns of V and O in a tile."""
        return self.dv // self.column_tiles

    def row_bytes(self, operand: str) -> int:
        """Return the bytes of a row of an operand in a tile."""
        return (self.d if operand in "qk" else self.tile_dv) * self.bytes_of(operand)

    @property
    def q_columns(self) -> int:
        """Number of columns of a Q tile in shared memory. O leaves through the Q tile of the same rows."""
        return max(self.d, self.tile_dv) if self.stores_out_in_q else self.d

    @property
    def stores_out_in_q(self) -> bool:
        return self.bytes_of("q") == self.bytes_of("o")

    @property
    def num_q_buffers(self) -> int:
        """Number of 64-row parts of Q in shared memory: 1 to MAX_Q_TILES for each warpgroup, as K and V leave space."""
        limit = _HALF_SMEM if self.shares_sm else SMEM_BYTES[self.arch]
        free = limit - BARRIER_BYTES - self.kv_bytes() - self._stage_bytes(self.tile_m, self.tile_n)
        free -= self._out_bytes()
        return max(self.warpgroups, min(MAX_Q_TILES * self.warpgroups, free // self._q_buffer_bytes()))

    @property
    def shares_sm(self) -> bool:
        """True if an SM has two forward CTAs. With small tiles, a CTA computes while the other CTA waits."""
        least = self.kv_bytes() + self._q_buffer_bytes() + BARRIER_BYTES
        short = self.kind == "fwd" and features.has_short_tiles(self.features)
        return short and self.warpgroups == 1 and least <= _HALF_SMEM

    @property
    def ctas_per_sm(self) -> int:
        return KernelSpec.ctas_per_sm.fget(self) if self.is_decode else 1 + (self.shares_sm or self.is_single_tile)

    @property
    def register_split(self) -> RegisterSplit:
        if self.shares_sm or self.is_single_tile:
            return TWO_CTA_REGISTER_SPLIT
        has_busy_producer = self.kind == "dbias" or features.reads_pages(self.features)
        return BUSY_REGISTER_SPLIT if has_busy_producer and self.warpgroups == 2 else REGISTER_SPLIT[self.warpgroups]

    def _stage_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes that score stages keep for a block, with a copy unit behind each row of a bias.

        The number of query rows equals `rows`, even if `rows` are keys, because such blocks have 64 queries.
        """
        held = KernelSpec._stage_bytes(self, rows, columns)
        return held + rows * COPY_UNIT if held else 0

    def _q_buffer_bytes(self) -> int:
        q, o = self.row_bytes("q"), self.row_bytes("o")
        return ROWS_PER_WARPGROUP * (max(q, o) if self.stores_out_in_q else q)

    def _out_bytes(self) -> int:
        """Return the bytes of O, or 0 if O leaves through the buffers of Q."""
        return 0 if self.stores_out_in_q or self.is_decode else self.tile_m * self.row_bytes("o")

    @property
    def early_rescale(self) -> bool:
        return self.tile_dv >= EARLY_RESCALE_DV and self.bytes_of("v") > 1  # with 8-bit V, ptxas spills in this mode

    @property
    def kv_in_registers(self) -> bool:
        """True if the registers of a backward hold K, V and every product of a step."""
        return self.d + self.dv <= 2 * KV_IN_REGISTERS_D

    @property
    def shares_dq_registers(self) -> bool:
        """True if dQ of a fused backward has the registers of dP.

        Both must have equal sizes: ptxas serializes products whose accumulators overlap in part.
        """
        return self.d // BACKWARD_WARPGROUPS == self.tile_m

    def smem_bytes(self) -> int:
        """Return the shared memory of a CTA in bytes.

        - fwd: Q and O, the K pipeline and the V pipeline.
        - bwd: K and V, the pipelines of Q and dO with LSE and delta, two dS buffers, and buffers for dQ on the way to
          the workspace and from the workspace to global memory.
        - dbias: pairs of Q and K, or of dO and V.

        All kinds have the bytes of the score stages, and the barriers.
        """
        if self.kind == "dbias":
            pairs = self.stages * (self.tile_m * self.row_bytes("q") + self.tile_n * self.row_bytes("k"))
            return pairs + self._stage_bytes(self.tile_m, self.tile_n) + BARRIER_BYTES  # pairs also hold column sums
        if self.is_single_tile:
            return self._tile_bytes()
        if self.is_wide_backward:
            return max(self._wide_bytes(num_held, self.wide_buffers(num_held)) for num_held in (1, 2))
        if self.is_split_backward:
            return max(self._dq_bytes(self.dq_stages_v, self.dq_has_stage_smem), self._dkdv_bytes() + BARRIER_BYTES)
        if self.is_backward:
            return self._bwd_bytes() + self.dq_writer_units * DQ_WRITERS * self._dq_unit_bytes()
        q_bytes = self.tile_m * self.row_bytes("q") if self.is_decode else self.num_q_buffers * self._q_buffer_bytes()
        q_bytes += self.shared_p_bytes
        held = self.kv_bytes() + self._stage_bytes(self.tile_m, self.tile_n) + self._out_bytes()
        return q_bytes + held + BARRIER_BYTES

    def _tile_bytes(self) -> int:
        """Return the bytes of a tilebwd: stages of Q, K, V and dO; P and dS; outgoing dQ; score stages; barriers."""
        stage = 2 * (self.tile_m * self.row_bytes("q") + self.tile_n * self.row_bytes("v"))
        weights = 2 * self.tile_m * self.tile_n * self.bytes_of("q")
        held = self.tile_m * self.row_bytes("q") + self._stage_bytes(self.tile_m, self.tile_n)
        return self.stages * stage + weights + held + BARRIER_BYTES

    @property
    def dq_writer_units(self) -> int:
        """Number of workspace units in flight for a dQ writer of a backward: as many as fit, at least 1."""
        free = min(DQ_WRITERS * DQ_WRITER_BYTES, SMEM_BYTES[self.arch] - self._bwd_bytes())
        return max(1, free // (DQ_WRITERS * self._dq_unit_bytes()))

    def _dq_unit_bytes(self) -> int:
        """Return the bytes of a unit of dQ in the workspace: the rows of a warp, the columns of a warpgroup."""
        return MMA_ATOM_M * self.d // BACKWARD_WARPGROUPS * FP32_BYTES

    def _bwd_bytes(self) -> int:
        """Return the bytes of a backward without the units in flight for dQ writers."""
        written = DQ_WRITERS * self.tile_m // 8 * self.row_bytes("q")
        if self.is_backward_of_96_keys:  # P beside dS; no dQ in fp32
            return self._dkdv_bytes() + self.tile_n * self.tile_m * self.bytes_of("q") + written + BARRIER_BYTES
        return self._dkdv_bytes() + self.tile_m * self.d * FP32_BYTES + written + BARRIER_BYTES

    @property
    def dq_tile_m(self) -> int:
        """Number of query rows of a CTA of the dQ kernel of a split backward."""
        return ROWS_PER_WARPGROUP if self.is_wide_backward else DQ_TILE_M

    @property
    def dq_stages_v(self) -> int:
        """Number of V blocks in the shared memory of the dQ kernel of a split backward."""
        return 2 if self._dq_bytes(2) <= SMEM_BYTES[self.arch] else 1

    @property
    def dq_has_stage_smem(self) -> bool:
        """True if score stages of the dQ kernel fit into shared memory. Otherwise, stages read global memory."""
        return self._dq_bytes(1) <= SMEM_BYTES[self.arch]

    def _dq_bytes(self, stages_v: int, has_stage_smem: bool = True) -> int:
        """Return the bytes of the dQ kernel: Q and dO of all warpgroups, two K blocks, V, score stages, barriers."""
        q, k, v, do = (self.row_bytes(operand) for operand in "qkvo")
        held = has_stage_smem * self._stage_bytes(BACKWARD_WARPGROUPS * ROWS_PER_WARPGROUP, self.tile_n)
        return ROWS_PER_WARPGROUP * (2 * q + 2 * k + 2 * do + stages_v * v) + held + BARRIER_BYTES

    def _dkdv_bytes(self) -> int:
        """Return the bytes of the step pipelines, K, V, two dS buffers (split: P and dS), and score stages."""
        return self.stages * self._step_bytes() + self._keys_bytes() + self._stage_bytes(self.tile_n, self.tile_m)

    def wide_buffers(self, num_held: int) -> WideBuffers:
        """Return the buffers of a kernel of a wide split backward.

        Args:
            num_held: operands that stay in shared memory for a tile: 2 for dQ and dK, which have `stages` stages of the
                whole operand; 1 for dV, which has 2 stages where they fit.
        """
        stages = (self.stages,) if num_held > 1 else (2, 1)
        choices = [WideBuffers(number, ring) for number in stages for ring in WIDE_RINGS]
        fits = (buffers for buffers in choices if self._wide_bytes(num_held, buffers) <= SMEM_BYTES[self.arch])
        return next(fits, choices[-1])

    def _wide_bytes(self, num_held: int, buffers: WideBuffers) -> int:
        """Return the bytes of a kernel of a wide split backward.

        These are the held operands, the stages of the whole operand, the ring, P or dS, two stages of LSE and delta,
        and barriers.
        """
        columns = (num_held + buffers.stages) * self.d + buffers.ring * BOX_COLUMNS + self.tile_n
        return ROWS_PER_WARPGROUP * (columns * self.bytes_of("q") + 2 * 2 * FP32_BYTES) + BARRIER_BYTES

    def accumulator_registers(self) -> int:
        """Return the accumulator registers of a consumer thread.

        - fwd: scores and output in fp32, probabilities in 16 bits.
        - bwd of 96 keys: dK (or dV), the gradient of the scores (or scores, then dQ) in fp32, and the same in 16 bits.
        - other bwd: dK and dV, scores and the gradient of the scores (then dQ, if `shares_dq_registers`) in fp32,
          probabilities (then dS) in 16 bits. If `kv_in_registers`, all of these are separate, and K and V are in
          registers, too.
        - dbias: scores, the gradient of the scores, and the sum of the gradient in fp32.
        """
        if self.kind == "dbias":
            return 3 * self.tile_n // 2
        if self.is_single_tile:
            return self.tile_n // 2 + max(self.tile_n, 3 * self.d // 2) + self.tile_n // 4
        if self.is_wide_backward:
            boxes = -(-self.d // (BACKWARD_WARPGROUPS * BOX_COLUMNS))
            return boxes * BOX_COLUMNS // 2 + self.tile_m // 2 + self.tile_m // 4
        if self.is_split_backward:
            weights = self.tile_m // 4
            return max(self.d // 2 + self.tile_n, (self.d + self.dv) // 4 + self.tile_m // 2) + weights
        if self.is_backward_of_96_keys:
            return max(self.d, self.dv) * self.tile_n // WARPGROUP + self.tile_n // 2 + self.tile_n // 4
        if self.is_backward:
            keys = (self.d + self.dv) // 2 + self.tile_m + self.tile_m // 4
            keys += (not self.shares_dq_registers) * self.d // 4
            return keys + self.kv_in_registers * (self.tile_m // 4 + (self.d + self.dv) // 4)
        out = self.tile_dv // self.column_warpgroups // 2
        return self.tile_n // 2 + self.tile_n * self.bytes_of("v") // 8 + out

    def register_budget(self) -> RegisterBudget:
        available = self.register_split.consumer if self.splits_registers else self._decode_registers(1)
        overhead = OVERHEAD_OF_96_KEYS if self.is_backward_of_96_keys else REGISTER_OVERHEAD
        return RegisterBudget(self.accumulator_registers() + overhead, available)

    def illegal_shape(self) -> str | None:
        tiles = {"dbias": BIAS_TILES, "partbwd": (SPLIT_BACKWARD_TILE,), "tilebwd": (SINGLE_TILE,)}
        # Half of dQ has the registers of the scores: ptxas serializes products whose accumulators overlap in part.
        half_of_dq = ROWS_PER_WARPGROUP, self.d // BACKWARD_WARPGROUPS
        fused_tile = half_of_dq if self.is_backward_of_96_keys else BACKWARD_TILE
        tiles = tiles.get(self.kind, (fused_tile,))
        if self.elementwise:
            return "Hopper kernels must use TMA, which moves 16-byte units; only sm_80 kernels are element-wise"
        if self.tile_m % ROWS_PER_WARPGROUP or self.warpgroups not in REGISTER_SPLIT:
            return f"tile_m={self.tile_m}; use 64, 128 or 192 (one consumer warpgroup per 64 rows)"
        if self.is_backward and (self.tile_m, self.tile_n) not in tiles:
            return f"tile {self.tile_m}x{self.tile_n}; a {self.kind} must have {' or '.join(map(str, tiles))}"
        if self.tile_n % 16 or not 16 <= self.tile_n <= 256:
            return f"tile_n={self.tile_n}; use a multiple of 16 from 16 to 256 (wgmma N)"
        if not self.is_decode and self.tile_n * features.score_bytes(self.features) % SWIZZLED_LINE:
            return (
                f"tile_n={self.tile_n}; use a multiple of 64 (a row of a bias must fill lines of {SWIZZLED_LINE} bytes)"
            )
        if (self.d % 64 or self.dv % 64) and (self.d % 16 or self.d != self.dv):
            return f"head dims ({self.d}, {self.dv}); use multiples of 64, or the same multiple of 16 for both"
        if self.row_bytes("k") % EIGHT_BIT_DEPTH or (self.bytes_of("v") == 1 and self.tile_n % EIGHT_BIT_DEPTH):
            return f"head dim {self.d}, tile_n={self.tile_n}; 8-bit products need multiples of {EIGHT_BIT_DEPTH}"
        has_own_dim_rule = self.is_split_backward or self.is_single_tile
        if self.is_backward and not has_own_dim_rule and (self.d % 32 or self.dv % 32):
            return f"head dims ({self.d}, {self.dv}); a {self.kind} must have multiples of 32"
        if self.is_split_backward:
            return self._illegal_split_backward()
        if self.is_single_tile and (self.d != self.dv or self.d % 32 or self.stages != 2):
            return f"head dims ({self.d}, {self.dv}), stages={self.stages}; use equal multiples of 32, and 2 stages"
        if self.kind == "dbias" and (self.d != self.dv or self.stages == 1):
            return f"head dims ({self.d}, {self.dv}), stages={self.stages}; a dbias has equal dims, and 2 or more"
        if self.stages not in (1, 2, 4) and self.kind not in {"decode", "dbias"}:
            return f"stages={self.stages}; use 1, 2 or 4 (other numbers need a division in the hottest loop)"
        return self._illegal_sharing()

    def _illegal_sharing(self) -> str | None:
        if not self.shares_values:
            return None
        dims = f"head dims ({self.d}, {self.dv}), {self.tile_m} rows"
        if self.dv != 2 * MAX_TILE_DV or self.d - self.dv not in (0, ROWS_PER_WARPGROUP) or self.column_warpgroups != 2:
            return f"{dims}; use {2 * MAX_TILE_DV} columns of V, and as many of K or {ROWS_PER_WARPGROUP} more"
        if self.tile_m != ROWS_PER_WARPGROUP or self.stages % 2:
            return f"{dims}, stages={self.stages}; a decode with shared values has 64 rows, and pairs of stages"
        return None

    def _illegal_split_backward(self) -> str | None:
        if not self.is_wide_backward and (self.stages not in (2, 4) or self.d % 32 or self.dv % 32):
            return "use 2 or 4 stages (the next step is in flight) and multiples of 32 for head dims"
        if not self.is_wide_backward:
            return None
        if self.d != self.dv or self.d % BOX_COLUMNS or self.d > BACKWARD_WARPGROUPS * MAX_TILE_DV:
            most = BACKWARD_WARPGROUPS * MAX_TILE_DV
            return f"head dims ({self.d}, {self.dv}); use equal multiples of {BOX_COLUMNS} up to {most}"
        if self.stages not in (1, 2):
            return f"stages={self.stages}; use 1 or 2 stages of the operand that is loaded as a whole"
        return None


@dataclass(frozen=True, slots=True)
class AmpereSpec(KernelSpec):
    """A kernel for sm_80 and later GPUs: all warps load (cp.async) and multiply (mma.sync)."""

    @property
    def column_parts(self) -> int:
        """Number of backward warps that share the columns of dK and dV of 32 keys."""
        max_dim = max(self.d, self.dv)
        min_parts = 4 if (self.tile_m, self.tile_n) == SPLIT_BACKWARD_TILE else 1
        return next(parts for parts in (1, 2, 4) if parts >= min_parts and max_dim <= parts * AMPERE_COLUMNS)

    @property
    def slabs(self) -> int:
        """Number of slabs of rows that a forward warp owns."""
        return 2 if self.tile_m >= WARPGROUP and max(self.d, self.dv) <= AMPERE_NARROW else 1

    @property
    def teams(self) -> int:
        """Number of parts of a key block in a decode. Each part has separate warps for all rows; 4 warps in all."""
        return WARPGROUP // (self.tile_m // MMA_ATOM_M * WARP) if self.is_decode else 1

    @property
    def threads(self) -> int:
        if self.is_backward:
            return self.tile_n * self.column_parts
        return self.tile_m // (MMA_ATOM_M * self.slabs) * WARP * self.teams

    def smem_bytes(self) -> int:
        return self.operand_bytes() + self.has_stage_smem * self._stage_bytes(self.tile_m, self.tile_n)

    @property
    def has_stage_smem(self) -> bool:
        """True if score stages of a forward keep blocks of 16-bit elements; stages read fp32 in global memory."""
        return self.kind == "fwd" and features.score_bytes(self.features) == KERNEL_DTYPES[self.dtype].num_bytes("q")

    def operand_bytes(self) -> int:
        """Return the shared memory of the operands in bytes.

        - fwd: Q (later O), K and V.
        - decode: Q and the pipelines. At the end, the results of all teams take the place of both.
        - bwd: K and V, the steps, and two dS buffers (or P and dS).
        """
        if self.is_backward:
            return self.stages * self._step_bytes() + self._keys_bytes()
        if self.is_decode:
            results = self.teams * self.tile_m * (self.dv + RESULT_ROW_PADDING + 2) * FP32_BYTES
            least = QUANTIZED_KV_MIN_SMEM_BYTES if features.key_bytes(self.features) else 0
            return max(self.tile_m * self.row_bytes("q") + self.kv_bytes(), results, least)
        return self.tile_m * max(self.row_bytes("q"), self.row_bytes("o")) + self.kv_bytes()

    def accumulator_registers(self) -> int:
        """Return the accumulator registers of a thread.

        - fwd: scores and output.
        - bwd: dK and dV; scores, the gradient of the scores or dQ; the same scores or gradients in 16 bits.
        """
        if self.is_backward:
            return self.tile_n * (self.d + self.dv + self.tile_m) // self.threads + AMPERE_SCORES
        return self.slabs * (self.tile_n // self.teams // 2 + self.dv // 2)

    def register_budget(self) -> RegisterBudget:
        return RegisterBudget(self.accumulator_registers() + AMPERE_OVERHEAD, MAX_REGISTERS)

    def illegal_shape(self) -> str | None:
        if self.is_backward:
            return self._illegal_backward()
        tile, dims = f"tile {self.tile_m}x{self.tile_n}", f"head dims ({self.d}, {self.dv}), stages={self.stages}"
        if self.is_decode:
            if self.tile_m not in (MMA_ATOM_M, ROWS_PER_WARPGROUP) or self.tile_n not in (64, 128):
                return f"{tile}; use 16 or 64 rows, and 64 or 128 keys"
            if self.d % 64 or self.dv % 64 or not 1 <= self.stages <= 4:
                return f"{dims}; use multiples of 64, and 1 to 4 stages"
        elif self.tile_m not in (64, 128) or self.tile_n % MMA_ATOM_M or not MMA_ATOM_M <= self.tile_n <= 128:
            return f"{tile}; use 64 or 128 rows, and 16 to 128 keys in steps of 16"
        elif self.d % 32 or self.dv % 32 or self.stages != 1:
            return f"{dims}; use multiples of 32, and 1 stage: K and V are loaded in turn, each while the other is used"
        return None

    def _illegal_backward(self) -> str | None:
        if self.is_split_backward:
            return "sm_80 has no split backward (partbwd); use bwd or detbwd"
        # Element-wise loads need registers.
        is_restricted = self.elementwise or max(self.d, self.dv) > 2 * AMPERE_COLUMNS
        tiles = {SPLIT_BACKWARD_TILE: 1} if is_restricted else {SPLIT_BACKWARD_TILE: 1, BACKWARD_TILE: 2}
        if tiles.get((self.tile_m, self.tile_n)) != self.stages:
            actual = f"tile {self.tile_m}x{self.tile_n}, stages={self.stages}"
            legal = " or ".join(f"{tile} and {stages}" for tile, stages in tiles.items())
            return f"{actual}; a backward with these head dims must have {legal} stages"
        if (self.d % 64 or self.dv % 64) and ((self.d, self.dv) != (96, 96) or self.column_parts == 4):
            return f"head dims ({self.d}, {self.dv}); use multiples of 64, or 96 for both with vector loads"
        return None


_SPEC_CLASSES = {80: AmpereSpec, 90: HopperSpec}
_TAG_PATTERN = "|".join(map(re.escape, FEATURE_TAGS))
_NAME = re.compile(rf"([a-z]+)_sm(\d+)_({'|'.join(DTYPES)})_d(\d+)(?:v(\d+))?_({_TAG_PATTERN})_m(\d+)n(\d+)s(\d+)(e?)")
