"""Energy of calls on a GPU, from the energy counter of NVML.

The counter advances in steps of some 10 ms, so a sample has many calls. The energy contains the idle power of the GPU.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from torch_flashplug.testing import Candidate, Timing

SAMPLE_MS = 1000.0  # time of the calls in a sample


@dataclass(frozen=True, slots=True)
class EnergyMeter:
    """Energy counter of a GPU."""

    nvml: object  # the module pynvml
    handle: object

    def joules(self) -> float:
        """Return the energy since the driver was loaded."""
        return self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.handle) * 1e-3


def open_meter(device: str) -> tuple[EnergyMeter | None, str]:
    """Return the meter of the current GPU, or None and the reason for a missing meter."""
    if not device.startswith("cuda"):
        return None, f"NVML measures GPUs only, and the device is {device}"
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
        meter = EnergyMeter(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
        meter.joules()
    # NVML has an exception class for each error, and the module may be missing: the results note the reason.
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
    return meter, ""


def energy_per_call(
    meter: EnergyMeter, candidates: Mapping[str, Candidate], timings: Mapping[str, Timing], rounds: int, device: str
) -> dict[str, float]:
    """Return the joules of a call of each candidate: the median over rounds, in alternating order.

    Args:
        meter: the energy counter.
        candidates: calls by name.
        timings: times of the calls, for the number of calls in a sample.
        rounds: number of samples for each candidate.
        device: device of the calls.
    """
    wait = torch.cuda.synchronize if device.startswith("cuda") else (lambda: None)
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for idx in range(rounds):
        for name in list(candidates)[:: 1 if idx % 2 else -1]:
            calls = max(1, round(SAMPLE_MS / timings[name].ms))
            with candidates[name].scope():
                candidates[name].call()
                wait()
                start = meter.joules()
                for _ in range(calls):
                    candidates[name].call()
                wait()
                samples[name].append((meter.joules() - start) / calls)
    return {name: statistics.median(values) for name, values in samples.items()}
