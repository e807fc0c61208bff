"""Table of the test cases that the short run leaves out.

`./tools/dev test` runs every N-th case of a function, with N from the table. `./tools/dev test --all` runs all cases.
With N = 0 the short run has no case of the function.

The numbers in the comments are the seconds of all cases on one core (2026-11-28). Every kind of kernel keeps cases in
the short run: test_packs.py and test_interpreter.py are not in this table.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

import pytest

ONE_OF = {
    # Score stages without a product kernel, compiled into kernel files: 185 s, including 162 s to compile 41 kernels.
    "test_seams.py::test_a_stage_costs_no_spill_and_no_turn_of_the_tensor_cores": 0,
    "test_seams.py::test_numbers_are_those_of_fp64": 0,
    "test_seams.py::test_a_backward_in_order_gives_the_same_bits": 0,
    "test_eight_bit.py::test_errors_of_recipes": 15,  # 123
    "test_eight_bit.py::test_blocks_of_e4m3_at_16k_keys": 0,  # 17
    "test_distributed.py::test_two_ranks": 6,  # 70
    "test_distributed.py::test_four_ranks": 3,  # 56
    "test_plans.py::test_every_kernel": 3,  # 59
    "test_lengths.py::test_every_kernel": 3,  # 31
    "test_distributed.py::test_off_on_the_first_of_four_ranks": 0,  # 10
    "test_flash_names.py::test_continuous_batching": 0,  # 37
    "test_training.py::test_llama_trains_alike": 3,  # 32
    "test_generation.py::test_llama_generates_alike": 3,  # 25
    "test_build.py::test_an_engine_and_other_packages_change_no_byte": 0,  # 17
    "test_build.py::test_comments_and_docstrings_change_no_byte_of_an_object": 0,  # 15
    "test_cuda.py::test_aot_inductor_package": 0,  # 21
    "test_changed_masks.py::test_an_input_that_the_graph_changes": 3,  # 21
    "test_numerics.py::test_forward": 2,  # 32
    "test_gradients.py::test_gradients": 2,  # 21
    "test_gradients.py::test_gradients_in_one_order": 2,  # 21
    "test_masked_decode.py::test_masks": 3,  # 25
    "test_masked_decode.py::test_where_rows_begin_and_end": 3,  # 16
    "test_bias_gradient.py::test_biases": 3,  # 21
    "test_bias_gradient.py::test_same_bits_in_every_order": 3,  # 17
    "test_bias_gradient.py::test_shapes": 3,  # 13
    "test_tile_backward.py::test_sizes": 3,  # 18
    "test_rows_of_biases.py::test_rows_at_any_address": 3,  # 16
    "test_biases.py::test_few_rows": 3,  # 16
    "test_biases.py::test_gradients": 2,  # 13
    "test_dropout.py::test_every_backward_keeps_what_its_forward_did": 3,  # 14
    "test_badinput.py::test_same_error_or_result_as_without": 2,  # 35
}


def function_of(item: pytest.Item) -> str:
    """Return the name of a test function in the form of the table."""
    return f"{item.path.name}::{getattr(item, 'originalname', item.name)}"


def left_out(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Return the tests for the long run only: tests marked nightly, and tests of the table. GPU tests always run."""
    on_cpu = [item for item in items if item.get_closest_marker("gpu") is None]
    found = {item for item in on_cpu if item.get_closest_marker("nightly")}
    for function, cases in groupby(sorted(on_cpu, key=function_of), key=function_of):
        one_of = ONE_OF.get(function, 1)
        found |= {item for number, item in enumerate(cases) if one_of == 0 or number % one_of}
    return found
