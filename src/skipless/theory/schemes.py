"""The four ways to initialise attention: each turns (depth, skip weight) into one AttentionShape per block.

A scheme is a frozen value with only the fields that mean something for it. Nothing here knows width or heads,
except ALiBi, whose slopes are per head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from skipless.theory import calibration, kernels
from skipless.theory.feasibility import check_depth, check_repeat_rate
from skipless.theory.schedules import UniformSchedule, exponential_steps, uniform_steps
from skipless.theory.shapes import (
    AlibiShape,
    AttentionShape,
    ExponentialShape,
    IdentityShape,
    PlainShape,
    SymmetricUniformShape,
    UniformShape,
)
from skipless.theory.tables import SymmetricExponentialShape

Calibration = Literal["paper", "exact", "mlp-aware"]
KernelMap = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class StandardAttention:
    """Softmax attention as everyone uses it: a running average at zero logits; with alibi_heads, ALiBi's biases."""

    alibi_heads: int = 0

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
        calibration.check_name(self.calibration, skip_weight)
        entering = (kernels.cosine,) if normalised else ()
        kind = UniformShape if causal else SymmetricUniformShape
        steps = uniform_steps(self.rho_final, depth, self.repeat_rate, self.schedule, skip_weight)
        if self.calibration == "mlp-aware":
            steps = calibration.uniform_aware(steps, calibration.need_mlp(mlp))
        shapes: list[AttentionShape] = [kind(before, after) for before, after in steps]
        if self.calibration == "exact":
            limit = calibration.need_length(length, "exact")
            return calibration.exact(shapes, self.repeat_rate, skip_weight, limit, mlp, *entering)
        return shapes


@dataclass(frozen=True)
class ExponentialSPA:
    """E-SPA, the paper's main method: kernels exp(−γ_l|i−j|) with γ falling from ∞ to γ_L. Sec. 3.2, App. B, C, F.

    calibration as in UniformSPA; "mlp-aware" is a T×T table for E-SPA and needs length.
    """

    gamma_final: float = 0.005
    repeat_rate: float = 0.0
    calibration: Calibration = "paper"

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
        calibration.check_name(self.calibration, skip_weight)
        entering = (kernels.cosine,) if normalised else ()
        kind = ExponentialShape if causal else SymmetricExponentialShape
        steps = exponential_steps(self.gamma_final, depth, skip_weight)
        if self.calibration == "mlp-aware":
            rates, through = [step.gamma_out for step in steps], calibration.need_mlp(mlp)
            limit = calibration.need_length(length, "mlp-aware")
            return calibration.mlp_aware(rates, self.repeat_rate, causal, limit, through, *entering)
        shapes: list[AttentionShape] = [kind(step, self.repeat_rate) for step in steps]
        if self.calibration == "exact":
            limit = calibration.need_length(length, "exact")
            return calibration.exact(shapes, self.repeat_rate, skip_weight, limit, mlp, *entering)
        return shapes


Scheme = StandardAttention | ValueSkipInit | UniformSPA | ExponentialSPA
