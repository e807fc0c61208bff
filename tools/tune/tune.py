"""Tuning of tile sizes for a family of head dims, and of the cost model of decode calls.

    python tools/tune/tune.py compile --dims 192x128 --out DIR    a pack of candidates and tune.json (no GPU needed)
    python tools/tune/tune.py compile --dims 64x64=192x128,128x176 --mask full --out DIR    only these tiles
    python tools/tune/tune.py time --pack DIR --out results       on the GPU: check of results, then rounds
    python tools/tune/tune.py gate --out results                  constants of the cost model, timed and fitted

Every legal tile size is compiled. Candidates with spilled registers are dropped. The remaining candidates are checked,
and timed against stock. The tool prints replacement rows for torch_flashplug/registry/kernel_table.py.

torch_flashplug/registry/kernel_spec.py computes the legal tile sizes from registers, shared memory and wgmma shapes.
The tool neither guesses a value nor writes into the kernel table: a developer reads the times and pastes a row. To
compare two versions of a kernel, pass two packs to `time`, each made by `compile` in the source tree of the version.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

TILE_MS, TILE_NS, STAGES = (64, 128, 192), range(64, 209, 16), 2
LENGTHS = (512, 1024, 4096, 16384)
TOKENS, WIDTH = 16384, 2048  # batch x length, heads x head dim
COST_LENGTH = 4096  # sequence length at which the cost of a row is measured: long enough for whole waves
CLOSE = 0.98  # a tile size with at least 0.98 of the best speed at some length is worth a row
PEERS = ("fa3", "fa4")


@dataclass(frozen=True, slots=True)
class Family:
    """Family of calls that share the rows of the kernel table."""

    d: int
    dv: int
    mask: str

    def __str__(self) -> str:
        return f"{self.d}x{self.dv}_{self.mask}"

    def case(self, batch: int, heads: int, sq: int, sk: int):
        from torch_flashplug.testing import Case

        return Case(str(self), batch, heads, heads, sq, sk, self.d, self.dv, causal=self.mask == "causal")

    def timed_case(self, length: int):
        """Return the case of a sequence length. All cases have equal numbers of tokens and equal width."""
        return self.case(TOKENS // length, max(1, WIDTH // self.d), length, length)


@dataclass(slots=True)
class Trial:
    """Kernel of a pack: the pack, the kernel spec, the function, and the milliseconds by length."""

    pack: str
    spec: object  # KernelSpec
    function: Callable
    ms: dict[int, float] = field(default_factory=dict)

    @property
    def family(self) -> Family:
        return Family(self.spec.d, self.spec.dv, self.spec.mask)

    @property
    def label(self) -> str:
        return f"{self.pack}/m{self.spec.tile_m}n{self.spec.tile_n}s{self.spec.stages}"


def candidates(family: Family) -> Iterator:
    """Yield a kernel spec for every tile size of the family that fits the hardware."""
    from torch_flashplug.registry.kernel_spec import KernelSpec

    for tile_m in TILE_MS:
        for tile_n in TILE_NS:
            spec = KernelSpec("fwd", 90, "bf16", family.d, family.dv, family.mask, tile_m, tile_n, STAGES)
            if spec.check() is None:
                yield spec


def compile_candidates(args: argparse.Namespace) -> None:
    """Compile all candidates, and link the candidates without spilled registers into a pack."""
    from tools.build import aot

    specs = []
    for dims_and_tiles in args.dims:
        dims, _, tiles = dims_and_tiles.partition("=")
        for mask in args.mask or ("full", "causal"):
            legal = candidates(Family(*map(int, dims.split("x")), mask))
            specs += [spec for spec in legal if not tiles or f"{spec.tile_m}x{spec.tile_n}" in tiles.split(",")]
    args.out.mkdir(parents=True, exist_ok=True)
    names, store = [spec.name() for spec in specs], aot.Store(args.out / "objects", "sm_90a")
    aot.compile_all(names, store, os.cpu_count() or 1)
    rows = [store.row(name) for name in names]
    unspilled = [row for row in rows if not row.get("spills") and not row.get("stack_bytes")]
    for row in rows:
        if row not in unspilled:
            print(f"dropped, because registers are spilled: {row['name']}")
    aot.link([store.path(row["name"], ".o") for row in unspilled], args.out / "tune.so")
    (args.out / "tune.json").write_text(json.dumps(unspilled, indent=1) + "\n")
    print(f"{args.out / 'tune.so'}: {len(unspilled)} of {len(rows)} candidates")


def load_trials(packs: list[Path]) -> list[Trial]:
    from torch_flashplug.registry.kernel_spec import KernelSpec
    from torch_flashplug.testing import load_pack

    return [
        Trial(pack.name, KernelSpec.from_name(row["name"]), load_pack(pack / "tune.so")[row["name"]])
        for pack in packs
        for row in json.loads((pack / "tune.json").read_text())
    ]


def check_numbers(family: Family, trials: list[Trial]) -> list[Trial]:
    """Return the trials within the error budget on lengths that are not multiples of a tile. Print the wrong trials."""
    from torch_flashplug.testing import DirectForward, make_inputs, measure_error, oracle, plain

    case = family.case(1, 2, 1001, 1111)
    inputs = make_inputs(case, "cuda")
    exact, low = oracle(case, inputs), plain(case, inputs)
    right = []
    for trial in trials:
        run = DirectForward(trial.function, case, inputs)
        run.call()
        errors = measure_error(run.out, exact.out, low.out)
        if errors.ok and bool(run.out.isfinite().all()):
            right.append(trial)
        else:
            print(f"WRONG, not timed: {family} {trial.label}: {errors}")
    return right


def time_length(family: Family, length: int, trials: list[Trial], args: argparse.Namespace) -> dict[str, float]:
    """Return the milliseconds of stock, of the peers that can run the case, and of every trial.

    The time of a trial is also stored in the trial.
    """
    import torch

    from tools.bench.baselines import providers
    from torch_flashplug.testing import Candidate, DirectForward, make_inputs, time_interleaved

    case = family.timed_case(length)
    inputs = make_inputs(case, "cuda")
    runs: dict[str, Candidate] = {}
    available, _ = providers({"stock", *PEERS})
    for name, provider in available.items():

        def call(provider=provider):
            return provider.attend(*inputs, **case.sdpa_kwargs())

        try:
            with provider.scope():
                call()
            runs[name] = Candidate(call, provider.scope)
        except (RuntimeError, AssertionError):
            continue  # the peer has no kernel for these head dims
    for trial in trials:
        runs[trial.label] = Candidate(DirectForward(trial.function, case, inputs).call)
    with torch.no_grad():
        times = time_interleaved(runs, rounds=args.rounds, round_ms=args.round_ms, rest_ms=args.rest_ms)
    for trial in trials:
        trial.ms[length] = times[trial.label].ms
    return {name: timing.ms for name, timing in times.items()}


def print_family(family: Family, times: dict[int, dict[str, float]]) -> None:
    """Print TFLOP/s and the multiple of stock's speed, with one line per candidate and one column per length."""
    print(f"== {family}: TFLOP/s (x stock) at S {' '.join(map(str, times))}")
    for name in dict.fromkeys(name for column in times.values() for name in column):
        cells = ""
        for length, column in times.items():
            tflops = family.timed_case(length).flop / column[name] * 1e-9
            cells += f"{tflops:8.0f} ({column['stock'] / column[name]:.3f})"
        print(f"  {name:28}{cells}")


def print_rows(family: Family, trials: list[Trial], device: str) -> None:
    """Print replacement rows for tile sizes near the best at some length, with the cost for the dispatcher."""
    import torch

    sms = torch.cuda.get_device_properties(0).multi_processor_count
    case = family.timed_case(COST_LENGTH)
    for trial in trials:
        lead = max(min(t.ms[s] for t in trials) / trial.ms[s] for s in trial.ms)
        if lead < CLOSE or COST_LENGTH not in trial.ms or family.mask != "full":
            continue  # the cost is measured without a mask, and is also used for causal
        m, n = trial.spec.tile_m, trial.spec.tile_n
        waves, blocks = -(-case.B * case.Hq * -(-case.Sq // m) // sms), -(-case.Sk // n)
        cost = round(trial.ms[COST_LENGTH] * 1e6 / (waves * (blocks + 1)))
        tile = f"{m}, {n}, {trial.spec.stages}, {cost}" + (", last_tile=LAST_TILE_OF_192_ROWS" if m == 192 else "")
        row = f'KernelRow("fwd", 90, {family.d}, {family.dv}, BOTH, {tile}),'
        print(f"    {row}  # {date.today()}, {device}, {trial.pack}: {lead:.3f} of the best tile at its best length")


def time_candidates(args: argparse.Namespace) -> None:
    from tools.bench import report

    trials = load_trials(args.pack)
    device, deadline = report.slug(report.gpu_name()), time.monotonic() + args.budget_seconds
    results: dict[str, dict[int, dict[str, float]]] = {}
    for family in dict.fromkeys(trial.family for trial in trials):
        if args.filter not in str(family):
            continue
        right_trials = check_numbers(family, [trial for trial in trials if trial.family == family])
        times = results[str(family)] = {}
        for length in args.lengths:
            if time.monotonic() > deadline:
                print(f"skipped: {family} at {length} (the time given with --budget-seconds is used up)")
                continue
            times[length] = time_length(family, length, right_trials, args)
        if times:
            print_family(family, times)
            print_rows(family, [trial for trial in right_trials if trial.ms], device)
    document = report.header("tune", {}, report.commit()) | {"ms": results}
    print("wrote", report.write_json(document, args.out))


def fit_gate(args: argparse.Namespace) -> None:
    from tools.tune.split_heuristic import tune_gate

    tune_gate(args.times, args.out, args.rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    make = verbs.add_parser("compile", help="a pack of candidates; needs the DSL, no GPU")
    make.add_argument("--dims", action="append", required=True, help="family DxDv, or DxDv=MxN,MxN (repeatable)")
    make.add_argument("--mask", action="append", choices=["full", "causal"], help="default: both")
    make.add_argument("--out", type=Path, required=True)
    run = verbs.add_parser("time", help="check and time packs of candidates on this machine's GPU")
    run.add_argument("--pack", type=Path, action="append", required=True, help="folder made by compile (repeatable)")
    run.add_argument("--filter", default="", help="only families with this text in the name, as in 192x128_causal")
    run.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    run.add_argument("--rounds", type=int, default=9)
    run.add_argument("--round-ms", type=float, default=20.0)
    run.add_argument("--rest-ms", type=float, default=0.0, help="idle time before a sample (testing/timing.py)")
    run.add_argument("--budget-seconds", type=float, default=480.0, help="start no length after this time")
    run.add_argument("--out", type=Path, default=ROOT / "build" / "tune", help="folder of the JSON file")
    gate = verbs.add_parser("gate", help="constants of the cost model (tools/tune/split_heuristic.py)")
    gate.add_argument("--times", type=Path, nargs="*", help="JSON of earlier runs, to fit again without a GPU")
    gate.add_argument("--rounds", type=int, default=7)
    gate.add_argument("--out", type=Path, default=ROOT / "build" / "tune", help="folder of the JSON file")
    args = parser.parse_args()
    {"compile": compile_candidates, "time": time_candidates, "gate": fit_gate}[args.verb](args)


if __name__ == "__main__":
    main()
