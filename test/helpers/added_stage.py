"""Kernels with one additional score stage, compiled into an interpreted pack.

    PYTHONPATH=.:test/helpers python -m added_stage FOLDER KERNEL...

The program prints JSON: the path of the pack, and the resources of each kernel without and with the stage.
test_added_score_stage.py runs it in a separate process, because the DSL reads its environment at import time.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from tools.build import aot, sass
from tools.ptx_interpreter import build_pack
from torch_flashplug.kernels import builder
from torch_flashplug.kernels.primitives.fragments import column_of
from torch_flashplug.kernels.score_stages.pipeline import ScoreCoord, ScorePipeline, ScoreStage
from torch_flashplug.registry.kernel_spec import KernelSpec

SLOPE = 1 / 32  # added to the score of a key for each key before it
TARGET = "sm_90a"


@dataclass(frozen=True)
class KeyPositionStage(ScoreStage):
    """Score stage that adds SLOPE times the key index to each score, as linear position biases do."""

    coord: ScoreCoord | None = None
    applies_to_full_blocks = True
    may_mask = False

    def set_tile(self, coord: ScoreCoord) -> ScoreStage:
        return replace(self, coord=coord)

    @cute.jit
    def apply(self, S: cute.Tensor, block: Int32, count: Int32 | None):
        first_key = block * self.coord.block + self.coord.column
        for r in cutlass.range_constexpr(cute.size(S, mode=[0])):
            for c in cutlass.range_constexpr(cute.size(S, mode=[1])):
                S[r, c] = S[r, c] + Float32(first_key + column_of(c)) * SLOPE


def add_stage(kernel: object) -> None:
    """Give a kernel the stage, behind the stages of its spec."""
    base = type(kernel.features)

    class Features(base):
        def score_pipeline(self, call: object) -> ScorePipeline:
            return ScorePipeline((*super().score_pipeline(call).stages, KeyPositionStage()))

    kernel.features.__class__ = Features


def compile_kernel(name: str, folder: Path) -> Path:
    """Compile a kernel with the stage, and return the path of its files without suffix."""
    kernel = builder(KernelSpec.from_name(name))
    add_stage(kernel)
    options = f"--enable-tvm-ffi --gpu-arch {TARGET} --keep-cubin --keep-ptx"
    compiled = cute.compile(kernel, *kernel.fake_arguments(), options=options)
    path = folder / name
    compiled.export_to_c(f"{path}.o", function_name=name, export_only_tvm_ffi_symbols=True)
    path.with_suffix(".ptx").write_text(compiled.__ptx__)
    path.with_suffix(".cubin").write_bytes(bytes(compiled.__cubin__))
    return path


def compile_base(name: str, folder: Path) -> Path:
    """Compile the unchanged kernel unless the build has done so, and return the path of its cubin."""
    store = aot.Store(build_pack.OBJECTS, TARGET, counts=False)
    if not store.has(name):
        store = replace(store, folder=folder)
        aot.compile_one(name, store)
    return store.path(name, ".cubin")


def main(folder: Path, names: list[str]) -> None:
    resources = {}
    for name in names:
        cubins = compile_base(name, folder), compile_kernel(name, folder).with_suffix(".cubin")
        resources[name] = [sass.resources(cubin.read_bytes()) for cubin in cubins]
    pack = build_pack.pack([folder / name for name in names], folder / "added_stage.so")
    print(json.dumps([str(pack), resources]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
