"""Dense kernels for packed sequences of equal lengths, on a GPU or interpreted.

A dense kernel is launched ahead of the kernel of packed sequences, and exactly one of both has work. Results are
compared with fp64, with the dense call, and with the kernels of packed sequences alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from cuda_graphs import call_on_side_stream
from deterministic import deterministic_gradients
from fp64_gradients import Results
from test_varlen_kernels import HEADS, KV_HEADS, SEED, WINDOWS, PackedCall, check_results
from torch import Tensor

import torch_flashplug
from torch_flashplug import attention, plan_varlen
from torch_flashplug.api import startup
from torch_flashplug.dispatch import bindings
from torch_flashplug.registry import dispatch_table, kernel_table
from torch_flashplug.registry.kernel_spec import KernelSpec
from torch_flashplug.testing import assert_bitwise_equal

SPECS = [spec for spec in kernel_table.specs(90) if "equal" in spec.features]
EQUAL = ((200, 200),) * 2
# Rows and keys of each sequence. All have as many rows and keys together as equal lengths would have.
UNEQUAL = {
    "rows": ((199, 200), (201, 200)),
    "keys": ((200, 201), (200, 199)),
    "one": ((200, 200), (200, 199), (200, 201)),
    "none": ((400, 400), (0, 0)),
    "many": (*((40, 40),) * 40, (39, 40), (41, 40)),
}
NAMES = ("out", "lse", "dq", "dk", "dv")
NO_SINK = -1e30  # the reference has sinks


def push(kernels: list[kernel_table.KernelRow], *, is_on: bool = True) -> None:
    """Push kernels, and let calls of any size have a dense kernel ahead, or no call."""
    rows = 0 if is_on else 1 << 40
    limits = {"min_equal_rows": rows, "min_equal_rows_of_gradients": rows, "min_equal_ns": 0.0}
    cost_model = replace(dispatch_table.COST_MODEL, **limits)
    startup.push_tables(kernels)
    bindings.push_rows(kernels, dispatch_table.CHOICE_ROWS, cost_model)


@pytest.fixture
def dense_ahead() -> Iterator[Callable[..., None]]:
    """Return a function that switches the dense kernels on for calls of any size, or off."""

    def switch(*, is_on: bool = True) -> None:
        push(list(kernel_table.KERNEL_ROWS), is_on=is_on)

    switch()
    yield switch
    startup.push_tables()


def make_call(
    lengths: tuple[tuple[int, int], ...], window: str, dims: tuple[int, int] = (64, 64), dtype: str = "bf16",
    kv_heads: int = KV_HEADS,
) -> PackedCall:  # fmt: skip
    """Return a random call without rows outside of all sequences, without sinks, and without a gradient of the LSE."""
    generator, (D, Dv) = torch.Generator().manual_seed(SEED + dims[0]), dims
    T, Tk = (sum(sequence[side] for sequence in lengths) for side in (0, 1))
    sizes = {"q": (T, HEADS, D), "k": (Tk, kv_heads, D), "v": (Tk, kv_heads, Dv), "do": (T, HEADS, Dv)}
    torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    tensors = {
        name: torch.randn(*size, generator=generator).to(torch_dtype).transpose(0, 1).unsqueeze(0)
        for name, size in sizes.items()
    }
    tensors |= {"sinks": torch.full((HEADS,), NO_SINK), "dlse": torch.zeros(1, HEADS, T)}
    return PackedCall(lengths, WINDOWS[window], tensors, ahead=0)


def run(
    call: PackedCall, device: str, *, grads: bool = True, has_plan: bool = False, num_ahead: int = 2
) -> Results:  # fmt: skip
    """Return results of attention() with packed sequences. Check the number of dense kernels launched ahead."""
    q, k, v = (call.tensors[name][0].transpose(0, 1).to(device).requires_grad_(grads) for name in ("q", "k", "v"))
    cu_q, cu_k = (call.cu_seqlens(side, device) for side in (0, 1))
    settings = {"causal": "bottom_right" if call.window.right == 0 else False}
    settings |= {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    if has_plan:
        settings["plan"] = plan_varlen(q, k, v, **settings, gradients=grads)
    bindings.counters(reset=True)
    out, lse = attention(q, k, v, **settings, return_lse=True)
    do = call.tensors["do"][0].transpose(0, 1).to(device)
    gradients = torch.autograd.grad(out, (q, k, v), do) if grads else ()
    counts = bindings.counters(reset=True)
    assert counts["ours_fwd"] == 1 and counts["ours_bwd"] == grads and counts["dense_ahead"] == num_ahead, counts
    results = (x.detach().cpu().transpose(0, 1).unsqueeze(0) for x in (out, *gradients))
    return Results(next(results), lse.detach().cpu().unsqueeze(0), dict(zip(("dq", "dk", "dv"), results)))


def run_dense(call: PackedCall, device: str) -> Results:
    """Return results of the dense call for equal lengths, in the layout of packed sequences."""
    batch = [call.tensors[name][0].unflatten(1, (len(call.lengths), -1)).transpose(0, 1).to(device) for name in "qkv"]
    q, k, v = (x.requires_grad_() for x in batch)
    do = call.tensors["do"][0].unflatten(1, (len(call.lengths), -1)).transpose(0, 1).to(device)
    out, lse, *_ = torch.ops.torch_flashplug.sdpa_fwd(
        q, k, v, None, dropout_p=0.0, causal_mode=int(call.window.right == 0), scale=None, mode=bindings.mode()
    )
    gradients = torch.autograd.grad(out, (q, k, v), do)
    packed = [x.detach().cpu().transpose(0, 1).flatten(1, 2).unsqueeze(0) for x in (out, lse, *gradients)]
    return Results(packed[0], packed[1], dict(zip(("dq", "dk", "dv"), packed[2:], strict=True)))


def assert_equal_bits(actual: Results, expected: Results, apart: tuple[str, ...] = ()) -> None:
    """Check that results are bitwise equal, except results named in `apart`: sums in a random order."""
    pairs = {"out": (actual.out, expected.out), "lse": (actual.lse, expected.lse)}
    pairs |= {name: (actual.grads[name], expected.grads[name]) for name in actual.grads}
    for name, (actual_tensor, expected_tensor) in pairs.items():
        if name in apart:
            torch.testing.assert_close(actual_tensor, expected_tensor, rtol=2e-2, atol=2e-2)
        else:
            assert_bitwise_equal(name, actual_tensor, expected_tensor)


def is_bitwise_equal(actual: Results, expected: Results) -> bool:
    return torch.equal(actual.out, expected.out) and torch.equal(actual.lse, expected.lse)


@pytest.mark.parametrize("spec", SPECS, ids=KernelSpec.name)
def test_every_dense_kernel_of_packed_sequences(kernels_on: str, spec: KernelSpec) -> None:
    """The table has no other dense kernel of packed sequences of the same direction."""
    rivals = {"bwd", "partbwd"} if spec.is_backward else {"fwd"}
    rows = [
        row
        for row in kernel_table.KERNEL_ROWS
        if row.kind not in rivals
        or spec in row.specs()
        or (row.kind == "fwd" and not any("equal" in tag for tag in row.features))
    ]
    window = "causal" if "causal" in spec.features else "full"
    call = make_call((EQUAL, ((150, 150),) * 3)[SPECS.index(spec) // 2 % 2], window, (spec.d, spec.dv), spec.dtype)
    try:
        push(rows)
        with torch_flashplug.sdpa_backend("fa3"):
            results = run(call, kernels_on, grads=spec.is_backward, num_ahead=1 + spec.is_backward)
    finally:
        startup.push_tables()
    check_results(call, results, spec.name())


@pytest.mark.parametrize("has_plan", [False, True], ids=["", "plan"])
@pytest.mark.parametrize("window", ["full", "causal"])
def test_equal_lengths_have_the_bits_of_the_dense_call(
    kernels_on: str, window: str, has_plan: bool, dense_ahead: Callable[..., None]
) -> None:
    """The kernel of packed sequences has no work, because its results have other bits.

    A small dense call with groups would share the heads of a group among tiles, and round dK and dV differently.
    """
    call = make_call(EQUAL, window, kv_heads=HEADS)
    with torch_flashplug.sdpa_backend("fa3"):
        actual, expected = run(call, kernels_on, has_plan=has_plan), run_dense(call, kernels_on)
        assert_equal_bits(actual, expected, ("dq",))
        dense_ahead(is_on=False)
        assert not is_bitwise_equal(run(call, kernels_on, has_plan=has_plan, num_ahead=0), actual)


@pytest.mark.parametrize("has_plan", [False, True], ids=["", "plan"])
@pytest.mark.parametrize("lengths", UNEQUAL)
def test_other_lengths_have_the_bits_of_the_packed_kernels(
    kernels_on: str, lengths: str, has_plan: bool, dense_ahead: Callable[..., None]
) -> None:
    call = make_call(UNEQUAL[lengths], "full")
    with torch_flashplug.sdpa_backend("fa3"):
        actual = run(call, kernels_on, has_plan=has_plan)
        dense_ahead(is_on=False)
        assert_equal_bits(actual, run(call, kernels_on, has_plan=has_plan, num_ahead=0), ("dq",))
    check_results(call, actual, lengths)


@pytest.mark.parametrize(
    "starts", [[0, 190, 390], [10, 205, 400], [0, 200, 390], [0, 0, 400], [0, 900, 20], [-5, 10, 10]], ids=str
)
def test_rows_outside_of_all_sequences(kernels_on: str, starts: list[int], dense_ahead: Callable[..., None]) -> None:
    """The starts of some call are wrong, but the interpreter, or compute-sanitizer, checks each memory access."""
    call = make_call(EQUAL, "causal")
    q, k, v = (call.tensors[name][0].transpose(0, 1).to(kernels_on) for name in ("q", "k", "v"))
    cu = torch.tensor(starts, dtype=torch.int32, device=kernels_on)
    with torch_flashplug.sdpa_backend("fa3"):
        bindings.counters(reset=True)
        actual = attention(q, k, v, causal=True, cu_seqlens_q=cu)
        assert bindings.counters()["dense_ahead"] == 1
        dense_ahead(is_on=False)
        assert_bitwise_equal("out", actual, attention(q, k, v, causal=True, cu_seqlens_q=cu))
    assert not actual[: max(starts[0], 0)].any()


def count_dense_kernels(device: str, *, grad_lse: bool = False, lengths=EQUAL, **settings: object) -> int:
    """Return the number of dense kernels launched ahead in a call with gradients."""
    call = make_call(lengths, "full")
    has_used = "seqused_k" in settings
    q, k, v = (call.tensors[x][0].transpose(0, 1).to(device).requires_grad_(not has_used) for x in ("q", "k", "v"))
    starts = {"cu_seqlens_q": call.cu_seqlens(0, device), "cu_seqlens_k": call.cu_seqlens(1, device)}
    bindings.counters(reset=True)
    out, lse = attention(q, k, v, **starts, **settings, return_lse=True)
    if not has_used:
        torch.autograd.grad(out.sum() + (lse.sum() if grad_lse else 0), (q, k, v))
    return bindings.counters(reset=True)["dense_ahead"]


def test_calls_with_a_dense_kernel_ahead(kernels_on: str, dense_ahead: Callable[..., None]) -> None:
    """The host decides by what it knows: rows, sequences, settings."""
    sinks = torch.zeros(HEADS, device=kernels_on)
    used = torch.full((2,), 100, dtype=torch.int32, device=kernels_on)
    with torch_flashplug.sdpa_backend("fa3"):
        for settings in ({}, {"causal": True}, {"window": (400, 400)}, {"causal": "top_left"}, {"scale": -0.3}):
            assert count_dense_kernels(kernels_on, **settings) == 2, settings
        assert count_dense_kernels(kernels_on, lengths=((200, 100),) * 2) == 2
        assert count_dense_kernels(kernels_on, lengths=((200, 100),) * 2, causal="top_left") == 2
        assert count_dense_kernels(kernels_on, lengths=((200, 100),) * 2, causal="bottom_right") == 0
        assert count_dense_kernels(kernels_on, grad_lse=True) == 1  # the forward
        assert count_dense_kernels(kernels_on, sinks=sinks) == 1  # the backward: the LSE includes the sinks
        for settings in ({"window": (40, 0)}, {"softcap": 2.0}, {"num_splits": 1}):
            assert count_dense_kernels(kernels_on, **settings) == 0, settings
        assert count_dense_kernels(kernels_on, seqused_k=used) == 0
        assert count_dense_kernels(kernels_on, lengths=((100, 100), (101, 101))) == 0
        with deterministic_gradients():
            assert count_dense_kernels(kernels_on, causal=True) == 2
        startup.push_tables()
        assert count_dense_kernels(kernels_on) == 0  # a small call


def test_gradients_with_sinks(kernels_on: str, dense_ahead: Callable[..., None]) -> None:
    call = make_call(EQUAL, "causal")
    operands = [call.tensors[name][0].transpose(0, 1).to(kernels_on) for name in "qkv"]
    do = call.tensors["do"][0].transpose(0, 1).to(kernels_on)
    leaves = [x.requires_grad_() for x in (*operands, torch.linspace(-1.0, 3.0, HEADS, device=kernels_on))]
    gradients = []
    with torch_flashplug.sdpa_backend("fa3"):
        for is_on in (True, False):
            dense_ahead(is_on=is_on)
            bindings.counters(reset=True)
            out = attention(*leaves[:3], causal=True, sinks=leaves[3], cu_seqlens_q=call.cu_seqlens(0, kernels_on))
            gradients.append(torch.autograd.grad(out, leaves, do))
            assert bindings.counters()["dense_ahead"] == is_on
    for name, actual, expected in zip(("dq", "dk", "dv", "dsinks"), *gradients, strict=True):
        torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2, msg=name)


def test_deterministic_gradients_of_equal_lengths_are_bitwise_equal(
    kernels_on: str, dense_ahead: Callable[..., None]
) -> None:
    call = make_call(EQUAL, "causal")
    with torch_flashplug.sdpa_backend("fa3"), deterministic_gradients():
        first_run, second_run = (run(call, kernels_on) for _ in range(2))
    assert_equal_bits(first_run, second_run)


def test_output_of_the_caller_and_strided_rows(kernels_on: str, dense_ahead: Callable[..., None]) -> None:
    """Operands are views of one tensor, as behind a projection of q, k and v together."""
    generator = torch.Generator().manual_seed(SEED)
    qkv = torch.randn(400, 3, HEADS, 64, generator=generator).bfloat16().to(kernels_on)
    cu = torch.tensor([0, 200, 400], dtype=torch.int32, device=kernels_on)
    wide_out = torch.full((400, HEADS, 128), 7.0, dtype=torch.bfloat16, device=kernels_on)
    with torch_flashplug.sdpa_backend("fa3"):
        attention(*qkv.unbind(1), causal=True, cu_seqlens_q=cu, out=wide_out[..., :64])
        expected = attention(*(x.contiguous() for x in qkv.unbind(1)), causal=True, cu_seqlens_q=cu)
    assert_bitwise_equal("out", wide_out[..., :64].contiguous(), expected)
    assert (wide_out[..., 64:] == 7.0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("captured_equal", [False, True], ids=["captured_other", "captured_equal"])
@pytest.mark.parametrize("has_plan", [False, True], ids=["", "plan"])
def test_graph_replayed_with_equal_and_other_lengths(has_plan: bool, captured_equal: bool) -> None:
    """Each replay follows its lengths, whatever the lengths of the capture. The table decides about dense kernels."""
    sequences, length, heads = 16, 512, (16, 4)
    draw = torch.Generator("cuda").manual_seed(SEED)
    T = sequences * length
    q, k, v = (
        torch.randn(T, h, 128, generator=draw, device="cuda").bfloat16().requires_grad_()
        for h in (heads[0], heads[1], heads[1])
    )
    do = torch.randn(T, heads[0], 128, generator=draw, device="cuda").bfloat16()
    equal = torch.arange(sequences + 1, dtype=torch.int32, device="cuda") * length
    moved = torch.randint(-200, 200, (sequences + 1,), generator=draw, device="cuda").int()
    moved[0] = moved[-1] = 0
    fewer = equal - (equal // length == sequences).int() * 300
    cu = (equal if captured_equal else equal + moved).clone()

    def layer() -> tuple[Tensor, ...]:
        settings = {"causal": True, "cu_seqlens_q": cu}
        if has_plan:
            settings["plan"] = plan_varlen(q, k, v, **settings, gradients=True)
        out, lse = attention(q, k, v, **settings, return_lse=True)
        return out, lse, *torch.autograd.grad(out, (q, k, v), do)

    bindings.counters(reset=True)
    call_on_side_stream(layer)
    assert bindings.counters(reset=True)["dense_ahead"] == 2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer()
    for starts in (equal, equal + moved, fewer, equal, equal + moved):
        with torch.no_grad():
            cu.copy_(starts)
            for x in captured:
                x.fill_(math.nan)
        graph.replay()
        graph.replay()
        expected = layer()
        exact = [
            attention(*(x[a:b].double().unsqueeze(0) for x in (q, k, v)), causal=True)[0]
            for a, b in zip(starts.tolist(), starts.tolist()[1:], strict=False)
            if b > a
        ]
        exact = torch.cat(exact)
        assert ((captured[0][: len(exact)].double() - exact).norm() / exact.norm()).item() < 5e-3
        for name, actual_tensor, expected_tensor in zip(NAMES, captured, expected, strict=True):
            if name == "dq":
                torch.testing.assert_close(actual_tensor, expected_tensor, rtol=2e-2, atol=2e-2, msg=name)
            else:
                assert_bitwise_equal(name, actual_tensor, expected_tensor)


@pytest.mark.gpu
def test_calls_one_behind_the_other_wait_for_each_other() -> None:
    """Launches of a call overlap: each kernel must wait for the results of the previous launch."""
    sequences, length = 32, 512
    draw = torch.Generator("cuda").manual_seed(SEED)
    q, k, v = (torch.randn(sequences * length, 8, 64, generator=draw, device="cuda").bfloat16() for _ in range(3))
    equal = torch.arange(sequences + 1, dtype=torch.int32, device="cuda") * length
    other = equal.clone()
    other[1:-1:2] += 100
    for cu in (equal, other):
        chain = [q]
        for _ in range(8):
            chain.append(attention(chain[-1], k, v, causal=True, cu_seqlens_q=cu))
            torch.cuda.synchronize()
        for _ in range(20):
            x = q
            for _ in range(8):
                x = attention(x, k, v, causal=True, cu_seqlens_q=cu)
            assert torch.equal(x, chain[-1])


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256)])
def test_long_gradients_of_dense_kernels_are_those_of_the_batch(
    dims: tuple[int, int], dense_ahead: Callable[..., None]
) -> None:
    """Compare long calls, whose dense kernels still run while the lists are made.

    The lists must not get the memory of the row statistics. At D 256, dK and dV were wrong by a factor of 48.
    """
    call = make_call(((2048, 2048),) * 2, "causal", dims)
    dense_ahead()
    for _ in range(5):
        assert_equal_bits(run(call, "cuda"), run_dense(call, "cuda"), apart=("dq", "dk", "dv"))
