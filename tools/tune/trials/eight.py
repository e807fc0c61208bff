"""Variants of the 8-bit forward kernels: numbers first, then times of the kernels alone, beside FA3's FP8.

    python eight.py FOLDER_OR_TAR_XZ [--seconds 95] [--only TEXT]

FOLDER holds one folder for each variant, FOLDER/<variant>/flashplug_sm90a.so, built by tools/build/aot.py with
FLASHPLUG_EIGHT=<variant>,bare: such kernels do not quantize; this script quantizes with torch. Needs torch and
apache-tvm-ffi, and takes fa3-fwd (or tokenspeed-fa3) if importable. A variant that hangs or crashes is left out, and the
rest goes on. The table has the ratio of FA3's time to ours (above 1: ours is faster), and TFLOP/s of FA3 and of `base`.
"""
import argparse, ctypes, importlib, json, math, queue, re, statistics, subprocess, sys, threading, time
from pathlib import Path

ORDER = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
ARGS = ("q k v o lse scale_log2 scale counter num_ctas mask mask_metadata bias bias32 seed dropout_p quant_workspace "
        "quantized_kv k_samples quantizes_kv left right bottom_right sinks softcap cu_seqlens_q cu_seqlens_k seqused_k "
        "tile_lists").split()
NAME = re.compile(r"fwd_sm90_bf16_d(\d+)_(causal\+)?(8bit|e4m3|qk8)_m(\d+)n(\d+)s(\d)")
SIZES = ((4, 4096), (1, 16384), (1, 32768))


def say(*text):
    print(*text, flush=True)


class Kernels:
    """Kernels (variant, name) of the packs, by (d, causal, recipe)."""

    def __init__(self, folder, only, without):
        import tvm_ffi

        self.by_key = {}
        for so in sorted(Path(folder).glob("*/flashplug_sm90a.so"), key=lambda p: (p.parent.name != "base", p.parent.name)):
            module = tvm_ffi.load_module(str(so))
            for row in json.loads(so.with_suffix(".json").read_text())["kernels"]:
                d, causal, recipe, m, n, _ = NAME.fullmatch(row["name"]).groups()
                label = f"{so.parent.name}:{recipe}:{m}x{n}"
                if only and not re.search(only, label) or (label, int(d), bool(causal)) in without:
                    continue
                self.by_key.setdefault((int(d), bool(causal)), {})[label] = (module[row["name"]], recipe, int(n))


def quantize(torch, q, k, v, recipe, block, seed=0):
    """Return workspaces of Q and of K and V, and the numbers that they stand for."""
    generator = torch.Generator(q.device).manual_seed(seed)
    (B, Hq, Sq, D), (_, Hkv, Sk, Dv) = q.shape, v.shape
    low = torch.float8_e4m3fn if recipe == "e4m3" else torch.int8
    top = 448.0 if recipe == "e4m3" else 127.0

    def eight(x, scale):
        x = x / scale
        return x.to(low) if low is torch.float8_e4m3fn else x.round().clamp(-127, 127).to(low)

    def words(*tensors):
        parts = []
        for t in tensors:
            flat = t.contiguous().view(-1).view(torch.uint8)
            parts += [flat, torch.full((-flat.numel() % 128,), 0x7F, dtype=torch.uint8, device=flat.device)]
        return torch.cat(parts).view(torch.int32)

    q_scale = q.float().abs().amax(-1).clamp(min=1e-6) / top
    q8 = eight(q.float(), q_scale[..., None])
    blocks = -(-Sk // block)
    padded = torch.nn.functional.pad(k.float(), (0, 0, 0, blocks * block - Sk)).view(B, Hkv, blocks, block, D)
    k_scale = padded.abs().amax((3, 4)).clamp(min=1e-6) / top
    k8 = eight(padded, k_scale[..., None, None]).view(B, Hkv, -1, D)[:, :, :Sk].contiguous()
    row_shift = torch.randn(B, Hq, Sq, device=q.device, generator=generator)
    of_q = words(q8, q_scale, row_shift)
    real = {"q": q8.double() * q_scale.double()[..., None], "row_shift": row_shift.double(),
            "k": k8.double() * k_scale.double().repeat_interleave(block, 2)[:, :, :Sk, None], "v": v.double()}
    if recipe == "qk8":
        return of_q, words(k8, k_scale), real
    v_mean = 0.5 + 0.1 * torch.randn(B, Hkv, Dv, device=q.device, generator=generator)
    v_scale = v.float().abs().amax(2) / 224.0
    v8 = (v.float() / v_scale[:, :, None]).to(torch.float8_e4m3fn)
    real["v"] = v8.double() * v_scale.double()[:, :, None] + v_mean.double()[:, :, None]
    pad = -Sk % 16
    turned = torch.nn.functional.pad(v8.view(torch.int8), (0, 0, 0, pad)).mT.reshape(B, Hkv, Dv, -1, 16)
    turned = turned[..., list(ORDER)].reshape(B, Hkv, Dv, -1).contiguous()
    return of_q, words(k8, turned, k_scale, v_scale, v_mean), real


def caller(torch, kernel, q, k, v, of_q, of_kv, counter, sms):
    B, Hq, Sq, D = q.shape
    out = torch.full((B, Sq, Hq, v.shape[3]), math.nan, dtype=q.dtype, device=q.device).transpose(1, 2)
    lse = torch.full((B, Hq, Sq), math.nan, device=q.device)
    scale = D**-0.5
    values = dict(q=q, k=k, v=v, o=out, lse=lse, scale_log2=scale * math.log2(math.e), scale=scale, counter=counter,
                  num_ctas=sms, quant_workspace=of_q, quantized_kv=of_kv, k_samples=k, quantizes_kv=0)
    args = [values.get(name) for name in ARGS]
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    return (lambda: kernel(*args, stream)), out, lse


def check(torch, kernel, recipe, block, d, causal, sms):
    """Return the relative error of O, and the error of the LSE, against fp64 of the quantized operands."""
    worst = [0.0, 0.0]
    for (B, Hq, Hkv), (Sq, Sk) in (((2, 4, 2), (2500, 2500)), ((1, 2, 1), (130, 70)), ((1, 8, 8), (1100, 3000))):
        generator = torch.Generator("cuda").manual_seed(Sq + d)
        q, k, v = (torch.randn(B, H, S, d, device="cuda", generator=generator).bfloat16()
                   for H, S in ((Hq, Sq), (Hkv, Sk), (Hkv, Sk)))
        of_q, of_kv, real = quantize(torch, q, k, v, recipe, block)
        counter = torch.zeros(1, dtype=torch.int32, device="cuda")
        run, out, lse = caller(torch, kernel, q, k, v, of_q, of_kv, counter, sms)
        for _ in range(2):
            out.fill_(math.nan), lse.fill_(math.nan)
            run()
            torch.cuda.synchronize()
            assert int(counter) == 0
            keys, values = (real[x].repeat_interleave(Hq // Hkv, 1) for x in "kv")
            scores = real["q"] @ keys.mT * d**-0.5
            if causal:
                scores.masked_fill_(~torch.ones(Sq, Sk, dtype=torch.bool, device="cuda").tril(), -math.inf)
            expected = scores.softmax(-1) @ values
            right = scores.logsumexp(-1) + real["row_shift"] * d**-0.5
            worst[0] = max(worst[0], float((out.double() - expected).norm() / (expected - 0.5).norm()))
            worst[1] = max(worst[1], float((lse.double() - right).abs().max()))
    return worst


def fa3_function():
    for module in ("flash_attn_interface", "fa3_fwd_interface", "tokenspeed_fa3.flash_attn_interface", "tokenspeed_fa3"):
        try:
            return importlib.import_module(module).flash_attn_func
        except Exception as error:
            say(f"# {module}: {type(error).__name__}: {str(error)[:80]}")
    return None


def fa3_call(torch, function, q, k, v, causal):
    def by_head(x):
        x = x.transpose(1, 2)
        scale = x.abs().amax((1, 3)).float() / 448.0
        return (x / scale[:, None, :, None]).to(torch.float8_e4m3fn), scale

    (q8, qs), (k8, ks), (v8, vs) = map(by_head, (q, k, v))
    return lambda: function(q8, k8, v8, causal=causal, q_descale=qs, k_descale=ks, v_descale=vs)


def time_all(torch, calls, rounds, repeats):
    times = {name: [] for name in calls}
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    for _ in range(rounds):
        events = []
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(repeats):
                call()
            end.record()
            events.append((name, start, end))
        torch.cuda.synchronize()
        for name, start, end in events:
            times[name].append(start.elapsed_time(end) / repeats)
    return {name: statistics.median(x) for name, x in times.items()}


def child(args):
    import torch

    state = json.loads(Path(args.state).read_text())
    without = {tuple(x) for x in state["without"]}
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    kernels = Kernels(args.folder, args.only, without)
    say("#", torch.cuda.get_device_name(), torch.__version__, sum(map(len, kernels.by_key.values())), "kernels")
    for (d, causal), group in kernels.by_key.items():
        for label, (kernel, recipe, block) in list(group.items()):
            key = [label, d, causal]
            if key in state["right"]:
                continue
            say("AT", json.dumps(key))
            error, lse_error = check(torch, kernel, recipe, block, d, causal, sms)
            limit = {"qk8": 8e-3, "8bit": 0.03, "e4m3": 0.035}[recipe]
            if re.search("no(exp|sum|cvt)", label):  # a bound of what is left out, wrong on purpose
                state["right"].append(key)
                continue
            is_right = error < limit and lse_error < (1.5e-2 if recipe == "e4m3" else 1.5e-3)
            say(f"check d{d} {'causal' if causal else 'full  '} {label:34} O {error:.4f} LSE {lse_error:.1e}",
                "" if is_right else "WRONG")
            state["right" if is_right else "without"].append(key)
            Path(args.state).write_text(json.dumps(state))
            if not is_right:
                del group[label]
    function = fa3_function()
    total = {}
    for S_index, (B, S) in enumerate(SIZES + ((1, 32760),)):
        for d, causal in sorted(kernels.by_key):
            H = 40 if S == 32760 else 2048 // d
            if time.time() > args.until or (S == 32760 and (d != 128 or causal)):
                continue
            group = kernels.by_key[d, causal]
            q, k, v = (torch.randn(B, H, S, d, device="cuda").bfloat16() for _ in range(3))
            counter = torch.zeros(1, dtype=torch.int32, device="cuda")
            calls, spaces = {}, {}
            if function:
                calls["fa3"] = fa3_call(torch, function, q, k, v, causal)
            for label, (kernel, recipe, block) in group.items():
                if (recipe, block) not in spaces:
                    spaces[recipe, block] = quantize(torch, q, k, v, recipe, block)[:2]
                calls[label] = caller(torch, kernel, q, k, v, *spaces[recipe, block], counter, sms)[0]
            for label in list(group):  # a variant that hangs at this size is left out by the parent
                say("AT", json.dumps([label, d, causal]))
                calls[label]()
                torch.cuda.synchronize()
            say("AT", json.dumps(["timing", d, causal, S]))
            flops = 4e-9 * B * H * S * S * d / (2 if causal else 1)
            repeats = max(1, int(3.0 / (flops / 8e2)))
            ms = time_all(torch, calls, 5 if flops > 4e3 else 7, repeats)
            fa3 = ms.get("fa3")
            say(f"== d{d} {'causal' if causal else 'full'} B{B} H{H} S{S}: fa3 {flops / fa3 if fa3 else 0:.0f} TFLOP/s")
            for label in sorted(group, key=lambda x: ms[x]):
                ratio = (fa3 or ms[next(iter(group))]) / ms[label]
                say(f"   {label:36} {flops / ms[label]:6.0f}  {ratio:.3f}")
                if S in (4096, 16384, 32768):
                    total.setdefault((d, label), []).append((causal, S, ratio))
            del calls, spaces
    for d in (64, 128, 256):
        say(f"== d{d}: ratio to fa3: mean and least of all cells; cells full, causal at 4k, 16k, 32k")
        rows = {label: cells for (dim, label), cells in total.items() if dim == d}
        for label, cells in sorted(rows.items(), key=lambda x: -statistics.mean(c[2] for c in x[1])):
            ratios = [c[2] for c in sorted(cells)]
            say(f"   {label:36} {statistics.mean(ratios):.3f} {min(ratios):.3f} ", " ".join(f"{x:.3f}" for x in ratios))
    say("DONE")


def read_lines(stream, lines):
    for line in stream:
        lines.put(line)
    lines.put("")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--seconds", type=float, default=95)
    parser.add_argument("--only", default="")
    parser.add_argument("--state", default="")
    parser.add_argument("--until", type=float, default=0)
    args = parser.parse_args()
    if args.state:
        return child(args)
    if args.folder.endswith(".tar.xz"):
        subprocess.run(["mkdir", "-p", "/tmp/eight_packs"], check=True)
        subprocess.run(["tar", "-xJf", args.folder, "-C", "/tmp/eight_packs"], check=True)
        args.folder = "/tmp/eight_packs"
    start = time.time()
    state = Path("/tmp/eight_state.json")
    state.write_text(json.dumps({"right": [], "without": []}))
    done = False
    while not done and time.time() - start < args.seconds:
        command = [sys.executable, __file__, args.folder, "--state", str(state), "--only", args.only, "--until",
                   str(start + args.seconds - 8)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1)
        at, lines = None, queue.Queue()
        threading.Thread(target=read_lines, args=(process.stdout, lines), daemon=True).start()
        while True:
            try:
                line = lines.get(timeout=12)
            except queue.Empty:
                break
            if not line:
                break
            if line.startswith("AT "):
                at = json.loads(line[3:])
            else:
                done = done or line.startswith("DONE")
                say(line.rstrip())
            if time.time() - start > args.seconds + 20:
                done = True
                break
        process.kill()
        process.wait()
        if not done:
            say("# child ended at", at, process.returncode)
            if at is None or at[0] == "timing":
                break
            known = json.loads(state.read_text())
            known["without"].append(at)
            state.write_text(json.dumps(known))
    say(f"# {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
