"""Depth schedules (App. C) and their adjustment for normalised skips (Sec. 3.4, App. F), without cancellation."""

import math
from typing import Literal

import numpy as np

from skipless.theory.exponential import ExponentialStep
from skipless.theory.feasibility import (
    check_correlation,
    check_decay_rate,
    check_depth,
    check_exponential_skip,
    check_skip_weight,
    check_uniform_skip,
)

UniformSchedule = Literal["linear", "geometric"]


def decay_rates(gamma_final: float, depth: int) -> np.ndarray:
    """γ_0 … γ_L with γ_0 = ∞ and a(γ_l) = a(γ_L)^{l/L}, so that A's diagonal λ is the same in every block. App. C."""
    tau = _tau(gamma_final, depth)
    level = np.arange(depth + 1, dtype=np.float64)
    kept = np.exp(-tau * level)  # a(γ_l)² = 1 − e^{−2γ_l}
    with np.errstate(divide="ignore"):
        return np.where(kept < 0.5, -0.5 * np.log1p(-kept), -0.5 * np.log(-np.expm1(-tau * level)))


def correlations(rho_final: float, depth: int, rho_initial: float, schedule: UniformSchedule) -> np.ndarray:
    """ρ_0 … ρ_L: linear in depth (App. C), or "geometric", where 1−ρ_l falls by the same factor in every block."""
    check_depth(depth)
    check_correlation("rho_initial", rho_initial)
    check_correlation("rho_final", rho_final)
    if rho_final <= rho_initial:
        raise ValueError(
            f"rho_final={rho_final} is not above the input's correlation {rho_initial} (the repeat rate); "
            f"correlations must rise with depth (Thm 1): use rho_final > {rho_initial}"
        )
    share = np.arange(depth + 1, dtype=np.float64) / depth
    if schedule == "linear":
        return rho_initial + share * (rho_final - rho_initial)
    if schedule == "geometric":
        fall = np.log1p(-rho_final) - np.log1p(-rho_initial)
        return -np.expm1(np.log1p(-rho_initial) + share * fall)
    raise ValueError(f"schedule is {schedule!r}; it must be 'linear' or 'geometric'")


def exponential_steps(gamma_final: float, depth: int, skip_weight: float = 0.0) -> list[ExponentialStep]:
    """One E-SPA step per block for the paper's schedule; with a normalised skip α, App. F's.

    With τ = −ln(a_L²)/L, t_l = e^{−τl} = a_l² and q_l² = 1 − t_l, a block that must lose the share
    s = (1−e^{−τ})/(1−α²) of what the skipless λ² leaves has 1−λ_α² = s and q_out² = q_in² + t_in s.
    """
    check_skip_weight(skip_weight)
    tau = _tau(gamma_final, depth)
    rates = decay_rates(gamma_final, depth)
    lost = -np.expm1(-tau) / (1.0 - skip_weight**2)  # 1 − λ_α²
    # λ_α², by whichever form loses fewer digits
    lam_squared = 1.0 - lost if tau < 1.0 else (np.exp(-tau) - skip_weight**2) / (1.0 - skip_weight**2)
    check_exponential_skip(float(lam_squared), gamma_final, depth, skip_weight)
    lam = np.sqrt(lam_squared) if skip_weight else np.exp(-0.5 * tau)
    steps = []
    for level in range(1, depth + 1):
        kept_in = np.exp(-tau * (level - 1))
        q_in = np.sqrt(-np.expm1(-tau * (level - 1)))
        q_out = np.sqrt(q_in**2 + kept_in * lost)
        gap = kept_in * lost / (q_out * (q_out + q_in))
        gamma_out = rates[level] if skip_weight == 0 else _decay_rate(kept_in * lam**2, q_out)
        steps.append(
            ExponentialStep(float(rates[level - 1]), float(gamma_out), float(gap), float(lost / (lam * (1 + lam))))
        )
    return steps


def uniform_steps(
    rho_final: float, depth: int, rho_initial: float, schedule: UniformSchedule, skip_weight: float = 0.0
) -> list[tuple[float, float]]:
    """(ρ_in, ρ_out) per block; with a normalised skip α, ρ_out is the residual branch's (ρ_l−α²ρ_{l−1})/(1−α²)."""
    check_skip_weight(skip_weight)
    rho = correlations(rho_final, depth, rho_initial, schedule)
    residual = rho[:-1] + np.diff(rho) / (1.0 - skip_weight**2)
    check_uniform_skip(float(residual.max()), rho_final, depth, skip_weight, rho_initial, schedule)
    return [(float(before), float(after)) for before, after in zip(rho[:-1], residual, strict=True)]


def _tau(gamma_final: float, depth: int) -> float:
    """τ = −ln(a(γ_L)²)/L: the rate at which a² falls per block."""
    check_depth(depth)
    check_decay_rate("gamma_final", gamma_final)
    if np.isinf(gamma_final):
        raise ValueError("gamma_final is ∞; attention would then be the identity in every block: use ValueSkipInit")
    lost = math.exp(-2.0 * gamma_final)  # 1−a², by whichever form loses no digits
    tau = -(math.log1p(-lost) if lost < 0.5 else math.log(-math.expm1(-2.0 * gamma_final))) / depth
    if not tau > 0.0:
        raise ValueError(
            f"gamma_final is {gamma_final:g}; from about 370 on attention is the identity in every block to rounding: "
            "use ValueSkipInit"
        )
    return tau


def _decay_rate(kept: float, q: float) -> float:
    """γ from a² = 1−e^{−2γ} and q = e^{−γ}, by whichever of the two loses no digits."""
    return float(-0.5 * np.log1p(-kept)) if kept < 0.5 else float(-np.log(q))
