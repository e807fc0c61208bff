"""Decode suites: few query rows against many keys, without a mask (decode) and with a bool mask (maskdecode).

Suite decode compares the plugin with every peer, and with a kernel that only reads K and V. Each case runs in two
states. In state "cold" the calls of a graph visit many copies of K and V, so that no copy is still in L2 at the next
visit. In state "warm" a single copy stays in L2, if the copy fits.

Suite maskdecode has KV caches that a bool mask masks out in part, with K and V in memory. Times are device times of
replayed CUDA graphs. The time of stock includes the conversion of the mask. The suite also times the project's kernels
for the same calls without a mask.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.bench import baselines, workloads
from tools.bench.runner import Bench, facts_of, graphed, refusal, row_of, try_each
from tools.bench.suites.masks import SEED, VISIBLE_SHARE, wrong_in
from torch_flashplug.testing import Candidate, Case, Inputs, Timing, make_inputs, time_interleaved

ROUND_MS = 3.0
COLD_BYTES = 240 << 20  # bytes of K and V read before a copy is reused: several times the size of any L2
WARM_BYTES = 32 << 20  # bytes of K and V that surely stay in L2
MAX_COPIES, WARM_CALLS = 48, 20
MATH_BYTES = 1 << 27  # the math backend is timed up to so many bytes of K and V: above, math is never near the fastest


def kv_bytes(case: Case) -> int:
    return 2 * case.B * case.Hkv * case.Sk * (case.D + case.Dv)


def copies_of(case: Case) -> int:
    """Return a number of copies of K and V so large that no copy is still in L2 at the next visit."""
    return max(2, min(MAX_COPIES, -(-COLD_BYTES // kv_bytes(case))))


def in_sequence(calls: list[Callable[[], object]]) -> Callable[[], None]:
    def run():
        for call in calls:
            call()

    return run


def states_of(case: Case) -> dict[str, tuple[int, int]]:
    """Map each state of K and V to the number of copies that a graph visits and the number of repetitions."""
    warm = {"warm": (1, WARM_CALLS)} if kv_bytes(case) <= WARM_BYTES else {}
    return {"cold": (copies_of(case), 1)} | warm


def suite_decode(bench: Bench) -> None:
    for case in workloads.decode():
        for state in states_of(case):
            name = f"{case.name}_{state}"
            if bench.take(name):
                _measure(bench, case, state, name)


def _measure(bench: Bench, case: Case, state: str, name: str) -> None:
    from tools.bench.memory_bandwidth import reader  # imported late, because CPU builds of torch lack triton

    copies, turns = states_of(case)[state]
    inputs = [make_inputs(case, bench.device, seed) for seed in range(copies)]
    skipped = baselines.SLOW if kv_bytes(case) > MATH_BYTES else baselines.SLOW - {"math"}
    names = [peer for peer in bench.providers if peer not in skipped and not peer.endswith(baselines.ONE_ORDER)]
    with torch.no_grad():

        def build(provider, which=inputs[0]):
            return lambda: provider.attend(*which, **case.sdpa_kwargs())

        candidates, errors, refused = try_each(bench, case, inputs[0], names, build)
        for peer, candidate in candidates.items():
            calls = [build(bench.providers[peer], which) for which in inputs]
            candidates[peer] = graphed(Candidate(in_sequence(calls), candidate.scope), turns)
        candidates["read"] = graphed(Candidate(in_sequence([reader(which) for which in inputs])), turns)
        timings = time_interleaved(candidates, rounds=bench.rounds, device=bench.device, round_ms=ROUND_MS)
    timings = {peer: Timing(tuple(ms / (copies * turns) for ms in t.rounds)) for peer, t in timings.items()}
    read = timings.pop("read")
    row = row_of(name, timings, **facts_of(case), errors=errors, refused=refused)
    plan = baselines.torch_flashplug.explain(*inputs[0], **case.sdpa_kwargs())
    row |= {"state": state, "kv_bytes": kv_bytes(case), "bound_ms": read.ms, "splits": plan.splits}
    bench.add(row | {"auto_plan": plan.backend})


# ---- suite maskdecode ----


MASKED_PROVIDERS = ("ours_fa3", "ours_auto", "stock", "efficient")
UNMASKED_PROVIDER = "ours_fa3"
FILLED = 32  # one key of FILLED keys is visible in the "filled" pattern


def _filled_mask(case: Case, keys: Tensor, device: str) -> Tensor:
    """Return the mask (B, 1, Sq, Sk) of a nearly empty static cache, stored once and expanded."""
    return (keys < case.Sk // FILLED).view(1, 1, 1, -1).expand(case.B, 1, case.Sq, case.Sk)


def _full_mask(case: Case, keys: Tensor, device: str) -> Tensor:
    return (keys >= 0).view(1, 1, 1, -1).expand(case.B, 1, case.Sq, case.Sk)


def _padding_mask(case: Case, keys: Tensor, device: str) -> Tensor:
    """Return a mask (B, 1, Sq, Sk) with padding on the left, and causal for the keys after the padding.

    On average a quarter of the keys is padding. The causal mask is aligned to the last query.
    """
    first = torch.arange(case.B, device=device) * case.Sk // (2 * case.B)
    last = case.Sk - case.Sq + torch.arange(case.Sq, device=device)
    return (keys >= first.view(-1, 1, 1, 1)) & (keys <= last.view(1, 1, -1, 1))


def _random_mask(case: Case, keys: Tensor, device: str) -> Tensor:
    """Return a random mask (B, Hq, Sq, Sk), different for each head."""
    sizes, generator = (case.B, case.Hq, case.Sq, case.Sk), torch.Generator(device).manual_seed(SEED)
    return torch.rand(sizes, device=device, generator=generator) < VISIBLE_SHARE


MASK_PATTERNS: dict[str, Callable[[Case, Tensor, str], Tensor]] = {
    "filled": _filled_mask,
    "all": _full_mask,
    "padding": _padding_mask,
    "random": _random_mask,
}


def masked_calls() -> Iterator[tuple[str, Case, str]]:
    for case in workloads.masked_decode():
        for pattern in MASK_PATTERNS:
            yield f"{pattern}_{case.name}", case, pattern


def suite_maskdecode(bench: Bench) -> None:
    for name, case, pattern in masked_calls():
        if bench.take(name):
            _measure_masked(bench, name, case, pattern)


def _measure_masked(bench: Bench, name: str, case: Case, pattern: str) -> None:
    copies = copies_of(case)
    inputs = [make_inputs(case, bench.device, seed) for seed in range(copies)]
    mask = MASK_PATTERNS[pattern](case, torch.arange(case.Sk, device=bench.device), bench.device)

    def attend(mask: Tensor | None, copy: Inputs) -> Tensor:
        return F.scaled_dot_product_attention(*copy, mask, enable_gqa=case.gqa)

    def candidate(peer: str, mask: Tensor | None) -> Candidate:
        each = [functools.partial(attend, mask, copy) for copy in inputs]
        return graphed(Candidate(in_sequence(each), bench.providers[peer].scope), 1)

    candidates, wrong, refused = {}, {}, {}
    with torch.no_grad():
        for peer in (peer for peer in MASKED_PROVIDERS if peer in bench.providers):
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
        if UNMASKED_PROVIDER in bench.providers:
            candidates["unmasked"] = candidate(UNMASKED_PROVIDER, None)
        timings = time_interleaved(candidates, rounds=bench.rounds, device=bench.device, round_ms=ROUND_MS)
    timings = {peer: Timing(tuple(ms / copies for ms in t.rounds)) for peer, t in timings.items()}
    unmasked = timings.pop("unmasked", None)
    row = row_of(name, timings, **facts_of(case) | {"mask": pattern}, wrong=wrong, refused=refused)
    bench.add(row | {"unmasked_ms": unmasked.ms if unmasked else None})
