"""Compile FA4's kernels for the cases of suites groups and everyday into FA4's disk cache, in parallel processes.

Run: FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 PYTHONPATH=... python3 prewarm.py WORKERS SECONDS
"""
import multiprocessing as mp, sys, time, os
sys.path.insert(0, os.getcwd() + "/.gpu")

def cases():
    from tools.bench import workloads, public_models
    seen = {}
    for c in workloads.groups():
        seen.setdefault((c.D, c.Dv, c.causal, c.Hq // c.Hkv, True, c.Sq == c.Sk), c)
    for m in public_models.model_calls():
        c = m.case
        seen.setdefault((c.D, c.Dv, c.causal, c.Hq // c.Hkv, m.direction == "train", (c.Sq, c.Sk)), c)
    return list(seen.items())

def work(jobs, done, end):
    import torch
    from flash_attn.cute.interface import flash_attn_func
    while time.time() < end:
        try:
            (key, c) = jobs.get_nowait()
        except Exception:
            return
        t = time.time()
        try:
            g = key[4]
            q, k, v = (torch.randn(c.B, s, h, d, device="cuda", dtype=getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[c.dtype]), requires_grad=g)
                       for s, h, d in ((c.Sq, c.Hq, c.D), (c.Sk, c.Hkv, c.D), (c.Sk, c.Hkv, c.Dv)))
            out = flash_attn_func(q, k, v, softmax_scale=c.scale, causal=c.causal)
            out = out[0] if isinstance(out, tuple) else out
            if g:
                torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
            torch.cuda.synchronize()
            done.put((key, round(time.time() - t, 1), ""))
        except Exception as e:
            done.put((key, round(time.time() - t, 1), f"{type(e).__name__}: {str(e)[:100]}"))
            if "CUDA error" in str(e):
                return

if __name__ == "__main__":
    n, seconds = int(sys.argv[1]), float(sys.argv[2])
    ctx = mp.get_context("spawn")
    jobs, done = ctx.Queue(), ctx.Queue()
    all_cases = cases()
    for c in all_cases: jobs.put(c)
    time.sleep(0.5)
    end = time.time() + seconds
    ps = [ctx.Process(target=work, args=(jobs, done, end)) for _ in range(n)]
    t = time.time()
    for p in ps: p.start()
    got = 0
    while any(p.is_alive() for p in ps) or not done.empty():
        try:
            k, s, e = done.get(timeout=1)
            got += 1
            if e: print(k, s, e, flush=True)
        except Exception:
            pass
    print(f"prewarm: {got} of {len(all_cases)} in {time.time()-t:.0f} s", flush=True)
