"""Finds the tiles of a head-dim family: every legal one is compiled, those that spill are dropped, the rest are checked
and timed beside cuDNN; prints replacement rows for torch_flashplug/configs.py.

    python tools/tune.py compile --dims 192x128 --out DIR        no GPU needed: a pack of candidates, tune.json beside it
    python tools/tune.py time --pack DIR --out results           on the GPU: numbers first, then interleaved rounds

Legal is what torch_flashplug/spec.py computes: registers, shared memory, wgmma shapes. Nothing is guessed and nothing is
written into the table: a row is pasted by whoever has read the table of times above it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
for folder in (ROOT, ROOT / "tools"):
    sys.path.append(str(folder))

TILE_MS = (64, 128, 192)
TILE_NS = range(64, 209, 16)
LENGTHS = (512, 1024, 4096, 16384)
TOKENS, WIDTH = 16384, 2048  # batch x length, heads x head dim
COST_LENGTH = 4096  # a row's cost is taken here: long enough for whole waves
CLOSE = 0.97  # a tile this close to the best of its length is worth a look


def candidates(d: int, dv: int, mask: str) -> Iterator:
    """Every tile of the family that the hardware can hold."""
    from torch_flashplug.spec import KernelSpec

    for tile_m in TILE_MS:
        for tile_n in TILE_NS:
            spec = KernelSpec("fwd", 90, "bf16", d, dv, mask, tile_m, tile_n, 2)
            if spec.check() is None:
                yield spec


def compile_candidates(args: argparse.Namespace) -> None:
    """A pack of all candidates that compile without spills."""
    import aot

    specs = []
    for family in args.dims:
        dims, _, tiles = family.partition("=")
        for mask in args.mask:
            legal = candidates(*map(int, dims.split("x")), mask)
            specs += [spec for spec in legal if not tiles or f"{spec.tile_m}x{spec.tile_n}" in tiles.split(",")]
    args.out.mkdir(parents=True, exist_ok=True)
    report = args.out / "objects"
    report.mkdir(exist_ok=True)
    rows = aot.compile_all([spec.name() for spec in specs], report, os.cpu_count() or 1)
    whole = [row for row in rows if not row.get("spills") and not row.get("stack_bytes")]
    for row in rows:
        if row not in whole:
            print(f"dropped, it spills: {row['name']}")
    aot.link([report / f"{row['name']}.o" for row in whole], args.out / "tune.so")
    (args.out / "tune.json").write_text(json.dumps(whole, indent=1) + "\n")
    for path in report.iterdir():
        path.unlink() if path.is_file() else None
    print(f"{args.out / 'tune.so'}: {len(whole)} of {len(rows)} candidates")


def time_candidates(args: argparse.Namespace) -> None:
    import torch

    from providers import providers
    from torch_flashplug.demo.scopes import plugin_off
    from torch_flashplug.spec import KernelSpec
    from torch_flashplug.testing import Candidate, Case, DirectForward, load_pack, make_inputs, time_interleaved

    modules = {folder.name: load_pack(folder / "tune.so") for folder in args.pack}
    specs = [
        (folder.name, KernelSpec.from_name(row["name"]))
        for folder in args.pack
        for row in json.loads((folder / "tune.json").read_text())
    ]
    families = dict.fromkeys((spec.d, spec.dv, spec.mask) for _, spec in specs)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    peers, _ = providers()
    rows = []
    deadline = time.monotonic() + args.budget_seconds
    for d, dv, mask in families:
        if args.filter not in f"{d}x{dv}_{mask}":
            continue
        heads = max(1, WIDTH // d)
        for s in args.lengths:
            if time.monotonic() > deadline:
                print("time is up")
                break
            case = Case(f"{d}x{dv}_{mask}_{s}", TOKENS // s, heads, heads, s, s, d, dv, causal=mask == "causal")
            inputs = make_inputs(case, "cuda")

            def stock(inputs=inputs, case=case):
                return sdpa(*inputs, is_causal=case.causal)

            with plugin_off():
                expected = stock()
            runs = {"cudnn": Candidate(stock, plugin_off)}
            for name in {"fa3", "fa4"} & set(peers):

                def peer(i=inputs, c=case, p=peers[name]):
                    return p.attend(*i, is_causal=c.causal)

                try:
                    peer()
                    runs[name] = Candidate(peer)
                except (RuntimeError, AssertionError):
                    continue  # it has no kernel for these head dims
            for pack, spec in specs:
                if (spec.d, spec.dv, spec.mask) != (d, dv, mask):
                    continue
                direct = DirectForward(modules[pack][spec.name()], case, inputs)
                direct.call()
                error = (direct.out.float() - expected.float()).abs().max().item()
                if not error < 0.03:
                    print(f"WRONG {pack}/{spec.name()} at S {s}: {error}")
                    continue
                runs[f"{pack}/m{spec.tile_m}n{spec.tile_n}s{spec.stages}"] = Candidate(direct.call)
            with torch.no_grad():
                times = time_interleaved(runs, rounds=args.rounds, round_ms=args.round_ms)
            for name, timing in times.items():
                rows.append({"d": d, "dv": dv, "mask": mask, "s": s, "name": name, "ms": timing.ms,
                             "tflops": case.flop / timing.ms * 1e-9, "vs_stock": times["cudnn"].ms / timing.ms})  # fmt: skip
        _print_family(rows, d, dv, mask, args.lengths)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"tune-{torch.cuda.get_device_name().split()[1].lower()}.json"
    path.write_text(
        json.dumps({"date": str(date.today()), "device": torch.cuda.get_device_name(), "rows": rows}, indent=1) + "\n"
    )
    print("wrote", path)


def _print_family(rows: list[dict], d: int, dv: int, mask: str, lengths: list[int]) -> None:
    mine = [row for row in rows if (row["d"], row["dv"], row["mask"]) == (d, dv, mask)]
    names = dict.fromkeys(row["name"] for row in mine)
    print(f"== {d}x{dv} {mask}: TFLOP/s (x stock) at S " + " ".join(map(str, lengths)))
    for name in names:
        cells = {row["s"]: row for row in mine if row["name"] == name}
        print(
            f"  {name:28}"
            + "".join(
                f"{cells[s]['tflops']:8.0f} ({cells[s]['vs_stock']:.3f})" if s in cells else "       -        "
                for s in lengths
            )
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    make = verbs.add_parser("compile")
    make.add_argument("--dims", action="append", required=True, help="a family, DxDv or DxDv=MxN,MxN (repeatable)")
    make.add_argument("--mask", action="append", choices=["full", "causal"])
    make.add_argument("--out", type=Path, required=True)
    run = verbs.add_parser("time")
    run.add_argument("--pack", type=Path, action="append", required=True)
    run.add_argument("--filter", default="")
    run.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    run.add_argument("--rounds", type=int, default=7)
    run.add_argument("--round-ms", type=float, default=8.0)
    run.add_argument("--budget-seconds", type=float, default=480.0)
    run.add_argument("--out", type=Path, default=ROOT / "tools" / "results")
    args = parser.parse_args()
    if args.verb == "compile":
        args.mask = args.mask or ["full", "causal"]
        compile_candidates(args)
    else:
        time_candidates(args)


if __name__ == "__main__":
    main()
