"""Time the backward of grouped causal calls with uneven numbers of tiles in several trees, in processes by turns.

Run: python3 l2groups.py TREE_A TREE_B   (folders with torch_flashplug; about 60 s)
"""
import json, os, statistics, subprocess, sys, time
CASES = [(2,3001,24,8,128),(1,3001,48,8,128),(1,4250,40,8,128),(4,1500,12,2,128),(1,2048,8,1,128),(1,4096,8,1,128),(1,4096,14,2,128),(2,1024,32,8,128),(1,2048,32,8,128),(1,1024,32,8,128),(1,512,32,8,128),(1,4096,8,1,64),(1,2048,14,2,64),(4,1024,8,2,64),(1,4096,8,1,256),(1,2048,32,8,256),(2,2048,14,2,256),(1,2047,96,8,192),(1,6000,28,4,128),(8,2048,32,8,128)]
def child():
    import torch, torch.nn.functional as F, torch_flashplug as fp
    res = {}
    with fp.sdpa_backend("fa3"):
        for c in CASES:
            b, s, hq, hkv, d = c
            torch.manual_seed(0)
            q, k, v = (torch.randn(b, s, h, d, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for h in (hq, hkv, hkv))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            go = torch.randn_like(out)
            run = lambda: torch.autograd.grad(out, (q, k, v), go, retain_graph=True)
            g = run(); run(); torch.cuda.synchronize()
            a, e = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            n, ts = 5, []
            for _ in range(3):
                a.record()
                for _ in range(n): run()
                e.record(); torch.cuda.synchronize(); ts.append(a.elapsed_time(e) / n)
            res[str(c)] = [statistics.median(ts), [float(x.float().abs().mean()) for x in g]]
            del q, k, v, out, go, g
    print("RES " + json.dumps(res), flush=True)
if sys.argv[1] == "--child":
    child()
else:
    trees, got = sys.argv[1:], {}
    for r in range(3):
        for t in trees:
            env = dict(os.environ, PYTHONPATH=t)
            o = subprocess.run([sys.executable, __file__, "--child"], env=env, capture_output=True, text=True, timeout=60)
            line = [l for l in o.stdout.splitlines() if l.startswith("RES ")]
            if not line: print(t, o.stderr[-400:]); continue
            for c, (ms, means) in json.loads(line[0][4:]).items(): got.setdefault(c, {}).setdefault(t, []).append((ms, means))
    for c, by in got.items():
        med = {t: statistics.median(m for m, _ in v) for t, v in by.items()}
        m0 = [v[0][1] for v in by.values()]
        print(c, {os.path.basename(os.path.dirname(t)) or t: round(m, 4) for t, m in med.items()}, "first/last", round(med[trees[0]] / med[trees[-1]], 3), "means equal", all(abs(a - b) < 1e-4 * abs(a) + 1e-7 for a, b in zip(m0[0], m0[-1])), flush=True)
