"""Error budget of a result, derived from the data and never set by hand.

    |result - fp64|  <=  factor * |plain low-precision torch - fp64|  +  one rounding    (largest element and RMS)

The factor is 2 for outputs and 3 for gradients. A gradient from a difference of fp32 sums (dS = P * (dP - delta)) has
an additional error: the last place of the sums. With one key, dS is exactly 0 and plain torch returns exactly 0, but
every flash-style backward returns the rounding of two equal sums. Special values are compared by position first. A
failure names the position, both values and the seed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

OUT_FACTOR, GRAD_FACTOR = 2.0, 3.0
FP32_EPS = 2.0**-23
# Tensor cores keep fp32 accumulators with a few bits less than IEEE fp32, and exp2 is approximate to 2 ulp. So an LSE
# has an error of about 2^-16 of the magnitude of the scores.
LSE_RELATIVE = 2.0**-16


def cancelled_sums(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad_out: torch.Tensor, scale: float | None):
    """Return the magnitudes of the fp32 sums with gradients as differences: 0-d tensors by name.

    dq = scale * dS K and dk = scale * dS^T Q, where dS is a difference of two sums with the bound |dO| |V|. The
    roundings of n terms add up like sqrt(n).
    """
    norms = [tensor.detach().float().norm(dim=-1).amax() for tensor in (grad_out, v)]
    sums = norms[0] * norms[1] * abs(q.shape[3] ** -0.5 if scale is None else scale)
    rows, keys = q.shape[2] * q.shape[1] / k.shape[1], k.shape[2]
    return {
        "dq": sums * keys**0.5 * k.detach().abs().amax(),
        "dk": sums * rows**0.5 * q.detach().abs().amax(),
        "dv": torch.zeros_like(sums),
    }


def cancelled_bias_sums(v: torch.Tensor, grad_out: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return the magnitude of the sums of a bias gradient: dS, summed over the dims broadcast by the bias."""
    norms = [tensor.detach().float().norm(dim=-1).amax() for tensor in (grad_out, v)]
    scores = grad_out.shape[:-1].numel() * v.shape[2]
    return norms[0] * norms[1] * (scores / bias.numel()) ** 0.5


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """Errors of a result and of plain torch against fp64, and the budgets of the result."""

    max: float
    rms: float
    plain_max: float
    plain_rms: float
    budget_max: float
    budget_rms: float

    @property
    def ok(self) -> bool:
        return self.max <= self.budget_max and self.rms <= self.budget_rms


def _rms(x: torch.Tensor) -> float:
    return math.sqrt(float(x.double().square().mean())) if x.numel() else 0.0


def _peak(x: torch.Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _difference(a: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return a - exact where both are finite, and 0 elsewhere."""
    return torch.where(torch.isfinite(exact) & torch.isfinite(a), a.double() - exact, 0.0)


def measure_error(
    got: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor, factor: float = OUT_FACTOR, cancelled: float = 0.0
) -> ErrorReport:
    """Measure the errors over the finite elements.

    Args:
        got: the result.
        exact: the fp64 result.
        plain: result of the same formula in the dtype of `got`.
        factor: permitted multiple of the error of `plain`.
        cancelled: magnitude of the fp32 sums with the result as difference.
    """
    rounding = torch.finfo(got.dtype).eps / 2
    finite = torch.where(torch.isfinite(exact), exact, 0.0)
    ours, yardstick = _difference(got, exact), _difference(plain, exact)
    peak, rms = _peak(yardstick), _rms(yardstick)
    return ErrorReport(
        max=_peak(ours), rms=_rms(ours), plain_max=peak, plain_rms=rms,
        budget_max=factor * peak + rounding * _peak(finite) + FP32_EPS * cancelled,
        budget_rms=factor * rms + rounding * _rms(finite) + FP32_EPS * cancelled,
    )  # fmt: skip


def _coordinate(flat_index: int, shape: torch.Size) -> tuple[int, ...]:
    at = []
    for size in reversed(shape):
        at.append(flat_index % size)
        flat_index //= size
    return tuple(reversed(at))


def _assert_special_values(label: str, got: torch.Tensor, exact: torch.Tensor) -> None:
    for kind, where in (("nan", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = where(got) ^ where(exact)
        if wrong.any():
            at = _coordinate(int(wrong.flatten().to(torch.uint8).argmax()), got.shape)
            raise AssertionError(
                f"{label}: {int(wrong.sum())} elements differ in {kind}; "
                f"first at {at}: got {got[at]!s}, fp64 has {exact[at]!s}"
            )


def assert_within_budget(
    label: str,
    got: torch.Tensor,
    exact: torch.Tensor,
    plain: torch.Tensor,
    *,
    factor: float = OUT_FACTOR,
    cancelled: float = 0.0,
    seed: int = 0,
) -> ErrorReport:
    """Assert that a result is within the error budget, and return the errors.

    Args:
        label: name of the case and of the compared tensor ("one_key out"). The message alone then reproduces a failure.
        got: the result.
        exact: the fp64 result.
        plain: result of the same formula in the dtype of `got`.
        factor: permitted multiple of the error of `plain`.
        cancelled: magnitude of the fp32 sums with the result as difference.
        seed: seed of the inputs, for the message.

    Raises:
        AssertionError: `got` exceeds the budget. The message has the worst coordinate, both values and the seed.
    """
    label = f"{label} (seed {seed})"
    if got.shape != exact.shape:
        raise AssertionError(f"{label}: shape {tuple(got.shape)}, expected {tuple(exact.shape)}")
    _assert_special_values(label, got, exact)
    report = measure_error(got, exact, plain, factor, cancelled)
    if not report.ok:
        error = _difference(got, exact).abs()
        at = _coordinate(int(error.flatten().argmax()), got.shape)
        over = int((error > report.budget_max).sum())
        raise AssertionError(
            f"{label}: max error {report.max:.3e} "
            f"(budget {report.budget_max:.3e}, plain torch {report.plain_max:.3e}), "
            f"RMS {report.rms:.3e} (budget {report.budget_rms:.3e}, plain torch {report.plain_rms:.3e}); "
            f"{over} of {got.numel()} elements over; "
            f"worst at {at}: got {float(got[at]):.6g}, fp64 {float(exact[at]):.6g}, plain torch {float(plain[at]):.6g}"
        )
    return report


def assert_lse(label: str, got: torch.Tensor, exact: torch.Tensor, plain32: torch.Tensor, *, seed: int = 0) -> None:
    """Assert that an LSE (B, Hq, Sq), fp32 with natural log, is within the error budget.

    The budget is twice the error of the fp32 formula, plus the precision loss of a tensor core's accumulator.
    """
    label = f"{label} lse (seed {seed})"
    if got.dtype != torch.float32 or not got.is_contiguous():
        raise AssertionError(f"{label}: LSE must be contiguous fp32, but got {got.dtype} with strides {got.stride()}.")
    if got.shape != exact.shape:
        raise AssertionError(f"{label}: shape {tuple(got.shape)}, expected {tuple(exact.shape)}")
    _assert_special_values(label, got, exact)
    error, yardstick = _difference(got, exact).abs(), _difference(plain32, exact).abs()
    budget = OUT_FACTOR * _peak(yardstick) + LSE_RELATIVE * (
        1.0 + _peak(torch.where(torch.isfinite(exact), exact, 0.0))
    )
    if _peak(error) > budget:
        at = _coordinate(int(error.flatten().argmax()), got.shape)
        raise AssertionError(
            f"{label}: error {_peak(error):.3e} > {budget:.3e} at {at}: "
            f"got {float(got[at]):.7g}, fp64 {float(exact[at]):.7g}"
        )


def assert_of_sinks(
    label: str, got: torch.Tensor, exact: torch.Tensor, shares: torch.Tensor, out: torch.Tensor, grad_out: torch.Tensor
) -> None:
    """Assert that the gradients (Hq,) of sinks are within the error budget.

    A gradient is -sum of share * (rowsum(dO O) - dLSE) over rows. The budget is the error of the sum by rounding O to
    the dtype of O. The terms of the sum are independent.

    Args:
        label: name of the case and of the compared tensor.
        got: gradients (Hq,) of the sinks.
        exact: gradients (Hq,) in fp64.
        shares: exp(sink - LSE), (B, Hq, Sq).
        out: output O in fp64.
        grad_out: gradient of the output; the dtype determines the rounding.
    """
    rounding = torch.finfo(grad_out.dtype).eps / 2
    terms = shares.double().unsqueeze(-1) * grad_out.double() * out.double()
    sums = terms.square().sum((0, 2, 3)).sqrt(), terms.abs().sum((0, 2, 3)) + exact.abs()
    budget = 4 * rounding * sums[0] + 16 * FP32_EPS * sums[1] + 1e-6
    error = _difference(got, exact).abs()
    if bool((error > budget).any()):
        raise AssertionError(f"{label}: errors {error.tolist()} > {budget.tolist()}: {got.tolist()}, {exact.tolist()}")


def assert_dropped_alike(out: torch.Tensor, grad_out: torch.Tensor, dv: torch.Tensor, v: torch.Tensor) -> None:
    """Assert that a backward drops the same probabilities as the forward.

    The output is linear in the values, so <dV, V> = <O, dO> for every batch and key head. Each term is rounded to the
    dtype of `v`, and the roundings of n terms add up like sqrt(n). The standard deviation is a quarter of the
    tolerance. A tile with different dropout bits changes the sums by the contents of the tile, with random signs. The
    check detects most such tiles where tiles are few, and fewer the more tiles there are.
    """
    of_values, of_output = dv.detach().double() * v.detach().double(), out.detach().double() * grad_out.double()
    B, Hkv = v.shape[:2]
    terms = [
        product.reshape(B, Hkv, -1) for product in (of_values, of_output)
    ]  # query heads of a key head are adjacent
    allowed = 1.5 * torch.finfo(v.dtype).eps * sum(term.square().sum(-1) for term in terms).sqrt()
    apart = (terms[0].sum(-1) - terms[1].sum(-1)).abs()
    if not bool((apart <= allowed).all()):  # NaN fails the comparison
        worst = int((apart - allowed).flatten().nan_to_num(math.inf).argmax())
        sums = [float(term.sum(-1).flatten()[worst]) for term in terms]
        raise AssertionError(
            f"batch {worst // Hkv}, key head {worst % Hkv}: <dV, V> is {sums[0]:.6g} and <O, dO> is {sums[1]:.6g}; the "
            f"difference is {float(apart.flatten()[worst]):.3g}, the tolerance {float(allowed.flatten()[worst]):.3g}"
        )


def assert_bitwise_equal(label: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that two tensors are equal bit for bit, with NaN equal to NaN."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        raise AssertionError(
            f"{label}: {tuple(got.shape)} {got.dtype}, expected {tuple(expected.shape)} {expected.dtype}"
        )
    same = (got == expected) | (torch.isnan(got) & torch.isnan(expected))
    if not bool(same.all()):
        at = _coordinate(int((~same).flatten().to(torch.uint8).argmax()), got.shape)
        raise AssertionError(
            f"{label}: {int((~same).sum())} of {got.numel()} elements differ; "
            f"first at {at}: got {got[at]!s}, expected {expected[at]!s}"
        )
