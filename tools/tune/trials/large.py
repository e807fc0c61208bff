"""Head dims 257 to 512, forward (plan 0: two column tiles): numbers against fp64, then times against stock.

Run on a Hopper GPU with the bundle of the branch first on the path:
    PYTHONPATH=.gpu python large.py              checks (about 30 s), then times (about 80 s)
    PYTHONPATH=.gpu python large.py check        checks alone
    PYTHONPATH=.gpu python large.py time         times alone
The pack flashplug_sm90a_wide.so must lie in the bundle. No other pack, and no compiler, is needed.
Every line is printed as soon as it is known. `FAIL` begins a wrong number. TFLOP/s count 4 Sq Sk D H (causal: half).
"""

import itertools
import math
import statistics
import sys
import time

import torch
import torch.nn.functional as F

import torch_flashplug as fp
from torch_flashplug.api import startup
from torch_flashplug.dispatch import bindings
from torch_flashplug.ops.attention import Window
from torch_flashplug.registry import kernel_table
from torch_flashplug.registry.kernel_table import KernelRow
from torch_flashplug.testing import assert_lse, assert_within_budget
from torch_flashplug.testing.oracle import Attention

START, LIMIT_S = time.time(), 115
OP = torch.ops.torch_flashplug.attention_fwd
BF16, FP16 = torch.bfloat16, torch.float16


def say(*words):
    print(f"[{time.time() - START:5.1f}]", *words, flush=True)


def out_of_time():
    return time.time() - START > LIMIT_S


# ---- checks ----


def reference(q, k, v, dtype, visible, sinks, softcap):
    """Attention by definition, every step rounded to `dtype`."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.to(dtype) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    if sinks is None:
        blind = (scores == -math.inf).all(-1, keepdim=True)
        return Attention(scores.softmax(-1).masked_fill(blind, 0.0) @ v, scores.logsumexp(-1))
    logits = torch.cat((scores, sinks.to(dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    return Attention(logits.softmax(-1)[..., :-1] @ v, logits.logsumexp(-1))


def poison(*shapes):
    """Fill free blocks of the allocator with NaN, so that elements not written by a kernel show."""
    blocks = [torch.full(shape, math.nan, device="cuda", dtype=dtype) for shape, dtype in shapes for _ in "ab"]
    del blocks


def operands(B, Hq, Hkv, Sq, Sk, D, Dv, dtype=BF16, guard=False):
    """Fresh random operands; with `guard`, views of larger tensors of NaN."""
    tensors = []
    for heads, rows, dim in ((Hq, Sq, D), (Hkv, Sk, D), (Hkv, Sk, Dv)):
        x = torch.randn(B, rows, heads, dim, device="cuda", dtype=torch.float32).to(dtype).transpose(1, 2)
        if guard:
            around = torch.full((B, heads, rows + 2, dim + 16), math.nan, device="cuda", dtype=dtype)
            x = around[:, :, 1 : rows + 1, 8 : dim + 8].copy_(x)
        tensors.append(x)
    return tensors


failures, checked, missing = 0, 0, set()


def check(name, shape, window=None, packed=None, sinks=False, softcap=0.0, causal=False, mask=None, **more):
    """Compare a call with fp64: F.sdpa for full, causal and masked calls, else the op of attention()."""
    global failures, checked
    checked += 1
    B, Hq, Hkv, Sq, Sk, D, Dv = shape
    q, k, v = operands(*shape, **more)
    of_heads = torch.randn(Hq, device="cuda") * 2 if sinks else None
    visible, starts, lse = None, (None, None), None
    if packed:
        starts = [torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32, device="cuda") for x in packed]
        visible = torch.zeros(Sq, Sk, dtype=torch.bool)
        for (a, b), (c, d) in zip(*(itertools.pairwise([0, *itertools.accumulate(x)]) for x in packed)):
            visible[a:b, c:d] = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a)) if causal else True
        window = window or Window(-1, 0 if causal else -1)
    elif window is not None:
        visible = window.to_mask(Sq, Sk, torch.device("cpu"))
    elif causal:
        visible = torch.ones(Sq, Sk, dtype=torch.bool).tril()
    elif mask is not None:
        visible = mask
    visible = None if visible is None else visible.cuda()
    poison(((B, Hq, Sq, Dv), q.dtype), ((B, Hq, Sq), torch.float32))
    bindings.counters(reset=True)
    try:
        with fp.sdpa_backend("fa3"), torch.no_grad():
            if window is not None:
                out, lse = OP(q, k, v, of_heads, *starts, None, *window, softcap, None)
            else:
                attn_mask = mask.cuda() if mask is not None else None
                out = F.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=causal, enable_gqa=Hq != Hkv)
        torch.cuda.synchronize()
        assert bindings.counters(reset=True)["ours_fwd"] == 1, "another path served the call"
        exact, low, single = (
            reference(q, k, v, dtype, visible, of_heads, softcap) for dtype in (torch.float64, q.dtype, torch.float32)
        )
        report = assert_within_budget(name, out, exact.out, low.out)
        if lse is not None:
            assert_lse(name, lse, exact.lse, single.lse)
        return report.max / max(report.budget_max, 1e-30)
    except (AssertionError, RuntimeError) as error:
        if "is not available" in str(error):
            missing.add(str(error).partition("kernel ")[2].split()[0])
            return 0.0
        failures += 1
        say("FAIL", name, shape, str(error)[:500])
        if "CUDA error" in str(error):
            raise SystemExit(1) from error
        return math.nan


def run_checks():
    worst = {}

    def note(kind, ratio):
        worst[kind] = max(worst.get(kind, 0.0), ratio)

    dims = ((264, 264), (320, 320), (328, 328), (384, 384), (448, 448), (504, 504), (512, 512), (512, 256), (320, 512),
            (256, 512), (64, 264), (512, 8))  # fmt: skip
    for (D, Dv), causal in itertools.product(dims, (False, True)):
        for dtype in (BF16, FP16):
            for Sq, Sk in ((1, 1), (63, 65), (129, 1000), (1000, 129), (333, 333)):
                note(f"{D}, {Dv}", check("dims", (2, 3, 3, Sq, Sk, D, Dv), causal=causal, dtype=dtype, guard=Sq == 333))
    say("full and causal, worst error / budget:", {k: round(x, 2) for k, x in worst.items()})
    worst.clear()
    for D in (264, 320, 384, 448, 512):
        for Hq, Hkv in ((8, 4), (32, 4), (64, 1), (16, 1)):
            for causal in (False, True):
                note(f"grouped {D}", check("grouped", (1, Hq, Hkv, 257, 300, D, D), causal=causal))
        # Many tiles: all SMs have several, in both orders, with tiles of 128 rows.
        for causal in (False, True):
            note(f"many {D}", check("many tiles", (2, 40, 20, 513, 700, D, D), causal=causal))
        for window in (Window(127, 0), Window(40, 30), Window(0, 0), Window(-1, 0), Window(200, -1, False)):
            for Sq, Sk in ((300, 333), (1, 200), (257, 130), (513, 513)):
                for sinks, softcap in ((False, 0.0), (True, 0.0), (True, 2.0)):
                    ratio = check("window", (1, 4, 2, Sq, Sk, D, D), window, sinks=sinks, softcap=softcap)
                    note(f"window {D}", ratio)
        note(f"window {D}", check("V4", (1, 64, 1, 700, 700, D, D), Window(127, 0), sinks=True))
        for dtype in (BF16, FP16):
            for lq, lk in (((1, 70, 0, 129, 500), (3, 70, 9, 140, 500)), ((65, 3, 200), (65, 300, 100))):
                for causal, sinks, softcap in ((True, False, 0.0), (False, True, 0.0), (True, True, 2.0)):
                    ratio = check("packed", (1, 4, 2, sum(lq), sum(lk), D, D), packed=(lq, lk), causal=causal,
                                  sinks=sinks, softcap=softcap, dtype=dtype)  # fmt: skip
                    note(f"packed {D}", ratio)
        hidden = torch.rand(300, 500) < 0.5
        hidden[7], hidden[:, 128:256] = False, False
        note(f"mask {D}", check("mask", (2, 4, 2, 300, 500, D, D), mask=hidden))
    say("others:", {k: round(x, 2) for k, x in worst.items()})
    worst.clear()
    for D, Dv in ((512, 512), (264, 264), (448, 320), (320, 512), (512, 256)):
        for Hq, Hkv, Sq, Sk in ((8, 1, 1, 1), (8, 1, 1, 4097), (64, 1, 1, 1000), (16, 4, 3, 33), (8, 8, 2, 65),
                                (32, 4, 1, 20000), (4, 1, 16, 129)):  # fmt: skip
            for B in (1, 40):
                for dtype in (BF16, FP16):
                    if B * Sk < 50000:
                        ratio = check("decode", (B, Hq, Hkv, Sq, Sk, D, Dv), dtype=dtype, guard=Sk == 129)
                        note(f"decode {D}, {Dv}", ratio)
            hidden = torch.rand(Sq, Sk) < 0.5
            hidden[0, : Sk // 2] = False
            note(f"decode mask {D}, {Dv}", check("decode mask", (2, Hq, Hkv, Sq, Sk, D, Dv), mask=hidden))
    say("decode:", {k: round(x, 2) for k, x in worst.items()})
    repeated()
    say(f"{checked} calls checked, {failures} failures; kernels that are not in the pack: {sorted(missing) or 'none'}")


def repeated():
    """The same call gives the same bits, many times; scores of +-1e4 stay finite."""
    q, k, v = operands(2, 8, 2, 700, 1500, 512, 512)
    with fp.sdpa_backend("fa3"), torch.no_grad():
        for scale in (None, 30.0):
            first = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, scale=scale)
            same = all(
                torch.equal(first, F.scaled_dot_product_attention(q, k, v, enable_gqa=True, scale=scale))
                for _ in range(20)
            )
            say("OK" if same and first.isfinite().all() else "FAIL", f"20 repetitions, scale {scale}")


# ---- times ----


def measured(calls, rounds=5, min_ms=3.0):
    """Median milliseconds of calls by name, interleaved, with the order turned from round to round."""
    counts, times = {}, {name: [] for name in calls}
    for name, call in list(calls.items()):
        try:
            call()
            torch.cuda.synchronize()
        except (RuntimeError, torch.OutOfMemoryError) as error:
            say("   ", name, "does not run:", str(error).splitlines()[0][:150])
            del calls[name]
            continue
        counts[name] = max(1, min(50, int(min_ms / max(span(call, 1), 1e-3))))
    for turn in range(rounds):
        names = list(calls)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            times[name].append(span(calls[name], counts[name]))
    return {name: statistics.median(times[name]) for name in calls}


def span(call, count):
    getattr(call, "prepare", lambda: None)()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / count


def attend(backend, q, k, v, **more):
    def call():
        with fp.sdpa_backend(backend), torch.no_grad():
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **more)

    return call


def line(name, flop, times):
    ours, stock = times.get("ours"), times.get("stock")
    words = [f"{n} {ms:8.3f} ms {flop / ms / 1e9:6.1f} TFLOP/s" for n, ms in times.items()]
    ratio = f"ratio {stock / ours:6.2f}" if ours and stock else ""
    say(f"{name:34s}", " | ".join(words), ratio)


def time_call(name, B, Hq, Hkv, S, D, causal=False, with_stock=True):
    if out_of_time():
        return
    q, k, v = operands(B, Hq, Hkv, S, S, D, D)
    calls = {"ours": attend("fa3", q, k, v, is_causal=causal)}
    if with_stock:
        calls["stock"] = attend("stock", q, k, v, is_causal=causal)
    line(name, 4.0 * B * Hq * S * S * D / (2 if causal else 1), measured(calls))


def time_tiles():
    """Tiles of one head dim against each other, and two launches on halves of V; only kernels of the pack run."""
    tiles = {
        512: ((128, 64, 1), (64, 48, 2), (128, 32, 2)),
        384: ((128, 48, 2), (64, 64, 2), (128, 112, 1)),
        320: ((128, 64, 2), (64, 96, 2), (128, 144, 1), (192, 48, 2)),
    }
    for D, heads, S in ((512, 32, 8192), (384, 32, 8192), (320, 32, 8192), (512, 1, 4096), (512, 1, 16384)):
        if out_of_time():
            return
        q, k, v = operands(1, heads, heads, S, S, D, D)
        calls = {}
        for m, n, stages in tiles[D]:
            row = KernelRow("fwd", 90, D, D, ("full",), m, n, stages)
            calls[f"{m}x{n}x{stages}"] = with_rows(others, row, attend("fa3", q, k, v))
        line(f"tiles D {D}, {heads} heads, S {S}", 4.0 * heads * S * S * D, measured(calls))
        startup.push_tables()
        pushed[0] = None


pushed = [None]
others = [row for row in kernel_table.KERNEL_ROWS if row.kind != "fwd"]


def time_v4(S):
    """64 query heads on one KV head, window of 128 keys, sinks; stock gets the window as a mask, without sinks."""
    if out_of_time():
        return
    q, k, v = operands(1, 64, 1, S, S, 512, 512)
    sinks = torch.randn(64, device="cuda")
    mask = Window(127, 0).to_mask(S, S, torch.device("cuda"))

    def ours():
        with torch.no_grad():
            return OP(q, k, v, sinks, None, None, None, 127, 0, True, 0.0, None)

    calls = {"ours": ours}
    if S <= 8192:
        calls["stock"] = attend("stock", q, k, v, attn_mask=mask)
    line(f"V4: 64 on 1, window 128, sinks, {S}", 4.0 * 64 * S * 128 * 512, measured(calls, rounds=3))


def time_decode():
    """Decode: GB/s of K and V; a cache of 256 MB and more does not fit in L2. Stock runs grouped heads as math."""
    variants = ((64, 32, 2), (64, 16, 5))
    for B, Hq, Hkv, Sk in ((1, 8, 1, 4096), (1, 8, 1, 32768), (16, 8, 1, 8192), (1, 32, 4, 65536), (32, 32, 4, 2048),
                           (16, 8, 8, 2048)):  # fmt: skip
        if out_of_time():
            return
        q, k, v = operands(B, Hq, Hkv, 1, Sk, 512, 512)
        calls = {}
        for m, n, stages in variants:
            row = KernelRow("decode", 90, 512, 512, ("full",), m, n, stages, 700 * n // 16)
            calls[f"{n}x{stages}"] = with_rows([r for r in kernel_table.KERNEL_ROWS if r.kind != "decode"], row,
                                               attend("fa3", q, k, v))  # fmt: skip
        if B * Hq * Sk < 1 << 22:
            calls["stock"] = attend("stock", q, k, v)
        times = measured(calls)
        gb = 2 * B * Hkv * Sk * 1024 / 1e6
        say(f"decode D 512, B {B}, {Hq} on {Hkv}, {Sk} keys".ljust(40),
            " | ".join(f"{n} {ms:7.4f} ms {gb / ms:6.0f} GB/s" for n, ms in times.items()))  # fmt: skip
    startup.push_tables()
    pushed[0] = None


def with_rows(others, row, call):
    """Return a call that runs with one row of the kernel table in place of the rows of its kind."""

    def prepare():
        if pushed[0] is not row:
            startup.push_tables([*others, row])
            pushed[0] = row
            call()

    def run():
        prepare()
        return call()

    run.prepare = prepare
    return run


def run_times():
    torch.manual_seed(int(time.time()))
    for D in (512, 384, 320):
        for causal in (False, True):
            for S in (4096, 8192, 16384):
                time_call(f"D {D} {'causal' if causal else 'full'} 32 heads {S}", 1, 32, 32, S, D, causal)
    for S in (4096, 8192, 16384):  # stock: math, with memory for S x S scores of every head
        for causal in (False, True):
            name = f"D 512 {'causal' if causal else 'full'} 32 on 4 {S}"
            time_call(name, 1, 32, 4, S, 512, causal, with_stock=S == 4096)
    for D in (512, 384):
        for S in (4096, 16384, 65536):
            time_call(f"VAE D {D} one head {S}", 1, 1, 1, S, D)
    time_v4(4096)
    time_v4(8192)
    time_tiles()
    time_decode()
    for D in (264, 448):
        time_call(f"D {D} full 32 heads 8192", 1, 32, 32, 8192, D)
    for B, H, S in ((8, 16, 512), (4, 16, 1024), (16, 8, 256), (2, 8, 2048)):
        for D in (320, 512):
            for causal in (False, True):
                time_call(f"D {D} {'causal' if causal else 'full'} ({B}, {H}, {S})", B, H, H, S, D, causal)


def main():
    say(torch.cuda.get_device_name(), torch.__version__, fp.__file__)
    torch.manual_seed(int(time.time()))
    wants = sys.argv[1:] or ["check", "time"]
    with torch.no_grad():
        if "check" in wants:
            run_checks()
        if "time" in wants:
            run_times()
    say("done")


main()
