"""Calls of varlen_attn that auto serves, for each selection rule of torch.

torch 2.14 selects cuDNN by the sizes of a call. torch 2.15 and newer select by an argument of the op and by
torch.nn.attention.sdpa_kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import interpreted_kernels
import pytest
import stock_varlen_stubs
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel, varlen

import torch_flashplug
from torch_flashplug import explain_varlen
from torch_flashplug.api import startup
from torch_flashplug.dispatch import bindings, packs, varlen_decision
from torch_flashplug.registry import dispatch_table
from torch_flashplug.torch_hooks import flash_attention_op
from torch_flashplug.torch_hooks import varlen_attn as varlen_attn_hook

VERSION = torch.torch_version.TorchVersion(torch.__version__)
VARLEN_KWARGS = varlen.varlen_attn.__kwdefaults__
GROUPED = {"enable_gqa": True} if "enable_gqa" in VARLEN_KWARGS else {}
SINCE_2_15 = pytest.mark.skipif(VERSION < (2, 15), reason="varlen_attn heeds no sdpa_kernel before torch 2.15")
LENGTHS = (150, 20)  # more rows than torch 2.14 leaves to flash attention


@pytest.fixture
def rule() -> Iterator[Callable[[str], None]]:
    """Set the selection rule to the rule of a given torch version."""
    varlen_attn_hook.prepare()
    before = varlen_decision.varlen_rule()
    yield varlen_decision.set_varlen_rule
    varlen_decision.set_varlen_rule(before)


@pytest.fixture
def patched_device(kernels_on: str) -> Iterator[str]:
    """Install only the varlen_attn kernels.

    On a GPU, the varlen_attn of torch serves the remaining calls by the flash attention of stock. The flash attention
    op must therefore not be replaced in these tests.
    """
    with interpreted_kernels.installed_at(varlen_attn_hook, kernels_on):
        flash_attention_op.uninstall()
        yield kernels_on
        flash_attention_op.install()


@pytest.fixture
def varlen_on_cpu() -> Iterator[list[str]]:
    with stock_varlen_stubs.registered_on_cpu() as stock_calls:
        yield stock_calls


def make_varlen_call(
    device: str = "cpu", *, heads: tuple[int, int] = (2, 2), D: int = 64, lengths: tuple[int, ...] = LENGTHS
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int, int]:
    draw = torch.Generator().manual_seed(20261127)
    sizes = (heads[0], heads[1], heads[1])
    operands = (torch.randn(sum(lengths), n, D, generator=draw).to(device, torch.bfloat16) for n in sizes)
    cu = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    return (*operands, cu, cu, max(lengths), max(lengths))


def make_misaligned(x: Tensor) -> Tensor:
    """Return the same numbers at an address four bytes after a multiple of 16."""
    return torch.empty(x.numel() + 2, dtype=x.dtype, device=x.device)[2:].view(x.shape).copy_(x)


def test_selection_rule_of_this_torch() -> None:
    varlen_attn_hook.prepare()
    has_cudnn = torch.version.cuda is not None and (torch.backends.cudnn.version() or 0) >= 91800
    expected_of_2_14 = "shapes" if has_cudnn else "flash"
    expected = "flash" if VERSION < (2, 14) else expected_of_2_14 if VERSION < (2, 15) else "argument"
    assert varlen_decision.varlen_rule() == expected
    body = getattr(varlen, "_should_use_cudnn", None)
    assert expected != "flash" or VERSION >= (2, 14) or body is None or body(0) is False


CUDNN, FLASH = "CUDNN_ATTENTION", "FLASH_ATTENTION"
# For each selection rule: arguments of the call, the kernel chosen by torch, and whether auto serves the call.
CALLS = [
    ("flash", {}, {}, FLASH, True),
    ("flash", {"heads": (4, 2)}, {"window_size": (-1, 0)}, FLASH, True),
    ("shapes", {}, {}, CUDNN, False),
    ("shapes", {"D": 256}, {}, CUDNN, False),
    ("shapes", {"lengths": (128, 20)}, {}, FLASH, True),
    ("shapes", {"heads": (4, 2)}, {}, FLASH, True),
    ("shapes", {}, {"window_size": (-1, 0)}, FLASH, True),
    ("shapes", {}, {"window_size": (20, 0)}, FLASH, True),
    ("shapes", {}, {"enable_gqa": True}, FLASH, True),
    ("shapes", {}, {"num_splits": 1}, FLASH, True),
    ("shapes", {}, {"out": torch.empty(sum(LENGTHS), 2, 64, dtype=torch.bfloat16)}, FLASH, True),
    ("shapes", {}, {"scale": -0.5}, CUDNN, True),
    ("unknown", {}, {}, CUDNN, False),
    ("unknown", {"lengths": (1, 1)}, {"window_size": (20, 0)}, CUDNN, False),
]


@pytest.mark.parametrize(("selection", "sizes", "settings", "stock", "is_ours"), CALLS)
def test_auto_serves_calls_covered_by_a_row(
    rule: Callable[[str], None], selection: str, sizes: dict, settings: dict, stock: str, is_ours: bool
) -> None:
    rule(selection)
    plan = explain_varlen(*make_varlen_call(**sizes), **settings, device="h100")
    assert (plan.backend, plan.stock_choice) == ("fa3" if is_ours else "stock", stock)
    if is_ours:
        assert plan.kernel and (plan.row or plan.stock_bug)
    else:
        assert "no measured entry compares" in plan.reasons["fa3"] and "cuDNN" in str(plan)
    with torch_flashplug.sdpa_backend("fa3"):
        assert explain_varlen(*make_varlen_call(**sizes), **settings, device="h100").backend == "fa3"
    for backend in ("stock", "math"):
        with torch_flashplug.sdpa_backend(backend):
            assert explain_varlen(*make_varlen_call(**sizes), **settings, device="h100").backend == "stock"


def test_calls_with_cudnn_faults_run_on_kernels(rule: Callable[[str], None]) -> None:
    rule("shapes")
    q, k, v, *lengths = make_varlen_call()
    for operands in ((make_misaligned(q), k, v), (q, k, make_misaligned(v)), (q, k[:, :1].expand_as(k), v)):
        plan = explain_varlen(*operands, *lengths, device="h100")
        assert plan.backend == "fa3" and "wrong numbers" in plan.stock_bug and "194818" in plan.stock_bug
    assert explain_varlen(q, k, v, *lengths, device="h100").backend == "stock"


def test_auto_serves_no_call_on_an_a100(rule: Callable[[str], None]) -> None:
    for selection in ("flash", "shapes"):
        rule(selection)
        plan = explain_varlen(*make_varlen_call(), device="a100")
        assert plan.backend == "stock" and "not measured on compute capability 8.0" in plan.reasons["fa3"]
        assert plan.stock_choice == FLASH
    with torch_flashplug.sdpa_backend("fa2"):
        assert explain_varlen(*make_varlen_call(), device="a100").backend == "fa2"


def test_explain_varlen_reports_unsupported_arguments(rule: Callable[[str], None]) -> None:
    rule("flash")
    q, k, v, *lengths = make_varlen_call()
    table = torch.zeros(2, 1, dtype=torch.int32)
    for operands, settings, word in (
        ((q, k[None], v[None]), {"block_table": table}, "block_table, but no seqused_k"),
        ((q, k, v), {"num_splits": 256}, "num_splits=256"),
        ((q, k, v), {"out": q.float()}, "an out that differs"),
        ((q.float(), k.float(), v.float()), {}, "torch.float32"),
        ((q[..., :60], k[..., :60], v[..., :60]), {}, r"head dims \[60\]"),
    ):
        plan = explain_varlen(*operands, *lengths, **settings, device="h100")
        assert plan.backend == "stock" and word.replace("\\", "") in plan.reasons["fa3"] and not plan.error
        with torch_flashplug.sdpa_backend("fa3"):
            error = explain_varlen(*operands, *lengths, **settings, device="h100").error
        assert error.startswith("varlen_attn: the forced kernels do not support") and "sdpa_backend('fa3')" in error
    assert "tensors are on cpu" in explain_varlen(q, k, v, *lengths).reasons["fa3"]
    with pytest.raises(TypeError, match="settings must be among"):
        explain_varlen(q, k, v, *lengths, causal=True)
    with pytest.raises(ValueError, match="device must be one of h100"):
        explain_varlen(q, k, v, *lengths, device="h900")
    torch_flashplug.disable()
    try:
        assert "disabled" in explain_varlen(q, k, v, *lengths, device="h100").reasons["fa3"]
    finally:
        torch_flashplug.enable()


def test_torch_2_14_runs_flash_attention_for_pages() -> None:
    facts = dict.fromkeys(bindings.names("varlen call members"), 0)
    facts |= {"rule": bindings.names("varlen rules").index("shapes"), "max_q": 200, "heads_q": 4, "heads_k": 4}
    facts |= {"D": 64, "Dv": 64, "splits": -1, "backend": -1, "allowed": 1, "readable": 1, "out_fits": 1}
    facts |= {"has_cu_seqlens_k": 1, "has_seqused_k": 1}
    for is_paged, stock in ((False, "cudnn"), (True, "flash")):
        decision = varlen_decision.decide_varlen(facts | {"paged": is_paged}, 90, 0)
        assert (decision["stock"], decision["reason"]) == (stock, "unmeasured")


def test_varlen_rows_use_known_kernels_and_facts() -> None:
    assert dispatch_table.VARLEN_KERNELS == bindings.names("varlen kernels")
    assert dispatch_table.VARLEN_FACTS == bindings.names("varlen facts")
    for row in dispatch_table.VARLEN_ROWS:
        assert row.stock in dispatch_table.VARLEN_KERNELS and set(row.facts) <= set(dispatch_table.VARLEN_FACTS)
        assert bool(row.wrong) != bool(row.ratio) and row.measured


# ---- calls that run ----


RUN = [
    ("flash", {}, {}, True),
    ("shapes", {}, {}, False),
    ("shapes", {"lengths": (100, 20)}, {}, True),
    ("shapes", {"heads": (4, 2)}, GROUPED, True),
    ("shapes", {}, {"window_size": (-1, 0)}, True),
    ("unknown", {"lengths": (100, 20)}, {}, False),
]


@pytest.mark.parametrize(("selection", "sizes", "settings", "is_ours"), RUN)
def test_op_agrees_with_explain_varlen(
    patched_device: str,
    varlen_on_cpu: list[str],
    rule: Callable[[str], None],
    selection: str,
    sizes: dict,
    settings: dict,
    is_ours: bool,
) -> None:
    rule(selection)
    call = make_varlen_call(patched_device, **sizes)
    bindings.counters(reset=True)
    with torch.no_grad():
        varlen.varlen_attn(*call, **settings)
    assert bindings.counters(reset=True)["ours_fwd"] == is_ours
    assert varlen_on_cpu == ["forward"] * (not is_ours and patched_device == "cpu")
    assert (explain_varlen(*call, **settings, device="h100").backend == "fa3") == is_ours
    with torch.no_grad(), torch_flashplug.sdpa_backend("fa3"):
        varlen.varlen_attn(*call, **settings)
    assert bindings.counters(reset=True)["ours_fwd"] == 1


def test_misaligned_operands_run_on_kernels(patched_device: str, rule: Callable[[str], None]) -> None:
    rule("shapes")
    q, k, v, *lengths = make_varlen_call(patched_device)
    bindings.counters(reset=True)
    with torch.no_grad():
        out = varlen.varlen_attn(q, make_misaligned(k), v, *lengths)
        assert bindings.counters(reset=True)["ours_fwd"] == 1
        with torch_flashplug.sdpa_backend("fa3"):
            assert torch.equal(out, varlen.varlen_attn(q, k, v, *lengths))


def test_cudnn_backward_never_follows_a_forward_of_the_plugin(
    patched_device: str, varlen_on_cpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the backward of our forward without our kernels.

    The backward must be flash attention, even where torch itself would select cuDNN.
    """
    if VERSION >= (2, 14) and VERSION < (2, 15):
        monkeypatch.setattr(varlen, "_can_use_cudnn", lambda *args: True)
    monkeypatch.setenv("TORCH_FLASHPLUG_JIT", "0")
    q, k, v, cu, _, longest, _ = make_varlen_call(patched_device)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    backend_argument = {"backend": SDPBackend.CUDNN_ATTENTION.value} if VERSION >= (2, 15) else {}
    bindings.counters(reset=True)
    with torch_flashplug.sdpa_backend("fa3"):
        out, *_ = torch.ops.torch_attn._varlen_attn(*leaves, cu, cu, longest, longest, **backend_argument)
    assert bindings.counters(reset=True)["ours_fwd"] == 1
    bindings.clear_packs()
    try:
        startup.push_tables()  # kernels are searched again
        torch.autograd.grad(out.float().sum(), leaves)
    finally:
        packs.register()
        startup.push_tables()
    assert varlen_on_cpu == ["backward"] * (patched_device == "cpu") and bindings.counters(reset=True)["ours_bwd"] == 0


# ---- torch 2.15: sdpa_kernel and the argument `backend` ----


@SINCE_2_15
@pytest.mark.parametrize("backend", ["auto", "fa3"])
def test_sdpa_kernel_block_of_cudnn_runs_stock(patched_device: str, varlen_on_cpu: list[str], backend: str) -> None:
    """Allow cuDNN only, as for F.sdpa.

    Without FLASH_ATTENTION or OVERRIDEABLE, our kernels are not allowed, forced or not.
    """
    call = make_varlen_call(patched_device)
    cudnn, flash, overrideable = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.OVERRIDEABLE
    bindings.counters(reset=True)
    with torch.no_grad(), torch_flashplug.sdpa_backend(backend):
        for allowed, chosen, is_ours in (
            ([cudnn], cudnn, False),
            ([cudnn, overrideable], cudnn, backend == "fa3"),
            ([cudnn, flash], cudnn, backend == "fa3"),
            ([cudnn, flash], flash, True),
            ([flash], flash, True),
        ):
            varlen_on_cpu.clear()
            with sdpa_kernel(allowed):
                torch.ops.torch_attn._varlen_attn(*call, backend=chosen.value)
            assert bindings.counters(reset=True)["ours_fwd"] == is_ours
            asked = "forward" if chosen == flash else "cudnn forward"
            assert varlen_on_cpu == [asked] * (not is_ours and patched_device == "cpu")


@SINCE_2_15
def test_explain_varlen_respects_sdpa_kernel() -> None:
    cudnn, flash = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION
    assert explain_varlen(*make_varlen_call(), device="h100").stock_choice == CUDNN
    with sdpa_kernel(flash):
        plan = explain_varlen(*make_varlen_call(), device="h100")
        assert plan.backend == "fa3" and plan.stock_choice == FLASH
    with sdpa_kernel(cudnn), torch_flashplug.sdpa_backend("fa3"):
        plan = explain_varlen(*make_varlen_call(), device="h100")
        assert plan.backend == "stock" and "sdpa_kernel allows neither" in plan.reasons["fa3"]
    # cuDNN never serves windows, several splits or head dims above 128 in this version.
    assert explain_varlen(*make_varlen_call(), window_size=(20, 0), device="h100").backend == "fa3"
    assert explain_varlen(*make_varlen_call(D=256), device="h100").backend == "fa3"
    assert explain_varlen(*make_varlen_call(), num_splits=1, device="h100").backend == "fa3"
    refused = explain_varlen(*make_varlen_call(), scale=0.0, device="h100")
    assert refused.backend == "stock" and "scale must be greater than 0" in refused.error
