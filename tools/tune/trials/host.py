"""Host time of attention() on a GPU, after a check of its numbers. About 40 s.

Call from the root of the tree under test (a built tree, or with the packs of the wheel):

    python host.py [--rounds 15]

The script lies outside of the tree: copy it into the tree, or give its text to `python -`. It prints as it goes:

1. Numbers: each form of attention() against fp64 on fresh random inputs, with `out` full of NaN, and bit for bit
   against the general path in Python (`general`). The cache form is called for the first time inside a CUDA graph.
2. Host time, us per call, medians of interleaved rounds, in no_grad: `direct` (attention() as users call it), `general`
   (the same without the C function of direct_attention.cpp, so the path before it), torch's varlen_attn with stock's
   kernel and with ours, F.sdpa with stock and with ours.

Expected: direct / torch's varlen_attn (stock) <= 0.6 for varlen, planned, paged_out and cache; aim 25, 20, 20, 20 us;
direct with gradients within 2 % of general; F.sdpa within the noise of the tree before.
"""

import argparse
import math
import statistics
import sys
import time

sys.path.insert(0, ".")
import torch
import torch.nn.functional as F

import torch_flashplug
from torch_flashplug import attention, plan_varlen
from torch_flashplug.api import direct_attention

H, KV, D = 8, 2, 128
dev, dt = "cuda", torch.bfloat16
parser = argparse.ArgumentParser()
parser.add_argument("--rounds", type=int, default=15)
rounds = parser.parse_args().rounds
torch.manual_seed(int(time.time()))
print(torch.__version__, torch.cuda.get_device_name(), "direct:", direct_attention.attend, flush=True)
assert direct_attention.attend is not direct_attention._refuse, "the C function is not installed"
c_function = direct_attention.attend
answers = {"direct": 0, "refused": 0}


def counted(*arguments):
    result = c_function(*arguments)
    answers["refused" if result is None else "direct"] += 1
    return result


def refuse(*arguments):
    return None


def randn(*sizes):
    return torch.randn(*sizes, device=dev).to(dt)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32, device=dev)


def exact(q, k, v, causal=True, left=None):
    """fp64 attention of one sequence: (S, H, D), causal to the bottom right; the output and the LSE (H, S)."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], 0) for x in (k, v))
    s = q @ k.mT / math.sqrt(q.shape[-1])
    rows, keys = s.shape[-2:]
    distance = torch.arange(keys, device=dev) - torch.arange(rows, device=dev).unsqueeze(1) - (keys - rows)
    hidden = distance > 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
    if left is not None:
        hidden |= distance < -left
    s = s.masked_fill(hidden, -math.inf)
    return (s.softmax(-1) @ v).transpose(0, 1), s.logsumexp(-1)


cu_list, used_list = (0, 40, 100, 128), (20, 48, 3, 33)
cu, used = ints(*cu_list), ints(*used_list)
q, k, v = randn(128, H, D), randn(128, KV, D), randn(128, KV, D)
table = torch.randperm(12, device=dev).to(torch.int32).view(4, 3)
pools = [randn(12, 16, KV, D) for _ in range(2)]
q1 = randn(4, 1, H, D)
caches = [randn(4, 48, KV, D) for _ in range(2)]
for pool in (*pools,):  # poison the slots behind the used keys
    for b, n in enumerate(used_list):
        for j in range(n, 48):
            pool[int(table[b, j // 16]), j % 16] = math.nan
for cache in caches:
    for b, n in enumerate(used_list):
        cache[b, n:] = math.nan
paged = {"block_table": table, "seqused_k": used, "causal": True}


def packed_reference(left=None):
    parts = [exact(*(x[a:b] for x in (q, k, v)), left=left) for a, b in zip(cu_list, cu_list[1:])]
    return torch.cat([x for x, _ in parts]), torch.cat([x for _, x in parts], 1)


def decode_reference(keys_of):
    parts = [exact(q1[b], *keys_of(b, n)) for b, n in enumerate(used_list)]
    return torch.stack([x for x, _ in parts]), torch.stack([x for _, x in parts])


pages_of = lambda b, n: [pool[table[b].long()].flatten(0, 1)[:n] for pool in pools]
cache_of = lambda b, n: [cache[b, :n] for cache in caches]
plan = plan_varlen(q, k, v, causal=True, cu_seqlens_q=cu)
sinks = torch.full((H,), -math.inf, device=dev)
forms = {
    "varlen": (lambda **m: attention(q, k, v, causal=True, cu_seqlens_q=cu, **m), packed_reference),
    "planned": (lambda **m: attention(q, k, v, causal=True, cu_seqlens_q=cu, plan=plan, **m), packed_reference),
    "window": (lambda **m: attention(q, k, v, causal=True, window=(15, 0), cu_seqlens_q=cu, **m),
               lambda: packed_reference(15)),
    "sinks": (lambda **m: attention(q, k, v, causal=True, sinks=sinks.to(dt), cu_seqlens_q=cu, **m), packed_reference),
    "paged": (lambda **m: attention(q1, *pools, **paged, **m), lambda: decode_reference(pages_of)),
    "paged_1": (lambda **m: attention(q1, *pools, **paged, num_splits=1, **m), lambda: decode_reference(pages_of)),
    "cache": (lambda **m: attention(q1, *caches, seqused_k=used, causal=True, **m), lambda: decode_reference(cache_of)),
}
failed = []
with torch.no_grad():
    forms["paged"][0]()  # loads the kernel; the cache form comes first inside a capture
    torch.cuda.synchronize()
    graph, static = torch.cuda.CUDAGraph(), torch.full_like(q1, math.nan)
    direct_attention.attend = counted
    with torch.cuda.graph(graph):
        forms["cache"][0](out=static)
    assert answers == {"direct": 1, "refused": 0}, answers
    graph.replay()
    torch.cuda.synchronize()
    reference = decode_reference(cache_of)[0]
    error = float((static.double() - reference).norm() / reference.norm())
    print(f"captured cache   error {error:.5f}", flush=True)
    failed += ["captured cache"] * (not error < 0.01)
    for name, (call, reference_of) in forms.items():
        expected, expected_lse = reference_of()
        answers.update(direct=0, refused=0)
        direct_attention.attend = counted
        out, lse = call(return_lse=True)
        mine = torch.full_like(expected, math.nan, dtype=dt)
        written = call(out=mine)
        direct_attention.attend = refuse
        general, general_lse = call(return_lse=True)
        error = float((out.double() - expected).norm() / expected.norm())
        lse_error = float((lse.double() - expected_lse).abs().max())
        same = torch.equal(out, general) and torch.equal(lse, general_lse) and torch.equal(written, out)
        same &= written is mine and out.stride() == general.stride() and lse.stride() == general_lse.stride()
        ok = error < 0.01 and lse_error < 0.02 and same and answers == {"direct": 2, "refused": 0}
        failed += [name] * (not ok)
        print(f"{name:16} error {error:.5f} lse {lse_error:.5f} same {same} {answers} {'ok' if ok else 'FAILED'}", flush=True)
    direct_attention.attend = c_function
print("numbers", "ok" if not failed else f"FAILED: {failed}", flush=True)

# ---- host time ----
from torch.nn.attention.varlen import varlen_attn  # noqa: E402

out, out1 = torch.empty_like(q), torch.empty_like(q1)
leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
dense = [randn(2, n, h, D).transpose(1, 2) for n, h in ((128, H), (128, H), (128, H))]
kf, vf = (x.repeat_interleave(H // KV, 1) for x in (k, v))


def stock_varlen():
    try:
        return varlen_attn(q, kf, vf, cu, cu, 60, 60, window_size=(-1, 0))
    except TypeError:
        return varlen_attn(q, kf, vf, cu, cu, 60, 60, is_causal=True)


calls = {name: call for name, (call, _) in forms.items()}
calls["varlen_out"] = lambda: attention(q, k, v, causal=True, cu_seqlens_q=cu, out=out)
calls["paged_out"] = lambda: attention(q1, *pools, **paged, out=out1)
calls["cache_out"] = lambda: attention(q1, *caches, seqused_k=used, causal=True, out=out1)
candidates = {}
for name, call in calls.items():
    candidates[name, "direct"] = (call, torch.no_grad, c_function)
    candidates[name, "general"] = (call, torch.no_grad, refuse)
gradients = lambda: attention(*leaves, causal=True, cu_seqlens_q=cu)
candidates["gradients", "direct"] = (gradients, torch.enable_grad, c_function)
candidates["gradients", "general"] = (gradients, torch.enable_grad, refuse)
sdpa = lambda: F.scaled_dot_product_attention(*dense, is_causal=True)
candidates["F.sdpa", "ours"] = (sdpa, torch.no_grad, c_function)
candidates["torch varlen_attn", "ours"] = (stock_varlen, torch.no_grad, c_function)


class Disabled:
    def __enter__(self):
        torch_flashplug.disable()
        self.scope = torch.no_grad()
        self.scope.__enter__()

    def __exit__(self, *error):
        self.scope.__exit__(*error)
        torch_flashplug.enable()


candidates["F.sdpa", "stock"] = (sdpa, Disabled, c_function)
candidates["torch varlen_attn", "stock"] = (stock_varlen, Disabled, c_function)
samples = {key: [] for key in candidates}
for key, (call, scope, attend) in list(candidates.items()):
    try:
        with scope():
            call()
    except Exception as error:  # a peer that this torch does not have
        print(key, "left out:", type(error).__name__, str(error)[:120], flush=True)
        del candidates[key]
started = time.time()
for number in range(rounds):
    order = list(candidates.items())
    order = order if number % 2 == 0 else order[::-1]
    for key, (call, scope, attend) in order:
        direct_attention.attend = attend
        with scope():
            for _ in range(20):
                call()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(100):
                call()
            samples[key].append((time.perf_counter() - begin) * 1e4)
            torch.cuda.synchronize()
    if number in (0, 4, rounds - 1):
        print(f"-- after {number + 1} rounds, {time.time() - started:.1f} s: us per call, median (lowest)", flush=True)
        medians = {key: statistics.median(samples[key]) for key in candidates}
        base = medians.get(("torch varlen_attn", "stock"))
        for key in candidates:
            text = f"{key[0]:18} {key[1]:8} {medians[key]:7.2f} ({min(samples[key]):7.2f})"
            if base:
                text += f"   / torch's varlen_attn {medians[key] / base:.3f}"
            if key[1] == "direct":
                text += f"   / general {medians[key] / medians[key[0], 'general']:.3f}"
            print(text, flush=True)
direct_attention.attend = c_function
