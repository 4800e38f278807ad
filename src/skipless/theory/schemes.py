"""The four ways to initialise attention: each turns (depth, skip weight) into one AttentionShape per block.

A scheme is a frozen value with only the fields that mean something for it. Nothing here knows width or heads,
except ALiBi, whose slopes are per head.

Calibrations beyond the paper's, at the end, propagate a kernel once to see what the MLPs leave of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import scipy

from skipless.schema import check_own
from skipless.theory import kernels
from skipless.theory.exponential import check_gamma_final, exponential_steps
from skipless.theory.feasibility import check_correlation, check_depth, check_repeat_rate
from skipless.theory.shapes import (
    AlibiShape,
    AttentionShape,
    DenseShape,
    ExponentialShape,
    IdentityShape,
    PlainShape,
    RescaledShape,
    SymmetricExponentialShape,
    SymmetricUniformShape,
    UniformShape,
    non_negative,
)
from skipless.theory.uniform import UniformSchedule, uniform_steps

KernelMap = Callable[[np.ndarray], np.ndarray]
Calibration = Literal["paper", "exact", "mlp-aware"]


@dataclass(frozen=True)
class StandardAttention:
    """Softmax attention as everyone uses it: a running average at zero logits; with alibi_heads, ALiBi's biases."""

    alibi_heads: int = 0

    def __post_init__(self):
        check_own(self)
        if self.alibi_heads < 0:
            raise ValueError(f"alibi_heads is {self.alibi_heads}; it must be at least 0, which means no ALiBi")

    def shapes(self, depth: int, skip_weight: float = 0.0, causal: bool = True) -> list[AttentionShape]:
        """The same shape in every block, whatever the skips."""
        shape = AlibiShape(self.alibi_heads, causal) if self.alibi_heads else PlainShape(causal)
        return [shape] * check_depth(depth)


@dataclass(frozen=True)
class ValueSkipInit:
    """Attn = (αI + βA)V with trainable α = 1, β = 0 at initialisation: identity attention. Sec. 3.1.

    per_head gives every head its own α and β.
    """

    per_head: bool = False

    def __post_init__(self):
        check_own(self)

    def shapes(self, depth: int, skip_weight: float = 0.0, causal: bool = True) -> list[AttentionShape]:
        """The identity in every block, whatever the skips."""
        return [IdentityShape(causal)] * check_depth(depth)


@dataclass(frozen=True)
class UniformSPA:
    """U-SPA: kernels with off-diagonals ρ_0 = r rising to ρ_L. Sec. 3.2, App. B, C.

    calibration: "paper" ignores the MLPs; "exact" rescales each location so that the average kernel keeps a unit
    diagonal (needs length); "mlp-aware" starts each block from what the MLP left, where that stays non-negative.
    """

    rho_final: float = 0.8
    repeat_rate: float = 0.0
    schedule: UniformSchedule = "linear"
    calibration: Calibration = "paper"

    def __post_init__(self):
        check_own(self)
        check_correlation("rho_final", self.rho_final)
        check_repeat_rate(self.repeat_rate)

    def shapes(
        self,
        depth: int,
        skip_weight: float = 0.0,
        causal: bool = True,
        *,
        length: int | None = None,
        mlp: KernelMap | None = None,
        normalised: bool = False,
    ) -> list[AttentionShape]:
        """One shape per block. mlp maps a kernel through the MLP sub-block; length is where "exact" calibrates.

        normalised says that a norm stands before attention, which calibrations beyond the paper's take into account.
        """
        check_repeat_rate(self.repeat_rate)
        check_calibration(self.calibration, skip_weight)
        entering = (kernels.cosine,) if normalised else ()
        kind = UniformShape if causal else SymmetricUniformShape
        steps = uniform_steps(self.rho_final, depth, self.repeat_rate, self.schedule, skip_weight)
        if self.calibration == "mlp-aware":
            steps = uniform_aware(steps, need_mlp(mlp))
        shapes: list[AttentionShape] = [kind(before, after) for before, after in steps]
        if self.calibration == "exact":
            limit = need_length(length, "exact")
            return exact(shapes, self.repeat_rate, skip_weight, limit, mlp, *entering)
        return shapes


@dataclass(frozen=True)
class ExponentialSPA:
    """E-SPA, the paper's main method: kernels exp(−γ_l|i−j|) with γ falling from ∞ to γ_L. Sec. 3.2, App. B, C, F.

    calibration as in UniformSPA; "mlp-aware" is a T×T table for E-SPA and needs length.
    """

    gamma_final: float = 0.005
    repeat_rate: float = 0.0
    calibration: Calibration = "paper"

    def __post_init__(self):
        check_own(self)
        check_gamma_final(self.gamma_final)
        check_repeat_rate(self.repeat_rate)

    def shapes(
        self,
        depth: int,
        skip_weight: float = 0.0,
        causal: bool = True,
        *,
        length: int | None = None,
        mlp: KernelMap | None = None,
        normalised: bool = False,
    ) -> list[AttentionShape]:
        """One shape per block; with a normalised skip α, App. F's decay rates γ_{l,α}."""
        check_repeat_rate(self.repeat_rate)
        check_calibration(self.calibration, skip_weight)
        entering = (kernels.cosine,) if normalised else ()
        kind = ExponentialShape if causal else SymmetricExponentialShape
        steps = exponential_steps(self.gamma_final, depth, skip_weight)
        if self.calibration == "mlp-aware":
            rates, through = [step.gamma_out for step in steps], need_mlp(mlp)
            limit = need_length(length, "mlp-aware")
            return mlp_aware(rates, self.repeat_rate, causal, limit, through, *entering)
        shapes: list[AttentionShape] = [kind(step, self.repeat_rate) for step in steps]
        if self.calibration == "exact":
            limit = need_length(length, "exact")
            return exact(shapes, self.repeat_rate, skip_weight, limit, mlp, *entering)
        return shapes


Scheme = StandardAttention | ValueSkipInit | UniformSPA | ExponentialSPA


def check_calibration(name: str, skip_weight: float) -> None:
    """The calibration exists for these skips."""
    if name == "mlp-aware" and skip_weight:
        raise ValueError(
            f"calibration='mlp-aware' has no form with skips (skip_weight={skip_weight}): use calibration='exact', "
            "or skip_weight=0"
        )


def need_length(length: int | None, name: str) -> int:
    """The length at which a T×T kernel is propagated once, which only the caller knows."""
    if length is None:
        raise ValueError(f"calibration={name!r} propagates a T×T kernel once: say for which length")
    return length


def need_mlp(mlp: KernelMap | None) -> KernelMap:
    """The MLP sub-block's map of a kernel, which only the caller knows."""
    if mlp is None:
        raise ValueError("calibration='mlp-aware' needs mlp=, the MLP sub-block's map of a kernel")
    return mlp


def _as_it_is(kernel: np.ndarray) -> np.ndarray:
    return kernel


def exact(
    shapes: Sequence[AttentionShape],
    repeat_rate: float,
    skip_weight: float,
    length: int,
    mlp: KernelMap | None = None,
    entering: KernelMap = _as_it_is,
) -> list[AttentionShape]:
    """The same softmaxes P with D = diag(P Σ̄ Pᵀ)^{−½}, Σ̄ the average kernel propagated so far.

    Every branch then has a unit diagonal, so normalised skips keep one too. entering: what a norm before attention
    makes of the stream's kernel.
    Departs: App. F leaves the diagonal free; it reaches 11 at L=36, γ_L=.2, α=.98, T=512.
    """
    kernel = kernels.uniform(repeat_rate, length)
    calibrated: list[AttentionShape] = []
    for shape in shapes:
        weights = np.exp(shape.bias(length))
        branch = weights @ entering(kernel) @ weights.T
        scale = 1.0 / np.sqrt(np.diagonal(branch))
        calibrated.append(RescaledShape(shape, scale))
        kernel = skip_weight**2 * kernel + (1.0 - skip_weight**2) * (scale[:, None] * branch * scale[None, :])
        kernel = mlp(kernel) if mlp else kernel
    return calibrated


def mlp_aware(
    gammas: Sequence[float],
    repeat_rate: float,
    causal: bool,
    length: int,
    mlp: KernelMap,
    entering: KernelMap = _as_it_is,
) -> list[AttentionShape]:
    """A_l = L_l L̂_{l−1}⁻¹, where L̂ factors the kernel f(Σ_{l−1}) that the MLP before block l left. Sec. 3.4.

    Repeated tokens are corrected as in App. B, by rows: D keeps the diagonal of the average kernel at 1.
    Departs: the paper ignores the MLP because A_l ≥ 0 is not guaranteed; here a negative entry is an error.
    """
    before, average = np.eye(length), kernels.uniform(repeat_rate, length)
    shapes: list[AttentionShape] = []
    for block, gamma in enumerate(gammas, start=1):
        target = kernels.exponential(gamma, length)
        matrix = non_negative(_factor_ratio(target, before, causal), f"calibration='mlp-aware' in block {block}")
        branch = matrix @ average @ matrix.T
        scale = 1.0 / np.sqrt(np.diagonal(branch))
        shapes.append(DenseShape(scale[:, None] * matrix, causal))
        before, average = entering(mlp(target)), entering(mlp(scale[:, None] * branch * scale[None, :]))
    return shapes


def _factor_ratio(target: np.ndarray, source: np.ndarray, causal: bool) -> np.ndarray:
    """L(target) L(source)⁻¹ with Cholesky factors, or symmetric roots for non-causal attention."""
    if causal:
        upper = scipy.linalg.cholesky(source), scipy.linalg.cholesky(target)
        return scipy.linalg.solve_triangular(upper[0], upper[1]).T
    return np.linalg.solve(kernels.symmetric_root(source), kernels.symmetric_root(target)).T


def uniform_aware(steps: Sequence[tuple[float, float]], mlp: KernelMap) -> list[tuple[float, float]]:
    """U-SPA's (ρ_in, ρ_out) per block, ρ_in being what the MLP before the block left."""
    aware = [*steps[:1], *((uniform_after(mlp, before), after) for before, after in steps[1:])]
    for block, (before, after) in enumerate(aware, start=1):
        if before > after:
            raise ValueError(
                f"calibration='mlp-aware' in block {block}: the MLP before it leaves cosines of {before:.4g}, above "
                f"its target {after:.4g}, and attention cannot lower them; use calibration='paper' or 'exact'"
            )
    return aware


def uniform_after(mlp: KernelMap, rho: float) -> float:
    """The uniform correlation that the MLP makes of ρ: a uniform kernel stays uniform."""
    return float(kernels.cosine(mlp(kernels.uniform(rho, 2)))[0, 1])
