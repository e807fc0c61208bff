"""Markers and fixtures.

`gpu` and `gpu2` mark tests that need one or two CUDA devices; only this file skips such tests. `interpreted`
marks tests with kernels on the CPU; a machine with a GPU leaves these tests out. `isolated(seconds)` runs a test in a
separate process with a time limit. The marker is for tests that could hang, poison the device or need a fresh torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator

import ceilings
import interpreted_kernels
import nightly
import pytest
import torch
from device_backend import DeviceBackend, use_device_backend
from torch._functorch import config as functorch_config

from torch_flashplug.api import startup
from torch_flashplug.dispatch import bindings
from torch_flashplug.registry import kernel_table
from torch_flashplug.registry.dtypes import ELEMENTS_16BIT
from torch_flashplug.registry.kernel_spec import KernelSpec
from torch_flashplug.testing import case_named

GPU_TEST_SECONDS = 300  # a slower gpu test ends the entire run, with a traceback
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
INTERPRETED = pytest.param("cpu", marks=pytest.mark.interpreted, id="interpreted")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.addinivalue_line("markers", "gpu2: needs two CUDA devices")
    config.addinivalue_line("markers", "interpreted: runs kernels without a GPU; left out where there is one")
    config.addinivalue_line("markers", "isolated(seconds): runs in its own process, killed after that time")
    config.addinivalue_line("markers", "nightly: left out of the short run; ./tools/dev test --all runs it")
    if config.getoption("--ceilings") and not config.getoption("--nightly"):
        config.pluginmanager.register(ceilings.Ceilings())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="also what the short run leaves out (test/nightly.py)")
    parser.addoption("--ceilings", action="store_true", help="fail tests that take too long (test/ceilings.py)")
    parser.addoption("--in-isolation", action="store_true", help="set in the process that an isolated test runs in")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    has_gpu, has_two = torch.cuda.is_available(), torch.cuda.device_count() > 1
    left_out = {item for item in items if item.get_closest_marker("interpreted") and (has_gpu or not _is_small(item))}
    named = any("::" in argument for argument in config.args)  # a test named on the command line always runs
    interpreted_kernels.compiles_on_demand = named
    if not (config.getoption("--nightly") or config.getoption("--in-isolation") or named):
        left_out |= nightly.left_out([item for item in items if item not in left_out])
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
    for item in items:
        if item.get_closest_marker("gpu") and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("gpu2") and not has_two:
            item.add_marker(pytest.mark.skip(reason="needs two CUDA devices"))


def _is_small(item: pytest.Item) -> bool:
    """Return False for interpreted tests of cases too large for the short run.

    A small case takes about one second. Each case runs with a single dtype, because the code of a kernel hardly depends
    on the dtype. After a build of samples, cases run with all dtypes.
    """
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    case = case_named(parameters["name"]) if "name" in parameters else parameters.get("case")
    if case is None:
        return True
    dtype = (
        "bf16"
        if interpreted_kernels.not_built()
        else ELEMENTS_16BIT[zlib.crc32(case.name.encode()) % len(ELEMENTS_16BIT)]
    )
    return interpreted_kernels.is_small(case) and parameters.get("dtype", dtype) == dtype


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Skip a failed test if a kernel of the table was missing because only samples were built.

    Without the missing kernel, the call may have been served by a different kernel or by none.
    """
    interpreted_kernels.missing_kernels.clear()
    try:
        return (yield)
    except (Exception, pytest.fail.Exception):
        if interpreted_kernels.missing_kernels:
            pytest.skip(f"{interpreted_kernels.missing_kernels[0]}: {interpreted_kernels.NOT_BUILT}")
        raise


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    mark = pyfuncitem.get_closest_marker("isolated")
    if mark is None or pyfuncitem.config.getoption("--in-isolation"):
        return None
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "--in-isolation",
        "-p",
        "no:cacheprovider",
        pyfuncitem.nodeid,
    ]
    try:
        limits = {"timeout": mark.args[0], "check": False}
        done = subprocess.run(command, cwd=pyfuncitem.config.rootpath, capture_output=True, text=True, **limits)  # noqa: PLW1510
    except subprocess.TimeoutExpired as late:
        pytest.fail(f"no end after {mark.args[0]} s\n{(late.stdout or b'').decode()[-4000:]}", pytrace=False)
    if done.returncode != 0:
        pytest.fail(f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}", pytrace=False)
    return True


@pytest.fixture(autouse=True)
def _hard_timeout(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    faulthandler.dump_traceback_later(GPU_TEST_SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(params=["cpu", CUDA])
def device_backend(request: pytest.FixtureRequest) -> Iterator[DeviceBackend]:
    """Return the device backend with the choice hook installed: the CPU stub or the real device."""
    with use_device_backend(request.param) as device_backend:
        yield device_backend


@pytest.fixture(params=["choice_hook", "composite_hook"])
def hooked_backend(request: pytest.FixtureRequest, device: str) -> Iterator[DeviceBackend]:
    """Return the device backend with either hook, since both hooks must behave alike."""
    with use_device_backend(device, request.param) as device_backend:
        yield device_backend


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[INTERPRETED, CUDA])
def kernels_on(request: pytest.FixtureRequest) -> Iterator[str]:
    """Return the device for the tensors of our kernels: a GPU, or the CPU with interpreted kernels."""
    with interpreted_kernels.enabled() if request.param == "cpu" else contextlib.nullcontext():
        yield request.param


@pytest.fixture
def kernel_alone() -> Iterator[Callable[[KernelSpec], None]]:
    """Return a function that pushes the table rows of a single kernel, plus all rows of unrelated kernel kinds."""

    def push(spec: KernelSpec) -> None:
        rivals = {"bwd", "detbwd", "partbwd", "tilebwd"} if spec.is_backward else {"fwd"}
        startup.push_tables([row for row in kernel_table.KERNEL_ROWS if row.kind not in rivals or spec in row.specs()])

    yield push
    startup.push_tables()


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Start a test without compiled graphs, and check that no mode is left behind."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    assert bindings.mode() == 0


@pytest.fixture
def no_autograd_cache() -> Iterator[None]:
    """Turn off the autograd cache.

    Keys of the cache do not contain the stock backend of the trace, so one cached graph would serve all backends.
    """
    with functorch_config.patch(enable_autograd_cache=False):
        yield
