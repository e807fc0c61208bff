"""Self-test of an installation: the `check` verb prints a line per check, and then a text for a bug report.

The checks of a GPU compare a forward and a backward with fp64, and time a call against stock torch. On a machine
without a GPU, the GPU checks are skipped. Instead, a kernel is interpreted on the CPU. The interpreter requires a
checkout.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .. import env
from ..api.backend import sdpa_backend
from ..codegen import dsl, kernel_cache, linker
from ..dispatch import bindings, library
from ..registry.architectures import FAMILIES
from ..testing import Masking, assert_within_budget, attention_math, grads_math, interpreted
from ..testing.budget import GRAD_FACTOR, OUT_FACTOR
from ..testing.timing import Candidate, paired_ratio, time_interleaved
from . import env_info

PASS, FAIL, SKIP = "PASS", "FAIL", "SKIP"
OLDEST_CC = min(family.arch for family in FAMILIES)
CALL = (2, 4, 300, 64)  # batch, heads, length and head dim of the call compared with fp64
TIMED_CALL = (4, 16, 2048, 64)  # batch, heads, length and head dim of the timed call
ROUNDS = 7
# The timed call fails below this ratio stock time / plugin time. A call on a busy GPU may lose 5 %.
MIN_SPEED_RATIO = 0.9


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Outcome of a check.

    Attributes:
        status: PASS, FAIL or SKIP.
        name: the subject of the check.
        text: the finding.
        remedy: an action for the user; empty if the check did not fail.
    """

    status: str
    name: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        remedy = f"\n     {'remedy':<10}{self.remedy}" if self.remedy else ""
        return f"{self.status} {self.name:<10}{self.text}{remedy}"


def torch_build() -> CheckResult:
    """Report the versions of torch and of torch's CUDA toolkit."""
    return CheckResult(PASS, "torch", f"{torch.__version__}, CUDA {torch.version.cuda or 'none: a CPU build'}")


def extension() -> CheckResult:
    """Check that _C is loaded."""
    try:
        library.lib()
    except (ImportError, OSError) as error:
        return CheckResult(FAIL, "_C", str(error), "reinstall torch_flashplug in this environment")
    return CheckResult(PASS, "_C", str(library.find_built("_C.so") or "loaded"))


def hook() -> CheckResult:
    """Check that calls of F.scaled_dot_product_attention reach the dispatcher."""
    facts = env_info.hook()
    if not facts["enabled"]:
        why = facts["why"] or "torch_flashplug.disable() was called"
        return CheckResult(FAIL, "hook", f"off: {why}", f"unset {env.ENABLED.name}, or call torch_flashplug.enable()")
    if facts["installed"] or facts["composite_hook"]:
        text = f"in place, mode {facts['mode']}"
        if owners := env_info.kept_by_others():
            text += f"; other libraries serve {', '.join(owners)}"
        return CheckResult(PASS, "hook", text)
    if torch.version.cuda is None:
        return CheckResult(SKIP, "hook", facts["why"])
    return CheckResult(FAIL, "hook", facts["why"], f"try {env.HOOK.name}=composite, and report this line")


def kernels() -> CheckResult:
    """Check that kernels are installed, or can be compiled at first use and kept in a folder."""
    packs = [pack for pack in env_info.packs() if not pack["unusable"]]
    if packs:
        count = sum(pack["symbols"] for pack in packs)
        is_compressed = any(pack["compressed"] and not pack["unpacked"] for pack in packs)
        text = f"{count} in {len(packs)} pack{'s' if len(packs) > 1 else ''}"
        return CheckResult(PASS, "kernels", f"{text}, unpacked at first use" if is_compressed else text)
    if env.jit_mode() == env.NEVER:
        return CheckResult(
            FAIL, "kernels", f"no pack is installed, and {env.JIT.name} forbids compiling", f"unset {env.JIT.name}"
        )
    if dsl.version() is None:
        return CheckResult(FAIL, "kernels", "neither a pack nor a compiler is installed", dsl.INSTALL)
    writable, reasons = kernel_cache.writable_folders()
    if not writable:
        return CheckResult(
            FAIL, "kernels", f"no folder for the cache: {'; '.join(reasons)}", f"set {env.CACHE_DIR.name}"
        )
    text = f"compiled at first use by CuTe DSL {dsl.version()}"
    if linker.c_compiler() is None:
        text += "; without a C compiler, each kernel loads in 0.6 s instead of 1 ms"
    elif reason := linker.link_failure_reason():
        return CheckResult(FAIL, "kernels", reason, "set CC to a C compiler that links, or install gcc")
    if reasons:
        text += f"; kept in {writable[0]} ({reasons[0]})"
    return CheckResult(PASS, "kernels", text)


def gpu() -> CheckResult:
    """Check that kernels support the first GPU."""
    if torch.version.cuda is None:
        return CheckResult(SKIP, "GPU", "a CPU build of torch")
    if not torch.cuda.is_available():
        return CheckResult(SKIP, "GPU", "no GPU, or no driver that supports this torch; see `nvidia-smi`")
    major, minor = torch.cuda.get_device_capability()
    description = f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}"
    if 10 * major + minor < OLDEST_CC:
        needed = f"{OLDEST_CC // 10}.{OLDEST_CC % 10}"
        return CheckResult(
            FAIL, "GPU", description, f"kernels need compute capability {needed} or later; stock torch serves all calls"
        )
    return CheckResult(PASS, "GPU", description)


def numbers() -> CheckResult:
    """Compare the output and the gradients of a causal call with fp64.

    The error budget is the budget of the tests (testing/budget.py). The check also fails if stock serves the call.
    """
    if gpu().status != PASS:
        return CheckResult(SKIP, "numbers", "needs a GPU that kernels support")
    torch.manual_seed(0)
    q, k, v, grad_out = (torch.randn(CALL, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    bindings.counters(reset=True)
    try:
        with sdpa_backend(_family()):
            out = F.scaled_dot_product_attention(*leaves, is_causal=True)
        results = (out.detach(), *torch.autograd.grad(out, leaves, grad_out))
        counts = bindings.counters(reset=True)
        exact, plain = (
            (attention_math(q, k, v, mask=Masking(1), dtype=dtype).out,
             *grads_math(q, k, v, grad_out, mask=Masking(1), dtype=dtype))
            for dtype in (torch.float64, torch.bfloat16)
        )  # fmt: skip
        for name, *three in zip(("out", "dq", "dk", "dv"), results, exact, plain, strict=True):
            assert_within_budget(name, *three, factor=OUT_FACTOR if name == "out" else GRAD_FACTOR, seed=0)
    except (RuntimeError, AssertionError) as error:
        return CheckResult(FAIL, "numbers", " ".join(str(error).split())[:300], "report this text")
    if not (counts["ours_fwd"] and counts["ours_bwd"]):
        return CheckResult(
            FAIL, "numbers", "stock torch served the call", "`python -m torch_flashplug explain` prints the reasons"
        )
    worst = max(float((a.double() - b).norm() / b.norm()) for a, b in zip(results, exact, strict=True))
    return CheckResult(
        PASS, "numbers", f"forward and backward of {CALL}: {worst:.2%} off fp64 at most (relative L2 norm)"
    )


def interpreted_kernel() -> CheckResult:
    """Run a kernel on the CPU, interpreted from PTX, and compare the output with fp64.

    The call goes through F.sdpa and the dispatcher as on an H100. The check fails if stock torch serves the call, if
    the kernel cannot be compiled, or if the error exceeds the error budget of the tests. The first run compiles the
    interpreter.
    """
    if torch.cuda.is_available():
        return CheckResult(
            SKIP, "interpret", "for machines without a GPU; the line `numbers` runs kernels on the GPU itself"
        )
    if not bindings.enabled():
        return CheckResult(SKIP, "interpret", "the plugin is off")
    if lack := interpreted.missing():
        return CheckResult(SKIP, "interpret", lack)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(CALL, generator=generator).bfloat16() for _ in range(3))
    kernel = interpreted.kernel_of(q, k, v, is_causal=True)
    if not kernel:
        mode = bindings.backend_of(bindings.effective_mode())
        return CheckResult(SKIP, "interpret", f"stock torch would serve this call on an H100, too (mode {mode})")
    try:
        pack = interpreted.build(kernel, _show_progress)
        with interpreted.kernels(pack):
            bindings.counters(reset=True)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            counts = bindings.counters(reset=True)
        exact, plain = (
            attention_math(q, k, v, mask=Masking(1), dtype=dtype).out for dtype in (torch.float64, torch.bfloat16)
        )
        report = assert_within_budget(kernel, out, exact, plain, factor=OUT_FACTOR, seed=0)
    except (RuntimeError, AssertionError, OSError) as error:
        return CheckResult(FAIL, "interpret", " ".join(str(error).split())[-300:], "report this text")
    if counts["ours_fwd"] != 1:
        return CheckResult(FAIL, "interpret", f"{kernel} did not run: {counts}", "report this text")
    text = f"{kernel}, PTX interpreted on this CPU, causal forward of {CALL}: RMS error against fp64 {report.rms:.2e}"
    return CheckResult(PASS, "interpret", f"{text}, plain bf16 math {report.plain_rms:.2e}")


def _show_progress(line: str) -> None:
    """Print a line of progress to standard error, apart from the lines of the checks."""
    print(f"     {line}", file=sys.stderr, flush=True)


def speed() -> CheckResult:
    """Time a causal forward in auto mode and by stock torch, interleaved."""
    if gpu().status != PASS:
        return CheckResult(SKIP, "speed", "needs a GPU that kernels support")
    q, k, v = (torch.randn(TIMED_CALL, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    call = functools.partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
    candidates = {mode: Candidate(call, functools.partial(sdpa_backend, mode)) for mode in ("auto", "stock")}
    times = time_interleaved(candidates, rounds=ROUNDS)
    ours, stock, ratio = times["auto"].ms, times["stock"].ms, paired_ratio(times["stock"], times["auto"])
    text = f"causal forward of {TIMED_CALL}: {ours * 1e3:.0f} us, stock torch {stock * 1e3:.0f} us: {ratio:.2f} x"
    if ratio < MIN_SPEED_RATIO:
        return CheckResult(FAIL, "speed", text, "repeat on an idle GPU; if the check fails again, report this line")
    return CheckResult(PASS, "speed", text)


CHECKS: tuple[Callable[[], CheckResult], ...] = (
    *(torch_build, extension, hook, kernels),
    *(gpu, numbers, speed, interpreted_kernel),
)


def _family() -> str:
    """Return the backend of the first kernel family for the current GPU."""
    major, minor = torch.cuda.get_device_capability()
    return next(family.backend for family in FAMILIES if family.runs_on(10 * major + minor))


def run() -> int:
    """Print all checks and a text for a bug report.

    Returns:
        The exit status: 1 if a check failed, else 0.
    """
    failed = 0
    for check in CHECKS:
        line = check()
        print(line, flush=True)
        failed += line.status == FAIL
    print("\nFor a bug report, copy everything above and the lines below:")
    env_info.show(env_info.collect())
    print(f"\n{'FAIL' if failed else 'PASS'}: {failed} of {len(CHECKS)} checks failed")
    return int(failed > 0)
