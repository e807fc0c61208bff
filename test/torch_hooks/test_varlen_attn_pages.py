"""torch.nn.attention.varlen with a paged KV cache, with split hints and with output tensors, on our kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import interpreted_kernels
import pytest
import stock_varlen_stubs
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, varlen

import torch_flashplug
from torch_flashplug import explain_varlen
from torch_flashplug.api import startup
from torch_flashplug.dispatch import bindings, varlen_decision
from torch_flashplug.registry import dispatch_table
from torch_flashplug.registry.dispatch_table import VarlenRow
from torch_flashplug.torch_hooks import flash_attention_op
from torch_flashplug.torch_hooks import varlen_attn as varlen_attn_hook

pytestmark = pytest.mark.skipif(
    "block_table" not in varlen.varlen_attn.__kwdefaults__, reason="torch's varlen_attn has no such argument here"
)
HEADS, KV_HEADS, D, PAGE = 4, 2, 64, 16
AUX = varlen.AuxRequest(lse=True)


@dataclass
class PagedCall:
    """A call of varlen_attn with a paged KV cache, and the keys of each sequence in a row."""

    query: Tensor
    pools: list[Tensor]
    cu_seq_q: Tensor
    block_table: Tensor
    seqused_k: Tensor
    max_q: int
    sequences: list[tuple[Tensor, Tensor]]

    def settings(self, **more: object) -> dict[str, object]:
        return {"block_table": self.block_table, "seqused_k": self.seqused_k, "enable_gqa": True, **more}

    def args(self) -> tuple:
        return self.query, *self.pools, self.cu_seq_q, None, self.max_q, self.block_table.shape[1] * PAGE

    def run(self, **more: object) -> Tensor | tuple[Tensor, Tensor]:
        with torch.no_grad():
            return varlen.varlen_attn(*self.args(), **self.settings(**more))

    def run_into(self, out: Tensor, **more: object) -> Tensor:
        with torch.no_grad():
            return varlen.varlen_attn_out(out, *self.args(), **self.settings(**more))

    def part(self, i: int) -> PagedCall:
        """Return the call of sequence i alone."""
        first, last = self.cu_seq_q[i : i + 2].tolist()
        cu = torch.tensor([0, last - first], dtype=torch.int32, device=self.query.device)
        tables = (self.block_table[i : i + 1], self.seqused_k[i : i + 1])
        return PagedCall(self.query[first:last], self.pools, cu, *tables, last - first, self.sequences[i : i + 1])


def make_call(
    device: str, rows: tuple[int, ...], used: tuple[int, ...], *, after: int = 0, page: int = PAGE
) -> PagedCall:
    """Make a call with permuted pages.

    Unused rows of pages and unused pages are NaN. The tables have invalid numbers after the used pages. The query has
    `after` rows after the last sequence.
    """
    draw = torch.Generator().manual_seed(20261129)
    counts = [-(-n // page) for n in used]
    width, pages = max(1, *counts) + 1, sum(counts) + 3
    order = torch.randperm(pages, generator=draw).tolist()
    table = torch.full((len(used), width), 2**31 - 1, dtype=torch.int32)
    pools = [torch.full((pages, page, KV_HEADS, D), math.nan, dtype=torch.bfloat16) for _ in range(2)]
    sequences = []
    for i, n in enumerate(used):
        mine = [order.pop() for _ in range(counts[i])]
        table[i, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
        keys = [torch.randn(n, KV_HEADS, D, generator=draw).bfloat16() for _ in range(2)]
        for pool, x in zip(pools, keys, strict=True):
            for j, number in enumerate(mine):
                part = x[j * page : (j + 1) * page]
                pool[number, : len(part)] = part
        sequences.append(tuple(keys))
    query = torch.randn(sum(rows) + after, HEADS, D, generator=draw).bfloat16()
    cu = torch.tensor([0, *rows]).cumsum(0).int()
    tensors = [x.to(device) for x in (query, *pools, cu, table, torch.tensor(used, dtype=torch.int32))]
    query, *pools, cu, table, lengths = tensors
    return PagedCall(query, pools, cu, table, lengths, max(rows), sequences)


def expected(call: PagedCall, window: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Compute the output (T, Hq, D) and the LSE (Hq, T) in fp64, from the keys of each sequence."""
    out = torch.zeros(call.query.shape, dtype=torch.float64)
    lse = torch.full((HEADS, len(out)), math.inf, dtype=torch.float64)
    for i, (keys, values) in enumerate(call.sequences):
        first, last = call.cu_seq_q[i : i + 2].tolist()
        q = call.query[first:last].cpu().double().transpose(0, 1)
        k, v = (x.double().transpose(0, 1).repeat_interleave(HEADS // KV_HEADS, 0) for x in (keys, values))
        scores = q @ k.transpose(1, 2) / math.sqrt(D)
        own = torch.arange(last - first).unsqueeze(1) + len(keys) - (last - first)
        key, (left, right) = torch.arange(len(keys)), window
        hidden = (key > own + right) * (right >= 0) | (key < own - left) * (left >= 0)
        scores = scores.masked_fill(hidden, -math.inf)
        sums = scores.logsumexp(-1)
        weights = torch.exp(scores - sums.unsqueeze(-1)).nan_to_num(0.0)
        out[first:last] = (weights @ v).transpose(0, 1)
        lse[:, first:last] = torch.where(sums == -math.inf, math.inf, sums)
    return out, lse


def assert_right(call: PagedCall, result: tuple[Tensor, Tensor], window: tuple[int, int]) -> None:
    out, lse = expected(call, window)
    assert result[0].shape == out.shape and result[1].is_contiguous()
    torch.testing.assert_close(result[0].cpu().double(), out, atol=1.5e-2, rtol=1.5e-2)
    torch.testing.assert_close(result[1].cpu().double(), lse, atol=1e-4, rtol=1e-4)


@pytest.fixture
def patched_device(kernels_on: str) -> Iterator[str]:
    """Install only the varlen_attn kernels, as in test_varlen_attn_versions.py."""
    with interpreted_kernels.installed_at(varlen_attn_hook, kernels_on):
        flash_attention_op.uninstall()
        yield kernels_on
        flash_attention_op.install()


@pytest.fixture
def stock_on_cpu() -> Iterator[list[str]]:
    with stock_varlen_stubs.registered_on_cpu() as stock_calls:
        yield stock_calls


@pytest.fixture
def served_forms(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Return a function that adds a row for each of some facts to VARLEN_ROWS."""
    measured = dispatch_table.VARLEN_ROWS

    def push(*facts: str) -> None:
        rows = (VarlenRow("flash", 90, "test table", 2.0, facts=(fact,)) for fact in facts)
        monkeypatch.setattr(dispatch_table, "VARLEN_ROWS", (*measured, *rows))
        startup.push_tables()

    yield push
    monkeypatch.undo()
    startup.push_tables()


ROWS, USED = (5, 0, 33, 1, 2), (37, 20, 50, 16, 0)


@pytest.mark.parametrize("page", [16, 12])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (20, 0)], ids=str)
def test_packed_rows_run_on_kernels(patched_device: str, window: tuple[int, int], page: int) -> None:
    """Pages of 12 rows are gathered."""
    call = make_call(patched_device, ROWS, USED, page=page)
    bindings.counters(reset=True)
    with torch_flashplug.sdpa_backend("fa3"):
        result = call.run(window_size=window, return_aux=AUX)
        plan = explain_varlen(*call.args(), **call.settings(window_size=window), device="h100")
    assert bindings.counters(reset=True)["ours_fwd"] == 1
    assert ("paged" in plan.kernel) == (page == PAGE) and ("gathered" in plan.copies) == (page != PAGE)
    assert_right(call, result, window)


@pytest.mark.parametrize("page", [16, 12])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (20, 0)], ids=str)
def test_single_rows_read_pages_in_place(patched_device: str, window: tuple[int, int], page: int) -> None:
    """Use a sequence without rows, and rows after the last sequence. Pages of 12 rows are gathered."""
    call = make_call(patched_device, (1, 1, 0, 1), (37, 0, 20, 50), after=2, page=page)
    bindings.counters(reset=True)
    with torch_flashplug.sdpa_backend("fa3"):
        result = call.run(window_size=window, return_aux=AUX)
        plan = explain_varlen(*call.args(), **call.settings(window_size=window), device="h100")
    assert bindings.counters(reset=True)["ours_fwd"] == 1
    assert plan.kernel.startswith("decode" if page == PAGE else "fwd")
    assert_right(call, result, window)
    assert not result[0][3:].any()


def test_tables_and_lengths_with_other_strides(patched_device: str) -> None:
    call = make_call(patched_device, (1, 1, 0, 1), (37, 0, 20, 50))
    with torch_flashplug.sdpa_backend("fa3"):
        plain = call.run()
        call.block_table = call.block_table.T.contiguous().T
        call.seqused_k = torch.stack([call.seqused_k, call.seqused_k], 1)[:, 0]
        call.cu_seq_q = torch.stack([call.cu_seq_q, call.cu_seq_q], 1)[:, 0]
        assert torch.equal(call.run(), plain)


@pytest.mark.parametrize("window", [(-1, 0), (20, 0)], ids=str)
def test_one_split_gives_the_same_bits_in_any_batch(patched_device: str, window: tuple[int, int]) -> None:
    """Compare each sequence alone, also a single row, with the sequence in a batch of longer sequences."""
    call = make_call(patched_device, ROWS, USED)
    with torch_flashplug.sdpa_backend("fa3"):
        whole = call.run(num_splits=1, window_size=window)
        for i in (0, 2, 3):
            first, last = call.cu_seq_q[i : i + 2].tolist()
            assert torch.equal(call.part(i).run(num_splits=1, window_size=window), whole[first:last])


@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_split_hints_are_accepted_by_forced_kernels(patched_device: str, num_splits: int) -> None:
    call = make_call(patched_device, (1, 1, 0, 1), (37, 0, 20, 50))
    with torch_flashplug.sdpa_backend("fa3"):
        result = call.run(num_splits=num_splits, return_aux=AUX)
    assert_right(call, result, (-1, -1))


def make_outs(like: Tensor) -> dict[str, Tensor]:
    """Return output tensors in several layouts, all full of NaN."""
    T, H, last = like.shape
    heads_first = like.new_full((H, T, last), math.nan).transpose(0, 1)
    wider = like.new_full((T, H, last + 8), math.nan)[..., :last]
    unaligned = like.new_full((T * H * last + 1,), math.nan)[1:].view(T, H, last)
    every_second = like.new_full((T, H, 2 * last), math.nan)[..., ::2]
    return {"heads first": heads_first, "wider": wider, "unaligned": unaligned, "every second": every_second}


@pytest.mark.parametrize("rows", [ROWS, (1, 1, 0, 1, 1)], ids=["packed rows", "single rows"])
def test_out_may_have_other_strides(patched_device: str, rows: tuple[int, ...]) -> None:
    call = make_call(patched_device, rows, USED)
    with torch_flashplug.sdpa_backend("fa3"):
        plain, lse = call.run(window_size=(-1, 0), return_aux=AUX)
        for name, out in make_outs(call.query).items():
            address = out.data_ptr()
            written, out_lse = call.run_into(out, window_size=(-1, 0), return_aux=AUX)
            assert written is out and out.data_ptr() == address, name
            assert torch.equal(out, plain) and torch.equal(out_lse, lse), name


def test_out_may_be_the_query(patched_device: str) -> None:
    call = make_call(patched_device, ROWS, USED)
    with torch_flashplug.sdpa_backend("fa3"):
        plain = call.run(window_size=(-1, 0))
        call.run_into(call.query, window_size=(-1, 0))
    assert torch.equal(call.query, plain)


def test_forced_kernels_refuse_other_outs(patched_device: str) -> None:
    call = make_call(patched_device, ROWS, USED)
    with torch_flashplug.sdpa_backend("fa3"):
        for out in (call.query.float(), call.query[:-1].clone(), call.query.new_empty(*call.query.shape[:2], 32)):
            with pytest.raises(RuntimeError, match="an out that differs from the result"):
                call.run_into(out)
        call.seqused_k = call.seqused_k[:-1]
        with pytest.raises(RuntimeError, match="block_table must be int32"):
            call.run()


def test_auto_leaves_unmeasured_pages_to_stock(
    patched_device: str, stock_on_cpu: list[str], served_forms: Callable[..., None]
) -> None:
    """Let a row serve single rows. Packed rows and split hints then still have no row."""
    if patched_device != "cpu":
        pytest.skip("stock's kernel reads only pages of 256 rows")
    single, packed = (make_call("cpu", rows, (37, 0, 20, 50)) for rows in ((1, 1, 0, 1), (5, 1, 0, 1)))
    calls = [(single, {}), (packed, {}), (single, {"num_splits": 1}), (single, {"num_splits": 3})]
    for facts, served in (((), set()), (("paged_decode",), {0}), (("paged_decode", "paged_rows"), {0, 1, 2})):
        served_forms(*facts)
        for i, (call, settings) in enumerate(calls):
            bindings.counters(reset=True), stock_on_cpu.clear()
            call.run(**settings)
            plan = explain_varlen(*call.args(), **call.settings(**settings), device="h100")
            assert bindings.counters(reset=True)["ours_fwd"] == (i in served), (facts, i)
            assert stock_on_cpu == ["forward"] * (i not in served), (facts, i)
            assert (plan.backend != "stock") == (i in served), (facts, i)
            assert i in served or "no measured entry compares" in plan.reasons["fa3"]


@pytest.fixture
def schema_with() -> Iterator[Callable[[str, str], None]]:
    """Let C++ read the arguments of `_varlen_attn` by a schema with another argument."""
    varlen_attn_hook.prepare()
    schema, rule = str(torch.ops.torch_attn._varlen_attn.default._schema), varlen_decision.varlen_rule()

    def replace(old: str, new: str) -> None:
        assert schema.count(old) == 1
        bindings.set_varlen_schema("_varlen_attn", schema.replace(old, new))

    yield replace
    bindings.set_varlen_schema("_varlen_attn", schema)
    varlen_decision.set_varlen_rule(rule)


@pytest.mark.parametrize(
    ("old", "new", "settings"),
    [
        ("SymInt? num_splits=None", "SymInt? new=None", {"num_splits": 1}),
        ("bool enable_gqa=False", "bool new=False", {"enable_gqa": True}),
        ("float? scale=None", "float? new=None", {"scale": 0.5}),
    ],
)
def test_unknown_arguments_must_have_their_default(
    patched_device: str,
    stock_on_cpu: list[str],
    schema_with: Callable[[str, str], None],
    old: str,
    new: str,
    settings: dict,
) -> None:
    """Rename an argument, as if a newer torch had an argument that this version does not know."""
    if patched_device != "cpu":
        pytest.skip("without the argument's name, stock would compute something else")
    schema_with(old, new)
    q, cu = torch.randn(9, 2, D).bfloat16(), torch.tensor([0, 4, 9], dtype=torch.int32)
    bindings.counters(reset=True)
    with torch.no_grad():
        varlen.varlen_attn(q, q, q, cu, cu, 5, 5)
        assert bindings.counters(reset=True)["ours_fwd"] == 1 and not stock_on_cpu
        varlen.varlen_attn(q, q, q, cu, cu, 5, 5, **settings)
        assert not bindings.counters(reset=True)["ours_fwd"] and stock_on_cpu == ["forward"]
        with torch_flashplug.sdpa_backend("fa3"), pytest.raises(RuntimeError, match="argument that this version does"):
            varlen.varlen_attn(q, q, q, cu, cu, 5, 5, **settings)


def test_unknown_argument_without_a_default_runs_stock(
    patched_device: str, stock_on_cpu: list[str], schema_with: Callable[[str, str], None]
) -> None:
    if patched_device != "cpu":
        pytest.skip("without the argument's name, stock would compute something else")
    schema_with("SymInt max_k", "SymInt new")
    q, cu = torch.randn(9, 2, D).bfloat16(), torch.tensor([0, 4, 9], dtype=torch.int32)
    with torch.no_grad():
        varlen.varlen_attn(q, q, q, cu, cu, 5, 5)
    assert stock_on_cpu == ["forward"]


def test_backend_argument_is_read_by_name(
    patched_device: str, stock_on_cpu: list[str], schema_with: Callable[[str, str], None]
) -> None:
    """Read the place of num_splits as the argument `backend` of torch 2.15."""
    if patched_device != "cpu":
        pytest.skip("stock would read the number as num_splits")
    schema_with("SymInt? num_splits=None", "SymInt? backend=None")
    varlen_decision.set_varlen_rule("argument")
    q, cu = torch.randn(9, 2, D).bfloat16(), torch.tensor([0, 4, 9], dtype=torch.int32)
    with torch.no_grad():
        for backend, is_ours in ((SDPBackend.FLASH_ATTENTION, True), (SDPBackend.CUDNN_ATTENTION, False)):
            bindings.counters(reset=True), stock_on_cpu.clear()
            varlen.varlen_attn(q, q, q, cu, cu, 5, 5, num_splits=backend.value)
            assert bindings.counters(reset=True)["ours_fwd"] == is_ours
            assert stock_on_cpu == ["forward"] * (not is_ours)
