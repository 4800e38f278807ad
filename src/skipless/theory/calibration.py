"""Calibrations beyond the paper's: unit norms with skips and MLPs, and attention that undoes the MLP's map."""

from collections.abc import Callable, Sequence

import numpy as np
from scipy.linalg import cholesky, solve_triangular

from skipless.theory import kernels
from skipless.theory.shapes import AttentionShape
from skipless.theory.tables import DenseShape, RescaledShape, non_negative

KernelMap = Callable[[np.ndarray], np.ndarray]


def check_options(name: str, skip_weight: float, length: int | None, mlp: KernelMap | None) -> None:
    """Each calibration has what it needs, and the name exists."""
    if name not in ("paper", "exact", "mlp-aware"):
        raise ValueError(f"calibration is {name!r}; it must be 'paper', 'exact' or 'mlp-aware'")
    if name == "exact" and length is None:
        raise ValueError("calibration='exact' propagates a T×T kernel once: say up to which length")
    if name == "mlp-aware" and mlp is None:
        raise ValueError("calibration='mlp-aware' needs mlp=, the MLP sub-block's map of a kernel")
    if name == "mlp-aware" and skip_weight:
        raise ValueError(
            f"calibration='mlp-aware' has no form with skips (skip_weight={skip_weight}): use calibration='exact', "
            "or skip_weight=0"
        )


def exact(
    shapes: Sequence[AttentionShape],
    repeat_rate: float,
    skip_weight: float,
    length: int,
    mlp: KernelMap | None = None,
) -> list[AttentionShape]:
    """The same softmaxes P with D = diag(P Σ̄ Pᵀ)^{−½}, Σ̄ the average kernel propagated so far.

    Every branch then has a unit diagonal, so normalised skips keep one too.
    Departs: App. F leaves the diagonal free; it reaches 11 at L=36, γ_L=.2, α=.98, T=512.
    """
    kernel = kernels.uniform(repeat_rate, length)
    calibrated: list[AttentionShape] = []
    for shape in shapes:
        weights = np.exp(shape.bias(length))
        branch = weights @ kernel @ weights.T
        scale = 1.0 / np.sqrt(np.diagonal(branch))
        calibrated.append(RescaledShape(shape, scale))
        kernel = skip_weight**2 * kernel + (1.0 - skip_weight**2) * (scale[:, None] * branch * scale[None, :])
        kernel = mlp(kernel) if mlp else kernel
    return calibrated


def mlp_aware(
    gammas: Sequence[float], repeat_rate: float, causal: bool, length: int, mlp: KernelMap
) -> list[AttentionShape]:
    """A_l = L_l L̂_{l−1}⁻¹, where L̂ factors the kernel that the MLP before block l left. Sec. 3.4.

    Departs: the paper ignores the MLP because A_l ≥ 0 is not guaranteed; here a negative entry is an error.
    With repeated tokens L_l factors the normalised average kernel, so that r = 0 is the paper's formula.
    """
    average = kernels.uniform(repeat_rate, length)
    before = average
    shapes: list[AttentionShape] = []
    for block, gamma in enumerate(gammas, start=1):
        factor = kernels.exponential_chol(gamma, length)
        target = kernels.cosine(factor @ average @ factor.T)
        matrix = _factor_ratio(target, before, causal)
        shapes.append(DenseShape(non_negative(matrix, f"calibration='mlp-aware' in block {block}"), causal))
        before = mlp(target)
    return shapes


def uniform_after(mlp: KernelMap, rho: float) -> float:
    """The uniform correlation that the MLP makes of ρ: a uniform kernel stays uniform."""
    return float(kernels.cosine(mlp(kernels.uniform(rho, 2)))[0, 1])


def _factor_ratio(target: np.ndarray, source: np.ndarray, causal: bool) -> np.ndarray:
    """L(target) L(source)⁻¹ with Cholesky factors, or symmetric roots for non-causal attention."""
    if causal:
        upper = cholesky(source), cholesky(target)
        return solve_triangular(upper[0], upper[1]).T
    return np.linalg.solve(kernels.symmetric_root(source), kernels.symmetric_root(target)).T
