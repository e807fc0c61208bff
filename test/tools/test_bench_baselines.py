"""Peers of the suites `paged`, `varlen`, `window`, `softcap` and `sinks`.

Stub modules with the signatures of the wheels replace the peers. The stubs check the arguments of the call. A peer with
wrong results, or a peer that cannot run, must not be timed, and the row must contain the reason.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from torch_flashplug import attention, sdpa_backend

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

pytest.importorskip("rich")

from tools.bench import baselines, bench, runner, workloads  # noqa: E402
from tools.bench.suites import paged, varlen_window  # noqa: E402

PAGED = replace(workloads.paged()[-2], B=2, Sk=256)
WINDOW = varlen_window.Call("fwd", (40, 40), 64, (4, 2), left=9)


@pytest.fixture(autouse=True)
def replace_gpu_functions(monkeypatch):
    for caller in (paged, runner):
        monkeypatch.setattr(caller, "graphed", lambda candidate, calls: candidate)
    for suite in (paged, varlen_window):
        monkeypatch.setattr(suite, "ROUND_MS", 0.1)
    monkeypatch.setattr(paged, "copies_of", lambda case: 2)
    monkeypatch.setattr(workloads, "paged", lambda: [PAGED])
    monkeypatch.setattr(workloads, "UNEVEN", ())
    for name in ("flashinfer", "flash_attn_interface", "fa3_fwd_interface", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, name, None)


def run_suite(suite: str, function, *args) -> dict:
    """Return the single row of a suite."""
    available, absent = baselines.providers(bench.SUITE_PROVIDERS[suite])
    bench_run = runner.Bench("cpu", 1, time.monotonic() + 100, "", True, available, absent)
    bench_run.last_clocks = time.monotonic()
    function(bench_run, *args)
    return bench_run.rows[0]


def install_stub_wheel(monkeypatch, name: str, **functions) -> None:
    """Install a stub module; the last part of its name has the given functions."""
    for end in [i for i, letter in enumerate(name) if letter == "."]:
        monkeypatch.setitem(sys.modules, name[:end], ModuleType(name[:end]))
    module = ModuleType(name)
    for function_name, function in functions.items():
        function.__module__ = name
        setattr(module, function_name, function)
    monkeypatch.setitem(sys.modules, name, module)


def stub_fa3_paged(q, k_cache, v_cache, *, cache_seqlens, page_table):
    """Compute paged attention with the arguments of FlashAttention-3."""
    outs = []
    for b, length in enumerate(cache_seqlens.tolist()):
        k, v = (x[page_table[b].long()].flatten(0, 1)[None, :length] for x in (k_cache, v_cache))
        with sdpa_backend("math"):
            outs.append(attention(q[b : b + 1], k, v))
    return torch.cat(outs)


class StubFlashInferWrapper:
    """Stub of the FlashInfer wrapper: checks arguments and returns zeros."""

    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False, *,
        paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer,
    ):  # fmt: skip
        assert use_cuda_graph and len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1
        if use_tensor_cores:
            raise RuntimeError("no kernel of it")

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *,
        q_data_type, kv_data_type,
    ):  # fmt: skip
        assert int(indptr[-1]) == len(indices) and sorted(indices.tolist()) == list(range(len(indices)))
        assert (num_qo_heads, num_kv_heads, head_dim) == (PAGED.Hq, PAGED.Hkv, PAGED.D)
        assert (indptr.diff().sum() - len(indptr) + 1) * page_size + last_page_len.sum() == PAGED.B * PAGED.Sk

    def run(self, q, pools):
        assert q.shape == (PAGED.B, PAGED.Hq, PAGED.D) and len(pools) == 2
        return torch.zeros_like(q)


def test_paged_suite_without_a_peer():
    row = run_suite("paged", paged.suite_paged)
    assert row["ratio"] is None and row["peers_ms"] == {} and set(row["refused"]) == {"flashinfer", "flashinfer_mma"}
    assert set(row["all_ms"]) == {*paged.PAGES, *paged.SPLITS, "ours_lengths", "ours_contiguous"}


def test_paged_peer_receives_the_call_and_a_wrong_peer_is_not_timed(monkeypatch):
    install_stub_wheel(
        monkeypatch, "flash_attn_interface", flash_attn_func=lambda: 0, flash_attn_with_kvcache=stub_fa3_paged
    )
    install_stub_wheel(monkeypatch, "flashinfer", BatchDecodeWithPagedKVCacheWrapper=StubFlashInferWrapper)
    row = run_suite("paged", paged.suite_paged)
    assert list(row["peers_ms"]) == ["fa3"] and row["best_peer"] == "fa3" and row["ratio"] > 0
    assert row["errors"]["fa3"] < 0.004 and row["refused"]["flashinfer"] == "ValueError: wrong by 1"
    assert "get_scheduler_metadata" in row["refused"]["fa3_planned"]
    assert row["refused"]["flashinfer_mma"] == "RuntimeError: no kernel of it"


def test_uneven_batch_is_timed_with_equal_and_balanced_splits(monkeypatch):
    install_stub_wheel(
        monkeypatch, "flash_attn_interface", flash_attn_func=lambda: 0, flash_attn_with_kvcache=stub_fa3_paged
    )
    monkeypatch.setattr(workloads, "paged", list)
    monkeypatch.setattr(workloads, "UNEVEN", (workloads.UnevenBatch("uneven_3", (200, 130, 64), shared=64),))
    row = run_suite("paged", paged.suite_paged)
    assert set(row["all_ms"]) == {*paged.UNEVEN_PAGES, *paged.BALANCED, "fa3"}
    assert max(row["errors"].values()) < 0.004


def test_wrong_result_of_the_plugin_ends_the_run(monkeypatch):
    monkeypatch.setattr(paged, "_ours", lambda x: lambda: torch.zeros_like(x.q))
    with pytest.raises(SystemExit, match="nothing is timed: wrong by 1"):
        run_suite("paged", paged.suite_paged)


def stub_fa4(q, k, v, *, causal, window_size, softcap, **more):
    """Compute attention with the arguments of FlashAttention-4."""
    lengths = more.pop("cu_seqlens_q", None)
    if lengths is not None:
        assert more.pop("cu_seqlens_k") is lengths and more.pop("max_seqlen_q") == more.pop("max_seqlen_k")
    sinks, left = more.pop("learnable_sink", None), None if window_size[0] < 0 else window_size
    assert not more and (left is None or left[1] == 0)
    with sdpa_backend("math"):
        return attention(
            q, k, v, causal=causal, window=left, softcap=softcap, sinks=sinks, cu_seqlens_q=lengths
        ), None  # fmt: skip


CALLS = {
    "window": WINDOW, "varlen": replace(WINDOW, lengths=(50, 7, 30), left=-1, is_packed=True),
    "softcap": replace(WINDOW, left=-1, softcap=5.0), "sinks": replace(WINDOW, sinks=True),
}  # fmt: skip


@pytest.mark.parametrize("direction", ["fwd", "train"])
@pytest.mark.parametrize("suite", CALLS)
def test_flash_attention_4_receives_the_call(suite, direction, monkeypatch):
    install_stub_wheel(
        monkeypatch, "flash_attn.cute.interface", flash_attn_func=stub_fa4, flash_attn_varlen_func=stub_fa4
    )
    monkeypatch.setitem(varlen_window.FUNCTIONS, "flex", varlen_window._varlen)  # a compiled kernel would take minutes
    row = run_suite(suite, varlen_window._measure, replace(CALLS[suite], direction=direction))
    assert "fa4" in row["peers_ms"] and row["errors"]["fa4"] < 0.004, row
