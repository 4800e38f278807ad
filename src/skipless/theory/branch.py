"""The family of shaped activations that continues the linear one: one activation for each amount of nonlinearity.

DKS and TAT give four equations for (α, β, δ, γ). γ follows from Q(1) = 1 and δ from the condition on C(0) or C'(1), in
closed form; what remains is (α, β) from Q'(1) = 1 and a measure of nonlinearity, C'(1) − 1 or C''(1). That pair has
many roots. The right one is picked by continuation: as the nonlinearity s → 0, α ~ √s and β → β₀, a root of Q'(1) = 1
at vanishing α; from there the root is followed up to the s that was asked for.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from scipy.optimize import brentq, root

from skipless.theory import gaussian, local_maps
from skipless.theory.activations import ShapedActivation

_WEAK_SCALE = 1e-2  # an α at which φ(αx + β) is as good as its third-order Taylor polynomial
_WEAK_STRENGTH = 1e-3
_SHIFTS = np.linspace(-4.0, 4.0, 161)  # where β₀ is looked for
_STEP, _FINEST_STEP = math.log(2), 1e-4  # growth of log s between two solutions: the first tried, and the last
_ACCURACY = 1e-11
_LARGEST_SCALE = 8.0  # α beyond which φ(αx + β) is a kink or a step in all but name

ShiftRule = Callable[[ShapedActivation], float]
Measure = Callable[[ShapedActivation], float]


class BranchEnd(Exception):
    """The branch turns back, or passes α = 8, before the nonlinearity asked for; `strength` is the largest on it."""

    def __init__(self, strength: float) -> None:
        super().__init__(f"no solution beyond nonlinearity {strength:g}")
        self.strength = strength


def centred(raw: ShapedActivation) -> float:
    """δ with E[φ̂] = 0, which is C(0) = 0: the rule of DKS."""
    return -_mean(raw, raw)


def unit_slope(raw: ShapedActivation) -> float:
    """δ with E[φ̂'²] = E[φ̂²], which is C'(1) = 1: the rule of TAT.

    (E[φ] + δ)² = E[φ'²] − Var φ, never negative (Poincaré). Of the two signs, that of E[φ''].
    """
    mean = _mean(raw, raw)
    excess = _mean(raw, lambda x: raw.derivative(x) ** 2 - (raw(x) - mean) ** 2)
    bend = _mean(raw, lambda x: raw.derivative(x, order=2))
    return -mean + math.copysign(math.sqrt(max(excess, 0.0)), bend)


def _mean(raw: ShapedActivation, f: Callable[[np.ndarray], np.ndarray]) -> float:
    """E[f(z)] for an f made of `raw`."""
    return float(gaussian.expectation(f, order=gaussian.order_for(raw.input_scale)))


class Branch:
    """Shaped activations of one smooth `base`, indexed by their nonlinearity s = `measure`(φ̂) > 0.

    `shift_rule` gives δ from φ(αx + β). Solved points are remembered, so that a search along the branch is cheap.
    """

    def __init__(self, base: str, shift_rule: ShiftRule, measure: Measure) -> None:
        self.base, self.shift_rule, self.measure = base, shift_rule, measure
        self._solved: dict[float, np.ndarray] = {}

    def solve(self, strength: float) -> ShapedActivation:
        """φ̂ with Q(1) = 1, Q'(1) = 1, `shift_rule` and `measure`(φ̂) = `strength`, all to 1e-11; `BranchEnd` if none."""
        if not self._solved:
            weakest = min(strength, _WEAK_STRENGTH)
            self._accept(weakest, self._linear_limit(weakest))
        known = [s for s in self._solved if s <= strength]
        s = max(known) if known else min(self._solved)
        step = _STEP
        while s != strength:
            move = np.clip(math.log(strength / s), -step, step)
            trial = strength if abs(move) < step else s * math.exp(move)
            if self._accept(trial, self._solved[s] + [0.5 * move, 0.0]):
                s = trial
            elif (step := step / 2) < _FINEST_STEP:
                raise BranchEnd(s)
        return self._shape(self._solved[s])

    def _shape(self, point: np.ndarray) -> ShapedActivation:
        raw = ShapedActivation(self.base, input_scale=math.exp(point[0]), input_shift=point[1])
        shifted = replace(raw, output_shift=self.shift_rule(raw))
        return replace(shifted, output_scale=local_maps.variance_gain(shifted))

    def _accept(self, strength: float, guess: np.ndarray) -> bool:
        """Solve for (log α, β) from `guess`, and remember the root if it is one and belongs to the same branch."""

        def residual(point: np.ndarray) -> np.ndarray:
            point = np.minimum(point, [math.log(2 * _LARGEST_SCALE), np.inf])  # where a wild step may not follow
            shaped = self._shape(point)
            return np.array([local_maps.q_slope(shaped) - 1, self.measure(shaped) - strength]) / strength

        found = root(residual, guess, method="hybr", options={"xtol": 1e-13})
        same_branch = np.abs(found.x - guess).max() < 0.5 and found.x[0] < math.log(_LARGEST_SCALE)
        if same_branch and np.abs(found.fun).max() * strength < _ACCURACY:
            self._solved[strength] = found.x
            return True
        return False

    def _linear_limit(self, strength: float) -> np.ndarray:
        """(log α, β₀) for a small `strength`: β₀ is the root nearest 0 of Q'(1) = 1 at small α, and s ∝ α²."""

        def weak(beta: float) -> ShapedActivation:
            return self._shape(np.array([math.log(_WEAK_SCALE), beta]))

        def excess(beta: float) -> float:
            return (float(local_maps.q_slope(weak(beta))) - 1) / _WEAK_SCALE**2

        values = np.array([excess(beta) for beta in _SHIFTS])
        changes = np.flatnonzero(np.sign(values[:-1]) != np.sign(values[1:]))
        shifts = [brentq(excess, _SHIFTS[i], _SHIFTS[i + 1]) for i in changes]
        beta = min(shifts, key=lambda b: (round(abs(b), 6), -b))
        return np.array([math.log(_WEAK_SCALE) + 0.5 * math.log(strength / self.measure(weak(beta))), beta])
