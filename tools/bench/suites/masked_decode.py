"""Suite maskdecode: decode with KV caches that a bool mask hides in part, with K and V in memory.

Times are device times of replayed CUDA graphs. The time of stock includes the conversion of the mask. The suite also
times the project's kernels for the same calls without a mask.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.bench import workloads
from tools.bench.runner import Bench, facts_of, graphed, refusal, row_of
from tools.bench.suites.decode import ROUND_MS, copies_of, in_turn
from tools.bench.suites.masks import SEED, SEEN, wrong_in
from torch_flashplug.testing import Candidate, Case, Inputs, Timing, make_inputs, time_interleaved

MASKED = ("ours_fa3", "ours_auto", "stock", "efficient")
UNMASKED = "ours_fa3"
FILLED = 32  # one key of FILLED keys is visible in the "filled" pattern


def _filled(case: Case, keys: Tensor, device: str) -> Tensor:
    """Return the mask (B, 1, Sq, Sk) of a nearly empty static cache, stored once and expanded."""
    return (keys < case.Sk // FILLED).view(1, 1, 1, -1).expand(case.B, 1, case.Sq, case.Sk)


def _all(case: Case, keys: Tensor, device: str) -> Tensor:
    return (keys >= 0).view(1, 1, 1, -1).expand(case.B, 1, case.Sq, case.Sk)


def _padding(case: Case, keys: Tensor, device: str) -> Tensor:
    """Return a mask (B, 1, Sq, Sk) with padding on the left, and causal for the keys after the padding.

    On average a quarter of the keys is padding. The causal mask is aligned to the last query.
    """
    first = torch.arange(case.B, device=device) * case.Sk // (2 * case.B)
    last = case.Sk - case.Sq + torch.arange(case.Sq, device=device)
    return (keys >= first.view(-1, 1, 1, 1)) & (keys <= last.view(1, 1, -1, 1))


def _random(case: Case, keys: Tensor, device: str) -> Tensor:
    """Return a random mask (B, Hq, Sq, Sk), different for each head."""
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
                    out = attend(mask, inputs[0])  # raises before the graph capture if the peer cannot run the call
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
