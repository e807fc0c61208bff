"""Measure cells of choice rows that auto leaves to stock: stock by default, and stock with cuDNN switched off, over ours.

Run: python3 choice_cells.py SECONDS   (prints a line per row; about 100 s). With --count: only count cells.
"""
import collections, contextlib, itertools, json, os, statistics, sys, time
import torch, torch.nn.functional as F
import torch_flashplug as fp
from tools.bench import workloads
from torch_flashplug.demo.scopes import plugin_off
from torch_flashplug.dispatch import bindings
from torch_flashplug.registry import dispatch_table as dt
from torch_flashplug.registry.architectures import BACKENDS
from torch_flashplug.testing import Case, Candidate, make_inputs, time_interleaved
count_only = "--count" in sys.argv
H = {"cc": 90, "sm_count": 132, "smem_bytes": 232448, "l2_bytes": 50 << 20, "memory_rate": 3352}

@contextlib.contextmanager
def no_cudnn():
    with plugin_off():
        torch.backends.cuda.enable_cudnn_sdp(False)
        try: yield
        finally: torch.backends.cuda.enable_cudnn_sdp(True)

def facts(c, grad):
    al = 16
    f = dict(bindings.problem_facts())
    f.update(B=c.B, Hq=c.Hq, Hkv=c.Hkv, Sq=c.Sq, Sk=c.Sk, D=c.D, Dv=c.Dv, grad=grad, on_cuda=1)
    ids = bindings.DTYPE_IDS if hasattr(bindings, "DTYPE_IDS") else None
    from torch_flashplug.dispatch import table_structs
    for x in "qkv":
        f[f"dtype_{x}"] = table_structs.DTYPE_IDS[c.dtype]; f[f"last_stride_{x}"] = 1; f[f"align_{x}"] = 16
    if c.causal: f["causal"] = 1
    return f

def cells():
    out = {}
    for grad, lattices in ((False, (workloads.choice_lattice(),)), (True, (workloads.choice_lattice(), workloads.grouped_lattice()))):
        for c in itertools.chain(*lattices):
            p = bindings.plan(facts(c, int(grad)), H)
            if p["backend"] == "stock" and p.get("row"):
                out[(grad, c.name)] = (p["row"], c)
    return out

def main():
    found = cells()
    by = collections.Counter(str(r) for r, _ in found.values())
    for r, n in by.items(): print(n, r[:150])
    print(len(found), "cells")
    if count_only: return
    end = time.time() + float(sys.argv[1])
    rows = collections.defaultdict(list)
    order = sorted(found.items(), key=lambda kv: hash(kv[0][1]) % 1000)
    for (grad, name), (row, c) in order:
        if time.time() > end: print("time is up", flush=True); break
        x = make_inputs(c, "cuda", requires_grad=grad)
        def call(x=x, c=c, grad=grad):
            out = F.scaled_dot_product_attention(x.q, x.k, x.v, **c.sdpa_kwargs())
            return torch.autograd.grad(out, (x.q, x.k, x.v), x.grad_out) if grad else out
        names = {"ours": lambda: fp.sdpa_backend("fa3"), "stock": plugin_off, "no_cudnn": no_cudnn}
        try:
            with torch.set_grad_enabled(grad):
                cand = {}
                for n, s in names.items():
                    with s(): call()
                    cand[n] = Candidate(call, s)
                t = time_interleaved(cand, rounds=7, device="cuda", round_ms=2.0)
            ms = {n: v.ms for n, v in t.items()}
            rows[json.dumps(row)].append((ms["stock"] / ms["ours"], ms["no_cudnn"] / ms["ours"], name))
        except Exception as e:
            print(name, grad, type(e).__name__, str(e)[:100], flush=True)
    for r, v in rows.items():
        print(f"{len(v)} cells: stock {min(a for a,_,_ in v):.3f}..{max(a for a,_,_ in v):.3f}, without cuDNN lowest {min(b for _,b,_ in v):.3f} ({min(v, key=lambda e: e[1])[2]}) median {statistics.median(b for _,b,_ in v):.3f} | {r[:170]}", flush=True)
    json.dump({r: v for r, v in rows.items()}, open(os.environ.get("OUT", "/tmp") + "/choice_cells.json", "w"))
main()
