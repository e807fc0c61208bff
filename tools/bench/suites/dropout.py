"""Suite dropout: training calls with dropout_p, first forward only, then forward and backward.

Each call draws a new seed, as in user programs. So each call drops a different set of probabilities.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.bench import workloads
from tools.bench.result_schema import GRADIENT_FLOP, OURS
from tools.bench.runner import Bench, facts_of, row_of, time_calls
from tools.bench.suites import masks
from torch_flashplug.ops import dropout_reference
from torch_flashplug.testing import (
    Candidate,
    Case,
    Inputs,
    Masking,
    make_inputs,
    measure_error,
    oracle,
    plain,
)

SEED = 20261124
P = 0.1


PATTERNS_BY_PREFIX = {  # mask patterns of the calls, by the prefix of the case name
    "": None,
    "padding_": next(pattern for pattern in masks.PATTERNS if pattern.name == "padding"),
    "bias_": next(pattern for pattern in masks.PATTERNS if pattern.name == "bias_heads"),
}


def calls() -> Iterator[tuple[str, Case, str, str]]:
    for direction in ("fwd", "train"):
        for case in workloads.dropout_cases():
            for beside in PATTERNS_BY_PREFIX:
                if not (case.causal and beside) and case.Sq <= (4096 if beside else case.Sq):
                    yield f"{direction}_{beside}{case.name}", case, direction, beside


def suite_dropout(bench: Bench) -> None:
    for name, case, direction, beside in calls():
        if bench.take(name):
            _measure(bench, name, case, direction, PATTERNS_BY_PREFIX[beside])


def wrong_in(case: Case, inputs: Inputs, mask: Tensor | None, out: Tensor, seed: Tensor) -> str | None:
    """Compare the first head of our output with fp64, and return a description of a wrong result, or None.

    The fp64 answer drops the probabilities that the seed selects.
    """
    few = Inputs(*(tensor[:1, :1] for tensor in (*inputs, inputs.grad_out)))
    kept = torch.ops.torch_flashplug.dropout_mask(seed, 1, 1, case.Sq, case.Sk, P)
    visible = None if mask is None else mask[:1, :1]
    rule = Masking(int(case.causal), visible, kept=kept, kept_share=dropout_reference.keep_probability(P))
    errors = measure_error(out[:1, :1], oracle(case, few, rule).out, plain(case, few, rule).out)
    return None if errors.ok else str(errors)


def _measure(bench: Bench, name: str, case: Case, direction: str, beside: masks.Pattern | None) -> None:
    grad = direction == "train"
    inputs = make_inputs(case, bench.device, requires_grad=grad)
    mask = None if beside is None else beside.make(case, bench.device)
    attend = functools.partial(F.scaled_dot_product_attention, *inputs, mask, dropout_p=P, is_causal=case.causal)

    def call() -> object:
        out = attend()
        return torch.autograd.grad(out, tuple(inputs), inputs.grad_out) if grad else out

    def wrong_of(peer: str) -> str | None:
        if peer not in OURS:  # a peer draws different random bits, so no answer is known
            return None
        torch.manual_seed(SEED)
        out = attend().detach()
        torch.manual_seed(SEED)
        seed = torch.empty((), dtype=torch.int64, device=bench.device).random_()
        return wrong_in(case, inputs, mask, out, seed)

    peers = [peer for peer in ("ours_fa3", "stock", "cudnn", "fa2", "efficient") if peer in bench.providers]
    with torch.set_grad_enabled(grad):
        candidates = {peer: Candidate(call, bench.providers[peer].scope) for peer in peers}
        timings, _, refused = time_calls(bench, name, candidates, wrong_of)
    facts = facts_of(case) | {"flop": case.flop * GRADIENT_FLOP.get(direction, 1.0), "dropout_p": P}
    facts |= {} if beside is None else {"mask": beside.name}
    bench.add(row_of(name, timings, **facts, grad=grad, refused=refused))
