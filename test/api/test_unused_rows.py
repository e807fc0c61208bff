"""Rows and keys outside all packed sequences: attention() must not read them, whatever their values.

The tests cover every tensor of a forward or backward, keys beyond the KV length, and blocks outside the block-sparse
lists. test_varlen_kernels.py checks the numbers of the kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from cuda_graphs import call_on_side_stream
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from torch_flashplug import attention, sdpa_backend
from torch_flashplug.ops import attention as attention_ops

SEED, HEADS, KV_HEADS, DIM = 20261127, 4, 2, 64
AHEAD, BEHIND = 3, 5  # rows and keys before the first sequence, and after the last sequence
LENGTHS = ([5, 0, 3, 9], [7, 4, 0, 12])  # rows and keys of each sequence
SETTINGS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": "top_left", "window": (4, -1)},
    "softcap": {"causal": True, "softcap": 1.5},
}
BAD_VALUES = (math.nan, math.inf, -math.inf)
NAMES = ("q", "k", "v", "sinks", "do", "dlse")
Call = dict[str, Tensor]


def int32_tensor(values: list[int], device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def make_cu_seqlens(lengths: list[int], device: str = "cpu") -> Tensor:
    return int32_tensor([AHEAD, *lengths], device).cumsum(0, dtype=torch.int32)


def make_call(dtype: torch.dtype, bad: float | None = None) -> Call:
    """Return the tensors of a call; entries outside all sequences are 0, or `bad`."""
    rows, keys = (AHEAD + sum(lengths) + BEHIND for lengths in LENGTHS)
    sizes = ((rows, HEADS, DIM), (keys, KV_HEADS, DIM), (keys, KV_HEADS, DIM), (HEADS,), (rows, HEADS, DIM),
             (HEADS, rows))  # fmt: skip
    source = torch.Generator().manual_seed(SEED)
    call = {name: torch.randn(size, generator=source) for name, size in zip(NAMES, sizes, strict=True)}
    for name in ("q", "k", "v", "do", "dlse"):
        x = call[name] if name != "dlse" else call[name].T
        x[:AHEAD] = x[-BEHIND:] = 0.0 if bad is None else bad
    return {name: x if name in {"sinks", "dlse"} else x.to(dtype) for name, x in call.items()}


def run_attention(
    call: Call, device: str, settings: dict, *, sinks: bool = True, lse: bool = True
) -> dict[str, Tensor]:
    """Return the outputs and the gradients by name; with `lse`, the loss also depends on the LSE."""
    tensors = {name: x.to(device) for name, x in call.items()}
    tensors |= {"dlse": tensors["dlse"].to(torch.promote_types(torch.float32, tensors["q"].dtype))}
    names = NAMES[: 4 if sinks else 3]
    leaves = [tensors[name].detach().requires_grad_() for name in names]
    cu = {"cu_seqlens_q": make_cu_seqlens(LENGTHS[0], device), "cu_seqlens_k": make_cu_seqlens(LENGTHS[1], device)}
    results = attention(*leaves[:3], **cu, **settings, sinks=leaves[3] if sinks else None, return_lse=True)
    parts = 2 if lse else 1
    grads = torch.autograd.grad(results[:parts], leaves, (tensors["do"], tensors["dlse"])[:parts])
    return {"out": results[0].detach(), "lse": results[1].detach()} | {f"d{name}": x for name, x in zip(names, grads)}


def attend_in_fp64(call: Call, settings: dict, *, lse: bool = True) -> dict[str, Tensor]:
    """Return the expected results in fp64, computed per sequence by the definition of softmax."""
    wide = {name: x.double() for name, x in call.items()}
    leaves = [wide[name].requires_grad_() for name in NAMES[:4]]
    (q, k, v, sinks), loss, cu_seqlens = (
        leaves,
        torch.zeros((), dtype=torch.float64),
        [make_cu_seqlens(query) for query in LENGTHS],
    )
    out = torch.zeros_like(wide["do"])
    window = attention_ops.Window(
        settings.get("window", (-1, -1))[0], 0 if settings.get("causal") else -1, settings.get("causal") != "top_left"
    )
    for i in range(len(LENGTHS[0])):
        rows, keys = (slice(int(cu[i]), int(cu[i + 1])) for cu in cu_seqlens)
        query = q[rows].transpose(0, 1)
        key, value = (x[keys].transpose(0, 1).repeat_interleave(HEADS // KV_HEADS, 0) for x in (k, v))
        scores, cap = query @ key.mT * DIM**-0.5, settings.get("softcap")
        scores = cap * torch.tanh(scores / cap) if cap else scores
        scores = scores.masked_fill(~window.to_mask(*scores.shape[1:], torch.device("cpu")), -math.inf)
        scores = torch.cat((scores, sinks.view(-1, 1, 1).expand(*scores.shape[:2], 1)), -1)
        sequence_out = (scores.softmax(-1)[..., :-1] @ value).transpose(0, 1)
        out[rows] = sequence_out.detach()
        loss = loss + (sequence_out * wide["do"][rows]).sum()
        loss = loss + (scores.logsumexp(-1) * wide["dlse"][:, rows]).sum() * lse
    return {"out": out} | {f"d{name}": x for name, x in zip(NAMES, torch.autograd.grad(loss, leaves))}


def assert_same_results(actual: dict[str, Tensor], clean: dict[str, Tensor]) -> None:
    """Compare results with a call whose unused rows are zeros, bit for bit on the CPU.

    On a GPU, some kernels accumulate in any order, so a tolerance applies. Gradients of unused rows must be zero.
    """
    near = {"rtol": 0.0, "atol": 0.0} if actual["out"].device.type == "cpu" else {"rtol": 1e-2, "atol": 1e-3}
    for name, x in actual.items():
        torch.testing.assert_close(x, clean[name], **near, msg=lambda text, name=name: f"{name}: {text}")
    for name, cu in (("out", LENGTHS[0]), ("dq", LENGTHS[0]), ("dk", LENGTHS[1]), ("dv", LENGTHS[1])):
        unused = torch.cat((actual[name][:AHEAD], actual[name][AHEAD + sum(cu) :]))
        assert unused.shape[0] == AHEAD + BEHIND and (unused == 0.0).all(), name


@pytest.fixture(params=["auto", "math"])
def backend(request: pytest.FixtureRequest) -> Iterator[None]:
    with sdpa_backend(request.param):
        yield


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("lse", [True, False], ids=["lse", "out"])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_gradients_do_not_read_rows_outside_sequences(
    device: str, dtype: torch.dtype, settings: str, lse: bool
) -> None:
    """Check gradients of q, k, v and sinks, in kernels and in the reference math."""
    arguments, expected = SETTINGS[settings], attend_in_fp64(make_call(dtype), SETTINGS[settings], lse=lse)
    clean = run_attention(make_call(dtype), device, arguments, lse=lse)
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 6e-2}
    for name, x in expected.items():
        torch.testing.assert_close(clean[name].cpu().double(), x, **tolerance)
    for bad in BAD_VALUES:
        assert_same_results(run_attention(make_call(dtype, bad), device, arguments, lse=lse), clean)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_gradients_without_sinks_do_not_read_rows_outside_sequences(device: str, dtype: torch.dtype) -> None:
    clean = run_attention(make_call(dtype), device, SETTINGS["causal"], sinks=False)
    for bad in BAD_VALUES:
        assert_same_results(run_attention(make_call(dtype, bad), device, SETTINGS["causal"], sinks=False), clean)


@pytest.mark.parametrize("name", ["do", "dlse", "q", "k", "v"])
@pytest.mark.parametrize("place", ["ahead", "behind"])
def test_bad_values_outside_sequences_do_not_reach_sink_gradients(device: str, name: str, place: str) -> None:
    """Set a single tensor to NaN, before or after the sequences."""
    call = make_call(torch.float32)
    clean = run_attention(call, device, SETTINGS["causal"])
    x = call[name].T if name == "dlse" else call[name]
    x[slice(0, AHEAD) if place == "ahead" else slice(-BEHIND, None)] = math.nan
    assert_same_results(run_attention(call, device, SETTINGS["causal"]), clean)


@pytest.mark.parametrize("op", ["attention_bwd", "_attention_math_bwd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_backward_does_not_read_output_rows_outside_sequences(device: str, op: str, dtype: torch.dtype) -> None:
    """Set unused rows of the output and LSE to NaN or infinity. A caller of the op may leave such values there."""
    call = {name: x.to(device) for name, x in make_call(dtype).items()}
    q, k, v, do = (call[name].transpose(0, 1).unsqueeze(0) for name in ("q", "k", "v", "do"))
    lengths, dlse = [make_cu_seqlens(expected, device) for expected in LENGTHS], call["dlse"].unsqueeze(0)
    window = (-1, 0, True, 0.0, None)
    out, lse = attention_ops.namespace.attention_fwd(q, k, v, call["sinks"], *lengths, None, *window)
    clean = getattr(attention_ops.namespace, op)(do, dlse, q, k, v, out, lse, *lengths, *window, False)[:3]
    for bad in BAD_VALUES:
        for x in (do, out, lse.unsqueeze(-1), dlse.unsqueeze(-1)):
            x[:, :, :AHEAD] = x[:, :, -BEHIND:] = bad
        actual = getattr(attention_ops.namespace, op)(do, dlse, q, k, v, out, lse, *lengths, *window, False)[:3]
        for x, expected in zip(actual, clean, strict=True):
            torch.testing.assert_close(x, expected, rtol=1e-2, atol=1e-3)


# ---- keys beyond the KV length: no gradients ----


def pack_layout(call: Call) -> Callable[..., tuple[Tensor, Tensor]]:
    device = call["q"].device.type
    cu = {"cu_seqlens_q": make_cu_seqlens([4, 6], device), "cu_seqlens_k": make_cu_seqlens([9, 11], device)}
    return lambda q, k, v, **more: attention(q[:18], k[:28], v[:28], **cu, **more)


def batch_layout(rows: int) -> Callable[[Call], Callable[..., tuple[Tensor, Tensor]]]:
    def lay(call: Call) -> Callable[..., tuple[Tensor, Tensor]]:
        def forward(q: Tensor, k: Tensor, v: Tensor, **more: object) -> tuple[Tensor, Tensor]:
            k, v = (x[AHEAD:][:20].unflatten(0, (2, 10)) for x in (k, v))
            return attention(q[AHEAD:][: 2 * rows].unflatten(0, (2, rows)), k, v, **more)

        return forward

    return lay


LAYOUTS = {"packed": pack_layout, "few rows": batch_layout(1), "batches": batch_layout(6)}
USED, COUNT = [3, 0], slice(AHEAD, AHEAD + 3)  # the KV length of each sequence, and the slice of visible keys


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_keys_beyond_the_kv_length_are_not_read(device: str, dtype: torch.dtype, layout: str) -> None:
    """Neither k nor v may be read beyond the KV length. The second sequence has a KV length of zero."""
    call = {name: torch.randn(40, heads, DIM, generator=torch.Generator().manual_seed(i)).to(device, dtype)
            for i, (name, heads) in enumerate((("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)))}  # fmt: skip
    forward, more = LAYOUTS[layout](call), {"causal": True, "sinks": torch.zeros(HEADS, device=device)}
    more |= {"seqused_k": int32_tensor(USED, device), "return_lse": True}
    clean = forward(*call.values(), **more)
    assert all(x.isfinite().all() for x in clean)
    hidden = torch.ones(40, dtype=torch.bool, device=device)
    hidden[COUNT] = False
    for bad in BAD_VALUES:
        call["k"][hidden] = call["v"][hidden] = bad
        for x, expected in zip(forward(*call.values(), **more), clean, strict=True):
            assert torch.equal(x, expected)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "batches"])
def test_pages_beyond_the_kv_length_are_not_read(device: str, rows: int, packed: bool) -> None:
    """Query rows outside all sequences and scales of 8-bit keys must not be read either."""
    source, dtype = torch.Generator().manual_seed(SEED), torch.bfloat16
    q = torch.randn(2 * rows + BEHIND, HEADS, DIM, generator=source).to(device, dtype)
    pools = [torch.randint(-99, 99, (5, 16, KV_HEADS, DIM), generator=source).to(device, torch.int8) for _ in range(2)]
    scales = {name: torch.rand(5, KV_HEADS, 16, generator=source).to(device) / 99 for name in ("k_scale", "v_scale")}
    table, used = int32_tensor([[3, 1], [4, 9]]).to(device), int32_tensor([20, 5], device)
    more = {"block_table": table, "seqused_k": used, "return_lse": True}
    if packed:
        more |= {"cu_seqlens_q": int32_tensor([0, rows, 2 * rows], device), "max_seqlen_q": rows}

    def forward(is_quantized: bool) -> list[Tensor]:
        k, v = (
            pools
            if is_quantized
            else [x.to(dtype) * s.mT.to(dtype).unsqueeze(-1) for x, s in zip(pools, scales.values())]
        )
        query = q if packed else q[: 2 * rows].unflatten(0, (2, rows))
        out, lse = attention(query, k, v, **more, **(scales if is_quantized else {}))
        return [out[: 2 * rows], lse[:, : 2 * rows]] if packed else [out, lse]

    clean_results = forward(True), forward(False)
    assert all(x.isfinite().all() for clean in clean_results for x in clean)
    for bad in BAD_VALUES:
        for page, row in ((0, 0), (2, 0), (1, 4), (4, 5)):
            for scale in scales.values():
                scale[page, :, row:] = bad
        q[2 * rows :] = bad
        for actual, clean in zip((forward(True), forward(False)), clean_results, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(actual, clean, strict=True))


# ---- blocks outside the block-sparse lists ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("name", ["q", "k", "v", "do", "dlse"])
def test_reference_math_of_block_lists_does_not_read_masked_rows(device: str, name: str, dtype: torch.dtype) -> None:
    """Use a document mask for tensors longer than the documents. Kernels also read no unlisted block."""
    rows, used, source = 384, 128, torch.Generator().manual_seed(SEED)
    sizes = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS, "do": HEADS}
    call = {x: torch.randn(2, rows, heads, 32, generator=source).to(device, dtype) for x, heads in sizes.items()}
    call["dlse"] = torch.randn(2, HEADS, rows, generator=source).to(device)
    mask = create_block_mask(lambda b, h, i, j: (i < used) & (j <= i), None, None, rows, rows, device=device)

    def step() -> tuple[Tensor, ...]:
        leaves = [call[x].detach().requires_grad_() for x in ("q", "k", "v")]
        with sdpa_backend("math"):
            results = attention(*leaves, block_mask=mask, return_lse=True)
            return (results[0], *torch.autograd.grad(results, leaves, (call["do"], call["dlse"])))

    clean = step()
    for bad in BAD_VALUES:
        (call[name].transpose(1, 2) if name == "dlse" else call[name])[:, used:] = bad
        for x, expected in zip(step(), clean, strict=True):
            torch.testing.assert_close(x[:, :used], expected[:, :used], rtol=1e-5, atol=1e-5)
            assert (x[:, used:] == 0.0).all()


# ---- tracing and capture ----


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_gradients_do_not_read_rows_outside_sequences(dynamic: bool) -> None:
    """Compile a single graph with sequence lengths as data."""

    def loss(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, cu_q: Tensor, cu_k: Tensor) -> tuple[Tensor, Tensor]:
        return attention(q, k, v, sinks=sinks, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True, return_lse=True)

    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    expected = run_attention(make_call(torch.float32), "cpu", SETTINGS["causal"])
    for bad in BAD_VALUES:
        call = make_call(torch.float32, bad)
        leaves = [call[name].requires_grad_() for name in NAMES[:4]]
        results = compiled(*leaves, *(make_cu_seqlens(lengths) for lengths in LENGTHS))
        grads = torch.autograd.grad(results, leaves, (call["do"], call["dlse"]))
        for name, x in zip(NAMES, grads):
            torch.testing.assert_close(x, expected[f"d{name}"])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_captured_gradients_do_not_read_rows_outside_sequences(dtype: torch.dtype) -> None:
    """Capture with finite numbers and replay with bad numbers.

    Nothing may wait for the device.
    """
    call = {name: x.cuda() for name, x in make_call(dtype).items()}
    leaves, cu = (
        [call[name].requires_grad_() for name in NAMES[:4]],
        [make_cu_seqlens(expected, "cuda") for expected in LENGTHS],
    )

    def step() -> tuple[Tensor, ...]:
        results = attention(*leaves[:3], sinks=leaves[3], cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], return_lse=True)
        return torch.autograd.grad(results, leaves, (call["do"], call["dlse"]))

    clean = call_on_side_stream(lambda: [x.clone() for x in step()])
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = step()
    for bad in BAD_VALUES:
        with torch.no_grad():
            for name, x in make_call(dtype, bad).items():
                call[name].copy_(x)
        graph.replay()
        for x, expected in zip(grads, clean, strict=True):
            torch.testing.assert_close(x, expected, rtol=1e-2, atol=1e-3)
