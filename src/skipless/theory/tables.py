"""Shapes that are tables: attention known entry by entry, or calibrated numerically at a fixed length."""

from dataclasses import dataclass, field

import numpy as np

from skipless.theory import kernels
from skipless.theory.exponential import ExponentialStep
from skipless.theory.feasibility import check_length, check_repeat_rate
from skipless.theory.shapes import AttentionShape, CompactBias


@dataclass(frozen=True)
class SymmetricExponentialShape(AttentionShape):
    """Non-causal E-SPA, A = Σ(γ')^{½} Σ(γ)^{−½}, by eigendecomposition: it has no closed form. App. A.

    Departs: the paper checks non-negativity by experiment; rounding-sized negative entries (≤ 1e-12) become 0 here,
    and anything larger is refused.
    """

    step: ExponentialStep
    repeat_rate: float = 0.0
    causal: bool = False

    def __post_init__(self):
        check_repeat_rate(self.repeat_rate)

    def compact(self, length: int) -> CompactBias:
        raise ValueError("non-causal E-SPA has no O(T) form; use its dense table: bias(length) and row_scale(length)")

    def bias(self, length: int) -> np.ndarray:
        return _log_rows(self.dense(length))

    def row_scale(self, length: int) -> np.ndarray:
        return self.dense(length).sum(axis=-1)

    def dense(self, length: int) -> np.ndarray:
        root_in = kernels.symmetric_root(kernels.exponential(self.step.gamma_in, length))
        root_out = kernels.symmetric_root(kernels.exponential(self.step.gamma_out, length))
        matrix = np.linalg.solve(root_in, root_out).T
        average = kernels.uniform(self.repeat_rate, length)
        norm_in, norm_out = (np.sqrt(np.diagonal(root @ average @ root)) for root in (root_in, root_out))
        instead = f"decay rates above {self.step.gamma_out:g}, at which {length} locations coincide to rounding"
        return non_negative(matrix * norm_in[None, :] / norm_out[:, None], "non-causal E-SPA", instead)


@dataclass(frozen=True, eq=False)
class DenseShape(AttentionShape):
    """An explicit non-negative matrix. A causal one serves every shorter length by its leading block."""

    matrix: np.ndarray = field(repr=False)
    causal: bool = True

    def compact(self, length: int) -> CompactBias:
        raise ValueError("a dense shape has no O(T) form; use its table: bias(length) and row_scale(length)")

    def bias(self, length: int) -> np.ndarray:
        return _log_rows(self.dense(length))

    def row_scale(self, length: int) -> np.ndarray:
        return self.dense(length).sum(axis=-1)

    def dense(self, length: int) -> np.ndarray:
        limit = _check_table(length, len(self.matrix), self.causal)
        return self.matrix[:limit, :limit]


@dataclass(frozen=True, eq=False)
class RescaledShape(AttentionShape):
    """Another shape's P with row scales of its own: what the "exact" calibration returns."""

    base: AttentionShape
    scales: np.ndarray = field(repr=False)

    @property
    def causal(self) -> bool:
        return self.base.causal

    def compact(self, length: int) -> CompactBias:
        parts = self.base.compact(length)
        return CompactBias(parts.slope, parts.column, parts.diagonal, self.row_scale(length), parts.row)

    def bias(self, length: int) -> np.ndarray:
        return self.base.bias(length)

    def row_scale(self, length: int) -> np.ndarray:
        return self.scales[: _check_table(length, len(self.scales), self.causal)]


def non_negative(matrix: np.ndarray, name: str, instead: str = "calibration='paper'") -> np.ndarray:
    """The matrix with rounding-sized negative entries set to 0; refuses larger ones, which no softmax can make."""
    lowest = matrix.min()
    if lowest < -1e-12 * max(np.abs(matrix).max(), 1.0):
        i, j = np.unravel_index(matrix.argmin(), matrix.shape)
        raise ValueError(
            f"{name} needs attention {lowest:.3g} from location {i} to {j}, and a softmax gives none below 0; "
            f"use {instead}"
        )
    return np.maximum(matrix, 0.0)


def _log_rows(matrix: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):  # log 0 = −∞ is the mask
        return np.log(matrix / matrix.sum(axis=-1, keepdims=True))


def _check_table(length: int, stored: int, causal: bool) -> int:
    check_length(length)
    if length > stored or (length != stored and not causal):
        rule = "at most" if causal else "exactly"
        raise ValueError(
            f"length is {length}, but this shape was calibrated for {stored} locations and serves {rule} as many; "
            f"calibrate for {length} (ModelConfig(length={length}), or the scheme's shapes with length={length}), or "
            "use calibration='paper', which has no such limit"
        )
    return length
