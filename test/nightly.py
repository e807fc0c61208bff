"""Tests left out by the short run.

`./tools/dev test` runs every n-th case of a listed function; `./tools/dev test --all` runs all cases. Zero: the short
run has no case of the function.

The numbers beside the names are seconds of one core for all cases (2026-11-28). Each kernel kind keeps cases in the
short run: test_packs.py and test_interpreter.py are not in this table.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

import pytest

ONE_OF = {
    "test_added_score_stage.py::test_added_score_stage_matches_fp64_and_causes_no_spill": 0,  # 25, compiles two kernels
    "test_8bit_recipes.py::test_recipe_errors_stay_below_limits": 15,  # 123
    "test_8bit_recipes.py::test_block_scales_of_e4m3_at_16k_keys": 0,  # 17
    "test_distributed.py::test_cases_on_two_ranks": 6,  # 70
    "test_distributed.py::test_cases_on_four_ranks": 3,  # 56
    "test_varlen_plan_kernels.py::test_one_plan_serves_several_calls_of_every_kernel": 3,  # 59
    "test_varlen_kernels.py::test_every_varlen_kernel": 3,  # 31
    "test_distributed.py::test_plugin_off_on_the_first_of_four_ranks": 0,  # 10
    "test_flash_attn_functions.py::test_continuous_batching_serves_prompts_from_a_paged_cache": 0,  # 37
    "test_llama_training.py::test_llama_trains_like_stock": 3,  # 32
    "test_llama_generation.py::test_llama_generates_the_tokens_of_stock": 3,  # 25
    "test_build.py::test_jit_engine_and_loaded_packages_change_no_byte_of_an_object": 0,  # 17
    "test_build.py::test_comments_and_docstrings_change_no_byte_of_an_object": 0,  # 15
    "test_graphs_and_streams_cuda.py::test_aot_inductor_package_runs_on_kernels": 0,  # 21
    "test_in_place_mask_changes.py::test_mask_input_changed_in_the_graph": 3,  # 21
    "test_numerics.py::test_forward_matches_fp64": 2,  # 32
    "test_gradients.py::test_gradients_match_fp64": 2,  # 21
    "test_gradients.py::test_deterministic_gradients_match_fp64": 2,  # 21
    "test_masked_decode.py::test_masked_decode_of_each_layout_and_number_of_splits": 3,  # 25
    "test_masked_decode.py::test_mask_rows_at_any_address": 3,  # 16
    "test_bias_gradient.py::test_gradient_of_each_bias_layout_through_sdpa": 3,  # 21
    "test_bias_gradient.py::test_gradient_is_bitwise_equal_in_every_execution_order": 3,  # 17
    "test_bias_gradient.py::test_gradient_of_each_broadcast_shape": 3,  # 13
    "test_single_tile_backward.py::test_single_tile_gradients_of_different_lengths": 3,  # 18
    "test_unaligned_bias.py::test_unaligned_bias_rows_are_read_in_place": 3,  # 16
    "test_bias.py::test_biased_decode_of_each_layout_and_number_of_splits": 3,  # 16
    "test_bias.py::test_gradients_of_each_bias_layout": 2,  # 13
    "test_dropout.py::test_every_backward_keeps_the_scores_of_its_forward": 3,  # 14
    "test_invalid_input.py::test_error_or_result_equals_stock": 2,  # 35
}


def function_of(item: pytest.Item) -> str:
    """Return the name of a test function in the form of the table."""
    return f"{item.path.name}::{getattr(item, 'originalname', item.name)}"


def left_out(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Return the tests that only the long run has: tests marked nightly, and tests of the table.

    GPU tests always run.
    """
    cpu_items = [item for item in items if item.get_closest_marker("gpu") is None]
    excluded = {item for item in cpu_items if item.get_closest_marker("nightly")}
    for function, cases in groupby(sorted(cpu_items, key=function_of), key=function_of):
        stride = ONE_OF.get(function, 1)
        excluded |= {item for number, item in enumerate(cases) if stride == 0 or number % stride}
    return excluded
