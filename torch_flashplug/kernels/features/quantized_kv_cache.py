"""Decode with a quantized KV cache: K and V in 8 bits with scales.

The time of decode is bound by the bytes of K and V, and 8 bits halve the bytes. The numbers are converted to 16 bits in
registers, and products use 16-bit operands.

In global and shared memory, a pair of 8-bit numbers is treated as a single 16-bit element, so copies and ldmatrix stay
unchanged. A register with four numbers of a key is converted to two registers of the right operand. Thread t of four
holds columns 4t ... 4t + 3 of sixteen, while the product expects 2t, 2t + 1, 2t + 8 and 2t + 9. Queries lie in shared
memory in the matching order (`permuted_column`). A register with adjacent columns of V for two keys is converted to a
pair of keys for each column. A thread then holds four consecutive columns of O.

Scales of K are multiplied into the scores, and scales of V into the probabilities, in fp32. Rotated keys
(quantize_reference.py) need rotated queries, which this module computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.base_dsl import Arch

from ...registry.dtypes import KERNEL_DTYPES
from ...registry.kernel_spec import MMA_ATOM_M, WARP, KernelSpec
from ...registry.quant_recipes import SIGN_BITS
from ..decode.kv_load import K, KvLoader, KvScaleLoader, V
from ..primitives import dtype as dsl_dtypes
from ..primitives import sm80
from ..primitives.fragments import OperandA, column_of, target_from
from .base import KernelFeatures

if TYPE_CHECKING:
    from ..decode.pack_gqa import DecodeTile

FLOAT_BYTES, NUMBERS_PER_WORD = 4, 4  # bytes of a float, numbers in a register
GROUP = 16  # columns per step of the product
SIGNS = tuple(word - (word >> 31 << 32) for word in SIGN_BITS)  # as signed Int32
# The product P V uses bf16, because scales of values may have any magnitude.
VALUES = dsl_dtypes.ELEMENTS["bf16"]


@dataclass(frozen=True)
class QuantizedKvScales(KvScaleLoader):
    """Scales of a KV head in shared memory: for each stage the scales of K, then for each stage the scales of V.

    A stage holds one fp32 scale for each key of a team (warps that share a part of the keys of a block).
    """

    k: cute.Tensor  # (Sk,)
    v: cute.Tensor  # (Sk,)
    start: Int32
    keys: int
    stages: int

    def stage_address(self, which: int, stage: Int32) -> Int32:
        """Return the shared-memory address of the scales of a stage, of K or V."""
        return self.start + (which * self.stages + stage) * (self.keys * FLOAT_BYTES)

    @cute.jit
    def load(self, which: cutlass.Constexpr[int], first: Int32, stage: Int32, threads: cutlass.Constexpr[int]):
        thread = cute.arch.lane_idx() if threads == WARP else cute.arch.thread_idx()[0]
        scales = self.k if which == K else self.v
        text = "cp.async.ca.shared.global [{$r0}], [{$r1}], 4, {$r2};"
        for key in cutlass.range_constexpr(0, self.keys, threads):
            key_of_thread = key + thread
            if key_of_thread < self.keys:
                key_exists = first + key_of_thread < scales.shape[0]
                source = (
                    scales.iterator + Int64(cutlass.min(first + key_of_thread, scales.shape[0] - 1)) * scales.stride[0]
                )
                size = cutlass.select_(key_exists, Int32(FLOAT_BYTES), Int32(0))  # zeros beyond the last key
                target = self.stage_address(which, stage) + key_of_thread * FLOAT_BYTES
                cute.arch.inline_ptx(text, read_only_args=[target, source.toint(), size])

    def scales_of(self, which: int, stage: Int32, columns: int) -> list[Float32]:
        """Return the scales for a thread's columns of a block (fragments.column_of)."""
        start, scales = self.stage_address(which, stage) + cute.arch.lane_idx() % 4 * (2 * FLOAT_BYTES), []
        for c in range(0, columns, 2):
            source = cute.make_ptr(Float32, start + column_of(c) * FLOAT_BYTES, cute.AddressSpace.smem, assumed_align=8)
            pair = cute.make_rmem_tensor((2,), Float32)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(2)), pair)
            scales += [pair[0], pair[1]]
        return scales

    def scale(self, S: cute.Tensor, stage: Int32) -> None:
        for c, scale in enumerate(self.scales_of(K, stage, cute.size(S, mode=[1]))):
            for r in range(2):
                S[r, c] = S[r, c] * scale

    def weights(self, stage: Int32, columns: int) -> object:
        scales = self.scales_of(V, stage, columns)
        return lambda r, c, value: value * scales[c]


@dataclass(frozen=True)
class Rotation:
    """Rotation of rows of D numbers: random signs, then Hadamard matrices on the diagonal.

    The size of a matrix is the largest power of two that divides D.
    """

    is_enabled: Int32  # 0: rows stay unchanged
    D: Int32

    @cute.jit
    def apply(self, row: cute.Tensor):
        """Rotate a row, distributed over a warp. Each lane holds an equal number of adjacent values."""
        if self.is_enabled != 0:
            lane, values_per_lane, size = cute.arch.lane_idx(), cute.size(row), self.D & -self.D
            bits = Int32(0)
            for word in cutlass.range_constexpr(values_per_lane):
                bits = cutlass.select_(lane * values_per_lane // WARP == word, Int32(SIGNS[word]), bits)
            for i in cutlass.range_constexpr(values_per_lane):
                row[i] = cutlass.select_((bits >> (lane * values_per_lane % WARP + i) & 1) != 0, -row[i], row[i])
            for step in cutlass.range_constexpr(values_per_lane.bit_length() - 1):
                self.exchange_in_lane(row, 1 << step, (1 << step) < size)
            for step in cutlass.range_constexpr(WARP.bit_length() - 1):
                self.exchange_across_lanes(row, 1 << step, (values_per_lane << step) < size)
            factor = cute.math.exp2(Float32(31 - cute.arch.clz(size)) * -0.5, fastmath=True)  # size**-0.5
            for i in cutlass.range_constexpr(values_per_lane):
                row[i] = row[i] * factor

    @cute.jit
    def exchange_in_lane(self, row: cute.Tensor, distance: cutlass.Constexpr[int], is_active: cutlass.Boolean):
        if is_active:
            for i in cutlass.range_constexpr(cute.size(row)):
                if cutlass.const_expr(i & distance == 0):
                    low, high = row[i], row[i + distance]
                    row[i], row[i + distance] = low + high, low - high

    @cute.jit
    def exchange_across_lanes(self, row: cute.Tensor, distance: cutlass.Constexpr[int], is_active: cutlass.Boolean):
        if is_active:
            upper = (cute.arch.lane_idx() & distance) != 0
            for i in cutlass.range_constexpr(cute.size(row)):
                peer_value = cute.arch.shuffle_sync_bfly(row[i], offset=distance)
                row[i] = peer_value + cutlass.select_(upper, -row[i], row[i])


@dataclass(frozen=True)
class QuantizedKvLoader(KvLoader):
    """KV loader for 8-bit caches: the scales of a call, and whether keys are rotated."""

    k_scale: cute.Tensor  # (B, Hkv, Sk)
    v_scale: cute.Tensor
    k_is_rotated: Int32

    def columns(self, dim: int) -> int:
        return dim // 2

    def of_head(self, decode_tile: DecodeTile, x: cute.Tensor) -> cute.Tensor:
        head_rows = decode_tile.of_head(x)
        (rows, columns), (stride, _) = head_rows.shape, head_rows.stride
        pairs = cute.recast_ptr(head_rows.iterator, dtype=cutlass.Int16)
        return cute.make_tensor(pairs, cute.make_layout((rows, columns // 2), stride=(stride // 2, 1)))

    def scale_loader(self, decode_tile: DecodeTile, start: Int32, keys: int, stages: int) -> QuantizedKvScales:
        k, v = (x[decode_tile.batch, decode_tile.tile.kv_head, None] for x in (self.k_scale, self.v_scale))
        return QuantizedKvScales(k, v, start, keys, stages)

    @cute.jit
    def transform_queries(
        self,
        q: sm80.SmemTile,
        decode_tile: DecodeTile,
        D: Int32,
        element: QuantizedKvElement,
        warps: cutlass.Constexpr[int],
    ):
        rows = cutlass.min(decode_tile.rows - decode_tile.first_row, q.rows)
        for r in cutlass.range(cute.arch.warp_idx(), rows, warps, unroll=1):
            self.rotate_row(q, r, D, element)
        cute.arch.sync_threads()

    @cute.jit
    def rotate_row(self, q: sm80.SmemTile, row: Int32, D: Int32, element: QuantizedKvElement):
        """Rotate a row of queries and reorder its columns. A warp handles a row."""
        values_per_lane = q.columns // WARP
        query, rotated = (cute.make_rmem_tensor((values_per_lane,), dtype) for dtype in (element.dtype, Float32))
        column = cute.arch.lane_idx() * values_per_lane
        source = cute.make_ptr(
            element.dtype, element_address(q, row, column), cute.AddressSpace.smem, assumed_align=2 * values_per_lane
        )
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(values_per_lane)), query)
        for i in cutlass.range_constexpr(values_per_lane):
            rotated[i] = query[i].to(Float32)
        Rotation(self.k_is_rotated, D).apply(rotated)
        cute.arch.sync_warp()
        for i in cutlass.range_constexpr(0, values_per_lane, 2):
            sm80.store_packed(
                element_address(q, row, permuted_column(column + i)), element.pack_pair(rotated[i], rotated[i + 1])
            )

    def product(self, element: QuantizedKvElement) -> DequantizedFragment:
        scores, values = (sm80.MmaProduct.create(x.dtype) for x in (element, VALUES))
        return DequantizedFragment(scores, values, element.pack, element.format)

    def left_operand(self, acc: cute.Tensor, element: QuantizedKvElement) -> OperandA:
        return OperandA.create(acc, VALUES)

    def output_columns(self, output: cute.Tensor, row: int) -> list[tuple[Int32, list]]:
        first, columns = (
            cute.arch.lane_idx() % 4 * NUMBERS_PER_WORD,
            range(0, cute.size(output, mode=[1]), NUMBERS_PER_WORD),
        )
        return [(first + c // NUMBERS_PER_WORD * GROUP, [output[row, c + i] for i in (0, 2, 1, 3)]) for c in columns]


def element_address(tile: sm80.SmemTile, row: Int32, column: Int32) -> Int32:
    """Return the shared-memory address of an element of a row."""
    unit = tile.unit(row, column % tile.panel // sm80.VECTOR)
    return unit + column // tile.panel * tile.panel_bytes + column % sm80.VECTOR * 2


def permuted_column(column: Int32) -> Int32:
    """Return the column at which the product expects the query elements of an even column and the next column."""
    pair = column % GROUP // 2
    return column - column % GROUP + pair // 2 * 2 + pair % 2 * 8


@dataclass(frozen=True)
class DequantizedFragment:
    """Product acc += A B on a warp, as sm80.MmaProduct, for one slab of rows and an 8-bit B."""

    qk_product: sm80.MmaProduct
    pv_product: sm80.MmaProduct
    pack: str  # PTX type of packed pairs in score operands
    format: QuantizedFormat

    def scores(self, accs: sm80.Accumulators, left: sm80.LdmatrixView, right: sm80.LdmatrixView) -> None:
        (acc,), dtype = accs, self.qk_product.dtype
        lefts = tuple(sm80.allocate_fragment(dtype) for _ in range(2))
        (kv_words, fetched), (words, operand) = (registers(dtype) for _ in range(2))
        acc.fill(0.0)
        for column in range(0, right.tile.columns, sm80.PAIR):
            for unit, left_fragment in enumerate(lefts):
                left.fetch(0, 2 * column + GROUP * unit, left_fragment)
            for row in range(0, cute.size(acc) * 2, MMA_ATOM_M):
                right.fetch(row, column, fetched)
                for unit, left_fragment in enumerate(lefts):
                    for half in range(2):  # eight keys per half
                        pairs = self.format.pairs(kv_words[2 * half + unit], (0, 1), (2, 3), self.pack)
                        words[2 * half], words[2 * half + 1] = pairs
                    self.qk_product.step(accs, (left_fragment,), operand, row)

    def accumulate(self, accs: sm80.Accumulators, lefts: sm80.Fragments, right: sm80.LdmatrixView, row: int) -> None:
        dtype, first = self.pv_product.dtype, 0
        (kv_words, fetched), (words, operand) = (
            registers(dtype_of_words) for dtype_of_words in (self.qk_product.dtype, dtype)
        )
        for panel in range(0, right.tile.columns, right.tile.panel):
            for pair in range(len(right.addresses)):
                right.fetch(row, panel + pair * sm80.PAIR, fetched)
                for unit in range(2):
                    for half in range(2):  # eight keys per half
                        even, odd = self.format.pairs(kv_words[2 * unit + half], (0, 2), (1, 3), VALUES.pack)
                        words[half], words[2 + half] = even, odd
                    self.pv_product.step(accs, lefts, operand, first)
                    first += GROUP


def registers(dtype: type[cutlass.Numeric]) -> tuple[cute.Tensor, cute.Tensor]:
    """Return four registers, and the same registers in the layout of ldmatrix and products."""
    words = cute.make_rmem_tensor((NUMBERS_PER_WORD,), Int32)
    layout = cute.make_layout((sm80.VECTOR, 1))
    return words, cute.make_tensor(cute.recast_ptr(words.iterator, dtype=dtype), layout)


# ---- 8 bits to 16 ----


class QuantizedFormat:
    """Conversion of an 8-bit format. All 8-bit numbers are exact in fp16 and in bf16."""

    def halves(self, places: tuple[int, int], into: str, work: str) -> str:
        """Return PTX that converts two bytes of {$r0} to fp16.

        Args:
            places: positions of the two bytes.
            into: name of the destination register.
            work: name of a temporary register.
        """
        raise NotImplementedError

    def pairs(self, word: Int32, first: tuple[int, int], second: tuple[int, int], pack: str) -> tuple[Int32, Int32]:
        """Return two pairs of 16-bit numbers from the four numbers of a word.

        Args:
            word: four 8-bit numbers.
            first: byte positions of the first pair.
            second: byte positions of the second pair.
            pack: PTX type of a pair.
        """
        text = "{ .reg .b32 w<2>; .reg .b32 h<2>; .reg .b16 low; .reg .b16 high; .reg .f32 f<2>; "
        for i, places in enumerate((first, second)):
            text += self.halves(places, f"h{i}", f"w{i}")
            text += f"mov.b32 {{$w{i}}}, h{i}; " if pack == "f16x2" else TO_BF16.format(i=i)
        return cute.arch.inline_ptx(text + "}", write_only_types=[Int32, Int32], read_only_args=[word])


TO_BF16 = (
    "mov.b32 {{low, high}}, h{i}; cvt.f32.f16 f0, low; cvt.f32.f16 f1, high; cvt.rn.bf16x2.f32 {{$w{i}}}, f1, f0; "
)


class Int8(QuantizedFormat):
    """Conversion of int8."""

    def halves(self, places: tuple[int, int], into: str, work: str) -> str:
        """Return PTX that converts two bytes to fp16.

        A byte with inverted sign bit is the number plus 128. This value is used as the mantissa of a number from 1024
        on.
        """
        low, high = places
        return (
            f"xor.b32 {work}, {{$r0}}, 0x80808080; prmt.b32 {work}, {work}, 0x64646464, 0x4{high}4{low}; "
            f"mov.b32 {into}, 0xE480E480; add.f16x2 {into}, {work}, {into}; "
        )

    def pairs(self, word: Int32, first: tuple[int, int], second: tuple[int, int], pack: str) -> tuple[Int32, Int32]:
        """Return two pairs of 16-bit numbers.

        bf16 has too few mantissa bits for the fp16 method. Instead, the lower seven bits are added to 128. Then 128 is
        subtracted, or 256 for a negative number.
        """
        if pack == "f16x2":
            return super().pairs(word, first, second, pack)
        text = "{ .reg .b32 w<2>; .reg .b32 low; .reg .b32 sign; .reg .b32 one; mov.b32 one, 0x3F803F80; "
        for i, (low, high) in enumerate((first, second)):
            text += (
                f"prmt.b32 w{i}, {{$r0}}, 0x43434343, 0x4{high}4{low}; and.b32 low, w{i}, 0xFF7FFF7F; "
                f"and.b32 sign, w{i}, 0x00800080; or.b32 sign, sign, 0xC300C300; "
                f"fma.rn.bf16x2 {{$w{i}}}, low, one, sign; "
            )
        return cute.arch.inline_ptx(text + "}", write_only_types=[Int32, Int32], read_only_args=[word])


class E4m3(QuantizedFormat):
    """Conversion of e4m3."""

    def halves(self, places: tuple[int, int], into: str, work: str) -> str:
        low, high = places
        if target_from(Arch.sm_89):
            return (
                f"prmt.b32 {work}, {{$r0}}, 0, 0x44{high}{low}; mov.b32 {{low, high}}, {work}; "
                f"cvt.rn.f16x2.e4m3x2 {into}, low; "
            )
        # The exponent bias is 8 less than the bias of fp16. NaN has all bits set.
        return (
            f"prmt.b32 {work}, {{$r0}}, 0, 0x{high}4{low}4; and.b32 {into}, {work}, 0x7F007F00; "
            f"and.b32 {work}, {work}, 0x80008000; shr.u32 {into}, {into}, 1; or.b32 {work}, {work}, {into}; "
            f"{{ .reg .b32 nan; .reg .b32 scale; add.u32 nan, {into}, 0x00800080; and.b32 nan, nan, 0x40004000; "
            f"shr.u32 {into}, nan, 14; shl.b32 nan, nan, 1; sub.u32 nan, nan, {into}; "
            f"mov.b32 scale, 0x5C005C00; mul.f16x2 {into}, {work}, scale; or.b32 {into}, {into}, nan; }} "
        )


class E5m2(QuantizedFormat):
    """Conversion of e5m2."""

    def halves(self, places: tuple[int, int], into: str, work: str) -> str:
        """Return PTX that converts two bytes to fp16. An e5m2 number is the upper half of an fp16 number."""
        low, high = places
        return f"prmt.b32 {into}, {{$r0}}, 0, 0x{high}4{low}4; "


FORMATS = {"int8": Int8(), "e4m3": E4m3(), "e5m2": E5m2()}


class QuantizedKvElement(dsl_dtypes.Element):
    """Element type with Q and O in 16 bits, and K and V in an 8-bit format."""

    def __init__(self, element: dsl_dtypes.Element, format: QuantizedFormat):
        super().__init__(element.dtype, element.pack, element.p_scale_log2)
        self.format = format

    @property
    def cached(self) -> type[cutlass.Numeric]:
        """Type of K and V in memory: bytes, for every 8-bit format."""
        return cutlass.Uint8


class QuantizedKvCacheFeature(KernelFeatures):
    """Kernel feature for decode with K and V in 8 bits."""

    def __init__(self, element: dsl_dtypes.Element, spec: KernelSpec, transposed: bool):
        super().__init__(QuantizedKvElement(element, FORMATS[KERNEL_DTYPES[spec.dtype].k]), spec, transposed)

    def kv_loader(self, call: object) -> QuantizedKvLoader:
        return QuantizedKvLoader(call.k_scale, call.v_scale, call.k_is_rotated)
