"""What to change in a network that loses its signal: residual weight, norm placement, or E-SPA and its γ_L."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from skipless.analysis.inspection import BlockSignal
from skipless.theory.certificate import Verdict
from skipless.theory.feasibility import round_up, smallest_gamma_final
from skipless.theory.schemes import ExponentialSPA, UniformSPA

if TYPE_CHECKING:
    from skipless.analysis.diagnose import Structure

_GAMMA = 0.005  # the paper's final decay rate without shortcuts


def advise(verdict: Verdict, signals: Sequence[BlockSignal], structure: "Structure") -> str:
    """Plain words, most effective change first."""
    if verdict.block == 0:
        return "The batch itself carries no signal: its locations are alike or zero. Inspect with real data."
    if verdict.kind == "drift":
        return _against_drift(signals, structure)
    if verdict.kind == "collapse":
        return _against_collapse(signals, structure)
    last = signals[-1].gradient_mean
    if verdict.block == signals[-1].block and last is not None and not 0 < last < math.inf:
        return "This gradient comes from what follows the last block: look at the head and at the loss."
    return _against_scale(verdict, structure)


def _against_drift(signals: Sequence[BlockSignal], structure: "Structure") -> str:
    scheme = structure.config.scheme if structure.config is not None else None
    words = "Nothing is lost, and a wider network drifts less."
    if not isinstance(scheme, ExponentialSPA | UniformSPA):
        return words
    rate = max(signals[0].cosine_mean, 0.0)
    if abs(rate - scheme.repeat_rate) > 0.02:
        words += f" The scheme assumes repeat_rate={scheme.repeat_rate:g}; locations start with a cosine of {rate:.2g}."
    if scheme.calibration == "paper":
        words += " calibration='exact' keeps the diagonal at 1 where the MLPs move it."
    return words


def _against_collapse(signals: Sequence[BlockSignal], structure: "Structure") -> str:
    scheme = structure.config.scheme if structure.config is not None else None
    if isinstance(scheme, ExponentialSPA | UniformSPA):
        name = f"γ_L = {scheme.gamma_final:g}" if isinstance(scheme, ExponentialSPA) else f"ρ_L = {scheme.rho_final:g}"
        way = "raise it" if isinstance(scheme, ExponentialSPA) else "lower it"
        return f"The scheme ends too close to collapse ({name}): {way}, or shape the MLPs' activation (dks-gelu)."
    rate = max(signals[0].cosine_mean, 0.0)
    spa = f"ExponentialSPA(gamma_final={_GAMMA:g}, repeat_rate={rate:.2g})"
    if not structure.shortcuts:
        return (
            f"Without shortcuts softmax attention averages locations away. Use E-SPA with γ_L = {_GAMMA:g}, {spa}, and "
            "a shaped activation (dks-gelu); or put a shortcut around every sub-block, with the norm inside the branch "
            "(Pre-LN)."
        )
    weighted = _weighted_skip(structure.depth)
    if structure.norms_after:
        words = "The norm after each sum shrinks the shortcut block by block. Move it into the branch (Pre-LN)"
        return f"{words}; or {weighted}."
    return f"The branches outweigh the shortcuts: {weighted}; or put a norm inside the branch (Pre-LN)."


def _against_scale(verdict: Verdict, structure: "Structure") -> str:
    weighted = _weighted_skip(structure.depth)
    if not structure.shortcuts:
        return (
            "Every block multiplies the signal, so gains other than 1 compound. Initialise each matrix orthogonally "
            f"with gain 1, shape the activation (dks-gelu), and use E-SPA with γ_L = {_GAMMA:g}, calibration='exact'; "
            "or normalise inside the branch."
        )
    if structure.norms_after:
        words = "The norm after each sum rescales gradients at every block. Move it into the branch (Pre-LN)"
        return f"{words}; or {weighted}."
    return f"The sums compound: {weighted}; or put a norm inside the branch (Pre-LN)."


def _weighted_skip(depth: int) -> str:
    """β = 1/√L keeps a normalised skip's share of the input at e^{−1/2} after L blocks."""
    beta = 1.0 / math.sqrt(max(depth, 2))
    alpha = math.sqrt(1.0 - beta**2)
    gamma = round_up(smallest_gamma_final(alpha, max(depth, 2)), 2)
    return (
        f"weight the residual branch by β = {beta:.2g} and the shortcut by α = √(1−β²) = {alpha:.3g}, which with E-SPA "
        f"needs γ_L ≥ {gamma:g}"
    )
