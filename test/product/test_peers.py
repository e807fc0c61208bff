"""Peers of the suites paged, ragged, window, softcap and sinks, in their place modules that take what the wheels take:
what they are given is the call, what is wrong or cannot run is not timed and says why.
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
sys.path.append(str(ROOT / "tools"))

pytest.importorskip("rich")

import bench  # noqa: E402
import harness  # noqa: E402
import paged_decode  # noqa: E402
import providers  # noqa: E402
import windows  # noqa: E402
import workloads  # noqa: E402

PAGED = replace(workloads.paged()[-2], B=2, Sk=256)
WINDOW = windows.Call("fwd", (40, 40), 64, (4, 2), left=9)


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    for caller in (paged_decode, harness):
        monkeypatch.setattr(caller, "graphed", lambda candidate, calls: candidate)
    for suite in (paged_decode, windows):
        monkeypatch.setattr(suite, "ROUND_MS", 0.1)
    monkeypatch.setattr(paged_decode, "copies_of", lambda case: 2)
    monkeypatch.setattr(workloads, "paged", lambda: [PAGED])
    for name in ("flashinfer", "flash_attn_interface", "fa3_fwd_interface", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, name, None)


def run(suite: str, function, *args) -> dict:
    """The one row of it."""
    found, absent = providers.providers(bench.WANTED[suite])
    asked = harness.Bench("cpu", 1, time.monotonic() + 100, "", True, found, absent)
    asked.last_clocks = time.monotonic()
    function(asked, *args)
    return asked.rows[0]


def wheel(monkeypatch, name: str, **functions) -> None:
    """Importable: its last part has these functions."""
    for end in [i for i, letter in enumerate(name) if letter == "."]:
        monkeypatch.setitem(sys.modules, name[:end], ModuleType(name[:end]))
    module = ModuleType(name)
    for given, function in functions.items():
        function.__module__ = name
        setattr(module, given, function)
    monkeypatch.setitem(sys.modules, name, module)


def attend_pages(q, k_cache, v_cache, *, cache_seqlens, page_table):
    """As FlashAttention-3 says of its arguments."""
    outs = []
    for b, length in enumerate(cache_seqlens.tolist()):
        k, v = (x[page_table[b].long()].flatten(0, 1)[None, :length] for x in (k_cache, v_cache))
        with sdpa_backend("math"):
            outs.append(attention(q[b : b + 1], k, v))
    return torch.cat(outs)


class Nothing:
    """FlashInfer's wrapper, as to its arguments; it gives zeros."""

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


def test_pages_without_a_peer():
    row = run("paged", paged_decode.suite_paged)
    assert row["ratio"] is None and row["peers_ms"] == {} and set(row["refused"]) == {"flashinfer", "flashinfer_mma"}
    assert set(row["all_ms"]) == {*paged_decode.PAGES, *paged_decode.SPLITS, "ours_lengths", "ours_on_end"}


def test_a_peer_of_pages_is_given_the_call_and_a_wrong_one_is_not_timed(monkeypatch):
    wheel(monkeypatch, "flash_attn_interface", flash_attn_func=lambda: 0, flash_attn_with_kvcache=attend_pages)
    wheel(monkeypatch, "flashinfer", BatchDecodeWithPagedKVCacheWrapper=Nothing)
    row = run("paged", paged_decode.suite_paged)
    assert list(row["peers_ms"]) == ["fa3"] and row["best_peer"] == "fa3" and row["ratio"] > 0
    assert row["errors"]["fa3"] < 0.004 and row["refused"]["flashinfer"] == "ValueError: wrong by 1"
    assert "get_scheduler_metadata" in row["refused"]["fa3_planned"]
    assert row["refused"]["flashinfer_mma"] == "RuntimeError: no kernel of it"


def test_ours_being_wrong_ends_the_run(monkeypatch):
    monkeypatch.setattr(paged_decode, "_ours", lambda x: lambda: torch.zeros_like(x.q))
    with pytest.raises(SystemExit, match="nothing is timed: wrong by 1"):
        run("paged", paged_decode.suite_paged)


def flash(q, k, v, *, causal, window_size, softcap, **more):
    """As FlashAttention-4 says of its arguments."""
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
    "window": WINDOW, "ragged": replace(WINDOW, lengths=(50, 7, 30), left=-1, on_end=True),
    "softcap": replace(WINDOW, left=-1, softcap=5.0), "sinks": replace(WINDOW, sinks=True),
}  # fmt: skip


@pytest.mark.parametrize("what", ["fwd", "train"])
@pytest.mark.parametrize("suite", CALLS)
def test_flash_attention_4_is_given_the_call(suite, what, monkeypatch):
    wheel(monkeypatch, "flash_attn.cute.interface", flash_attn_func=flash, flash_attn_varlen_func=flash)
    monkeypatch.setitem(windows.FUNCTIONS, "flex", windows._varlen)  # compiled: for minutes
    row = run(suite, windows._measure, replace(CALLS[suite], what=what))
    assert "fa4" in row["peers_ms"] and row["errors"]["fa4"] < 0.004, row
