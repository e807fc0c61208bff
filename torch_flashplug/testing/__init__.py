"""Named cases, the fp64 oracle, the error budget and the timer of tests, benchmarks and bug reports.

Product code never imports this folder. Most files import torch and the standard library only.

- `cases`: The named cases, and their inputs.
- `oracle`: Attention and gradients in fp64.
- `budget`: The error budget, and the comparison with the oracle.
- `timing`: Interleaved timing.
- `activations`: Operands distributed as in real models.
- `emulation_8bit`: The arithmetic of 8-bit kernels in fp64.
- `direct_launch`: The launch of one kernel by name, without the dispatcher.
- `interpreted`: Kernels that run on a CPU, for `check`, the demo and tests.
"""

from .budget import ErrorReport, assert_bitwise_equal, assert_lse, assert_within_budget, measure_error
from .cases import (
    CASES,
    ODD_CASES,
    WIDE_CASES,
    WIDE_GRADIENT_CASES,
    Case,
    Inputs,
    case_named,
    make_inputs,
    make_lookup,
    new_case,
)
from .direct_launch import DirectForward, load_pack
from .oracle import Masking, attention_math, bias_grad_math, grads_math, oracle, oracle_grads, plain, plain_grads
from .timing import Candidate, Timing, captured, event_time, paired_ratio, time_host, time_interleaved

__all__ = [
    "CASES", "Candidate", "Case", "DirectForward", "ErrorReport", "Inputs", "Masking", "ODD_CASES", "Timing",
    "WIDE_CASES",
    "WIDE_GRADIENT_CASES",
    "assert_bitwise_equal", "assert_lse", "assert_within_budget", "attention_math", "bias_grad_math", "captured",
    "case_named", "event_time", "grads_math", "load_pack", "make_inputs", "make_lookup", "measure_error", "new_case",
    "oracle", "oracle_grads", "paired_ratio", "plain", "plain_grads", "time_host", "time_interleaved",
]  # fmt: skip
