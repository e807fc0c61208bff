"""Calls with a forced number of splits, and what is planned for them."""

from __future__ import annotations

from torch_flashplug import sdpa_backend
from torch_flashplug.api.backend import DEVICES
from torch_flashplug.dispatch import bindings, table_structs
from torch_flashplug.registry.dtypes import ELEMENTS
from torch_flashplug.testing import Case

MOST = 255  # splits that a mode word holds
CAUSAL_TEXT = "num_splits=4, no kernel splits this call's keys (with is_causal none does); use num_splits=1"


def forced(num_splits: int, backend: str = "fa3") -> int:
    """Mode word of ours with that many splits; 0: as many as the gate says."""
    return sdpa_backend(backend, num_splits=num_splits).mode


def planned(
    case: Case, num_splits: int = 0, device: dict[str, int] = DEVICES["h100"], backend: str = "fa3", **facts: int
) -> dict:
    """The plan of a forced call; facts: of its operands (native.problem_facts())."""
    made = zip("qkv", ELEMENTS[case.dtype].operands)
    dtypes = {f"dtype_{operand}": table_structs.DTYPE_IDS[number] for operand, number in made}
    return bindings.plan(case.sizes() | dtypes | facts, device, forced(num_splits, backend))
