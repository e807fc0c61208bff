"""Suite maskdecode: few query rows against caches of which a bool mask hides a part, K and V from memory. Device time
of replayed CUDA graphs: what stock makes of the mask is in its time. Beside peers: our own kernels for the same call
without its mask.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
import workloads
from decode import ROUND_MS, copies_of, in_turn
from harness import Bench, facts_of, graphed, refusal, row_of
from masks import SEED, SEEN, wrong_in
from torch import Tensor

from torch_flashplug.testing import Candidate, Case, Inputs, Timing, make_inputs, time_interleaved

MASKED = ("ours_fa3", "ours_auto", "stock", "efficient")
UNMASKED = "ours_fa3"
FILLED = 32  # of so many keys one


def _filled(case: Case, keys: Tensor, device: str) -> Tensor:
    """A static cache at its beginning: (B, 1, Sq, Sk), stored once."""
    return (keys < case.Sk // FILLED).view(1, 1, 1, -1).expand(case.B, 1, case.Sq, case.Sk)


def _all(case: Case, keys: Tensor, device: str) -> Tensor:
    return (keys >= 0).view(1, 1, 1, -1).expand(case.B, 1, case.Sq, case.Sk)


def _padding(case: Case, keys: Tensor, device: str) -> Tensor:
    """On the left, a quarter in the mean; behind that causal to the last query: (B, 1, Sq, Sk)."""
    first = torch.arange(case.B, device=device) * case.Sk // (2 * case.B)
    last = case.Sk - case.Sq + torch.arange(case.Sq, device=device)
    return (keys >= first.view(-1, 1, 1, 1)) & (keys <= last.view(1, 1, -1, 1))


def _random(case: Case, keys: Tensor, device: str) -> Tensor:
    """By head: (B, Hq, Sq, Sk)."""
    sizes, generator = (case.B, case.Hq, case.Sq, case.Sk), torch.Generator(device).manual_seed(SEED)
    return torch.rand(sizes, device=device, generator=generator) < SEEN


PATTERNS: dict[str, Callable[[Case, Tensor, str], Tensor]] = {
    "filled": _filled,
    "all": _all,
    "padding": _padding,
    "random": _random,
}


def calls() -> Iterator[tuple[str, Case, str]]:
    for case in workloads.masked_decode():
        for pattern in PATTERNS:
            yield f"{pattern}_{case.name}", case, pattern


def suite_maskdecode(bench: Bench) -> None:
    for name, case, pattern in calls():
        if bench.take(name):
            _measure(bench, name, case, pattern)


def _measure(bench: Bench, name: str, case: Case, pattern: str) -> None:
    copies = copies_of(case)
    inputs = [make_inputs(case, bench.device, seed) for seed in range(copies)]
    mask = PATTERNS[pattern](case, torch.arange(case.Sk, device=bench.device), bench.device)

    def attend(mask: Tensor | None, one: Inputs) -> Tensor:
        return F.scaled_dot_product_attention(*one, mask, enable_gqa=case.gqa)

    def candidate(peer: str, mask: Tensor | None) -> Candidate:
        each = [functools.partial(attend, mask, one) for one in inputs]
        return graphed(Candidate(in_turn(each), bench.providers[peer].scope), 1)

    candidates, wrong, refused = {}, {}, {}
    with torch.no_grad():
        for peer in (peer for peer in MASKED if peer in bench.providers):
            try:
                with bench.providers[peer].scope():
                    out = attend(mask, inputs[0])  # whoever cannot says so before it is captured
                if bench.check and (error := wrong_in(case, inputs[0], mask, out)):
                    wrong[peer] = error
                candidates[peer] = candidate(peer, mask)
            except RuntimeError as error:
                refused[peer] = refusal(error)
        if any(peer.startswith("ours") for peer in wrong):
            raise SystemExit(f"{name}: wrong, nothing is timed: {wrong}")
        if UNMASKED in bench.providers:
            candidates["unmasked"] = candidate(UNMASKED, None)
        timings = time_interleaved(candidates, rounds=bench.rounds, device=bench.device, round_ms=ROUND_MS)
    timings = {peer: Timing(tuple(ms / copies for ms in t.rounds)) for peer, t in timings.items()}
    unmasked = timings.pop("unmasked", None)
    row = row_of(name, timings, **facts_of(case) | {"mask": pattern}, wrong=wrong, refused=refused)
    bench.add(row | {"unmasked_ms": unmasked.ms if unmasked else None})
