"""Kernels of features that no product kernel has yet: stages of kernels/parts put into kernel files as they are. They
are compiled and counted (test_seams), not run.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32

from torch_flashplug import features
from torch_flashplug.kernels import builder
from torch_flashplug.kernels.parts.arguments.backward import Gradients
from torch_flashplug.kernels.parts.arguments.decode import FewRows
from torch_flashplug.kernels.parts.arguments.forward import Call
from torch_flashplug.kernels.parts.arguments.operands import Scales, fake_operand, fake_vector
from torch_flashplug.kernels.parts.element import ELEMENTS
from torch_flashplug.kernels.parts.fragments import column_of, rows_and_columns
from torch_flashplug.kernels.parts.listed import Listed, Lists
from torch_flashplug.kernels.parts.pieces import Pieces
from torch_flashplug.kernels.parts.ragged import ENTRY, Ragged, TileList
from torch_flashplug.kernels.parts.scores.bias import Bias, matrices
from torch_flashplug.kernels.parts.scores.chain import Chain, Form, Kept, Stage
from torch_flashplug.kernels.parts.scores.words import Bits, Dropout
from torch_flashplug.kernels.parts.seams import Seams
from torch_flashplug.kernels.parts.walk import Walk
from torch_flashplug.kernels.parts.window import InWindow, Window
from torch_flashplug.spec import ROWS_PER_WARPGROUP, SMEM_BYTES, WARP, WARPGROUP, KernelSpec


@dataclass(frozen=True)
class Extra:
    """What a call of a trial brings beside a product kernel's arguments."""

    words: cute.Tensor  # (n,) Int32: a mask's
    dropped: cute.Tensor  # (n,) Int32: dropout's
    planes_of_batch: Int32
    planes_of_head: Int32
    share: Float32
    inverse: Float32
    key_counts: cute.Tensor  # (R,) Int32, of masked blocks; in a trial of whole ones, too
    key_blocks: cute.Tensor  # (R, C) Int32
    query_counts: cute.Tensor
    query_blocks: cute.Tensor
    query_turns: cute.Tensor
    left: Int32
    right: Int32
    diagonal: Int32
    row_tiles: cute.Tensor  # (n, ENTRY) Int32
    row_count: cute.Tensor  # (1,) Int32
    key_tiles: cute.Tensor
    key_count: cute.Tensor
    scratch_tiles: cute.Tensor
    scratch_count: cute.Tensor
    bias: cute.Tensor  # (B, Hq, Sq, Sk), strides of broadcast dims 0


# What features.py will say of a feature that costs shared memory.
features.FEATURES += (features.Feature("bias", "bias", "", "", score_bytes=2),)
for causal in ((), ("causal",)):
    known = features.COMBINATIONS[-1].kinds
    features.TAGS["+".join((*causal, "bias"))] = features.Combination(frozenset({*causal, "bias"}), known)
# Before a spec's own stage, or behind it.
FIRST = {"bias": lambda call: Bias(call.extra.bias, call.scales.natural)}
STAGES = {
    "bits": lambda x: Bits(x.words, x.planes_of_batch, x.planes_of_head),
    "dropout": lambda x: Dropout(x.dropped, x.planes_of_batch, x.planes_of_head, kept_share=Kept(x.share, x.inverse)),
}


class TrialSeams(Seams):
    """The walk of a spec, its own stage, then the trial's."""

    stages: tuple[str, ...]

    @property
    def short(self) -> bool:
        return "ragged" in self.stages

    def pieces(self, call) -> Pieces:
        if "ragged" not in self.stages:
            return super().pieces(call)
        x = call.extra
        lists = ((x.row_tiles, x.row_count), (x.key_tiles, x.key_count), (x.scratch_tiles, x.scratch_count))
        return Ragged(*(TileList(*each) for each in lists), total_keys=call.k.shape[2])

    def walk(self, call) -> Walk:
        if "window" in self.stages:
            return Window(call.extra.left, call.extra.right, call.extra.diagonal)
        if "listed" not in self.stages:
            return super().walk(call)
        x = call.extra
        keys, queries = (x.key_counts, x.key_blocks), (x.query_counts, x.query_blocks)
        planes = (x.planes_of_batch, x.planes_of_head)
        return Listed(Lists(*keys, *keys, *planes), Lists(*queries, *queries, *planes, x.query_turns, x.query_turns))

    def chain(self, call) -> Chain:
        first = (FIRST[name](call) for name in self.stages if name in FIRST)
        more = (STAGES[name](call.extra) for name in self.stages if name in STAGES)
        return Chain((*first, *super().chain(call).stages, *more))

    def visible(self, call) -> Stage:
        return InWindow(self.walk(call)) if "window" in self.stages else super().visible(call)


@dataclass(frozen=True)
class TrialCall(Call):
    extra: Extra


@dataclass(frozen=True)
class TrialFewRows(FewRows):
    extra: Extra


@dataclass(frozen=True)
class TrialGradients(Gradients):
    extra: Extra


def fake_list(rank: int) -> cute.Tensor:
    sizes, strides = (cute.sym_int() for _ in range(rank)), (cute.sym_int64() for _ in range(rank - 1))
    return cute.runtime.make_fake_tensor(Int32, tuple(sizes), (*strides, 1))


def fake_tiles() -> tuple[cute.Tensor, cute.Tensor]:
    entries = cute.runtime.make_fake_tensor(Int32, (cute.sym_int(), ENTRY), (ENTRY, 1), assumed_align=16)
    return entries, fake_vector(Int32, 4, size=1)


def fake_extra(like: cute.Tensor) -> Extra:
    words, lists = (fake_vector(Int32, 16) for _ in range(2)), (fake_list(rank) for rank in (1, 2, 1, 2, 2))
    tiles = (x for _ in range(3) for x in fake_tiles())
    bias = fake_operand(like.element_type, *(cute.sym_int() for _ in range(4)))
    numbers = (Int32(1), Int32(1), Float32(0.9), Float32(1 / 0.9))
    return Extra(*words, *numbers, *lists, Int32(1), Int32(1), Int32(1), *tiles, bias)


def trial(spec: KernelSpec, *stages: str):
    """A kernel as builder() makes it, with stages; callable by cute.compile with its `fake_arguments()`."""
    known = spec.features | {name for name in stages if name in FIRST}
    spec = dataclasses.replace(spec, mask=features.tag_of(known))
    assert spec.smem_bytes() <= SMEM_BYTES[spec.arch], f"{spec.name()}: {spec.smem_bytes()} B of shared memory"
    kernel = builder(spec)
    base = type(kernel)

    def with_seams(part) -> None:
        if isinstance(seams := getattr(part, "seams", None), Seams):
            part.seams = type("TrialSeams", (TrialSeams, type(seams)), {"stages": stages})(seams.element)

    class Forward(base):
        def fake_arguments(self) -> tuple:
            *arguments, stream = base.fake_arguments(self)
            return (*arguments, fake_extra(arguments[0]), stream)

        @cute.jit
        def __call__(
            self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, o: cute.Tensor, lse: cute.Tensor,
            scale_log2: Float32, scale: Float32, counter: cute.Tensor, num_ctas: Int32,
            extra: Extra, stream: cuda.CUstream,
        ):  # fmt: skip
            self.launch(TrialCall(q, k, v, o, lse, Scales(scale_log2, scale), counter, num_ctas, extra), stream)

    class Decode(base):
        fake_arguments = Forward.fake_arguments

        @cute.jit
        def __call__(
            self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, o: cute.Tensor, lse: cute.Tensor,
            partials: cute.Tensor, scale: Float32, splits: Int32, cluster: Int32, extra: Extra, stream: cuda.CUstream,
        ):  # fmt: skip
            self.launch(TrialFewRows(q, k, v, o, lse, partials, scale, splits, cluster, extra), stream)

    class Backward(base):
        fake_arguments = Forward.fake_arguments

        @cute.jit
        def __call__(
            self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, o: cute.Tensor, do: cute.Tensor, lse: cute.Tensor,
            dq: cute.Tensor, dk: cute.Tensor, dv: cute.Tensor, rows: cute.Tensor, scratch: cute.Tensor,
            scale_log2: Float32, scale: Float32, counter: cute.Tensor, num_ctas: Int32, wanted: Int32,
            extra: Extra, stream: cuda.CUstream,
        ):  # fmt: skip
            tensors = (q, k, v, o, do, lse, dq, dk, dv, rows, scratch)
            scales = Scales(scale_log2, scale)
            self.launch(TrialGradients(*tensors, scales, counter, num_ctas, wanted, extra), stream)

    kernel.__class__ = Backward if spec.is_backward else Decode if spec.is_decode else Forward
    for part in (kernel, getattr(kernel, "query_gradient", None), getattr(kernel, "key_gradients", None)):
        with_seams(part)
    return kernel


def biases_read(transposed: bool, columns: int) -> list[list[list[tuple[int, int]]]]:
    """Which element of a tile of biases each of 128 threads gets for each of its scores, [thread][r][c], where ldmatrix
    does what the PTX ISA says. To be called while something is traced; what it does is done then.
    """
    form = Form(ELEMENTS["bf16"], 1, columns, transposed)
    copies, (values, *_) = zip(*(matrices(form, columns, thread) for thread in range(WARPGROUP)), strict=True)
    tile = cute.make_identity_tensor((ROWS_PER_WARPGROUP, columns))
    lines = [copy.partition_S(tile) for copy in copies]  # ((elements of a line, instruction), 1, 1)
    target, scores = copies[0].retile(values).layout, rows_and_columns(values).layout

    def read_by(thread: int) -> list[list[tuple[int, int]]]:
        lane, warp, registers = thread % WARP, thread // WARP * WARP, {}
        for nth in range(columns // 16):  # instructions: four matrices of 8 x 8 each
            for i in range(8):
                matrix, line, place = i // 2, lane // 4, lane % 4 * 2 + i % 2
                if transposed:
                    line, place = place, line
                source = lines[warp + matrix * 8 + line]  # lane 8 m + l says where line l of matrix m begins
                registers[cute.crd2idx(((i, nth), 0, 0), target)] = tuple(source[(place, nth), 0, 0])
        return [[registers[cute.crd2idx((r, c), scores)] for c in range(columns // 4)] for r in range(2)]

    return [read_by(thread) for thread in range(WARPGROUP)]


def wrong_biases(transposed: bool, columns: int) -> int:
    """Scores whose bias would be another's."""
    read = biases_read(transposed, columns)
    return sum(
        read[thread][r][c] != (thread // WARP * 16 + thread % WARP // 4 + 8 * r, thread % 4 * 2 + column_of(c))
        for thread in range(WARPGROUP)
        for r in range(2)
        for c in range(columns // 4)
    )


def print_wrong_biases() -> None:
    """Of what kernels read: the forward's blocks and halves of them, the backward's steps."""
    print([wrong_biases(*read) for read in ((False, 128), (False, 64), (False, 80), (True, 64))])


@cute.jit
def say_wrong_biases():
    """While it is compiled; plain Python, since the DSL would make loops of loops."""
    print_wrong_biases()
