"""Recorder of the attention calls of a program.

The recorder is a mode and observes F.sdpa from outside. So the program needs no change.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


@dataclass(slots=True)
class Call:
    """F.sdpa call: the tensors (views, not copies) and all remaining arguments."""

    q: Tensor
    k: Tensor
    v: Tensor
    kwargs: dict[str, object]

    @property
    def shape(self) -> dict[str, int]:
        (B, Hq, Sq, D), (Hkv, Sk), Dv = self.q.shape, self.k.shape[1:3], self.v.shape[-1]
        return {"B": B, "Hq": Hq, "Hkv": Hkv, "Sq": Sq, "Sk": Sk, "D": D, "Dv": Dv}

    @property
    def causal(self) -> bool:
        return bool(self.kwargs.get("is_causal", False))

    def run(self) -> Tensor:
        return F.scaled_dot_product_attention(self.q, self.k, self.v, **self.kwargs)


@dataclass(slots=True)
class CallGroup:
    """Group of calls with the same plan, different only in the number of keys."""

    first: Call
    last: Call
    plan: object  # the result of torch_flashplug.explain for the last call
    count: int = 1

    def label(self) -> str:
        s, keys = self.first.shape, sorted({self.first.shape["Sk"], self.last.shape["Sk"]})
        phase = "training" if self.first.q.requires_grad else "decode" if s["Sq"] == 1 else "prefill"
        num_sequences = f"{s['B']} sequences, " if s["B"] > 1 else ""
        num_keys = "..".join(map(str, keys))
        heads = f"{s['Hq']}/{s['Hkv']} heads" if s["Hq"] != s["Hkv"] else f"{s['Hq']} heads"
        return f"{phase}: {num_sequences}{heads}, {s['Sq']} x {num_keys}, D {s['D']}" + (
            ", causal" if self.first.causal else ""
        )


class Recorder(TorchFunctionMode):
    """Mode for recording every F.sdpa call inside the mode, before running the call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.calls.append(Call(*args[:3], dict(kwargs)))
        return func(*args, **kwargs)


class OutputRecorder(Recorder):
    """Recorder that also keeps the outputs of the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.outs: list[Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs)
        if func is F.scaled_dot_product_attention:
            self.outs.append(out)
        return out


def group_calls(calls: Iterable[Call], explain) -> list[CallGroup]:
    """Group calls by the plan and by all properties except the number of keys.

    Args:
        calls: the recorded calls.
        explain: a function returning the plan of a call from `(q, k, v, **kwargs)`.
    """
    groups: dict[tuple, CallGroup] = {}
    for call in calls:
        plan = explain(call.q, call.k, call.v, **call.kwargs)
        shape = {name: size for name, size in call.shape.items() if name != "Sk"}
        key = (tuple(shape.values()), call.causal, plan.backend, plan.kernel)
        if key in groups:
            groups[key].last, groups[key].plan = call, plan
            groups[key].count += 1
        else:
            groups[key] = CallGroup(call, call, plan)
    return list(groups.values())
