"""Kernels of features that no product kernel has yet: stages of kernels/parts put into kernel files as they are. They
are compiled and counted (test_seams), not run.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32

from torch_flashplug.kernels import builder
from torch_flashplug.kernels.parts.arguments import Call, Gradients, Scales, fake_vector
from torch_flashplug.kernels.parts.listed import Listed, Lists
from torch_flashplug.kernels.parts.scores.chain import Chain, Kept
from torch_flashplug.kernels.parts.scores.words import Bits, Dropout
from torch_flashplug.kernels.parts.seams import Seams
from torch_flashplug.kernels.parts.walk import Walk
from torch_flashplug.kernels.parts.window import InWindow, Window
from torch_flashplug.spec import KernelSpec


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


STAGES = {
    "bits": lambda x: Bits(x.words, x.planes_of_batch, x.planes_of_head),
    "dropout": lambda x: Dropout(x.dropped, x.planes_of_batch, x.planes_of_head, kept_share=Kept(x.share, x.inverse)),
}


@dataclass(frozen=True)
class TrialSeams(Seams):
    """The walk of a spec, its own stage, then the trial's."""

    stages: tuple[str, ...] = ()

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
        more = (STAGES[name](call.extra) for name in self.stages if name in STAGES)
        own = (InWindow(self.walk(call)),) if "window" in self.stages else super().chain(call).stages
        return Chain((*own, *more))


@dataclass(frozen=True)
class TrialCall(Call):
    extra: Extra


@dataclass(frozen=True)
class TrialGradients(Gradients):
    extra: Extra


def fake_list(rank: int) -> cute.Tensor:
    sizes, strides = (cute.sym_int() for _ in range(rank)), (cute.sym_int64() for _ in range(rank - 1))
    return cute.runtime.make_fake_tensor(Int32, tuple(sizes), (*strides, 1))


def fake_extra() -> Extra:
    words, lists = (fake_vector(Int32, 16) for _ in range(2)), (fake_list(rank) for rank in (1, 2, 1, 2, 2))
    return Extra(*words, Int32(1), Int32(1), Float32(0.9), Float32(1 / 0.9), *lists, Int32(1), Int32(1), Int32(1))


def trial(spec: KernelSpec, *stages: str):
    """A kernel as builder() makes it, with stages; callable by cute.compile with its `fake_arguments()`."""
    kernel = builder(spec)
    base = type(kernel)

    def with_seams(part) -> None:
        if isinstance(getattr(part, "seams", None), Seams):
            facts = {field.name: getattr(part.seams, field.name) for field in dataclasses.fields(Seams)}
            part.seams = TrialSeams(**facts, stages=stages)

    class Forward(base):
        def fake_arguments(self) -> tuple:
            *arguments, stream = base.fake_arguments(self)
            return (*arguments, fake_extra(), stream)

        @cute.jit
        def __call__(  # noqa: PLR0913, PLR0917 (a product kernel's, and one more)
            self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, o: cute.Tensor, lse: cute.Tensor,
            scale_log2: Float32, scale: Float32, counter: cute.Tensor, num_ctas: Int32,
            extra: Extra, stream: cuda.CUstream,
        ):  # fmt: skip
            self.launch(TrialCall(q, k, v, o, lse, Scales(scale_log2, scale), counter, num_ctas, extra), stream)

    class Backward(base):
        fake_arguments = Forward.fake_arguments

        @cute.jit
        def __call__(  # noqa: PLR0913, PLR0917 (a product kernel's, and one more)
            self, q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, o: cute.Tensor, do: cute.Tensor, lse: cute.Tensor,
            dq: cute.Tensor, dk: cute.Tensor, dv: cute.Tensor, rows: cute.Tensor, scratch: cute.Tensor,
            scale_log2: Float32, scale: Float32, counter: cute.Tensor, num_ctas: Int32, wanted: Int32,
            extra: Extra, stream: cuda.CUstream,
        ):  # fmt: skip
            tensors = (q, k, v, o, do, lse, dq, dk, dv, rows, scratch)
            scales = Scales(scale_log2, scale)
            self.launch(TrialGradients(*tensors, scales, counter, num_ctas, wanted, extra), stream)

    kernel.__class__ = Backward if spec.is_backward else Forward
    for part in (kernel, getattr(kernel, "query_gradient", None), getattr(kernel, "key_gradients", None)):
        with_seams(part)
    return kernel
