"""CUDA graphs: calls before a capture, and replays of a captured call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


def call_on_side_stream(call: Callable[[], Result], times: int = 1) -> Result:
    """Make calls on a second stream, as torch requires before a capture, and return the last result."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(times):
            result = call()
    torch.cuda.current_stream().wait_stream(side)
    return result


def capture_graph(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return a function for replaying a captured call.

    Each replay returns the same output tensor, poisoned before the replay.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()

    def replay() -> Tensor:
        out.fill_(torch.nan)
        graph.replay()
        return out

    return replay
