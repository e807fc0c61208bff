"""Time the host part of attention() in all forms, without a GPU, for one or two trees by turns.

    python host_attention.py TREE [OTHER_TREE] [--processes 8] [--forms varlen,paged] [--instructions]

Each process runs in a tree (current folder) with `.venv/bin/python` and CPU tensors. The dispatcher takes the CPU for
an H100 (CPU stub, level "pack"), and each kernel is a C function that returns 0. So everything of a call is real
except the driver's launch and the caching allocator of CUDA. Times are CPU-stub figures: no figure is that of a GPU.
"""
import argparse, json, os, statistics, subprocess, sys, time

ROUNDS, CALLS = 15, 100


def forms():
    import ctypes
    import torch
    import torch.nn.functional as F
    import torch_flashplug
    from torch_flashplug import attention, plan_varlen
    from torch_flashplug.api import attention_args, backend, startup
    from torch_flashplug.codegen.kernel_request import KernelAnswer
    from torch_flashplug.dispatch import bindings, callbacks

    startup.load()
    bindings.set_facts_override(backend.DEVICES["h100"])
    bindings.set_cpu_stub(2)
    bindings.clear_packs()
    libc = ctypes.CDLL(None)
    empty = ctypes.cast(libc.labs, ctypes.c_void_p).value  # labs(self = NULL) is 0
    callbacks.set_compile_callback(lambda *_: KernelAnswer(function=empty))
    from torch_flashplug.torch_hooks import op_owners
    op_owners.suppress_override_warning()
    bindings.register_ops("CPU")
    startup.push_tables()
    torch._fused_sdp_choice(*torch.empty(3, 1, 1, 8, 8).unbind())
    backend.enable()
    assert bindings.install(bindings.CPU_SLOT) == 0
    attention_args.has_kernel = lambda query, key, value: query.dtype == key.dtype == value.dtype and query.dtype in attention_args.SIXTEEN_BITS

    def randn(*sizes):
        return torch.randn(*sizes).to(torch.bfloat16)

    def ints(*values):
        return torch.tensor(values, dtype=torch.int32)

    H, KV, D = 8, 2, 128
    cu = ints(0, 40, 100, 128)
    q, k, v = randn(128, H, D), randn(128, KV, D), randn(128, KV, D)
    plan = plan_varlen(q, k, v, causal=True, cu_seqlens_q=cu)
    assert plan.lists is not None
    out = torch.empty_like(q)
    pages = [randn(12, 16, KV, D) for _ in range(2)]
    table, used = torch.arange(12, dtype=torch.int32).view(4, 3), ints(20, 48, 3, 33)
    q1 = randn(4, 1, H, D)
    out1 = torch.empty_like(q1)
    caches = [randn(4, 48, KV, D) for _ in range(2)]
    dense = [randn(2, 128, H, D), randn(2, 128, KV, D), randn(2, 128, KV, D)]
    sinks = torch.zeros(H)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    sdpa = [x.transpose(1, 2) for x in dense]
    paged = {"block_table": table, "seqused_k": used, "causal": True}
    calls = {
        "varlen": lambda: attention(q, k, v, causal=True, cu_seqlens_q=cu),
        "varlen_all": lambda: attention(q, k, v, causal=True, window=(31, 0), sinks=sinks, scale=0.1, cu_seqlens_q=cu,
                                        cu_seqlens_k=cu, return_lse=True),
        "planned": lambda: attention(q, k, v, causal=True, cu_seqlens_q=cu, plan=plan),
        "varlen_out": lambda: attention(q, k, v, causal=True, cu_seqlens_q=cu, out=out),
        "paged": lambda: attention(q1, *pages, **paged),
        "paged_out": lambda: attention(q1, *pages, **paged, out=out1),
        "cache": lambda: attention(q1, *caches, causal=True, seqused_k=used),
        "cache_out": lambda: attention(q1, *caches, causal=True, seqused_k=used, out=out1),
        "dense_causal": lambda: attention(*dense, causal=True),
        "dense_window": lambda: attention(*dense, causal=True, window=(31, 0)),
        "dense_sinks": lambda: attention(*dense, causal=True, sinks=sinks),
        "sdpa": lambda: F.scaled_dot_product_attention(*sdpa, is_causal=True, enable_gqa=True),
    }
    scopes = {name: torch.no_grad for name in calls}
    calls["varlen_grad_mode"] = calls["varlen"]
    scopes["varlen_grad_mode"] = torch.enable_grad
    calls["varlen_inference"] = calls["varlen"]
    scopes["varlen_inference"] = torch.inference_mode
    calls["varlen_gradients"] = lambda: attention(*leaves, causal=True, cu_seqlens_q=cu)
    scopes["varlen_gradients"] = torch.enable_grad
    calls["sdpa_gradients"] = lambda: F.scaled_dot_product_attention(
        *(x.unsqueeze(0).transpose(1, 2) for x in leaves), is_causal=True, enable_gqa=True)
    scopes["sdpa_gradients"] = torch.enable_grad
    return calls, scopes, bindings


def child(names, instructions):
    import torch
    torch.set_num_threads(1)
    calls, scopes, bindings = forms()
    names = names or list(calls)
    results = {}
    for name in names:
        call = calls[name]
        with scopes[name]():
            for _ in range(20):
                call()
            bindings.counters(reset=True)
            call()
            served = bindings.counters(reset=True)["ours_fwd"]
            if instructions:
                for _ in range(instructions):
                    call()
                continue
            lows = []
            for _ in range(ROUNDS):
                start = time.thread_time_ns()
                for _ in range(CALLS):
                    call()
                lows.append((time.thread_time_ns() - start) / CALLS / 1000)
        results[name] = [min(lows), statistics.median(lows), served]
    print(json.dumps(results))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("trees", nargs="+")
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument("--forms", default="")
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--instructions", type=int, default=0)
    a = parser.parse_args()
    names = [n for n in a.forms.split(",") if n]
    if a.child:
        return child(names, a.instructions)
    runs = {tree: [] for tree in a.trees}
    for i in range(a.processes):
        for tree in (a.trees if i % 2 == 0 else a.trees[::-1]):
            env = dict(os.environ, TORCH_DEVICE_BACKEND_AUTOLOAD="0", PYTHONPATH=tree, OMP_NUM_THREADS="1")
            done = subprocess.run([f"{tree}/.venv/bin/python", __file__, tree, "--child", "--forms", a.forms], cwd=tree,
                                  env=env, capture_output=True, text=True)
            if done.returncode:
                print(done.stderr[-3000:])
                raise SystemExit(1)
            runs[tree].append(json.loads(done.stdout.splitlines()[-1]))
    for name in runs[a.trees[0]][0]:
        lows = [min(run[name][0] for run in runs[t]) for t in a.trees]
        medians = [statistics.median(run[name][1] for run in runs[t]) for t in a.trees]
        served = [runs[t][0][name][2] for t in a.trees]
        text = "  ".join(f"fastest {x:7.2f} median {y:7.2f} us served {s}" for x, y, s in zip(lows, medians, served))
        if len(lows) == 2:
            text += f"  other/first {lows[1] / lows[0]:.3f} ({medians[1] / medians[0]:.3f})"
        print(f"{name:18} {text}", flush=True)


main()
