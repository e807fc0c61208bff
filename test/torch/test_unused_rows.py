"""Rows and keys that no packed sequence owns: attention() reads none of them, whatever they hold, in any tensor of a
forward or a backward. The same of keys that do not count, and of blocks that no list names. Kernels' own numbers are
test_lengths.py's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from torch_flashplug import attention, sdpa_backend
from torch_flashplug.ops import attention as windowed

SEED, HEADS, KV_HEADS, DIM = 20261127, 4, 2, 64
AHEAD, BEHIND = 3, 5  # rows and keys ahead of the first sequence, and behind the last one
LENGTHS = ([5, 0, 3, 9], [7, 4, 0, 12])  # rows and keys of each sequence
SETTINGS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": "top_left", "window": (4, -1)},
    "softcap": {"causal": True, "softcap": 1.5},
}
BAD = (math.nan, math.inf, -math.inf)
NAMES = ("q", "k", "v", "sinks", "do", "dlse")
Call = dict[str, Tensor]


def numbers(values: list[int], device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def starts(lengths: list[int], device: str = "cpu") -> Tensor:
    return numbers([AHEAD, *lengths], device).cumsum(0, dtype=torch.int32)


def draw(dtype: torch.dtype, bad: float | None = None) -> Call:
    """Return the tensors of a call; where they belong to no sequence they are 0, or `bad`."""
    rows, keys = (AHEAD + sum(one) + BEHIND for one in LENGTHS)
    sizes = ((rows, HEADS, DIM), (keys, KV_HEADS, DIM), (keys, KV_HEADS, DIM), (HEADS,), (rows, HEADS, DIM),
             (HEADS, rows))  # fmt: skip
    source = torch.Generator().manual_seed(SEED)
    call = {name: torch.randn(size, generator=source) for name, size in zip(NAMES, sizes, strict=True)}
    for name in ("q", "k", "v", "do", "dlse"):
        x = call[name] if name != "dlse" else call[name].T
        x[:AHEAD] = x[-BEHIND:] = 0.0 if bad is None else bad
    return {name: x if name in {"sinks", "dlse"} else x.to(dtype) for name, x in call.items()}


def run(call: Call, device: str, settings: dict, *, sinks: bool = True, lse: bool = True) -> dict[str, Tensor]:
    """Return the outputs and the gradients by name. lse: whether the loss has a part of it, too."""
    given = {name: x.to(device) for name, x in call.items()}
    given |= {"dlse": given["dlse"].to(torch.promote_types(torch.float32, given["q"].dtype))}
    names = NAMES[: 4 if sinks else 3]
    leaves = [given[name].detach().requires_grad_() for name in names]
    cu = {"cu_seqlens_q": starts(LENGTHS[0], device), "cu_seqlens_k": starts(LENGTHS[1], device)}
    ends = attention(*leaves[:3], **cu, **settings, sinks=leaves[3] if sinks else None, return_lse=True)
    parts = 2 if lse else 1
    grads = torch.autograd.grad(ends[:parts], leaves, (given["do"], given["dlse"])[:parts])
    return {"out": ends[0].detach(), "lse": ends[1].detach()} | {f"d{name}": x for name, x in zip(names, grads)}


def exact(call: Call, settings: dict, *, lse: bool = True) -> dict[str, Tensor]:
    """Return the same in fp64, of each sequence by itself, by the definition of softmax."""
    wide = {name: x.double() for name, x in call.items()}
    leaves = [wide[name].requires_grad_() for name in NAMES[:4]]
    (q, k, v, sinks), loss, ends = leaves, torch.zeros((), dtype=torch.float64), [starts(one) for one in LENGTHS]
    out = torch.zeros_like(wide["do"])
    window = windowed.Window(
        settings.get("window", (-1, -1))[0], 0 if settings.get("causal") else -1, settings.get("causal") != "top_left"
    )
    for i in range(len(LENGTHS[0])):
        mine, met = (slice(int(cu[i]), int(cu[i + 1])) for cu in ends)
        one = q[mine].transpose(0, 1)
        key, value = (x[met].transpose(0, 1).repeat_interleave(HEADS // KV_HEADS, 0) for x in (k, v))
        scores, cap = one @ key.mT * DIM**-0.5, settings.get("softcap")
        scores = cap * torch.tanh(scores / cap) if cap else scores
        scores = scores.masked_fill(~window.seen(*scores.shape[1:], torch.device("cpu")), -math.inf)
        scores = torch.cat((scores, sinks.view(-1, 1, 1).expand(*scores.shape[:2], 1)), -1)
        found = (scores.softmax(-1)[..., :-1] @ value).transpose(0, 1)
        out[mine] = found.detach()
        loss = loss + (found * wide["do"][mine]).sum()
        loss = loss + (scores.logsumexp(-1) * wide["dlse"][:, mine]).sum() * lse
    return {"out": out} | {f"d{name}": x for name, x in zip(NAMES, torch.autograd.grad(loss, leaves))}


def assert_same(found: dict[str, Tensor], clean: dict[str, Tensor]) -> None:
    """Hold results to those of a call whose unused rows are zeros: bit for bit where no kernel adds up in any order."""
    near = {"rtol": 0.0, "atol": 0.0} if found["out"].device.type == "cpu" else {"rtol": 1e-2, "atol": 1e-3}
    for name, x in found.items():
        torch.testing.assert_close(x, clean[name], **near, msg=lambda said, name=name: f"{name}: {said}")
    for name, cu in (("out", LENGTHS[0]), ("dq", LENGTHS[0]), ("dk", LENGTHS[1]), ("dv", LENGTHS[1])):
        unused = torch.cat((found[name][:AHEAD], found[name][AHEAD + sum(cu) :]))
        assert unused.shape[0] == AHEAD + BEHIND and (unused == 0.0).all(), name


@pytest.fixture(params=["auto", "math"])
def backend(request: pytest.FixtureRequest) -> Iterator[None]:
    with sdpa_backend(request.param):
        yield


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("lse", [True, False], ids=["lse", "out"])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_gradients_read_no_row_of_no_sequence(device: str, dtype: torch.dtype, settings: str, lse: bool) -> None:
    """Those of q, k, v and sinks, by the kernels' backward and by the mathematics'."""
    said, right = SETTINGS[settings], exact(draw(dtype), SETTINGS[settings], lse=lse)
    clean = run(draw(dtype), device, said, lse=lse)
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 6e-2}
    for name, x in right.items():
        torch.testing.assert_close(clean[name].cpu().double(), x, **tolerance)
    for bad in BAD:
        assert_same(run(draw(dtype, bad), device, said, lse=lse), clean)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_gradients_without_sinks_read_no_row_of_no_sequence(device: str, dtype: torch.dtype) -> None:
    clean = run(draw(dtype), device, SETTINGS["causal"], sinks=False)
    for bad in BAD:
        assert_same(run(draw(dtype, bad), device, SETTINGS["causal"], sinks=False), clean)


@pytest.mark.parametrize("name", ["do", "dlse", "q", "k", "v"])
@pytest.mark.parametrize("place", ["ahead", "behind"])
def test_one_bad_tensor_reaches_no_sink(device: str, name: str, place: str) -> None:
    """Each by itself, on either side of the sequences."""
    call = draw(torch.float32)
    clean = run(call, device, SETTINGS["causal"])
    x = call[name].T if name == "dlse" else call[name]
    x[slice(0, AHEAD) if place == "ahead" else slice(-BEHIND, None)] = math.nan
    assert_same(run(call, device, SETTINGS["causal"]), clean)


@pytest.mark.parametrize("op", ["attention_bwd", "_attention_math_bwd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_backward_reads_no_output_of_no_sequence(device: str, op: str, dtype: torch.dtype) -> None:
    """Nor an LSE: a caller of the op may have left there what is no number."""
    call = {name: x.to(device) for name, x in draw(dtype).items()}
    q, k, v, do = (call[name].transpose(0, 1).unsqueeze(0) for name in ("q", "k", "v", "do"))
    lengths, dlse = [starts(one, device) for one in LENGTHS], call["dlse"].unsqueeze(0)
    window = (-1, 0, True, 0.0, None)
    out, lse = windowed.namespace.attention_fwd(q, k, v, call["sinks"], *lengths, None, *window)
    right = getattr(windowed.namespace, op)(do, dlse, q, k, v, out, lse, *lengths, *window, False)[:3]
    for bad in BAD:
        for x in (do, out, lse.unsqueeze(-1), dlse.unsqueeze(-1)):
            x[:, :, :AHEAD] = x[:, :, -BEHIND:] = bad
        found = getattr(windowed.namespace, op)(do, dlse, q, k, v, out, lse, *lengths, *window, False)[:3]
        for x, one in zip(found, right, strict=True):
            torch.testing.assert_close(x, one, rtol=1e-2, atol=1e-3)


# ---- keys beyond those that count: no gradients ----


def lay_packed(call: Call) -> Callable[..., tuple[Tensor, Tensor]]:
    device = call["q"].device.type
    cu = {"cu_seqlens_q": starts([4, 6], device), "cu_seqlens_k": starts([9, 11], device)}
    return lambda q, k, v, **more: attention(q[:18], k[:28], v[:28], **cu, **more)


def lay_in_batches(rows: int) -> Callable[[Call], Callable[..., tuple[Tensor, Tensor]]]:
    def lay(call: Call) -> Callable[..., tuple[Tensor, Tensor]]:
        def forward(q: Tensor, k: Tensor, v: Tensor, **more: object) -> tuple[Tensor, Tensor]:
            k, v = (x[AHEAD:][:20].unflatten(0, (2, 10)) for x in (k, v))
            return attention(q[AHEAD:][: 2 * rows].unflatten(0, (2, rows)), k, v, **more)

        return forward

    return lay


LAYOUTS = {"packed": lay_packed, "few rows": lay_in_batches(1), "batches": lay_in_batches(6)}
USED, COUNT = [3, 0], slice(AHEAD, AHEAD + 3)  # how many keys of each sequence count, and which of all that is


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_keys_that_do_not_count_are_not_read(device: str, dtype: torch.dtype, layout: str) -> None:
    """Neither their k nor their v, of sequences of which one has no key that counts."""
    call = {name: torch.randn(40, heads, DIM, generator=torch.Generator().manual_seed(i)).to(device, dtype)
            for i, (name, heads) in enumerate((("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)))}  # fmt: skip
    forward, more = LAYOUTS[layout](call), {"causal": True, "sinks": torch.zeros(HEADS, device=device)}
    more |= {"seqused_k": numbers(USED, device), "return_lse": True}
    right = forward(*call.values(), **more)
    assert all(x.isfinite().all() for x in right)
    hidden = torch.ones(40, dtype=torch.bool, device=device)
    hidden[COUNT] = False
    for bad in BAD:
        call["k"][hidden] = call["v"][hidden] = bad
        for x, one in zip(forward(*call.values(), **more), right, strict=True):
            assert torch.equal(x, one)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "batches"])
def test_pages_behind_the_keys_that_count_are_not_read(device: str, rows: int, packed: bool) -> None:
    """Nor rows of the query that belong to no sequence, nor scales of keys in 8 bits."""
    source, dtype = torch.Generator().manual_seed(SEED), torch.bfloat16
    q = torch.randn(2 * rows + BEHIND, HEADS, DIM, generator=source).to(device, dtype)
    pools = [torch.randint(-99, 99, (5, 16, KV_HEADS, DIM), generator=source).to(device, torch.int8) for _ in range(2)]
    scales = {name: torch.rand(5, KV_HEADS, 16, generator=source).to(device) / 99 for name in ("k_scale", "v_scale")}
    table, used = numbers([[3, 1], [4, 9]]).to(device), numbers([20, 5], device)
    more = {"block_table": table, "seqused_k": used, "return_lse": True}
    if packed:
        more |= {"cu_seqlens_q": numbers([0, rows, 2 * rows], device), "max_seqlen_q": rows}

    def forward(eight: bool) -> list[Tensor]:
        k, v = pools if eight else [x.to(dtype) * s.mT.to(dtype).unsqueeze(-1) for x, s in zip(pools, scales.values())]
        given = q if packed else q[: 2 * rows].unflatten(0, (2, rows))
        out, lse = attention(given, k, v, **more, **(scales if eight else {}))
        return [out[: 2 * rows], lse[:, : 2 * rows]] if packed else [out, lse]

    right = forward(True), forward(False)
    assert all(x.isfinite().all() for one in right for x in one)
    for bad in BAD:
        for page, row in ((0, 0), (2, 0), (1, 4), (4, 5)):
            for scale in scales.values():
                scale[page, :, row:] = bad
        q[2 * rows :] = bad
        for found, one in zip((forward(True), forward(False)), right, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(found, one, strict=True))


# ---- blocks that no list names ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("name", ["q", "k", "v", "do", "dlse"])
def test_the_mathematics_of_block_lists_reads_no_hidden_row(device: str, name: str, dtype: torch.dtype) -> None:
    """As kernels read no block that no list names: documents behind which a tensor has room for more."""
    rows, used, source = 384, 128, torch.Generator().manual_seed(SEED)
    sizes = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS, "do": HEADS}
    call = {x: torch.randn(2, rows, heads, 32, generator=source).to(device, dtype) for x, heads in sizes.items()}
    call["dlse"] = torch.randn(2, HEADS, rows, generator=source).to(device)
    mask = create_block_mask(lambda b, h, i, j: (i < used) & (j <= i), None, None, rows, rows, device=device)

    def step() -> tuple[Tensor, ...]:
        leaves = [call[x].detach().requires_grad_() for x in ("q", "k", "v")]
        with sdpa_backend("math"):
            ends = attention(*leaves, block_mask=mask, return_lse=True)
            return (ends[0], *torch.autograd.grad(ends, leaves, (call["do"], call["dlse"])))

    clean = step()
    for bad in BAD:
        (call[name].transpose(1, 2) if name == "dlse" else call[name])[:, used:] = bad
        for x, one in zip(step(), clean, strict=True):
            torch.testing.assert_close(x[:, :used], one[:, :used], rtol=1e-5, atol=1e-5)
            assert (x[:, used:] == 0.0).all()


# ---- what traces and captures it ----


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_gradients_read_no_row_of_no_sequence(dynamic: bool) -> None:
    """In one graph, whose lengths are data."""

    def loss(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, cu_q: Tensor, cu_k: Tensor) -> tuple[Tensor, Tensor]:
        return attention(q, k, v, sinks=sinks, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True, return_lse=True)

    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    right = run(draw(torch.float32), "cpu", SETTINGS["causal"])
    for bad in BAD:
        call = draw(torch.float32, bad)
        leaves = [call[name].requires_grad_() for name in NAMES[:4]]
        ends = compiled(*leaves, *(starts(one) for one in LENGTHS))
        grads = torch.autograd.grad(ends, leaves, (call["do"], call["dlse"]))
        for name, x in zip(NAMES, grads):
            torch.testing.assert_close(x, right[f"d{name}"])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_captured_gradients_read_no_row_of_no_sequence(dtype: torch.dtype) -> None:
    """Captured with finite numbers, replayed with others; and nothing waits for the device."""
    call = {name: x.cuda() for name, x in draw(dtype).items()}
    leaves, cu = [call[name].requires_grad_() for name in NAMES[:4]], [starts(one, "cuda") for one in LENGTHS]

    def step() -> tuple[Tensor, ...]:
        ends = attention(*leaves[:3], sinks=leaves[3], cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], return_lse=True)
        return torch.autograd.grad(ends, leaves, (call["do"], call["dlse"]))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        right = [x.clone() for x in step()]
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for bad in BAD:
        with torch.no_grad():
            for name, x in draw(dtype, bad).items():
                call[name].copy_(x)
        graph.replay()
        for x, one in zip(found, right, strict=True):
            torch.testing.assert_close(x, one, rtol=1e-2, atol=1e-3)
