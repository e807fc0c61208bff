"""Quantized QK and PV products (quant_recipes.py). Q, K and V are quantized before the kernel.

Quantized K and V have a workspace of their own, because calls with the same K and V may share it. The arguments tell
which parts of the work a call does:

| call | quantizes_kv | num_ctas |
|---|---|---|
| quantizes Q, K and V, then runs the kernel | 1 | the SMs of the device |
| quantizes K and V only (`quantize_kv`) | 1 | 0 |
| quantizes Q, then runs the kernel | 0 | the SMs of the device |

The row shifts of Q need the constant key, hence the sampled keys. `k_samples` provides the samples: it is K itself, or
the copy of the sampled keys that accompanies quantized K and V (`sampled_keys` in quantize_reference.py).
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, Uint8

from ...registry.quant_recipes import KEY_ORDER, PROB_SCALE_LOG2, RECIPES, WORKSPACE_ALIGNMENT, Recipe
from ..mainloop.scaled_softmax import IntegerScaling, Scaling
from ..preprocess.quantize import Quantize, QuantizedOperands
from ..primitives.dtype import EIGHT_BITS, Element, QuantizedElement
from ..sm90.trial import FLAGS
from .base import KernelFeatures, ProductOperands

STEEP = {"int8": 16.0, "e4m3": 0.25}  # `Scaling.steep`, up to D 256


class QuantizedQkv(KernelFeatures):
    """Kernel feature for quantized products. Subclasses select a recipe.

    The quantization kernel runs before the main kernel, which starts early and waits in `wait_for_preprocess`.
    """

    recipe: Recipe
    overlaps_preprocess = True

    def __init__(self, element: Element, *more: object):
        scores, values = EIGHT_BITS[self.recipe.scores], EIGHT_BITS.get(self.recipe.values)
        super().__init__(QuantizedElement(element, scores, values), *more)
        self.v_is_transposed = values is not None

    def launch_preprocess(self, call: object, stream: cuda.CUstream) -> None:
        """Launch nothing: `QuantizeThenKernel` calls `launch_before_kernel`, with or without the kernel behind."""

    def launch_before_kernel(self, call: object, stream: cuda.CUstream) -> None:
        """Launch the preprocess kernels of further features, then the quantization."""
        super().launch_preprocess(call, stream)
        self.quantize(call, stream)

    @cute.jit
    def quantize(self, call: object, stream: cuda.CUstream):
        """Launch the quantization of K and V, unless they are quantized already, and of Q."""
        kernel = Quantize(self.element, self.recipe, self.spec.d, self.spec.dv, self.spec.tile_n)
        kernel(call.q, self.keys_to_quantize(call), call.v, self.quantized_operands(call), call.num_ctas, stream)

    def keys_to_quantize(self, call: object) -> cute.Tensor:
        """Return K or the copy of its samples.

        The batch size is 0 if K and V are quantized already. The quantization kernel then has CTAs for Q only, and
        these read the samples of K at the same strides.
        """
        samples = call.k_samples
        B, Hkv, S, D = samples.shape
        return cute.make_tensor(
            samples.iterator, cute.make_layout((B * call.quantizes_kv, Hkv, S, D), stride=samples.stride)
        )

    def wait_for_preprocess(self) -> None:
        cute.arch.griddepcontrol_wait()

    def operands(self, call: object) -> ProductOperands:
        quantized = self.quantized_operands(call)
        scores, values = self.element.scores.dtype, self.element.values.dtype
        v = call.v if quantized.v is None else with_dtype(quantized.v, values)
        p_scale_log2 = PROB_SCALE_LOG2 if self.v_is_transposed else 0
        scaling_class, steep = IntegerScaling if self.recipe.scores == "int8" else Scaling, STEEP[self.recipe.scores]
        output_max = 65504.0 if self.element.dtype is cutlass.Float16 else None
        scaling = scaling_class(
            quantized.q_scale,
            quantized.k_scale,
            quantized.v_scale,
            quantized.row_shift,
            quantized.v_mean,
            output_max,
            p_scale_log2,
            steep,
        )
        return ProductOperands(with_dtype(quantized.q, scores), with_dtype(quantized.k, scores), v, scaling)

    def quantized_operands(self, call: object) -> QuantizedOperands:
        """Return the quantized operands in the two workspaces.

        src/operands/quant_workspace.cpp computes the same numbers of bytes, and ops/quantize_ahead.py reads the
        workspace of K and V.
        """
        B, Hq, Sq, _ = call.q.shape
        _, Hkv, Sk, _ = call.k.shape
        Dv, q_workspace = call.v.shape[3], QuantWorkspace(call.quant_workspace.iterator)
        kv_workspace = QuantWorkspace(call.quantized_kv.iterator)
        q = q_workspace.next_tensor(Uint8, B, Hq, Sq, self.spec.d)
        q_scale, row_shift = (q_workspace.next_tensor(Float32, B, Hq, Sq) for _ in range(2))
        k = kv_workspace.next_tensor(Uint8, B, Hkv, Sk, self.spec.d)
        v = (
            kv_workspace.next_tensor(Uint8, B, Hkv, Dv, cute.round_up(Sk, len(KEY_ORDER)))
            if self.v_is_transposed
            else None
        )
        k_scale = kv_workspace.next_tensor(Float32, B, Hkv, cute.ceil_div(Sk, self.spec.tile_n))
        v_scale, v_mean = (
            kv_workspace.next_tensor(Float32, B, Hkv, self.spec.dv) if self.v_is_transposed else None for _ in range(2)
        )
        return QuantizedOperands(q, k, v, q_scale, k_scale, v_scale, row_shift, v_mean)


class QuantizeThenKernel:
    """Mixin ahead of a kernel class: launches the quantization before everything else.

    A call without CTAs to run launches only the quantization of K and V.
    """

    @cute.jit
    def launch(self, call: object, stream: cuda.CUstream):
        if cutlass.const_expr("bare" not in FLAGS):
            self.features.launch_before_kernel(call, stream)
        if call.num_ctas > 0:
            # `super` has explicit arguments, because the DSL compiles a copy of this function, and the copy belongs to
            # no class.
            super(QuantizeThenKernel, self).launch(call, stream)  # noqa: UP008


class QuantWorkspace:
    """Consecutive tensors in the workspace, which the host has allocated.

    The order of the calls of `next_tensor` is the order of src/operands/quant_workspace.cpp.
    """

    def __init__(self, start: cute.Pointer):
        self.start, self.used_bytes = start.toint(), Int64(0)

    def next_tensor(self, dtype: type[cutlass.Numeric], *shape: object) -> cute.Tensor:
        """Return a packed tensor of a shape in the next part of the workspace.

        The last size of 8-bit tensors must be a multiple of 16; nothing is padded.
        """
        stride, strides = 1, []
        for size in reversed(shape):
            strides.insert(0, stride)
            stride = stride * (Int64(size) if strides[1:] else size)  # 32 bits suffice for the stride of rows
            if dtype.width == 8:
                stride = cute.assume(Int64(stride), divby=16)
        pointer = cute.make_ptr(dtype, self.start + self.used_bytes, cute.AddressSpace.gmem, assumed_align=16)
        self.used_bytes += cute.round_up(stride * (dtype.width // 8), WORKSPACE_ALIGNMENT)
        return cute.make_tensor(pointer, cute.make_layout(shape, stride=tuple(strides)))


def with_dtype(x: cute.Tensor, dtype: type[cutlass.Numeric]) -> cute.Tensor:
    return cute.make_tensor(cute.recast_ptr(x.iterator, dtype=dtype), x.layout)


class Int8ScoresFeature(QuantizedQkv):
    """Recipe qk8: int8 scores, 16-bit values."""

    recipe = RECIPES["qk8"]


class Int8Feature(QuantizedQkv):
    """Recipe 8bit: int8 scores, e4m3 values."""

    recipe = RECIPES["8bit"]


class E4m3Feature(QuantizedQkv):
    """Recipe e4m3: e4m3 scores and values."""

    recipe = RECIPES["e4m3"]
