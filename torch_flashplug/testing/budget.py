"""Is a result right? The error budget, derived from the data and never set by hand.

    |ours - fp64|  <=  factor * |plain low-precision torch - fp64|  +  one rounding        (largest element and RMS)

factor is 2 for outputs and 3 for gradients. A gradient that is a difference of fp32 sums (dS = P * (dP - delta)) may
also be off by the last place of those sums: with one key dS is exactly 0, plain torch finds exactly 0, and every
flash-style backward finds the rounding of two equal sums. Special values are compared by position first. A failure says
where, both values and the seed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

OUT_FACTOR, GRAD_FACTOR = 2.0, 3.0
FP32_EPS = 2.0**-23
# Tensor cores keep fp32 accumulators with a few bits less than IEEE fp32 and exp2 is approximate to 2 ulp: an LSE is
# good to about 2^-16 of the scores' size.
LSE_RELATIVE = 2.0**-16


def cancelled_sums(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad_out: torch.Tensor, scale: float | None):
    """Sizes of the fp32 sums whose differences gradients are made of, by name, 0-d tensors: dq = scale * dS K and
    dk = scale * dS^T Q, where dS is a difference of two sums that |dO| |V| bounds. Roundings of n terms add up like
    sqrt(n).
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
    """The same of a bias's gradient: dS, summed over what the bias is broadcast to."""
    norms = [tensor.detach().float().norm(dim=-1).amax() for tensor in (grad_out, v)]
    scores = grad_out.shape[:-1].numel() * v.shape[2]
    return norms[0] * norms[1] * (scores / bias.numel()) ** 0.5


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """Errors against fp64 of a result and of the yardstick, and the budgets that follow."""

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
    """a - exact where both are finite, 0 elsewhere."""
    return torch.where(torch.isfinite(exact) & torch.isfinite(a), a.double() - exact, 0.0)


def measure_error(
    got: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor, factor: float = OUT_FACTOR, cancelled: float = 0.0
) -> ErrorReport:
    """Errors over the finite elements; `exact` is fp64, `plain` the same formula in the dtype of `got`, `cancelled` the
    size of the fp32 sums whose difference the result is made of.
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
                f"first at {at}: got {got[at]!s}, fp64 says {exact[at]!s}"
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
    """Raises AssertionError with the worst coordinate, both values and the seed when `got` leaves the budget; else
    returns the errors.

    label is a case name with what is compared ("one_key out"), so that the message alone reproduces the failure.
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
    """LSE (B, Hq, Sq) fp32 natural log: 2 x the fp32 formula's error plus what a tensor core's accumulator may lose."""
    label = f"{label} lse (seed {seed})"
    if got.dtype != torch.float32 or not got.is_contiguous():
        raise AssertionError(f"{label}: must be contiguous fp32, is {got.dtype} with strides {got.stride()}")
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
    """Gradients (Hq,) of sinks, -sum of share * (rowsum(dO O) - dLSE) over rows: off by what rounding O to its dtype
    moves that sum by, whose terms are independent. shares (B, Hq, Sq): exp(sink - LSE); out: fp64's.
    """
    rounding = torch.finfo(grad_out.dtype).eps / 2
    terms = shares.double().unsqueeze(-1) * grad_out.double() * out.double()
    sums = terms.square().sum((0, 2, 3)).sqrt(), terms.abs().sum((0, 2, 3)) + exact.abs()
    budget = 4 * rounding * sums[0] + 16 * FP32_EPS * sums[1] + 1e-6
    error = _difference(got, exact).abs()
    if bool((error > budget).any()):
        raise AssertionError(f"{label}: errors {error.tolist()} > {budget.tolist()}: {got.tolist()}, {exact.tolist()}")


def assert_dropped_alike(out: torch.Tensor, grad_out: torch.Tensor, dv: torch.Tensor, v: torch.Tensor) -> None:
    """A backward that drops what its forward did: the output is linear in the values, so <dV, V> = <O, dO>, for every
    batch and key head by itself. Each term is rounded to `v`'s dtype, and the roundings of n terms add up like sqrt(n):
    their standard deviation is a quarter of what is allowed. One tile of other bits moves the sums by what it holds, of
    random signs: most draws of it are seen where tiles are few, and fewer the more there are.
    """
    of_values, of_output = dv.detach().double() * v.detach().double(), out.detach().double() * grad_out.double()
    B, Hkv = v.shape[:2]
    terms = [product.reshape(B, Hkv, -1) for product in (of_values, of_output)]  # query heads of a key head: neighbours
    allowed = 1.5 * torch.finfo(v.dtype).eps * sum(term.square().sum(-1) for term in terms).sqrt()
    apart = (terms[0].sum(-1) - terms[1].sum(-1)).abs()
    if not bool((apart <= allowed).all()):  # NaN is not alike
        worst = int((apart - allowed).flatten().nan_to_num(math.inf).argmax())
        sums = [float(term.sum(-1).flatten()[worst]) for term in terms]
        raise AssertionError(
            f"batch {worst // Hkv}, key head {worst % Hkv}: <dV, V> is {sums[0]:.6g}, <O, dO> {sums[1]:.6g}: apart by "
            f"{float(apart.flatten()[worst]):.3g}, allowed {float(allowed.flatten()[worst]):.3g}"
        )


def assert_bitwise_equal(label: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit for bit, NaN equal to NaN."""
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
