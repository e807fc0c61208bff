"""Time the split and the fused backward of short D 72 to 96 calls, to renew rows of kind partbwd (about 15 s)."""
import dataclasses, itertools, statistics, sys, time
import torch
import torch.nn.functional as F
import torch_flashplug as fp
from torch_flashplug.dispatch import bindings
from torch_flashplug.registry import dispatch_table as dt, kernel_table

def tables(split):
    rows = [r for r in dt.CHOICE_ROWS if r.kind != "partbwd"]
    if split:
        rows = [dt.ChoiceRow("partbwd", "vectors", 90, True, m, 1, 128, 1, dt.ANY, 1, dt.ANY, 0, 2.0, "x") for m in ("full", "causal")] + rows
    bindings.push_rows(kernel_table.KERNEL_ROWS, rows, dt.COST_MODEL)

def main():
    for d, (hq, hkv), s, causal in itertools.product((72, 80, 96), ((20, 20), (20, 5)), (128, 256, 512, 1024), (False, True)):
        b = 16384 // s
        q = torch.randn(b, s, hq, d, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        k, v = (torch.randn(b, s, hkv, d, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for _ in range(2))
        graphs, times, grads = {}, {}, {}
        with fp.sdpa_backend("fa3"):
            for split in (False, True):
                tables(split)
                out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
                go = torch.randn_like(out) if not grads else go
                run = lambda: torch.autograd.grad(out, (q, k, v), go, retain_graph=True)
                grads[split] = run()
                torch.cuda.synchronize()
                start = torch.cuda.Event(enable_timing=True)
                times[split] = []
                graphs[split] = (run, out)
            for r in range(7):
                for split in (False, True):
                    tables(split)
                    run = graphs[split][0]
                    out = graphs[split][1]
                    for _ in range(3): torch.autograd.grad(out, (q, k, v), go, retain_graph=True)
                    a, e = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    a.record()
                    for _ in range(8): torch.autograd.grad(out, (q, k, v), go, retain_graph=True)
                    e.record(); torch.cuda.synchronize()
                    times[split].append(a.elapsed_time(e) / 8)
        med = {x: statistics.median(t) for x, t in times.items()}
        same = max(float((x.float() - y.float()).abs().max() / y.float().abs().max()) for x, y in zip(grads[False], grads[True]))
        print(f"d{d} h{hq}x{hkv} s{s} {'causal' if causal else 'full'}: fused {med[False]*1e3:.0f} us, split {med[True]*1e3:.0f} us, fused/split {med[False]/med[True]:.3f} diff {same:.4f}", flush=True)

main()
