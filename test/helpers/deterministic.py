"""Deterministic gradients: accumulation in a fixed order, as torch.use_deterministic_algorithms asks for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def deterministic_gradients(order: bool = True) -> Iterator[None]:
    torch.use_deterministic_algorithms(order)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
