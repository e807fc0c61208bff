"""Ceilings on the CPU time of tests and of test files, which keep the short run short.

`./tools/dev test` turns the ceilings on. Seconds refer to the machine of `REFERENCE`; a slower
machine gets more. The time of processes that a test starts and waits for counts. Slower tests and files have a row in
`SECONDS`.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator

import interpreted_kernels
import nightly
import pytest

OF_A_TEST, OF_A_FILE = 5.0, 60.0
HEADROOM = 1.5  # for cores with shared units, and for cold caches
REFERENCE = 0.0154  # CPU seconds of `loop()` on the machine of the ceilings (AMD EPYC, 2026-11-28)
# Tests and files that may take longer than the usual ceiling, most of them because of child processes with torch.
SECONDS: dict[str, float] = {
    "test_build.py::test_changed_kernel_file_recompiles_only_dependent_kernels": 10,  # compiles five kernels
    "test_build.py::test_kernel_sources_equal_imported_modules": 17,  # imports each kind of kernel
    "test_compile.py::test_inductor_graph_equals_eager_mode": 12,  # builds the headers of Inductor
    "test_demo.py::test_precision_demo_compares_8_bit_kernels": 10,
    "test_demo.py::test_training_demo_reports_speeds_losses_and_gradients": 12,
    "test_distributed.py": 80,
    "test_distributed.py::test_distributed_demo_divides_a_model_in_two_ways": 18,
    "test_distributed.py::test_cases_on_four_ranks": 18,
    "test_distributed.py::test_plugin_off_on_one_rank": 8,
    "test_distributed.py::test_cases_on_two_ranks": 18,
    "test_flash_attention_op.py::test_unsupported_calls_run_stock": 12,  # compiles C++ that includes torch
    "test_fuzz.py::test_dead_worker_is_reported_and_remaining_work_continues": 10,
    "test_fuzz.py::test_fuzz_command_writes_a_report": 12,
    "test_mask_placeholder.py::test_cpp_caller_keeps_the_mask_variable": 10,  # compiles C++ that includes torch
    "test_masked_graphs.py::test_masked_graphs_of_each_compile_backend_run_on_kernels": 20,  # as above
    "test_wheel.py::test_concurrent_processes_share_an_unpacked_pack": 10,
}
REMEDY = "Shorten the test, give it a row in test/nightly.py, or a ceiling of its own in test/ceilings.py."


def cpu_seconds() -> float:
    """Return the CPU time of this process and of all finished child processes."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def loop() -> float:
    """Return the CPU seconds of a fixed loop of Python code."""
    start = time.process_time()
    sum(number * number % 7 for number in range(300_000))
    return time.process_time() - start


class Ceilings:
    """Plugin of pytest for measuring tests and failing slow tests."""

    def __init__(self) -> None:
        self.factor = HEADROOM * max(1.0, min(loop() for _ in range(5)) / REFERENCE)
        self.of_files: dict[str, float] = defaultdict(float)

    def check(self, item: pytest.Item, seconds: float) -> None:
        """Fail the test if the test, or the file up to this test, took longer than the ceiling."""
        file, test = item.path.name, nightly.function_of(item)
        for name, spent, usual in ((test, seconds, OF_A_TEST), (file, self.of_files[file], OF_A_FILE)):
            ceiling = SECONDS.get(name, usual) * self.factor
            if spent > ceiling:
                self.of_files.pop(name, None)  # a file fails once
                pytest.fail(f"{name} took {spent:.1f} s of CPU time, but {ceiling:.1f} s are allowed. {REMEDY}", False)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Build the pack shared by all interpreted tests, so that no test is charged for the build."""
        collects = session.config.getoption("numprocesses", None)  # the process for distributing tests runs no test
        if not collects and any(item.get_closest_marker("interpreted") for item in session.items):
            interpreted_kernels.pack()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        """Add the time of fixtures to the time of the file."""
        start = cpu_seconds()
        try:
            return (yield)
        finally:
            self.of_files[item.path.name] += cpu_seconds() - start

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Measure the test, and fail a slow test at the end."""
        start = cpu_seconds()
        try:
            result = yield
        finally:
            seconds = cpu_seconds() - start
            self.of_files[item.path.name] += seconds
        self.check(item, seconds)
        return result
