"""Every combination of features has a test of numbers, and every feature has code for each kind of its kernels."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest

from torch_flashplug.registry import features, kernel_table
from torch_flashplug.registry.kernel_spec import KernelSpec

# Modules of this folder that compare kernels with fp64. The lists of a module have the kernels that the module tests.
NUMERICS_TESTS = (
    "test_8bit_kernels",
    "test_balanced_splits",
    "test_bias",
    "test_bias_gradient",
    "test_bool_masks",
    "test_decode",
    "test_dropout",
    "test_equal_lengths",
    "test_masked_decode",
    "test_numerics",
    "test_paged_kv_kernels",
    "test_paged_prefill_kernels",
    "test_quantized_kv_kernels",
    "test_shared_values",
    "test_varlen_kernels",
    "test_window_kernels",
)
SPECS = [spec for pack in kernel_table.PACKS for spec in pack.specs()]


def kernel_lists_of(module: str) -> Iterator[KernelSpec]:
    """Yield the kernels in the lists and tuples of a test module."""
    for value in vars(importlib.import_module(module)).values():
        if isinstance(value, list | tuple):
            yield from (spec for spec in value if isinstance(spec, KernelSpec))


def test_every_combination_of_features_is_compared_with_fp64() -> None:
    tested = {(spec.mask, spec.arch) for module in NUMERICS_TESTS for spec in kernel_lists_of(module)}
    missing = {(spec.mask, spec.arch) for spec in SPECS} - tested
    assert not missing, f"add the kernels of {sorted(missing)} to a list of a test in NUMERICS_TESTS"


@pytest.mark.parametrize("feature", features.FEATURES, ids=lambda feature: feature.name)
def test_every_feature_has_code_for_each_kind_of_its_kernels(feature: features.Feature) -> None:
    """Without a class, a kernel would be compiled without the feature, and would give wrong numbers."""
    kinds = {spec.kind for spec in SPECS if feature.name in spec.features}
    assert kinds and all(map(feature.class_path_of, kinds))
