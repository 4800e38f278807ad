"""E-SPA in closed form: attention that carries Σ(γ) to Σ(γ'), at any length, without cancellation.

With q = e^{−γ}, Δ = γ−γ' ≥ 0, λ = a(γ')/a(γ) and E_ij = e^{−γ'(i−j)} for i ≥ j, Theorem 3 of He et al. 2023 is

    A = L(γ') L(γ)⁻¹ = λ [ (1−e^{−Δ}) E + e^{−Δ} I + (1/λ−1) E e₀e₀ᵀ ],

three non-negative terms: a moving average, a self-connection and a boost of location 0. Locations are 0-based.

The schedule of App. C, and with skips that of App. F, says which step each block of a network takes.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from skipless.theory.feasibility import (
    check_decay_rate,
    check_depth,
    check_exponential_skip,
    check_gamma_final,
    check_skip_weight,
    check_step_skip,
)

# e^{−40} is 4e-18, below float64's resolution of 1: after 40/γ locations every sequence below has converged.
_CONVERGED = 40.0


@dataclass(frozen=True)
class ExponentialStep:
    """The four scalars of one E-SPA block, each accurate to rounding however small the step.

    gap is 1−e^{−Δ} and excess is 1/λ−1: both vanish with the step, so they are never formed by subtraction.
    """

    gamma_in: float
    gamma_out: float
    gap: float
    excess: float

    @classmethod
    def between(cls, gamma_in: float, gamma_out: float) -> "ExponentialStep":
        """The step from any γ_in (∞ allowed) down to γ_out < γ_in."""
        check_decay_rate("gamma_in", gamma_in)
        check_decay_rate("gamma_out", gamma_out)
        if gamma_out > gamma_in:
            raise ValueError(
                f"gamma_out={gamma_out} exceeds gamma_in={gamma_in}; decay rates must fall with depth for attention "
                f"to be non-negative (Thm 2): use gamma_out < {gamma_in}"
            )
        if gamma_out == gamma_in:
            raise ValueError(
                f"gamma_in and gamma_out are both {gamma_in}; attention is then the identity, which a softmax reaches "
                f"only by saturating: use gamma_out < {gamma_in}, or ValueSkipInit for identity attention"
            )
        delta = gamma_in - gamma_out
        lam = np.sqrt(np.expm1(-2.0 * gamma_out) / np.expm1(-2.0 * gamma_in))
        lost = np.exp(-2.0 * gamma_out) * np.expm1(-2.0 * delta) / np.expm1(-2.0 * gamma_in)  # 1−λ²
        return cls(gamma_in, gamma_out, float(-np.expm1(-delta)), float(lost / (lam * (1.0 + lam))))

    @property
    def lam(self) -> float:
        """λ = a(γ')/a(γ), the diagonal of A from location 1 on. App. C, App. F."""
        return 1.0 / (1.0 + self.excess)


def mean_diagonal(gamma: float, repeat_rate: float, length: int) -> np.ndarray:
    """D̄ = diag(L Σ̄_0 Lᵀ), Σ̄_0 = (1−r)I + r11ᵀ: the mean squared norm per location. App. B.

    D̄_n = 1 + r (m_n−1)(m_n+1), where m = L1, m_n = 1 + (M−1)(1−e^{−γn}), M² = coth(γ/2).
    """
    n = np.arange(length, dtype=np.float64)
    if repeat_rate == 0.0 or np.isinf(gamma):
        return np.ones(length)
    rise = _rise(gamma) * -np.expm1(-gamma * n)  # m_n − 1
    return 1.0 + repeat_rate * rise * (rise + 2.0)


def row_sums(step: ExponentialStep, repeat_rate: float, length: int) -> np.ndarray:
    """D, the row sums of A = D̄_out^{−½} L(γ')L(γ)⁻¹ D̄_in^{½}, by one O(T) filter of positive terms.

    y_0 = 1, y_n = e^{−γ'} y_{n−1} + λ [(g_n−g_{n−1}) + (1−e^{−γ}) g_{n−1}], g = √D̄_in;  D = y / √D̄_out.
    """
    root_in = np.sqrt(mean_diagonal(step.gamma_in, repeat_rate, length))
    growth = _mean_diagonal_increments(step.gamma_in, repeat_rate, length) / (root_in[1:] + root_in[:-1])
    drive = np.ones(length)
    drive[1:] = step.lam * (growth - np.expm1(-step.gamma_in) * root_in[:-1])
    filtered = _decaying_sum(drive.tolist(), float(np.exp(-step.gamma_out)))
    return filtered / np.sqrt(mean_diagonal(step.gamma_out, repeat_rate, length))


def log_columns(step: ExponentialStep, repeat_rate: float, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(column, diagonal) of the bias, up to a constant per row: B_ij = −γ'(i−j) + column_j, B_ii = diagonal_i.

    diagonal = ½ log D̄_in; column = diagonal + log(1−e^{−Δ}), and + log(1−e^{−Δ} + 1/λ−1) for location 0, which stands
    for all that came before it.
    """
    diagonal = 0.5 * np.log(mean_diagonal(step.gamma_in, repeat_rate, length))
    column = diagonal + np.log(step.gap)
    column[0] = diagonal[0] + np.log(step.gap + step.excess)
    return column, diagonal


def attention(step: ExponentialStep, repeat_rate: float, length: int) -> np.ndarray:
    """The dense A = D̄_out^{−½} L(γ')L(γ)⁻¹ D̄_in^{½}: Theorem 3 with App. B's correction. An oracle, O(T²)."""
    distance = np.subtract.outer(np.arange(length), np.arange(length)).astype(np.float64)
    decay = np.tril(np.exp(-step.gamma_out * np.abs(distance)))
    dense = step.gap * decay + (1.0 - step.gap) * np.eye(length)
    dense[:, 0] += step.excess * decay[:, 0]
    root_in, root_out = (np.sqrt(mean_diagonal(g, repeat_rate, length)) for g in (step.gamma_in, step.gamma_out))
    return step.lam * dense * root_in[None, :] / root_out[:, None]


def converged_length(step: ExponentialStep) -> int:
    """The number of locations after which column, diagonal and row sums are constant to float64 rounding."""
    return int(np.ceil(_CONVERGED / step.gamma_out)) + 2


def _rise(gamma: float) -> float:
    """M − 1 with M² − 1 = 2e^{−γ}/(1−e^{−γ}), so that for large γ nothing is subtracted, and nothing overflows."""
    square = 2.0 * np.exp(-gamma) / -np.expm1(-gamma)
    return float(square / (1.0 + np.sqrt(1.0 + square)))


def _mean_diagonal_increments(gamma: float, repeat_rate: float, length: int) -> np.ndarray:
    """D̄_n − D̄_{n−1} = r (m_n−m_{n−1})(m_n+m_{n−1}) for n = 1 … T−1, each factor a positive closed form."""
    if repeat_rate == 0.0 or np.isinf(gamma):
        return np.zeros(length - 1)
    n = np.arange(length, dtype=np.float64)
    m = 1.0 + _rise(gamma) * -np.expm1(-gamma * n)
    step = _rise(gamma) * np.exp(-gamma * n[:-1]) * -np.expm1(-gamma)
    return repeat_rate * step * (m[1:] + m[:-1])


def _decaying_sum(drive: Iterable[float], decay: float) -> np.ndarray:
    """y_0 = x_0, y_n = x_n + decay·y_{n−1}: a first-order filter, as scipy.signal's, which is slow to import."""
    return np.array(list(accumulate(drive, lambda y, x: x + decay * y)))


def exponential_steps(gamma_final: float, depth: int, skip_weight: float = 0.0) -> list[ExponentialStep]:
    """One E-SPA step per block for the paper's schedule; with a normalised skip α, App. F's.

    With τ = −ln(a_L²)/L, t_l = a_l² = e^{−τl} and q_l² = 1 − t_l, every block takes t to e^{−τ}t. The skip, of weight
    α², leaves t as it is, so the branch must lose the share s = (1−e^{−τ})/(1−α²) of it: 1−λ_α² = s, and
    q_out² = q_in² + t_in s.
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


def steps_through(gammas: Sequence[float], skip_weight: float = 0.0) -> list[ExponentialStep]:
    """One E-SPA step per block through γ_1 … γ_L, from γ_0 = ∞; with a normalised skip α, by App. F's rule in each.

    A block from t = a(γ)² to t' = a(γ')² loses 1−λ_α² = s = (1−t'/t)/(1−α²) in its branch, and q_out² = q_in² + t s.
    """
    check_skip_weight(skip_weight)
    steps = []
    for block, (before, after) in enumerate(zip((math.inf, *gammas), gammas, strict=False)):
        step = ExponentialStep.between(before, after)
        if skip_weight:
            kept_in, q_in = -math.expm1(-2.0 * before), math.exp(-before)
            lost = step.excess * (1.0 + step.lam) * step.lam / (1.0 - skip_weight**2)
            bound = -0.5 * math.log1p(-(skip_weight**2) * kept_in)
            check_step_skip("gammas", block, after, lost, skip_weight, bound)
            lam, q_out = math.sqrt(1.0 - lost), math.sqrt(q_in**2 + kept_in * lost)
            gap = kept_in * lost / (q_out * (q_out + q_in))
            step = ExponentialStep(before, _decay_rate(kept_in * lam**2, q_out), gap, lost / (lam * (1.0 + lam)))
        steps.append(step)
    return steps


def decay_rates(gamma_final: float, depth: int) -> np.ndarray:
    """γ_0 … γ_L with γ_0 = ∞ and a(γ_l) = a(γ_L)^{l/L}, so that A's diagonal λ is the same in every block. App. C."""
    tau = _tau(gamma_final, depth)
    level = np.arange(depth + 1, dtype=np.float64)
    kept = np.exp(-tau * level)  # a(γ_l)² = 1 − e^{−2γ_l}
    with np.errstate(divide="ignore"):
        return np.where(kept < 0.5, -0.5 * np.log1p(-kept), -0.5 * np.log(-np.expm1(-tau * level)))


def _tau(gamma_final: float, depth: int) -> float:
    """τ = −ln(a(γ_L)²)/L: the rate at which a² falls per block."""
    check_depth(depth)
    check_gamma_final(gamma_final)
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
