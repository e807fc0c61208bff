"""explain_attention(): the op behind attention() and its plan, compared with the log of calls that ran."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from torch_flashplug import attention, explain, explain_attention, sdpa_backend
from torch_flashplug.api import startup
from torch_flashplug.dispatch import callbacks

HQ, HKV, D = 8, 2, 128


def meta_tensor(*sizes: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> Tensor:
    return torch.empty(*sizes, dtype=dtype, device="meta", requires_grad=grad)


def int32(*sizes: int) -> Tensor:
    return meta_tensor(*sizes, dtype=torch.int32)


def dense_qkv(
    Sq: int, Sk: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        meta_tensor(2, Sq, HQ, D, grad=grad),
        meta_tensor(2, Sk, HKV, D, dtype=dtype),
        meta_tensor(2, Sk, HKV, D, dtype=dtype),
    )


def paged_qkv(*rows: int, page: int = 16, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    return (
        meta_tensor(*rows, HQ, D),
        meta_tensor(200, page, HKV, D, dtype=dtype),
        meta_tensor(200, page, HKV, D, dtype=dtype),
    )


PAGES = {"block_table": int32(2, 50), "seqused_k": int32(2)}
KV_SCALES = {"k_scale": 0.5, "v_scale": 0.5}
PACKED_QKV = meta_tensor(900, HQ, D), meta_tensor(900, HKV, D), meta_tensor(900, HKV, D)
# Operands, arguments, the first part of the kernel name, and the first part of the text about operands.
IMPLEMENTATIONS: dict[str, tuple[tuple[Tensor, ...], dict[str, object], str, str]] = {
    "causal": (dense_qkv(512, 512), {"causal": True}, "fwd_sm90_bf16_d128_causal_", ""),
    "window": (dense_qkv(512, 512), {"window": (100, 0)}, "fwd_sm90_bf16_d128_window_", ""),
    "softcap": (dense_qkv(512, 512, grad=True), {"softcap": 2.0}, "fwd_sm90_bf16_d128_window+softcap_", ""),
    "few": (dense_qkv(1, 512), {"sinks": meta_tensor(HQ)}, "decode_sm90_bf16_d128_full_", ""),
    "used_few": (dense_qkv(1, 512), {"seqused_k": int32(2)}, "decode_sm80_bf16_d128_window+paged_", ""),
    "used": (dense_qkv(90, 512), {"seqused_k": int32(2)}, "fwd_sm90_bf16_d128_window+ragged_", ""),
    "on_end": (PACKED_QKV, {"cu_seqlens_q": int32(9)}, "fwd_sm90_bf16_d128_window+ragged_", ""),
    "pages": (paged_qkv(2, 3), PAGES, "decode_sm80_bf16_d128_window+paged_", ""),
    "pages_of_15": (
        paged_qkv(2, 3, page=15),
        PAGES,
        "fwd_sm90_bf16_d128_window+ragged_",
        "Pages are gathered first. The pages have 15 rows, but kernels read pages of a multiple of",
    ),
    "pages_many": (paged_qkv(2, 90), PAGES, "fwd_sm90_bf16_d128_window+ragged_", "Pages are gathered first. No kernel"),
    "pages_on_end": (
        paged_qkv(90),
        PAGES | {"cu_seqlens_q": int32(3)},
        "fwd_sm90_bf16_d128_window+ragged_",
        "Pages are gathered first.",
    ),
    "pages_of_ones": (
        paged_qkv(2),
        PAGES | {"cu_seqlens_q": int32(3), "max_seqlen_q": 1},
        "decode_sm80_bf16_d128_window+paged_",
        "",
    ),
    "eight": (dense_qkv(3, 512, torch.int8), KV_SCALES, "decode_sm80_bf16_int8_d128_cache8_", ""),
    "eight_softcap": (
        dense_qkv(3, 512, torch.int8),
        KV_SCALES | {"softcap": 2.0},
        "fwd_sm90_bf16_d128_window+softcap_",
        "Key and value are converted to 16 bits first.",
    ),
    "eight_sinks": (
        dense_qkv(3, 512, torch.int8),
        KV_SCALES | {"sinks": meta_tensor(HQ)},
        "decode_sm90_bf16_d128_full_",
        "Key and value are converted to 16 bits first.",
    ),
    "eight_many": (dense_qkv(90, 512, torch.int8), KV_SCALES, "", "Key and value are converted to 16 bits first."),
    "eight_pages": (
        paged_qkv(2, 3, dtype=torch.int8),
        KV_SCALES | PAGES,
        "decode_sm80_bf16_int8_d128_window+cache8+paged_",
        "",
    ),
    "eight_pages_softcap": (
        paged_qkv(2, 3, dtype=torch.int8),
        KV_SCALES | PAGES | {"softcap": 2.0},
        "fwd_sm90_bf16_d128_window+softcap+ragged_",
        "Pages are gathered first and converted to 16 bits.",
    ),
    "eight_pages_on_end": (
        paged_qkv(90, dtype=torch.int8),
        KV_SCALES | PAGES | {"cu_seqlens_q": int32(3)},
        "fwd_sm90_bf16_d128_window+ragged_",
        "Pages are gathered first. Key and value are converted to 16 bits first.",
    ),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_implementation_is_explained(implementation: str) -> None:
    operands, arguments, kernel, words = IMPLEMENTATIONS[implementation]
    plan = explain_attention(*operands, **arguments, device="h100")
    assert plan.kernel.startswith(kernel) and bool(plan.kernel) == bool(kernel)
    assert plan.backend == ("fa3" if "sm90" in kernel else "fa2" if kernel else "stock")
    assert plan.copies.startswith(words) and bool(plan.copies) == bool(words) and not plan.error
    assert not plan.copies or plan.copies.endswith(".")
    assert str(plan).startswith("call        q [") and plan.gradients.startswith(
        "bwd_sm90" * (implementation == "softcap")
    )


def test_splits_are_reported() -> None:
    operands = dense_qkv(1, 8192)
    plans = [explain_attention(*operands, seqused_k=int32(2), num_splits=n, device="h100") for n in (None, 1, 5)]
    assert plans[0].splits > 1 and [plan.splits for plan in plans[1:]] == [1, 5]
    assert "splits 5 of" in plans[2].gate


def test_pages_of_packed_queries_are_read_in_place_under_a_forced_backend() -> None:
    arguments = PAGES | {"cu_seqlens_q": int32(3)}
    with sdpa_backend("fa3"):
        plan = explain_attention(*paged_qkv(90), **arguments, device="h100")
        pages_of_15 = explain_attention(*paged_qkv(90, page=15), **arguments, device="h100")
    assert plan.kernel.startswith("fwd_sm90_bf16_d128_window+ragged+paged_") and not plan.copies
    assert pages_of_15.kernel.startswith("fwd_sm90_bf16_d128_window+ragged_m")
    assert pages_of_15.copies.startswith("Pages are gathered first. The pages have 15 rows")
    in_auto = explain_attention(*paged_qkv(90), **arguments, device="h100")
    assert 'under sdpa_backend("fa3")' in in_auto.copies


def test_unused_num_splits_are_not_reported() -> None:
    for operands, arguments in (
        (PACKED_QKV, {"cu_seqlens_q": int32(9)}),
        (dense_qkv(90, 512), {"window": (9, 0)}),
        (dense_qkv(90, 512), {"seqused_k": int32(2)}),
    ):
        alone, several = (explain_attention(*operands, **arguments, num_splits=n, device="h100") for n in (None, 3))
        assert alone.kernel and several.kernel == alone.kernel and several.splits == 1 and not several.error
        with sdpa_backend("fa3"):
            assert not explain_attention(*operands, **arguments, num_splits=3, device="h100").error


def test_split_sizes_are_reported() -> None:
    """Check the split size for split keys; calls without split-KV only become batch-invariant."""
    size, one_split = {"fixed_split_size": 1024, "device": "h100"}, {"num_splits": 1, "device": "h100"}
    for operands, arguments in ((dense_qkv(1, 8192), {"seqused_k": int32(2)}), (dense_qkv(1, 8192), {}),
                                (paged_qkv(2, 1), PAGES | {"block_table": int32(2, 512)})):  # fmt: skip
        plan = explain_attention(*operands, **arguments, **size)
        assert plan.splits == 8 and "splits 8 of 8 blocks of 128 keys" in plan.gate
        assert plan.call.endswith("fixed_split_size=1024")
    for arguments in (PAGES, {"seqused_k": int32(2)}):
        operands = paged_qkv(2, 90) if arguments is PAGES else dense_qkv(90, 512)
        plans = [explain_attention(*operands, **arguments, **more) for more in (size, one_split)]
        assert plans[0].splits == 1 and plans[0].kernel == plans[1].kernel
    with pytest.raises(ValueError, match="fixed_split_size must be at least 256"):
        explain_attention(
            *paged_qkv(2, 1), **PAGES | {"block_table": int32(2, 4000)}, **size | {"fixed_split_size": 128}
        )
    many = PAGES | {"block_table": int32(9000, 2000), "seqused_k": int32(9000)}
    with pytest.raises(ValueError, match="at most 2.31 - 1 numbers of partial results, but got 128"):
        explain_attention(*paged_qkv(9000, 8), **many, **size | {"fixed_split_size": 128})


def test_plan_of_f_sdpa_equals_explain() -> None:
    q, k, v = dense_qkv(512, 512)
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    plan = explain_attention(q, k, v, causal="top_left", device="h100")
    expected = explain(*turned, is_causal=True, enable_gqa=True, device="h100")
    assert (plan.kernel, plan.row, plan.reasons) == (expected.kernel, expected.row, expected.reasons)
    assert plan.call == "q [2, 512, 8, 128], k [2, 512, 2, 128], v [2, 512, 2, 128], bfloat16, causal=top_left"


def test_backend_blocks_are_respected() -> None:
    q, k, v = dense_qkv(512, 512)
    for mode in ("math", "stock"):
        with sdpa_backend(mode):
            plan = explain_attention(q, k, v, softcap=2.0, device="h100")
        assert plan.backend == "math" and set(plan.reasons.values()) == {f"The {mode} backend is requested."}
        with sdpa_backend(mode):  # the backend block does not change calls with 8-bit caches
            assert explain_attention(*dense_qkv(3, 512, torch.int8), **KV_SCALES, device="h100").backend == "fa2"
    with sdpa_backend("fa2"):
        assert explain_attention(q, k, v, softcap=2.0, device="h100").backend == "fa2"
    wide = [meta_tensor(2, 512, 2, 520) for _ in range(3)]
    assert "head dim 520, but the kernels take at most 256" in str(explain_attention(*wide, softcap=2.0, device="h100"))
    with sdpa_backend("fa3"):
        plan = explain_attention(*wide, softcap=2.0, device="h100")
    assert plan.backend == "math" and "is forced and cannot run this call" in plan.error


def test_explain_attention_runs_nothing_and_reports_errors() -> None:
    """Use real CPU tensors."""
    q, k, v = (torch.zeros(1, 9, 2, 16, requires_grad=True) for _ in range(3))
    plan = explain_attention(q, k, v, window=(1, 1), return_lse=True)
    assert plan.backend == "math" and "no CUDA device" in plan.reasons["fa3"] and plan.call.endswith("grad")
    assert explain_attention(q, k, v).backend == "stock"
    for error, message, arguments in (
        (ValueError, "window must be .*, but got 3", {"window": 3}),
        (ValueError, r"out must be .*, but got torch.float32 \(3,\)", {"out": torch.zeros(3)}),
        (RuntimeError, "gradients are not supported with out", {"out": torch.zeros(1, 9, 2, 16)}),
        (ValueError, r"sinks must be .*, but got torch.float32 \(3,\)", {"sinks": torch.zeros(3)}),
        (ValueError, "must be an int32 tensor", {"seqused_k": int32(1)}),
        (TypeError, "unexpected keyword", {"sofcap": 1.0}),
        (ValueError, "explain_attention: device must be one of h100, .* but got 'h101'", {"device": "h101"}),
    ):
        with pytest.raises(error, match=message):
            explain_attention(q, k, v, **arguments)
    with pytest.raises(TypeError, match="q must be a tensor .*, but got str"):
        explain_attention("q", k, v)


@pytest.fixture
def plan_log() -> list[str]:
    """Record the new messages of the plan log; the log repeats no plan."""
    messages: list[str] = []
    callbacks.set_log_callback(lambda _, text: messages.append(text), plans=True)
    yield messages
    callbacks.set_log_callback(startup._plan_log.log, plans=False)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "implementation",
    [implementation for implementation in IMPLEMENTATIONS if implementation not in {"causal", "softcap", "eight_many"}],
)
def test_executed_kernel_equals_explained_kernel(implementation: str, plan_log: list[str]) -> None:
    """Compare the kernel of the last plan of an op.

    For calls that F.sdpa decides, the choice hook also logs a plan.
    """
    _, arguments, *_ = IMPLEMENTATIONS[implementation]
    operands, arguments = zeros_on_gpu(IMPLEMENTATIONS[implementation][0], arguments)
    plan = explain_attention(*operands, **arguments)
    torch.cuda.synchronize()
    assert not plan_log
    with torch.no_grad():
        attention(*operands, **arguments)
    kernels = re.findall(r'"kernel": "([^"]+)"', "".join(plan_log))
    assert kernels[-1:] == [plan.kernel] * bool(plan.kernel), str(plan)


def zeros_on_gpu(operands: tuple[Tensor, ...], arguments: dict[str, object]) -> tuple[list[Tensor], dict[str, object]]:
    zeros_like_on_gpu: Callable[[Tensor], Tensor] = lambda x: torch.zeros(x.shape, dtype=x.dtype, device="cuda")  # noqa: E731
    return [zeros_like_on_gpu(x) for x in operands], {
        n: zeros_like_on_gpu(x) if isinstance(x, Tensor) else x for n, x in arguments.items()
    }


@pytest.mark.parametrize("arguments", [{"causal": None}, {"softcap": None}], ids=str)
def test_none_is_refused_as_in_attention(arguments: dict[str, None]) -> None:
    q = torch.randn(1, 4, 2, 16)
    for ask in (attention, explain_attention):
        with pytest.raises((ValueError, TypeError)) as raised:
            ask(q, q, q, **arguments)
        assert next(iter(arguments)) in str(raised.value)


@pytest.mark.parametrize("ask", [explain, explain_attention], ids=["explain", "explain_attention"])
def test_reason_names_the_dtype_fp64(ask: Callable) -> None:
    """Check a dtype without an entry in the list of dtypes of the dispatcher."""
    settings = {"softcap": 2.0} if ask is explain_attention else {}
    same = [meta_tensor(2, 512, 4, 64, dtype=torch.float64) for _ in range(3)]

    reason = ask(*same, device="h100", **settings).reasons["fa3"]

    assert reason.startswith("query, key and value have dtype float64, but the kernels take ")


def test_reason_names_mixed_dtypes() -> None:
    q, k = meta_tensor(2, 4, 512, 64, dtype=torch.float64), meta_tensor(2, 4, 512, 64)

    reason = explain(q, k, k, device="h100").reasons["fa3"]

    assert reason.startswith("query, key and value must have one dtype, but have float64, bfloat16, bfloat16. Cast")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_infinite_scale_is_reported(implementation: str) -> None:
    """Kernels take finite scales only, and the dispatcher sends a call with an infinite scale to math."""
    operands, arguments, *_ = IMPLEMENTATIONS[implementation]
    plan = explain_attention(*operands, **arguments, scale=float("inf"), device="h100")
    assert not plan.kernel and "scale" in " ".join(plan.reasons.values())


def test_scale_may_be_a_tensor() -> None:
    operands, arguments, *_ = IMPLEMENTATIONS["window"]
    plan = explain_attention(*operands, **arguments, scale=torch.tensor(0.5), device="h100")
    assert plan.kernel == explain_attention(*operands, **arguments, scale=0.5, device="h100").kernel
