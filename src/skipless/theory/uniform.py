"""U-SPA in O(T): attention that carries Σ(ρ) to Σ(ρ'), as two non-negative vectors and a diagonal.

With x = ρ, y = ρ', P_n = 1+nx, Q_n = 1+ny, κ = √((1−y)/(1−x)), the matrix A = L(y) L(x)⁻¹ of Theorem 1 is

    A_ij = U_j + W_i  (i > j),     A_nn = κ √(Q_n P_{n−1} / (P_n Q_{n−1})).

U and W vanish as n → ∞ and fall by positive steps, so both are sums of positive terms (which proves Theorem 1):

    U_n − U_{n+1} = κ y / √(P_n Q_n) · [ √(P_{n−1}/Q_{n−1}) − √(P_{n+1}/Q_{n+1}) ],
    W_n − W_{n+1} = κ x / √(P_n Q_n) · [ √(Q_{n+1}/P_{n+1}) − √(Q_{n−1}/P_{n−1}) ],

and each bracket is 2(y−x) over positive factors because P_{n−1}Q_{n+1} − P_{n+1}Q_{n−1} = 2(y−x).
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from skipless.theory.feasibility import (
    check_correlation,
    check_depth,
    check_skip_weight,
    check_step_skip,
    check_uniform_skip,
)

UniformSchedule = Literal["linear", "quadratic", "geometric"]
# From this location on the elementary tail below is accurate to 1e-12; sums run down from here.
_TAIL_START = 16384
# Below this ρ_in, W/U ≤ n ρ_in is nothing beside U's rounding at any length, and 1/ρ_in would overflow.
_NO_CORRELATION = 1e-60


def check_step(rho_in: float, rho_out: float) -> None:
    """Correlations must rise with depth (Thm 1), and strictly, for attention not to be the identity."""
    check_correlation("rho_in", rho_in)
    check_correlation("rho_out", rho_out)
    if rho_out < rho_in:
        raise ValueError(
            f"rho_out={rho_out} is below rho_in={rho_in}; correlations must rise with depth for attention to be "
            f"non-negative (Thm 1): use rho_out > {rho_in}"
        )
    if rho_out == rho_in:
        raise ValueError(
            f"rho_in and rho_out are both {rho_in}; attention is then the identity, which a softmax reaches only by "
            f"saturating: use rho_out > {rho_in}, or ValueSkipInit for identity attention"
        )


def factors(rho_in: float, rho_out: float, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(U, W, diagonal) of A for locations 0 … T−1. W is all zero when ρ_in is 0 (to any precision)."""
    kappa = np.sqrt((1.0 - rho_out) / (1.0 - rho_in))
    n = np.arange(length, dtype=np.float64)
    p, q = _pivots(rho_in, n), _pivots(rho_out, n)
    p_before, q_before = _pivots(rho_in, n - 1), _pivots(rho_out, n - 1)
    diagonal = kappa * np.sqrt(q * p_before / (p * q_before))
    if rho_in < _NO_CORRELATION:
        column = rho_out * np.sqrt((1.0 - rho_out) / (q * q_before))
        return column, np.zeros(length), diagonal
    end = max(length, _TAIL_START)
    column_steps, row_steps = _steps(rho_in, rho_out, np.arange(end, dtype=np.float64))
    column_tail, row_tail = _tails(rho_in, rho_out, float(end))
    column = kappa * _sum_from(column_steps, column_tail)[:length]
    row = kappa * _sum_from(row_steps, row_tail)[:length]
    return column, row, diagonal


def row_sums(column: np.ndarray, row: np.ndarray, diagonal: np.ndarray) -> np.ndarray:
    """D_n = Σ_{j<n} U_j + n W_n + A_nn."""
    before = np.concatenate([[0.0], np.cumsum(column)[:-1]])
    return before + np.arange(len(row)) * row + diagonal


def attention(rho_in: float, rho_out: float, length: int) -> np.ndarray:
    """The dense A = L(ρ')L(ρ)⁻¹ of Theorem 1. An oracle, O(T²)."""
    column, row, diagonal = factors(rho_in, rho_out, length)
    dense = np.tril(np.add.outer(row, column), k=-1)
    np.fill_diagonal(dense, diagonal)
    return dense


def symmetric_factors(rho_in: float, rho_out: float, length: int) -> tuple[float, float]:
    """(κ, b) of the non-causal A = κ I + b 11ᵀ = Σ(ρ')^{½} Σ(ρ)^{−½}. App. A.

    b = (y−x) / [(1−x)(1+(T−1)x)(μ+κ)] with μ = √((1+(T−1)y)/(1+(T−1)x)), which is also every row's sum.
    """
    kappa = np.sqrt((1.0 - rho_out) / (1.0 - rho_in))
    mu = symmetric_row_sum(rho_in, rho_out, length)
    spread = (rho_out - rho_in) / ((1.0 - rho_in) * _pivots(rho_in, length - 1) * (mu + kappa))
    return float(kappa), float(spread)


def symmetric_row_sum(rho_in: float, rho_out: float, length: int) -> float:
    """μ = √((1+(T−1)ρ') / (1+(T−1)ρ)), the row sum of the non-causal A."""
    return float(np.sqrt(_pivots(rho_out, length - 1) / _pivots(rho_in, length - 1)))


def _pivots(rho: float, n):
    return 1.0 + n * rho


def _steps(x: float, y: float, n: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(U_n − U_{n+1}, W_n − W_{n+1}) / κ."""
    p, q = _pivots(x, n), _pivots(y, n)
    p0, q0, p1, q1 = _pivots(x, n - 1), _pivots(y, n - 1), _pivots(x, n + 1), _pivots(y, n + 1)
    shared = 2.0 * (y - x) / np.sqrt(p * q)
    column = y * shared / (q0 * q1 * (np.sqrt(p0 / q0) + np.sqrt(p1 / q1)))
    row = x * shared / (p0 * p1 * (np.sqrt(q0 / p0) + np.sqrt(q1 / p1)))
    return column, row


def _tails(x: float, y: float, n: float) -> tuple[float, float]:
    """(U_n, W_n) / κ for large n in elementary form: the sums become integrals of 1/√quartic, here expanded."""
    d = (y - x) / (x * y)
    u = n + 1.0 / y
    w = u - 1.0
    e = 1.0 / ((1.0 + u / d) * w)
    half = e / (1.0 + np.sqrt(1.0 + e))
    column = (half + _log_defect(d / u)) / u
    row = (d / w - (1.0 + d / w) * _log_defect(d / w) - half) / (w + d)
    return column, row


def _log_defect(z: float) -> float:
    """1 − log(1+z)/z, by its series z/2 − z²/3 + … where the difference would cancel."""
    if z > 0.03:
        return 1.0 - np.log1p(z) / z
    k = np.arange(1, 12)
    return float(np.sum(-((-z) ** k) / (k + 1)))


def _sum_from(steps: np.ndarray, tail: float) -> np.ndarray:
    """tail + Σ_{m≥n} steps_m for every n, smallest terms first."""
    return np.cumsum(np.concatenate([[tail], steps[::-1]]))[:0:-1]


def uniform_steps(
    rho_final: float, depth: int, rho_initial: float, schedule: UniformSchedule, skip_weight: float = 0.0
) -> list[tuple[float, float]]:
    """(ρ_in, ρ_out) per block; with a normalised skip α, ρ_out is the residual branch's (ρ_l−α²ρ_{l−1})/(1−α²)."""
    check_skip_weight(skip_weight)
    rho = correlations(rho_final, depth, rho_initial, schedule)
    residual = rho[:-1] + np.diff(rho) / (1.0 - skip_weight**2)
    check_uniform_skip(float(residual.max()), rho_final, depth, skip_weight, rho_initial, schedule)
    return [(float(before), float(after)) for before, after in zip(rho[:-1], residual, strict=True)]


def steps_through(rhos: Sequence[float], rho_initial: float, skip_weight: float = 0.0) -> list[tuple[float, float]]:
    """(ρ_in, ρ_out) per block through ρ_1 … ρ_L; with a normalised skip α, ρ_out is the residual branch's."""
    check_skip_weight(skip_weight)
    steps = []
    for block, (before, after) in enumerate(zip((rho_initial, *rhos), rhos, strict=False)):
        residual = before + (after - before) / (1.0 - skip_weight**2)
        check_step_skip("rhos", block, after, residual, skip_weight, 1.0 - skip_weight**2 * (1.0 - before))
        steps.append((before, residual))
    return steps


def correlations(rho_final: float, depth: int, rho_initial: float, schedule: UniformSchedule) -> np.ndarray:
    """ρ_0 … ρ_L: linear in depth (App. C), rising with its square, or "geometric": 1−ρ_l falls by the same factor."""
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
    if schedule == "quadratic":
        return rho_initial + share**2 * (rho_final - rho_initial)
    if schedule == "geometric":
        fall = np.log1p(-rho_final) - np.log1p(-rho_initial)
        return -np.expm1(np.log1p(-rho_initial) + share * fall)
    raise ValueError(f"schedule is {schedule!r}; it must be 'linear', 'quadratic' or 'geometric'")
